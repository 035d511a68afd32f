"""The connections of one backend: idle ones are lent to whichever thread needs one, the last used first."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks
from multiq.errors import BackendError, MultiqError

from .connection import open_connection
from .errors import CONNECTION_ERRORS, explain, refused, shown
from .server_info import parse_server_info

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection, Reply
    from .server_info import ServerInfo

_CHECK_AFTER = 0.02  # seconds since a connection was last taken in which it is not looked at before it is used again
_MAX_IDLE = 8  # connections kept for the next thread


class Pool:
    """Opens, lends and closes connections to one server. Nothing is locked: a list's append and pop are atomic."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        """Seconds that a call may take."""
        self._idle: list[Connection] = []
        self._generation = forks.generation
        self._kept: weakref.WeakKeyDictionary[Connection, None] = weakref.WeakKeyDictionary()

    @property
    def shown(self) -> str:
        """The server as messages name it."""
        return shown(self.address)

    def deadline(self) -> float:
        """When a call that begins now has to be over; monotonic."""
        return time.monotonic() + self.timeout

    def take(self, deadline: float) -> Connection:
        """An idle connection that is still alive, or a new one. Raises ``BackendError``."""
        self._discard_inherited()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self.open(deadline)
            last_acquired_at, connection.last_acquired_at = connection.last_acquired_at, deadline
            if deadline - last_acquired_at < _CHECK_AFTER or connection.is_alive():
                return connection

    def release(self, connection: Connection) -> None:
        """Lend it to somebody else, if it is good for that."""
        if connection.is_closed:
            return
        if len(self._idle) < _MAX_IDLE and self._generation == forks.generation:
            self._idle.append(connection)
        else:
            connection.close()

    def open(self, deadline: float, *, close_with_pool: bool = False) -> Connection:
        """A new connection; one *close_with_pool* is closed with the others. Raises ``BackendError``."""
        try:
            connection = open_connection(self.address, deadline)
        except CONNECTION_ERRORS as exc:
            raise explain(exc, self.address, self.timeout) from exc
        if close_with_pool:
            self._kept[connection] = None
        return connection

    def fetch_server_info(self, connection: Connection, deadline: float) -> tuple[Connection, ServerInfo]:
        """What the server says of itself, and the connection that it was asked on, another one if this one breaks.

        Raises ``BackendError``.
        """
        try:
            try:
                ((line, body),) = connection.ask(b"stats\r\n", 1, deadline)
            except ConnectionError:
                connection = self.open(deadline)
                ((line, body),) = connection.ask(b"stats\r\n", 1, deadline)
            if not line.startswith(b"OK "):
                connection.close()
                raise refused(line, self.address)
            connection.server_info = parse_server_info(body)
        except CONNECTION_ERRORS as exc:
            connection.close()
            raise explain(exc, self.address, self.timeout) from exc
        return connection, connection.server_info

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Session]:
        """A connection for a call of several round trips, all within one deadline.

        Raises ``BackendError`` for what goes wrong with it.
        """
        session = Session(self, self.deadline())
        try:
            yield session
        except CONNECTION_ERRORS as exc:
            session.close()
            raise explain(exc, self.address, self.timeout) from exc
        except BackendError:
            session.close()  # somebody who gives strange answers may be out of step
            raise
        except MultiqError:
            raise
        except BaseException:
            session.close()
            raise
        finally:
            session.end()

    def ask(self, *commands: bytes, tube: str | None = None) -> list[Reply]:
        """The replies to commands that do no harm when they are sent twice. Raises ``BackendError``."""
        with self.borrowed() as session:
            return session.ask(*commands, tube=tube, is_safe=True)

    def close(self) -> None:
        """Close all connections, those that others keep included."""
        self._discard_inherited()
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        for reference in self._kept.keyrefs():  # a copy, as other threads may open some meanwhile
            connection = reference()
            if connection is not None:
                connection.hang_up()

    def _discard_inherited(self) -> None:
        """In a forked child: what is said on the parent's connections is not for us."""
        if self._generation != forks.generation:
            self._generation = forks.generation
            self._idle, idle = [], self._idle
            for connection in idle:
                connection.close()
            self._kept = weakref.WeakKeyDictionary()


class Session:
    """One call's use of a connection."""

    def __init__(self, pool: Pool, deadline: float) -> None:
        self.pool = pool
        self.deadline = deadline
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """The connection. Raises ``BackendError``."""
        if self._connection is None:
            self._connection = self.pool.take(self.deadline)
        return self._connection

    def ask(self, *commands: bytes, tube: str | None = None, is_safe: bool = False) -> list[Reply]:
        """The replies to *commands*, sent together, with *tube* as the one in use.

        With *is_safe* they are sent once more if the connection breaks. Raises ``OSError``, ``ProtocolError``,
        ``BackendError``.
        """
        try:
            return self._ask(commands, tube)
        except ConnectionError:
            if not is_safe:
                raise
        self.reconnect()
        return self._ask(commands, tube)

    def reconnect(self) -> None:
        """Go on with another connection. Raises ``BackendError``."""
        self.close()
        self._connection = self.pool.open(self.deadline)

    def close(self) -> None:
        """Nobody shall use this connection any more."""
        if self._connection is not None:
            self._connection.close()

    def use(self, tube: str) -> None:
        """Have *tube* in use before anything is put, as a ``use`` that is refused leaves the one before in use.

        Raises ``OSError``, ``ProtocolError``, ``BackendError``.
        """
        if self.connection.used != tube:
            self.ask(tube=tube)

    def extend_deadline(self) -> None:
        """A further packet of a call that takes as long as there are jobs: it has a deadline of its own."""
        self.deadline = self.pool.deadline()

    def server_info(self, *, is_safe: bool = False) -> ServerInfo:
        """What the server says of itself, asked once on each connection; another one only if that *is_safe*.

        Raises ``OSError``, ``ProtocolError``, ``BackendError``.
        """
        server_info = self.connection.server_info
        if server_info is None:
            ((line, body),) = self.ask(b"stats", is_safe=is_safe)
            if not line.startswith(b"OK "):
                raise refused(line, self.pool.address)
            server_info = self.connection.server_info = parse_server_info(body)
        return server_info

    def end(self) -> None:
        """The connection is for somebody else."""
        if self._connection is not None:
            self.pool.release(self._connection)

    def _ask(self, commands: Sequence[bytes], tube: str | None) -> list[Reply]:
        connection = self.connection
        if tube is None or connection.used == tube:
            return connection.ask(b"%b\r\n" % b"\r\n".join(commands), len(commands), self.deadline)
        packet = b"%b\r\n" % b"\r\n".join((b"use %b" % tube.encode(), *commands))
        (used, _), *replies = connection.ask(packet, len(commands) + 1, self.deadline)
        if not used.startswith(b"USING "):
            connection.close()
            raise refused(used, self.pool.address)
        connection.used = tube
        return replies
