"""The consumer settles and reserves in one transaction, and waits outside any transaction.

A waiting consumer reads its queues after a commit of another connection, at a due time, and at least once a second. It
takes the write lock only if the queues have a job to reserve or a pause that has ended. The module ``waiting`` waits
for commits.
"""

from __future__ import annotations

import heapq
import operator
import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from multiq.backend import Abandon, Ack, Bury, Consumer, GiveBack, Lease, Release, Touch
from multiq.driverkit.clock import SECOND
from multiq.errors import LeaseLost, MultiqError

from .errors import MalformedRecord
from .limits import OpenGates, is_gated, place
from .malformed import LONGEST_TTR, MOST_COUNTED, bury_and_repeat
from .outcomes import keep_outcomes
from .records import SLICE_PAUSE, as_json, clean, due, look, look_inside, promote, unpacked
from .steps import carry_out, have_keys, largest_of, steps_after, steps_of
from .waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import After, Verdict
    from multiq.driverkit.clock import Clock

    from .connection import Transaction
    from .pool import Pool
    from .records import Outlook

_LONGEST_SLEEP = 1.0  # seconds after which a waiting consumer checks the queues and the file's identity in any case
# After a waiting consumer has read the queues, it pauses for at least 4 times the duration of the read. The reason is
# that every commit causes a read, even a commit to other queues.
_PAUSE_PER_LOOK = 4
_ROWS_AT_ONCE = 500  # jobs that one statement reads
# ``Lease.token`` is "seq:token", or "seq:+token" if the job has a stored detail. So a release without a detail can find
# out whether it must delete a stored detail. ``int`` ignores the plus sign.
_HAS_DETAIL = ":+"

# The token begins with 0 if the job has gates, so that its verdict frees their slots. ``int`` ignores the zero.
_GATED, _GATED_WITH_DETAIL = ":0", ":+0"

_AFTER, _TOKEN = map(operator.attrgetter, ("after", "lease.token"))

_RELEASING = frozenset({Release, GiveBack, Abandon})

_Job: TypeAlias = tuple[int, str, int, int, int, int, int, int, str | int]  # as packed by sql/ready.sql

_T = TypeVar("_T")

_decode_jobs = msgspec.json.Decoder(list[_Job]).decode
_decode_held = msgspec.json.Decoder(list[tuple[int, int]]).decode


class SqliteConsumer(Consumer):
    """Reserves jobs from queues of one file. Its connection opens at the first call."""

    def __init__(self, pool: Pool, clock: Clock, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._asked = self._own_order = as_json(self.queues)
        """``_asked``: the queues in the order of the current call. ``_own_order``: in the consumer's own order."""
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
        afters = self._checked_afters(verdicts)
        answers = self._burying_malformed(
            lambda: self._connection.write(lambda transaction: _settle(transaction, verdicts, self._clock(), afters))
        )
        self._notify_released(verdicts, afters)
        return answers

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        if not verdicts:
            return [], self.reserve(limit, timeout, queues)
        self._asked = self._own_order if queues is None else as_json(self.in_order(queues))
        afters = self._checked_afters(verdicts)
        give_up_at = time.monotonic() + timeout
        answers, leases, is_all = self._burying_malformed(
            lambda: self._exchange(verdicts, limit, self._clock(), afters)
        )
        self._notify_released(verdicts, afters)
        self.sees_all = is_all
        if leases or (is_all and timeout <= 0):
            self._interrupted = False
            return answers, leases
        try:
            return answers, self._wait_for_jobs(limit, give_up_at)
        except MultiqError:  # If the folder is gone, the error is UrlInvalid, which is not a BackendError.
            return answers, []  # The verdicts are settled and must not be repeated. The next reserve raises the error.

    def interrupt(self) -> None:
        self._interrupted = True
        self._pool.notifier.notify()

    def close(self) -> None:
        self._connection.close()
        self._waiter.close()

    def _burying_malformed(self, call: Callable[[], _T]) -> _T:
        """Return the result of *call*. If *call* finds records that it cannot read, bury these records and repeat
        *call*."""
        try:
            return call()
        except MalformedRecord as exc:
            return bury_and_repeat(self._pool, self._clock, call, exc)

    # --- settling and reserving ---

    def _checked_afters(self, verdicts: Sequence[Verdict]) -> list[After]:
        """Return the ``After`` of each verdict that has one. Raises ``PayloadTooLarge``."""
        if not any(map(_AFTER, verdicts)):
            return []
        having = [verdict for verdict in verdicts if verdict.after is not None]
        for verdict in having:
            self._connection.refuse_too_large(_largest(verdict), "no verdict was carried out")
        return [verdict.after for verdict in having if verdict.after is not None]

    def _exchange(
        self, verdicts: Sequence[Verdict], limit: int, until: int, afters: Sequence[After]
    ) -> tuple[list[LeaseLost | None], list[Lease], bool]:
        """Settle and reserve in one transaction. Returns the answers, the leases, and whether the call is complete.

        The call is incomplete if more jobs are due than one transaction may promote.
        """

        def settle_and_reserve(transaction: Transaction) -> tuple[list[LeaseLost | None], list[Lease], bool]:
            self.asked_at, now = time.monotonic(), self._clock()
            answers = _settle(transaction, verdicts, now, afters) if verdicts else []
            return answers, *self._reserve_from(transaction, limit, now, min(until, now))

        return self._connection.write(settle_and_reserve)

    def _reserve_in_slices(self, limit: int) -> list[Lease]:
        """Reserve jobs. If many jobs are due, this takes several transactions, and none of them holds the lock for
        long.

        Jobs that become due after the beginning of the call wait for the next call. So the call ends, even if jobs
        become due very fast. The first transaction runs even after an interrupt, because the call must not miss ready
        jobs.
        """
        until = self._clock()
        while True:
            _, leases, self.sees_all = self._exchange((), limit, until, ())
            if leases or self.sees_all or self._interrupted:
                return leases
            time.sleep(SLICE_PAUSE)

    def _reserve_from(self, transaction: Transaction, limit: int, now: int, until: int) -> tuple[list[Lease], bool]:
        """Reserve the best jobs, queue by queue. Returns the leases, and whether the call is complete.

        The call is incomplete if more jobs of a queue must be promoted before the queue's best job is known. Jobs of
        earlier queues are returned without a delay: they do not wait for a later queue with many due jobs.
        """
        leases: list[Lease] = []
        most_gated = limit if self.most_gated is None else self.most_gated
        for outlook in look_inside(transaction, self._asked):
            if outlook.has_past_pause(now):
                # This statement runs once for each pause, because it deletes the row of the pause.
                transaction.execute("forget_pauses", {"now": now})
            if len(leases) == limit:
                break
            if outlook.has_work(now):
                promoted, is_all = promote(transaction, outlook, until)
                if not is_all:
                    return leases, False
                if outlook.has_gates:
                    found, is_all = _reserve_within_limits(transaction, outlook, limit - len(leases), now, most_gated)
                    most_gated -= sum(map(_has_gates, found))
                    leases += found
                    if not is_all:
                        return leases, False
                elif promoted or outlook.has_ready:
                    leases += _reserve(transaction, outlook.queue, limit - len(leases), now)
        return leases, True

    def _notify_released(self, verdicts: Sequence[Verdict], afters: Sequence[After]) -> None:
        """Notify waiting consumers of this process if a verdict or a step may have made a job ready or due."""
        if _have_steps(afters) or not _RELEASING.isdisjoint(map(type, verdicts)) or _have_gates(verdicts):
            self._pool.notifier.notify()

    # --- waiting ---

    def _wait_for_jobs(self, limit: int, give_up_at: float) -> list[Lease]:
        leases: list[Lease] = []
        self._waiter.speed_up()
        while True:
            change_mark = self._waiter.change_mark()  # read first: each commit after this line ends the wait
            looked_at = time.monotonic()
            outlooks = look(self._connection, self._asked) if limit > 0 else []
            now = self._clock()
            self.sees_all = True
            if any(outlook.has_work(now) or outlook.has_past_pause(now) for outlook in outlooks):
                leases = self._reserve_in_slices(limit)
                if not leases and any(outlook.has_gates for outlook in outlooks):
                    # the reserve may have parked jobs, and then the next change is the time at which a gate opens
                    outlooks, now = look(self._connection, self._asked), self._clock()
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


def _settle(
    transaction: Transaction, verdicts: Sequence[Verdict], now: int, afters: Sequence[After]
) -> list[LeaseLost | None]:
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
    accepted: Sequence[Verdict] = ()
    if _have_steps(afters):
        accepted = [verdict for verdict, answer in zip(verdicts, answers, strict=True) if answer is None]
        if len(accepted) > 1 and have_keys(accepted):
            seqs = [seq for (seq, _), answer in zip(fences, answers, strict=True) if answer is None]
            _carry_out_in_order(transaction, list(zip(seqs, accepted, strict=True)), now)
            return answers
    _carry_out(transaction, allowed, now, has_afters=bool(afters))
    if _have_gates(verdicts):
        _end_gated(transaction, allowed)
    if accepted:
        carry_out(transaction, steps_after(accepted), now)
    return answers


def _carry_out_in_order(transaction: Transaction, accepted: Sequence[tuple[int, Verdict]], now: int) -> None:
    """Carry out each verdict and its steps before the next verdict. *accepted*: the accepted verdicts. Each has the seq
    of its job."""
    for seq, verdict in accepted:
        one: dict[type[Verdict], list[tuple[int, Any]]] = {
            kind: [] for kind in (Touch, Ack, GiveBack, Release, Bury, Abandon)
        }
        one[type(verdict)].append((seq, verdict))
        _carry_out(transaction, one, now, has_afters=True)
        _end_gated(transaction, one)
        carry_out(transaction, steps_of(verdict), now)


def _fence(lease: Lease) -> tuple[int, int]:
    """Return the job's seq and the reservation's token. For a lease of another driver, the values match no job."""
    seq, _, token = lease.token.partition(":")
    try:
        return int(seq) % 2**63, int(token)  # SQLite's integers have 64 bits.
    except ValueError:
        return 0, -1


def _has_gates(lease: Lease) -> bool:
    token = lease.token
    return _GATED in token or _GATED_WITH_DETAIL in token


def _have_gates(verdicts: Sequence[Verdict]) -> bool:
    """Whether any of the settled leases has gates. One search in all tokens is faster than a search in each."""
    tokens = " ".join(map(_TOKEN, verdicts))
    return _GATED in tokens or _GATED_WITH_DETAIL in tokens


def _held(transaction: Transaction, seqs: list[int], now: int) -> dict[int, int]:
    (packed,) = transaction.execute("held", {"seqs": as_json(seqs), "now": now}).fetchone()
    return dict(unpacked(_decode_held, packed))


def _carry_out(
    transaction: Transaction, allowed: dict[type[Verdict], list[tuple[int, Any]]], now: int, *, has_afters: bool
) -> None:
    # Touches are carried out first. A touch that follows another verdict on the same job was refused above.
    if touched := allowed[Touch]:
        transaction.execute("touch", {"seqs": as_json([seq for seq, _ in touched]), "now": now})
        for seq, verdict in touched:
            _store_memo(transaction, seq, verdict.after)
    if acked := allowed[Ack]:
        keep_outcomes(transaction, acked if has_afters else (), now)
        transaction.execute("remove", {"seqs": as_json([seq for seq, _ in acked])})
    given_back: dict[float, list[int]] = {}
    for seq, verdict in allowed[GiveBack]:
        given_back.setdefault(verdict.delay, []).append(seq)
    for delay, seqs in given_back.items():
        state, due_at = due(delay, now)
        transaction.execute("give_back", {"seqs": as_json(seqs), "state": state, "due_at": due_at})
    for seq, verdict in allowed[GiveBack]:
        _store_memo(transaction, seq, verdict.after)
    for seq, verdict in allowed[Release]:
        state, due_at = due(verdict.delay, now)
        moved = {"state": state, "due_at": due_at, "priority": verdict.priority}
        transaction.execute("release", moved | {"seq": seq, "reason": clean(verdict.reason)})
        _replace_detail(transaction, seq, verdict.lease, verdict.after)
    for seq, verdict in allowed[Bury]:
        transaction.execute("bury", {"seq": seq, "reason": clean(verdict.reason)})
        _replace_detail(transaction, seq, verdict.lease, verdict.after)
    for seq, verdict in allowed[Abandon]:
        transaction.execute("abandon", {"seq": seq, "reason": clean(verdict.reason)})
        _replace_detail(transaction, seq, verdict.lease, None)


def _end_gated(transaction: Transaction, allowed: dict[type[Verdict], list[tuple[int, Any]]]) -> None:
    """Free the slots of jobs that are no longer reserved, and put those that are ready again into their lines."""
    ended = [one for kind, settled in allowed.items() if kind is not Touch for one in settled]
    place(transaction, [seq for seq, verdict in ended if _has_gates(verdict.lease)])


def _store_memo(transaction: Transaction, seq: int, after: After | None) -> None:
    """Store the memo if there is one. The job's detail stays."""
    if after is not None and after.memo is not None:
        transaction.execute("note", {"seq": seq, "memo": after.memo, "detail": None, "keeps_detail": 1})


def _replace_detail(transaction: Transaction, seq: int, lease: Lease, after: After | None) -> None:
    """Store the memo if there is one. Replace the stored detail, or delete it if there is no new one."""
    memo, detail = (None, None) if after is None else (after.memo, after.detail or None)
    if memo is not None or detail is not None or _HAS_DETAIL in lease.token:
        transaction.execute("note", {"seq": seq, "memo": memo, "detail": detail, "keeps_detail": 0})


def _have_steps(afters: Sequence[After]) -> bool:
    return any(after.steps for after in afters)


def _largest(verdict: Ack | Release | Bury | Touch | GiveBack) -> int:
    """Return the size of the largest value that the verdict stores."""
    after = verdict.after
    assert after is not None  # noqa: S101 - the caller has chosen these verdicts
    stored: list[bytes | None] = []
    if isinstance(verdict, Ack):
        stored = [after.outcome if after.keep > 0 else None]
    elif isinstance(verdict, Release | Bury):
        stored = [after.memo, after.detail]
    elif isinstance(verdict, Touch | GiveBack):
        stored = [after.memo]
    return max(largest_of(after.steps), *(len(value or b"") for value in stored))


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


def _reserve_within_limits(
    transaction: Transaction, outlook: Outlook, limit: int, now: int, most_gated: int
) -> tuple[list[Lease], bool]:
    """Reserve jobs of a queue that may have jobs with gates. At most *most_gated* of the reserved jobs have gates.

    Returns the leases, and whether the call is complete. It is incomplete if there are many jobs with closed gates.
    """
    leases: list[Lease] = []
    token = secrets.randbits(63)
    gates = OpenGates(transaction, outlook.queue, now)
    is_all = outlook.opens_at is None or outlook.opens_at > now or gates.open_by_time()
    while len(leases) < limit:
        # When no more jobs with gates may be taken or examined, jobs without gates are still reserved.
        is_plain = most_gated <= 0 or gates.has_parked_most
        asked = {"queue": outlook.queue, "limit": min(_ROWS_AT_ONCE, limit - len(leases))}
        (packed,) = transaction.execute("ready_plain" if is_plain else "ready", asked).fetchone()
        jobs = unpacked(_decode_jobs, packed)
        if not jobs:
            break
        if any(map(is_gated, jobs)):
            taken = _choose(
                gates,
                jobs,
                token,
                are_more=len(jobs) == asked["limit"],
                limit=limit - len(leases),
                most_gated=most_gated,
            )
        else:
            taken = jobs
        if taken:
            seqs = as_json([job[0] for job in taken])
            transaction.execute("reserve", {"token": token, "now": now, "seqs": seqs})
        for job in taken:
            mark = ":0" if is_gated(job) else ":"
            leases.append(_lease(transaction, outlook.queue, f"{job[0]}{mark}{token}", now, job))
        most_gated -= sum(map(is_gated, taken))
        gates.end()
    return leases, (is_all and not gates.has_parked_most) or len(leases) == limit


def _choose(
    gates: OpenGates, jobs: Sequence[_Job], token: int, *, are_more: bool, limit: int, most_gated: int
) -> list[_Job]:
    """Choose jobs that may be reserved now, in their order.

    - *jobs*: the best ready jobs.
    - *are_more*: whether there are more ready jobs than these. The jobs after *jobs* wait for the next call.
    """
    waiting = [(job[2], job[0], job) for job in jobs]  # The list is sorted, so it is a heap.
    last = waiting[-1][:2]
    taken: list[_Job] = []
    done: set[int] = set()
    while waiting and len(taken) < limit and not gates.has_parked_most and not gates.opens_lines:
        job = heapq.heappop(waiting)[2]
        if job[0] in done:
            continue
        if not is_gated(job):
            taken.append(job)
            continue
        if most_gated <= 0:
            continue
        chosen = gates.choose(job)
        if chosen is None:
            following = gates.following()
        else:
            taken.append(chosen)
            done.add(chosen[0])
            most_gated -= 1
            following = gates.take(token)
            if chosen[0] != job[0]:
                following = job
        if following is not None and (not are_more or (following[2], following[0]) < last):
            heapq.heappush(waiting, (following[2], following[0], following))
    return taken


def _lease(transaction: Transaction, queue: str, token: str, now: int, job: _Job) -> Lease:
    seq, job_id, priority, ttr, attempt, crashes, kicks, enqueued_at, inline = job
    if not (0 < ttr <= LONGEST_TTR and 0 <= attempt <= MOST_COUNTED and 0 <= crashes <= MOST_COUNTED):
        raise MalformedRecord(f"job number {seq} has a ttr of {ttr}, {attempt} attempts and {crashes} crashes")
    lease = Lease(
        queue=queue,
        id=job_id,
        token=token,
        body=bytes.fromhex(inline) if isinstance(inline, str) else b"",
        priority=priority,
        ttr=ttr / SECOND,
        attempt=attempt + 1,
        crashes=crashes,
        kicks=kicks,
        age=max(0, now - enqueued_at) / SECOND,
    )
    return lease if isinstance(inline, str) else _with_parts(transaction, seq, lease)


def _with_parts(transaction: Transaction, seq: int, lease: Lease) -> Lease:
    """Return the lease with the data that is stored outside the job's row: the job's body, its memo, and the reason why
    it must not run."""
    row = transaction.execute("parts", {"seq": seq}).fetchone()
    if row is None:
        raise MalformedRecord(f"job number {seq} has no body")
    body, memo, has_detail, doomed = row
    return msgspec.structs.replace(
        lease,
        token=lease.token.replace(":", _HAS_DETAIL) if has_detail else lease.token,
        body=body,
        memo=memo or b"",
        doomed=(doomed or b"").decode("utf-8", "replace"),
    )


# --- waiting ---------------------------------------------------------------------------------------------


def _next_change_at(outlooks: Sequence[Outlook], now: int) -> int | None:
    changes = (outlook.next_change_at(now) for outlook in outlooks)
    return min((at for at in changes if at is not None), default=None)
