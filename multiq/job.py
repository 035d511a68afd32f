"""The public classes of jobs: the handle of an enqueued job, a reserved job, a listed job, the running job."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec

from .backend import Ack, Bury, JobRecord, Lease, Release, State, Touch
from .envelope import decode_json
from .errors import JobNotFound, JobSettled
from .retry import DEFAULT
from .timeout_notices import Notice, pending
from .validation import check_delay, check_priority, check_reason

if TYPE_CHECKING:
    import asyncio
    import datetime as dt
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from .backend import Backend, Verdict
    from .envelope import Envelope
    from .queue import SharedConsumer


class JobHandle:
    """An enqueued job. Its methods inspect the job, cancel it and change its due time."""

    __slots__ = ("_backend", "id", "queue")

    def __init__(self, backend: Backend, queue: str, job_id: str) -> None:
        self._backend = backend
        self.queue = queue
        self.id = job_id

    def cancel(self) -> None:
        """Delete the job. Raises ``JobReserved`` if the job is running, ``JobNotFound`` if the job is gone."""
        self._backend.delete(self.queue, self.id)

    def reschedule(self, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None) -> None:
        """Make the job due in *delay* seconds or at the time *at*, as if it were enqueued now.

        On a backend without ``stable_ids`` this handle gets a new ``id``. Raises ``JobReserved``, ``JobNotFound``.
        """
        seconds = check_delay(delay, at)
        self._backend.check_terms(delay=seconds)
        self.id = self._backend.reschedule(self.queue, self.id, seconds)

    def state(self) -> State:
        """Return the job's state now. ``State.GONE``: the job was acked or deleted."""
        try:
            return self._backend.peek(self.queue, self.id).state
        except JobNotFound:
            return State.GONE

    def peek(self) -> JobInfo:
        """Return the job as the backend stores it. Raises ``JobNotFound``."""
        return JobInfo.of(self._backend.peek(self.queue, self.id))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and (self.queue, self.id) == (other.queue, other.id)

    def __hash__(self) -> int:
        return hash((self.queue, self.id))

    def __repr__(self) -> str:
        return f"JobHandle(queue={self.queue!r}, id={self.id!r})"


class JobInfo(JobRecord, frozen=True, kw_only=True):
    """A job as it is stored. ``body`` has the bytes, and ``value`` has the decoded value."""

    @classmethod
    def of(cls, record: JobRecord) -> JobInfo:
        return cls(**{name: getattr(record, name) for name in record.__struct_fields__})

    @property
    def value(self) -> Any:
        """The decoded JSON of the body. If the body is not JSON: its bytes."""
        return decode_json(self.body)

    @property
    def task(self) -> str | None:
        """The name of the task. None: the body is not a task's envelope."""
        return task_of(self.value)


def task_of(value: Any) -> str | None:
    """Return the name of the task. None: the decoded body is not a task's envelope."""
    name = value.get("task") if isinstance(value, dict) and "multiq" in value else None
    return name if isinstance(name, str) else None


class JobPage(msgspec.Struct, frozen=True):
    """A page of a listing. Pass its ``after`` to get the next page. None: this is the last page."""

    jobs: list[JobInfo]
    after: str | None

    def __iter__(self) -> Iterator[JobInfo]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Job:
    """A reserved job. Settle the job once, by ``ack``, ``release`` or ``bury``, or by leaving a ``with`` block.

    Leaving the block acks the job. An exception releases the job with a backoff, and is raised again. The lease is
    extended only if you call ``touch``. Any thread may settle the job.
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
        """The decoded JSON of the body. If the body is not JSON: its bytes."""
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
        """The number of this reservation. The first is 1."""
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
        """Delete the job, because it is done. Raises ``LeaseLost`` if its lease has ended. Then the job runs again."""
        self._settle(Ack(self.lease))

    def release(
        self, delay: float | dt.timedelta = 0, *, priority: int | None = None, reason: str | None = None
    ) -> None:
        """Make the job ready again, now or in *delay* seconds.

        Raises ``LeaseLost``, and the errors that ``Queue.enqueue`` raises for such arguments.
        """
        seconds = check_delay(delay)
        first = None if priority is None else check_priority(priority)
        self._consumer.backend.check_terms(priority=first, delay=seconds)
        self._settle(Release(self.lease, seconds, first, check_reason(reason)))

    def bury(self, reason: str | None = None) -> None:
        """Set the job aside until it is kicked. Raises ``LeaseLost``."""
        self._settle(Bury(self.lease, check_reason(reason)))

    def touch(self) -> None:
        """Extend the lease to the full ttr from now. Raises ``LeaseLost``."""
        if self._settled:
            raise JobSettled(self.queue, self.id)
        (lost,) = self._consumer.settle([Touch(self.lease)])
        if lost is not None:
            raise lost

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
        except Exception as lost:  # noqa: BLE001 - the block's own error matters more
            error.add_note(f"and the job could not be released: {lost}")

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    def _settle(self, verdict: Verdict) -> None:
        if self._settled:
            raise JobSettled(self.queue, self.id)
        (lost,) = self._consumer.settle([verdict])  # if this raises, the caller may repeat the verdict
        self._settled = True
        if lost is not None:
            raise lost


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a worker runs. ``multiq.current_job()`` returns it, and events have it as ``job``."""

    task: str | None
    """The task's name. None: the body is not a valid envelope."""
    lease: Lease
    envelope: Envelope | None
    deadline: float | None = None
    """The end of the job's ``timeout``, in ``time.monotonic()`` seconds. None: the job has no ``timeout``."""
    notice: Notice | None = None
    """Whether ``SoftTimeout`` was raised in the job. None: the job has no ``timeout``."""

    def check(self) -> None:
        """Raise ``SoftTimeout`` if the job has run longer than its ``timeout``.

        A plain function on a thread cannot be interrupted. Such a function may call ``check`` between its steps.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            from .retry import SoftTimeout

            if self.notice is not None:
                self.notice.is_notified = True  # so that SoftTimeout is not raised again during the cleanup
            pending.discard(threading.get_ident())
            raise SoftTimeout

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


running: ContextVar[JobContext] = ContextVar("multiq_running_job")


class JobTasks(set["asyncio.Task[Any]"]):
    """One job's asyncio tasks on the event loop that all jobs share. The tasks end with the job."""

    is_over = False
    """Whether the job has ended."""


job_tasks: ContextVar[JobTasks | None] = ContextVar("multiq_job_tasks", default=None)
"""The asyncio tasks of this context's job. None: there is no job, or the job does not run on an event loop."""


def current_job() -> JobContext:
    """Return the job that runs in this thread or coroutine. Raises ``LookupError`` outside of a job."""
    try:
        return running.get()
    except LookupError:
        raise LookupError("no multiq job runs here: current_job() works inside a task that a worker runs") from None


def describe(error: BaseException) -> str:
    """Return ``Kind: message`` of an error, cut short. Never raises, even if the error's ``str`` does."""
    kind = "an error"
    try:
        kind = type.__getattribute__(type(error), "__name__")  # a metaclass of the user's may override __name__
        message = "".join(str(error))  # converts an instance of a subclass of str
        return check_reason(f"{kind}: {message}" if message else kind) or kind
    except BaseException:  # noqa: BLE001 - a broken __str__ must not end the worker
        return f"{kind}: (its message could not be made)"


_UNREAD = object()
