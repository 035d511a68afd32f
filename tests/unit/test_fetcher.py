"""The fetcher touches leases of jobs that may still begin here, and writes it to the in-flight table first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

import multiq
from multiq.backend import Consumer, Lease, Touch, Verdict
from multiq.errors import BackendUnavailable
from multiq.events import BackendDown, BackendUp, Events, WorkerEvent
from multiq.worker.execution.fetcher import Fetcher
from multiq.worker.processes.inflight import Held, InflightTable, InflightWriter, make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.errors import LeaseLost


class Watched(Consumer):
    """A consumer that notes what stands in the table while it touches."""

    def __init__(self, inner: Consumer, table: InflightTable) -> None:
        self.queues = inner.queues
        self._inner = inner
        self._table = table
        self.touches: list[float] = []
        self.is_away = False

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        if self.is_away:
            raise BackendUnavailable("the backend is away")
        return self._inner.reserve(limit, timeout, queues)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if any(isinstance(verdict, Touch) for verdict in verdicts):
            self.touches += [entry.ends_at for entry in self._table.entries()]
        return self._inner.settle(verdicts)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


class Child(NamedTuple):
    app: multiq.App
    events: Events
    fetcher: Fetcher
    consumer: Watched
    inflight: InflightWriter
    held: Held


@pytest.fixture
def child() -> Iterator[Child]:
    """What a child has that holds one lease of a minute."""
    app = multiq.App("memory://")
    app.queue().enqueue(1, ttr=60)
    (table,) = make_tables(1, 4)
    table.assign()
    inflight = InflightWriter(table)
    consumer = Watched(app.backend.consumer(["default"]), table)
    events = Events()
    fetcher = Fetcher(consumer, events, "worker", inflight)
    (held,) = fetcher.exchange((), 1, 0)
    yield Child(app, events, fetcher, consumer, inflight, held)
    app.close()


def is_due(child: Child, *, is_over: bool) -> float:
    """Have it that the lease is to be touched now, or is over, for all that the child knows. Returns its end."""
    child.held.touch_at = child.fetcher._next_touch = 0.0
    if is_over:
        child.held.ends_at = time.monotonic()
    return child.held.ends_at


def test_a_lease_that_is_over_before_its_job_has_begun_is_not_touched(child: Child) -> None:
    # Given a lease that another process has kept alive beyond the moment at which the child may begin its job
    ends_at = is_due(child, is_over=True)
    assert child.app.backend.consumer(["default"]).settle([Touch(child.held.lease)]) == [None]
    # When the child would touch, then it does not: that one may give it back at any moment. And it does not try again
    child.fetcher.touch_due()
    assert (child.consumer.touches, child.held.ends_at) == ([], ends_at)
    assert child.fetcher.next_touch_in() == float("inf")


def test_a_lease_that_is_over_while_its_job_runs_is_touched(child: Child) -> None:
    child.held.began_at = time.monotonic()
    child.inflight.begin(child.held)
    is_due(child, is_over=True)
    child.fetcher.touch_due()
    assert len(child.consumer.touches) == 1


def test_the_new_end_of_a_lease_stands_in_the_table_before_it_is_asked_for(child: Child) -> None:
    # Else the lease may be given back by the old one while the answer is under way
    before = is_due(child, is_over=False)
    child.fetcher.touch_due()
    assert child.consumer.touches == [child.held.ends_at]
    assert child.held.ends_at > before


@pytest.mark.parametrize("kind", [BackendDown, BackendUp])
def test_a_subscriber_that_hangs_stops_neither_reserving_nor_touching(
    child: Child, kind: type[BackendDown | BackendUp]
) -> None:
    # Given a subscriber that does not return when it hears that the backend is away, or back
    heard: list[str] = []
    release, told_up = threading.Event(), threading.Event()

    def hang(event: WorkerEvent) -> None:
        heard.append(type(event).__name__)
        if isinstance(event, BackendUp):
            told_up.set()
        if isinstance(event, kind):
            release.wait(60)

    child.events.subscribe(WorkerEvent, hang)

    def go_on() -> tuple[int, bool]:
        """How many jobs there are, and whether any lease is touched."""
        child.consumer.is_away = True
        assert child.fetcher.exchange((), 1, 0) == []
        child.consumer.is_away = False
        child.app.queue().enqueue(2, ttr=60)
        child.fetcher._retry_at = 0.0
        jobs = len(child.fetcher.exchange((), 1, 0))
        child.held.began_at = time.monotonic()
        is_due(child, is_over=False)
        child.fetcher.touch_due()
        return jobs, bool(child.consumer.touches)

    # When the backend was away, then there are jobs all the same, and leases are touched
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(go_on).result(20) == (1, True)
        finally:
            release.set()
    # And once it goes on, all is told, in its order
    assert told_up.wait(60)
    assert heard == ["BackendDown", "BackendUp"]
