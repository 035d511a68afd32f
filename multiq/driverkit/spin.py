"""Spinning for a short time before a blocking read, for drivers that own their sockets.

The kernel wakes a thread that blocks until a socket is readable. On an idle core, this wake-up takes longer than a
small call to a server on the same machine. See docs/decisions/0018.
"""

from __future__ import annotations

import os
import socket
import ssl
from time import monotonic

_SPIN_FOR = 0.0001  # seconds: twice what a small call to a server on the same machine takes
_MOST_MISSES = 10  # in a row: at worst one call in a thousand spins in vain
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0) if hasattr(os, "sched_yield") else 0


class SpinReader:
    """Reads from one socket. Like the socket, it is for one thread at a time."""

    __slots__ = ("_misses", "_recv", "_skip_calls")

    def __init__(self, sock: socket.socket) -> None:
        self._recv = sock.recv
        self._misses = 0  # in a row
        can_spin = _DONT_WAIT and not isinstance(sock, ssl.SSLSocket)
        self._skip_calls = 0 if can_spin else float("inf")  # calls that return at once, without spinning

    def receive(self, size: int) -> bytes:
        """Return up to *size* bytes that arrive within 0.1 ms, else nothing: the caller then makes a blocking read.

        Between two reads the loop yields the core, so that other threads, above all the server, can run on it. A miss
        is a call without data: after each further miss in a row, twice as many calls return without spinning, because
        the server may be far away, or busy. Raises what ``recv`` raises, except ``BlockingIOError``. An empty result
        may also be the end of the connection, which the blocking read reports.
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
