"""The way to a server, for drivers that own their sockets: names, addresses and connecting, all within a deadline."""

from __future__ import annotations

import socket
import time
from typing import Any, TypeAlias

from .resolver import addresses

Address: TypeAlias = "tuple[str, int] | str"
"""Host and port, or the path of a UNIX socket."""


def connect(address: Address, deadline: float) -> socket.socket:
    """A connected socket, by the first of the host's addresses that answers. *deadline* is ``time.monotonic``'s.

    Its timeout is what was left then: set the one that is wanted. Raises ``OSError``, ``TimeoutError`` at the
    deadline, and ``NameTimeoutError`` if that was reached before the host's addresses were found.
    """
    if isinstance(address, str):
        return _connected(socket.AF_UNIX, socket.SOCK_STREAM, 0, address, deadline)
    host, port = address
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, place in addresses(host, port, deadline):
        try:
            sock = _connected(family, kind, protocol, place, deadline)
        except OSError as exc:
            failure = exc
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return sock
    raise failure


def time_left(deadline: float) -> float:
    """Seconds until *deadline*. Raises ``TimeoutError`` if there are none: a socket's timeout of 0 has a meaning."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the server did not answer in time")
    return left


def _connected(family: int, kind: int, protocol: int, place: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(time_left(deadline))
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock
