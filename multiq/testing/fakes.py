"""A fake connection for tests. A test checks the enqueued jobs, and moves the time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from multiq.driverkit.clock import SECOND
from multiq.errors import ArgumentsInvalid
from multiq.formatting import shown
from multiq.validation import check_timeout

from .assertions import Assertions
from .fake_backend import FakeBackend
from .sync_backend import SyncBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.app import App


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
