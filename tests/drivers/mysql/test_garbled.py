"""Replies of the real server, changed on their way: each call ends with an answer or an error of multiq's, in time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from attacker import Attacker

from multiq.backend import Ack, Bury, NewJob, Release, State
from multiq.errors import BackendError, MultiqError
from multiq.ids import new_id
from multiq.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Backend

_HANG = 20.0  # seconds: no call may take so long, whose timeout is a fraction of a second


@pytest.fixture
def attacker(mysql_server: MysqlDatabases, place: Place) -> Iterator[Attacker]:
    with open_backend(place.url) as backend:
        backend.stats("q")
    with Attacker((mysql_server.host, mysql_server.port)) as attacker:
        yield attacker


def calls(backend: Backend) -> list[Callable[[], Any]]:
    """Every verb, on jobs that are there."""
    consumer = backend.consumer(["q", "r"])
    ids = [new_id() for _ in range(4)]

    def settle() -> None:
        leases = consumer.reserve(4, 0)
        kinds = (Ack, Bury, Release)
        consumer.settle([kinds[at % 3](lease) for at, lease in enumerate(leases)])

    return [
        lambda: backend.enqueue("q", [NewJob(b"x", job_id) for job_id in ids]),
        lambda: backend.enqueue("q", [NewJob(b"y" * 300, new_id(), delay=0.001)]),
        settle,
        lambda: consumer.exchange([Ack(one) for one in consumer.reserve(1, 0)], 2, 0.01),
        lambda: consumer.reserve(1, 0.05),
        lambda: backend.peek("q", ids[0]),
        lambda: [backend.jobs("q", state) for state in (State.READY, State.BURIED)],
        lambda: backend.reschedule("q", ids[1], 1),
        lambda: backend.kick("q", 5),
        lambda: backend.kick_job("q", ids[2]),
        lambda: backend.delete("q", ids[3]),
        backend.queues,
        lambda: backend.stats("q"),
        lambda: (backend.pause("r", 1), backend.resume("r")),
        lambda: backend.purge("q", [State.BURIED]),
        backend.doctor,
        lambda: backend.capabilities,
        lambda: backend.schema().check(),
    ]


def attack(backend: Backend, attacker: Attacker, seed: int) -> tuple[int, int]:
    """One change in each call. Returns how many calls were made, and how many were refused."""
    refused = made = 0
    for number, call in enumerate(calls(backend)):
        made += 1
        attacker.garble(seed * 1000 + number, at=seed % (12 if number % 3 == 0 else 4), times=1 + (seed % 5 == 0) * 50)
        start = time.monotonic()
        try:
            call()
        except MultiqError:
            refused += 1
        assert time.monotonic() - start < _HANG
        if seed % 2:
            backend.close()  # the next call logs in
    attacker.relent()
    return made, refused


def recovers(backend: Backend) -> None:
    """Its timeout is so short that a busy machine may need more than one try."""
    for _ in range(10):
        with contextlib.suppress(BackendError):
            backend.stats("q")
            return
    pytest.fail("nothing is answered any more, though the server is well")


def is_well(backend: Backend, queue: str) -> None:
    """At once: nothing is left over of what was wrong. A call may meet a connection that has ended in the meantime."""
    with contextlib.suppress(BackendError):
        backend.stats(queue)
    (job_id,) = backend.enqueue(queue, [NewJob(b"well", new_id())])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 2)
        assert (lease.id, lease.body) == (job_id, b"well")
        assert consumer.settle([Ack(lease)]) == [None]


@pytest.mark.parametrize("seed", range(12))
def test_a_garbled_reply_is_an_error_of_multiqs_and_the_next_call_is_well(
    mysql_server: MysqlDatabases, place: Place, attacker: Attacker, seed: int
) -> None:
    url = mysql_server.url(place.name, "timeout=0.2", port=attacker.port)
    with open_backend(url) as backend:
        _, refused = attack(backend, attacker, seed)
        assert refused
        recovers(backend)
    with open_backend(mysql_server.url(place.name, port=attacker.port)) as backend:
        is_well(backend, f"well{seed}")


@pytest.mark.parametrize("what", [b"\xff\xff\xff\0", b"\xff\xff\xff\1"], ids=["greeting", "reply"])
def test_a_reply_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, what: bytes) -> None:
    """Packets of 16 MB, each of which says that there is another one."""
    monkeypatch.setattr("multiq_mysql.timed._LARGEST_REPLY", 1_000_000)
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
    """A server may answer any statement with the request for a file."""
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
