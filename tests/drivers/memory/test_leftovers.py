"""What is left in memory of jobs that are gone, and of queues that are empty and not paused: nothing."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, State
from multiq.backend.memory import JobQueue, MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.mark.parametrize("way", [acked, deleted, purged, resumed, paused_for_a_moment, looked_at])
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
        # When it is acked
        consumer.settle([Ack(lease)])
    del lease
    # Then only this test refers to its body
    gc.collect()
    held = [found for found in gc.get_referrers(body) if found is not globals()]
    assert not [found for found in held if type(found).__module__.startswith("multiq")]
    assert backend.stats("q").ready == 3
