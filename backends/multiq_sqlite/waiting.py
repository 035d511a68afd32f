"""A waiting consumer polls to find out whether another connection has committed. It polls often at first, and then less
often.

A poll is ``PRAGMA data_version``. It takes some microseconds, and needs no lock. Producers in the same process wake the
consumer through the notifier. After a quiet period, the consumer relies on the kernel's hints (``file_watch``), if the
system gives hints. Then it polls only ten times a second.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from multiq.driverkit.shared_poller import PollPause

from .file_watch import Hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connection import Connection
    from .pool import Pool

ChangeMark: TypeAlias = "tuple[int, tuple[int, int]]"

_FIRST_PAUSE = 0.001  # The first pause between two polls, in seconds. Pauses grow while nothing happens.
_PAUSE_GROWTH = 0.05  # the pause as a share of the time since the last activity
_LONGEST_PAUSE = 0.012  # seconds. A job from another process is at most this late.
_QUIET_AFTER = 0.25  # seconds without activity, after which the waiter relies on hints
_QUIET_PAUSE = 0.1  # seconds between two polls of a waiter that relies on hints


class Waiter:
    """Waits on behalf of one consumer."""

    def __init__(self, pool: Pool, connection: Connection) -> None:
        self._pool = pool
        self._connection = connection
        self._pause = PollPause(first=_FIRST_PAUSE, longest=_LONGEST_PAUSE, growth=_PAUSE_GROWTH)
        self._hints = Hints(connection)

    def change_mark(self) -> ChangeMark:
        """Return a value that changes whenever the queues may have changed."""
        return self._pool.notifier.notifications, self._connection.data_version()

    def speed_up(self) -> None:
        """Poll often for a while, after activity."""
        self._pause.speed_up()

    def sleep(self, seen: ChangeMark, shortest_pause: float, left: Callable[[], float]) -> None:
        """Wait until the change mark differs from *seen*, a hint arrives, or ``left()`` is 0."""
        if self._poll(seen, shortest_pause, left):
            self._wait_for_hint(seen, left)

    def close(self) -> None:
        self._hints.close()

    def _poll(self, seen: ChangeMark, shortest_pause: float, left: Callable[[], float]) -> bool:
        """Poll until something changes, time is up, or the quiet period begins.

        Returns whether the quiet period has begun. The caller then waits for hints.
        """
        notifications, version = seen
        notifier = self._pool.notifier
        listener = threading.Lock()
        listener.acquire()
        with notifier.listening(listener):
            while notifier.notifications == notifications:
                if self._pause.idle >= _QUIET_AFTER and self._hints.watch() is not None:
                    return True
                pause = min(max(shortest_pause, self._pause.next()), left())
                if pause <= 0 or listener.acquire(timeout=pause) or self._connection.data_version() != version:
                    return False
        return False

    def _wait_for_hint(self, seen: ChangeMark, left: Callable[[], float]) -> None:
        """Wait for a hint, and poll ten times a second in case hints are missing."""
        watch = self._hints.watch()
        if watch is None:
            return
        watch.wait(0)  # discard earlier events
        hinted = False
        with self._pool.notifier.listening(watch):
            while not hinted and self.change_mark() == seen and (pause := min(_QUIET_PAUSE, left())) > 0:
                hinted = watch.wait(pause)
        changed = self._connection.data_version() != seen[1]
        if changed and not hinted:
            self._hints.check_after_commit()
        if changed or hinted:
            self.speed_up()
