"""Held and doomed jobs beside workers whose scripts do not know such jobs, as docs/redis.md promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from redis_old_worker import OldWorker

from multiq.backend import Ack, Arrive, NewJob, Release, State, Terms
from multiq_redis.records import pack_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease

QUEUE = "q"
SIZES = [5, 5000]
"""Bytes of a body that is stored inside the record, and of one in the bodies hash."""
OLD_RELEASES = 28
"""A doomed job keeps its reason during this many verdicts of old workers, if these have no reason (docs/redis.md)."""


@pytest.fixture
def consumer(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer


@pytest.fixture
def old(server: RedisServer) -> OldWorker:
    return OldWorker(server, QUEUE)


def take(consumer: Consumer) -> Lease:
    (lease,) = consumer.reserve(1, 0)
    return lease


def hold(backend: Backend, size: int = 5, awaits: int = 1) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x" * size, "job", terms=Terms(awaits))])


def doom(backend: Backend) -> None:
    assert backend.carry_out([Arrive(QUEUE, "job", "a", doom="why")])


def test_old_worker_is_not_handed_a_held_job(backend: Backend, consumer: Consumer, old: OldWorker) -> None:
    hold(backend)
    backend.enqueue(QUEUE, [NewJob(b"x", "other")])
    # When an old worker reserves and acks the jobs that it sees
    old.settle(old.reserve(), b"a")
    assert len(old.run("exchange", b"t" * 12, 5)) == 5
    # Then the held job is still stored, and is released when its member arrives
    assert backend.peek(QUEUE, "job").state is State.HELD
    assert backend.carry_out([Arrive(QUEUE, "job", "a")])
    assert old.reserve()[0] == pack_id("job")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("details", [b"r0::", b"r0::+because", b"x", b"g", b"b"])
@pytest.mark.long
def test_old_worker_loses_neither_doom_nor_body(
    backend: Backend, consumer: Consumer, old: OldWorker, details: bytes, size: int
) -> None:
    hold(backend, size)
    doom(backend)
    # When old workers handle the doomed job again and again
    for _ in range(OLD_RELEASES):
        old.settle(old.reserve(), details)
        backend.kick_job(QUEUE, "job")
    # Then a new worker still gets the reason
    lease = take(consumer)
    assert (lease.doomed, len(lease.body), lease.memo) == ("why", size, b"")
    assert consumer.settle([Release(lease, reason="new")]) == [None]
    assert take(consumer).doomed == "why"


def test_doom_that_an_old_ack_left_is_not_that_of_a_later_job(
    backend: Backend, consumer: Consumer, old: OldWorker
) -> None:
    # Given a doomed job that an old worker has acked, while another job kept the queue from becoming empty
    backend.enqueue(QUEUE, [NewJob(b"x", "other", delay=3600)])
    hold(backend)
    doom(backend)
    old.settle(old.reserve(), b"a")
    # When its id is enqueued again, then the new job is not doomed
    hold(backend)
    assert backend.carry_out([Arrive(QUEUE, "job", "a")])
    lease = take(consumer)
    assert (lease.doomed, lease.memo) == ("", b"")
    assert consumer.settle([Ack(lease)]) == [None]


def test_held_job_that_an_old_client_deletes_never_starts_and_is_counted_until_a_purge(
    server: RedisServer, backend: Backend, consumer: Consumer, old: OldWorker
) -> None:
    hold(backend)
    assert old.run("delete", pack_id("job")) == b"ok"
    assert backend.carry_out([Arrive(QUEUE, "job", "a")])
    assert consumer.reserve(1, 0) == []
    assert backend.jobs(QUEUE, State.HELD).jobs == []
    assert backend.stats(QUEUE).held == 1
    backend.purge(QUEUE, [State.HELD])
    assert backend.stats(QUEUE).held == 0


def test_held_job_that_an_old_client_reschedules_is_ready_once(
    backend: Backend, consumer: Consumer, old: OldWorker
) -> None:
    # Given a held job that an old client has rescheduled
    hold(backend)
    assert old.run("reschedule", pack_id("job"), 0) == b"ok"
    # When its member arrives, and held jobs are listed and purged
    assert backend.carry_out([Arrive(QUEUE, "job", "a")])
    assert backend.jobs(QUEUE, State.HELD).jobs == []
    backend.purge(QUEUE, [State.HELD])
    # Then the job is handed out, once
    lease = take(consumer)
    assert lease.id == "job"
    assert consumer.settle([Ack(lease)]) == [None]
    assert consumer.reserve(1, 0) == []
    assert backend.stats(QUEUE).held == 0
