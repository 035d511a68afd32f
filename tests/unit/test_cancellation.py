"""Cancelling jobs that wait and jobs that run, with a real worker in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import multiq
from multiq import events
from multiq.backend import Abandon, Ack, GiveBack, State
from multiq.backend.capabilities import Gap
from multiq.backend.memory import MemoryBackend, MemoryConsumer, MemoryJobs
from multiq.cancellation import HOME, _ask_workers
from multiq.control.flags import Control, DownState
from multiq.errors import JobAwaited, JobCancelled, JobEnded, JobNotFound, OptionInvalid, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from multiq.backend import JobRecord, Lease
    from multiq.job import JobHandle

SECONDS = 30.0  # a hang's limit


def spin_for(seconds: float) -> None:
    """Run until an exception interrupts this, or until *seconds* are over."""
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        time.sleep(0.005)


class Shop:
    """An app, and a record of what its tasks did."""

    def __init__(self, url: str) -> None:  # noqa: C901 - one function per task
        self.app = multiq.App(url)
        self.ran: list[Any] = []
        self.began = threading.Event()
        task = self.app.task

        @task(keep=60, max_attempts=3, backoff=0)
        def spin() -> None:
            self.began.set()
            spin_for(SECONDS)

        @task(keep=60, max_attempts=3, backoff=0, timeout=100)
        def timed() -> None:
            self.began.set()
            spin_for(SECONDS)

        @task(keep=60)
        async def sleep() -> None:
            self.began.set()
            await asyncio.sleep(SECONDS)

        @task(keep=60)
        def ask() -> None:
            self.began.set()
            job = multiq.current_job()
            while not job.is_cancelled:
                time.sleep(0.005)
            self.ran.append("seen")
            job.check_cancelled()

        @task(keep=60)
        def finish() -> str:
            self.began.set()
            while not multiq.current_job().is_cancelled:
                time.sleep(0.005)
            return "finished all the same"

        @task(keep=60, max_attempts=5, backoff=0)
        def fail() -> None:
            self.began.set()
            while not multiq.current_job().is_cancelled:
                time.sleep(0.005)
            raise ConnectionError("no route")

        @task(keep=60)
        def note(value: Any) -> Any:
            self.ran.append(value)
            return value

        @task(keep=60, max_attempts=3, backoff=0)
        def clean_up() -> None:
            self.began.set()
            try:
                spin_for(SECONDS)
            finally:
                time.sleep(0.1)
                self.ran.append("cleaned up")

        self.spin, self.timed, self.sleep, self.ask = spin, timed, sleep, ask
        self.finish, self.fail, self.note, self.clean_up = finish, fail, note, clean_up

    def work(self, meanwhile: Callable[[], object] = lambda: None, **options: Any) -> None:
        """Run a worker, and call *meanwhile* when a job has begun."""

        def wait() -> None:
            if self.began.wait(SECONDS):
                meanwhile()

        self.began.clear()
        thread = threading.Thread(target=wait)
        thread.start()
        try:
            multiq.Worker(self.app, stop_when_empty=True, **options).run()
        finally:
            self.began.set()
            thread.join()


@pytest.fixture(params=["memory://", "sqlite:///jobs.db?synchronous=normal"], ids=["memory", "sqlite"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.chdir(tmp_path)
    shop = Shop(request.param)
    with shop.app:
        yield shop


def assert_cancelled(handle: JobHandle, reason: str) -> None:
    """The job is gone, its outcome is kept, and it is neither buried nor ready."""
    assert handle.status() == "cancelled"
    with pytest.raises(JobCancelled, match=reason):
        handle.result(timeout=0)
    assert handle.state() is State.GONE


# --- running jobs ---


def test_a_job_that_is_cancelled_at_once_is_interrupted_although_looks_at_it_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a worker whose looks at a job take longer than the time between the enqueue of the job and its cancel
    at_once = MemoryBackend.peek

    def peek(self: MemoryBackend, queue: str, job_id: str) -> JobRecord:
        record = at_once(self, queue, job_id)
        if threading.current_thread() is not canceller:
            time.sleep(0.2)
        return record

    monkeypatch.setattr(MemoryBackend, "peek", peek)
    app = multiq.App("memory://")
    began = threading.Event()

    @app.task(keep=60)
    def spin() -> None:
        began.set()
        spin_for(SECONDS)

    def cancel() -> None:
        assert began.wait(SECONDS)
        handle.cancel(grace=0.05)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    # When a worker runs this job
    handle = spin.enqueue()
    multiq.Worker(app, stop_when_empty=True).run()
    canceller.join()
    # Then the job is interrupted
    assert handle.status() == "cancelled"


def test_an_impossible_grace_or_age_is_named(shop: Shop) -> None:
    handle = shop.app.queue("default").enqueue(b"x")
    with pytest.raises(OptionInvalid, match=r"grace must be from 0 .* got -1"):
        handle.cancel(grace=-1)
    with pytest.raises(OptionInvalid, match="older_than must be 0 seconds or more, got -1"):
        shop.app.flows.sweep(-1)


@pytest.mark.parametrize("name", ["spin", "timed", "sleep", "clean_up"])
def test_a_running_job_is_interrupted_after_the_grace(shop: Shop, name: str) -> None:
    # Given a job that does not check for its cancellation
    handle: JobHandle = getattr(shop, name).enqueue()
    # When the job is cancelled while it runs
    shop.work(lambda: handle.cancel(grace=0.05, reason="not needed"))
    # Then the job has ended in its first attempt
    assert_cancelled(handle, "not needed")
    outcome = handle.outcome()
    assert outcome is not None
    assert (outcome.kind, outcome.attempt, outcome.omitted) == ("cancelled", 1, "not needed")
    assert shop.ran == (["cleaned up"] if name == "clean_up" else [])


def test_a_coroutine_on_the_shared_loop_is_cancelled_and_the_others_go_on(shop: Shop) -> None:
    handle, other = shop.sleep.enqueue(), shop.note.enqueue(1)
    shop.work(lambda: handle.cancel(grace=0), concurrency=3)
    assert_cancelled(handle, "cancelled on request")
    assert other.result(timeout=0) == 1


@pytest.mark.parametrize("options", [{}, {"threads": 2}, {"concurrency": 2}], ids=["inline", "threads", "coroutines"])
def test_a_job_that_asks_sees_at_once_that_it_is_cancelled(shop: Shop, options: dict[str, int]) -> None:
    handle = shop.ask.enqueue()
    shop.work(lambda: handle.cancel(grace=SECONDS), **options)
    assert_cancelled(handle, "cancelled on request")
    assert shop.ran == ["seen"]


def test_a_job_that_returns_though_it_is_cancelled_is_done(shop: Shop) -> None:
    handle = shop.finish.enqueue()
    shop.work(lambda: handle.cancel(grace=SECONDS))
    assert handle.result(timeout=0) == "finished all the same"


def test_a_job_that_fails_when_it_is_cancelled_is_not_tried_again(shop: Shop) -> None:
    handle = shop.fail.enqueue()
    shop.work(lambda: handle.cancel(grace=SECONDS))
    assert_cancelled(handle, "cancelled on request")


def test_the_worker_tells_of_a_cancelled_job_and_deletes_the_request(shop: Shop) -> None:
    # Given a subscriber
    told: list[tuple[str, str]] = []

    @shop.app.on(events.JobCancelled)
    def tell(event: events.JobCancelled) -> None:
        told.append((event.job.id, event.reason))

    # When a job is cancelled, and another one after it, so that the worker looks for requests again
    first, second = shop.ask.enqueue(), shop.ask.enqueue()

    def cancel_both() -> None:
        first.cancel(reason="first")
        while first.status() == "running" or second.status() != "running":
            time.sleep(0.005)
        second.cancel(reason="second")

    shop.work(cancel_both)
    # Then the task sees the cancellation, and the first request is gone
    assert told == [(first.id, "first"), (second.id, "second")]
    assert len(shop.app.backend.notes(HOME).notes) <= 1


def test_a_second_request_shortens_the_grace_of_the_first(shop: Shop) -> None:
    # Given a running job that was cancelled with a long grace, and that has seen the request
    known = threading.Event()

    @shop.app.task(keep=60)
    def stay() -> None:
        shop.began.set()
        ends_at = time.monotonic() + SECONDS
        while time.monotonic() < ends_at:
            if multiq.current_job().is_cancelled:
                known.set()
            time.sleep(0.005)

    handle = stay.enqueue()

    def cancel_twice() -> None:
        handle.cancel(grace=3600, reason="when you can")
        assert known.wait(SECONDS)
        # When the job is cancelled again, without a grace
        assert handle.cancel(grace=0, reason="now") == "requested"

    shop.work(cancel_twice)
    # Then the job is interrupted at once
    assert_cancelled(handle, "now")


# --- typed answers ---


def test_a_job_that_has_not_started_is_deleted_and_its_outcome_is_kept(shop: Shop) -> None:
    for handle in (shop.note.enqueue(1), shop.note.options(delay=60).enqueue(2)):
        assert handle.cancel(reason="not needed") == "deleted"
        assert_cancelled(handle, "not needed")
    unkept = shop.note.options(keep=0).enqueue(3)
    assert unkept.cancel() == "deleted"
    assert unkept.status() == "unknown"
    assert shop.app.queue().cancel(shop.app.queue().enqueue("no task").id) == "deleted"
    shop.work()
    assert shop.ran == []


def test_a_job_that_is_gone_cannot_be_cancelled_and_the_error_says_how_it_ended(shop: Shop) -> None:
    done, unkept = shop.note.enqueue(1), shop.note.options(keep=0).enqueue(2)
    shop.work()
    with pytest.raises(JobEnded, match="has ended: it is done") as caught:
        done.cancel()
    assert caught.value.status == "done"
    with pytest.raises(JobNotFound, match="it is done, was deleted, or was never there"):
        unkept.cancel()
    with pytest.raises(JobNotFound):
        shop.app.queue().cancel("never")


def test_a_buried_job_is_deleted(shop: Shop) -> None:
    handle = shop.note.options(max_attempts=1).enqueue(1)
    job = shop.app.queue().reserve()
    job.bury("broken")
    assert handle.cancel() == "deleted"
    assert handle.status() == "cancelled"


@pytest.mark.parametrize("options", [{"grace": -1}, {"grace": "soon"}, {"reason": 7}, {"followers": "none"}])
def test_a_wrong_argument_is_refused(shop: Shop, options: dict[str, Any]) -> None:
    handle = shop.note.enqueue(1)
    with pytest.raises(OptionInvalid):
        handle.cancel(**options)
    assert handle.status() == "queued"


def test_a_running_job_cannot_be_cancelled_on_a_backend_without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = MemoryBackend.declared
    lacking = {name: Gap("never", "a test") for name in ("notes", "holds", "outcomes")}
    monkeypatch.setattr(MemoryJobs, "declared", msgspec.structs.replace(declared, **lacking), raising=False)
    app = multiq.App(backend=MemoryJobs())
    handle = app.queue().enqueue("work")
    job = app.queue().reserve()
    with pytest.raises(Unsupported, match="notes"):
        handle.cancel()
    job.release()
    assert handle.cancel() == "deleted"


# --- a request whose worker does not carry it out ---


def test_a_job_whose_worker_died_is_cancelled_before_it_starts_again(shop: Shop) -> None:
    # Given a running job, and a request to cancel it
    handle = shop.note.enqueue(1)
    consumer = shop.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert handle.cancel(reason="not needed") == "requested"
    # When its worker dies, and another one gets the job
    consumer.settle([Abandon(lease, "died")])
    shop.work()
    # Then the job does not start
    assert shop.ran == []
    assert_cancelled(handle, "not needed")


def test_a_request_is_not_about_a_later_job_of_the_same_id(shop: Shop) -> None:
    # Given a request about a job that has ended since
    queue = shop.app.queue()
    handle = shop.note.options(id="mine").enqueue(1)
    consumer = shop.app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert handle.cancel() == "requested"
    consumer.settle([GiveBack(lease)])
    queue.delete("mine")
    # When a job of the same id is enqueued, whose first worker dies
    time.sleep(0.05)  # the request is older, by the store's clock
    later = shop.note.options(id="mine").enqueue(2)
    (lease,) = consumer.reserve(1, 0)
    consumer.settle([Abandon(lease, "died")])
    shop.work()
    # Then it runs
    assert later.result(timeout=0) == 2


class _SlowRequests(MemoryConsumer):
    """A consumer whose request takes a while to arrive, as on a slow network."""

    def exchange(self, *args: Any, **options: Any) -> Any:
        began = self.slow()
        found = super().exchange(*args, **options)
        self.asked_at = began
        return found

    def reserve(self, *args: Any, **options: Any) -> list[Lease]:
        began = self.slow()
        leases = super().reserve(*args, **options)
        self.asked_at = began
        return leases

    def slow(self) -> float:
        began = time.monotonic()
        time.sleep(0.3)
        return began


def test_a_request_is_not_about_a_later_job_of_the_same_id_that_a_slow_call_reserves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a request about a job that has ended since
    shop = Shop("memory://")
    backend: Any = shop.app.backend
    handle = shop.note.options(id="mine").enqueue(1)
    consumer = backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert handle.cancel() == "requested"
    consumer.settle([Ack(lease)])
    # When a job of the same id is enqueued while a worker's call is on its way
    monkeypatch.setattr(backend, "consumer", lambda queues: _SlowRequests(backend._store, queues))

    @shop.app.task(keep=60)
    def wait() -> str:
        shop.began.set()
        give_up_at = time.monotonic() + SECONDS
        while backend.notes(HOME).notes and time.monotonic() < give_up_at:
            multiq.current_job().check_cancelled()
            time.sleep(0.005)
        return "not cancelled"

    timer = threading.Timer(0.15, lambda: wait.options(id="mine").enqueue())
    timer.start()
    shop.work(lambda: _ask_workers(backend))
    # Then the later job is not cancelled
    assert handle.result(timeout=SECONDS) == "not cancelled"


def test_a_request_about_an_earlier_job_of_the_same_id_is_deleted(shop: Shop) -> None:
    # Given a request about a job that has ended since, and a later job of the same id
    consumer = shop.app.backend.consumer(["default"])
    handle = shop.note.options(id="mine").enqueue(1)
    (lease,) = consumer.reserve(1, 0)
    assert handle.cancel() == "requested"
    consumer.settle([Ack(lease)])
    time.sleep(0.05)  # the request is older, by the store's clock

    @shop.app.task(keep=60)
    def wait() -> str:
        shop.began.set()
        while shop.app.backend.notes(HOME).notes:
            time.sleep(0.005)
        return "not cancelled"

    later = wait.options(id="mine").enqueue()
    # When a worker looks for requests while the later job runs, then the request is deleted, and the job continues
    shop.work(lambda: _ask_workers(shop.app.backend))
    assert later.result(timeout=0) == "not cancelled"


def test_a_worker_without_jobs_makes_no_call_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker without a sidecar and without a job, which may look for requests at each heartbeat
    shop = Shop("memory://")
    monkeypatch.setattr("multiq.worker.execution.cancels._ASK_EVERY", 0.0)
    calls: Counter[str] = Counter()
    read = Control.read_down

    def counting(control: Control) -> DownState:
        calls["flag"] += 1
        return read(control)

    monkeypatch.setattr(Control, "read_down", counting)
    worker = multiq.Worker(shop.app)
    thread = threading.Thread(target=worker.run)
    thread.start()
    time.sleep(0.3)  # some heartbeats
    worker.stop()
    thread.join()
    # Then the worker has not looked
    assert calls == Counter()


# --- flows ---


@pytest.mark.parametrize(("followers", "ran", "state"), [("go", [1], "finished"), ("stop", [], "cancelled")])
def test_the_jobs_after_a_cancelled_one_run_or_are_cancelled(
    shop: Shop, followers: Any, ran: list[int], state: str
) -> None:
    flow = multiq.chain(shop.spin.s(), shop.note.s(1)).enqueue()
    first, second = flow.jobs()
    refused: list[Exception] = []

    def cancel() -> None:
        try:
            first.cancel()
        except JobAwaited as exc:
            refused.append(exc)
        first.cancel(followers=followers, grace=0)

    shop.work(cancel)
    assert len(refused) == 1
    assert first.status() == "cancelled"
    assert shop.ran == ran
    assert flow.info().state == state
    assert second.status() == ("done" if ran else "cancelled")


@pytest.mark.parametrize("running", [True, False])
def test_a_flow_is_cancelled_with_its_running_jobs_if_asked(shop: Shop, running: bool) -> None:
    # Given a batch of which one member runs
    waiting = [shop.note.options(delay=SECONDS).s(n) for n in range(5)]
    flow = multiq.batch([shop.ask.s(), *waiting], then=shop.note.s("then")).enqueue()
    member = next(job for job, task in flow.tasks() if task == "ask")
    assert flow.progress() == (0, 6)
    deleted: list[int] = []

    # When the flow is cancelled
    def cancel() -> None:
        deleted.append(flow.cancel(running=running))
        if not running:
            member.cancel(followers="stop")

    shop.work(cancel)
    # Then no further job starts, and the running job is cancelled, with the flow or by its own call
    assert member.status() == "cancelled"
    assert shop.ran == ["seen"]
    assert flow.info().state == "cancelled"
    assert deleted == [6]  # first the waiting members are deleted
    assert flow.progress() == (0, 6)


# --- what it costs ---


def test_jobs_that_are_not_cancelled_cost_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a backend that counts its calls
    shop = Shop("memory://")
    calls: Counter[str] = Counter()
    for name in ("note", "notes", "stats", "peek", "pause"):
        call = getattr(shop.app.backend, name)

        def counting(*args: Any, _name: str = name, _call: Any = call, **options: Any) -> Any:
            calls[_name] += 1
            return _call(*args, **options)

        monkeypatch.setattr(shop.app.backend, name, counting)

    @shop.app.task(max_attempts=3, backoff=0)
    def fails() -> None:
        raise ValueError

    # When jobs run, and jobs are retried
    for number in range(20):
        shop.note.options(keep=0).enqueue(number)
        fails.enqueue()
    shop.work()
    # Then no call was made for requests
    assert shop.ran == list(range(20))
    assert calls == Counter({"stats": 1})  # the calls of the start, for ``multiq down``


def test_a_worker_looks_for_requests_of_other_processes_by_itself(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a request about which this process's workers are not notified
    monkeypatch.setattr("multiq.cancellation._listeners", set())
    handle = shop.ask.enqueue()
    # When the worker continues to run
    shop.work(lambda: handle.cancel(grace=SECONDS))
    # Then it finds the request
    assert_cancelled(handle, "cancelled on request")


def test_a_swallowed_cancellation_does_not_reach_the_next_job(shop: Shop) -> None:
    @shop.app.task(keep=60)
    def swallow() -> str:
        shop.began.set()
        with contextlib.suppress(JobCancelled):
            spin_for(SECONDS)
        return "went on"

    handle, other = swallow.enqueue(), shop.note.enqueue(1)
    shop.work(lambda: handle.cancel(grace=0))
    assert handle.result(timeout=0) == "went on"
    assert other.result(timeout=0) == 1
