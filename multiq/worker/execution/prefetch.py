"""How many jobs to hold at once: many only while they are far shorter than a round trip is worth."""

from __future__ import annotations

#: seconds of work that one slot may hold in hand: what a job waits at most behind others that were taken along
BUDGET = 0.010

_WEIGHT = 0.2  # of the newest job in the running mean


class Prefetch:
    """Doubles while batches come back full and jobs are short; falls at once when they are long.

    *slots* jobs run at a time, *most* more may wait for one of them. With n held, the last one waits for the first
    slot that is free, and then for its turn: (n - slots + 1) / slots of what a job takes. That is the budget.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = slots + most
        self._mean: float | None = None  # of what jobs take; None: nobody knows yet
        self._size = slots

    @property
    def size(self) -> int:
        """Jobs to hold at most, running and waiting."""
        return self._size

    def note_job(self, seconds: float) -> None:
        """A job ran for so long."""
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        if seconds > BUDGET:
            self._mean = max(self._mean, seconds)
            self._size = min(self._size, self._affordable())

    def note_batch(self, asked: int, got: int) -> None:
        """A reserve came back."""
        if self._mean is None:
            return
        grown = self._size * 2 if got >= asked else self._size
        self._size = min(grown, self._affordable(), self._most)

    def _affordable(self) -> int:
        slots, mean = self._slots, max(self._mean or 0.0, 1e-6)
        return max(slots, slots - 1 + int(slots * BUDGET / mean))
