"""The file: its path, its identity, how it is created, its lock, and the free space on its disk.

When a disk is nearly full, new jobs are refused while there is still enough space to work off the existing jobs. Even
an ack needs space, because it is written to the log. Before the log can restart, all of it must be moved into the file.
The file then grows by the new pages. If a disk is full to the last byte, the file cannot grow and the log cannot
restart. In this state, no job can be acked, released or deleted.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from multiq.driverkit.call_retry import Attempts, Pauses
from multiq.errors import BackendFull, BackendUnavailable, UrlInvalid

from .errors import classify
from .lock_owner import refuse_own_lock

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

FileIdentity: TypeAlias = "tuple[int, int] | None"

# bytes. The log has this size while many processes work. On a small disk, an eighth of the disk is kept free.
KEPT_BACK = 16_000_000

_GROWTH = 3  # One byte of new jobs takes at most this many bytes: in the log, in the file, and in half-empty pages.
_CHECK_PAUSE = 0.05  # seconds between two checks. A check takes 10 us.
_CHECK_EVERY = 250_000  # bytes of new jobs between two checks
# seconds between two attempts to get the lock. A commit holds the lock for about 0.0002 s.
_LOCK_PAUSES = Pauses(0.0002, 0.003)
# seconds until the lock's owner is read first, and seconds between later reads
_CHECK_OWNER_AFTER, _CHECK_OWNER_EVERY = 0.1, 1.0

create_lock = threading.Lock()
"""Held while a file is created."""


def check_path(path: str) -> None:
    """Raise ``UrlInvalid`` for a path that can never be used. The file need not exist."""
    if not path or path == ":memory:":
        raise UrlInvalid(
            "SQLite's own in-memory databases are private to one connection, so no worker could see the jobs: "
            "use memory:// (or memory://name), or name a file, as in sqlite:///jobs.db"
        )
    if "\0" in path:
        raise UrlInvalid(f"a file name must not hold NUL characters, got {path!r}")


def file_identity(path: str) -> FileIdentity:
    """Return the device and the inode of the file at *path*. None if there is no file, or if it cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 - before each call, and half the cost of Path.stat
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


def create_file(path: str) -> None:
    """Create the file with mode 600. SQLite itself would use the umask. The -wal and -shm files get the mode of the
    file.

    The file is created under a lock, and only if it does not exist. If this function opened and closed a file that is
    in use, the process would lose all its locks on the file, including those of other threads' connections.
    """
    with create_lock:
        if _is_there(path):
            return
        if Path(path).is_symlink():
            raise UrlInvalid(
                f"{path} is a symbolic link to {Path(path).readlink()}, which does not exist, and multiq makes no file "
                "through a link: make an empty file there, or name that file in the URL"
            )
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return
        except (FileNotFoundError, NotADirectoryError) as exc:
            folder = Path(path).parent
            raise UrlInvalid(f"{path} cannot be made: there is no folder {folder} (make it first)") from exc
        except OSError as exc:
            raise BackendUnavailable(f"{path} cannot be made: {exc.strerror}") from exc


def require_file(path: str) -> None:
    """Raise ``BackendUnavailable`` if there is no file."""
    if not _is_there(path):
        raise missing(f"there is no file {path}")


def missing(what: str) -> BackendUnavailable:
    """Return the error for a missing file or missing tables that must not be created."""
    return BackendUnavailable(
        f"{what}: nothing was enqueued there yet, and no worker has run; if your jobs are elsewhere, say where, with "
        "multiq -c sqlite:////folder/file.db or in MULTIQ_URL"
    )


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


def size_of_file(path: str) -> int:
    """Return the size of a file in bytes. 0 if it does not exist."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost of Path.stat
    except OSError:
        return 0


class DiskSpace:
    """Checks the free space on the disk of one file. Enqueues that follow quickly share one check."""

    def __init__(self) -> None:
        self._next_check_at = 0.0
        self._unchecked = 0

    def is_due(self, size: int) -> bool:
        """Whether the disk must be checked before *size* bytes are added."""
        self._unchecked += size
        return self._unchecked >= _CHECK_EVERY or time.monotonic() >= self._next_check_at

    def refuse_if_full(self, sqlite: sqlite3.Connection, path: str, log: str, size: int) -> None:
        """Check the disk. Raises ``BackendFull`` if *size* more bytes would leave too little space."""
        try:
            disk = os.statvfs(path)
            log_size = os.stat(log).st_size  # noqa: PTH116 - half the cost of Path.stat
        except (OSError, AttributeError):  # The file does not exist yet, or this is Windows.
            return
        free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        kept, needed = min(KEPT_BACK, total // 8) + log_size, _GROWTH * size
        missing = kept + needed - free
        if total and missing > 0 and _unused(sqlite) < missing:
            raise BackendFull(
                f"{path} has no room to grow: its disk has {free / 1e6:,.1f} MB free, the new jobs may need "
                f"{needed / 1e6:,.1f} MB, and {kept / 1e6:,.1f} MB are kept back so that jobs can be worked off; "
                "make room, or wait until jobs are done; nothing was stored"
            )
        self._next_check_at, self._unchecked = time.monotonic() + _CHECK_PAUSE, 0


def _is_there(path: str) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as exc:  # Path.exists raises some of these errors unchanged.
        raise BackendUnavailable(f"{path} cannot be reached: {exc.strerror}") from exc
    if stat.S_ISDIR(mode):
        raise UrlInvalid(f"{path} is a folder: name a file in it, as in {path}/jobs.db")
    return True


def _unused(sqlite: sqlite3.Connection) -> int:
    """Return the bytes of free pages in the file. The file never shrinks, and uses its free pages before it grows."""
    (pages,) = sqlite.execute("PRAGMA freelist_count").fetchone()
    (size,) = sqlite.execute("PRAGMA page_size").fetchone()
    return int(pages * size)
