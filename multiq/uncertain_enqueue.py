"""Repeats an enqueue after an error, and raises ``EnqueueUncertain`` if it stays unknown whether a job was added.

- No second job: every attempt sends the same ids, if the backend takes ids of the caller.
- Uncertain jobs are reported: a job whose reply was lost stays uncertain until a reply confirms the job. Errors of
  later attempts do not make the job certain.
- The same due time: a later attempt subtracts the time since the first attempt from the delay.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from .driverkit.call_retry import Attempts, Failure
from .errors import BackendError, BackendTimeout, BackendUnavailable, EnqueuePartial, EnqueueUncertain
from .job import handles_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .backend import Backend, NewJob
    from .job import JobHandle

#: seconds for which an enqueue is repeated after a dropped connection. The ids prevent a second job.
PATIENCE = 1.0


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


def later(job: NewJob, passed: float) -> NewJob:
    """Return the job with its delay reduced by *passed* seconds, so that its due time stays the same."""
    return msgspec.structs.replace(job, delay=max(0.0, job.delay - passed)) if job.delay else job


def _classify(error: BackendError) -> Failure:
    """Return ``UNREACHABLE`` if a connection was dropped or could not be made. For any other error, return
    ``FINAL``."""
    cause = error.__cause__ if isinstance(error, EnqueueUncertain | EnqueuePartial) else error
    is_passing = isinstance(cause, BackendUnavailable) and not isinstance(cause, BackendTimeout)
    return Failure.UNREACHABLE if is_passing else Failure.FINAL
