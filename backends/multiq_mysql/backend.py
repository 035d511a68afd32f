"""MySQL and MariaDB: jobs in a table of the application's own database. Waiting processes poll the table.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
durable when it       InnoDB, flushed at each commit as ``innodb_flush_log_at_trx_commit``     one fsync per call
returns               says
atomic calls          one READ COMMITTED transaction, run again after a deadlock              one or two round trips
priority, then age    one index by (queue, state, place, seq); place is the priority          O(log n)
no lock waits         ``FOR UPDATE SKIP LOCKED``; no lock is held while a job runs            none
never early           due times in microseconds of the server's clock                         an index entry per state
                                                                                              change
one live lease        a random token per reserve; every settle compares the token, and the    a condition by primary key
                      lease's end with the clock
waiting               one poll every 47 ms for all consumers of a process, without a lock     23 queries/s, idle
fast while InnoDB     scans resume at a cursor behind the deleted entries; some start at      the others take 1 % of the
cannot purge          the first entry, for jobs that became ready behind the cursor           time
====================  ======================================================================  =======================

The tables' names begin with ``multiq_``. A job can be enqueued inside the application's own transaction.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import msgspec
import pymysql

from multiq.backend import (
    Diagnosis,
    Holds,
    Inspection,
    Limits,
    Management,
    Migrations,
    NewJob,
    NotePage,
    Notes,
    OutcomePage,
    Outcomes,
    Page,
    Pausing,
    Purging,
    QueueStats,
    Schema,
    State,
    check_state,
    check_states,
)
from multiq.backend.capabilities import Capabilities, Gap
from multiq.driverkit.paging import cursor_of, read_cursor
from multiq.driverkit.replies import BACKEND_METHODS, guarded
from multiq.errors import (
    BackendError,
    EnqueueUncertain,
    JobNotFound,
    JobReserved,
    PayloadTooLarge,
)
from multiq.settings.url import Option, seconds

from . import limits, notes, outcomes
from .carry_out import CarryOut
from .consumer import MysqlConsumer
from .delete import DeleteMany
from .dsn import OPTIONS, Dsn
from .errors import is_unsent
from .external_transaction import ExternalTransaction
from .gates import wake_lines
from .kick import Kick, KickWithKeys, kick_job_with_key
from .outcomes import FIRST_PAGE, KINDS, OutcomeRow, drop_expired, key_list, key_of
from .pool import Pool
from .promote import promote
from .receipts import CHANGED
from .records import (
    AGAIN,
    BURIED,
    DELAYED,
    HELD,
    PARKED,
    READY,
    RESERVED,
    SECOND,
    SLICE,
    Row,
    body_limit,
    decode_text,
    effective_state,
    gates_in,
    have_keys,
    insert_statements,
    look,
    microseconds,
    pack_id,
)
from .reschedule import reschedule
from .statements import Sql, render
from .unique import KickedRow, UniqueInsert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from multiq.backend import (
        After,
        Finding,
        JobRecord,
        LimitState,
        Note,
        Outcome,
        OutcomeKind,
        Quota,
        Step,
        Version,
    )
    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

    from .connection import Session

_T = TypeVar("_T")

_CODES = {
    State.READY: (READY, AGAIN, PARKED),
    State.DELAYED: (DELAYED,),
    State.RESERVED: (RESERVED,),
    State.BURIED: (BURIED,),
    State.HELD: (HELD,),
}
_SURELY_FITS = 100_000  # bytes. A smaller body fits without a check of max_allowed_packet, which is usually megabytes.
_START = (-1, 0)  # sorts before every job of a listing


@guarded(*BACKEND_METHODS, "delete_many", "carry_out", "note", "notes", "now", server="a MySQL or MariaDB")
class MysqlBackend(Inspection, Management, Pausing, Purging, Outcomes, Holds, Notes, Limits, Migrations, Diagnosis):
    """Jobs in a MySQL or MariaDB database: ``mysql://user:password@host/database``."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="mysql",
        delay_resolution=1e-6,
        poll_interval=0.06,
        max_body=body_limit(16 * 1024 * 1024),
        client_ids=True,
        atomic_batches=True,
        waits_in_server=Gap("cannot today", "the server cannot notify clients: a waiting process polls the table"),
        shared=True,
        persistent=True,
        disconnect_ends_lease=Gap("never", "a reservation is a row, not a connection; its lease runs out"),
        give_back=True,
        lists_jobs=True,
        durable_attempts=True,
        transactional_enqueue=True,
        reasons=True,
        stable_ids=True,
        portable_leases=True,
        fenced_late=True,
        memos=True,
        outcomes=True,
        holds=True,
        notes=True,
        unique=True,
        limits=True,
        one_step_everywhere=True,
        schema=True,
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "timeout": Option(
            seconds(0.1, 3600), 10.0, "seconds that a call waits for the server, and for locks of other clients"
        ),
    }

    def __init__(self, dsn: Dsn, *, timeout: float = 10.0, create: bool = True, clock: Clock | None = None) -> None:
        """Does no I/O.

        - *create*: whether to create the tables in a database that has none. If it is False, calls on such a database
          raise ``SchemaNotReady``.
        - *clock*: a clock that tests set by hand. None: the server's clock is used.
        """
        self.dsn = dsn
        self.timeout = timeout
        self._pool = Pool(dsn, timeout=timeout, create=create, clock=clock)

    @classmethod
    def from_url(cls, url: BackendUrl) -> MysqlBackend:
        return cls(Dsn.from_url(url), timeout=url.options["timeout"], create=url.create)

    @property
    def capabilities(self) -> Capabilities:
        packet = self._pool.max_packet
        return self.declared if packet is None else msgspec.structs.replace(self.declared, max_body=body_limit(packet))

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self._check_sizes(jobs)
        if connection is not None:
            ids = ExternalTransaction(self._pool, connection).enqueue(queue, jobs)
        elif have_keys(jobs):
            ids = self._enqueue_unique(queue, jobs)
        else:
            ids = self._enqueue(queue, jobs)
        return ids

    def _enqueue(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        if jobs:
            now, preface = self._pool.now, []
            if len(jobs) > 1:  # One computation of the time is faster than one per row.
                now, preface = Sql("@multiq_now"), [f"SET @multiq_now = {now}"]
            insert = _Insert(preface, insert_statements(queue, jobs, now))
            try:
                self._run(insert.run)
            except BackendError as exc:
                if insert.may_be_done:
                    raise EnqueueUncertain(queue, jobs, str(exc), client_ids=True) from exc
                raise
            poller = self._pool.poller
            poller.scan_windows.enqueued(queue, min(job.priority for job in jobs))
            poller.notify()
        return [job.id for job in jobs]

    def _enqueue_unique(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        insert = UniqueInsert(self._pool, queue, jobs)
        try:
            ids = self._run(insert.run)
        except BackendError as exc:
            if insert.may_be_done:
                raise EnqueueUncertain(queue, jobs, str(exc), client_ids=True) from exc
            raise
        self._made_ready(queue)
        return ids

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> MysqlConsumer:
        return MysqlConsumer(self._pool, queues)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        rows = self._select("peek", queue=queue.encode(), id=pack_id(job_id))
        if not rows:
            raise JobNotFound(queue, job_id)
        return self._records(queue, [Row(*rows[0])])[0]

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        place, seq = _START if after is None else read_cursor(after)
        self._promote_all(queue)
        asked = {"queue": queue.encode(), "place": place, "seq": seq, "limit": limit + 1}
        found = [Row(*row) for code in _CODES[state] for row in self._select("page", state=code, **asked)]
        found.sort(key=lambda row: (row.place, row.seq))
        shown = self._records(queue, found[:limit])
        last = found[limit - 1] if len(found) > limit else None
        return Page(shown, None if last is None else cursor_of((last.place, last.seq)))

    def delete(self, queue: str, job_id: str) -> None:
        which = {"queue": queue.encode(), "id": pack_id(job_id)}

        def delete(session: Session) -> None:
            if self._is_done(session, which):
                return
            gone, *_ = session.commit(render("delete", now=self._pool.now, **which), done=CHANGED)
            if not gone.affected:
                if not self._find(session, queue, job_id).is_parked:
                    raise JobReserved(queue, job_id)
                (answer,) = DeleteMany(self._pool, queue, [job_id], None).run(session).values()
                if answer is not None:
                    raise answer

        self._run(delete)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        answers: dict[str, JobNotFound | JobReserved | None] = {}
        for some in _slices(sorted(set(ids))):
            answers |= self._run(DeleteMany(self._pool, queue, some, after).run)
        found = []
        for job_id in ids:
            found.append(answers[job_id])
            if answers[job_id] is None:
                answers[job_id] = JobNotFound(queue, job_id)  # the answer if *ids* has this id more than once
        return found

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        self._run(lambda session: reschedule(session, self._pool, queue, job_id, delay))
        self._made_ready(queue)
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        kicked = 0
        ((behind,),) = self._select("last_buried", queue=queue.encode())
        while kicked < limit:
            size = min(SLICE, limit - kicked)
            slice_ = Kick(self._pool, queue, size, behind)
            done = self._run(slice_.run)
            kicked += done
            if done < slice_.found:
                kicked += self._kick_with_keys(queue, limit - kicked, behind)
            if done < size:
                break
        self._made_ready(queue)
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        which = {"queue": queue.encode(), "id": pack_id(job_id)}

        def kick_job(session: Session) -> None:
            if self._is_done(session, which):
                return
            kicked, *_ = session.commit(render("kick_job", now=self._pool.now, **which), done=CHANGED)
            if not kicked.affected:
                found = self._find(session, queue, job_id)
                if found.state is State.RESERVED:
                    raise JobReserved(queue, job_id)
                if found.state is State.BURIED and found.unique_key:
                    kick_job_with_key(session, self._pool, queue, KickedRow(found.seq, which["id"], found.unique_key))

        self._run(kick_job)
        self._made_ready(queue)

    def queues(self) -> list[str]:
        return [decode_text(name) for (name,) in self._select("queues")]

    def stats(self, queue: str) -> QueueStats:
        ((ready, delayed, reserved, buried, held, left),) = self._select("stats", queue=queue.encode())
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            held=held,
            paused_for=left / SECOND if left is not None and left > 0 else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        asked = render("pause", queue=queue.encode(), now=self._pool.now, pause=microseconds(seconds))
        forget = render("forget_pauses", now=self._pool.now)
        self._run(lambda session: session.commit(forget, asked))
        self._pool.poller.notify()

    def resume(self, queue: str) -> None:
        asked = (render("forget_pauses", now=self._pool.now), render("resume", queue=queue.encode()))
        self._run(lambda session: session.commit(*asked))
        self._pool.poller.notify()

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        self._promote_all(queue)
        ((newest,),) = self._select("newest")
        codes = [code for state in states if state is not State.RESERVED for code in _CODES[state]]
        return sum(self._purge(queue, code, int(newest)) for code in codes)

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        found: dict[bytes, Outcome] = {}
        for some in _slices(ids):
            rows = self._select("outcomes", queue=queue.encode(), ids=key_list(some))
            found.update((row.id, row.outcome(queue)) for row in [OutcomeRow(*values) for values in rows])
        return [found.get(key_of(job_id)) for job_id in ids]

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        expires_at, key = FIRST_PAGE if after is None else outcomes.read_cursor(after)
        kinds = [number for number, name in enumerate(KINDS) if kind in {None, name}]
        asked: dict[str, Any] = {"queue": queue.encode(), "kinds": kinds, "expires_at": expires_at, "id": key}
        rows = [OutcomeRow(*row) for row in self._select("history", **asked, limit=limit + 1)]
        rows.sort(key=lambda row: row.place, reverse=True)
        cursor = outcomes.cursor_of(rows[limit - 1]) if len(rows) > limit else None
        return OutcomePage([row.outcome(queue) for row in rows[:limit]], cursor)

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        if ids is None:
            return self._forget_expired(queue, limit)
        forgotten = 0
        for some in _slices(sorted(set(ids))):
            statement = render("forget", queue=queue.encode(), ids=key_list(some), now=self._pool.now)
            forgotten += self._run(functools.partial(_delete_some, statement=statement))
        return forgotten

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        call = CarryOut(self._pool, steps, when)
        is_done = self._run(call.run)
        for queue in call.queues if is_done else ():
            self._made_ready(queue)
        return is_done

    def relay(self, queues: Sequence[str]) -> int:  # noqa: ARG002 - as Backend.relay has it
        """Return 0, because a settle carries out all steps of its verdicts."""
        return 0

    def note(self, home: str, key: str) -> Note | None:
        with self._pool.borrowed() as connection:
            rows = connection.select(notes.asked(home, key, self._pool.now))
        return notes.NoteRow(*rows[0]).note() if rows else None

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        with self._pool.borrowed() as connection:
            rows = connection.select(notes.page(home, prefix, limit, after, self._pool.now))
        found = [notes.NoteRow(*row).note() for row in rows]
        return NotePage(found[:limit], found[limit - 1].key if len(found) > limit else None)

    def now(self, home: str) -> float:  # noqa: ARG002 - one clock for all queues
        ((now,),) = self._select("now")
        return int(now) / SECOND

    # --- limits ---

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        if change:
            changed = self._run(lambda session: limits.change_limits(session, queue, change, pinned=pinned))
            for name in changed:
                slice_ = functools.partial(limits.go_on, pool=self._pool, queue=queue, name=name, waits=True)
                while not self._run(slice_):
                    pass  # A consumer can lock the gates between two slices.
            self._pool.poller.scan_windows.of(queue).has_limits = True
            self._pool.poller.notify()
        self._promote_all(queue)
        return limits.states(self._select, queue)

    def doctor(self) -> list[Finding]:
        from .doctor import examine

        return examine(self)

    def schema(self) -> Schema:
        from .schema import MysqlSchema

        return MysqlSchema(self.dsn, self.timeout)

    def close(self) -> None:
        self._pool.close()

    # --- helpers ---

    def _discard_connections(self) -> None:
        """Close all connections after a malformed reply. Later replies on these connections may belong to earlier
        requests."""
        self._pool.close()

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        largest = max((len(job.body) for job in jobs), default=0)
        if largest <= _SURELY_FITS:
            return
        if self._pool.max_packet is None:
            self._select("newest")
        limit = body_limit(self._pool.max_packet or 0)
        if largest > limit:
            raise PayloadTooLarge(
                largest, limit, "store it elsewhere and enqueue its address, or raise the server's max_allowed_packet"
            )

    def _run(self, work: Callable[[Session], _T]) -> _T:
        with self._pool.borrowed() as connection:
            return connection.run(work)

    def _select(self, verb: str, **values: Any) -> tuple[Any, ...]:
        with self._pool.borrowed() as connection:
            return connection.select(render(verb, now=self._pool.now, **values))

    def _records(self, queue: str, rows: Sequence[Row]) -> list[JobRecord]:
        parked = {row.seq: gates_in(row.gates) for row in rows if row.state == PARKED}
        held_by = self._run(lambda session: limits.held_by(session, self._pool, queue, parked)) if parked else {}
        return [row.record(queue, held_by.get(row.seq)) for row in rows]

    def _made_ready(self, queue: str) -> None:
        self._pool.poller.scan_windows.made_ready(queue)
        self._pool.poller.notify()

    def _is_done(self, session: Session, which: Mapping[str, bytes]) -> bool:
        """Whether an earlier attempt of this call was committed and its reply was lost.

        In a first attempt, this method sends nothing. In a later attempt, this method locks the job and then makes the
        check. Without the check, the attempt could undo a change that another client has made to the job meanwhile.
        """
        if not session.unconfirmed:
            return False
        session.begin(render("take_out", now=self._pool.now, **which))
        if not session.done_before():
            return False
        session.roll_back()
        return True

    def _find(self, session: Session, queue: str, job_id: str) -> _Found:
        """Find a job. Raises ``JobNotFound``."""
        asked = render("find", queue=queue.encode(), id=pack_id(job_id), now=self._pool.now)
        ((rows, _),) = session.execute(asked)
        if not rows:
            raise JobNotFound(queue, job_id)
        ((seq, code, is_due, unique_key),) = rows
        return _Found(seq, effective_state(code, is_due=bool(is_due)), unique_key, code == PARKED)

    def _kick_with_keys(self, queue: str, limit: int, behind: int) -> int:
        """Kick jobs, some of which have unique keys. Begins with the job that has been buried for the longest time."""
        kicked = 0
        place, seq = _START
        while kicked < limit:
            asked = {"queue": queue.encode(), "behind": behind, "limit": min(SLICE, limit - kicked)}
            found = self._select("buried_page", place=place, seq=seq, **asked)
            if not found:
                break
            place, seq, *_ = found[-1]
            slice_ = KickWithKeys(self._pool, queue, [KickedRow(*row) for _, *row in found])
            kicked += self._run(slice_.run)
        return kicked

    def _promote_all(self, queue: str) -> None:
        with self._pool.borrowed() as connection:
            (outlook,) = look(connection, self._pool, [queue])
            if outlook.has_due:
                promote(connection, outlook, time.monotonic() + self.timeout)

    def _purge(self, queue: str, code: int, newest: int) -> int:
        purged = 0
        place, seq = _START
        which = {"queue": queue.encode(), "state": code, "newest": newest, "limit": SLICE}
        while found := self._select("purgeable", place=place, seq=seq, **which):
            place, seq = found[-1]
            seqs = sorted(number for _, number in found)
            statement = render("purge", seqs=seqs, state=code)
            if code == PARKED:
                purged += self._run(functools.partial(_purge_parked, queue=queue, seqs=seqs, statement=statement))
            else:
                purged += self._run(functools.partial(_delete_some, statement=statement))
        return purged

    def _forget_expired(self, queue: str, limit: int) -> int:
        forgotten = 0
        while forgotten < limit:
            size = min(SLICE, limit - forgotten)
            statement = drop_expired(self._pool, queue, size)
            done = self._run(functools.partial(_delete_some, statement=statement))
            forgotten += done
            if done < size:
                break
        return forgotten


class _Insert:
    """The insert of a batch. ``may_be_done`` says whether an attempt may have been committed."""

    def __init__(self, preface: list[str], statements: list[str]) -> None:
        self._preface = preface
        self._statements = statements
        self.may_be_done = False

    def run(self, session: Session) -> None:
        """Insert the batch.

        A single statement is a transaction by itself. It needs no BEGIN and no COMMIT. This saves two round trips.
        """
        first, *others = self._statements
        if not others:
            self._commit(session, *self._preface, first)
            return
        session.begin(*self._preface, first)
        for statement in others[:-1]:
            session.execute(statement)
        self._commit(session, others[-1])

    def _commit(self, session: Session, *texts: str) -> None:
        try:
            session.commit(*texts)
        except (pymysql.MySQLError, OSError) as exc:
            if session.is_broken and not is_unsent(exc):
                self.may_be_done = True
            raise


class _Found(NamedTuple):
    seq: int
    state: State
    unique_key: bytes | None
    """The column ``unique_key``, which begins with the byte of ``until``."""
    is_parked: bool


def _delete_some(session: Session, statement: str) -> int:
    """Delete some rows. Returns the number of rows that this call has deleted in all its attempts."""
    deleted, *_ = session.commit(statement, done=CHANGED)
    return deleted.affected + (session.done_before() or 0)


def _purge_parked(session: Session, queue: str, seqs: Sequence[int], statement: str) -> int:
    """Like ``_delete_some``, but for parked jobs. The next reserve examines the lines of these jobs again."""
    (deleted,) = session.begin(statement)
    if deleted.affected:
        session.commit(*wake_lines(session, queue, seqs), done=deleted.affected)
    else:
        session.roll_back()
    return deleted.affected + (session.done_before() or 0)


def _slices(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[at : at + SLICE] for at in range(0, len(ids), SLICE))
