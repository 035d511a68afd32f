"""One alarm: a delayed job, and the three things that can happen to its deadline."""

from __future__ import annotations

import multiq

from .tasks import ring


class Alarm:
    """Rings *seconds* from now unless it is resolved before. Keep ``job_id`` to find it again after a restart."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self._handle = ring.options(delay=seconds).enqueue(what)

    @property
    def job_id(self) -> str:
        return self._handle.id

    def resolve(self) -> bool:
        """It never rings. False: too late, it rings right now or has rung."""
        try:
            self._handle.cancel()
        except (multiq.JobReserved, multiq.JobNotFound):
            return False
        return True

    def move(self, seconds: float) -> bool:
        """It rings *seconds* from now instead, be that earlier or later than before. False: too late."""
        try:
            self._handle.reschedule(delay=seconds)
        except (multiq.JobReserved, multiq.JobNotFound):
            return False
        return True
