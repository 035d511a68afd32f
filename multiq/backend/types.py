"""The types of the interface between multiq and a driver: jobs, leases, verdicts, records and counts."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import msgspec

from multiq.errors import OptionInvalid
from multiq.formatting import shown

from .limits import Gate  # noqa: TC001 - msgspec reads a stored job's types
from .unique import UniqueKey  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .effects import After

PRIORITY_DEFAULT = 1024
PRIORITY_MAX = 2**32 - 1  # beanstalkd's range
TTR_DEFAULT = 60.0
TTR_MIN = 1.0
DELAY_MAX = 100 * 365 * 86400.0  # seconds in a century; a larger number is probably not in seconds


class State(enum.StrEnum):
    """The state of a job. A delayed job becomes READY at its due time, and a reserved job when its lease ends."""

    READY = "ready"
    DELAYED = "delayed"
    RESERVED = "reserved"
    BURIED = "buried"
    HELD = "held"
    """The job waits for arrivals (``Terms.awaits``)."""
    GONE = "gone"
    """The job was acked or deleted. Only ``JobHandle.state`` returns this state."""


STORED_STATES: tuple[State, ...] = (State.READY, State.DELAYED, State.RESERVED, State.BURIED, State.HELD)


def check_state(state: str) -> State:
    """Return the state with this name. Raises ``OptionInvalid`` if no stored job can have such a state."""
    if state in STORED_STATES:
        return State(state)
    name = state.value if isinstance(state, State) else state
    not_kept = "; jobs that were acked or deleted are not kept" if name == State.GONE else ""
    raise OptionInvalid(f"a job's state must be one of {', '.join(STORED_STATES)}, got {shown(name)}{not_kept}")


def check_states(states: Iterable[str] | str) -> list[State]:
    """Return the states with these names. *states* may also be a single name. Raises the errors of ``check_state``."""
    return [check_state(state) for state in ([states] if isinstance(states, str) else states)]


class Terms(msgspec.Struct, frozen=True):
    """The conditions of a job's start apart from its due time, and the job's unique key."""

    awaits: int = 0
    """The job is held until this number of different members have arrived (``Arrive``). Needs the capability
    ``holds``."""
    unique: UniqueKey | None = None
    """The job is not added while another job of its queue has this key. Needs the capability ``unique``."""
    gates: tuple[Gate, ...] = ()
    """At most four different gates. The job is handed out only while all its gates are open. Needs the capability
    ``limits``."""


class NewJob(msgspec.Struct, frozen=True):
    """A job to enqueue. ``delay`` >= 0 and ``ttr`` >= 1 are seconds; a smaller ``priority`` goes first."""

    body: bytes
    id: str
    """The caller's id for the job. A backend without ``client_ids`` ignores this id and chooses another one."""
    priority: int = PRIORITY_DEFAULT
    delay: float = 0.0
    ttr: float = TTR_DEFAULT
    terms: Terms | None = None
    """With ``awaits`` the delay begins when the job is no longer held."""


class Lease(msgspec.Struct, frozen=True):
    """A reservation of a job. The lease ends ``ttr`` seconds after the reserve or the last touch."""

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
    """How often the job was kicked while it was buried."""
    age: float
    """Seconds since the job was enqueued or rescheduled, by the server's clock."""
    memo: bytes = b""
    """The bytes that an earlier verdict stored for the next reservation (``After.memo``)."""
    doomed: str = ""
    """The reason why the job must not run (``Arrive.doom``). Empty: it may run."""


class Ack(msgspec.Struct, frozen=True):
    """A verdict that deletes the job, because it is done."""

    lease: Lease
    after: After | None = None


class Release(msgspec.Struct, frozen=True):
    """A verdict that makes the job ready again, or delayed by ``delay`` seconds. ``priority`` None: the priority stays
    the same."""

    lease: Lease
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None
    after: After | None = None


class Bury(msgspec.Struct, frozen=True):
    """A verdict that sets the job aside until it is kicked, rescheduled or deleted."""

    lease: Lease
    reason: str | None = None
    after: After | None = None


class Touch(msgspec.Struct, frozen=True):
    """A verdict that extends the lease to its full ttr from now."""

    lease: Lease
    after: After | None = None


class GiveBack(msgspec.Struct, frozen=True):
    """A verdict that makes the job ready again, or delayed by ``delay`` seconds.

    Backends with the capability ``give_back`` do not count the attempt.
    """

    lease: Lease
    delay: float = 0.0
    after: After | None = None


class Abandon(msgspec.Struct, frozen=True):
    """A verdict that another process sends because the job's worker has died.

    The job is ready again, in its old position, and its attempt stays counted. Backends with the capability
    ``portable_leases`` also count a crash. On other backends, only the worker that reserved the job can settle it, so
    another process's abandon is refused.
    """

    lease: Lease
    reason: str | None = None
    after: ClassVar[None] = None  # nothing is stored for a job whose worker has died


Verdict: TypeAlias = Ack | Release | Bury | Touch | GiveBack | Abandon


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored job, as ``peek`` and ``jobs`` return it. A field is None if the backend does not know the value, or if
    there is none. For example, a buried or held job has no ``due_in``.
    """

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
    memo: bytes | None = None
    """The bytes that the job's next lease has. Empty: none were stored."""
    detail: bytes | None = None
    """The bytes that the last release or bury stored (``After.detail``). Empty: none were stored."""
    awaits: int | None = 0
    """The number of arrivals that a held job still waits for. 0: the job is not held."""
    unique_key: bytes | None = None
    """The key that the job was enqueued with (``Terms.unique``). None: the job has no key, or the backend does not know
    the key."""
    held_by: str | None = None
    """What a ready job waits for: a limit and a key, like ``limit api/7``. None: the job can be reserved, or no reserve
    has examined the job yet.
    """


class Page(msgspec.Struct, frozen=True):
    """A page of a listing. Pass ``after`` to ``jobs`` to get the next page. None: this is the last page.

    On a backend without ``lists_jobs``, a page with ``after`` means that there are more jobs, but the call for the next
    page raises ``Unsupported``.
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
    held: int | None = 0
