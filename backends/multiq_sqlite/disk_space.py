"""Room on the disk: new jobs are refused while there is still enough for working off those that are there.

An ack writes, too. It goes to the log, and the log can only be written from its beginning again once all of it is
moved into the file, which grows by the new pages in it. On a disk that producers have filled to the last byte the file
cannot grow, so the log cannot start over, and no job could be acked, released or deleted ever again.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from multiq.errors import BackendFull

if TYPE_CHECKING:
    import sqlite3

KEPT_BACK = 16_000_000  # bytes, as long as the log becomes while many processes work; of a small disk, an eighth

_GROWTH = 3  # bytes that a byte of new jobs takes at most: in the log, in the file, and around it in half-empty pages
_CHECK_PAUSE = 0.05  # seconds between two looks, which cost 10 us each
_CHECK_EVERY = 250_000  # bytes of new jobs between two looks


class DiskSpace:
    """What is free on the disk of one file, as it was when it was looked at last."""

    def __init__(self) -> None:
        self._next_check_at = 0.0
        self._unchecked = 0

    def is_due(self, size: int) -> bool:
        """Whether it has to be looked at before so many bytes are added."""
        self._unchecked += size
        return self._unchecked >= _CHECK_EVERY or time.monotonic() >= self._next_check_at

    def refuse_if_full(self, sqlite: sqlite3.Connection, path: str, log: str, size: int) -> None:
        """Look. Raises ``BackendFull`` if *size* bytes more would leave too little."""
        try:
            disk = os.statvfs(path)
            log_size = os.stat(log).st_size  # noqa: PTH116 - half the price of Path.stat
        except (OSError, AttributeError):  # the file is about to be made; or Windows
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
    """Bytes of the file itself that were jobs once. It does not shrink, and uses them before it grows."""
    (pages,) = sqlite.execute("PRAGMA freelist_count").fetchone()
    (size,) = sqlite.execute("PRAGMA page_size").fetchone()
    return int(pages * size)
