"""Which process has the write lock of a file: the one that asks, or another.

SQLite locks ranges of bytes with ``fcntl``, which tells a process nothing about its own locks. Linux lists everybody's
in ``/proc/locks``, by process and inode. Elsewhere nobody can tell, and a call waits until its timeout.
"""

from __future__ import annotations

import os
import sys

from multiq.errors import LockedByCaller

_WAL_WRITE_LOCK = 120  # the byte of the -shm file: https://www.sqlite.org/walformat.html#locks
_PENDING_BYTE = 0x40000000  # from here on, in the file itself, without a write-ahead log; os_unix.c
_LOCKS = "/proc/locks"


def write_lock_owner(path: str) -> int | None:
    """The number of the process that has the write lock; None if there is none, or it cannot be told."""
    path = os.path.realpath(path)
    wanted = {_inode(path + "-shm"): (_WAL_WRITE_LOCK, _WAL_WRITE_LOCK), _inode(path): (_PENDING_BYTE, sys.maxsize)}
    try:
        with open(_LOCKS, encoding="ascii", errors="replace") as listed:  # noqa: PTH123 - no path of a user's
            lines = [line.split() for line in listed]
    except OSError:
        return None
    for fields in lines:
        # 7: POSIX  ADVISORY  WRITE 13712 fe:00:2147523 120 120; with "->" after the number it is waited for
        if len(fields) == 8 and fields[1] == "POSIX" and fields[3] == "WRITE" and fields[6].isdigit():
            first, last = wanted.get(fields[5].rpartition(":")[2], (1, 0))
            if first <= int(fields[6]) <= last:
                return int(fields[4])
    return None


def refuse_own_lock(path: str) -> None:
    """Raises ``LockedByCaller`` if only the thread that asks could end the transaction that has the write lock.

    That is certain where this process has the lock, and this thread is its only one: it is not inside any transaction
    of ours, and until it is back from here nobody ends the caller's.
    """
    if write_lock_owner(path) == os.getpid() and len(sys._current_frames()) == 1:  # noqa: SLF001 - documented; has all threads
        raise LockedByCaller(
            f"{path} is locked by a transaction that this program itself has open on another connection, so this call "
            "would wait for ever: to enqueue inside that transaction pass the connection, as in "
            "enqueue(..., connection=connection); for anything else commit, or roll back, first"
        )


def _inode(path: str) -> str:
    try:
        return str(os.stat(path).st_ino)  # noqa: PTH116 - as everywhere here
    except OSError:
        return ""
