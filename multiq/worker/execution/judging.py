"""Turns the result of a job, or its error, into a verdict, and tells subscribers and middleware how the job has ended.

Every exception of a task, of any type, becomes a verdict here. ``retry.py`` has the policies, and ``effects.py`` adds
what a verdict stores.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from multiq.backend import Ack, After, Bury, GiveBack, Lease, Release, Verdict
from multiq.errors import BackendError, PayloadInvalid
from multiq.events import JobBuried, JobCancelled, JobDone, JobFailed, JobRetried, JobSnoozed, JobTimedOut
from multiq.failure_record import encode_failure
from multiq.job import JobContext, describe
from multiq.logging import log_slow, slow_after
from multiq.middleware import Ending
from multiq.retry import DEFAULT, BuryJob, ReleaseJob, RetryPolicy, Snooze, SoftTimeout
from multiq.validation import check_reason

from .effects import Effects

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.cancellation import CancelRequest
    from multiq.events import JobEvent
    from multiq.flows.record import FlowRecord
    from multiq.task import Task

    from .cancels import Cancel
    from .running_memos import JobMemos
    from .task_call import TaskCall

_log = logging.getLogger("multiq.worker")


class Judging:
    """Makes the verdicts on the jobs of one app. *memos*: see ``Runner``."""

    def __init__(self, app: App, memos: JobMemos | None = None) -> None:
        self._backend = app.backend
        self._tasks = app.tasks
        self._events = app.events
        self._chain = app.chain
        self.effects = Effects(app, memos)
        self.slow_after = slow_after(app)
        capabilities = app.backend.capabilities
        self._counts_given_back = not capabilities.give_back
        self._stores_failures = bool(capabilities.memos)
        self._longest_delay = app.backend.declared.longest_delay
        self._counting = threading.Lock()
        self.not_runs: Counter[tuple[str, type[Verdict]]] = Counter()
        """The numbers of jobs, by a pair: the word ``cancelled``, ``expired``, ``limited`` or ``snoozed``, and the type
        of the verdict."""

    def done(self, call: TaskCall, result: Any, seconds: float) -> Verdict:
        # the value is read before subscribers and middleware may change it
        envelope = call.envelope
        if envelope.keep or envelope.flow is not None:
            verdict = self.effects.ack(call.job, result, seconds, call.record, call.task.returns)
        else:
            verdict = Ack(call.job.lease)
        if self._events.listeners[JobDone]:
            self._events.emit(JobDone(job=call.job, seconds=seconds))
        if seconds > self.slow_after:
            log_slow(call.job, seconds)
        if self._chain.any_ended:
            self.tell(call.job, Ending(verdict="done", seconds=seconds, result=result), call.task)
        return verdict

    def failed(self, call: TaskCall, exc: BaseException, seconds: float, cancel: Cancel | None = None) -> Verdict:
        if cancel is not None:  # whatever error the task has raised, the job is not tried again
            verdict, emit = self.cancelled(call.job, cancel.request, call.record, seconds, has_run=True)
        else:
            verdict, emit = self.judge_safely(call, exc, seconds)
        emit()
        return verdict

    def judge_safely(
        self, call: TaskCall, exc: BaseException, seconds: float, stack: str | None = None
    ) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict on a failed run, and a function that emits its events."""
        try:
            return self.judge(call, exc, seconds, stack)
        except BaseException:  # noqa: BLE001 - the user's backoff function may raise any error
            _log.exception("the retry policy of task %s failed; its job gets the default backoff", call.task.name)
            policy = msgspec.structs.replace(call.policy, backoff=DEFAULT)
            return self.judge(msgspec.structs.replace(call, policy=policy), exc, seconds, stack)

    def cancelled(
        self,
        job: JobContext,
        request: CancelRequest,
        record: FlowRecord | None,
        seconds: float,
        *,
        has_run: bool = False,
    ) -> tuple[Verdict, Callable[[], None]]:
        verdict = self.effects.cancelled(job, request.reason, seconds, record, releases=request.followers == "go")
        self.counted("cancelled", verdict)

        def emit() -> None:
            self._events.emit(JobCancelled(job=job, reason=request.reason))
            if self._chain.any_ended:
                ran = seconds if has_run else None
                self.tell(job, Ending(verdict="cancelled", seconds=ran, reason=request.reason), self.task_of(job))

        return verdict, emit

    def bury(self, job: JobContext, reason: str, task: Task[Any, Any] | None = None) -> Verdict:
        return self.refused(job, Bury(job.lease, check_reason(reason)), reason, task)

    def refused(
        self, job: JobContext, verdict: Release | Bury, reason: str, task: Task[Any, Any] | None = None
    ) -> Verdict:
        """Complete the verdict on a job that was refused before its run, and tell of it."""
        return self._announce(job, self.effects.failed(job, self._with_failure(job, verdict)), reason, task)

    def counted(self, word: str, verdict: Verdict) -> Verdict:
        with self._counting:
            self.not_runs[word, type(verdict)] += 1
        return verdict

    def tell(self, job: JobContext, ending: Ending, task: Task[Any, Any] | None) -> None:
        """Call the ``ended`` of all middleware, the innermost first."""
        if task is not None and task.chain is not None:
            task.chain.tell(job, ending)
        self._chain.tell(job, ending)

    def task_of(self, job: JobContext) -> Task[Any, Any] | None:
        return None if job.task is None else self._tasks.get(job.task)

    def record(self, job: JobContext) -> FlowRecord | None:
        """Return the record of the flow that this job ends. None: the job ends no flow.

        Raises ``BackendError``, ``PayloadInvalid``.
        """
        flow = None if job.envelope is None else job.envelope.flow
        if flow is None or not flow.ends:
            return None
        from multiq.flows.followers import find_record

        return find_record(self._backend, flow)

    def with_new_record(self, call: TaskCall) -> TaskCall:
        """Return the call with its flow's record as it is after the run. The flow may have been cancelled during the
        run, and a verdict that ended it again would undo this."""
        if call.record is None:
            return call
        try:
            return msgspec.structs.replace(call, record=self.record(call.job))
        except (BackendError, PayloadInvalid):  # the job has run, so it gets its verdict
            return call

    def judge(
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
        verdict = self.effects.failed(
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
        verdict = self.effects.snoozed(job, verdict)
        self.counted("snoozed", verdict)

        def emit() -> None:
            self._events.emit(JobSnoozed(job=job, delay=delay, reason=reason))
            if self._chain.any_ended:
                ending = Ending(verdict="snoozed", seconds=seconds, error=snooze, delay=delay, reason=reason)
                self.tell(job, ending, call.task)

        return verdict, emit

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
            self.tell(job, Ending(verdict=word, seconds=seconds, error=error, delay=delay, reason=reason), task)
        return verdict


def fallback_verdict(lease: Lease, exc: BaseException, longest_delay: float | None) -> Verdict:
    with contextlib.suppress(BaseException):  # even formatting the traceback may fail
        _log.error("the worker cannot choose a verdict on a run of job %s: %r", lease.id, type(exc))
        _log.debug("the error of this run", exc_info=exc)
    reason = "the worker cannot choose a verdict: the error or the task of this run cannot be formatted as text"
    return RetryPolicy().after_failure(lease, reason, longest=longest_delay)
