"""Forks child processes from the test. A child has a copy of the test's memory, like a forking server's child."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from typing import TYPE_CHECKING

from .threads import HANGS

if TYPE_CHECKING:
    from collections.abc import Callable


_reports: dict[int, int] = {}  # child -> file descriptor of the text that it has printed to stderr


def fork(work: Callable[[], object]) -> int:
    """Run *work* in a forked child, which then ends by ``os._exit``. Returns the child's process id."""
    report, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108 - the descriptor is enough
    with warnings.catch_warnings():
        # Since Python 3.12, a fork in a process with threads causes a warning. The tests check that a backend survives
        # a fork in a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            _redirect_stderr(report)
            faulthandler.dump_traceback_later(HANGS / 2, file=2)  # shows where a child hangs
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - printed, and reported by the exit code
            os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
        finally:
            os._exit(status)
    _reports[child] = report
    return child


def ended_well(child: int) -> bool:
    """Wait until the child ends, and return True if its work succeeded.

    If a child hangs, it is killed. If the work did not succeed, the call raises ``AssertionError`` with the text that
    the child has printed.
    """
    give_up_at = time.monotonic() + HANGS
    how = "ended"
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > give_up_at:
            os.kill(child, signal.SIGKILL)
            give_up_at = float("inf")
            how = f"hung for {HANGS:g} s, was killed, and ended"
        time.sleep(0.005)
    printed = ""
    if child in _reports:
        with os.fdopen(_reports.pop(child), "rb") as report:
            report.seek(0)
            printed = report.read().decode(errors="replace")
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code != 0:
        raise AssertionError(f"child {child} {how} with exit code {exit_code}. It printed:\n{printed or 'nothing'}")
    return True


def _redirect_stderr(fd: int) -> None:
    """Redirect the stderr of this child to *fd*. A test runner may have replaced ``sys.stderr`` by a buffer.
    ``os._exit`` does not flush such a buffer.
    """
    os.dup2(fd, 2)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
