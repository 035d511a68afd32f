"""Disk space: new jobs are refused while there is still enough space to work off the existing ones.

An ack writes, too. It goes to the log, and the log can only restart once all of it is moved into the file, which grows
by the new pages. On a disk that producers have filled to the last byte the file cannot grow, so the log cannot restart,
and no job could be acked, released or deleted any more.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendFull

if TYPE_CHECKING:
    import sqlite3

KEPT_BACK = 16_000_000  # bytes: the size of the log while many processes work; an eighth of a small disk

_GROWTH = 3  # bytes that a byte of new jobs takes at most: in the log, in the file, and in half-empty pages
_CHECK_PAUSE = 0.05  # seconds between two checks, which cost 10 us each
_CHECK_EVERY = 250_000  # bytes of new jobs between two checks


class DiskSpace:
    """The free space on the disk of one file, as of the last check."""

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
        except (OSError, AttributeError):  # the file does not exist yet; or Windows
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


def _unused(sqlite: sqlite3.Connection) -> int:
    """Return the bytes of free pages in the file: it never shrinks, and uses these before it grows."""
    (pages,) = sqlite.execute("PRAGMA freelist_count").fetchone()
    (size,) = sqlite.execute("PRAGMA page_size").fetchone()
    return int(pages * size)
