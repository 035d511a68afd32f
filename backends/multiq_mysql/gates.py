"""Gates: a key of a limit, with its leases and with the line of the jobs that wait for it.

A verdict lets the next reserve check the gates of its lease (``open_gates``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from multiq.backend import Gate
from multiq.backend.limits import fair_rank

from .records import SECOND
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Quota

    from .connection import Session

GATE_MARK = "0"
"""The first character of the token of a lease whose job has gates. ``int`` ignores this zero."""

OPEN = 0
NEVER = 2**62  # the gate does not open by itself, but a verdict or a changed quota may open it

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


class Line:
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
        self.stored = self.due, self.look_at, self.turn, None if name is None else gate_of(name, key)
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
        """Return the time at which the gate opens, in microseconds. ``OPEN``: the gate is open."""
        quota = self.quota
        if quota is None:
            return OPEN
        if quota.slots is not None and len(self.ends) >= quota.slots:
            return min(self.ends, default=NEVER)
        if quota.rate is None:
            return OPEN
        opens_at = quota.possible_due(self.due, now, SECOND) - (quota.burst - 1) * quota.interval(SECOND)
        return OPEN if opens_at <= now else min(opens_at, NEVER)

    def count(self, now: int) -> None:
        """Count a job that is handed out. The lease ends later than now. The next check of the gate finds out when the
        lease ends."""
        self.ends.append(now + SECOND)
        if self.quota is not None and self.quota.rate is not None:
            due = self.quota.possible_due(self.due, now, SECOND)
            self.due = min(max(due, now) + self.quota.interval(SECOND), NEVER)


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
    gates = sorted({gate_of(name, key) for _, name, key in rows}, key=gate_order)
    return [render_for("wake_line", queue, gate) for gate in gates]


# --- statements ------------------------------------------------------------------------------------------


def render_for(verb: str, queue: str, gate: Gate, **values: Any) -> str:
    own = {"queue": queue.encode(), "name": as_bytes(gate.limit), "key": as_bytes(gate.key)}
    return render(verb, **own, **values)


def gate_columns(queue: str, gate: Gate) -> str:
    return f"{literal(queue.encode())},{literal(as_bytes(gate.limit))},{literal(as_bytes(gate.key))}"


def gate_order(gate: Gate) -> tuple[bytes, bytes]:
    return as_bytes(gate.limit), as_bytes(gate.key)


def gate_of(name: bytes, key: bytes) -> Gate:
    return Gate(as_text(name), as_text(key))


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def as_text(kept: bytes) -> str:
    return kept.decode("utf-8", "surrogatepass")
