"""Replies of the real server, changed by a proxy, and replies without an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import hiredis
import pytest
from attacker import Attacker
from garbling import attack, is_well, recovers

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendTimeout, BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend

#: the garbage collector closes a connection whose greeting was malformed
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

_HELLO = b"*4\r\n$7\r\nversion\r\n$5\r\n7.2.0\r\n$4\r\nrole\r\n$6\r\nmaster\r\n"


@pytest.mark.one_row
@pytest.mark.parametrize("seed", range(15))
def test_garbled_reply_is_a_multiq_error_and_the_next_call_works(redis_server: RedisServer, seed: int) -> None:
    with (
        Attacker(("127.0.0.1", redis_server.port)) as attacker,
        open_backend(f"redis://127.0.0.1:{attacker.port}?timeout=0.2&prefix=garbled{seed}") as backend,
    ):
        assert attack(backend, attacker, seed)
        recovers(backend)
        is_well(backend, f"well{seed}")


def test_reply_that_comes_a_byte_at_a_time_ends_at_the_deadline(redis_server: RedisServer) -> None:
    with (
        Attacker(("127.0.0.1", redis_server.port)) as attacker,
        open_backend(f"redis://127.0.0.1:{attacker.port}?timeout=0.4&prefix=dribble") as backend,
    ):
        backend.enqueue("q", [NewJob(b"x" * 500, "1")])
        attacker.dribble(0.1)
        for call in (lambda: backend.peek("q", "1"), lambda: backend.consumer(["q"]).reserve(1, 0)):
            start = time.monotonic()
            with pytest.raises(BackendTimeout):
                call()
            assert time.monotonic() - start < 5  # the whole reply would take a minute


@pytest.fixture
def liar() -> Iterator[Callable[[Callable[[list[bytes]], bytes], str], Backend]]:
    """Starts a server that replies to each command with the result of *answer*, and opens a backend on it."""
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[list[bytes]], bytes], scheme: str) -> Backend:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listeners.append(listener)
            threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()
            port = listener.getsockname()[1]
            return stack.enter_context(open_backend(f"{scheme}://127.0.0.1:{port}?timeout=0.5"))

        yield start
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, answer: Callable[[list[bytes]], bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_talk, args=(client, answer), daemon=True).start()


def _talk(client: socket.socket, answer: Callable[[list[bytes]], bytes]) -> None:
    reader = hiredis.Reader()
    with client, contextlib.suppress(OSError):
        while data := client.recv(65536):
            reader.feed(data)
            while (words := reader.gets()) is not False:
                client.sendall(_HELLO if words[0] == b"HELLO" else answer(words))


@pytest.mark.parametrize("fresh", [False, True])
def test_endless_scan_is_given_up(
    liar: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch, *, fresh: bool
) -> None:
    monkeypatch.setattr("multiq_redis.listing._SCANS_FOR", 0.5)
    cursor = 1

    def answer(words: list[bytes]) -> bytes:
        nonlocal cursor
        cursor += fresh
        return b"*2\r\n:%d\r\n*0\r\n" % cursor if words[0] == b"SCAN" else b"+OK\r\n"

    start = time.monotonic()
    with pytest.raises(BackendUnavailable, match="more keys" if fresh else "same cursor"):
        liar(answer, "redis").queues()
    assert time.monotonic() - start < 10


def test_endless_promotion_ends_at_the_deadline(liar: Callable[..., Backend]) -> None:
    backend = liar(lambda _: b"*5\r\n$1\r\n1\r\n$1\r\n0\r\n$0\r\n\r\n$0\r\n\r\n$0\r\n\r\n", "redis")
    start = time.monotonic()
    with contextlib.suppress(BackendError):
        backend.consumer(["q"]).reserve(1, 0)
    assert time.monotonic() - start < 10
    backend = liar(lambda _: b"$1\r\n1\r\n", "redis")
    with pytest.raises(BackendError):
        backend.jobs("q", State.READY)
    assert time.monotonic() - start < 20


def test_circular_redirections_end_at_the_deadline(liar: Callable[..., Backend]) -> None:
    ports: list[int] = []

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"CLUSTER":
            return b"*1\r\n*3\r\n:0\r\n:9223372036854775807\r\n*2\r\n$0\r\n\r\n:%d\r\n" % ports[0]
        return b"-MOVED 1 127.0.0.1:%d\r\n" % ports[0]

    backend = liar(answer, "redis+cluster")
    ports.append(backend._servers._seeds[0][1])  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(BackendUnavailable):
        backend.stats("q")
    assert time.monotonic() - start < 10


def test_surplus_reply_is_not_taken_for_the_next_one(liar: Callable[..., Backend]) -> None:
    """If a server or a proxy repeats a reply, each later command would get the reply to the command before it."""
    backend = liar(lambda _: b"$1\r\n1\r\n" * 2, "redis")
    with pytest.raises(BackendUnavailable, match="more replies than there were commands"):
        backend.kick_job("q", "1")


@pytest.mark.parametrize("what", [b"*4294967295\r\n", b"*1\r\n" * 50_000, b">2\r\n+a\r\n+b\r\n", b"%1\r\n+a\r\n:1\r\n"])
def test_replies_of_odd_shapes_are_errors(liar: Callable[..., Backend], what: bytes) -> None:
    backend = liar(lambda _: what, "redis")
    for call in (lambda: backend.stats("q"), backend.queues, lambda: backend.peek("q", "1")):
        with pytest.raises(BackendError):
            call()
    assert backend.capabilities.max_body
