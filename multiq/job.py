"""The public classes for the handle of an enqueued job, a reserved job, a listed job, and the running job."""

from __future__ import annotations

import math
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from . import timeout_notices
from .backend import Ack, Bury, JobRecord, Lease, Release, State, Touch
from .envelope import decode_json
from .errors import (
    BackendUnavailable,
    JobNotFound,
    JobSettled,
    MultiqError,
    ResultTimeout,
)
from .failure_record import Failure, decode_failure
from .job_ref import make_ref
from .job_steps import arun_step, run_step
from .memo import check_progress, decode_memo
from .outcome import decode_outcome
from .retry import DEFAULT
from .timeout_notices import Notice, pending
from .validation import check_delay, check_priority, check_reason, check_timeout

if TYPE_CHECKING:
    import asyncio
    import datetime as dt
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Self

    from .backend import Backend, NewJob, Verdict
    from .cancellation import CancelAnswer
    from .envelope import Envelope
    from .flows.followers import Followers
    from .memo import Memos, Progress, RunningMemo
    from .outcome import JobOutcome
    from .queue import SharedConsumer
    from .result_waiting import JobStatus

P = ParamSpec("P")
R = TypeVar("R")

_NOTICE_EVERY = 0.1  # seconds between two checks of the waiting job's timeout


class JobHandle:
    """An enqueued job. The methods inspect the job, cancel the job and change its due time."""

    __slots__ = ("_backend", "id", "queue")

    was_new = True
    """Whether the enqueue added a job. ``was_new`` is False if an existing job already had the unique key. If
    ``was_new`` is False, the handle is the existing job's handle. An existing job that holds its key for a fixed time
    may be done.
    """

    def __init__(self, backend: Backend, queue: str, job_id: str) -> None:
        self._backend = backend
        self.queue = queue
        self.id = job_id

    def cancel(
        self, *, followers: Followers = "refuse", grace: float | dt.timedelta | None = None, reason: str | None = None
    ) -> CancelAnswer:
        """Cancel the job. Returns ``"deleted"`` if the job had not started, and ``"requested"`` if the job is running.

        The worker of a running job reads the request within about five seconds. Once the request is read,
        ``JobContext.is_cancelled`` is true. After the grace, ``JobCancelled`` is raised in the task's own code, in the
        same way as ``SoftTimeout`` at a timeout. A task that is a coroutine is cancelled. If the task raises an error
        after the cancellation, the job ends as cancelled. A reserved job whose task had not begun also ends as
        cancelled. A cancelled job is neither retried nor buried. If a cancelled task returns, the job is done.
        ``cancel`` deletes a buried job.

        - *followers*: what happens to the jobs of a flow that wait for this job. ``"go"``: the waiting jobs run.
          ``"stop"``: the waiting jobs are cancelled. ``"refuse"``: if jobs wait for this job, nothing is changed, and
          ``JobAwaited`` is raised.
        - *grace*: seconds, or a timedelta, of at least 0. Default: 5.
        - *reason*: a text that is stored in the outcome, and that ``JobCancelled`` shows.

        Errors:

        - ``JobEnded``: the job is gone, and its outcome is kept. ``JobNotFound``: the job is gone, or was never
          enqueued.
        - ``Unsupported``: the job is running, and the backend has no notes or no control flags.
        """
        # imported late, because few programs cancel jobs
        from .cancellation import GRACE_DEFAULT, cancel_job, check_reason_of

        seconds = GRACE_DEFAULT if grace is None else check_delay(grace, name="grace")
        why = check_reason_of(reason)
        return cancel_job(self._backend, self.queue, self.id, followers=followers, grace=seconds, reason=why)

    def reschedule(self, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None) -> None:
        """Make the job due in *delay* seconds or at the time *at*, as if it were enqueued now.

        On a backend without ``stable_ids``, this handle gets a new ``id``. Raises ``JobReserved``, ``JobNotFound``.
        """
        seconds = check_delay(delay, at)
        self._backend.check_terms(delay=seconds)
        self.id = self._backend.reschedule(self.queue, self.id, seconds)

    def state(self) -> State:
        """Return the job's current state. ``State.GONE`` means that the job was acked or deleted."""
        try:
            return self._backend.peek(self.queue, self.id).state
        except JobNotFound:
            return State.GONE

    def peek(self) -> JobInfo:
        """Return the job in the form in which the backend stores it. Raises ``JobNotFound``."""
        return JobInfo.of(self._backend.peek(self.queue, self.id))

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the job is done, and return the value that its task returned, decoded from JSON.

        *timeout*: the longest wait in seconds. With 0, ``result`` does not wait. With None, ``result`` waits without a
        limit. The job must have ``keep``.

        Errors:

        - ``JobFailed``: the job is buried. ``JobFailed`` has the reason and the traceback.
        - ``JobCancelled``: the job was cancelled.
        - ``OutcomeUnknown``: the outcome was not kept or has expired, or the job was deleted.
        - ``ResultOmitted``: the job is done, and its value is too large or not JSON.
        - ``ResultTimeout``: the job is not done yet.
        - ``Unsupported``: the backend keeps no outcomes.
        - ``BackendUnavailable``: the backend did not answer until the timeout. Other errors of the backend are raised
          immediately.
        """
        from .result_waiting import Done, look, wait  # imported late, because many programs wait for no results

        if timeout is not None:
            timeout = check_timeout(timeout)
        self._check_outcomes()
        began = time.monotonic()
        try:
            found = look(self._backend, self.queue, self.id)
        except BackendUnavailable:
            if timeout == 0:
                raise
        else:
            if isinstance(found, Done):
                return found.value
            if timeout == 0:
                raise ResultTimeout(self.queue, self.id, found.status, 0.0)
        left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
        future = wait(self._backend, self.queue, self.id, left, timeout)
        try:
            _wait_in_thread(future)
            return future.result()
        finally:
            future.cancel()
            del future  # without this line, the error and this frame would form a reference cycle

    async def aresult(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - as in result
        """``result`` without blocking the event loop. A cancelled ``aresult`` stops waiting, and the job continues."""
        import asyncio

        from .async_calls import running_loop
        from .result_waiting import wait

        if timeout is not None:
            timeout = check_timeout(timeout)
        self._check_outcomes()
        running_loop()
        return await asyncio.wrap_future(wait(self._backend, self.queue, self.id, timeout, timeout))

    def status(self) -> JobStatus:
        """Return the job's current status.

        - ``"queued"``, ``"delayed"``, ``"running"``: the job is not done yet.
        - ``"held"``: the job waits for other jobs of its flow.
        - ``"failed"``: the job is buried.
        - ``"done"``, ``"cancelled"``: the job is gone, and its outcome is kept.
        - ``"unknown"``: there is neither a job nor an outcome.
        """
        from .result_waiting import status_of

        return status_of(self._backend, self.queue, self.id)

    def outcome(self) -> JobOutcome | None:
        """Return the kept outcome of the job. None means that the job is not done yet, or that no outcome is kept.

        Raises ``Unsupported`` if the backend keeps no outcomes.
        """
        self._check_outcomes()
        if self.state() is not State.GONE:  # if the job exists, an outcome belongs to an earlier job with the same id
            return None
        (outcome,) = self._backend.outcomes(self.queue, [self.id])
        return None if outcome is None else decode_outcome(outcome)

    def progress(self) -> Progress | None:
        """Return the last progress that the job has set by ``JobContext.progress``. None means that the job has not set
        its progress, or is gone.

        Raises ``Unsupported`` if the backend keeps no memos.
        """
        if not self._backend.capabilities.memos:
            raise self._backend.unsupported("memos")
        try:
            return decode_memo(self._backend.peek(self.queue, self.id).memo).progress
        except JobNotFound:
            return None

    async def acancel(
        self, *, followers: Followers = "refuse", grace: float | dt.timedelta | None = None, reason: str | None = None
    ) -> CancelAnswer:
        """``cancel`` without blocking the event loop."""
        return await self._run(self.cancel, followers=followers, grace=grace, reason=reason)

    async def areschedule(self, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None) -> None:
        """``reschedule`` without blocking the event loop."""
        await self._run(self.reschedule, delay, at=at)

    async def astate(self) -> State:
        """``state`` without blocking the event loop."""
        return await self._run(self.state)

    async def apeek(self) -> JobInfo:
        """``peek`` without blocking the event loop."""
        return await self._run(self.peek)

    async def astatus(self) -> JobStatus:
        """``status`` without blocking the event loop."""
        return await self._run(self.status)

    async def aoutcome(self) -> JobOutcome | None:
        """``outcome`` without blocking the event loop."""
        return await self._run(self.outcome)

    async def aprogress(self) -> Progress | None:
        """``progress`` without blocking the event loop."""
        return await self._run(self.progress)

    @property
    def ref(self) -> str:
        """The queue and the id as one text, which needs no escaping in a URL. ``App.job`` makes a handle from a
        ``ref``."""
        return make_ref(self.queue, self.id)

    async def _run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        from .async_calls import run

        return await run(self._backend, function, *args, **kwargs)

    def _check_outcomes(self) -> None:
        if not self._backend.declared.outcomes:
            raise self._backend.unsupported("outcomes")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and (self.queue, self.id) == (other.queue, other.id)

    def __hash__(self) -> int:
        return hash((self.queue, self.id))

    def __repr__(self) -> str:
        return f"JobHandle(queue={self.queue!r}, id={self.id!r})"


class ExistingJobHandle(JobHandle):
    """The handle of a job that existed before the enqueue that returned the handle."""

    __slots__ = ()

    was_new = False


def handles_of(backend: Backend, queue: str, jobs: Sequence[NewJob], ids: Sequence[str]) -> list[JobHandle]:
    """Return the handles of enqueued jobs. *ids*: the ids that the enqueue returned."""
    return [_handle_of(backend, queue, job, job_id) for job, job_id in zip(jobs, ids, strict=True)]


def _handle_of(backend: Backend, queue: str, job: NewJob, job_id: str) -> JobHandle:
    is_new = job.terms is None or job.terms.unique is None or job_id == job.id
    return (JobHandle if is_new else ExistingJobHandle)(backend, queue, job_id)


def _wait_in_thread(future: Future[Any]) -> None:
    """Wait until *future* is done. In a job, raise ``SoftTimeout`` when the job's timeout is over."""
    from concurrent.futures import wait

    job = running.get(None)
    while not wait([future], None if job is None or job.deadline is None else _NOTICE_EVERY).done:
        timeout_notices.raise_if_pending()


class JobInfo(JobRecord, frozen=True, kw_only=True):
    """A job in the form in which it is stored. ``body`` has the body's bytes, and ``value`` has the decoded value."""

    @classmethod
    def of(cls, record: JobRecord) -> JobInfo:
        return cls(**{name: getattr(record, name) for name in record.__struct_fields__})

    @property
    def value(self) -> Any:
        """The decoded JSON of the body, or the body's bytes if the body is not JSON."""
        return decode_json(self.body)

    @property
    def task(self) -> str | None:
        """The name of the task, or None if the body is not a task's envelope."""
        return task_of(self.value)

    @property
    def failure(self) -> Failure | None:
        """The reason, the worker and the time of the bury. None means that no worker has buried the job, or that the
        backend lacks ``memos``."""
        return decode_failure(self.detail)


def task_of(value: Any) -> str | None:
    """Return the name of the task, or None if the decoded body is not a task's envelope."""
    name = value.get("task") if isinstance(value, dict) and "multiq" in value else None
    return name if isinstance(name, str) else None


class JobPage(msgspec.Struct, frozen=True):
    """A page of a listing. Pass the page's ``after`` to get the next page. The last page's ``after`` is None."""

    jobs: list[JobInfo]
    after: str | None

    def __iter__(self) -> Iterator[JobInfo]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Job:
    """A reserved job. Settle the job once, by ``ack``, ``release`` or ``bury``, or by leaving a ``with`` block.

    Leaving the ``with`` block acks the job. An exception in the ``with`` block releases the job with a backoff, and is
    raised again. The lease is extended only if you call ``touch``. Any thread may settle the job.
    """

    __slots__ = ("_consumer", "_settled", "_value", "lease")

    def __init__(self, lease: Lease, consumer: SharedConsumer) -> None:
        self.lease = lease
        self._consumer = consumer
        self._settled = False
        self._value: Any = _UNREAD

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def queue(self) -> str:
        return self.lease.queue

    @property
    def body(self) -> Any:
        """The decoded JSON of the body, or the body's bytes if the body is not JSON."""
        if self._value is _UNREAD:
            self._value = decode_json(self.lease.body)
        return self._value

    @property
    def raw(self) -> bytes:
        """The bytes of the body, unchanged."""
        return self.lease.body

    @property
    def priority(self) -> int:
        return self.lease.priority

    @property
    def attempt(self) -> int:
        """The number of the job's reservation. A job's first reservation has the number 1."""
        return self.lease.attempt

    @property
    def crashes(self) -> int:
        """The number of earlier reservations that ended without a verdict, for example by a crash."""
        return self.lease.crashes

    @property
    def age(self) -> float:
        """Seconds from enqueue to reserve, by the server's clock."""
        return self.lease.age

    def ack(self) -> None:
        """Delete the job, because it is done. Raises ``LeaseLost`` if the job's lease has ended. A job whose lease has
        ended runs again."""
        self._settle(Ack(self.lease))

    def release(
        self, delay: float | dt.timedelta = 0, *, priority: int | None = None, reason: str | None = None
    ) -> None:
        """Make the job ready again, now or in *delay* seconds.

        Raises ``LeaseLost``. For invalid arguments, ``release`` raises the same errors as ``Queue.enqueue``.
        """
        seconds = check_delay(delay)
        first = None if priority is None else check_priority(priority)
        self._consumer.backend.check_terms(priority=first, delay=seconds)
        self._settle(Release(self.lease, seconds, first, check_reason(reason)))

    def bury(self, reason: str | None = None) -> None:
        """Bury the job, which does not run until it is kicked. Raises ``LeaseLost``."""
        self._settle(Bury(self.lease, check_reason(reason)))

    def touch(self) -> None:
        """Extend the lease, so that it ends a full ttr from now. Raises ``LeaseLost``."""
        if self._settled:
            raise JobSettled(self.queue, self.id)
        (lost,) = self._consumer.settle([Touch(self.lease)])
        if lost is not None:
            raise lost

    async def aack(self) -> None:
        """``ack`` without blocking the event loop. A cancelled ``aack`` ends only when its call of the backend has
        ended."""
        await self._run_to_end(self.ack)

    async def arelease(
        self, delay: float | dt.timedelta = 0, *, priority: int | None = None, reason: str | None = None
    ) -> None:
        """``release`` without blocking the event loop. A cancelled ``arelease`` behaves like a cancelled ``aack``."""
        await self._run_to_end(self.release, delay, priority=priority, reason=reason)

    async def abury(self, reason: str | None = None) -> None:
        """``bury`` without blocking the event loop. A cancelled ``abury`` behaves like a cancelled ``aack``."""
        await self._run_to_end(self.bury, reason)

    async def atouch(self) -> None:
        """``touch`` without blocking the event loop. A cancelled ``atouch`` behaves like a cancelled ``aack``."""
        await self._run_to_end(self.touch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run_to_end(self.__exit__, kind, error, trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._settled:
            return
        if error is None:
            self.ack()
            return
        try:
            self.release(self._consumer.backend.shortened(DEFAULT(self.attempt)), reason=describe(error))
        except Exception as lost:  # noqa: BLE001 - the error of the block is raised instead
            error.add_note(f"and the job could not be released: {lost}")

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    async def _run_to_end(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        from .async_calls import run_to_end

        return await run_to_end(self._consumer.backend, function, *args, **kwargs)

    def _settle(self, verdict: Verdict) -> None:
        if self._settled:
            raise JobSettled(self.queue, self.id)
        (lost,) = self._consumer.settle([verdict])  # if this call raises an error, the caller may settle the job again
        self._settled = True
        if lost is not None:
            raise lost


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a worker runs. ``multiq.current_job()`` returns a ``JobContext``. The attribute ``job`` of an event
    is a ``JobContext``."""

    task: str | None
    """The task's name, or None if the body is not a valid envelope."""
    lease: Lease
    envelope: Envelope | None
    deadline: float | None = None
    """The end of the job's ``timeout``, in ``time.monotonic()`` seconds. If the job has no ``timeout``, ``deadline`` is
    None."""
    notice: Notice | None = None
    """Whether ``SoftTimeout`` was raised in the job. If the job has no ``timeout``, ``notice`` is None."""
    memos: Memos | None = None
    """Stores the values of ``progress`` and ``step``. None means that the job does not run."""
    kept: dict[str, Any] | None = None
    """The value of ``state``, or None if no code has read ``state`` yet."""

    @property
    def state(self) -> dict[str, Any]:
        """A dict that middleware and the task share during one run. The dict is not stored."""
        if self.kept is None:
            msgspec.structs.force_setattr(self, "kept", {})
        assert self.kept is not None  # noqa: S101 - set above
        return self.kept

    def progress(self, fraction: float, message: str = "") -> None:
        """Set the job's progress, which ``JobHandle.progress`` returns.

        *fraction*: a number from 0 to 1. *message*: up to 500 characters.

        The worker stores the progress later, at most once a second, so a call of ``progress`` makes no round trip.
        Raises ``OptionInvalid``. Raises ``Unsupported`` if the backend keeps no memos, and ``LeaseLost`` if the lease
        has ended.
        """
        self._memo().set_progress(check_progress(fraction, message))

    def step(self, name: str, function: Callable[[], Any]) -> Any:
        """Call *function*, store its value with the job, and return the value decoded from JSON.

        If an earlier attempt of the job has stored a value for the step *name*, the stored value is returned. If a
        stored value is returned, *function* is not called. One call of the backend stores the value and renews the
        lease. If the worker dies before the value is stored, a later attempt calls *function* again.

        If the task does not catch one of the following errors, the attempt fails:

        - ``LeaseLost``: the lease has ended, so the job runs again. The value is not stored.
        - ``PayloadInvalid``: the value is not JSON. ``PayloadTooLarge``: the job's memo would be too large.
        - ``BackendError``: the backend did not answer before the lease ended.
        - ``Unsupported``: the backend keeps no memos. The function was not called.
        """
        return run_step(self._memo(), name, function)

    async def astep(self, name: str, function: Callable[[], Awaitable[Any]]) -> Any:
        """``step`` for a coroutine function, without blocking the event loop."""
        return await arun_step(self._memo(), name, function)

    @property
    def is_cancelled(self) -> bool:
        """Whether ``JobHandle.cancel`` was called for the running job, and the worker has read the request."""
        return self.memos is not None and self.memos.cancel_of(self.lease) is not None

    def check_cancelled(self) -> None:
        """Raise ``JobCancelled`` if the running job was cancelled. Makes no call of the backend."""
        cancel = None if self.memos is None else self.memos.cancel_of(self.lease)
        if cancel is not None:
            error = cancel.error()
            pending.pop(threading.get_ident(), None)  # after ``error``, so that no notice of the same error is added
            raise error

    def check(self) -> None:
        """Raise ``SoftTimeout`` if the job has run longer than its ``timeout``. Raise ``JobCancelled`` if the job was
        cancelled.

        A plain function on a thread cannot be interrupted. A plain function on a thread may call ``check`` between its
        steps.
        """
        self.check_cancelled()
        if self.deadline is not None and time.monotonic() >= self.deadline:
            from .retry import SoftTimeout

            if self.notice is not None:
                self.notice.is_notified = True  # so that SoftTimeout is not raised again during the cleanup
            pending.pop(threading.get_ident(), None)
            raise SoftTimeout

    def _memo(self) -> RunningMemo:
        if self.memos is None:
            raise MultiqError(f"job {self.id} of queue {self.queue!r} does not run: progress and steps belong to a run")
        return self.memos.of(self.lease)

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def queue(self) -> str:
        return self.lease.queue

    @property
    def attempt(self) -> int:
        return self.lease.attempt

    @property
    def headers(self) -> dict[str, str]:
        return self.envelope.headers if self.envelope is not None else {}


HEADER_DELAY = "multiq-delay"
"""The header with the seconds from the enqueue of a schedule's job to its due time."""


def first_wait(job: JobContext) -> float | None:
    """Return the seconds from a job's enqueue to its first reservation, by the server's clock.

    For a schedule's job, the seconds count from its due time. None means that the time at which the job became due is
    unknown. The time is unknown if the job was tried or kicked before, or waited for other jobs of its flow.
    """
    if job.attempt > 1 or job.lease.kicks or (job.envelope is not None and job.envelope.flow is not None):
        return None
    delay = job.headers.get(HEADER_DELAY)
    if delay is None:
        return job.lease.age
    try:
        wait = max(0.0, job.lease.age - float(delay))
    except ValueError:  # another program has written the header
        return None
    return wait if math.isfinite(wait) else None


running: ContextVar[JobContext] = ContextVar("multiq_running_job")


class JobTasks(set["asyncio.Task[Any]"]):
    """The asyncio tasks of one job on the worker's shared event loop. The tasks end when the job ends."""

    is_over = False
    """Whether the job has ended."""


job_tasks: ContextVar[JobTasks | None] = ContextVar("multiq_job_tasks", default=None)
"""The asyncio tasks of this context's job. None means that no job runs, or that the job does not run on an event
loop."""


def current_job() -> JobContext:
    """Return the job that runs in this thread or coroutine. Raises ``LookupError`` outside of a job."""
    try:
        return running.get()
    except LookupError:
        raise LookupError("no multiq job runs here: current_job() works inside a task that a worker runs") from None


def describe(error: BaseException) -> str:
    """Return the text ``Kind: message`` of an error, cut short. Never raises an error, even if the error's ``str``
    raises an error."""
    kind = "an error"
    try:
        kind = type.__getattribute__(type(error), "__name__")  # a user's metaclass may override __name__
        message = "".join(str(error))  # join makes a plain str from an instance of a subclass
        return check_reason(f"{kind}: {message}" if message else kind) or kind
    except BaseException:  # noqa: BLE001 - a broken __str__ must not end the worker
        return f"{kind}: (its message could not be made)"


_UNREAD = object()
