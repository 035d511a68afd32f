"""If one node of a cluster does not answer, queues and partitions on other nodes still work."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from faults import new
from servers.process import until
from servers.redis import RedisCluster

from multiq.backend import Ack, NewJob, Release
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueuePartial, EnqueueUncertain
from multiq.events import Events
from multiq.ids import new_id
from multiq.worker.execution.fetcher import Fetcher
from multiq_redis import keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease
    from multiq.worker.processes.inflight import Held

QUEUES = [f"queue-{number}" for number in range(6)]
SPREAD = 8
WIDE = "wide"
ENOUGH = 60
"""The number of jobs that are acked while the node is unreachable."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A private cluster, whose nodes keep their jobs over a restart."""
    with RedisCluster(appendonly="yes", cluster_node_timeout="15000") as cluster:
        yield cluster


@pytest.fixture(params=["stopped", "killed"])
def gone(request: pytest.FixtureRequest, cluster: RedisCluster) -> Iterator[contextlib.ExitStack]:
    """The stack to which ``take`` adds the node that it makes unreachable. At the end the node is reachable again."""
    with contextlib.ExitStack() as stack:
        stack.kind = request.param  # type: ignore[attr-defined]
        yield stack


def take(node: RedisServer, gone: contextlib.ExitStack) -> None:
    if gone.kind == "stopped":  # type: ignore[attr-defined]
        node.pause()
        gone.callback(node.go_on)
    else:
        node.kill()
        gone.callback(node.start)


def of_node(cluster: RedisCluster, names: list[str]) -> dict[int, list[str]]:
    """The names, grouped by the port of the node that has their slots."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(cluster.owner(cluster.slot_of(f"{{{name}}}")).port, []).append(name)
    return found


def work(consumer: Consumer, count: int, seconds: float) -> list[Lease]:
    """Reserve and ack, repeating after errors, until this number of jobs is done, or the time is over."""
    done: list[Lease] = []
    owed: list[Lease] = []
    end = time.monotonic() + seconds
    while len(done) < count and time.monotonic() < end:
        try:
            lost = consumer.settle([Ack(lease) for lease in owed])
        except BackendUnavailable:
            pass
        else:
            assert lost == [None] * len(owed)
            done += owed
            owed = []
        with contextlib.suppress(BackendUnavailable):
            owed += consumer.reserve(10, 0.2)
    return done


@pytest.mark.long
def test_other_queues_of_a_consumer_go_on(cluster: RedisCluster, gone: contextlib.ExitStack) -> None:
    by_node = of_node(cluster, QUEUES)
    dead = QUEUES[0]
    node = cluster.owner(cluster.slot_of(f"{{{dead}}}"))
    others = [name for name in QUEUES if name not in by_node[node.port]]
    with open_backend(cluster.url + "?timeout=2") as backend, backend.consumer(QUEUES) as consumer:
        assert consumer.reserve(1, 0) == []
        for number in range(ENOUGH):
            backend.enqueue(others[number % len(others)], [new()])
        take(node, gone)
        done = work(consumer, ENOUGH, 20)
        assert len({lease.id for lease in done}) == ENOUGH
        gone.close()
        # And when the node is back, its own queue works, too
        deadline = time.monotonic() + 20
        job = new()
        while time.monotonic() < deadline:
            with contextlib.suppress(BackendUnavailable, EnqueueUncertain):
                (job_id,) = backend.enqueue(dead, [job])
                break
        assert [lease.id for lease in work(consumer, 1, 20)] == [job_id]


@pytest.mark.one_row
def test_consumer_does_not_see_all_jobs_while_a_node_does_not_answer(
    cluster: RedisCluster, gone: contextlib.ExitStack
) -> None:
    by_node = of_node(cluster, QUEUES)
    dead = QUEUES[0]
    node = cluster.owner(cluster.slot_of(f"{{{dead}}}"))
    other = next(name for name in QUEUES if name not in by_node[node.port])

    def is_empty(consumer: Consumer) -> bool:
        try:
            return not consumer.reserve(1, 0)
        except BackendUnavailable:
            return False

    with open_backend(cluster.url + "?timeout=2") as backend, backend.consumer([dead, other]) as consumer:
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], True)
        take(node, gone)
        # When the other node has answered that its queue is empty
        until(lambda: is_empty(consumer), "the other node has answered")
        # Then this does not mean that no job is due
        assert not consumer.sees_all
        gone.close()
        until(lambda: is_empty(consumer) and consumer.sees_all, "both nodes have answered")


def acked(jobs: list[Held]) -> list[Held]:
    """Give each job the verdict ``Ack``, as if it had run."""
    for held in jobs:
        held.verdict = Ack(held.lease)
    return jobs


@pytest.mark.long
def test_verdict_for_the_dead_node_waits_and_gets_the_right_answer(
    cluster: RedisCluster, gone: contextlib.ExitStack
) -> None:
    by_node = of_node(cluster, QUEUES)
    dead = QUEUES[0]
    node = cluster.owner(cluster.slot_of(f"{{{dead}}}"))
    other = next(name for name in QUEUES if name not in by_node[node.port])
    with open_backend(cluster.url + "?timeout=2") as backend, backend.consumer([dead, other]) as consumer:
        backend.enqueue(dead, [new(ttr=600)])
        (held,) = consumer.reserve(1, 0)
        fetcher = Fetcher(consumer, Events(), "worker")
        jobs = fetcher._hold([held])  # as if the fetcher had reserved the job
        for _ in range(ENOUGH):
            backend.enqueue(other, [new()])
        take(node, gone)
        # When a worker has a verdict for this job, then it still gets the jobs of the other queue
        jobs = fetcher.exchange(acked(jobs), 10, 0.2)
        done = 0
        end = time.monotonic() + 20
        while done < ENOUGH and time.monotonic() < end:
            done += len(jobs)
            jobs = fetcher.exchange(acked(jobs), 10, 0.2)
        assert done == ENOUGH
        gone.close()
        end = time.monotonic() + 20
        while fetcher.has_unsettled and time.monotonic() < end:
            fetcher.settle([])
            time.sleep(0.1)
        assert not fetcher.has_unsettled
        assert backend.stats(dead).reserved == backend.stats(other).reserved == 0
        assert backend.stats(dead).ready == backend.stats(other).ready == 0


@pytest.mark.long
def test_other_partitions_of_a_queue_go_on(cluster: RedisCluster, gone: contextlib.ExitStack) -> None:
    partitions = [keys.partition(WIDE, number) for number in range(SPREAD)]
    by_node = of_node(cluster, partitions)
    assert len(by_node) > 1
    first = cluster.owner(cluster.slot_of(f"{{{partitions[0]}}}"))
    with open_backend(f"{cluster.url}?timeout=2&partitions={SPREAD}") as backend:
        ids = {partition: [] for partition in partitions}  # type: dict[str, list[str]]
        while min(map(len, ids.values())) < 8:
            job_id = new_id()
            ids[_home(backend, job_id)].append(job_id)
        backend.enqueue(WIDE, [new()])
        with backend.consumer([WIDE]) as consumer:
            consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)])
            for partition in partitions:
                backend.enqueue(WIDE, [_job(job_id) for job_id in ids[partition]])
            take(first, gone)
            alive = {
                job_id for partition in partitions if partition not in by_node[first.port] for job_id in ids[partition]
            }
            done = work(consumer, len(alive), 20)
            assert {lease.id for lease in done} >= alive
        gone.close()
    _drain(cluster)


@pytest.mark.long
def test_producer_whose_first_partition_is_dead_fills_the_others(
    cluster: RedisCluster, gone: contextlib.ExitStack
) -> None:
    partitions = [keys.partition(WIDE, number) for number in range(SPREAD)]
    by_node = of_node(cluster, partitions)
    first = cluster.owner(cluster.slot_of(f"{{{partitions[0]}}}"))
    with open_backend(f"{cluster.url}?timeout=2&partitions={SPREAD}") as backend:
        take(first, gone)
        accepted: list[str] = []
        while len(accepted) < 16:
            job_id = new_id()
            if _home(backend, job_id) not in by_node[first.port]:
                accepted += backend.enqueue(WIDE, [_job(job_id)])
        gone.close()
        with open_backend(cluster.url) as narrow:
            # And when it is back, clients that do not know the partitions learn of them by the next enqueue
            end = time.monotonic() + 30
            while time.monotonic() < end:
                with contextlib.suppress(BackendUnavailable, EnqueueUncertain):
                    backend.enqueue(WIDE, [new()])
                    if len(narrow._partitions.refreshed(WIDE)) == SPREAD:  # type: ignore[attr-defined]
                        break
                time.sleep(0.2)
            assert (narrow.stats(WIDE).ready or 0) >= 16
    _drain(cluster)


@pytest.mark.one_row
def test_new_partitions_of_a_paused_queue_are_paused_though_the_first_attempt_failed(
    cluster: RedisCluster, gone: contextlib.ExitStack
) -> None:
    queue = f"paused-{new_id()}"
    partitions = [keys.partition(queue, number) for number in range(SPREAD)]
    first = cluster.owner(cluster.slot_of(f"{{{partitions[0]}}}"))
    other = next(node for node in cluster.nodes if node is not first)
    assert any(cluster.owner(cluster.slot_of(f"{{{partition}}}")) is other for partition in partitions)
    with open_backend(cluster.url) as narrow, open_backend(f"{cluster.url}?timeout=1&partitions={SPREAD}") as wide:
        narrow.pause(queue, 600)
        take(other, gone)
        for _ in range(2):
            with pytest.raises(BackendUnavailable):
                wide.enqueue(queue, [new() for _ in range(20)])
        gone.close()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(BackendUnavailable, EnqueueUncertain, EnqueuePartial):
                wide.enqueue(queue, [new() for _ in range(20)])
                break
        for backend in (wide, narrow):
            with backend.consumer([queue]) as consumer:
                assert consumer.reserve(100, 0) == []
                assert consumer.reserve(100, 0) == []
        wide.resume(queue)
        with wide.consumer([queue]) as consumer:
            assert len(consumer.reserve(100, 0)) >= 20


@pytest.mark.one_row
def test_release_that_was_cut_off_counts_once(cluster: RedisCluster, gone: contextlib.ExitStack) -> None:
    dead = QUEUES[0]
    node = cluster.owner(cluster.slot_of(f"{{{dead}}}"))
    with open_backend(cluster.url + "?timeout=1") as backend, backend.consumer(QUEUES) as consumer:
        backend.enqueue(dead, [new(ttr=600)])
        (held,) = consumer.reserve(1, 0)
        take(node, gone)
        for _ in range(3):
            with pytest.raises(BackendUnavailable):
                consumer.settle([Release(held)])
        gone.close()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with contextlib.suppress(BackendUnavailable):
                assert consumer.settle([Release(held)]) == [None]
                break
        (again,) = work(consumer, 1, 20)
        assert (again.id, again.attempt) == (held.id, 2)


def _job(job_id: str) -> NewJob:
    return NewJob(b"x", job_id)


def _home(backend: Backend, job_id: str) -> str:
    from multiq_redis.records import pack_id

    partition_for: str = backend._partitions.partition_for(WIDE, pack_id(job_id))  # type: ignore[attr-defined]
    return partition_for


def _drain(cluster: RedisCluster) -> None:
    end = time.monotonic() + 20
    with open_backend(f"{cluster.url}?partitions={SPREAD}") as backend, backend.consumer([WIDE]) as consumer:
        while time.monotonic() < end:
            with contextlib.suppress(BackendUnavailable):
                leases = consumer.reserve(100, 0)
                if not leases:
                    return
                consumer.settle([Ack(lease) for lease in leases])
