"""The backend of ``multiq.testing.fake``, which keeps all enqueued jobs and has a clock that the test moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Enqueue
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock

from .inline_backend import InlineBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import NewJob, Step, Version


class FakeBackend(InlineBackend):
    """Keeps all enqueued jobs, and has a clock that the test moves. ``fake`` makes this backend."""

    declared = msgspec.structs.replace(MemoryBackend.declared, backend="fake")

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(clock=self.clock)
        self.sent: list[tuple[str, NewJob, int]] = []
        """For each enqueue: the queue, the job, and the time in nanoseconds of ``clock``."""

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        with self._store.lock:
            known = self._store.queue(queue, self.clock()).jobs
            is_new = [job.id not in known for job in jobs]
            ids = super().enqueue(queue, jobs, connection=connection)
            self.sent += [
                (queue, job, self.clock())
                for job, new, stored_id in zip(jobs, is_new, ids, strict=True)
                if new and (stored_id == job.id or _replaces(job))
            ]
        return ids

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        is_done = super().carry_out(steps, when=when)
        if is_done:
            self.sent += [(step.queue, step.job, self.clock()) for step in steps if isinstance(step, Enqueue)]
        return is_done


def _replaces(job: NewJob) -> bool:
    """Whether a duplicate job replaces the existing job. A duplicate that does not replace the existing job is not
    stored."""
    unique = None if job.terms is None else job.terms.unique
    return unique is not None and unique.on_conflict == "replace"
