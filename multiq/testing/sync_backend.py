"""The backend ``sync://``, which runs each job within its enqueue."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Enqueue
from multiq.backend.memory import MemoryBackend

from .inline_backend import InlineBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob, Step, Version


class SyncBackend(InlineBackend):
    """``sync://``: each job runs within its enqueue, with its retries and without waiting for delays.

    If the job is buried, the enqueue raises the error of the task. Without an app, this is a memory backend.
    """

    declared = msgspec.structs.replace(MemoryBackend.declared, backend="sync")
    gathers_enqueues = False  # each caller gets the error of its own job

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        with self._running([(queue, job.id) for job in jobs]):
            return super().enqueue(queue, jobs, connection=connection)

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        with self._running([(step.queue, step.job.id) for step in steps if isinstance(step, Enqueue)]):
            return super().carry_out(steps, when=when)

    @contextlib.contextmanager
    def _running(self, jobs: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Enqueue *jobs* in the block, and run them after it.

        This call claims the jobs. Without the claim, another thread, or a job that enqueues another job, could run the
        jobs and get their errors.
        """
        self._level_below()  # an error is raised before a job is stored, because another call would run the job
        call = object()
        claimed = [job for job in jobs if self._claims.setdefault(job, call) is call]
        try:
            yield
            if self._app is not None:
                for error in self.run_jobs(early=True, call=call):
                    raise error
        finally:
            for job in claimed:
                del self._claims[job]
