"""What a driver implements: a ``Backend``, the optional parts that its store makes possible, and a ``Consumer``.

A driver inherits from ``Backend`` if its store can do the minimum only, or from those of ``OPTIONAL_PARTS`` that it
implements: ``class AcmeBackend(Inspection, Pausing)``. Each part belongs to one power of ``Capabilities``:
declare a power if, and only if, the driver has its part.
"""

# ruff: noqa: ARG002 - the methods of optional parts refuse whatever they are given

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
    """One connection's jobs. Thread-safe, fork-safe, cheap to construct; connects at the first call.

    The abstract methods are the minimum. The methods of the optional parts are here, too, and raise ``Unsupported``, so
    that callers need not check a backend's class.
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

        Without ``url.create``, a driver whose first call makes a file or tables raises ``BackendError`` if these are
        missing.
        """

    @property
    def capabilities(self) -> Capabilities:
        """``declared``, corrected where the live server reports something else."""
        return self.declared

    def unsupported(self, power: str) -> Unsupported:
        """The error to raise for a power that this backend lacks."""
        from .registry import backends_with

        gap = self.capabilities.claim(power)
        reason = "" if gap is True else f"{gap.kind}: {gap.reason}"
        return Unsupported(power, self.declared.backend, reason, backends_with(power))

    def check_terms(self, *, priority: int | None = None, delay: float = 0.0) -> None:
        """Refuse a priority or delay that this backend cannot keep. The core calls it before the driver is called.

        Raises ``Unsupported`` (``priorities``) for a priority other than the default, ``OptionInvalid`` for a delay
        beyond ``longest_delay``.
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
        """A delay that the core has chosen, as a retry's backoff, cut to ``longest_delay``."""
        longest = self.declared.longest_delay
        return delay if longest is None or delay <= longest else longest

    # --- producing ---

    @abstractmethod
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        """Add jobs, in their order, in one round trip. Returns their ids, in the same order.

        A job whose id the queue already holds is left as it is, and its id is returned: repeating a call whose
        reply was lost adds nothing. With ``atomic_batches`` a batch of up to 1,000 jobs and 8 MB is all or nothing.

        With ``connection`` the jobs are written inside the caller's open transaction on that connection and
        exist exactly if the caller commits; the driver neither commits nor rolls back.

        Raises ``EnqueueUncertain``, from the error of the connection, for jobs that were sent and not answered. After
        any other error no job of the call is stored, except those that ``EnqueuePartial`` names. Such errors are
        ``PayloadTooLarge``, before anything is sent, ``Unsupported`` (``transactional_enqueue``), and ``BackendError``.
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

        Order: ready as they would be reserved, delayed and reserved by due time, buried as they would be kicked.
        Pages are not a snapshot: a job that moves between two calls may be seen twice or not at all, one that
        stays is seen exactly once. Raises ``Unsupported`` (``lists_jobs``) for a page after the jobs that the
        backend can show, and for a state of which it can show no job. Raises ``OptionInvalid`` for a state in which no
        job is kept (``multiq.backend.check_state``).
        """
        raise self.unsupported("inspection")

    def delete(self, queue: str, job_id: str) -> None:
        """Delete a job that is not reserved: it never starts. Raises ``JobNotFound``, ``JobReserved``."""
        raise self.unsupported("management")

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Make a job that is not reserved due in ``delay`` seconds, as if it were enqueued now.

        Its attempts, crashes, kicks, age and place start over. Sleeping consumers notice if the new time is earlier.
        Returns the id to use from now on. Raises ``JobNotFound``, ``JobReserved``.
        """
        raise self.unsupported("management")

    @abstractmethod
    def kick(self, queue: str, limit: int) -> int:
        """Up to ``limit`` buried jobs, the longest buried first, become ready. Returns how many."""

    def kick_job(self, queue: str, job_id: str) -> None:
        """One buried or delayed job becomes ready now; a ready one stays. ``JobNotFound``, ``JobReserved``."""
        raise self.unsupported("management")

    @abstractmethod
    def queues(self) -> list[str]:
        """The names, sorted, of all queues that hold a job or are paused."""

    @abstractmethod
    def stats(self, queue: str) -> QueueStats:
        """Counts now. A queue that was never used counts zero of everything."""

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

        A driver that overrides it checks its server's settings; the default checks what any backend can report. Raises
        ``BackendError``.
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
        """The store's tables. Raises ``Unsupported`` if it has none, or if the driver creates them itself."""
        raise self.unsupported("schema")

    @abstractmethod
    def close(self) -> None:
        """Drop this object's connections; they open again when they are needed.

        This does not close the backend's consumers. They keep their leases, unless leases end with a connection. A
        consumer that waits goes on waiting, or raises ``BackendUnavailable``.
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


#: power -> the base class of the drivers that have it, with the methods that they implement
OPTIONAL_PARTS: dict[str, type] = {
    "inspection": Inspection,
    "management": Management,
    "pausing": Pausing,
    "purging": Purging,
    "schema": Migrations,
    "diagnosis": Diagnosis,
}


def methods_of(power: str) -> list[str]:
    """The methods of an optional part."""
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
        """Return *queues* if they are this consumer's own, in any order. Raises ``OptionInvalid``."""
        if sorted(queues) != sorted(self.queues):
            raise OptionInvalid(
                f"queues must be {list(self.queues)!r} in another order, got {list(queues)!r}: for other queues make "
                "another consumer"
            )
        return tuple(queues)

    @abstractmethod
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        """Up to ``limit`` due jobs, each under a lease; waits up to ``timeout`` seconds for the first, never for more.

        Strictly from earlier queues first; within a queue by lowest priority number, then oldest by enqueue. A job that
        was released, became due, or whose lease ended keeps its place by age. No job is reserved early, by the server's
        clock. A lease that ended makes its job ready again, at most a second late while a consumer waits.

        *queues* are this consumer's queues in another order, for this call only (``in_order`` checks them, and raises
        ``OptionInvalid``). A worker may give another order with every call, so a new order must not cost a request to
        the server. None: the consumer's own order.
        """

    @abstractmethod
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Carry out many verdicts in one round trip. Returns, for each, None or why it was refused.

        A verdict is refused from the moment that its lease has ended, whether or not another consumer has the job.
        """

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle these verdicts, then reserve: one round trip where the store can do both.

        *queues* is as in ``reserve``.

        Raises only if nothing was settled. If the backend fails after the verdicts, no lease is returned, and the next
        call raises the error.
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
        """From any thread: the reserve that is waiting now, or else the next one, returns without waiting on."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. A job that is still reserved stays reserved until its lease ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
