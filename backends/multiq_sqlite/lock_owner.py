"""Finds the process that holds a file's write lock.

SQLite locks ranges of bytes with ``fcntl``, which reports only the locks of other processes. Linux lists all locks in
``/proc/locks``, by process and inode. On other systems the owner is unknown, and a call waits until its timeout.
"""

from __future__ import annotations

import os
import sys

from multiq.errors import LockedByCaller

_WAL_WRITE_LOCK = 120  # The byte of the -shm file: https://www.sqlite.org/walformat.html#locks
# Without a write-ahead log, the locks are in the file itself, from this byte on. See os_unix.c.
_PENDING_BYTE = 0x40000000
_LOCKS = "/proc/locks"


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


def refuse_own_lock(path: str) -> None:
    """Raise ``LockedByCaller`` if no other thread could end the transaction that has the write lock.

    This holds if this process has the lock, and this thread is its only thread. The lock then belongs to a transaction
    of the caller. This thread cannot end that transaction while it waits for the lock.
    """
    if write_lock_owner(path) == os.getpid() and len(sys._current_frames()) == 1:  # noqa: SLF001 - documented; has all threads
        raise LockedByCaller(
            f"{path} is locked by a transaction that this program itself has open on another connection, so this call "
            "would wait for ever: to enqueue inside that transaction pass the connection, as in "
            "enqueue(..., connection=connection); for anything else commit, or roll back, first"
        )


def _inode(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)  # noqa: PTH116 - as in file.py
    except OSError:
        return ""
