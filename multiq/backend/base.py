"""What a driver implements: a ``Backend``, the optional parts that its store makes possible, and a ``Consumer``.

A driver inherits from ``Backend`` if its store can do the minimum only, or from those of ``OPTIONAL_PARTS`` that it
implements: ``class AcmeBackend(Inspection, Pausing)``. Each part belongs to a power, which is a field of
``Capabilities`` that says what a backend can do. Declare such a power if, and only if, the driver implements its part.
"""

# ruff: noqa: ARG002 - the methods of optional parts raise Unsupported, whatever their arguments are

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from multiq.errors import BackendError, DriverInvalid, OptionInvalid, Unsupported

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
    from .types import JobRecord, Lease, NewJob, Page, QueueStats, State, Verdict


class Backend(ABC):
    """The jobs of one connection. Thread-safe, fork-safe, cheap to construct; connects at the first call.

    The abstract methods are the minimum. The methods of the optional parts are here, too: they raise ``Unsupported``
    unless the driver implements them, so callers need not check a backend's class.
    """

    declared: ClassVar[Capabilities]
    """What this driver can do, known without a server and without importing a client library."""

    options: ClassVar[Mapping[str, Option]] = {}
    """The options that this driver's URLs take in their query string."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "declared"):
            _check_parts(cls)

    @classmethod
    @abstractmethod
    def from_url(cls, url: BackendUrl) -> Self:
        """Construct from a parsed URL whose options were checked against ``options``. Does no I/O.

        Some drivers make a file or tables at the first call. If ``url.create`` is False, such a driver makes none, and
        its calls raise ``BackendError`` if the file or the tables are missing.
        """

    @property
    def capabilities(self) -> Capabilities:
        """The same as ``declared``, corrected where the live server reports something else."""
        return self.declared

    def unsupported(self, power: str) -> Unsupported:
        """The error to raise for a power that this backend lacks."""
        from .registry import backends_with

        gap = self.capabilities.claim(power)
        reason = "" if gap is True else f"{gap.kind}: {gap.reason}"
        return Unsupported(power, self.declared.backend, reason, backends_with(power))

    def check_terms(self, *, priority: int | None = None, delay: float = 0.0) -> None:
        """Refuse a priority or delay that this backend cannot honour. The core calls this before it calls the driver.

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
        """*delay*, but at most ``longest_delay``; for delays that the core chooses, such as a retry's backoff."""
        longest = self.declared.longest_delay
        return delay if longest is None or delay <= longest else longest

    # --- producing ---

    @abstractmethod
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        """Add jobs, in their order, in one round trip. Returns their ids, in the same order.

        A job whose id the queue already holds is left as it is, and its id is returned: repeating a call whose
        reply was lost adds nothing. With ``atomic_batches`` a batch of up to 1,000 jobs and 8 MB is all or nothing.

        With ``connection`` the jobs are written inside the caller's open transaction on that connection. They exist if,
        and only if, the caller commits. The driver neither commits nor rolls back.

        Raises ``EnqueueUncertain``, from the error of the connection, for jobs that were sent and not answered. After
        any other error no job of the call is stored, except those that ``EnqueuePartial`` names. The other errors are:

        - ``PayloadTooLarge``, before any job is sent;
        - ``Unsupported`` for a ``connection``, if the backend lacks ``transactional_enqueue``;
        - ``BackendError``.
        """

    # --- consuming ---

    @abstractmethod
    def consumer(self, queues: Sequence[str]) -> Consumer:
        """A consumer that reserves from these queues, earlier ones first. Does no I/O."""

    # --- looking and managing, from outside ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        """One job, untouched. Raises ``JobNotFound``."""
        raise self.unsupported("inspection")

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """The queue's jobs in a state, untouched, a page at a time.

        The order depends on the state:

        - ready: the order in which the jobs would be reserved;
        - delayed: by due time;
        - reserved: by the lease's end;
        - buried: the order in which the jobs would be kicked.

        Pages are not a snapshot. A job that changes its state or its place between two calls may be seen twice or not
        at all; a job that stays where it is is seen exactly once.

        A backend without ``lists_jobs`` shows only some jobs. It raises ``Unsupported`` for a page after these jobs,
        and for a state of which it can show no job. Raises ``OptionInvalid`` for a state in which no job is stored
        (``multiq.backend.check_state``).
        """
        raise self.unsupported("inspection")

    def delete(self, queue: str, job_id: str) -> None:
        """Delete a job that is not reserved: it never starts. Raises ``JobNotFound``, ``JobReserved``."""
        raise self.unsupported("management")

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Make a job due in ``delay`` seconds, as if it were enqueued now. The job must not be reserved.

        The job's attempts, crashes, kicks, age and place start over. Consumers that sleep notice if the new time is
        earlier. Returns the id that the job has from now on. Raises ``JobNotFound``, ``JobReserved``.
        """
        raise self.unsupported("management")

    @abstractmethod
    def kick(self, queue: str, limit: int) -> int:
        """Make up to ``limit`` buried jobs ready, the longest buried first. Returns how many."""

    def kick_job(self, queue: str, job_id: str) -> None:
        """Make a buried or delayed job ready now; a ready job stays ready. Raises ``JobNotFound``, ``JobReserved``."""
        raise self.unsupported("management")

    @abstractmethod
    def queues(self) -> list[str]:
        """The names, sorted, of all queues that hold a job or are paused."""

    @abstractmethod
    def stats(self, queue: str) -> QueueStats:
        """The queue's counts now. All counts of a queue that was never used are zero."""

    def pause(self, queue: str, seconds: float) -> None:
        """No new reservations for *seconds*; delays and leases run on. A second pause replaces the first."""
        raise self.unsupported("pausing")

    def resume(self, queue: str) -> None:
        """End a pause now; consumers that wait notice."""
        raise self.unsupported("pausing")

    def purge(self, queue: str, states: Sequence[State]) -> int:
        """Delete all jobs in these states (never reserved ones). Returns how many.

        Raises ``OptionInvalid`` as ``jobs`` does.
        """
        raise self.unsupported("purging")

    def doctor(self) -> list[Finding]:
        """Check that the server, or file, is fit for jobs as it is configured now. Changes nothing.

        This default checks only what any backend can report; a driver that overrides it checks its server's settings.
        Raises ``BackendError``.
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
        """The store's tables. Raises ``Unsupported`` if there are none, or if the driver creates the tables itself."""
        raise self.unsupported("schema")

    @abstractmethod
    def close(self) -> None:
        """Drop this object's connections; they open again when they are needed.

        This does not close the backend's consumers. Consumers keep their leases, unless a lease of this backend ends
        with a connection. A consumer that waits goes on waiting, or raises ``BackendUnavailable``.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- the optional parts ---


class Inspection(Backend):
    """A backend that shows jobs: the power ``inspection``."""

    @abstractmethod
    def peek(self, queue: str, job_id: str) -> JobRecord:
        """See ``Backend.peek``."""

    @abstractmethod
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """See ``Backend.jobs``."""


class Management(Backend):
    """A backend that reaches single jobs by their ids: the power ``management``."""

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
    """A backend that pauses queues: the power ``pausing``."""

    @abstractmethod
    def pause(self, queue: str, seconds: float) -> None:
        """See ``Backend.pause``."""

    @abstractmethod
    def resume(self, queue: str) -> None:
        """See ``Backend.resume``."""


class Purging(Backend):
    """A backend that empties queues: the power ``purging``."""

    @abstractmethod
    def purge(self, queue: str, states: Sequence[State]) -> int:
        """See ``Backend.purge``."""


class Migrations(Backend):
    """A backend with tables that an operator creates and migrates: the power ``schema``."""

    @abstractmethod
    def schema(self) -> Schema:
        """See ``Backend.schema``."""


class Diagnosis(Backend):
    """A backend that checks its server's settings: the power ``diagnosis``."""

    @abstractmethod
    def doctor(self) -> list[Finding]:
        """See ``Backend.doctor``."""


#: power -> the optional part that belongs to it: a base class with the methods that a driver of this power implements
OPTIONAL_PARTS: dict[str, type] = {
    "inspection": Inspection,
    "management": Management,
    "pausing": Pausing,
    "purging": Purging,
    "schema": Migrations,
    "diagnosis": Diagnosis,
}


def methods_of(power: str) -> list[str]:
    """The methods of the optional part that belongs to *power*."""
    return sorted(name for name, value in vars(OPTIONAL_PARTS[power]).items() if hasattr(value, "__isabstractmethod__"))


def _check_parts(driver: type[Backend]) -> None:
    """Raise ``DriverInvalid`` if the powers that a driver declares contradict the parts that it implements."""
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
    """One thread's connection: reserves jobs and settles what it reserved."""

    queues: tuple[str, ...]

    asked_at: float = 0.0
    """A moment before the last call's jobs were reserved, close to it; ``time.monotonic()``. 0.0: unknown.

    Their leases last at least until a ttr after it. The time at which the call returned gives no such bound, because
    the process may have been stopped between the server's answer and the return.
    """

    def in_order(self, queues: Sequence[str]) -> tuple[str, ...]:
        """Return *queues* if they are this consumer's own queues, in any order; else raise ``OptionInvalid``."""
        if sorted(queues) != sorted(self.queues):
            raise OptionInvalid(
                f"queues must be {list(self.queues)!r} in another order, got {list(queues)!r}: for other queues make "
                "another consumer"
            )
        return tuple(queues)

    @abstractmethod
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        """Reserve up to ``limit`` ready jobs, each under a lease.

        Waits up to ``timeout`` seconds for the first job, and never waits for more jobs.

        Order: strictly from earlier queues first; within a queue by the lowest priority number, then by age, the job
        that was enqueued first. A job that was released or became due, or whose lease ended, keeps its age. By the
        server's clock, no job is reserved early. When a lease ends, its job becomes ready again; while a consumer
        waits, this happens at most a second late.

        *queues*: this consumer's queues in another order, for this call only; None: the consumer's own order.
        ``in_order`` checks them, and raises ``OptionInvalid``. A worker may give another order with every call, so a
        new order must not cost a request to the server.
        """

    @abstractmethod
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Carry out many verdicts in one round trip. Returns for each verdict None, or the error that refuses it.

        From the moment that a lease has ended, a verdict on it is refused, even if no other consumer has the job.
        """

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle these verdicts, then reserve: one round trip where the store can do both.

        *queues* is as in ``reserve``.

        Raises an error only if nothing was settled. If the backend fails after it has settled the verdicts, this
        returns the answers without a lease, and the next call raises the error.
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
        """Make the ``reserve`` that waits now return at once; if none waits, the next one. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. A job that is still reserved stays reserved until its lease ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
