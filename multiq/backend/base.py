"""The base classes of a driver: ``Backend``, its optional parts, and ``Consumer``.

A driver inherits from the ``OPTIONAL_PARTS`` that it implements: ``class AcmeBackend(Inspection, Pausing)``. A driver
without optional parts inherits from ``Backend``. Each optional part belongs to a capability, which is a field of
``Capabilities``. A driver declares the capability if, and only if, it implements the part.
"""

# ruff: noqa: ARG002 - the methods of optional parts raise Unsupported, whatever their arguments are

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from multiq.errors import BackendError, DriverInvalid, JobNotFound, JobReserved, OptionInvalid, Unsupported

from .capabilities import Gap
from .diagnostics import Finding
from .types import PRIORITY_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from multiq.errors import LeaseLost
    from multiq.settings.url import BackendUrl, Option

    from .capabilities import Capabilities
    from .diagnostics import Schema
    from .effects import After, Note, NotePage, Outcome, OutcomeKind, OutcomePage, Step, Version
    from .limits import LimitState, Quota
    from .types import JobRecord, Lease, NewJob, Page, QueueStats, State, Verdict


class Backend(ABC):
    """A connection to a store of jobs. Thread-safe, fork-safe and cheap to construct. Connects at the first call.

    Every driver implements the abstract methods. The methods of an optional part raise ``Unsupported`` unless the
    driver implements that part.
    """

    declared: ClassVar[Capabilities]
    """The capabilities of this driver. Reading them needs no server and no client library."""

    options: ClassVar[Mapping[str, Option]] = {}
    """The options in the query string of this driver's URLs."""

    gathers_enqueues: ClassVar[bool] = True
    """Whether multiq may combine the enqueues of several waiting coroutines into one call. False for a test backend
    that runs the jobs within their enqueue.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "declared"):
            _check_parts(cls)

    @classmethod
    @abstractmethod
    def from_url(cls, url: BackendUrl) -> Self:
        """Construct a backend from a parsed URL. The caller has checked its options against ``options``. Does no I/O.

        Some drivers create a file or tables at the first call. If ``url.create`` is False, a driver creates nothing.
        Then its calls raise ``BackendError`` if the file or the tables are missing.
        """

    @property
    def capabilities(self) -> Capabilities:
        """The ``declared`` capabilities, corrected by what the server reports."""
        return self.declared

    def unsupported(self, power: str) -> Unsupported:
        """Return the error to raise for a capability that this backend lacks."""
        from .paired.needs import WITH_STORE, can_have_store
        from .registry import backends_with

        gap = self.capabilities.claim(power)
        reason = "" if gap is True else f"{gap.kind}: {gap.reason}"
        if power in WITH_STORE and can_have_store(self.declared):
            reason = f"{reason}; a store beside the backend adds this capability: ?store=sqlite:///state.db in the URL"
        return Unsupported(power, self.declared.backend, reason, backends_with(power))

    def check_terms(self, *, priority: int | None = None, delay: float = 0.0) -> None:
        """Check that the backend supports this priority and delay. The core calls this before it calls the driver.

        Raises ``Unsupported`` for a priority other than the default if the backend lacks ``priorities``, and
        ``OptionInvalid`` for a delay beyond ``longest_delay``.
        """
        declared = self.declared
        if priority is not None and priority != PRIORITY_DEFAULT and not declared.priorities:
            error = self.unsupported("priorities")
            reason = f"{error.reason}; got priority {priority}: leave it out, and give urgent jobs a queue of their own"
            raise Unsupported("priorities", error.backend, reason, error.others)
        if declared.longest_delay is not None and delay > declared.longest_delay:
            raise OptionInvalid(
                f"delay must be at most {declared.longest_delay:g} seconds on the {declared.backend} backend, got "
                f"{delay:g}: enqueue the job later, or use a backend with longer delays (multiq backends lists them)"
            )

    def shortened(self, delay: float) -> float:
        """Return *delay*, limited to ``longest_delay``. The core uses this for delays that it chooses itself, such as
        the backoff of a retry."""
        longest = self.declared.longest_delay
        return delay if longest is None or delay <= longest else longest

    # --- producing ---

    @abstractmethod
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        """Add jobs, in their order, in one round trip. Returns their ids, in the same order.

        If the queue already has a job with the same id, that job is not changed, and its id is returned. So a call may
        be repeated after a lost reply. If another job already has the unique key of a new job (``Terms.unique``), the
        new job is not added, and the id of the other job is returned. With ``atomic_batches`` a batch of up to 1,000
        jobs and 8 MB is all or nothing.

        With ``connection`` the jobs are written inside the caller's open transaction on that connection. The jobs exist
        if, and only if, the caller commits. The driver neither commits nor rolls back.

        Raises ``EnqueueUncertain`` if jobs were sent and no reply came. After any other error no job of the call is
        stored, except the jobs in ``EnqueuePartial``. The other errors are:

        - ``PayloadTooLarge``, before any job is sent;
        - ``Unsupported`` for a ``connection``, if the backend lacks ``transactional_enqueue``;
        - ``BackendError``.
        """

    # --- consuming ---

    @abstractmethod
    def consumer(self, queues: Sequence[str]) -> Consumer:
        """Return a consumer of these queues. It reserves from earlier queues first. Does no I/O."""

    # --- looking and managing, from outside ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        """Return a job without changing it. Raises ``JobNotFound``."""
        raise self.unsupported("inspection")

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """Return a page of the queue's jobs in a state, without changing them.

        The order depends on the state:

        - ready: the order in which the jobs would be reserved;
        - delayed: by due time;
        - reserved: by the lease's end;
        - buried: the order in which the jobs would be kicked;
        - held: by age, the oldest first.

        Pages are not a snapshot. A job that changes its state or position between two calls may be seen twice or not
        at all. Any other job is seen exactly once.

        A backend without ``lists_jobs`` shows only some jobs. It raises ``Unsupported`` for the page after these jobs,
        and for a state whose jobs it cannot show. Raises ``OptionInvalid`` for a state that ``check_state`` refuses.
        """
        raise self.unsupported("inspection")

    def delete(self, queue: str, job_id: str) -> None:
        """Delete a job that is not reserved. Raises ``JobNotFound``, ``JobReserved``."""
        raise self.unsupported("management")

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        """Delete these jobs, except the reserved ones. Returns, for each job, None or the error.

        *after*: the outcome to keep for each deleted job. Each outcome is stored in the same step as the deletion.
        Needs the capability ``outcomes``.

        The deletions need not be one step. If the call is repeated after an error, the result for a job that the first
        call has deleted is ``JobNotFound``. This default deletes one job after the other, and cannot keep outcomes.
        """
        if after is not None and after.keep > 0:
            raise self.unsupported("outcomes")
        answers: list[JobNotFound | JobReserved | None] = []
        for job_id in ids:
            try:
                self.delete(queue, job_id)
            except (JobNotFound, JobReserved) as exc:
                answers.append(exc)
            else:
                answers.append(None)
        return answers

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Make a job due in ``delay`` seconds, as if it were enqueued now. The job must not be reserved.

        The job's attempts, crashes, kicks, age and position start over. Sleeping consumers are woken if the new time is
        earlier. Returns the job's new id, which may be the same. Raises ``JobNotFound``, ``JobReserved``, ``JobHeld``,
        ``UniqueTaken``.
        """
        raise self.unsupported("management")

    @abstractmethod
    def kick(self, queue: str, limit: int) -> int:
        """Make up to ``limit`` buried jobs ready, the longest buried first. Returns the number of these jobs.

        If another job has taken the unique key of a buried job, the buried job stays buried, and is not counted.
        """

    def kick_job(self, queue: str, job_id: str) -> None:
        """Make a buried, delayed or held job ready now. A ready job stays ready.

        Raises ``JobNotFound``, ``JobReserved``, ``UniqueTaken``.
        """
        raise self.unsupported("management")

    @abstractmethod
    def queues(self) -> list[str]:
        """Return the sorted names of all queues that have a job or are paused."""

    @abstractmethod
    def stats(self, queue: str) -> QueueStats:
        """Return the numbers of the queue's jobs. All numbers of an unknown queue are zero."""

    def pause(self, queue: str, seconds: float) -> None:
        """Reserve no jobs for *seconds*. The times of delays and leases continue. A second pause replaces the first."""
        raise self.unsupported("pausing")

    def resume(self, queue: str) -> None:
        """End a pause now, and wake waiting consumers."""
        raise self.unsupported("pausing")

    def purge(self, queue: str, states: Sequence[State]) -> int:
        """Delete all jobs in these states, except reserved jobs. Returns the number of deleted jobs.

        Raises ``OptionInvalid`` for the same states as ``jobs``.
        """
        raise self.unsupported("purging")

    # --- outcomes of jobs that are gone ---

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        """Return the kept outcome of each job, in the order of the ids. None: no outcome is kept, or it has expired."""
        raise self.unsupported("outcomes")

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        """Return a page of the queue's kept outcomes. The outcome that expires last comes first.

        *kind*: only outcomes of this kind. As for ``jobs``, pages are not a snapshot.
        """
        raise self.unsupported("outcomes")

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        """Delete the kept outcomes of these jobs. Returns the number of deleted outcomes.

        *ids* None: delete up to *limit* expired outcomes. No call returns an expired outcome, but it uses space until
        it is deleted. An ack that keeps an outcome also deletes a few expired outcomes of its queue.
        """
        raise self.unsupported("outcomes")

    # --- steps and notes ---

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        """If all conditions hold, carry out all of these steps. If not, carry out no step. Returns whether the
        conditions held.

        At most 1,000 steps. ``Put``, ``Drop`` and *when* need the capability ``notes``. All notes in *when* must have
        the same home. This home must be the home of the first step, or its queue if the first step has no home.

        With ``one_step_everywhere`` the call is atomic. Otherwise only the steps in the queue or home of the first step
        are carried out atomically. Each other step is carried out later, and only once: at the latest by the next
        ``relay``.

        A call may be repeated after an error. A repeated step changes nothing, except that a repeated ``Put`` gives the
        note another version.
        """
        raise self.unsupported("holds")

    def relay(self, queues: Sequence[str]) -> int:
        """Carry out pending steps. These are steps in other queues that belong to earlier verdicts in *queues*.

        A backend without ``one_step_everywhere`` may have pending steps after a process has died. Other backends never
        have pending steps. Returns the number of steps that still have to be carried out.
        """
        raise self.unsupported("holds")

    def note(self, home: str, key: str) -> Note | None:
        """Return a note. None: there is no such note, or the note has expired."""
        raise self.unsupported("notes")

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        """Return a page of the notes whose keys begin with *prefix*, sorted by key."""
        raise self.unsupported("notes")

    def now(self, home: str) -> float:
        """Return the time in seconds since 1970, by the clock that decides when the jobs of queue *home* are due.

        When the call returns, the clock shows this time or a later one. So a job that is enqueued afterwards with the
        delay ``at - now(home)`` is not due before *at* by this clock, whatever the caller's own clock shows.
        """
        raise self.unsupported("notes")

    # --- limits ---

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        """Store, change or remove limits of a queue. Return all limits of the queue, sorted by name.

        - *change*: the new quota of each named limit. None: the limit is removed, so its gates are open. A change takes
          effect with the next reserve. It ends no lease.
        - *pinned*: True: the changed limits are pinned. False: the call does not change limits that are already pinned.

        A call may be repeated after an error.
        """
        raise self.unsupported("limits")

    def limits_beside(self, queue: str, quotas: Mapping[str, Quota], connection: Any) -> bool:
        """Store limits of jobs that are about to be enqueued with ``connection=``. Pinned limits do not change.

        Returns whether the limits stay stored if the caller rolls back. This default stores them outside the caller's
        transaction. A driver must override it if the caller's transaction would keep ``limits`` waiting.
        """
        self.limits(queue, quotas, pinned=False)
        return True

    def doctor(self) -> list[Finding]:
        """Check whether the server or file is suitable for jobs. Changes nothing.

        This default lists the queues and reports missing capabilities. A driver may override it to check its server's
        settings. Raises ``BackendError``.
        """
        start = time.monotonic()
        self.queues()
        took = time.monotonic() - start
        findings = [Finding("ok", "reachable", f"it listed its queues in {took * 1000:.1f} ms")]
        for power in ("persistent", "durable_attempts", "shared"):
            claim = self.capabilities.claim(power)
            if isinstance(claim, Gap):
                findings.append(Finding("warn", power, f"{claim.kind}: {claim.reason}"))
        return findings

    def schema(self) -> Schema:
        """Return the store's tables. Raises ``Unsupported`` if there are none, or if the driver creates them itself."""
        raise self.unsupported("schema")

    @abstractmethod
    def close(self) -> None:
        """Close this object's connections. Later calls open new connections.

        This does not close the backend's consumers. Their leases go on, unless the backend ends leases with the
        connection. A waiting consumer goes on waiting, or raises ``BackendUnavailable``.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the optional parts ---


class Inspection(Backend):
    """A backend that shows jobs. The capability is ``inspection``."""

    @abstractmethod
    def peek(self, queue: str, job_id: str) -> JobRecord:
        """See ``Backend.peek``."""

    @abstractmethod
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """See ``Backend.jobs``."""


class Management(Backend):
    """A backend that reaches single jobs by their ids. The capability is ``management``."""

    @abstractmethod
    def delete(self, queue: str, job_id: str) -> None:
        """See ``Backend.delete``."""

    @abstractmethod
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """See ``Backend.reschedule``."""

    @abstractmethod
    def kick_job(self, queue: str, job_id: str) -> None:
        """See ``Backend.kick_job``."""


class Pausing(Backend):
    """A backend that pauses queues. The capability is ``pausing``."""

    @abstractmethod
    def pause(self, queue: str, seconds: float) -> None:
        """See ``Backend.pause``."""

    @abstractmethod
    def resume(self, queue: str) -> None:
        """See ``Backend.resume``."""


class Purging(Backend):
    """A backend that empties queues. The capability is ``purging``."""

    @abstractmethod
    def purge(self, queue: str, states: Sequence[State]) -> int:
        """See ``Backend.purge``."""


class Outcomes(Backend):
    """A backend that keeps the outcomes of jobs. The capability is ``outcomes``."""

    @abstractmethod
    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        """See ``Backend.outcomes``."""

    @abstractmethod
    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        """See ``Backend.history``."""

    @abstractmethod
    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        """See ``Backend.forget``."""


class Holds(Backend):
    """A backend that holds a job until the members for which it waits have arrived. The capability is ``holds``."""

    @abstractmethod
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        """See ``Backend.carry_out``."""

    @abstractmethod
    def relay(self, queues: Sequence[str]) -> int:
        """See ``Backend.relay``."""


class Notes(Backend):
    """A backend that keeps notes. The capability is ``notes``."""

    @abstractmethod
    def note(self, home: str, key: str) -> Note | None:
        """See ``Backend.note``."""

    @abstractmethod
    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        """See ``Backend.notes``."""

    @abstractmethod
    def now(self, home: str) -> float:
        """See ``Backend.now``."""


class Limits(Backend):
    """A backend that hands out jobs within limits. The capability is ``limits``."""

    @abstractmethod
    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        """See ``Backend.limits``."""


class Migrations(Backend):
    """A backend with tables that an operator creates and migrates. The capability is ``schema``."""

    @abstractmethod
    def schema(self) -> Schema:
        """See ``Backend.schema``."""


class Diagnosis(Backend):
    """A backend that checks its server's settings. The capability is ``diagnosis``."""

    @abstractmethod
    def doctor(self) -> list[Finding]:
        """See ``Backend.doctor``."""


#: capability -> its optional part, a base class with the methods that a driver implements
OPTIONAL_PARTS: dict[str, type] = {
    "inspection": Inspection,
    "management": Management,
    "pausing": Pausing,
    "purging": Purging,
    "outcomes": Outcomes,
    "holds": Holds,
    "notes": Notes,
    "limits": Limits,
    "schema": Migrations,
    "diagnosis": Diagnosis,
}


def methods_of(power: str) -> list[str]:
    """Return the names of the methods of a capability's optional part."""
    return sorted(name for name, value in vars(OPTIONAL_PARTS[power]).items() if hasattr(value, "__isabstractmethod__"))


def _check_parts(driver: type[Backend]) -> None:
    """Raise ``DriverInvalid`` if a driver's declared capabilities contradict the parts that it implements."""
    for power, part in OPTIONAL_PARTS.items():
        if driver.declared.claim(power):
            missing = [name for name in methods_of(power) if getattr(driver, name) is getattr(Backend, name)]
            if missing:
                raise DriverInvalid(
                    f"{driver.__qualname__} declares {power} and does not implement {', '.join(missing)}: "
                    f"inherit from multiq.backend.{part.__name__}, or declare a Gap with its reason"
                )
        elif issubclass(driver, part):
            raise DriverInvalid(
                f"{driver.__qualname__} inherits from multiq.backend.{part.__name__} and declares {power} as a gap: "
                f"declare {power}=True, or do not inherit from it"
            )


# --- consuming ---


class Consumer(ABC):
    """One thread's connection, which reserves and settles jobs."""

    queues: tuple[str, ...]

    asked_at: float = 0.0
    """The value of ``time.monotonic()`` shortly before the last call reserved its jobs. 0.0: unknown.

    The leases of these jobs last at least until ``asked_at`` plus the ttr. The time of the call's return would be too
    late, because the process may have been stopped between the server's reply and the return.
    """

    most_gated: int | None = None
    """Each later call returns at most this number of jobs with gates. None: no special bound for jobs with gates. A
    worker sets this to the number of jobs that it can start. The reason is that a job with gates uses a slot even while
    it waits in the worker.
    """

    sees_all: bool = True
    """Whether ``reserve`` looks at all due jobs. False: ``reserve`` may have missed jobs, because a part of the backend
    does not answer, or because the last call ended before it had looked at all due jobs. The other parts still
    deliver jobs, so this is no error. With ``stop_when_empty``, a worker does not end while ``sees_all`` is False.
    """

    def in_order(self, queues: Sequence[str]) -> tuple[str, ...]:
        """Return *queues*. Raises ``OptionInvalid`` if *queues* is not a permutation of this consumer's queues."""
        if sorted(queues) != sorted(self.queues):
            raise OptionInvalid(
                f"queues must be the consumer's own queues {list(self.queues)!r} in any order, got {list(queues)!r}: "
                "create another consumer for other queues"
            )
        return tuple(queues)

    @abstractmethod
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        """Reserve up to ``limit`` ready jobs, and return a lease for each.

        Waits up to ``timeout`` seconds for the first job, and does not wait for more jobs.

        Jobs of earlier queues come first. Within a queue the lowest priority number comes first. Among equal priorities
        the job that was enqueued first comes first. A release, a delay or the end of a lease does not change this
        order. No job is reserved before its due time by the server's clock. When a lease ends, its job becomes ready
        again. While a consumer waits, the job becomes ready at most a second after the end of the lease.

        *queues*: this consumer's queues in another order, for this call only. None: the consumer's own order. The
        driver checks *queues* with ``in_order``, which raises ``OptionInvalid``. A worker may pass another order in
        every call. So a new order must not need an additional request to the server.
        """

    @abstractmethod
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Carry out many verdicts in one round trip. Returns None or the error for each verdict.

        A verdict is refused if its lease has ended, even if no other consumer has reserved the job since.
        """

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle these verdicts, then reserve jobs. A driver may do both in one round trip.

        *queues* has the same meaning as in ``reserve``.

        Raises an error only if no verdict was settled. If the backend fails after it has settled the verdicts, this
        call returns the answers without leases, and the next call raises the error.
        """
        lost = self.settle(verdicts) if verdicts else []
        try:
            if queues is None:
                return lost, self.reserve(limit, timeout)
            return lost, self.reserve(limit, timeout, queues)
        except BackendError:
            if not verdicts:
                raise
            return lost, []

    @abstractmethod
    def interrupt(self) -> None:
        """Make the waiting ``reserve`` return immediately. If no ``reserve`` waits, the next one returns immediately.
        Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. A reserved job stays reserved until its lease ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
