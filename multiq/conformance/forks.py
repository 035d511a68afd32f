"""Child processes forked from the test, with a copy of its memory, as a forking server makes them."""

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
    """Do *work* in a forked child, which ends without any of its parent's clean-up. Returns the child's process id."""
    with warnings.catch_warnings():
        # since 3.12 Python warns of a fork in a process with threads; the test is that a backend survives it
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        faulthandler.dump_traceback_later(HANGS / 2, file=2)  # the parent cannot see where a child hangs
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - printed, and shown by the exit code, too
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return child


def ended_well(child: int) -> bool:
    """Wait for the child's end and return whether its work succeeded. A child that hangs is killed."""
    give_up_at = time.monotonic() + HANGS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > give_up_at:
            os.kill(child, signal.SIGKILL)
            give_up_at = float("inf")
        time.sleep(0.005)
