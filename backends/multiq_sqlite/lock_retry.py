"""Repeats an attempt until no other connection has the lock of the file that the attempt needs."""

from __future__ import annotations

import sqlite3
import time
from typing import TYPE_CHECKING, TypeVar

from multiq.driverkit.call_retry import Attempts, Pauses

from .errors import classify
from .lock_owner import refuse_own_lock

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

# seconds between two attempts to get the lock. A commit holds the lock for about 0.0002 s.
_LOCK_PAUSES = Pauses(0.0002, 0.003)
# seconds until the lock's owner is read first, and seconds between later reads
_CHECK_OWNER_AFTER, _CHECK_OWNER_EVERY = 0.1, 1.0


def retry_while_locked(attempt: Callable[[], _T], timeout: float, path: str) -> _T:
    """Run *attempt* and return its result. Repeats it for up to *timeout* seconds while the file at *path* is locked.

    SQLite's own busy handler pauses up to 100 ms at a time. This function retries a few hundred times a second, after
    pauses of random length.

    Raises ``LockedByCaller`` if the calling program itself has the lock, because waiting cannot help then.
    """
    attempts: Attempts | None = None
    look_at = 0.0
    while True:
        try:
            return attempt()  # The common case needs no clock.
        except sqlite3.OperationalError as exc:
            if attempts is None:
                now = time.monotonic()
                attempts, look_at = Attempts(now + timeout, conflict_pauses=_LOCK_PAUSES), now + _CHECK_OWNER_AFTER
            if not attempts.again(classify(exc)):
                raise
        if (now := time.monotonic()) >= look_at:
            refuse_own_lock(path)
            look_at = now + _CHECK_OWNER_EVERY
