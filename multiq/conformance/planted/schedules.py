"""Backends with one planted bug each, in functions that schedulers use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Enqueue

from .registry import Planted, plant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Step, Version


@plant(
    "time of the first call",
    "the time stands still after it was read for the first time, as in a transaction",
    "ServerTime.test_the_time_goes_on_as_the_backend_s_own_clock_does",
)
class _TimeOfTheFirstCall(Planted):
    _first: float | None = None

    def now(self, home: str) -> float:
        if self._first is None:
            self._first = super().now(home)
        return self._first


@plant(
    "jobs without their condition",
    "a call whose condition does not hold adds its jobs nevertheless, and only its notes are not changed",
    "Schedules.test_an_occurrence_whose_job_has_run_is_not_made_again",
)
class _JobsWithoutTheirCondition(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if super().carry_out(steps, when=when):
            return True
        super().carry_out([step for step in steps if isinstance(step, Enqueue)])
        return False
