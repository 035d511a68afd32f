"""Child processes that share the test's memory as it was, as a forking server's do."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Do *work* in a forked child, which ends without any of its parent's clean-up. Returns its process id."""
    with warnings.catch_warnings():
        # newer Pythons warn that a child does not inherit threads; no thread of the suite holds a lock here
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def ended_well(child: int) -> bool:
    """Whether the child's work went through. Waits for its end."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
