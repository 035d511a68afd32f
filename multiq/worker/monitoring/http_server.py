"""Serves health and metrics over HTTP: three pages for probes and for Prometheus.

The sidecar's process serves the pages, so tasks cannot delay them. Only the method, the path and the ``Host`` header of
a request are used. There is no login, because the pages contain no arguments of jobs. The default address is reachable
only from this host.

One thread serves all connections, and other clients must not keep a probe from being answered. So the request and the
reply of each connection must be complete within a few seconds. At the limit of connections, a new connection replaces
the oldest one. A second thread makes the metrics, because they need calls to the backend. See decision 35 in
``docs/decisions``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import ipaddress
import logging
import resource
import selectors
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from multiq.errors import ExtraNotInstalled, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .health import Health

_log = logging.getLogger("multiq.sidecar")

_LOOPBACK = "127.0.0.1"
#: Seconds to wait for the address. After a reload, the previous sidecar takes a moment to release it.
_BIND_PATIENCE = 3.0
_RETRY = 0.05  # seconds
_CONNECTIONS = 100
_SHARE_OF_FILES = 4  # connections may use 1 / _SHARE_OF_FILES of the process's file limit
_BACKLOG = 4096  # the system's maximum, because a client retries only after a second if the backlog is full
_ACCEPTED_AT_ONCE = 64
_CONNECTION_SECONDS = 3.0  # from the start of a connection to the last byte of its reply; probes take milliseconds
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HEADER_ROOM = 8192  # bytes
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
#: Zones in which an attacker cannot register a name. Any other name may come from DNS rebinding by a web page.
_PRIVATE_ZONES = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".test")


class Address(NamedTuple):
    host: str
    port: int


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` for this host only. Raises ``OptionInvalid``."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.netloc != text or "@" in text:
        raise OptionInvalid(f"http must be an address, got {text!r}: write HOST:PORT, or :PORT for this host only")
    return Address(parts.hostname or _LOOPBACK, port)


def check_libraries() -> None:
    try:
        importlib.import_module("prometheus_client")
    except ImportError as exc:
        name = exc.name or "prometheus_client"
        raise ExtraNotInstalled(f"http needs {name}: pip install 'multiq[metrics]'") from exc


def listen(address: Address) -> socket.socket:
    """Return a socket that listens on *address*. Raises ``OptionInvalid``."""
    give_up_at = time.monotonic() + _BIND_PATIENCE
    while True:
        try:
            return socket.create_server(
                address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                raise OptionInvalid(f"http {address.host}:{address.port} cannot be bound: {exc}") from exc
            time.sleep(_RETRY)


class Reply(NamedTuple):
    status: str
    kind: str
    body: bytes

    def packed(self, *, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status}\r\nContent-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
            "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (self.body if with_body else b"")


class Request(NamedTuple):
    method: str
    path: str
    host: str | None


class Pages:
    """The three pages. *names* are accepted as names of this server, in addition to its addresses.

    If *health* is None, there is no worker, and the pages for probes only show that this process answers.
    """

    def __init__(self, health: Health | None, metrics: Callable[[], bytes], names: tuple[str, ...] = ()) -> None:
        self._health = health
        self._metrics = metrics
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def refuse(self, request: Request) -> Reply | None:
        """Return the reply that refuses a request, or None if the request is valid."""
        if request.host is not None and not self._is_own(request.host):
            return Reply("421 Misdirected Request", _TEXT, b"the Host header must name this server: use its address\n")
        if request.path not in {"/healthz", "/readyz", "/metrics"}:
            return Reply("404 Not Found", _TEXT, b"the pages are /healthz, /readyz and /metrics\n")
        if request.method not in {"GET", "HEAD"}:
            return Reply("405 Method Not Allowed", _TEXT, b"the method must be GET or HEAD\n")
        return None

    def health(self, path: str) -> Reply:
        if self._health is None:
            return Reply("200 OK", _TEXT, b"ok\n")
        report = self._health.report()
        is_fine = report.is_well if path == "/healthz" else report.is_ready
        status = "200 OK" if is_fine else "503 Service Unavailable"
        return Reply(status, "application/json", msgspec.json.encode(report) + b"\n")

    def metrics(self) -> Reply:
        return Reply("200 OK", _TEXT, self._metrics())

    def _is_own(self, host: str) -> bool:
        """Whether *host* is a name of this server. With DNS rebinding, ``Host`` has the name of an attacker's web
        page."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower().removesuffix(".")
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return bool(name) and (
            "." not in name or name in self._names or name.endswith((*_PRIVATE_ZONES, ".cluster.local"))
        )


class _Connection:
    def __init__(self, sock: socket.socket, *, is_local: bool, seconds: float) -> None:
        self.sock = sock
        self.is_local = is_local
        self.ends_at = time.monotonic() + seconds
        self.received = b""
        self.reply = memoryview(b"")
        self.is_request_complete = False
        """If True, all further bytes from the client are discarded."""
        self.is_reply_sent = False
        """If True, the connection stays open until the client closes it, because an early close could lose the
        reply."""


class Server:
    """Serves *pages* on *listener*, in its own threads.

    *seconds*: the time of each connection, from its start to the last byte of the reply. Default: 3.
    """

    def __init__(self, listener: socket.socket, pages: Pages, *, seconds: float | None = None) -> None:
        host, port, *_ = listener.getsockname()
        self._listener = listener
        self._pages = pages
        self._seconds = _CONNECTION_SECONDS if seconds is None else seconds
        self._connections: dict[socket.socket, _Connection] = {}  # ordered by age, the oldest first
        self._metrics_requests: deque[tuple[_Connection, bool]] = deque()  # connections that wait for metrics
        self._metrics_requested = threading.Semaphore(0)
        self._metrics_replies: deque[tuple[_Connection, bytes]] = deque()
        self._is_closed = False
        self._max_connections = _connection_limit()
        self._woken, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (listener, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="multiq-http", daemon=True)
        self._thread.start()
        threading.Thread(target=self._make_metrics, name="multiq-http-metrics", daemon=True).start()
        _log.info("health and metrics are on http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def close(self) -> None:
        """Release the address immediately.

        If this method only closed the listener, the address would stay in use until the polling thread wakes up. So the
        method shuts the listener down.
        """
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._wake()
        self._metrics_requested.release()
        self._thread.join(_CONNECTION_SECONDS)

    # --- the thread of all connections ---

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._poll()
        finally:
            for connection in list(self._connections.values()):
                self._close_connection(connection)
            self._selector.close()
            for sock in (self._listener, self._woken, self._waker):
                sock.close()

    def _poll(self) -> None:
        # All connections get the same number of seconds, so the oldest connection ends first.
        ends_at = next((connection.ends_at for connection in self._connections.values()), None)
        timeout = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._send_metrics()
            else:
                connection = self._connections.get(key.fileobj)  # type: ignore[call-overload]  # sockets are all that is registered
                if connection is not None:  # None: a new connection has replaced it in this round
                    self._proceed(connection, events)
        now = time.monotonic()
        for connection in list(self._expired(now)):
            self._close_connection(connection)

    def _expired(self, now: float) -> Iterator[_Connection]:
        for connection in self._connections.values():
            if connection.ends_at > now:
                return
            yield connection

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, (address, *_) = self._listener.accept()
            except BlockingIOError:  # no connection is waiting
                return
            except OSError as exc:
                if exc.errno not in _NO_FILES:
                    return
                if not self._close_oldest(
                    even_local=True
                ):  # the listener stays readable, so the thread would spin without this pause
                    time.sleep(_RETRY)
                    return
                continue
            sock.setblocking(False)
            is_local = address == sock.getsockname()[0] or address.startswith(("127.", "::1"))
            connection = _Connection(sock, is_local=is_local, seconds=self._seconds)
            if not self._make_room(connection):
                sock.close()
                continue
            self._connections[sock] = connection
            self._selector.register(sock, selectors.EVENT_READ)
            self._proceed(connection, selectors.EVENT_READ)  # most requests have arrived already

    def _make_room(self, newcomer: _Connection) -> bool:
        """Close the oldest connection if there are too many. A new remote connection cannot replace a local
        connection."""
        return len(self._connections) < self._max_connections or self._close_oldest(even_local=newcomer.is_local)

    def _close_oldest(self, *, even_local: bool) -> bool:
        """Close the oldest connection. If the connection's request has arrived, the request is answered first.

        Returns False if there was no connection to close.
        """
        oldest = next((connection for connection in self._connections.values() if not connection.is_local), None)
        if oldest is None and even_local:
            oldest = next(iter(self._connections.values()), None)
        if oldest is None:
            return False
        if not oldest.is_request_complete:
            self._proceed(oldest, selectors.EVENT_READ)
        self._close_connection(oldest)
        return True

    def _proceed(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            if events & selectors.EVENT_WRITE:
                self._write(connection)
        except BlockingIOError:
            return
        except OSError:
            self._close_connection(connection)

    def _read(self, connection: _Connection) -> None:
        data = connection.sock.recv(_HEADER_ROOM)
        if not data and (connection.is_reply_sent or not connection.is_request_complete):
            self._close_connection(connection)
        elif not data:
            self._selector.unregister(connection.sock)  # half closed: the client still waits for the reply
            if connection.reply:
                self._selector.register(connection.sock, selectors.EVENT_WRITE)
        elif not connection.is_request_complete:
            connection.received += data
            self._answer(connection)

    def _answer(self, connection: _Connection) -> None:
        head, end, _ = connection.received.partition(b"\r\n\r\n")
        if not end and len(connection.received) <= _HEADER_ROOM:
            return
        connection.is_request_complete = True
        connection.received = b""
        request = parse_request(head) if len(head) <= _HEADER_ROOM else None
        if request is None:
            self._send(
                connection, Reply("400 Bad Request", _TEXT, b"the request is not valid HTTP/1\n").packed(with_body=True)
            )
            return
        with_body = request.method != "HEAD"
        refusal = self._pages.refuse(request)
        if refusal is not None:
            self._send(connection, refusal.packed(with_body=with_body))
        elif request.path == "/metrics":
            self._metrics_requests.append((connection, with_body))
            self._metrics_requested.release()
        else:
            self._send(connection, self._pages.health(request.path).packed(with_body=with_body))

    def _send(self, connection: _Connection, reply: bytes) -> None:
        connection.reply = memoryview(reply)
        with contextlib.suppress(BlockingIOError):
            self._write(connection)

    def _write(self, connection: _Connection) -> None:
        while connection.reply:
            try:
                connection.reply = connection.reply[connection.sock.send(connection.reply) :]
            except BlockingIOError:
                self._watch(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
                raise
        connection.is_reply_sent = True
        self._watch(connection, selectors.EVENT_READ)
        connection.sock.shutdown(socket.SHUT_WR)

    def _watch(self, connection: _Connection, events: int) -> None:
        if connection.sock in self._selector.get_map():
            self._selector.modify(connection.sock, events)
        else:
            self._selector.register(connection.sock, events)

    def _close_connection(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    # --- metrics ---

    def _make_metrics(self) -> None:
        while True:
            self._metrics_requested.acquire()
            if self._is_closed:
                return
            connection, with_body = self._metrics_requests.popleft()
            if connection.sock.fileno() < 0:  # the client has closed the connection
                continue
            try:
                reply = self._pages.metrics()
            except Exception:  # noqa: BLE001 - the next request may succeed
                _log.exception("the metrics cannot be made")
                reply = Reply("500 Internal Server Error", _TEXT, b"see the worker's log\n")
            self._metrics_replies.append((connection, reply.packed(with_body=with_body)))
            self._wake()

    def _send_metrics(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1024)
        while self._metrics_replies:
            connection, reply = self._metrics_replies.popleft()
            if self._connections.get(connection.sock) is connection:
                try:
                    self._send(connection, reply)
                except OSError:
                    self._close_connection(connection)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")


def _connection_limit() -> int:
    """Return the maximum number of connections. The process also needs files for other purposes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _CONNECTIONS
    return max(1, min(_CONNECTIONS, files // _SHARE_OF_FILES))


def parse_request(head: bytes) -> Request | None:
    """Parse the head of a request, without its empty line. Returns None if the head is not valid."""
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not line.isprintable():
        return None
    headers = [tuple(part.strip() for part in header.partition(":")[::2]) for header in lines]
    hosts = [value for name, value in headers if name.lower() == "host"]
    if len(hosts) > 1:
        return None
    return Request(words[0], words[1].partition("?")[0], hosts[0] if hosts else None)
