"""Stores of the memory backend: one per name, which keeps nothing of jobs that are gone."""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, Release, State, Touch
from multiq.backend.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self


@pytest.fixture
def _hasty_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_hasty_switches")
def test_threads_that_open_one_name_at_once_share_its_store() -> None:
    for number in range(600):
        opened: list[MemoryBackend] = []
        start = threading.Barrier(2)

        def open_it(name: str, opened: list[MemoryBackend], start: threading.Barrier) -> None:
            start.wait()
            opened.append(MemoryBackend(name=name))

        threads = [threading.Thread(target=open_it, args=(f"shop {number}", opened, start)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one, other = opened
        one.enqueue("q", [NewJob(b"", "1")])
        assert other.stats("q").ready == 1


class Body(bytes):
    """A body that is counted as long as it is referred to."""

    alive = 0

    def __new__(cls) -> Self:
        Body.alive += 1
        return super().__new__(cls)

    def __del__(self) -> None:
        Body.alive -= 1


def test_bodies_of_jobs_that_are_gone_are_not_kept() -> None:
    backend = MemoryBackend()
    # Given jobs that were cancelled long before they are due, and jobs that were purged before they were reserved
    for number in range(300):
        backend.enqueue("q", [NewJob(Body(), f"late {number}", delay=86_400.0)])
        backend.delete("q", f"late {number}")
    backend.enqueue("q", [NewJob(Body(), f"ready {number}") for number in range(300)])
    backend.purge("q", [State.READY])
    gc.collect()
    # Then few of them are still in memory
    assert Body.alive <= 2 * 65


def test_order_and_due_times_survive_that_stale_entries_are_dropped() -> None:
    backend = MemoryBackend()
    consumer = backend.consumer(["q"])
    backend.enqueue("q", [NewJob(b"", f"{number}", priority=number % 3) for number in range(9)])
    # When each job is touched and released often
    for _ in range(100):
        leases = consumer.reserve(9, 0)
        consumer.settle([Touch(lease) for lease in leases])
        consumer.settle([Release(lease) for lease in leases])
    queue = backend._store._queues["q"]
    assert len(queue._ready) + len(queue._timed) <= 4 * 9 + 2 * 64
    # Then the jobs come in the same order as before
    leases = consumer.reserve(9, 0)
    assert [lease.id for lease in leases] == ["0", "3", "6", "1", "4", "7", "2", "5", "8"]
    assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 9
