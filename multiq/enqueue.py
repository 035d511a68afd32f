"""Sends every enqueue to the backend, and repeats an enqueue after an error.

- No second job: every attempt sends the same ids, if the backend takes ids of the caller.
- Uncertain jobs are reported: a job whose reply was lost stays uncertain until a reply confirms the job. Errors of
  later attempts do not make the job certain.
- The same due time: a later attempt subtracts the time since the first attempt from the delay.
"""

from __future__ import annotations

import time
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from . import timeout_notices
from .backend import PRIORITY_DEFAULT, NewJob
from .driverkit.call_retry import Attempts, Failure
from .errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
)
from .ids import check_new_ids, new_id, new_ids
from .job import ExistingJobHandle, JobHandle
from .outbox import store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .backend import Backend

#: seconds for which an enqueue is repeated after a dropped connection. The ids prevent a second job.
PATIENCE = 1.0

_Ids = TypeVar("_Ids", str, list[str])


def put(
    backend: Backend,
    queue: str,
    bodies: Sequence[bytes],
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    ids: Iterable[str] | None = None,
) -> list[JobHandle]:
    """Enqueue checked bodies with checked options.

    - *priority*, *delay*, *ttr*, *connection*: the options of ``Queue.enqueue``, which apply to all of the jobs.
      *delay* is in seconds.
    - *ids*: the caller's ids, which ``put`` checks. None: new ids.
    """
    jobs = make_jobs(backend, bodies, priority=priority, delay=delay, ttr=ttr, ids=ids)
    if not jobs:
        return []
    return [JobHandle(backend, queue, job_id) for job_id in _add(backend, queue, jobs, connection, False)]


def put_one(
    backend: Backend,
    queue: str,
    body: bytes,
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    own_id: str | None = None,
) -> JobHandle:
    """Enqueue one job. Does the same as ``put``, but faster. *own_id* is a checked id of the caller, or None for a new
    id."""
    # Called for every enqueue: the code of make_job is repeated here for speed.
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    job_id = new_id() if own_id is None else _allowed(backend, own_id)
    (job_id,) = _add(backend, queue, [NewJob(body, job_id, priority, delay, ttr)], connection, True)
    return JobHandle(backend, queue, job_id)


def put_jobs(
    backend: Backend, queue: str, jobs: Sequence[NewJob], *, connection: Any, is_one: bool = False
) -> list[JobHandle]:
    """Like ``put``, for jobs that already have ids and checked options.

    If another job already has a job's unique key, the other job's handle is returned.
    """
    if not jobs:
        return []
    return handles_of(backend, queue, jobs, _add(backend, queue, jobs, connection, is_one))


def handles_of(backend: Backend, queue: str, jobs: Sequence[NewJob], ids: Sequence[str]) -> list[JobHandle]:
    """Return the handles of enqueued jobs. *ids*: the ids that the enqueue returned."""
    return [_handle_of(backend, queue, job, job_id) for job, job_id in zip(jobs, ids, strict=True)]


def _handle_of(backend: Backend, queue: str, job: NewJob, job_id: str) -> JobHandle:
    is_new = job.terms is None or job.terms.unique is None or job_id == job.id
    return (JobHandle if is_new else ExistingJobHandle)(backend, queue, job_id)


def make_job(backend: Backend, body: bytes, *, priority: int, delay: float, ttr: float, own_id: str | None) -> NewJob:
    """Return the job that ``put_one`` enqueues. Calls no server. Raises ``Unsupported``, ``OptionInvalid``."""
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    return NewJob(body, new_id() if own_id is None else _allowed(backend, own_id), priority, delay, ttr)


def make_jobs(
    backend: Backend, bodies: Sequence[bytes], *, priority: int, delay: float, ttr: float, ids: Iterable[str] | None
) -> list[NewJob]:
    """Return the jobs that ``put`` enqueues. Calls no server. Raises ``Unsupported``, ``OptionInvalid``."""
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    count = len(bodies)
    used = new_ids(count) if ids is None else _allowed(backend, check_new_ids(ids, count))
    return [NewJob(body, job_id, priority, delay, ttr) for body, job_id in zip(bodies, used, strict=True)]


def add_jobs(
    backend: Backend, queue: str, jobs: Sequence[NewJob], connection: Any = None, *, is_one: bool = False
) -> list[str]:
    """Enqueue jobs that have ids and checked options. Repeats the call, and raises errors, as ``put`` does."""
    return _add(backend, queue, jobs, connection, is_one)


def _allowed(backend: Backend, ids: _Ids) -> _Ids:
    """Return *ids*. Raises ``Unsupported`` if the backend chooses the ids."""
    if not backend.declared.client_ids:
        raise backend.unsupported("client_ids")
    return ids


def _add(backend: Backend, queue: str, jobs: Sequence[NewJob], connection: Any, is_one: bool) -> list[str]:
    began = monotonic()
    try:
        ids = backend.enqueue(queue, jobs) if connection is None else store(backend, queue, jobs, connection)
    except BackendError as exc:
        delivery = Delivery(backend, queue, jobs, began, is_one=is_one)
        ids = delivery.insist(exc, began, may_repeat=connection is None)
    if timeout_notices.pending:
        timeout_notices.raise_if_pending()
    return ids


class Delivery:
    """The jobs of one enqueue after an error. Each job is stored, uncertain, or not sent."""

    def __init__(self, backend: Backend, queue: str, jobs: Sequence[NewJob], began: float, *, is_one: bool) -> None:
        self._backend = backend
        self._queue = queue
        self._jobs = jobs
        self._began = began
        self._is_one = is_one
        self._there: dict[int, str] = {}  # position -> id
        self._uncertain: set[int] = set()  # positions
        self._sent: Sequence[int] = range(len(jobs))
        """The positions of the jobs that the last attempt sent."""
        self._is_first = True

    def insist(self, error: BackendError, since: float, *, may_repeat: bool = True) -> list[str]:
        """Repeat a call that began at *since* and raised *error*, if its connection was dropped. Returns the ids.

        A call that reached its deadline is not repeated. No call is repeated on a backend that chooses the ids. Raises
        ``BackendError``.
        """
        may_repeat = may_repeat and bool(self._backend.declared.client_ids)
        # has_failover: repeat even if the server is unreachable, because this server or another server may answer soon
        attempts = Attempts(since + PATIENCE, has_failover=True)
        while True:
            self._note(error)
            if not may_repeat or not attempts.again(_classify(error)):
                told = self._told(error)
                cause = error.__cause__ if isinstance(error, EnqueueUncertain | EnqueuePartial) else error
                try:
                    if told is error:
                        raise error
                    raise told from cause
                finally:
                    # the errors refer to this frame: a reference cycle would delay closing sockets
                    del error, told, cause
            try:
                return self._send()
            except BackendError as exc:
                error = exc

    def repeat(self) -> JobHandle | list[JobHandle]:
        """Carry out ``EnqueueUncertain.repeat``."""
        if not self._backend.declared.client_ids:
            raise self._backend.unsupported("client_ids")
        since = time.monotonic()
        try:
            ids = self._send()
        except BackendError as exc:
            ids = self.insist(exc, since)
        handles = handles_of(self._backend, self._queue, self._jobs, ids)
        return handles[0] if self._is_one else handles

    def fail(self, there: Mapping[int, str], uncertain: Iterable[int], error: BackendError) -> BackendError:
        """Return the error to raise for the jobs of this enqueue, which were sent together with the jobs of other
        calls.

        - *there*: the ids of the jobs that are certainly stored, by position.
        - *uncertain*: the positions of the jobs that were sent without a reply.
        - *error*: the error for all of the jobs together, which does not describe single jobs.
        """
        self._is_first = False
        self._there.update(there)
        self._uncertain.update(uncertain)
        return self._told(error)

    def _send(self) -> list[str]:
        """Enqueue the jobs that are not certainly stored."""
        self._is_first = False
        self._sent = [at for at in range(len(self._jobs)) if at not in self._there]
        passed = time.monotonic() - self._began
        jobs = [later(self._jobs[at], passed) for at in self._sent]
        self._there.update(zip(self._sent, self._backend.enqueue(self._queue, jobs), strict=True))
        return [self._there[at] for at in range(len(self._jobs))]

    def _note(self, error: BackendError) -> None:
        if isinstance(error, EnqueueUncertain | EnqueuePartial):
            self._there.update((self._sent[at], job_id) for at, job_id in error.accepted.items())
        if isinstance(error, EnqueueUncertain):
            ids = {job.id for job in error.jobs}
            self._uncertain.update(at for at in self._sent if self._jobs[at].id in ids)
        self._uncertain -= self._there.keys()

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Call *function* without blocking the event loop."""
        from .async_calls import run

        return await run(self._backend, function)

    def _told(self, error: BackendError) -> BackendError:
        """Return the error to raise. The error describes the outcome of all attempts, not only of the last attempt."""
        why = error.why if isinstance(error, EnqueueUncertain | EnqueuePartial) else str(error)
        if self._uncertain:
            uncertain = error
            if not isinstance(uncertain, EnqueueUncertain) or not self._is_first:
                others = [at for at in range(len(self._jobs)) if at not in self._there and at not in self._uncertain]
                uncertain = EnqueueUncertain(
                    self._queue,
                    [self._jobs[at] for at in sorted(self._uncertain)],
                    why,
                    accepted=self._there,
                    unsent=[self._jobs[at] for at in others],
                    client_ids=bool(self._backend.declared.client_ids),
                )
            uncertain.repeat_by(self.repeat, self._run)
            return uncertain
        if self._there and not self._is_first:
            return EnqueuePartial(self._there, len(self._jobs), why)
        return error


def _classify(error: BackendError) -> Failure:
    """Return ``UNREACHABLE`` if a connection was dropped or could not be made. For any other error, return
    ``FINAL``."""
    cause = error.__cause__ if isinstance(error, EnqueueUncertain | EnqueuePartial) else error
    is_passing = isinstance(cause, BackendUnavailable) and not isinstance(cause, BackendTimeout)
    return Failure.UNREACHABLE if is_passing else Failure.FINAL


def later(job: NewJob, passed: float) -> NewJob:
    """Return the job with its delay reduced by *passed* seconds, so that its due time stays the same."""
    return msgspec.structs.replace(job, delay=max(0.0, job.delay - passed)) if job.delay else job
