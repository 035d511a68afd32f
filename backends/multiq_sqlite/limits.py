"""Limits: decides which jobs with gates may be reserved now. ``sql/schema.sql`` explains the tables.

If the gate of a line may be open, the first job of the line is among the ready jobs. A reserve checks all gates of this
first job. If one of them is closed, the job waits in the line of the closed gate, and no reserve reads the job until
this gate opens.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from multiq.backend import Gate, Quota
from multiq.backend.limits import COMPARED, fair_rank, limit_states
from multiq.driverkit.clock import SECOND

from .records import as_json
from .statements import qualified

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from multiq.backend import LimitState, NewJob

    from .connection import Transaction

    Job: TypeAlias = tuple[int, str, int, int, int, int, int, int, str | int]  # as packed by sql/ready.sql

_OPEN = 0
_NEVER = 2**63 - 1  # the gate does not open by itself, but a verdict may open it
_SLICE = 200  # keys that one transaction opens
_MOST_PARKED = 200  # a transaction that has found closed gates of this number of jobs looks at no more jobs with gates
_GATED = 1  # the last column of sql/ready.sql for a job with gates


def is_gated(job: Job) -> bool:
    """Whether a row of ``sql/ready.sql`` is a job with gates."""
    return job[8] == _GATED


def gates_of(job: NewJob) -> tuple[Gate, ...]:
    return () if job.terms is None else job.terms.gates


def insert_gates(execute: Callable[[str, dict[str, Any]], Any], queue: str, job: NewJob) -> None:
    """Store the gates of a job that was just inserted. A parked job waits in the line of one of these gates."""
    gates = sorted(set(gates_of(job)))
    fair = {name for name, *_, is_fair, _ in execute("quotas", {"queue": queue}).fetchall() if is_fair}
    line = min(gates, key=lambda gate: (gate.limit not in fair, gate))
    execute("drop_stale_gates", {"queue": queue, "id": job.id})
    for gate in gates:
        own = {"queue": queue, "id": job.id, "is_line": int(gate == line)}
        execute("enqueue_gate", own | _columns(gate))
    execute("note_gates", {"queue": queue})


def place(transaction: Transaction, seqs: Sequence[int]) -> None:
    """Put jobs that became ready into their lines. Free the slots of jobs that are gone or no longer reserved."""
    if seqs:
        transaction.execute("place", {"seqs": as_json(list(seqs))})


def may_have_gates(transaction: Transaction, queue: str) -> bool:
    return transaction.execute("has_gates", {"queue": queue}).fetchone() is not None


class _Candidate(NamedTuple):
    """A job whose gates are looked at."""

    job: Job
    gates: list[Gate]
    line: Gate | None
    """None: the job has no gates any more, because another program has deleted them."""


class OpenGates:
    """The gates of one queue, in one transaction at one time."""

    _chosen: _Candidate

    def __init__(self, transaction: Transaction, queue: str, now: int) -> None:
        self._transaction = transaction
        self._queue = queue
        self._now = now
        self._leases: dict[Gate, int] = {}
        self._due: dict[Gate, int] = {}
        self._touched: set[Gate] = set()
        self._left: Gate | None = None
        self._parked = 0
        self.opens_lines = False
        """Whether ``end`` will make jobs ready that wait in lines of fair limits. These jobs may be next."""

    @property
    def has_parked_most(self) -> bool:
        """Whether this transaction must look at no more jobs with gates, so that it does not hold the lock for long."""
        return self._parked >= _MOST_PARKED

    @functools.cached_property
    def _quotas(self) -> dict[str, Quota]:
        stored = _stored(self._transaction.execute, self._queue)
        return {name: limit.quota for name, limit in stored.items()}

    def open_by_time(self) -> bool:
        """Make jobs ready if the rate for which they wait is open now. Continue the changes of limits.

        Returns whether everything is done.
        """
        opening = self._execute("opening", now=self._now, limit=_SLICE).fetchall()
        is_changing = False
        for name, key in opening:
            if not name:
                is_changing = True
                continue
            gate = _gate(name, key)
            self._execute("await_rate", gate, opens_at=None)
            self._execute("open_gate", gate)
        return (not is_changing or go_on(self._transaction, self._queue, self._now)) and len(opening) < _SLICE

    def choose(self, job: Job) -> Job | None:
        """Return the job that is reserved now. This is *job*, or another job if another key of a fair limit has the
        next turn. None: *job* must wait, or ``has_parked_most``.

        The caller reserves the returned job, and calls ``take``.
        """
        self._left = None
        own = self._candidate(job)
        if own is None or self._goes_back(own):
            return None
        while not self.has_parked_most:
            candidate = self._next_turn(own)
            closed = self._closed(candidate)
            if closed is None:
                self._chosen = candidate
                return candidate.job
            self._wait(candidate, closed)
            if candidate.job[0] == job[0]:
                break
        return None

    def following(self) -> Job | None:
        """Return the first job of the line that a job had to leave in the previous call of ``choose``."""
        return None if self._left is None else self._head(self._left)

    def take(self, token: int) -> Job | None:
        """Count the chosen job at its gates. Returns the next job of its line. For the line of a fair limit, returns
        None."""
        job, gates, line = self._chosen
        if line is None:
            return None
        self._execute("lease_gates", seq=job[0], token=token)
        for gate in gates:
            self._touched.add(gate)
            quota = self._quotas.get(gate.limit)
            if quota is None:
                continue
            self._leases[gate] = self._live(gate) + 1
            if quota.rate is not None:
                self._spend(gate, quota)
        if not self._is_fair(line.limit):
            return self._head(line)
        self._check_awaited(gate for gate in gates if gate != line)
        head = self._head(line)
        if head is None:
            self._execute("drop_turn", line)
        else:
            self._execute("end_turn", line, priority=head[2])
        return None

    def end(self) -> None:
        """Make ready the next jobs of the gates of examined jobs, because these gates may still be open."""
        touched, self._touched = self._touched, set()
        self.opens_lines = False
        for gate in sorted(touched):
            opens_at = self._opens_at(gate)
            if opens_at == _OPEN:
                self._execute("open_gate", gate)
            elif opens_at < _NEVER and self._head(gate) is not None:
                self._execute("await_rate", gate, opens_at=opens_at)

    # --- jobs ---

    def _candidate(self, job: Job) -> _Candidate | None:
        """Return a ready job with its gates. None: the job was put into the line of a fair limit."""
        rows = self._execute("gates", seq=job[0]).fetchall()
        gates = sorted(_gate(name, key) for name, key, _ in rows)
        line = next((_gate(name, key) for name, key, is_line in rows if is_line), None)
        if line is None:
            return _Candidate(job, [], None)
        fair = next((gate for gate in gates if self._is_fair(gate.limit)), None)
        if fair is not None and not self._is_fair(line.limit):  # The limit became fair after the job was enqueued.
            self._change_line(job, line, fair)
            self._park(job)
            self._touched.add(fair)
            return None
        return _Candidate(job, gates, line)

    def _goes_back(self, candidate: _Candidate) -> bool:
        """If another job has become the first in the line of a fair limit, put this job back into the line."""
        job, _, line = candidate
        if line is None or not self._is_fair(line.limit):
            return False
        head = self._head(line)
        if head is None or head[0] == job[0]:
            return False
        self._park(job)
        self._touched.add(line)
        return True

    def _next_turn(self, candidate: _Candidate) -> _Candidate:
        """Return the job whose turn it is at a fair limit."""
        if candidate.line is None or not self._is_fair(candidate.line.limit):
            return candidate
        line = self._next_line(candidate)
        if line is None or line == candidate.line:
            return candidate
        head = self._head(line)
        if head is None:
            self._execute("drop_turn", line)
            return candidate
        return self._candidate(head) or candidate

    def _next_line(self, candidate: _Candidate) -> Gate | None:
        """Return the line of the key that is next at the candidate's fair limit.

        If the lines of several keys wait for a gate, the trigger opens only the first one. So the others are compared,
        too, if this gate is open. The opened line may be another one than the candidate's.
        """
        assert candidate.line is not None  # noqa: S101 - the caller has checked it
        name = candidate.line.limit
        found = self._execute("next_turns", name=name, limit=COMPARED).fetchall()
        awaited = self._execute("awaited_beside_turns", name=name, limit=COMPARED).fetchall()
        for gate in {*candidate.gates, *(_gate(*row) for row in awaited)}:
            if gate != candidate.line and self._opens_at(gate) == _OPEN:
                closed = {"closed_name": gate.limit, "closed_key": _bytes(gate.key)}
                found += self._execute("next_turns_behind", name=name, limit=COMPARED, **closed).fetchall()
        best: tuple[tuple[int, ...], Gate] | None = None
        for key, priority, turn in sorted(found, key=lambda row: row[1:])[:COMPARED]:
            line = _gate(name, key)
            rank = priority, *fair_rank(self._live(line), turn)
            if best is None or rank < best[0]:
                best = rank, line
            if best[0][1] == 0:  # the following keys have later turns
                break
        return None if best is None else best[1]

    def _wait(self, candidate: _Candidate, closed: Gate) -> None:
        """Let a job wait for a closed gate."""
        job, gates, line = candidate
        assert line is not None  # noqa: S101 - a job without gates waits for none
        opens_at = self._opens_at(closed)
        if opens_at < _NEVER:
            self._execute("await_rate", closed, opens_at=opens_at)
        if self._is_fair(line.limit):
            self._execute("close_line", line, closed_name=closed.limit, closed_key=_bytes(closed.key))
            # The job may have waited for another gate until now. The other jobs that wait for that gate are next.
            others = {gate for gate in gates if gate not in {closed, line}}
            self._touched |= others
            self._check_awaited(others)
        elif closed != line:
            self._change_line(job, line, closed)
        self._park(job)

    def _park(self, job: Job) -> None:
        self._execute("park", seq=job[0])
        self._parked += 1

    def _change_line(self, job: Job, line: Gate, new: Gate) -> None:
        self._execute("change_line", new, seq=job[0], priority=job[2])
        self._touched.add(line)
        self._left = line

    def _head(self, line: Gate) -> Job | None:
        row: Job | None = self._execute("head", line).fetchone()
        return row

    # --- gates ---

    def _check_awaited(self, gates: Iterable[Gate]) -> None:
        for gate in gates:
            if self._opens_at(gate) == _OPEN and self._execute("awaited", gate).fetchone() is not None:
                self.opens_lines = True

    def _closed(self, candidate: _Candidate) -> Gate | None:
        ordered = candidate.gates if candidate.line is None else [candidate.line, *candidate.gates]
        return next((gate for gate in ordered if self._opens_at(gate) != _OPEN), None)

    def _opens_at(self, gate: Gate) -> int:
        """Return the time at which the gate opens. ``_OPEN``: the gate is open. ``_NEVER``: it does not open by itself,
        but a verdict may open it."""
        quota = self._quotas.get(gate.limit)
        if quota is None:
            return _OPEN
        if quota.slots is not None and self._live(gate) >= quota.slots:
            return _NEVER
        if quota.rate is None:
            return _OPEN
        opens_at = self._due_of(gate, quota) - (quota.burst - 1) * quota.interval(SECOND)
        return _OPEN if opens_at <= self._now else opens_at

    def _live(self, gate: Gate) -> int:
        if gate not in self._leases:
            self._leases[gate] = self._execute("leases", gate, now=self._now).fetchone()[0]
        return self._leases[gate]

    def _due_of(self, gate: Gate, quota: Quota) -> int:
        if gate not in self._due:
            row = self._execute("rate", gate).fetchone()
            self._due[gate] = 0 if row is None else quota.possible_due(row[0], self._now, SECOND)
        return self._due[gate]

    def _spend(self, gate: Gate, quota: Quota) -> None:
        due = min(max(self._due_of(gate, quota), self._now) + quota.interval(SECOND), _NEVER)
        self._due[gate] = due
        self._execute("spend", gate, due=due)
        for name, key in self._execute("past_rates", now=self._now).fetchall():
            self._execute("forget_rate", _gate(name, key))
            self._due.pop(_gate(name, key), None)

    def _is_fair(self, name: str) -> bool:
        quota = self._quotas.get(name)
        return quota is not None and quota.fair

    def _execute(self, statement: str, gate: Gate | None = None, /, **parameters: Any) -> Any:
        own = {} if gate is None else _columns(gate)
        return self._transaction.execute(statement, {"queue": self._queue} | own | parameters)


# --- stored limits ---------------------------------------------------------------------------------------


class _Limit(NamedTuple):
    quota: Quota
    is_pinned: bool


class _Change(NamedTuple):
    """The remaining part of a change of a limit. Each part goes through keys, from *first* on."""

    name: str
    part: int = 0
    first: bytes = b""
    latest: int = _NEVER
    """The latest time until which a job waits for the limit's rate. ``_NEVER``: the limit was removed. Each slice
    computes the time again, because reserves may have handed out jobs within the new quota before the slice."""

    def key(self) -> bytes:
        """Return the change as the key of a row in ``multiq_rates``."""
        name = self.name.encode()
        return len(name).to_bytes(2, "big") + name + bytes([self.part]) + self.first

    @classmethod
    def of(cls, key: bytes) -> _Change:
        end = 2 + int.from_bytes(key[:2], "big")
        return cls(key[2:end].decode(), key[end], key[end + 1 :])


def change_limits(
    transaction: Transaction, queue: str, change: Mapping[str, Quota | None], now: int, *, pinned: bool
) -> bool:
    """Store or remove limits. The gates of the jobs that wait for these limits are checked again.

    Returns False if ``go_on`` must be called in more transactions. If the process dies, the next reserve calls
    ``go_on``.
    """
    known = _stored(transaction.execute, queue)
    changes: list[_Change] = []
    for name, quota in change.items():
        own = {"queue": queue, "name": name}
        before = known.get(name)
        if not pinned and before is not None and (before.is_pinned or before.quota == quota):
            continue
        if quota is None:
            transaction.execute("drop_limit", own)
        else:
            transaction.execute("put_limit", own | _quota_columns(quota) | {"pinned": int(pinned)})
        changes.append(_Change(name))
    for (key,) in transaction.execute("changes", {"queue": queue}).fetchall():
        if _Change.of(key).name in {one.name for one in changes}:
            transaction.execute("end_change", {"queue": queue, "key": key})
    is_all = _go_on(transaction, queue, changes, now)
    transaction.execute("forget_gates", {"queue": queue})
    return is_all


def unstored(rows: Iterable[tuple[Any, ...]], quotas: Mapping[str, Quota]) -> dict[str, Quota]:
    """Return the limits that are neither pinned nor stored with the same quota. *rows*: the rows of ``quotas.sql``."""
    stored = _limits(rows)
    return {
        name: quota
        for name, quota in quotas.items()
        if name not in stored or not (stored[name].is_pinned or stored[name].quota == quota)
    }


def add_limits(transaction: Transaction, queue: str, quotas: Mapping[str, Quota], schema: str) -> None:
    """Store limits in a caller's transaction. Pinned limits do not change.

    The next reserve after the commit checks the gates of the jobs that wait for these limits, as it does after a
    process died during ``change_limits``. So the caller's transaction is short.
    """

    def execute(name: str, parameters: dict[str, Any]) -> Any:
        return transaction.execute_text(qualified(name, schema), parameters)

    changed = unstored(execute("quotas", {"queue": queue}).fetchall(), quotas)
    for (key,) in execute("changes", {"queue": queue}).fetchall():
        if _Change.of(key).name in changed:
            execute("end_change", {"queue": queue, "key": key})
    for name, quota in changed.items():
        execute("put_limit", {"queue": queue, "name": name, "pinned": 0} | _quota_columns(quota))
        execute("go_on_later", {"queue": queue, "key": _Change(name).key()})


def go_on(transaction: Transaction, queue: str, now: int) -> bool:
    """Continue changes of limits. Returns whether all changes are done."""
    changes: list[_Change] = []
    for (key,) in transaction.execute("changes", {"queue": queue}).fetchall():
        transaction.execute("end_change", {"queue": queue, "key": key})
        changes.append(_Change.of(key))
    return _go_on(transaction, queue, changes, now)


def _go_on(transaction: Transaction, queue: str, changes: Iterable[_Change], now: int) -> bool:
    """Carry out a slice of some changes, and store the remaining part."""
    left = _SLICE
    is_all = True
    stored: dict[str, _Limit] | None = None
    for change in changes:
        stored = _stored(transaction.execute, queue) if stored is None else stored
        limit = stored.get(change.name)
        one: _Change | None = change
        if limit is not None:
            latest = now + limit.quota.burst * limit.quota.interval(SECOND)
            one = change._replace(latest=min(latest, _NEVER - 1))
        while one is not None and left > 0:
            done, one = _PARTS[one.part](transaction, queue, one, left, limit is not None and limit.quota.fair)
            left -= done
        if one is not None:
            transaction.execute("go_on_later", {"queue": queue, "key": one.key()})
            is_all = False
    return is_all


def _next(change: _Change, keys: Sequence[bytes], limit: int) -> tuple[int, _Change | None]:
    """Return the number of keys that were processed, and the remaining part of the change. *limit*: the number of
    requested keys."""
    if len(keys) == limit:
        return limit, change._replace(first=keys[-1] + b"\0")
    if change.part + 1 < len(_PARTS):
        return len(keys), change._replace(part=change.part + 1, first=b"")
    return len(keys), None


def _keys(transaction: Transaction, queue: str, statement: str, change: _Change, limit: int) -> list[bytes]:
    asked = {"queue": queue, "name": change.name, "first": change.first, "limit": limit}
    return [key for (key,) in transaction.execute(statement, asked).fetchall()]


def _spend_faster(
    transaction: Transaction,
    queue: str,
    change: _Change,
    limit: int,
    is_fair: bool,  # noqa: ARG001 - as all parts have it
) -> tuple[int, _Change | None]:
    if change.latest == _NEVER:
        return _next(change, [], limit)
    keys = _keys(transaction, queue, "rate_keys", change, limit)
    if keys:
        which = {"queue": queue, "name": change.name, "first": change.first, "last": keys[-1], "latest": change.latest}
        transaction.execute("faster_rate", which)
    return _next(change, keys, limit)


def _drop_turns(
    transaction: Transaction,
    queue: str,
    change: _Change,
    limit: int,
    is_fair: bool,
) -> tuple[int, _Change | None]:
    dropped = 0
    if not is_fair:
        dropped = transaction.execute("drop_turns", {"queue": queue, "name": change.name, "limit": limit}).rowcount
    return (limit, change) if dropped == limit else _next(change, [], limit)


def _open_lines(
    transaction: Transaction,
    queue: str,
    change: _Change,
    limit: int,
    is_fair: bool,
) -> tuple[int, _Change | None]:
    keys = _keys(transaction, queue, "lines", change, limit)
    for key in keys:
        own = {"queue": queue, "name": change.name, "key": key}
        if is_fair:
            transaction.execute("begin_turns", own)
        transaction.execute("open_gate", own)
    return _next(change, keys, limit)


def _open_closed(
    transaction: Transaction,
    queue: str,
    change: _Change,
    limit: int,
    is_fair: bool,  # noqa: ARG001
) -> tuple[int, _Change | None]:
    """Open the gates for which lines of fair limits wait. Each of these gates wakes one line now, and the other lines
    later."""
    keys = _keys(transaction, queue, "closed_keys", change, limit)
    for key in keys:
        transaction.execute("open_gate", {"queue": queue, "name": change.name, "key": key})
    return _next(change, keys, limit)


_PARTS = (_spend_faster, _drop_turns, _open_lines, _open_closed)


def states(execute: Callable[[str, dict[str, Any]], Any], queue: str, now: int) -> list[LimitState]:
    """Return the limits of a queue. *execute* runs a statement, and returns its rows."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for name, key, running in execute("running", {"queue": queue, "now": now}):
        counts.setdefault(name, {})[_text(key)] = running, 0
    for name, key, parked in execute("parked", {"queue": queue}):
        of_limit = counts.setdefault(name, {})
        of_limit[_text(key)] = of_limit.get(_text(key), (0, 0))[0], parked
    found = _limits(execute("quotas", {"queue": queue}))
    return limit_states([(name, limit.quota, limit.is_pinned) for name, limit in found.items()], counts)


def held_by(execute: Callable[[str, dict[str, Any]], Any], queue: str, seq: int, now: int) -> str | None:
    """Return a closed gate of a job that waits in a line, as text. *execute* runs a statement, and returns its rows."""
    quotas = {name: limit.quota for name, limit in _limits(execute("quotas", {"queue": queue})).items()}
    rows = sorted(execute("gates", {"seq": seq}), key=lambda row: not row[2])
    for gate in [_gate(name, key) for name, key, _ in rows]:
        quota = quotas.get(gate.limit)
        if quota is None:
            continue
        own = {"queue": queue} | _columns(gate)
        if quota.slots is not None and execute("leases", own | {"now": now})[0][0] >= quota.slots:
            return str(gate)
        if quota.rate is not None:
            due = execute("rate", own)
            if due and due[0][0] - (quota.burst - 1) * quota.interval(SECOND) > now:
                return str(gate)
    return None


def _stored(execute: Callable[[str, dict[str, Any]], Any], queue: str) -> dict[str, _Limit]:
    return _limits(execute("quotas", {"queue": queue}).fetchall())


def _limits(rows: Iterable[tuple[Any, ...]]) -> dict[str, _Limit]:
    return {
        name: _Limit(Quota(slots, rate, per, burst, bool(fair)), bool(pinned))
        for name, slots, rate, per, burst, fair, pinned in rows
    }


def _quota_columns(quota: Quota) -> dict[str, Any]:
    return {
        "slots": quota.slots,
        "rate": quota.rate,
        "per": quota.per,
        "burst": quota.burst,
        "fair": int(quota.fair),
    }


def _columns(gate: Gate) -> dict[str, Any]:
    return {"name": gate.limit, "key": _bytes(gate.key)}


def _gate(name: str, key: bytes) -> Gate:
    return Gate(name, _text(key))


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")  # so that different keys have different bytes


def _text(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")
