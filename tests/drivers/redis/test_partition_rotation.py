"""The rotation through a queue's partitions, for a consumer of one queue and of several."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.ids import new_id
from multiq_redis.records import partition_of

if TYPE_CHECKING:
    from servers.redis import RedisServer

SPREAD = 4


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_partition_waits_for_the_others_to_end(server: RedisServer, count: int) -> None:
    queues = [f"queue-{number}" for number in range(count)]
    with open_backend(f"{server.url}?partitions={SPREAD}") as backend, backend.consumer(queues) as consumer:
        for queue in queues:
            backend.enqueue(queue, [NewJob(b"x", new_id()) for _ in range(400)])
        # Given a worker whose batches reach into every queue now and then
        seen: dict[str, Counter[str]] = {queue: Counter() for queue in queues}
        for turn in range(4 * SPREAD):
            leases = consumer.reserve(5, 0, queues[turn % count :] + queues[: turn % count] if count == 3 else None)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            for lease in leases:
                seen[lease.queue][partition_of(lease)] += 1
        # Then jobs came from each partition of the first queue
        assert len(seen[queues[0]]) == SPREAD


def test_two_queues_rotate_their_partitions_independently(server: RedisServer) -> None:
    queues = ["first", "second"]
    with open_backend(f"{server.url}?partitions={SPREAD}") as backend, backend.consumer(queues) as consumer:
        backend.enqueue("second", [NewJob(b"x", new_id()) for _ in range(400)])
        seen: Counter[str] = Counter()
        for _ in range(2 * SPREAD):
            leases = consumer.reserve(5, 0)  # this call asks the empty queue first
            seen.update(map(partition_of, leases))
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        assert len(seen) == SPREAD
