"""Memos and details on Redis: what deletes them, and workers whose scripts do not know them.

``scripts_before_extras`` has the scripts of a version without memos. Their keys and arguments are the same.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

import pytest
from redis_old_worker import OLD_SCRIPTS, OldWorker

from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq.ids import new_id
from multiq_redis.records import pack_id
from multiq_redis.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease, Verdict

QUEUE = "q"
BOTH = After(memo=b"a memo", detail=b"a detail")
SIZES = [5, 5000]
"""Bytes of a body that is stored inside the record, and of one in the bodies hash."""
OLD_RELEASES = 32
"""The memo survives this many verdicts of workers that do not know memos, if these have no reason (docs/redis.md)."""


def key(name: str) -> str:
    return f"multiq:{{{QUEUE}}}:{name}"


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {name.decode() for name in client.scan_iter("multiq:*") if client.ttl(name) == -1}


def take(consumer: Consumer) -> Lease:
    (lease,) = consumer.reserve(1, 0)
    return lease


def with_both(backend: Backend, consumer: Consumer, size: int = 5, job_id: str = "job") -> str:
    """A ready job with a memo and a detail. Returns its id."""
    backend.enqueue(QUEUE, [NewJob(b"x" * size, job_id)])
    assert consumer.settle([Release(take(consumer), after=BOTH, reason="why")]) == [None]
    return job_id


def stored(backend: Backend, job_id: str = "job") -> tuple[bytes | None, bytes | None, str | None, int]:
    job = backend.peek(QUEUE, job_id)
    (listed,) = (one for one in backend.jobs(QUEUE, job.state).jobs if one.id == job_id)
    assert (listed.memo, listed.detail, listed.reason, listed.body) == (job.memo, job.detail, job.reason, job.body)
    return job.memo, job.detail, job.reason, len(job.body)


@pytest.fixture
def consumer(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer


# --- plain verdicts on jobs that have both ---------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_plain_verdicts_treat_memo_and_detail_as_promised(backend: Backend, consumer: Consumer, size: int) -> None:
    job = with_both(backend, consumer, size)
    assert stored(backend) == (b"a memo", b"a detail", "why", size)
    # When the job gets a plain touch, give-back and kick, then the memo and the detail stay
    lease = take(consumer)
    assert (lease.memo, len(lease.body)) == (b"a memo", size)
    assert consumer.settle([Touch(lease), GiveBack(lease)]) == [None] * 2
    assert stored(backend) == (b"a memo", b"a detail", "why", size)
    # And a plain bury, release and abandon delete the detail
    for verdict in (Bury, Release, Abandon):
        assert consumer.settle([Release(take(consumer), after=After(detail=b"new"))]) == [None]
        assert stored(backend) == (b"a memo", b"new", None, size)
        assert consumer.settle([verdict(take(consumer))]) == [None]
        assert stored(backend) == (b"a memo", b"", None, size)
        backend.kick_job(QUEUE, job)
    # And verdicts can set and delete the reason without a change of the memo
    assert consumer.settle([Release(take(consumer), reason="again", after=After(detail=b"d"))]) == [None]
    assert stored(backend) == (b"a memo", b"d", "again", size)
    assert consumer.settle([Release(take(consumer), reason="plain")]) == [None]
    assert stored(backend) == (b"a memo", b"", "plain", size)
    assert consumer.settle([Ack(take(consumer))]) == [None]


def test_verdict_after_a_memo_in_the_same_call_meets_the_memo(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    lease = take(consumer)
    verdicts: list[Verdict] = [
        Touch(lease, After(memo=b"1")),
        Touch(lease),
        Touch(lease, After(memo=b"2")),
        Release(lease),
    ]
    verdicts.append(Ack(lease))
    assert [lost is None for lost in consumer.settle(verdicts)] == [True] * 4 + [False]
    assert stored(backend)[0] == b"2"
    lease = take(consumer)
    assert consumer.settle([Touch(lease, After(memo=b"3")), Ack(lease)]) == [None] * 2


def acked(backend: Backend, consumer: Consumer) -> None:
    assert consumer.settle([Ack(take(consumer))]) == [None]


def acked_with_an_outcome(backend: Backend, consumer: Consumer) -> None:
    assert consumer.settle([Ack(take(consumer), After(keep=60))]) == [None]
    backend.forget(QUEUE, ["job"])


def deleted(backend: Backend, _: Consumer) -> None:
    backend.delete(QUEUE, "job")


def purged(backend: Backend, _: Consumer) -> None:
    assert backend.purge(QUEUE, [State.READY]) == 1


def rescheduled_and_acked(backend: Backend, consumer: Consumer) -> None:
    backend.reschedule(QUEUE, "job", 0)
    assert stored(backend)[:3] == (b"", b"", None)
    assert b"\x01" not in b"".join(name[-1:] for name in _fields(backend))
    acked(backend, consumer)


def _fields(backend: Backend) -> list[bytes]:
    with backend._pool.borrowed() as client:  # type: ignore[attr-defined]
        address = client.all_addresses()[0]
        return [name for hash_ in ("bodies", "reasons") for name in client.command(address, "HKEYS", key(hash_))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("end", [acked, acked_with_an_outcome, deleted, purged, rescheduled_and_acked])
def test_job_that_ends_takes_its_memo_and_detail_along(
    server: RedisServer, backend: Backend, consumer: Consumer, end: Callable[[Backend, Consumer], None], size: int
) -> None:
    # Given a job with a memo and a detail, and another job, so that the queue does not become empty
    with_both(backend, consumer, size)
    backend.enqueue(QUEUE, [NewJob(b"x", "other", delay=60)])
    # When the first job ends, then only the other job's keys are left
    end(backend, consumer)
    assert left(server) == {key("jobs"), key("delayed"), key("sequence"), key("hint")}
    assert server.ask("HLEN", key("jobs")) == 1


def test_ids_of_any_form_have_memos_of_their_own(backend: Backend, consumer: Consumer) -> None:
    ids = [new_id(), "a", "a" * 15, "a" * 16, "a" * 17, "\x01", "a\x01", "a" * 15 + "\x01", "a" * 16 + "\x01"]
    backend.enqueue(QUEUE, [NewJob(b"x" * 2000, job_id) for job_id in ids])
    leases = consumer.reserve(20, 0)
    assert consumer.settle([Release(lease, after=After(memo=lease.id.encode())) for lease in leases]) == [None] * 9
    leases = consumer.reserve(20, 0)
    assert [lease.memo.decode() for lease in leases] == [lease.id for lease in leases] == ids
    assert {lease.body for lease in leases} == {b"x" * 2000}


@pytest.mark.parametrize("size", SIZES)
def test_lease_that_ended_leaves_memo_and_detail(backend: Backend, consumer: Consumer, size: int) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x" * size, "job", ttr=1)])
    assert consumer.settle([Release(take(consumer), after=BOTH)]) == [None]
    take(consumer)
    time.sleep(1.1)
    lease = take(consumer)
    assert (lease.memo, lease.crashes, stored(backend)) == (b"a memo", 1, (b"a memo", b"a detail", None, size))


# --- workers whose scripts do not know memos -------------------------------------------------------------


@pytest.fixture
def old(server: RedisServer) -> OldWorker:
    return OldWorker(server)


def test_old_scripts_here_take_the_keys_of_the_plain_scripts() -> None:
    text = (OLD_SCRIPTS / "exchange.lua").read_text()
    assert "128" not in re.sub(r"\\128", "", text)
    assert len(script("exchange").keys) == len(set(re.findall(r"KEYS\[(\d+)\]", text)))


@pytest.mark.one_row
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("details", [b"r0::", b"r0::+because", b"x", b"g", b"b"])
def test_old_worker_loses_neither_memo_nor_body(
    backend: Backend, consumer: Consumer, old: OldWorker, details: bytes, size: int
) -> None:
    with_both(backend, consumer, size)
    # When workers that do not know memos handle the job again and again
    for _ in range(OLD_RELEASES):
        old.settle(old.reserve(), details)
        backend.kick_job(QUEUE, "job")
    # Then a worker that knows them still gets the memo, and the detail is still shown
    reason = {b"r0::+because": "because", b"g": "why"}.get(details)
    assert stored(backend) == (b"a memo", b"a detail", reason, size)
    lease = take(consumer)
    assert (lease.memo, len(lease.body)) == (b"a memo", size)
    # And after a verdict of this worker, the job is as if no old worker had handled it
    assert consumer.settle([Release(lease, reason="new")]) == [None]
    assert stored(backend) == (b"a memo", b"", "new", size)
    assert consumer.settle([Release(take(consumer))]) == [None]
    assert stored(backend) == (b"a memo", b"", None, size)


def test_old_worker_hands_the_same_body_to_its_task(backend: Backend, consumer: Consumer, server: RedisServer) -> None:
    for size in SIZES:
        job_id = with_both(backend, consumer, size, f"job {size}")
        old = OldWorker(server)
        token = os.urandom(12)
        packed, record, *rest = old.run("exchange", token, 1)[5:]
        assert packed == pack_id(job_id)
        body = rest[0] if record[40] & 1 else record[53:]
        assert body == b"x" * size
        old.settle((packed, token), b"a")


def test_memo_that_an_old_ack_left_is_not_shown_with_a_later_job_of_the_same_id(
    backend: Backend, consumer: Consumer, old: OldWorker
) -> None:
    # Given a job with a memo and a detail that an old worker has acked, while another job kept the queue from becoming
    # empty
    backend.enqueue(QUEUE, [NewJob(b"x", "other", delay=60)])
    with_both(backend, consumer)
    old.settle(old.reserve(), b"a")
    # When the id is enqueued again, then the new job has neither a memo nor a detail
    backend.enqueue(QUEUE, [NewJob(b"new", "job")])
    assert stored(backend)[:2] == (b"", b"")
    # And when the new job gets a detail, it does not get the old memo
    assert consumer.settle([Release(take(consumer), after=After(detail=b"d"))]) == [None]
    assert stored(backend)[:2] == (b"", b"d")
    backend.reschedule(QUEUE, "job", 0)
    old.settle(old.reserve(), b"a")
    with_both(backend, consumer)
    old.settle(old.reserve(), b"a")
    backend.enqueue(QUEUE, [NewJob(b"new", "job")])
    assert consumer.settle([GiveBack(take(consumer), after=After(memo=b"m"))]) == [None]
    assert stored(backend)[:2] == (b"m", b"")


@pytest.mark.parametrize("end", [acked, deleted, purged])
def test_memos_that_old_workers_left_go_with_the_queues_last_job(
    server: RedisServer,
    backend: Backend,
    consumer: Consumer,
    old: OldWorker,
    end: Callable[[Backend, Consumer], None],
) -> None:
    with_both(backend, consumer, job_id="before")
    old.settle(old.reserve(), b"a")
    with_both(backend, consumer, job_id="deleted")
    assert old.run("delete", pack_id("deleted")) == b"ok"
    assert left(server) == {key("bodies"), key("reasons")}
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    end(backend, consumer)
    assert left(server) == set()


def test_old_reschedule_starts_the_job_over_without_memo_and_detail(
    backend: Backend, consumer: Consumer, old: OldWorker
) -> None:
    with_both(backend, consumer)
    assert old.run("reschedule", pack_id("job"), 0) == b"ok"
    assert stored(backend)[:2] == (b"", b"")


def test_partitions_have_memos_and_details_too(server: RedisServer) -> None:
    with open_backend(f"{server.url}?partitions=4") as backend, backend.consumer([QUEUE]) as consumer:
        ids = backend.enqueue(QUEUE, [NewJob(b"x", f"job {number}") for number in range(20)])
        leases = consumer.reserve(20, 0)
        after = {job_id: After(memo=job_id.encode(), detail=job_id.encode() * 2) for job_id in ids}
        assert consumer.settle([Bury(lease, after=after[lease.id]) for lease in leases]) == [None] * 20
        assert {job.id: job.memo for job in backend.jobs(QUEUE, State.BURIED).jobs} == {
            job_id: job_id.encode() for job_id in ids
        }
        assert backend.kick(QUEUE, 20) == 20
        leases = consumer.reserve(20, 0)
        assert {lease.id: lease.memo for lease in leases} == {job_id: job_id.encode() for job_id in ids}
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 20
    assert left(server) == {key("partitions")}
