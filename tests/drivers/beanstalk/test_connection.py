"""Many replies to one packet, as a connection reads them: together, however they come, and no more than there are."""

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


def said(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\r\n" for line in lines)


def say_one_by_one(theirs: socket.socket, pieces: list[bytes]) -> threading.Thread:
    """As the server does that syncs its log before each reply."""

    def say() -> None:
        for piece in pieces:
            theirs.sendall(piece)
            time.sleep(0.001)

    thread = threading.Thread(target=say)
    thread.start()
    return thread


def test_replies_that_come_one_by_one_are_not_received_one_by_one(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    # When a hundred replies come one after the other
    thread = say_one_by_one(theirs, [said([line]) for line in INSERTED])
    assert connection.read_lines(JOBS, in_time()) == INSERTED
    thread.join()
    # Then whoever reads was not called for each
    assert isinstance(connection.sock, Counting)
    assert connection.sock.received < JOBS / 4


@pytest.mark.parametrize("line", [b"BURIED", b"DELETED", b"RELEASED", b"NOT_FOUND"])
def test_the_shortest_replies_are_all_that_is_waited_for(pair: tuple[Connection, socket.socket], line: bytes) -> None:
    connection, theirs = pair
    theirs.sendall(said([line] * JOBS))
    assert connection.read_many(JOBS, in_time(), lines=JOBS) == [(line, b"")] * JOBS
    theirs.sendall(said([line] * JOBS))
    assert connection.read_lines(JOBS, in_time()) == [line] * JOBS


def test_what_follows_verdicts_is_read_with_its_body(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    whole = said([b"DELETED"] * JOBS) + said([part for reply in RESERVED for part in reply])
    thread = say_one_by_one(theirs, [whole[at : at + 7] for at in range(0, len(whole), 7)])
    assert connection.read_many(JOBS + 3, in_time(), lines=JOBS) == [(b"DELETED", b"")] * JOBS + RESERVED
    thread.join()


@pytest.mark.parametrize("heard", [0, 1, 37, JOBS - 11, JOBS - 1])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "silent"])
def test_replies_that_came_before_a_failure_are_told(
    pair: tuple[Connection, socket.socket], heard: int, is_cut: bool
) -> None:
    connection, theirs = pair
    # Given some replies, and a piece of the next one
    theirs.sendall(said(INSERTED[:heard]) + INSERTED[heard][:5])
    # When the connection ends, or no more comes in time
    if is_cut:
        theirs.close()
    deadline = time.monotonic() + 0.2
    with pytest.raises(ConnectionError if is_cut else TimeoutError) as failure:
        connection.read_lines(JOBS, deadline)
    # Then nothing that was heard is lost, and nobody can read on in the middle of a reply
    assert failure.value.partly_read == INSERTED[:heard]  # type: ignore[attr-defined]
    assert connection.is_closed


@pytest.mark.parametrize("heard", [0, 1, 37, JOBS - 11, JOBS - 1])
def test_verdicts_that_were_heard_before_a_failure_are_told(pair: tuple[Connection, socket.socket], heard: int) -> None:
    connection, theirs = pair
    theirs.sendall(said([b"DELETED"] * heard) + b"DELE")
    theirs.close()
    with pytest.raises(ConnectionError) as failure:
        connection.read_many(JOBS + 3, in_time(), lines=JOBS)
    assert failure.value.partly_read == [(b"DELETED", b"")] * heard  # type: ignore[attr-defined]
    assert connection.is_closed
