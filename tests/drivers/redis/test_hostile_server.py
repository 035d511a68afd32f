"""Servers that send random replies: each call returns, or raises an error of multiq's."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, Lease, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend

#: a connection that was just being made when its greeting turned out to be none is left to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

HELLO = (
    b"*14\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.2.0\r\n$5\r\nproto\r\n:2\r\n$2\r\nid\r\n:3\r\n"
    b"$4\r\nmode\r\n$10\r\nstandalone\r\n$4\r\nrole\r\n$6\r\nmaster\r\n$7\r\nmodules\r\n*0\r\n"
)
ATOMS = [
    b":0\r\n",
    b":-1\r\n",
    b":9223372036854775807\r\n",
    b"+OK\r\n",
    b"+\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$1\r\n1\r\n",
    b"$3\r\n\xff\xfe\x00\r\n",
    b"$3\r\nnan\r\n",
    b"$3\r\ninf\r\n",
    b"$5\r\nready\r\n",
    b"$5\r\n-1e99\r\n",
    b"$60\r\n" + b"x" * 60 + b"\r\n",
    b"$53\r\n" + b"\xff" * 53 + b"\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"-ERR rubbish\r\n",
    b"-\r\n",
    b"-MOVED 1\r\n",
    b"-MOVED x y:z\r\n",
    b"-ASK 1 :\r\n",
    b"-NOSCRIPT\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",1.5\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"(1" + b"0" * 30 + b"\r\n",
    b"?\r\n",
]


class Rubbish:
    """A server that mostly greets as Redis does, and then answers at random."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._greets = self._dice.random() < 0.8
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def reply(self, depth: int = 0) -> bytes:
        if depth < 3 and self._dice.random() < 0.6:
            size = self._dice.choice([0, 1, 2, 3, 5, 6, 7, 8, 10])
            return b"*%d\r\n" % size + b"".join(self.reply(depth + 1) for _ in range(size))
        return self._dice.choice(ATOMS)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                # each command begins with the head of an array
                for _ in range(max(1, data.count(b"*") if data.startswith(b"*1\r\n") else 1)):
                    connection.sendall(HELLO if self._greets and b"HELLO" in data else self.reply())


@pytest.fixture
def rubbish() -> Iterator[Callable[[int], Backend]]:
    with contextlib.ExitStack() as stack:

        def start(seed: int) -> Backend:
            server = stack.enter_context(contextlib.closing(Rubbish(seed)))
            return stack.enter_context(open_backend(f"redis://127.0.0.1:{server.port}?timeout=0.1"))

        yield start


def calls(backend: Backend) -> list[Callable[[], Any]]:
    lease = Lease("q", "1", "00" * 12 + ".1", b"", 0, 60.0, 1, 0, 0, 0.0)
    consumer = backend.consumer(["q"])
    return [
        lambda: backend.enqueue("q", [NewJob(b"x", "1")]),
        lambda: backend.enqueue("q", [NewJob(b"x", "1"), NewJob(b"y" * 2000, "2", delay=1)]),
        lambda: consumer.reserve(3, 0),
        lambda: consumer.settle([Ack(lease)]),
        lambda: consumer.exchange([Ack(lease)], 2, 0.01),
        lambda: consumer.reserve(1, 0.05),
        lambda: backend.peek("q", "1"),
        lambda: backend.jobs("q", State.BURIED),
        lambda: backend.delete("q", "1"),
        lambda: backend.reschedule("q", "1", 1),
        lambda: backend.kick_job("q", "1"),
        lambda: backend.stats("q"),
        lambda: backend.pause("q", 1),
        lambda: backend.resume("q"),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_replies_raise_only_multiq_errors(rubbish: Callable[[int], Backend], seed: int) -> None:
    refused = 0
    for call in calls(rubbish(seed)):
        try:
            call()
        except MultiqError:
            refused += 1
    assert refused > 0


@pytest.mark.long
def test_reply_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiq_redis.connection._LARGEST_REPLY", 1_000_000)
    listener = socket.create_server(("127.0.0.1", 0))
    sent = 0

    def serve() -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(HELLO)
            connection.recv(65536)
            connection.sendall(b"$600000000\r\n")
            while sent < 600_000_000:
                sent += connection.send(b"x" * 65536)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with open_backend(f"redis://127.0.0.1:{listener.getsockname()[1]}?timeout=5") as backend:
        with pytest.raises(BackendError):
            backend.stats("q")
        listener.close()
    thread.join(10)
    assert sent < 50_000_000
