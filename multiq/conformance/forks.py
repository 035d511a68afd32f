"""Forks child processes from the test. A child has a copy of the test's memory, like a child of a forking server."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
import warnings
from typing import TYPE_CHECKING

from .threads import HANGS

if TYPE_CHECKING:
    from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Run *work* in a forked child. The child ends without its parent's clean-up. Returns the child's process id."""
    with warnings.catch_warnings():
        # Since 3.12 Python warns of a fork in a process with threads. The tests check that a backend survives such a
        # fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        faulthandler.dump_traceback_later(HANGS / 2, file=2)  # the parent cannot see where a child hangs
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - printed, and reported by the exit code
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return child


def ended_well(child: int) -> bool:
    """Wait for the child's end, and return whether the child's work succeeded. A child that hangs is killed."""
    give_up_at = time.monotonic() + HANGS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > give_up_at:
            os.kill(child, signal.SIGKILL)
            give_up_at = float("inf")
        time.sleep(0.005)
