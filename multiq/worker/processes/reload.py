"""What a reload passes to the re-executed program in the same process: the previous children, and their lifeline.

Signals stay blocked across the ``exec``, so that no signal ends the program before the program can handle signals.
Processes that the app starts while it is imported would inherit the blocked signals. So as soon as multiq itself is
imported, the signals are unblocked and noted (``note_signals``), until the supervisor takes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from . import fork

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: environment variable: the supervisor's pid, its lifeline's descriptor, whether it is paused (1), the pids of its
#: children, and those of sidecars as negative numbers
_RELOADED = "MULTIQ_RELOADED"

_POLL = 0.1  # seconds between two checks of the children, where no supervisor checks them

BLOCKED_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR2, signal.SIGCONT}
)
"""The signals that a supervisor handles. They are blocked when a reloaded program begins."""

_noted_signals: list[signal.Signals] = []
_tokens: dict[signal.Signals, Any] = {}  # what gives back the handlers that note signals


def reload_environment(
    lifeline: int, children: Iterable[int], sidecars: Iterable[int] = (), *, is_paused: bool = False
) -> dict[str, str]:
    """The environment for the re-executed program. Until that program takes over, the children work on."""
    pids = [*children, *(-pid for pid in sidecars)]
    return {**os.environ, _RELOADED: " ".join(map(str, [os.getpid(), lifeline, int(is_paused), *pids]))}


def was_reloaded() -> bool:
    """Whether a reload has re-executed this program, and the program has not taken over yet."""
    return os.environ.get(_RELOADED, "").split()[:1] == [str(os.getpid())]


def note_signals() -> None:
    """After a reload, unblock the signals and note those that arrive, for ``noted_signals``."""
    if not was_reloaded() or threading.current_thread() is not threading.main_thread():
        return
    for number in BLOCKED_SIGNALS - {signal.SIGCHLD}:
        _tokens[number] = fork.take_signal(number, note_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def note_signal(number: int, _frame: object = None) -> bool:
    """The handler that ``note_signals`` installs; handlers that replace it for a time call it.

    Returns False if no reload is going on.
    """
    if _tokens:
        _noted_signals.append(signal.Signals(number))
    return bool(_tokens)


def noted_signals() -> list[signal.Signals]:
    """The signals noted so far, in their order; clears the notes."""
    came = _noted_signals[:]
    del _noted_signals[: len(came)]
    return came


@contextlib.contextmanager
def taking_over() -> Iterator[None]:
    """While the block lasts, the caller takes the signals; then their handlers are restored as before the reload."""
    try:
        yield
    finally:
        for number in list(_tokens):
            fork.restore_signal(number, _tokens.pop(number))


class PreviousGeneration:
    """The children and sidecars of the programs that reloads have replaced. They are children of this process."""

    def __init__(self, children: set[int], sidecars: set[int], *, is_paused: bool = False) -> None:
        self.children = children
        self.sidecars = sidecars
        self.codes: list[int] = []
        """Exit codes of the children that have ended, or, less than 0, the signals that killed them."""
        self.is_paused = is_paused
        """Whether the previous program was paused by a signal."""

    @classmethod
    def take(cls) -> PreviousGeneration:
        """The previous generation, empty without a reload. Closes the lifeline of its children, so that they stop."""
        is_ours = was_reloaded()
        words = [int(word) for word in os.environ.pop(_RELOADED, "").split()]
        if not is_ours:
            return cls(set(), set())
        os.close(words[1])
        pids = words[3:]
        for pid in pids:
            # stopped by a signal, too: a process that the app has started meanwhile may hold the lifeline open
            if pid > 0 and is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return cls({pid for pid in pids if pid > 0}, {-pid for pid in pids if pid < 0}, is_paused=bool(words[2]))

    @property
    def pids(self) -> set[int]:
        """Processes that have not ended yet."""
        return self.children | self.sidecars

    def have_all_ended(self) -> bool:
        """Whether all have ended. Their own sidecar settles what they held, and kills those that do not end."""
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
        """Wait for all of them. A worker without a supervisor calls this in a thread of its own."""
        while not self.have_all_ended():
            time.sleep(_POLL)

    def send(self, number: signal.Signals) -> None:
        """Send the children a signal. Another thread may run ``reap`` meanwhile."""
        for pid in list(self.children):
            if is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def is_child(pid: int) -> bool:
    """Whether *pid* is a child of this process. Then the pid is not reused until the child has been waited for."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
