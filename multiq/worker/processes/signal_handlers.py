"""Installs the worker's signal handlers, and restores the previous ones: at the worker's end, and in processes that a
job forks.

A forked process inherits handlers, blocked signals and the wake-up socket. If a job's child process kept what it
inherits, ``Process.terminate()`` would stop the worker, and not the child. The hooks in this module run after every
fork except the forks of the worker itself (``kept_in_forks``):

- The hooks restore the handler that each signal had before the worker started.
- The hooks unblock the signals that the worker takes.
- The hooks reset the wake-up socket.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: faster than signal.getsignal, which converts its result to an enum
handler_of = import_module("_signal").getsignal


class _ForkState(threading.local):
    """The state of a thread before a fork, for the hooks that run after the fork."""

    mask: set[Any] | None = None
    is_own = False


_previous_handlers: dict[int, Any] = {}  # signal -> handler before a worker took the signal
_fork_state = _ForkState()


def take_signal(number: int, handler: Callable[[int, Any], object]) -> Any:
    """Install *handler* until ``restore_signal``. Returns a token for ``restore_signal``."""
    known = number in _previous_handlers
    old = signal.signal(number, handler)
    if not known:
        # *old* is None if the handler was not installed from Python
        _previous_handlers[number] = signal.SIG_DFL if old is None else old
    return old, known


def restore_signal(number: int, token: Any) -> None:
    """Restore the handler that ``take_signal`` has replaced."""
    old, known = token
    signal.signal(number, signal.SIG_DFL if old is None else old)
    if not known:
        _previous_handlers.pop(number, None)


def was_ignored(number: int) -> bool:
    """Return whether the signal was ignored before the worker took it. ``nohup`` starts programs that ignore SIGHUP."""
    return bool(_previous_handlers.get(number, signal.getsignal(number)) == signal.SIG_IGN)


@contextlib.contextmanager
def kept_in_forks() -> Iterator[None]:
    """Let a process that this thread forks in the block keep the worker's signal handlers."""
    _fork_state.is_own = True
    try:
        yield
    finally:
        _fork_state.is_own = False


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
