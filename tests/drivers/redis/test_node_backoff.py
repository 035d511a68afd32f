"""A consumer forgets that a node did not answer when its partitions are on another node."""

from __future__ import annotations

import contextlib

import pytest
from servers.process import until
from servers.redis import SLOTS, RedisCluster, RedisServer
from waits import is_quiet

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq.ids import new_id
from multiq_redis.cluster import slot_of


def knows_all(node: RedisServer) -> bool:
    return any(last == SLOTS - 1 for _, last, *_ in node.ask("CLUSTER", "SLOTS", raw=True))


@pytest.mark.long
def test_idle_consumer_is_quiet_after_a_failover() -> None:
    # Given a consumer whose queues are on all nodes, one of which is dead
    with (
        RedisCluster(cluster_node_timeout="15000") as cluster,
        open_backend(f"{cluster.url}?timeout=2") as backend,
    ):
        names = {cluster.owner(slot_of(name)).port: name for name in (f"queue-{n}" for n in range(30))}
        queues = [names[node.port] for node in cluster.nodes]
        *others, dead = cluster.nodes
        with backend.consumer(queues) as consumer:
            assert consumer.reserve(1, 0) == []
            dead.kill()
            with contextlib.suppress(BackendUnavailable):
                consumer.reserve(1, 1.5)
            # When another node gets the dead node's slots
            for node in others:
                node.ask("CLUSTER", "DELSLOTS", *range(SLOTS * 2 // 3, SLOTS))
            others[0].ask("CLUSTER", "ADDSLOTS", *range(SLOTS * 2 // 3, SLOTS))
            others[0].ask("CLUSTER", "BUMPEPOCH")
            until(lambda: all(knows_all(node) for node in others), "both know of it")
            backend.enqueue(queues[2], [NewJob(b"", new_id())])
            assert len(consumer.reserve(1, 10)) == 1
            assert consumer.reserve(1, 1) == []
            # Then the waiting consumer sends few commands again

            def sent() -> int:
                before = sum(node.consumers_sent for node in others)
                assert consumer.reserve(1, 2) == []
                return sum(node.consumers_sent for node in others) - before

            is_quiet(sent, 29)
