"""Slices: large numbers of jobs move in order, without one long hold of the lock."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, State
from multiq.driverkit.clock import ManualClock
from multiq_sqlite import records as sqlite_jobs
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANY = 100_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def backend(path: Path, clock: ManualClock) -> Iterator[SqliteBackend]:
    with SqliteBackend(str(path), synchronous="normal", clock=clock) as backend:
        yield backend


@pytest.mark.long
def test_hundred_thousand_jobs_due_at_once_are_reserved_in_order(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given many jobs, one in ten of them urgent, all due at the same moment
    for start in range(0, MANY, 5000):
        batch = [
            NewJob(b"", f"{number:06}", delay=60.0, priority=0 if number % 10 == 9 else 1024)
            for number in range(start, start + 5000)
        ]
        backend.enqueue("q", batch)
    clock.advance(60)
    consumer = backend.consumer(["q"])
    pauses: list[float] = []
    monkeypatch.setattr("multiq_sqlite.consumer.time.sleep", pauses.append)  # the pause between two slices
    # When a consumer reserves all jobs
    ids: list[str] = []
    leases = consumer.reserve(1000, 0)
    while leases:
        ids += [lease.id for lease in leases]
        _, leases = consumer.exchange([Ack(lease) for lease in leases], 1000, 0)
    # Then the urgent jobs came first, and within each priority the jobs came in the order of their enqueues
    urgent = [f"{number:06}" for number in range(9, MANY, 10)]
    others = [f"{number:06}" for number in range(MANY) if number % 10 != 9]
    assert ids == urgent + others
    # And no transaction promoted more than one slice
    assert len(pauses) == MANY // 1000


def test_an_interrupted_reserve_tells_that_it_has_not_looked_at_all_due_jobs(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given due jobs for several small slices
    monkeypatch.setattr("multiq_sqlite.records.SLICE", 10)
    backend.enqueue("q", [NewJob(b"", f"{number:02}", delay=5.0) for number in range(35)])
    clock.advance(5)
    consumer = backend.consumer(["q"])
    # When a reserve is interrupted, then its empty result does not mean that no job is due
    consumer.interrupt()
    assert (consumer.reserve(35, 60), consumer.sees_all) == ([], False)
    # And the next one goes on
    leases = consumer.reserve(35, 60)
    assert (len(leases), consumer.sees_all) == (35, True)
    assert consumer.exchange([Ack(lease) for lease in leases], 35, 0) == ([None] * 35, [])
    assert consumer.sees_all


@pytest.mark.parametrize("name", ["promote", "kick", "purge"])
def test_bulk_moves_are_made_in_slices(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Given jobs for several small slices
    monkeypatch.setattr("multiq_sqlite.backend.SLICE", 10)
    monkeypatch.setattr("multiq_sqlite.records.SLICE", 10)
    assert sqlite_jobs.SLICE == 10
    backend.enqueue("q", [NewJob(b"", f"{number:02}", delay=5.0 if name == "promote" else 0.0) for number in range(35)])
    if name == "kick":
        consumer = backend.consumer(["q"])
        consumer.settle([Bury(lease) for lease in reversed(consumer.reserve(35, 0))])
    clock.advance(5)
    statements: list[str] = []
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        sqlite.set_trace_callback(statements.append)
    # When a call moves the jobs
    if name == "promote":
        assert len(backend.jobs("q", State.READY).jobs) == 35
    elif name == "kick":
        assert backend.kick("q", 25) == 25
        assert [job.id for job in backend.jobs("q", State.BURIED).jobs] == [
            f"{number:02}" for number in range(9, -1, -1)
        ]
    else:
        assert backend.purge("q", [State.READY]) == 35
    # Then this took as many transactions as there are slices
    assert (
        len([text for text in statements if text.startswith("COMMIT")]) == {"promote": 4, "kick": 3, "purge": 4}[name]
    )


def test_purge_ends_while_producers_go_on(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiq_sqlite.backend.SLICE", 10)
    backend.enqueue("q", [NewJob(b"", f"{number}") for number in range(20)])
    numbers = itertools.count(20)

    def produce(_: float) -> None:
        assert next(numbers) < 1000
        backend.enqueue("q", [NewJob(b"", f"{next(numbers)}") for _ in range(10)])

    monkeypatch.setattr("multiq_sqlite.backend.time.sleep", produce)  # a producer enqueues a slice between two slices
    assert backend.purge("q", [State.READY]) == 20


def test_reserve_reads_more_than_one_slice_of_rows(backend: SqliteBackend) -> None:
    backend.enqueue("q", [NewJob(str(number).encode(), f"{number:04}") for number in range(1201)])
    leases = backend.consumer(["q"]).reserve(2000, 0)
    assert [lease.body for lease in leases] == [str(number).encode() for number in range(1201)]


@pytest.mark.parametrize("state", [State.READY, State.DELAYED])
def test_page_deep_in_a_long_queue_costs_no_more_than_the_first(backend: SqliteBackend, state: State) -> None:
    # Given many jobs of one priority, or of one due time
    delay = 60.0 if state is State.DELAYED else 0.0
    backend.enqueue("q", [NewJob(b"", f"{number:05}", delay=delay) for number in range(20_000)])
    steps: list[int] = []
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        # called after this number of steps of SQLite's machine
        sqlite.set_progress_handler(lambda: steps.append(1), 100)
    # When they are listed page by page
    costs: list[int] = []
    ids: list[str] = []
    after: str | None = None
    while after is not None or not ids:
        steps.clear()
        page = backend.jobs("q", state, limit=1000, after=after)
        costs.append(len(steps))
        ids += [job.id for job in page.jobs]
        after = page.after
    # Then each page costs about the same, and each job is on one page
    assert ids == [f"{number:05}" for number in range(20_000)]
    assert max(costs) < 2 * costs[0]


def test_earlier_queue_does_not_wait_for_due_jobs_of_a_later_one(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_sqlite.records.SLICE", 10)
    backend.enqueue("late", [NewJob(b"", f"{number}", delay=5.0) for number in range(500)])
    backend.enqueue("early", [NewJob(b"", "early")])
    clock.advance(5)
    consumer = backend.consumer(["early", "late"])
    statements: list[str] = []
    consumer._connection._open(1.0).set_trace_callback(statements.append)
    # When a reserve asks for more jobs than the earlier queue has
    assert [lease.id for lease in consumer.reserve(10, 0)] == ["early"]
    # Then it returns that queue's jobs after one slice of the later queue
    assert statements.count("COMMIT") == 1


def test_reserve_ends_while_jobs_keep_becoming_due(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs become due as fast as they are promoted."""
    monkeypatch.setattr("multiq_sqlite.records.SLICE", 10)
    backend.enqueue("q", [NewJob(b"", f"{number:04}", delay=1.0 + number // 10) for number in range(1000)])
    clock.advance(3)
    slices: list[float] = []

    def pass_on(seconds: float) -> None:
        slices.append(seconds)
        clock.advance(1)

    monkeypatch.setattr("multiq_sqlite.consumer.time.sleep", pass_on)  # replaces the pause between two slices
    assert [lease.id for lease in backend.consumer(["q"]).reserve(1, 0)] == ["0000"]
    assert len(slices) == 3


def test_interrupt_takes_effect_between_two_slices(
    backend: SqliteBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_sqlite.records.SLICE", 10)
    backend.enqueue("q", [NewJob(b"", f"{number:04}", delay=1.0) for number in range(1000)])
    clock.advance(1)
    consumer = backend.consumer(["q"])
    slices: list[float] = []

    def interrupt(seconds: float) -> None:
        slices.append(seconds)
        consumer.interrupt()

    monkeypatch.setattr("multiq_sqlite.consumer.time.sleep", interrupt)
    assert consumer.reserve(1, 60) == []
    assert len(slices) == 1


def test_reserve_of_no_job_waits_without_reading_queues(backend: SqliteBackend, clock: ManualClock) -> None:
    backend.enqueue("q", [NewJob(b"", "1"), NewJob(b"", "2", delay=1.0)])
    clock.advance(1)
    consumer = backend.consumer(["q"])
    consumer.reserve(0, 0)
    statements: list[str] = []
    consumer._connection._open(1.0).set_trace_callback(statements.append)
    assert consumer.exchange([], 0, 0.2) == ([], [])
    assert [text for text in statements if not text.startswith("PRAGMA data_version")] == []


def test_clock_set_back_makes_nothing_early_and_no_age_negative(backend: SqliteBackend, clock: ManualClock) -> None:
    backend.enqueue("q", [NewJob(b"", "ready"), NewJob(b"", "delayed", delay=10.0)])
    consumer = backend.consumer(["q"])
    clock.advance(-3600)
    assert [record.age for record in backend.jobs("q", State.DELAYED).jobs] == [0.0]
    (lease,) = consumer.reserve(2, 0)
    assert (lease.id, lease.age) == ("ready", 0.0)
    assert consumer.settle([Ack(lease)]) == [None]
    clock.advance(3600 + 9)
    assert consumer.reserve(2, 0) == []
    clock.advance(1)
    assert [lease.id for lease in consumer.reserve(2, 0)] == ["delayed"]
