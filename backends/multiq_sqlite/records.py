"""Job records in the tables: inserts, promotion of due jobs, and the public ``JobRecord``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from multiq.backend import STORED_STATES
from multiq.driverkit import records
from multiq.driverkit.clock import SECOND, nanoseconds

from .errors import MalformedRecord
from .statements import qualified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import JobRecord, NewJob, State

    from .connection import Connection, Transaction

READY, DELAYED, RESERVED, BURIED = range(4)  # the codes in the tables, in the order of STORED_STATES

# Jobs that one transaction promotes, kicks or purges. A slice holds the write lock for some milliseconds.
SLICE = 1_000
SLICE_PAUSE = 0.0005  # seconds between two slices. Other connections can get the lock in this time.

_LARGEST_INSERT = 128  # rows
_INLINE = 2048  # bytes of the largest body that is stored in its job's row

_ROW = 200  # bytes of a job without its body, in the table and in two indexes

_T = TypeVar("_T")

_decode_outlooks = msgspec.json.Decoder(list[tuple[str, int | None, int, int | None, int | None]]).decode


class Outlook(NamedTuple):
    """Whether a queue has ready jobs, when its next job becomes due, and when its next lease ends."""

    queue: str
    paused_until: int
    has_ready: bool
    due_at: int | None
    lease_ends_at: int | None

    def has_work(self, now: int) -> bool:
        """Whether a job could be reserved."""
        return self.paused_until <= now and (self.has_ready or self.has_due(now))

    def has_past_pause(self, now: int) -> bool:
        """Whether the row of a pause that has ended still exists."""
        return 0 < self.paused_until <= now

    def has_due(self, now: int) -> bool:
        """Whether a job is due and not promoted yet."""
        return any(at <= now for at in self._times())

    def next_change_at(self, now: int) -> int | None:
        """Return when the next job may become reservable without any call. None if there is no such job."""
        if self.paused_until > now:
            return self.paused_until
        return min(self._times(), default=None)

    def _times(self) -> Iterator[int]:
        return (at for at in (self.due_at, self.lease_ends_at) if at is not None)


def as_json(values: list[int] | tuple[str, ...]) -> str:
    """Encode a list as one parameter, which a statement reads with ``json_each``."""
    return msgspec.json.encode(values).decode()


def outlooks(packed: str) -> list[Outlook]:
    """Decode the row that ``sql/look.sql`` returns."""
    return [
        Outlook(queue, paused_until or 0, bool(has_ready), due_at, lease_ends_at)
        for queue, paused_until, has_ready, due_at, lease_ends_at in unpacked(_decode_outlooks, packed)
    ]


def unpacked(decode: Callable[[str], _T], packed: str) -> _T:
    """Decode the JSON text into which a statement has packed many rows.

    Raises ``MalformedRecord`` if a column holds a value that multiq does not write.
    """
    try:
        return decode(packed)
    except msgspec.DecodeError as exc:
        raise MalformedRecord(exc) from exc


def due(delay: float, now: int) -> tuple[int, int]:
    """Return the state and the due time of a job that is delayed by *delay* seconds from now."""
    return (DELAYED, now + nanoseconds(delay)) if delay > 0 else (READY, 0)


def clean(reason: str | None) -> str | None:
    """Make a reason storable. An error's text may hold halves of surrogate pairs, which UTF-8 cannot encode."""
    return None if reason is None else reason.encode("utf-8", "backslashreplace").decode()


# --- enqueue ---------------------------------------------------------------------------------------------


def insert(transaction: Transaction, queue: str, jobs: Sequence[NewJob], now: int, schema: str = "main") -> None:
    """Insert jobs in their order. A job that exists already stays unchanged."""
    start = 0
    while start < len(jobs):
        # Batches have sizes that are powers of two. Few statements differ, and each of them is prepared only once.
        size = min(_LARGEST_INSERT, 1 << ((len(jobs) - start).bit_length() - 1))
        _insert_some(transaction, queue, jobs[start : start + size], now, schema)
        start += size


def is_large(body: bytes) -> bool:
    """Whether a body is stored in a table of its own."""
    return len(body) > _INLINE


def size_of(jobs: Sequence[NewJob]) -> int:
    """Estimate the bytes that jobs take in the file."""
    return sum(len(job.body) for job in jobs) + _ROW * len(jobs)


def _insert_some(transaction: Transaction, queue: str, jobs: Sequence[NewJob], now: int, schema: str) -> None:
    parameters: list[Any] = []
    for job in jobs:
        body = None if is_large(job.body) else job.body
        parameters += (queue, now, job.id, *due(job.delay, now), job.priority, round(job.ttr * SECOND), body)
    transaction.execute_text(_insert_text(len(jobs), schema), parameters)
    for job in jobs:
        if is_large(job.body):
            large = {"queue": queue, "id": job.id, "body": job.body}
            transaction.execute_text(qualified("enqueue_body", schema), large)


@functools.lru_cache(maxsize=64)
def _insert_text(rows: int, schema: str) -> str:
    head, values, tail = qualified("enqueue", schema).partition("(?, ?, ?, ?, ?, ?, ?, ?)")
    return head + ", ".join([values] * rows) + tail


# --- promotion of due jobs ---------------------------------------------------------------------------


def promote(transaction: Transaction, outlook: Outlook, now: int) -> tuple[int, bool]:
    """Make due jobs ready: at most one slice whose leases have ended, and one slice whose delays have ended.

    Returns the number of these jobs, and whether they were all due jobs.
    """
    promoted = 0
    for state, at in ((RESERVED, outlook.lease_ends_at), (DELAYED, outlook.due_at)):
        if at is not None and at <= now:
            asked = {"queue": outlook.queue, "state": state, "now": now, "limit": SLICE}
            promoted += move(transaction, "promote", "due", asked)
    return promoted, promoted < SLICE


def move(transaction: Transaction, statement: str, which: str, parameters: dict[str, Any]) -> int:
    """Run ``sql/<statement>.sql`` on the jobs that ``sql/<which>.sql`` finds. Returns the number of jobs."""
    seqs, count = transaction.execute(which, parameters).fetchone()
    if count:
        transaction.execute(statement, {"seqs": seqs})
    return int(count)


def look(connection: Connection, queues: str) -> list[Outlook]:
    """Return the ``Outlook`` of each of *queues*, a JSON list. Reads outside a transaction."""
    return outlooks(connection.select("look", {"queues": queues})[0][0])


def look_inside(transaction: Transaction, queues: str) -> list[Outlook]:
    """Return the ``Outlook`` of each of *queues*, a JSON list. Reads inside a transaction."""
    return outlooks(transaction.execute("look", {"queues": queues}).fetchone()[0])


# --- records ---------------------------------------------------------------------------------------------


_KINDS = {(int, str, *[int] * 8, kind) for kind in (str, type(None))}


class Row(NamedTuple):
    """A job as read by ``peek`` and ``jobs``."""

    seq: int
    id: str
    state: int
    priority: int
    due_at: int
    ttr: int
    enqueued_at: int
    attempt: int
    crashes: int
    kicks: int
    reason: str | None
    body: bytes

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of a listing."""
        return (self.priority if self.state == READY else self.due_at, self.seq)

    def record(self, queue: str, now: int) -> JobRecord:
        """Return the public record, as of *now*."""
        kinds = tuple(map(type, self))
        if kinds[:11] not in _KINDS or kinds[11] is not bytes:
            raise MalformedRecord(f"columns of job number {self.seq}")
        return records.job_record(
            queue=queue,
            id=self.id,
            body=self.body,
            stored=_stored_state(self.state, self.due_at),
            left=(self.due_at - now) / SECOND,
            priority=self.priority,
            ttr=self.ttr / SECOND,
            attempt=self.attempt,
            crashes=self.crashes,
            kicks=self.kicks,
            age=max(0, now - self.enqueued_at) / SECOND,
            reason=self.reason,
        )


def effective_state(code: int, due_at: int, now: int) -> State:
    """Return a job's state as of *now*. A job whose delay or lease has ended is ready."""
    return records.effective_state(_stored_state(code, due_at), is_due=due_at <= now)


def _stored_state(code: int, due_at: int) -> State:
    """Raises ``MalformedRecord`` for columns that multiq does not write."""
    if type(code) is not int or type(due_at) is not int or not READY <= code <= BURIED:
        raise MalformedRecord(f"a state of {code!r} and a due time of {due_at!r}")
    return STORED_STATES[code]
