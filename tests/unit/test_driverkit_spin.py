"""The spin before a blocking read: data is received as soon as it is there, and spins become rarer after misses."""

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


def test_available_bytes_are_received(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    theirs.sendall(b"reply")
    assert reader.receive(3) == b"rep"
    assert reader.receive(3) == b"ly"


def test_missing_reply_is_given_up(pair: Pair) -> None:
    ours, _ = pair
    assert SpinReader(ours).receive(100) == b""


def test_misses_in_a_row_double_the_skipped_calls(pair: Pair) -> None:
    reader = SpinReader(pair[0])
    assert [skipped(reader) for _ in range(12)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_hit_resets_the_skipped_calls(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    for _ in range(5):
        skipped(reader)
    theirs.sendall(b"reply")
    assert reader.receive(100) == b"reply"
    assert skipped(reader) == 2


def test_skipped_calls_leave_the_bytes_to_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    reader.receive(100)
    theirs.sendall(b"reply")
    assert [reader.receive(100) for _ in range(3)] == [b"", b"", b"reply"]


def skipped(reader: SpinReader) -> int:
    """How many calls return without spinning after one that missed."""
    reader.receive(100)
    calls = int(reader._skip_calls)
    for _ in range(calls):
        reader.receive(100)
    return calls


def test_end_of_the_stream_is_left_to_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert SpinReader(ours).receive(100) == b""
    assert ours.recv(100) == b""


def test_socket_error_is_raised(pair: Pair) -> None:
    ours, _ = pair
    reader = SpinReader(ours)
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.receive(100)


def test_concurrent_reply_is_received_or_left_whole(pair: Pair) -> None:
    ours, theirs = pair
    reader = SpinReader(ours)
    for number in range(200):
        word = b"%d" % number
        sender = threading.Thread(target=theirs.sendall, args=(word,))
        sender.start()
        assert (reader.receive(100) or ours.recv(100)) == word
        sender.join()
