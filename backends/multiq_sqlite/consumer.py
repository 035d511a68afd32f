"""The consumer settles and reserves in one transaction, and waits outside any transaction.

``waiting`` describes how it waits. The consumer reads its queues after a commit of another connection, at a due time,
and otherwise once a second. It takes the write lock only if the queues have a job to reserve or a pause that has ended.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from multiq.backend import Abandon, Ack, Bury, Consumer, GiveBack, Lease, Release, Touch
from multiq.driverkit.clock import SECOND
from multiq.errors import LeaseLost, MultiqError

from .errors import MalformedRecord
from .malformed import LONGEST_TTR, MOST_COUNTED, bury_and_repeat
from .records import SLICE_PAUSE, as_json, clean, due, look, look_inside, promote, unpacked
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Verdict
    from multiq.driverkit.clock import Clock

    from .connection import Transaction
    from .pool import Pool
    from .records import Outlook

_LONGEST_SLEEP = 1.0  # seconds after which the queues and the file's identity are checked without a sign of a change
# A pause lasts at least 4 times as long as a read of the queues. If only other queues are busy, few reads find a job.
_PAUSE_PER_LOOK = 4
_ROWS_AT_ONCE = 500  # jobs that one statement reads

_Job: TypeAlias = tuple[int, str, int, int, int, int, int, int, str | None]  # as packed by sql/ready.sql

_T = TypeVar("_T")

_decode_jobs = msgspec.json.Decoder(list[_Job]).decode
_decode_held = msgspec.json.Decoder(list[tuple[int, int]]).decode


class SqliteConsumer(Consumer):
    """Reserves jobs from queues of one file. Its connection opens at the first call."""

    def __init__(self, pool: Pool, clock: Clock, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._asked = self._own_order = as_json(self.queues)
        """The queues in the order of the present call, and in the consumer's own order."""
        self._pool = pool
        self._connection = pool.connection()
        self._clock = clock
        self._waiter = Waiter(pool, self._connection)
        self._interrupted = False

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        self._asked = self._own_order if queues is None else as_json(self.in_order(queues))
        give_up_at = time.monotonic() + timeout
        return self._burying_malformed(lambda: self._wait_for_jobs(limit, give_up_at))

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers = self._burying_malformed(
            lambda: self._connection.write(lambda transaction: _settle(transaction, verdicts, self._clock()))
        )
        self._notify_released(verdicts)
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout, queues)
        self._asked = self._own_order if queues is None else as_json(self.in_order(queues))
        give_up_at = time.monotonic() + timeout
        answers, leases, is_all = self._burying_malformed(lambda: self._exchange(verdicts, limit, self._clock()))
        self._notify_released(verdicts)
        if leases or (is_all and timeout <= 0):
            self._interrupted = False
            return answers, leases
        try:
            return answers, self._wait_for_jobs(limit, give_up_at)
        except MultiqError:  # A BackendError would be too narrow. If the folder is gone, the error is UrlInvalid.
            return answers, []  # The verdicts are settled and must not be repeated. The next reserve raises the error.

    def interrupt(self) -> None:
        self._interrupted = True
        self._pool.notifier.notify()

    def close(self) -> None:
        self._connection.close()
        self._waiter.close()

    def _burying_malformed(self, call: Callable[[], _T]) -> _T:
        """Return the result of *call*. If it finds records that it cannot read, bury them and repeat *call*."""
        try:
            return call()
        except MalformedRecord as exc:
            return bury_and_repeat(self._pool, self._clock, call, exc)

    # --- settling and reserving ---

    def _exchange(
        self, verdicts: Sequence[Verdict], limit: int, until: int
    ) -> tuple[list[LeaseLost | None], list[Lease], bool]:
        """Settle and reserve in one transaction. Returns the answers, the leases, and whether the call is complete.

        The call is incomplete if more jobs are due than one transaction may promote.
        """

        def settle_and_reserve(transaction: Transaction) -> tuple[list[LeaseLost | None], list[Lease], bool]:
            self.asked_at, now = time.monotonic(), self._clock()
            answers = _settle(transaction, verdicts, now) if verdicts else []
            return answers, *self._reserve_from(transaction, limit, now, min(until, now))

        return self._connection.write(settle_and_reserve)

    def _reserve_in_slices(self, limit: int) -> list[Lease]:
        """Reserve jobs. If many jobs are due, this takes several transactions, and none of them holds the lock for
        long.

        Jobs that become due after the call began wait for the next call. This call therefore ends, however fast jobs
        become due. The first transaction is made even after an interrupt, because it would otherwise miss ready jobs.
        """
        until = self._clock()
        while True:
            _, leases, is_all = self._exchange((), limit, until)
            if leases or is_all or self._interrupted:
                return leases
            time.sleep(SLICE_PAUSE)

    def _reserve_from(self, transaction: Transaction, limit: int, now: int, until: int) -> tuple[list[Lease], bool]:
        """Reserve the best jobs, queue by queue. Returns the leases, and whether the call is complete.

        The call is incomplete if more jobs of a queue must be promoted before the queue's best job is known. Jobs of
        earlier queues are returned at once. They do not wait for a later queue in which many jobs are due.
        """
        leases: list[Lease] = []
        for outlook in look_inside(transaction, self._asked):
            if outlook.has_past_pause(now):
                # This runs once per pause, because it deletes the pause's row.
                transaction.execute("forget_pauses", {"now": now})
            if len(leases) == limit:
                break
            if outlook.has_work(now):
                promoted, is_all = promote(transaction, outlook, until)
                if not is_all:
                    return leases, False
                if promoted or outlook.has_ready:
                    leases += _reserve(transaction, outlook.queue, limit - len(leases), now)
        return leases, True

    def _notify_released(self, verdicts: Sequence[Verdict]) -> None:
        """Notify waiting consumers of this process if a verdict may have made a job ready or due."""
        if any(isinstance(verdict, Release | GiveBack | Abandon) for verdict in verdicts):
            self._pool.notifier.notify()

    # --- waiting ---

    def _wait_for_jobs(self, limit: int, give_up_at: float) -> list[Lease]:
        leases: list[Lease] = []
        self._waiter.speed_up()
        while True:
            change_mark = self._waiter.change_mark()  # read before the queues, so that a later commit ends the wait
            looked_at = time.monotonic()
            outlooks = look(self._connection, self._asked) if limit > 0 else []
            now = self._clock()
            if any(outlook.has_work(now) or outlook.has_past_pause(now) for outlook in outlooks):
                leases = self._reserve_in_slices(limit)
            if leases or self._interrupted or time.monotonic() >= give_up_at:
                self._interrupted = False
                return leases
            shortest_pause = _PAUSE_PER_LOOK * (time.monotonic() - looked_at)
            until = min(give_up_at, looked_at + _LONGEST_SLEEP)
            self._waiter.sleep(change_mark, shortest_pause, self._time_until(until, _next_change_at(outlooks, now)))

    def _time_until(self, until: float, change_at: int | None) -> Callable[[], float]:
        """Return a function that returns the seconds until *until* or *change_at*, whichever is earlier.

        *until* is a time of the monotonic clock. *change_at* is a time of the clock by which jobs become due.
        """
        if change_at is None:
            return lambda: until - time.monotonic()
        return lambda: min(until - time.monotonic(), (change_at - self._clock()) / SECOND)


# --- settling --------------------------------------------------------------------------------------------


def _settle(transaction: Transaction, verdicts: Sequence[Verdict], now: int) -> list[LeaseLost | None]:
    fences = [_fence(verdict.lease) for verdict in verdicts]
    held = _held(transaction, [seq for seq, _ in fences], now)
    answers: list[LeaseLost | None] = []
    kinds = (Touch, Ack, GiveBack, Release, Bury, Abandon)
    allowed: dict[type[Verdict], list[tuple[int, Any]]] = {kind: [] for kind in kinds}
    for verdict, (seq, token) in zip(verdicts, fences, strict=True):
        kind = type(verdict)
        if held.get(seq) != token:
            answers.append(LeaseLost(verdict.lease.queue, verdict.lease.id))
            continue
        answers.append(None)
        allowed[kind].append((seq, verdict))
        if kind is not Touch:
            del held[seq]  # a reservation takes only one verdict
    _carry_out(transaction, allowed, now)
    return answers


def _fence(lease: Lease) -> tuple[int, int]:
    """Return the job's seq and the reservation's token. For a lease of another driver, the values fit no job."""
    seq, _, token = lease.token.partition(":")
    try:
        return int(seq) % 2**63, int(token)  # within SQLite's integers
    except ValueError:
        return 0, -1


def _held(transaction: Transaction, seqs: list[int], now: int) -> dict[int, int]:
    (packed,) = transaction.execute("held", {"seqs": as_json(seqs), "now": now}).fetchone()
    return dict(unpacked(_decode_held, packed))


def _carry_out(transaction: Transaction, allowed: dict[type[Verdict], list[tuple[int, Any]]], now: int) -> None:
    # Touches are carried out first. A touch that follows another verdict on the same job was refused above.
    for kind, statement in ((Touch, "touch"), (Ack, "remove")):
        if allowed[kind]:
            parameters = {"seqs": as_json([seq for seq, _ in allowed[kind]]), "now": now}
            transaction.execute(statement, parameters)
    given_back: dict[float, list[int]] = {}
    for seq, verdict in allowed[GiveBack]:
        given_back.setdefault(verdict.delay, []).append(seq)
    for delay, seqs in given_back.items():
        state, due_at = due(delay, now)
        transaction.execute("give_back", {"seqs": as_json(seqs), "state": state, "due_at": due_at})
    for seq, verdict in allowed[Release]:
        state, due_at = due(verdict.delay, now)
        moved = {"state": state, "due_at": due_at, "priority": verdict.priority}
        transaction.execute("release", moved | {"seq": seq, "reason": clean(verdict.reason)})
    for seq, verdict in allowed[Bury]:
        transaction.execute("bury", {"seq": seq, "reason": clean(verdict.reason)})
    for seq, verdict in allowed[Abandon]:
        transaction.execute("abandon", {"seq": seq, "reason": clean(verdict.reason)})


# --- reserving -------------------------------------------------------------------------------------------


def _reserve(transaction: Transaction, queue: str, limit: int, now: int) -> list[Lease]:
    leases: list[Lease] = []
    token = secrets.randbits(63)
    while len(leases) < limit:
        asked = min(_ROWS_AT_ONCE, limit - len(leases))
        (packed,) = transaction.execute("ready", {"queue": queue, "limit": asked}).fetchone()
        jobs = unpacked(_decode_jobs, packed)
        if jobs:
            seqs = as_json([job[0] for job in jobs])
            transaction.execute("reserve", {"token": token, "now": now, "seqs": seqs})
            leases += [_lease(transaction, queue, f"{job[0]}:{token}", now, job) for job in jobs]
        if len(jobs) < asked:
            break
    return leases


def _lease(transaction: Transaction, queue: str, token: str, now: int, job: _Job) -> Lease:
    seq, job_id, priority, ttr, attempt, crashes, kicks, enqueued_at, body = job
    if not (0 < ttr <= LONGEST_TTR and 0 <= attempt <= MOST_COUNTED and 0 <= crashes <= MOST_COUNTED):
        raise MalformedRecord(f"job number {seq} has a ttr of {ttr}, {attempt} attempts and {crashes} crashes")
    return Lease(
        queue=queue,
        id=job_id,
        token=token,
        body=_large_body(transaction, seq) if body is None else bytes.fromhex(body),
        priority=priority,
        ttr=ttr / SECOND,
        attempt=attempt + 1,
        crashes=crashes,
        kicks=kicks,
        age=max(0, now - enqueued_at) / SECOND,
    )


def _large_body(transaction: Transaction, seq: int) -> bytes:
    row = transaction.execute("body", {"seq": seq}).fetchone()
    if row is None:
        raise MalformedRecord(f"job number {seq} has no body")
    body: bytes = row[0]
    return body


# --- waiting ---------------------------------------------------------------------------------------------


def _next_change_at(outlooks: Sequence[Outlook], now: int) -> int | None:
    changes = (outlook.next_change_at(now) for outlook in outlooks)
    return min((at for at in changes if at is not None), default=None)
