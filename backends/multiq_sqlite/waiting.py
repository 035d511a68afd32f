"""How a consumer waits: it looks whether anybody committed, often at first, then less, and sleeps in between.

A look is ``PRAGMA data_version``: some microseconds, and no lock that would disturb anyone. Producers of the same
process notify a notifier. After a quiet while an idle consumer relies on hints from the kernel where there are any, and
looks only a few times a second itself.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from .file_watch import FileWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection, Pool

ChangeMark: TypeAlias = "tuple[int, tuple[int, int]]"

_FIRST_PAUSE = 0.001  # seconds between two looks; longer the longer nothing happens
_PAUSE_GROWTH = 0.05  # of the time since something happened
_LONGEST_PAUSE = 0.012  # another process's job is at most this late
_QUIET_AFTER = 0.25  # seconds without anything, after which hints are relied on
_QUIET_PAUSE = 0.1  # seconds between two looks of one who relies on hints


class Waiter:
    """One consumer's sleep."""

    def __init__(self, pool: Pool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._active_at = 0.0
        self._relies_on_hints = True
        self._watch: FileWatch | None = None
        self._file_watch_key = (0, 0)

    def change_mark(self) -> ChangeMark:
        """Differs from an earlier answer if anything may have changed since."""
        return self._pool.notifier.notifications, self._connection.data_version()

    def speed_up(self) -> None:
        """Something happened: look often for a while."""
        self._active_at = time.monotonic()

    def sleep(self, seen: ChangeMark, shortest_pause: float, left: Callable[[], float]) -> None:
        """Until there are other change_mark than those *seen*, or a hint of some, or nothing is *left* of the time."""
        if self._poll(seen, shortest_pause, left):
            self._wait_for_hint(seen, left)

    def close(self) -> None:
        """Give back what the kernel lent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _poll(self, seen: ChangeMark, shortest_pause: float, left: Callable[[], float]) -> bool:
        """Look again and again. True: it has been quiet for a while."""
        notifications, version = seen
        notifier = self._pool.notifier
        listener = threading.Lock()
        listener.acquire()
        with notifier.listening(listener):
            while notifier.notifications == notifications:
                idle = time.monotonic() - self._active_at
                if idle >= _QUIET_AFTER and self._file_watch() is not None:
                    return True
                pause = max(shortest_pause, min(_LONGEST_PAUSE, _FIRST_PAUSE + idle * _PAUSE_GROWTH))
                pause = min(pause, left())
                if pause <= 0 or listener.acquire(timeout=pause) or self._connection.data_version() != version:
                    return False
        return False

    def _wait_for_hint(self, seen: ChangeMark, left: Callable[[], float]) -> None:
        """Wait for a hint, looking now and then in case there are none."""
        watch = self._file_watch()
        if watch is None:
            return
        watch.wait(0)  # what it has to tell from before is no news
        hinted = False
        with self._pool.notifier.listening(watch):
            while not hinted and self.change_mark() == seen and (pause := min(_QUIET_PAUSE, left())) > 0:
                hinted = watch.wait(pause)
        changed = self._connection.data_version() != seen[1]
        if changed and not hinted:
            self._relies_on_hints = watch.wait(0)  # else somebody committed, and the kernel said nothing
        if changed or hinted:
            self.speed_up()

    def _file_watch(self) -> FileWatch | None:
        """The watch on the log that our connection has open. A fork and a new file need a new one."""
        key = (os.getpid(), self._connection.opened)
        if self._file_watch_key != key:
            self.close()
            self._file_watch_key = key
            self._watch = FileWatch.of(self._connection.log) if self._relies_on_hints else None
        return self._watch if self._relies_on_hints else None
