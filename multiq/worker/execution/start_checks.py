"""Refuses jobs that must not run, before their code begins. All other jobs are prepared for their run.

A job is refused and buried if its payload or its arguments are invalid, if it has had all of its attempts, if it is
older than ``retry_for``, or if it is poison, because it has crashed its process ``max_crashes`` times
(``RetryPolicy.refuse``). A job is also refused if it has expired, if it was cancelled, if its task is unknown, and if
its inputs or its permits are missing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import After, GiveBack, Lease, Verdict
from multiq.envelope import END_TASK, Envelope, decode_envelope
from multiq.errors import ArgumentsInvalid, BackendError, PayloadInvalid
from multiq.events import JobExpired
from multiq.job import JobContext
from multiq.middleware import Ending
from multiq.retry import RetryPolicy, exponential, tighter
from multiq.timeout_notices import Notice

from .task_call import TaskCall

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.cancellation import CancelRequest
    from multiq.envelope import FlowPart
    from multiq.worker.processes.inflight import Held

    from .cancels import Cancels
    from .fetcher import Fetcher
    from .judging import Judging
    from .permits import Permits
    from .running_memos import JobMemos

_READ_AGAIN = 1.0  # seconds until a job is tried again, if its flow or its input could not be read

#: The next deployment may bring the unknown task, so the job is retried for about two and a half minutes.
UNKNOWN_TASK = RetryPolicy(max_attempts=5, backoff=exponential(first=10, cap=600))


class StartChecks:
    """Decides whether a job may run. The arguments are those of ``Runner``, and *judging*, which makes the verdicts."""

    def __init__(
        self, app: App, judging: Judging, memos: JobMemos | None, cancels: Cancels | None, fetcher: Fetcher | None
    ) -> None:
        self._backend = app.backend
        self._tasks = app.tasks
        self._events = app.events
        self._chain = app.chain
        self._max_body = app.settings.max_body
        self._judging = judging
        self._memos = memos
        self._cancels = cancels
        self._fetcher = fetcher
        self._permits: Permits | None = None
        self._making_permits = threading.Lock()
        self._counts_given_back = not app.backend.capabilities.give_back
        self._stores_failures = bool(app.backend.capabilities.memos)
        self._longest_delay = app.backend.declared.longest_delay

    def prepare(  # noqa: C901, PLR0911 - one per reason
        self, lease: Lease, held: Held | None = None, thread: int | None = None
    ) -> TaskCall | Verdict:
        """Return the call to make for a lease, or the verdict if the job must not run.

        - *held*: the job that is about to start. None: the job has started already, so it cannot expire.
        - *thread*: the thread that will run the call, unless it is the shared event loop.
        """
        try:
            envelope = decode_envelope(lease.body, max_body=self._max_body)
        except PayloadInvalid as exc:
            return self._judging.bury(JobContext(task=None, lease=lease, envelope=None), str(exc))
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
                return self._judging.bury(job, refusal, task)
        try:
            task.accept(envelope)
        except ArgumentsInvalid as exc:
            return self._judging.bury(job, str(exc), task)
        timeout = task.timeout_of(envelope)
        if not timeout:  # 0 means no timeout
            return TaskCall(job, task, envelope, policy, None, thread)
        deadline = time.monotonic() + timeout
        job = msgspec.structs.replace(job, deadline=deadline, notice=Notice())
        return TaskCall(job, task, envelope, policy, timeout, thread)

    def may_be_cancelled(self, lease: Lease) -> bool:
        """Whether an earlier run of the job may have received a request to cancel it. A first run begins without a
        search for requests."""
        cancels = self._cancels
        return (lease.crashes > 0 or lease.attempt > 1) and (
            cancels is not None and (lease.crashes > 0 or cancels.may_have_requests)
        )

    def look_up_cancel(self, held: Held) -> None:
        with contextlib.suppress(BackendError):  # the job begins now, and is cancelled later, when the backend answers
            if self._cancels is not None:
                self._cancels.look_up(held)

    def ready(self, call: TaskCall, held: Held) -> TaskCall | Verdict:
        """Return the call with its inputs and its permits, or the verdict if the job may not start now."""
        ready: TaskCall | Verdict = call
        if call.envelope.flow is not None:
            ready = self._with_inputs(call, call.envelope.flow)
        if isinstance(ready, TaskCall) and call.envelope.permits:
            ready = self._with_permits(ready, held)
        return ready

    def close_permits(self) -> None:
        """Free the permits of jobs that are settled."""
        if self._permits is not None:
            self._permits.close()

    def _cancelled_before(self, job: JobContext, request: CancelRequest) -> Verdict:
        """Return the verdict on a job that was cancelled before its task has begun."""
        try:
            record = self._judging.record(job)
        except PayloadInvalid as exc:
            return self._judging.bury(job, str(exc))
        except BackendError:
            return GiveBack(job.lease, _READ_AGAIN)
        verdict, emit = self._judging.cancelled(job, request, record, 0.0)
        emit()
        return verdict

    def _unknown(self, job: JobContext, envelope: Envelope) -> Verdict:
        known = ", ".join(sorted(self._tasks)) or "none"
        reason = f"this worker knows no task {envelope.task[:128]!r} (registered: {known})"
        policy = UNKNOWN_TASK
        if envelope.max_attempts is not None:
            policy = msgspec.structs.replace(policy, max_attempts=tighter(policy.attempts(), envelope.max_attempts))
        verdict = policy.after_failure(job.lease, reason, longest=self._longest_delay)
        return self._judging.refused(job, verdict, reason)

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
            record = self._judging.record(job)
        except PayloadInvalid as exc:
            return self._judging.bury(job, str(exc))
        except BackendError:
            return GiveBack(lease, _READ_AGAIN)
        self._events.emit(JobExpired(job=job, age=age, expires=expires))
        reason = f"it did not start within {expires:g} s after its enqueue"
        if self._chain.any_ended:
            self._judging.tell(job, Ending(verdict="expired", reason=reason), self._judging.task_of(job))
        return self._judging.counted("expired", self._judging.effects.cancelled(job, reason, record=record))

    def _flow_verdict_safely(self, job: JobContext) -> Verdict | None:
        try:
            return self._flow_verdict(job)
        except PayloadInvalid as exc:
            return self._judging.bury(job, str(exc))
        except BackendError:
            return GiveBack(job.lease, _READ_AGAIN)

    def _flow_verdict(self, job: JobContext) -> Verdict | None:
        """Return the verdict on a job of a flow if it must not run a task, else None."""
        if not self._backend.declared.holds:
            return self._judging.bury(
                job,
                "the job belongs to a flow, and this backend lacks the capability holds: move the job back to the "
                "backend of its flow",
            )
        if job.lease.doomed:
            reason = job.lease.doomed
            if self._chain.any_ended:
                self._judging.tell(job, Ending(verdict="cancelled", reason=reason), self._judging.task_of(job))
            return self._judging.counted(
                "cancelled", self._judging.effects.cancelled(job, reason, record=self._judging.record(job))
            )
        if job.task == END_TASK:
            return self._judging.effects.ack(job, None, 0.0, self._judging.record(job))
        return None

    def _with_inputs(self, call: TaskCall, flow: FlowPart) -> TaskCall | Verdict:
        """Put the results of earlier jobs into the arguments. If a result is missing, returns the verdict."""
        from multiq.flows.inputs import InputMissing, InputNotYet, fetch_inputs

        try:
            fetch_inputs(self._backend, call.envelope, flow)
            call.task.decode_arguments(call.envelope)
            record = self._judging.record(call.job)
        except (InputMissing, PayloadInvalid, ArgumentsInvalid) as exc:
            return self._judging.bury(call.job, str(exc), call.task)
        except (InputNotYet, BackendError):
            return GiveBack(call.job.lease, _READ_AGAIN)  # the task has not begun, so it has not failed
        return call if record is None else msgspec.structs.replace(call, record=record)

    def _with_permits(self, call: TaskCall, held: Held) -> TaskCall | Verdict:
        """Return the call if the job has its permits. If not, return a give-back with a delay."""
        if self._fetcher is None:
            return call
        with self._making_permits:
            if self._permits is None:
                from .permits import Permits  # imported here, because few jobs need permits

                self._permits = Permits(self._backend, self._fetcher)
        # Another worker may have reserved the job, only to ask for its permits, when the job was cancelled.
        if self._cancels is not None and not self._cancels.knows_of_none:
            self.look_up_cancel(held)
        delay = self._permits.ask(held, call.envelope.permits) if held.cancel is None else None
        if held.cancel is not None:
            return self._cancelled_before(call.job, held.cancel.request)
        if delay is not None:
            if self._longest_delay is not None:
                delay = min(delay, self._longest_delay)
            uncounted = After(is_uncounted=True) if self._counts_given_back and self._stores_failures else None
            return self._judging.counted("limited", GiveBack(held.lease, delay, uncounted))
        if call.timeout is None:
            return call
        # a new deadline, because the wait for the store does not count
        job = msgspec.structs.replace(call.job, deadline=time.monotonic() + call.timeout)
        return msgspec.structs.replace(call, job=job)
