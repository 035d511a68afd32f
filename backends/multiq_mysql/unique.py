"""Unique jobs. Each key has an *entry*. The entry names the job that took the key last. The row of this job shows
whether the job still has the key.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
one job per key       an enqueue locks the key's entry until its commit                       one row, and a second
                                                                                              round trip
nothing to release    the next enqueue judges by the job's row; no verdict changes an entry   none for other jobs
few deadlocks         entries are locked in the order of their keys, and before the jobs      none
                      that are replaced or kicked; a deadlock's transaction is run again
no gap locks          entries are locked by primary key; jobs are read without a lock,        none
                      and locked only to replace or kick them
entries do not add    an enqueue deletes up to two entries whose jobs are gone, among a       two reads of the index
up                    sample, and skips those that are locked
====================  ======================================================================  =======================
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import pymysql

from multiq.backend import Arrive, Drop, Enqueue, Put, Terms, UniqueKey

from .errors import is_unsent
from .gates import wake_lines
from .records import (
    AGAIN,
    BURIED,
    DELAYED,
    HELD,
    PARKED,
    READY,
    RESERVED,
    SECOND,
    UNTIL,
    chunked,
    gates_column,
    gates_in,
    insert_statements,
    key_of,
    microseconds,
    pack_id,
    unpack_id,
)
from .statements import Sql, literal, qualified, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from multiq.backend import NewJob, Step

    from .connection import Reply, Session
    from .pool import Pool

Name: TypeAlias = tuple[str, bytes]
"""A queue and a unique key."""

_CHUNK = 1_000_000  # bytes
_SLICE = 1_000  # keys or ids that one statement names
_DROPPED_PER_KEY, _EXAMINED_PER_KEY = 2, 10
_MOST_EXAMINED = 1_000


class _Owner(NamedTuple):
    """The job that an entry names. Times are in microseconds."""

    state: int
    is_due: int
    attempt: int
    age: int
    column: bytes | None


class _Entry:
    """The entry of a key, and its job."""

    def __init__(self, key: bytes, job_id: str, owner: _Owner | None, *, is_held: bool) -> None:
        self.id = job_id
        self.is_held = is_held
        """Whether the key is held by time."""
        self.owner = owner
        self.seq: int | None = None
        """The seq of the owner, if the transaction has locked it."""
        self._key = key

    @property
    def has_key(self) -> bool:
        """Whether the owner was enqueued with the key, and still has it."""
        owner = self.owner
        if owner is None or not owner.column or owner.column[1:] != self._key:
            return False
        until = own_key(owner.column).until
        if until == "buried":
            return owner.state != BURIED
        return until == "gone" or owner.attempt == 0

    @property
    def is_taken(self) -> bool:
        return self.is_held or self.has_key

    @property
    def may_be_replaced(self) -> bool:
        owner = self.owner
        if owner is None or not self.has_key:
            return False
        return owner.state in {READY, AGAIN, DELAYED, HELD, PARKED} or (owner.state == RESERVED and bool(owner.is_due))

    def lock(self, rows: Sequence[Any]) -> None:
        """Store the owner as the transaction has read and locked it. *rows*: the row, or none if the job is gone."""
        self.owner = None
        for seq, *values in rows:
            self.seq, self.owner = seq, _Owner(*values)


def steps_have_keys(steps: Iterable[Step]) -> bool:
    return any(isinstance(step, Enqueue) and key_of(step.job) is not None for step in steps)


def parts_of(steps: Iterable[Step]) -> list[list[Step]]:
    """Split steps into parts that are carried out one after the other.

    An enqueue with a key may replace a held job. An earlier arrival may release this job. So this arrival is in an
    earlier part. All changes of notes are in the last part.
    """
    parts: list[list[Step]] = [[]]
    changes: list[Step] = []
    for step in steps:
        if isinstance(step, Put | Drop):
            changes.append(step)
            continue
        has_key = isinstance(step, Enqueue) and key_of(step.job) is not None
        if has_key and any(isinstance(earlier, Arrive) for earlier in parts[-1]):
            parts.append([])
        parts[-1].append(step)
    parts[-1] += changes
    return parts


def own_key(column: bytes) -> UniqueKey:
    """Return the key in the column ``unique_key``."""
    return UniqueKey(column[1:], until=UNTIL[column[0]] if column[0] < len(UNTIL) else "gone")  # type: ignore[arg-type]


def terms_of(unique_key: bytes | None, gates: str | None) -> Terms | None:
    """Return the terms of a job that is inserted again, from its columns."""
    if not unique_key and not gates:
        return None
    return Terms(unique=own_key(unique_key) if unique_key else None, gates=gates_in(gates))


# --- judging enqueues ------------------------------------------------------------------------------------


class Judgement:
    """The effect of an enqueue of some jobs. It depends on the entries of the jobs' keys."""

    def __init__(
        self,
        jobs: Sequence[tuple[str, NewJob]],
        entries: dict[Name, _Entry],
        added: Iterable[tuple[str, str]],
        stale: dict[str, list[bytes]],
    ) -> None:
        """Parameters:
        jobs: the queue and the job of each enqueue, in their order.
        entries: the locked entries of the jobs' keys.
        added: the queues and ids of the jobs with keys that an earlier call has already added.
        stale: entries without a job, by queue.
        """
        self.ids: list[str] = []
        """The answers: for each job its id, or the id of the job that has its key."""
        self.new: list[NewJob | None] = []
        """For each job: the job that is to be inserted, or None."""
        self.to_lock: dict[tuple[str, str], _Entry] = {}
        """The jobs that must be locked before they can be replaced: queue and id of each job -> its entry."""
        self._entries = entries
        self._added = set(added)
        self._stale = stale
        self._owners: dict[Name, int] = {}
        """Key -> the index of the new job that has the key."""
        self._taken: dict[Name, tuple[str, float]] = {}
        self._replaced: dict[Name, tuple[int, NewJob, float]] = {}
        self.parked: defaultdict[str, set[int]] = defaultdict(set)
        """Queue -> the replaced jobs that wait at a limit."""
        self.waking: list[str] = []
        """The statements for the lines that the parked jobs leave."""
        for queue, job in jobs:
            unique = key_of(job)
            if unique is None:
                self._added.add((queue, job.id))
                self._answer(job.id, job)
            else:
                self._judge(queue, job, unique)

    def statements(self, now: Sql, database: str | None = None) -> list[str]:
        """Return the statements that replace jobs and change entries. *database*: the name of the database, if the
        statements run in a caller's session."""
        found = [
            render(
                "replace",
                seq=seq,
                body=job.body,
                priority=job.priority,
                ttr=microseconds(job.ttr),
                delay=microseconds(delay),
                hold_delay=microseconds(job.delay),
                gates=gates_column(job),
                now=now,
            )
            for seq, job, delay in self._replaced.values()
        ]
        found += [render("leave_lines", seq=seq) for seqs in self.parked.values() for seq in seqs]
        found += self.waking
        for (queue, key), (job_id, hold) in self._taken.items():
            held_until = Sql(f"{now}+{microseconds(hold)}") if hold > 0 else 0
            which = {"queue": queue.encode(), "key": key}
            found.append(render("take_key", id=pack_id(job_id), held_until=held_until, **which))
        return found if database is None else [qualified(text, database) for text in found]

    def clean_up(self, now: Sql) -> list[str]:
        """Return the statements that delete entries without a job."""
        own = set(self._entries)
        found = {queue: [key for key in keys if (queue, key) not in own] for queue, keys in self._stale.items()}
        return [
            render("drop_keys", queue=queue.encode(), keys=_list(keys), now=now, limit=len(keys))
            for queue, keys in found.items()
            if keys
        ]

    def _judge(self, queue: str, job: NewJob, unique: UniqueKey) -> None:
        name = queue, unique.key
        if (queue, job.id) in self._added:
            return self._answer(job.id, None)
        is_replacing = unique.on_conflict == "replace"
        if (at := self._owners.get(name)) is not None:
            before = self.new[at]
            if is_replacing and before is not None:
                self.new[at] = _replaced(before, job, unique)
            return self._answer(self.ids[at], None)
        entry = self._entries[name]
        if entry.is_taken:
            if is_replacing and entry.id != job.id and entry.may_be_replaced:
                self._replace(name, entry, job, unique)
            return self._answer(entry.id, None)
        self._owners[name] = len(self.ids)
        self._added.add((queue, job.id))
        if entry.id != job.id or unique.hold > 0:
            self._taken[name] = job.id, unique.hold
        return self._answer(job.id, job)

    def _replace(self, name: Name, entry: _Entry, job: NewJob, unique: UniqueKey) -> None:
        assert entry.owner is not None  # noqa: S101 - it may be replaced
        if entry.seq is None:
            self.to_lock[name[0], entry.id] = entry
            return
        delay = job.delay
        if unique.max_wait is not None:
            delay = min(delay, max(0.0, unique.max_wait - entry.owner.age / SECOND))
        self._replaced[name] = entry.seq, job, delay
        if entry.owner.state == PARKED:
            self.parked[name[0]].add(entry.seq)

    def _answer(self, job_id: str, new: NewJob | None) -> None:
        self.ids.append(job_id)
        self.new.append(new)


def _replaced(before: NewJob, job: NewJob, unique: UniqueKey) -> NewJob:
    """Return an earlier job of the same call with the data of another job."""
    delay = job.delay
    is_held = before.terms is not None and before.terms.awaits > 0
    if unique.max_wait is not None and not is_held:
        delay = min(delay, unique.max_wait)
    gates = () if job.terms is None else job.terms.gates
    terms = msgspec.structs.replace(before.terms, gates=gates) if before.terms is not None else None
    return msgspec.structs.replace(before, body=job.body, priority=job.priority, ttr=job.ttr, delay=delay, terms=terms)


class UniqueInsert:
    """The enqueue of jobs, some of which have unique keys. ``may_be_done`` says whether an attempt may have been
    committed."""

    def __init__(self, pool: Pool, queue: str, jobs: Sequence[NewJob]) -> None:
        self._pool = pool
        self._queue = queue
        self._jobs = [(queue, job) for job in jobs]
        self._sent: list[str] = []
        """The answers of the last attempt for which a COMMIT was sent."""
        self.may_be_done = False

    def run(self, session: Session) -> list[str]:
        """Insert the jobs, except jobs whose keys are taken. Returns for each job its own id, or the id of the job that
        has its key.

        If a reply was lost and the attempt was committed, the next attempt returns the answers of that attempt. If the
        next attempt inserted again, it could replace a job that another client has replaced since.
        """
        judgement = judge(session, self._pool, self._jobs)
        if session.done_before():
            session.roll_back()
            return self._sent
        now = self._pool.now
        new = [job for job in judgement.new if job is not None]
        changes = judgement.statements(now)
        if not new and not changes:
            session.roll_back()
            return judgement.ids
        inserts = insert_statements(self._queue, new, now, ready=AGAIN) if new else []
        self._sent = judgement.ids
        try:
            session.commit(*judgement.clean_up(now), *changes, *inserts, done=1)
        except (pymysql.MySQLError, OSError) as exc:
            if session.is_broken and not is_unsent(exc):
                self.may_be_done = True
            raise
        return judgement.ids


def judge(session: Session, pool: Pool, jobs: Sequence[tuple[str, NewJob]]) -> Judgement:
    """Lock the entries of the jobs' keys, and judge the enqueues. Begins a transaction if none is open."""
    asking = _Asking(pool, jobs)
    statements = [*asking.locks(), *asking.reads()]
    replies = session.execute(*statements) if session.in_transaction else session.begin(*statements)
    asking.read(replies[len(asking.locks()) :])
    judgement = asking.judgement()
    if judgement.to_lock:  # All transactions lock jobs in the same order.
        wanted = sorted(judgement.to_lock)
        found = session.execute(*(owner(queue, job_id, pool.now) for queue, job_id in wanted))
        for name, (rows, _) in zip(wanted, found, strict=True):
            judgement.to_lock[name].lock(rows)
        judgement = asking.judgement()
        for queue, seqs in judgement.parked.items():
            judgement.waking += wake_lines(session, queue, seqs)
    return judgement


def judge_in(
    execute: Callable[[str], Sequence[tuple[Any, ...]]], pool: Pool, jobs: Sequence[tuple[str, NewJob]]
) -> Judgement:
    """Like ``judge``, but in the caller's transaction. The snapshot of this transaction may be old. *execute* runs a
    statement in the transaction.

    A session of the driver reads the committed state of the jobs. The caller's session would need a locking read for
    this. If the caller's transaction is REPEATABLE READ, a locking read would lock the gaps of jobs that are gone.
    """
    database, now = pool.dsn.database, pool.true_now
    asking = _Asking(pool, jobs)
    for statement in asking.locks():
        execute(qualified(statement, database))
    with pool.borrowed() as ours:
        asking.read(ours.run(lambda session: session.execute(*asking.reads())))
    for (queue, key), entry in asking.entries.items():
        which = {"queue": queue.encode(), "key": key}
        ((kept, is_held),) = execute(qualified(render("locked_key", now=now, **which), database))
        entry.is_held = bool(is_held)
        if unpack_id(kept) != entry.id:  # This transaction has taken the key, so the job belongs to this transaction.
            entry.id = unpack_id(kept)
            entry.owner = _Owner(READY, 0, 0, 0, b"\0" + key) if asking.is_older(entry.id) else None
    judgement = asking.judgement()
    if judgement.to_lock:
        for (queue, job_id), entry in sorted(judgement.to_lock.items(), key=lambda item: item[0]):
            entry.lock(execute(qualified(owner(queue, job_id, now), database)))
        judgement = asking.judgement()
        if judgement.parked:  # The caller's transaction would lock the lines until its end.
            with pool.borrowed() as ours:
                ours.run(lambda session: _wake_now(session, judgement.parked))
    if statements := judgement.clean_up(pool.now):
        with pool.borrowed() as ours:
            ours.run(lambda session: session.execute(*statements))
    return judgement


def _wake_now(session: Session, parked: Mapping[str, Iterable[int]]) -> None:
    """Let the next reserve examine the lines of these parked jobs. A caller's transaction has locked the jobs."""
    for queue, seqs in parked.items():
        if waking := wake_lines(session, queue, seqs):
            session.execute(*waking)


class _Asking:
    """The statements that lock and read the entries of the keys of new jobs."""

    def __init__(self, pool: Pool, jobs: Sequence[tuple[str, NewJob]]) -> None:
        self.entries: dict[Name, _Entry] = {}
        self._pool = pool
        self._jobs = jobs
        self._ids: defaultdict[str, list[str]] = defaultdict(list)
        self._keys: dict[Name, str] = {}
        """Each key, with the id of the first job that has it."""
        self._added: list[tuple[str, str]] = []
        self._stale: dict[str, list[bytes]] = {}
        for queue, job in jobs:
            if (unique := key_of(job)) is not None:
                self._ids[queue].append(job.id)
                self._keys.setdefault((queue, unique.key), job.id)
        self._by_queue: defaultdict[str, list[bytes]] = defaultdict(list)
        for queue, key in sorted(self._keys, key=_order):
            self._by_queue[queue].append(key)

    def locks(self) -> list[str]:
        return lock_keys(self._pool, self._keys)

    def reads(self) -> list[str]:
        now = self._pool.now
        found = [
            render("keys", queue=queue.encode(), keys=_list(some), now=now)
            for queue, keys in self._by_queue.items()
            for some in _slices(keys)
        ]
        found += [
            render("added", queue=queue.encode(), ids=_list(map(pack_id, some)))
            for queue, ids in self._ids.items()
            for some in _slices(ids)
        ]
        for queue, keys in self._by_queue.items():
            examined = min(_EXAMINED_PER_KEY * len(keys), _MOST_EXAMINED)
            limit = min(_DROPPED_PER_KEY * len(keys), _MOST_EXAMINED)
            found.append(
                render("stale_keys", queue=queue.encode(), key=keys[0], examined=examined, limit=limit, now=now)
            )
        return found

    def read(self, replies: Sequence[Reply]) -> None:
        """Read the replies to ``reads``. A caller's new entries are not found, because they are not committed."""
        answers = iter(replies)
        self.entries = {name: _Entry(name[1], "", None, is_held=False) for name in self._keys}
        for queue, keys in self._by_queue.items():
            for _ in _slices(keys):
                for row in next(answers).rows:
                    entry = read_entry(row)
                    self.entries[queue, row[0]] = entry
        for queue, ids in self._ids.items():
            for some in _slices(ids):
                names = {pack_id(job_id): job_id for job_id in some}
                self._added += [(queue, names[kept]) for (kept,) in next(answers).rows]
        for queue in self._by_queue:
            self._stale[queue] = [key for key, _ in next(answers).rows]

    def is_older(self, job_id: str) -> bool:
        """Whether the job with this id is older than this call. If it is, no job of this call has the id."""
        return all(job.id != job_id for _, job in self._jobs)

    def judgement(self) -> Judgement:
        return Judgement(self._jobs, self.entries, self._added, self._stale)


def read_entry(row: Sequence[Any]) -> _Entry:
    """Return an entry from a row of keys.sql."""
    key, job_id, is_held, *owner_values = row
    found = _Owner(*owner_values) if owner_values[0] is not None else None
    return _Entry(key, unpack_id(job_id), found, is_held=bool(is_held))


def lock_keys(pool: Pool, keys: dict[Name, str]) -> list[str]:
    """Return the statements that lock the entries of these keys. A new entry names the job of this id."""
    rows = (
        f"({literal(queue.encode())},{literal(key)},{literal(pack_id(keys[queue, key]))},0)"
        for queue, key in sorted(keys, key=_order)
    )
    chunk = min(_CHUNK, (pool.max_packet or 0) // 2)
    return [render("lock_keys", row=Sql(",".join(some)[1:-1])) for some in chunked(rows, chunk)]


def owner(queue: str, job_id: str, now: Sql) -> str:
    return render("owner", queue=queue.encode(), id=pack_id(job_id), now=now)


def lock_keys_of(pool: Pool, steps: Sequence[Step]) -> list[str]:
    """Return the statements that lock the keys of steps. All keys are locked together, because all transactions lock
    keys in the same order."""
    keys = {
        (step.queue, unique.key): step.job.id
        for step in reversed(steps)
        if isinstance(step, Enqueue) and (unique := key_of(step.job)) is not None
    }
    return lock_keys(pool, keys) if keys else []


def resolve_steps(session: Session, pool: Pool, steps: Sequence[Step]) -> tuple[list[Step], list[str]]:
    """Judge the enqueues of steps in the present transaction.

    Returns the steps without the enqueues that add no job, and the statements that go before those of the steps.
    """
    judgement = judge(session, pool, [(step.queue, step.job) for step in steps if isinstance(step, Enqueue)])
    new = iter(judgement.new)
    kept: list[Step] = []
    for step in steps:
        if not isinstance(step, Enqueue):
            kept.append(step)
        elif (job := next(new)) is not None:
            kept.append(Enqueue(step.queue, job))
    return kept, [*judgement.clean_up(pool.now), *judgement.statements(pool.now)]


# --- kicking ---------------------------------------------------------------------------------------------


class KickedRow(NamedTuple):
    """A buried job that is to be kicked."""

    seq: int
    id: bytes
    column: bytes | None


class Kicks(NamedTuple):
    seqs: list[int]
    """The jobs that are kicked."""
    refused: list[int]
    """The jobs whose key another job has. A job that is neither here nor in ``seqs`` was not buried any more."""
    statements: list[str]


def judge_kicks(session: Session, pool: Pool, queue: str, rows: Sequence[KickedRow]) -> Kicks:
    """Begin a transaction, and lock the entries of the jobs' keys and the jobs. Decide, in the order of the jobs, which
    jobs are kicked."""
    keys: dict[Name, str] = {}
    for row in rows:
        if row.column:
            keys.setdefault((queue, row.column[1:]), unpack_id(row.id))
    locks = lock_keys(pool, keys)
    asked = [
        render("keys", queue=queue.encode(), keys=_list(some), now=pool.now)
        for some in _slices(sorted(key for _, key in keys))
    ]
    seqs = sorted(row.seq for row in rows)
    # The jobs are locked before the entries are read, so that the owner's state is not older than the locks.
    replies = session.begin(*locks, render("lock", seqs=seqs), *asked)
    at = len(locks)
    buried = {seq for seq, state in replies[at].rows if state == BURIED}
    entries = {row[0]: read_entry(row) for reply in replies[at + 1 :] for row in reply.rows}
    kicked: list[int] = []
    refused: list[int] = []
    taken: set[bytes] = set()
    moved: dict[bytes, bytes] = {}
    for row in rows:
        if row.seq not in buried:
            continue
        if row.column:
            key = row.column[1:]
            is_own = entries[key].id == unpack_id(row.id)
            if key in taken or (entries[key].is_taken and not is_own):
                refused.append(row.seq)
                continue
            if own_key(row.column).until != "reserved":
                taken.add(key)
            if is_own:
                moved.pop(key, None)  # An earlier job of this batch has not kept the key.
            else:
                moved[key] = row.id
        kicked.append(row.seq)
    statements = [
        render("take_key", queue=queue.encode(), key=key, id=job_id, held_until=0) for key, job_id in moved.items()
    ]
    if kicked:
        statements.append(render("kick_with_key", seqs=sorted(kicked)))
    return Kicks(kicked, refused, statements)


# --- rescheduling ----------------------------------------------------------------------------------------


def ask_entry(pool: Pool, queue: str, job_id: str, key: bytes) -> list[str]:
    """Return the statements that lock and read the entry of a job's key. The last statement is sent after all
    others."""
    lock = lock_keys(pool, {(queue, key): job_id})
    return [*lock, render("keys", queue=queue.encode(), keys=_list([key]), now=pool.now)]


def take_again(queue: str, job_id: str, key: bytes, entry: _Entry) -> list[str]:
    """Return the statement by which a job takes its key again. No statement is returned if the entry already names the
    job."""
    if entry.id == job_id:
        return []
    return [render("take_key", queue=queue.encode(), key=key, id=pack_id(job_id), held_until=0)]


def _order(name: Name) -> tuple[bytes, bytes]:
    return name[0].encode(), name[1]


def _list(texts: Iterable[bytes]) -> Sql:
    return Sql(",".join(map(literal, texts)))


def _slices(some: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (some[at : at + _SLICE] for at in range(0, len(some), _SLICE))
