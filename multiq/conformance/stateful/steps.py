"""The steps of a random walk as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from multiq.backend import OutcomeKind, State

QUEUES = 2
WAYS: tuple[tuple[int, ...], ...] = ((0, 1), (1, 0), (0,))  # the queues of each consumer, in the consumer's order
KINDS: tuple[OutcomeKind, ...] = ("done", "cancelled")


class Job(NamedTuple):
    """A job to enqueue. ``ticks`` (the delay) and ``ttr`` are numbers of ticks."""

    body: bytes
    priority: int
    ticks: int
    ttr: int
    awaits: int
    """The number of members for which the job is held."""


class Come(NamedTuple):
    """A step of a verdict: a member arrives at a job.

    *job*: a number up to 4 means one of the newest jobs that were enqueued as held. A larger number means one of the
    newest jobs of any kind.
    """

    job: int
    member: str
    expect: int
    doom: str


class Add(NamedTuple):
    """A step of a verdict: a job is enqueued."""

    queue: int
    job: Job


class AddAgain(NamedTuple):
    """A step of a verdict: a job with the id of an earlier job is enqueued."""

    job: int
    ticks: int
    priority: int


class PutNote(NamedTuple):
    """A step of a verdict: a note is stored for ``ticks`` ticks. 0 means no time limit."""

    home: int
    key: str
    value: bytes
    ticks: int


class DropNote(NamedTuple):
    """A step of a verdict: a note is deleted."""

    home: int
    key: str


Act: TypeAlias = Come | Add | AddAgain | PutNote | DropNote


class Say(NamedTuple):
    """A verdict on a lease that a consumer has had. The lease may have ended."""

    kind: str
    lease: int
    ticks: int
    priority: int | None
    reason: str | None
    then: Then | None
    acts: list[Act]


class Then(NamedTuple):
    """The values that a verdict stores, like ``After``. ``ticks``: the time for which an ack keeps the outcome."""

    ticks: int
    outcome: bytes
    kind: OutcomeKind
    memo: bytes | None
    detail: bytes | None


class Enqueue(NamedTuple):
    queue: int
    jobs: list[Job]


class EnqueueAgain(NamedTuple):
    """Enqueue a job with the id of an earlier job and with other options."""

    job: int
    ticks: int
    priority: int


class Reserve(NamedTuple):
    consumer: int
    limit: int


class Reorder(NamedTuple):
    """Let a consumer's next calls name its queues in reverse order. If the calls already name the queues in reverse,
    let the next calls name no order.
    """

    consumer: int


class Settle(NamedTuple):
    consumer: int
    verdicts: list[Say]


class Exchange(NamedTuple):
    consumer: int
    verdicts: list[Say]
    limit: int


class Kick(NamedTuple):
    queue: int
    limit: int


class KickJob(NamedTuple):
    job: int


class Reschedule(NamedTuple):
    job: int
    ticks: int


class Delete(NamedTuple):
    job: int


class Peek(NamedTuple):
    job: int


class List(NamedTuple):
    queue: int
    state: State


class Outcomes(NamedTuple):
    """Read the outcomes of those of the *recent* jobs that are in the queue."""

    queue: int
    jobs: list[int]


class History(NamedTuple):
    queue: int
    kind: OutcomeKind | None


class Forget(NamedTuple):
    """Forget the outcomes of those of the *recent* jobs that are in the queue. If ``jobs`` is None, all expired
    outcomes are forgotten."""

    queue: int
    jobs: list[int] | None


class CarryOut(NamedTuple):
    """Carry out *acts*. The acts in *home* come first.

    *when*: conditions about notes in the *home* queue. Each condition has a key and one of three versions: the note's
    present version, the version in the latest earlier condition, or no version.
    """

    home: int
    acts: list[Act]
    when: list[tuple[str, Literal["now", "before", "none"]]]


class ListNotes(NamedTuple):
    home: int
    prefix: str


class Pause(NamedTuple):
    queue: int
    ticks: int


class Resume(NamedTuple):
    queue: int


class Purge(NamedTuple):
    queue: int
    states: list[State]


class Tick(NamedTuple):
    ticks: int


Step: TypeAlias = (
    Enqueue
    | EnqueueAgain
    | Reserve
    | Reorder
    | Settle
    | Exchange
    | Kick
    | KickJob
    | Reschedule
    | Delete
    | Peek
    | List
    | Outcomes
    | History
    | Forget
    | CarryOut
    | ListNotes
    | Pause
    | Resume
    | Purge
    | Tick
)
