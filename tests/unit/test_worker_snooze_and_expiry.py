"""Snoozed jobs, expired jobs, and errors that bury a job at once."""

from __future__ import annotations

import datetime as dt
import logging
import re
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import multiq
from multiq import BuryJob, OptionInvalid, ReleaseJob, Snooze, State, events
from multiq.backend import Ack, Capabilities, Gap, Release, Verdict
from multiq.backend.memory import MemoryBackend, MemoryConsumer
from multiq.driverkit.clock import ManualClock
from multiq.envelope import decode_envelope
from multiq.retry import ErrorRules, to_error_rules
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts
from multiq.worker.monitoring.summary import Summary
from multiq.worker.processes.inflight import Held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.errors import LeaseLost

MODES: list[dict[str, Any]] = [{}, {"threads": 2}, {"concurrency": 3}]
in_each_mode = pytest.mark.parametrize("mode", MODES, ids=["inline", "threads", "coroutines"])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def app(clock: ManualClock) -> multiq.App:
    return multiq.App(backend=MemoryBackend(clock=clock))


class CountingBackend(MemoryBackend):
    """A store that counts every reservation and gives none back, as beanstalkd does."""

    declared = msgspec.structs.replace(MemoryBackend.declared, give_back=Gap("never", "for this test"))
    settled: list[Verdict]

    def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
        settled = self.settled = []

        class Consumer(MemoryConsumer):
            def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
                settled.extend(verdicts)
                return super().settle(verdicts)

        return Consumer(self._store, queues)


def drain(app: multiq.App, **options: Any) -> int:
    return multiq.Worker(app, stop_when_empty=True, **options).run()


def heard(app: multiq.App, *kinds: type[events.JobEvent]) -> list[events.JobEvent]:
    """A list that gets all later events of these kinds."""
    told: list[events.JobEvent] = []
    for kind in kinds or (events.JobEvent,):
        app.on(kind)(told.append)
    return told


def summaries(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the summaries in the log."""
    fields = [getattr(record, "multiq", {}) for record in caplog.records]
    return [each for each in fields if each.get("event") == "summary"]


# --- snooze ---


@in_each_mode
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_a_snoozed_job_waits_and_its_attempt_does_not_count(
    app: multiq.App, clock: ManualClock, mode: dict[str, Any], is_coroutine: bool
) -> None:
    told, hooks, attempts = heard(app), list[str](), list[int]()

    class Note(multiq.Middleware):
        def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None:
            hooks.append(ending.verdict)

    def snooze() -> None:
        attempts.append(multiq.current_job().attempt)
        raise Snooze(dt.timedelta(seconds=60), "the printer is warm")

    async def snooze_later() -> None:
        snooze()

    # Given a task that may be tried once, and that snoozes
    task = app.task(name="snooze", max_attempts=1, middleware=[Note()])(snooze_later if is_coroutine else snooze)
    handle = task.enqueue()
    # When its job is due three times
    for _ in range(3):
        assert drain(app, **mode) == 0
        info = handle.peek()
        assert (info.state, info.attempt) == (State.DELAYED, 0)
        assert 59 < (info.due_in or 0) <= 60
        clock.advance(61)
    # Then each run was the first attempt, and nothing has failed
    assert attempts == [1, 1, 1]
    assert [type(event).__name__ for event in told] == ["JobStarted", "JobSnoozed"] * 3
    snoozed = told[1]
    assert isinstance(snoozed, events.JobSnoozed)
    assert (snoozed.delay, snoozed.reason) == (60, "the printer is warm")
    assert hooks == ["snoozed"] * 3


def test_a_snoozed_job_does_not_run_out_of_attempts_where_the_store_counts_each_reservation(
    clock: ManualClock,
) -> None:
    backend = CountingBackend(clock=clock)
    app, attempts = multiq.App(backend=backend), list[int]()

    # Given a task of two attempts on a store that counts given-back ones
    @app.task(max_attempts=2)
    def snooze() -> None:
        attempts.append(multiq.current_job().attempt)
        raise Snooze(60, "not yet")

    handle = snooze.enqueue()
    # When its job snoozes more than two times
    for _ in range(4):
        drain(app)
        clock.advance(61)
    # Then the job is released each time, and stays in the queue
    assert attempts == [1, 2, 3, 4]
    assert [type(verdict) for verdict in backend.settled] == [Release]
    assert (handle.peek().state, handle.peek().reason) == (State.READY, "not yet")


def test_a_snooze_longer_than_the_store_s_longest_delay_is_shortened(clock: ManualClock) -> None:
    class Short(MemoryBackend):
        declared = msgspec.structs.replace(MemoryBackend.declared, longest_delay=900.0)

    app = multiq.App(backend=Short(clock=clock))

    @app.task
    def snooze() -> None:
        raise Snooze(3600)

    handle = snooze.enqueue()
    drain(app)
    assert handle.peek().due_in == 900


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon", None])
def test_a_snooze_of_an_impossible_delay_is_refused(delay: Any) -> None:
    with pytest.raises(OptionInvalid):
        Snooze(delay)


def test_a_snooze_is_counted_as_neither_done_nor_retried_nor_buried(
    app: multiq.App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def snooze() -> None:
        raise Snooze(60, "later")

    @app.task
    def work() -> None: ...

    snooze.enqueue()
    work.enqueue()
    with caplog.at_level(logging.INFO, "multiq.worker"):
        drain(app)
    (summary,) = summaries(caplog)
    assert (summary["done"], summary["retried"], summary["buried"]) == (1, 0, 0)
    assert summary["snoozed"] == 1


def test_a_summary_counts_a_dropped_job_once_and_has_no_negative_count() -> None:
    # Given dropped jobs that are settled after the next summary of the log
    settled: dict[type[Verdict], int] = {Ack: 5, Release: 0, multiq.backend.Bury: 0}
    not_runs: dict[tuple[str, type[Verdict]], int] = {}
    summary, lines = Summary("host:1", settled, 60.0, not_runs), list[dict[str, int]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiq.worker.monitoring.summary.log_summary", lambda *_, **counts: lines.append(counts))
        not_runs["expired", Ack] = 2
        summary.log(1.0)
        settled[Ack] += 3
        summary.log(2.0)
    # Then each job is counted in one summary
    assert [line["done"] for line in lines] == [0, 1]
    assert [line.get("expired", 0) for line in lines] == [2, 0]


# --- expiry ---


@in_each_mode
def test_a_job_that_did_not_start_in_time_is_dropped_and_reported(
    app: multiq.App, clock: ManualClock, mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    multiq.logging.log_events(app)
    told, ran = heard(app), list[int]()
    task = app.task(name="note", expires=60)(ran.append)
    # Given a job that has waited for longer than its expiry
    late, other = task.enqueue(1), task.options(expires=dt.timedelta(hours=1)).enqueue(2)
    never = task.options(expires=0).enqueue(3)
    clock.advance(61)
    # When a worker takes the job
    with caplog.at_level(logging.WARNING, "multiq.worker"):
        assert drain(app, **mode) == 0
    # Then the job is gone without a run, with an event and a line in the log
    assert [handle.state() for handle in (late, other, never)] == [State.GONE] * 3
    assert sorted(ran) == [2, 3]
    (expired,) = [event for event in told if isinstance(event, events.JobExpired)]
    assert (expired.job.id, expired.job.task, expired.expires) == (late.id, "note", 60)
    assert 61 <= expired.age < 120
    assert [event for event in told if event.job.id == late.id] == [expired]
    (line,) = caplog.messages
    assert re.match(rf"expired +note \[default\] {late.id} attempt 1 after 61\.\d s of 60\.0 s at most", line)


def test_a_dropped_job_is_not_counted_as_done(
    app: multiq.App, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    task = app.task(name="work", expires=60)(lambda: None)
    task.enqueue()
    clock.advance(61)
    task.enqueue()
    with caplog.at_level(logging.INFO, "multiq.worker"):
        drain(app)
    (summary,) = summaries(caplog)
    assert (summary["done"], summary["expired"]) == (1, 1)


def test_a_retry_that_would_start_too_late_is_dropped(app: multiq.App, clock: ManualClock) -> None:
    attempts: list[int] = []

    @app.task(expires=60, backoff=40)
    def fail() -> None:
        attempts.append(multiq.current_job().attempt)
        raise ValueError("no")

    handle = fail.enqueue()
    for _ in range(3):
        drain(app)
        clock.advance(41)
    assert attempts == [1, 2]
    assert handle.state() is State.GONE


def test_a_kicked_job_runs_however_old_it_is(app: multiq.App, clock: ManualClock) -> None:
    attempts: list[int] = []

    @app.task(expires=60)
    def fail() -> None:
        attempts.append(multiq.current_job().attempt)
        raise BuryJob("no")

    fail.enqueue()
    drain(app)
    clock.advance(3600)
    app.queue().kick()
    drain(app)
    assert attempts == [1, 2]


def test_the_expiry_of_a_rescheduled_job_starts_over(app: multiq.App, clock: ManualClock) -> None:
    ran: list[int] = []
    task = app.task(name="note", expires=60)(ran.append)
    handle = task.enqueue(1)
    clock.advance(50)
    handle.reschedule(delay=30)
    clock.advance(31)
    drain(app)
    assert ran == [1]


def test_a_job_that_waited_in_the_worker_expires_too(app: multiq.App) -> None:
    # Given a job that was reserved in time, and whose turn in this process comes later
    app.task(name="note", expires=60)(lambda: None).enqueue()
    (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
    runner = Runner(app, Timeouts(0.0))
    now = time.monotonic()
    in_time = Held(lease, None, now, now - 59 + lease.ttr)
    too_late = Held(lease, None, now, now - 61 + lease.ttr)
    told = heard(app, events.JobExpired)
    runner.run(in_time)
    assert told == []
    assert runner.run(too_late) == Ack(lease)
    assert len(told) == 1
    # When its lease was renewed meanwhile, then the time before that counts, too
    renewed = Held(lease, None, now, now + lease.ttr, reserved=now - 61)
    assert runner.run(renewed) == Ack(lease)
    assert len(told) == 2


def test_a_job_that_has_started_and_runs_over_its_time_limit_does_not_expire(
    app: multiq.App, clock: ManualClock
) -> None:
    # Given a job that started in time, and was killed at its time limit after its expiry
    app.task(name="long", expires=60, timeout=300)(lambda: None).enqueue()
    clock.advance(360)
    (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
    # When the end of the job is judged
    verdict, _ = Runner(app, Timeouts(0.0)).timed_out(lease)
    # Then the job is retried like any other job
    assert isinstance(verdict, Release)


def test_a_job_of_an_unknown_task_expires_by_its_envelope(app: multiq.App, clock: ManualClock) -> None:
    handle = app.queue().enqueue({"multiq": 1, "task": "nope", "expires": 60})
    clock.advance(61)
    drain(app)
    assert handle.state() is State.GONE


def test_a_dropped_job_that_is_kept_leaves_a_cancelled_outcome(app: multiq.App, clock: ManualClock) -> None:
    handle = app.task(name="note", expires=60, keep=3600)(lambda: None).enqueue()
    clock.advance(61)
    drain(app)
    outcome = handle.outcome()
    assert outcome is not None
    assert (outcome.kind, outcome.omitted) == ("cancelled", "it did not start within 60 s after its enqueue")
    with pytest.raises(multiq.JobCancelled, match="it did not start within 60 s"):
        handle.result(timeout=0)


def test_an_expiry_travels_in_the_envelope_only_if_the_job_has_its_own(app: multiq.App) -> None:
    task = app.task(name="note", expires=60)(lambda: None)
    bodies = [handle.peek().body for handle in (task.enqueue(), task.options(expires=5.5).enqueue())]
    assert bodies == [b'{"multiq":1,"task":"note"}', b'{"multiq":1,"task":"note","expires":5.5}']
    assert decode_envelope(bodies[1]).expires == 5.5


@pytest.mark.parametrize("expires", [-1, float("inf"), "60", True])
def test_an_impossible_expiry_is_refused(app: multiq.App, expires: Any) -> None:
    with pytest.raises(OptionInvalid, match="expires must be"):
        app.task(name="refused", expires=expires)(lambda: None)
    with pytest.raises(OptionInvalid, match="expires must be"):
        app.task(name="note")(lambda: None).options(expires=expires)


def test_a_delay_that_is_as_long_as_the_expiry_is_refused(app: multiq.App) -> None:
    task = app.task(name="note", expires=60)(lambda: None)
    with pytest.raises(OptionInvalid, match=r"the delay must be shorter than expires=60 seconds, got 60: "):
        task.options(delay=60)
    with pytest.raises(OptionInvalid, match="shorter than expires=5 seconds"):
        task.options(delay=dt.timedelta(seconds=6), expires=5)
    task.options(delay=60, expires=0)
    task.options(delay=59)


# --- errors that bury at once ---


class Timeout(Exception): ...


class Slow(Timeout): ...


class Odd(Timeout, ValueError): ...


@in_each_mode
@pytest.mark.parametrize(
    ("rules", "error", "state"),
    [
        ({"bury_on": ValueError}, ValueError("no"), State.BURIED),
        ({"bury_on": (ValueError,)}, UnicodeError("a subclass"), State.BURIED),
        ({"bury_on": [ValueError]}, KeyError("another"), State.DELAYED),
        ({"retry_on": Timeout}, Timeout(), State.DELAYED),
        ({"retry_on": (Timeout,)}, KeyError("not named"), State.BURIED),
        ({"retry_on": ()}, KeyError("none is retried"), State.BURIED),
        ({"retry_on": Exception, "bury_on": Timeout}, Slow(), State.BURIED),
        ({"retry_on": Slow, "bury_on": Timeout}, Slow("the most specific"), State.DELAYED),
        ({"retry_on": Timeout, "bury_on": ValueError}, Odd("a tie"), State.BURIED),
        ({"bury_on": ReleaseJob.__mro__[1]}, ReleaseJob(60), State.DELAYED),
        ({"retry_on": Exception}, BuryJob("the task decides"), State.BURIED),
        ({"bury_on": Exception}, Snooze(60), State.DELAYED),
    ],
)
def test_classes_of_errors_decide_whether_a_job_is_retried(
    app: multiq.App, mode: dict[str, Any], rules: dict[str, Any], error: Exception, state: State
) -> None:
    @app.task(max_attempts=3, backoff=60, **rules)
    def fail() -> None:
        raise error

    handle = fail.enqueue()
    drain(app, **mode)
    assert handle.state() is state


def test_a_time_limit_is_an_error_like_any_other(app: multiq.App) -> None:
    @app.task(name="buried", retry_on=(KeyError,), timeout=60)
    def buried() -> None: ...

    @app.task(name="retried", retry_on=(KeyError, TimeoutError), timeout=60)
    def retried() -> None: ...

    for task, kind in ((buried, multiq.backend.Bury), (retried, Release)):
        task.enqueue()
        (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
        assert isinstance(Runner(app, Timeouts(0.0)).timed_out(lease)[0], kind)


@pytest.mark.parametrize(
    "options",
    [
        {"retry_on": "Timeout"},
        {"retry_on": (Timeout(),)},
        {"bury_on": (int,)},
        {"bury_on": 7},
        {"bury_on": (ReleaseJob,)},
        {"retry_on": (Snooze,)},
        {"retry_on": (Timeout,), "bury_on": (ValueError, Timeout)},
    ],
)
def test_a_value_that_is_not_a_class_of_errors_is_refused_at_registration(
    app: multiq.App, options: dict[str, Any]
) -> None:
    with pytest.raises(OptionInvalid, match="must"):
        app.task(name="refused", **options)(lambda: None)


def test_a_task_without_classes_of_errors_has_no_rules() -> None:
    assert to_error_rules(None, None) is None
    assert to_error_rules(None, KeyError) == ErrorRules(None, (KeyError,))


def test_tasks_that_differ_in_the_new_options_only_are_not_the_same(app: multiq.App) -> None:
    def work() -> None: ...

    app.task(work)
    for options in ({"expires": 60}, {"bury_on": KeyError}, {"retry_on": KeyError}):
        with pytest.raises(multiq.errors.TaskExists):
            app.task(**options)(work)
    app.task(work)


def test_the_declared_capabilities_of_the_counting_store_are_those_of_the_memory_backend() -> None:
    assert isinstance(CountingBackend.declared, Capabilities)
    assert not CountingBackend.declared.give_back
