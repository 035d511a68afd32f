"""Makes the occurrences of schedules, in a worker's sidecar or on a thread of a worker without a supervisor."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from multiq.errors import MultiqError
from multiq.job import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.schedules import Scheduler

_log = logging.getLogger("multiq.worker")

_AGAIN = 5.0  # seconds after an error
_LONGEST_WAIT = 0.5  # a waiting thread checks after this number of seconds whether it must end


class Scheduling:
    """Looks at the schedules at regular times.

    If the app's code has no schedules, this class makes no call and imports nothing until ``notice`` is called.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_schedules = bool(app.code_schedules)
        self._is_over = False
        self._scheduler: Scheduler | None = None
        self._look_at = 0.0  # monotonic
        self._error = ""

    def notice(self) -> None:
        """Record that the connection has schedules."""
        self._has_schedules = True

    def look_if_due(self) -> None:
        """Look at the schedules, if a look is due. An error is logged, unless it is the same as the previous error."""
        if not self._has_schedules or self._is_over or time.monotonic() < self._look_at:
            return
        try:
            self._look_at = time.monotonic() + self._look()
        except MultiqError as exc:
            self._fail(str(exc))
        except Exception as exc:  # noqa: BLE001 - logged; the sidecar has other work, which goes on
            self._fail(f"this should not happen: {describe(exc)}")
        else:
            self._error = ""

    def _fail(self, error: str) -> None:
        self._look_at = time.monotonic() + _AGAIN
        if error != self._error:
            _log.error("schedules do not run%s: %s", "" if self._is_over else " now, and are tried again", error)
        self._error = error

    def _look(self) -> float:
        if not self._app.backend.declared.notes:
            self._is_over = True
            raise self._app.backend.unsupported("notes")
        if self._scheduler is None:
            from multiq.schedules import Scheduler

            self._scheduler = Scheduler(self._app)
        return self._scheduler.look()


def schedule_on_thread(app: App) -> Callable[[], None]:
    """Look at the schedules on a thread. Returns a function that ends the thread."""
    ended = threading.Event()
    scheduling = Scheduling(app)

    def run() -> None:
        while not ended.wait(_LONGEST_WAIT):
            scheduling.look_if_due()

    thread = threading.Thread(target=run, name="multiq-schedules", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(_AGAIN)

    return end
