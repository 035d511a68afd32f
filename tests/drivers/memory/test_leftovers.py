"""After jobs are gone, and for queues that are empty and not paused, nothing is left in memory."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, After, Gate, NewJob, Quota, State, Terms, UniqueKey
from multiq.backend.memory import JobQueue, MemoryBackend
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Consumer


def new(count: int = 1, **options: float) -> list[NewJob]:
    return [NewJob(b"x", f"{time.monotonic_ns()}-{number}", **options) for number in range(count)]  # type: ignore[arg-type]


def acked(backend: MemoryBackend) -> None:
    backend.enqueue("q", new(3))
    with backend.consumer(["q"]) as consumer:
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(5, 0)]) == [None] * 3


def deleted(backend: MemoryBackend) -> None:
    for job_id in backend.enqueue("q", [*new(2), *new(delay=60)]):
        backend.delete("q", job_id)


def purged(backend: MemoryBackend) -> None:
    backend.enqueue("q", [*new(2), *new(delay=60)])
    assert backend.purge("q", [State.READY, State.DELAYED]) == 3


def resumed(backend: MemoryBackend) -> None:
    backend.pause("q", 60)
    backend.resume("q")


def paused_for_a_moment(backend: MemoryBackend) -> None:
    backend.pause("q", 0.01)
    time.sleep(0.02)
    assert backend.queues() == []


def looked_at(backend: MemoryBackend) -> None:
    backend.stats("q")
    backend.jobs("q", State.READY)
    backend.kick("q", 1)
    backend.enqueue("q", [])
    with backend.consumer(["q"]) as consumer:
        assert consumer.reserve(1, 0.01) == []


def kept_and_forgotten(backend: MemoryBackend) -> None:
    ids = backend.enqueue("q", new(3))
    with backend.consumer(["q"]) as consumer:
        consumer.settle([Ack(lease, After(keep=60)) for lease in consumer.reserve(5, 0)])
    assert backend.forget("q", ids) == 3
    assert backend.history("q").outcomes == []


@pytest.mark.parametrize("way", [kept_and_forgotten, acked, deleted, purged, resumed, paused_for_a_moment, looked_at])
def test_an_empty_queue_leaves_nothing_behind(way: Callable[[MemoryBackend], None]) -> None:
    backend = MemoryBackend()
    way(backend)
    gc.collect()
    assert [found for found in gc.get_objects() if type(found) is JobQueue and found.name == "q"] == []


def test_an_acked_job_is_dropped_at_once_while_others_stay() -> None:
    # Given a job with a long lease, beside others that stay
    backend = MemoryBackend()
    body = bytes(100_000)
    backend.enqueue("q", [NewJob(body, "gone", ttr=3600), *new(3)])
    with backend.consumer(["q"]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        # When the job is acked
        consumer.settle([Ack(lease)])
    del lease
    # Then only this test refers to the job's body
    gc.collect()
    held = [found for found in gc.get_referrers(body) if found is not globals()]
    assert not [found for found in held if type(found).__module__.startswith("multiq")]
    assert backend.stats("q").ready == 3


def test_outcomes_that_are_forgotten_or_replaced_leave_nothing_behind() -> None:
    backend = MemoryBackend()
    consumer = backend.consumer(["q"])
    for number in range(500):
        # Given many outcomes with one id, and many that are forgotten long before they expire
        backend.enqueue("q", [NewJob(b"x", "again"), NewJob(b"x", f"{number}")])
        consumer.settle([Ack(lease, After(keep=3600 + number)) for lease in consumer.reserve(2, 0)])
        assert backend.forget("q", [f"{number}"]) == 1
    # Then little is left of them
    (kept,) = backend._store.outcomes._queues.values()
    assert len(kept.by_id) == 1
    assert len(kept.expiring) <= 2 + 64 + 1


def gated(*gates: Gate, unique: UniqueKey | None = None) -> NewJob:
    return NewJob(b"x", new_id(), terms=Terms(gates=gates, unique=unique))


def sizes(backend: MemoryBackend) -> int:
    """How many entries the limits of the queue have in heaps."""
    lines = backend._store._queues["q"].lines
    return len(lines._opening) + len(lines.kept._past) + sum(map(len, lines._lines.values()))


def reserved_at_a_closed_rate(backend: MemoryBackend, consumer: Consumer) -> None:
    backend.enqueue("q", [gated(Gate("slow"))])
    assert consumer.reserve(1, 0) == []


def replaced_behind_another(backend: MemoryBackend, consumer: Consumer) -> None:
    backend.enqueue("q", [gated(Gate("closed"), unique=UniqueKey(b"key", on_conflict="replace"))])
    assert consumer.reserve(1, 0) == []


def deleted_behind_another(backend: MemoryBackend, consumer: Consumer) -> None:
    (job_id,) = backend.enqueue("q", [gated(Gate("closed"))])
    assert consumer.reserve(1, 0) == []
    backend.delete("q", job_id)


def handed_out_in_a_burst(backend: MemoryBackend, consumer: Consumer) -> None:
    backend.enqueue("q", [gated(Gate("burst"))])
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]


@pytest.mark.one_row
@pytest.mark.parametrize(
    "call", [reserved_at_a_closed_rate, replaced_behind_another, deleted_behind_another, handed_out_in_a_burst]
)
def test_limits_do_not_grow_with_the_number_of_calls(call: Callable[[MemoryBackend, Consumer], None]) -> None:
    # Given a job that waits at a closed gate
    backend = MemoryBackend()
    quotas = {"slow": Quota(rate=1, per=60.0), "burst": Quota(rate=1, per=60.0, burst=10_000), "closed": Quota(slots=0)}
    backend.limits("q", quotas)
    backend.enqueue("q", [gated(Gate("closed")), gated(Gate("slow"))])
    with backend.consumer(["q"]) as consumer:
        assert len(consumer.reserve(9, 0)) == 1
        # When a call is repeated, then few entries of it stay
        for _ in range(1000):
            call(backend, consumer)
        jobs = len(backend.jobs("q", State.READY, limit=10_000).jobs)
        assert sizes(backend) <= jobs + 300
