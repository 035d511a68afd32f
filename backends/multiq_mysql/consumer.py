"""The consumer settles and reserves in one transaction. While it waits, no transaction is open.

A call of ``exchange`` takes two round trips and one commit. The first packet has the acks, a poll, and a *claim*. A
claim is a SELECT that locks ready rows. The second packet has the UPDATE that makes leases of these rows, and the
COMMIT. ``waiting`` describes how a consumer waits.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multiq.backend import Abandon, Consumer, GiveBack, Lease, Release
from multiq.driverkit.fork import forks
from multiq.driverkit.replies import guarded
from multiq.errors import BackendError, MultiqError

from . import parking_time
from .gated_claim import Claim
from .gates import GATE_MARK, open_gates
from .holds import DOOM_MARK
from .limits import go_on
from .outcomes import NOTHING_KEPT
from .parking_time import Parking
from .promote import due_statements, promote, promote_statements
from .read_back import UnconfirmedLeases
from .records import (
    AGAIN,
    GATES_MARK,
    READY,
    SECOND,
    Poll,
    decode_text,
    look,
    unpack_hex_id,
)
from .scan_window import BUSY, FROM_START, IDLE, NO_SCAN
from .settle import Batch, UnconfirmedVerdicts
from .statements import render, rendered
from .steps import NO_STEPS
from .waiting import poll

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import Verdict
    from multiq.errors import LeaseLost

    from .connection import Reply, Session
    from .outcomes import Keeping
    from .pool import Pool
    from .records import Outlook
    from .scan_window import ScanCursor
    from .settle import Fence
    from .statements import Sql
    from .steps import Steps

_START_CLOCK = "SET @multiq_at = SYSDATE(6)"
_READ_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, @multiq_at, SYSDATE(6))"

_MAKE_READY = frozenset({Release, GiveBack, Abandon})

_INLINE_MEMO = 8_192  # bytes of the largest memo that a claim returns in its text
_MIN_TTR, _MAX_TTR = SECOND, 3_153_600_000 * SECOND  # as in begin_leases.sql
_OPENING_TIME = 0.5  # seconds that a call spends on gates which could not be opened after an earlier verdict
_LONGEST_SLEEP = 1.0  # seconds after which a waiting consumer polls again in any case
_FIRST_HOLD_UP, _LONGEST_HOLD_UP = 0.001, 0.1  # seconds until a consumer looks again at jobs that others have locked


class _Exchanged(NamedTuple):
    answers: list[LeaseLost | None]
    leases: list[Lease]
    outlooks: list[Outlook]


class _Row(msgspec.Struct, array_like=True):
    """A ready job whose row is locked. reserve.sql selects the first nine fields in this order."""

    priority: int
    seq: int
    ttr: int
    attempt: int
    crashes: int
    kicks: int
    enqueued_at: int
    memo: str = ""
    """The memo in hex. If the text is longer than an inline memo may be, the memo must be read separately."""
    doomed: str = ""
    """The reason why the job is doomed, in hex, after ``DOOM_MARK``."""
    gates: str = ""
    """The text of the column ``gates``, after ``GATES_MARK``."""
    id: str = ""
    """In hex."""
    body: bytes = b""
    queue: str = ""
    is_again: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of ready jobs within a queue."""
        return self.priority, self.seq

    def lease(self, token: str, now: int) -> Lease:
        """Return the lease of this job. *now*: the server's time at the poll. The job may have been enqueued shortly
        after the poll.

        Another program may have written any value that fits the column. So the values are bounded as in
        begin_leases.sql.
        """
        ttr, age = self.ttr, now - self.enqueued_at
        if not _MIN_TTR <= ttr <= _MAX_TTR:
            ttr = min(max(ttr, _MIN_TTR), _MAX_TTR)
        if not 0 <= age <= now:
            age = min(max(age, 0), now)
        lease = Lease(
            queue=self.queue,
            id=unpack_hex_id(self.id),
            token=f"{self.seq}:{token}",
            body=self.body,
            priority=self.priority,
            ttr=ttr / SECOND,
            attempt=self.attempt + 1,
            crashes=self.crashes,
            kicks=self.kicks,
            age=age / SECOND,
        )
        if not (self.gates or self.memo or self.doomed):
            return lease
        return msgspec.structs.replace(
            lease,
            token=f"{self.seq}:{GATE_MARK}{token}" if self.gates else lease.token,
            memo=bytes.fromhex(self.memo),
            doomed=decode_text(bytes.fromhex(self.doomed[1:])),
        )


# Decoding a JSON list is faster than two calls of int(). Decoding all rows together is faster than decoding them one by
# one.
_rows_of_numbers = msgspec.json.Decoder(list[_Row]).decode
_BY_PLACE, _MEMO, _GATES = map(operator.attrgetter, ("place", "memo", "gates"))


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
        self._unconfirmed_leases = UnconfirmedLeases(pool)
        self._may_forget = True
        """Whether this user may delete the rows of pauses that have ended."""
        self._call_began = 0.0
        self._unconfirmed = UnconfirmedVerdicts()
        self._parking = Parking()
        self._to_open: list[Fence] = []
        """Ended leases whose gates must be opened. Empty, unless the server has not answered."""
        self._gates_to_open: set[tuple[bytes, bytes, bytes]] = set()
        """The gates of these leases that were found."""
        self._held_up: set[str] = set()
        """The queues whose jobs the last look has not found, because other consumers had locked them."""
        self._hold_ups = 0
        """The number of looks in a row that found such a queue."""
        self._gated: str | None = None
        """The first queue of the present call whose jobs have gates. A separate transaction reserves the jobs of this
        queue."""

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        if queues is not None or self._order is not self.queues:
            self._set_order(queues)
        if self._to_open:
            self._open_gates(deadline=time.monotonic() + _OPENING_TIME)
        return self._wait_for_jobs(limit, time.monotonic() + timeout, has_looked=False)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if not verdicts:
            return []
        batch = Batch(self._pool, verdicts)
        answers = self._connection.run(lambda session: self._settle(session, batch))
        self._unconfirmed.end(batch)
        self._open_gates(batch.ends_of_gates)
        self._notify_released(batch)
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout, queues)
        if queues is not None or self._order is not self.queues:
            self._set_order(queues)
        give_up_at = time.monotonic() + timeout
        if self._to_open:
            self._open_gates(deadline=time.monotonic() + _OPENING_TIME)
        batch = Batch(self._pool, verdicts)
        # These verdicts have a transaction of their own, which is committed before the claim. So no claimed row is
        # locked while a step waits for the lock of a unique key. Also, the claim can use the slots of the settled
        # leases.
        if batch.has_keys or batch.ends_of_gates:
            self._call_began = time.monotonic()
            answers = self.settle(verdicts)
        else:
            exchanged = self._exchange(batch, limit)
            answers = exchanged.answers
            self._notify_released(batch)
            if exchanged.leases or timeout <= 0:
                self._interrupted = False
                return answers, exchanged.leases
        try:
            return answers, self._wait_or_read_back(limit, give_up_at)
        except BaseException:
            # The caller gets no answers, and may repeat the verdicts.
            self._unconfirmed.begin(batch, answers, None)
            raise

    def interrupt(self) -> None:
        self._interrupted = True
        self._pool.poller.notify()

    def close(self) -> None:
        deadline = time.monotonic() + self._pool.timeout
        if leases := self._unconfirmed_leases.recover(self._connection, deadline):
            batch = Batch(self._pool, [GiveBack(lease) for lease in leases])
            with contextlib.suppress(MultiqError):  # After an error, the leases run out and count as crashes.
                self._connection.run(lambda session: self._settle(session, batch), deadline)
                self._open_gates(batch.ends_of_gates, deadline)
            self._notify_released(batch)
        self._connection.close()

    def _discard_connections(self) -> None:
        """Close all connections after a malformed reply. Later replies on a connection may be malformed, too."""
        self._connection.close()
        self._pool.close()

    # --- settling ---

    def _settle(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        batch.check_sizes()
        if batch.has_keys:
            answers, _ = batch.lock(session, self._unconfirmed)
            batch.carry_out_in_order(session)
            self._commit(session, batch, answers, [])
            return answers
        if batch.is_short and not self._unconfirmed.about(batch):
            done, acks = batch.all_done(), batch.acks(session.take_ticket())
            is_lone = len(done) == 1 and not batch.has_steps
            keeping, steps = batch.keeping(is_guarded=is_lone), batch.begin_steps()
            if is_lone:  # A single ack commits by itself. An ack with an outcome goes in one packet.
                ack, *kept = self._commit(session, batch, done, [*acks, *keeping.statements])
                if batch.are_done([ack]):
                    keeping.read(kept)
                    return done
            else:
                found = session.begin(*acks, *steps.first)
                if batch.are_done(found[: len(acks)]):
                    steps.read(found[len(acks) :])
                    moves, last = steps.take_moves(), steps.last
                    replies = self._commit(session, batch, done, [*last, *moves, *keeping.statements])
                    steps.read_last(replies)
                    keeping.read(replies[len(last) + len(moves) :])
                    return done
                session.roll_back()
        answers, statements = batch.lock(session, self._unconfirmed)
        steps = batch.steps
        if steps.first:
            steps.read(session.execute(*statements, *steps.first)[len(statements) :])
            statements = steps.take_moves()
        steps.read_last(self._commit(session, batch, answers, [*steps.last, *statements]))
        return answers

    def _settle_carefully(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        """Lock the jobs, and carry out the verdicts and their steps. The last statements of the steps are not sent
        yet."""
        answers, statements = batch.lock(session, self._unconfirmed)
        steps = batch.steps
        if statements or steps.first:
            steps.read(session.execute(*statements, *steps.first)[len(statements) :])
            self._scan_for(steps)
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
        """Set the order of the queues for the present call. If *queues* is None, it is the order of ``self.queues``."""
        self._order = self.queues if queues is None else self.in_order(queues)
        # The first queue that may have jobs. If it has jobs, the call needs no rows of later queues.
        self._likely_queue = next((queue for queue in self._order if queue not in self._without), self._order[0])

    def _exchange(self, batch: Batch | None, limit: int) -> _Exchanged:
        self._call_began = time.monotonic()
        self.sees_all = True
        if not self._unconfirmed_leases.leases:  # Unconfirmed leases run from the time of an earlier call.
            self.asked_at = self._call_began
        exchanged = self._connection.run(lambda session: self._settle_and_reserve(session, batch, limit))
        if batch is not None:
            self._unconfirmed.end(batch)
        if self._gated is not None:
            exchanged = self._reserve_within_limits(exchanged, self._gated, limit, is_settled=batch is not None)
        self._is_busy = bool(exchanged.leases)
        self._without = frozenset(outlook.queue for outlook in exchanged.outlooks if not outlook.has_work)
        if exchanged.leases:
            self._pool.poller.pause.speed_up()
        return exchanged

    def _settle_and_reserve(self, session: Session, batch: Batch | None, limit: int) -> _Exchanged:
        self._gated = None  # Each attempt checks this again.
        unconfirmed = self._unconfirmed_leases
        if unconfirmed.generation != forks.generation:
            # The leases are from before a fork. The parent process reads them back itself.
            unconfirmed.leases = []
        if unconfirmed.leases and (ours := unconfirmed.read_back(session)):
            answers = self._settle(session, batch) if batch else []
            unconfirmed.leases = ours[limit:]
            return _Exchanged(answers, ours[:limit], [])
        unconfirmed.leases = []
        claims = _Claims(self._pool)
        try:
            return self._settle_and_claim(session, batch, claims, limit)
        finally:
            claims.drop()  # The next scan must find the rows that were locked and not reserved.

    def _settle_and_claim(self, session: Session, batch: Batch | None, claims: _Claims, limit: int) -> _Exchanged:
        answers, acks, first, keeping = [], [], [], NOTHING_KEPT
        if batch is not None:
            batch.check_sizes()
        if batch is not None and batch.is_short and not self._unconfirmed.about(batch):
            answers, acks, keeping = batch.all_done(), batch.acks(session.take_ticket()), batch.keeping()
            first = batch.begin_steps().first
            self._scan_for(batch.steps)
        elif batch is not None:
            answers = self._settle_carefully(session, batch)
        polled = self._look_and_claim(session, [*acks, *first], claims, limit)
        if batch is not None and acks and not batch.are_done(polled.settled[: len(acks)]):
            session.roll_back()  # A lease has ended. _settle_carefully locks the rows and finds which one.
            claims.drop()
            keeping = NOTHING_KEPT  # _settle_carefully stores the outcomes.
            answers = self._settle_carefully(session, batch)
            polled = self._look_and_claim(session, [], claims, limit)
        elif batch is not None and acks:
            batch.steps.read(polled.settled[len(acks) :])
        steps = NO_STEPS if batch is None else batch.steps
        outlooks = polled.outlooks
        if steps.released:
            outlooks = [
                outlook if steps.readied(outlook.queue) is None else outlook._replace(has_ready=True)
                for outlook in outlooks
            ]
        chosen = self._choose(session, outlooks, claims, limit, steps)
        leases = self._reserve(
            session, batch, answers, claims, chosen, now=outlooks[0].now, keeping=keeping, steps=steps
        )
        return _Exchanged(answers, leases, outlooks)

    def _scan_for(self, steps: Steps) -> None:
        """Make the next scans find the jobs that the steps have added."""
        for queue in steps.enqueued:
            self._pool.poller.scan_windows.made_ready(queue)

    def _look_and_claim(self, session: Session, settling: list[str], claims: _Claims, limit: int) -> _Polled:
        """Send the acks and their steps, a poll of the queues, and a claim on the likely queue in one packet."""
        polling = Poll(self._pool, self._order, BUSY, claimed_from=self._likely_queue)
        claim = claims.begin(self._likely_queue, limit)
        statements = [*settling, polling.sql, *claim.statements]
        replies = session.execute(*statements) if session.in_transaction else session.begin(*statements)
        at = len(settling)
        settled, polled, claimed = replies[:at], replies[at], replies[at + 1 :]
        outlooks = polling.read(polled.rows)
        rows = claim.read(session, claimed)
        return _Polled(
            settled,
            [
                outlook._replace(has_ready=bool(rows)) if outlook.queue == self._likely_queue else outlook
                for outlook in outlooks
            ],
        )

    def _choose(
        self, session: Session, outlooks: Sequence[Outlook], claims: _Claims, limit: int, steps: Steps
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
            if outlook.queue in chosen:  # a consumer may name a queue twice
                continue
            rows = self._best(session, outlook, claims, left, steps) if outlook.has_work else []
            plain = rows if not any(map(_GATES, rows)) else _until_gated(rows)
            if outlook.has_open_gate and self.most_gated != 0:
                plain = []
            if plain:
                if not chosen:
                    self._likely_queue = outlook.queue
                chosen[outlook.queue] = plain[:left]
                left -= len(chosen[outlook.queue])
            if left and (len(plain) < len(rows) or outlook.has_open_gate):
                self._gated = outlook.queue
                self._pool.poller.scan_windows.of(outlook.queue).has_limits = True
                break
        return chosen

    def _best(self, session: Session, outlook: Outlook, claims: _Claims, limit: int, steps: Steps) -> list[_Row]:
        """Promote the queue's due jobs and release its held jobs, then lock and return the queue's best rows."""
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
        released = steps.readied(outlook.queue) if steps.released else None
        if released is not None and (known is None or known.is_behind(released)):
            promoting += steps.take_moves()
            self._pool.poller.scan_windows.made_ready(outlook.queue)
        else:
            released = None
        if known is not None and not promoting and released is None:
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
        *,
        now: int,
        keeping: Keeping,
        steps: Steps,
    ) -> list[Lease]:
        """Reserve the chosen rows, and commit. *now*: the server's time at the poll."""
        rows = [row for found in chosen.values() for row in found]
        if not rows and batch is None and not claims.has_promoted:
            session.roll_back()
            return []
        _read_large_memos(session, rows)
        token = secrets.randbits(63) | 1  # 0 is stored for "no lease"
        text = str(token)
        leases = [row.lease(text, now) for row in rows]
        seqs = sorted(row.seq for row in rows)
        statements = [render("begin_leases", seqs=seqs, token=token, now=self._pool.now)] if rows else []
        unconfirmed = self._unconfirmed_leases
        unconfirmed.leases, unconfirmed.generation = leases, forks.generation
        try:
            ending = [] if steps is NO_STEPS else [*steps.last, *steps.take_moves()]
            replies = self._commit(session, batch, answers, [*ending, *keeping.statements, *statements])
            if steps is not NO_STEPS:
                steps.read_last(replies)
        except BaseException:
            if not session.is_broken:
                unconfirmed.leases = []  # The server replied with an error, so nothing was reserved.
            raise
        unconfirmed.leases = []
        if keeping.statements:
            keeping.read(replies[len(ending) :])
        claims.taken(chosen)
        return leases

    # --- limits ---

    def _reserve_within_limits(self, exchanged: _Exchanged, first: str, limit: int, *, is_settled: bool) -> _Exchanged:
        """Reserve more jobs, beginning with the queue *first*. The queues before *first* have no jobs left."""
        leases = exchanged.leases
        at = next(number for number, outlook in enumerate(exchanged.outlooks) if outlook.queue == first)
        outlooks = {outlook.queue: outlook for outlook in reversed(exchanged.outlooks[at:])}
        queues = [outlook.queue for outlook in exchanged.outlooks[at:] if outlook.has_work or outlook.has_open_gate]
        try:
            for queue in dict.fromkeys(queues):
                if queue != first and outlooks[queue].has_due:
                    # The transaction that found the limits has promoted due jobs in the queues up to *first*. In later
                    # queues it has promoted none.
                    promote(self._connection, outlooks[queue], self._call_began + self._pool.timeout)
                    self._pool.poller.scan_windows.of(queue).again.restart.request()
                leases += self._reserve_gated(queue, limit - len(leases), leases, outlooks[queue])
                if len(leases) >= limit:
                    break
        except MultiqError:
            if not leases and not is_settled:
                raise
        return exchanged._replace(leases=leases)

    def _reserve_gated(self, queue: str, limit: int, before: Sequence[Lease], outlook: Outlook) -> list[Lease]:
        """Reserve jobs of a queue with limits, and check their gates. *before*: the leases that the call has so far.

        A transaction may park many jobs and find none that can start. While the call goes on, the caller's new verdicts
        and touches wait. So the call ends if it has leases and many jobs are left, if it is interrupted, or after
        ``LOOKING_TIME`` (parking_time.py). ``sees_all`` is then False, because the jobs that the call has not looked at
        may include one that can start.

        If other consumers have locked the jobs or their gates, the queue is noted as held up. Without a pause, many
        consumers would ask the server again and again, and so slow down the one that has the locks.
        """
        leases: list[Lease] = []
        gated = sum(map(_has_gates, before))
        turns = self._pool.poller.claim_turns(queue)
        looked = turns.begun
        give_up_at = self._call_began + min(self._pool.timeout, parking_time.LOOKING_TIME)
        searches = 0
        first, seeks_keys = self._parking.begin(queue, self._call_began)
        for turn in itertools.count(first):
            most_gated = limit if self.most_gated is None else self.most_gated - gated - sum(map(_has_gates, leases))
            claim = _GatedClaim(
                self,
                self._pool,
                queue,
                limit - len(leases),
                most_gated,
                unconfirmed=self._unconfirmed_leases,
                turn=turn,
                parks_until=self._parking.end(queue, self._call_began),
                seeks_keys=seeks_keys and most_gated > 0,
            )
            try:
                with turns.next(looked, self._call_began + self._pool.timeout, lambda: self._interrupted) as number:
                    if number is None:  # another consumer of this process has just found that nothing is left
                        return leases
                    began = time.monotonic()
                    found = self._connection.run(claim.run)
                    is_last = claim.is_all and not claim.has_locked and sum(map(_has_gates, found)) < most_gated
                    if is_last and turns.is_awaited and self._has_nothing(queue):
                        turns.found_all(number)
                looked = turns.begun
                self._parking.note_claim(queue, claim, began, self._call_began, has_found=bool(found))
                # Without leases, the transactions before have reserved nothing.
                self.asked_at = self.asked_at if leases or before else began
                leases += found
                for name in claim.changes:
                    self._connection.run(functools.partial(go_on, pool=self._pool, queue=queue, name=name, waits=False))
            except MultiqError:
                if not leases:
                    raise
                break
            if claim.is_all or len(leases) >= limit:
                break
            searches += seeks_keys
            may_search = not searches and self._parking.may_search(queue)
            seeks_keys = claim.has_parked_first and may_search
            has_enough = claim.is_deep and not found and bool(leases or before)
            if has_enough or self._interrupted or time.monotonic() > give_up_at:
                self.sees_all = False
                self._parking.ended_early(queue, turn)
                break
        saw_open_gate = turn == first and outlook.has_open_gate and self.most_gated != 0
        if not leases and (claim.has_locked or (saw_open_gate and not claim.has_looked)):
            self._held_up.add(queue)
        return leases

    def _has_nothing(self, queue: str) -> bool:
        """Whether the queue has no job that can start. A claim does not see the jobs and gates that another session has
        locked, but a poll does."""
        try:
            (outlook,) = look(self._connection, self._pool, [queue])
        except MultiqError:
            return False
        return not (outlook.has_work or outlook.has_open_gate)

    def claim_gated(self, session: Session, claim: Claim, queue: str) -> list[Lease]:
        """Reserve the jobs that a claim has chosen, and commit."""
        if not claim.has_changed:
            session.roll_back()
            return []
        token = secrets.randbits(63) | 1
        seqs = sorted(job.seq for job in claim.taken)
        statements = claim.statements(token)
        if not seqs:
            session.commit(*statements)
            return []
        asked = [render("read_locked", seqs=seqs, inline=_INLINE_MEMO + 1)]
        if not claim.now:  # None of the jobs has a gate, so the claim has not read the time.
            asked.append(render("now", now=self._pool.now))
        (rows, _), *time_read = session.execute(*asked)
        now = time_read[0].rows[0][0] if time_read else claim.now
        found = _read_rows(rows, queue)
        _read_large_memos(session, found)
        chosen = {job.seq: number for number, job in enumerate(claim.taken)}
        found.sort(key=lambda row: chosen[row.seq])
        leases = [row.lease(str(token), now) for row in found]
        unconfirmed = self._unconfirmed_leases
        unconfirmed.leases, unconfirmed.generation = leases, forks.generation
        try:
            session.commit(render("begin_leases", seqs=seqs, token=token, now=self._pool.now), *statements)
        except BaseException:
            if not session.is_broken:
                unconfirmed.leases = []
            raise
        unconfirmed.leases = []
        return leases

    # --- waiting ---

    def _wait_for_jobs(self, limit: int, give_up_at: float, *, has_looked: bool) -> list[Lease]:
        """Reserve jobs, and wait for them until *give_up_at*. *has_looked*: whether a poll has just found no jobs."""
        poller = self._pool.poller
        while True:
            # This is read before the poll, so that a later enqueue in this process ends the wait.
            notifications = poller.notifications
            outlooks: list[Outlook] = []
            self.sees_all = True
            self._held_up.clear()
            if self._unconfirmed_leases.leases or (self._is_busy and not has_looked) or self._has_work(outlooks):
                leases, outlooks = self._reserve_now(limit, outlooks)
                if leases:
                    self._hold_ups = 0
                    self._interrupted = False
                    return leases
            has_looked = False
            if any(outlook.has_past_pause for outlook in outlooks):
                self._forget_pauses()
            if self._interrupted or time.monotonic() >= give_up_at:
                self._interrupted = False
                return []
            if not self.sees_all:
                continue
            wake_at = self._wake_at(outlooks, give_up_at)
            poller.sleep(
                [queue for queue in self._order if queue not in self._held_up] if self._held_up else self._order,
                notifications,
                min(wake_at, time.monotonic() + self._hold_up_pause()),
                functools.partial(poll, self._pool),
            )

    def _hold_up_pause(self) -> float:
        """Return the seconds for which this consumer leaves out the queues whose jobs were locked. The pause doubles
        while they are locked."""
        if not self._held_up:
            self._hold_ups = 0
            return _LONGEST_SLEEP
        self._hold_ups += 1
        spread = random.uniform(0.5, 1.5)  # noqa: S311 - spreads the attempts, guards nothing
        return min(_FIRST_HOLD_UP * 2.0 ** min(self._hold_ups, 10), _LONGEST_HOLD_UP) * spread

    def _reserve_now(self, limit: int, outlooks: list[Outlook]) -> tuple[list[Lease], list[Outlook]]:
        """Reserve jobs. *outlooks*: the outlooks of this poll. Returns the leases and the last outlooks."""
        first = next((outlook.queue for outlook in outlooks if outlook.has_open_gate), None)
        if first is None or self._unconfirmed_leases.leases or any(outlook.has_work for outlook in outlooks):
            exchanged = self._exchange(None, limit)
        else:  # All remaining jobs wait for gates.
            self._call_began = self.asked_at = time.monotonic()
            exchanged = self._reserve_within_limits(_Exchanged([], [], outlooks), first, limit, is_settled=False)
        return exchanged.leases, exchanged.outlooks

    def _wait_or_read_back(self, limit: int, give_up_at: float) -> list[Lease]:
        """Wait for jobs. After an error, return the leases that were reserved.

        The error is not raised, because the caller's verdicts are already settled and the caller would repeat them. The
        next reserve raises the error.
        """
        try:
            return self._wait_for_jobs(limit, give_up_at, has_looked=True)
        except MultiqError:
            unconfirmed = self._unconfirmed_leases
            found = unconfirmed.recover(self._connection, self._call_began + self._pool.timeout)
            unconfirmed.leases = found[limit:] or unconfirmed.leases
            return found[:limit]

    def _has_work(self, outlooks: list[Outlook]) -> bool:
        with self._pool.borrowed() as connection:
            outlooks += look(connection, self._pool, self._order)
        return any(outlook.has_work or (outlook.has_open_gate and self.most_gated != 0) for outlook in outlooks)

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

    def _open_gates(self, ended: Sequence[Fence] = (), deadline: float | None = None) -> None:
        """Let the next reserve check the gates of leases that have ended.

        If this fails, the next call tries again. If there is no next call, a reserve checks the gates when the leases
        would have ended.
        """
        self._to_open += ended
        if not self._to_open:
            return
        with contextlib.suppress(MultiqError):
            self._connection.run(lambda session: open_gates(session, self._to_open, self._gates_to_open), deadline)
            self._to_open, self._gates_to_open = [], set()
        self._pool.poller.notify()

    def _notify_released(self, batch: Batch) -> None:
        """Wake the waiting consumers of this process if a verdict may have made a job ready or due."""
        poller = self._pool.poller
        queues = batch.queues
        for queue in queues:
            poller.scan_windows.made_ready(queue)
        if queues or not _MAKE_READY.isdisjoint(map(type, batch.verdicts)):
            poller.notify()


def _read_large_memos(session: Session, rows: Sequence[_Row]) -> None:
    """Read the memos that the claims have cut off. The rows are locked, so no other session has changed the memos."""
    if not any(map(_MEMO, rows)):
        return
    large = {row.seq: row for row in rows if len(row.memo) > 2 * _INLINE_MEMO}
    if large:
        ((found, _),) = session.execute(render("memos", seqs=sorted(large)))
        for seq, memo in found:
            large[seq].memo = memo.hex()


def _until_gated(rows: list[_Row]) -> list[_Row]:
    return rows[: next(at for at, row in enumerate(rows) if row.gates)]


def _has_gates(lease: Lease) -> bool:
    return f":{GATE_MARK}" in lease.token


class _GatedClaim:
    """A reserve of jobs of a queue with limits. It may be attempted several times."""

    def __init__(
        self,
        consumer: MysqlConsumer,
        pool: Pool,
        queue: str,
        limit: int,
        most_gated: int,
        *,
        unconfirmed: UnconfirmedLeases,
        turn: int,
        parks_until: float,
        seeks_keys: bool,
    ) -> None:
        self._consumer = consumer
        self._unconfirmed = unconfirmed
        self._pool = pool
        self._queue = queue
        self._limit = limit
        self._most_gated = most_gated
        self._turn = turn
        self._parks_until = parks_until
        self.seeks_keys = seeks_keys
        """Whether the transaction looks for jobs of other keys of fair limits behind the jobs that it reads."""
        self.is_all = False
        self.is_full = False
        """Whether there may be more ready jobs than the transaction has read."""
        self.is_deep = False
        """Whether the transaction has read as many ready jobs as a transaction may, and there may be more."""
        self.has_parked_first = False
        """Whether the transaction has handed out nothing to park ready jobs of fair limits first."""
        self.knows_all_keys = self.search_failed = False
        """Whether the transaction has searched for jobs of other keys, and whether it has found all keys or not."""
        self.has_looked = False
        """Whether the transaction has locked gates that must be checked."""
        self.has_locked = False
        """Whether the transaction leaves jobs out, because another session has locked them or one of their gates."""
        self.changes: list[str] = []
        """The changed limits whose next gates must be opened."""

    def run(self, session: Session) -> list[Lease]:
        if ours := self._unconfirmed.take(session, self._limit):
            return ours
        claim = Claim(
            self._pool,
            self._queue,
            self._limit,
            self._most_gated,
            turn=self._turn,
            may_park_first=time.monotonic() < self._parks_until,
            seeks_keys=self.seeks_keys,
        )
        claim.read(session)
        self.changes, self.is_full, self.has_parked_first = claim.changes, claim.is_full, claim.has_parked_first
        self.is_deep, self.has_looked, self.has_locked = claim.is_deep, claim.has_looked, claim.has_locked
        self.knows_all_keys, self.search_failed = claim.knows_all_keys, claim.search_failed
        leases = self._consumer.claim_gated(session, claim, self._queue)
        self.is_all = (claim.is_all or not claim.has_progress) and not claim.changes
        return leases


class _Polled(NamedTuple):
    settled: list[Reply]
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
    """Locks the best ready jobs of a queue. One scan reads the jobs in the state AGAIN, and another scan reads the jobs
    in the state READY."""

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

    def is_behind(self, place: tuple[int, int]) -> bool:
        """Whether the claim would have found a job at this place, if the job had been ready."""
        return len(self.rows) < self._limit or place < self.rows[-1].place

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
    """One scan of a queue's rows in one of the two stored states of ready jobs, ``READY`` and ``AGAIN``.

    If the time of the scan must be measured, additional statements do this.

    The statements are rendered only once, because other threads change the counts that decide whether to measure. A
    second rendering could have other statements than the first.
    """

    __slots__ = ("_condition", "_cursor", "_is_measured", "_limit", "_pool", "_queue", "_state", "statements")

    def __init__(self, pool: Pool, queue: str, limit: int, *, state: int, cursor: ScanCursor, condition: Sql) -> None:
        self._pool = pool
        self._queue = queue
        self._limit = limit
        self._state = state
        self._cursor = cursor
        self._condition = condition
        select = rendered(
            "reserve",
            queue=queue.encode(),
            state=state,
            condition=condition,
            limit=limit,
            inline=_INLINE_MEMO + 1,
        )
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
        return self._rows(rows)

    def restart(self, session: Session) -> list[_Row]:
        """Scan from the start. This is called if both scans of the claim have found nothing.

        Does nothing if this scan has begun at the start.
        """
        if self._condition is FROM_START or not self._cursor.restart.is_due(IDLE):
            return []
        restarted = _Scan(
            self._pool, self._queue, self._limit, state=self._state, cursor=self._cursor, condition=FROM_START
        )
        return restarted.read(session.execute(*restarted.statements))

    def _rows(self, found: Sequence[tuple[str, bytes]]) -> list[_Row]:
        return _read_rows(found, self._queue, is_again=self._state == AGAIN)


def _read_rows(found: Sequence[tuple[str, bytes]], queue: str, *, is_again: bool = False) -> list[_Row]:
    """Return jobs from rows of reserve.sql."""
    parts = [text.partition(",") for text, _body in found]
    rows = _rows_of_numbers(f"[{','.join([f'[{numbers}]' for _id, _comma, numbers in parts])}]")
    for row, (job_id, _comma, _numbers), (_text, body) in zip(rows, parts, found, strict=True):
        if row.memo or row.doomed:  # an empty memo may come before the gates
            _sort_texts(row)
        row.id, row.body, row.queue, row.is_again = job_id, body, queue, is_again
    return rows


def _sort_texts(row: _Row) -> None:
    """Sort the texts at the end of a row. Any of them may be missing."""
    texts = [found for found in (row.memo, row.doomed, row.gates) if found]
    row.memo = row.doomed = row.gates = ""
    for found in texts:
        if found[0] == DOOM_MARK:
            row.doomed = found
        elif found[0] == GATES_MARK:
            row.gates = found
        else:
            row.memo = found
