"""Computes the number of jobs to hold.

A process holds more jobs than it can run, but only while the jobs are short compared with a round trip to the backend.
"""

from __future__ import annotations

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
