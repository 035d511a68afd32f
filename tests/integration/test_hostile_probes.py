"""The probe endpoint answers probes although other clients attack it."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from multiq.worker.monitoring.http_server import Pages, Server, listen, parse_address, parse_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.worker.monitoring.health import Health

CLIENTS = 100


class WellHealth:
    """The status of a healthy worker."""

    def report(self) -> Any:
        return WellReport()


class WellReport:
    is_well = is_ready = True
    __struct_fields__ = ()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Starts the endpoint in this process; returns its port."""
    servers = []
    monkeypatch.setattr("multiq.worker.monitoring.http_server.msgspec.json.encode", lambda _: b"{}")

    def start(metrics: Callable[[], bytes] = lambda: b"figures 1\n", *names: str) -> int:
        listener = listen(parse_address(":0"))
        port: int = listener.getsockname()[1]
        servers.append(Server(listener, Pages(cast("Health", WellHealth()), metrics, names)))
        return port

    yield start
    for server in servers:
        server.close()


def status(port: int, path: str = "/healthz", *, timeout: float = 20.0, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={name.capitalize(): value for name, value in headers.items()})
        return connection.getresponse().status


class Drippers:
    """Clients that send endless headers one byte at a time, and reconnect when they are disconnected."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.sent = 0
        self._sockets = [self._connect() for _ in range(CLIENTS)]
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), timeout=20)
        sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        return sock

    def _drip(self) -> None:
        while not self._is_over.wait(0.2):
            for at, sock in enumerate(self._sockets):
                try:
                    sock.sendall(b"x")
                    self.sent += 1
                except OSError:
                    sock.close()
                    self._sockets[at] = self._connect()


def test_probes_are_answered_beside_a_hundred_clients_that_drip(serve: Callable[..., int]) -> None:
    port = serve()
    drippers = Drippers(port)
    try:
        for _ in range(20):
            assert status(port) == 200
            time.sleep(0.05)
        assert drippers.sent > CLIENTS
    finally:
        drippers.close()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
def test_a_connection_has_a_time_limit(serve: Callable[..., int], sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiq.worker.monitoring.http_server._CONNECTION_SECONDS", 0.5)
    port = serve()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(sent)
        dripped, is_over = 0, False
        while not is_over and dripped < 200:  # ten seconds
            sock.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                try:
                    is_over = sock.recv(100) == b""
                except ConnectionResetError:
                    is_over = True
            if not is_over and sent:
                with contextlib.suppress(OSError):
                    sock.sendall(b"x")
            dripped += 1
        assert is_over
    assert status(port) == 200


def test_a_client_that_reads_nothing_is_disconnected(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq.worker.monitoring.http_server._CONNECTION_SECONDS", 0.5)
    port = serve(lambda: b"x" * 20_000_000)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(1)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1_000_000):
                received += len(data)
        assert received < 20_000_000
    assert status(port) == 200


def test_probes_do_not_wait_for_metrics(serve: Callable[..., int]) -> None:
    is_over = threading.Event()
    port = serve(lambda: b"%d" % is_over.wait(20))
    waiting = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(10)]
    for sock in waiting:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status(port) == 200
    is_over.set()
    for sock in waiting:
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        sock.close()


def test_large_metrics_arrive_whole(serve: Callable[..., int]) -> None:
    port = serve(lambda: b"x" * 5_000_000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    assert len(connection.getresponse().read()) == 5_000_000
    connection.close()


def test_metrics_that_fail_are_an_error_of_one_request(serve: Callable[..., int]) -> None:
    answers: Iterator[bytes | Exception] = iter([ZeroDivisionError("x"), b"fine"])

    def metrics() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    port = serve(metrics)
    assert [status(port, "/metrics"), status(port, "/metrics")] == [500, 200]


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1:80", "[::1]:9000", "10.1.2.3", "worker", "shop.svc.cluster.local:9", "Own.Example.COM"],
)
def test_requests_to_the_hosts_own_names_are_answered(serve: Callable[..., int], host: str) -> None:
    assert status(serve(lambda: b"", "own.example.com"), host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example.com", "127.0.0.1.evil.com", "localhost.evil.com:9000", "", "[x]", "a b.c"]
)
def test_a_web_page_whose_name_leads_here_is_refused(serve: Callable[..., int], host: str) -> None:
    port = serve()
    for path in ("/healthz", "/metrics"):
        assert status(port, path, host=host) == 421


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET",
        b"GET /",
        b"GET / HTTP/2.0",
        b"\x00\xff / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"G / HTTP/1.1\r\nHost: a\r\nhost: b",
    ],
)
def test_a_malformed_request_is_refused(head: bytes) -> None:
    assert parse_request(head) is None


def test_a_request_may_come_byte_by_byte_and_its_sender_end_its_half(serve: Callable[..., int]) -> None:
    port = serve()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        for byte in b"GET /healthz?x=1 HTTP/1.0\r\n\r\n":
            sock.sendall(bytes([byte]))
        sock.shutdown(socket.SHUT_WR)
        reply = b""
        while data := sock.recv(1000):
            reply += data
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"\r\n\r\n{}\n")


def test_a_closed_server_leaves_its_address(serve: Callable[..., int]) -> None:
    listener = listen(parse_address(":0"))
    port = listener.getsockname()[1]
    server = Server(listener, Pages(cast("Health", WellHealth()), bytes))
    assert status(port) == 200
    server.close()
    with listen(parse_address(f":{port}")):
        pass


def test_a_process_that_may_open_few_files_answers_beside_many_clients(serve: Callable[..., int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients: list[socket.socket] = []
    room = 120
    try:
        clients += [socket.socket() for _ in range(300)]  # opened before the limit is set
        used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, hard))
        port = serve()
        probe = socket.socket()
        for sock in clients:
            sock.settimeout(20)
            sock.connect(("127.0.0.1", port))
            sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        files = [os.open(os.devnull, os.O_RDONLY)]
        with contextlib.suppress(OSError):
            while len(files) < room:
                files.append(os.open(os.devnull, os.O_RDONLY))
        clients.append(probe)
        probe.settimeout(2)  # less than a connection's three seconds
        probe.connect(("127.0.0.1", port))
        probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert probe.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in clients:
            sock.close()
        for file in files:
            os.close(file)


def test_connections_leave_files_for_the_rest_of_the_process(serve: Callable[..., int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(80, len(list(Path("/proc/self/fd").iterdir())) + 40)  # earlier tests may have files open
    with contextlib.ExitStack() as clients:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            port = serve()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(60):
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        assert status(port) == 200
        theirs = [
            file for file in Path("/proc/self/net/tcp").read_text().splitlines() if file.split()[1:2] == [at(port)]
        ]
        assert sum(line.split()[3] == "01" for line in theirs) <= limit // 4  # established, as the server sees them


def at(port: int) -> str:
    """This host's address in the notation of /proc/net/tcp."""
    return f"0100007F:{port:04X}"


def test_a_burst_of_connections_is_let_in_at_once() -> None:
    listener = listen(parse_address(":0"))
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with listener, contextlib.ExitStack() as clients:
        for _ in range(min(1000, most)):  # no program accepts these connections
            clients.enter_context(socket.create_connection(listener.getsockname(), timeout=0.9))


def test_a_connection_that_is_closed_for_a_new_one_is_answered_if_its_request_has_arrived(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq.worker.monitoring.http_server._CONNECTIONS", 4)
    listener = listen(parse_address(":0"))
    with contextlib.ExitStack() as clients:
        address = listener.getsockname()
        first = clients.enter_context(socket.create_connection(address, timeout=20))
        turn = threading.Event()
        accept = Server._accept

        def accept_late(server: Server) -> None:  # sent after the first connection, and before its request
            accept(server)
            turn.wait(20)

        monkeypatch.setattr(Server, "_accept", accept_late)
        server = Server(listener, Pages(cast("Health", WellHealth()), bytes))
        clients.callback(server.close)
        while not server._connections:
            time.sleep(0.01)
        first.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        for _ in range(20):
            clients.enter_context(socket.create_connection(address, timeout=20))
        # The listener was registered before the connection, so new connections are handled first.
        monkeypatch.setattr(Server, "_accept", accept)
        turn.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
