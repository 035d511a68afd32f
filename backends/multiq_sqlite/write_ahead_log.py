"""The driver restarts the write-ahead log when it is long.

SQLite itself restarts the log only at a moment when no connection reads. There is no such moment while many processes
work. The driver therefore checks the log's size after some of its commits, and restarts a long log.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time

LONG = 16_000_000  # bytes. This is four times the size at which SQLite begins to checkpoint.
CHECK_PAUSE = 0.01  # seconds between two checks of the size of a log that is not long

_READERS_PATIENCE = 5  # milliseconds that a restart of the log may wait for readers. Writers wait during this time.
_CHECKPOINT_PATIENCE = 0.5  # seconds that a commit may wait for other checkpoints before it checkpoints a long log
_CHECKPOINT_PAUSE = 0.05  # seconds after a failed checkpoint until the next checkpoint


def restart(connection: sqlite3.Connection) -> float:
    """Restart the log. Returns the seconds until the next check of the log's size.

    After a failed checkpoint, the next check is later. A reader that stays for hours makes all checkpoints fail. The
    longer pause limits the cost of these checkpoints for the writers.
    """
    with contextlib.suppress(sqlite3.Error):  # The commit is done. A later commit tries the restart again.
        return _restart(connection)
    return _CHECKPOINT_PAUSE


def _restart(sqlite: sqlite3.Connection) -> float:
    """Make the next commit write to the log's beginning, unless a reader prevents this. Returns the seconds until the
    next check.

    A ``PASSIVE`` checkpoint moves the log's frames (changed pages) into the file, and waits for no reader. A
    ``RESTART`` checkpoint holds the write lock while it waits for readers. A reader may stay for hours and need a frame
    that is not moved yet. So ``RESTART`` is used only after all frames have been moved.

    Only one checkpoint of a file runs at a time, and SQLite does not wait for the end of another connection's
    checkpoint. This loop waits for that end without a lock. With many writers, a checkpoint runs nearly always. The
    loop still ends, because writers that wait here write nothing.
    """
    give_up_at = time.monotonic() + _CHECKPOINT_PATIENCE
    (page,) = sqlite.execute("PRAGMA page_size").fetchone()
    while time.monotonic() < give_up_at:
        _, frames, moved = _checkpoint(sqlite, "PASSIVE")
        if 0 <= frames * page < LONG:
            return 0.0  # Another connection has restarted the log, and no commit has truncated the file yet.
        if moved < frames:
            return _CHECKPOINT_PAUSE
        if frames > 0 and _checkpoint(sqlite, "RESTART")[0] == 0:
            return 0.0
        time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - jitter, not for security
    return _CHECKPOINT_PAUSE


def _checkpoint(sqlite: sqlite3.Connection, mode: str) -> tuple[int, int, int]:
    """Run a checkpoint.

    Returns whether it was blocked, the number of frames in the log, and the number of frames that were moved into the
    file. Both numbers are -1 if another checkpoint runs.
    """
    sqlite.execute(f"PRAGMA busy_timeout = {_READERS_PATIENCE if mode == 'RESTART' else 0}")
    try:
        busy, frames, moved = sqlite.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    finally:
        sqlite.execute("PRAGMA busy_timeout = 0")
    return busy, frames, moved
