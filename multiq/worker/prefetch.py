"""How many jobs to hold at once: many only while they are far shorter than a round trip is worth."""

from __future__ import annotations

#: seconds of work that one slot may hold in hand: what a job waits at most behind others that were taken along
BUDGET = 0.010

_WEIGHT = 0.2  # of the newest job in the running mean


class Prefetch:
    """Doubles while batches come back full and jobs are short; falls at once when they are long."""

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = max(most, slots)
        self._mean: float | None = None  # of what jobs take; None: nobody knows yet
        self._ahead = 1.0

    @property
    def size(self) -> int:
        """Jobs to hold at most, running and waiting."""
        return min(self._most, self._slots * int(self._ahead))

    def saw_job(self, seconds: float) -> None:
        """A job ran for so long."""
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        if seconds > BUDGET:
            self._mean, self._ahead = max(self._mean, seconds), 1.0

    def saw_batch(self, asked: int, got: int) -> None:
        """A reserve came back."""
        if self._mean is None:
            return
        affordable = BUDGET / max(self._mean, 1e-6)
        grown = self._ahead * 2 if got >= asked else self._ahead
        self._ahead = max(1.0, min(grown, affordable, self._most))
