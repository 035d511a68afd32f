"""Reloading in development: beside the supervisor a process watches the code, and sends it SIGHUP when that changes.

It is a process of its own because a supervisor starts no threads. A roll keeps the supervisor's process id, so its
watcher goes on beside the program that follows. It ends with the supervisor.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.errors import ExtraNotInstalled

from .reload import BLOCKED_SIGNALS, noted_signals, was_reloaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_log = logging.getLogger("multiq.supervisor")

_WATCHER = "MULTIQ_WATCHER"  # in the environment: whose watcher runs already, and which one it is
_POLL_MS = 500  # so often the watcher looks whether its supervisor is still there
_QUIET_MS = 300  # changes that follow one another so closely are one: an editor's, or a checkout's


def check_library() -> None:
    """Raises ``ExtraNotInstalled``."""
    if find_spec("watchfiles") is None:
        raise ExtraNotInstalled("--watch needs watchfiles: pip install 'multiq[watch]'")


def folders_of(module: str) -> list[Path]:
    """Where the code of an app lies: the current folder, and the one that its module was found in."""
    folders = [Path.cwd()]
    origin = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    if origin is not None:
        top = Path(origin).resolve().parent
        if not top.is_relative_to(folders[0]) and not top.is_relative_to(sys.prefix):  # what is installed stays
            folders.append(top)
    return folders


@contextlib.contextmanager
def auto_reloading(folders: Iterable[Path]) -> Iterator[None]:
    """While it lasts, this process gets a SIGHUP whenever a file of code or settings in these folders has changed."""
    # until the supervisor takes signals, a change waits; once it does not any more, nothing comes of one. Ignoring it
    # instead would throw away the one that came while a rolled program starts: sigaction(2) of POSIX says so
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    watcher = _running_watcher() or _start(folders)
    os.environ[_WATCHER] = f"{os.getpid()} {watcher}"
    try:
        yield
    finally:
        del os.environ[_WATCHER]
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(watcher, signal.SIGTERM)
            os.waitpid(watcher, 0)


def wait_if_reloaded(problem: Exception) -> None:
    """This program was begun anew and cannot start: when code changes, begin anew again. The old children work on.

    Code is tried before a roll; it may be changed in the moment between. Returns if this is no roll, or when told to
    stop.
    """
    if not was_reloaded():
        return
    _log.error("the new code does not start: %s; its old processes go on until it is changed", problem)
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    heeded = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT}
    came: list[int] = []
    while not came:
        came = [number for number in noted_signals() if number in heeded]  # a thread of the app's may let them through
        if not came and (info := signal.sigtimedwait(heeded, _POLL_MS / 1000)) is not None:
            came = [info.si_signo]
    if came[0] == signal.SIGHUP:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def watch(supervisor: int, folders: Sequence[str]) -> None:
    """The watcher's work, until its supervisor is gone."""
    import watchfiles

    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's, for the whole group
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # a program that was rolled starts us with it blocked
    changes = watchfiles.watch(
        *folders,
        watch_filter=watchfiles.PythonFilter(extra_extensions=(".toml",)),
        step=_QUIET_MS,
        rust_timeout=_POLL_MS,
        yield_on_timeout=True,
    )
    first = next(changes)
    _log.warning("changes of code in %s will be rolled onto", " and ".join(folders))
    for changed in itertools.chain([first], changes):
        if os.getppid() != supervisor:
            return
        if changed:
            os.kill(supervisor, signal.SIGHUP)


def _running_watcher() -> int | None:
    """The watcher that the program before a roll has left to us, if it still runs."""
    words = [int(word) for word in os.environ.get(_WATCHER, "").split()]
    if not words or words[0] != os.getpid():
        return None
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(words[1], os.WNOHANG) == (0, 0):
            return words[1]
    return None


def _start(folders: Iterable[Path]) -> int:
    command = [sys.executable, "-m", __name__, str(os.getpid()), *map(str, folders)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL).pid  # noqa: S603 - our own module


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2:])
