"""A model of unique keys and limits (contract, sections 18 and 19). It shares no code with any backend.

The model says what a backend may answer. Where the contract leaves a choice, for example between the keys of a fair
limit, the model checks the choice of the backend instead of making its own. Time is a number of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiq.backend import State

if TYPE_CHECKING:
    from multiq.backend import Gate, Lease, UniqueKey

LONG = 3600.0  # seconds: longer than any walk
FAIR = "t"
"""The name of the limit that is fair in fair walks. A job has at most one gate of this limit."""


class DiffersError(AssertionError):
    """The backend has given an answer that the contract does not allow."""


@dataclass
class New:
    """A job to enqueue."""

    id: str
    body: bytes
    priority: int
    delay: float
    ttr: float
    awaits: int = 0
    unique: UniqueKey | None = None
    gates: tuple[Gate, ...] = ()


@dataclass
class Limit:
    slots: int | None
    interval: float | None  # seconds between two jobs
    burst: int
    fair: bool
    pinned: bool


@dataclass
class Job:
    id: str
    body: bytes
    priority: int
    ttr: float
    gates: tuple[Gate, ...]
    key: bytes | None
    until: str
    place: int
    born: float
    state: State
    end: float  # the end of the delay or of the lease
    delay: float = 0.0  # begins when a held job is released
    missing: set[str] = field(default_factory=set)
    attempt: int = 0
    crashes: int = 0
    kicks: int = 0
    buried: int = 0  # its place among the buried jobs
    token: str = ""

    @property
    def fair_gate(self) -> Gate | None:
        return next((gate for gate in self.gates if gate.limit == FAIR), None)

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.place

    def become(self, delay: float, now: float) -> None:
        self.state, self.end, self.token = (State.DELAYED if delay > 0 else State.READY), now + delay, ""


class Model:
    """One queue."""

    def __init__(self, *, finds_late: bool = False) -> None:
        """*finds_late*: whether a job of a fair key begins to wait only when a reserve has found it."""
        self._finds_late = finds_late
        self.now = 0.0
        self.jobs: dict[str, Job] = {}
        self.limits: dict[str, Limit] = {}
        self.paused = False
        self._takers: dict[bytes, tuple[str, float]] = {}  # key -> the job that took it, and the end of its hold
        # When the next job of a gate would be due at the steady rate. While a limit is removed, a backend may forget
        # the past of its rate. The first number is for a backend that has forgotten it, the second for one that still
        # knows it.
        self._due: dict[Gate, tuple[float, float]] = {}
        self._places = self._burials = 0
        # for turns: how many reserves and leases there were when each key was last served, and when it began to wait
        self._turns = 0
        self._served: dict[Gate, int] = {}
        self._waits: dict[Gate, int] = {}

    # --- time ---

    def promote(self, now: float) -> None:
        """Let delays and leases end."""
        self.now = now
        for job in self.jobs.values():
            if job.state in {State.DELAYED, State.RESERVED} and job.end <= now:
                job.crashes += job.state is State.RESERVED
                job.become(0, now)
        self._note_waiting()

    # --- unique keys ---

    def owner(self, key: bytes) -> str | None:
        """The id of the job that has a key, or that holds it by time."""
        if key not in self._takers:
            return None
        job_id, held_until = self._takers[key]
        return job_id if held_until > self.now or self.has_key(self.jobs.get(job_id), key) else None

    def has_key(self, job: Job | None, key: bytes) -> bool:
        if job is None or job.key != key:
            return False
        if job.until == "buried":
            return job.state is not State.BURIED
        return job.until == "gone" or job.attempt == 0

    def is_taken(self, job: Job) -> bool:
        """Whether another job has the job's key."""
        return job.key is not None and self.owner(job.key) not in {None, job.id}

    def take_again(self, job: Job) -> None:
        if job.key is not None and self.owner(job.key) is None:
            self._takers[job.key] = job.id, 0.0

    # --- enqueues ---

    def enqueue(self, new: New) -> str:
        """Add a job. Returns the id that the backend must return."""
        if new.id in self.jobs:
            return new.id
        unique = new.unique
        if unique is not None:
            owner = self.owner(unique.key)
            if owner is not None:
                job = self.jobs.get(owner)
                if owner != new.id and unique.on_conflict == "replace" and self.has_key(job, unique.key):
                    assert job is not None
                    self._replace(job, new, unique)
                return owner
            self._takers[unique.key] = new.id, self.now + unique.hold if unique.hold else 0.0
        self._places += 1
        job = Job(
            new.id, new.body, new.priority, new.ttr, new.gates, unique.key if unique else None,
            unique.until if unique else "", self._places, self.now, State.HELD, 0.0, new.delay,
            {f"m{number}" for number in range(new.awaits)},
        )  # fmt: skip
        if not new.awaits:
            job.become(new.delay, self.now)
        self.jobs[new.id] = job
        self._note_waiting()
        return new.id

    def _replace(self, job: Job, new: New, unique: UniqueKey) -> None:
        if job.state not in {State.READY, State.DELAYED, State.HELD}:
            return
        self._leave_place(job)
        job.body, job.priority, job.ttr, job.gates = new.body, new.priority, new.ttr, new.gates
        job.attempt = job.crashes = job.kicks = 0
        if job.state is State.HELD:
            job.delay = new.delay
            return
        latest = LONG if unique.max_wait is None else max(0.0, job.born + unique.max_wait - self.now)
        job.become(min(new.delay, latest), self.now)
        self._note_waiting()

    def arrive(self, job_id: str, member: str) -> None:
        job = self.jobs.get(job_id)
        if job is None or job.state is not State.HELD:
            return
        job.missing.discard(member)
        if not job.missing:
            job.become(job.delay, self.now)
            self._note_waiting()

    # --- reserves ---

    def is_open(self, gate: Gate) -> bool:
        return not self.why_closed(gate)

    def is_surely_open(self, gate: Gate) -> bool:
        return not self.why_closed(gate, remembers=True)

    def why_closed(self, gate: Gate, *, remembers: bool = False) -> str:
        limit = self.limits.get(gate.limit)
        if limit is None:
            return ""
        if limit.slots is not None and self.running(gate) >= limit.slots:
            return f"all {limit.slots} slots of {gate} are in use"
        due = self._due.get(gate, (0.0, 0.0))[remembers]
        if limit.interval is not None and due - (limit.burst - 1) * limit.interval > self.now:
            return f"the rate of {gate} admits no job yet"
        return ""

    def running(self, gate: Gate) -> int:
        return sum(job.state is State.RESERVED and gate in job.gates for job in self.jobs.values())

    def begin_call(self) -> None:
        """Begin to check the leases of one reserve."""
        self._turns += 1

    def hand_out(self, lease: Lease, *, with_gates: bool) -> Job:
        """Check that the backend may hand out this job as the next one."""
        job = self.jobs.get(lease.id)
        if job is None:
            raise DiffersError(f"{_short(lease.id)} was handed out, but it is gone or was never added")
        if job.state is not State.READY:
            raise DiffersError(f"{_short(lease.id)} was handed out, but it is {job.state}")
        if self.paused:
            raise DiffersError(f"{_short(lease.id)} was handed out, but the queue is paused")
        for gate in job.gates:
            if reason := self.why_closed(gate):
                raise DiffersError(f"{_short(lease.id)} was handed out, but {reason}")
        if job.gates and not with_gates:
            raise DiffersError(f"{_short(lease.id)} was handed out, but the call may have no more jobs with gates")
        for other in self.eligible(with_gates=with_gates):
            if self._goes_before(other, job):
                raise DiffersError(f"{_short(job.id)} was handed out, but {_short(other.id)} goes before it")
        if job not in self.eligible(with_gates=with_gates, surely=False) and not self._is_behind(
            self._first_of_key(job)
        ):
            raise DiffersError(f"{_short(lease.id)} was handed out before an earlier job of its fair key")
        self._lease(job, lease.token)
        return job

    def eligible(self, *, with_gates: bool, surely: bool = True) -> list[Job]:
        """The jobs that the backend can hand out now. *surely*: without those that it may also regard as parked."""
        if self.paused:
            return []
        is_open = self.is_surely_open if surely else self.is_open
        ready = [job for job in self.jobs.values() if job.state is State.READY]
        heads: dict[Gate, tuple[int, int]] = {}
        for job in ready:
            if (gate := self._turn_gate(job)) is not None:
                heads[gate] = min(heads.get(gate, job.rank), job.rank)
        return [
            job
            for job in ready
            if (with_gates or not job.gates)
            and all(map(is_open, job.gates))
            and ((gate := self._turn_gate(job)) is None or heads[gate] == job.rank)
        ]

    def _is_behind(self, rank: tuple[int, int]) -> bool:
        """Whether a job of this rank may still wait behind a job that can be handed out (contract, 19.9)."""
        eligible = self.eligible(with_gates=True) if self._finds_late else []
        return any(other.rank < rank and self._turn_gate(other) is None for other in eligible)

    def _first_of_key(self, job: Job) -> tuple[int, int]:
        ready = [other for other in self.jobs.values() if other.state is State.READY]
        return min(other.rank for other in ready if self._turn_gate(other) == self._turn_gate(job))

    def _turn_gate(self, job: Job) -> Gate | None:
        limit = self.limits.get(FAIR)
        return job.fair_gate if limit is not None and limit.fair else None

    def _goes_before(self, other: Job, job: Job) -> bool:
        """Whether a job that could be handed out now must be handed out before another one."""
        if other is job:
            return False
        others_key, key = self._turn_gate(other), self._turn_gate(job)
        if others_key is None and key is None:
            return other.rank < job.rank
        if others_key is None or key is None or others_key == key:
            return False  # the contract does not rank the keys of a fair limit beside other jobs
        if self._is_behind(other.rank):
            return False
        if other.priority != job.priority:
            return other.priority < job.priority
        return others_key in self._waits and self._surely_ranks_before(others_key, key)

    def _surely_ranks_before(self, others_key: Gate, key: Gate) -> bool:
        """Whether the key of a fair limit is next before another one. The model knows the order of turns only for keys
        without a lease."""
        others, own = self.running(others_key), self.running(key)
        if others or own:
            return others < own
        return self._waits[others_key] < self._served.get(key, 0)

    def _lease(self, job: Job, token: str) -> None:
        for gate in set(job.gates):
            limit = self.limits.get(gate.limit)
            if limit is not None and limit.interval is not None:
                low, high = self._due.get(gate, (0.0, 0.0))
                self._due[gate] = max(low, self.now) + limit.interval, max(high, self.now) + limit.interval
        job.state, job.end, job.token = State.RESERVED, self.now + job.ttr, token
        job.attempt += 1
        self._turns += 1
        if (key := self._turn_gate(job)) is not None:
            if self._finds_late:
                found = [other for other in self.eligible(with_gates=True) if not self._is_behind(other.rank)]
                self._begin_to_wait({gate for gate in map(self._turn_gate, found) if gate is not None})
            self._served[key] = self._turns
            self._waits.pop(key, None)
        self._note_waiting()

    def _leave_place(self, job: Job) -> None:
        """A job moves, so its fair key may begin to wait again."""
        if (gate := self._turn_gate(job)) is not None:
            self._waits.pop(gate, None)

    def _note_waiting(self) -> None:
        ready = [job for job in self.jobs.values() if job.state is State.READY]
        waiting = {gate for job in ready if (gate := self._turn_gate(job)) is not None}
        for gate in self._waits.keys() - waiting:
            del self._waits[gate]
        if not self._finds_late:
            self._begin_to_wait(waiting)

    def _begin_to_wait(self, gates: set[Gate]) -> None:
        for gate in gates - self._waits.keys():
            self._waits[gate] = self._turns

    # --- verdicts ---

    def leased(self, lease: Lease) -> Job | None:
        """The job of a lease that is live."""
        job = self.jobs.get(lease.id)
        return job if job is not None and job.state is State.RESERVED and job.token == lease.token else None

    def bury(self, job: Job) -> None:
        self._burials += 1
        job.state, job.buried, job.token = State.BURIED, self._burials, ""

    def put_back(self, job: Job, delay: float) -> None:
        job.become(delay, self.now)
        self._note_waiting()

    def delete(self, job: Job) -> None:
        del self.jobs[job.id]
        self._note_waiting()

    # --- management ---

    def kick(self, job: Job) -> bool:
        """Make a job ready that is not reserved. False: another job has its key."""
        if job.state is State.BURIED:
            if self.is_taken(job):
                return False
            job.kicks += 1
            self.put_back(job, 0)
            self.take_again(job)
        elif job.state is not State.READY:
            self.put_back(job, 0)
        return True

    def kick_many(self, most: int) -> int:
        buried = sorted((job for job in self.jobs.values() if job.state is State.BURIED), key=lambda job: job.buried)
        kicked = 0
        for job in buried:
            if kicked < most:
                kicked += self.kick(job)
        return kicked

    def reschedule(self, job: Job, delay: float) -> None:
        self._places += 1
        job.place, job.born = self._places, self.now
        job.attempt = job.crashes = job.kicks = 0
        self._leave_place(job)
        self.put_back(job, delay)
        self.take_again(job)

    def limit(self, name: str, limit: Limit | None, *, pinned: bool) -> None:
        known = self.limits.get(name)
        if not pinned and known is not None and known.pinned:
            return
        if limit is None:
            self.limits.pop(name, None)
            self._due = {gate: (0.0 if gate.limit == name else low, high) for gate, (low, high) in self._due.items()}
        else:
            self.limits[name] = limit
            latest = self.now + limit.burst * (limit.interval or 0.0)
            for gate, (low, high) in self._due.items():
                if gate.limit == name:
                    self._due[gate] = min(low, latest), min(high, latest)
        if name == FAIR:
            self._served.clear()
            self._waits.clear()
        self._note_waiting()


def _short(job_id: str) -> str:
    return job_id[-4:]
