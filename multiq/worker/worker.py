"""The worker as its users start it."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

from multiq.log import log_events
from multiq.names import check_name
from multiq.options import check_count, check_timeout

from .child import Child, ChildSettings
from .signals import SignalInbox
from .supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.app import App


class Worker:
    """Runs the jobs of an app's queues.

    *queues* are worked off in strict order: a later one only while all earlier ones have nothing due. *processes*
    above 1 run under a supervisor; *threads* above 1 run that many jobs at a time in each process; *concurrency*
    runs that many coroutines at a time on one event loop instead (plain functions then go to a pool of threads
    beside it). *prefetch* is how many short jobs a process may hold beyond those, *grace* the seconds that running
    jobs get after SIGTERM. *max_jobs* ends each process after so many jobs, *stop_when_empty* when nothing is due.
    What is not given comes from the settings.

    Raises ``OptionInvalid``, ``NameInvalid``; ``Unsupported`` for several processes on a backend that is not shared.
    """

    def __init__(
        self,
        app: App,
        queues: Sequence[str] | None = None,
        *,
        processes: int | None = None,
        threads: int | None = None,
        concurrency: int | None = None,
        prefetch: int | None = None,
        grace: float | None = None,
        max_jobs: int | None = None,
        stop_when_empty: bool = False,
    ) -> None:
        default = app.settings.worker
        names = default.queues if queues is None else ([queues] if isinstance(queues, str) else queues)
        self._app = app
        self._processes = default.processes if processes is None else check_count(processes, "processes")
        self._settings = ChildSettings(
            queues=tuple(dict.fromkeys(check_name(name) for name in names)),
            threads=default.threads if threads is None else check_count(threads, "threads"),
            concurrency=default.concurrency
            if concurrency is None
            else check_count(concurrency, "concurrency", least=0),
            prefetch=default.prefetch if prefetch is None else check_count(prefetch, "prefetch"),
            grace=default.grace if grace is None else check_timeout(grace, "grace"),
            max_jobs=None if max_jobs is None else check_count(max_jobs, "max_jobs"),
            stop_when_empty=stop_when_empty,
        )
        if self._processes > 1 and not app.backend.capabilities.shared:
            raise app.backend.unsupported("shared")
        self._running: Child | Supervisor | None = None
        self._stop_early = False

    def run(self) -> int:
        """Work until SIGTERM, SIGINT or ``stop``. Returns the exit code: 0, or 130 when jobs were cut short.

        In the main thread it takes the signals: the first TERM or INT finishes what runs and gives back the rest, a
        second one gives back everything at once; USR2 pauses, CONT resumes.
        """
        log_events(self._app)
        if self._processes == 1:
            return self._run_child(None)
        settings = self._settings
        supervisor = Supervisor(
            self._run_child,
            self._processes,
            grace=settings.grace,
            once=settings.stop_when_empty or settings.max_jobs is not None,
        )
        self._running = supervisor
        if self._stop_early:
            return 0
        return supervisor.run()

    def stop(self) -> None:
        """From any thread: as the first SIGTERM does; called again, as the second."""
        self._stop_early = True
        running = self._running
        if isinstance(running, Child):
            _stop(running)
        elif running is not None:
            running.stop()

    def _run_child(self, parent: int | None) -> int:
        """One process's work; *parent* is the supervisor's pid."""
        inbox = SignalInbox(
            [signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT, *([] if parent else [signal.SIGINT])],
        )
        child = Child(self._app, self._settings, parent=parent, leave=_leave if inbox.installed else None)
        self._running = child
        if self._stop_early:
            child.stop()
        with inbox:
            inbox.serve(
                {
                    signal.SIGTERM: lambda: _stop(child),
                    signal.SIGINT: lambda: _stop(child),
                    signal.SIGUSR2: child.pause,
                    signal.SIGCONT: child.resume,
                }
            )
            return child.run()


def _stop(child: Child) -> None:
    if child.stopping:
        child.abort()
    else:
        child.stop()


def _leave(code: int) -> None:
    """End the process although a job still has its main thread."""
    logging.shutdown()
    os._exit(code)
