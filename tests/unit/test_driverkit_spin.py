"""Staying awake for a reply: caught when it is there, and given up where it never is."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.driverkit.spin import Vigil

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
    vigil = Vigil(ours)
    theirs.sendall(b"reply")
    assert vigil.receive(3) == b"rep"
    assert vigil.receive(3) == b"ly"


def test_what_does_not_come_is_not_waited_for(pair: Pair) -> None:
    ours, _ = pair
    assert Vigil(ours).receive(100) == b""


def test_who_waits_in_vain_sleeps_through_more_calls_each_time(pair: Pair) -> None:
    vigil = Vigil(pair[0])
    assert [sleeps(vigil) for _ in range(12)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_who_was_in_time_once_begins_anew(pair: Pair) -> None:
    ours, theirs = pair
    vigil = Vigil(ours)
    for _ in range(5):
        sleeps(vigil)
    theirs.sendall(b"reply")
    assert vigil.receive(100) == b"reply"
    assert sleeps(vigil) == 2


def test_who_sleeps_leaves_what_is_there(pair: Pair) -> None:
    ours, theirs = pair
    vigil = Vigil(ours)
    vigil.receive(100)
    theirs.sendall(b"reply")
    assert [vigil.receive(100) for _ in range(3)] == [b"", b"", b"reply"]


def sleeps(vigil: Vigil) -> int:
    """How many calls it goes to sleep for after one that waits in vain."""
    vigil.receive(100)
    calls = int(vigil._asleep_for)
    for _ in range(calls):
        vigil.receive(100)
    return calls


def test_the_end_of_a_connection_is_left_to_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert Vigil(ours).receive(100) == b""
    assert ours.recv(100) == b""


def test_an_error_comes_through(pair: Pair) -> None:
    ours, _ = pair
    vigil = Vigil(ours)
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        vigil.receive(100)


def test_a_reply_that_another_thread_sends_meanwhile_is_caught_or_left_whole(pair: Pair) -> None:
    ours, theirs = pair
    vigil = Vigil(ours)
    for number in range(200):
        word = b"%d" % number
        sender = threading.Thread(target=theirs.sendall, args=(word,))
        sender.start()
        assert (vigil.receive(100) or ours.recv(100)) == word
        sender.join()
