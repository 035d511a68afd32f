"""A job, as its users see it: the handle of an enqueued job, a reserved job, a listed job, the running job."""

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
    """An enqueued job: its queue, its id, and what can be done with the job from outside."""

    __slots__ = ("_backend", "id", "queue")

    def __init__(self, backend: Backend, queue: str, job_id: str) -> None:
        self._backend = backend
        self.queue = queue
        self.id = job_id

    def cancel(self) -> None:
        """Delete the job: it never starts. Raises ``JobReserved`` if it runs already, ``JobNotFound`` if it is gone."""
        self._backend.delete(self.queue, self.id)

    def reschedule(self, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None) -> None:
        """Make the job due in *delay* seconds or at the time *at*, as if it were enqueued now.

        Raises ``JobReserved``, ``JobNotFound``. Where the backend has no stable ids, this handle gets a new ``id``.
        """
        seconds = check_delay(delay, at)
        self._backend.check_terms(delay=seconds)
        self.id = self._backend.reschedule(self.queue, self.id, seconds)

    def state(self) -> State:
        """The job's state now; ``State.GONE`` once it was acked or deleted."""
        try:
            return self._backend.peek(self.queue, self.id).state
        except JobNotFound:
            return State.GONE

    def peek(self) -> JobInfo:
        """The job as the backend stores it. Raises ``JobNotFound``."""
        return JobInfo.of(self._backend.peek(self.queue, self.id))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobHandle) and (self.queue, self.id) == (other.queue, other.id)

    def __hash__(self) -> int:
        return hash((self.queue, self.id))

    def __repr__(self) -> str:
        return f"JobHandle(queue={self.queue!r}, id={self.id!r})"


class JobInfo(JobRecord, frozen=True, kw_only=True):
    """A job as it is stored. ``body`` holds the bytes, ``value`` the decoded value."""

    @classmethod
    def of(cls, record: JobRecord) -> JobInfo:
        return cls(**{name: getattr(record, name) for name in record.__struct_fields__})

    @property
    def value(self) -> Any:
        """The decoded JSON of the body, or the bytes themselves if they are not JSON."""
        return decode_json(self.body)

    @property
    def task(self) -> str | None:
        """The name of the task, if the body is a task's envelope."""
        return task_of(self.value)


def task_of(value: Any) -> str | None:
    """The name of the task, if a decoded body is a task's envelope."""
    name = value.get("task") if isinstance(value, dict) and "multiq" in value else None
    return name if isinstance(name, str) else None


class JobPage(msgspec.Struct, frozen=True):
    """A page of a listing. Iterate over it, and pass its ``after`` to get the next page. None: this is the last."""

    jobs: list[JobInfo]
    after: str | None

    def __iter__(self) -> Iterator[JobInfo]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)


class Job:
    """A reserved job. Settle it once: with ``ack``, ``release`` or ``bury``, or by leaving a ``with`` block.

    Leaving the block acks the job; an exception releases the job with a backoff, and is raised again. The lease is
    extended only if you call ``touch``. Any thread may settle the job, not only the one that reserved it.
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
        """The decoded JSON of the body; the bytes themselves if they are not JSON."""
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
        """The 1-based number of this reservation."""
        return self.lease.attempt

    @property
    def crashes(self) -> int:
        """How many earlier reservations ended without a verdict."""
        return self.lease.crashes

    @property
    def age(self) -> float:
        """Seconds from enqueue to reserve, by the server's clock."""
        return self.lease.age

    def ack(self) -> None:
        """The job is done: delete it. Raises ``LeaseLost`` if its lease has ended: the job will run again."""
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
        """Extend the lease: it lasts the full ttr from now. Raises ``LeaseLost``."""
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
        except Exception as lost:  # noqa: BLE001 - the block's own error matters more, and carries this one along
            error.add_note(f"and the job could not be released: {lost}")

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    def _settle(self, verdict: Verdict) -> None:
        if self._settled:
            raise JobSettled(self.queue, self.id)
        (lost,) = self._consumer.settle([verdict])  # if it raises, the job is not settled: repeat the verdict
        self._settled = True
        if lost is not None:
            raise lost


class JobContext(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a worker runs, as ``multiq.current_job()`` returns it to a task, and as events carry it."""

    task: str | None
    """None if the body could not be understood."""
    lease: Lease
    envelope: Envelope | None
    deadline: float | None = None
    """When the job's ``timeout`` is over, on the clock of ``time.monotonic()``. None: the job has no ``timeout``."""
    notice: Notice | None = None
    """Whether ``SoftTimeout`` was raised in the job. None: the job has no ``timeout``."""

    def check(self) -> None:
        """Raise ``SoftTimeout`` if the job has run longer than its ``timeout``.

        For long work in plain functions, which cannot be interrupted on a thread: call ``check`` between two steps.
        """
        if self.deadline is not None and time.monotonic() >= self.deadline:
            from .retry import SoftTimeout

            if self.notice is not None:
                self.notice.is_notified = True  # so that it is not raised again during the cleanup
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
    """One job's asyncio tasks on the event loop that all jobs share. These tasks end with the job."""

    is_over = False
    """Whether the job has ended."""


job_tasks: ContextVar[JobTasks | None] = ContextVar("multiq_job_tasks", default=None)
"""The asyncio tasks of the job of this context. None: no job, or one that does not run on an event loop."""


def current_job() -> JobContext:
    """The job that runs in this thread or coroutine. Raises ``LookupError`` outside of a job."""
    try:
        return running.get()
    except LookupError:
        raise LookupError("no multiq job runs here: current_job() works inside a task that a worker runs") from None


def describe(error: BaseException) -> str:
    """``Kind: message`` of an error, cut short. Works even if the ``str`` of the error fails."""
    kind = "an error"
    try:
        kind = type.__getattribute__(type(error), "__name__")  # past a metaclass of the user's
        message = "".join(str(error))  # a plain string, also where it is of a subclass
        return check_reason(f"{kind}: {message}" if message else kind) or kind
    except BaseException:  # noqa: BLE001 - user code: a broken __str__ must not take the worker along
        return f"{kind}: (its message could not be made)"


_UNREAD = object()
