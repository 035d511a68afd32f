"""The consumer settles and reserves in one transaction. While it waits, no transaction is open.

A call of ``exchange`` takes two round trips and one commit. The first packet has the acks, a poll, and a *claim*. A
claim is a SELECT that locks ready rows. The second packet has the UPDATE that makes leases of these rows, and the
COMMIT. ``waiting`` describes how a consumer waits.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multiq.backend import Abandon, Consumer, GiveBack, Lease, Release
from multiq.driverkit.fork import forks
from multiq.driverkit.replies import guarded
from multiq.errors import BackendError, MultiqError

from .records import AGAIN, READY, SECOND, Poll, due_statements, look, promote_statements, unpack_hex_id
from .scan_window import BUSY, FROM_START, IDLE, NO_SCAN
from .settle import Batch, UnconfirmedVerdicts
from .statements import render, rendered
from .waiting import poll

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import Verdict
    from multiq.errors import LeaseLost

    from .connection import Reply, Session
    from .pool import Pool
    from .records import Outlook
    from .scan_window import ScanCursor
    from .statements import Sql

_START_CLOCK = "SET @multiq_at = SYSDATE(6)"
_READ_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, @multiq_at, SYSDATE(6))"

_MAKE_READY = frozenset({Release, GiveBack, Abandon})

_LONGEST_SLEEP = 1.0  # seconds after which a waiting consumer polls again in any case


class _Outcome(NamedTuple):
    answers: list[LeaseLost | None]
    leases: list[Lease]
    outlooks: list[Outlook]


class _Row(msgspec.Struct, array_like=True):
    """A ready job whose row is locked. claim.sql selects the first seven fields in this order."""

    priority: int
    seq: int
    ttr: int
    attempt: int
    crashes: int
    kicks: int
    age: int
    id: str = ""
    """In hex."""
    body: bytes = b""
    queue: str = ""
    is_again: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of ready jobs within a queue."""
        return self.priority, self.seq

    def lease(self, token: int) -> Lease:
        return Lease(
            queue=self.queue,
            id=unpack_hex_id(self.id),
            token=f"{self.seq}:{token}",
            body=self.body,
            priority=self.priority,
            ttr=self.ttr / SECOND,
            attempt=self.attempt + 1,
            crashes=self.crashes,
            kicks=self.kicks,
            age=self.age / SECOND,
        )


_row_of_numbers = msgspec.json.Decoder(_Row).decode  # One JSON list is decoded faster than int() converts two numbers.
_BY_PLACE = operator.attrgetter("place")


@guarded("reserve", "settle", "exchange", server="a MySQL or MariaDB")
class MysqlConsumer(Consumer):
    """Reserves jobs from the queues of one database. Its connection opens at the first call."""

    def __init__(self, pool: Pool, queues: Sequence[str]) -> None:
        self.queues = self._order = tuple(queues)
        self._pool = pool
        self._connection = pool.connection()
        self._interrupted = False
        self._likely_queue = self.queues[0]
        """The queue that had jobs last. Its rows are claimed in the same packet as the poll."""
        self._without: frozenset[str] = frozenset()
        """Queues that had no jobs at the last poll."""
        self._is_busy = False
        self._unconfirmed_leases: list[Lease] = []
        """Leases of a transaction whose COMMIT had no reply. The server may or may not have carried out the
        transaction.
        """
        self._unconfirmed_generation = 0
        self._may_forget = True
        """Whether this user may delete the rows of pauses that have ended."""
        self._call_began = 0.0
        self._unconfirmed = UnconfirmedVerdicts()

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        if queues is not None or self._order is not self.queues:
            self._set_order(queues)
        return self._wait_for_jobs(limit, time.monotonic() + timeout, has_looked=False)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if not verdicts:
            return []
        batch = Batch(self._pool, verdicts)
        answers = self._connection.run(lambda session: self._settle(session, batch))
        self._unconfirmed.end(batch)
        self._notify_released(verdicts)
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout, queues)
        if queues is not None or self._order is not self.queues:
            self._set_order(queues)
        give_up_at = time.monotonic() + timeout
        outcome = self._exchange(verdicts, limit)
        self._notify_released(verdicts)
        if outcome.leases or timeout <= 0:
            self._interrupted = False
            return outcome.answers, outcome.leases
        try:
            return outcome.answers, self._wait_or_read_back(limit, give_up_at)
        except BaseException:
            self._unconfirmed.begin(Batch(self._pool, verdicts), outcome.answers, None)  # This call returns no answers.
            raise

    def interrupt(self) -> None:
        self._interrupted = True
        self._pool.poller.notify()

    def close(self) -> None:
        deadline = time.monotonic() + self._pool.timeout
        if leases := self._recover_leases(deadline):
            batch = Batch(self._pool, [GiveBack(lease) for lease in leases])
            with contextlib.suppress(MultiqError):  # After an error, the leases run out and count as crashes.
                self._connection.run(lambda session: self._settle(session, batch), deadline)
            self._notify_released(batch.verdicts)
        self._connection.close()

    def _discard_connections(self) -> None:
        """Close all connections after a malformed reply. Later replies on a connection may be malformed, too."""
        self._connection.close()
        self._pool.close()

    # --- settling ---

    def _settle(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        if batch.is_short and not self._unconfirmed.about(batch):
            done, acks = batch.all_done(), batch.acks(session.take_ticket())
            if len(done) == 1:  # A single statement commits by itself.
                if batch.are_done(self._commit(session, batch, done, acks)):
                    return done
            elif batch.are_done(session.begin(*acks)):
                self._commit(session, batch, done, [])
                return done
            else:
                session.roll_back()
        answers, statements = batch.lock(session, self._unconfirmed)
        self._commit(session, batch, answers, statements)
        return answers

    def _settle_carefully(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        answers, statements = batch.lock(session, self._unconfirmed)
        if statements:
            session.execute(*statements)
        return answers

    def _commit(
        self,
        session: Session,
        batch: Batch | None,
        answers: Sequence[LeaseLost | None],
        statements: Sequence[str],
    ) -> list[Reply]:
        """Commit. If the reply is lost, the ticket or the receipt shows later whether the transaction was committed."""
        if batch is None:
            return session.commit(*statements)
        try:
            return session.commit(*statements, done=1)
        except BaseException:
            if session.is_broken and session.proof is not None:
                self._unconfirmed.begin(batch, answers, session.proof)
            raise

    # --- reserving ---

    def _set_order(self, queues: Sequence[str] | None) -> None:
        """Set the order of the queues for the present call. None means the order that the consumer was created with."""
        self._order = self.queues if queues is None else self.in_order(queues)
        # This is the first queue that may have jobs. Locking rows of a later queue would be wasted work.
        self._likely_queue = next((queue for queue in self._order if queue not in self._without), self._order[0])

    def _exchange(self, verdicts: Sequence[Verdict], limit: int) -> _Outcome:
        batch = Batch(self._pool, verdicts) if verdicts else None
        self._call_began = time.monotonic()
        if not self._unconfirmed_leases:  # An earlier call has reserved unconfirmed leases.
            self.asked_at = self._call_began
        outcome = self._connection.run(lambda session: self._settle_and_reserve(session, batch, limit))
        if batch is not None:
            self._unconfirmed.end(batch)
        self._is_busy = bool(outcome.leases)
        self._without = frozenset(outlook.queue for outlook in outcome.outlooks if not outlook.has_work)
        if outcome.leases:
            self._pool.poller.pause.speed_up()
        return outcome

    def _settle_and_reserve(self, session: Session, batch: Batch | None, limit: int) -> _Outcome:
        if self._unconfirmed_generation != forks.generation:
            # The leases are from before a fork. The parent process reads them back itself.
            self._unconfirmed_leases = []
        if self._unconfirmed_leases and (ours := self._read_back(session)):
            answers = self._settle(session, batch) if batch else []
            self._unconfirmed_leases = ours[limit:]
            return _Outcome(answers, ours[:limit], [])
        self._unconfirmed_leases = []
        claims = _Claims(self._pool)
        try:
            return self._settle_and_claim(session, batch, claims, limit)
        finally:
            claims.drop()  # The next scan must find the rows that were locked and not reserved.

    def _settle_and_claim(self, session: Session, batch: Batch | None, claims: _Claims, limit: int) -> _Outcome:
        answers, acks = [], []
        if batch is not None and batch.is_short and not self._unconfirmed.about(batch):
            answers, acks = batch.all_done(), batch.acks(session.take_ticket())
        elif batch is not None:
            answers = self._settle_carefully(session, batch)
        polled = self._look_and_claim(session, acks, claims, limit)
        if batch is not None and acks and not batch.are_done(polled.acks):
            session.roll_back()  # A lease has ended. The locked rows will show which one.
            claims.drop()
            answers = self._settle_carefully(session, batch)
            polled = self._look_and_claim(session, [], claims, limit)
        outlooks = polled.outlooks
        chosen = self._choose(session, outlooks, claims, limit)
        return _Outcome(answers, self._reserve(session, batch, answers, claims, chosen), outlooks)

    def _look_and_claim(self, session: Session, acks: list[str], claims: _Claims, limit: int) -> _Polled:
        """Send the acks, a poll of the queues, and a claim on the likely queue in one packet."""
        polling = Poll(self._pool, self._order, BUSY, claimed_from=self._likely_queue)
        claim = claims.begin(self._likely_queue, limit)
        statements = [*acks, polling.sql, *claim.statements]
        replies = session.execute(*statements) if session.in_transaction else session.begin(*statements)
        acked, polled, claimed = replies[: len(acks)], replies[len(acks)], replies[len(acks) + 1 :]
        outlooks = polling.read(polled.rows)
        rows = claim.read(session, claimed)
        return _Polled(
            acked,
            [
                outlook._replace(has_ready=bool(rows)) if outlook.queue == self._likely_queue else outlook
                for outlook in outlooks
            ],
        )

    def _choose(
        self, session: Session, outlooks: Sequence[Outlook], claims: _Claims, limit: int
    ) -> dict[str, list[_Row]]:
        """Return the best rows, queue by queue. The COMMIT unlocks all other rows.

        A queue's due jobs are promoted (made ready) only when that queue's turn comes. If an earlier queue has enough
        jobs, the call does not wait for the promotion. Jobs that become due during this call are left to the next call.
        """
        chosen: dict[str, list[_Row]] = {}
        left = limit
        for outlook in outlooks:
            if not left:
                break
            if outlook.has_work and outlook.queue not in chosen:  # a consumer may name a queue twice
                rows = self._best(session, outlook, claims, left)
                if rows:
                    if not chosen:
                        self._likely_queue = outlook.queue
                    chosen[outlook.queue] = rows[:left]
                    left -= len(chosen[outlook.queue])
        return chosen

    def _best(self, session: Session, outlook: Outlook, claims: _Claims, limit: int) -> list[_Row]:
        """Promote the queue's due jobs, then lock and return the queue's best rows."""
        promoting: list[str] = []
        if outlook.has_due:
            found = session.execute(*due_statements(outlook))
            promoting = promote_statements(found)
            scan_window = self._pool.poller.scan_windows.of(outlook.queue)
            if promoting:
                claims.has_promoted = True
                scan_window.again.restart.request()
            else:
                scan_window.mark_due_locked()
        known = claims.of(outlook.queue)
        if known is not None and not promoting:
            return known.rows
        if known is not None:
            known.drop()
        claim = claims.begin(outlook.queue, limit)
        replies = session.execute(*promoting, *claim.statements)
        return claim.read(session, replies[len(promoting) :])

    def _reserve(
        self,
        session: Session,
        batch: Batch | None,
        answers: Sequence[LeaseLost | None],
        claims: _Claims,
        chosen: dict[str, list[_Row]],
    ) -> list[Lease]:
        rows = [row for found in chosen.values() for row in found]
        if not rows and batch is None and not claims.has_promoted:
            session.roll_back()
            return []
        token = secrets.randbits(63) | 1  # 0 is stored for "no lease"
        leases = [row.lease(token) for row in rows]
        seqs = sorted(row.seq for row in rows)
        statements = [render("reserve", seqs=seqs, token=token, now=self._pool.now)] if rows else []
        self._unconfirmed_leases, self._unconfirmed_generation = leases, forks.generation
        try:
            self._commit(session, batch, answers, statements)
        except BaseException:
            if not session.is_broken:
                self._unconfirmed_leases = []  # The server replied with an error, so nothing was reserved.
            raise
        self._unconfirmed_leases = []
        claims.taken(chosen)
        return leases

    def _recover_leases(self, deadline: float) -> list[Lease]:
        """Return the leases of an unconfirmed transaction, if the transaction was carried out.

        Without this, the leases would run out and count as crashes.
        """
        if not self._unconfirmed_leases or self._unconfirmed_generation != forks.generation:
            return []  # There are no such leases, or they belong to the parent process.
        if time.monotonic() >= deadline:
            return []
        try:
            leases = self._connection.run(self._read_back, deadline)
        except MultiqError:
            return []
        self._unconfirmed_leases = []
        return leases

    def _read_back(self, session: Session) -> list[Lease]:
        """Return the unconfirmed leases that the server has stored under their token."""
        fences = [lease.token.split(":") for lease in self._unconfirmed_leases]
        token = int(fences[0][1])
        asked = render("read_back", seqs=[int(seq) for seq, _ in fences], token=token, now=self._pool.now)
        live = {seq for (seq,) in session.execute(asked)[0].rows}
        return [lease for lease, (seq, _) in zip(self._unconfirmed_leases, fences, strict=True) if int(seq) in live]

    # --- waiting ---

    def _wait_for_jobs(self, limit: int, give_up_at: float, *, has_looked: bool) -> list[Lease]:
        """Reserve jobs, and wait for them until *give_up_at*. *has_looked*: a poll has just found no jobs."""
        poller = self._pool.poller
        while True:
            # read before the poll, so that a later enqueue in this process ends the wait
            notifications = poller.notifications
            outlooks: list[Outlook] = []
            if self._unconfirmed_leases or (self._is_busy and not has_looked) or self._has_work(outlooks):
                outcome = self._exchange((), limit)
                outlooks = outcome.outlooks
                if outcome.leases:
                    self._interrupted = False
                    return outcome.leases
            has_looked = False
            if any(outlook.has_past_pause for outlook in outlooks):
                self._forget_pauses()
            if self._interrupted or time.monotonic() >= give_up_at:
                self._interrupted = False
                return []
            wake_at = self._wake_at(outlooks, give_up_at)
            poller.sleep(self._order, notifications, wake_at, functools.partial(poll, self._pool))

    def _wait_or_read_back(self, limit: int, give_up_at: float) -> list[Lease]:
        """Wait for jobs. After an error, return the leases that were reserved.

        The error is not raised, because the caller's verdicts are already settled and the caller would repeat them. The
        next reserve raises the error.
        """
        try:
            return self._wait_for_jobs(limit, give_up_at, has_looked=True)
        except MultiqError:
            found = self._recover_leases(self._call_began + self._pool.timeout)
            self._unconfirmed_leases = found[limit:] or self._unconfirmed_leases
            return found[:limit]

    def _has_work(self, outlooks: list[Outlook]) -> bool:
        with self._pool.borrowed() as connection:
            outlooks += look(connection, self._pool, self._order)
        return any(outlook.has_work for outlook in outlooks)

    def _forget_pauses(self) -> None:
        """Delete the rows of pauses that have ended, so that polls do not read them again.

        Several processes may do this at the same time.
        """
        if self._may_forget:
            try:
                with self._pool.borrowed() as connection:
                    statement = render("forget_pauses", now=self._pool.now)
                    connection.run(lambda session: session.commit(statement))
            except BackendError:  # This user may lack the right to DELETE. The row then stays and does no harm.
                self._may_forget = False

    def _wake_at(self, outlooks: Sequence[Outlook], give_up_at: float) -> float:
        changes = [outlook.changes_in for outlook in outlooks if outlook.changes_in is not None]
        nap = min([_LONGEST_SLEEP, *(change / SECOND for change in changes if change > 0)])
        return min(give_up_at, time.monotonic() + nap)

    def _notify_released(self, verdicts: Sequence[Verdict]) -> None:
        """Wake the waiting consumers of this process if a verdict may have made a job ready or due."""
        if not _MAKE_READY.isdisjoint(map(type, verdicts)):
            self._pool.poller.notify()


class _Polled(NamedTuple):
    acks: list[Reply]
    outlooks: list[Outlook]


class _Claims:
    """The last claim on each queue, for one attempt of a transaction."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last: dict[str, _Claim] = {}
        self.has_promoted = False

    def begin(self, queue: str, limit: int) -> _Claim:
        """Return a new claim, which replaces the queue's earlier claim."""
        self._last[queue] = claim = _Claim(self._pool, queue, limit)
        return claim

    def of(self, queue: str) -> _Claim | None:
        return self._last.get(queue)

    def taken(self, chosen: Mapping[str, list[_Row]]) -> None:
        """Record that the transaction is committed and these rows are reserved."""
        for queue, rows in chosen.items():
            self._last[queue].taken(rows)

    def drop(self) -> None:
        """Record that the remaining rows were locked but not reserved."""
        for claim in self._last.values():
            claim.drop()


class _Claim:
    """Locks the best ready jobs of a queue. One scan reads the jobs in the state AGAIN, and one those in READY."""

    def __init__(self, pool: Pool, queue: str, limit: int) -> None:
        self._limit = limit
        self.rows: list[_Row] = []
        """The rows that were found and are not reserved yet. The best row is first."""
        self._surplus: list[_Row] = []
        """Rows that were found and locked beyond the limit."""
        self._window = window = pool.poller.scan_windows.of(queue)
        self._again = _Scan(pool, queue, limit, state=AGAIN, cursor=window.again, condition=window.again.sql)
        self._ready = _Scan(pool, queue, limit, state=READY, cursor=window.ready, condition=window.ready.sql)

    @property
    def statements(self) -> list[str]:
        """The statements for AGAIN, followed by the statements for READY."""
        return [*self._again.statements, *self._ready.statements]

    def read(self, session: Session, replies: list[Reply]) -> list[_Row]:
        """Return the rows from the replies to ``statements``. The best row is first."""
        first_of_ready = len(self._again.statements)
        again, ready = self._again.read(replies[:first_of_ready]), self._ready.read(replies[first_of_ready:])
        if not again and not ready:
            again, ready = self._again.restart(session), self._ready.restart(session)
        found = sorted([*again, *ready], key=_BY_PLACE) if again else ready
        self.rows, self._surplus = found[: self._limit], found[self._limit :]
        return self.rows

    def taken(self, rows: Sequence[_Row]) -> None:
        """Record that these first rows are reserved. Later scans can start behind them."""
        for cursor, is_again in ((self._window.ready, False), (self._window.again, True)):
            last = next((row for row in reversed(rows) if row.is_again is is_again), None)
            if last is not None:
                cursor.taken(last.place)
        self._window.taken(len(rows))
        self.rows = self.rows[len(rows) :]

    def drop(self) -> None:
        """Record that the remaining rows were not reserved. The next scan must find them."""
        dropped, self.rows, self._surplus = [*self.rows, *self._surplus], [], []
        for cursor, is_again in ((self._window.ready, False), (self._window.again, True)):
            first = next((row for row in dropped if row.is_again is is_again), None)
            if first is not None:
                cursor.dropped(first.place)


class _Scan:
    """One scan of a queue's ready jobs in one state. If necessary, further statements measure the scan's time.

    The statements are rendered only once. Other threads change the counts that decide whether to measure.
    """

    __slots__ = ("_condition", "_cursor", "_is_measured", "_limit", "_pool", "_queue", "_state", "statements")

    def __init__(self, pool: Pool, queue: str, limit: int, *, state: int, cursor: ScanCursor, condition: Sql) -> None:
        self._pool = pool
        self._queue = queue
        self._limit = limit
        self._state = state
        self._cursor = cursor
        self._condition = condition
        select = rendered("claim", queue=queue.encode(), state=state, condition=condition, limit=limit, now=pool.now)
        self._is_measured = condition is FROM_START and cursor.restart.must_measure
        self.statements = [_START_CLOCK, select, _READ_CLOCK] if self._is_measured else [select]

    def read(self, replies: list[Reply]) -> list[_Row]:
        """Return the rows from the replies to ``statements``, and update the cursor."""
        if self._is_measured:
            _clock_started, selected, clock_read = replies
            ((micros,),) = clock_read.rows
            took = micros / SECOND
        else:
            (selected,), took = replies, None
        rows = selected.rows
        if self._condition is FROM_START:
            self._cursor.scanned(took, len(rows))
        elif self._condition is not NO_SCAN and len(rows) < self._limit:
            # All jobs of this priority are reserved. The next scan finds other priorities.
            self._cursor.restart.request()
        return [self._row(text, body) for text, body in rows]

    def restart(self, session: Session) -> list[_Row]:
        """Scan from the start, after both scans of the claim found nothing.

        Does nothing if this scan has begun at the start.
        """
        if self._condition is FROM_START or not self._cursor.restart.is_due(IDLE):
            return []
        restarted = _Scan(
            self._pool, self._queue, self._limit, state=self._state, cursor=self._cursor, condition=FROM_START
        )
        return restarted.read(session.execute(*restarted.statements))

    def _row(self, text: str, body: bytes) -> _Row:
        job_id, _, numbers = text.partition(",")
        row = _row_of_numbers(f"[{numbers}]")
        row.id, row.body, row.queue, row.is_again = job_id, body, self._queue, self._state == AGAIN
        return row
