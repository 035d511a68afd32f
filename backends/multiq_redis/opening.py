"""Opens connections within the call's deadline. redis-py does the login (``authentication.py``).

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
from typing import TYPE_CHECKING

import hiredis

from multiq.driverkit.net import connect
from multiq.driverkit.tls import handshake
from multiq.errors import BackendUnavailable

from .authentication import log_in
from .connection import OLDEST, Connection, pack
from .errors import TOO_MANY_CLIENTS

if TYPE_CHECKING:
    from multiq.driverkit.net import Address

    from .connection_settings import ConnectionSettings


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
        log_in(sock, address, settings, deadline)
        connection = Connection(sock)
        _read_version_and_role(connection, deadline)
    except BaseException:
        sock.close()
        raise
    return connection


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
