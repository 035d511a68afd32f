"""Progress and steps: what a running job stores in its memo, and what its next attempt gets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from processes import until

import multiq
from multiq import current_job
from multiq.backend import Ack, Release, Touch
from multiq.backend.memory import MemoryBackend, MemoryConsumer
from multiq.errors import BackendUnavailable
from multiq.memo import Memo, Progress, decode_memo, encode_memo
from multiq.outcome import AttemptError
from multiq.worker.execution.running_memos import JobMemo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import Verdict
    from multiq.errors import LeaseLost

MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 3}]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["inline", "threads", "coroutines"])


class WatchedConsumer(MemoryConsumer):
    """A consumer that notes each touch. The test can make it unreachable."""

    log: Watched

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        touches = [verdict for verdict in verdicts if isinstance(verdict, Touch)]
        if touches and self.log.failures > 0:
            self.log.failures -= 1
            raise BackendUnavailable("away")
        if touches:
            time.sleep(self.log.round_trip)
        self.log.touches += touches
        self.log.verdicts += [verdict for verdict in verdicts if not isinstance(verdict, Touch)]
        return super().settle(verdicts)


class Watched(MemoryBackend):
    def __init__(self) -> None:
        super().__init__()
        self.touches: list[Touch] = []
        self.verdicts: list[Verdict] = []
        self.failures = 0
        self.round_trip = 0.0  # seconds that a touch takes

    def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
        consumer = WatchedConsumer(self._store, queues)
        consumer.log = self
        return consumer

    @property
    def memos(self) -> list[Memo]:
        """The memos that touches have stored."""
        return [decode_memo(touch.after.memo) for touch in self.touches if touch.after is not None]


@pytest.fixture
def backend() -> Watched:
    return Watched()


@pytest.fixture
def app(backend: Watched) -> Iterator[multiq.App]:
    with multiq.App(backend=backend) as app:
        yield app


def store_steps_until(end: threading.Event) -> None:
    """Carry out one step after the other, for 15 seconds at most."""
    job, deadline, number = current_job(), time.monotonic() + 15, 0
    while not end.is_set() and time.monotonic() < deadline:
        job.step(f"step {number}", lambda: 1)
        number += 1


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


# --- steps ---


@in_each_mode
def test_a_step_runs_once_over_all_attempts(app: multiq.App, backend: Watched, mode: dict[str, Any]) -> None:
    calls: list[str] = []
    values: list[Any] = []

    @app.task(backoff=0, max_attempts=3)
    def order() -> None:
        job = current_job()

        def charge() -> Any:
            calls.append("charge")
            return {"receipt": (1, 2)}

        values.append(job.step("charge", charge))
        if job.attempt < 3:
            raise ValueError
        values.append(job.step("ship", lambda: calls.append("ship")))

    order.enqueue()
    assert drain(app, **mode) == 0
    # Then each step has run once, in one touch, and each attempt has had the same value
    assert calls == ["charge", "ship"]
    assert values == [{"receipt": [1, 2]}] * 3 + [None]
    assert [sorted(memo.steps) for memo in backend.memos] == [["charge"], ["charge", "ship"]]


@in_each_mode
def test_a_step_of_a_coroutine_runs_once_over_all_attempts(app: multiq.App, mode: dict[str, Any]) -> None:
    calls: list[str] = []

    @app.task(keep=60, backoff=0, max_attempts=3)
    async def order() -> Any:
        job = current_job()

        async def charge() -> int:
            calls.append("charge")
            await asyncio.sleep(0)
            return 7

        value = await job.astep("charge", charge)
        if job.attempt < 3:
            raise ValueError
        return value, job.step("plain", lambda: 8)

    handle = order.enqueue()
    assert drain(app, **mode) == 0
    assert (calls, handle.result()) == (["charge"], [7, 8])


def test_many_steps_of_many_threads_are_all_stored(app: multiq.App) -> None:
    @app.task(keep=60, backoff=0, max_attempts=2)
    def work(number: int) -> list[Any]:
        job = current_job()
        values = [job.step(f"step {each}", lambda each=each: number + each) for each in range(20)]  # type: ignore[misc]
        if job.attempt < 2:
            raise ValueError
        return values

    handles = [work.enqueue(number) for number in range(20)]
    assert drain(app, threads=4) == 0
    assert [handle.result() for handle in handles] == [[n + each for each in range(20)] for n in range(20)]


def test_steps_of_other_jobs_do_not_keep_a_lease_from_being_renewed(app: multiq.App, backend: Watched) -> None:
    # Given jobs whose steps follow each other without a pause, and a job of a short ttr beside them
    backend.round_trip = 0.002
    ended, runs = threading.Event(), list[int]()

    @app.task
    def busy() -> None:
        store_steps_until(ended)

    @app.task(ttr=1)
    def slow() -> None:
        runs.append(current_job().attempt)
        time.sleep(2.5)
        ended.set()

    slow.enqueue()
    busy.enqueue_many([()] * 3)
    assert drain(app, threads=4, processes=0) == 0
    # Then the other job's lease was renewed, so it has run once
    assert runs == [1]


def test_steps_of_running_jobs_do_not_keep_the_worker_from_taking_jobs(app: multiq.App, backend: Watched) -> None:
    # Given jobs whose steps follow each other without a pause, and a job that comes later
    backend.round_trip = 0.002
    came, begun = threading.Event(), threading.Barrier(3)
    in_time: list[bool] = []

    @app.task
    def busy() -> None:
        begun.wait(20)
        store_steps_until(came)
        in_time.append(came.is_set())

    @app.task
    def late() -> None:
        came.set()

    busy.enqueue_many([(), ()])
    worker = threading.Thread(target=lambda: drain(app, threads=3, processes=0))
    worker.start()
    begun.wait(20)
    late.enqueue()
    worker.join()
    # Then the later job runs while the others still run
    assert in_time == [True, True]


def test_a_step_extends_the_lease_as_a_touch_does(app: multiq.App) -> None:
    left: list[float] = []

    @app.task(ttr=60)
    def work() -> None:
        job = current_job()
        time.sleep(0.3)
        job.step("one", lambda: None)
        left.append(app.queue().peek(job.id).due_in or 0.0)

    work.enqueue()
    drain(app)
    assert left[0] > 59.75


def test_a_step_of_a_lost_lease_raises_and_is_not_done(app: multiq.App, backend: Watched) -> None:
    seen: list[str] = []

    @app.task(keep=60)
    def work() -> str:
        job = current_job()
        # Given a job that still runs after the end of its lease
        lease = job.lease
        assert backend.consumer(["default"]).settle([Release(lease, 3600)]) == [None]
        for _ in range(2):
            with pytest.raises(multiq.LeaseLost):
                job.step("charge", lambda: seen.append("called"))
        with pytest.raises(multiq.LeaseLost):
            job.progress(0.5)
        return "first"

    handle = work.enqueue()
    drain(app)
    # Then the value was not stored, and the result of this run does not count
    assert seen == ["called", "called"]
    assert handle.peek().memo == b""
    assert handle.status() == "delayed"


@in_each_mode
def test_a_step_waits_for_a_backend_that_is_away(app: multiq.App, backend: Watched, mode: dict[str, Any]) -> None:
    calls: list[int] = []

    @app.task(keep=60)
    def work() -> Any:
        def charge() -> int:
            calls.append(1)
            return 7

        backend.failures = 3
        return current_job().step("charge", charge)

    handle = work.enqueue()
    assert drain(app, **mode) == 0
    assert (handle.result(), calls) == (7, [1])


@pytest.mark.parametrize("mode", MODES[:2], ids=["inline", "threads"])
def test_a_step_ends_at_the_job_s_timeout_while_the_backend_is_away(
    app: multiq.App, backend: Watched, mode: dict[str, Any]
) -> None:
    raised: list[BaseException] = []

    @app.task(timeout=0.3, ttr=5, max_attempts=1)
    def order() -> None:
        backend.failures = 10**9
        try:
            current_job().step("charge", lambda: 1)
        except BaseException as exc:
            raised.append(exc)
            raise

    # Given a backend that is unreachable for longer than the job may run, and a lease that lasts longer
    handle = order.enqueue()
    drain(app, **mode)
    # Then the step raises at the timeout, and not at the end of the lease
    assert [type(exc) for exc in raised] == [multiq.SoftTimeout]
    assert handle.peek().reason == "the task ran longer than its timeout of 0.3 s"


def test_a_step_raises_when_the_backend_is_away_until_the_lease_s_end(app: multiq.App, backend: Watched) -> None:
    raised: list[BaseException] = []

    @app.task(ttr=1, max_attempts=1)
    def work() -> None:
        backend.failures = 1_000_000
        try:
            current_job().step("charge", lambda: 7)
        except multiq.BackendError as exc:
            raised.append(exc)
        assert "charge" not in decode_memo(app.queue().peek(current_job().id).memo).steps
        backend.failures = 0

    work.enqueue()
    multiq.Worker(app, max_jobs=1).run()
    assert isinstance(raised[0], BackendUnavailable)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [({1}, "the value of step charge is of type set"), (float("nan"), "the value of step charge is nan")],
)
def test_a_step_s_value_must_be_json(app: multiq.App, value: Any, complaint: str) -> None:
    @app.task(max_attempts=1)
    def work() -> None:
        current_job().step("charge", lambda: value)

    handle = work.enqueue()
    drain(app)
    assert complaint in (handle.peek().reason or "")


def test_a_memo_that_is_too_large_is_refused(app: multiq.App) -> None:
    raised: list[multiq.PayloadTooLarge] = []

    @app.task(keep=60)
    def work() -> list[Any]:
        job = current_job()
        first = job.step("small", lambda: "x")
        for _ in range(2):
            with pytest.raises(multiq.PayloadTooLarge, match="no room for step 'large'") as refused:
                job.step("large", lambda: "x" * 300_000)
            raised.append(refused.value)
        return [first, job.step("small", lambda: "y"), job.step("next", lambda: "z")]

    handle = work.enqueue()
    drain(app)
    assert handle.result() == ["x", "x", "z"]
    assert [error.limit_bytes for error in raised] == [262_144] * 2


@pytest.mark.parametrize("name", ["", "x" * 201, 7, None, "a\nb"])
def test_a_step_has_a_name(app: multiq.App, name: Any) -> None:
    @app.task(max_attempts=1)
    def work() -> None:
        current_job().step(name, lambda: 7)

    handle = work.enqueue()
    drain(app)
    assert "a step's name must be printable text" in (handle.peek().reason or "")


def test_a_plain_step_refuses_a_coroutine_function(app: multiq.App) -> None:
    @app.task(max_attempts=1)
    def work() -> None:
        async def charge() -> None: ...

        current_job().step("charge", charge)

    handle = work.enqueue()
    drain(app)
    assert "await astep(...)" in (handle.peek().reason or "")


def test_a_function_in_a_step_is_interrupted_at_the_job_s_timeout() -> None:
    app = multiq.App("memory://")  # a timeout does not interrupt code of a backend's package
    caught: list[str] = []

    def charge() -> None:
        end = time.monotonic() + 30
        try:
            while time.monotonic() < end:
                pass
        except multiq.SoftTimeout:
            caught.append("in the step")
            raise

    @app.task(timeout=0.2, max_attempts=1)
    def work() -> None:
        current_job().step("charge", charge)

    handle = work.enqueue()
    drain(app)
    assert caught == ["in the step"]
    assert "ran longer than its timeout" in (handle.peek().reason or "")


# --- progress ---


@in_each_mode
def test_progress_is_seen_while_the_job_runs(app: multiq.App, mode: dict[str, Any]) -> None:
    seen: list[Progress | None] = []

    @app.task
    def work() -> None:
        handle = app.job("default", current_job().id)
        seen.append(handle.progress())
        current_job().progress(0.4, "page 4 of 10")
        until(lambda: handle.progress() is not None)
        seen.append(handle.progress())

    handle = work.enqueue()
    assert drain(app, **mode) == 0
    assert seen == [None, Progress(0.4, "page 4 of 10")]
    assert handle.progress() is None  # the job is gone


def test_progress_is_sent_at_most_once_a_second(app: multiq.App, backend: Watched) -> None:
    took: list[float] = []

    @app.task(ttr=60)
    def work() -> None:
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            current_job().progress(min(1.0, (time.monotonic() - began) / 2))
            time.sleep(0.001)
        handle = app.job("default", current_job().id)
        until(lambda: (handle.progress() or Progress(0)).fraction > 0.7)
        took.append(time.monotonic() - began)

    work.enqueue()
    drain(app)
    # Then the first and the last value are sent, and few in between
    assert 2 <= len(backend.memos) <= took[0] + 1
    assert backend.memos[-1].progress is not None


def test_the_last_progress_goes_with_the_verdict(app: multiq.App, backend: Watched) -> None:
    @app.task(backoff=3600)
    def work() -> None:
        current_job().progress(0.1)
        until(lambda: bool(backend.memos))
        current_job().progress(0.9, "nearly")
        raise ValueError

    handle = work.enqueue()
    drain(app)
    assert handle.progress() == Progress(0.9, "nearly")
    assert len(backend.memos) == 1


@in_each_mode
def test_the_last_progress_goes_with_a_snooze(app: multiq.App, mode: dict[str, Any]) -> None:
    @app.task
    def work() -> None:
        current_job().progress(0.4, "the shop is closed")
        raise multiq.Snooze(3600)

    handle = work.enqueue()
    drain(app, **mode)
    assert handle.state() == "delayed"
    assert handle.progress() == Progress(0.4, "the shop is closed")


def test_no_step_is_stored_after_the_verdict_was_made(app: multiq.App, backend: Watched) -> None:
    raised: list[BaseException] = []

    # Given a job that still runs after its verdict was made, as an overdue job does
    @app.task
    def work() -> None:
        job = current_job()
        job.step("before", lambda: 1)
        assert job.memos is not None
        memo = job.memos.of(job.lease)
        assert isinstance(memo, JobMemo)
        memo.with_error(AttemptError(1, "overdue", 0.0, "w:1"))
        try:
            job.step("after", lambda: 2)
        except multiq.LeaseLost as exc:
            raised.append(exc)
        with pytest.raises(multiq.LeaseLost):
            job.progress(0.5)

    work.enqueue()
    drain(app)
    # Then the step does not count as done, because the verdict stores the memo without this step
    assert len(raised) == 1
    assert [sorted(memo.steps) for memo in backend.memos] == [["before"]]


def test_progress_from_another_thread_of_the_job_is_stored(app: multiq.App) -> None:
    @app.task
    def work() -> None:
        job = current_job()
        thread = threading.Thread(target=lambda: job.progress(0.5))
        thread.start()
        thread.join()
        until(lambda: app.job("default", job.id).progress() == Progress(0.5))

    work.enqueue()
    assert drain(app) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "0.5", None, True])
def test_progress_must_be_from_0_to_1(app: multiq.App, fraction: Any) -> None:
    @app.task(max_attempts=1)
    def work() -> None:
        current_job().progress(fraction)

    handle = work.enqueue()
    drain(app)
    assert "fraction must be a number from 0 to 1" in (handle.peek().reason or "")


def test_a_long_message_is_cut(app: multiq.App) -> None:
    @app.task(backoff=3600)
    def work() -> None:
        current_job().progress(1, "\udcff" + "x" * 10_000)
        raise ValueError

    handle = work.enqueue()
    drain(app)
    progress = handle.progress()
    assert progress is not None
    assert (len(progress.message), progress.message[-3:]) == (500, "...")


def test_a_job_that_has_ended_has_no_progress(app: multiq.App) -> None:
    jobs: list[multiq.JobContext] = []

    @app.task
    def work() -> None:
        jobs.append(current_job())

    work.enqueue()
    drain(app)
    with pytest.raises(multiq.LeaseLost):
        jobs[0].progress(0.5)
    with pytest.raises(multiq.MultiqError, match="does not run: progress and steps belong to a run"):
        multiq.JobContext(task="t", lease=jobs[0].lease, envelope=None).progress(0.5)


# --- backends and processes ---


def test_a_backend_without_memos_says_so(app: multiq.App, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiq.backend import Gap

    gap = Gap("never", "it stores jobs only")
    monkeypatch.setattr(Watched, "declared", msgspec.structs.replace(MemoryBackend.declared, memos=gap))
    called: list[int] = []
    raised: list[multiq.Unsupported] = []

    @app.task
    def work() -> None:
        for ask in (lambda: current_job().progress(0.5), lambda: current_job().step("a", lambda: called.append(1))):
            with pytest.raises(multiq.Unsupported) as refused:
                ask()
            raised.append(refused.value)

    work.enqueue()
    drain(app)
    assert [(error.capability, error.reason) for error in raised] == [("memos", "never: it stores jobs only")] * 2
    assert called == []


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_of_a_job_is_told_that_it_has_no_memo(app: multiq.App) -> None:
    codes: list[int] = []

    @app.task
    def work() -> None:
        job = current_job()
        child = os.fork()
        if child == 0:
            try:
                job.step("charge", lambda: 7)
            except multiq.MultiqError as exc:
                os._exit(0 if "this is a fork of it" in str(exc) else 1)
            os._exit(2)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    work.enqueue()
    drain(app)
    assert codes == [0]


def test_a_memo_that_is_not_multiq_s_fails_the_step_and_stays(app: multiq.App, backend: Watched) -> None:
    from multiq.backend import After

    @app.task(keep=60, max_attempts=2, backoff=0)
    def work() -> None:
        current_job().step("charge", lambda: 7)

    handle = work.enqueue()
    consumer = backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([Release(lease, after=After(memo=b"another's"))]) == [None]
    drain(app)
    assert "the job's memo cannot be read" in (handle.peek().reason or "")
    assert handle.peek().memo == b"another's"


def test_a_job_without_steps_and_progress_has_the_same_verdicts_as_before_memos(
    app: multiq.App, backend: Watched
) -> None:
    @app.task(backoff=3600)
    def work(number: int) -> None:
        if number:
            raise ValueError

    work.enqueue(0)
    work.enqueue(1)
    drain(app)
    assert [(type(verdict), verdict.after) for verdict in backend.verdicts if isinstance(verdict, Ack | Release)] == [
        (Ack, None),
        (Release, None),
    ]
    assert backend.touches == []


# --- the format ---


def test_a_memo_is_the_json_of_the_documentation() -> None:
    memo = Memo(Progress(0.4, "page 4 of 10"), {"charge": msgspec.Raw(b'{"receipt":[1,2]}')})
    body = b'{"progress":{"fraction":0.4,"message":"page 4 of 10"},"steps":{"charge":{"receipt":[1,2]}}}'
    assert encode_memo(memo) == body
    assert encode_memo(decode_memo(body)) == body
    assert encode_memo(decode_memo(b"")) == encode_memo(Memo()) == b"{}"
