"""Child processes that share the test's memory as it was, as a forking server's do."""

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
    """Do *work* in a forked child, which ends without any of its parent's clean-up. Returns its process id."""
    with warnings.catch_warnings():
        # newer Pythons warn of locks that threads hold while the process forks; that a backend can take it is the claim
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        faulthandler.dump_traceback_later(HANGS / 2, file=2)  # where one hangs, its parent cannot see
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - told, and by the exit code, too
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return child


def ended_well(child: int) -> bool:
    """Whether the child's work went through. Waits for its end; one that hangs is killed."""
    give_up_at = time.monotonic() + HANGS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > give_up_at:
            os.kill(child, signal.SIGKILL)
            give_up_at = float("inf")
        time.sleep(0.005)
