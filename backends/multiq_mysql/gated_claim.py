"""Which jobs with gates may be reserved now. One transaction locks jobs and gates, counts leases, and chooses jobs.

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

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from .fair_search import FairSearch
from .gates import (
    OPEN,
    Candidate,
    Line,
    as_bytes,
    as_text,
    gate_columns,
    gate_of,
    gate_order,
    render_for,
)
from .limits import limits_in
from .records import AGAIN, READY, gates_in
from .scan_window import FROM_START
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from multiq.backend import Gate

    from .connection import Reply, Session
    from .gates import Place
    from .pool import Pool

_LOOK_AGAIN = 10_000  # microseconds until a reserve looks again at a gate of a job that another session has locked
_TURN_BITS = 40
_LOOKED_AT = 50  # gates that one transaction looks at
_EXAMINED = 250  # gates that one transaction examines for lines that wait for them
DEEPEST = 3  # the turn from which each claim reads _MOST_READ jobs
_FEWEST_READ, _MOST_READ = 20, 500  # ready jobs, and parked jobs of each line, that one transaction reads
_PAST_PER_GATE = 2  # gates of the past that each reserve deletes
_WITHOUT_GATES = Sql("gates IS NULL")


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
        self._search = FairSearch(queue)
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
        self._woken: list[tuple[Line, Place]] = []
        """Lines of fair limits that this transaction has not read, each with the place of a job that joins the line.
        This job may have the line's next turn."""
        self.now = 0
        """The server's time, in microseconds. 0 until the first read."""
        self._lines: dict[Gate, Line] = {}
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
        gates = {gate for job in (*self._scan, *self._search.jobs) for gate in job.gates}
        gates.update(looks, (gate for jobs in heads.values() for job in jobs for gate in job.gates))
        if gates:
            self._lock(session, sorted(gates, key=gate_order), looks, heads)
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
            self._search.run(session, self._scan[-1], {text.encode() for *_, text in found if text})
        if not looked or not looked[0].rows:  # Other consumers have locked these gates.
            return []
        self.has_looked = True
        self._has_more_looks = any(len(reply.rows) == _LOOKED_AT for reply in looked)
        rows = [row for reply in looked for row in reply.rows]
        self.changes = [as_text(key) for name, key in rows if not name]  # begin_change.sql explains the empty name.
        return list(dict.fromkeys(gate_of(*row) for row in rows if row[0]))

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
        quotas = {name: quota for name, quota, _ in limits_in(next(replies).rows)}
        ((now_before,),) = next(replies).rows
        self.now = max(self.now, now_before)
        ended: list[tuple[Line, int]] = []
        for gate, (values, leases) in found.items():
            self._lines[gate] = line = Line(gate, quotas.get(gate.limit))
            line.read(values)
            for seq, left in leases:
                if left is None:
                    line.stale_leases.append(seq)
                elif left > 0:
                    line.ends.append(self.now + left)
                else:
                    ended.append((line, seq))
        self._scan += self._search.free_jobs(self._scan, self._lines)
        self._locked = [job for job in self._scan if not self._has_gates_of(job)]
        self._scan = [job for job in self._scan if self._has_gates_of(job)]
        for gate, reply in lines:
            self._read_line(gate, reply, heads, parked)
        if ended:
            self._count_touched(session, ended)
        self._read_firsts(session)

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
        there = {gate_of(*row) for row in replies[2 * count].rows}
        missing = [gate for gate in gates if gate not in there]
        self._note_gates(found, gates, replies)
        if missing:
            rows = ",".join(f"({gate_columns(self._queue, gate)},0,NULL,0)" for gate in missing)
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
            if gate in joined and line.is_asleep and line.is_fair and line.opens_at(self.now) == OPEN
        ]
        if lines:
            replies = session.execute(*self._ask_lines([line.gate for line in lines]))
            for line, reply in zip(lines, replies, strict=True):
                line.first = next((job.place for job in self._line_of(line.gate, reply)[0]), None)

    def _has_gates_of(self, job: Candidate) -> bool:
        """Whether this transaction has locked all gates of the job."""
        return self._lines.keys() >= set(job.gates)

    def _count_touched(self, session: Session, ended: Sequence[tuple[Line, int]]) -> None:
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
        search = self._search
        self.search_failed = search.is_begun and not search.knows_all_keys
        self.knows_all_keys = search.knows_all_keys and self._has_unparked
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

    def _sort(self, jobs: Iterable[Candidate]) -> tuple[list[Candidate], list[Line]]:
        """Return the jobs without a fair limit, in their order. Also return the lines of fair limits. These lines have
        the other jobs."""
        singles: list[Candidate] = []
        fair: list[Line] = []
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

    def _choose_in_order(self, singles: Sequence[Candidate], fair: Sequence[Line]) -> None:
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

    def _is_behind_unread(self, place: Place, turn: Line | None) -> bool:
        """Whether a line with an open gate may have unread jobs before this place, or before this line's *turn*.

        Only the first transactions wait for unread jobs. Later transactions read the largest allowed number of jobs.
        """
        unread = list(self._woken) if self._waits_for_woken else []
        if self._is_first:
            unread += [
                (line, line.last_seen)
                for line in self._lines.values()
                if line.last_seen is not None and not line.waiting and line.opens_at(self.now) == OPEN
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
                self._lines[closed].look_at = OPEN
                self._lines[closed].is_full = True
                self.is_all = is_next = False
        if closed is None:
            self._take(job)
        elif closed != job.line:
            self._park(job, closed)
        return is_next

    def _has_better(self, line: Line, job: Candidate) -> bool:
        """Whether the line of an open gate may have unread jobs before this job."""
        if line.had_line and not line.is_looked_at:
            return True
        return line.last_seen is not None and job.place > line.last_seen

    def _best_turn(self, fair: Sequence[Line]) -> tuple[Place, Line] | None:
        """Return the line of a fair limit whose turn it is, and the place of the limit's best job."""
        if self._gated_taken >= self._most_gated:
            return None
        ready: defaultdict[str, list[Line]] = defaultdict(list)
        for line in fair:
            if line.waiting and line.waits_for is None:
                line.waits_for = self._closed(line.waiting[0], first=line.gate)
                if line.waits_for is None:
                    ready[line.gate.limit].append(line)
        found = [
            (
                min(line.waiting[0].place for line in lines),
                min(lines, key=lambda line: (line.rank(line.waiting[0].priority), gate_order(line.gate))),
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
        return next((gate for gate in ordered if self._lines[gate].opens_at(self.now) != OPEN), None)

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
            line.look_at = OPEN
            self.is_all = False

    def _next_turn(self, line: Line) -> int:
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
                name, key = (None, None) if closed is None else (as_bytes(closed.limit), as_bytes(closed.key))
                changed = {"due": due, "look_at": look_at, "turn": turn, "closed_name": name, "closed_key": key}
                statements.append(self._render("set_gate", line.gate, **changed))
        return statements

    def _values(self, line: Line, *, is_blocking: bool) -> tuple[int, int | None, int, Gate | None]:
        """Return the values that ``multiq_gates`` must have for a gate."""
        has_jobs = bool(line.left) or line.is_full or (line.had_line and not line.is_looked_at)
        closed = line.waits_for if has_jobs and line.waits_for != line.gate else None
        look_at: int | None = line.opens_at(self.now)
        if look_at == OPEN and line.is_fair:
            look_at = _look_by_turn(line.priority, line.turn)
        if not is_blocking and (closed is not None or not has_jobs):
            look_at = None
        elif line.had_line and not line.is_looked_at and line.look_at:
            look_at = min(line.look_at, look_at or OPEN)
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
                f"({gate_columns(self._queue, gate)},{job.priority},{job.seq})" for job, gate in self._parked.values()
            )
            found += [render("park", seqs=sorted(self._parked)), render("join_lines", row=Sql(rows[1:-1]))]
        leased = [
            f"({job.seq},{literal(as_bytes(gate.limit))},{literal(as_bytes(gate.key))},{literal(self._queue.encode())},{token})"
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
        return render_for(verb, self._queue, gate, **values)


def _look_by_turn(priority: int, turn: int) -> int:
    """Return ``look_at`` of an open line of a fair limit. It is a time before 2006.

    So a reserve looks first at the lines with the most urgent jobs, and among them at the lines whose turns are next.
    Priorities from 256 on are rounded to 32 steps between two powers of 2.
    """
    size = priority.bit_length()
    step = priority if size <= 8 else 256 + (size - 9) * 32 + ((priority >> (size - 6)) & 31)
    return (step << _TURN_BITS) + min(turn, (1 << _TURN_BITS) - 1)


def _limit_bytes(gate: Gate) -> bytes:
    return as_bytes(gate.limit)


def _key_bytes(gate: Gate) -> bytes:
    return as_bytes(gate.key)
