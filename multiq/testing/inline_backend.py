"""The base of the backends for tests: a memory backend that runs its jobs in the calling thread."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from multiq.async_calls import Level, level
from multiq.backend import State
from multiq.backend.memory import MemoryBackend, MemoryConsumer, lease_of
from multiq.driverkit.clock import SECOND
from multiq.envelope import END_TASK, decode_json
from multiq.errors import MultiqError
from multiq.job import task_of

from .run_job import run_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App
    from multiq.backend import Lease
    from multiq.backend.memory import Job, JobQueue
    from multiq.driverkit.clock import Clock


class InlineBackend(MemoryBackend):
    """A memory backend that can run its jobs in the calling thread."""

    _tokens = itertools.count(1)

    def __init__(self, *, name: str = "", clock: Clock | None = None) -> None:
        if clock is None:
            super().__init__(name=name)
        else:
            super().__init__(name=name, clock=clock)
        self._app: App | None = None
        self._level = Level()
        self._snoozed: set[str] = set()
        self._claims: dict[tuple[str, str], object] = {}
        """Queue and id of each job that a call of ``enqueue`` runs -> this call. No other call runs the job."""

    def attach_app(self, app: App) -> None:
        """Run the tasks of *app* from now on. The app calls this method."""
        self._app = app

    def run_jobs(self, *, early: bool, call: object = None) -> list[BaseException]:
        """Run jobs until no job is due. Returns the errors of the jobs that are buried.

        A job whose body is not an envelope does not run. A job that another call than *call* has claimed does not run
        either. *early*: also run delayed jobs, except jobs that have raised ``Snooze``.
        """
        errors: list[BaseException] = []
        before = level.set(self._level_below())
        try:
            while (lease := self._take(early=early, call=call)) is not None:
                ran = run_here(self._attached(), MemoryConsumer(self._store, [lease.queue]), lease)
                if ran.is_snoozed:
                    self._snoozed.add(lease.id)
                if ran.error is not None:
                    errors.append(ran.error)
        finally:
            level.reset(before)
        return errors

    def next_due_in(self) -> float | None:
        """Return the seconds until another job of a task is due, or None if there is no such job. A job of a paused
        queue is not due before the end of the pause."""
        with self._store.lock:
            now = self._store.clock()
            due = [
                max(job.due_at if job.state is State.DELAYED else now, queue.paused_until) - now
                for queue, job in self._task_jobs(now)
                if job.state is State.DELAYED or queue.paused_until > now
            ]
        return min(due) / SECOND if due else None

    def _level_below(self) -> Level:
        """Return the level of the jobs that run now. Raises ``RecursionError``."""
        outer = level.get()
        return self._level if outer is None else outer.below()

    def _attached(self) -> App:
        if self._app is None:
            raise MultiqError("this backend has no app whose tasks could run: multiq.App(backend=...) attaches it")
        return self._app

    def _take(self, *, early: bool, call: object) -> Lease | None:
        """Reserve the next job of a task: by priority, and then by age."""
        store = self._store
        with store.lock:
            now = store.clock()
            due = [
                (job.priority, job.sequence, queue.name, job)
                for queue, job in self._task_jobs(now)
                if queue.paused_until <= now
                and self._claims.get((queue.name, job.id), call) is call
                and (job.state is State.READY or (early and self._may_run_early(job)))
            ]
            if not due:
                return None
            *_, name, job = min(due, key=lambda entry: entry[:2])
            queue = store.queue(name, now)
            job.attempt += 1
            job.token = f"inline-{next(self._tokens)}"
            queue.extend(job, now)
            return lease_of(name, job, now)

    def _may_run_early(self, job: Job) -> bool:
        # multiq's own delayed job, which guards against a producer that dies
        return job.state is State.DELAYED and job.id not in self._snoozed and _task(job) != END_TASK

    def _task_jobs(self, now: int) -> Iterator[tuple[JobQueue, Job]]:
        for name in self._store.names(now):
            queue = self._store.queue(name, now)
            for job in list(queue.jobs.values()):
                if job.state in {State.READY, State.DELAYED} and _task(job) is not None:
                    yield queue, job


def _task(job: Job) -> str | None:
    return task_of(decode_json(job.body))
