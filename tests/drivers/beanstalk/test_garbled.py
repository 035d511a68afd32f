"""Malformed replies: the real server's, changed by a proxy. Each call ends in time, with a result or a typed error."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from attacker import Attacker
from garbling import attack, is_well, recovers

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendTimeout, BackendUnavailable, EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend

_STATS = b"---\nmax-job-size: 65535\nx: 1\nbinlog-current-index: 0\n"
_OK = b"OK %d\r\n%b\r\n" % (len(_STATS), _STATS)


@pytest.mark.one_row
@pytest.mark.parametrize("seed", range(25))
def test_malformed_reply_is_a_typed_error_and_the_next_call_works(beanstalk_server: BeanstalkServer, seed: int) -> None:
    with (
        Attacker(beanstalk_server.address) as attacker,
        open_backend(f"beanstalk://127.0.0.1:{attacker.port}?timeout=0.2") as backend,
    ):
        assert attack(backend, attacker, seed)
        recovers(backend)
        is_well(backend, f"well{seed}")


def test_slow_reply_ends_at_the_deadline(beanstalk_server: BeanstalkServer) -> None:
    with (
        Attacker(beanstalk_server.address) as attacker,
        open_backend(f"beanstalk://127.0.0.1:{attacker.port}?timeout=0.4") as backend,
    ):
        (job_id,) = backend.enqueue("dribble", [NewJob(b"x" * 500, "1")])
        attacker.dribble(0.1)
        for call in (lambda: backend.peek("dribble", job_id), lambda: backend.consumer(["dribble"]).reserve(1, 0)):
            start = time.monotonic()
            with pytest.raises(BackendTimeout):
                call()
            assert time.monotonic() - start < 5  # the reply takes a minute


class Liar:
    """Answers each command with what *answer* makes of its words."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(65536):
                for command in data.split(b"\r\n")[:-1]:
                    if answer := self._answer(command):
                        client.sendall(answer)
                        self.sent += len(answer)


@pytest.fixture
def liar() -> Iterator[Callable[[Callable[[bytes], bytes]], Backend]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[bytes], bytes]) -> Backend:
            server = stack.enter_context(contextlib.closing(Liar(answer)))
            return stack.enter_context(open_backend(f"beanstalk://127.0.0.1:{server.port}?timeout=0.5"))

        yield start


@pytest.mark.parametrize("sent_back", [b"NOT_FOUND\r\n", b""], ids=["refused", "silent"])
def test_kick_and_purge_without_progress_end_at_the_deadline(
    liar: Callable[[Callable[[bytes], bytes]], Backend], sent_back: bytes
) -> None:
    """The server always returns the same first job, and neither kicks nor deletes it."""
    tube = b"---\ncurrent-jobs-ready: 9\ncurrent-jobs-reserved: 0\ncurrent-jobs-delayed: 9\ncurrent-jobs-buried: 9\n"
    tube += b"pause: 0\npause-time-left: 0\n"

    def answer(command: bytes) -> bytes:
        if command.startswith(b"use "):
            return b"USING x\r\n"
        if command.startswith(b"peek-"):
            return b"FOUND 1 1\r\nx\r\n"
        if command.startswith(b"stats-tube"):
            return b"OK %d\r\n%b\r\n" % (len(tube), tube)
        return _OK if command == b"stats" else sent_back

    backend = liar(answer)
    calls: list[Callable[[], int]] = [lambda: backend.kick("q", 10**9), lambda: backend.purge("q", [State.READY])]
    for call in calls:
        start = time.monotonic()
        with pytest.raises(BackendUnavailable):
            call()
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("sent_back", [b"INSERTED \xff\r\n", b"INSERTED\r\n", b"HELLO 7\r\n", b"\r\n"])
def test_put_with_an_unexpected_reply_is_uncertain(
    liar: Callable[[Callable[[bytes], bytes]], Backend], sent_back: bytes
) -> None:
    """After this reply the server may have stored the job. After ``BackendUnavailable`` the caller would put it a
    second time."""

    def answer(command: bytes) -> bytes:
        if command.startswith(b"put "):
            return sent_back
        return {b"stats": _OK, b"use q": b"USING q\r\n"}.get(command, b"")

    backend = liar(answer)
    for jobs in ([NewJob(b"x", "1")], [NewJob(b"x", "1"), NewJob(b"y", "2")]):
        for _ in range(2):  # the second time the tube is already in use, so the driver does not send ``use``
            with pytest.raises(EnqueueUncertain) as caught:
                backend.enqueue("q", jobs)
            assert caught.value.jobs == tuple(jobs)


@pytest.mark.parametrize(
    "sent_back",
    [
        b"OK 600000000\r\n",  # a body that does not end
        b"OK 9999999999999999\r\n",
        b"OK " + b"9" * 5000 + b"\r\n",
        b"OK ",  # a line that does not end
        b"",
    ],
    ids=["body", "size", "digits", "line", "nothing"],
)
@pytest.mark.parametrize("call", ["stats", "enqueue"])
def test_reply_size_is_bounded(monkeypatch: pytest.MonkeyPatch, sent_back: bytes, call: str) -> None:
    monkeypatch.setattr("multiq_beanstalk.replies._LARGEST_REPLIES", 1_000_000)
    listener = socket.create_server(("127.0.0.1", 0))
    sent = 0

    def serve() -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            if call == "enqueue":  # the driver asks for the limits and the tube first
                connection.recv(65536)
                connection.sendall(_OK)
                connection.recv(65536)
                connection.sendall(b"USING q\r\n")
            connection.recv(65536)
            connection.sendall(sent_back)
            while sent < 300_000_000:
                sent += connection.send(b"x" * 65536)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with open_backend(f"beanstalk://127.0.0.1:{listener.getsockname()[1]}?timeout=5") as backend:
        with pytest.raises(BackendError):
            backend.stats("q") if call == "stats" else backend.enqueue("q", [NewJob(b"x", str(n)) for n in range(50)])
        listener.close()
    thread.join(10)
    assert sent < 50_000_000
