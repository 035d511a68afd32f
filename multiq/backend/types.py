"""What multiq and a driver pass to each other: jobs, leases, verdicts, records and counts.

They hold bytes, seconds and ids, and know nothing of tasks or JSON.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from multiq.errors import OptionInvalid
from multiq.formatting import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

PRIORITY_DEFAULT = 1024
PRIORITY_MAX = 2**32 - 1  # beanstalkd's range, so that a priority means the same everywhere
TTR_DEFAULT = 60.0
TTR_MIN = 1.0
DELAY_MAX = 100 * 365 * 86400.0  # a century in seconds: larger numbers are mistakes of unit


class State(enum.StrEnum):
    """The state of a job. A job is READY when its due time is past, and when its lease has ended."""

    READY = "ready"
    DELAYED = "delayed"
    RESERVED = "reserved"
    BURIED = "buried"
    GONE = "gone"
    """Acked or deleted. Never stored: only a handle reports it, for a job that is not there any more."""


STORED_STATES: tuple[State, ...] = (State.READY, State.DELAYED, State.RESERVED, State.BURIED)


def check_state(state: str) -> State:
    """The stored state of this name, one of four. Raises ``OptionInvalid``."""
    if state in STORED_STATES:
        return State(state)
    name = state.value if isinstance(state, State) else state
    not_kept = "; jobs that were acked or deleted are not kept" if name == State.GONE else ""
    raise OptionInvalid(f"a job's state must be one of {', '.join(STORED_STATES)}, got {shown(name)}{not_kept}")


def check_states(states: Iterable[str] | str) -> list[State]:
    """The stored states of these names, or of a single name. Raises ``OptionInvalid``."""
    return [check_state(state) for state in ([states] if isinstance(states, str) else states)]


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
    """The verdict: the job is done, delete it."""

    lease: Lease


class Release(msgspec.Struct, frozen=True):
    """The verdict: the job is ready again, or delayed by ``delay`` seconds. With no ``priority`` it keeps its own."""

    lease: Lease
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None


class Bury(msgspec.Struct, frozen=True):
    """The verdict: the job is set aside until somebody kicks, reschedules or deletes it."""

    lease: Lease
    reason: str | None = None


class Touch(msgspec.Struct, frozen=True):
    """The verdict: the lease has its full ttr again, from now."""

    lease: Lease


class GiveBack(msgspec.Struct, frozen=True):
    """The verdict: the job is ready again, or delayed by ``delay`` seconds, as if it had never been reserved.

    On backends with the power ``give_back``, no attempt is counted.
    """

    lease: Lease
    delay: float = 0.0


class Abandon(msgspec.Struct, frozen=True):
    """The verdict: the job's worker has died, as another process reports before the lease ends.

    The job is ready again in its old place, and its attempt stays counted. On backends with the power
    ``portable_leases`` a crash is counted, too. On other backends only the dead worker itself could settle the lease.
    """

    lease: Lease
    reason: str | None = None


Verdict: TypeAlias = Ack | Release | Bury | Touch | GiveBack | Abandon


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``peek`` and ``jobs`` return for a job. A field is None if this backend cannot know it."""

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
    """A part of a listing. *after*: what to pass to ``jobs`` for the next part; None: this was the last part.

    If the backend lacks ``lists_jobs``, ``after`` only says that there are more jobs: to ask for them raises
    ``Unsupported``.
    """

    jobs: list[JobRecord]
    after: str | None


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue's jobs by state. A count is None if this backend cannot know it."""

    queue: str
    ready: int | None
    delayed: int | None
    reserved: int | None
    buried: int | None
    paused_for: float | None
    """Seconds until the queue resumes by itself; None: it is not paused."""
