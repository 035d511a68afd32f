"""A reload (SIGHUP): checks the new code, and executes the same command in the same process, with the new code.

The supervisor begins a reload, and passes its children and their lifeline to the re-executed program in the
environment. These previous children continue to work until the new program takes over.

Signals stay blocked during the ``exec``, because the new program could not handle them yet. Processes that the app
starts while it is imported would inherit the blocked signals. multiq therefore unblocks the signals as soon as it is
imported, and collects those that arrive (``note_signals``) until the supervisor takes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from . import signal_handlers
from .signals import HANDLED_BY_SUPERVISOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_log = logging.getLogger("multiq.supervisor")

#: Environment variable: the supervisor's pid, the descriptor of its lifeline, 1 for a paused worker, and the pids of
#: the children. Negative numbers are pids of sidecars.
_RELOADED = "MULTIQ_RELOADED"

#: Environment variable: how many processes a worker that scales had. This number is not in the other variable, because
#: older versions of multiq read that variable.
_PROCESSES = "MULTIQ_RELOADED_PROCESSES"

_POLL = 0.1  # seconds between two checks of the children by a worker without a supervisor

_noted_signals: list[signal.Signals] = []
_tokens: dict[signal.Signals, Any] = {}  # tokens that restore the handlers which ``note_signals`` has replaced


class ReloadCheck:
    """Runs *command*, which exits with 0 if the current code starts. The supervisor does not wait for it.

    *command* is None: every reload goes on without a check.
    """

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stale = False

    @property
    def pid(self) -> int | None:
        """The process of the running check."""
        return None if self._process is None else self._process.pid

    def begin(self) -> bool:
        """Start the check. Returns True if there is no command, so that the reload goes on immediately."""
        if self._command is None:
            return True
        if self._process is not None:
            self._is_stale = True  # files may have changed after the running check read them
            return False
        self._is_stale = False
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)  # noqa: S603 - our own command
        except OSError:  # a deployment is replacing the interpreter, or the system refuses to start a process
            _log.exception("the new code cannot be checked: the old code keeps running")
        return False

    def has_just_passed(self, *, is_stopping: bool) -> bool:
        """Whether the check has passed since the last call, and the reload goes on. If files may have changed during
        the check, this method starts the check again."""
        if self._process is None or self._process.poll() is None:
            return False
        code, self._process = self._process.returncode, None
        if self._is_stale and not is_stopping:
            return self.begin()
        if code:
            _log.error("the new code does not start (exit code %d): the old code keeps running", code)
        return not code and not is_stopping

    def end(self) -> None:
        """Kill the running check."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def re_execute(environment: dict[str, str], undo: Callable[[], None], *, ignores_hangups: bool) -> None:
    """Execute the same command in this process. If that fails, call *undo* and return.

    Signals stay blocked until the new program, or the old one after *undo*, can handle them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_BY_SUPERVISOR)
    if ignores_hangups:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the new program reads this in ``was_ignored``
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - ourselves
    except OSError:
        _log.exception("the command cannot be re-executed: the old code keeps running")
        undo()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


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
        _tokens[number] = signal_handlers.take_signal(number, note_signal)
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
            signal_handlers.restore_signal(number, _tokens.pop(number))


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
