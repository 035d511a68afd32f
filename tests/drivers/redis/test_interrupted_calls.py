"""Calls interrupted at any line of the driver: an unread reply must not be taken for the answer to the next call."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest
from servers.redis import RedisCluster

import multiq_redis
from multiq.backend import Ack, GiveBack, NewJob, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendFull, BackendUnavailable
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from servers.redis import RedisServer

    from multiq.backend import Backend

#: a connection that was just being made when its call was interrupted is left to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

QUEUE = "mail"
SPREAD = 4
FOLDER = multiq_redis.__path__[0]


class Interrupted(BaseException):
    """Stands for an exception that a time limit or a signal raises in the middle of a call."""


def traced(call: Callable[[], object], at_line: Callable[[tuple[str, int]], None]) -> None:
    """Make a call, and call *at_line* before each line of the driver's own code."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER) or code.co_name == "__del__":
            return None
        if event == "line":
            at_line((code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


def every_line(call: Callable[[], object]) -> Iterator[None]:
    """Interrupt *call* at each line of the driver that it reaches, the first and the second time that it reaches it."""
    lines: dict[tuple[str, int], None] = {}
    for _ in range(2):
        traced(call, lines.setdefault)
        yield
    assert len(lines) > 20
    for wanted, nth in itertools.product(lines, (1, 2)):
        left = [nth]

        def interrupt(line: tuple[str, int], wanted: tuple[str, int] = wanted, left: list[int] = left) -> None:
            left[0] -= line == wanted
            if line == wanted and not left[0]:
                raise Interrupted

        with contextlib.suppress(Interrupted):
            traced(call, interrupt)
        yield


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A private cluster, because the test changes it."""
    with RedisCluster() as cluster:
        yield cluster


def in_step(backend: Backend) -> None:
    """The next calls on the same connections get their own replies."""
    for number in range(3):
        assert backend.peek(QUEUE, f"job {number}").body == b"body %d" % number
    assert backend.stats("never used").ready == 0


def put_three(backend: Backend) -> None:
    backend.enqueue(QUEUE, [NewJob(b"body %d" % number, f"job {number}") for number in range(3)])


@pytest.mark.long
@pytest.mark.parametrize("partitions", [1, pytest.param(SPREAD, marks=pytest.mark.long)])
def test_producer_interrupted_anywhere_takes_no_reply_of_another_call(server: RedisServer, partitions: int) -> None:
    with open_backend(f"{server.url}?partitions={partitions}") as backend:
        put_three(backend)
        calls: list[Callable[[], object]] = [
            lambda: backend.enqueue(QUEUE, [NewJob(b"x", new_id())]),
            lambda: backend.enqueue(QUEUE, [NewJob(b"x", new_id()) for _ in range(10)]),
            lambda: backend.stats(QUEUE),
            lambda: backend.peek(QUEUE, "job 1"),
        ]
        for call in calls:
            for _ in every_line(call):
                in_step(backend)


@pytest.mark.long
@pytest.mark.parametrize("timeout", [0, pytest.param(0.01, marks=pytest.mark.long)])
def test_consumer_interrupted_anywhere_takes_no_reply_of_another_call(server: RedisServer, timeout: float) -> None:
    with open_backend(f"{server.url}?partitions={SPREAD}") as backend, backend.consumer(["empty"]) as consumer:
        backend.enqueue("other", [NewJob(b"x", new_id(), ttr=600)])
        for _ in every_line(lambda: consumer.reserve(1, timeout)):
            with backend.consumer(["other"]) as other:
                leases = other.reserve(1, 0)
                assert consumer.settle([Touch(lease) for lease in leases]) == [None]
                assert consumer.reserve(1, 0) == []
                assert other.settle([GiveBack(lease) for lease in leases]) == [None]


@pytest.mark.long
def test_refused_asking_leaves_no_reply_behind(cluster: RedisCluster) -> None:
    # Given an account that may use all commands but ASKING, and a slot that is moving from one node to another
    source = cluster.owner(cluster.slot_of("{mail}"))
    target = next(node for node in cluster.nodes if node is not source)
    there = next(name for name in map(str, range(1000)) if cluster.owner(cluster.slot_of(f"{{{name}}}")) is target)
    for node in cluster.nodes:
        node.ask("ACL", "SETUSER", "worker", "on", ">secret", "~*", "+@all", "-asking")
    ids = {node: node.ask("CLUSTER", "MYID").decode() for node in (source, target)}
    slot = cluster.slot_of("{mail}")
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    with open_backend(cluster.url.replace("://", "://worker:secret@") + "?timeout=1") as backend:
        # When a call is redirected to the other node, which refuses ASKING
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match=r"(?i)asking"):
                backend.enqueue("mail", [NewJob(b"x", new_id())])
            # Then the next calls to that node get their own replies
            backend.enqueue(there, [NewJob(b"y", new_id())])
        target.set("maxmemory", "1mb")
        for _ in range(4):
            with pytest.raises(BackendFull):
                backend.enqueue(there, [NewJob(b"z", new_id())])
        assert backend.stats(there).ready == 2
        with backend.consumer([there]) as consumer:
            leases = consumer.reserve(10, 0)
            assert [lease.body for lease in leases] == [b"y", b"y"]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None, None]
