"""The write-ahead log: the driver restarts it when it is long.

SQLite by itself restarts the log only at a moment when no connection reads. While many processes work, there is no such
moment. So the driver checks the log's size after some of its commits, and restarts the log if it is long.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time

LONG = 16_000_000  # bytes: four times the size at which SQLite begins to checkpoint
CHECK_PAUSE = 0.01  # seconds between two checks of the log's size, where it is not long

_READERS_PATIENCE = 5  # milliseconds that a restart of the log waits for readers, and delays writers, at most
_CHECKPOINT_PATIENCE = 0.5  # seconds that a commit waits to checkpoint a long log, while other checkpoints run
_CHECKPOINT_PAUSE = 0.05  # seconds without another checkpoint after a failed one


def restart(connection: sqlite3.Connection) -> float:
    """Restart the log. Returns the seconds until the next check of its size.

    After a failed checkpoint the next check is later. So a reader that stays for hours, and makes all checkpoints fail,
    costs the writers next to nothing.
    """
    with contextlib.suppress(sqlite3.Error):  # the commit stands; a later commit tries again
        return _restart(connection)
    return _CHECKPOINT_PAUSE


def _restart(sqlite: sqlite3.Connection) -> float:
    """Let the next commit write to the log's beginning, unless a reader prevents it. Returns the seconds to pause.

    A ``PASSIVE`` checkpoint moves the log's frames (changed pages) into the file, and waits for no reader. A
    ``RESTART`` checkpoint keeps the write lock while it waits for readers. A reader that needs a frame which was not
    moved yet may stay for hours, so ``RESTART`` is used only when all frames have been moved.

    Only one checkpoint of a file runs at a time, and SQLite does not wait until another connection's checkpoint ends.
    This loop waits for that end, without a lock. With many writers there is nearly always a checkpoint running; the
    loop ends all the same, because writers that wait here write nothing.
    """
    give_up_at = time.monotonic() + _CHECKPOINT_PATIENCE
    (page,) = sqlite.execute("PRAGMA page_size").fetchone()
    while time.monotonic() < give_up_at:
        _, frames, moved = _checkpoint(sqlite, "PASSIVE")
        if 0 <= frames * page < LONG:
            return 0.0  # another connection has restarted it, and no commit has truncated the file yet
        if moved < frames:
            return _CHECKPOINT_PAUSE
        if frames > 0 and _checkpoint(sqlite, "RESTART")[0] == 0:
            return 0.0
        time.sleep(random.uniform(0.0002, 0.001))  # noqa: S311 - jitter, not for security
    return _CHECKPOINT_PAUSE


def _checkpoint(sqlite: sqlite3.Connection, mode: str) -> tuple[int, int, int]:
    """Run a checkpoint.

    Returns whether it was blocked, how many frames the log has, and how many of them have been moved into the file.
    Both numbers are -1 if another checkpoint runs.
    """
    sqlite.execute(f"PRAGMA busy_timeout = {_READERS_PATIENCE if mode == 'RESTART' else 0}")
    try:
        busy, frames, moved = sqlite.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
    finally:
        sqlite.execute("PRAGMA busy_timeout = 0")
    return busy, frames, moved
