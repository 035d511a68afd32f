"""The pool of connections to one file, and the state that the connections share."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import PerProcess, forks
from multiq.driverkit.shared_poller import Notifier

from .connection import Connection
from .disk_space import DiskSpace
from .forks import fork_guard
from .opening import check_path

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_IDLE = 8  # connections kept open for later calls

_notifiers = PerProcess(Notifier)


class Pool:
    """The pool of connections to one file, and the settings with which the file is opened. Does no I/O before the first
    call."""

    def __init__(self, path: str, *, synchronous: str, timeout: float, create: bool = True) -> None:
        check_path(path)
        self.path = os.path.abspath(path)  # noqa: PTH100 - no I/O yet; and now, as the process may change its folder
        self.timeout = timeout
        """Seconds that a call waits for the lock."""
        self.synchronous = synchronous
        self.create = create
        """Whether a missing file, and missing tables, are created."""
        self.next_log_check_at = 0.0
        """The monotonic time of the next check of the log's size. One connection makes this check for all
        connections."""
        self.disk_space = DiskSpace()
        self._idle: list[Connection] = []  # append and pop are atomic
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._notifier: tuple[int, Notifier] | None = None

    @property
    def notifier(self) -> Notifier:
        """The notifier that wakes waiting consumers. All connections of this process to this file share it."""
        if self._notifier is None or self._notifier[0] != forks.generation:
            self._notifier = (forks.generation, _notifiers.of(os.path.realpath(self.path)))
        return self._notifier[1]

    def connection(self) -> Connection:
        """Return a connection for one consumer. It opens when it is first used."""
        connection = Connection(self)
        with fork_guard.lock:
            self._connections.add(connection)
        return connection

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Connection]:
        """Lend the most recently used connection for one call, because its cache still holds pages of the file."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connection()
        try:
            yield connection
        finally:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close all connections. A connection opens again if it is used again."""
        with fork_guard.lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
