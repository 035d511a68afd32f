"""The runner: decodes and checks a job, calls its task, and turns the outcome into a verdict.

Every exception of a task, of any type, becomes a verdict here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Ack, Bury, GiveBack, Lease, Release, Verdict
from multiq.driverkit.fork import forks
from multiq.envelope import Envelope, decode_envelope
from multiq.errors import ArgumentsInvalid, PayloadInvalid
from multiq.events import JobBuried, JobDone, JobFailed, JobRetried, JobStarted, JobTimedOut
from multiq.job import JobContext, describe, running
from multiq.logging import log_slow, slow_after
from multiq.retry import DEFAULT, BuryJob, ReleaseJob, RetryPolicy, SoftTimeout, exponential, tighter
from multiq.timeout_notices import Notice
from multiq.validation import check_reason
from multiq.worker.processes.fork import ExitInForks, exit_forked_copy

from .event_loop import JobLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.events import JobEvent
    from multiq.task import Task
    from multiq.worker.processes.inflight import Held

    from .timeouts import TimedJob, Timeouts

_log = logging.getLogger("multiq.worker")

_NOT_RUN = (Awaitable, GeneratorType, AsyncGeneratorType)
_LATE = 0.05  # seconds of delay by other jobs on the loop; a shorter delay does not extend a job's time

#: The next deployment may bring the unknown task, so the job is retried for about two and a half minutes.
UNKNOWN_TASK = RetryPolicy(max_attempts=5, backoff=exponential(first=10, cap=600))


class TaskCall(msgspec.Struct, frozen=True):
    job: JobContext
    task: Task[Any, Any]
    envelope: Envelope
    policy: RetryPolicy
    timeout: float | None
    """The job's time limit in seconds. None: no limit."""

    @property
    def deadline(self) -> float:
        """The time at which the job's time is over, as ``time.monotonic``. Infinite without a timeout."""
        return float("inf") if self.job.deadline is None else self.job.deadline


class Runner:
    """Runs the jobs of one app, on all threads of a worker. Each job gets a copy of the ``contextvars`` context in
    which the runner was created.
    """

    def __init__(self, app: App, timeouts: Timeouts) -> None:
        self._tasks = app.tasks
        self._events = app.events
        self._middleware = app.around
        self._max_body = app.settings.max_body
        self._timeouts = timeouts
        self._slow_after = slow_after(app)
        self._counts_given_back = not app.backend.capabilities.give_back
        self._longest_delay = app.backend.declared.longest_delay
        self._threads = threading.local()
        self._context = contextvars.copy_context()
        self.is_ending = False
        """Whether the worker cancels coroutines because it ends. Such a cancellation is not a failure of the job."""

    def run(self, held: Held) -> Verdict:
        """Run a job in this thread, or on this thread's event loop if the job is a coroutine. Never raises."""
        try:
            return self._context.copy().run(self._run, held)
        except BaseException as exc:  # noqa: BLE001 - an error that cannot even be put into words
            return _fallback_verdict(held.lease, exc, self._longest_delay)

    async def arun(self, held: Held) -> Verdict:
        """Run a coroutine job on the running event loop, in a ``fresh_context``. Never raises."""
        try:
            return await self._arun(held)
        except BaseException as exc:  # noqa: BLE001 - as in run
            return _fallback_verdict(held.lease, exc, self._longest_delay)

    async def _arun(self, held: Held) -> Verdict:
        call = self._prepare(held.lease)
        if not isinstance(call, TaskCall):
            return call
        if self._events.listeners[JobStarted]:
            self._emit_started(call)
        running.set(call.job)
        started = time.perf_counter()
        try:
            result = await self._await(call, held, thread=None)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                await asyncio.sleep(0)  # raises the cancellation here if the job has cancelled itself
        except BaseException as exc:  # noqa: BLE001 - SystemExit and its kin are a job's failure, not the worker's end
            if self.is_ending and isinstance(exc, asyncio.CancelledError):
                return GiveBack(held.lease)  # the worker is ending, so the job has not failed
            return self._failed(call, exc, time.perf_counter() - started)
        return self._done(call, result, time.perf_counter() - started)

    def fresh_context(self) -> contextvars.Context:
        """Return a copy of the context, so that no job sees the changes of another job."""
        return self._context.copy()

    def is_coroutine(self, lease: Lease) -> bool:
        """Whether the job's task is a coroutine function. False if the task is unknown or the job cannot be decoded."""
        try:
            task = self._tasks.get(decode_envelope(lease.body, max_body=self._max_body).task)
        except PayloadInvalid:
            return False
        return task is not None and task.is_coroutine

    def timed_out(self, lease: Lease, stack: str | None = None) -> tuple[Verdict, Callable[[], None]]:
        """Judge a job that must end because it ran longer than its timeout.

        Returns the verdict, and a function that emits the verdict's events. Call the function when the backend has
        accepted the verdict.
        """
        call = self._prepare(lease)
        if not isinstance(call, TaskCall):
            return call, lambda: None
        return self._judge_safely(call, SoftTimeout(), call.timeout or 0.0, stack)

    def close_loop(self) -> None:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is not None:
            loop.close()

    def _run(self, held: Held) -> Verdict:
        call = self._prepare(held.lease)
        if not isinstance(call, TaskCall):
            return call
        if self._events.listeners[JobStarted]:
            self._emit_started(call)
        running.set(call.job)
        started = time.perf_counter()
        try:
            if call.task.is_coroutine:
                result = self._drive(call, held)
            elif call.timeout is None and not self._middleware:
                result = self._plain_result(call, None)
            else:
                result = self._call(call, held)
        except BaseException as exc:  # noqa: BLE001 - SystemExit and its kin are a job's failure, not the worker's end
            return self._failed(call, exc, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        if self._events.listeners[JobDone] or seconds > self._slow_after or call.task.on_success is not None:
            return self._done(call, result, seconds)
        return Ack(held.lease)

    # --- before ---

    def _prepare(self, lease: Lease) -> TaskCall | Verdict:
        """Return the call to make for a lease, or the verdict if the job must not run."""
        try:
            envelope = decode_envelope(lease.body, max_body=self._max_body)
        except PayloadInvalid as exc:
            return self._bury(JobContext(task=None, lease=lease, envelope=None), str(exc))
        job = JobContext(task=envelope.task, lease=lease, envelope=envelope)
        task = self._tasks.get(envelope.task)
        if task is None:
            return self._unknown(job, envelope)
        policy = task.policy_of(envelope)
        if lease.attempt > 1 or lease.crashes:  # a first run is never refused
            refusal = policy.refuse(lease, counts_given_back=self._counts_given_back)
            if refusal is not None:
                return self._bury(job, refusal, task)
        try:
            task.check_arguments(envelope.args, envelope.kwargs)
        except ArgumentsInvalid as exc:
            return self._bury(job, str(exc), task)
        timeout = task.timeout_of(envelope)
        if not timeout:  # 0 means no timeout
            return TaskCall(job, task, envelope, policy, None)
        deadline = time.monotonic() + timeout
        job = JobContext(task=envelope.task, lease=lease, envelope=envelope, deadline=deadline, notice=Notice())
        return TaskCall(job, task, envelope, policy, timeout)

    def _unknown(self, job: JobContext, envelope: Envelope) -> Verdict:
        known = ", ".join(sorted(self._tasks)) or "none"
        reason = f"this worker knows no task {envelope.task[:128]!r} (registered: {known})"
        policy = UNKNOWN_TASK
        if envelope.max_attempts is not None:
            policy = msgspec.structs.replace(policy, max_attempts=tighter(policy.attempts(), envelope.max_attempts))
        verdict = policy.after_failure(job.lease, reason, longest=self._longest_delay)
        return self._announce(job, verdict, reason)

    def _emit_started(self, call: TaskCall) -> None:
        self._events.emit(JobStarted(job=call.job))
        if (
            call.timeout is not None
        ):  # the time of subscribers does not count, so the deadline is moved; nothing checks the deadline yet
            msgspec.structs.force_setattr(call.job, "deadline", time.monotonic() + call.timeout)

    # --- the call itself ---

    def _call(self, call: TaskCall, held: Held) -> Any:
        if call.timeout is None:
            return self._result(call, None)
        timed = self._timeouts.begin(call, held, thread=threading.get_ident())
        try:
            return self._result(call, timed)
        finally:
            self._timeouts.end(timed)

    def _result(self, call: TaskCall, timed: TimedJob | None) -> Any:
        if self._middleware:
            with contextlib.ExitStack() as stack:
                for is_async, middleware in self._middleware:
                    if not is_async:
                        stack.enter_context(middleware(call.job))
                return self._plain_result(call, timed)
        return self._plain_result(call, timed)

    def _plain_result(self, call: TaskCall, timed: TimedJob | None) -> Any:
        generation = forks.generation  # does the same as ExitInForks, without the cost of a block for each job
        try:
            result = call.task.function(*call.envelope.args, **call.envelope.kwargs)
            if result is not None and isinstance(result, _NOT_RUN):
                result = self._run_result(result, timed)
        except BaseException as exc:
            if forks.generation != generation:
                exit_forked_copy(exc)
            raise
        if forks.generation != generation:
            exit_forked_copy(None)
        return result

    def _run_result(self, result: Any, timed: TimedJob | None) -> Any:
        """Await a plain function's result if it is a coroutine. A decorator may hide a coroutine function."""
        if isinstance(result, GeneratorType | AsyncGeneratorType):
            raise BuryJob(
                f"the task returned {type(result).__name__}, whose code has not run: a task must not be a generator"
            )
        return self._loop().run(self._within(timed, result))

    def _drive(self, call: TaskCall, held: Held) -> Any:
        return self._loop().run(self._await(call, held, thread=threading.get_ident()))

    def _loop(self) -> JobLoop:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is None:
            loop = self._threads.loop = JobLoop()
        return loop

    async def _await(self, call: TaskCall, held: Held, *, thread: int | None) -> Any:
        """*thread* has an event loop that runs only this job. None: the job runs on the shared loop."""
        timed = None if call.timeout is None else self._timeouts.begin(call, held, thread=thread)
        try:
            with ExitInForks():
                work = (
                    self._wrapped(call)
                    if self._middleware
                    else call.task.function(*call.envelope.args, **call.envelope.kwargs)
                )
                return await self._within(timed, work)
        finally:
            if timed is not None:
                self._timeouts.end(timed)

    async def _within(self, timed: TimedJob | None, work: Awaitable[Any]) -> Any:
        """Await *work*, and cancel it when its time is over."""
        if timed is None:
            return await work
        timer = _Timer(timed, self._timeouts)
        try:
            async with timer.patience:
                return await work
        except TimeoutError:
            if timer.patience.expired():
                raise SoftTimeout from None
            raise
        finally:
            timer.cancel()

    async def _wrapped(self, call: TaskCall) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for is_async, middleware in self._middleware:
                entered = middleware(call.job)
                await stack.enter_async_context(entered) if is_async else stack.enter_context(entered)
            with ExitInForks():
                return await call.task.function(*call.envelope.args, **call.envelope.kwargs)

    # --- after ---

    def _done(self, call: TaskCall, result: Any, seconds: float) -> Verdict:
        if self._events.listeners[JobDone]:
            self._events.emit(JobDone(job=call.job, seconds=seconds))
        if seconds > self._slow_after:
            log_slow(call.job, seconds)
        if call.task.on_success is not None:
            _call_hook(call, call.task.on_success, result)
        return Ack(call.job.lease)

    def _failed(self, call: TaskCall, exc: BaseException, seconds: float) -> Verdict:
        verdict, emit = self._judge_safely(call, exc, seconds)
        emit()
        return verdict

    def _judge_safely(
        self, call: TaskCall, exc: BaseException, seconds: float, stack: str | None = None
    ) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict on a failed run, and a function that emits its events."""
        try:
            return self._judge(call, exc, seconds, stack)
        except BaseException:  # noqa: BLE001 - the user's backoff function: its error is logged, and the job retried
            _log.exception("the retry policy of task %s failed; its job is retried after the default", call.task.name)
            policy = msgspec.structs.replace(call.policy, backoff=DEFAULT)
            return self._judge(msgspec.structs.replace(call, policy=policy), exc, seconds, stack)

    def _judge(
        self, call: TaskCall, exc: BaseException, seconds: float, stack: str | None
    ) -> tuple[Verdict, Callable[[], None]]:
        lease = call.job.lease
        reason = describe(exc)
        events: list[JobEvent] = []
        if isinstance(exc, SoftTimeout) and call.timeout is not None:
            reason = f"the task ran longer than its timeout of {call.timeout:g} s"
            events.append(JobTimedOut(job=call.job, timeout=call.timeout, stack=stack))
        verdict: Release | Bury
        if isinstance(exc, ReleaseJob):
            reason = exc.reason or reason
            verdict = call.policy.after_failure(lease, reason, exc.delay, longest=self._longest_delay)
        else:
            events.append(JobFailed(job=call.job, seconds=seconds, error=exc))
            if isinstance(exc, BuryJob):
                reason = exc.reason
                verdict = Bury(lease, check_reason(reason))
            else:
                verdict = call.policy.after_failure(lease, reason, longest=self._longest_delay)

        def emit() -> None:
            for event in events:
                if self._events.listeners[type(event)]:
                    self._events.emit(event)
            self._announce(call.job, verdict, reason, call.task, exc)

        return verdict, emit

    def _bury(self, job: JobContext, reason: str, task: Task[Any, Any] | None = None) -> Verdict:
        return self._announce(job, Bury(job.lease, check_reason(reason)), reason, task)

    def _announce(
        self,
        job: JobContext,
        verdict: Release | Bury,
        reason: str,
        task: Task[Any, Any] | None = None,
        error: BaseException | None = None,
    ) -> Verdict:
        reason = verdict.reason or reason  # the stored reason: shortened, and without characters that cannot be stored
        if isinstance(verdict, Release):
            self._events.emit(JobRetried(job=job, delay=verdict.delay, reason=reason))
            hook = None if task is None else task.on_retry
        else:
            self._events.emit(JobBuried(job=job, reason=reason))
            hook = None if task is None else task.on_failure
        if hook is not None:
            _call_hook(job, hook, BuryJob(reason) if error is None else error)
        return verdict


def _fallback_verdict(lease: Lease, exc: BaseException, longest_delay: float | None) -> Verdict:
    with contextlib.suppress(BaseException):  # even formatting the traceback may fail
        _log.error("the worker cannot judge a run of job %s: %r", lease.id, type(exc))
        _log.debug("it failed like this", exc_info=exc)
    reason = "the worker cannot judge this run: its error, or its task, has no text"
    return RetryPolicy().after_failure(lease, reason, longest=longest_delay)


class _Timer:
    """Expires a coroutine's ``asyncio.timeout`` at its deadline. Time in which other jobs block the loop does not
    count.
    """

    def __init__(self, timed: TimedJob, timeouts: Timeouts) -> None:
        self.patience = asyncio.timeout(None)
        self._timed = timed
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._plan(self._loop.time() + timed.notify_at - time.monotonic())

    def cancel(self) -> None:
        self._handle.cancel()

    def _plan(self, at: float) -> None:
        self._at = at
        self._handle = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        now = self._loop.time()
        lost_time = self._timeouts.lost_time(self._timed, self._at) if self._timed.thread is None else 0.0
        if self._timed.is_notified:
            return  # current_job().check() has notified the job, and the job may now tidy up
        if lost_time > _LATE:
            self._timeouts.postpone(self._timed, lost_time)
            self._plan(now + lost_time)
        else:
            self._timeouts.mark_notified(self._timed)
            self.patience.reschedule(now)


def _call_hook(call: TaskCall | JobContext, hook: Any, what: Any) -> None:
    """Call a task's hook. An error of the hook is logged, and changes nothing."""
    job = call.job if isinstance(call, TaskCall) else call
    try:
        hook(job, what)
    except BaseException:  # noqa: BLE001 - whatever the hook raises, the job is over, and its thread must go on
        _log.exception("a hook of task %s failed; the job's fate is not affected", job.task)
