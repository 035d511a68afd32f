"""Unique jobs. ``multiq_unique`` names the job that took a key last. The state of that job shows whether the job still
has the key.

The write lock is held from the check of a key until the insert, so no other process can take the key in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multiq.driverkit.clock import SECOND, nanoseconds

from .limits import gates_of, insert_gates
from .records import BURIED, DELAYED, HELD, PARKED, READY, RESERVED, delay_of, due, insert
from .statements import qualified

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from multiq.backend import NewJob, UniqueKey

    from .connection import Transaction

_UNTIL = ("gone", "buried", "reserved")  # the column unique_until has an index into this tuple


class _Taken(NamedTuple):
    """The entry of a key. It has the job, if the job still exists and was enqueued with this key."""

    id: str
    held_until: int
    seq: int | None
    state: int | None
    due_at: int
    attempt: int
    enqueued_at: int
    until: int | None

    def has_key(self) -> bool:
        """Whether the job still has the key."""
        if self.seq is None or self.until is None:
            return False
        until = _UNTIL[self.until]
        if until == "buried":
            return self.state != BURIED
        return until == "gone" or self.attempt == 0

    def may_be_replaced(self, now: int) -> bool:
        return self.state in {READY, DELAYED, HELD, PARKED} or (self.state == RESERVED and self.due_at <= now)


def key_of(job: NewJob) -> UniqueKey | None:
    """Return the unique key of a new job. None: the job has no unique key."""
    return None if job.terms is None else job.terms.unique


def insert_all(
    transaction: Transaction, queue: str, jobs: Sequence[NewJob], now: int, schema: str = "main"
) -> list[str]:
    """Insert jobs in their order. For each job, returns its id, or the id of the other job that has its unique key."""
    if all(job.terms is None for job in jobs):
        insert(transaction, queue, jobs, now, schema)
        return [job.id for job in jobs]
    ids: list[str] = []
    plain: list[NewJob] = []
    for job in jobs:
        if key_of(job) is None and not gates_of(job):
            plain.append(job)
            ids.append(job.id)
            continue
        insert(transaction, queue, plain, now, schema)
        plain = []
        ids.append(_insert_one(transaction, queue, job, now, schema))
    insert(transaction, queue, plain, now, schema)
    return ids


def is_anothers(transaction: Transaction, queue: str, seq: int, key: bytes, now: int) -> bool:
    """Whether another job than *seq* has this key. Also True if the key is held by time for another job."""
    taken = _taken(transaction, queue, key, "main")
    if taken is None or (taken.held_until <= now and not taken.has_key()):
        return False
    return taken.seq != seq


class OwnKey(NamedTuple):
    """The key that a job was enqueued with."""

    key: bytes
    until: int


def own_key(transaction: Transaction, seq: int) -> OwnKey | None:
    """Return the key that a job was enqueued with. A job with a body in its own row has no key."""
    row = transaction.execute("own_key", {"seq": seq}).fetchone()
    return None if row is None else OwnKey(*row)


def take_again(transaction: Transaction, queue: str, seq: int, key: bytes, old_seq: int | None = None) -> None:
    """Store that the job *seq* has its key again. *old_seq*: the job's number before a reschedule."""
    entry = transaction.execute("entry", {"queue": queue, "key": key}).fetchone()
    held_until = entry[1] if entry is not None and entry[0] in {seq, old_seq} else 0
    transaction.execute("take_key", {"key": key, "seq": seq, "held_until": held_until})


def _insert_one(transaction: Transaction, queue: str, job: NewJob, now: int, schema: str) -> str:
    """Insert a job with a unique key or gates. Returns its id, or the id of the other job that has its unique key."""
    unique = key_of(job)

    def execute(name: str, parameters: dict[str, Any]) -> Any:
        return transaction.execute_text(qualified(name, schema), parameters)

    if execute("find", {"queue": queue, "id": job.id}).fetchone() is not None:
        return job.id
    if unique is None:
        insert(transaction, queue, [job], now, schema)
        insert_gates(execute, queue, job)
        return job.id
    taken = _taken(transaction, queue, unique.key, schema)
    if taken is not None and (taken.held_until > now or taken.has_key()):
        if taken.id != job.id and taken.has_key() and unique.on_conflict == "replace" and taken.may_be_replaced(now):
            _replace(execute, queue, taken, job, now)
        return taken.id
    insert(transaction, queue, [job], now, schema)
    (seq, *_) = execute("find", {"queue": queue, "id": job.id}).fetchone()
    execute("set_key", {"seq": seq, "key": unique.key, "until": _UNTIL.index(unique.until)})
    if gates_of(job):
        insert_gates(execute, queue, job)
    held_until = now + nanoseconds(unique.hold) if unique.hold > 0 else 0
    execute("take_key", {"key": unique.key, "seq": seq, "held_until": held_until})
    for (key,) in execute("expired_keys", {"queue": queue, "now": now}).fetchall():
        execute("end_hold", {"queue": queue, "key": key})
        execute("forget_key", {"queue": queue, "key": key})
    return job.id


def _replace(execute: Any, queue: str, taken: _Taken, job: NewJob, now: int) -> None:
    unique = key_of(job)
    assert unique is not None  # noqa: S101 - the caller has asked
    delay = job.delay
    if unique.max_wait is not None:
        delay = min(delay, max(0.0, unique.max_wait - (now - taken.enqueued_at) / SECOND))
    state, due_at = due(delay, now)
    if state == READY and gates_of(job):
        state = PARKED
    if taken.state == HELD:
        state, due_at = HELD, taken.due_at
        execute("replace_delay", {"seq": taken.seq, "delay": delay_of(job)})
    moved = {"state": state, "due_at": due_at, "priority": job.priority, "ttr": round(job.ttr * SECOND)}
    execute("drop_gates", {"seq": taken.seq})  # first: while they are dropped, a trigger may change the job's state
    execute("replace", moved | {"seq": taken.seq})
    execute("replace_body", {"seq": taken.seq, "body": job.body})
    execute("replace_memo", {"seq": taken.seq})
    if gates_of(job):
        insert_gates(execute, queue, msgspec.structs.replace(job, id=taken.id))


def _taken(transaction: Transaction, queue: str, key: bytes, schema: str) -> _Taken | None:
    row = transaction.execute_text(qualified("taken", schema), {"queue": queue, "key": key}).fetchone()
    return None if row is None else _Taken(*row)
