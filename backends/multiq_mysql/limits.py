"""Stored limits: changes of a queue's limits, and what ``limits`` returns. gated_claim.py decides which jobs may be
reserved within the limits.

A changed quota is stored with a mark. Then reserves may look at its gates, slice by slice (``go_on``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend import Gate, Quota
from multiq.backend.limits import limit_states

from .gates import NEVER, OPEN, Line, as_bytes, as_text, gate_of, gate_order, render_for
from .records import SECOND, gates_in
from .statements import Sql, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from multiq.backend import LimitState

    from .connection import Session
    from .pool import Pool

_SLICE = 200  # gates that one transaction of a change opens: some milliseconds
_AFTER_ALL = b"\xff" * 800  # comes after all keys, because no key in UTF-8 has such a byte


def change_limits(session: Session, queue: str, change: Mapping[str, Quota | None], *, pinned: bool) -> list[str]:
    """Store or remove limits. Returns the names of the changed limits.

    The jobs that wait for these limits check their gates again. The caller calls ``go_on`` for each of these limits
    until it returns True. If the process dies, the next reserve calls ``go_on``.
    """
    (found,) = session.begin(f"{render('quotas', queue=queue.encode())} FOR UPDATE")
    stored = {name: (before, is_pinned) for name, before, is_pinned in limits_in(found.rows)}
    statements: list[str] = []
    changed: list[str] = []
    for name, quota in sorted(change.items()):
        before, is_pinned = stored.get(name, (None, 0))
        if not pinned and (is_pinned or (quota is not None and before == quota)):
            continue
        own = {"queue": queue.encode(), "name": as_bytes(name)}
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
    own = {"queue": queue.encode(), "name": as_bytes(name)}
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
    quota = next((quota for stored, quota, _ in limits_in(quotas.rows) if stored == name), None)
    wait = 0 if quota is None else min(quota.burst * quota.interval(SECOND), NEVER // 2)
    latest = Sql(str(NEVER) if quota is None else f"{pool.now}+{wait}")
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
    stored = limits_in(select("quotas", queue=queue.encode()))
    if not stored:
        return []
    counts: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)

    def count(gate: Gate, running: int, parked: int) -> None:
        before = counts[gate.limit].get(gate.key, (0, 0))
        counts[gate.limit][gate.key] = before[0] + running, before[1] + parked

    for name, key, running in select("running", queue=queue.encode()):
        count(gate_of(name, key), running, 0)
    for name, key, parked in select("waiting", queue=queue.encode()):
        count(gate_of(name, key), 0, parked)
    fair = {name for name, quota, _ in stored if quota.fair}
    for text, number in select("unplaced", queue=queue.encode()):
        gates = gates_in(text)
        count(min(gates, key=lambda gate: (gate.limit not in fair, gate)), 0, number)
    return limit_states([(name, quota, bool(pinned)) for name, quota, pinned in stored], counts)


def held_by(session: Session, pool: Pool, queue: str, jobs: Mapping[int, tuple[Gate, ...]]) -> dict[int, str]:
    """For each parked job that has a closed gate, return one of its closed gates as text. The keys are the jobs' seqs.

    *jobs*: the gates of each job. The keys are the jobs' seqs.
    """
    gates = sorted({gate for own in jobs.values() for gate in own}, key=gate_order)
    now = pool.now
    found, lines, ((time,),), *replies = (
        reply.rows
        for reply in session.execute(
            render("quotas", queue=queue.encode()),
            render("in_lines", seqs=sorted(jobs)),
            render("now", now=now),
            *(render_for("leased", queue, gate, now=now) for gate in gates),
            *(render_for("rate", queue, gate, now=now) for gate in gates),
        )
    )
    quotas = {name: quota for name, quota, _ in limits_in(found)}
    closed: set[Gate] = set()
    for gate, leased, rates in zip(gates, replies, replies[len(gates) :], strict=False):
        line = Line(gate, quotas.get(gate.limit))
        line.ends = [left for *_, left in leased if left is not None and left > 0]
        line.due = next((time + left for (left,) in rates), 0)
        if line.opens_at(time) != OPEN:
            closed.add(gate)
    first = {seq: gate_of(name, key) for seq, name, key in lines}
    answers = {}
    for seq, own in jobs.items():
        ordered = (first[seq], *own) if seq in first else own
        found_closed = next((gate for gate in ordered if gate in closed), None)
        if found_closed is not None:
            answers[seq] = str(found_closed)
    return answers


def limits_in(rows: Iterable[Any]) -> list[tuple[str, Quota, int]]:
    """Return the names, the quotas and the marks of pinned limits, from rows of quotas.sql."""
    return [(as_text(name), msgspec.json.decode(quota, type=Quota), pinned) for name, quota, pinned in rows]
