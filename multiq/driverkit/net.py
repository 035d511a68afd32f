"""Connects to a server within a deadline. The deadline includes the name resolution. This is for drivers that own their
sockets."""

from __future__ import annotations

import socket
import time
from typing import Any, TypeAlias

from .fork import forks
from .resolver import resolve

Address: TypeAlias = "tuple[str, int] | str"
"""Host and port, or the path of a UNIX socket."""


def connect(address: Address, deadline: float) -> socket.socket:
    """Return a socket that is connected to the first address of the host that accepts the connection. A forked child
    closes its copy of the socket.

    *deadline* is a value of ``time.monotonic``. The caller must set the socket's timeout. Raises ``OSError``,
    ``TimeoutError`` at the deadline, and ``NameTimeoutError`` if the host's addresses were not found by then.
    """
    if isinstance(address, str):
        return _connected(socket.AF_UNIX, socket.SOCK_STREAM, 0, address, deadline)
    host, port = address
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, resolved in resolve(host, port, deadline):
        try:
            sock = _connected(family, kind, protocol, resolved, deadline)
        except OSError as exc:
            failure = exc
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    raise failure


def time_left(deadline: float) -> float:
    """Return the seconds until *deadline*. Raises ``TimeoutError`` if it has passed.

    The result is never 0, because a timeout of 0 would make a socket non-blocking.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    return left


def _connected(family: int, kind: int, protocol: int, address: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    forks.close_in_child(sock)
    try:
        sock.settimeout(time_left(deadline))
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
