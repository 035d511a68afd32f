"""Processes that a job forks do not belong to the worker: in them, signals act as before the worker started.

A forked process inherits handlers, blocked signals and the wake-up socket. If these are a worker's,
``Process.terminate()`` would stop the worker instead of the process. So after every fork except the worker's own forks,
each signal has the handler that it had before the worker started, no signal that the worker takes is blocked, and
nothing is written to the wake-up socket.

A job's code may return in a process that it has forked: then that process ends (``ExitInForks``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import NoReturn

_log = logging.getLogger("multiq.worker")


#: signal.getsignal converts its result to an enum, which takes longer
handler_of = import_module("_signal").getsignal


class _ForkState(threading.local):
    """A thread's state before a fork, for the hooks that run after the fork."""

    mask: set[Any] | None = None
    is_own = False


_previous_handlers: dict[int, Any] = {}  # a signal that a worker has taken -> its handler before that
_fork_state = _ForkState()


def take_signal(number: int, handler: Callable[[int, Any], object]) -> Any:
    """Have *handler* called for this signal, until ``restore_signal``. Returns the token for ``restore_signal``."""
    known = number in _previous_handlers
    old = signal.signal(number, handler)
    if not known:
        # *old* is None if the handler was not installed from Python
        _previous_handlers[number] = signal.SIG_DFL if old is None else old
    return old, known


def restore_signal(number: int, token: Any) -> None:
    """Restore the handler that ``take_signal`` has replaced; *token* is what it returned."""
    old, known = token
    signal.signal(number, signal.SIG_DFL if old is None else old)
    if not known:
        _previous_handlers.pop(number, None)


def fork_worker_process() -> int:
    """``os.fork`` for the worker's own processes, which keep its signal handlers."""
    _fork_state.is_own = True
    try:
        return os.fork()
    finally:
        _fork_state.is_own = False


class ExitInForks:
    """A block that runs a job's code. If the code returns in a process that the job has forked, that process ends."""

    __slots__ = ("_generation",)

    def __enter__(self) -> None:
        self._generation = forks.generation

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if forks.generation != self._generation:
            exit_forked_copy(error)


def exit_forked_copy(error: BaseException | None) -> NoReturn:
    """End this forked process, in which a job's code has returned: its parent settles the job."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif error is not None:
        code = 1
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    with contextlib.suppress(BaseException):
        logging.shutdown()
    flush_streams()
    os._exit(code & 0xFF)


def flush_streams() -> None:
    """Flush the standard streams. The streams may be closed, or their reader may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a stream is None if it was closed when Python started
            stream.flush()


def _before_fork() -> None:
    """Block the worker's signals until the child has its own handlers."""
    if _previous_handlers and not _fork_state.is_own:
        _fork_state.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _previous_handlers)


def _in_parent() -> None:
    if _fork_state.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork_state.mask)
        _fork_state.mask = None


def _in_child() -> None:
    if _fork_state.mask is None:
        return
    mask, _fork_state.mask = _fork_state.mask, None
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(signal.SIGQUIT)
    for number, handler in _previous_handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - _previous_handlers.keys())
    _previous_handlers.clear()


forks.register(before=_before_fork, in_parent=_in_parent, in_child=_in_child)
