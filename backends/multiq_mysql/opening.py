"""Opens connections within the call's deadline, and logs in. PyMySQL does the login.

====================  ======================================================================
step                  how
====================  ======================================================================
name, TCP             ``multiq.driverkit``: a deadline for the resolver and all addresses
TLS                   PyMySQL asks for it, over a socket with a deadline; tls.py checks it
password              PyMySQL's authentication plugins; tls.py refuses to reveal the password
session's settings    the caller's ``init_command`` (session_settings.py, ``Pool.open``)
====================  ======================================================================
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.constants.CR import CR_CONN_HOST_ERROR

from multiq.driverkit.net import connect
from multiq.driverkit.timed_socket import TimedTlsContext, timed_socket
from multiq.errors import BackendUnavailable, MultiqError

from .errors import malformed
from .pymysql_private import limit_each_call
from .tls import REFUSED_PLUGINS, GuardedConnection, may_send_password, require_tls, takes_keys

if TYPE_CHECKING:
    import socket

    from pymysql.connections import Connection

    from .dsn import Dsn


def open_connection(dsn: Dsn, timeout: float, *, period: float | None = None, **more: Any) -> Connection[Any]:
    """Return a new connection that is connected and logged in within *timeout* seconds. *more*: arguments for
    ``pymysql.connect``.

    After the login, each statement with its whole reply may take at most *period* seconds. Default of *period*:
    *timeout*. Raises ``UrlInvalid`` for a password that cannot be read, ``pymysql.MySQLError``, and ``OSError`` for
    TLS.
    """
    deadline = time.monotonic() + timeout
    connection = _unconnected(dsn, timeout, more)
    sock = timed_socket(_socket(dsn, deadline), deadline)
    try:
        connection.connect(sock)
    except (pymysql.MySQLError, OSError, MultiqError):
        raise
    except RuntimeError as exc:  # PyMySQL lacks a package for this authentication plugin.
        raise BackendUnavailable(f"{dsn.place} cannot be logged in to: {exc}") from exc
    except Exception as exc:  # A malformed greeting may raise any exception in PyMySQL.
        raise malformed(exc) from exc
    limit_each_call(connection, timeout if period is None else period)
    require_tls(connection, dsn)
    return connection


def _unconnected(dsn: Dsn, timeout: float, more: dict[str, Any]) -> GuardedConnection:
    # Without ssl_disabled or a context, PyMySQL would try TLS without being asked. It would check no certificate, and
    # read all certificate authorities for each connection.
    tls: dict[str, Any] = {"ssl_disabled": True} if dsn.tls is None else {"ssl": dsn.tls}
    connection = GuardedConnection(
        **{
            "host": dsn.host,
            "port": dsn.port,
            "unix_socket": dsn.unix_socket,
            "user": dsn.username,
            "password": dsn.password.encode(),  # PyMySQL would encode a string as Latin-1
            "database": dsn.database,
            "charset": "utf8mb4",
            "defer_connect": True,
            "auth_plugin_map": {} if may_send_password(dsn) else REFUSED_PLUGINS,
            "connect_timeout": timeout,
            "server_public_key": dsn.server_public_key,
            **tls,
            **more,
        }
    )
    connection.may_send_password = may_send_password(dsn)
    connection.takes_keys = takes_keys(dsn)
    inside: Any = connection
    inside._secure = dsn.unix_socket is not None  # noqa: SLF001 - as PyMySQL does for a socket that it opens itself
    if dsn.tls is not None:
        inside.ctx = TimedTlsContext(dsn.tls)
    return connection


def _socket(dsn: Dsn, deadline: float) -> socket.socket:
    """Return a connected socket. PyMySQL itself would leak a socket that fails to connect, and would resolve names
    without a time limit."""
    address = (dsn.host, dsn.port) if dsn.host is not None else str(dsn.unix_socket)
    try:
        return connect(address, deadline)
    except TimeoutError:
        raise
    except OSError as exc:
        raise pymysql.OperationalError(CR_CONN_HOST_ERROR, f"cannot connect to {dsn.place}: {exc}") from exc
