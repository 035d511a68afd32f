"""A failover by an operator's command: the old primary accepts writes for ten seconds more, and these are lost."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest
import redis
from faults import new
from servers.process import until
from servers.redis import SERVICE, SentinelTrio

from multiq.backend import Ack
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisServer

QUEUE = "mail"


@pytest.fixture(params=["0", "1"], ids=["any writes", "min-replicas-to-write 1"])
def trio(request: pytest.FixtureRequest) -> Iterator[SentinelTrio]:
    """Sentinels with two replicas, so that the new primary has a replica before the old primary is demoted."""
    with SentinelTrio(replicas=2, min_replicas_to_write=request.param, min_replicas_max_lag="2") as trio:
        until(lambda: trio.primary.ask("INFO", "replication")["connected_slaves"] == 2, "both replicas are there")
        yield trio


def fail_over(trio: SentinelTrio) -> RedisServer:
    """The new primary, when a sentinel names it."""
    old = trio.primary.port
    trio.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)
    until(lambda: trio.primary_port != old, "a sentinel names another one")
    return next(one for one in trio.replicas if one.port == trio.primary_port)


def is_primary(server: RedisServer) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(server.ask("INFO", "replication")["role"] == "master")
    return False


@pytest.mark.one_row
def test_producers_and_consumers_leave_the_old_primary_before_it_is_demoted(trio: SentinelTrio) -> None:
    old = trio.primary
    with open_backend(trio.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new()])
        (held,) = consumer.reserve(1, 0)
        until(lambda: old.ask("WAIT", 2, 1000) == 2, "the replica has it all")
        coming = fail_over(trio)
        # When producer and consumer continue to make calls
        arrived = 0
        while is_primary(old) and not arrived:
            with contextlib.suppress(BackendUnavailable):
                (job_id,) = backend.enqueue(QUEUE, [new()])
                arrived = coming.ask("HEXISTS", "multiq:{mail}:jobs", _packed(job_id))
            time.sleep(0.01)
        # Then they use the new primary while the old one would still accept their writes
        assert arrived
        assert is_primary(old)
        assert consumer.settle([Ack(held)]) == [None]


@pytest.mark.long
def test_planned_failover_behind_a_pause_loses_nothing(trio: SentinelTrio) -> None:
    """What docs/redis.md says to do."""
    old = trio.primary
    acknowledged: set[str] = set()
    done: list[str] = []
    ended = threading.Event()
    errors: list[BaseException] = []

    def produce() -> None:
        try:
            with open_backend(trio.url) as backend:
                while not ended.is_set():
                    job = new()
                    while not ended.is_set():
                        with contextlib.suppress(BackendUnavailable, EnqueueUncertain):
                            acknowledged.update(backend.enqueue(QUEUE, [job]))
                            break
                    time.sleep(0.002)
        except BaseException as exc:
            errors.append(exc)

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        until(lambda: len(acknowledged) > 50, "jobs are enqueued")
        old.ask("CLIENT", "PAUSE", 60_000, "WRITE")
        offset = old.ask("INFO", "replication")["master_repl_offset"]
        for replica in trio.replicas:
            until(lambda: replica.ask("INFO", "replication")["slave_repl_offset"] >= offset, "it has it all")  # noqa: B023
        coming = fail_over(trio)
        until(lambda: is_primary(coming), "the replica is a primary")
        known = len(acknowledged)
        until(lambda: len(acknowledged) > known + 50, "jobs are enqueued at the new one")
    finally:
        ended.set()
        producer.join()
    assert not errors
    with open_backend(trio.url) as backend, backend.consumer([QUEUE]) as consumer:
        while leases := consumer.reserve(100, 0):
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            done += [lease.id for lease in leases]
    assert acknowledged <= set(done)
    assert len(done) == len(set(done))


def _packed(job_id: str) -> bytes:
    return bytes.fromhex(job_id.replace("-", ""))
