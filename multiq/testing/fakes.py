"""A fake connection for tests. A test checks the enqueued jobs, and moves the time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Enqueue
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import SECOND, ManualClock
from multiq.errors import ArgumentsInvalid
from multiq.formatting import shown
from multiq.validation import check_timeout

from .assertions import Assertions
from .inline_backend import InlineBackend
from .sync_backend import SyncBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.app import App
    from multiq.backend import NewJob, Step, Version


class Fake(Assertions):
    """The jobs that a test has enqueued. ``fake(app)`` makes it.

    If an assertion holds, it marks its jobs as expected. A second assertion then needs another job.
    ``assert_nothing_else_enqueued`` fails if a job is not expected. All assertions raise ``AssertionError``.
    """

    def run(self) -> None:
        """Run the jobs that are due now, and the due jobs that these jobs enqueue. Failed jobs wait for their retries.

        If a job is buried, the error of its task is raised after all jobs have run. If there are several errors, the
        first one is raised.
        """
        for error in self._backend.run_jobs(early=False):
            raise error

    def advance(self, seconds: float) -> None:
        """Move the clock by *seconds*. Each job that becomes due runs at its due time. Raises the errors of ``run``."""
        clock = self._backend.clock
        end = clock() + int(check_timeout(seconds, "seconds") * SECOND)
        errors = self._backend.run_jobs(early=False)
        while (wait := self._backend.next_due_in()) is not None and clock() + int(wait * SECOND) <= end:
            clock.advance(max(wait, 0.0))
            errors += self._backend.run_jobs(early=False)
        clock.advance(max(0, end - clock()) / SECOND)
        for error in errors:
            raise error


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


@contextlib.contextmanager
def fake(app: App) -> Iterator[Fake]:
    """Give *app* a fake connection within a ``with`` block. Nothing runs before ``run`` or ``advance``."""
    _check_app(app)
    backend = FakeBackend()
    with app.using(backend):
        yield Fake(app, backend)


@contextlib.contextmanager
def sync(app: App) -> Iterator[App]:
    """Give *app* the connection ``sync://`` within a ``with`` block."""
    _check_app(app)
    with app.using(SyncBackend()):
        yield app


def _check_app(app: object) -> None:
    from multiq.app import App

    if not isinstance(app, App):
        raise ArgumentsInvalid(f"the testing kit must have a multiq.App, got {shown(app)}")


def _replaces(job: NewJob) -> bool:
    """Whether a duplicate job replaces the existing job. A duplicate that does not replace the existing job is not
    stored."""
    unique = None if job.terms is None else job.terms.unique
    return unique is not None and unique.on_conflict == "replace"
