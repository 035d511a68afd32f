"""Logs in with redis-py: user, password or credential provider, client name and database.

redis-py sends its commands through a socket with the call's deadline. No error and no variable shows the password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hiredis

from multiq.driverkit.net import time_left

from .errors import CredentialsError, without_arguments
from .redis_py_import import redis_py

if TYPE_CHECKING:
    import socket

    from multiq.driverkit.net import Address

    from .connection_settings import ConnectionSettings

_ENDED = "the server closed the connection"


def log_in(sock: socket.socket, address: Address, settings: ConnectionSettings, deadline: float) -> None:
    """Log in. Raises the errors of ``open_connection``.

    No variable here holds the password, because tools that collect errors show the variables of each frame.
    """
    connection = _redis_py_connection(address, settings)
    link = _LoginSocket(sock, deadline)
    connection._sock = link  # noqa: SLF001 - the only private name; tests/drivers/redis/test_opening.py guards it
    failure = _attempt(connection, link, settings)
    if failure is not None:
        raise failure  # raised outside the except block, because redis-py's error may contain the password


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
