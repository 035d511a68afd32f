"""The file's write lock: waits for it, and names its owner in the errors ``BackendTimeout`` and ``LockedByCaller``.

SQLite locks ranges of bytes with ``fcntl``, which reports only the locks of other processes. Linux lists all locks in
``/proc/locks``, by process and inode. On other systems the owner is unknown, and a call waits until its timeout.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from multiq.driverkit.call_retry import Attempts, Pauses
from multiq.driverkit.thread_frames import thread_frames
from multiq.errors import BackendTimeout, LockedByCaller

from .errors import classify

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

# seconds between two attempts to get the lock. A commit holds the lock for about 0.0002 s.
_LOCK_PAUSES = Pauses(0.0002, 0.003)
# seconds until the lock's owner is read first, and seconds between later reads
_CHECK_OWNER_AFTER, _CHECK_OWNER_EVERY = 0.1, 1.0

_WAL_WRITE_LOCK = 120  # The byte of the -shm file: https://www.sqlite.org/walformat.html#locks
# Without a write-ahead log, the locks are in the file itself, from this byte on. See os_unix.c.
_PENDING_BYTE = 0x40000000
_LOCKS = "/proc/locks"


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
            _refuse_own_lock(path)
            look_at = now + _CHECK_OWNER_EVERY


def lock_timeout(exc: sqlite3.Error, path: str, timeout: float) -> BackendTimeout:
    """Return the error of a call that has not got the lock within *timeout* seconds."""
    return BackendTimeout(
        f"{path} was locked by {_owner_text(path)} for {timeout:g} s ({exc}): look for a program that keeps a "
        "write transaction open, or wait longer with ?timeout= in the URL"
    )


def write_lock_owner(path: str) -> int | None:
    """Return the id of the process that has the write lock. None: no process has the lock, or the owner is unknown."""
    path = os.path.realpath(path)
    wanted = {_inode(path + "-shm"): (_WAL_WRITE_LOCK, _WAL_WRITE_LOCK), _inode(path): (_PENDING_BYTE, sys.maxsize)}
    try:
        with open(_LOCKS, encoding="ascii", errors="replace") as listed:  # noqa: PTH123 - not a path of the application's
            lines = [line.split() for line in listed]
    except OSError:
        return None
    for fields in lines:
        # 7: POSIX  ADVISORY  WRITE 13712 fe:00:2147523 120 120; "->" after the number marks a process that waits
        if len(fields) == 8 and fields[1] == "POSIX" and fields[3] == "WRITE" and fields[6].isdigit():
            first, last = wanted.get(fields[5].rpartition(":")[2], (1, 0))
            if first <= int(fields[6]) <= last:
                return int(fields[4])
    return None


def _refuse_own_lock(path: str) -> None:
    """Raise ``LockedByCaller`` if no other thread could end the transaction that has the write lock.

    This holds if this process has the lock, and this thread is its only thread. The lock then belongs to a transaction
    of the caller. This thread cannot end that transaction while it waits for the lock.
    """
    if write_lock_owner(path) == os.getpid() and len(thread_frames()) == 1:
        raise LockedByCaller(
            f"{path} is locked by a transaction that this program itself has open on another connection, so this call "
            "would wait for ever: to enqueue inside that transaction pass the connection, as in "
            "enqueue(..., connection=connection); for anything else commit, or roll back, first"
        )


def _owner_text(path: str) -> str:
    pid = write_lock_owner(path)
    if pid == os.getpid():
        return (
            "a transaction of this very process (to enqueue inside a transaction of your own, pass its connection: "
            "enqueue(..., connection=connection))"
        )
    return "another connection, of another process or this one," if pid is None else f"the process {pid}"


def _inode(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)  # noqa: PTH116 - half the cost of Path.stat
    except OSError:
        return ""
