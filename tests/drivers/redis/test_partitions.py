"""A queue with several partitions: where its jobs are, which clients find them, and how the number changes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until
from waits import is_quiet

from multiq.backend import Ack, Bury, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendFull, EnqueuePartial, JobNotFound, JobReserved, UrlInvalid
from multiq.ids import new_id, new_ids
from multiq_redis import keys
from multiq_redis.records import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisCluster, RedisServer

    from multiq.backend import Backend

QUEUE = "mail"
SPREAD = 8
PARTITIONS = [keys.partition(QUEUE, number) for number in range(SPREAD)]


@pytest.fixture
def wide(server: RedisServer) -> Iterator[Backend]:
    """A backend that enqueues into several partitions."""
    with open_backend(f"{server.url}?partitions={SPREAD}") as backend:
        yield backend


@pytest.fixture
def narrow(server: RedisServer) -> Iterator[Backend]:
    """A backend that enqueues into one partition, and does not know of the others."""
    with open_backend(server.url) as backend:
        yield backend


def put(backend: Backend, count: int = 1, **options: Any) -> list[str]:
    return backend.enqueue(QUEUE, [NewJob(b"%d" % number, new_id(), **options) for number in range(count)])


def sizes(server: RedisServer) -> dict[str, int]:
    return {partition: server.ask("HLEN", keys.jobs(keys.base("multiq", partition))) for partition in PARTITIONS}


def drain(backend: Backend, limit: int = 100) -> list[str]:
    found = []
    with backend.consumer([QUEUE]) as consumer:
        while leases := consumer.reserve(limit, 0):
            found += [lease.id for lease in leases]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
    return found


@pytest.mark.parametrize("number", ["0", "65", "-1", "4.5", "four", ""])
def test_partition_count_out_of_range_is_refused(number: str) -> None:
    with pytest.raises(UrlInvalid, match="from 1 to 64"):
        open_backend(f"redis://localhost?partitions={number}")


# --- where jobs are --------------------------------------------------------------------------------------


def test_jobs_are_spread_over_all_partitions_one_by_one_and_in_batches(server: RedisServer, wide: Backend) -> None:
    ids = put(wide, 400)
    ids += [put(wide)[0] for _ in range(100)]
    found = sizes(server)
    assert sum(found.values()) == 500
    assert min(found.values()) > 20
    assert wide.queues() == [QUEUE]
    assert wide.stats(QUEUE).ready == 500
    assert sorted(drain(wide)) == sorted(ids)
    assert wide.queues() == []


def test_repeated_id_is_the_same_job(server: RedisServer, wide: Backend) -> None:
    jobs = [NewJob(b"x", job_id) for job_id in new_ids(50)]
    with open_backend(f"{server.url}?partitions={SPREAD}") as other:
        wide.enqueue(QUEUE, jobs)
        for job in jobs:
            other.enqueue(QUEUE, [job])
        assert other.stats(QUEUE).ready == 50


def test_order_holds_within_a_partition(wide: Backend) -> None:
    # Given jobs of two priorities, enqueued in turns
    for number in range(60):
        wide.enqueue(QUEUE, [NewJob(b"%02d" % number, new_id(), priority=5 - number % 2)])
    with wide.consumer([QUEUE]) as consumer:
        seen: dict[str, list[tuple[int, bytes]]] = {partition: [] for partition in PARTITIONS}
        while leases := consumer.reserve(7, 0):
            for lease in leases:
                seen[partition_of(lease)].append((lease.priority, lease.body))
            consumer.settle([Ack(lease) for lease in leases])
    # Then the jobs of each partition came by priority, then by age
    assert sum(map(len, seen.values())) == 60
    assert all(partition == sorted(partition) for partition in seen.values())


def test_no_partition_waits_for_the_others_to_end(wide: Backend) -> None:
    put(wide, 400)
    with wide.consumer([QUEUE]) as consumer:
        partitions = Counter(partition_of(lease) for _ in range(3 * SPREAD) for lease in consumer.reserve(1, 0))
    assert partitions == dict.fromkeys(PARTITIONS, 3)


def test_limit_is_filled_from_all_partitions_and_not_exceeded(wide: Backend) -> None:
    ids = put(wide, 100)
    with wide.consumer([QUEUE]) as consumer:
        first = consumer.reserve(70, 0)
        assert len(first) == 70
        rest = consumer.reserve(70, 0)
        assert sorted(lease.id for lease in first + rest) == sorted(ids)


def test_pages_go_through_all_partitions_whatever_their_size(wide: Backend) -> None:
    ids = put(wide, 60)
    for limit in (1, 7, 59, 60, 61):
        seen: list[str] = []
        after = None
        while True:
            page = wide.jobs(QUEUE, State.READY, limit=limit, after=after)
            seen += [job.id for job in page.jobs]
            after = page.after
            if after is None:
                break
            assert len(page.jobs) == limit
        assert sorted(seen) == sorted(ids)
        assert len(seen) == 60


def test_partitioned_queue_is_on_all_nodes_of_a_cluster(redis_cluster: RedisCluster) -> None:
    # Given a queue with enough partitions that each of the three masters has some
    with (
        open_backend(f"{redis_cluster.url}?partitions={SPREAD}") as backend,
        backend.consumer([QUEUE]) as consumer,
    ):
        ids = put(backend, 200)
        pattern = keys.jobs(keys.base("multiq", f"{QUEUE}*"))
        held = [len(node.ask("KEYS", pattern)) for node in redis_cluster.nodes]
        assert sum(held) == SPREAD
        assert min(held) > 0, held
        # Then every method reads or changes all partitions
        assert backend.stats(QUEUE).ready == 200
        assert backend.queues() == [QUEUE]
        leases = consumer.reserve(200, 0)
        assert sorted(lease.id for lease in leases) == sorted(ids)
        assert consumer.settle([Bury(lease) for lease in leases]) == [None] * 200
        assert backend.kick(QUEUE, 150) == 150
        assert backend.purge(QUEUE, [State.READY]) == 150
        assert len(backend.jobs(QUEUE, State.BURIED, limit=100).jobs) == 50
        # And a waiting consumer is notified of a job on any of them
        backend.purge(QUEUE, [State.BURIED])
        for _ in range(6):
            found: list[Any] = []
            waiting = threading.Thread(target=lambda: found.extend(consumer.reserve(1, 30)))  # noqa: B023
            waiting.start()
            until(lambda: _asleep(redis_cluster) == SPREAD, "it waits at every partition")
            (job_id,) = put(backend)
            waiting.join()
            assert [lease.id for lease in found] == [job_id]
            consumer.settle([Ack(lease) for lease in found])


def _asleep(cluster: RedisCluster) -> int:
    return sum(node.ask("INFO", "clients")["blocked_clients"] for node in cluster.nodes)


# --- another number of partitions -----------------------------------------------------------------------------


def test_client_with_one_partition_finds_the_jobs_of_all(wide: Backend, narrow: Backend) -> None:
    # Given jobs that both backends have enqueued
    ids = put(narrow, 20) + put(wide, 50)
    # Then the backend with one partition lists, moves, reserves and acks all of them
    assert narrow.stats(QUEUE).ready == 70
    assert len(narrow.jobs(QUEUE, State.READY, limit=100).jobs) == 70
    for job_id in ids:
        assert narrow.peek(QUEUE, job_id).id == job_id
    narrow.delete(QUEUE, ids[-1])
    assert narrow.reschedule(QUEUE, ids[-2], 3600) == ids[-2]
    narrow.kick_job(QUEUE, ids[-2])
    assert sorted(drain(narrow)) == sorted(ids[:-1])


@pytest.mark.parametrize("reader", ["wide", "narrow"])
def test_job_is_found_in_any_partition(reader: str, wide: Backend, narrow: Backend) -> None:
    looks, puts = (wide, narrow) if reader == "wide" else (narrow, wide)
    ids = put(puts, 30)
    for job_id in ids:
        assert looks.peek(QUEUE, job_id).state is State.READY
    with puts.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(30, 0)) == 30
        with pytest.raises(JobReserved):
            looks.delete(QUEUE, ids[0])
    with pytest.raises(JobNotFound):
        looks.peek(QUEUE, new_id())
    with pytest.raises(JobNotFound):
        looks.delete(QUEUE, new_id())


@pytest.mark.parametrize("learns_elsewhere", [False, True])
def test_reserve_that_has_not_asked_a_new_partition_does_not_see_all(
    wide: Backend, narrow: Backend, monkeypatch: pytest.MonkeyPatch, learns_elsewhere: bool
) -> None:
    # Given a job in a partition that the consumer does not know
    partition_for = wide._partitions.partition_for  # type: ignore[attr-defined]
    job_id = next(job_id for job_id in new_ids(100) if partition_for(QUEUE, _packed(job_id)) != QUEUE)
    wide.enqueue(QUEUE, [NewJob(b"", job_id)])
    with narrow.consumer([QUEUE]) as consumer:
        perform = consumer._perform  # type: ignore[attr-defined]

        def perform_after_another_call(*args: Any) -> Any:
            assert narrow.stats(QUEUE).ready == 1
            return perform(*args)

        with monkeypatch.context() as patch:
            if learns_elsewhere:
                patch.setattr(consumer, "_perform", perform_after_another_call)
            # Then the call that learns of the partition, or during which another call does, says so
            assert (consumer.reserve(1, 0), consumer.sees_all) == ([], False)
        # And the next call finds the job
        (lease,) = consumer.reserve(1, 0)
        assert lease.id == job_id
        assert consumer.settle([Ack(lease)]) == [None]
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], True)


@pytest.mark.long
def test_consumer_waiting_at_one_partition_learns_of_the_others_in_time(
    server: RedisServer, wide: Backend, narrow: Backend
) -> None:
    # Given a waiting consumer that knows only one partition
    with narrow.consumer([QUEUE]) as consumer:
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(consumer.reserve(100, 60)))
        waiting.start()
        until(lambda: server.ask("INFO", "clients")["blocked_clients"] == 1, "it waits")
        # When a job is enqueued into another partition
        partition_for = wide._partitions.partition_for  # type: ignore[attr-defined]
        job_id = next(job_id for job_id in new_ids(100) if partition_for(QUEUE, _packed(job_id)) != QUEUE)
        wide.enqueue(QUEUE, [NewJob(b"", job_id)])
        # Then the consumer finds it in a poll
        waiting.join()
        assert [lease.id for lease in found] == [job_id]
        # And from now on, jobs in that partition wake the consumer
        consumer.settle([Ack(found[0])])
        assert consumer.reserve(1, 0) == []


def _packed(job_id: str) -> bytes:
    return bytes.fromhex(job_id.replace("-", ""))


def test_paused_queue_that_gets_more_partitions_is_paused_in_all(wide: Backend, narrow: Backend) -> None:
    narrow.pause(QUEUE, 3600)
    put(wide, 100)
    assert drain(wide) == []
    assert 3500 < (wide.stats(QUEUE).paused_for or 0) <= 3600
    narrow.resume(QUEUE)
    assert wide.stats(QUEUE).paused_for is None
    assert len(drain(wide)) == 100


def test_partitions_added_during_a_pause_call_are_paused(
    wide: Backend, narrow: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a producer that adds partitions after the client that pauses has read their number
    partitions: Any = narrow._partitions  # type: ignore[attr-defined]
    refreshed = partitions.refreshed

    def asked_too_early(queue: str) -> list[str]:
        monkeypatch.undo()
        found: list[str] = refreshed(queue)
        put(wide, 100)
        return found

    monkeypatch.setattr(partitions, "refreshed", asked_too_early)
    narrow.pause(QUEUE, 3600)
    # Then no job is handed out
    assert drain(wide) == []
    narrow.resume(QUEUE)
    assert len(drain(wide)) == 100


def test_lost_partition_count_is_stored_again(
    server: RedisServer, wide: Backend, narrow: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(wide, 100)
    server.ask("FLUSHALL")
    monkeypatch.setattr("multiq_redis.partitions._ANNOUNCE_EVERY", 0.0)  # store the count at once
    put(wide, 100)
    assert len(drain(narrow)) == 100


def test_lease_can_be_settled_by_a_client_with_another_partition_count(wide: Backend, narrow: Backend) -> None:
    put(wide, 40)
    with wide.consumer([QUEUE]) as taker, narrow.consumer([QUEUE]) as settler:
        leases = taker.reserve(40, 0)
        assert settler.settle([Ack(lease) for lease in leases]) == [None] * 40
    assert wide.stats(QUEUE).reserved == 0


def test_doctor_reports_partitions_beyond_those_of_the_url(server: RedisServer, wide: Backend, narrow: Backend) -> None:
    def partition_findings(backend: Backend) -> list[str]:
        return [f"{found.why} {found.advice}" for found in backend.doctor() if found.what == "partitions"]

    assert partition_findings(narrow) == partition_findings(wide) == []
    put(wide, 100)
    (text,) = partition_findings(narrow)
    assert f"{QUEUE!r} has {SPREAD} partitions, and this URL enqueues over 1" in text
    assert "jobs are in the further ones" in text
    assert partition_findings(wide) == []
    # When these partitions are empty, then the doctor names the key that can be deleted
    drain(narrow)
    key = keys.partitions(keys.base("multiq", QUEUE))
    assert f"delete the key {key}" in partition_findings(narrow)[0]
    assert server.ask("DEL", key) == 1
    assert partition_findings(narrow) == []
    put(wide, 100)  # a running client still enqueues into all partitions, and reads them


# --- a part of a batch -----------------------------------------------------------------------------------


def test_batch_refused_by_one_full_node_reports_what_the_others_took() -> None:
    from servers.redis import RedisCluster

    with RedisCluster() as cluster, open_backend(f"{cluster.url}?partitions={SPREAD}&timeout=2") as backend:
        # Given one master that is full
        full = cluster.owner(cluster.slot_of(keys.jobs(keys.base("multiq", QUEUE))))  # the jobs of the first partition
        full.set("maxmemory", "1")
        # When a batch goes to all partitions
        jobs = [NewJob(b"x", job_id) for job_id in new_ids(100)]
        with pytest.raises(EnqueuePartial, match="maxmemory") as caught:
            backend.enqueue(QUEUE, jobs)
        # Then exactly the jobs that the error reports are stored
        accepted = caught.value.accepted
        assert isinstance(caught.value.__cause__, BackendFull)
        assert 0 < len(accepted) < 100
        assert all(jobs[at].id == job_id for at, job_id in accepted.items())
        stored = {job.id for job in backend.jobs(QUEUE, State.READY, limit=200).jobs}
        assert stored == set(accepted.values())
        # And when there is room, the whole batch can be repeated
        full.set("maxmemory", "0")
        backend.enqueue(QUEUE, jobs)
        assert backend.stats(QUEUE).ready == 100


# --- idle ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_idle_consumer_of_many_partitions_sends_no_more_than_one_of_a_single_partition(
    server: RedisServer, wide: Backend
) -> None:
    put(wide, 1)
    assert len(drain(wide)) == 1
    with wide.consumer([QUEUE]) as consumer:
        consumer.reserve(1, 0.2)  # pops the marker of the acked job

        def sent() -> int:
            before = _commands(server)
            assert consumer.reserve(1, 6) == []
            return _commands(server) - before

        is_quiet(sent, 4)


def _commands(server: RedisServer) -> int:
    stats = server.ask("INFO", "commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name in {"cmdstat_evalsha", "cmdstat_bzpopmin"})
