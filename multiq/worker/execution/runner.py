"""The runner: decodes and checks a job, calls its task, and turns the result or exception into a verdict.

Every exception of a task, of any type, becomes a verdict here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from multiq.backend import Ack, After, Bury, GiveBack, Lease, Release, Verdict
from multiq.driverkit.fork import forks
from multiq.envelope import END_TASK, Envelope, decode_envelope
from multiq.errors import ArgumentsInvalid, BackendError, PayloadInvalid
from multiq.events import (
    JobBuried,
    JobCancelled,
    JobDone,
    JobExpired,
    JobFailed,
    JobRetried,
    JobSnoozed,
    JobStarted,
    JobTimedOut,
)
from multiq.failure_record import encode_failure
from multiq.job import JobContext, describe, running
from multiq.logging import log_slow, slow_after
from multiq.middleware import Ending
from multiq.retry import DEFAULT, BuryJob, ReleaseJob, RetryPolicy, Snooze, SoftTimeout, exponential, tighter
from multiq.timeout_notices import Notice
from multiq.validation import check_reason
from multiq.worker.processes.fork import ExitInForks, exit_forked_copy

from .blocked_loop import CoroutineTimer
from .effects import Effects
from .event_loop import JobLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.cancellation import CancelRequest
    from multiq.envelope import FlowPart
    from multiq.events import JobEvent
    from multiq.flows.record import FlowRecord
    from multiq.task import Task
    from multiq.worker.processes.inflight import Held

    from .cancels import Cancel, Cancels
    from .fetcher import Fetcher
    from .running_memos import JobMemos
    from .running_permits import Permits
    from .timeouts import TimedJob, Timeouts

_log = logging.getLogger("multiq.worker")

_NOT_RUN = (Awaitable, GeneratorType, AsyncGeneratorType)
_READ_AGAIN = 1.0  # seconds until a job is tried again, if its flow or its input could not be read

#: The next deployment may bring the unknown task, so the job is retried for about two and a half minutes.
UNKNOWN_TASK = RetryPolicy(max_attempts=5, backoff=exponential(first=10, cap=600))


class TaskCall(msgspec.Struct, frozen=True):
    job: JobContext
    task: Task[Any, Any]
    envelope: Envelope
    policy: RetryPolicy
    timeout: float | None
    """The job's time limit in seconds. None: no limit."""
    thread: int | None
    """The thread that runs the call. None: it runs on the shared event loop."""
    record: FlowRecord | None = None
    """The record of the flow that this job ends. None: the job ends no flow."""

    @property
    def deadline(self) -> float:
        """The value of ``time.monotonic()`` at which the timeout ends. Infinite without a timeout."""
        return float("inf") if self.job.deadline is None else self.job.deadline


class Runner:
    """Runs the jobs of one app, on all threads of a worker. Each job gets a copy of the ``contextvars`` context in
    which the runner was created.

    - *memos*: the memos of the jobs. None: the runner only judges jobs, and does not run jobs.
    - *cancels*: the requests to cancel jobs.
    - *fetcher*: has the leases of the jobs. None: jobs run without permits.
    """

    def __init__(
        self,
        app: App,
        timeouts: Timeouts,
        memos: JobMemos | None = None,
        cancels: Cancels | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._permits: Permits | None = None
        self._backend = app.backend
        self._tasks = app.tasks
        self._events = app.events
        self._chain = app.chain
        self._max_body = app.settings.max_body
        self._timeouts = timeouts
        self._memos = memos
        self._cancels = cancels
        self._effects = Effects(app, memos)
        self._slow_after = slow_after(app)
        capabilities = app.backend.capabilities
        self._counts_given_back = not capabilities.give_back
        self._stores_failures = bool(capabilities.memos)
        self._longest_delay = app.backend.declared.longest_delay
        self._threads = threading.local()
        self._context = contextvars.copy_context()
        self._counting = threading.Lock()
        self.not_runs: Counter[tuple[str, type[Verdict]]] = Counter()
        """The numbers of jobs, by a pair: the word ``cancelled``, ``expired``, ``limited`` or ``snoozed``, and the type
        of the verdict."""
        self.is_ending = False
        """Whether the worker is ending, and cancels coroutines for this reason. A cancellation for this reason is not a
        failure of the job."""

    def run(self, held: Held) -> Verdict:
        """Run a job in this thread, or on this thread's event loop if the job is a coroutine. Never raises."""
        try:
            return self._context.copy().run(self._run, held)
        except BaseException as exc:  # noqa: BLE001 - even formatting an error may raise an error
            return _fallback_verdict(held.lease, exc, self._longest_delay)

    async def arun(self, held: Held) -> Verdict:
        """Run a coroutine job on the running event loop, in a ``fresh_context``. Never raises."""
        try:
            return await self._arun(held)
        except BaseException as exc:  # noqa: BLE001 - as in run
            return _fallback_verdict(held.lease, exc, self._longest_delay)

    async def _arun(self, held: Held) -> Verdict:
        try:
            if self._may_be_cancelled(held.lease):
                await asyncio.to_thread(self._look_up_cancel, held)
            call = self._prepare(held.lease, held)
            if isinstance(call, TaskCall) and (call.envelope.flow is not None or call.envelope.permits):
                call = await asyncio.to_thread(self._ready, call, held)
        except asyncio.CancelledError:
            return GiveBack(held.lease)  # the worker is ending, and the task has not begun
        if not isinstance(call, TaskCall):
            return call
        if self._events.listeners[JobStarted]:
            self._emit_started(call)
        running.set(call.job)
        started = time.perf_counter()
        held.call = call
        try:
            result = await self._await(call, held, thread=None)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                await asyncio.sleep(0)  # if the job has cancelled itself, the cancellation is raised here
        except BaseException as exc:  # noqa: BLE001 - SystemExit and its kin are a job's failure, not the worker's end
            if self.is_ending and isinstance(exc, asyncio.CancelledError):
                if self._chain.any_ended:
                    seconds = time.perf_counter() - started
                    self._tell(call.job, Ending(verdict="given back", seconds=seconds, error=exc), call.task)
                return GiveBack(held.lease)  # the worker is ending, so the job has not failed
            seconds = time.perf_counter() - started
            return self._failed(await self._awith_new_record(call), exc, seconds, held.cancel)
        seconds = time.perf_counter() - started
        return self._done(await self._awith_new_record(call), result, seconds)

    @property
    def has_kept_outcomes(self) -> bool:
        """Whether this runner has run a job whose outcome is kept."""
        return self._effects.has_kept

    def fresh_context(self) -> contextvars.Context:
        """Return a copy of the context, so that no job sees the changes of another job."""
        return self._context.copy()

    def is_coroutine(self, lease: Lease) -> bool:
        """Whether the job's task is a coroutine function. False if the task is unknown or the job cannot be decoded.

        Also False for a job that must not run. Its verdict may need a call of the backend, which would block an event
        loop.
        """
        if lease.doomed:
            return False
        try:
            task = self._tasks.get(decode_envelope(lease.body, max_body=self._max_body).task)
        except PayloadInvalid:
            return False
        return task is not None and task.is_coroutine

    def overdue(self, held: Held, stack: str | None = None) -> tuple[Verdict, Callable[[], None]]:
        """Judge a job that must end because it still runs after its timeout, or still runs after it was cancelled.

        Returns a verdict and a function that emits the verdict's events, in the same way as ``timed_out``. Raises the
        errors of ``cancelled``.
        """
        call = held.call  # None: the run ends at this moment
        state = None if call is None else call.job.kept
        if held.cancel is None:
            return self.timed_out(held.lease, stack, state=state)
        return self.cancelled(held.lease, held.cancel.request, state=state)

    def cancelled(
        self, lease: Lease, request: CancelRequest, *, state: dict[str, Any] | None = None
    ) -> tuple[Verdict, Callable[[], None]]:
        """Judge a job that must end because it was cancelled. Takes and returns what ``timed_out`` takes and returns.

        Raises ``BackendError`` if the record of the flow that the job ends cannot be read. An ack without this record
        would leave the flow open for ever.
        """
        call = self._prepare(lease)
        if not isinstance(call, TaskCall):
            return call, lambda: None
        msgspec.structs.force_setattr(call.job, "kept", state)
        try:
            record = self._record(call.job)
        except PayloadInvalid:  # no worker can finish this flow
            record = None
        return self._cancelled(call.job, request, record, 0.0)

    def timed_out(
        self, lease: Lease, stack: str | None = None, *, state: dict[str, Any] | None = None
    ) -> tuple[Verdict, Callable[[], None]]:
        """Judge a job that must end because it ran longer than its timeout.

        *state*: the run's ``JobContext.state``, for the ``ended`` of middleware. None: the run was in another process.
        Returns the verdict, and a function that emits the verdict's events. Call the function when the backend has
        accepted the verdict.
        """
        call = self._prepare(lease)
        if not isinstance(call, TaskCall):
            return call, lambda: None
        msgspec.structs.force_setattr(call.job, "kept", state)
        return self._judge_safely(call, SoftTimeout(), call.timeout or 0.0, stack)

    def close_loop(self) -> None:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is not None:
            loop.close()

    def _run(self, held: Held) -> Verdict:  # noqa: C901 - calls would cost time for each job
        lease = held.lease
        if (lease.attempt > 1 or lease.crashes) and self._may_be_cancelled(lease):
            self._look_up_cancel(held)
        call = self._prepare(lease, held, threading.get_ident())
        if not isinstance(call, TaskCall):
            return call
        envelope = call.envelope
        if envelope.flow is not None or envelope.permits:
            ready = self._ready(call, held)
            if not isinstance(ready, TaskCall):
                return ready
            call = ready
        if self._events.listeners[JobStarted]:
            self._emit_started(call)
        running.set(call.job)
        started = time.perf_counter()
        held.call = call
        try:
            if call.task.is_coroutine:
                result = self._drive(call, held)
            elif call.timeout is None and not self._chain.any_run:
                result = self._plain_result(call, None, held)
            else:
                result = self._call(call, held)
        except BaseException as exc:  # noqa: BLE001 - SystemExit and its kin are a job's failure, not the worker's end
            self._end_call(held)
            return self._failed(self._with_new_record(call), exc, time.perf_counter() - started, held.cancel)
        held.call = None  # as _end_call does
        if held.cancel is not None:
            self._timeouts.end_cancel(held)
        seconds = time.perf_counter() - started
        if (
            envelope.keep
            or envelope.flow is not None
            or self._events.listeners[JobDone]
            or seconds > self._slow_after
            or self._chain.any_ended
        ):
            if call.record is not None:
                call = self._with_new_record(call)
            return self._done(call, result, seconds)
        return Ack(lease)

    def _end_call(self, held: Held) -> None:
        """Note that the task has ended, so that it is not interrupted any more."""
        held.call = None
        if held.cancel is not None:
            self._timeouts.end_cancel(held)

    # --- before ---

    def _prepare(  # noqa: C901, PLR0911 - one per reason
        self, lease: Lease, held: Held | None = None, thread: int | None = None
    ) -> TaskCall | Verdict:
        """Return the call to make for a lease, or the verdict if the job must not run.

        - *held*: the job that is about to start. None: the job has started already, so it cannot expire.
        - *thread*: the thread that will run the call, unless it is the shared event loop.
        """
        try:
            envelope = decode_envelope(lease.body, max_body=self._max_body)
        except PayloadInvalid as exc:
            return self._bury(JobContext(task=None, lease=lease, envelope=None), str(exc))
        job = JobContext(task=envelope.task, lease=lease, envelope=envelope, memos=self._memos)
        if envelope.flow is not None and (verdict := self._flow_verdict_safely(job)) is not None:
            return verdict
        if held is not None and held.cancel is not None:
            return self._cancelled_before(job, held.cancel.request)
        task = self._tasks.get(envelope.task)
        expires = envelope.expires
        if expires is None and task is not None:  # 0 means no limit
            expires = task.expires
        if expires and held is not None and (verdict := self._expired(job, held, expires)) is not None:
            return verdict
        if task is None:
            return self._unknown(job, envelope)
        policy = task.policy_of(envelope)
        if lease.attempt > 1 or lease.crashes:  # a first run is never refused
            refusal = policy.refuse(lease, counts_given_back=self._counts_given_back)
            if refusal is not None:
                return self._bury(job, refusal, task)
        try:
            task.accept(envelope)
        except ArgumentsInvalid as exc:
            return self._bury(job, str(exc), task)
        timeout = task.timeout_of(envelope)
        if not timeout:  # 0 means no timeout
            return TaskCall(job, task, envelope, policy, None, thread)
        deadline = time.monotonic() + timeout
        job = msgspec.structs.replace(job, deadline=deadline, notice=Notice())
        return TaskCall(job, task, envelope, policy, timeout, thread)

    def _may_be_cancelled(self, lease: Lease) -> bool:
        """Whether an earlier run of the job may have received a request to cancel it. A first run begins without a
        search for requests."""
        cancels = self._cancels
        return (lease.crashes > 0 or lease.attempt > 1) and (
            cancels is not None and (lease.crashes > 0 or cancels.may_have_requests)
        )

    def _look_up_cancel(self, held: Held) -> None:
        with contextlib.suppress(BackendError):  # the job begins now, and is cancelled later, when the backend answers
            if self._cancels is not None:
                self._cancels.look_up(held)

    def _cancelled_before(self, job: JobContext, request: CancelRequest) -> Verdict:
        """Return the verdict on a job that was cancelled before its task has begun."""
        try:
            record = self._record(job)
        except PayloadInvalid as exc:
            return self._bury(job, str(exc))
        except BackendError:
            return GiveBack(job.lease, _READ_AGAIN)
        verdict, emit = self._cancelled(job, request, record, 0.0)
        emit()
        return verdict

    def _cancelled(
        self,
        job: JobContext,
        request: CancelRequest,
        record: FlowRecord | None,
        seconds: float,
        *,
        has_run: bool = False,
    ) -> tuple[Verdict, Callable[[], None]]:
        verdict = self._effects.cancelled(job, request.reason, seconds, record, releases=request.followers == "go")
        self._counted("cancelled", verdict)

        def emit() -> None:
            self._events.emit(JobCancelled(job=job, reason=request.reason))
            if self._chain.any_ended:
                ran = seconds if has_run else None
                self._tell(job, Ending(verdict="cancelled", seconds=ran, reason=request.reason), self._task_of(job))

        return verdict, emit

    def _unknown(self, job: JobContext, envelope: Envelope) -> Verdict:
        known = ", ".join(sorted(self._tasks)) or "none"
        reason = f"this worker knows no task {envelope.task[:128]!r} (registered: {known})"
        policy = UNKNOWN_TASK
        if envelope.max_attempts is not None:
            policy = msgspec.structs.replace(policy, max_attempts=tighter(policy.attempts(), envelope.max_attempts))
        verdict = policy.after_failure(job.lease, reason, longest=self._longest_delay)
        return self._announce(job, self._effects.failed(job, self._with_failure(job, verdict)), reason)

    def _flow_verdict_safely(self, job: JobContext) -> Verdict | None:
        try:
            return self._flow_verdict(job)
        except PayloadInvalid as exc:
            return self._bury(job, str(exc))
        except BackendError:
            return GiveBack(job.lease, _READ_AGAIN)

    def _flow_verdict(self, job: JobContext) -> Verdict | None:
        """Return the verdict on a job of a flow if it must not run a task, else None."""
        if not self._backend.declared.holds:
            return self._bury(
                job,
                "the job belongs to a flow, and this backend lacks the capability holds: move the job back to the "
                "backend of its flow",
            )
        if job.lease.doomed:
            reason = job.lease.doomed
            if self._chain.any_ended:
                self._tell(job, Ending(verdict="cancelled", reason=reason), self._task_of(job))
            return self._counted("cancelled", self._effects.cancelled(job, reason, record=self._record(job)))
        if job.task == END_TASK:
            return self._effects.ack(job, None, 0.0, self._record(job))
        return None

    def _record(self, job: JobContext) -> FlowRecord | None:
        """Return the record of the flow that this job ends. None: the job ends no flow.

        Raises ``BackendError``, ``PayloadInvalid``.
        """
        flow = None if job.envelope is None else job.envelope.flow
        if flow is None or not flow.ends:
            return None
        from multiq.flows.followers import find_record

        return find_record(self._backend, flow)

    def _with_inputs(self, call: TaskCall, flow: FlowPart) -> TaskCall | Verdict:
        """Put the results of earlier jobs into the arguments. If a result is missing, returns the verdict."""
        from multiq.flows.inputs import InputMissing, InputNotYet, fetch_inputs

        try:
            fetch_inputs(self._backend, call.envelope, flow)
            call.task.decode_arguments(call.envelope)
            record = self._record(call.job)
        except (InputMissing, PayloadInvalid, ArgumentsInvalid) as exc:
            return self._bury(call.job, str(exc), call.task)
        except (InputNotYet, BackendError):
            return GiveBack(call.job.lease, _READ_AGAIN)  # the task has not begun, so it has not failed
        return call if record is None else msgspec.structs.replace(call, record=record)

    def _with_new_record(self, call: TaskCall) -> TaskCall:
        """Return the call with its flow's record as it is after the run. The flow may have been cancelled during the
        run, and a verdict that ended it again would undo this."""
        if call.record is None:
            return call
        try:
            return msgspec.structs.replace(call, record=self._record(call.job))
        except (BackendError, PayloadInvalid):  # the job has run, so it gets its verdict
            return call

    async def _awith_new_record(self, call: TaskCall) -> TaskCall:
        """``_with_new_record`` without blocking the event loop."""
        if call.record is None:
            return call
        try:
            return await asyncio.to_thread(self._with_new_record, call)
        except asyncio.CancelledError:  # the worker is ending, and the job has run
            return call

    def _ready(self, call: TaskCall, held: Held) -> TaskCall | Verdict:
        """Return the call with its inputs and its permits, or the verdict if the job may not start now."""
        ready: TaskCall | Verdict = call
        if call.envelope.flow is not None:
            ready = self._with_inputs(call, call.envelope.flow)
        if isinstance(ready, TaskCall) and call.envelope.permits:
            ready = self._with_permits(ready, held)
        return ready

    def _with_permits(self, call: TaskCall, held: Held) -> TaskCall | Verdict:
        """Return the call if the job has its permits. If not, return a give-back with a delay."""
        if self._fetcher is None:
            return call
        with self._counting:
            if self._permits is None:
                from .running_permits import Permits  # imported here, because few jobs need permits

                self._permits = Permits(self._backend, self._fetcher)
        # Another worker may have reserved the job, only to ask for its permits, when the job was cancelled.
        if self._cancels is not None and not self._cancels.knows_of_none:
            self._look_up_cancel(held)
        delay = self._permits.ask(held, call.envelope.permits) if held.cancel is None else None
        if held.cancel is not None:
            return self._cancelled_before(call.job, held.cancel.request)
        if delay is not None:
            if self._longest_delay is not None:
                delay = min(delay, self._longest_delay)
            uncounted = After(is_uncounted=True) if self._counts_given_back and self._stores_failures else None
            return self._counted("limited", GiveBack(held.lease, delay, uncounted))
        if call.timeout is None:
            return call
        # a new deadline, because the wait for the store does not count
        job = msgspec.structs.replace(call.job, deadline=time.monotonic() + call.timeout)
        return msgspec.structs.replace(call, job=job)

    def close_permits(self) -> None:
        """Free the permits of jobs that are settled."""
        if self._permits is not None:
            self._permits.close()

    def _expired(self, job: JobContext, held: Held, expires: float) -> Verdict | None:
        """Return the verdict on a job that starts too late. None: the job may start.

        ``lease.age`` is the age at the reservation, by the server's clock. The time in which the job has waited in this
        process is added. A kicked job never expires, because the kick means that it must run now.
        """
        lease = job.lease
        age = lease.age + max(0.0, time.monotonic() - held.reserved_at)
        if age < expires or lease.kicks:
            return None
        try:
            record = self._record(job)
        except PayloadInvalid as exc:
            return self._bury(job, str(exc))
        except BackendError:
            return GiveBack(lease, _READ_AGAIN)
        self._events.emit(JobExpired(job=job, age=age, expires=expires))
        reason = f"it did not start within {expires:g} s after its enqueue"
        if self._chain.any_ended:
            self._tell(job, Ending(verdict="expired", reason=reason), self._task_of(job))
        return self._counted("expired", self._effects.cancelled(job, reason, record=record))

    def _emit_started(self, call: TaskCall) -> None:
        self._events.emit(JobStarted(job=call.job))
        # The time that subscribers take does not count, so the deadline is moved. Before this line, no code checks the
        # deadline.
        if call.timeout is not None:
            msgspec.structs.force_setattr(call.job, "deadline", time.monotonic() + call.timeout)

    # --- the call itself ---

    def _call(self, call: TaskCall, held: Held) -> Any:
        if call.timeout is None:
            return self._result(call, None, held)
        timed = self._timeouts.begin(call, held, thread=threading.get_ident())
        try:
            return self._result(call, timed, held)
        finally:
            self._timeouts.end(timed)

    def _result(self, call: TaskCall, timed: TimedJob | None, held: Held) -> Any:
        if self._chain.any_run:
            with contextlib.ExitStack() as stack:
                self._chain.enter_runs(stack, call.job)
                if call.task.chain is not None:
                    call.task.chain.enter_runs(stack, call.job)
                return self._plain_result(call, timed, held)
            return None  # middleware has caught the task's error
        return self._plain_result(call, timed, held)

    def _plain_result(self, call: TaskCall, timed: TimedJob | None, held: Held) -> Any:
        generation = forks.generation  # the same as ExitInForks, without the cost of a ``with`` block for each job
        try:
            result = call.task.function(*call.envelope.args, **call.envelope.kwargs)
            if result is not None and isinstance(result, _NOT_RUN):
                result = self._run_result(result, timed, held)
        except BaseException as exc:
            if forks.generation != generation:
                exit_forked_copy(exc)
            raise
        if forks.generation != generation:
            exit_forked_copy(None)
        return result

    def _run_result(self, result: Any, timed: TimedJob | None, held: Held) -> Any:
        """Await a plain function's result if it is a coroutine. A decorator may hide a coroutine function."""
        if isinstance(result, GeneratorType | AsyncGeneratorType):
            raise BuryJob(
                f"the task returned {type(result).__name__}, whose code has not run: a task must not be a generator"
            )
        return self._loop().run(self._within(timed, result, held))

    def _drive(self, call: TaskCall, held: Held) -> Any:
        return self._loop().run(self._await(call, held, thread=threading.get_ident()))

    def _loop(self) -> JobLoop:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is None:
            loop = self._threads.loop = JobLoop()
        return loop

    async def _await(self, call: TaskCall, held: Held, *, thread: int | None) -> Any:
        """*thread*: a thread with an event loop that runs only this job. None: the job runs on the shared loop."""
        timed = None if call.timeout is None else self._timeouts.begin(call, held, thread=thread)
        try:
            with ExitInForks():
                work = (
                    self._wrapped(call)
                    if self._chain.any_run
                    else call.task.function(*call.envelope.args, **call.envelope.kwargs)
                )
                return await self._within(timed, work, held)
        finally:
            if timed is not None:
                self._timeouts.end(timed)
            if thread is None:
                self._end_call(held)

    async def _within(self, timed: TimedJob | None, work: Awaitable[Any], held: Held) -> Any:
        """Await *work*, and cancel it when its time is over."""
        held.task = asyncio.current_task()
        if timed is None:
            return await work
        timer = CoroutineTimer(timed, self._timeouts)
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
            await self._chain.enter_coroutine(stack, call.job)
            if call.task.chain is not None:
                await call.task.chain.enter_coroutine(stack, call.job)
            with ExitInForks():
                return await call.task.function(*call.envelope.args, **call.envelope.kwargs)

    # --- after ---

    def _done(self, call: TaskCall, result: Any, seconds: float) -> Verdict:
        # the value is read before subscribers and middleware may change it
        envelope = call.envelope
        if envelope.keep or envelope.flow is not None:
            verdict = self._effects.ack(call.job, result, seconds, call.record, call.task.returns)
        else:
            verdict = Ack(call.job.lease)
        if self._events.listeners[JobDone]:
            self._events.emit(JobDone(job=call.job, seconds=seconds))
        if seconds > self._slow_after:
            log_slow(call.job, seconds)
        if self._chain.any_ended:
            self._tell(call.job, Ending(verdict="done", seconds=seconds, result=result), call.task)
        return verdict

    def _failed(self, call: TaskCall, exc: BaseException, seconds: float, cancel: Cancel | None = None) -> Verdict:
        if cancel is not None:  # whatever error the task has raised, the job is not tried again
            verdict, emit = self._cancelled(call.job, cancel.request, call.record, seconds, has_run=True)
        else:
            verdict, emit = self._judge_safely(call, exc, seconds)
        emit()
        return verdict

    def _judge_safely(
        self, call: TaskCall, exc: BaseException, seconds: float, stack: str | None = None
    ) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict on a failed run, and a function that emits its events."""
        try:
            return self._judge(call, exc, seconds, stack)
        except BaseException:  # noqa: BLE001 - the user's backoff function may raise any error
            _log.exception("the retry policy of task %s failed; its job gets the default backoff", call.task.name)
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
        if isinstance(exc, Snooze):
            return self._snoozed(call, exc, seconds)
        verdict: Release | Bury
        if isinstance(exc, ReleaseJob):
            reason = exc.reason or reason
            verdict = call.policy.after_failure(lease, reason, exc.delay, longest=self._longest_delay)
        else:
            events.append(JobFailed(job=call.job, seconds=seconds, error=exc))
            if isinstance(exc, BuryJob):
                reason = exc.reason
                verdict = Bury(lease, check_reason(reason))
            elif call.task.error_rules is not None and call.task.error_rules.buries(exc):
                verdict = Bury(lease, check_reason(reason))
            else:
                verdict = call.policy.after_failure(lease, reason, longest=self._longest_delay)
        verdict = self._effects.failed(
            call.job, self._with_failure(call.job, verdict, exc, stack, seconds), exc, seconds
        )

        def emit() -> None:
            for event in events:
                if self._events.listeners[type(event)]:
                    self._events.emit(event)
            self._announce(call.job, verdict, reason, call.task, exc, seconds)

        return verdict, emit

    def _snoozed(self, call: TaskCall, snooze: Snooze, seconds: float) -> tuple[Verdict, Callable[[], None]]:
        job = call.job
        reason, longest = check_reason(snooze.reason), self._longest_delay
        delay = snooze.delay if longest is None else min(snooze.delay, longest)
        # without the capability give_back, both verdicts count the attempt; only a release also stores the reason
        verdict = Release(job.lease, delay, reason=reason) if self._counts_given_back else GiveBack(job.lease, delay)
        verdict = self._effects.snoozed(job, verdict)
        self._counted("snoozed", verdict)

        def emit() -> None:
            self._events.emit(JobSnoozed(job=job, delay=delay, reason=reason))
            if self._chain.any_ended:
                ending = Ending(verdict="snoozed", seconds=seconds, error=snooze, delay=delay, reason=reason)
                self._tell(job, ending, call.task)

        return verdict, emit

    def _counted(self, word: str, verdict: Verdict) -> Verdict:
        with self._counting:
            self.not_runs[word, type(verdict)] += 1
        return verdict

    def _with_failure(
        self,
        job: JobContext,
        verdict: Release | Bury,
        error: BaseException | None = None,
        stack: str | None = None,
        seconds: float | None = None,
    ) -> Release | Bury:
        """Add the failure to a bury, if the backend stores it."""
        if not self._stores_failures or isinstance(verdict, Release):
            return verdict
        detail = encode_failure(
            verdict.reason or "", task=job.task, attempt=job.attempt, error=error, stack=stack, seconds=seconds
        )
        after = msgspec.structs.replace(verdict.after or After(), detail=detail)
        return msgspec.structs.replace(verdict, after=after)

    def _bury(self, job: JobContext, reason: str, task: Task[Any, Any] | None = None) -> Verdict:
        verdict = self._effects.failed(job, self._with_failure(job, Bury(job.lease, check_reason(reason))))
        return self._announce(job, verdict, reason, task)

    def _announce(  # noqa: PLR0917 - what is told
        self,
        job: JobContext,
        verdict: Release | Bury,
        reason: str,
        task: Task[Any, Any] | None = None,
        error: BaseException | None = None,
        seconds: float | None = None,
    ) -> Verdict:
        reason = verdict.reason or reason  # the stored reason: shortened, and without characters that cannot be stored
        delay = verdict.delay if isinstance(verdict, Release) else None
        if delay is not None:
            self._events.emit(JobRetried(job=job, delay=delay, reason=reason))
        else:
            self._events.emit(JobBuried(job=job, reason=reason))
        if self._chain.any_ended:
            word: Literal["buried", "retried"] = "buried" if delay is None else "retried"
            self._tell(job, Ending(verdict=word, seconds=seconds, error=error, delay=delay, reason=reason), task)
        return verdict

    def _tell(self, job: JobContext, ending: Ending, task: Task[Any, Any] | None) -> None:
        """Call the ``ended`` of all middleware, the innermost first."""
        if task is not None and task.chain is not None:
            task.chain.tell(job, ending)
        self._chain.tell(job, ending)

    def _task_of(self, job: JobContext) -> Task[Any, Any] | None:
        return None if job.task is None else self._tasks.get(job.task)


def _fallback_verdict(lease: Lease, exc: BaseException, longest_delay: float | None) -> Verdict:
    with contextlib.suppress(BaseException):  # even formatting the traceback may fail
        _log.error("the worker cannot choose a verdict on a run of job %s: %r", lease.id, type(exc))
        _log.debug("the error of this run", exc_info=exc)
    reason = "the worker cannot choose a verdict: the error or the task of this run cannot be formatted as text"
    return RetryPolicy().after_failure(lease, reason, longest=longest_delay)
