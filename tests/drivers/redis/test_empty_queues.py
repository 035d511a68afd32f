"""A queue that is empty and not paused leaves no keys in the store, except keys that expire."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, Release, State
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer


def new(count: int = 1, **options: float) -> list[NewJob]:
    return [NewJob(b"x", f"{time.monotonic_ns()}-{number}", **options) for number in range(count)]  # type: ignore[arg-type]


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {key.decode() for key in client.scan_iter("multiq:*") if client.ttl(key) == -1}


def acked_by_settling(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue("q", new(3))
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(5, 0)]) == [None] * 3


def acked_by_exchanging_one_by_one(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue("q", new(3))
    leases = consumer.reserve(1, 0)
    while leases:
        lost, leases = consumer.exchange([Ack(lease) for lease in leases], 1, 0)
        assert lost == [None]


def acked_after_a_wait(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue("q", new(delay=0.2))
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 30)]) == [None]


def acked_while_it_is_paused(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue("q", new())
    leases = consumer.reserve(1, 0)
    backend.pause("q", 60)
    assert consumer.exchange([Ack(lease) for lease in leases], 1, 0) == ([None], [])
    backend.resume("q")


def acked_after_all_else(backend: Backend, consumer: Consumer) -> None:
    backend.enqueue("q", [NewJob(b"x" * 5000, "large")])
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([Release(lease, delay=60, reason="not now")]) == [None]
    backend.kick_job("q", "large")
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([Bury(lease, "no")]) == [None]
    assert backend.kick("q", 1) == 1
    backend.reschedule("q", "large", 0)
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]


def deleted(backend: Backend, _: Consumer) -> None:
    for job_id in backend.enqueue("q", [*new(2), *new(delay=60)]):
        backend.delete("q", job_id)


def purged(backend: Backend, _: Consumer) -> None:
    backend.enqueue("q", [*new(2), *new(delay=60)])
    assert backend.purge("q", [State.READY, State.DELAYED, State.BURIED]) == 3


def paused_and_resumed(backend: Backend, _: Consumer) -> None:
    backend.pause("q", 60)
    backend.resume("q")


WAYS = (
    acked_by_settling,
    acked_by_exchanging_one_by_one,
    acked_after_a_wait,
    acked_while_it_is_paused,
    acked_after_all_else,
    deleted,
    purged,
    paused_and_resumed,
)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_empty_queue_leaves_nothing_behind(
    server: RedisServer, way: Callable[[Backend, Consumer], None], partitions: int
) -> None:
    with open_backend(f"{server.url}?partitions={partitions}") as backend, backend.consumer(["q"]) as consumer:
        way(backend, consumer)
        assert backend.queues() == []
    # the partition count stays, because clients may still read from the partitions
    assert left(server) <= ({"multiq:{q}:partitions"} if partitions > 1 else set())


def test_queue_that_is_not_empty_keeps_its_order(backend: Backend, server: RedisServer) -> None:
    # Given a queue that became empty once, and one that never did
    with backend.consumer(["q"]) as consumer:
        acked_by_settling(backend, consumer)
        ids = backend.enqueue("q", new(5))
        (first,) = consumer.reserve(1, 0)
        assert first.id == ids[0]
        assert consumer.settle([Ack(first)]) == [None]
        assert "multiq:{q}:sequence" in left(server)
        # Then a later job is younger than the jobs in the queue
        ids += backend.enqueue("q", new(2))
        backend.reschedule("q", ids[1], 0)
        assert [job.id for job in backend.jobs("q", State.READY).jobs] == [*ids[2:], ids[1]]
        # And if the id of a leased job is enqueued again after the queue was empty, the old lease's verdict is refused
        backend.purge("q", [State.READY])
        (job_id,) = backend.enqueue("q", [NewJob(b"old", "same")])
        (old,) = consumer.reserve(1, 0)
        assert consumer.settle([Ack(old)]) == [None]
        assert backend.enqueue("q", [NewJob(b"new", "same")]) == [job_id]
        (again,) = consumer.reserve(1, 0)
        (lost,) = consumer.settle([Ack(old)])
        assert lost is not None
        assert consumer.settle([Ack(again)]) == [None]
    assert left(server) == set()


def test_consumer_is_notified_in_a_queue_that_was_emptied_and_resumed(backend: Backend, server: RedisServer) -> None:
    import threading

    # Given a consumer that waits at a queue which becomes empty, and is paused and resumed meanwhile
    with backend.consumer(["q"]) as consumer:
        acked_by_settling(backend, consumer)
        backend.pause("q", 3600)
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(len(consumer.reserve(1, 60))))
        waiting.start()
        time.sleep(0.5)
        backend.resume("q")
        time.sleep(0.2)
        # Then a new job wakes the consumer
        start = time.monotonic()
        backend.enqueue("q", new())
        waiting.join()
        assert found == [1]
        assert time.monotonic() - start < 30  # earlier than the end of the pause or of the wait
