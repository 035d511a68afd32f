"""The connection pool of one backend."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.call_retry import Attempts
from multiq.driverkit.fork import forks
from multiq.errors import BackendError, MultiqError

from .connection import open_connection
from .errors import CONNECTION_ERRORS, classify, explain, reply_error, server_name
from .stats import parse_server_info

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.driverkit.net import Address

    from .connection import Connection
    from .replies import Reply
    from .stats import ServerInfo

_CHECK_AFTER = 0.02  # seconds: after a longer idle time, a connection is checked before its next use
_MAX_IDLE = 8  # idle connections that stay open for later calls


class Pool:
    """Opens, lends and closes connections to one server. A thread gets the idle connection that was used last.

    The pool needs no lock, because a list's append and pop are atomic.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        """Seconds that a call may take."""
        self._idle: list[Connection] = []
        self._kept: weakref.WeakKeyDictionary[Connection, None] = weakref.WeakKeyDictionary()
        forks.watch(self)

    @property
    def server_name(self) -> str:
        """The server's name in messages."""
        return server_name(self.address)

    def deadline(self) -> float:
        """Return the deadline of a call that begins now, by the monotonic clock."""
        return time.monotonic() + self.timeout

    def take(self, deadline: float) -> Connection:
        """Return an idle connection that is still alive, or a new one. Raises ``BackendError``."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self.open(deadline)
            last_acquired_at, connection.last_acquired_at = connection.last_acquired_at, deadline
            if deadline - last_acquired_at < _CHECK_AFTER or connection.is_alive():
                return connection

    def release(self, connection: Connection) -> None:
        """Make the connection idle, or close it if there are enough idle connections."""
        if connection.is_closed:
            return
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def open(self, deadline: float, *, close_with_pool: bool = False) -> Connection:
        """Open a connection. With *close_with_pool*, the pool's ``close`` closes this connection. Raises
        ``BackendError``."""
        try:
            connection = open_connection(self.address, deadline)
        except CONNECTION_ERRORS as exc:
            raise explain(exc, self.address, self.timeout) from exc
        if close_with_pool:
            self._kept[connection] = None
        return connection

    def fetch_server_info(self, connection: Connection, deadline: float) -> tuple[Connection, ServerInfo]:
        """Ask the server for its ``stats``. Returns the connection and the server info. Raises ``BackendError``.

        If the connection breaks, a new connection is returned instead.
        """
        attempts: Attempts | None = None
        while True:
            try:
                ((line, body),) = connection.ask(b"stats\r\n", 1, deadline)
                if not line.startswith(b"OK "):
                    connection.close()
                    raise reply_error(line, self.address)
                connection.server_info = parse_server_info(body)
            except CONNECTION_ERRORS as exc:
                connection.close()
                attempts = attempts or Attempts(deadline)
                if not attempts.again(classify(exc)):
                    raise explain(exc, self.address, self.timeout) from exc
            else:
                return connection, connection.server_info
            connection = self.open(deadline)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Session]:
        """Lend a connection for a call that has several round trips and one deadline.

        Raises ``BackendError`` for connection errors.
        """
        session = Session(self, self.deadline())
        try:
            yield session
        except CONNECTION_ERRORS as exc:
            session.close()
            raise explain(exc, self.address, self.timeout) from exc
        except BackendError:
            session.close()  # after an unexpected reply, later replies may belong to earlier commands
            raise
        except MultiqError:
            raise
        except BaseException:
            session.close()
            raise
        finally:
            session.end()

    def ask(self, *commands: bytes, tube: str | None = None) -> list[Reply]:
        """Send commands that are safe to repeat, and return their replies. Raises ``BackendError``."""
        with self.borrowed() as session:
            return session.ask(*commands, tube=tube, is_safe=True)

    def close(self) -> None:
        """Close all connections, including those of consumers."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop().close()
        for reference in self._kept.keyrefs():  # a copy: other threads may open connections meanwhile
            connection = reference()
            if connection is not None:
                connection.hang_up()

    def start_over_in_child(self) -> None:
        """Forget the parent's connections. The child has closed its copies at the fork."""
        self._idle = []
        self._kept = weakref.WeakKeyDictionary()


class Session:
    """One call's use of one pooled connection."""

    def __init__(self, pool: Pool, deadline: float) -> None:
        self.pool = pool
        self.deadline = deadline
        self._connection: Connection | None = None
        self._attempts: Attempts | None = None

    @property
    def connection(self) -> Connection:
        """The connection, taken from the pool at the first use. Raises ``BackendError``."""
        if self._connection is None:
            self._connection = self.pool.take(self.deadline)
        return self._connection

    def ask(self, *commands: bytes, tube: str | None = None, is_safe: bool = False) -> list[Reply]:
        """Send *commands* in one packet, and return their replies. *tube*: the tube that is in use for these commands.

        With *is_safe*, the commands are sent again if the connection breaks. Raises ``OSError``, ``ProtocolError``,
        ``BackendError``.
        """
        while True:
            try:
                return self._ask(commands, tube)
            except CONNECTION_ERRORS as exc:
                if not is_safe or not self.reconnect_after(exc):
                    raise

    def reconnect_after(self, exc: Exception) -> bool:
        """Continue on a new connection after this error. Returns False if the call must not be attempted again.

        Raises ``BackendError``.
        """
        self._attempts = self._attempts or Attempts(self.deadline)
        if not self._attempts.again(classify(exc)):
            return False
        self.close()
        self._connection = self.pool.open(self.deadline)
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def use(self, tube: str) -> None:
        """Put *tube* in use, in a separate round trip. If the server refuses a ``use``, the previous tube stays in use.

        Raises ``OSError``, ``ProtocolError``, ``BackendError``.
        """
        if self.connection.used != tube:
            self.ask(tube=tube)

    def extend_deadline(self) -> None:
        """Begin a new deadline for the next packet. The duration of the whole call depends on the number of jobs."""
        self.deadline = self.pool.deadline()

    def server_info(self, *, is_safe: bool = False) -> ServerInfo:
        """Return the server info. It is requested once per connection.

        With *is_safe*, the request is repeated on a new connection if the connection breaks. Raises ``OSError``,
        ``ProtocolError``, ``BackendError``.
        """
        server_info = self.connection.server_info
        if server_info is None:
            ((line, body),) = self.ask(b"stats", is_safe=is_safe)
            if not line.startswith(b"OK "):
                raise reply_error(line, self.pool.address)
            server_info = self.connection.server_info = parse_server_info(body)
        return server_info

    def end(self) -> None:
        """Return the connection to the pool."""
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
            raise reply_error(used, self.pool.address)
        connection.used = tube
        return replies
