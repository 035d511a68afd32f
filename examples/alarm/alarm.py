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

    @property
    def has_rung(self) -> bool:
        """Whether it has rung. The outcome is kept for an hour, so this is False after that."""
        return self._handle.status() == "done"

    def resolve(self) -> bool:
        """Keep the alarm from ringing. Returns False if it rings right now or has rung."""
        try:
            self._handle.cancel()
        except (multiq.JobReserved, multiq.JobNotFound):
            return False
        return True

    def move(self, seconds: float) -> bool:
        """Move the deadline to *seconds* from now. Returns False if the alarm rings right now or has rung."""
        try:
            self._handle.reschedule(delay=seconds)
        except (multiq.JobReserved, multiq.JobNotFound):
            return False
        return True
