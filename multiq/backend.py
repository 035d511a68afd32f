"""The seam between multiq and a driver. This page is all that is needed to write one.

A driver deals in bytes, seconds and ids. It owns every atomic state change, its keys or tables, its waiting, its
connections and its clock, and knows nothing of tasks, JSON, retries or events. Names, ranges and types were
checked before a call gets here, so a driver need not check them again.

The states of a job, and the verbs that move it::

            enqueue(delay>0)              release(delay>0)
   --------------------------> DELAYED <------------------.
   enqueue                        | due, or kick_job      |
   --------------------------> READY ----- reserve -----> RESERVED ---- ack ----> gone
                                ^  ^---- lease ended ------'  |  |
                                |  '------ release -----------'  | bury
                                '-- kick, kick_job -- BURIED <---'

What each verb promises is in ``docs/contract.md``, paragraph by paragraph; ``multiq.conformance`` proves a driver
against it; ``multiq.memory`` is the contract as a program; ``docs/writing-a-driver.md`` is the way through.

Errors: a driver raises only ``multiq.errors`` (from the client library's exception), a ``BackendUnavailable`` for
whatever is worth another try, an ``EnqueueUncertain`` for an enqueue that may have been carried out. Each verb must be
safe to repeat after such an error: the caller chooses the ids of jobs, the driver chooses a fresh token for each call
of ``reserve`` and finds out by it what happened.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import msgspec

from .capabilities import Gap
from .errors import BackendError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from .capabilities import Capabilities
    from .errors import LeaseLost
    from .url import BackendUrl, Option

PRIORITY_DEFAULT = 1024
PRIORITY_MAX = 2**32 - 1  # beanstalkd's range, so that a priority means the same everywhere
TTR_DEFAULT = 60.0
TTR_MIN = 1.0
DELAY_MAX = 100 * 365 * 86400.0  # a century in seconds: larger numbers are mistakes of unit


class State(enum.StrEnum):
    """Where a job stands. A job past its due time, or whose lease has ended, is READY."""

    READY = "ready"
    DELAYED = "delayed"
    RESERVED = "reserved"
    BURIED = "buried"
    GONE = "gone"
    """Acked or deleted. Never stored: only a handle says so of a job that is not there any more."""


STORED_STATES: tuple[State, ...] = (State.READY, State.DELAYED, State.RESERVED, State.BURIED)


class NewJob(msgspec.Struct, frozen=True):
    """A job to enqueue. ``delay`` >= 0 and ``ttr`` >= 1 are seconds; a smaller ``priority`` goes first."""

    body: bytes
    id: str
    """Chosen by the caller (a UUIDv7). A backend without ``client_ids`` ignores it and returns its own."""
    priority: int = PRIORITY_DEFAULT
    delay: float = 0.0
    ttr: float = TTR_DEFAULT


class Lease(msgspec.Struct, frozen=True):
    """The proof that a job was handed out to its holder, until ``ttr`` seconds after reserve or touch."""

    queue: str
    id: str
    token: str
    """The fence: tells this reservation from every other one of the same job."""
    body: bytes
    priority: int
    ttr: float
    attempt: int
    """1-based number of this reservation; given-back ones are not counted where the backend can tell."""
    crashes: int
    """How many earlier reservations ended without a verdict."""
    kicks: int
    """How many times the job came back from being buried."""
    age: float
    """Seconds since the job was enqueued (or rescheduled), by the server's clock."""


class Ack(msgspec.Struct, frozen=True):
    """The job is done: forget it."""

    lease: Lease


class Release(msgspec.Struct, frozen=True):
    """Ready again, or delayed by ``delay`` seconds. ``priority`` None keeps it."""

    lease: Lease
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None


class Bury(msgspec.Struct, frozen=True):
    """Set aside until a person acts."""

    lease: Lease
    reason: str | None = None


class Touch(msgspec.Struct, frozen=True):
    """The full ttr again, from now."""

    lease: Lease


class GiveBack(msgspec.Struct, frozen=True):
    """Ready again as if it had never been reserved: no attempt is counted where the backend can tell."""

    lease: Lease


class Abandon(msgspec.Struct, frozen=True):
    """Ready again in its old place, its attempt counted: its worker died, and somebody says so before the lease ends.

    With ``portable_leases`` it is counted as a crash; elsewhere nobody but the dead worker could have said it.
    """

    lease: Lease
    reason: str | None = None


Verdict: TypeAlias = Ack | Release | Bury | Touch | GiveBack | Abandon


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``peek`` and ``jobs`` tell of a job. None stands for what this backend cannot know."""

    queue: str
    id: str
    state: State
    body: bytes
    priority: int
    ttr: float
    attempt: int | None
    """How many reservations there were so far."""
    crashes: int | None
    kicks: int | None
    due_in: float | None
    """Seconds until a delayed job is due or a reserved job's lease ends; 0 for a ready job; None for a buried one."""
    age: float | None
    """Seconds since it was enqueued (or rescheduled)."""
    reason: str | None
    """The reason of the last verdict that takes one."""


class Page(msgspec.Struct, frozen=True):
    """A part of a listing. ``after`` asks for the next part; None: this was the last.

    Without ``lists_jobs`` it says that there are more, and asking for them raises ``Unsupported``.
    """

    jobs: list[JobRecord]
    after: str | None


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue's jobs by state. None stands for what this backend cannot know."""

    queue: str
    ready: int | None
    delayed: int | None
    reserved: int | None
    buried: int | None
    paused_for: float | None
    """Seconds until the queue resumes by itself; None: it is not paused."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that ``doctor`` looked at, and whether it is as jobs need it.

    ``ok``; ``warn``: works, with a weakness that somebody should know of; ``bad``: jobs will be lost or stuck;
    ``unknown``: could not be found out, so nothing is promised.
    """

    level: Literal["ok", "warn", "bad", "unknown"]
    what: str
    """What was looked at, as the server's manual calls it: ``maxmemory-policy``."""
    why: str
    """What was found, and what follows from it."""
    advice: str = ""
    """What to do about it."""


class SchemaState(msgspec.Struct, frozen=True):
    """How the tables of a store stand to what this multiq needs."""

    state: Literal["ready", "missing", "older", "newer"]
    """``ready``: fit for this multiq; that includes newer ones that say so. ``newer``: of no use to this one."""
    found: int
    """The version of the tables; 0: there are none."""
    needed: int
    """The version that this multiq makes."""


class Schema(ABC):
    """The tables of a store whose changes are numbered migrations, run by a person: ``multiq schema``."""

    @abstractmethod
    def check(self) -> SchemaState:
        """Look, and change nothing. Raises ``BackendError``."""

    @abstractmethod
    def up(self) -> list[str]:
        """Run what is missing; safe while jobs are worked off, and when somebody else does the same. Their names.

        Raises ``SchemaNotReady`` if this user may not, ``BackendError``.
        """

    @abstractmethod
    def sql(self, since: int = 0) -> str:
        """What ``up`` would run for tables of version *since*, as a script. Asks nobody."""


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
        """``declared``, made exact by what the live server says where that matters."""
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
        """Someone who reserves from these queues, earlier ones first. Does no I/O."""

    # --- looking and managing, from outside ---

    @abstractmethod
    def peek(self, queue: str, job_id: str) -> JobRecord:
        """One job, untouched. Raises ``JobNotFound``."""

    @abstractmethod
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        """The queue's jobs in a state, untouched, a page at a time.

        Order: ready as they would be reserved, delayed and reserved by due time, buried as they would be kicked.
        Pages are no snapshot: a job that moves between two calls may be seen twice or not at all, one that
        stays is seen exactly once. Raises ``Unsupported`` (``lists_jobs``) for going on after what the backend can
        show, and for a state of which it can show no job,
        ``OptionInvalid`` for a state in which no job is kept (``multiq.options.check_state``).
        """

    @abstractmethod
    def delete(self, queue: str, job_id: str) -> None:
        """A job that nobody runs is gone and never starts. Raises ``JobNotFound``, ``JobReserved``."""

    @abstractmethod
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """A job that nobody runs becomes due in ``delay`` seconds, as if it were enqueued now.

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
        """Whether the server, or file, is fit for jobs as it is set up now; changes nothing. Raises ``BackendError``.

        A driver looks at its own settings; without that, there is what any backend can be asked.
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
        """The store's tables. Raises ``Unsupported`` where there are none, or where they need nobody's care."""
        from .registry import backends_with_a_schema

        reason = "its store has no tables that a person would have to bring up"
        raise Unsupported("schema", self.declared.backend, reason, backends_with_a_schema())

    def make_nothing(self) -> None:  # noqa: B027 - most stores are there, or are a server's to make
        """From now on a store that its first use would make, a file or tables, is a ``BackendError`` if it is missing.

        For who looks from outside: in the wrong place "no jobs" would be the wrong answer.
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

    Their leases last at least until a ttr after it. When the call returned says less: a process may have been stopped
    between the server's answer and that.
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
        server's clock. A lease that ended makes its job ready again, at most a second late while anybody waits.
        """

    @abstractmethod
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Carry out many verdicts in one round trip. Returns, for each, None or why it was refused.

        A verdict is refused from the moment that its lease has ended, whether or not anybody took the job since.
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
