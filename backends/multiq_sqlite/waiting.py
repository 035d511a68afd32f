"""How a consumer waits: it looks whether anybody committed, often at first, then less, and sleeps in between.

A look is ``PRAGMA data_version``: some microseconds, and no lock that would disturb anyone. Producers of the same
process ring a bell. After a quiet while an idle consumer relies on hints from the kernel where there are any, and
looks only a few times a second itself.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from .file_watch import LogWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection, Database

Signs: TypeAlias = "tuple[int, tuple[int, int]]"

_FIRST_NAP = 0.001  # seconds between two looks; longer the longer nothing happens
_NAP_GROWTH = 0.05  # of the time since something happened
_LONGEST_NAP = 0.012  # another process's job is at most this late
_QUIET_AFTER = 0.25  # seconds without anything, after which hints are relied on
_QUIET_NAP = 0.1  # seconds between two looks of one who relies on hints


class Lookout:
    """One consumer's sleep."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database = database
        self._connection = connection
        self._stirred_at = 0.0
        self._relies_on_hints = True
        self._watch: LogWatch | None = None
        self._watch_belongs_to = (0, 0)

    def signs(self) -> Signs:
        """Differs from an earlier answer if anything may have changed since."""
        return self._database.bell.rings, self._connection.data_version()

    def stir(self) -> None:
        """Something happened: look often for a while."""
        self._stirred_at = time.monotonic()

    def sleep(self, seen: Signs, shortest_nap: float, left: Callable[[], float]) -> None:
        """Until there are other signs than those *seen*, or a hint of some, or nothing is *left* of the time."""
        if self._doze(seen, shortest_nap, left):
            self._sleep_deeply(seen, left)

    def close(self) -> None:
        """Give back what the kernel lent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _doze(self, seen: Signs, shortest_nap: float, left: Callable[[], float]) -> bool:
        """Look again and again. True: it has been quiet for a while."""
        rings, version = seen
        bell = self._database.bell
        ear = threading.Lock()
        ear.acquire()
        with bell.listening(ear):
            while bell.rings == rings:
                idle = time.monotonic() - self._stirred_at
                if idle >= _QUIET_AFTER and self._log_watch() is not None:
                    return True
                nap = max(shortest_nap, min(_LONGEST_NAP, _FIRST_NAP + idle * _NAP_GROWTH))
                nap = min(nap, left())
                if nap <= 0 or ear.acquire(timeout=nap) or self._connection.data_version() != version:
                    return False
        return False

    def _sleep_deeply(self, seen: Signs, left: Callable[[], float]) -> None:
        """Wait for a hint, looking now and then in case there are none."""
        watch = self._log_watch()
        if watch is None:
            return
        watch.wait(0)  # what it has to tell from before is no news
        hinted = False
        with self._database.bell.listening(watch):
            while not hinted and self.signs() == seen and (nap := min(_QUIET_NAP, left())) > 0:
                hinted = watch.wait(nap)
        changed = self._connection.data_version() != seen[1]
        if changed and not hinted:
            self._relies_on_hints = watch.wait(0)  # else somebody committed, and the kernel said nothing
        if changed or hinted:
            self.stir()

    def _log_watch(self) -> LogWatch | None:
        """The watch on the log that our connection has open. A fork and a new file need a new one."""
        belongs_to = (os.getpid(), self._connection.opened)
        if self._watch_belongs_to != belongs_to:
            self.close()
            self._watch_belongs_to = belongs_to
            self._watch = LogWatch.of(self._connection.log) if self._relies_on_hints else None
        return self._watch if self._relies_on_hints else None
