"""Staying awake for a reply: caught when it is there, and given up where it never is."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.driverkit.spin import SpinReader

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_what_is_there_is_received(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    theirs.sendall(b"reply")
    assert reader.receive(3) == b"rep"
    assert reader.receive(3) == b"ly"


def test_what_does_not_come_is_not_waited_for(pair: Pair) -> None:
    ours, _ = pair
    assert SpinReader(ours).receive(100) == b""


def test_who_waits_in_vain_sleeps_through_more_calls_each_time(pair: Pair) -> None:
    reader = SpinReader(pair[0])
    assert [sleeps(reader) for _ in range(12)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_who_was_in_time_once_begins_anew(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    for _ in range(5):
        sleeps(reader)
    theirs.sendall(b"reply")
    assert reader.receive(100) == b"reply"
    assert sleeps(reader) == 2


def test_who_sleeps_leaves_what_is_there(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    reader.receive(100)
    theirs.sendall(b"reply")
    assert [reader.receive(100) for _ in range(3)] == [b"", b"", b"reply"]


def sleeps(reader: SpinReader) -> int:
    """How many calls it goes to sleep for after one that waits in vain."""
    reader.receive(100)
    calls = int(reader._skip_calls)
    for _ in range(calls):
        reader.receive(100)
    return calls


def test_the_end_of_a_connection_is_left_to_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert SpinReader(ours).receive(100) == b""
    assert ours.recv(100) == b""


def test_an_error_comes_through(pair: Pair) -> None:
    ours, _ = pair
    reader = SpinReader(ours)
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.receive(100)


def test_a_reply_that_another_thread_sends_meanwhile_is_caught_or_left_whole(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    for number in range(200):
        word = b"%d" % number
        sender = threading.Thread(target=theirs.sendall, args=(word,))
        sender.start()
        assert (reader.receive(100) or ours.recv(100)) == word
        sender.join()
