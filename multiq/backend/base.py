"""What a driver implements: a ``Backend``, and the ``Consumer`` that it hands out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from multiq.errors import BackendError, Unsupported

from .capabilities import Gap
from .diagnostics import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from multiq.errors import LeaseLost
    from multiq.settings.url import BackendUrl, Option

    from .capabilities import Capabilities
    from .diagnostics import Schema
    from .types import JobRecord, Lease, NewJob, Page, QueueStats, State, Verdict


class Backend(ABC):
    """One connection's jobs. Thread-safe, fork-safe, cheap to construct; connects at the first call."""

    declared: ClassVar[Capabilities]
    """What this driver can do, known without a server and without importing a client library."""

    options: ClassVar[Mapping[str, Option]] = {}
    """The options that this driver's URLs take in their query string."""

    @classmethod
    @abstractmethod
    def from_url(cls, url: BackendUrl) -> Self:
        """Construct from a parsed URL whose options were checked against ``options``. Does no I/O."""

    @property
    def capabilities(self) -> Capabilities:
        """``declared``, corrected by what the live server reports if that matters."""
        return self.declared

    def unsupported(self, power: str) -> Unsupported:
        """The error to raise for a power that this backend lacks."""
        from .registry import backends_with

        gap = self.capabilities.claim(power)
        reason = "" if gap is True else f"{gap.kind}: {gap.reason}"
        return Unsupported(power, self.declared.backend, reason, backends_with(power))

    # --- producing ---

    @abstractmethod
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        """Add jobs, in their order, in one round trip. Returns their ids, in the same order.

        A job whose id the queue already holds is left as it is, and its id is returned: repeating a call whose
        reply was lost adds nothing. With ``atomic_batches`` a batch of up to 1,000 jobs and 8 MB is all or nothing.

        With ``connection`` the jobs are written inside the caller's open transaction on that connection and
        exist exactly if the caller commits; the driver neither commits nor rolls back.

        Raises ``EnqueueUncertain``, from the error of the connection, for jobs that were sent and not answered. After
        any other error none is there, but those that ``EnqueuePartial`` names: ``PayloadTooLarge`` before anything is
        sent, ``Unsupported`` (``transactional_enqueue``), ``BackendError``.
        """

    # --- consuming ---

    @abstractmethod
    def consumer(self, queues: Sequence[str]) -> Consumer:
        """A consumer that reserves from these queues, earlier ones first. Does no I/O."""

    # --- looking and managing, from outside ---

    @abstractmethod
    def peek(self, queue: str, job_id: str) -> JobRecord:
        """One job, untouched. Raises ``JobNotFound``."""

    @abstractmethod
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """The queue's jobs in a state, untouched, a page at a time.

        Order: ready as they would be reserved, delayed and reserved by due time, buried as they would be kicked.
        Pages are not a snapshot: a job that moves between two calls may be seen twice or not at all, one that
        stays is seen exactly once. Raises ``Unsupported`` (``lists_jobs``) for going on after what the backend can
        show, and for a state of which it can show no job,
        ``OptionInvalid`` for a state in which no job is kept (``multiq.backend.check_state``).
        """

    @abstractmethod
    def delete(self, queue: str, job_id: str) -> None:
        """Delete a job that is not reserved: it never starts. Raises ``JobNotFound``, ``JobReserved``."""

    @abstractmethod
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Make a job that is not reserved due in ``delay`` seconds, as if it were enqueued now.

        Its attempts, crashes, kicks, age and place start over. Sleeping consumers notice an earlier time.
        Returns the id to use from now on. Raises ``JobNotFound``, ``JobReserved``.
        """

    @abstractmethod
    def kick(self, queue: str, limit: int) -> int:
        """Up to ``limit`` buried jobs, the longest buried first, become ready. Returns how many."""

    @abstractmethod
    def kick_job(self, queue: str, job_id: str) -> None:
        """One buried or delayed job becomes ready now; a ready one stays. ``JobNotFound``, ``JobReserved``."""

    @abstractmethod
    def queues(self) -> list[str]:
        """The names, sorted, of all queues that hold a job or are paused."""

    @abstractmethod
    def stats(self, queue: str) -> QueueStats:
        """Counts now. A queue that was never used counts zero of everything."""

    @abstractmethod
    def pause(self, queue: str, seconds: float) -> None:
        """No new reservations for so long; delays and leases run on. A second pause replaces the first."""

    @abstractmethod
    def resume(self, queue: str) -> None:
        """End a pause now; consumers that wait notice."""

    @abstractmethod
    def purge(self, queue: str, states: Sequence[State]) -> int:
        """Delete all jobs in these states (never reserved ones). Returns how many.

        Raises ``OptionInvalid`` as ``jobs`` does.
        """

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
        """The store's tables. Raises ``Unsupported`` where there are none, or where the driver keeps them itself."""
        from .registry import backends_with_a_schema

        reason = "its store has no tables that a person would have to bring up"
        raise Unsupported("schema", self.declared.backend, reason, backends_with_a_schema())

    def make_nothing(self) -> None:  # noqa: B027 - most stores are there, or are a server's to make
        """From now on raise ``BackendError`` for a missing file or missing tables, instead of creating them.

        Called by commands that only inspect: with a wrong path, "no jobs" would be the wrong answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop this object's connections; they open again when they are needed.

        Consumers are closed by themselves: they keep what they hold, unless leases end with a connection, and go on
        waiting, or end with ``BackendUnavailable``.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer(ABC):
    """One thread's connection: reserves jobs and settles what it reserved."""

    queues: tuple[str, ...]

    asked_at: float = 0.0
    """A moment before the last call's jobs were reserved, close to it; ``time.monotonic()``. 0.0: unknown.

    Their leases last at least until a ttr after it. The time at which the call returned gives no such bound, because
    the process may have been stopped between the server's answer and the return.
    """

    def reorder(self, queues: Sequence[str]) -> None:
        """The same queues in another order, from the next reserve on: perhaps before every one, so without any I/O.

        A driver that keeps anything made from the order extends this one. Raises ``ValueError`` unless *queues* are
        this consumer's, each as often as before.
        """
        if queues != self.queues and sorted(queues) != sorted(self.queues):
            raise ValueError(
                f"{list(queues)!r} are not the queues {list(self.queues)!r} in another order: "
                "for other queues make another consumer"
            )
        self.queues = tuple(queues)

    @abstractmethod
    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        """Up to ``limit`` due jobs, each under a lease; waits up to ``timeout`` seconds for the first, never for more.

        Strictly from earlier queues first; within a queue by lowest priority number, then oldest by enqueue. A
        job that was released, became due, or whose lease ended keeps its place by age. Never early by the
        server's clock. A lease that ended makes its job ready again, at most a second late while a consumer waits.
        """

    @abstractmethod
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Carry out many verdicts in one round trip. Returns, for each, None or why it was refused.

        A verdict is refused from the moment that its lease has ended, whether or not another consumer has the job.
        """

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        """Settle these, then reserve: one round trip where the store can do both.

        Raises only if nothing was settled: an outage between the two is met by the next call.
        """
        if not verdicts:
            return [], self.reserve(limit, timeout)
        lost = self.settle(verdicts)
        try:
            return lost, self.reserve(limit, timeout)
        except BackendError:
            return lost, []

    @abstractmethod
    def interrupt(self) -> None:
        """From any thread: the reserve that is waiting now, or else the next one, returns without waiting on."""

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. What is still reserved is left to its lease's end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
