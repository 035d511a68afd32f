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

READY, DELAYED, RESERVED, BURIED, HELD = range(5)  # the codes in the tables, in the order of STORED_STATES
PARKED = 5  # a ready job that waits in a line for a gate

AFTER_READY = 2**32  # the place of parked jobs in a listing, behind all priorities

# Jobs that one transaction promotes, kicks or purges. A slice holds the write lock for some milliseconds.
SLICE = 1_000
SLICE_PAUSE = 0.0005  # seconds between two slices. Other connections can get the lock in this time.

_LARGEST_INSERT = 128  # rows
_INLINE = 2048  # bytes of the largest body that is stored in its job's row

_ROW = 200  # bytes of a job without its body, in the table and in two indexes

_T = TypeVar("_T")

_decode_outlooks = msgspec.json.Decoder(list[tuple[str, int | str | None, int, int | None, int | None]]).decode

_decode_gated = msgspec.json.Decoder(tuple[int, int | None]).decode


class Outlook(NamedTuple):
    """Whether a queue has ready jobs, when its next job becomes due, and when its next lease ends."""

    queue: str
    paused_until: int
    has_ready: bool
    due_at: int | None
    lease_ends_at: int | None
    has_gates: bool = False
    opens_at: int | None = None
    """The time at which the next rate opens a gate for which jobs wait."""

    def has_work(self, now: int) -> bool:
        """Whether a job could be reserved."""
        return self.paused_until <= now and (self.has_ready or self.has_due(now))

    def has_past_pause(self, now: int) -> bool:
        """Whether the row of a pause that has ended still exists."""
        return 0 < self.paused_until <= now and not self.has_gates

    def has_due(self, now: int) -> bool:
        """Whether a job is due and not promoted yet."""
        return any(at <= now for at in self._times())

    def next_change_at(self, now: int) -> int | None:
        """Return the time at which the next delay, lease or pause ends. None: there is none."""
        if self.paused_until > now:
            return self.paused_until
        return min(self._times(), default=None)

    def _times(self) -> Iterator[int]:
        return (at for at in (self.due_at, self.lease_ends_at, self.opens_at) if at is not None)


def as_json(values: list[int] | tuple[str, ...]) -> str:
    """Encode a list as one parameter, which a statement reads with ``json_each``."""
    return msgspec.json.encode(values).decode()


def outlooks(packed: str) -> list[Outlook]:
    """Decode the row that ``sql/look.sql`` returns."""
    found: list[Outlook] = []
    for queue, paused_until, has_ready, due_at, lease_ends_at in unpacked(_decode_outlooks, packed):
        if isinstance(paused_until, str):
            paused, opens_at = unpacked(_decode_gated, paused_until)
            found.append(Outlook(queue, paused, bool(has_ready), due_at, lease_ends_at, True, opens_at))
        else:
            found.append(Outlook(queue, paused_until or 0, bool(has_ready), due_at, lease_ends_at))
    return found


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
    return due_after(nanoseconds(delay), now) if delay > 0 else (READY, 0)


def due_after(delay: int, now: int) -> tuple[int, int]:
    """Return the state and the due time of a job that is delayed by *delay* nanoseconds from now."""
    return (DELAYED, now + delay) if delay > 0 else (READY, 0)


def clean(reason: str | None) -> str | None:
    """Make a reason storable. The text of an error may have halves of surrogate pairs, and UTF-8 cannot encode
    these."""
    return None if reason is None else reason.encode("utf-8", "backslashreplace").decode()


# --- enqueue ---------------------------------------------------------------------------------------------


def insert(transaction: Transaction, queue: str, jobs: Sequence[NewJob], now: int, schema: str = "main") -> None:
    """Insert jobs in their order. A job that exists already stays unchanged."""
    for batch in in_batches(jobs):
        _insert_some(transaction, queue, batch, now, schema)


def in_batches(rows: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Split rows into batches, one for each INSERT.

    The sizes are powers of two. There are then few different statements, and SQLite prepares each of them once.
    """
    start = 0
    while start < len(rows):
        size = min(_LARGEST_INSERT, 1 << ((len(rows) - start).bit_length() - 1))
        yield rows[start : start + size]
        start += size


def repeated(text: str, group: str, rows: int) -> str:
    """Return the statement *text* for several rows. *group* is the part of *text* that is repeated for each row."""
    head, values, tail = text.partition(group)
    return head + ", ".join([values] * rows) + tail


def has_one_row(job: NewJob) -> bool:
    """Whether a new job is a single row. A large body and the body of a held job are stored in another table."""
    return job.terms is None and len(job.body) <= _INLINE


def size_of(jobs: Sequence[NewJob]) -> int:
    """Estimate the bytes that jobs take in the file."""
    return sum(len(job.body) for job in jobs) + _ROW * len(jobs)


def _insert_some(transaction: Transaction, queue: str, jobs: Sequence[NewJob], now: int, schema: str) -> None:
    parameters: list[Any] = []
    further: list[NewJob] = []  # jobs that have rows in other tables
    for job in jobs:
        body: bytes | None = job.body
        state, due_at = due(job.delay, now)
        if job.terms is not None or len(job.body) > _INLINE:  # has_one_row, inlined on purpose: this loop is hot
            body = None
            further.append(job)
            if _awaits(job) > 0:
                state, due_at = HELD, 0
            elif state == READY and job.terms is not None and job.terms.gates:
                state = PARKED
        parameters += (queue, now, job.id, state, due_at, job.priority, round(job.ttr * SECOND), body)
    transaction.execute_text(_insert_text(len(jobs), schema), parameters)
    for job in further:
        own = {"queue": queue, "id": job.id}
        transaction.execute_text(qualified("enqueue_body", schema), own | {"body": job.body})
        if _awaits(job) > 0:
            terms = {"awaits": _awaits(job), "delay": delay_of(job)}
            transaction.execute_text(qualified("enqueue_terms", schema), own | terms)


def delay_of(job: NewJob) -> int:
    """Return the column ``delay`` of a held job. It is negative if the job has gates."""
    delay = nanoseconds(job.delay) if job.delay > 0 else 0
    return -1 - delay if job.terms is not None and job.terms.gates else delay


def _awaits(job: NewJob) -> int:
    return job.terms.awaits if job.terms is not None else 0


@functools.lru_cache(maxsize=64)
def _insert_text(rows: int, schema: str) -> str:
    return repeated(qualified("enqueue", schema), "(?, ?, ?, ?, ?, ?, ?, ?)", rows)


# --- promotion of due jobs ---------------------------------------------------------------------------


def promote(transaction: Transaction, outlook: Outlook, now: int) -> tuple[int, bool]:
    """Make due jobs ready: at most one slice of jobs whose leases have ended, and one slice of jobs whose delays have
    ended.

    Returns the number of these jobs, and whether no other jobs are due.
    """
    promoted = 0
    for state, at in ((RESERVED, outlook.lease_ends_at), (DELAYED, outlook.due_at)):
        if at is not None and at <= now:
            asked = {"queue": outlook.queue, "state": state, "now": now, "limit": SLICE}
            then = "place" if outlook.has_gates else None
            promoted += move(transaction, "promote", "due", asked, then=then)
    return promoted, promoted < SLICE


def move(
    transaction: Transaction, statement: str, which: str, parameters: dict[str, Any], *, then: str | None = None
) -> int:
    """Run ``sql/<statement>.sql`` on the jobs that ``sql/<which>.sql`` finds. Returns the number of jobs.

    *then*: another statement that runs on the same jobs.
    """
    seqs, count, *_ = transaction.execute(which, parameters).fetchone()
    if count:
        transaction.execute(statement, {"seqs": seqs})
        if then is not None:
            transaction.execute(then, {"seqs": seqs})
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
    memo: bytes | None
    detail: bytes | None
    awaits: int | None
    unique_key: bytes | None

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of a listing."""
        major = {READY: self.priority, PARKED: AFTER_READY}.get(self.state, self.due_at)
        return major, self.seq

    @property
    def is_in_line(self) -> bool:
        """Whether this is a ready job with gates."""
        return self.state == PARKED or (self.state == READY and self.due_at != 0)

    def record(self, queue: str, now: int, held_by: str | None = None) -> JobRecord:
        """Return the public record at the time *now*."""
        kinds = tuple(map(type, self))
        if kinds[:11] not in _KINDS or kinds[11] is not bytes or kinds[14] is not int:
            raise MalformedRecord(f"job number {self.seq} has a column of a wrong type")
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
            memo=self.memo or b"",
            detail=self.detail or b"",
            awaits=self.awaits or 0,
            unique_key=self.unique_key,
            held_by=held_by,
        )


def effective_state(code: int, due_at: int, now: int) -> State:
    """Return a job's state at the time *now*. A job whose delay or lease has ended is ready."""
    return records.effective_state(_stored_state(code, due_at), is_due=due_at <= now)


def _stored_state(code: int, due_at: int) -> State:
    """Return the stored state. Raises ``MalformedRecord`` for values that multiq does not write."""
    if type(code) is not int or type(due_at) is not int or not READY <= code <= PARKED:
        raise MalformedRecord(f"a job has the state {code!r} and the due time {due_at!r}")
    return STORED_STATES[READY if code == PARKED else code]
