"""Pauses tubes. A separate connection watches the paused tubes.

The server deletes a tube that has neither jobs nor watchers. The pause of the tube is then lost.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

from .errors import CONNECTION_ERRORS, explain, reply_error
from .records import whole_seconds

if TYPE_CHECKING:
    from .connection import Connection
    from .pool import Pool


class PausedTubes:
    """The tubes that this process has paused. A connection that never reserves watches them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Connection | None = None
        self._until: dict[str, float] = {}  # tube -> the monotonic time at which its pause ends
        self._lock = threading.Lock()
        forks.watch(self)

    def pause(self, queue: str, seconds: float) -> None:
        """Pause a tube, and watch it until the pause ends. Raises ``BackendError``."""
        tube, whole = queue.encode(), max(1, whole_seconds(seconds))
        with self._lock:
            now = time.monotonic()
            over = [name for name, until in self._until.items() if until < now and name != queue]
            packet = b"".join(b"ignore %b\r\n" % name.encode() for name in over)
            packet += b"watch %b\r\npause-tube %b %d\r\n" % (tube, tube, whole)
            deadline = self._pool.deadline()
            try:
                *_, (watched, _), (line, _) = self._live_connection(deadline).ask(packet, len(over) + 2, deadline)
            except CONNECTION_ERRORS as exc:
                raise explain(exc, self._pool.address, self._pool.timeout) from exc
            if line != b"PAUSED":
                raise reply_error(line, self._pool.address)
            if not watched.startswith(b"WATCHING "):  # without a watcher, the pause ends with the tube's last job
                raise reply_error(watched, self._pool.address)
            for name in over:
                self._until.pop(name, None)  # a new connection does not watch the tube
            self._until[queue] = now + whole + 1

    def forget(self, queue: str) -> None:
        """Record that a tube is not paused any more. The next call of ``pause`` stops watching the tube."""
        with self._lock:
            if queue in self._until:
                self._until[queue] = 0.0

    def close(self) -> None:
        """Close the connection, which ends the watches."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._until.clear()
        if connection is not None:
            connection.close()

    def _live_connection(self, deadline: float) -> Connection:
        if self._connection is None or not self._connection.is_alive():
            self._until.clear()
            self._connection = self._pool.open(deadline)
        return self._connection

    def start_over_in_child(self) -> None:
        """Drop the connection, because it belongs to the parent. Make a new lock, because a thread of the parent may
        have held the old one."""
        self._lock = threading.Lock()
        self._connection, self._until = None, {}
