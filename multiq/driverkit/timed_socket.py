"""Sockets with a deadline and a size limit for a whole reply, for a client library that accepts a connected socket.

A timeout of such a library (PyMySQL, for example) limits only one ``recv``. A server that sends a byte now and then
could make a call last for ever. Such libraries read through ``socket.makefile``, which calls ``recv_into``, and write
with ``sendall``. In the classes here, both methods end at the deadline. Setting the socket's own timeout is a system
call. So both methods set it only if it is shorter than the remaining time, or more than a tenth of a second longer.
"""

from __future__ import annotations

import math
import socket
import ssl
from time import monotonic
from typing import Any

from .fork import forks
from .tls import handshake

_SLACK = 0.1  # seconds that a read may end later than the deadline
_LARGEST_REPLY = 640_000_000  # bytes; as in the Redis driver
_BUFFER = 65_536  # bytes: a claim of 100 jobs takes two reads then, and six with Python's default of 8,192


class DeadlineSocket(socket.socket):
    """The base class of both sockets, with the deadline and the size limit."""

    deadline = math.inf
    """The monotonic time at which all reads and writes end."""
    period: float | None = None
    """Each write sets the deadline to this many seconds after its start. None: writes do not set the deadline."""
    _received = 0  # bytes since the last write

    def bound(self) -> None:
        """Call before a read or write. Raises ``TimeoutError`` after the deadline."""
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        timeout = self.gettimeout()
        if timeout is None or not left <= timeout <= left + _SLACK:
            self.settimeout(math.ceil(left / _SLACK) * _SLACK)

    def begin(self) -> None:
        """Call before a write that begins a new request."""
        self._received = 0
        if self.period is not None:
            self.deadline = monotonic() + self.period
        self.bound()

    def makefile(self, mode: str = "r", buffering: int | None = None, **options: Any) -> Any:
        return super().makefile(mode, _BUFFER if buffering is None else buffering, **options)  # type: ignore[call-overload]

    def counted(self, size: int) -> int:
        """Call after a read of *size* bytes."""
        self._received += size
        if self._received > _LARGEST_REPLY:
            raise ConnectionError(f"a reply has more than {_LARGEST_REPLY:,} bytes")
        return size


_recv_into, _sendall = socket.socket.recv_into, socket.socket.sendall


class TimedSocket(DeadlineSocket):
    """A TCP socket without TLS, or a UNIX socket."""

    def recv_into(self, *args: Any) -> int:
        self.bound()
        return self.counted(_recv_into(self, *args))

    def sendall(self, *args: Any) -> None:
        self.begin()
        _sendall(self, *args)  # ``sendall`` applies its timeout to the whole write


class TimedTlsSocket(DeadlineSocket, ssl.SSLSocket):
    """A TLS socket."""

    def recv_into(self, *args: Any) -> int:
        self.bound()
        return self.counted(super().recv_into(*args))

    def sendall(self, *args: Any) -> None:
        self.begin()
        super().sendall(*args)

    def send(self, *args: Any) -> int:
        self.bound()  # the deadline also holds for ``sendall``, which sends in several writes
        return super().send(*args)


class TimedTlsContext:
    """Replaces the ``SSLContext`` of one connection, for a library that calls only ``wrap_socket``."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap_socket(self, sock: TimedSocket, server_hostname: str) -> TimedTlsSocket:
        """Do the handshake. It must end before the deadline of *sock*."""
        wrapped = handshake(self._context, sock, server_hostname, sock.deadline)
        assert isinstance(wrapped, TimedTlsSocket)  # noqa: S101 - the caller sets the context's sslsocket_class
        wrapped.deadline = sock.deadline
        return wrapped


def timed_socket(sock: socket.socket, deadline: float) -> TimedSocket:
    """Return a socket with a deadline for the connection of *sock*. *sock* itself cannot be used afterwards.

    A forked child closes its copy of the new socket.
    """
    made = TimedSocket(sock.family, sock.type, sock.proto, fileno=sock.detach())
    forks.close_in_child(made)
    made.deadline = deadline
    return made
