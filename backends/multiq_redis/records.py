"""Encodes jobs for the Lua scripts, and decodes the scripts' replies."""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from binascii import hexlify
from typing import TYPE_CHECKING, Any, NamedTuple

from multiq.backend import Gate, JobRecord, Lease, State
from multiq.errors import BackendCorrupt

from . import keys

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from multiq.backend import NewJob
    from multiq.backend.unique import UniqueUntil

MICROSECOND = 1_000_000  # per second

_REST = struct.Struct(">IQ12xx12x")  # a record from the priority to the body; only the priority and the ttr are set
_RECORD = struct.Struct(">QQIQIIIB12s")  # lua/include/record.lua
_FLAGS_AT = 40  # index in a record
_DELAY = struct.Struct(">Q")
_DETAILS = struct.Struct(">QI")  # lua/include/add.lua
_UNIQUE = struct.Struct(">QQc")  # the rest of the details of a job with a unique key
_NO_MAX_WAIT = 2**53 - 1
_UNTIL: dict[UniqueUntil, bytes] = {"gone": b"g", "buried": b"b", "reserved": b"r"}
_SIZE = struct.Struct(">H")
_KEY_AT = _RECORD.size + 2  # index in the record of a job with a unique key (lua/include/key_and_gates.lua)
_BODY_APART = 1
_EXTRAS_FROM = 128  # flags from this value on: the job may have a memo and a detail
_DOOMED_FROM = 196  # flags from this value on: the job is doomed
_GATES = ord("G")  # the byte before the gates in a record (lua/include/key_and_gates.lua)
GATED = "+"  # the end of the token of a lease whose job has gates
_INLINE = 1024  # bytes of the largest body that is stored inside a record; lua/enqueue.lua has the same number

_TOKEN_SIZE = 12  # bytes
_NO_TOKEN = b"?" * _TOKEN_SIZE

_UUID_SIZE = 16  # bytes; all other ids are stored in more bytes, so two ids are never stored alike
_UUID_PARTS = struct.Struct("8s4s4s4s12s").unpack
_END = b"\x80"


def microseconds(seconds: float) -> int:
    """Converts *seconds* to microseconds, rounded up, so that a delay is never shorter than the requested one."""
    whole = int(seconds)
    return whole * MICROSECOND + math.ceil((seconds - whole) * MICROSECOND)


# --- ids -------------------------------------------------------------------------------------------------


def pack_id(job_id: str) -> bytes:
    """Returns an id as it is stored. A UUID has 16 bytes. Any other id is its text and an end mark, at least 17
    bytes."""
    if len(job_id) == 36:
        digits = job_id.replace("-", "")
        try:
            packed = bytes.fromhex(digits)
        except ValueError:
            packed = b""
        # ``unpack_id`` has to return the same text, so capitals and misplaced dashes do not count as a UUID
        if packed.hex() == digits and job_id[8] == job_id[13] == job_id[18] == job_id[23] == "-" and len(digits) == 32:
            return packed
    return (job_id.encode("utf-8", "surrogatepass") + _END).ljust(_UUID_SIZE + 1, b"\0")


def pack_ids(ids: Sequence[str]) -> list[bytes]:
    """Pack many ids. If all ids are UUIDs, one call parses and checks the digits of all of them."""
    count = len(ids)
    text = "".join(ids)
    if len(text) == 36 * count and all(text[dash::36] == "-" * count for dash in (8, 13, 18, 23)):
        digits = text.replace("-", "")
        with contextlib.suppress(ValueError):
            packed = bytes.fromhex(digits)
            if len(packed) == _UUID_SIZE * count and packed.hex() == digits and all(len(one) == 36 for one in ids):
                return [packed[at : at + _UUID_SIZE] for at in range(0, len(packed), _UUID_SIZE)]
    return [pack_id(one) for one in ids]


def unpack_id(packed: bytes) -> str:
    """The inverse of ``pack_id``."""
    if len(packed) == _UUID_SIZE:
        return b"-".join(_UUID_PARTS(hexlify(packed))).decode()  # 0.6 of the time of slices of a str
    return packed.rstrip(b"\0").removesuffix(_END).decode("utf-8", "surrogatepass")


# --- in --------------------------------------------------------------------------------------------------


def new_jobs(jobs: Sequence[NewJob]) -> list[bytes]:
    """Returns the arguments of ``lua/enqueue.lua``: the delays, then the id and the record of each job."""
    if len({job.id for job in jobs}) < len(jobs):
        unique: dict[str, NewJob] = {}
        for job in jobs:
            unique.setdefault(job.id, job)  # if jobs have the same id, the first job counts
        jobs = list(unique.values())
    arguments = [b""] * (2 * len(jobs) + 1)
    arguments[0] = _delays(jobs)
    arguments[1::2] = pack_ids([job.id for job in jobs])
    options = {(job.priority, job.ttr) for job in jobs}
    if len(options) == 1:  # the common case
        head = _head(*options.pop())
        arguments[2::2] = [head + job.body for job in jobs]
    else:
        arguments[2::2] = [_head(job.priority, job.ttr) + job.body for job in jobs]
    return arguments


def new_job(job: NewJob) -> tuple[bytes, int, bytes] | None:
    """Returns the arguments of ``lua/enqueue_one.lua``, or None if the job is held, delayed or large."""
    if job.delay or len(job.body) > _INLINE or job.terms is not None:
        return None
    return pack_id(job.id), job.priority, _head(job.priority, job.ttr) + job.body


def record_of(job: NewJob) -> bytes:
    """Returns the record of a new job, beginning with the priority. The record has the whole body."""
    return _head(job.priority, job.ttr) + job.body


def details_of(job: NewJob) -> bytes:
    """Returns the details of a new job that ``lua/include/add.lua`` takes."""
    delay, terms = microseconds(job.delay), job.terms
    if terms is None:
        return _DETAILS.pack(delay, 0)
    details, unique = _DETAILS.pack(delay, terms.awaits), terms.unique
    gates = b"G" + b"".join(map(pack_gate, sorted(terms.gates))) if terms.gates else b""
    if unique is None:
        return details + _UNIQUE.pack(0, 0, b"k") + gates if gates else details
    max_wait = _NO_MAX_WAIT if unique.max_wait is None else microseconds(unique.max_wait)
    conflict = b"r" if unique.on_conflict == "replace" else b"k"
    after = _UNIQUE.pack(microseconds(unique.hold), max_wait, conflict)
    return details + after + _UNTIL[unique.until] + bytes([len(unique.key)]) + unique.key + gates


def has_key_or_gates(job: NewJob) -> bool:
    """Whether a new job has a unique key or gates."""
    return job.terms is not None and (job.terms.unique is not None or bool(job.terms.gates))


def pack_gate(gate: Gate) -> bytes:
    """Returns a gate as it is stored (lua/include/key_and_gates.lua)."""
    limit, key = gate.limit.encode("utf-8", "surrogatepass"), gate.key.encode("utf-8", "surrogatepass")
    return _SIZE.pack(len(limit)) + limit + _SIZE.pack(len(key)) + key


def unpack_gate(packed: bytes) -> Gate:
    """The inverse of ``pack_gate``."""
    (size,) = _SIZE.unpack_from(packed)
    limit, key = packed[_SIZE.size : _SIZE.size + size], packed[2 * _SIZE.size + size :]
    return Gate(limit.decode("utf-8", "surrogatepass"), key.decode("utf-8", "surrogatepass"))


@functools.lru_cache(maxsize=256)
def _head(priority: int, ttr: float) -> bytes:
    return _REST.pack(priority, round(ttr * MICROSECOND))


def _delays(jobs: Collection[NewJob]) -> bytes:
    if not any(job.delay for job in jobs):
        return b""
    return b"".join(_DELAY.pack(microseconds(job.delay)) for job in jobs)


# --- out -------------------------------------------------------------------------------------------------


def partition_of(lease: Lease) -> str:
    """The partition that the job of a lease is in."""
    if "/" not in lease.token:  # the common case
        return lease.queue
    number = lease.token.rstrip(GATED).partition("/")[2]
    return keys.partition(lease.queue, int(number)) if number.isdecimal() and len(number) <= 2 else lease.queue


def is_gated(lease: Lease) -> bool:
    """Whether the job of a lease has gates."""
    return lease.token.endswith(GATED)


def fence(token: str) -> bytes:
    """Returns the token that the job's record must have. *token* is that of the lease. For another driver's lease, no
    record has such a token."""
    return _fence(token[: 2 * _TOKEN_SIZE + 1])


@functools.lru_cache(maxsize=256)  # jobs of one reserve have the same token, up to the dot
def _fence(start: str) -> bytes:
    try:
        token = bytes.fromhex(start.removesuffix("."))
    except ValueError:
        return _NO_TOKEN
    return token if len(token) == _TOKEN_SIZE and any(token) else _NO_TOKEN


def leases(partition: str, reply: Sequence[bytes], now: int) -> list[Lease]:
    """Decode the jobs that ``lua/exchange.lua`` handed out. *reply* is the script's reply from the first job on."""
    queue, _, number = partition.partition("#")  # as in keys.py; each reserve comes here
    where = f"/{number}" if number else ""
    found: list[Lease] = []
    shared, digits = b"", ""  # jobs of one reserve have the same token
    parts = iter(reply)
    for packed in parts:
        record = next(parts)
        try:
            sequence, enqueued_at, priority, ttr, attempt, crashes, kicks, flags, token = _RECORD.unpack_from(record)
        except struct.error as exc:
            raise _corrupt(queue, packed) from exc
        if token != shared:
            shared, digits = token, token.hex()
        named = f"{digits}.{sequence}{where}"
        if flags & _BODY_APART:
            body = next(parts)
            if has_gates(record):
                named += GATED
        else:
            body = record[_RECORD.size :]
        age, lasts, job_id = (now - enqueued_at) / MICROSECOND, ttr / MICROSECOND, unpack_id(packed)
        # positional arguments in the order of the fields, because keywords would double the time of this loop
        if flags >= _EXTRAS_FROM:
            memo = next(parts)
            doomed = text_of(next(parts)) if flags >= _DOOMED_FROM else ""
            found.append(Lease(queue, job_id, named, body, priority, lasts, attempt, crashes, kicks, age, memo, doomed))
        else:
            found.append(Lease(queue, job_id, named, body, priority, lasts, attempt, crashes, kicks, age))
    return found


class Found(NamedTuple):
    """A job as ``lua/peek.lua`` and ``lua/jobs.lua`` return it."""

    packed_id: bytes
    state: State
    at: int
    """The job's score: its due time, the end of its lease, its priority, or its number among the buried jobs. For a
    held job: the number of arrivals for which it waits.
    """
    record: bytes
    body: bytes
    reason: bytes | None
    was_abandoned: bool = False
    """Whether the job's lease has ended, but no script has made the job ready yet."""
    memo: bytes | None = None
    detail: bytes | None = None

    def to_record(self, queue: str, now: int, held_by: bytes = b"") -> JobRecord:
        """Returns the public record of the job.

        *now* is the server's time, in microseconds. *held_by* is the closed gate that the job waits for, packed.
        """
        try:
            _, enqueued_at, priority, ttr, attempt, crashes, kicks, flags, _ = _RECORD.unpack_from(self.record)
        except struct.error as exc:
            raise _corrupt(queue, self.packed_id) from exc
        timeless = {State.READY: 0.0, State.BURIED: None, State.HELD: None}
        due_in = timeless.get(self.state, max(self.at - now, 0) / MICROSECOND)
        return JobRecord(
            queue=queue,
            id=unpack_id(self.packed_id),
            state=self.state,
            body=self.body if flags & _BODY_APART else self.record[_RECORD.size :],
            priority=priority,
            ttr=ttr / MICROSECOND,
            attempt=attempt,
            crashes=crashes + self.was_abandoned,
            kicks=kicks,
            due_in=due_in,
            age=(now - enqueued_at) / MICROSECOND,
            reason=None if self.reason is None else text_of(self.reason),
            memo=self.memo or b"",
            detail=self.detail or b"",
            awaits=self.at if self.state is State.HELD else 0,
            held_by=str(unpack_gate(held_by)) if held_by else None,
            unique_key=_key_in(self.record) if flags & _BODY_APART else None,
        )


def parse_peek(packed_id: bytes, reply: list[Any]) -> tuple[Found, int]:
    """Decode the reply of ``lua/peek.lua``. Returns the job and the server's time."""
    now, state, at, abandoned, record, body, reason, *extras = reply
    return Found(packed_id, State(state.decode()), _score(at), record, body, reason, abandoned == b"1", *extras), int(
        now
    )


def parse_listing(
    state: State, reply: list[Any], *, was_abandoned: bool = False
) -> tuple[list[tuple[tuple[int, int], Found]], int]:
    """Decode the reply of ``lua/jobs.lua``. Returns each job with (score, sequence), and the server's time."""
    now, *rest = reply
    found = []
    parts = iter(rest)
    for place in parts:
        score, record, body, reason = next(parts), next(parts), next(parts), next(parts)
        extras = (next(parts), next(parts)) if _has_extras(record) else ()
        at = _score(score)
        job = Found(place[12:], state, at, record, body, reason, was_abandoned, *extras)
        rank = 0 if state is State.HELD else at  # all held jobs have the score 0
        found.append(((rank, int.from_bytes(place[:8], "big")), job))
    return found, int(now)


def parse_parked(reply: list[Any]) -> tuple[list[tuple[bytes, Found]], int]:
    """Decode the reply of ``lua/jobs_parked.lua``. Returns each job with its member, and the server's time."""
    now, *rest = reply
    found = []
    parts = iter(rest)
    for member in parts:
        score, record, body, reason = next(parts), next(parts), next(parts), next(parts)
        extras = (next(parts), next(parts)) if _has_extras(record) else ()
        size = _gate_size(member)
        found.append(
            (member, Found(member[size + 12 :], State.READY, int(score), record, body, reason, False, *extras))
        )
    return found, int(now)


def _gate_size(packed: bytes) -> int:
    at = 0
    for _ in range(2):
        at += _SIZE.size + _SIZE.unpack_from(packed, at)[0]
    return at


def text_of(stored: bytes) -> str:
    return stored.decode("utf-8", "backslashreplace")


def _key_in(record: bytes) -> bytes | None:
    """The unique key in the record of a job whose body is in the bodies hash."""
    if len(record) <= _KEY_AT or record[_KEY_AT - 2] == _GATES:
        return None
    return record[_KEY_AT : _KEY_AT + record[_KEY_AT - 1]]


def has_gates(record: bytes) -> bool:
    """Whether a job has gates."""
    if len(record) <= _KEY_AT or not record[_FLAGS_AT] & _BODY_APART:
        return False
    at = _KEY_AT - 2 if record[_KEY_AT - 2] == _GATES else _KEY_AT + record[_KEY_AT - 1]
    return record[at : at + 1] == b"G"


def _has_extras(record: bytes) -> bool:
    return len(record) >= _RECORD.size and record[_FLAGS_AT] >= _EXTRAS_FROM


def _score(score: bytes) -> int:
    """Return a score as an integer. multiq writes only integers, but another program may have written a different
    score."""
    try:
        return int(score)
    except ValueError:
        return int(min(max(float(score), -(2.0**62)), 2.0**62))  # any other score is a float


def _corrupt(queue: str, packed_id: bytes) -> BackendCorrupt:
    return BackendCorrupt(
        f"the record of job {packed_id.hex()} of queue {queue!r} is not one of multiq's: another program wrote it, "
        "or a newer multiq"
    )
