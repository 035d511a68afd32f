"""The checker still finds the violations in old histories, which show bugs that were fixed since or were planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiq.soak.campaign import setting_for
from multiq.soak.counterexamples import check
from multiq.soak.history import replay
from multiq.soak.load import Load

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.jsonl.gz"))


def test_the_folder_has_histories() -> None:
    assert HISTORIES


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name.partition(".")[0])
def test_an_old_history_still_violates_its_invariant(path: Path) -> None:
    invariant, driver, _ = path.name.split("-", 2)
    verdict = check(replay(path), setting_for(driver, Load(folder="", seed=0, timeout=2.0)))
    assert invariant in verdict.violations
    assert f"{verdict.violations[invariant][0].invariant}: " in verdict.report()
