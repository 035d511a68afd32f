"""The proxy that other tests break connections with: what it counts, cuts and lets through."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest
from proxy import CutReply, CutRequest, Hole, Latency, Pass, Proxy, Slice
from servers.process import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisServer

PONG = b"+PONG\r\n"


@pytest.fixture(params=["tcp", "unix"])
def proxy(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Proxy]:
    redis_server.ask("FLUSHALL")
    upstream = ("127.0.0.1", redis_server.port) if request.param == "tcp" else str(redis_server.socket)
    with Proxy(upstream) as proxy:
        yield proxy


@contextlib.contextmanager
def connected(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as client:
        yield client


def ask(client: socket.socket, line: bytes, size: int) -> bytes:
    """The first *size* bytes of the answer to a line, fewer if the connection ends."""
    client.sendall(line + b"\r\n")
    return read(client, size)


def read(client: socket.socket, size: int) -> bytes:
    answer = b""
    while len(answer) < size and (piece := client.recv(size - len(answer))):
        answer += piece
    return answer


def test_proxy_passes_and_counts_both_directions(proxy: Proxy) -> None:
    with connected(proxy) as client:
        assert ask(client, b"PING", 7) == PONG
        assert ask(client, b"PING", 7) == PONG
    assert (proxy.sent, proxy.replied, proxy.accepted) == (12, 14, 1)


@pytest.mark.parametrize("at", [0, 1, 3, 6])
def test_cut_reply_ends_at_the_byte_and_its_command_was_carried_out(
    proxy: Proxy, redis_server: RedisServer, at: int
) -> None:
    with connected(proxy) as client:
        proxy.arm(CutReply(at=at, after=b"APPEND"))
        assert ask(client, b"SET key 123", 5) == b"+OK\r\n"
        assert ask(client, b"APPEND key " + b"x" * 997, 8) == b":1000\r\n"[:at]
    assert redis_server.ask("STRLEN", "key") == 1000


@pytest.mark.parametrize("at", [0, 1, 5])
def test_cut_request_is_never_carried_out(proxy: Proxy, redis_server: RedisServer, at: int) -> None:
    with connected(proxy) as client:
        proxy.arm(CutRequest(at=at, after=b"INCR"))
        assert ask(client, b"INCR count", 8) == b""
    assert redis_server.ask("EXISTS", "count") == 0
    assert not proxy.is_armed


def test_fault_waits_for_the_nth_match_across_pieces_and_connections(proxy: Proxy) -> None:
    proxy.arm(CutRequest(after=b"PING", nth=3))
    with connected(proxy) as first, connected(proxy) as second:
        assert ask(first, b"PING", 7) == PONG
        second.sendall(b"PI")
        until(lambda: proxy.sent == 8, "the first half went through")
        assert ask(second, b"NG", 7) == PONG
        assert proxy.is_armed
        assert ask(first, b"PING", 7) == b""
        assert ask(second, b"PING", 7) == PONG


def test_reset_arrives_as_a_reset(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.arm(CutReply(rst=True))
        with pytest.raises(ConnectionResetError):
            ask(client, b"PING", 7)


def test_black_hole_takes_everything_and_answers_nothing(proxy: Proxy, redis_server: RedisServer) -> None:
    with connected(proxy) as client:
        proxy.mode = Hole()
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ask(client, b"INCR count", 1)
    proxy.mode = Pass()
    with connected(proxy) as client:
        assert ask(client, b"PING", 7) == PONG
    assert redis_server.ask("EXISTS", "count") == 0


def test_slices_and_latency_change_the_time_of_a_reply_and_not_its_content(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.mode = Slice(1)
        assert ask(client, b"ECHO hello", 11) == b"$5\r\nhello\r\n"
        proxy.mode = Latency(0.2)
        start = time.monotonic()
        assert ask(client, b"PING", 7) == PONG
        assert time.monotonic() - start >= 0.2


def test_proxy_refuses_and_accepts_again_on_the_same_port(proxy: Proxy) -> None:
    with connected(proxy) as client:
        assert ask(client, b"PING", 7) == PONG
        proxy.refuse()
        assert read(client, 1) == b""
    with pytest.raises(ConnectionRefusedError), connected(proxy):
        pass
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", proxy.port))  # although the proxy does not listen on this address
    proxy.accept()
    with connected(proxy) as client:
        assert ask(client, b"PING", 7) == PONG
