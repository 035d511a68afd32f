"""A short soak: a few seconds of faults on each backend, with fixed seeds; and a planted bug that it must find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from soak.mutants import BACKENDS, MUTANTS
from soak.recovery import NAMES, measure
from soak.run_soak import soak

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long

SECONDS = 10.0
FOUND_BY_ALL = ("drops a job", "short leases", "hurries")


@pytest.mark.parametrize("name", BACKENDS)
def test_no_history_violates_an_invariant(name: str, tmp_path: Path) -> None:
    verdict = soak(name, tmp_path, seconds=SECONDS, seed=7)
    assert verdict.figures["faults"] + verdict.figures.get("faults missed", 0) > 0  # a busy machine makes few faults
    assert verdict.figures["run"] > 100
    assert verdict.is_clean, verdict.report()


@pytest.mark.parametrize("mutant", FOUND_BY_ALL)
def test_a_planted_bug_is_found_by_its_own_invariant(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAK_MUTANT", mutant)
    invariant = MUTANTS[mutant].invariant
    verdict = soak("sqlite", tmp_path, seconds=SECONDS, seed=7, plant="soak.planted", drain=20.0, until=invariant)
    assert MUTANTS[mutant].invariant in verdict.violations, verdict.report()


@pytest.mark.parametrize("name", NAMES)
def test_work_goes_on_after_each_restart_and_calls_keep_their_deadlines(name: str, tmp_path: Path) -> None:
    found = measure(name, tmp_path, restarts=3, freezes=2, seed=7)
    assert found.all is not None
    # work continued at all; how soon it continued can be measured only on an idle machine
    assert found.all.longest < 30
    assert found.calls > 0
    assert found.verdict.is_clean, found.verdict.report()
