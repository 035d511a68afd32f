"""MySQL and MariaDB: jobs in a table of the application's own database. Waiting processes poll the table.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
durable when it       InnoDB, flushed at each commit as ``innodb_flush_log_at_trx_commit``     one fsync per call
returns               says
atomic calls          one READ COMMITTED transaction, run again after a deadlock              one or two round trips
priority, then age    one index by (queue, state, place, seq), read in its order              O(log n)
no lock waits         ``FOR UPDATE SKIP LOCKED``; no lock is held while a job runs            none
never early           due times in microseconds of the server's clock                         an index entry per move
one live lease        a random token per reserve; every settle compares the token, and the    a condition by primary key
                      lease's end with the clock
waiting               one poll every 47 ms for all consumers of a process, without a lock     23 queries/s, idle
fast while InnoDB     scans resume at a cursor behind the deleted entries                     1 % of the time, for scans
cannot purge                                                                                  from the start
====================  ======================================================================  =======================

The tables' names begin with ``multiq_``. A job can be enqueued inside the application's own transaction.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
import pymysql

from multiq.backend import (
    Diagnosis,
    Inspection,
    Management,
    Migrations,
    NewJob,
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
from multiq.errors import BackendError, EnqueueUncertain, JobNotFound, JobReserved, PayloadTooLarge
from multiq.settings.url import Option, seconds

from .consumer import MysqlConsumer
from .dsn import OPTIONS, Dsn
from .errors import is_unsent
from .external_transaction import ExternalTransaction
from .pool import Pool
from .receipts import CHANGED
from .records import (
    AGAIN,
    BURIED,
    DELAYED,
    READY,
    RESERVED,
    SECOND,
    SLICE,
    Row,
    body_limit,
    decode_text,
    effective_state,
    insert_statements,
    look,
    microseconds,
    pack_id,
    promote,
)
from .statements import Sql, render

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from multiq.backend import Finding, JobRecord
    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

    from .connection import Session

_T = TypeVar("_T")

_CODES = {
    State.READY: (READY, AGAIN),
    State.DELAYED: (DELAYED,),
    State.RESERVED: (RESERVED,),
    State.BURIED: (BURIED,),
}
_SURELY_FITS = 100_000  # bytes. A smaller body fits without a check of max_allowed_packet, which is usually megabytes.
_START = (-1, 0)  # sorts before every job of a listing


@guarded(*BACKEND_METHODS, server="a MySQL or MariaDB")
class MysqlBackend(Inspection, Management, Pausing, Purging, Migrations, Diagnosis):
    """Jobs in a MySQL or MariaDB database: ``mysql://user:password@host/database``."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="mysql",
        delay_resolution=1e-6,
        poll_interval=0.06,
        max_body=body_limit(16 * 1024 * 1024),
        client_ids=True,
        atomic_batches=True,
        waits_in_server=Gap("cannot today", "the server cannot notify clients: a waiting process polls every 47 ms"),
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
        schema=True,
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        **OPTIONS,
        "timeout": Option(seconds(0.1, 3600), 10.0, "seconds that a call waits for the server, and for others' locks"),
    }

    def __init__(self, dsn: Dsn, *, timeout: float = 10.0, create: bool = True, clock: Clock | None = None) -> None:
        """Does no I/O.

        - *create*: whether to create the tables in a database that has none. If not, calls raise ``SchemaNotReady``
          there.
        - *clock*: a clock that tests set by hand. None means the server's clock.
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
            ExternalTransaction(self._pool, connection).enqueue(queue, jobs)
        elif jobs:
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

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> MysqlConsumer:
        return MysqlConsumer(self._pool, queues)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        rows = self._select("peek", queue=queue.encode(), id=pack_id(job_id))
        if not rows:
            raise JobNotFound(queue, job_id)
        return Row(*rows[0]).record(queue)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        place, seq = _START if after is None else read_cursor(after)
        self._promote_all(queue)
        asked = {"queue": queue.encode(), "place": place, "seq": seq, "limit": limit + 1}
        found = [Row(*row) for code in _CODES[state] for row in self._select("page", state=code, **asked)]
        found.sort(key=lambda row: (row.place, row.seq))
        shown = [row.record(queue) for row in found[:limit]]
        last = found[limit - 1] if len(found) > limit else None
        return Page(shown, None if last is None else cursor_of((last.place, last.seq)))

    def delete(self, queue: str, job_id: str) -> None:
        which = {"queue": queue.encode(), "id": pack_id(job_id)}

        def delete(session: Session) -> None:
            if self._is_done(session, which):
                return
            gone, *_ = session.commit(render("delete", now=self._pool.now, **which), done=CHANGED)
            if not gone.affected:
                self._find(session, queue, job_id)
                raise JobReserved(queue, job_id)

        self._run(delete)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        self._run(lambda session: self._reschedule(session, queue, job_id, delay))
        self._made_ready(queue)
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        kicked = 0
        ((behind,),) = self._select("last_buried", queue=queue.encode())
        while kicked < limit:
            size = min(SLICE, limit - kicked)
            slice_ = _Kick(self._pool, queue, size, behind)
            done = self._run(slice_.run)
            kicked += done
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
            if not kicked.affected and self._find(session, queue, job_id) is State.RESERVED:
                raise JobReserved(queue, job_id)

        self._run(kick_job)
        self._made_ready(queue)

    def queues(self) -> list[str]:
        return [decode_text(name) for (name,) in self._select("queues")]

    def stats(self, queue: str) -> QueueStats:
        ((ready, delayed, reserved, buried, left),) = self._select("stats", queue=queue.encode())
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
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
        """Close all connections after a malformed reply. Later replies on them may belong to earlier requests."""
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

    def _made_ready(self, queue: str) -> None:
        self._pool.poller.scan_windows.made_ready(queue)
        self._pool.poller.notify()

    def _is_done(self, session: Session, which: Mapping[str, bytes]) -> bool:
        """Whether an earlier attempt of this call was committed although its reply was lost. If not, the job is locked.

        A second attempt must check this first. Otherwise it could undo what another client has done to the job since.
        """
        if not session.unconfirmed:
            return False
        session.begin(render("take_out", now=self._pool.now, **which))
        if not session.done_before():
            return False
        session.roll_back()
        return True

    def _find(self, session: Session, queue: str, job_id: str) -> State:
        """Return the job's state. Raises ``JobNotFound``."""
        asked = render("find", queue=queue.encode(), id=pack_id(job_id), now=self._pool.now)
        ((rows, _),) = session.execute(asked)
        if not rows:
            raise JobNotFound(queue, job_id)
        ((code, is_due),) = rows
        return effective_state(code, is_due=bool(is_due))

    def _reschedule(self, session: Session, queue: str, job_id: str, delay: float) -> None:
        """Remove the row and insert it again. Only an insert gives the job a new seq, and the seq is the job's age.

        The row is inserted in the state AGAIN. Other processes scan the index range of that state from the start at
        least every second.
        """
        now = self._pool.now
        ((rows, _),) = session.begin(render("take_out", queue=queue.encode(), id=pack_id(job_id), now=now))
        if session.done_before():
            return session.roll_back()
        if not rows:
            raise JobNotFound(queue, job_id)
        ((seq, code, is_due, priority, ttr, body),) = rows
        if effective_state(code, is_due=bool(is_due)) is State.RESERVED:
            raise JobReserved(queue, job_id)
        job = msgspec.structs.replace(_TEMPLATE, body=body, id=job_id, priority=priority, delay=delay, ttr=ttr / SECOND)
        session.commit(render("remove", seqs=[seq]), *insert_statements(queue, [job], now, ready=AGAIN), done=1)
        return None

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
            purged += self._run(functools.partial(_purge_some, seqs=seqs, code=code))
        return purged


class _Insert:
    """The insert of a batch. ``may_be_done`` says whether an attempt may have been committed."""

    def __init__(self, preface: list[str], statements: list[str]) -> None:
        self._preface = preface
        self._statements = statements
        self.may_be_done = False

    def run(self, session: Session) -> None:
        """Insert the batch.

        A single statement is a transaction by itself. It needs no BEGIN and COMMIT, which saves two round trips.
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


class _Kick:
    """One slice of a kick. After a lost reply, the next attempt checks whether the slice was committed."""

    def __init__(self, pool: Pool, queue: str, size: int, behind: int) -> None:
        """*behind*: a ``place`` greater than that of every job that was buried when the kick began."""
        self._pool = pool
        self._behind = behind
        self._queue = queue
        self._size = size
        self._seqs: list[int] = []

    def run(self, session: Session) -> int:
        if session.unconfirmed:
            session.execute(render("lock", seqs=self._seqs))
            if session.done_before():
                return len(self._seqs)
        ((rows, _),) = session.begin(render("buried", queue=self._queue.encode(), place=self._behind, limit=self._size))
        self._seqs = sorted(seq for (seq,) in rows)
        if self._seqs:
            session.commit(render("kick", seqs=self._seqs), done=1)
        else:
            session.roll_back()
        return len(self._seqs)


_TEMPLATE = NewJob(body=b"", id="")


def _purge_some(session: Session, seqs: list[int], code: int) -> int:
    """Delete these jobs. Returns the number of jobs that this call has deleted in all its attempts."""
    purged, *_ = session.commit(render("purge", seqs=seqs, state=code), done=CHANGED)
    return purged.affected + (session.done_before() or 0)
