"""The fetcher touches leases of jobs that may still begin. The fetcher writes the new end to the in-flight table
first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

import multiq
from multiq.backend import Abandon, Ack, After, Consumer, Lease, Put, Touch, Verdict
from multiq.errors import BackendUnavailable, PayloadTooLarge
from multiq.events import BackendDown, BackendUp, Events, WorkerEvent
from multiq.memo import Progress, decode_memo
from multiq.outcome import encode_outcome
from multiq.worker.execution.fetcher import Fetcher
from multiq.worker.execution.running_memos import JobMemos
from multiq.worker.processes.inflight import Held, InflightTable, InflightWriter, make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.errors import LeaseLost


class Watched(Consumer):
    """A consumer that records the content of the table at each touch."""

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
    """A child's objects, with one held lease of a minute."""
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
    """Change the child's data so that a touch of the lease is due, or that the lease is over. Returns the lease's
    end."""
    child.held.touch_at = child.fetcher._touches.next_touch = 0.0
    if is_over:
        child.held.ends_at = time.monotonic()
    return child.held.ends_at


def test_a_lease_that_is_over_before_its_job_has_begun_is_not_touched(child: Child) -> None:
    # Given a lease that another process has kept alive beyond the moment at which the child may begin its job
    ends_at = is_due(child, is_over=True)
    assert child.app.backend.consumer(["default"]).settle([Touch(child.held.lease)]) == [None]
    # When a touch is due, then the child does not touch, now or later: the other process may give the lease back
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
    # Otherwise another process may give the lease back, by its old end, while the answer is on its way.
    before = is_due(child, is_over=False)
    child.fetcher.touch_due()
    assert child.consumer.touches == [child.held.ends_at]
    assert child.held.ends_at > before


@pytest.mark.parametrize("kind", [BackendDown, BackendUp])
def test_a_subscriber_that_hangs_stops_neither_reserving_nor_touching(
    child: Child, kind: type[BackendDown | BackendUp]
) -> None:
    # Given a subscriber that does not return from its event that the backend is unreachable, or reachable again
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
        """Return how many jobs there are, and whether a lease was touched."""
        child.consumer.is_away = True
        assert child.fetcher.exchange((), 1, 0) == []
        child.consumer.is_away = False
        child.app.queue().enqueue(2, ttr=60)
        child.fetcher._backoff.retry_at = 0.0
        jobs = len(child.fetcher.exchange((), 1, 0))
        child.held.began_at = time.monotonic()
        is_due(child, is_over=False)
        child.fetcher.touch_due()
        return jobs, bool(child.consumer.touches)

    # When the backend is reachable again, then jobs are fetched and leases are touched in spite of the subscriber
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(go_on).result(20) == (1, True)
        finally:
            release.set()
    # And when the subscriber returns, it gets all events, in their order
    assert told_up.wait(60)
    assert heard == ["BackendDown", "BackendUp"]


def test_a_memo_is_stored_while_the_loop_waits_for_jobs(child: Child) -> None:
    # Given a loop that reserves again and again, and waits long each time
    child.held.began_at = time.monotonic()
    stopped = threading.Event()

    def loop() -> None:
        while not stopped.is_set():
            child.fetcher.exchange((), 1, 60)

    memos = JobMemos(child.app, child.fetcher)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(loop)
        # When several steps of a job are stored meanwhile
        for number in range(20):
            memos.of(child.held.lease).store_step(f"step {number}", b"1")
        stopped.set()
        child.fetcher.interrupt()
        done.result()
    # Then all are stored, each by a touch
    memo = decode_memo(child.app.queue().peek(child.held.lease.id).memo)
    assert len(memo.steps) == len(child.consumer.touches) == 20


def test_verdicts_over_the_backend_s_limit_are_sent_again_without_what_they_store(child: Child) -> None:
    # Given a backend that refuses a value although it declares a larger limit
    refused: list[int] = []
    settle = child.consumer.settle

    def refuse(verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        sizes = [len(verdict.after.outcome) for verdict in verdicts if isinstance(verdict, Ack) and verdict.after]
        if max(sizes, default=0) > 200:
            refused.append(max(sizes))
            raise PayloadTooLarge(max(sizes), 200, "no")
        return settle(verdicts)

    child.consumer.settle = refuse  # type: ignore[method-assign]
    body, _ = encode_outcome(b'"' + b"x" * 300 + b'"', None, started=1, finished=2, worker="w", attempt=1)
    child.held.verdict = Ack(child.held.lease, After(keep=60, outcome=body))
    # When the verdict on the value's job is settled, then the job is acked, and the outcome says why it has no value
    assert not child.fetcher.settle([child.held])
    assert child.fetcher.has_unsettled
    assert child.fetcher.settle(())
    assert len(refused) == 1
    outcome = child.app.job("default", child.held.lease.id).outcome()
    assert outcome is not None
    assert "over the limit of 200 bytes" in (outcome.omitted or "")


def test_a_verdict_with_a_step_over_the_limit_does_not_hold_up_other_verdicts(child: Child) -> None:
    # Given a backend that refuses a large note, and two jobs, of which the first one stores such a note
    settle = child.consumer.settle

    def refuse(verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        for verdict in verdicts:
            if isinstance(verdict, Ack) and verdict.after and any(isinstance(one, Put) for one in verdict.after.steps):
                raise PayloadTooLarge(300, 200, "no")
        return settle(verdicts)

    child.consumer.settle = refuse  # type: ignore[method-assign]
    child.app.queue().enqueue(2, ttr=60)
    (other,) = child.fetcher.exchange((), 1, 0)
    child.held.verdict = Ack(child.held.lease, After(steps=(Put("default", "key", b"x" * 300),)))
    body, _ = encode_outcome(b"7", None, started=1, finished=2, worker="w", attempt=1)
    other.verdict = Ack(other.lease, After(keep=60, outcome=body))
    # When their verdicts are settled in one call
    assert not child.fetcher.settle([child.held, other])
    assert child.fetcher.settle(())
    # Then the first job is buried with the reason, and the outcome of the other job has its value
    assert "over the limit of 200 bytes" in (child.app.queue().peek(child.held.lease.id).reason or "")
    outcome = child.app.job("default", other.lease.id).outcome()
    assert outcome is not None
    assert outcome.value == 7


class HalfDown(Consumer):
    """A consumer that stores nothing beside jobs, and settles the verdicts that store nothing."""

    def __init__(self, inner: Consumer) -> None:
        self.queues = inner.queues
        self._inner = inner
        self.is_half_down = True

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self._inner.reserve(limit, timeout, queues)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        plain = [verdict for verdict in verdicts if isinstance(verdict, Abandon) or verdict.after is None]
        if not self.is_half_down or len(plain) == len(verdicts):
            return self._inner.settle(verdicts)
        error = BackendUnavailable("the store is down")
        error.is_partial = True
        sent = [verdict for verdict in plain if not isinstance(verdict, Touch)]
        answers = self._inner.settle(sent)
        error.settled = {verdict.lease.token: lost for verdict, lost in zip(sent, answers, strict=True)}
        raise error

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


def test_verdicts_that_a_failed_call_has_settled_free_their_places(child: Child) -> None:
    # Given two held jobs, of which one has something to store
    consumer = HalfDown(child.app.backend.consumer(["default"]))
    fetcher = Fetcher(consumer, child.events, "worker")
    child.app.queue().enqueue_many([2, 3])
    kept, plain = fetcher.exchange((), 2, 0)
    kept.verdict, plain.verdict = Ack(kept.lease, After(keep=60, outcome=b"{}")), Ack(plain.lease)
    # When a part of the backend is down while both jobs end, then the job without data to store is settled
    assert not fetcher.settle([kept, plain])
    assert fetcher.held() == [kept]
    # And so is a job that ends later, before the verdict on the other job is sent again
    child.app.queue().enqueue(4)
    (later,) = fetcher.exchange((), 1, 0)
    later.verdict = Ack(later.lease)
    fetcher.settle([later])
    assert (fetcher.held(), fetcher.has_unsettled) == ([kept], True)
    # When the whole backend is up again, then the last job is settled, too
    consumer.is_half_down = False
    while not fetcher.settle(()):
        time.sleep(fetcher.retry_in())
    assert (fetcher.held(), fetcher.settling.counts[Ack]) == ([], 3)


def test_leases_are_touched_while_memos_cannot_be_stored(child: Child) -> None:
    # Given two held jobs, of which one has reported progress
    consumer = HalfDown(child.app.backend.consumer(["default"]))
    fetcher = Fetcher(consumer, child.events, "worker")
    child.app.queue().enqueue_many([2, 3], ttr=60)
    first, second = fetcher.exchange((), 2, 0)
    memo = JobMemos(child.app, fetcher).of(first.lease)
    memo.set_progress(Progress(0.5, ""))
    ends_at = first.ends_at
    # When memos cannot be stored and a touch is due, then both leases are touched
    first.touch_at = second.touch_at = fetcher._touches.next_touch = 0.0
    fetcher.touch_due()
    assert min(first.ends_at, second.ends_at) > ends_at
    # And the memo is stored later
    assert memo.is_pending
    consumer.is_half_down = False
    time.sleep(fetcher.next_touch_in())
    fetcher.touch_due()
    assert not memo.is_pending
