"""Limits: which jobs with gates may be reserved now.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
a slot is a lease     a row of ``multiq_leases`` counts while its job is reserved under this  a row for each gate of a
                      token; no verdict changes a number                                      lease
never one too many    a reserve locks the gates that it looks at, and then counts             reserves of one gate take
                                                                                              turns
no waits, few         a reserve skips gates that another reserve has locked                   none
deadlocks
parked jobs are not   state 6, which no other statement scans; ``look_at`` says when a gate   a read of an index per
scanned               has to be looked at: by time, or at once after a verdict                poll
no long transaction   a changed quota is stored with a mark; then reserves may look at its    two packets per 200 keys
                      gates, slice by slice; if the process dies before the last slice, the
                      next reserve goes on
no lost wake-up       a verdict opens its gates after its commit, and waits for the reserve   two packets per batch of
                      that has closed them; if the process dies before, the end of the lease  such verdicts
                      opens them
====================  ======================================================================  =======================

At first, a ready job with gates is stored among the other ready jobs. The reserve that reads the job either hands it
out, or moves it to the line of a closed gate or of a fair gate.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from multiq.backend import Gate, Quota
from multiq.backend.limits import fair_rank, limit_states

from .records import AGAIN, READY, SECOND, gates_in
from .scan_window import FROM_START
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from multiq.backend import LimitState

    from .connection import Reply, Session
    from .pool import Pool

GATE_MARK = "0"
"""The first character of the token of a lease whose job has gates. ``int`` ignores this zero."""

_OPEN = 0
_NEVER = 2**62  # the gate does not open by itself, but a verdict or a changed quota may open it
_LOOK_AGAIN = 10_000  # microseconds until a reserve looks again at a gate of a job that another session has locked
_SLICE = 200  # gates that one transaction of a change opens: some milliseconds
_TURN_BITS = 40
_AFTER_ALL = b"\xff" * 800  # comes after all keys, because no key in UTF-8 has such a byte
_LOOKED_AT = 50  # gates that one transaction looks at
_EXAMINED = 250  # gates that one transaction examines for lines that wait for them
DEEPEST = 3  # the turn from which each claim reads _MOST_READ jobs
# A search for other keys reads this number of ready jobs first, then twice as many each time, and at most so many.
_SOUGHT_FIRST, _MOST_SOUGHT = 250, 4_000
SEARCH_TIME = 0.2  # seconds that such a search may take: less than PARKING_TIME. An idle server reads 50,000 small jobs
_QUICK_TIME = 1.5  # seconds
SEARCH_PAUSE = 5.0  # seconds without a search, after a search that has not reached the last ready job
# rows for each ready job: if there are more, an index is read. It takes 2.5 times as long for each row
_SPARSEST = 2
_MOST_KNOWN = 20  # different texts of gates that such a search leaves out
_FEWEST_READ, _MOST_READ = 20, 500  # ready jobs, and parked jobs of each line, that one transaction reads
# seconds after which a consumer no longer parks the ready jobs of fair limits before it hands out one of them: less
# than the half second after which a waiting consumer has its job (3.10)
PARKING_TIME = 0.3
PARKING_PAUSE = 1.0  # seconds without such parking, after a call has used up its time
# seconds after which a call ends although it has found no job yet, because a worker must touch its leases; more than
# PARKING_TIME
LOOKING_TIME = 0.5
_PAST_PER_GATE = 2  # gates of the past that each reserve deletes
_WITHOUT_GATES = Sql("gates IS NULL")

Place: TypeAlias = tuple[int, int]
"""The priority and the seq of a job."""


class Candidate(NamedTuple):
    """A job that may be reserved. Its row is locked."""

    priority: int
    seq: int
    gates: tuple[Gate, ...]
    line: Gate | None
    """The line in which the job is parked. None: it is not parked."""

    @property
    def place(self) -> Place:
        return self.priority, self.seq


class _Line:
    """A gate that the transaction has locked, and its line."""

    def __init__(self, gate: Gate, quota: Quota | None) -> None:
        self.gate = gate
        self.quota = quota
        self.due = self.turn = self.last_turn = 0
        self.look_at: int | None = None
        self.stored: tuple[int, int | None, int, Gate | None] | None = None
        self.waits_for: Gate | None = None
        """The closed gate of the first job of a fair line."""
        self.had_line = False
        self.is_blocking = False
        """Whether other lines wait for this gate."""
        self.ends: list[int] = []
        """The ends of the live leases."""
        self.stale_leases: list[int] = []
        self.is_looked_at = False
        self.waiting: list[Candidate] = []
        """For a fair gate: the jobs that may be handed out, in their order."""
        self.left: set[int] = set()
        """The seqs of the jobs in the line."""
        self.last_seen: Place | None = None
        """The place of the last job that was read, if there may be more jobs after it."""
        self.is_full = False
        self.first: Place | None = None
        """For a line that was asleep: the place of its first job, if it was read."""
        self.joined: int | None = None
        """The lowest priority number of the jobs that join the line."""

    def read(self, row: Sequence[Any]) -> None:
        """Read a row of gate.sql."""
        self.due, self.look_at, self.turn, name, key, blocking, self.last_turn = row
        self.stored = self.due, self.look_at, self.turn, None if name is None else _gate(name, key)
        self.had_line = self.look_at is not None or name is not None
        self.is_blocking = bool(blocking)

    @property
    def is_asleep(self) -> bool:
        """Whether this is a line of a fair gate that still has to wait for another gate."""
        return self.had_line and not self.is_looked_at and self.look_at is None

    def is_woken_by(self, job: Candidate) -> bool:
        """Whether this line is asleep and the job may become its first job. The job need not wait for the same gate."""
        return self.is_asleep and (self.first is None or job.place < self.first)

    @property
    def is_fair(self) -> bool:
        return self.quota is not None and self.quota.fair

    @property
    def priority(self) -> int:
        """The priority of the first job, or a lower number if this transaction has not read the first job."""
        if not self.is_looked_at and self.joined is not None:
            return self.joined
        if self.waiting:
            return self.waiting[0].priority
        return 0 if self.last_seen is None else self.last_seen[0]

    def rank(self, priority: int) -> tuple[int, ...]:
        """Return the line's rank among the lines of its fair limit, for a first job of this priority."""
        return priority, *fair_rank(len(self.ends), self.turn)

    def opens_at(self, now: int) -> int:
        """Return the time at which the gate opens, in microseconds. ``_OPEN``: the gate is open."""
        quota = self.quota
        if quota is None:
            return _OPEN
        if quota.slots is not None and len(self.ends) >= quota.slots:
            return min(self.ends, default=_NEVER)
        if quota.rate is None:
            return _OPEN
        opens_at = quota.possible_due(self.due, now, SECOND) - (quota.burst - 1) * quota.interval(SECOND)
        return _OPEN if opens_at <= now else min(opens_at, _NEVER)

    def count(self, now: int) -> None:
        """Count a job that is handed out. The lease ends later than now. The next check of the gate finds out when the
        lease ends."""
        self.ends.append(now + SECOND)
        if self.quota is not None and self.quota.rate is not None:
            due = self.quota.possible_due(self.due, now, SECOND)
            self.due = min(max(due, now) + self.quota.interval(SECOND), _NEVER)


class Claim:
    """One transaction that reserves jobs of a queue with limits."""

    def __init__(
        self,
        pool: Pool,
        queue: str,
        limit: int,
        most_gated: int,
        *,
        turn: int,
        may_park_first: bool = True,
        seeks_keys: bool = False,
    ) -> None:
        """Parameters:
        turn: the number of transactions that the call has made before. Later transactions read more jobs.
        may_park_first: whether the transaction may hand out nothing to park ready jobs of fair limits first.
        seeks_keys: whether the transaction looks for jobs of other keys behind the jobs that it reads.
        """
        self._pool = pool
        self._queue = queue
        self._limit = limit
        self._most_gated = most_gated
        self._scanned = min(max(_FEWEST_READ, 2 * limit) * 4**turn, _MOST_READ)
        self._is_first = turn == 0
        self._parks_first = may_park_first
        self._waits_for_woken = may_park_first or turn < DEEPEST
        self._seeks_keys = seeks_keys
        self._others: list[Candidate] = []
        """Ready jobs behind the jobs of ``_scan``, in their order. Each has other gates than all jobs of ``_scan``."""
        self._locked_others: set[int] = set()
        """The seqs of those of ``_others`` that this transaction could not lock."""
        self.knows_all_keys = False
        """Whether the transaction knows all keys of fair limits that the ready jobs of the best priority have, although
        it has not read all of these jobs."""
        self.search_failed = False
        """Whether the transaction has searched for jobs of other keys, and may not know all keys."""
        self._has_unparked = False
        """Whether there are ready jobs of fair limits that have not been in a line yet."""
        self._depth = min(limit, _FEWEST_READ) + 1 if self._is_first else _MOST_READ
        self._is_cut = False
        """Whether the next transaction has to read more jobs before it takes any job."""
        self._woken: list[tuple[_Line, Place]] = []
        """Lines of fair limits that this transaction has not read, each with the place of a job that joins the line.
        This job may have the line's next turn."""
        self.now = 0
        """The server's time, in microseconds. 0 until the first read."""
        self._lines: dict[Gate, _Line] = {}
        self._scan: list[Candidate] = []
        self._locked: list[Candidate] = []
        """Jobs that this transaction leaves out, because another session has locked them or one of their gates."""
        self.is_full = False
        """Whether there may be more ready jobs than the transaction has read."""
        self.has_parked_first = False
        """Whether the transaction hands out nothing to park ready jobs of fair limits first."""
        self.has_looked = False
        """Whether the transaction has locked gates that must be checked."""
        self._has_more_looks = False
        """Whether there may be more open gates than this transaction has read."""
        self.changes: list[str] = []
        """The limits with a change that is not done yet: see ``go_on``."""
        self._parked: dict[int, tuple[Candidate, Gate]] = {}
        self._stale: list[tuple[Gate, int, int]] = []
        self.taken: list[Candidate] = []
        """The jobs that are to be reserved, in their order."""
        self.is_all = True
        """Whether all jobs were found, so that another transaction would find no more jobs now."""

    @property
    def is_deep(self) -> bool:
        """Whether the transaction has read as many ready jobs as a transaction may, and there may be more."""
        return self.is_full and self._scanned == _MOST_READ

    @property
    def has_locked(self) -> bool:
        """Whether the transaction leaves jobs out, because another session has locked them or one of their gates."""
        return bool(self._locked)

    @property
    def has_progress(self) -> bool:
        """Whether the transaction reserves jobs, parks jobs or makes a line shorter, or whether the next transaction
        will read more jobs."""
        is_looking_on = self._has_more_looks and bool(self._changed())
        return bool(self.taken or self._parked or self._stale or self._is_cut or is_looking_on)

    @property
    def has_changed(self) -> bool:
        return bool(self.taken or self._parked or self._stale or self._changed())

    # --- reading ---

    def read(self, session: Session) -> None:
        """Begin a transaction, lock jobs and gates, and choose the jobs."""
        looks = self._read_gated(session)
        heads = self._read_lines(session, looks) if looks else {}
        gates = {gate for job in (*self._scan, *self._others) for gate in job.gates}
        gates.update(looks, (gate for jobs in heads.values() for job in jobs for gate in job.gates))
        if gates:
            self._lock(session, sorted(gates, key=_order), looks, heads)
        self._choose(heads)

    def _read_gated(self, session: Session) -> list[Gate]:
        """Lock the best ready jobs. Returns the gates that must be checked."""
        with_gates = self._most_gated > 0
        condition = FROM_START if with_gates else _WITHOUT_GATES
        queue, now = self._queue.encode(), self._pool.now
        statements = [
            render("reserve_gated", queue=queue, state=state, condition=condition, limit=self._scanned)
            for state in (AGAIN, READY)
        ]
        if with_gates:
            statements += [
                render("gates_to_look_at", queue=queue, now=now, limit=_LOOKED_AT),
                render("lines_to_look_at", queue=queue, now=now, examined=_EXAMINED, limit=_LOOKED_AT),
            ]
        again, ready, *looked = session.begin(*statements)
        found = sorted((*again.rows, *ready.rows), key=lambda row: (row[0], row[1]))
        self.is_full = len(found) >= self._scanned
        found = found[: self._scanned]
        self._scan = [Candidate(priority, seq, gates_in(gates), None) for priority, seq, gates in found]
        if self._seeks_keys and with_gates and self.is_full:
            self._read_others(session, {text.encode() for *_, text in found if text})
        if not looked or not looked[0].rows:  # Other consumers have locked these gates.
            return []
        self.has_looked = True
        self._has_more_looks = any(len(reply.rows) == _LOOKED_AT for reply in looked)
        rows = [row for reply in looked for row in reply.rows]
        self.changes = [_text(key) for name, key in rows if not name]  # begin_change.sql explains the empty name.
        return list(dict.fromkeys(_gate(*row) for row in rows if row[0]))

    def _read_others(self, session: Session, known: set[bytes]) -> None:
        """Lock the first ready jobs behind the scan whose gates are none of the *known* texts.

        The jobs have the priority of the last job of the scan, because jobs with this priority go before less urgent
        jobs. If a job is found, all earlier jobs with other texts are found, too.
        """
        if not 0 < len(known) <= _MOST_KNOWN:
            return
        last = self._scan[-1]
        self.search_failed = True
        found = self._search(session, last, Sql(",".join(map(literal, sorted(known)))))
        if not found:
            return
        own: dict[str, int | bytes] = {"queue": self._queue.encode(), "place": last.priority, "seq": last.seq}
        (locked,) = session.execute(render("reserve_others", seqs=sorted(found), **own))
        now = {seq: Candidate(last.priority, seq, gates_in(text), None) for seq, text in locked.rows}
        self._others = [now.get(seq, job) for seq, job in sorted(found.items())]
        self._locked_others = found.keys() - now.keys()

    def _search(self, session: Session, last: Candidate, known: Sql) -> dict[int, Candidate]:
        """Return the first ready jobs behind the job *last* that have gates, but none of the *known* texts, by seq."""
        began = time.monotonic()
        found: dict[int, Candidate] = {}
        seq, examined = last.seq, _SOUGHT_FIRST
        while True:
            began_part = time.monotonic()
            own: dict[str, int | bytes] = {"queue": self._queue.encode(), "place": last.priority, "seq": seq}
            ends = session.execute(
                *(render("others_end", state=state, examined=examined, **own) for state in (AGAIN, READY))
            )
            counted = [reply.rows[0] for reply in ends]
            rest = [highest for count, highest in counted if count == examined]
            end = min(rest) if rest else max((highest for _, highest in counted if highest), default=seq)
            # If other jobs have many of the rows in between, an index is read.
            is_dense = end - seq <= _SPARSEST * sum(count for count, _ in counted)
            verbs = [("others_by_seq", READY)] if is_dense else [("others", AGAIN), ("others", READY)]
            replies = session.execute(
                *(render(verb, state=state, known=known, end=end, limit=_LOOKED_AT, **own) for verb, state in verbs)
            )
            cut = min((reply.rows[-1][0] for reply in replies if len(reply.rows) == _LOOKED_AT), default=end)
            for reply in replies:
                found.update(
                    (job, Candidate(last.priority, job, gates_in(text), None)) for job, text in reply.rows if job <= cut
                )
            now = time.monotonic()
            self.knows_all_keys = not rest and cut == end
            # The next part takes about twice as long as this one.
            is_late = now - began + 2 * (now - began_part) > SEARCH_TIME
            if self.knows_all_keys or cut < end or len(found) >= _LOOKED_AT or is_late:
                return found
            seq, examined = end, min(2 * examined, _MOST_SOUGHT)

    def _read_lines(self, session: Session, looks: Sequence[Gate]) -> dict[Gate, list[Candidate]]:
        """Read the first jobs of these lines, to know which gates have to be locked."""
        replies = session.execute(*self._ask_lines(looks))
        return {gate: self._line_of(gate, reply)[0] for gate, reply in zip(looks, replies, strict=True)}

    def _ask_lines(self, looks: Sequence[Gate]) -> list[str]:
        return [self._render("line", gate, limit=self._depth) for gate in looks]

    def _line_of(self, gate: Gate, reply: Reply) -> tuple[list[Candidate], list[Place]]:
        """Return the parked jobs of a line, and the places of the rows whose jobs are not parked."""
        jobs = [Candidate(priority, seq, gates_in(text), gate) for priority, seq, text in reply.rows if text]
        return jobs, [(priority, seq) for priority, seq, text in reply.rows if not text]

    def _lock(
        self, session: Session, gates: Sequence[Gate], looks: Sequence[Gate], heads: dict[Gate, list[Candidate]]
    ) -> None:
        """Lock the gates and the parked jobs, and then read the gates, their leases and their lines.

        If another reserve has locked a gate, this gate and its jobs are left out. So consumers do not wait for each
        other.
        """
        now, queue = self._pool.now, self._queue.encode()
        seqs = sorted({job.seq for jobs in heads.values() for job in jobs})
        # The time is read after the locks, so that it does not go back from one reserve to the next.
        asked = [*self._ask_lines(looks), render("quotas", queue=queue), render("now", now=now)]
        if seqs:  # Lock the jobs before the second read of the lines: then the jobs' gates do not change.
            asked.insert(0, render("parked", seqs=seqs))
        found, more = self._lock_gates(session, gates, asked)
        replies = iter(more)
        parked = {seq for (seq,) in next(replies).rows} if seqs else set()
        lines = [(gate, next(replies)) for gate in looks]
        quotas = {name: quota for name, quota, _ in _limits(next(replies).rows)}
        ((now_before,),) = next(replies).rows
        self.now = max(self.now, now_before)
        ended: list[tuple[_Line, int]] = []
        for gate, (values, leases) in found.items():
            self._lines[gate] = line = _Line(gate, quotas.get(gate.limit))
            line.read(values)
            for seq, left in leases:
                if left is None:
                    line.stale_leases.append(seq)
                elif left > 0:
                    line.ends.append(self.now + left)
                else:
                    ended.append((line, seq))
        self._scan += self._with_other_keys()
        self._locked = [job for job in self._scan if not self._has_gates_of(job)]
        self._scan = [job for job in self._scan if self._has_gates_of(job)]
        for gate, reply in lines:
            self._read_line(gate, reply, heads, parked)
        if ended:
            self._count_touched(session, ended)
        self._read_firsts(session)

    def _with_other_keys(self) -> list[Candidate]:
        """Return those of ``_others`` that have a fair gate, and that share no fair gate with an earlier job.

        Otherwise the job would have to wait for that job, and perhaps for jobs between the two that were not read. Jobs
        that are returned may share a gate.
        """
        before = {gate for job in self._scan for gate in job.gates}
        found = []
        for job in self._others:
            fair = [gate for gate in job.gates if gate not in self._lines or self._lines[gate].is_fair]
            if fair and job.seq not in self._locked_others and before.isdisjoint(fair):
                found.append(job)
                continue
            before.update(job.gates)
            if fair:
                self.knows_all_keys = False
        return found

    def _lock_gates(
        self, session: Session, gates: Sequence[Gate], asked: Sequence[str]
    ) -> tuple[dict[Gate, tuple[Any, tuple[Any, ...]]], list[Reply]]:
        """Lock those gates that no other session has locked. A gate without a row gets a row.

        Returns the row of each gate with its leases, and the replies to the statements *asked*.
        """
        found: dict[Gate, tuple[Any, tuple[Any, ...]]] = {}
        names, keys = ({literal(part(gate)) for gate in gates} for part in (_limit_bytes, _key_bytes))
        existing = render(
            "existing_gates", queue=self._queue.encode(), names=Sql(",".join(names)), keys=Sql(",".join(keys))
        )
        count = len(gates)
        replies = session.execute(*self._ask_gates(gates), existing, *asked)
        there = {_gate(*row) for row in replies[2 * count].rows}
        missing = [gate for gate in gates if gate not in there]
        self._note_gates(found, gates, replies)
        if missing:
            rows = ",".join(f"({_where(self._queue, gate)},0,NULL,0)" for gate in missing)
            asking, now = self._ask_gates(missing), render("now", now=self._pool.now)
            quotas = render("quotas", queue=self._queue.encode())
            _, *created, read_again, time = session.execute(
                render("lock_gates", row=Sql(rows[1:-1])), *asking, quotas, now
            )
            self._note_gates(found, missing, created)
            # After the first packet, another session may have created and deleted such a gate, or changed a limit
            # without a look at this gate. So the time and the quotas are read again.
            replies[-2] = read_again
            ((self.now,),) = time.rows
        return found, replies[2 * count + 1 :]

    def _ask_gates(self, gates: Sequence[Gate]) -> list[str]:
        locks = [self._render("gate", gate) for gate in gates]
        return [*locks, *(self._render("leased", gate, now=self._pool.now) for gate in gates)]

    def _note_gates(
        self, found: dict[Gate, tuple[Any, tuple[Any, ...]]], gates: Sequence[Gate], replies: Sequence[Reply]
    ) -> None:
        for gate, (rows, _), leases in zip(gates, replies, replies[len(gates) :], strict=False):
            for row in rows:
                found[gate] = row, leases.rows

    def _read_line(self, gate: Gate, reply: Reply, heads: dict[Gate, list[Candidate]], parked: set[int]) -> None:
        """Read a line again, now that its gate is locked."""
        line = self._lines.get(gate)
        known = {job.seq for job in heads.pop(gate, ())} & parked
        if line is None:
            return
        jobs, stale = self._line_of(gate, reply)
        line.is_looked_at = True
        line.left = {job.seq for job in jobs}
        self._stale += [(gate, *place) for place in stale]
        if len(jobs) + len(stale) == self._depth:
            line.is_full = True
            line.last_seen = max([job.place for job in jobs] + stale)
        # Jobs that came between the two reads wait for the next check. Jobs with another gate that this transaction has
        # not locked wait for the next check, too.
        heads[gate] = [job for job in jobs if job.seq in known and self._has_gates_of(job)]
        self._locked += set(jobs).difference(heads[gate])

    def _read_firsts(self, session: Session) -> None:
        """Read the first jobs of the lines that are asleep and that a job may join.

        A job behind the first job need not wake the line.
        """
        joined = {gate for job in self._scan for gate in job.gates}
        lines = [
            line
            for gate, line in self._lines.items()
            if gate in joined and line.is_asleep and line.is_fair and line.opens_at(self.now) == _OPEN
        ]
        if lines:
            replies = session.execute(*self._ask_lines([line.gate for line in lines]))
            for line, reply in zip(lines, replies, strict=True):
                line.first = next((job.place for job in self._line_of(line.gate, reply)[0]), None)

    def _has_gates_of(self, job: Candidate) -> bool:
        """Whether this transaction has locked all gates of the job."""
        return self._lines.keys() >= set(job.gates)

    def _count_touched(self, session: Session, ended: Sequence[tuple[_Line, int]]) -> None:
        """Also count an ended lease if another session has locked its job. That session may be touching the lease."""
        ((rows, _),) = session.execute(render("ended", seqs=sorted({seq for _, seq in ended}), now=self._pool.now))
        free = {seq for seq, is_live in rows if not is_live}
        for line, seq in ended:
            if seq not in free:
                line.ends.append(self.now + _LOOK_AGAIN)

    # --- choosing ---

    def _choose(self, heads: Mapping[Gate, Sequence[Candidate]]) -> None:
        jobs = [*self._scan, *(job for line in heads.values() for job in line)]
        singles, fair = self._sort(jobs)
        self.search_failed = self.search_failed and not self.knows_all_keys
        self.knows_all_keys = self.knows_all_keys and self._has_unparked
        if self.is_full and self._has_unparked and self._parks_first and not self.knows_all_keys:
            # All jobs of fair limits go to their lines first, because jobs of other keys may follow.
            self.is_all, self.has_parked_first = False, True
        else:
            self._choose_in_order(singles, fair)
            is_part = self.is_full or self._has_more_looks or any(line.is_full for line in self._lines.values())
            self.is_all = self.is_all and not is_part
        for line in fair:
            for job in line.waiting:
                if job.line != line.gate:
                    self._park(job, line.gate)

    def _sort(self, jobs: Iterable[Candidate]) -> tuple[list[Candidate], list[_Line]]:
        """Return the jobs without a fair limit, in their order. Also return the lines of fair limits. These lines have
        the other jobs."""
        singles: list[Candidate] = []
        fair: list[_Line] = []
        locked = set(self._locked)
        held_up: set[Gate] = set()
        for job in sorted([*jobs, *self._locked], key=lambda job: job.place):
            gate = next((gate for gate in job.gates if gate in self._lines and self._lines[gate].is_fair), None)
            if job in locked and gate is not None:
                held_up.add(gate)  # The later jobs of the key wait for this job.
            if job in locked or gate in held_up:
                continue
            if gate is None:
                singles.append(job)
                continue
            line = self._lines[gate]
            self._has_unparked = self._has_unparked or job.line is None
            if job.line is None and self._has_better(line, job):
                is_asleep = line.is_asleep and not line.is_woken_by(job)
                if not line.is_looked_at and not is_asleep and self._closed(job) is None:
                    self._woken.append((line, job.place))
                self._park(job, gate)
                continue
            if not line.waiting:
                fair.append(line)
                if not line.had_line:
                    line.turn = self._next_turn(line)
            line.waiting.append(job)
        return singles, fair

    def _choose_in_order(self, singles: Sequence[Candidate], fair: Sequence[_Line]) -> None:
        at = 0
        while len(self.taken) < self._limit:
            turn = self._best_turn(fair)
            single = singles[at] if at < len(singles) else None
            if turn is not None and (single is None or turn[0] < single.place):
                place, line = turn
                if self._is_behind_unread(place, line):
                    self._is_cut = True
                    break
                self._take(line.waiting.pop(0))
                line.turn = self._next_turn(line)
            elif single is not None:
                if self._is_behind_unread(single.place, None):
                    self._is_cut = True
                    break
                if not self._judge(single):
                    return
                at += 1
            else:
                return
        self.is_all = False

    def _is_behind_unread(self, place: Place, turn: _Line | None) -> bool:
        """Whether a line with an open gate may have unread jobs before this place, or before this line's *turn*.

        Only the first transactions wait for unread jobs. Later transactions read the largest allowed number of jobs.
        """
        unread = list(self._woken) if self._waits_for_woken else []
        if self._is_first:
            unread += [
                (line, line.last_seen)
                for line in self._lines.values()
                if line.last_seen is not None and not line.waiting and line.opens_at(self.now) == _OPEN
            ]
        if not unread or self._gated_taken >= self._most_gated:
            return False
        for line, seen in unread:
            if turn is None or line.gate.limit != turn.gate.limit:
                if place > seen:
                    return True
            elif line is not turn and turn.rank(turn.waiting[0].priority) > line.rank(seen[0]):
                return True
        return False

    def _judge(self, job: Candidate) -> bool:
        """Take a job without a fair limit, or let it wait. Returns whether jobs after it may be taken now."""
        if not job.gates:
            self.taken.append(job)
            return True
        if self._gated_taken >= self._most_gated:
            return True
        is_next = True
        closed = self._closed(job)
        if closed is None and job.line is None:
            closed = next((gate for gate in job.gates if self._has_better(self._lines[gate], job)), None)
            if closed is not None:
                self._lines[closed].look_at = _OPEN
                self._lines[closed].is_full = True
                self.is_all = is_next = False
        if closed is None:
            self._take(job)
        elif closed != job.line:
            self._park(job, closed)
        return is_next

    def _has_better(self, line: _Line, job: Candidate) -> bool:
        """Whether the line of an open gate may have unread jobs before this job."""
        if line.had_line and not line.is_looked_at:
            return True
        return line.last_seen is not None and job.place > line.last_seen

    def _best_turn(self, fair: Sequence[_Line]) -> tuple[Place, _Line] | None:
        """Return the line of a fair limit whose turn it is, and the place of the limit's best job."""
        if self._gated_taken >= self._most_gated:
            return None
        ready: defaultdict[str, list[_Line]] = defaultdict(list)
        for line in fair:
            if line.waiting and line.waits_for is None:
                line.waits_for = self._closed(line.waiting[0], first=line.gate)
                if line.waits_for is None:
                    ready[line.gate.limit].append(line)
        found = [
            (
                min(line.waiting[0].place for line in lines),
                min(lines, key=lambda line: (line.rank(line.waiting[0].priority), _order(line.gate))),
            )
            for lines in ready.values()
        ]
        return min(found, key=lambda one: one[0], default=None)

    @property
    def _gated_taken(self) -> int:
        return sum(bool(job.gates) for job in self.taken)

    def _closed(self, job: Candidate, first: Gate | None = None) -> Gate | None:
        """Return a closed gate of the job. If the gate of its line is closed, return that gate. None: all gates are
        open."""
        first = first or job.line
        ordered = job.gates if first is None else (first, *job.gates)
        return next((gate for gate in ordered if self._lines[gate].opens_at(self.now) != _OPEN), None)

    def _take(self, job: Candidate) -> None:
        self.taken.append(job)
        for gate in job.gates:
            self._lines[gate].count(self.now)
        if job.line is not None:
            self._lines[job.line].left.discard(job.seq)

    def _park(self, job: Candidate, gate: Gate) -> None:
        self._parked[job.seq] = job, gate
        if job.line is not None:
            self._lines[job.line].left.discard(job.seq)
        line = self._lines[gate]
        line.left.add(job.seq)
        line.joined = job.priority if line.joined is None else min(line.joined, job.priority)
        if line.is_woken_by(job):
            line.look_at = _OPEN
            self.is_all = False

    def _next_turn(self, line: _Line) -> int:
        lines = [other for other in self._lines.values() if other.gate.limit == line.gate.limit]
        return 1 + max(max(other.turn, other.last_turn) for other in lines)

    # --- changing ---

    def _changed(self) -> list[str]:
        """Return the statements that change the gates."""
        blocking = {line.waits_for for line in self._lines.values() if line.waits_for != line.gate}
        statements = []
        for line in self._lines.values():
            if line.is_asleep:
                continue
            values = self._values(line, is_blocking=line.is_blocking or line.gate in blocking)
            if values != line.stored:
                due, look_at, turn, closed = values
                name, key = (None, None) if closed is None else (_bytes(closed.limit), _bytes(closed.key))
                changed = {"due": due, "look_at": look_at, "turn": turn, "closed_name": name, "closed_key": key}
                statements.append(self._render("set_gate", line.gate, **changed))
        return statements

    def _values(self, line: _Line, *, is_blocking: bool) -> tuple[int, int | None, int, Gate | None]:
        """Return the values that ``multiq_gates`` must have for a gate."""
        has_jobs = bool(line.left) or line.is_full or (line.had_line and not line.is_looked_at)
        closed = line.waits_for if has_jobs and line.waits_for != line.gate else None
        look_at: int | None = line.opens_at(self.now)
        if look_at == _OPEN and line.is_fair:
            look_at = _look_by_turn(line.priority, line.turn)
        if not is_blocking and (closed is not None or not has_jobs):
            look_at = None
        elif line.had_line and not line.is_looked_at and line.look_at:
            look_at = min(line.look_at, look_at or _OPEN)
        return line.due, look_at, line.turn, closed

    def statements(self, token: int) -> list[str]:
        """Return the statements that park and lease the jobs, and change the gates."""
        moved = [*self.taken, *(job for job, _ in self._parked.values())]
        places = [(job.line, job.priority, job.seq) for job in moved if job.line is not None]
        found = [
            self._render("leave_line", gate, priority=priority, seq=seq)
            for gate, priority, seq in [*places, *self._stale]
        ]
        if self._parked:
            rows = ",".join(
                f"({_where(self._queue, gate)},{job.priority},{job.seq})" for job, gate in self._parked.values()
            )
            found += [render("park", seqs=sorted(self._parked)), render("join_lines", row=Sql(rows[1:-1]))]
        leased = [
            f"({job.seq},{literal(_bytes(gate.limit))},{literal(_bytes(gate.key))},{literal(self._queue.encode())},{token})"
            for job in self.taken
            for gate in job.gates
        ]
        found += [
            self._render("end_lease", line.gate, seqs=sorted(line.stale_leases))
            for line in self._lines.values()
            if line.stale_leases
        ]
        if leased:
            found.append(render("lease_gates", row=Sql(",".join(leased)[1:-1])))
        found += self._changed()
        if leased:
            most = _PAST_PER_GATE * len(leased)
            found.append(render("past_gates", queue=self._queue.encode(), now=self._pool.now, limit=most))
        return found

    def _render(self, verb: str, gate: Gate, **values: Any) -> str:
        return _render(verb, self._queue, gate, **values)


def first_turn(searching: float) -> int:
    """Return the first turn of a call that begins with a search. *searching*: the seconds since the first of the calls
    in a row that have searched.

    At first, such calls park few jobs, because jobs of other keys wait for them. Later calls park many, so that there
    are soon fewer jobs to search: each search takes longer the more jobs are not parked yet.
    """
    return 1 if searching < _QUICK_TIME else DEEPEST


# --- verdicts --------------------------------------------------------------------------------------------


def open_gates(session: Session, fences: Iterable[tuple[int, int]], found: set[tuple[bytes, bytes, bytes]]) -> None:
    """Let the next reserve check the gates of leases that have ended.

    Each statement is a transaction by itself, so no transaction holds two locks.

    - *fences*: the seqs and tokens of the jobs.
    - *found*: collects the gates. Pass the same set to each attempt, because an attempt may have deleted the leases and
      then failed to open some of the gates.
    """
    leases = sorted(set(fences))
    seqs = sorted({seq for seq, _ in leases})
    ((rows, _),) = session.execute(render("leased_gates", seqs=seqs))
    found.update(rows)
    opened = [render("open_gate", queue=queue, name=name, key=key) for queue, name, key in sorted(found)]
    pairs = Sql(",".join(f"({seq},{token})" for seq, token in leases))
    session.execute(render("end_leases", seqs=seqs, leases=pairs), *opened)


def wake_lines(session: Session, queue: str, seqs: Iterable[int]) -> list[str]:
    """Return the statements that let the next reserve examine the lines which these parked jobs leave."""
    ((rows, _),) = session.execute(render("in_lines", seqs=sorted(seqs)))
    gates = sorted({_gate(name, key) for _, name, key in rows}, key=_order)
    return [_render("wake_line", queue, gate) for gate in gates]


# --- stored limits ---------------------------------------------------------------------------------------


def change_limits(session: Session, queue: str, change: Mapping[str, Quota | None], *, pinned: bool) -> list[str]:
    """Store or remove limits. Returns the names of the changed limits.

    The jobs that wait for these limits check their gates again. The caller calls ``go_on`` for each of these limits
    until it returns True. If the process dies, the next reserve calls ``go_on``.
    """
    (found,) = session.begin(f"{render('quotas', queue=queue.encode())} FOR UPDATE")
    stored = {name: (before, is_pinned) for name, before, is_pinned in _limits(found.rows)}
    statements: list[str] = []
    changed: list[str] = []
    for name, quota in sorted(change.items()):
        before, is_pinned = stored.get(name, (None, 0))
        if not pinned and (is_pinned or (quota is not None and before == quota)):
            continue
        own = {"queue": queue.encode(), "name": _bytes(name)}
        if quota is None:
            statements.append(render("drop_limit", **own))
        else:
            statements.append(render("put_limit", pinned=int(pinned), quota=msgspec.json.encode(quota), **own))
        statements.append(render("begin_change", **own))
        changed.append(name)
    if statements:
        session.commit(*statements)
    else:
        session.roll_back()
    return changed


def go_on(session: Session, pool: Pool, queue: str, name: str, *, waits: bool) -> bool:
    """Let the next reserve check a slice of the gates of a changed limit. Returns whether no gates of it are left.

    - *waits*: whether to wait for another session that does a slice. If it is False, the answer may be True too early.

    A claim reads the quotas after it has locked its gates. So a claim that has read the old quota still holds these
    locks, and the slice with these gates waits for it.
    """
    own = {"queue": queue.encode(), "name": _bytes(name)}
    mark, quotas = session.begin(
        render("change", lock=Sql("" if waits else "SKIP LOCKED"), **own), render("quotas", queue=queue.encode())
    )
    if not mark.rows:
        session.roll_back()
        return True
    ((before,),) = mark.rows
    first = b"" if before is None else before + b"\0"
    (found,) = session.execute(render("last_of_slice", first=first, before=_SLICE - 1, **own))
    last = found.rows[0][0] if found.rows else _AFTER_ALL
    # Not the time of the change: meanwhile, a reserve may have handed out jobs within the new quota.
    quota = next((quota for stored, quota, _ in _limits(quotas.rows) if stored == name), None)
    wait = 0 if quota is None else min(quota.burst * quota.interval(SECOND), _NEVER // 2)
    latest = Sql(str(_NEVER) if quota is None else f"{pool.now}+{wait}")
    opening = render("open_gates", first=first, key=last, latest=latest, **own)
    later = render("go_on_later", key=last, **own)
    if found.rows:
        session.commit(opening, later)
        return False
    _, unblocked = session.execute(opening, render("unblock", limit=_SLICE, **own))
    is_last = unblocked.affected < _SLICE
    session.commit(render("end_change", **own) if is_last else later)
    return is_last


def states(select: Callable[..., tuple[Any, ...]], queue: str) -> list[LimitState]:
    """Return the limits of a queue. *select* runs a statement, and returns its rows."""
    stored = _limits(select("quotas", queue=queue.encode()))
    if not stored:
        return []
    counts: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)

    def count(gate: Gate, running: int, parked: int) -> None:
        before = counts[gate.limit].get(gate.key, (0, 0))
        counts[gate.limit][gate.key] = before[0] + running, before[1] + parked

    for name, key, running in select("running", queue=queue.encode()):
        count(_gate(name, key), running, 0)
    for name, key, parked in select("waiting", queue=queue.encode()):
        count(_gate(name, key), 0, parked)
    fair = {name for name, quota, _ in stored if quota.fair}
    for text, number in select("unplaced", queue=queue.encode()):
        gates = gates_in(text)
        count(min(gates, key=lambda gate: (gate.limit not in fair, gate)), 0, number)
    return limit_states([(name, quota, bool(pinned)) for name, quota, pinned in stored], counts)


def held_by(session: Session, pool: Pool, queue: str, jobs: Mapping[int, tuple[Gate, ...]]) -> dict[int, str]:
    """For each parked job that has a closed gate, return one of its closed gates as text. The keys are the jobs' seqs.

    *jobs*: the gates of each job. The keys are the jobs' seqs.
    """
    gates = sorted({gate for own in jobs.values() for gate in own}, key=_order)
    now = pool.now
    found, lines, ((time,),), *replies = (
        reply.rows
        for reply in session.execute(
            render("quotas", queue=queue.encode()),
            render("in_lines", seqs=sorted(jobs)),
            render("now", now=now),
            *(_render("leased", queue, gate, now=now) for gate in gates),
            *(_render("rate", queue, gate, now=now) for gate in gates),
        )
    )
    quotas = {name: quota for name, quota, _ in _limits(found)}
    closed: set[Gate] = set()
    for gate, leased, rates in zip(gates, replies, replies[len(gates) :], strict=False):
        line = _Line(gate, quotas.get(gate.limit))
        line.ends = [left for *_, left in leased if left is not None and left > 0]
        line.due = next((time + left for (left,) in rates), 0)
        if line.opens_at(time) != _OPEN:
            closed.add(gate)
    first = {seq: _gate(name, key) for seq, name, key in lines}
    answers = {}
    for seq, own in jobs.items():
        ordered = (first[seq], *own) if seq in first else own
        found_closed = next((gate for gate in ordered if gate in closed), None)
        if found_closed is not None:
            answers[seq] = str(found_closed)
    return answers


def _limits(rows: Iterable[Any]) -> list[tuple[str, Quota, int]]:
    return [(_text(name), msgspec.json.decode(quota, type=Quota), pinned) for name, quota, pinned in rows]


def _render(verb: str, queue: str, gate: Gate, **values: Any) -> str:
    own = {"queue": queue.encode(), "name": _bytes(gate.limit), "key": _bytes(gate.key)}
    return render(verb, **own, **values)


def _where(queue: str, gate: Gate) -> str:
    return f"{literal(queue.encode())},{literal(_bytes(gate.limit))},{literal(_bytes(gate.key))}"


def _look_by_turn(priority: int, turn: int) -> int:
    """Return ``look_at`` of an open line of a fair limit. It is a time before 2006.

    So a reserve looks first at the lines with the most urgent jobs, and among them at the lines whose turns are next.
    Priorities from 256 on are rounded to 32 steps between two powers of 2.
    """
    size = priority.bit_length()
    step = priority if size <= 8 else 256 + (size - 9) * 32 + ((priority >> (size - 6)) & 31)
    return (step << _TURN_BITS) + min(turn, (1 << _TURN_BITS) - 1)


def _order(gate: Gate) -> tuple[bytes, bytes]:
    return _bytes(gate.limit), _bytes(gate.key)


def _limit_bytes(gate: Gate) -> bytes:
    return _bytes(gate.limit)


def _key_bytes(gate: Gate) -> bytes:
    return _bytes(gate.key)


def _gate(name: bytes, key: bytes) -> Gate:
    return Gate(_text(name), _text(key))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(kept: bytes) -> str:
    return kept.decode("utf-8", "surrogatepass")
