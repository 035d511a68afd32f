"""Computes the number of jobs to hold, and gives held jobs back when the job before them turns out long.

A process holds more jobs than it can run, but only while the jobs are short compared with a round trip to the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import GiveBack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.worker.processes.inflight import Held

    from .executors import Executor
    from .fetcher import Fetcher

#: Seconds of work that may wait for one slot. A job waits at most this long for other jobs of its batch.
BUDGET = 0.010

_WEIGHT = 0.2  # weight of the newest job in the running mean


class Prefetch:
    """The number of jobs to hold. The number doubles while batches are full and jobs are short. A long job reduces the
    number immediately.

    Up to *slots* jobs run at the same time, and up to *most* more jobs wait. The last of n held jobs waits (n - slots +
    1) / slots times the duration of a job. ``BUDGET`` limits this time.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = slots + most
        self._mean: float | None = None  # mean duration of a job in seconds; None before the first job
        self._size = slots

    @property
    def size(self) -> int:
        """The maximum number of jobs to hold: the sum of running and waiting jobs."""
        return self._size

    def note_job(self, seconds: float) -> None:
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        if seconds > BUDGET:
            self._mean = max(self._mean, seconds)
            self._size = min(self._size, self._affordable())

    def note_batch(self, asked: int, got: int) -> None:
        """Record how many jobs a reserve call asked for, and how many it got."""
        if self._mean is None:
            return
        grown = self._size * 2 if got >= asked else self._size
        self._size = min(grown, self._affordable(), self._most)

    def _affordable(self) -> int:
        slots, mean = self._slots, max(self._mean or 0.0, 1e-6)
        return max(slots, slots - 1 + int(slots * BUDGET / mean))


class WaitingJobs:
    """Gives back the jobs that a process holds and that have not begun, so that other processes run them.

    This happens when a long job makes the jobs wait (``Executor.is_held_up``), and when the process begins no more
    jobs. *count* adds a number to the count of the jobs that the process has taken. Here the number is negative.
    """

    def __init__(self, executor: Executor, fetcher: Fetcher, count: Callable[[int], None]) -> None:
        self._executor = executor
        self._fetcher = fetcher
        self._count = count

    def give_back_if_held_up(self) -> None:
        """Give the jobs back if a long job makes them wait. Called by the worker's loop in each turn."""
        if self._executor.is_held_up:
            self.give_back_all()

    def give_back_beside_loop(self) -> None:
        """Give the jobs back while the worker's loop runs a long job itself. Called by the heartbeat.

        Does nothing while another thread makes a call (``Fetcher.settle_if_free``).
        """
        self._fetcher.settle_if_free(self.take_back)

    def give_back_all(self) -> None:
        jobs = self.take_back()
        if jobs:
            self._fetcher.settle(jobs)

    def give_back(self, jobs: Sequence[Held]) -> None:
        """Give back jobs that were not passed to the executor."""
        self._fetcher.settle(self._as_given_back(jobs))

    def take_back(self) -> Sequence[Held]:
        """Take the jobs that have not begun, and set their verdict to give-back. The executor never begins the taken
        jobs.
        """
        return self._as_given_back(self._executor.take_back())

    def _as_given_back(self, jobs: Sequence[Held]) -> Sequence[Held]:
        self._count(-len(jobs))
        for held in jobs:
            held.verdict = GiveBack(held.lease)
        return jobs
