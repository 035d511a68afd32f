"""Staying awake for a reply that comes soon, for drivers that own their sockets.

Who sleeps until a socket can be read is woken by the kernel, and on an idle core that takes longer than a server on
the same machine takes for a small call. See docs/decisions/0018.
"""

from __future__ import annotations

import os
import socket
import ssl
from time import monotonic

_AWAKE = 0.0001  # seconds: twice what a small call to a server on the same machine takes
_MOST_MISSES = 10  # in a row: at worst one call in a thousand stays awake for nothing
_NOW = getattr(socket, "MSG_DONTWAIT", 0) if hasattr(os, "sched_yield") else 0


class Vigil:
    """One socket's. It is for one thread at a time, as the socket is."""

    __slots__ = ("_asleep_for", "_misses", "_recv")

    def __init__(self, sock: socket.socket) -> None:
        self._recv = sock.recv
        self._misses = 0  # in a row
        can_be_held = _NOW and not isinstance(sock, ssl.SSLSocket)
        self._asleep_for = 0 if can_be_held else float("inf")  # calls that go to sleep at once

    def receive(self, size: int) -> bytes:
        """Up to *size* bytes, if they come within a tenth of a millisecond; else nothing: go to sleep for them.

        In between, others get the core, the server above all. Where replies do not come in time, as the server is
        far, or busy, or at something large, this is tried more and more seldom. Raises what ``recv`` raises but
        ``BlockingIOError``; nothing may also be the end of the connection, which ``recv`` will tell again.
        """
        if self._asleep_for:
            self._asleep_for -= 1
            return b""
        recv, until = self._recv, monotonic() + _AWAKE
        while True:
            try:
                data = recv(size, _NOW)
            except BlockingIOError:
                if monotonic() > until:
                    break
                os.sched_yield()
            else:
                self._misses = 0
                return data
        self._misses = min(self._misses + 1, _MOST_MISSES)
        self._asleep_for = 2**self._misses
        return b""
