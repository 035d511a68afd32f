"""The runner: calls the tasks of jobs.

Before the call, ``start_checks.py`` decides whether a job may run. After the call, ``judging.py`` turns the result or
the exception into a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Ack, GiveBack, Lease, Verdict
from multiq.driverkit.fork import forks
from multiq.envelope import decode_envelope
from multiq.errors import PayloadInvalid
from multiq.events import JobDone, JobStarted
from multiq.job import running
from multiq.middleware import Ending
from multiq.retry import BuryJob, SoftTimeout
from multiq.worker.processes.fork import ExitInForks, exit_forked_copy

from .blocked_loop import CoroutineTimer
from .event_loop import JobLoop
from .judging import Judging, fallback_verdict
from .start_checks import StartChecks
from .task_call import TaskCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.cancellation import CancelRequest
    from multiq.worker.processes.inflight import Held

    from .cancels import Cancels
    from .fetcher import Fetcher
    from .running_memos import JobMemos
    from .timeouts import TimedJob, Timeouts

_NOT_RUN = (Awaitable, GeneratorType, AsyncGeneratorType)


class Runner:
    """Runs the jobs of one app, on all threads of a worker. Each job gets a copy of the ``contextvars`` context in
    which the runner was created.

    - *memos*: the memos of the jobs. None: the runner only judges jobs, and does not run jobs.
    - *cancels*: the requests to cancel jobs.
    - *fetcher*: has the leases of the jobs. None: jobs run without permits.
    - *judging*: makes the verdicts. None: a new ``Judging``.
    """

    def __init__(
        self,
        app: App,
        timeouts: Timeouts,
        memos: JobMemos | None = None,
        cancels: Cancels | None = None,
        fetcher: Fetcher | None = None,
        *,
        judging: Judging | None = None,
    ) -> None:
        self._tasks = app.tasks
        self._events = app.events
        self._chain = app.chain
        self._max_body = app.settings.max_body
        self._timeouts = timeouts
        self._judging = judging = judging or Judging(app, memos)
        self._start_checks = StartChecks(app, judging, memos, cancels, fetcher)
        self._prepare = self._start_checks.prepare  # bound once, because each job calls it
        self._slow_after = judging.slow_after
        self._longest_delay = app.backend.declared.longest_delay
        self._threads = threading.local()
        self._context = contextvars.copy_context()
        self.not_runs = judging.not_runs
        self.is_ending = False
        """Whether the worker is ending, and cancels coroutines for this reason. A cancellation for this reason is not a
        failure of the job."""

    def run(self, held: Held) -> Verdict:
        """Run a job in this thread, or on this thread's event loop if the job is a coroutine. Never raises."""
        try:
            return self._context.copy().run(self._run, held)
        except BaseException as exc:  # noqa: BLE001 - even formatting an error may raise an error
            return fallback_verdict(held.lease, exc, self._longest_delay)

    async def arun(self, held: Held) -> Verdict:
        """Run a coroutine job on the running event loop, in a ``fresh_context``. Never raises."""
        try:
            return await self._arun(held)
        except BaseException as exc:  # noqa: BLE001 - as in run
            return fallback_verdict(held.lease, exc, self._longest_delay)

    async def _arun(self, held: Held) -> Verdict:
        try:
            if self._start_checks.may_be_cancelled(held.lease):
                await asyncio.to_thread(self._start_checks.look_up_cancel, held)
            call = self._prepare(held.lease, held)
            if isinstance(call, TaskCall) and (call.envelope.flow is not None or call.envelope.permits):
                call = await asyncio.to_thread(self._start_checks.ready, call, held)
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
                    self._judging.tell(call.job, Ending(verdict="given back", seconds=seconds, error=exc), call.task)
                return GiveBack(held.lease)  # the worker is ending, so the job has not failed
            seconds = time.perf_counter() - started
            return self._judging.failed(await self._awith_new_record(call), exc, seconds, held.cancel)
        seconds = time.perf_counter() - started
        return self._judging.done(await self._awith_new_record(call), result, seconds)

    @property
    def has_kept_outcomes(self) -> bool:
        """Whether this runner has run a job whose outcome is kept."""
        return self._judging.effects.has_kept

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
            record = self._judging.record(call.job)
        except PayloadInvalid:  # no worker can finish this flow
            record = None
        return self._judging.cancelled(call.job, request, record, 0.0)

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
        return self._judging.judge_safely(call, SoftTimeout(), call.timeout or 0.0, stack)

    def close_loop(self) -> None:
        loop: JobLoop | None = getattr(self._threads, "loop", None)
        if loop is not None:
            loop.close()

    def _run(self, held: Held) -> Verdict:  # noqa: C901 - calls would cost time for each job
        lease = held.lease
        if (lease.attempt > 1 or lease.crashes) and self._start_checks.may_be_cancelled(lease):
            self._start_checks.look_up_cancel(held)
        call = self._prepare(lease, held, threading.get_ident())
        if not isinstance(call, TaskCall):
            return call
        envelope = call.envelope
        if envelope.flow is not None or envelope.permits:
            ready = self._start_checks.ready(call, held)
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
            return self._judging.failed(
                self._judging.with_new_record(call), exc, time.perf_counter() - started, held.cancel
            )
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
                call = self._judging.with_new_record(call)
            return self._judging.done(call, result, seconds)
        return Ack(lease)

    def _end_call(self, held: Held) -> None:
        """Note that the task has ended, so that it is not interrupted any more."""
        held.call = None
        if held.cancel is not None:
            self._timeouts.end_cancel(held)

    async def _awith_new_record(self, call: TaskCall) -> TaskCall:
        """``Judging.with_new_record`` without blocking the event loop."""
        if call.record is None:
            return call
        try:
            return await asyncio.to_thread(self._judging.with_new_record, call)
        except asyncio.CancelledError:  # the worker is ending, and the job has run
            return call

    def _emit_started(self, call: TaskCall) -> None:
        self._events.emit(JobStarted(job=call.job))
        # The time that subscribers take does not count, so the deadline is moved. Before this line, no code checks the
        # deadline.
        if call.timeout is not None:
            msgspec.structs.force_setattr(call.job, "deadline", time.monotonic() + call.timeout)

    def close_permits(self) -> None:
        """Free the permits of jobs that are settled."""
        self._start_checks.close_permits()

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
