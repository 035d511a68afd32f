"""Polls a socket for a short time (*spins*) before a blocking read. For drivers that own their sockets.

If a thread blocks until a socket is readable, the kernel must wake it. On an idle core, this wake-up takes longer than
a small call to a server on the same machine. See docs/decisions/0018.
"""

from __future__ import annotations

import os
import socket
import ssl
from time import monotonic

_SPIN_FOR = 0.0001  # seconds; twice the duration of a small call to a server on the same machine
_MOST_MISSES = 10  # misses in a row; after these, only one call in a thousand spins
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0) if hasattr(os, "sched_yield") else 0


class SpinReader:
    """Reads from one socket. Only one thread at a time may use it."""

    __slots__ = ("_misses", "_recv", "_skip_calls")

    def __init__(self, sock: socket.socket) -> None:
        self._recv = sock.recv
        self._misses = 0  # in a row
        can_spin = _DONT_WAIT and not isinstance(sock, ssl.SSLSocket)
        self._skip_calls = 0 if can_spin else float("inf")  # calls that return immediately, without spinning

    def receive(self, size: int) -> bytes:
        """Return up to *size* bytes that arrive within 0.1 ms. Returns nothing if no data came, or at the connection's
        end.

        If nothing is returned, the caller must make a blocking read, which also reports the end of the connection.
        Between two reads the loop yields the core, so that other threads, above all the server, can run on it. A *miss*
        is a spin without data: the server is far away or busy. With each further miss in a row, the number of calls
        that return immediately, without spinning, doubles. Raises the errors of ``recv``, except ``BlockingIOError``.
        """
        if self._skip_calls:
            self._skip_calls -= 1
            return b""
        recv, until = self._recv, monotonic() + _SPIN_FOR
        while True:
            try:
                data = recv(size, _DONT_WAIT)
            except BlockingIOError:
                if monotonic() > until:
                    break
                os.sched_yield()
            else:
                self._misses = 0
                return data
        self._misses = min(self._misses + 1, _MOST_MISSES)
        self._skip_calls = 2**self._misses
        return b""
