"""Results: the outcomes that a worker stores, and how a handle returns them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from processes import until

import multiq
from multiq import result_waiting
from multiq.backend import Ack, After, Bury
from multiq.backend.memory import MemoryBackend
from multiq.errors import BackendError, BackendUnavailable
from multiq.outcome import encode_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Outcome

MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 3}]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["inline", "threads", "coroutines"])


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App("memory://") as app:
        yield app
    until(lambda: "multiq-results" not in [thread.name for thread in threading.enumerate()])


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


@contextlib.contextmanager
def working(app: multiq.App, **options: Any) -> Iterator[None]:
    worker = multiq.Worker(app, **options)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join()


def settle(app: multiq.App, verdict: Callable[[Any], Any]) -> None:
    consumer = app.backend.consumer(["default"])
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([verdict(lease)]) == [None]


# --- what is kept ---


@in_each_mode
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_kept_job_leaves_its_value(app: multiq.App, mode: dict[str, Any], is_coroutine: bool) -> None:
    @app.task(keep=60, name="plain")
    def plain(a: int, b: int) -> dict[str, Any]:
        return {"sum": a + b, "pair": (a, b)}

    @app.task(keep=60, name="coroutine")
    async def coroutine(a: int, b: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        return plain(a, b)

    # Given several jobs, whose acks may go in one batch
    before = time.time()
    task: Any = coroutine if is_coroutine else plain
    handles = [task.enqueue(number, 2) for number in range(20)]
    # When they are done
    assert drain(app, **mode) == 0
    # Then each handle has the value of its job, as JSON has it
    assert [handle.result() for handle in handles] == [{"sum": n + 2, "pair": [n, 2]} for n in range(20)]
    assert {handle.status() for handle in handles} == {"done"}
    outcome = handles[0].outcome()
    assert outcome is not None
    assert (outcome.kind, outcome.attempt, outcome.errors, outcome.omitted) == ("done", 1, [], None)
    assert before <= outcome.started <= outcome.finished <= time.time()
    assert 0 < outcome.expires_in <= 60
    assert ":" in outcome.worker


def test_none_is_a_value(app: multiq.App) -> None:
    @app.task(keep=60)
    def nothing() -> None: ...

    handle = nothing.enqueue()
    drain(app)
    assert handle.result() is None
    assert handle.outcome() is not None


@pytest.mark.parametrize(
    ("keep", "of_job", "expected"),
    [
        (None, None, 0.0),
        (0, None, 0.0),
        (60, None, 60.0),
        (None, 30, 30.0),
        (60, 0, 0.0),
        (60, dt.timedelta(minutes=2), 120.0),
        (dt.timedelta(hours=1), None, 3600.0),
    ],
)
def test_keep_of_a_job_replaces_keep_of_its_task(app: multiq.App, keep: Any, of_job: Any, expected: float) -> None:
    @app.task(keep=keep)
    def noop() -> None: ...

    handle = noop.options(keep=of_job).enqueue()
    assert handle.peek().value.get("keep", 0.0) == expected
    drain(app)
    outcome = handle.outcome()
    assert (outcome is not None) == (expected > 0)
    if outcome is not None:
        assert expected - 30 < outcome.expires_in <= expected


@pytest.mark.parametrize("keep", [-1, float("nan"), float("inf"), "60", True, 1e12, dt.timedelta(seconds=-1)])
def test_keep_must_be_seconds(app: multiq.App, keep: Any) -> None:
    with pytest.raises(multiq.OptionInvalid, match="keep must be"):
        app.task(name="noop", keep=keep)(lambda: None)

    @app.task
    def noop() -> None: ...

    with pytest.raises(multiq.OptionInvalid, match="keep must be"):
        noop.options(keep=keep)


def test_another_library_s_name_for_keep_is_answered_with_it(app: multiq.App) -> None:
    with pytest.raises(multiq.OptionInvalid, match="did you mean keep"):
        app.task(result_ttl=60)  # type: ignore[call-overload]


@pytest.mark.parametrize(("many", "of_task"), [(False, True), (True, True), (False, False)])
def test_a_backend_without_outcomes_refuses_keep_before_it_gets_anything(many: bool, of_task: bool) -> None:
    # Given an unreachable server
    with multiq.App("beanstalk://127.0.0.1:1") as app:

        @app.task(keep=60 if of_task else None)
        def noop() -> None: ...

        call = noop if of_task else noop.options(keep=60)
        # When a job with keep is enqueued, then the error is about keep, and not about the unreachable server
        with pytest.raises(multiq.Unsupported, match="does not support outcomes") as refused:
            call.enqueue_many([()]) if many else call.enqueue()
        assert "memory" in refused.value.others
        # And a job without keep fails because of the server
        with pytest.raises(BackendUnavailable):
            noop.options(keep=0).enqueue()


class BadDict(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no")


@in_each_mode
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, "of type set, which is not JSON"),
        ({"a": [float("nan")]}, "value.a[0] is nan"),
        ({1: 2}, "JSON's keys are strings"),
        ("\ud800", "cannot be written as JSON"),
        ("x" * 300_000, "the value has 300,002 bytes, and max_result allows 262,144"),
        (BadDict(a=1), "RuntimeError"),
    ],
    ids=["set", "nan", "keys", "surrogate", "large", "broken"],
)
def test_a_value_that_cannot_be_kept_does_not_fail_its_job(
    app: multiq.App, mode: dict[str, Any], value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    @app.task(keep=60)
    def odd() -> Any:
        runs.append(1)
        return value

    handle = odd.enqueue()
    assert drain(app, **mode) == 0
    # Then the job has run once, and is done
    assert (runs, handle.status()) == ([1], "done")
    # And the outcome, the error and the log say why there is no value
    outcome = handle.outcome()
    assert outcome is not None
    assert reason in (outcome.omitted or "")
    with pytest.raises(multiq.ResultOmitted) as refused:
        handle.result()
    assert reason in str(refused.value)
    assert any(reason in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_max_result_is_an_option_of_the_app() -> None:
    with multiq.App("memory://", max_result=10) as app:
        assert app.settings.max_result == 10

        @app.task(keep=60)
        def text(length: int) -> str:
            return "x" * length

        fits, large = text.enqueue(8), text.enqueue(9)
        drain(app)
        assert fits.result() == "x" * 8
        with pytest.raises(multiq.ResultOmitted, match="11 bytes, and max_result allows 10"):
            large.result()
    with pytest.raises(multiq.OptionInvalid, match="max_result must be"):
        multiq.App("memory://", max_result=0)


def test_an_outcome_over_the_backend_s_limit_goes_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    # Given a backend with a smaller limit than the app's ``max_result``
    declared = msgspec.structs.replace(MemoryBackend.declared, max_body=400)
    monkeypatch.setattr(MemoryBackend, "declared", declared)
    with multiq.App("memory://") as app:

        @app.task(keep=60)
        def text() -> str:
            return "x" * 500

        handle = text.enqueue()
        drain(app)
        outcome = handle.outcome()
        assert outcome is not None
        assert "the backend allows 400" in (outcome.omitted or "")


def test_an_outcome_has_the_last_five_errors(app: multiq.App) -> None:
    @app.task(keep=60, backoff=0, max_attempts=8)
    def flaky() -> int:
        attempt = multiq.current_job().attempt
        if attempt < 8:
            raise ValueError(f"attempt {attempt}")
        return attempt

    handle = flaky.enqueue()
    drain(app)
    assert handle.result() == 8
    outcome = handle.outcome()
    assert outcome is not None
    assert [(error.attempt, error.error) for error in outcome.errors] == [
        (attempt, f"ValueError: attempt {attempt}") for attempt in range(3, 8)
    ]
    assert all(error.worker == outcome.worker and error.at <= outcome.finished for error in outcome.errors)


def test_a_job_that_is_not_kept_stores_no_errors(app: multiq.App) -> None:
    @app.task(backoff=3600)
    def fail() -> None:
        raise ValueError

    handle = fail.enqueue()
    drain(app)
    assert handle.peek().memo == b""


def test_the_value_is_that_before_middleware_changed_it(app: multiq.App) -> None:
    class Clear(multiq.Middleware):
        def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
            ending.result.clear()

    @app.task(keep=60, middleware=[Clear()])
    def items() -> list[int]:
        return [1, 2]

    handle = items.enqueue()
    drain(app)
    assert handle.result() == [1, 2]


# --- asking ---


def test_a_failed_job_s_result_is_its_error(app: multiq.App) -> None:
    @app.task(keep=60, max_attempts=1)
    def fail() -> None:
        raise ValueError("no such page")

    handle = fail.enqueue()
    drain(app)
    assert handle.status() == "failed"
    with pytest.raises(multiq.JobFailed, match="ValueError: no such page") as failed:
        handle.result()
    assert failed.value.reason == "ValueError: no such page"


@pytest.mark.parametrize(
    ("detail", "traceback"),
    [
        ('{"v":1,"error":"why","traceback":"Traceback: é"}', "Traceback: é"),
        ('{"v":1,"error":"why","traceback":""}', None),
        ("Traceback: é", "Traceback: é"),
        ("", None),
    ],
)
def test_a_failed_job_s_error_has_the_stored_traceback(app: multiq.App, detail: str, traceback: str | None) -> None:
    handle = app.queue().enqueue(1)
    settle(app, lambda lease: Bury(lease, "why", After(detail=detail.encode())))
    with pytest.raises(multiq.JobFailed) as failed:
        handle.result()
    assert (failed.value.reason, failed.value.traceback) == ("why", traceback)


def test_an_unknown_job_is_neither_pending_nor_done(app: multiq.App) -> None:
    handle = app.job("default", "nothing")
    assert (handle.status(), handle.outcome(), handle.progress()) == ("unknown", None, None)
    for timeout in (0, 5, None):
        with pytest.raises(multiq.OutcomeUnknown, match="neither the job nor its outcome"):
            handle.result(timeout)
    with pytest.raises(multiq.OutcomeUnknown, match="neither the job nor its outcome"):
        asyncio.run(handle.aresult())


def test_the_result_of_a_job_that_is_not_kept_raises_at_once(app: multiq.App) -> None:
    @app.task
    def noop() -> None: ...

    for handle in (noop.enqueue(), app.queue().enqueue({"keep": 60}), app.queue().enqueue(b"\xff")):
        with pytest.raises(multiq.OutcomeUnknown, match="is queued, and its outcome will not be kept: give its task"):
            handle.result()
        with pytest.raises(multiq.OutcomeUnknown, match="will not be kept"):
            asyncio.run(handle.aresult())


def test_the_states_of_a_job_before_it_is_done(app: multiq.App) -> None:
    @app.task(keep=60)
    def noop() -> None: ...

    assert noop.options(delay=60).enqueue().status() == "delayed"
    handle = noop.enqueue()
    assert handle.status() == "queued"
    with pytest.raises(multiq.ResultTimeout, match=r"is queued, and not done within 0 s") as late:
        handle.result(0)
    assert (late.value.status, late.value.timeout) == ("queued", 0.0)
    (_lease,) = app.backend.consumer(["default"]).reserve(1, 0)
    assert handle.status() == "running"
    with pytest.raises(TimeoutError, match=r"is running, and not done within 0\.02 s"):
        handle.result(0.02)
    with pytest.raises(TimeoutError, match=r"is running, and not done within 0\.02 s"):
        asyncio.run(handle.aresult(0.02))


def test_a_cancelled_job_is_reported_as_cancelled(app: multiq.App) -> None:
    @app.task(keep=60)
    def noop() -> None: ...

    handle = noop.enqueue()
    body, _ = encode_outcome(None, "expired", started=1, finished=2, worker="w:1", attempt=1)
    settle(app, lambda lease: Ack(lease, After(keep=60, outcome=body, kind="cancelled")))
    assert handle.status() == "cancelled"
    with pytest.raises(multiq.JobCancelled, match="was cancelled: expired"):
        handle.result()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"v":2,"value":1}', b'{"v":1,"value":1,"errors":7}'])
def test_an_outcome_that_is_not_multiq_s_is_refused(app: multiq.App, body: bytes) -> None:
    @app.task(keep=60)
    def noop() -> None: ...

    handle = noop.enqueue()
    settle(app, lambda lease: Ack(lease, After(keep=60, outcome=body)))
    for ask in (handle.result, handle.outcome, lambda: asyncio.run(handle.aresult(5))):
        with pytest.raises(multiq.PayloadInvalid, match=f"outcome of job {handle.id}"):
            ask()


def test_a_backend_without_outcomes_says_so() -> None:
    with multiq.App("beanstalk://127.0.0.1:1") as app:
        handle = app.job("default", "7")
        for ask in (handle.result, handle.outcome, lambda: asyncio.run(handle.aresult())):
            with pytest.raises(multiq.Unsupported, match="outcomes"):
                ask()
        with pytest.raises(multiq.Unsupported, match="memos"):
            handle.progress()


@pytest.mark.parametrize("job_id", ["0198c0de-7000-7000-8000-000000000000", "7", "a.b_c-d", "a/b?c", "~x", "é ~", "=="])
def test_a_ref_is_safe_in_a_url_and_names_the_same_job(app: multiq.App, job_id: str) -> None:
    from urllib.parse import quote

    ref = app.job("mail.high-1", job_id).ref
    assert quote(ref, safe="") == ref
    assert app.job(ref) == app.job("mail.high-1", job_id)


@pytest.mark.parametrize(
    "ref", ["", "default", "~", "default~", "default~~", "default~~*", "default~~/w", "a b~1", None, 7]
)
def test_a_text_that_is_not_a_ref_is_refused(app: multiq.App, ref: Any) -> None:
    with pytest.raises(multiq.OptionInvalid, match="ref must be the text that JobHandle"):
        app.job(ref)


@pytest.mark.parametrize("name", ["JobFailed", "JobCancelled", "OutcomeUnknown", "ResultOmitted", "ResultTimeout"])
def test_an_error_about_a_result_is_public_and_can_be_pickled(name: str) -> None:
    import pickle

    kind = getattr(multiq, name)
    assert issubclass(kind, multiq.MultiqError)
    error = kind("q", "1", "running", 2.0) if name == "ResultTimeout" else kind("q", "1", "why")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_the_event_and_the_error_of_the_same_name_are_two() -> None:
    assert multiq.JobFailed is multiq.errors.JobFailed
    assert issubclass(multiq.events.JobFailed, multiq.events.JobEvent)


# --- an id that is used again ---


def test_the_outcome_of_an_earlier_job_with_the_same_id_is_not_taken_for_a_later_one_s(app: multiq.App) -> None:
    @app.task(keep=60)
    def echo(text: str) -> str:
        return text

    # Given the outcome of a job, and a later job of the same id
    echo.options(id="order-7").enqueue("first")
    drain(app)
    handle = echo.options(id="order-7").enqueue("second")
    # Then the handle waits for the later job
    assert handle.status() == "queued"
    with pytest.raises(multiq.ResultTimeout):
        handle.result(0)
    with pytest.raises(multiq.ResultTimeout):
        asyncio.run(handle.aresult(0.05))
    assert handle.outcome() is None
    drain(app)
    assert handle.result() == "second"
    assert handle.outcome() is not None


# --- waiting ---


@in_each_mode
def test_a_waiter_has_the_result_when_the_job_is_done(app: multiq.App, mode: dict[str, Any]) -> None:
    @app.task(keep=60)
    def slow() -> str:
        time.sleep(0.2)
        return "done"

    handle = slow.enqueue()
    with working(app, **mode):
        assert handle.result(30) == "done"


def test_one_thread_looks_for_all_waiters(app: multiq.App) -> None:
    @app.task(keep=60)
    def echo(number: int) -> int:
        return number

    handles = [echo.enqueue(number) for number in range(200)]
    before = {*threading.enumerate()}  # the outcomes of other tests end half a minute later
    names: list[str] = []

    async def gather() -> list[int]:
        waits = [asyncio.ensure_future(handle.aresult(30)) for handle in handles]
        await asyncio.sleep(0.1)
        names.extend(thread.name for thread in {*threading.enumerate()} - before)
        worker = asyncio.create_task(asyncio.to_thread(drain, app))
        results = await asyncio.gather(*waits)
        await worker
        return results

    assert asyncio.run(gather()) == list(range(200))
    assert names.count("multiq-results") == 1
    assert len(names) <= 2


class Counted(MemoryBackend):
    """A memory backend that records the calls. The test can make it unreachable."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.error: BackendError | None = None

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        self.asked.append(len(ids))
        if self.error is not None:
            raise self.error
        return super().outcomes(queue, ids)

    def peek(self, queue: str, job_id: str) -> Any:
        if self.error is not None:
            raise self.error
        return super().peek(queue, job_id)


@pytest.fixture
def counted() -> Iterator[tuple[multiq.App, Counted]]:
    backend = Counted()
    with multiq.App(backend=backend) as app:
        yield app, backend


def test_the_waiters_of_a_queue_are_looked_for_in_one_call(counted: tuple[multiq.App, Counted]) -> None:
    app, backend = counted

    @app.task(keep=60)
    def noop() -> None: ...

    handles = [noop.enqueue() for _ in range(50)]

    async def gather() -> None:
        await asyncio.gather(*(handle.aresult(0.3) for handle in handles), return_exceptions=True)

    asyncio.run(gather())
    assert max(backend.asked) == 50
    assert len(backend.asked) <= 20


def test_waiters_that_began_at_different_times_are_looked_for_together(counted: tuple[multiq.App, Counted]) -> None:
    app, backend = counted

    @app.task(keep=60)
    def noop() -> None: ...

    handles = [noop.enqueue() for _ in range(40)]

    # Given waiters that have begun one after the other, during the longest pause between two polls
    async def gather() -> int:
        waiters = []
        for handle in handles:
            waiters.append(asyncio.create_task(handle.aresult(3)))
            await asyncio.sleep(0.006)
        await asyncio.sleep(1)
        before = len(backend.asked)
        await asyncio.sleep(1)
        calls = len(backend.asked) - before
        await asyncio.gather(*waiters, return_exceptions=True)
        return calls

    # Then there are a few calls a second, and not four for each waiter
    assert asyncio.run(gather()) <= 40


def test_the_pauses_of_a_waiter_grow(counted: tuple[multiq.App, Counted]) -> None:
    app, backend = counted

    @app.task(keep=60)
    def noop() -> None: ...

    with pytest.raises(multiq.ResultTimeout):
        noop.enqueue().result(1)
    # 5, 10, 20, 40, 80, 160, 250 ms ..., and one poll at the end
    assert len(backend.asked) <= 11


def test_a_cancelled_wait_leaves_nothing_behind(app: multiq.App) -> None:
    @app.task(keep=60)
    def noop() -> None: ...

    handle = noop.enqueue()

    async def give_up() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(handle.aresult(), 0.05)

    asyncio.run(give_up())
    until(lambda: not result_waiting._pollers)
    until(lambda: "multiq-results" not in [thread.name for thread in threading.enumerate()])


def test_a_wait_outlives_an_outage_of_the_backend(counted: tuple[multiq.App, Counted]) -> None:
    app, backend = counted

    @app.task(keep=60)
    def noop() -> int:
        return 7

    handle = noop.enqueue()
    drain(app)
    backend.error = BackendUnavailable("away")
    threading.Timer(0.2, lambda: setattr(backend, "error", None)).start()
    assert handle.result(30) == 7
    backend.error = BackendUnavailable("away")
    threading.Timer(0.2, lambda: setattr(backend, "error", None)).start()
    assert asyncio.run(handle.aresult()) == 7


@pytest.mark.parametrize("timeout", [0, 0.1])
def test_an_outage_until_the_timeout_is_raised(counted: tuple[multiq.App, Counted], timeout: float) -> None:
    app, backend = counted
    backend.error = BackendUnavailable("away")
    handle = app.job("default", "7")
    with pytest.raises(BackendUnavailable, match="away"):
        handle.result(timeout)
    with pytest.raises(BackendUnavailable, match="away"):
        asyncio.run(handle.aresult(timeout))


def test_an_error_that_does_not_pass_is_raised_at_once(counted: tuple[multiq.App, Counted]) -> None:
    app, backend = counted
    backend.error = multiq.errors.BackendCorrupt("broken")
    handle = app.job("default", "7")
    with pytest.raises(multiq.errors.BackendCorrupt):
        handle.result()
    with pytest.raises(multiq.errors.BackendCorrupt):
        asyncio.run(handle.aresult())


def test_a_waiter_of_a_failed_job_is_told(app: multiq.App) -> None:
    @app.task(keep=60, max_attempts=1)
    def fail() -> None:
        raise ValueError("no")

    handle = fail.enqueue()

    async def both() -> None:
        wait = asyncio.ensure_future(handle.aresult(30))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(drain, app)
        with pytest.raises(multiq.JobFailed, match="ValueError: no"):
            await wait

    asyncio.run(both())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_waits_with_a_thread_of_its_own(app: multiq.App) -> None:
    @app.task(keep=60)
    def noop() -> None: ...

    # Given a process that waits in a thread
    handle = noop.enqueue()
    future = result_waiting.wait(app.backend, "default", handle.id, None, None)
    until(lambda: bool(result_waiting._pollers))
    # When it forks, then the child can wait, too
    child = os.fork()
    if child == 0:
        try:
            handle.result(0.1)
        except multiq.ResultTimeout:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    future.cancel()


def test_a_job_that_waits_for_another_is_interrupted_at_its_timeout(app: multiq.App) -> None:
    # Given a job on a thread that waits for a job that never runs
    caught: list[str] = []

    @app.task(keep=60, queue="never")
    def never() -> None: ...

    @app.task(timeout=0.1, max_attempts=1)
    def parent() -> None:
        try:
            never.enqueue().result()
        except multiq.SoftTimeout:
            caught.append("in time")
            raise

    parent.enqueue()
    drain(app, queues=["default"], threads=2)
    assert caught == ["in time"]


@pytest.mark.long
def test_a_worker_deletes_expired_outcomes_of_a_queue_in_which_no_more_jobs_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a worker on a backend that records what forget deletes
    class Forgetting(MemoryBackend):
        deleted = 0

        def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
            number = super().forget(queue, ids, limit=limit)
            self.deleted += number
            return number

    monkeypatch.setattr("multiq.worker.processes.expired_outcomes._EVERY", 0.05)
    backend = Forgetting()
    app = multiq.App(backend=backend)

    @app.task(keep=0.2)
    def work() -> None: ...

    # When its only job is done, and the outcome expires, then the worker deletes the outcome
    with app, working(app, queues=["default"]):
        work.enqueue()
        until(lambda: backend.deleted == 1)
