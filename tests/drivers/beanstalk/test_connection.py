"""The connection: reads many replies to one packet by few calls, however they arrive, and never waits for too many."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from servers.process import HOST

from multiq_beanstalk.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0
JOBS = 100

INSERTED = [b"INSERTED %d" % number for number in range(JOBS)]
RESERVED = [(b"RESERVED %d 6" % number, b"a\r\nb\r\n") for number in range(3)]


class Counting(socket.socket):
    """Counts the receives that found something."""

    received = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        self.received += 1
        return data


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = tcp_pair() if request.param == "tcp" else socket.socketpair()
    with closing(Connection(Counting(fileno=ours.detach()))) as connection, theirs:
        yield connection, theirs


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def in_time() -> float:
    return time.monotonic() + PATIENCE


def encoded(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\r\n" for line in lines)


def send_one_by_one(theirs: socket.socket, pieces: list[bytes]) -> threading.Thread:
    """Send each reply separately, like a server that syncs its log before each reply."""

    def say() -> None:
        for piece in pieces:
            theirs.sendall(piece)
            time.sleep(0.001)

    thread = threading.Thread(target=say)
    thread.start()
    return thread


def test_replies_sent_one_by_one_are_received_by_few_calls(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    # When a hundred replies come one after the other
    thread = send_one_by_one(theirs, [encoded([line]) for line in INSERTED])
    assert connection.read_lines(JOBS, in_time()) == INSERTED
    thread.join()
    # Then the client made fewer receives than there were replies
    assert isinstance(connection.sock, Counting)
    assert connection.sock.received < JOBS / 4


@pytest.mark.parametrize("line", [b"BURIED", b"DELETED", b"RELEASED", b"NOT_FOUND"])
def test_receive_waits_for_no_more_than_the_shortest_replies(
    pair: tuple[Connection, socket.socket], line: bytes
) -> None:
    connection, theirs = pair
    theirs.sendall(encoded([line] * JOBS))
    assert connection.read_many(JOBS, in_time(), lines=JOBS) == [(line, b"")] * JOBS
    theirs.sendall(encoded([line] * JOBS))
    assert connection.read_lines(JOBS, in_time()) == [line] * JOBS


def test_replies_after_verdicts_are_read_with_their_bodies(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    whole = encoded([b"DELETED"] * JOBS) + encoded([part for reply in RESERVED for part in reply])
    thread = send_one_by_one(theirs, [whole[at : at + 7] for at in range(0, len(whole), 7)])
    assert connection.read_many(JOBS + 3, in_time(), lines=JOBS) == [(b"DELETED", b"")] * JOBS + RESERVED
    thread.join()


@pytest.mark.parametrize("received", [0, 1, 37, JOBS - 11, JOBS - 1])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "silent"])
def test_error_carries_lines_received_before_it(
    pair: tuple[Connection, socket.socket], received: int, is_cut: bool
) -> None:
    connection, theirs = pair
    # Given some replies, and a part of the next one
    theirs.sendall(encoded(INSERTED[:received]) + INSERTED[received][:5])
    # When the connection ends, or no more comes in time
    if is_cut:
        theirs.close()
    deadline = time.monotonic() + 0.2
    with pytest.raises(ConnectionError if is_cut else TimeoutError) as failure:
        connection.read_lines(JOBS, deadline)
    # Then no received line is lost, and the connection cannot be read from the middle of a reply
    assert failure.value.partly_read == INSERTED[:received]  # type: ignore[attr-defined]
    assert connection.is_closed


@pytest.mark.parametrize("received", [0, 1, 37, JOBS - 11, JOBS - 1])
def test_error_carries_verdict_replies_received_before_it(
    pair: tuple[Connection, socket.socket], received: int
) -> None:
    connection, theirs = pair
    theirs.sendall(encoded([b"DELETED"] * received) + b"DELE")
    theirs.close()
    with pytest.raises(ConnectionError) as failure:
        connection.read_many(JOBS + 3, in_time(), lines=JOBS)
    assert failure.value.partly_read == [(b"DELETED", b"")] * received  # type: ignore[attr-defined]
    assert connection.is_closed
