"""The limits of one queue in the memory backend. The caller holds the store's lock around each call."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from multiq.driverkit.clock import SECOND

from .limits import Gate, Quota, fair_rank, limit_states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .limits import LimitState
    from .memory import Job

# each job with a rate deletes this number of outdated entries of ``due``: more than one, so that their number falls
_DROPPED_PER_SPEND = 2
_STALE_KEPT = 64  # stale entries that a heap may have in addition to one for each live one
_OPEN = 0
_NEVER = 2**63


class Stored(NamedTuple):
    quota: Quota
    is_pinned: bool


class KeptLimits:
    """The data about a queue's limits that stays while the queue has no jobs: the quotas, and the times of rates."""

    def __init__(self) -> None:
        self.stored: dict[str, Stored] = {}
        self.due: dict[Gate, int] = {}
        """The time at which a job would be due at the steady rate (GCRA's theoretical arrival time), in nanoseconds."""
        self._past: list[tuple[int, Gate]] = []

    def change(self, change: Mapping[str, Quota | None], now: int, *, pinned: bool) -> None:
        for name, quota in change.items():
            known = self.stored.get(name)
            if not pinned and known is not None and known.is_pinned:
                continue
            if quota is None:
                self.stored.pop(name, None)
            else:
                self.stored[name] = Stored(quota, pinned)
                self._forget_slower_rate(name, now + quota.burst * quota.interval(SECOND))

    def _forget_slower_rate(self, name: str, latest: int) -> None:
        """Shorten the wait of each gate that waits longer than the new rate requires."""
        for gate in [gate for gate, due in self.due.items() if gate.limit == name and due > latest]:
            self._set_due(gate, latest)

    def quota(self, gate: Gate) -> Quota | None:
        found = self.stored.get(gate.limit)
        return None if found is None else found.quota

    def rate_opens_at(self, gate: Gate, quota: Quota, now: int) -> int:
        """Return the time at which the rate admits the next job. ``_OPEN``: the rate admits a job now."""
        due = quota.possible_due(self.due.get(gate, 0), now, SECOND)
        opens_at = due - (quota.burst - 1) * quota.interval(SECOND)
        return _OPEN if opens_at <= now else opens_at

    def spend(self, gate: Gate, quota: Quota, now: int) -> None:
        due = quota.possible_due(self.due.get(gate, 0), now, SECOND)
        self._set_due(gate, max(due, now) + quota.interval(SECOND))
        for _ in range(_DROPPED_PER_SPEND):
            if self._past[0][0] > now:
                break
            due, past = heapq.heappop(self._past)
            if self.due.get(past) == due:
                del self.due[past]

    def _set_due(self, gate: Gate, due: int) -> None:
        self.due[gate] = due
        heapq.heappush(self._past, (due, gate))
        if len(self._past) > 2 * len(self.due) + _STALE_KEPT:
            self._past = [(due, gate) for gate, due in self.due.items()]
            heapq.heapify(self._past)


class Lines:
    """The parked jobs of a queue, in a line for each gate, and the leases that its limits count.

    A ready job with gates waits in the line of one of its gates: a fair gate, or a closed one. A line is looked
    at only while its gate may be open. The line of a fair gate also waits for the other gates of its first job.
    """

    def __init__(self, kept: KeptLimits) -> None:
        self.kept = kept
        self._now = 0
        self.clear()

    def clear(self) -> None:
        self.leased: dict[Gate, set[str]] = {}
        """The ids of the reserved jobs."""
        self._lines: dict[Gate, list[tuple[int, int, int, Job]]] = {}  # heaps: priority, sequence, stamp
        self._open: set[Gate] = set()  # gates that may be open, and have a line
        self._opening: list[tuple[int, Gate]] = []  # a heap of the times at which a rate opens a gate
        self._opens: dict[Gate, int] = {}  # for each gate in the heap, the latest of these times
        self._kept_in_line: dict[Gate, int] = {}  # how many entries a line may have before its stale ones are dropped
        # a closed gate -> the fair gates whose first job waits for the closed gate
        self._blocked: dict[Gate, set[Gate]] = {}
        self._turns: dict[Gate, int] = {}  # for gates with a line; a higher number is a later turn
        self._last_turn = 0

    # --- counting ---

    def lease(self, job: Job) -> None:
        for gate in job.gates:
            self.leased.setdefault(gate, set()).add(job.id)

    def end_lease(self, job: Job) -> None:
        for gate in job.gates:
            leased = self.leased.get(gate, set())
            leased.discard(job.id)
            if not leased:
                self.leased.pop(gate, None)
            self.look_at(gate)

    def look_at(self, gate: Gate) -> None:
        """Let the next reserve check whether the gate is open."""
        if gate in self._lines:
            self._open.add(gate)
        self._open |= self._blocked.pop(gate, set())

    def look_at_all(self) -> None:
        """Let the next reserve check all gates, because a quota has changed."""
        self._blocked.clear()
        self._open.update(self._lines)

    def promote(self, now: int) -> None:
        """Let the next reserve check the gates whose rates admit a job by now."""
        self._now = now
        while self._opening and self._opening[0][0] <= now:
            opens_at, gate = heapq.heappop(self._opening)
            if self._opens.get(gate) == opens_at:
                del self._opens[gate]
            self.look_at(gate)

    def next_change_at(self) -> int | None:
        return self._opening[0][0] if self._opening else None

    # --- lines ---

    def park(self, job: Job) -> None:
        """Put a ready job into the line of one of its gates: the first fair gate, else the first closed gate, else the
        first gate."""
        is_open = {gate: self.opens_at(gate, self._now) == _OPEN for gate in job.gates}
        gates = sorted(job.gates, key=lambda gate: (not self._is_fair(gate), is_open[gate], gate))
        self._park_at(gates[0], job)

    def best(self, now: int) -> tuple[tuple[int, int], Gate] | None:
        """Return the best job's place among the ready jobs, and the line whose first job is this job.

        The gate of the returned line is open. ``fair_rank`` says which key of a fair limit is next. Compared with other
        lines, the lines of a fair limit count as one line. Its place is the best place among the jobs in these lines.
        """
        found: dict[object, tuple[tuple[int, int], tuple[int, ...], Gate]] = {}
        for gate in sorted(self._open):
            head = self._head(gate)
            if head is None:
                continue
            checked = [gate, *head.gates] if self._is_fair(gate) else [gate]
            closed = next((one for one in checked if self.opens_at(one, now) != _OPEN), None)
            if closed is not None:
                self._close(gate, closed, now)
                continue
            place = head.priority, head.sequence
            group: object = gate
            rank: tuple[int, ...] = ()
            if self._is_fair(gate):
                group, rank = gate.limit, (head.priority, *self._rank(gate))
            known = found.get(group)
            if known is None:
                found[group] = place, rank, gate
            else:
                found[group] = min(place, known[0]), *min((rank, gate), known[1:])
        if not found:
            return None
        place, _, gate = min(found.values(), key=lambda one: one[0])
        return place, gate

    def take(self, gate: Gate, now: int) -> Job | None:
        """Take the first job of a line, and count it at the rates of its gates. None: another gate of the job is
        closed, so the job has moved to the line of that closed gate."""
        *_, job = heapq.heappop(self._lines[gate])
        self._end_turn(gate)
        self._head(gate)
        is_elsewhere = any(map(self._is_fair, job.gates)) and not self._is_fair(gate)
        if is_elsewhere or any(self.opens_at(other, now) != _OPEN for other in job.gates):
            self.park(job)
            return None
        for other in job.gates:
            quota = self.kept.quota(other)
            if quota is not None and quota.rate is not None:
                self.kept.spend(other, quota, now)
        return job

    def opens_at(self, gate: Gate, now: int) -> int:
        """Return the time at which the gate opens. ``_OPEN``: the gate is open. ``_NEVER``: the gate does not open by
        itself, but a verdict may open it."""
        quota = self.kept.quota(gate)
        if quota is None:
            return _OPEN
        if quota.slots is not None and len(self.leased.get(gate, ())) >= quota.slots:
            return _NEVER
        return _OPEN if quota.rate is None else self.kept.rate_opens_at(gate, quota, now)

    def held_by(self, job: Job, now: int) -> str | None:
        """Return the closed gate that a parked job waits for, as text."""
        gates = () if job.parked is None else (job.parked, *job.gates)
        return next((str(gate) for gate in gates if self.opens_at(gate, now) != _OPEN), None)

    def states(self, jobs: Mapping[str, Job]) -> list[LimitState]:
        counts: dict[str, dict[str, tuple[int, int]]] = {}

        def count(gate: Gate, running: int, parked: int) -> None:
            of_limit = counts.setdefault(gate.limit, {})
            before = of_limit.get(gate.key, (0, 0))
            of_limit[gate.key] = before[0] + running, before[1] + parked

        for gate, leased in self.leased.items():
            count(gate, len(leased), 0)
        for job in jobs.values():
            if job.parked is not None:
                count(job.parked, 0, 1)
        stored = [(name, limit.quota, limit.is_pinned) for name, limit in self.kept.stored.items()]
        return limit_states(stored, counts)

    def _close(self, line: Gate, closed: Gate, now: int) -> None:
        """Let reserves skip a line until the gate *closed* opens."""
        self._open.discard(line)
        if closed != line:
            self._blocked.setdefault(closed, set()).add(line)
        opens_at = self.opens_at(closed, now)
        if opens_at < _NEVER and self._opens.get(closed) != opens_at:
            self._opens[closed] = opens_at
            heapq.heappush(self._opening, (opens_at, closed))

    def _rank(self, gate: Gate) -> tuple[int, int]:
        """Return the rank of a key among the keys of its fair limit. The lowest rank is next."""
        return fair_rank(len(self.leased.get(gate, ())), self._turns[gate])

    def _is_fair(self, gate: Gate) -> bool:
        quota = self.kept.quota(gate)
        return quota is not None and quota.fair

    def _park_at(self, gate: Gate, job: Job) -> None:
        job.parked = gate
        if self._head(gate) is None:
            self._lines[gate] = []
            self._end_turn(gate)
        heapq.heappush(self._lines[gate], (job.priority, job.sequence, job.stamp, job))
        self._open.add(gate)
        if len(self._lines[gate]) > self._kept_in_line.get(gate, _STALE_KEPT):
            self._drop_stale(gate)

    def _drop_stale(self, gate: Gate) -> None:
        """Drop the entries of jobs that have moved since the entries were made. The old entry of a job that has moved
        would keep the job in memory after it is gone."""
        line = [entry for entry in self._lines[gate] if entry[2] == entry[3].stamp]
        heapq.heapify(line)
        self._lines[gate] = line
        self._kept_in_line[gate] = 2 * len(line) + _STALE_KEPT

    def _end_turn(self, gate: Gate) -> None:
        """Give this key its next turn after all other keys that wait now."""
        self._last_turn += 1
        self._turns[gate] = self._last_turn

    def _head(self, gate: Gate) -> Job | None:
        """Return the first job of the line, without the entries of jobs that are not in the line any more."""
        line = self._lines.get(gate, [])
        while line and line[0][2] != line[0][3].stamp:
            heapq.heappop(line)
        if line:
            return line[0][3]
        self._lines.pop(gate, None)
        self._kept_in_line.pop(gate, None)
        self._turns.pop(gate, None)
        self._open.discard(gate)
        return None
