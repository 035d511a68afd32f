"""CLIENT UNBLOCK is never sent: during a failover it ends servers before 8.2."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from faults import new
from servers.process import until
from servers.redis import RedisCluster

from multiq.backend import Ack
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Lease

PAUSE = 2.0  # seconds


def blocked(server: RedisServer) -> int:
    return int(server.ask("INFO", "clients")["blocked_clients"])


@pytest.mark.long
@pytest.mark.parametrize("queues", [["one"], ["one", "two"]], ids=["one queue", "two queues"])
@pytest.mark.parametrize("end", ["time", "interrupt"])
def test_wait_that_ends_while_writes_are_paused_leaves_the_server_alive(
    new_redis: Callable[..., RedisServer], queues: list[str], end: str
) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer(queues) as consumer:
        # Given a consumer that knows that no job is due, and begins to wait while a failover pauses all writes
        assert consumer.reserve(1, 0) == []
        server.ask("CLIENT", "PAUSE", int(PAUSE * 1000), "WRITE")
        if end == "interrupt":
            threading.Timer(0.2, consumer.interrupt).start()
        # When the wait ends
        started = time.monotonic()
        assert consumer.reserve(1, 0.3 if end == "time" else 60) == []
        assert time.monotonic() - started < 30
        # Then the server still runs, and the consumer gets the next job
        assert server.is_running
        (job_id,) = backend.enqueue(queues[-1], [new()])
        leases = consumer.reserve(1, 20)
        assert [(lease.id, lease.attempt) for lease in leases] == [(job_id, 1)]
        assert consumer.settle([Ack(lease) for lease in leases]) == [None]
        assert "cmdstat_client|unblock" not in server.ask("INFO", "commandstats")


def test_exact_end_of_a_wait_needs_no_new_connection(server: RedisServer, backend: Backend) -> None:
    with backend.consumer(["one", "two"]) as consumer:
        backend.enqueue("one", [new(delay=0.1)])
        assert len(consumer.reserve(1, 5)) == 1
        before = server.ask("INFO", "stats")["total_connections_received"]
        for _ in range(20):
            assert consumer.reserve(1, 0.03) == []
        assert server.ask("INFO", "stats")["total_connections_received"] - before <= 20 + 1  # 1 for each ``ask``
        commands = server.ask("INFO", "commandstats")
        assert "cmdstat_client|unblock" not in commands


def test_wakeup_markers_leave_no_key_behind(server: RedisServer, backend: Backend) -> None:
    with backend.consumer(["one", "two"]) as consumer:
        consumer.reserve(1, 0)
        for _ in range(10):
            threading.Timer(0.02, consumer.interrupt).start()
            consumer.reserve(1, 30)
        until(lambda: not server.ask("KEYS", "*wakeup*") or _expire(server), "no marker stays")


def _expire(server: RedisServer) -> bool:
    return all(server.ask("TTL", key) > 0 for key in server.ask("KEYS", "*wakeup*"))


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A private cluster."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.mark.long
def test_cluster_with_paused_writes_survives_a_consumer_of_several_queues(cluster: RedisCluster) -> None:
    queues = [f"queue-{number}" for number in range(6)]
    with open_backend(cluster.url) as backend, backend.consumer(queues) as consumer:
        assert consumer.reserve(1, 0) == []
        for node in cluster.nodes:
            node.ask("CLIENT", "PAUSE", int(PAUSE * 1000), "WRITE")
        threading.Timer(0.2, consumer.interrupt).start()
        assert consumer.reserve(1, 60) == []
        assert all(node.is_running for node in cluster.nodes)
        for queue in queues:
            backend.enqueue(queue, [new()])
        found: list[Lease] = []
        while len(found) < len(queues):
            leases = consumer.reserve(10, 5)
            assert leases
            found += leases
