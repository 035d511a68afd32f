"""How many jobs to hold at a time.

A process holds more jobs than it can run at a time only while its jobs are short compared with a round trip.
"""

from __future__ import annotations

#: seconds of work that may wait for one slot: a job waits at most so long behind other jobs of its batch
BUDGET = 0.010

_WEIGHT = 0.2  # weight of the newest job in the running mean


class Prefetch:
    """How many jobs to hold: the number doubles while batches come back full and jobs are short, and falls at once when
    jobs are long.

    *slots* jobs run at a time, and at most *most* more may wait. ``BUDGET`` limits the wait of the last of n held jobs:
    (n - slots + 1) / slots times the duration of a job.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = slots + most
        self._mean: float | None = None  # seconds that a job takes; None: not known yet
        self._size = slots

    @property
    def size(self) -> int:
        """Jobs to hold at most, running and waiting."""
        return self._size

    def note_job(self, seconds: float) -> None:
        """Note how long a job ran."""
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        if seconds > BUDGET:
            self._mean = max(self._mean, seconds)
            self._size = min(self._size, self._affordable())

    def note_batch(self, asked: int, got: int) -> None:
        """Note how many jobs a reserve asked for, and how many it got."""
        if self._mean is None:
            return
        grown = self._size * 2 if got >= asked else self._size
        self._size = min(grown, self._affordable(), self._most)

    def _affordable(self) -> int:
        slots, mean = self._slots, max(self._mean or 0.0, 1e-6)
        return max(slots, slots - 1 + int(slots * BUDGET / mean))
