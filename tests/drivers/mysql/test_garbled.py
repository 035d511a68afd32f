"""Replies of the real server, changed on their way: each call ends with an answer or an error of multiq's, in time."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest
from attacker import Attacker
from garbling import attack, is_well, recovers

from multiq.backend.registry import open_backend
from multiq.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.mysql import MysqlDatabases, Place


@pytest.fixture
def attacker(mysql_server: MysqlDatabases, place: Place) -> Iterator[Attacker]:
    with open_backend(place.url) as backend:
        backend.stats("q")
    with Attacker((mysql_server.host, mysql_server.port)) as attacker:
        yield attacker


@pytest.mark.one_row
@pytest.mark.parametrize("seed", range(12))
def test_a_garbled_reply_is_an_error_of_multiqs_and_the_next_call_succeeds(
    mysql_server: MysqlDatabases, place: Place, attacker: Attacker, seed: int
) -> None:
    url = mysql_server.url(place.name, "timeout=0.2", port=attacker.port)
    with open_backend(url) as backend:
        assert attack(backend, attacker, seed)
        recovers(backend)
    with open_backend(mysql_server.url(place.name, port=attacker.port)) as backend:
        is_well(backend, f"well{seed}")


@pytest.mark.parametrize("what", [b"\xff\xff\xff\0", b"\xff\xff\xff\1"], ids=["greeting", "reply"])
def test_a_reply_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, what: bytes) -> None:
    """The server sends packets of 16 MB without end. Each packet announces another one."""
    monkeypatch.setattr("multiq.driverkit.timed_socket._LARGEST_REPLY", 1_000_000)
    listener = socket.create_server(("127.0.0.1", 0))
    sent = 0

    def serve() -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            if what[3]:
                connection.sendall(_GREETING)
                connection.recv(65536)
                what_ = what[:3] + b"\2"
            else:
                what_ = what
            connection.sendall(what_)
            while sent < 600_000_000:
                sent += connection.send(bytes(65536))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with open_backend(f"mysql://ann@127.0.0.1:{listener.getsockname()[1]}/jobs?timeout=5") as backend:
        with pytest.raises(BackendError, match="1,000,000"):
            backend.stats("q")
        listener.close()
    thread.join(10)
    assert sent < 50_000_000


def test_a_file_of_this_machine_is_not_sent(mysql_server: MysqlDatabases, place: Place) -> None:
    """By the protocol, a server may answer any statement with a request for a file of the client."""
    attacked = threading.Event()

    class Wants(Attacker):
        def _replies(self, client: socket.socket, server: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := server.recv(65536):
                    client.sendall(b"\x0c\0\0\1\xfb/etc/passwd" if attacked.is_set() else data)

    with (
        Wants((mysql_server.host, mysql_server.port)) as attacker,
        open_backend(mysql_server.url(place.name, "timeout=1", port=attacker.port)) as backend,
    ):
        backend.stats("q")
        attacked.set()
        with pytest.raises(BackendError):
            backend.stats("q")
        attacked.clear()
        backend.stats("q")


_GREETING = (
    b"\x4a\0\0\0\x0a8.0.40\0\7\0\0\x0012345678\0\x08\xa2\x2d\x02\0\x08\0\x15" + bytes(10)
    + b"123456789012\0mysql_native_password\0"
)  # fmt: skip
