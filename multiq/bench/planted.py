"""Backends with one bug each, planted on purpose. The tests of the verification use these backends.

``planted://half-lost`` wraps the memory backend. ``planted://half-lost@sqlite:///jobs.db`` wraps the backend of that
URL, so that several processes share the jobs. Each bug leaves the total numbers of jobs right. A check that only
compares counts would not find such a bug.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from multiq.backend import STORED_STATES, Ack, Backend, Bury, Consumer, GiveBack, NewJob, QueueStats
from multiq.backend.registry import open_backend
from multiq.errors import BackendError
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import JobRecord, Lease, Page, State, Verdict
    from multiq.backend.capabilities import Capabilities
    from multiq.errors import LeaseLost

_KEPT_BACK = 10  # one job out of this number is handed out
_FOR_GOOD = 10**8  # seconds: a delay so long that no run waits for its end


class PlantedBug(NamedTuple):
    """A bug's description, and the function that adds the bug to a backend."""

    does: str
    wrap: Callable[[Backend], Backend]

    def open(self, *, name: str = "", url: str = "") -> Backend:
        """Return the backend of *url* with this bug. Without *url*, the bug is added to a memory backend.

        Memory backends of the same *name* share their jobs.
        """
        return self.wrap(open_backend(url or f"memory://{name or new_id()}"))


#: name -> bug
PLANTED_BUGS: dict[str, PlantedBug] = {}


def _plant(name: str, does: str) -> Callable[[type[_BuggyBackend]], type[_BuggyBackend]]:
    def register(wrap: type[_BuggyBackend]) -> type[_BuggyBackend]:
        PLANTED_BUGS[name] = PlantedBug(does, wrap)
        return wrap

    return register


class _BuggyBackend(Backend):
    """Passes every call on to another backend. A subclass changes some of the calls."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.declared = inner.declared  # type: ignore[misc]  # not of the class, because inner backends differ
        self._counting = threading.Lock()
        self._count = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @classmethod
    def from_url(cls, url: object) -> Backend:  # type: ignore[override]
        raise TypeError(
            f"{cls.__name__} must wrap an open backend: write its URL as planted://BUG@URL, got from_url({url!r})"
        )

    def next(self) -> int:
        """The next number of a count (0, 1, 2...). A bug uses the number to pick every second or every tenth job."""
        with self._counting:
            self._count += 1
            return self._count - 1

    def stored(self, job: NewJob) -> list[NewJob]:  # a hook
        """The jobs that the store adds instead of this job."""
        return [job]

    def handed_out(self, consumer: Consumer, leases: list[Lease], limit: int) -> list[Lease]:  # noqa: ARG002 - a hook
        """The leases that a consumer gets when it asks for *limit* jobs. Called when the wrapped store has handed out
        *leases*."""
        return leases

    def carried_out(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:  # a hook
        """The verdicts that the store carries out instead of *verdicts*."""
        return verdicts

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        copies = [self.stored(job) for job in jobs]
        once = [job for stored in copies for job in stored[:1]]
        # the duplicate leases come last, so that a consumer that takes only a few jobs sees no duplicate
        again = [job for stored in copies for job in stored[1:]]
        if once:
            self._inner.enqueue(queue, [*once, *again], connection=connection)
        return [job.id for job in jobs]

    def consumer(self, queues: Sequence[str]) -> Consumer:
        return _BuggyConsumer(self, self._inner.consumer(queues))

    def stats(self, queue: str) -> QueueStats:
        return self._inner.stats(queue)

    def peek(self, queue: str, job_id: str) -> JobRecord:
        return self._inner.peek(queue, job_id)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        return self._inner.jobs(queue, state, limit=limit, after=after)

    def delete(self, queue: str, job_id: str) -> None:
        self._inner.delete(queue, job_id)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        return self._inner.reschedule(queue, job_id, delay)

    def kick(self, queue: str, limit: int) -> int:
        return self._inner.kick(queue, limit)

    def kick_job(self, queue: str, job_id: str) -> None:
        self._inner.kick_job(queue, job_id)

    def queues(self) -> list[str]:
        return self._inner.queues()

    def pause(self, queue: str, seconds: float) -> None:
        self._inner.pause(queue, seconds)

    def resume(self, queue: str) -> None:
        self._inner.resume(queue)

    def purge(self, queue: str, states: Sequence[State]) -> int:
        return self._inner.purge(queue, states)

    def close(self) -> None:
        self._inner.close()


class _BuggyConsumer(Consumer):
    def __init__(self, backend: _BuggyBackend, inner: Consumer) -> None:
        self._backend = backend
        self._inner = inner
        self.queues = inner.queues

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self._backend.handed_out(self._inner, self._inner.reserve(limit, timeout, queues), limit)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        # Some bugs do not apply to calls that ask for one job. On a busy machine jobs are slow, and a worker with slow
        # jobs asks for one job at a time. Every bug should apply to every worker, so a limit of 1 is raised to 2.
        lost = self.settle(verdicts) if verdicts else []
        try:
            taken = self._inner.reserve(limit, timeout, queues)
        except BackendError:
            if not verdicts:
                raise
            return lost, []
        return lost, self._backend.handed_out(self._inner, taken, max(limit, 2))

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._inner.settle(self._backend.carried_out(verdicts))

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


@_plant("half-lost", "loses every second job, and stores the others twice: as many are run as were enqueued")
class _HalfLost(_BuggyBackend):
    def stored(self, job: NewJob) -> list[NewJob]:
        return [] if self.next() % 2 else [job, _twin(job)]


@_plant("stored-twice", "stores every job twice")
class _StoredTwice(_BuggyBackend):
    def stored(self, job: NewJob) -> list[NewJob]:
        return [job, _twin(job)]


@_plant("twin-left", "stores every job a second time, delayed for years")
class _TwinLeft(_BuggyBackend):
    def stored(self, job: NewJob) -> list[NewJob]:
        return [job, NewJob(job.body, new_id(), job.priority, _FOR_GOOD, job.ttr)]


@_plant(
    "twin-uncounted",
    "stores every job a second time, delayed for years, and does not count these copies",
)
class _TwinUncounted(_TwinLeft):
    def stats(self, queue: str) -> QueueStats:
        return msgspec.structs.replace(self._inner.stats(queue), delayed=0)


@_plant("shadowed", "stores every job a second time in another queue, which no worker serves")
class _Shadowed(_BuggyBackend):
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self._inner.enqueue(f"{queue}.shadow", [_twin(job) for job in jobs])
        return super().enqueue(queue, jobs, connection=connection)


@_plant("buried-for-acked", "buries every second job that is acked, and cannot count its jobs")
class _BuriedForAcked(_BuggyBackend):
    def carried_out(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        return [
            Bury(verdict.lease) if isinstance(verdict, Ack) and self.next() % 2 else verdict for verdict in verdicts
        ]

    def stats(self, queue: str) -> QueueStats:
        return QueueStats(queue=queue, **dict.fromkeys(STORED_STATES), paused_for=None)


@_plant(
    "kept-back",
    "hands out one of ten jobs to a worker or a call that asks for several, and still counts the others",
)
class _KeptBack(_BuggyBackend):
    def handed_out(self, consumer: Consumer, leases: list[Lease], limit: int) -> list[Lease]:
        if limit == 1:
            return leases
        shown = [lease for lease in leases if self.next() % _KEPT_BACK == _KEPT_BACK - 1]
        consumer.settle([self.hidden(lease) for lease in leases if lease not in shown])
        return shown

    def hidden(self, lease: Lease) -> Verdict:
        return Bury(lease)


@_plant("swallowed", "deletes nine of ten jobs when a worker asks for them, or a call asks for several")
class _Swallowed(_KeptBack):
    def hidden(self, lease: Lease) -> Verdict:
        return Ack(lease)


@_plant(
    "kept-secretly",
    "hands out one of ten jobs to a worker or a call that asks for several, and counts no jobs at all",
)
class _KeptSecretly(_KeptBack):
    def stats(self, queue: str) -> QueueStats:
        return QueueStats(queue=queue, **dict.fromkeys(STORED_STATES, 0), paused_for=None)


@_plant("counts-nothing", "loses every tenth job, and cannot count its jobs")
class _CountsNothing(_BuggyBackend):
    def stored(self, job: NewJob) -> list[NewJob]:
        return [job] if self.next() % 10 else []

    def stats(self, queue: str) -> QueueStats:
        return QueueStats(queue=queue, **dict.fromkeys(STORED_STATES), paused_for=None)


@_plant("acks-forgotten", "accepts every second ack, but hands the job out again")
class _AcksForgotten(_BuggyBackend):
    def carried_out(self, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
        return [
            GiveBack(verdict.lease) if isinstance(verdict, Ack) and self.next() % 2 else verdict for verdict in verdicts
        ]


def _twin(job: NewJob) -> NewJob:
    return NewJob(job.body, new_id(), job.priority, job.delay, job.ttr)
