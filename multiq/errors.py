"""The errors that multiq raises. ``MultiqError`` is the base class of all errors of multiq.

If an exception of a client library caused an error, the exception is the error's ``__cause__``. Errors about a wrong
argument are also subclasses of ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

import functools
import queue as _stdlib_queue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from .backend import NewJob


_SHOWN = 3  # the largest number of ids that a message lists


class MultiqError(Exception):
    """The base class of every error that multiq raises."""


# --- invalid arguments -----------------------------------------------------------------------------------


class NameInvalid(MultiqError, ValueError):
    """The name of a queue or a task breaks the rule for names."""


class OptionInvalid(MultiqError, ValueError):
    """An option of a job or a call is outside its range, for example a delay, a priority or a ttr."""


class ConnectionElsewhere(OptionInvalid):
    """The ``connection=`` of the call is open on a file or server that differs from the URL. The call has changed
    nothing on the connection's file or server."""


class UrlInvalid(MultiqError, ValueError):
    """A backend's URL cannot be used. The message never contains the URL's password."""


class SettingsInvalid(MultiqError, ValueError):
    """The configuration is wrong. ``problems`` lists all mistakes, with the source and the key of each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("the configuration cannot be used:\n" + "\n".join(f"  - {p}" for p in self.problems))


class ArgumentsInvalid(MultiqError, TypeError):
    """A task was enqueued with arguments that its function does not take."""


class FlowInvalid(MultiqError, ValueError):
    """A chain, group, batch or flow cannot be enqueued, because it has a mistake."""


class FlowNotFound(MultiqError, LookupError):
    """There is no flow with this id. The flow was never enqueued, or has ended and is no longer kept."""


class FlowFinished(MultiqError):
    """The batch is finished or cancelled, so no more jobs can be added."""


class ScheduleInvalid(MultiqError, ValueError):
    """A schedule's definition is not valid, for example because of its cron expression or its time zone."""


class ScheduleNotFound(MultiqError, LookupError):
    """There is no schedule of this name."""


class ScheduleExists(MultiqError, ValueError):
    """A schedule of this name exists already."""


class PayloadInvalid(MultiqError, ValueError):
    """A value is not JSON, or a stored body is not a valid envelope. The message has the path of a wrong value."""


class PayloadTooLarge(PayloadInvalid):
    """A body is larger than the backend or ``max_body`` allows.

    ``size_bytes`` is the size of the body. ``limit_bytes`` is the largest allowed size.
    """

    def __init__(self, size_bytes: int, limit_bytes: int, advice: str) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"a body of {size_bytes:,} bytes is over the limit of {limit_bytes:,} bytes: {advice}")


class EnqueueRefused(MultiqError):
    """Middleware has refused an enqueue. Nothing was sent. Middleware raises ``EnqueueRefused``, with the reason."""


class TaskNotFound(MultiqError, LookupError):
    """No task of this name is registered with the app."""


class TaskExists(MultiqError, ValueError):
    """Two functions have the same task name."""


class TaskNotIncluded(MultiqError, LookupError):
    """A task of a registry is not in any app, or is in several apps without the call naming the app."""


class IncludeInvalid(MultiqError, ImportError):
    """A module of the setting ``include`` cannot be imported."""


# --- jobs ---------------------------------------------------------------------------------------------------


class JobError(MultiqError):
    """An error about one job. ``queue`` and ``job_id`` identify the job."""

    sentence = "job {job_id} of queue {queue!r} failed"

    def __init__(self, queue: str, job_id: str) -> None:
        self.queue = queue
        self.job_id = job_id
        super().__init__(self.sentence.format(queue=queue, job_id=job_id))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id)


class JobNotFound(JobError):
    """The queue does not have the job. The job is done, was deleted, or was never enqueued."""

    sentence = "queue {queue!r} has no job {job_id}: it is done, was deleted, or was never there"


class JobEnded(JobNotFound):
    """The job cannot be cancelled, because it has ended. ``status`` is ``done`` or ``cancelled``, from the job's
    outcome."""

    def __init__(self, queue: str, job_id: str, status: str) -> None:
        self.queue = queue
        self.job_id = job_id
        self.status = status
        MultiqError.__init__(self, f"job {job_id} of queue {queue!r} has ended: it is {status}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id, self.status)


class JobReserved(JobError):
    """A consumer has reserved the job, so the job can be neither deleted nor rescheduled."""

    sentence = "job {job_id} of queue {queue!r} is being run right now: wait until it is settled, then try again"


class JobHeld(JobError):
    """The job waits for other jobs of its flow, so it cannot be rescheduled."""

    sentence = (
        "job {job_id} of queue {queue!r} waits for other jobs: kick it to run it now, or delete it and enqueue it again"
    )


class JobExists(JobError):
    """Nothing was enqueued, because the job ``job_id`` has the same unique key.

    The job ``job_id`` may be gone if it holds the key for a fixed time.
    """

    sentence = (
        "nothing was enqueued: job {job_id} of queue {queue!r} has the same unique key (on_conflict='keep' returns "
        "its handle instead)"
    )


class UniqueTaken(JobError):
    """The job can be neither kicked nor rescheduled, because another job has taken its unique key."""

    sentence = (
        "another job has taken the unique key of job {job_id} of queue {queue!r}: wait until that job is done, or "
        "delete one of the two"
    )


class JobNotFailed(JobError):
    """The job is not buried, so it is not a failed job."""

    sentence = "job {job_id} of queue {queue!r} has not failed: it is not buried"


class JobAwaited(JobError):
    """Other jobs of a flow wait for the job, so the delete must say what happens to the waiting jobs. See
    ``JobHandle.cancel``."""

    sentence = (
        "other jobs wait for job {job_id} of queue {queue!r}: delete it with followers='go' to run the waiting jobs, "
        "or with followers='stop' to cancel them"
    )


class LeaseLost(JobError):
    """The lease ended before the job was settled. The job runs again, so discard this run's result."""

    sentence = "the lease of job {job_id} of queue {queue!r} has ended: the job is, or will be, run again"


class JobSettled(JobError):
    """This program has already acked, released or buried this reservation of the job."""

    sentence = "job {job_id} of queue {queue!r} was settled already: a reservation takes one verdict"


class JobFailed(JobError):
    """``JobHandle.result`` was called for a job that is buried. A buried job runs again if it is kicked.

    ``reason`` is the reason of the bury, or None if no reason is stored. ``traceback`` is the stored traceback, or None
    if no traceback is stored.

    ``multiq.events.JobFailed`` is another class: the event that one attempt of a job has failed.
    """

    def __init__(self, queue: str, job_id: str, reason: str | None = None, traceback: str | None = None) -> None:
        self.queue = queue
        self.job_id = job_id
        self.reason = reason
        self.traceback = traceback
        MultiqError.__init__(self, f"job {job_id} of queue {queue!r} failed: {reason or 'no reason is stored'}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id, self.reason, self.traceback)


class JobCancelled(JobError):
    """The job was cancelled. ``reason`` says why the job was cancelled, or is None if no reason is stored.

    ``JobHandle.result`` raises ``JobCancelled``. ``JobCancelled`` is also raised in the code of a running task that is
    cancelled. A cancelled task may clean up, and should then end.
    """

    def __init__(self, queue: str, job_id: str, reason: str | None = None) -> None:
        self.queue = queue
        self.job_id = job_id
        self.reason = reason
        why = f": {reason}" if reason else ""
        MultiqError.__init__(self, f"job {job_id} of queue {queue!r} was cancelled{why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id, self.reason)


class OutcomeUnknown(JobError):
    """The store has neither the job nor its outcome, or the job's outcome will not be kept.

    ``reason`` says why the outcome is unknown.
    """

    def __init__(self, queue: str, job_id: str, reason: str) -> None:
        self.queue = queue
        self.job_id = job_id
        self.reason = reason
        MultiqError.__init__(self, f"the outcome of job {job_id} of queue {queue!r} is unknown: {reason}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id, self.reason)


class ResultOmitted(OutcomeUnknown):
    """The job is done, and its outcome is kept without the value. ``reason`` says whether the value was too large or
    not JSON."""

    def __init__(self, queue: str, job_id: str, reason: str) -> None:
        self.queue = queue
        self.job_id = job_id
        self.reason = reason
        MultiqError.__init__(self, f"job {job_id} of queue {queue!r} is done, and its outcome has no value: {reason}")


class ResultTimeout(JobError, TimeoutError):
    """The job was not done within the timeout of the wait. ``status`` is the job's last known status."""

    def __init__(self, queue: str, job_id: str, status: str, timeout: float) -> None:
        self.queue = queue
        self.job_id = job_id
        self.status = status
        self.timeout = timeout
        MultiqError.__init__(self, f"job {job_id} of queue {queue!r} is {status}, and not done within {timeout:g} s")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.queue, self.job_id, self.status, self.timeout)


class QueueEmpty(MultiqError, _stdlib_queue.Empty):
    """No job was due within the timeout."""


# --- the backend -------------------------------------------------------------------------------------------------


class BackendError(MultiqError):
    """The backend refused the call, or failed."""

    is_partial = False
    """Whether other servers of the same backend have answered. If ``is_partial`` is True, a call that does not need the
    failed server may succeed."""

    settled: Mapping[str, LeaseLost | None] = {}
    """The answers to the verdicts that the failed call has settled, by the tokens of the leases.

    A verdict with an answer need not be repeated. The mapping is empty if ``is_partial`` is False.
    """

    may_be_done = False
    """Whether the server may have carried out the call, because the call was sent and the reply was lost.

    Drivers set ``may_be_done`` for their own use. An enqueue whose reply was lost raises ``EnqueueUncertain``.
    """

    is_of_primary = False
    """Whether only the server of the jobs has failed. Only a backend with a store beside it (``multiq.backend.paired``)
    sets ``is_of_primary``."""


class BackendUnavailable(BackendError):
    """The backend cannot be reached, or the connection ended during the call.

    A retry may help. An enqueue that raises this error has stored nothing.
    """


class BackendTimeout(BackendUnavailable):
    """The backend did not answer, or stayed locked, until the call's deadline.

    A retry may help. An enqueue that raises this error has stored nothing. If it is unknown whether the jobs were
    stored, the enqueue raises ``EnqueueUncertain`` instead.
    """


class LockedByCaller(BackendError):
    """The caller's own open transaction on another connection locks the store.

    Pass the locking connection as ``connection=``. A retry helps only after the caller has committed or rolled back.
    """


class BackendFull(BackendError):
    """The backend's disk, memory or quota is full. The call stored nothing."""


class BackendCorrupt(BackendError):
    """The data in the backend is damaged, is not multiq's, or was written by a newer multiq."""


class SchemaNotReady(BackendError):
    """The store's tables are missing or too old for this version of multiq. The message has the command that creates or
    upgrades the tables."""


class DriverInvalid(MultiqError, TypeError):
    """A driver's class declares capabilities that contradict its methods."""


class BackendNotInstalled(MultiqError, LookupError):
    """No driver of this name is installed, or its client library is missing."""


class ExtraNotInstalled(MultiqError, ImportError):
    """A library that one of multiq's extras installs is missing."""


class EnqueuePartial(BackendError):
    """Some jobs of a batch were stored, and the batch's other jobs were refused. A backend with ``atomic_batches``
    stores a batch of up to 1,000 jobs in one step. A backend with ``atomic_batches`` raises ``EnqueuePartial`` only for
    a larger batch.

    ``accepted`` has the id of each stored job, by the job's position in the batch.
    """

    def __init__(self, accepted: dict[int, str], total: int, why: str) -> None:
        self.accepted = accepted
        self.total = total
        self.why = why
        super().__init__(f"{len(accepted)} of {total} jobs were accepted, the rest was not: {why}")


class EnqueueUncertain(BackendError):
    """Jobs were sent, and the reply was lost. It is unknown whether ``jobs`` are stored.

    ``accepted`` has the id of each job that certainly is stored, by the job's position in the batch. ``unsent`` has the
    jobs that certainly are not stored, because they were not sent or were refused. Each job of the batch is in exactly
    one of ``jobs``, ``accepted`` and ``unsent``.

    The ``__cause__`` is the error that ended the call, for example a ``BackendTimeout``.
    """

    def __init__(
        self,
        queue: str,
        jobs: Sequence[NewJob],
        why: str,
        *,
        accepted: Mapping[int, str] | None = None,
        unsent: Sequence[NewJob] = (),
        client_ids: bool = False,
    ) -> None:
        """Construct the error in a driver.

        - *queue*, *jobs*: the queue of the enqueue, and the jobs that were sent without a reply.
        - *why*: what happened, for the message.
        - *accepted*: the ids of the jobs that are certainly stored, by their position in the batch. Default: none.
        - *unsent*: the jobs that are certainly not stored. Default: none.
        - *client_ids*: whether the jobs have the caller's ids. Sending jobs with the caller's ids again adds no second
          job.
        """
        self.queue = queue
        self.jobs = tuple(jobs)
        self.why = why
        self.accepted = dict(accepted or {})
        self.unsent = tuple(unsent)
        self.client_ids = client_ids
        self._again: Callable[[], Any] | None = None
        self._run: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
        others = f"; {len(self.accepted)} others are there" if self.accepted else ""
        others += (
            f"; {len(self.unsent)} others were not sent or were refused: they are not there" if self.unsent else ""
        )
        self.what = (
            f"{len(self.jobs)} job(s) for queue {queue!r} were sent, but the reply was lost ({why}): they may or may "
            f"not be there{others}"
        )
        """The error's message without the advice at the end."""
        super().__init__(f"{self.what}; {self._advice()}")

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of ``jobs``. If the backend chooses the ids, the tuple is empty, because the ids are unknown."""
        return tuple(job.id for job in self.jobs) if self.client_ids else ()

    def repeat(self) -> Any:
        """Repeat the enqueue for the jobs that are perhaps not stored. The result is the same as the result of a
        successful enqueue.

        The jobs keep their ids and their due times. If the queue still has a job, the job is not added a second time. A
        job that was acked before the repeat is added again, as a new job. ``repeat`` may be called several times.

        Raises the errors of an enqueue, including ``EnqueueUncertain``. Raises ``Unsupported`` if the backend chooses
        the ids.
        """
        if self._again is None:
            raise BackendError(
                "repeat() needs an error from the enqueue of a task or a queue, got one from the backend's enqueue: "
                "if the backend takes the caller's ids, pass error.jobs to the backend's enqueue again"
            )
        return self._again()

    async def arepeat(self) -> Any:
        """``repeat`` without blocking the event loop."""
        if self._run is None:
            return self.repeat()  # raises an error
        return await self._run(self.repeat)

    @property
    def repeated(self) -> Callable[[], Any] | None:
        """The function that ``repeat`` calls, or None."""
        return self._again

    def repeat_by(
        self, again: Callable[[], Any] | None, run: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None
    ) -> None:
        """Set the function that ``repeat`` calls. ``arepeat`` uses *run* to call this function on a thread.

        If *run* is None, ``arepeat`` continues to use the *run* of an earlier call.
        """
        self._again = again
        if run is not None:
            self._run = run

    def _advice(self) -> str:
        if not self.client_ids:
            return "enqueue them again only if running one twice does no harm"
        shown = ", ".join(self.ids[:_SHOWN]) + (f" and {len(self.ids) - _SHOWN} more" if self.ids[_SHOWN:] else "")
        return f"error.repeat() sends them again under their ids ({shown}), and adds none that is there already"

    def __reduce__(self) -> tuple[Callable[..., EnqueueUncertain], tuple[Any, ...]]:
        kind = functools.partial(type(self), accepted=self.accepted, unsent=self.unsent, client_ids=self.client_ids)
        return kind, (self.queue, self.jobs, self.why)


class Unsupported(MultiqError, NotImplementedError):
    """The backend lacks ``capability``. ``others`` names the backends that have ``capability``."""

    def __init__(self, capability: str, backend: str, reason: str, others: Sequence[str] = ()) -> None:
        self.capability = capability
        self.backend = backend
        self.reason = reason
        self.others = tuple(others)
        can = f"; these can: {', '.join(self.others)}" if self.others else ""
        super().__init__(f"the {backend} backend does not support {capability} ({reason}){can}")
