"""A worker in this process, on the memory backend: verdicts, events, middleware, time limits and prefetch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq import BuryJob, ReleaseJob, State, current_job, events
from multiq.backend import Consumer
from multiq.errors import BackendUnavailable
from multiq.worker.execution.prefetch import BUDGET, Prefetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MODES: list[dict[str, Any]] = [{}, {"threads": 3}, {"concurrency": 5}]


@pytest.fixture
def app() -> multiq.App:
    return multiq.App("memory://")


def drain(app: multiq.App, **options: Any) -> int:
    """Run a worker until the queues are empty."""
    return multiq.Worker(app, stop_when_empty=True, **options).run()


@contextlib.contextmanager
def working(app: multiq.App, **options: Any) -> Iterator[multiq.Worker]:
    """A worker in a thread while the block lasts."""
    worker = multiq.Worker(app, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Any, timeout: float = 20) -> None:
    give_up_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.005)


class EvilText(str):
    __slots__ = ()

    def __format__(self, _: str) -> str:
        raise RuntimeError("no format")


class EvilFormat(Exception):
    def __str__(self) -> str:
        return EvilText("text")


class EvilMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")


class EvilName(Exception, metaclass=EvilMeta):
    pass


class EvilClass(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


@pytest.mark.parametrize("mode", MODES)
class TestVerdicts:
    """What a task does decides its job's verdict, in every mode."""

    def test_a_job_that_returns_is_gone(self, app: multiq.App, mode: dict[str, Any]) -> None:
        ran: list[int] = []
        task = app.task(name="append")(ran.append)
        handle = task.enqueue(5)
        assert drain(app, **mode) == 0
        assert ran == [5]
        assert handle.state() is State.GONE

    def test_a_coroutine_is_awaited(self, app: multiq.App, mode: dict[str, Any]) -> None:
        ran: list[int] = []

        @app.task
        async def add(number: int) -> None:
            await asyncio.sleep(0)
            ran.append(number)

        add.enqueue(5)
        drain(app, **mode)
        assert ran == [5]

    @pytest.mark.parametrize(
        "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("bare")]
    )
    def test_whatever_a_job_raises_it_is_retried_and_the_worker_lives(
        self, app: multiq.App, mode: dict[str, Any], error: BaseException
    ) -> None:
        @app.task(max_attempts=2, backoff=0)
        def fail() -> None:
            raise error

        handle = fail.enqueue()
        assert drain(app, **mode) == 0
        info = handle.peek()
        assert (info.state, info.attempt) == (State.BURIED, 2)
        assert type(error).__name__ in str(info.reason)

    @pytest.mark.parametrize("error", ["EvilFormat", "EvilName", "EvilClass"])
    def test_an_error_that_cannot_be_formatted_ends_no_thread(
        self, app: multiq.App, mode: dict[str, Any], error: str
    ) -> None:
        ran: list[int] = []

        @app.task(max_attempts=1)
        def fail() -> None:
            raise globals()[error]

        handles = [fail.enqueue() for _ in range(6)]
        task = app.task(name="append")(ran.append)
        task.enqueue(1)
        assert drain(app, **mode) == 0
        assert ran == [1]
        # An error whose text cannot be made is retried as if the task had no retry policy.
        assert {handle.state() for handle in handles} <= {State.BURIED, State.DELAYED}

    def test_a_backoff_that_fails_hides_no_failure(self, app: multiq.App, mode: dict[str, Any]) -> None:
        seen: list[str] = []
        app.on(events.JobEvent)(lambda event: seen.append(type(event).__name__))

        @app.task(max_attempts=2, backoff=lambda _: 1 / 0)
        def fail() -> None:
            raise KeyError("no")

        handle = fail.enqueue()
        drain(app, **mode)
        assert seen == ["JobStarted", "JobFailed", "JobRetried"]
        assert handle.state() is State.DELAYED

    def test_a_coroutine_that_a_decorator_hides_is_run_or_refused(self, app: multiq.App, mode: dict[str, Any]) -> None:
        ran: list[str] = []

        class Later:
            def __await__(self) -> Any:
                ran.append("awaited")
                return asyncio.sleep(0).__await__()

        def generate() -> Iterator[int]:
            ran.append("never")
            yield 1

        app.task(name="later")(lambda: Later()).enqueue()  # noqa: PLW0108 - not the class itself
        handle = app.task(name="generate")(lambda: generate()).enqueue()  # noqa: PLW0108
        drain(app, **mode)
        assert ran == ["awaited"]
        assert handle.peek().state is State.BURIED
        assert "whose code has not run" in str(handle.peek().reason)

    def test_a_coroutine_that_cancels_itself_has_failed_and_its_attempt_counts(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        @app.task(max_attempts=2, backoff=0)
        async def give_in() -> None:
            raise asyncio.CancelledError

        handle = give_in.enqueue()
        worker = multiq.Worker(app, stop_when_empty=True, **mode)
        hang_guard = threading.Timer(10, worker.stop)
        hang_guard.start()
        worker.run()
        hang_guard.cancel()
        info = handle.peek()
        assert (info.state, info.attempt) == (State.BURIED, 2)

    def test_the_backoff_is_the_delay(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task(backoff=[100, 200])
        def fail() -> None:
            raise ValueError("no")

        handle = fail.enqueue()
        drain(app, **mode)
        info = handle.peek()
        assert info.state is State.DELAYED
        assert 95 < (info.due_in or 0) <= 100

    def test_release_job_says_when_to_try_again(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task
        def later() -> None:
            raise ReleaseJob(delay=500, reason="the printer is warm")

        handle = later.enqueue()
        drain(app, **mode)
        info = handle.peek()
        assert (info.state, info.reason) == (State.DELAYED, "the printer is warm")
        assert (info.due_in or 0) > 490

    def test_bury_job_gives_up_at_once(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task
        def hopeless() -> None:
            raise BuryJob("no such customer")

        handle = hopeless.enqueue()
        drain(app, **mode)
        assert (handle.peek().state, handle.peek().reason) == (State.BURIED, "no such customer")

    def test_a_body_that_is_not_an_envelope_is_buried_with_its_bytes(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        bodies = [b"\x00\xff", b"", b"[1,2]", b'{"multiq":99,"task":"x"}', b'{"multiq":1}', b"{" * 5000]
        handles = [app.queue().enqueue(body) for body in bodies]
        assert drain(app, **mode) == 0
        for handle, body in zip(handles, bodies, strict=True):
            info = handle.peek()
            assert (info.state, info.body) == (State.BURIED, body)
            assert info.reason

    def test_an_unknown_task_is_retried_and_in_the_end_buried(self, app: multiq.App, mode: dict[str, Any]) -> None:
        patient = app.queue().enqueue({"multiq": 1, "task": "nope"})
        at_once = app.queue().enqueue({"multiq": 1, "task": "nope", "max_attempts": 1})
        drain(app, **mode)
        assert patient.peek().state is State.DELAYED
        assert at_once.peek().state is State.BURIED
        assert "knows no task 'nope'" in str(at_once.peek().reason)

    def test_arguments_that_do_not_fit_are_buried(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task
        def one(number: int) -> None:
            raise AssertionError("never called")

        handle = app.queue().enqueue({"multiq": 1, "task": "one", "args": [1, 2, 3]})
        drain(app, **mode)
        assert handle.peek().state is State.BURIED
        assert "too many positional arguments" in str(handle.peek().reason)

    def test_an_error_whose_text_fails_is_reported(self, app: multiq.App, mode: dict[str, Any]) -> None:
        class Nasty(Exception):
            def __str__(self) -> str:
                raise RuntimeError("not even that")

        @app.task(max_attempts=1)
        def fail() -> None:
            raise Nasty

        handle = fail.enqueue()
        drain(app, **mode)
        assert str(handle.peek().reason).startswith("Nasty")

    @pytest.mark.one_row
    def test_a_huge_error_is_cut(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task(max_attempts=1)
        def fail() -> None:
            raise ValueError("x" * 10_000_000)

        handle = fail.enqueue()
        drain(app, **mode)
        assert len(str(handle.peek().reason)) <= 2000

    def test_a_broken_backoff_function_does_not_lose_the_job(self, app: multiq.App, mode: dict[str, Any]) -> None:
        def broken(attempt: int) -> float:
            raise RuntimeError("no idea")

        @app.task(backoff=broken)
        def fail() -> None:
            raise ValueError("no")

        handle = fail.enqueue()
        assert drain(app, **mode) == 0
        assert handle.peek().state is State.DELAYED

    def test_current_job_returns_the_running_job(self, app: multiq.App, mode: dict[str, Any]) -> None:
        seen: list[tuple[str, str, int, dict[str, str]]] = []

        @app.task
        def look() -> None:
            job = current_job()
            seen.append((job.id, job.queue, job.attempt, job.headers))

        handle = look.options(queue="here", headers={"trace": "7"}).enqueue()
        drain(app, queues=["here"], **mode)
        assert seen == [(handle.id, "here", 1, {"trace": "7"})]
        with pytest.raises(LookupError, match="no multiq job runs here"):
            current_job()

    def test_ended_is_called_and_its_error_changes_nothing(self, app: multiq.App, mode: dict[str, Any]) -> None:
        calls: list[tuple[str, Any]] = []

        class Told(multiq.Middleware):
            def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
                calls.append((ending.verdict, ending.result if ending.error is None else str(ending.error)))
                raise RuntimeError("in middleware")

        @app.task(max_attempts=2, backoff=0, middleware=[Told()])
        def work(number: int) -> int:
            if number < 0:
                raise ValueError("negative")
            return number * 2

        good, bad = work.enqueue(4), work.enqueue(-1)
        drain(app, **mode)
        assert sorted(calls, key=str) == [("buried", "negative"), ("done", 8), ("retried", "negative")]
        assert (good.state(), bad.state()) == (State.GONE, State.BURIED)


class TestEvents:
    def test_the_events_of_a_job_come_in_order(self, app: multiq.App) -> None:
        @app.task(max_attempts=2, backoff=0)
        def fail() -> None:
            raise ValueError("no")

        story: list[str] = []
        app.on(events.Event)(lambda event: story.append(type(event).__name__))
        fail.enqueue()
        drain(app)
        told = [name for name in story if name != "WorkerLooping"]
        one = ["JobStarted", "JobFailed"]
        ends = ["WorkerStopping", "WorkerStopped"]
        assert told == ["WorkerStarted", *one, "JobRetried", *one, "JobBuried", *ends]

    def test_a_subscriber_that_fails_changes_nothing(self, app: multiq.App) -> None:
        @app.on(events.JobDone)
        def broken(event: events.JobDone) -> None:
            raise RuntimeError("no")

        task = app.task(name="ok")(lambda: None)
        handle = task.enqueue()
        assert drain(app) == 0
        assert handle.state() is State.GONE

    @pytest.mark.parametrize("mode", MODES)
    def test_an_overdue_job_is_reported_once_and_runs_on_without_a_supervisor(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        seen: list[events.JobOverdue] = []
        app.on(events.JobOverdue)(seen.append)

        @app.task(timeout=0.1)
        def deaf() -> None:
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    time.sleep(0.01)

        handle = deaf.enqueue()
        assert drain(app, kill_after=0.1, **mode) == 0
        assert [event.timeout for event in seen] == [0.1]
        assert handle.state() is State.GONE

    @pytest.mark.parametrize("mode", MODES)
    def test_a_plain_function_is_interrupted_at_its_timeout_and_can_tidy_up(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        seen: list[object] = []
        app.on(events.JobTimedOut)(lambda event: seen.append(event.timeout))

        @app.task(max_attempts=1, timeout=0.1)
        def endless() -> None:
            try:
                while True:
                    time.sleep(0.01)
                    if mode:  # on a thread, the job must poll
                        current_job().check()
            except multiq.SoftTimeout as exc:
                seen.append(str(exc))
                raise

        handle = endless.enqueue()
        after = app.task(name="after")(lambda: seen.append("after"))
        after.enqueue()
        drain(app, **mode)
        assert sorted(seen, key=str) == [0.1, "after", "the task ran longer than its timeout"]
        assert handle.peek().reason == "the task ran longer than its timeout of 0.1 s"

    @pytest.mark.parametrize("mode", MODES)
    def test_a_job_that_polls_is_notified_once_and_may_tidy_up(self, app: multiq.App, mode: dict[str, Any]) -> None:
        marks: list[str] = []

        def wait(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.01)

        @app.task(max_attempts=1, timeout=0.1)
        def ask() -> None:
            try:
                while True:
                    current_job().check()
            except multiq.SoftTimeout:
                wait(0.3)
                after.options(queue="later").enqueue()  # a call into multiq would raise the timeout, too
                marks.append("tidied")

        @app.task
        def after() -> None: ...

        ask.enqueue()
        drain(app, queues=["default"], kill_after=60, **mode)
        assert marks == ["tidied"]

    def test_a_coroutine_that_holds_the_loop_itself_is_notified_at_its_timeout(self, app: multiq.App) -> None:
        slices: list[int] = []

        @app.task(max_attempts=1, timeout=0.5)
        async def hog() -> None:
            for number in range(40):
                time.sleep(0.2)  # noqa: ASYNC251 - blocks the loop on purpose
                await asyncio.sleep(0)
                slices.append(number)

        handle = hog.enqueue()
        drain(app, concurrency=2, kill_after=60)
        assert handle.peek().reason == "the task ran longer than its timeout of 0.5 s"
        assert len(slices) < 39

    @pytest.mark.long
    def test_a_coroutine_is_not_charged_for_the_time_in_which_another_holds_its_loop(self, app: multiq.App) -> None:
        @app.task
        async def hog() -> None:
            for _ in range(8):
                time.sleep(0.5)  # noqa: ASYNC251 - blocks the loop on purpose
                await asyncio.sleep(0)

        @app.task(timeout=1, max_attempts=1)
        async def innocent() -> None:
            for _ in range(5):
                await asyncio.sleep(0.1)

        handle = innocent.enqueue()
        hog.enqueue()
        drain(app, concurrency=2)
        assert handle.state() is State.GONE

    def test_jobs_behind_a_coroutine_that_holds_the_loop_go_to_other_workers(self, app: multiq.App) -> None:
        starts: dict[int, float] = {}
        let_go = threading.Event()

        @app.task
        async def hog() -> None:
            starts[-1] = time.monotonic()
            let_go.wait(30)  # blocks the loop for all its other jobs, on purpose
            starts[-2] = time.monotonic()

        @app.task
        async def short(number: int) -> None:
            starts[number] = time.monotonic()

        with working(app, concurrency=10):
            hog.enqueue()
            until(lambda: -1 in starts)
            with working(app, concurrency=10):
                short.enqueue_many([(number,) for number in range(20)])
                until(lambda: set(range(20)) <= starts.keys())
            assert -2 not in starts
            let_go.set()

    def test_a_coroutine_cancelled_before_its_first_step_is_given_back(self, app: multiq.App) -> None:
        ran: list[int] = []

        @app.task
        async def rough(number: int) -> None:
            if not ran:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            ran.append(number)

        rough.enqueue_many([(number,) for number in range(4)])
        hang_guard = multiq.Worker(app, concurrency=8, stop_when_empty=True)
        guard = threading.Timer(30, hang_guard.stop)
        guard.start()
        assert hang_guard.run() == 0
        guard.cancel()
        assert sorted(ran) == [0, 1, 2, 3]

    def test_a_timeout_never_lands_in_the_next_job(self, app: multiq.App) -> None:
        # Given jobs that end at about their time limit, each followed by a job without a limit
        ends: list[str | None] = []
        app.on(events.JobDone)(lambda event: ends.append(event.job.task))
        app.on(events.JobTimedOut)(lambda event: ends.append(f"{event.job.task}, timed out"))

        @app.task(max_attempts=1, timeout=0.05)
        def close() -> None:
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass

        @app.task
        def free() -> None:
            end = time.monotonic() + 0.003
            while time.monotonic() < end:
                pass

        for _ in range(30):
            close.enqueue()
            free.enqueue()
        # When a worker runs them, then only jobs with a limit get a timeout
        assert drain(app) == 0
        assert ends.count("free") == 30
        assert ends.count("close") + ends.count("close, timed out") == 30

    @pytest.mark.parametrize("mode", MODES)
    def test_a_coroutine_is_cancelled_at_its_timeout(self, app: multiq.App, mode: dict[str, Any]) -> None:
        @app.task(max_attempts=1)
        async def sleep() -> None:
            await asyncio.sleep(300)

        handle = sleep.options(timeout=0.1).enqueue()
        drain(app, **mode)
        assert handle.peek().reason == "the task ran longer than its timeout of 0.1 s"


class TestLeases:
    @pytest.mark.one_row
    @pytest.mark.parametrize("mode", MODES)
    def test_a_lease_is_touched_while_its_job_runs(self, app: multiq.App, mode: dict[str, Any]) -> None:
        starts: list[int] = []

        @app.task(ttr=1)
        def long() -> None:
            starts.append(current_job().attempt)
            time.sleep(2.5)

        long.enqueue()
        with working(app, **mode), working(app, **mode):
            until(lambda: starts)
            until(lambda: app.backend.queues() == [])
        assert starts == [1]

    def test_a_late_verdict_emits_job_lost(self, app: multiq.App) -> None:
        lost: list[str] = []
        app.on(events.JobLost)(lambda event: lost.append(event.job_id))

        @app.task
        def race() -> None:
            store = app.backend._store  # type: ignore[attr-defined]
            with store.changed:  # end the lease, as if its holder had been suspended
                held = store.queue("default", store.clock())
                held.make_ready(held.jobs[current_job().id], crashed=True)

        handle = race.options(max_crashes=1).enqueue()
        drain(app)
        assert lost == [handle.id]
        assert handle.peek().reason == (
            "poison: attempt 2 did not begin, as 1 before it ended without a verdict (crash, kill, or lease too short)"
        )


class FlakyConsumer(Consumer):
    """A consumer whose every third call raises a lost connection."""

    def __init__(self, inner: Consumer) -> None:
        self._inner = inner
        self.queues = inner.queues
        self._calls = 0

    def reserve(self, limit: int, timeout: float, queues: Any = None) -> list[Any]:
        self._fail_at_times()
        return self._inner.reserve(limit, timeout, queues)

    def settle(self, verdicts: Any) -> list[Any]:
        self._fail_at_times()
        return self._inner.settle(verdicts)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()

    def _fail_at_times(self) -> None:
        self._calls += 1
        if self._calls % 3 == 1:
            raise BackendUnavailable("the cable is loose")


@pytest.mark.parametrize("mode", MODES)
def test_an_outage_delays_verdicts_and_loses_none(
    app: multiq.App, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a backend that loses every third call
    ran: list[int] = []
    task = app.task(name="append")(ran.append)
    handles = [task.enqueue(number) for number in range(20)]
    make = app.backend.consumer
    monkeypatch.setattr(app.backend, "consumer", lambda queues: FlakyConsumer(make(queues)))
    told: list[str] = []
    app.on(events.BackendDown)(lambda event: told.append(str(event.error)))
    # When a worker works
    with working(app, **mode):
        until(lambda: {handle.state() for handle in handles} == {State.GONE}, timeout=60)
    # Then each job ran once and was settled, and the outage was reported
    assert sorted(ran) == list(range(20))
    assert "the cable is loose" in told


class Cut(FlakyConsumer):
    """A consumer whose first reserve after a settle raises a lost connection."""

    def reserve(self, limit: int, timeout: float, queues: Any = None) -> list[Any]:
        if self._calls == 1:
            self._calls = 2
            raise BackendUnavailable("the cable is loose")
        return self._inner.reserve(limit, timeout, queues)

    def settle(self, verdicts: Any) -> list[Any]:
        self._calls = self._calls or 1
        return self._inner.settle(verdicts)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_does_not_end_as_empty_if_its_reserve_was_cut(
    app: multiq.App, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more jobs than the worker takes at once, and a connection that is lost after the first verdicts
    ran: list[int] = []
    task = app.task(name="append")(ran.append)
    for number in range(10):
        task.enqueue(number)
    make = app.backend.consumer
    monkeypatch.setattr(app.backend, "consumer", lambda queues: Cut(make(queues)))
    # When a worker runs that ends when no job is due, then it runs all jobs
    assert multiq.Worker(app, stop_when_empty=True, prefetch=1, **mode).run() == 0
    assert sorted(ran) == list(range(10))


class TestPrefetch:
    def test_prefetch_grows_while_jobs_are_short_and_batches_full(self) -> None:
        prefetch = Prefetch(1, 100)
        for _ in range(20):
            prefetch.note_job(0.00001)
            prefetch.note_batch(prefetch.size, prefetch.size)
        assert prefetch.size == 101  # one job that runs, and 100 prefetched jobs

    def test_one_long_job_resets_the_prefetch(self) -> None:
        prefetch = Prefetch(1, 100)
        for _ in range(20):
            prefetch.note_job(0.00001)
            prefetch.note_batch(prefetch.size, prefetch.size)
        prefetch.note_job(1.0)
        prefetch.note_batch(1, 1)
        assert prefetch.size == 1

    def test_prefetch_never_holds_more_work_than_its_budget(self) -> None:
        prefetch = Prefetch(1, 100)
        for _ in range(100):
            prefetch.note_job(0.002)
            prefetch.note_batch(prefetch.size, prefetch.size)
        assert prefetch.size <= BUDGET / 0.002

    def test_many_slots_share_the_prefetched_jobs(self) -> None:
        # One of 50 slots becomes free every 0.4 ms. So 24 more jobs may wait, and none waits longer than the budget.
        prefetch = Prefetch(50, 100)
        for _ in range(100):
            prefetch.note_job(2 * BUDGET)
            prefetch.note_batch(prefetch.size, prefetch.size)
        assert prefetch.size == 50 - 1 + 25
        assert (prefetch.size - 50 + 1) / 50 * 2 * BUDGET <= BUDGET

    def test_every_slot_gets_at_least_one_job(self) -> None:
        assert Prefetch(8, 1).size == 8


@pytest.mark.parametrize("mode", [{"threads": 3}, {"concurrency": 3}])
def test_no_more_jobs_run_at_a_time_than_allowed(app: multiq.App, mode: dict[str, Any]) -> None:
    # Given jobs so short that more of them are held than run
    at_work, most = 0, 0
    counting = threading.Lock()

    def count(change: int) -> None:
        nonlocal at_work, most
        with counting:
            at_work += change
            most = max(most, at_work)

    async def acount_in_and_out(number: int) -> None:
        count(1)
        await asyncio.sleep(0)
        count(-1)

    def count_in_and_out(number: int) -> None:
        count(1)
        time.sleep(0)
        count(-1)

    task = app.task(acount_in_and_out if "concurrency" in mode else count_in_and_out)
    task.enqueue_many([(number,) for number in range(3000)])
    drain(app, **mode)
    assert app.queue().stats().ready == 0
    assert most <= 3


@pytest.mark.parametrize("mode", MODES)
def test_jobs_that_arrive_after_the_stop_do_not_begin(
    app: multiq.App, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that is stopped at the moment at which it gets a job
    ran: list[int] = []
    handle = app.task(name="append")(ran.append).enqueue(1)
    worker = multiq.Worker(app, **mode)
    make = app.backend.consumer

    class StopsInTheMiddle(FlakyConsumer):
        def reserve(self, limit: int, timeout: float, queues: Any = None) -> list[Any]:
            leases = self._inner.reserve(limit, timeout, queues)
            worker.stop()
            return leases

        def settle(self, verdicts: Any) -> list[Any]:
            return self._inner.settle(verdicts)

    monkeypatch.setattr(app.backend, "consumer", lambda queues: StopsInTheMiddle(make(queues)))
    # When the worker runs, then the job is ready as if it had never been reserved
    assert worker.run() == 0
    assert ran == []
    assert (handle.peek().state, handle.peek().attempt) == (State.READY, 0)


def test_jobs_behind_long_ones_are_not_fetched_and_given_back_over_and_over(app: multiq.App) -> None:
    # Given more long jobs than threads
    asked: list[events.WorkerLooping] = []
    app.on(events.WorkerLooping)(asked.append)
    app.task(name="long")(lambda: time.sleep(0.3))
    app.queue().enqueue_many([{"multiq": 1, "task": "long"}] * 8)
    # When a worker runs them, then it makes about one call per job, and does not fetch in a busy loop
    assert drain(app, threads=3) == 0
    assert len(asked) < 40


@pytest.mark.parametrize("mode", MODES)
class TestAround:
    """Middleware."""

    def test_middleware_runs_around_each_job_the_first_one_outermost(
        self, app: multiq.App, mode: dict[str, Any]
    ) -> None:
        seen: list[str] = []

        @app.middleware
        def outer(job: multiq.JobContext) -> Iterator[None]:
            seen.append(f"before {job.task}")
            yield
            seen.append("after")

        @app.middleware
        def inner(job: multiq.JobContext) -> Iterator[None]:
            seen.append("inner")
            assert current_job().id == job.id
            yield

        app.task(name="plain")(lambda: seen.append("plain")).enqueue()
        drain(app, **mode)

        @app.task
        async def slow() -> None:
            await asyncio.sleep(0)
            seen.append("slow")

        slow.enqueue()
        drain(app, **mode)
        assert seen == ["before plain", "inner", "plain", "after", "before slow", "inner", "slow", "after"]

    def test_middleware_sees_the_error_and_its_own_fails_the_job(self, app: multiq.App, mode: dict[str, Any]) -> None:
        seen: list[object] = []

        @app.middleware
        def watch(job: multiq.JobContext) -> Iterator[None]:
            if job.task == "forbidden":
                raise PermissionError("not this one")
            try:
                yield
            except ValueError as exc:
                seen.append(str(exc))
                raise

        @app.task(max_attempts=1)
        def fail() -> None:
            raise ValueError("no")

        forbidden = app.task(name="forbidden", max_attempts=1)(lambda: seen.append("ran"))
        handles = fail.enqueue(), forbidden.enqueue()
        drain(app, **mode)
        assert seen == ["no"]
        assert [handle.peek().reason for handle in handles] == ["ValueError: no", "PermissionError: not this one"]

    def test_async_middleware_is_for_coroutines(self, app: multiq.App, mode: dict[str, Any]) -> None:
        seen: list[str] = []

        @app.middleware
        async def session(job: multiq.JobContext) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            seen.append(f"open for {job.task}")
            yield
            seen.append("closed")

        @app.task
        async def fetch() -> None:
            seen.append("fetch")

        fetch.enqueue()
        app.task(name="plain")(lambda: None).enqueue()
        drain(app, **mode)
        assert seen == ["open for fetch", "fetch", "closed"]

    def test_middleware_may_keep_the_worker_from_fetching(self, app: multiq.App, mode: dict[str, Any]) -> None:
        asked: list[str] = []
        is_open = False

        class May(multiq.Middleware):
            def before_fetch(self, worker: str) -> bool:
                asked.append(worker)
                return is_open

        class Broken(multiq.Middleware):
            def before_fetch(self, worker: str) -> None:
                raise RuntimeError("no veto")

        app.middleware(May())
        app.middleware(Broken())

        ran: list[int] = []
        task = app.task(name="append")(ran.append)
        with working(app, **mode):
            until(lambda: asked)
            task.enqueue(1)
            time.sleep(0.1)
            assert (ran, app.queue().stats().ready) == ([], 1)
            is_open = True
            until(lambda: ran)

    def test_ended_is_called_for_each_retry(self, app: multiq.App, mode: dict[str, Any]) -> None:
        heard: list[tuple[int, str, str]] = []

        class Note(multiq.Middleware):
            def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
                heard.append((job.attempt, ending.verdict, str(ending.error)))

        @app.task(max_attempts=3, backoff=0, middleware=[Note()])
        def fail() -> None:
            raise ValueError("no")

        fail.enqueue()
        drain(app, **mode)
        assert heard == [(1, "retried", "no"), (2, "retried", "no"), (3, "buried", "no")]


def test_middleware_must_be_a_generator_function(app: multiq.App) -> None:
    with pytest.raises(multiq.ArgumentsInvalid, match="before and after one yield"):
        app.middleware(lambda job: None)  # type: ignore[type-var]  # wrong on purpose
