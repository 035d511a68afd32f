"""The SQLite backend. One file holds the queues of all processes on a machine. It needs only Python's sqlite3.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
durable when a call   write-ahead log with ``synchronous=FULL``: synced at each commit        one fsync per call
returns
atomic calls          ``BEGIN IMMEDIATE``: one writer at a time on the whole machine          other writers wait
priority, then age    an index of the ready jobs by (queue, priority, seq)                    O(log n)
never early           due times in nanoseconds, rounded up, by the machine's clock            an index entry per move
one live lease        a random token per reserve; every settle compares the token, and the    one read by primary key
                      lease's end with the clock
waiting               polls every few milliseconds, without a lock; inotify on Linux          0.2 % of a core, idle
one order for all     due jobs are promoted in slices before any job is reserved              some ms per 1,000 jobs
====================  ======================================================================  =======================

The tables' names begin with ``multiq_``. The file may also be the application's own database.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from multiq.backend import (
    STORED_STATES,
    Diagnosis,
    Inspection,
    Management,
    Page,
    Pausing,
    Purging,
    QueueStats,
    State,
    check_state,
    check_states,
)
from multiq.backend.capabilities import Capabilities, Gap
from multiq.driverkit.clock import SECOND, nanoseconds
from multiq.driverkit.paging import cursor_of, read_cursor
from multiq.errors import JobNotFound, JobReserved, PayloadTooLarge, UrlInvalid
from multiq.settings.url import Option, choice, seconds

from .connection import MAX_BODY
from .consumer import SqliteConsumer
from .doctor import examine
from .errors import MalformedRecord
from .external_transaction import ExternalTransaction
from .malformed import bury_and_repeat
from .pool import Pool
from .records import (
    READY,
    RESERVED,
    SLICE,
    SLICE_PAUSE,
    Row,
    as_json,
    due,
    effective_state,
    insert,
    is_large,
    look,
    look_inside,
    move,
    promote,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from multiq.backend import Finding, JobRecord, NewJob
    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

    from .connection import Transaction

_T = TypeVar("_T")

_SURELY_FITS = 1_000_000  # bytes. SQLite can be built with a limit below 1 GB, but not below this size.
_START = (-1, -1)  # sorts before every job of a listing


class SqliteBackend(Inspection, Management, Pausing, Purging, Diagnosis):
    """Jobs in an SQLite file: ``sqlite:///jobs.db`` in the working folder, or ``sqlite:////var/lib/app/jobs.db``."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="sqlite",
        delay_resolution=1e-6,
        poll_interval=0.1,
        max_body=MAX_BODY,
        client_ids=True,
        atomic_batches=True,
        waits_in_server=Gap("cannot today", "SQLite has no server: a waiting consumer polls every few milliseconds"),
        shared=True,
        persistent=True,
        disconnect_ends_lease=Gap("never", "there is no server that could notice a dead process; its lease runs out"),
        give_back=True,
        lists_jobs=True,
        durable_attempts=True,
        transactional_enqueue=True,
        reasons=True,
        stable_ids=True,
        portable_leases=True,
        fenced_late=True,
        schema=Gap("never", "the driver makes the tables in the file, and keeps them up to date"),
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "synchronous": Option(
            choice("full", "normal"),
            "full",
            "full: a job is on the disk when enqueue returns; normal: faster, a power loss takes the last commits",
        ),
        "timeout": Option(seconds(0, 3600), 10.0, "seconds that a call waits while another process has the write lock"),
    }

    def __init__(
        self,
        path: str,
        *,
        synchronous: str = "full",
        timeout: float = 10.0,
        create: bool = True,
        clock: Clock = time.time_ns,
    ) -> None:
        """Jobs in the file at *path*.

        - *synchronous*: ``full`` or ``normal``, as in the URL. Default: full.
        - *timeout*: seconds that a call waits while another process has the write lock. Default: 10.
        - *create*: whether a missing file and missing tables are created. If not, calls raise ``BackendUnavailable``.
          Default: True.
        - *clock*: a function that returns nanoseconds. Default: the system's clock.
        """
        self._pool = Pool(path, synchronous=synchronous, timeout=timeout, create=create)
        self._clock = clock

    @classmethod
    def from_url(cls, url: BackendUrl) -> SqliteBackend:
        return cls(_path(url), create=url.create, **url.options)

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._pool.path

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self._check_sizes(jobs)
        if connection is not None:
            transaction = ExternalTransaction(self._pool, connection)
            transaction.enqueue(queue, jobs, self._clock)
        elif jobs:
            self._insert(queue, jobs)
            self._pool.notifier.notify()
        return [job.id for job in jobs]

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> SqliteConsumer:
        return SqliteConsumer(self._pool, self._clock, queues)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        def peek() -> JobRecord:
            rows = self._select("peek", {"queue": queue, "id": job_id})
            if not rows:
                raise JobNotFound(queue, job_id)
            return Row(*rows[0]).record(queue, self._clock())

        return self._burying_malformed(peek)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        major, minor = _START if after is None else read_cursor(after)
        now = self._clock()
        self._promote_all(queue, now)
        asked = {"queue": queue, "major": major, "minor": minor, "limit": limit + 1}
        statement = "jobs_ready" if state is State.READY else "jobs_waiting"

        def read() -> tuple[list[Row], list[JobRecord]]:
            rows = [Row(*row) for row in self._select(statement, asked | {"state": STORED_STATES.index(state)})]
            return rows, [row.record(queue, now) for row in rows[:limit]]

        rows, shown = self._burying_malformed(read)
        return Page(shown, cursor_of(rows[limit - 1].place) if len(rows) > limit else None)

    def delete(self, queue: str, job_id: str) -> None:
        def delete(transaction: Transaction) -> None:
            seq, _ = _unreserved(transaction, queue, job_id, self._clock())
            transaction.execute("remove", {"seqs": as_json([seq])})

        self._write(delete)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        def reschedule(transaction: Transaction) -> None:
            now = self._clock()
            seq, _ = _unreserved(transaction, queue, job_id, now)
            newest = _newest(transaction) + 1
            state, due_at = due(delay, now)
            moved = {"seq": seq, "newest": newest, "state": state, "due_at": due_at, "now": now}
            transaction.execute("reschedule", moved)
            transaction.execute("reschedule_body", {"seq": seq, "newest": newest})

        self._write(reschedule)
        self._pool.notifier.notify()
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        def kick(size: int, transaction: Transaction) -> int:
            return move(transaction, "kick", "buried", {"queue": queue, "limit": size})

        kicked = self._in_slices(kick, limit)
        self._pool.notifier.notify()
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        def kick_job(transaction: Transaction) -> None:
            seq, state = _unreserved(transaction, queue, job_id, self._clock())
            if state is not State.READY:
                transaction.execute("kick", {"seqs": as_json([seq])})

        self._write(kick_job)
        self._pool.notifier.notify()

    def queues(self) -> list[str]:
        def read() -> list[str]:
            names = [name for (name,) in self._select("queues", {"now": self._clock()})]
            if not all(isinstance(name, str) for name in names):
                raise MalformedRecord("a queue's name that is not text")
            return names

        return self._burying_malformed(read)

    def stats(self, queue: str) -> QueueStats:
        now = self._clock()
        ((ready, delayed, reserved, buried, paused_until),) = self._select("stats", {"queue": queue, "now": now})
        left = (paused_until or 0) - now if isinstance(paused_until, int) else 0
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            paused_for=left / SECOND if left > 0 else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        def pause(transaction: Transaction) -> None:
            now = self._clock()
            transaction.execute("forget_pauses", {"now": now})
            transaction.execute("pause", {"queue": queue, "until": now + nanoseconds(seconds)})

        self._write(pause)
        self._pool.notifier.notify()

    def resume(self, queue: str) -> None:
        def resume(transaction: Transaction) -> None:
            transaction.execute("forget_pauses", {"now": self._clock()})
            transaction.execute("resume", {"queue": queue})

        self._write(resume)
        self._pool.notifier.notify()

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        self._promote_all(queue, self._clock())
        newest = self._select("newest", {})[0][0]
        codes = {STORED_STATES.index(state) for state in states} - {RESERVED}
        return sum(self._purge(queue, code, newest) for code in sorted(codes))

    def doctor(self) -> list[Finding]:
        return examine(self._pool)

    def close(self) -> None:
        self._pool.close()

    # --- helpers ---

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        largest = max((len(job.body) for job in jobs), default=0)
        if largest <= _SURELY_FITS:
            return
        with self._pool.borrowed() as connection:
            limit = connection.body_limit()
        if largest > limit:
            raise PayloadTooLarge(largest, limit, "store it elsewhere, and enqueue its address")

    def _select(self, statement: str, parameters: Mapping[str, Any]) -> list[Any]:
        with self._pool.borrowed() as connection:
            return connection.select(statement, parameters)

    def _insert(self, queue: str, jobs: Sequence[NewJob]) -> None:
        def add(transaction: Transaction) -> None:
            insert(transaction, queue, jobs, self._clock())

        with self._pool.borrowed() as connection:
            connection.refuse_if_full(size_of(jobs))
            # A single job with a small body is the common case. It needs one statement instead of three.
            if len(jobs) == 1 and not is_large(jobs[0].body):
                connection.write_single(add)
            else:
                connection.write(add)

    def _write(self, work: Callable[[Transaction], None]) -> None:
        with self._pool.borrowed() as connection:
            self._burying_malformed(lambda: connection.write(work))

    def _burying_malformed(self, call: Callable[[], _T]) -> _T:
        """Return the result of *call*. If it finds records that it cannot read, bury them and repeat *call*."""
        try:
            return call()
        except MalformedRecord as exc:
            return bury_and_repeat(self._pool, self._clock, call, exc)

    def _promote_all(self, queue: str, now: int) -> None:
        asked = as_json((queue,))
        with self._pool.borrowed() as connection:
            looks = self._burying_malformed(lambda: look(connection, asked))
            if not any(look_ahead.has_due(now) for look_ahead in looks):
                return
        self._in_slices(lambda _, transaction: promote(transaction, look_inside(transaction, asked)[0], now)[0])

    def _purge(self, queue: str, code: int, newest: int) -> int:
        def purge(size: int, transaction: Transaction) -> int:
            doomed = {"queue": queue, "newest": newest, "limit": size}
            if code == READY:
                return move(transaction, "remove", "purgeable_ready", doomed)
            return move(transaction, "remove", "purgeable_waiting", doomed | {"state": code})

        return self._in_slices(purge)

    def _in_slices(self, work: Callable[[int, Transaction], int], limit: int | None = None) -> int:
        """Run *work* on slices of jobs until a slice is not full. Returns the sum of its results.

        Each slice is a transaction of its own.
        """
        done = 0
        with self._pool.borrowed() as connection:
            while limit is None or done < limit:
                size = SLICE if limit is None else min(SLICE, limit - done)
                moved = self._burying_malformed(functools.partial(connection.write, functools.partial(work, size)))
                done += moved
                if moved < size:
                    break
                time.sleep(SLICE_PAUSE)
        return done


def _path(url: BackendUrl) -> str:
    if url.host or url.port or url.username or url.password:
        raise UrlInvalid(
            f"{str(url)!r} cannot be used: write three slashes and a path, as in sqlite:///jobs.db (in this folder) or "
            "sqlite:////var/lib/app/jobs.db"
        )
    return url.path.removeprefix("/")


def _unreserved(transaction: Transaction, queue: str, job_id: str, now: int) -> tuple[int, State]:
    """Return the seq and the state of a job. Raises ``JobNotFound``, ``JobReserved``."""
    row = transaction.execute("find", {"queue": queue, "id": job_id}).fetchone()
    if row is None:
        raise JobNotFound(queue, job_id)
    seq, code, due_at = row
    state = effective_state(code, due_at, now)
    if state is State.RESERVED:
        raise JobReserved(queue, job_id)
    return seq, state


def _newest(transaction: Transaction) -> int:
    newest: int = transaction.execute("newest").fetchone()[0]
    return newest
