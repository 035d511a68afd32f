"""Auto-reload for development (``--watch``): a watcher process sends SIGHUP to the supervisor when code changes.

The watcher is a process because a supervisor starts no threads. A reload keeps the supervisor's pid, so the watcher
continues after a reload. The watcher ends with the supervisor.
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

from .reload import noted_signals, was_reloaded
from .signals import HANDLED_BY_SUPERVISOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_log = logging.getLogger("multiq.supervisor")

_WATCHER = "MULTIQ_WATCHER"  # environment variable: the pids of the supervisor and of its watcher
_POLL_MS = 500  # interval at which the watcher checks that its supervisor is alive
_QUIET_MS = 300  # changes within this time count as one change, for editors and checkouts that write several files


def check_library() -> None:
    """Raise ``ExtraNotInstalled`` if the library is missing."""
    if find_spec("watchfiles") is None:
        raise ExtraNotInstalled("--watch needs watchfiles: pip install 'multiq[watch]'")


def folders_of(module: str) -> list[Path]:
    """Return the folders to watch: the current folder, and the folder of the app's top-level module."""
    folders = [Path.cwd()]
    origin = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    if origin is not None:
        top = Path(origin).resolve().parent
        if not top.is_relative_to(folders[0]) and not top.is_relative_to(
            sys.prefix
        ):  # installed packages are not watched
            folders.append(top)
    return folders


@contextlib.contextmanager
def auto_reloading(folders: Iterable[Path]) -> Iterator[None]:
    """While the block lasts, this process gets a SIGHUP when code or settings in *folders* change."""
    # SIGHUP stays blocked until the supervisor installs its handler. The handler here does nothing, and the supervisor
    # restores it at the end. SIG_IGN would lose a SIGHUP that is pending while a reloaded program starts: POSIX
    # discards a pending signal when it is set to SIG_IGN (sigaction(2)).
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
    """If a reload has loaded code that does not start, wait until the code changes, and execute it again.

    The old children continue to work. A reload checks the code first, but the code may change between the check and the
    ``exec``. If no reload has started this program, this function returns immediately. It also returns when a signal
    asks the worker to stop.
    """
    if not was_reloaded():
        return
    _log.error("the new code does not start: %s; the old processes keep running until the code is changed", problem)
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_BY_SUPERVISOR)
    heeded = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT}
    came: list[int] = []
    while not came:
        # the app's threads may have unblocked signals
        came = [number for number in noted_signals() if number in heeded]
        if not came and (info := signal.sigtimedwait(heeded, _POLL_MS / 1000)) is not None:
            came = [info.si_signo]
    if came[0] == signal.SIGHUP:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def watch(supervisor: int, folders: Sequence[str]) -> None:
    """The main function of the watcher. It runs until the supervisor has ended."""
    import watchfiles

    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends both signals to the whole group
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by a reloaded program
    changes = watchfiles.watch(
        *folders,
        watch_filter=watchfiles.PythonFilter(extra_extensions=(".toml",)),
        step=_QUIET_MS,
        rust_timeout=_POLL_MS,
        yield_on_timeout=True,
    )
    first = next(changes)
    _log.warning("watching %s: the worker reloads when code changes", " and ".join(folders))
    for changed in itertools.chain([first], changes):
        if os.getppid() != supervisor:
            return
        if changed:
            os.kill(supervisor, signal.SIGHUP)


def _running_watcher() -> int | None:
    """Return the pid of the watcher that was started before a reload, or None if it has ended."""
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
