"""A hundred thousand jobs that fall due in one instant: no job is handed out early or twice, and all are handed out.

The test prints how long other clients wait meanwhile. ``benchmarks/redis_backlog.py`` measures this.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from redis_backlog import Bystander

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.ids import new_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.redis import RedisServer

    from multiq.backend import Lease

QUEUE = "mail"
JOBS = 100_000
BATCH = 1_000


@pytest.mark.long
def test_hundred_thousand_jobs_due_at_once_are_reserved_once_each_and_none_early(
    new_redis: Callable[..., RedisServer],
) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given jobs that are all due at one moment, by the clock that the server and the test share
        moment = time.time() + 20
        not_before: dict[str, float] = {}
        for _ in range(JOBS // BATCH):
            delay = moment - (now := time.time())
            assert delay > 0, "this machine is too slow to prepare the test in time"
            ids = new_ids(BATCH)
            backend.enqueue(QUEUE, [NewJob(b"x", job_id, delay=delay) for job_id in ids])
            not_before.update(dict.fromkeys(ids, now + delay))
        # When a consumer reserves jobs until all are acked, and begins before that moment
        held: list[Lease] = []
        with Bystander(server) as bystander:
            while not_before or held:
                lost, leases = consumer.exchange([Ack(lease) for lease in held], 500, 30 if not_before else 0)
                now = time.time()
                assert set(lost) <= {None}
                # Then each job comes once, and not early
                assert all(not_before.pop(lease.id) <= now for lease in leases)
                assert leases or not not_before, f"{len(not_before)} jobs are missing"
                held = leases
        stats = backend.stats(QUEUE)
        assert (stats.ready, stats.delayed, stats.reserved) == (0, 0, 0)
    waits = sorted(bystander.waits)
    print(
        f"{len(waits)} PINGs meanwhile: median {waits[len(waits) // 2] * 1000:.2f} ms, "
        f"p99 {waits[len(waits) * 99 // 100] * 1000:.2f} ms, longest {waits[-1] * 1000:.2f} ms"
    )
