"""``app.failed``: the failed jobs of all queues are listed, retried and deleted, and jobs that have changed since are
left alone."""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import multiq
from multiq import BuryJob, JobNotFound, OptionInvalid, State, Unsupported
from multiq.backend import Gap, Page
from multiq.backend.memory import MemoryBackend
from multiq.errors import BackendUnavailable, JobNotFailed
from multiq.failed import FailedJobs, ShownJob

if TYPE_CHECKING:
    from collections.abc import Callable


class HeadsOnly(MemoryBackend):
    """A store that shows the first job of a state only, and keeps neither reasons nor memos, as beanstalkd does."""

    declared = msgspec.structs.replace(
        MemoryBackend.declared,
        lists_jobs=Gap("cannot today", "for this test"),
        reasons=Gap("never", "for this test"),
        memos=Gap("never", "for this test"),
    )

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        if after is not None:
            raise self.unsupported("lists_jobs")
        return super().jobs(queue, state, limit=1)


class HeadsWithTimes(HeadsOnly):
    """A store that shows the first job of a state only, and keeps reasons and memos, as beanstalkd with a store."""

    declared = msgspec.structs.replace(HeadsOnly.declared, reasons=True, memos=True)


@pytest.fixture
def app() -> multiq.App:
    return tasks_of(multiq.App("memory://"))


@pytest.fixture
def heads() -> multiq.App:
    return tasks_of(multiq.App(backend=HeadsOnly()))


@pytest.fixture
def timed_heads() -> multiq.App:
    return tasks_of(multiq.App(backend=HeadsWithTimes()))


def tasks_of(app: multiq.App) -> multiq.App:
    @app.task(queue="mail", max_attempts=1)
    def send(address: str) -> None:
        raise BuryJob(f"550 no such mailbox: {address}")

    @app.task(queue="orders", max_attempts=1)
    def ship(order: int) -> None:
        raise ValueError(f"order {order} is empty")

    return app


def fail(app: multiq.App, *calls: tuple[str, Any]) -> list[str]:
    """Enqueue and bury jobs of these tasks. Returns their ids."""
    handles = [app.tasks[task].enqueue(argument) for task, argument in calls]
    multiq.Worker(app, queues=["mail", "orders"], stop_when_empty=True).run()
    assert {handle.state() for handle in handles} == {State.BURIED}
    return [handle.id for handle in handles]


def ids(app: multiq.App, **filters: Any) -> list[str]:
    return [job.id for job in app.failed.list(**filters)]


def states(app: multiq.App, queue: str) -> dict[str, State]:
    queue_ = app.queue(queue)
    return {job.id: job.state for state in ("ready", "delayed", "buried", "reserved") for job in queue_.jobs(state)}


def age_by(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Move this host's clock by this many seconds."""
    now = time.time
    monkeypatch.setattr("multiq.failed.time.time", lambda: now() + seconds)


# --- list, show ---


def test_failed_jobs_of_all_queues_are_listed_the_longest_buried_first(app: multiq.App) -> None:
    one, two, three = fail(app, ("send", "a"), ("ship", 1), ("send", "b"))
    assert ids(app) == [one, three, two]
    assert ids(app, queue="orders") == [two]
    assert ids(app, queue=["orders", "mail"]) == [two, one, three]
    assert ids(app, queue="empty") == []
    assert ids(app, limit=2) == [one, three]
    assert [job.failure.task for job in app.failed.list(task="ship") if job.failure] == ["ship"]


def test_filters_by_task_and_reason_must_all_match(app: multiq.App) -> None:
    one, two, three = fail(app, ("send", "a"), ("ship", 1), ("send", "b"))
    assert ids(app, task="send") == [one, three]
    assert ids(app, reason="mailbox: b") == [three]
    assert ids(app, reason="MAILBOX") == []
    assert ids(app, task="ship", reason="mailbox") == []
    assert ids(app, task="ship", reason="empty") == [two]


def test_filters_by_age_look_at_the_time_of_the_failure(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    (old,) = fail(app, ("send", "a"))
    age_by(monkeypatch, 3600)
    assert ids(app, older_than=3599) == [old]
    assert ids(app, older_than=dt.timedelta(hours=2)) == []


def test_a_job_whose_time_is_unknown_is_counted_and_left_out(app: multiq.App) -> None:
    # Given a job that a plain consumer has buried, without a failure
    app.queue("mail").enqueue("x")
    app.queue("mail").reserve().bury("by hand")
    # When jobs that failed at any time, or long ago, are listed
    assert len(ids(app)) == 1
    listing = app.failed.list(older_than=0)
    assert (list(listing), listing.undated) == ([], 1)
    # Then a job that was enqueued later is not among those that failed long ago
    listing = app.failed.list(older_than=3600)
    assert (list(listing), listing.undated) == ([], 0)
    assert app.failed.prune(0).undated == 1


def test_a_long_listing_is_read_page_by_page(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    jobs = MemoryBackend.jobs

    def watched(backend: MemoryBackend, queue: str, state: State, **options: Any) -> Page:
        calls.append(options["limit"])
        return jobs(backend, queue, state, **options)

    app.queue("mail").enqueue_many(range(250))
    for job in app.queue("mail").reserve_many(250):
        job.bury("no")
    monkeypatch.setattr(MemoryBackend, "jobs", watched)
    first = next(iter(app.failed.list()))
    assert (first.value, calls) == (0, [100])
    assert [job.value for job in app.failed.list()] == list(range(250))


def test_show_finds_a_failed_job_in_any_queue(app: multiq.App) -> None:
    (failed,) = fail(app, ("ship", 1))
    assert app.failed.show(failed).reason == "ValueError: order 1 is empty"
    assert app.failed.show(failed, "orders").failure is not None
    with pytest.raises(JobNotFound, match="no queue has job"):
        app.failed.show("nope")
    with pytest.raises(JobNotFound, match="queue 'mail' has no job"):
        app.failed.show(failed, "mail")
    waiting = app.queue("mail").enqueue(1)
    with pytest.raises(JobNotFailed, match="has not failed"):
        app.failed.show(waiting.id)


# --- retry, forget, prune ---


def test_retry_makes_the_matching_jobs_ready(app: multiq.App) -> None:
    one, two, three = fail(app, ("send", "a"), ("ship", 1), ("send", "b"))
    change = app.failed.retry(task="send")
    assert (change.matched, change.changed, change.left) == (2, 2, 0)
    assert states(app, "mail") == {one: State.READY, three: State.READY}
    assert ids(app) == [two]


def test_forget_deletes_the_matching_jobs(app: multiq.App) -> None:
    one, two, _ = fail(app, ("send", "a"), ("ship", 1), ("send", "b"))
    assert app.failed.forget(reason="mailbox: b").changed == 1
    assert ids(app) == [one, two]
    assert app.failed.forget().changed == 2
    assert ids(app) == []


def test_prune_deletes_what_failed_long_ago(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(app, ("send", "a"))
    assert app.failed.prune(3600).changed == 0
    age_by(monkeypatch, 3601)
    assert app.failed.prune(dt.timedelta(hours=1), queue="orders").changed == 0
    assert app.failed.prune(dt.timedelta(hours=1)).changed == 1


@pytest.mark.parametrize("verb", ["retry", "forget"])
def test_a_dry_run_counts_and_changes_nothing(app: multiq.App, verb: str) -> None:
    fail(app, ("send", "a"), ("ship", 1))
    before = [states(app, queue) for queue in ("mail", "orders")]
    change = getattr(app.failed, verb)(dry_run=True)
    assert (change.matched, change.changed, change.left) == (2, 0, 0)
    assert [states(app, queue) for queue in ("mail", "orders")] == before


def kick(app: multiq.App, job_id: str) -> None:
    app.queue("mail").kick_job(job_id)


def delete(app: multiq.App, job_id: str) -> None:
    app.queue("mail").delete(job_id)


def reserve(app: multiq.App, job_id: str) -> None:
    kick(app, job_id)
    app.backend.consumer(["mail"]).reserve(1, 0)


def fail_again(app: multiq.App, job_id: str) -> None:
    kick(app, job_id)
    multiq.Worker(app, queues=["mail"], stop_when_empty=True).run()
    assert app.queue("mail").peek(job_id).state is State.BURIED


def reschedule(app: multiq.App, job_id: str) -> None:
    app.queue("mail").reschedule(job_id, 0)
    multiq.Worker(app, queues=["mail"], stop_when_empty=True).run()
    assert app.queue("mail").peek(job_id).state is State.BURIED


def replace(app: multiq.App, job_id: str) -> None:
    delete(app, job_id)
    app.tasks["send"].options(id=job_id).enqueue("c")
    multiq.Worker(app, queues=["mail"], stop_when_empty=True).run()
    assert app.queue("mail").peek(job_id).state is State.BURIED


@pytest.mark.parametrize("verb", ["retry_ids", "forget_ids"])
@pytest.mark.parametrize("meanwhile", [kick, delete, reserve, fail_again, reschedule, replace])
def test_a_job_that_changed_since_it_was_shown_is_counted_and_left(
    app: multiq.App, verb: str, meanwhile: Callable[[multiq.App, str], None]
) -> None:
    # Given two jobs that were shown, of which one has changed since
    one, two = fail(app, ("send", "a"), ("send", "b"))
    shown = list(app.failed.list())
    meanwhile(app, one)
    before = states(app, "mail").get(one)
    # When both are retried, or deleted
    change = getattr(app.failed, verb)(shown)
    # Then only the unchanged job is retried or deleted
    assert (change.matched, change.changed, change.left) == (2, 1, 1)
    assert states(app, "mail").get(one) is before
    assert states(app, "mail").get(two) is (State.READY if verb == "retry_ids" else None)


@pytest.mark.parametrize("verb", ["forget", "forget_ids"])
def test_a_failed_job_that_others_wait_for_is_deleted_only_if_they_are_told(app: multiq.App, verb: str) -> None:
    # Given a failed job of a chain
    chain = multiq.chain(app.tasks["ship"].s(1), app.tasks["send"].s()).enqueue()
    multiq.Worker(app, queues=["mail", "orders"], stop_when_empty=True).run()
    act = getattr(app.failed, verb)
    which = [list(app.failed.list())] if verb == "forget_ids" else []
    # Then the job is left and counted, unless the call says what happens to the next job
    change = act(*which)
    assert (change.matched, change.changed, change.left, change.awaited) == (1, 0, 0, 1)
    with pytest.raises(OptionInvalid, match="followers must be one of refuse, go, stop, got 'run'"):
        act(*which, followers="run")
    assert act(*which, followers="go").changed == 1
    assert chain.last().state() is State.READY


def test_a_job_that_is_named_twice_is_retried_once(app: multiq.App) -> None:
    fail(app, ("send", "a"))
    shown = [ShownJob.of(job) for job in app.failed.list()]
    change = app.failed.retry_ids([*shown, *shown])
    assert (change.changed, change.left) == (1, 1)


def test_jobs_may_be_named_by_queue_and_id(app: multiq.App) -> None:
    one, two = fail(app, ("send", "a"), ("ship", 1))
    assert app.failed.retry_ids([("mail", one), ("orders", one)]).left == 1
    assert app.failed.forget_ids([("orders", two)]).changed == 1
    for wrong in ("mail", ("mail",), ("no name!", one), 7):
        with pytest.raises((OptionInvalid, multiq.NameInvalid)):
            app.failed.forget_ids([wrong])  # type: ignore[list-item]


def test_an_outage_in_the_middle_says_how_many_jobs_were_changed(
    app: multiq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(app, *[("send", "a")] * 3)
    kick_job, calls = MemoryBackend.kick_job, list[str]()

    def break_down(backend: MemoryBackend, queue: str, job_id: str) -> None:
        calls.append(job_id)
        if len(calls) == 2:
            raise BackendUnavailable("gone")
        kick_job(backend, queue, job_id)

    monkeypatch.setattr(MemoryBackend, "kick_job", break_down)
    with pytest.raises(BackendUnavailable) as caught:
        app.failed.retry()
    assert caught.value.__notes__ == ["1 of 3 jobs were changed before this error"]


@pytest.mark.parametrize(
    "filters",
    [
        {"queue": "no name!"},
        {"queue": 7},
        {"task": ""},
        {"reason": 550},
        {"reason": b"550"},
        {"older_than": -1},
        {"older_than": "1h"},
        {"limit": 0},
        {"limit": "all"},
    ],
)
def test_impossible_filters_are_refused(app: multiq.App, filters: dict[str, Any]) -> None:
    with pytest.raises((OptionInvalid, multiq.NameInvalid)):
        app.failed.list(**filters)


def test_prune_without_an_age_deletes_nothing(app: multiq.App) -> None:
    # Given a failed job, and an age that a program has not set
    (one,) = fail(app, ("send", "a"))
    with pytest.raises(OptionInvalid, match="older_than must be a number of seconds, or a timedelta, got None"):
        app.failed.prune(None)  # type: ignore[arg-type]
    assert ids(app) == [one]


# --- a backend that shows the first job only ---


def test_a_store_of_heads_shows_them_and_says_that_there_are_more(heads: multiq.App) -> None:
    one, _, three = fail(heads, ("send", "a"), ("send", "b"), ("ship", 1))
    seen: list[str] = []
    with pytest.raises(Unsupported, match="lists_jobs"):
        seen.extend(job.id for job in heads.failed.list())
    assert seen == [one, three]
    assert ids(heads, queue="orders") == [three]
    assert ids(heads, limit=1) == [one]


@pytest.mark.parametrize("filters", [{"reason": "x"}, {"older_than": 3600}])
def test_a_store_without_reasons_and_times_does_not_filter_by_them(heads: multiq.App, filters: dict[str, Any]) -> None:
    for call in (heads.failed.retry, heads.failed.forget, lambda **given: list(heads.failed.list(**given))):
        with pytest.raises(Unsupported):
            call(**filters)


@pytest.mark.parametrize("verb", ["retry", "forget"])
def test_a_store_of_heads_changes_all_of_its_failed_jobs_one_after_the_other(heads: multiq.App, verb: str) -> None:
    fail(heads, ("send", "a"), ("send", "b"), ("ship", 1))
    assert getattr(heads.failed, verb)(dry_run=True).matched == 3
    assert getattr(heads.failed, verb)(limit=1).changed == 1
    assert getattr(heads.failed, verb)(task="send", queue="mail").changed == 1
    assert getattr(heads.failed, verb)().changed == 1
    assert getattr(heads.failed, verb)(dry_run=True).matched == 0


def test_a_store_of_heads_cannot_look_past_a_job_that_does_not_match(heads: multiq.App) -> None:
    heads.tasks["ship"].options(queue="mail").enqueue(1)
    fail(heads, ("send", "a"))
    with pytest.raises(Unsupported, match="lists_jobs"):
        heads.failed.retry(task="send", queue="mail")
    with pytest.raises(Unsupported, match="lists_jobs"):
        heads.failed.retry(task="send", queue="mail", dry_run=True)
    assert heads.queue("mail").stats().buried == 2


def test_a_store_of_heads_prunes_only_what_failed_long_ago(
    timed_heads: multiq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two jobs that failed two hours ago, and two that failed an hour later
    fail(timed_heads, ("send", "a"), ("send", "b"))
    age_by(monkeypatch, 3600)
    fail(timed_heads, ("send", "c"), ("send", "d"))
    age_by(monkeypatch, 3600)
    # Then only the first two are deleted
    assert timed_heads.failed.prune(5400).changed == 2
    assert timed_heads.failed.prune(5400).changed == 0
    assert timed_heads.queue("mail").stats().buried == 2


@pytest.mark.parametrize("filters", [{"reason": "no such reason"}, {"older_than": 3600}])
def test_a_dry_run_on_a_store_of_heads_does_not_count_what_it_cannot_see(
    timed_heads: multiq.App, filters: dict[str, Any]
) -> None:
    fail(timed_heads, ("ship", 1))
    assert timed_heads.failed.forget(**filters, dry_run=True).matched == 0
    fail(timed_heads, ("ship", 1))
    with pytest.raises(Unsupported, match="lists_jobs"):
        timed_heads.failed.forget(**filters, dry_run=True)


def test_a_store_of_heads_says_that_an_awaited_job_hides_the_others(timed_heads: multiq.App) -> None:
    multiq.chain(timed_heads.tasks["send"].s("a"), timed_heads.tasks["ship"].s(1)).enqueue()
    multiq.Worker(timed_heads, queues=["mail"], stop_when_empty=True).run()
    change = timed_heads.failed.forget()
    assert (change.matched, change.changed, change.awaited) == (1, 0, 1)
    fail(timed_heads, ("send", "b"))
    with pytest.raises(Unsupported, match="lists_jobs") as error:
        timed_heads.failed.forget()
    assert "it hides the failed jobs behind it" in error.value.__notes__[-1]
    assert timed_heads.failed.forget(followers="stop").changed == 2


def test_a_store_of_heads_counts_a_job_whose_time_is_unknown(timed_heads: multiq.App) -> None:
    queue = timed_heads.queue("mail")
    queue.enqueue("a")
    (job,) = queue.reserve_many(1, 1)
    job.bury("by hand")
    change = timed_heads.failed.prune(0)
    assert (change.changed, change.undated) == (0, 1)


def test_a_backend_that_shows_no_jobs_says_so(app: multiq.App) -> None:
    from multiq.backend import Backend

    class Blind(MemoryBackend):
        @property
        def capabilities(self) -> Any:
            return msgspec.structs.replace(self.declared, inspection=Gap("never", "for this test"))

    failed = FailedJobs(Blind())
    assert issubclass(Blind, Backend)
    for call in (failed.retry, failed.forget, lambda: list(failed.list())):
        with pytest.raises(Unsupported, match="inspection"):
            call()


# --- history ---


def keep(app: multiq.App, body: bytes, kind: Any = "done") -> str:
    """Store a finished job's outcome."""
    from multiq.backend import Ack, After

    handle = app.queue("mail").enqueue(1)
    consumer = app.backend.consumer(["mail"])
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([Ack(lease, After(keep=60, outcome=body, kind=kind))]) == [None]
    return handle.id


def test_the_history_of_a_queue_has_its_outcomes_in_pages(app: multiq.App) -> None:
    one = keep(app, b'{"v":1,"value":[1,2]}')
    two = keep(app, b'{"v":1,"omitted":"too large"}')
    three = keep(app, b"\xff", "cancelled")
    queue = app.queue("mail")
    page = queue.history(limit=2)
    assert [outcome.id for outcome in page] == [three, two]
    assert [(outcome.value, outcome.omitted) for outcome in page] == [(None, "no value is stored"), (None, "too large")]
    (last,) = queue.history(limit=2, after=page.after)
    assert (last.id, last.value, last.omitted, last.kind) == (one, [1, 2], None, "done")
    assert [outcome.id for outcome in queue.history(kind="cancelled")] == [three]
    assert len(app.queue("other").history()) == 0


def test_forget_deletes_the_outcomes_of_jobs(app: multiq.App) -> None:
    one, two = keep(app, b"{}"), keep(app, b"{}")
    assert app.queue("mail").forget([one, "nope"]) == 1
    assert [outcome.id for outcome in app.queue("mail").history()] == [two]
    with pytest.raises(OptionInvalid):
        app.queue("mail").forget(two)


def test_an_unknown_kind_of_outcome_is_refused(app: multiq.App) -> None:
    with pytest.raises(OptionInvalid, match="kind must be one of done, cancelled, got 'failed'"):
        app.queue("mail").history(kind="failed")
