"""Lets a fork wait while an outbox uses SQLite.

The SQLite library has locks for the whole process. A thread holds them for moments during most calls of the library,
such as ``sqlite3.connect``. A child that is forked at such a moment waits for ever in its own first call.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 10.0  # seconds that a fork waits, for example for a thread that waits for a locked file


class SqliteUse:
    """Marks the times at which outboxes use SQLite. Only one thread at a time uses it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an RLock: the thread that uses SQLite may fork, in a listener of its engine
        self._is_held = False
        forks.register(before=self._before, in_parent=self._release, in_child=self._in_child)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """While the block lasts, forks wait. Use ``pausing`` for anything in the block that may take long."""
        lock = self._lock
        with lock:
            yield

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """While the block lasts, forks do not wait, and other threads may use SQLite. Only within ``using``."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _before(self) -> None:
        self._is_held = self._lock.acquire(timeout=_PATIENCE)

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._lock.release()

    def _in_child(self) -> None:
        if self._is_held:
            self._release()
        else:  # a thread that does not exist here holds the lock
            self._lock = threading.RLock()


sqlite_use = SqliteUse()
