"""Code for the backend and its consumers: states, ids, enqueuing, polls and job records.

A poll reads whether a queue has ready jobs and when other jobs become ready. Its result is an ``Outlook``.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Gate, State
from multiq.driverkit import records
from multiq.driverkit.clock import nanoseconds
from multiq.errors import OptionInvalid

from .scan_window import BUSY, FROM_START, IDLE, NO_SCAN
from .statements import Sql, literal, rendered, template

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from multiq.backend import JobRecord, NewJob, UniqueKey

    from .connection import Connection
    from .pool import Pool
    from .scan_window import ScanRestart, ScanWindow

# The numbers in the column ``state``. Jobs in AGAIN are ready, too. Scans always read AGAIN from its start. In another
# state, a job whose transaction commits late would be behind the cursors: see external_transaction.py.
READY, DELAYED, RESERVED, BURIED, AGAIN, HELD, PARKED = range(7)
_STATES = (State.READY, State.DELAYED, State.RESERVED, State.BURIED, State.READY, State.HELD, State.READY)
"""The states in the order of these numbers."""

MICROSECOND = 1_000  # nanoseconds
SECOND = 1_000_000  # microseconds

SLICE = 1_000  # jobs that one transaction promotes, kicks or purges

_CHUNK = 1_000_000  # approximate bytes of one INSERT statement
_HORIZON = 100_000  # microseconds that an idle process looks ahead. The process polls again long before.
_OVERHEAD = 2048  # bytes of a statement without the body: the SQL words, and the longest name and id in hex
UNTIL = ("gone", "buried", "reserved")
"""The first byte of the column ``unique_key`` is an index into this tuple."""

_OPENS, _NO_LIMITS = Sql("opens.sql"), Sql("'-'")

GATES_MARK = "#"
"""The first character of the column ``gates``. Neither a memo in hex nor the reason of a doom ever begins with this
character."""

_LONGEST_ID = 255  # bytes that the column takes: the byte _NO_UUID, and up to 254 bytes of the id
_is_uuid = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
_UUID_BYTES = 16
_UUID_DIGITS = 2 * _UUID_BYTES
_terms = operator.attrgetter("terms")
_NO_UUID = b"\xff"  # The first byte of an id that is not a UUID. UTF-8 never has this byte.


@functools.lru_cache(maxsize=256)
def microseconds(seconds: float) -> int:
    """Convert seconds to microseconds, rounded up. A delay may be longer than the requested delay, but never
    shorter."""
    return -(-nanoseconds(seconds) // MICROSECOND)


# --- ids -------------------------------------------------------------------------------------------------


def pack_id(job_id: str) -> bytes:
    """Return an id as the table stores it.

    A UUID is stored in 16 bytes. Any other id is stored as its bytes, after one or two marker bytes.
    """
    return bytes.fromhex(_pack_id_hex(job_id))


def unpack_id(kept: bytes) -> str:
    """The inverse of ``pack_id``."""
    return unpack_hex_id(kept.hex())


def unpack_hex_id(kept: str) -> str:
    """``unpack_id`` for bytes in hex."""
    if len(kept) == _UUID_DIGITS:
        return f"{kept[:8]}-{kept[8:12]}-{kept[12:16]}-{kept[16:20]}-{kept[20:]}".lower()
    return decode_text(bytes.fromhex(kept).lstrip(_NO_UUID))


def decode_text(kept: bytes) -> str:
    """Decode a stored text. Bytes that are not UTF-8 come from another program, and are shown as escapes."""
    try:
        return kept.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return kept.decode("utf-8", "backslashreplace")


def _pack_id_hex(job_id: str) -> str:
    if _is_uuid(job_id):
        return job_id.replace("-", "")
    text = _NO_UUID + job_id.encode("utf-8", "surrogatepass")
    return (_NO_UUID + text if len(text) == _UUID_BYTES else text).hex()


# --- enqueue ---------------------------------------------------------------------------------------------


def insert_statements(
    queue: str, jobs: Sequence[NewJob], now: Sql, *, ready: int = READY, table: str = "multiq_jobs", chunk: int = _CHUNK
) -> list[str]:
    """Return the statements that add jobs in their order. A statement has about *chunk* bytes or fewer.

    *ready* is the state of the jobs without a delay.
    """
    verb, row = "enqueue", _row
    if any(map(_terms, jobs)):
        verb, row = (
            ("enqueue_terms", _row_with_all) if any(map(_is_special, jobs)) else ("enqueue_held", _row_with_terms)
        )
    head, tail = _insert_into(table, verb)
    name = f"x'{queue.encode().hex()}'"
    if len(jobs) == 1:  # the most frequent call, and a part of its time is spent here
        return [head + row(name, jobs[0], now, ready) + tail]
    return [head + ",".join(rows) + tail for rows in chunked((row(name, job, now, ready) for job in jobs), chunk)]


def key_of(job: NewJob) -> UniqueKey | None:
    """Return the unique key of a new job. None: the job has no unique key."""
    return None if job.terms is None else job.terms.unique


def have_keys(jobs: Sequence[NewJob]) -> bool:
    return any(map(_terms, jobs)) and any(key_of(job) is not None for job in jobs)  # most jobs have no terms


def gates_column(job: NewJob) -> bytes | None:
    """Return the column ``gates`` of a new job."""
    gates = () if job.terms is None else job.terms.gates
    if not gates:
        return None
    texts = (f"{_hex(gate.limit)}:{_hex(gate.key)}" for gate in sorted(set(gates)))
    return (GATES_MARK + ",".join(texts)).encode()


def gates_in(column: str | None) -> tuple[Gate, ...]:
    """Return the gates in the column ``gates``."""
    if not column:
        return ()
    pairs = (pair.partition(":") for pair in column[1:].split(","))
    try:
        return tuple(
            Gate(decode_text(bytes.fromhex(limit)), decode_text(bytes.fromhex(key))) for limit, _, key in pairs
        )
    except ValueError:  # Another program has written it.
        return ()


def _hex(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def chunked(rows: Iterable[str], chunk: int, size_of: Callable[[str], int] = len) -> Iterator[list[str]]:
    """Yield the rows of each statement. A statement has one row, or several rows with about *chunk* bytes or fewer.

    *size_of* returns the bytes that a row has in SQL. By default, the rows are SQL.
    """
    some: list[str] = []
    size = 0
    for row in rows:
        own = size_of(row)
        size += own + 1
        if some and size > chunk:
            yield some
            some, size = [], own
        some.append(row)
    if some:
        yield some


def body_limit(packet: int) -> int:
    """Return the size in bytes of the largest body that fits, in hex, into a statement of *packet* bytes."""
    return max(0, (packet - _OVERHEAD) // 2)


@functools.lru_cache(maxsize=16)
def _insert_into(table: str, verb: str) -> tuple[str, str]:
    """Return the parts of an INSERT before and after the rows."""
    head, _, tail = template(verb).replace("multiq_jobs", table).partition("({row})")
    return head, tail


def _row(name: str, job: NewJob, now: str, ready: int) -> str:
    settings = _settings(job.priority, job.delay, job.ttr, now, ready)
    return f"({name},x'{_stored_id(job)}',{settings},x'{job.body.hex()}')"


def _row_with_terms(name: str, job: NewJob, now: str, ready: int) -> str:
    """Return a row that ends in the columns of a held job."""
    if job.terms is None or job.terms.awaits <= 0:
        return f"{_row(name, job, now, ready)[:-1]},NULL,NULL)"
    settings = f"{HELD:d},0,{job.priority:d},{microseconds(job.ttr):d},{now}"
    own = f"{job.terms.awaits:d},{microseconds(job.delay):d}"
    return f"({name},x'{_stored_id(job)}',{settings},x'{job.body.hex()}',{own})"


def _row_with_all(name: str, job: NewJob, now: str, ready: int) -> str:
    """Return a row that ends in the columns of a held job, the unique key and the gates."""
    unique = key_of(job)
    column = "NULL" if unique is None else f"x'{UNTIL.index(unique.until):02x}{unique.key.hex()}'"
    return f"{_row_with_terms(name, job, now, ready)[:-1]},{column},{literal(gates_column(job))})"


def _is_special(job: NewJob) -> bool:
    return job.terms is not None and (job.terms.unique is not None or bool(job.terms.gates))


def _stored_id(job: NewJob) -> str:
    """Return the job's id in hex. Raises ``OptionInvalid`` if the id is too long."""
    job_id = _pack_id_hex(job.id)
    if len(job_id) > 2 * _LONGEST_ID:
        raise OptionInvalid(f"the id {job.id[:40]!r}... is too long: an id has at most {_LONGEST_ID - 1} bytes")
    return job_id


@functools.lru_cache(maxsize=256)
def _settings(priority: int, delay: float, ttr: float, now: str, ready: int) -> str:
    """Return a new row's values of the columns ``state`` to ``enqueued_at``.

    Most jobs have the same values, so the cache helps.
    """
    state, place = (DELAYED, f"{now}+{microseconds(delay)}") if delay > 0 else (ready, priority)
    return f"{state:d},{place},{priority:d},{microseconds(ttr):d},{now}"


# --- looking ---------------------------------------------------------------------------------------------


class Outlook(NamedTuple):
    """The result of a poll of one queue. Times are in microseconds."""

    queue: str
    now: int
    paused_for: int
    """The queue is not paused if this is 0 or less."""
    has_ready: bool
    due_in: int | None
    """Time until a delayed job is due. None if it is longer than the look-ahead."""
    lease_ends_in: int | None
    """Time until a lease ends. None if it is longer than the look-ahead."""
    opens_in: int | None
    """Time until a reserve has to look at a limit. None if it is longer than the look-ahead."""

    @property
    def has_due(self) -> bool:
        """Whether a job is due and not promoted yet. Such a job is delayed, or its lease has ended."""
        return any(left <= 0 for left in self._times())

    @property
    def without_due(self) -> Outlook:
        """Return the same outlook without its due jobs. This is used if no due job can be reserved now."""
        due_in, lease_ends_in = (
            None if left is None or left <= 0 else left for left in (self.due_in, self.lease_ends_in)
        )
        return self._replace(due_in=due_in, lease_ends_in=lease_ends_in)

    @property
    def has_work(self) -> bool:
        """Whether a job could be reserved."""
        return self.paused_for <= 0 and (self.has_ready or self.has_due)

    @property
    def has_open_gate(self) -> bool:
        """Whether a gate with parked jobs may be open."""
        return self.paused_for <= 0 and self.opens_in is not None and self.opens_in <= 0

    @property
    def has_past_pause(self) -> bool:
        """Whether there is still a row of a pause that has ended. For a missing row, the poll returns a pause that
        ended in 1970."""
        return -self.now < self.paused_for <= 0

    @property
    def changes_in(self) -> int | None:
        """The time after which a job may become reservable without any call. None if that is beyond the look-ahead."""
        if self.paused_for > 0:
            return self.paused_for
        return min((left for left in (*self._times(), self.opens_in) if left is not None), default=None)

    def _times(self) -> Iterator[int]:
        return (left for left in (self.due_in, self.lease_ends_in) if left is not None)


class Poll:
    """The statement of one poll of some queues. Reading its reply also updates the scan windows.

    *claimed_from*: a queue. The poll leaves out the ready jobs of this queue, because a busy consumer claims them in
    the same packet.
    """

    def __init__(self, pool: Pool, queues: Sequence[str], share: int, *, claimed_from: str | None = None) -> None:
        self._queues = queues
        self._scan_windows = list(map(pool.poller.scan_windows.of, queues))
        self._restarts: list[ScanRestart] = []
        claimed = [queue == claimed_from for queue in queues]
        values = [
            self._values(scan_window, share, is_claimed=is_claimed)
            for scan_window, is_claimed in zip(self._scan_windows, claimed, strict=True)
        ]
        self.sql = _look_statement(pool, queues, values, 0 if share == BUSY else _HORIZON)

    def read(self, rows: Sequence[tuple[str]]) -> list[Outlook]:
        """Return the outlooks in the poll's reply, and update the scan windows."""
        took, found = _outlooks(rows, self._queues)
        for restart in self._restarts:
            restart.scanned(took)
        for number, (scan_window, outlook) in enumerate(zip(self._scan_windows, found, strict=True)):
            if outlook.has_due and scan_window.is_due_locked:
                found[number] = outlook.without_due
            if outlook.opens_in is not None:
                scan_window.has_limits = True
            if outlook.has_ready:  # The claim that follows must find the ready jobs.
                scan_window.ready.restart.request()
                scan_window.again.restart.request()
        return found

    def _values(self, scan_window: ScanWindow, share: int, *, is_claimed: bool) -> dict[str, Sql]:
        ready, again = (
            NO_SCAN if is_claimed else self._scan(cursor.restart, share)
            for cursor in (scan_window.ready, scan_window.again)
        )
        opens = _OPENS if scan_window.may_have_limits() else _NO_LIMITS
        return {"again": again, "ready": ready, "due": self._scan(scan_window.due, share), "opens": opens}

    def _scan(self, restart: ScanRestart, share: int) -> Sql:
        if not restart.is_due(share):
            return NO_SCAN
        self._restarts.append(restart)
        return FROM_START


def look(connection: Connection, pool: Pool, queues: Sequence[str], share: int = IDLE) -> list[Outlook]:
    """Poll the queues without locking any row."""
    poll = Poll(pool, queues, share)
    return poll.read(connection.select(poll.sql))


def _look_statement(pool: Pool, queues: Sequence[str], conditions: Sequence[dict[str, Sql]], horizon: int) -> str:
    """Return the statement that polls *queues*, *horizon* microseconds ahead. *conditions*: the conditions of the scan
    windows.

    With a horizon of 0, the statement returns only whether any job is due, and not which job is due first.
    """
    order = Sql("ASC" if horizon else "DESC")
    parts = []
    for number, (queue, condition) in enumerate(zip(queues, conditions, strict=True)):
        values = {"queue": queue.encode(), "now": pool.now, "horizon": horizon}
        if condition["opens"] is _OPENS:
            condition["opens"] = Sql(rendered("opens", **values))
        parts.append(rendered("look", number=number, order=order, **values, **condition))
    return parts[0] if len(parts) == 1 else "(" + ") UNION ALL (".join(parts) + ")"


def _outlooks(rows: Sequence[tuple[str]], queues: Sequence[str]) -> tuple[float, list[Outlook]]:
    """Return the seconds that the poll took on the server, and the outlooks in the order of *queues*."""
    took = 0
    found = []
    for (text,) in rows:
        number, now, paused_for, has_ready, due_in, lease_ends_in, opens_in, micros = text.split()
        times = (None if left == "-" else int(left) for left in (due_in, lease_ends_in, opens_in))
        found.append((int(number), Outlook(queues[int(number)], int(now), int(paused_for), has_ready == "1", *times)))
        took = max(took, int(micros))
    return took / SECOND, [outlook for _, outlook in sorted(found)]


# --- records ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A job as ``peek`` and ``jobs`` read it."""

    seq: int
    id: bytes
    state: int
    place: int
    priority: int
    ttr: int
    age: int
    attempt: int
    crashes: int
    kicks: int
    left: int
    reason: bytes | None
    body: bytes
    memo: bytes | None
    detail: bytes | None
    awaits: int | None
    unique_key: bytes | None
    gates: str | None

    def record(self, queue: str, held_by: str | None = None) -> JobRecord:
        """Return the public record. *held_by*: the closed gate of a parked job."""
        return records.job_record(
            queue=queue,
            id=unpack_id(self.id),
            body=self.body,
            stored=_STATES[self.state],
            left=self.left / SECOND,
            priority=self.priority,
            ttr=self.ttr / SECOND,
            attempt=self.attempt,
            crashes=self.crashes,
            kicks=self.kicks,
            age=self.age / SECOND,
            reason=None if self.reason is None else decode_text(self.reason),
            memo=self.memo or b"",
            detail=self.detail or b"",
            awaits=(self.awaits or 0) if self.state == HELD else 0,
            unique_key=self.unique_key[1:] if self.unique_key else None,
            held_by=held_by,
        )


def effective_state(code: int, *, is_due: bool) -> State:
    """Return a job's state. A due job is ready."""
    return records.effective_state(_STATES[code], is_due=is_due)
