"""What a roll leaves to the program that follows in the same process: the children of before, and their lifeline.

It also leaves signals blocked, so that none ends the program before it can take it. Whatever the app starts while it is
imported would inherit that. So as soon as multiq itself is imported, they are let through and noted (``note_signals``)
until the supervisor takes them.
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

#: in the environment: the supervisor's own pid, its lifeline, whether it is paused (1), the pids of its
#: children, and those of sidecars, as negative numbers
_RELOADED = "MULTIQ_RELOADED"

_POLL = 0.1  # seconds between looks at the children, where no supervisor does that

BLOCKED_SIGNALS = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR2, signal.SIGCONT}
)
"""What a supervisor takes, and what is blocked when the program that follows begins."""

_noted_signals: list[signal.Signals] = []
_tokens: dict[signal.Signals, Any] = {}  # what gives back the handlers that note signals


def reload_environment(
    lifeline: int, children: Iterable[int], sidecars: Iterable[int] = (), *, is_paused: bool = False
) -> dict[str, str]:
    """The environment of the program that follows. Until that takes over, the children do not notice."""
    pids = [*children, *(-pid for pid in sidecars)]
    return {**os.environ, _RELOADED: " ".join(map(str, [os.getpid(), lifeline, int(is_paused), *pids]))}


def was_reloaded() -> bool:
    """Whether this program was begun anew by a roll, and has not taken over yet."""
    return os.environ.get(_RELOADED, "").split()[:1] == [str(os.getpid())]


def note_signals() -> None:
    """After a roll, let through the signals that it has blocked, and note them: ``noted`` returns them."""
    if not was_reloaded() or threading.current_thread() is not threading.main_thread():
        return
    for number in BLOCKED_SIGNALS - {signal.SIGCHLD}:
        _tokens[number] = fork.take_signal(number, note_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)


def note_signal(number: int, _frame: object = None) -> bool:
    """The handler, also for others that take signals meanwhile. False: this is no roll, or it is over."""
    if _tokens:
        _noted_signals.append(signal.Signals(number))
    return bool(_tokens)


def noted_signals() -> list[signal.Signals]:
    """The signals that have come so far, in their order. They are not noted any more."""
    came = _noted_signals[:]
    del _noted_signals[: len(came)]
    return came


@contextlib.contextmanager
def taking_over() -> Iterator[None]:
    """While it lasts, signals are somebody else's to take; then they are as before the roll."""
    try:
        yield
    finally:
        for number in list(_tokens):
            fork.restore_signal(number, _tokens.pop(number))


class PreviousGeneration:
    """The children and sidecars of the programs that rolls have replaced, which are ours to wait for."""

    def __init__(self, children: set[int], sidecars: set[int], *, is_paused: bool = False) -> None:
        self.children = children
        self.sidecars = sidecars
        self.codes: list[int] = []
        """Exit codes of the children that have ended, or, less than 0, the signals that killed them."""
        self.is_paused = is_paused
        """Whether that program was told to take no more jobs."""

    @classmethod
    def take(cls) -> PreviousGeneration:
        """What was left to this process, if anything was. Its lifeline ends here, so it stops as it should."""
        is_ours = was_reloaded()
        words = [int(word) for word in os.environ.pop(_RELOADED, "").split()]
        if not is_ours:
            return cls(set(), set())
        os.close(words[1])
        pids = words[3:]
        for pid in pids:
            if pid > 0 and is_child(
                pid
            ):  # by a signal, too: a process that the app has started meanwhile may hold the lifeline open
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        return cls({pid for pid in pids if pid > 0}, {-pid for pid in pids if pid < 0}, is_paused=bool(words[2]))

    @property
    def pids(self) -> set[int]:
        """Those that have not ended yet."""
        return self.children | self.sidecars

    def have_all_ended(self) -> bool:
        """Whether all have ended. Their own sidecar sees to what they held, and that they do end."""
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
        """Wait for all of them, in a thread of its own: for a worker without a supervisor."""
        while not self.have_all_ended():
            time.sleep(_POLL)

    def send(self, number: signal.Signals) -> None:
        """Send the children a signal, beside a thread that waits for them."""
        for pid in list(self.children):
            if is_child(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def is_child(pid: int) -> bool:
    """Whether a process is this one's child: its number is no other's, then, until it has been waited for."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
