"""What each signal means: to the supervisor, to its children, and to a worker without a supervisor.

``signal_inbox`` receives the signals and calls these actions. Three signals have their meaning elsewhere:

- SIGQUIT makes each process write its stacks (``stack_dump``).
- SIGCHLD only wakes the supervisor, which then reaps its children.
- ``ABORT`` makes a sidecar kill the children, if their supervisor has ended (``Sidecar.kill``).
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, TypeAlias

from multiq.formatting import many
from multiq.worker.execution.hanging_calls import run_in_thread

from . import signal_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .process import WorkerProcess
    from .reload import PreviousGeneration
    from .supervisor import Supervisor

    Actions: TypeAlias = Mapping[signal.Signals, Callable[[], None]]

_log = logging.getLogger("multiq.supervisor")

ABORT = signal.SIGUSR1
"""The supervisor sends this signal to children that are stopping, so that they end immediately. A second SIGTERM cannot
have this meaning, because service managers send SIGTERM to the whole process group. So for one stop, a child may
receive SIGTERM twice: from the service manager and from the supervisor.
"""

HANDLED_BY_SUPERVISOR = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR2, signal.SIGCONT}
)
"""The signals that a supervisor handles. These signals are blocked when a reloaded program starts."""

HANDLED_BY_CHILD = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT, ABORT})


def handled_alone(*, owns_process: bool) -> frozenset[signal.Signals]:
    """Return the signals that a worker without a supervisor handles. *owns_process*: see ``WorkerProcess``."""
    handled = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCONT})
    # A command ends when its terminal closes, unless ``nohup`` has started the command. In other programs, the user's
    # code handles SIGHUP.
    return handled | {signal.SIGHUP} if owns_process and not signal_handlers.was_ignored(signal.SIGHUP) else handled


def actions_of_supervisor(supervisor: Supervisor) -> Actions:
    return {
        signal.SIGTERM: supervisor.stop_children,
        signal.SIGINT: supervisor.stop_children,
        signal.SIGUSR2: supervisor.pause,
        signal.SIGCONT: supervisor.resume,
        signal.SIGQUIT: supervisor.dump,
        signal.SIGHUP: supervisor.reload_or_hang_up,
    }


def actions_of_child(process: WorkerProcess) -> Actions:
    """A child reads from the shared state whether it is paused. SIGUSR2 and SIGCONT only wake it."""
    return {
        signal.SIGTERM: process.stop,
        ABORT: process.abort,
        signal.SIGUSR2: process.wake,
        signal.SIGCONT: process.wake,
    }


def actions_alone(process: WorkerProcess, previous: PreviousGeneration | None) -> Actions:
    """*previous*: the children of a supervisor that a reload has replaced with this worker without a supervisor."""
    return {
        signal.SIGTERM: lambda: stop_or_abort(process, previous, by_signal=True),
        signal.SIGINT: lambda: stop_or_abort(process, previous, by_signal=True),
        signal.SIGHUP: process.stop,
        signal.SIGUSR2: process.pause,
        signal.SIGCONT: process.resume,
    }


def stop_or_abort(
    process: WorkerProcess, previous: PreviousGeneration | None = None, *, by_signal: bool = False
) -> None:
    """Stop a worker without a supervisor. The second call aborts it."""
    if process.is_stop_requested:
        if previous is not None:
            previous.send(ABORT)
        process.abort(by_signal=by_signal)
        return
    if by_signal:
        running = process.running
        # This runs in a thread, because writing the log may hang, and the next signal must still be handled.
        run_in_thread(lambda: log_waiting(running, process.grace))
    process.stop()


def log_waiting(running: int, grace: float) -> None:
    if running:
        what = "them" if running > 1 else "it"
        verb = "run" if running > 1 else "runs"
        _log.info(
            "stopping: waits for %s that %s, up to %.1f s; a second signal (Ctrl-C) gives %s back at once",
            many(running, "job"),
            verb,
            grace,
            what,
        )
