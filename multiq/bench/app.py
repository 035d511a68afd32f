"""The app of the bench. The bench's tasks are ordinary tasks that write each of their runs into a run log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from multiq import App, current_job
from multiq.errors import ArgumentsInvalid
from multiq.events import WorkerStarted, WorkerStopped
from multiq.settings.model import Settings

from .run_log import RunLog

if TYPE_CHECKING:
    from pathlib import Path

    from multiq.backend import Backend

PLANTED = "planted://"
"""The URL scheme of backends with a planted bug, as in ``planted://early``. Tests use backends with a planted bug to
check that the bench finds bugs."""


class BenchApp(App):
    """An app with the bench's tasks. The app's workers write run logs into *folder*. Each run log has room for
    *capacity* runs.
    """

    def __init__(self, url: str, folder: Path | None = None, capacity: int = 0) -> None:
        super().__init__(url, settings=Settings(max_body=2**26))
        self._planted = _open_planted(url) if url.startswith(PLANTED) else None
        self._folder = folder
        self._capacity = capacity
        self._run_log: RunLog | None = None
        self.noop = self.task(name="noop", max_attempts=20)(self._noop)
        self.padded = self.task(name="padded")(self._padded)
        self.nap = self.task(name="nap", max_crashes=20)(self._nap)
        self.flaky = self.task(name="flaky", max_attempts=20, backoff=0)(self._flaky)
        self.on(WorkerStarted)(self._open)
        self.on(WorkerStopped)(self._close)

    @property
    def backend(self) -> Backend:
        return super().backend if self._planted is None else self._planted

    @property
    def run_log(self) -> RunLog:
        """The run log of this process. Raises ``ArgumentsInvalid`` if the app was constructed without a folder."""
        if self._run_log is None:
            if self._folder is None:
                raise ArgumentsInvalid("this app only enqueues: it was given no folder for a run log")
            self._run_log = RunLog(self._folder, self._capacity)
        return self._run_log

    # --- tasks ---

    def _noop(self, number: int) -> None:
        run_log = self.run_log
        run_log.end(run_log.begin(number, current_job().attempt))

    def _padded(self, number: int, padding: str) -> None:  # noqa: ARG002 - only makes the body larger
        self._noop(number)

    def _nap(self, number: int, seconds: float) -> None:
        offset = self.run_log.begin(number, current_job().attempt)
        time.sleep(seconds)
        self.run_log.end(offset)

    def _flaky(self, number: int, failures: int) -> None:
        attempt = current_job().attempt
        offset = self.run_log.begin(number, attempt, fails=attempt <= failures)
        self.run_log.end(offset)
        if attempt <= failures:
            raise PlannedFailure(number)

    # --- the run log ---

    def _open(self, _event: WorkerStarted) -> None:
        self._run_log = None  # a forked child opens a run log of its own
        self.run_log  # noqa: B018 - created before the first job, because the CPU time counts from here

    def _close(self, _event: WorkerStopped) -> None:
        self.run_log.close()


class PlannedFailure(Exception):
    """Raised by a job that the workload planned to fail."""

    def __init__(self, number: int) -> None:
        super().__init__(f"job {number} fails in this run, as the workload planned")


def _open_planted(url: str) -> Backend:
    """Open a backend with a planted bug, which the bench must find.

    ``planted://NAME`` has a bug of the conformance suite or of the bench. ``planted://NAME@URL`` wraps the backend of
    *URL* with a bug of the bench.
    """
    from multiq.conformance import PLANTED as BUGS

    from .planted import PLANTED_BUGS

    name, _, inner = url.removeprefix(PLANTED).partition("@")
    if name in PLANTED_BUGS:
        return PLANTED_BUGS[name].open(name="bench", url=inner)
    bug = BUGS.get(name.replace("-", " "))
    if bug is None or inner:
        known = sorted([*PLANTED_BUGS, *(other.replace(" ", "-") for other in BUGS)])
        raise ArgumentsInvalid(f"there is no planted bug {name!r}: choose one of {', '.join(known)}")
    return bug.open(name="bench")
