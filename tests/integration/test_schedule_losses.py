"""Schedulers with wrong clocks, which are stopped and killed: ``tests/soak/schedule_losses.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from soak import schedule_losses
from soak.schedule_losses import Run, check
from stores import NAMES, STORES

if TYPE_CHECKING:
    from pathlib import Path

#: beanstalkd alone keeps no notes. Its store is Redis here, because a process that is stopped can lock an SQLite file.
KEEPING = ["beanstalk+redis" if name == "beanstalk" else name for name in NAMES]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "schedules", "number"),
    [("sqlite", 10, 50), *(pytest.param(name, 40, 1000, marks=pytest.mark.long) for name in KEEPING)],
)
def test_each_occurrence_is_made_once_and_none_is_early_whatever_becomes_of_the_schedulers(
    backend: str, schedules: int, number: int, tmp_path: Path
) -> None:
    with STORES[backend](tmp_path) as url:
        assert schedule_losses.run(url, tmp_path, schedules, number, seed=number) == []


@pytest.mark.long
@pytest.mark.parametrize(("plant", "fault"), [("local-clock", "early"), ("no-condition", "times")])
def test_a_bug_in_the_schedulers_is_found(plant: str, fault: str, tmp_path: Path) -> None:
    with STORES["sqlite"](tmp_path) as url:
        faults = schedule_losses.run(url, tmp_path, 20, 300, seed=1, plant=plant)
    assert any(fault in text for text in faults)


def test_the_check_finds_what_is_doubled_early_or_missing() -> None:
    right = [Run("s0", float(at), at + 0.1) for at in range(5)]
    assert check(right, 1) == []
    assert check([*right, right[2]], 1) == ["s0 at 2 was handed out 2 times"]
    assert check([*right[:2], *right[3:]], 1) == ["s0 at 2 was not made"]
    assert check([*right, Run("s0", 5.0, 4.5)], 1) == ["s0 at 5 was 0.500 s early"]
    assert check(right, 2) == ["s1 was never handed out"]
