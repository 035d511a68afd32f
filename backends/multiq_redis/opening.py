"""Opens connections within the call's deadline. redis-py does the login.

====================  ======================================================================  =======================
step                  how                                                                     round trips
====================  ======================================================================  =======================
name, TCP             ``multiq.driverkit``: a deadline for the resolver and all addresses     1 (TCP's own)
TLS                   ``multiq.driverkit.tls``: a deadline, and safe beside forks             TLS' own
password              redis-py's ``AUTH``; a credential provider is asked each time           1, if there is one
client name           redis-py's ``CLIENT SETNAME``                                           1, if there is one
database              redis-py's ``SELECT``                                                   1, but for database 0
version and role      ``HELLO 2``                                                             1
====================  ======================================================================  =======================

redis-py's own ``connect()`` is not used, because it

- has no deadline for name resolution, and none for all addresses of a name together;
- makes a new TLS context for each connection, which takes 28 ms of CPU time;
- makes its TLS handshake in a way that can hang a child, if another thread forks meanwhile.

See docs/decisions/0006.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import hiredis

from multiq.driverkit.net import connect, time_left
from multiq.driverkit.tls import handshake
from multiq.errors import BackendUnavailable

from .connection import OLDEST, Connection, pack
from .errors import TOO_MANY_CLIENTS, CredentialsError, without_arguments
from .redis_py_import import redis_py

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .connection_settings import ConnectionSettings

_ENDED = "the server closed the connection"


def open_connection(address: Address, settings: ConnectionSettings, deadline: float) -> Connection:
    """Connect and log in.

    Raises the errors of ``Connection.ask``. Raises ``BackendUnavailable`` if the server is too old.
    """
    sock = connect(address, deadline)
    try:
        if isinstance(address, tuple):
            for option, value in (settings.keepalive or {}).items():
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            if settings.tls is not None:
                sock = handshake(settings.tls, sock, address[0], deadline)
        _log_in(sock, address, settings, deadline)
        connection = Connection(sock)
        _read_version_and_role(connection, deadline)
    except BaseException:
        sock.close()
        raise
    return connection


class _LoginSocket:
    """redis-py uses this object as its socket during the login.

    All sends and receives have one deadline. redis-py itself would give each of them its own timeout. A receive takes
    one byte, so that redis-py reads only the replies to its own commands. Only the owner of the socket closes the
    socket.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self.failure: OSError | None = None
        """The error that ended the connection, or None."""
        self.reply = b""
        """The bytes received after the last command."""

    def sendall(self, data: bytes) -> None:
        self.reply = b""
        try:
            self._sock.settimeout(time_left(self._deadline))
            self._sock.sendall(data)
        except OSError as exc:
            self.failure = exc
            raise

    def recv(self, _size: int) -> bytes:
        try:
            self._sock.settimeout(time_left(self._deadline))
            data = self._sock.recv(1)
        except OSError as exc:
            self.failure = exc
            raise
        if not data:
            self.failure = ConnectionResetError(_ENDED)
        self.reply += data
        return data

    def recv_into(self, buffer: bytearray) -> int:
        data = self.recv(1)
        buffer[: len(data)] = data
        return len(data)

    def settimeout(self, seconds: float | None) -> None:
        """Ignored, because the deadline counts."""

    def shutdown(self, how: int) -> None:
        """Ignored, like ``close``."""

    def close(self) -> None:
        """Ignored, because this socket must stay open. redis-py closes a connection when Python collects it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _log_in(sock: socket.socket, address: Address, settings: ConnectionSettings, deadline: float) -> None:
    """Log in. Raises the errors of ``open_connection``.

    No variable here holds the password, because tools that collect errors show the variables of each frame.
    """
    connection = _redis_py_connection(address, settings)
    link = _LoginSocket(sock, deadline)
    connection._sock = link  # noqa: SLF001 - the only private name; tests/drivers/redis/test_opening.py guards it
    failure = _attempt(connection, link, settings)
    if failure is not None:
        raise failure  # raised outside the except block, because redis-py's error may contain the password


def _redis_py_connection(address: Address, settings: ConnectionSettings) -> Any:
    """Makes an unconnected connection object of redis-py. Raises ``CredentialsError``, ``UrlInvalid``."""
    redis = redis_py()
    username, password = _credentials(settings)
    options = {
        "username": username,
        "password": password,
        "db": settings.database,
        "client_name": settings.client_name,
        "protocol": 2,
        **_without_setinfo(redis),
    }
    if isinstance(address, str):
        return redis.UnixDomainSocketConnection(path=address, **options)
    return redis.Connection(host=address[0], port=address[1], **options)


def _without_setinfo(redis: Any) -> dict[str, None]:
    """Arguments that keep a connection of redis-py from sending CLIENT SETINFO, which would take two round trips."""
    if hasattr(redis, "DriverInfo"):  # in late releases of redis-py 7; with None, no metadata is read
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}


def _attempt(connection: Any, link: _LoginSocket, settings: ConnectionSettings) -> Exception | None:
    """Returns the error to raise, or None if the login succeeded."""
    redis = redis_py()
    try:
        (settings.connect_func or type(connection).on_connect)(connection)
    except (redis.DataError, UnicodeEncodeError) as exc:
        why = f"{exc}" if isinstance(exc, redis.DataError) else "UTF-8 cannot encode one of them"
        return CredentialsError(f"the user, the password or the client name cannot be sent: {why}")
    except (redis.RedisError, UnicodeDecodeError) as exc:
        if link.failure is not None:
            return link.failure
        if link.reply.startswith(b"-"):
            return hiredis.ReplyError(without_arguments(link.reply[1:].decode(errors="replace").strip()))
        return hiredis.ProtocolError(f"{exc}" if isinstance(exc, redis.RedisError) else "an error that is not UTF-8")
    except Exception as exc:
        if settings.connect_func is None:
            raise
        return _with_cause(CredentialsError(f"redis_connect_func raised {type(exc).__name__}"), exc)
    return None


def _with_cause(error: CredentialsError, cause: Exception) -> CredentialsError:
    error.__cause__ = cause
    return error


def _credentials(settings: ConnectionSettings) -> tuple[Any, Any]:
    """Returns the user and the password. Raises ``CredentialsError``, ``UrlInvalid``."""
    provider = settings.credential_provider
    if provider is None:
        return settings.username, settings.password
    name = type(provider).__name__
    try:
        given = provider.get_credentials()
    except Exception as exc:
        raise CredentialsError(f"the credential provider {name} raised {type(exc).__name__}") from exc
    if not isinstance(given, tuple) or not 1 <= len(given) <= 2:
        given = type(given).__name__  # the type, not the value, because the value may contain the password
        raise CredentialsError(
            f"the credential provider {name} must return (user, password) or (password,), got {given}"
        )
    return given if len(given) == 2 else (None, given[0])


def _read_version_and_role(connection: Connection, deadline: float) -> None:
    """Ask for the server's version and role. Raises ``BackendUnavailable`` if the server is too old."""
    try:
        reply = connection.ask(pack(("HELLO", 2)), deadline)
    except hiredis.ReplyError as exc:
        if str(exc).startswith("NOAUTH") or TOO_MANY_CLIENTS in str(exc):
            raise
        reply = None  # an ACL or a proxy refuses HELLO; then the first script shows whether the server is new enough
    if reply is None:
        return
    if not isinstance(reply, list):  # this is a surplus reply to an earlier command, so later replies would be mixed up
        raise hiredis.ProtocolError("the reply to HELLO must be a list")
    info = dict(zip(reply[::2], reply[1::2], strict=False))
    connection.version = _version(info.get(b"version", b""))
    connection.is_replica = info.get(b"role") == b"replica"
    if connection.version < OLDEST:
        text = ".".join(map(str, connection.version))
        raise BackendUnavailable(f"the server is Redis {text}, but multiq needs 6.2 or newer: upgrade it")


def _version(text: bytes) -> tuple[int, ...]:
    parts = text.split(b".")
    return tuple(int(part) for part in parts if part.isdigit()) or OLDEST
