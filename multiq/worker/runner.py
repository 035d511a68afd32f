"""From a lease to a verdict: decode, look up, guard, call, judge. Nothing that a task does gets past this file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Ack, Bury, GiveBack, Lease, Release, Verdict
from multiq.backoff import DEFAULT, exponential
from multiq.codec import Envelope, decode_envelope
from multiq.errors import ArgumentsInvalid, PayloadInvalid
from multiq.events import JobBuried, JobDone, JobFailed, JobRetried, JobStarted, JobTimedOut
from multiq.job import JobContext, describe, running
from multiq.options import check_reason
from multiq.retry import BuryJob, ReleaseJob, RetryPolicy, SoftTimeout

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.task import Task

    from .limits import Limits

_log = logging.getLogger("multiq.worker")

#: a task that nobody knows may be one that the next deployment brings: retried for about two and a half minutes
UNKNOWN_TASK = RetryPolicy(max_attempts=5, backoff=exponential(first=10, cap=600))


class Call(msgspec.Struct, frozen=True):
    """A job that may run: everything known about it."""

    job: JobContext
    task: Task[Any, Any]
    envelope: Envelope
    policy: RetryPolicy

    @property
    def timeout(self) -> float | None:
        timeout = self.task.timeout if self.envelope.timeout is None else self.envelope.timeout
        return timeout or None  # 0: no limit, as everywhere


class Runner:
    """Runs jobs of one app; used by all threads of a worker."""

    def __init__(self, app: App, limits: Limits) -> None:
        self._tasks = app.tasks
        self._events = app.events
        self._around = app.around
        self._max_body = app.settings.max_body
        self._limits = limits
        self._loops = threading.local()

    def run(self, lease: Lease) -> Verdict:
        """Run a job here and now; a coroutine on an event loop of this thread. Never raises."""
        call = self._open(lease)
        if not isinstance(call, Call):
            return call
        started = self._start(call)
        mark = running.set(call.job)
        try:
            result = self._drive(call) if call.task.is_coroutine else self._call(call)
        except BaseException as exc:  # noqa: BLE001 - SystemExit and its kin are a job's failure, not the worker's end
            return self._failed(call, exc, time.perf_counter() - started)
        else:
            return self._done(call, result, time.perf_counter() - started)
        finally:
            running.reset(mark)

    async def arun(self, lease: Lease) -> Verdict:
        """Run a coroutine job on the running event loop. Never raises; cancelled from outside, it is given back."""
        call = self._open(lease)
        if not isinstance(call, Call):
            return call
        started = self._start(call)
        running.set(call.job)  # this coroutine has a context of its own
        try:
            result = await self._await(call)
        except BaseException as exc:  # noqa: BLE001
            if isinstance(exc, asyncio.CancelledError) and _is_cancelled_from_outside():
                return GiveBack(lease)  # by a worker that ends: not the job's doing, unlike one that cancels itself
            return self._failed(call, exc, time.perf_counter() - started)
        return self._done(call, result, time.perf_counter() - started)

    def is_coroutine(self, lease: Lease) -> bool:
        """Whether the job's task is a coroutine; what cannot be told is none."""
        try:
            task = self._tasks.get(decode_envelope(lease.body, max_body=self._max_body).task)
        except PayloadInvalid:
            return False
        return task is not None and task.is_coroutine

    def timed_out(self, lease: Lease) -> Verdict:
        """The verdict on a job that was ended from outside because it ran longer than its timeout."""
        call = self._open(lease)
        if not isinstance(call, Call):
            return call
        return self._failed(call, SoftTimeout(), call.timeout or 0.0)

    def close_loop(self) -> None:
        """Close this thread's event loop, if it has one."""
        runner: asyncio.Runner | None = getattr(self._loops, "runner", None)
        if runner is not None:
            runner.close()

    # --- before ---

    def _open(self, lease: Lease) -> Call | Verdict:
        """The call that a lease stands for, or the verdict on one that must not run."""
        try:
            envelope = decode_envelope(lease.body, max_body=self._max_body)
        except PayloadInvalid as exc:
            return self._bury(JobContext(task=None, lease=lease, envelope=None), str(exc))
        job = JobContext(task=envelope.task, lease=lease, envelope=envelope)
        task = self._tasks.get(envelope.task)
        if task is None:
            return self._unknown(job, envelope)
        policy = task.policy_of(envelope)
        refusal = policy.refuse(lease)
        if refusal is not None:
            return self._bury(job, refusal, task)
        try:
            task.check_arguments(envelope.args, envelope.kwargs)
        except ArgumentsInvalid as exc:
            return self._bury(job, str(exc), task)
        return Call(job, task, envelope, policy)

    def _unknown(self, job: JobContext, envelope: Envelope) -> Verdict:
        known = ", ".join(sorted(self._tasks)) or "none"
        reason = f"this worker knows no task {envelope.task[:128]!r} (registered: {known})"
        policy = UNKNOWN_TASK
        if envelope.max_attempts is not None:
            policy = msgspec.structs.replace(policy, max_attempts=envelope.max_attempts)
        verdict = policy.after_failure(job.lease, reason)
        return self._announce(job, verdict, reason)

    def _start(self, call: Call) -> float:
        if self._events.wants(JobStarted):
            self._events.emit(JobStarted(job=call.job))
        return time.perf_counter()

    # --- the call itself ---

    def _call(self, call: Call) -> Any:
        timeout = call.timeout
        if timeout is None:
            return self._result(call)
        limit = self._limits.begin(call, timeout, thread=threading.get_ident())
        try:
            try:
                return self._result(call)
            finally:
                self._limits.end(limit)
        except SoftTimeout:  # it comes once, but may come in the middle of the line above
            self._limits.end(limit)
            raise

    def _result(self, call: Call) -> Any:
        if self._around:
            with contextlib.ExitStack() as stack:
                for is_async, middleware in self._around:
                    if not is_async:
                        stack.enter_context(middleware(call.job))
                return self._plain_result(call)
        return self._plain_result(call)

    def _plain_result(self, call: Call) -> Any:
        result = call.task.function(*call.envelope.args, **call.envelope.kwargs)
        # a decorator may hide that its function is a coroutine: not awaited, it would never have run
        return self._loop().run(result) if type(result) is CoroutineType else result

    def _drive(self, call: Call) -> Any:
        return self._loop().run(self._await(call))

    def _loop(self) -> asyncio.Runner:
        """This thread's event loop."""
        runner: asyncio.Runner | None = getattr(self._loops, "runner", None)
        if runner is None:
            runner = self._loops.runner = asyncio.Runner()
        return runner

    async def _await(self, call: Call) -> Any:
        timeout = call.timeout
        work = self._wrapped(call) if self._around else call.task.function(*call.envelope.args, **call.envelope.kwargs)
        if timeout is None:
            return await work
        limit = self._limits.begin(call, timeout, thread=None)
        try:
            async with asyncio.timeout(timeout) as patience:
                return await work
        except TimeoutError:
            if patience.expired():
                raise SoftTimeout from None
            raise
        finally:
            self._limits.end(limit)

    async def _wrapped(self, call: Call) -> Any:
        async with contextlib.AsyncExitStack() as stack:
            for is_async, middleware in self._around:
                entered = middleware(call.job)
                await stack.enter_async_context(entered) if is_async else stack.enter_context(entered)
            return await call.task.function(*call.envelope.args, **call.envelope.kwargs)

    # --- after ---

    def _done(self, call: Call, result: Any, seconds: float) -> Verdict:
        if self._events.wants(JobDone):
            self._events.emit(JobDone(job=call.job, seconds=seconds))
        if call.task.on_success is not None:
            _isolated(call, call.task.on_success, result)
        return Ack(call.job.lease)

    def _failed(self, call: Call, exc: BaseException, seconds: float) -> Verdict:
        try:
            return self._judge(call, exc, seconds)
        except (Exception, SystemExit):  # noqa: BLE001 - a backoff function of the user's: the job outlives it
            _log.exception("the retry policy of task %s failed; its job is released with the default", call.task.name)
            return Release(call.job.lease, DEFAULT(call.job.attempt), reason=describe(exc))

    def _judge(self, call: Call, exc: BaseException, seconds: float) -> Verdict:
        lease = call.job.lease
        reason = describe(exc)
        if isinstance(exc, SoftTimeout):
            reason = f"the task ran longer than its timeout of {call.timeout:g} s"
            self._events.emit(JobTimedOut(job=call.job, timeout=call.timeout or 0.0))
        if isinstance(exc, ReleaseJob):
            reason = exc.reason or reason
            return self._announce(call.job, call.policy.after_failure(lease, reason, exc.delay), reason, call.task, exc)
        if self._events.wants(JobFailed):
            self._events.emit(JobFailed(job=call.job, seconds=seconds, error=exc))
        if isinstance(exc, BuryJob):
            return self._announce(call.job, Bury(lease, check_reason(exc.reason)), exc.reason, call.task, exc)
        return self._announce(call.job, call.policy.after_failure(lease, reason), reason, call.task, exc)

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
        if isinstance(verdict, Release):
            self._events.emit(JobRetried(job=job, delay=verdict.delay, reason=reason))
            hook = None if task is None else task.on_retry
        else:
            self._events.emit(JobBuried(job=job, reason=reason))
            hook = None if task is None else task.on_failure
        if hook is not None:
            _isolated(job, hook, BuryJob(reason) if error is None else error)
        return verdict


def _is_cancelled_from_outside() -> bool:
    """Whether somebody has asked for the end of the coroutine that runs here."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _isolated(call: Call | JobContext, hook: Any, what: Any) -> None:
    """Call a task's own hook; its error is logged and changes nothing."""
    job = call.job if isinstance(call, Call) else call
    try:
        hook(job, what)
    except (Exception, SystemExit):  # noqa: BLE001
        _log.exception("a hook of task %s failed; the job's fate is not affected", job.task)
