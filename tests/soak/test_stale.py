"""A short run of ``stale.py``: each way to end a lease, on each backend; and a planted bug that the judge must find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from soak import stale

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", stale.BACKENDS)
def test_each_stale_verdict_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    found = stale.soak(name, tmp_path, verdicts=200, seed=7, lanes=1, each=7)
    assert found.total >= 200
    assert found.refused == found.total
    assert found.is_right, found


@pytest.mark.parametrize("mutant", ["no fence", "believes stale verdicts"])
def test_the_judge_sees_a_planted_bug(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOAK_MUTANT", mutant)
    found = stale.soak("sqlite", tmp_path, verdicts=200, seed=7, lanes=1, each=14)
    assert not found.is_right
    assert found.accepted.total()
    assert (mutant == "no fence") == bool(found.changed)
