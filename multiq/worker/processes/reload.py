"""The data that a reload passes to the re-executed program: the previous children and the lifeline of these children.

Signals stay blocked during the ``exec``, because the new program could not handle them yet. Processes that the app
starts while it is imported would inherit the blocked signals. multiq therefore unblocks the signals as soon as it is
imported, and collects those that arrive (``note_signals``) until the supervisor takes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from . import fork
from .signals import HANDLED_BY_SUPERVISOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: Environment variable: the supervisor's pid, the descriptor of its lifeline, 1 for a paused worker, and the pids of
#: the children. Negative numbers are pids of sidecars.
_RELOADED = "MULTIQ_RELOADED"

#: Environment variable: how many processes a worker that scales had. This number is not in the other variable, because
#: older versions of multiq read that variable.
_PROCESSES = "MULTIQ_RELOADED_PROCESSES"

_POLL = 0.1  # seconds between two checks of the children by a worker without a supervisor

_noted_signals: list[signal.Signals] = []
_tokens: dict[signal.Signals, Any] = {}  # tokens that restore the handlers which ``note_signals`` has replaced


def reload_environment(
    lifeline: int,
    children: Iterable[int],
    sidecars: Iterable[int] = (),
    *,
    is_paused: bool = False,
    processes: int | None = None,
) -> dict[str, str]:
    """Return the environment for the re-executed program. The children work until that program takes over."""
    pids = [*children, *(-pid for pid in sidecars)]
    words = " ".join(map(str, [os.getpid(), lifeline, int(is_paused), *pids]))
    return {**os.environ, _RELOADED: words} | ({} if processes is None else {_PROCESSES: str(processes)})


def was_reloaded() -> bool:
    """Return whether a reload has started this program. False as soon as the program has taken over."""
    return os.environ.get(_RELOADED, "").split()[:1] == [str(os.getpid())]


def note_signals() -> None:
    """After a reload, unblock the signals, and collect those that arrive for ``noted_signals``."""
    if not was_reloaded() or threading.current_thread() is not threading.main_thread():
        return
    for number in HANDLED_BY_SUPERVISOR - {signal.SIGCHLD}:
        _tokens[number] = fork.take_signal(number, note_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_BY_SUPERVISOR)


def note_signal(number: int, _frame: object = None) -> bool:
    """Collect a signal. If another handler replaces this handler for a while, the other handler calls this function,
    too.

    Returns False if there was no reload.
    """
    if _tokens:
        _noted_signals.append(signal.Signals(number))
    return bool(_tokens)


def noted_signals() -> list[signal.Signals]:
    """Return the collected signals in their order, and clear the list."""
    came = _noted_signals[:]
    del _noted_signals[: len(came)]
    return came


@contextlib.contextmanager
def taking_over() -> Iterator[None]:
    """Let the caller handle the signals while the block lasts. At the end of the block, undo ``note_signals``."""
    try:
        yield
    finally:
        for number in list(_tokens):
            fork.restore_signal(number, _tokens.pop(number))


class PreviousGeneration:
    """The children and sidecars of the programs that reloads have replaced. They are still children of this process,
    because a reload keeps the pid.
    """

    def __init__(
        self, children: set[int], sidecars: set[int], *, is_paused: bool = False, processes: int | None = None
    ) -> None:
        self.children = children
        self.sidecars = sidecars
        self.codes: list[int] = []
        """The exit codes of the children that have ended. A negative number is the signal that killed a child."""
        self.is_paused = is_paused
        """Whether a signal had paused the previous program."""
        self.processes = processes
        """How many processes the previous program had, if it scaled."""

    @classmethod
    def take(cls) -> PreviousGeneration:
        """Return the previous generation, which is empty without a reload. Closing its lifeline stops its children."""
        is_ours = was_reloaded()
        words = [int(word) for word in os.environ.pop(_RELOADED, "").split()]
        processes = os.environ.pop(_PROCESSES, None)
        if not is_ours:
            return cls(set(), set())
        os.close(words[1])
        pids = words[3:]
        for pid in pids:
            # the signal is needed because a process of the app may hold the lifeline open
            if pid > 0 and is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return cls(
            {pid for pid in pids if pid > 0},
            {-pid for pid in pids if pid < 0},
            is_paused=bool(words[2]),
            processes=None if processes is None else int(processes),
        )

    @property
    def pids(self) -> set[int]:
        """The processes that have not ended yet."""
        return self.children | self.sidecars

    def have_all_ended(self) -> bool:
        """Whether all processes have ended. The sidecar of the previous generation settles the jobs of the children,
        and kills children that do not end.
        """
        for pid in self.pids:
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                ended, status = pid, 0
            if ended and pid in self.children:
                self.codes.append(os.waitstatus_to_exitcode(status))
            if ended:
                self.children.discard(pid)
                self.sidecars.discard(pid)
        return not self.pids

    def reap(self) -> None:
        """Wait for all processes. A worker without a supervisor calls this in a separate thread."""
        while not self.have_all_ended():
            time.sleep(_POLL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the children. Another thread may run ``reap`` at the same time."""
        for pid in list(self.children):
            if is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def is_child(pid: int) -> bool:
    """Return whether *pid* is a child of this process. The pid of a child is not reused before the child is reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
