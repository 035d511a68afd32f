"""The types of the interface between multiq and a driver: jobs, leases, verdicts, records and counts."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from multiq.errors import OptionInvalid
from multiq.formatting import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

PRIORITY_DEFAULT = 1024
PRIORITY_MAX = 2**32 - 1  # beanstalkd's range
TTR_DEFAULT = 60.0
TTR_MIN = 1.0
DELAY_MAX = 100 * 365 * 86400.0  # seconds in a century; a larger number is probably not in seconds


class State(enum.StrEnum):
    """The state of a job. A job is READY when its due time is past, and when its lease has ended."""

    READY = "ready"
    DELAYED = "delayed"
    RESERVED = "reserved"
    BURIED = "buried"
    GONE = "gone"
    """The job was acked or deleted. Only ``JobHandle.state`` returns this state."""


STORED_STATES: tuple[State, ...] = (State.READY, State.DELAYED, State.RESERVED, State.BURIED)


def check_state(state: str) -> State:
    """Return the stored state of this name. Raises ``OptionInvalid``."""
    if state in STORED_STATES:
        return State(state)
    name = state.value if isinstance(state, State) else state
    not_kept = "; jobs that were acked or deleted are not kept" if name == State.GONE else ""
    raise OptionInvalid(f"a job's state must be one of {', '.join(STORED_STATES)}, got {shown(name)}{not_kept}")


def check_states(states: Iterable[str] | str) -> list[State]:
    """Return the stored states of these names, or of a single name. Raises ``OptionInvalid``."""
    return [check_state(state) for state in ([states] if isinstance(states, str) else states)]


class NewJob(msgspec.Struct, frozen=True):
    """A job to enqueue. ``delay`` >= 0 and ``ttr`` >= 1 are seconds; a smaller ``priority`` goes first."""

    body: bytes
    id: str
    """The caller's id for the job. A backend without ``client_ids`` ignores it and chooses another id."""
    priority: int = PRIORITY_DEFAULT
    delay: float = 0.0
    ttr: float = TTR_DEFAULT


class Lease(msgspec.Struct, frozen=True):
    """A reservation of a job, which ends ``ttr`` seconds after the reserve or the last touch."""

    queue: str
    id: str
    token: str
    """Distinguishes this reservation from all other reservations of the same job."""
    body: bytes
    priority: int
    ttr: float
    attempt: int
    """The number of this reservation, from 1. A backend with ``give_back`` does not count given-back reservations."""
    crashes: int
    """The number of earlier reservations that ended without a verdict."""
    kicks: int
    """The number of kicks of the buried job."""
    age: float
    """Seconds since the job was enqueued or rescheduled, by the server's clock."""


class Ack(msgspec.Struct, frozen=True):
    """A verdict that deletes the job, because it is done."""

    lease: Lease


class Release(msgspec.Struct, frozen=True):
    """A verdict that makes the job ready again, or delayed by ``delay`` seconds. None: the priority stays."""

    lease: Lease
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None


class Bury(msgspec.Struct, frozen=True):
    """A verdict that sets the job aside until it is kicked, rescheduled or deleted."""

    lease: Lease
    reason: str | None = None


class Touch(msgspec.Struct, frozen=True):
    """A verdict that extends the lease to its full ttr from now."""

    lease: Lease


class GiveBack(msgspec.Struct, frozen=True):
    """A verdict that makes the job ready again, or delayed by ``delay`` seconds.

    Backends with the capability ``give_back`` do not count the attempt.
    """

    lease: Lease
    delay: float = 0.0


class Abandon(msgspec.Struct, frozen=True):
    """A verdict that another process sends because the job's worker has died.

    The job is ready again, in its old position, and its attempt stays counted. Backends with the capability
    ``portable_leases`` also count a crash. On other backends only the dead worker itself could settle the lease.
    """

    lease: Lease
    reason: str | None = None


Verdict: TypeAlias = Ack | Release | Bury | Touch | GiveBack | Abandon


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored job, as ``peek`` and ``jobs`` return it. None in a field: the backend does not know the value."""

    queue: str
    id: str
    state: State
    body: bytes
    priority: int
    ttr: float
    attempt: int | None
    """The number of reservations so far."""
    crashes: int | None
    kicks: int | None
    due_in: float | None
    """Seconds until the delay or the lease ends. 0 for a ready job. None for a buried job."""
    age: float | None
    """Seconds since the job was enqueued or rescheduled."""
    reason: str | None
    """The reason that the last release, bury or abandon gave."""


class Page(msgspec.Struct, frozen=True):
    """A page of a listing. Pass ``after`` to ``jobs`` to get the next page. None: this is the last page.

    On a backend without ``lists_jobs``, ``after`` only says that there are more jobs. The call for the next page raises
    ``Unsupported``.
    """

    jobs: list[JobRecord]
    after: str | None


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a queue's jobs by state. None: the backend does not know the number."""

    queue: str
    ready: int | None
    delayed: int | None
    reserved: int | None
    buried: int | None
    paused_for: float | None
    """Seconds until the pause ends. None: the queue is not paused."""
