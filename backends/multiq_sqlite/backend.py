"""The SQLite backend. One file holds the queues of all processes on a machine. The driver needs only Python's sqlite3.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
durable when a call   write-ahead log with ``synchronous=FULL``: synced at each commit        one fsync per call
returns
atomic calls          ``BEGIN IMMEDIATE``: one writer at a time on the whole machine          other writers wait
priority, then age    an index of the ready jobs by (queue, priority, seq)                    O(log n)
never early           due times in nanoseconds, rounded up, by the machine's clock            an index entry per move
one live lease        a random token per reserve; every settle checks the token, and that     one read by primary key
                      the lease has not ended
waiting               polls every few milliseconds, without a lock; inotify on Linux          0.2 % of a core, idle
due jobs in order     a reserve first makes all due jobs ready, 1,000 per transaction         some ms per 1,000 jobs
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
    Enqueue,
    Holds,
    Inspection,
    Limits,
    Management,
    NotePage,
    Notes,
    OutcomePage,
    Outcomes,
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
from multiq.errors import JobHeld, JobNotFound, JobReserved, OptionInvalid, UniqueTaken

from .connection import MAX_BODY, SURELY_FITS
from .consumer import SqliteConsumer
from .doctor import examine
from .dsn import OPTIONS, path_of
from .errors import MalformedRecord
from .external_transaction import ExternalTransaction
from .holds import release
from .limits import change_limits, go_on, held_by, may_have_gates, place, states
from .malformed import bury_and_repeat
from .notes import AFTER_ALL, NoteRow, have_versions
from .outcomes import KINDS, OutcomeRow, code_of, drop_expired, keep_deleted
from .pool import Pool
from .records import (
    PARKED,
    READY,
    RESERVED,
    SLICE,
    SLICE_PAUSE,
    Row,
    as_json,
    due,
    effective_state,
    has_one_row,
    insert,
    look,
    look_inside,
    move,
    promote,
    size_of,
)
from .steps import carry_out, largest_of
from .unique import insert_all, is_anothers, own_key, take_again

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from multiq.backend import (
        After,
        Finding,
        JobRecord,
        LimitState,
        NewJob,
        Note,
        Outcome,
        OutcomeKind,
        Quota,
        Step,
        Version,
    )
    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl, Option

    from .connection import Transaction
    from .unique import OwnKey

_T = TypeVar("_T")

_START = (-1, -1)  # sorts before every job of a listing
_LATEST = (2**63 - 1, 2**63 - 1)  # sorts after every outcome; a history begins with the latest outcome


class SqliteBackend(Inspection, Management, Pausing, Purging, Outcomes, Holds, Notes, Limits, Diagnosis):
    """Jobs in an SQLite file: ``sqlite:///jobs.db`` in the working folder, or ``sqlite:////var/lib/app/jobs.db``."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="sqlite",
        delay_resolution=1e-6,
        poll_interval=0.1,
        max_body=MAX_BODY,
        client_ids=True,
        atomic_batches=True,
        waits_in_server=Gap("cannot today", "SQLite has no server: a waiting consumer polls the file"),
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
        memos=True,
        outcomes=True,
        holds=True,
        notes=True,
        unique=True,
        limits=True,
        one_step_everywhere=True,
        schema=Gap("never", "the driver makes the tables in the SQLite file, and keeps them up to date"),
        diagnosis=True,
    )
    options: ClassVar[Mapping[str, Option]] = OPTIONS

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
        - *create*: whether a missing file and missing tables are created. If it is False, calls that need them raise
          ``BackendUnavailable``. Default: True.
        - *clock*: a function that returns nanoseconds. Default: the system's clock.
        """
        self._pool = Pool(path, synchronous=synchronous, timeout=timeout, create=create)
        self._clock = clock

    @classmethod
    def from_url(cls, url: BackendUrl) -> SqliteBackend:
        return cls(path_of(url), create=url.create, **url.options)

    @property
    def path(self) -> str:
        """The file, as an absolute path."""
        return self._pool.path

    # --- producing ---

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self._check_sizes(jobs)
        if connection is not None:
            transaction = ExternalTransaction(self._pool, connection)
            return transaction.enqueue(queue, jobs, self._clock)
        if not jobs:
            return []
        ids = self._insert(queue, jobs)
        self._pool.notifier.notify()
        return ids

    # --- consuming ---

    def consumer(self, queues: Sequence[str]) -> SqliteConsumer:
        return SqliteConsumer(self._pool, self._clock, queues)

    # --- inspecting and managing ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        def peek() -> JobRecord:
            rows = self._select("peek", {"queue": queue, "id": job_id})
            if not rows:
                raise JobNotFound(queue, job_id)
            return self._record(Row(*rows[0]), queue, self._clock())

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
            return rows, [self._record(row, queue, now) for row in rows[:limit]]

        rows, shown = self._burying_malformed(read)
        return Page(shown, cursor_of(rows[limit - 1].place) if len(rows) > limit else None)

    def delete(self, queue: str, job_id: str) -> None:
        def delete(transaction: Transaction) -> None:
            seq, _, has_parts = _unreserved(transaction, queue, job_id, self._clock())
            transaction.execute("remove", {"seqs": as_json([seq])})
            if has_parts:
                place(transaction, [seq])

        self._write(delete)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        def delete(transaction: Transaction) -> list[JobNotFound | JobReserved | None]:
            now = self._clock()
            found = _find_unreserved(transaction, queue, ids, now)
            seqs = [seq for seq in found if isinstance(seq, int)]
            if after is not None and after.keep > 0:
                keep_deleted(transaction, queue, seqs, after, now)
            if seqs:
                transaction.execute("remove", {"seqs": as_json(seqs)})
                if may_have_gates(transaction, queue):
                    place(transaction, seqs)
            return [None if isinstance(seq, int) else seq for seq in found]

        with self._pool.borrowed() as connection:
            connection.refuse_too_large(0 if after is None else len(after.outcome), "no job was deleted")
        return self._write(delete)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        def reschedule(transaction: Transaction) -> None:
            now = self._clock()
            seq, state, has_parts = _unreserved(transaction, queue, job_id, now)
            if state is State.HELD:
                raise JobHeld(queue, job_id)
            key = _key_to_take(transaction, queue, job_id, seq, now) if has_parts else None
            newest = _newest(transaction) + 1
            code, due_at = due(delay, now)
            moved = {"seq": seq, "newest": newest, "state": code, "due_at": due_at, "now": now}
            transaction.execute("reschedule", moved)
            transaction.execute("reschedule_body", {"seq": seq, "newest": newest})
            if has_parts:
                transaction.execute("move_gates", {"seq": seq, "newest": newest})
                place(transaction, [newest])
            if key is not None:
                transaction.execute("set_key", {"seq": newest, "key": key.key, "until": key.until})
                take_again(transaction, queue, newest, key.key, seq)

        self._write(reschedule)
        self._pool.notifier.notify()
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        have_keys = False

        def kick(size: int, transaction: Transaction) -> int:
            nonlocal have_keys
            seqs, count, unique = transaction.execute("buried", {"queue": queue, "limit": size}).fetchone()
            if unique:
                have_keys = True
                return 0
            if count:
                transaction.execute("kick", {"seqs": seqs})
                if may_have_gates(transaction, queue):
                    transaction.execute("place", {"seqs": seqs})
            return int(count)

        kicked = self._in_slices(kick, limit)
        if have_keys:
            kicked += self._kick_with_keys(queue, limit - kicked)
        self._pool.notifier.notify()
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        def kick_job(transaction: Transaction) -> None:
            seq, state, has_parts = _unreserved(transaction, queue, job_id, self._clock())
            if state is State.HELD:
                release(transaction, seq)
            elif state is not State.READY:
                may_have_key = has_parts and state is State.BURIED
                key = _key_to_take(transaction, queue, job_id, seq, self._clock()) if may_have_key else None
                transaction.execute("kick", {"seqs": as_json([seq])})
                if has_parts:
                    place(transaction, [seq])
                if key is not None:
                    take_again(transaction, queue, seq, key.key)

        self._write(kick_job)
        self._pool.notifier.notify()

    def queues(self) -> list[str]:
        def read() -> list[str]:
            names = [name for (name,) in self._select("queues", {"now": self._clock()})]
            if not all(isinstance(name, str) for name in names):
                raise MalformedRecord("the name of a queue is not text")
            return names

        return self._burying_malformed(read)

    def stats(self, queue: str) -> QueueStats:
        now = self._clock()
        ((ready, delayed, reserved, buried, held, paused_until),) = self._select("stats", {"queue": queue, "now": now})
        left = (paused_until or 0) - now if isinstance(paused_until, int) else 0
        return QueueStats(
            queue=queue,
            ready=ready,
            delayed=delayed,
            reserved=reserved,
            buried=buried,
            held=held,
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
            transaction.execute("resume", {"queue": queue})
            transaction.execute("forget_pauses", {"now": self._clock()})

        self._write(resume)
        self._pool.notifier.notify()

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        self._promote_all(queue, self._clock())
        newest = self._select("newest", {})[0][0]
        codes = {STORED_STATES.index(state) for state in states} - {RESERVED}
        if READY in codes and self._select("has_gates", {"queue": queue}):
            codes.add(PARKED)
        # The parked jobs go first, because the deletion of the first job of a line makes the next one ready.
        return sum(self._purge(queue, code, newest) for code in sorted(codes, reverse=True))

    # --- outcomes ---

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        def read() -> dict[str, Outcome]:
            now = self._clock()
            rows = self._select("outcomes", {"queue": queue, "ids": as_json(tuple(ids)), "now": now})
            return {row.id: row.outcome(queue, now) for row in map(OutcomeRow._make, rows)}

        found = self._burying_malformed(read)
        return [found.get(job_id) for job_id in ids]

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        major, minor = _LATEST if after is None else read_cursor(after)
        now = self._clock()
        asked = {"queue": queue, "major": major, "minor": minor, "limit": limit + 1, "now": now}

        def read() -> tuple[list[OutcomeRow], list[Outcome]]:
            codes = [code_of(one) for one in KINDS if kind in {None, one}]
            found = [row for code in codes for row in self._select("history", asked | {"kind": code})]
            rows = [OutcomeRow(*row) for row in found]
            rows.sort(key=lambda row: row.place, reverse=True)
            return rows, [row.outcome(queue, now) for row in rows[:limit]]

        rows, shown = self._burying_malformed(read)
        return OutcomePage(shown, cursor_of(rows[limit - 1].place) if len(rows) > limit else None)

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        if ids is None:
            return self._in_slices(
                lambda size, transaction: drop_expired(transaction, queue, size, self._clock()), limit
            )
        forgotten = 0
        distinct = tuple(dict.fromkeys(ids))
        for at in range(0, len(distinct), SLICE):
            if at:
                time.sleep(SLICE_PAUSE)
            forgotten += self._forget(queue, distinct[at : at + SLICE])
        return forgotten

    # --- steps and notes ---

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        def carry_out_all(transaction: Transaction) -> bool:
            now = self._clock()
            if not have_versions(transaction, when, now):
                return False
            carry_out(transaction, steps, now)
            return True

        with self._pool.borrowed() as connection:
            connection.refuse_too_large(largest_of(steps), "no step was carried out")
            new = [step.job for step in steps if isinstance(step, Enqueue)]
            if new:
                connection.refuse_if_full(size_of(new))
            is_done = self._burying_malformed(lambda: connection.write(carry_out_all))
        if is_done:
            self._pool.notifier.notify()
        return is_done

    def relay(self, queues: Sequence[str]) -> int:  # noqa: ARG002 - as Backend.relay has it
        """Return 0, because a settle carries out all steps of its verdicts."""
        return 0

    def note(self, home: str, key: str) -> Note | None:
        def read() -> Note | None:
            now = self._clock()
            rows = self._select("find_note", {"home": home, "key": key, "now": now})
            return NoteRow(*rows[0]).note(now) if rows else None

        return self._burying_malformed(read)

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        def read() -> list[Note]:
            now = self._clock()
            first = prefix if after is None else max(prefix, after + "\0")
            asked = {"home": home, "first": first, "end": prefix + AFTER_ALL, "limit": limit + 1, "now": now}
            rows = self._select("notes", asked)
            return [NoteRow(*row).note(now) for row in rows]

        found = self._burying_malformed(read)
        return NotePage(found[:limit], found[limit - 1].key if len(found) > limit else None)

    def now(self, home: str) -> float:  # noqa: ARG002 - one clock for all queues
        return self._clock() / SECOND

    # --- limits ---

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        def store(transaction: Transaction) -> bool:
            return change_limits(transaction, queue, change or {}, self._clock(), pinned=pinned)

        if change:
            is_all = self._write(store)
            while not is_all:
                time.sleep(SLICE_PAUSE)
                is_all = self._write(lambda transaction: go_on(transaction, queue, self._clock()))
            self._pool.notifier.notify()
        self._promote_all(queue, self._clock())
        return self._burying_malformed(lambda: states(self._select, queue, self._clock()))

    def limits_beside(self, queue: str, quotas: Mapping[str, Quota], connection: Any) -> bool:
        try:
            transaction = ExternalTransaction(self._pool, connection)
            return transaction.store_limits(queue, quotas)
        except OptionInvalid:  # An outbox in another database may accept this connection.
            return super().limits_beside(queue, quotas, connection)

    def doctor(self) -> list[Finding]:
        return examine(self._pool)

    def close(self) -> None:
        self._pool.close()

    # --- helpers ---

    def _record(self, row: Row, queue: str, now: int) -> JobRecord:
        return row.record(queue, now, held_by(self._select, queue, row.seq, now) if row.is_in_line else None)

    def _check_sizes(self, jobs: Sequence[NewJob]) -> None:
        largest = max((len(job.body) for job in jobs), default=0)
        if largest <= SURELY_FITS:
            return
        with self._pool.borrowed() as connection:
            connection.refuse_too_large(largest, "store it elsewhere, and enqueue its address")

    def _select(self, statement: str, parameters: Mapping[str, Any]) -> list[Any]:
        with self._pool.borrowed() as connection:
            return connection.select(statement, parameters)

    def _insert(self, queue: str, jobs: Sequence[NewJob]) -> list[str]:
        def add(transaction: Transaction) -> None:
            insert(transaction, queue, jobs, self._clock())

        with self._pool.borrowed() as connection:
            connection.refuse_if_full(size_of(jobs))
            # A single job with a small body is the common case. It needs no BEGIN and COMMIT.
            if len(jobs) == 1 and has_one_row(jobs[0]):
                connection.write_single(add)
                return [jobs[0].id]
            return connection.write(lambda transaction: insert_all(transaction, queue, jobs, self._clock()))

    def _write(self, work: Callable[[Transaction], _T]) -> _T:
        with self._pool.borrowed() as connection:
            return self._burying_malformed(lambda: connection.write(work))

    def _burying_malformed(self, call: Callable[[], _T]) -> _T:
        """Return the result of *call*. If *call* finds records that it cannot read, bury these records and repeat
        *call*."""
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
            then = "place" if may_have_gates(transaction, queue) else None
            if code == READY:
                return move(transaction, "remove", "purgeable_ready", doomed, then=then)
            return move(transaction, "remove", "purgeable_waiting", doomed | {"state": code}, then=then)

        return self._in_slices(purge)

    def _kick_with_keys(self, queue: str, limit: int) -> int:
        """Kick jobs, some of which have unique keys, one by one. If another job has taken the key of a job, the job
        stays buried."""
        kicked = 0
        due_at, after = -(2**63), -(2**63)
        examined = SLICE

        def kick(transaction: Transaction) -> tuple[int, list[tuple[int, int, bytes | None]]]:
            asked = {"queue": queue, "due_at": due_at, "seq": after, "limit": min(SLICE, limit - kicked)}
            found = transaction.execute("buried_page", asked).fetchall()
            done = 0
            for seq, _, key in found:
                if key is not None and is_anothers(transaction, queue, seq, key, self._clock()):
                    continue
                transaction.execute("kick", {"seqs": as_json([seq])})
                if key is not None:
                    take_again(transaction, queue, seq, key)
                place(transaction, [seq])
                done += 1
            return done, found

        while examined and kicked < limit:
            done, found = self._write(kick)
            kicked, examined = kicked + done, len(found)
            if found:
                after, due_at, _ = found[-1]
                time.sleep(SLICE_PAUSE)
        return kicked

    def _forget(self, queue: str, ids: tuple[str, ...]) -> int:
        def forget(transaction: Transaction) -> int:
            return move(transaction, "forget", "kept", {"queue": queue, "ids": as_json(ids), "now": self._clock()})

        with self._pool.borrowed() as connection:
            return self._burying_malformed(lambda: connection.write(forget))

    def _in_slices(self, work: Callable[[int, Transaction], int], limit: int | None = None) -> int:
        """Run *work* on slices of jobs until a slice is not full. Returns the sum of the results of *work*.

        Each slice has its own transaction.
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


def _unreserved(transaction: Transaction, queue: str, job_id: str, now: int) -> tuple[int, State, bool]:
    """Return the seq and the state of a job, and whether its body is in ``multiq_bodies``.

    Raises ``JobNotFound``, ``JobReserved``.
    """
    row = transaction.execute("find", {"queue": queue, "id": job_id}).fetchone()
    if row is None:
        raise JobNotFound(queue, job_id)
    seq, code, due_at, has_parts = row
    state = effective_state(code, due_at, now)
    if state is State.RESERVED:
        raise JobReserved(queue, job_id)
    return seq, state, bool(has_parts)


def _key_to_take(transaction: Transaction, queue: str, job_id: str, seq: int, now: int) -> OwnKey | None:
    """Return the unique key of a job that is kicked or rescheduled. Raises ``UniqueTaken`` if another job has this
    key."""
    key = own_key(transaction, seq)
    if key is not None and is_anothers(transaction, queue, seq, key.key, now):
        raise UniqueTaken(queue, job_id)
    return key


def _find_unreserved(
    transaction: Transaction, queue: str, ids: Sequence[str], now: int
) -> list[int | JobNotFound | JobReserved]:
    """Return the seq of each job, or the error. If an id is given twice, the second result is ``JobNotFound``, as if
    the job had been deleted in between."""
    found: list[int | JobNotFound | JobReserved] = []
    seen: set[str] = set()
    for job_id in ids:
        try:
            found.append(
                JobNotFound(queue, job_id) if job_id in seen else _unreserved(transaction, queue, job_id, now)[0]
            )
        except (JobNotFound, JobReserved) as exc:
            found.append(exc)
        seen.add(job_id)
    return found


def _newest(transaction: Transaction) -> int:
    newest: int = transaction.execute("newest").fetchone()[0]
    return newest
