"""The free space on the disk of the file. An enqueue raises ``BackendFull`` if too little space is free.

When a disk is nearly full, new jobs are refused while there is still enough space to work off the existing jobs. Even
an ack needs space, because it is written to the log. Before the log can restart, all of it must be moved into the file.
The file then grows by the new pages. If a disk is full to the last byte, the file cannot grow and the log cannot
restart. In this state, no job can be acked, released or deleted.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendFull

if TYPE_CHECKING:
    import sqlite3

# bytes. The log has this size while many processes work. On a small disk, an eighth of the disk is kept free.
KEPT_BACK = 16_000_000

_GROWTH = 3  # One byte of new jobs takes at most this many bytes: in the log, in the file, and in half-empty pages.
_CHECK_PAUSE = 0.05  # seconds between two checks. A check takes 10 us.
_CHECK_EVERY = 250_000  # bytes of new jobs between two checks


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


def _unused(sqlite: sqlite3.Connection) -> int:
    """Return the bytes of free pages in the file. The file never shrinks, and uses its free pages before it grows."""
    (pages,) = sqlite.execute("PRAGMA freelist_count").fetchone()
    (size,) = sqlite.execute("PRAGMA page_size").fetchone()
    return int(pages * size)
