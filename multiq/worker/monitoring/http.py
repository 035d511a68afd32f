"""Health and metrics over HTTP: three pages for probes and for Prometheus, and nothing else.

They are served beside the jobs, from the sidecar's process, so no task keeps them waiting. Nothing of a request is
used but its method, its path and its ``Host``. There is no login: what is shown has no job's arguments in it, and the
address is this host's own unless somebody says otherwise.

One thread serves all connections, because a probe must be answered whatever others do: each connection has a few
seconds for its whole request and reply, and where there are as many as there may be, the next one takes the place of
the oldest. Only the metrics, which ask the backend, are made by a second thread. See docs/decisions/0035.
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

    from .status import Status

_log = logging.getLogger("multiq.sidecar")

_LOOPBACK = "127.0.0.1"
_PATIENCE = 3.0  # seconds: when a worker rolls, the one of before gives its address up when it notices
_AGAIN = 0.05  # seconds
_CONNECTIONS = 100
_SHARE_OF_FILES = 4  # of the files that the process may open, connections take one in so many
_BACKLOG = 4096  # as many as the system allows: who finds no room there is answered a second later, which is too late
_ACCEPTED_AT_ONCE = 64
_WHOLE = 3.0  # seconds for a connection, from its beginning to the last byte of the reply: probes take milliseconds
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HEADER_ROOM = 8192  # bytes
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
#: ends of names that no stranger can register: who reaches this server by another name was led here by a web page
_OWN_ENDS = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".test")


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` for this host only. Raises ``OptionInvalid``."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        port = None
    if port is None or parts.netloc != text or "@" in text:
        raise OptionInvalid(f"http {text!r} is no address: write HOST:PORT, or :PORT for this host only")
    return Address(parts.hostname or _LOOPBACK, port)


def check_libraries() -> None:
    """Raises ``ExtraNotInstalled``."""
    try:
        importlib.import_module("prometheus_client")
    except ImportError as exc:
        name = exc.name or "prometheus_client"
        raise ExtraNotInstalled(f"http needs {name}: pip install 'multiq[metrics]'") from exc


def listen(address: Address) -> socket.socket:
    """A socket that is bound there. Raises ``OptionInvalid``."""
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_server(
                address, family=socket.AF_INET6 if ":" in address.host else socket.AF_INET, backlog=_BACKLOG
            )
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                raise OptionInvalid(f"http {address.host}:{address.port} cannot be listened on: {exc}") from exc
            time.sleep(_AGAIN)


class Reply(NamedTuple):
    """What a request is answered with."""

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
    """What of a request is used."""

    method: str
    path: str
    host: str | None


class Pages:
    """The three pages. *names*: what this server may be called beside its addresses."""

    def __init__(self, status: Status, metrics: Callable[[], bytes], names: tuple[str, ...] = ()) -> None:
        self._status = status
        self._metrics = metrics
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def refuse(self, request: Request) -> Reply | None:
        """The answer to what is asked wrongly; None: it is asked rightly."""
        if request.host is not None and not self._is_own(request.host):
            return Reply("421 Misdirected Request", _TEXT, b"this server has another name: use its address\n")
        if request.path not in {"/healthz", "/readyz", "/metrics"}:
            return Reply("404 Not Found", _TEXT, b"/healthz, /readyz and /metrics are here\n")
        if request.method not in {"GET", "HEAD"}:
            return Reply("405 Method Not Allowed", _TEXT, b"GET or HEAD\n")
        return None

    def health(self, path: str) -> Reply:
        report = self._status.report()
        is_fine = report.is_well if path == "/healthz" else report.is_ready
        status = "200 OK" if is_fine else "503 Service Unavailable"
        return Reply(status, "application/json", msgspec.json.encode(report) + b"\n")

    def metrics(self) -> Reply:
        return Reply("200 OK", _TEXT, self._metrics())

    def _is_own(self, host: str) -> bool:
        """Whether a ``Host`` is this server's. A web page whose name leads here (DNS rebinding) gives its own."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower().removesuffix(".")
        except ValueError:
            return False
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return bool(name) and ("." not in name or name in self._names or name.endswith((*_OWN_ENDS, ".cluster.local")))


class _Visit:
    """A connection."""

    def __init__(self, sock: socket.socket, *, is_local: bool) -> None:
        self.sock = sock
        self.is_local = is_local
        self.ends_at = time.monotonic() + _WHOLE
        self.received = b""
        self.reply = memoryview(b"")
        self.is_asked = False
        """Whether the request is complete: what comes after it is thrown away."""
        self.is_told = False
        """Whether the reply is sent, and only the other side's end is waited for: closed before, it might be lost."""


class Server:
    """Serves *pages* on *listener*, from threads of its own."""

    def __init__(self, listener: socket.socket, pages: Pages) -> None:
        host, port, *_ = listener.getsockname()
        self._listener = listener
        self._pages = pages
        self._visits: dict[socket.socket, _Visit] = {}  # the oldest first
        self._asking: deque[tuple[_Visit, bool]] = deque()  # those who wait for metrics
        self._asked = threading.Semaphore(0)
        self._made: deque[tuple[_Visit, bytes]] = deque()
        self._is_closed = False
        self._most = _most_connections()
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
        """Leave the address to others, at once: closing alone takes effect when the thread that waits there wakes."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._wake()
        self._asked.release()
        self._thread.join(_WHOLE)

    # --- the thread of all connections ---

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            for visit in list(self._visits.values()):
                self._end(visit)
            self._selector.close()
            for sock in (self._listener, self._woken, self._waker):
                sock.close()

    def _turn(self) -> None:
        ends_at = next(
            (visit.ends_at for visit in self._visits.values()), None
        )  # all have as long: the oldest's is next
        timeout = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._hand_out_metrics()
            else:
                visit = self._visits.get(key.fileobj)  # type: ignore[call-overload]  # sockets are all that is registered
                if visit is not None:  # else it gave its place to another one in this very turn
                    self._go_on(visit, events)
        now = time.monotonic()
        for visit in list(self._expired(now)):
            self._end(visit)

    def _expired(self, now: float) -> Iterator[_Visit]:
        for visit in self._visits.values():
            if visit.ends_at > now:
                return
            yield visit

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, (address, *_) = self._listener.accept()
            except BlockingIOError:  # nobody waits
                return
            except OSError as exc:
                if exc.errno not in _NO_FILES:
                    return
                if not self._show_out(even_local=True):  # it stays readable: without a pause this would go round
                    time.sleep(_AGAIN)
                    return
                continue
            sock.setblocking(False)
            visit = _Visit(sock, is_local=address == sock.getsockname()[0] or address.startswith(("127.", "::1")))
            if not self._make_room(visit):
                sock.close()
                continue
            self._visits[sock] = visit
            self._selector.register(sock, selectors.EVENT_READ)
            self._go_on(visit, selectors.EVENT_READ)  # most requests are there already

    def _make_room(self, newcomer: _Visit) -> bool:
        """Have the oldest connection give up its place: those of this host last, and for others of it only."""
        return len(self._visits) < self._most or self._show_out(even_local=newcomer.is_local)

    def _show_out(self, *, even_local: bool) -> bool:
        """End the oldest connection, answered if its request is there. Returns whether there was one."""
        oldest = next((visit for visit in self._visits.values() if not visit.is_local), None)
        if oldest is None and even_local:
            oldest = next(iter(self._visits.values()), None)
        if oldest is None:
            return False
        if not oldest.is_asked:
            self._go_on(oldest, selectors.EVENT_READ)
        self._end(oldest)
        return True

    def _go_on(self, visit: _Visit, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(visit)
            if events & selectors.EVENT_WRITE:
                self._write(visit)
        except BlockingIOError:
            return
        except OSError:
            self._end(visit)

    def _read(self, visit: _Visit) -> None:
        data = visit.sock.recv(_HEADER_ROOM)
        if not data and (visit.is_told or not visit.is_asked):
            self._end(visit)
        elif not data:
            self._selector.unregister(visit.sock)  # half closed: it still waits for its reply
            if visit.reply:
                self._selector.register(visit.sock, selectors.EVENT_WRITE)
        elif not visit.is_asked:
            visit.received += data
            self._answer(visit)

    def _answer(self, visit: _Visit) -> None:
        head, end, _ = visit.received.partition(b"\r\n\r\n")
        if not end and len(visit.received) <= _HEADER_ROOM:
            return
        visit.is_asked = True
        visit.received = b""
        request = parse_request(head) if len(head) <= _HEADER_ROOM else None
        if request is None:
            self._tell(visit, Reply("400 Bad Request", _TEXT, b"that is no request\n").packed(with_body=True))
            return
        with_body = request.method != "HEAD"
        refusal = self._pages.refuse(request)
        if refusal is not None:
            self._tell(visit, refusal.packed(with_body=with_body))
        elif request.path == "/metrics":
            self._asking.append((visit, with_body))
            self._asked.release()
        else:
            self._tell(visit, self._pages.health(request.path).packed(with_body=with_body))

    def _tell(self, visit: _Visit, reply: bytes) -> None:
        visit.reply = memoryview(reply)
        with contextlib.suppress(BlockingIOError):
            self._write(visit)

    def _write(self, visit: _Visit) -> None:
        while visit.reply:
            try:
                visit.reply = visit.reply[visit.sock.send(visit.reply) :]
            except BlockingIOError:
                self._watch(visit, selectors.EVENT_READ | selectors.EVENT_WRITE)
                raise
        visit.is_told = True
        self._watch(visit, selectors.EVENT_READ)
        visit.sock.shutdown(socket.SHUT_WR)

    def _watch(self, visit: _Visit, events: int) -> None:
        if visit.sock in self._selector.get_map():
            self._selector.modify(visit.sock, events)
        else:
            self._selector.register(visit.sock, events)

    def _end(self, visit: _Visit) -> None:
        self._visits.pop(visit.sock, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(visit.sock)
        visit.sock.close()

    # --- metrics ---

    def _make_metrics(self) -> None:
        while True:
            self._asked.acquire()
            if self._is_closed:
                return
            visit, with_body = self._asking.popleft()
            if visit.sock.fileno() < 0:  # it did not wait so long
                continue
            try:
                reply = self._pages.metrics()
            except Exception:  # noqa: BLE001 - the next one may go well
                _log.exception("the metrics cannot be made")
                reply = Reply("500 Internal Server Error", _TEXT, b"see the worker's log\n")
            self._made.append((visit, reply.packed(with_body=with_body)))
            self._wake()

    def _hand_out_metrics(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1024)
        while self._made:
            visit, reply = self._made.popleft()
            if self._visits.get(visit.sock) is visit:
                try:
                    self._tell(visit, reply)
                except OSError:
                    self._end(visit)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")


def _most_connections() -> int:
    """How many there may be: the rest of the process needs files, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _CONNECTIONS
    return max(1, min(_CONNECTIONS, files // _SHARE_OF_FILES))


def parse_request(head: bytes) -> Request | None:
    """A request's head, without its empty line; None if it is none."""
    line, *lines = head.decode("latin-1").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not line.isprintable():
        return None
    headers = [tuple(part.strip() for part in header.partition(":")[::2]) for header in lines]
    hosts = [value for name, value in headers if name.lower() == "host"]
    if len(hosts) > 1:
        return None
    return Request(words[0], words[1].partition("?")[0], hosts[0] if hosts else None)
