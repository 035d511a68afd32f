"""The consumer: settles and reserves in one transaction, and waits without any.

A turn of ``exchange`` is two round trips and one commit: acks, a look and a claim go in the first packet, the leases
and the COMMIT in the second. How it waits is in ``waiting``.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multiq.backend import Abandon, Consumer, GiveBack, Lease, Release
from multiq.driverkit.replies import guarded
from multiq.errors import BackendError, MultiqError

from .records import AGAIN, READY, SECOND, due, promoted, unhexed
from .scan_window import BOTTOM, BUSY, IDLE, NOTHING
from .settle import Batch, Doubts
from .statements import render, rendered
from .waiting import Question

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from multiq.backend import Verdict
    from multiq.errors import LeaseLost

    from .connection import Answer, Database, Session
    from .records import Outlook
    from .scan_window import Lane
    from .statements import Sql

_START_CLOCK = "SET @multiq_at = SYSDATE(6)"
_READ_CLOCK = "SELECT TIMESTAMPDIFF(MICROSECOND, @multiq_at, SYSDATE(6))"

_MAKE_READY = frozenset({Release, GiveBack, Abandon})

_LONGEST_SLEEP = 1.0  # seconds until the queues are looked at whatever happens


class _Turn(NamedTuple):
    """What one transaction did, and saw."""

    answers: list[LeaseLost | None]
    leases: list[Lease]
    outlooks: list[Outlook]


class _Row(msgspec.Struct, array_like=True):
    """A ready job that is locked: first the numbers, in the order in which claim.sql tells them."""

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
        """What it sorts by as it is to be reserved."""
        return self.priority, self.seq

    def lease(self, token: int) -> Lease:
        return Lease(
            queue=self.queue,
            id=unhexed(self.id),
            token=f"{self.seq}:{token}",
            body=self.body,
            priority=self.priority,
            ttr=self.ttr / SECOND,
            attempt=self.attempt + 1,
            crashes=self.crashes,
            kicks=self.kicks,
            age=self.age / SECOND,
        )


_with_numbers = msgspec.json.Decoder(_Row).decode
_BY_PLACE = operator.attrgetter("place")


@guarded("reserve", "settle", "exchange", server="a MySQL or MariaDB")
class MysqlConsumer(Consumer):
    """Reserves from a database's queues. Its connection opens at the first call."""

    def __init__(self, database: Database, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._database = database
        self._connection = database.connection()
        self._interrupted = False
        self._hint = self.queues[0]
        """The queue that had jobs last: it is claimed from without looking first."""
        self._without: frozenset[str] = frozenset()
        """Queues that had nothing at the last look."""
        self._is_busy = False
        self._claimed: list[Lease] = []
        """Leases of a transaction of which it is not known whether it was committed."""
        self._claimed_by = 0
        self._may_forget = True
        """Whether rows of pauses that are over can be deleted."""
        self._turn_began = 0.0
        self._doubts = Doubts()
        """The same of verdicts."""

    def reorder(self, queues: Sequence[str]) -> None:
        super().reorder(queues)
        # rows of a later queue would be locked for nothing while an earlier one has jobs
        self._hint = next((queue for queue in self.queues if queue not in self._without), self.queues[0])

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        return self._wait_for_jobs(limit, time.monotonic() + timeout, has_looked=False)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if not verdicts:
            return []
        batch = Batch(self._database, verdicts)
        answers = self._connection.run(lambda session: self._settle(session, batch))
        self._doubts.end(batch)
        self._tell_others(verdicts)
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout)
        give_up_at = time.monotonic() + timeout
        turn = self._turn(verdicts, limit)
        self._tell_others(verdicts)
        if turn.leases or timeout <= 0:
            self._interrupted = False
            return turn.answers, turn.leases
        try:
            return turn.answers, self._wait_or_read_back(limit, give_up_at)
        except BaseException:
            self._doubts.begin(Batch(self._database, verdicts), turn.answers, None)  # the caller does not get them
            raise

    def interrupt(self) -> None:
        self._interrupted = True
        self._database.watch.ring()

    def _discard_connections(self) -> None:
        """A reply was none: those that come after it may be none either."""
        self._connection.close()
        self._database.close()

    def close(self) -> None:
        deadline = time.monotonic() + self._database.timeout
        if leases := self._leases_in_doubt(deadline):
            batch = Batch(self._database, [GiveBack(lease) for lease in leases])
            with contextlib.suppress(MultiqError):  # then they end by themselves, and count as crashes
                self._connection.run(lambda session: self._settle(session, batch), deadline)
            self._tell_others(batch.verdicts)
        self._connection.close()

    # --- waiting ---

    def _wait_for_jobs(self, limit: int, give_up_at: float, *, has_looked: bool) -> list[Lease]:
        """*has_looked*: there was nothing a moment ago."""
        watch = self._database.watch
        while True:
            rings = watch.rings  # before looking: what is enqueued here after this wakes us
            outlooks: list[Outlook] = []
            if self._claimed or (self._is_busy and not has_looked) or self._has_work(outlooks):
                turn = self._turn((), limit)
                outlooks = turn.outlooks
                if turn.leases:
                    self._interrupted = False
                    return turn.leases
            has_looked = False
            if any(outlook.has_past_pause for outlook in outlooks):
                self._forget_pauses()
            if self._interrupted or time.monotonic() >= give_up_at:
                self._interrupted = False
                return []
            watch.sleep(self._database, self.queues, rings, self._wake_at(outlooks, give_up_at))

    def _wait_or_read_back(self, limit: int, give_up_at: float) -> list[Lease]:
        """The verdicts are settled, and must not be again: what is wrong then is for the next reserve to say."""
        try:
            return self._wait_for_jobs(limit, give_up_at, has_looked=True)
        except MultiqError:
            found = self._leases_in_doubt(self._turn_began + self._database.timeout)
            self._claimed = found[limit:] or self._claimed
            return found[:limit]

    def _has_work(self, outlooks: list[Outlook]) -> bool:
        with self._database.borrowed() as connection:
            outlooks += self._database.watch.look(connection, self._database, self.queues)
        return any(outlook.has_work for outlook in outlooks)

    def _forget_pauses(self) -> None:
        """Delete the rows of pauses that are over: once for each, as then there is none. Others may do it, too."""
        if self._may_forget:
            try:
                with self._database.borrowed() as connection:
                    statement = render("forget_pauses", now=self._database.now)
                    connection.run(lambda session: session.commit(statement))
            except BackendError:  # a row that is left does no harm, and this user may not have the right
                self._may_forget = False

    def _wake_at(self, outlooks: Sequence[Outlook], give_up_at: float) -> float:
        changes = [outlook.changes_in for outlook in outlooks if outlook.changes_in is not None]
        nap = min([_LONGEST_SLEEP, *(change / SECOND for change in changes if change > 0)])
        return min(give_up_at, time.monotonic() + nap)

    def _tell_others(self, verdicts: Sequence[Verdict]) -> None:
        """Wake who waits in this process if a verdict may have made a job ready or due."""
        if not _MAKE_READY.isdisjoint(map(type, verdicts)):
            self._database.watch.ring()

    # --- reserving ---

    def _turn(self, verdicts: Sequence[Verdict], limit: int) -> _Turn:
        """Settle and reserve in one transaction."""
        batch = Batch(self._database, verdicts) if verdicts else None
        self._turn_began = time.monotonic()
        if not self._claimed:  # those were reserved before
            self.asked_at = self._turn_began
        turn = self._connection.run(lambda session: self._take_turn(session, batch, limit))
        if batch is not None:
            self._doubts.end(batch)
        self._is_busy = bool(turn.leases)
        self._without = frozenset(outlook.queue for outlook in turn.outlooks if not outlook.has_work)
        if turn.leases:
            self._database.watch.stir()
        return turn

    def _take_turn(self, session: Session, batch: Batch | None, limit: int) -> _Turn:
        if self._claimed_by != os.getpid():
            self._claimed = []  # before a fork: the parent reads them back
        if self._claimed and (ours := self._read_back(session)):
            answers = self._settle(session, batch) if batch else []
            self._claimed = ours[limit:]
            return _Turn(answers, ours[:limit], [])
        self._claimed = []
        claims = _Claims(self._database)
        try:
            return self._settle_and_claim(session, batch, claims, limit)
        finally:
            claims.drop()  # what is not handed out must be found by whoever looks next

    def _settle_and_claim(self, session: Session, batch: Batch | None, claims: _Claims, limit: int) -> _Turn:
        answers, acks = [], []
        if batch is not None and batch.is_short and not self._doubts.about(batch):
            answers, acks = batch.all_done(), batch.acks(session.take_ticket())
        elif batch is not None:
            answers = self._settle_carefully(session, batch)
        settled, outlooks = self._look_and_claim(session, acks, claims, limit)
        if batch is not None and acks and not batch.are_done(settled):
            session.roll_back()  # some lease has ended, and only the long way tells which
            claims.drop()
            answers = self._settle_carefully(session, batch)
            _, outlooks = self._look_and_claim(session, [], claims, limit)
        chosen = self._choose(session, outlooks, claims, limit)
        return _Turn(answers, self._reserve(session, batch, answers, claims, chosen), outlooks)

    def _look_and_claim(
        self, session: Session, acks: list[str], claims: _Claims, limit: int
    ) -> tuple[list[Answer], list[Outlook]]:
        """One packet: what the acks answered, what the queues offer, and rows of the likely queue, locked."""
        question = Question(self._database.watch, self._database, self.queues, BUSY, claimed_from=self._hint)
        claim = claims.begin(self._hint, limit)
        statements = [*acks, question.sql, *claim.sql]
        answers = session.ask(*statements) if session.in_transaction else session.begin(*statements)
        settled = answers[: len(acks)]
        look, *claimed = answers[len(acks) :]
        outlooks = question.answered(look.rows)
        rows = claim.answered(session, claimed)
        outlooks = [
            outlook._replace(has_ready=bool(rows)) if outlook.queue == self._hint else outlook for outlook in outlooks
        ]
        return settled, outlooks

    def _choose(
        self, session: Session, outlooks: Sequence[Outlook], claims: _Claims, limit: int
    ) -> dict[str, list[_Row]]:
        """The best rows, queue by queue; those that are not among them are free again with the commit.

        What is due in a queue is made ready when its turn comes, and not before: a queue in front of it with enough
        jobs does not wait for that. One round, as more may become due all the time.
        """
        chosen: dict[str, list[_Row]] = {}
        left = limit
        for outlook in outlooks:
            if not left:
                break
            if outlook.has_work and outlook.queue not in chosen:  # it may be named twice
                rows = self._best(session, outlook, claims, left)
                if rows:
                    if not chosen:
                        self._hint = outlook.queue
                    chosen[outlook.queue] = rows[:left]
                    left -= len(chosen[outlook.queue])
        return chosen

    def _best(self, session: Session, outlook: Outlook, claims: _Claims, limit: int) -> list[_Row]:
        """The best rows of one queue, locked, after what is due there was made ready."""
        promoting: list[str] = []
        if outlook.has_due:
            found = session.ask(*due(outlook))
            promoting = promoted(found)
            floors = self._database.watch.floors(outlook.queue)
            if promoting:
                claims.has_promoted = True
                floors.again.bottom.hurry()
            else:
                floors.all_due_is_locked()
        known = claims.of(outlook.queue)
        if known is not None and not promoting:
            return known.rows
        if known is not None:
            known.drop()
        claim = claims.begin(outlook.queue, limit)
        answers = session.ask(*promoting, *claim.sql)
        return claim.answered(session, answers[len(promoting) :])

    def _reserve(
        self,
        session: Session,
        batch: Batch | None,
        answers: Sequence[LeaseLost | None],
        claims: _Claims,
        chosen: dict[str, list[_Row]],
    ) -> list[Lease]:
        """Put the rows under leases of one token, and commit."""
        rows = [row for found in chosen.values() for row in found]
        if not rows and batch is None and not claims.has_promoted:
            session.roll_back()
            return []
        token = secrets.randbits(63) | 1  # 0 means none
        leases = [row.lease(token) for row in rows]
        seqs = sorted(row.seq for row in rows)
        statements = [render("reserve", seqs=seqs, token=token, now=self._database.now)] if rows else []
        self._claimed, self._claimed_by = leases, os.getpid()
        try:
            self._commit(session, batch, answers, statements)
        except BaseException:
            if not session.is_broken:
                self._claimed = []  # the server said that it did nothing
            raise
        self._claimed = []
        claims.taken(chosen)
        return leases

    def _leases_in_doubt(self, deadline: float) -> list[Lease]:
        """Those that a failed claim has left to us. Nobody knows of them: they would end, and count as crashes."""
        if not self._claimed or self._claimed_by != os.getpid():  # what a parent process has claimed is its own
            return []
        if time.monotonic() >= deadline:
            return []
        try:
            leases = self._connection.run(self._read_back, deadline)
        except MultiqError:
            return []
        self._claimed = []
        return leases

    def _read_back(self, session: Session) -> list[Lease]:
        """Those of the leases in doubt that are ours."""
        fences = [lease.token.split(":") for lease in self._claimed]
        token = int(fences[0][1])
        asked = render("read_back", seqs=[int(seq) for seq, _ in fences], token=token, now=self._database.now)
        live = {seq for (seq,) in session.ask(asked)[0].rows}
        return [lease for lease, (seq, _) in zip(self._claimed, fences, strict=True) if int(seq) in live]

    # --- settling ---

    def _settle(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        if batch.is_short and not self._doubts.about(batch):
            done, acks = batch.all_done(), batch.acks(session.take_ticket())
            if len(done) == 1:  # one statement, which commits by itself
                if batch.are_done(self._commit(session, batch, done, acks)):
                    return done
            elif batch.are_done(session.begin(*acks)):
                self._commit(session, batch, done, [])
                return done
            else:
                session.roll_back()
        answers, statements = batch.lock(session, self._doubts)
        self._commit(session, batch, answers, statements)
        return answers

    def _settle_carefully(self, session: Session, batch: Batch) -> list[LeaseLost | None]:
        answers, statements = batch.lock(session, self._doubts)
        if statements:
            session.ask(*statements)
        return answers

    def _commit(
        self,
        session: Session,
        batch: Batch | None,
        answers: Sequence[LeaseLost | None],
        statements: Sequence[str],
    ) -> list[Answer]:
        """Commit. If the reply is lost, the ticket or the receipt tells later whether these are the answers."""
        if batch is None:
            return session.commit(*statements)
        try:
            return session.commit(*statements, done=1)
        except BaseException:
            if session.is_broken and session.proof is not None:
                self._doubts.begin(batch, answers, session.proof)
            raise


class _Claims:
    """The claims of one try of a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last: dict[str, _Claim] = {}
        self.has_promoted = False

    def begin(self, queue: str, limit: int) -> _Claim:
        """One more, which takes the place of the queue's one before."""
        self._last[queue] = claim = _Claim(self._database, queue, limit)
        return claim

    def of(self, queue: str) -> _Claim | None:
        """The queue's last one."""
        return self._last.get(queue)

    def taken(self, chosen: Mapping[str, list[_Row]]) -> None:
        """These rows are under leases, and the transaction is committed."""
        for queue, rows in chosen.items():
            self._last[queue].taken(rows)

    def drop(self) -> None:
        """What is left of the rows was locked for nothing."""
        for claim in self._last.values():
            claim.drop()


class _Claim:
    """The best ready jobs of a queue, of both kinds: a pair of statements, and the rows that they locked."""

    def __init__(self, database: Database, queue: str, limit: int) -> None:
        self._database = database
        self._queue = queue
        self._limit = limit
        self.rows: list[_Row] = []
        """What it has found, in their order, as far as they are not handed out."""
        self._below: list[_Row] = []
        """What it has found beyond its limit."""
        self._floors = floors = database.watch.floors(queue)
        self._lanes = ((AGAIN, floors.again, floors.again.sql), (READY, floors.ready, floors.ready.sql))

    @property
    def sql(self) -> list[str]:
        """A statement for each lane, and those that tell how long it took, where that matters."""
        return [text for lane in self._lanes for text in self._scan(*lane)]

    def answered(self, session: Session, answers: Sequence[Answer]) -> list[_Row]:
        """The rows in their order."""
        left = iter(answers)
        again, ready = (self._found(lane, left) for lane in self._lanes)
        if not again and not ready:
            again, ready = (self._look_below(session, lane) for lane in self._lanes)
        found = sorted([*again, *ready], key=_BY_PLACE) if again else ready
        self.rows, self._below = found[: self._limit], found[self._limit :]
        return self.rows

    def taken(self, rows: Sequence[_Row]) -> None:
        """The first ones of its rows are handed out: what comes next is behind them."""
        for lane, is_again in ((self._floors.ready, False), (self._floors.again, True)):
            last = next((row for row in reversed(rows) if row.is_again is is_again), None)
            if last is not None:
                lane.taken(last.place)
        self._floors.taken(len(rows))
        self.rows = self.rows[len(rows) :]

    def drop(self) -> None:
        """The rows that are left are handed out to nobody: the next look must come upon them."""
        dropped, self.rows, self._below = [*self.rows, *self._below], [], []
        for lane, is_again in ((self._floors.ready, False), (self._floors.again, True)):
            first = next((row for row in dropped if row.is_again is is_again), None)
            if first is not None:
                lane.dropped(first.place)

    def _scan(self, state: int, lane: Lane, floor: Sql) -> list[str]:
        select = rendered(
            "claim", queue=self._queue.encode(), state=state, floor=floor, limit=self._limit, now=self._database.now
        )
        if floor is BOTTOM and lane.bottom.is_suspect:
            return [_START_CLOCK, select, _READ_CLOCK]
        return [select]

    def _found(self, asked: tuple[int, Lane, Sql], answers: Iterator[Answer]) -> list[_Row]:
        """The rows of one lane, from which its floor learns."""
        state, lane, floor = asked
        read = [next(answers) for _ in self._scan(*asked)]
        rows = read[len(read) // 2].rows
        if floor is BOTTOM:
            lane.looked(read[2].rows[0][0] / SECOND if len(read) > 1 else None, len(rows))
        elif floor is not NOTHING and len(rows) < self._limit:
            lane.bottom.hurry()  # what was left of this priority is taken: on to the next one
        return [self._row(row, is_again=state == AGAIN) for row in rows]

    def _look_below(self, session: Session, asked: tuple[int, Lane, Sql]) -> list[_Row]:
        """Who finds nothing anywhere looks from the bottom, where that was not done just now."""
        state, lane, floor = asked
        if floor is BOTTOM or not lane.bottom.is_due(IDLE):
            return []
        below = (state, lane, BOTTOM)
        return self._found(below, iter(session.ask(*self._scan(*below))))

    def _row(self, answer: tuple[str, bytes], *, is_again: bool) -> _Row:
        head, body = answer
        job_id, _, numbers = head.partition(",")
        row = _with_numbers(f"[{numbers}]")  # a JSON list is read at once, in less time than two numbers by int()
        row.id, row.body, row.queue, row.is_again = job_id, body, self._queue, is_again
        return row
