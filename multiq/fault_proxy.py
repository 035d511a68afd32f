"""A TCP proxy that breaks connections at a chosen byte.

``arm`` sets a fault. The fault happens when clients have sent the bytes ``after`` for the ``nth`` time. If ``after`` is
empty, the fault happens at the next data. The fault happens up to ``times`` times, by default once. ``mode`` changes
how all replies are forwarded, until another mode is set. The proxy works with any protocol over TCP.

    with Proxy(server_address) as proxy:
        client = connect(proxy.port)
        proxy.arm(CutReply(at=5, after=b"GET")) # the reply to the next GET ends after five bytes
        proxy.mode = Slice() # from now on, replies come byte by byte
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

Address: TypeAlias = "tuple[str, int] | str"  # host and port, or the path of a UNIX socket

CARRY_OUT = 10.0  # seconds that the proxy waits, at most, for a server to carry out a request whose reply is cut

_HOST = "127.0.0.1"
_CHUNK = 1 << 16
_RST = struct.pack("ii", 1, 0)  # SO_LINGER on, with 0 seconds: a close sends a reset


@dataclass(frozen=True)
class Fault:
    """A fault that happens when clients have sent *after* for the *nth* time.

    The fault happens up to *times* times. After each fault, the proxy counts *after* from zero again.
    """

    at: int = 0
    """The number of bytes that are forwarded before the cut. For ``CutRequest``, *at* counts bytes of a request. For
    ``CutReply``, *at* counts bytes of a reply.
    """
    after: bytes = b""
    nth: int = 1
    times: int = 1
    rst: bool = False
    """Whether the client sees a reset (RST) instead of an orderly end (FIN)."""


class CutRequest(Fault):
    """Forwards requests up to the match of *after* and *at* more bytes. After these bytes, the proxy ends both
    connections."""


class CutReply(Fault):
    """Lets the server carry out the whole request, and forwards only *at* bytes of the reply.

    A server may answer the first part of a request before it has carried out the last part. The server may stop if it
    cannot send an answer. For this reason, after *at* bytes the proxy still forwards everything that the client has
    sent. Then the proxy ends the server's input. The proxy reads and discards all further replies. The proxy closes the
    client's connection when the server has closed its own, or after ``CARRY_OUT`` seconds.
    """


def places(size: int, every_byte: int = 1000) -> list[int]:
    """The positions at which to cut *size* bytes.

    If *size* is at most *every_byte*, the result has every position. If *size* is larger, each position in the first
    and in the last *every_byte* / 3 bytes is included. About *every_byte* / 3 evenly spread positions lie between these
    two parts.
    """
    if size <= every_byte:
        return list(range(size))
    ends = every_byte // 3
    return [*range(ends), *range(ends, size - ends, max(1, (size - 2 * ends) // ends)), *range(size - ends, size)]


@dataclass(frozen=True)
class Pass:
    """Forwards everything unchanged."""


@dataclass(frozen=True)
class Hole:
    """Accepts connections, and discards all data."""


@dataclass(frozen=True)
class Latency:
    """Delays each piece of a reply by *seconds*."""

    seconds: float


@dataclass(frozen=True)
class Slice:
    """Sends replies in pieces of *size* bytes."""

    size: int = 1


@dataclass(frozen=True)
class Throttle:
    """Sends replies at no more than *rate* bytes a second on each connection."""

    rate: int


Mode: TypeAlias = Pass | Hole | Latency | Slice | Throttle


class _Ended(Exception):
    """The connection was cut."""


class _Link:
    """A client's connection to the proxy, with the proxy's connection to the server for this client."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.is_frozen = False
        self.is_ending = False
        self.cut: CutReply | None = None
        """The fault that ends this connection when the server has carried out the requests."""
        self.ended = threading.Event()

    def finish(self, cut: CutReply) -> None:
        """Forward only what the client has sent until now, and then end the server's input."""
        self.cut = cut
        self.client.shutdown(socket.SHUT_RD)  # the thread that reads requests gets the data received so far, then EOF

    def end(self, *, rst: bool = False) -> None:
        """Shut both connections down. The shutdown wakes both threads of this client's connection. The thread that ends
        last closes the sockets.

        Closing the sockets in this method would not wake a thread in ``recv``.
        """
        if self.is_ending:
            return
        self.is_ending = True
        with contextlib.suppress(OSError):
            if rst:
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            self.client.shutdown(socket.SHUT_RD if rst else socket.SHUT_RDWR)  # SHUT_WR would send a FIN before the RST
        if not self.is_frozen:
            self.end_server()
        self.ended.set()

    def end_server(self) -> None:
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy with its own port in front of the server at *upstream*."""

    def __init__(self, upstream: Address) -> None:
        self.mode: Mode = Pass()
        self.host = _HOST
        self.sent = 0
        """The number of bytes that clients have sent."""
        self.requests = 0
        """The number of reads that returned data from clients. Normally, one request arrives in one or more reads. If
        one packet has several requests, one read may return all of them.
        """
        self.replied = 0
        """The number of bytes in the server's replies. The count includes bytes that were not forwarded."""
        self.accepted = 0
        """The number of connections accepted so far."""
        self.happened = 0
        """The number of times that an armed fault has happened so far."""
        self._upstream = upstream
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._frozen: list[_Link] = []
        self._fault: Fault | None = None
        self._matches_left = 0
        self._bytes_left = 0
        self._tail = b""
        self._held = self._bound(0)  # reserves the port while the proxy does not listen on it
        self.port: int = self._held.getsockname()[1]
        self._listener = self._listen()

    @property
    def is_armed(self) -> bool:
        return self._fault is not None

    def arm(self, fault: Fault) -> None:
        """Arm *fault*. Any fault that was armed before is dropped."""
        with self._lock:
            self._arm(fault)

    def disarm(self) -> None:
        with self._lock:
            self._fault = None

    def refuse(self) -> None:
        """Refuse new connections from now on, and end the open connections."""
        self._stop_listening()
        self.cut()

    def accept(self) -> None:
        """Accept connections again after ``refuse``, on the same port."""
        self._listener = self._listen()

    def cut(self, *, rst: bool = False) -> int:
        """End all connections now. Returns the number of connections."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.end(rst=rst)
        return len(links)

    def freeze(self) -> int:
        """Freeze the open connections. From this call on, the proxy forwards no data of the frozen connections, and
        hides their ends. New connections work.

        Returns the number of frozen connections.
        """
        with self._lock:
            for link in self._links:
                link.is_frozen = True
                self._frozen.append(link)
            return len(self._links)

    def cut_server(self) -> None:
        """End all frozen connections on the server's side only. The clients do not notice that the connections have
        ended."""
        while self._frozen:
            self._frozen.pop().end_server()

    def close(self) -> None:
        self.refuse()
        self.cut_server()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- connections ---

    @staticmethod
    def _bound(port: int) -> socket.socket:
        sock = socket.socket()
        try:
            if hasattr(socket, "SO_REUSEPORT"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((_HOST, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def _listen(self) -> socket.socket:
        listener = self._bound(self.port)
        listener.listen(64)
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return listener

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # the listener was closed
            try:
                link = _Link(client, self._connect())
            except OSError:
                client.close()
                continue
            with self._lock:
                self.accepted += 1
                self._links.add(link)
            for work in (self._requests, self._replies):
                threading.Thread(target=self._relay, args=(link, work), daemon=True).start()

    def _connect(self) -> socket.socket:
        if isinstance(self._upstream, str):
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._upstream)
        else:
            server = socket.create_connection(self._upstream)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _relay(self, link: _Link, work: Callable[[_Link], None]) -> None:
        with contextlib.suppress(OSError, _Ended):
            link.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            work(link)
        link.end(rst=link.cut is not None and link.cut.rst)
        with self._lock:
            if link in self._links:
                self._links.remove(link)
                return
        link.client.close()  # only the thread that ends second reaches this line
        link.server.close()

    # --- forwarding ---

    def _requests(self, link: _Link) -> None:
        while data := link.client.recv(_CHUNK):
            self.sent += len(data)
            self.requests += 1
            if isinstance(self.mode, Hole) or link.is_frozen:
                continue
            passed, fault = self._of_request(data) if link.cut is None else (data, None)
            if passed:
                link.server.sendall(passed)
            if fault is not None:
                link.end(rst=fault.rst)
                raise _Ended
        if link.cut is not None and not link.is_frozen:
            link.server.shutdown(socket.SHUT_WR)
            link.ended.wait(CARRY_OUT)

    def _replies(self, link: _Link) -> None:
        while data := link.server.recv(_CHUNK):
            self.replied += len(data)
            if link.cut is not None:
                continue
            passed, fault = self._of_reply(data)
            if link.is_frozen:
                continue
            self._deliver(link.client, passed)
            if fault is not None:
                link.finish(fault)
        while link.is_frozen and not link.is_ending:
            time.sleep(0.01)  # the client must not see that the server has closed

    def _deliver(self, client: socket.socket, data: bytes) -> None:
        mode = self.mode
        if isinstance(mode, Hole):
            return
        if isinstance(mode, Latency):
            time.sleep(mode.seconds)
        if isinstance(mode, Throttle):
            piece = max(1, mode.rate // 100)
            for start in range(0, len(data), piece):
                client.sendall(data[start : start + piece])
                time.sleep(len(data[start : start + piece]) / mode.rate)
            return
        size = mode.size if isinstance(mode, Slice) else _CHUNK
        for start in range(0, len(data), size):
            client.sendall(data[start : start + size])

    def _of_request(self, data: bytes) -> tuple[bytes, Fault | None]:
        """Return the part of *data* to forward, and the fault that *data* triggers."""
        with self._lock:
            fault = self._fault
            if fault is None:
                return data, None
            beyond = self._match(data, fault)
            if beyond is None or not isinstance(fault, CutRequest):
                return data, None
            if len(data) - beyond <= self._bytes_left:
                self._bytes_left -= len(data) - beyond
                return data, None
            passed = data[: beyond + self._bytes_left]
            self._happened(fault)
            return passed, fault

    def _of_reply(self, data: bytes) -> tuple[bytes, CutReply | None]:
        with self._lock:
            fault = self._fault
            if not isinstance(fault, CutReply) or self._matches_left:
                return data, None
            if len(data) <= self._bytes_left:
                self._bytes_left -= len(data)
                return data, None
            passed = data[: self._bytes_left]
            self._happened(fault)
            return passed, fault

    def _arm(self, fault: Fault) -> None:
        self._fault, self._tail = fault, b""
        self._matches_left = fault.nth if fault.after else 0
        self._bytes_left = fault.at

    def _happened(self, fault: Fault) -> None:
        self.happened += 1
        if fault.times > 1:
            self._arm(replace(fault, times=fault.times - 1))
        else:
            self._fault = None

    def _match(self, data: bytes, fault: Fault) -> int | None:
        """The position in *data* behind the *nth* match of ``fault.after``. 0 means that the *nth* match ended before
        *data*. The position is None if there has been no *nth* match yet.
        """
        if not self._matches_left:
            return 0
        known, text = len(self._tail), self._tail + data
        end = 0
        while self._matches_left:
            found = text.find(fault.after, end)
            if found < 0:
                keep = len(fault.after) - 1
                self._tail = text[max(end, len(text) - keep) :] if keep else b""
                return None
            end = found + len(fault.after)
            self._matches_left -= 1
        return end - known
