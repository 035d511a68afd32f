"""A model of plain verbs and effects (contract, sections 1 to 10, 12 to 16, 18). It shares no code with any backend.

The model says what a backend may answer. Where the contract leaves a choice, the model checks the choice of the backend
instead of making its own. Time is a number of seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from soak.limit_model import DiffersError

from multiq.backend import Abandon, Ack, Arrive, Bury, Drop, Enqueue, GiveBack, Put, Release, State, Touch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import After, Gate, Lease, NewJob, OutcomeKind, Step, UniqueKey, Verdict, Version

LONG = 3600.0  # seconds: longer than any walk


@dataclass
class Job:
    id: str
    body: bytes
    priority: int
    ttr: float
    place: int
    born: float
    delay: float
    """Begins when a held job is released."""
    awaits: int
    unique: UniqueKey | None
    gates: tuple[Gate, ...]
    state: State = State.HELD
    end: float = 0.0
    """The end of the delay or of the lease."""
    members: set[str] = field(default_factory=set)
    attempt: int = 0
    crashes: int = 0
    kicks: int = 0
    reason: str | None = None
    memo: bytes = b""
    detail: bytes = b""
    doomed: str = ""
    buried: int = 0
    """Its place among the buried jobs."""
    token: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        return self.priority, self.place

    def become(self, delay: float, now: float) -> None:
        self.state, self.end, self.token = (State.DELAYED if delay > 0 else State.READY), now + delay, ""
        self.awaits = 0


@dataclass
class Kept:
    """A kept outcome."""

    kind: OutcomeKind
    body: bytes
    attempt: int
    at: float
    end: float


@dataclass
class Noted:
    value: bytes
    end: float | None
    version: str | None = None
    """None: the walk has not read this version yet."""


class Queue:
    """The jobs and outcomes of one queue, and the notes whose home it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: dict[str, Job] = {}
        self.outcomes: dict[str, Kept] = {}
        self.notes: dict[str, Noted] = {}
        self.versions: dict[str, set[str]] = {}
        """All versions that the walk has seen of each key."""
        self.takers: dict[bytes, tuple[str, float]] = {}
        """The job that took each unique key last, and the end of its hold."""
        self.slots: dict[str, int] = {}
        """The slots of each limit. A limit that is not stored has no bound."""
        self.paused_until = 0.0
        # How many expired outcomes are still stored. The contract says how many an ack deletes at most, and it does not
        # say which ones.
        self.fewest_expired = self.most_expired = 0

    def ready(self) -> list[Job]:
        """The ready jobs, in their order."""
        return sorted((job for job in self.jobs.values() if job.state is State.READY), key=lambda job: job.rank)

    def is_open(self, job: Job) -> bool:
        """Whether all gates of a job are open."""
        running = [one.gates for one in self.jobs.values() if one.state is State.RESERVED]
        return all(
            gate.limit not in self.slots or sum(gate in gates for gates in running) < self.slots[gate.limit]
            for gate in job.gates
        )

    def buried(self) -> list[Job]:
        return sorted((job for job in self.jobs.values() if job.state is State.BURIED), key=lambda job: job.buried)


class Model:
    """A store.

    - *steps_later*: the backend lacks ``one_step_everywhere``.
    - *ranks*: it has ``total_order``. Without it, steps in the verdict's own queue may be later, too.
    """

    def __init__(self, queues: Sequence[str], *, steps_later: bool, ranks: bool = True) -> None:
        self._steps_later, self._ranks = steps_later, ranks
        self.now = 0.0
        self.queues = {name: Queue(name) for name in queues}
        self._places = self._burials = 0
        self._tokens: set[tuple[str, str, str]] = set()
        self.late: set[tuple[str, str]] = set()
        """The jobs that steps in other queues may have made ready after the reserve of an exchange."""

    # --- time ---

    def promote(self, now: float) -> None:
        """Let delays, leases, outcomes and notes end."""
        self.now = now
        for queue in self.queues.values():
            for job in queue.jobs.values():
                if job.state in {State.DELAYED, State.RESERVED} and job.end <= now:
                    job.crashes += job.state is State.RESERVED
                    job.become(0, now)
            for job_id in [job_id for job_id, kept in queue.outcomes.items() if kept.end <= now]:
                del queue.outcomes[job_id]
                queue.fewest_expired += 1
                queue.most_expired += 1
            for key in [key for key, note in queue.notes.items() if note.end is not None and note.end <= now]:
                del queue.notes[key]

    # --- enqueues ---

    def enqueue(self, name: str, new: NewJob) -> str:
        """Add a job. Returns the id that the backend must return."""
        queue = self.queues[name]
        if new.id in queue.jobs:
            return new.id
        unique = new.terms.unique if new.terms is not None else None
        if unique is not None:
            owner = self.owner(queue, unique.key)
            if owner is not None:
                job = queue.jobs.get(owner)
                if (
                    owner != new.id
                    and job is not None
                    and unique.on_conflict == "replace"
                    and _has_key(job, unique.key)
                ):
                    self._replace(job, new, unique)
                return owner
            queue.takers[unique.key] = new.id, self.now + unique.hold
        self._places += 1
        awaits = new.terms.awaits if new.terms is not None else 0
        gates = new.terms.gates if new.terms is not None else ()
        job = Job(new.id, new.body, new.priority, new.ttr, self._places, self.now, new.delay, awaits, unique, gates)
        if not awaits:
            job.become(new.delay, self.now)
        queue.jobs[new.id] = job
        return new.id

    def _replace(self, job: Job, new: NewJob, unique: UniqueKey) -> None:
        if job.state not in {State.READY, State.DELAYED, State.HELD}:
            return
        job.body, job.priority, job.ttr = new.body, new.priority, new.ttr
        job.gates = new.terms.gates if new.terms is not None else ()
        _start_over(job)
        if job.state is State.HELD:
            job.delay = new.delay
            return
        latest = new.delay if unique.max_wait is None else max(0.0, job.born + unique.max_wait - self.now)
        job.become(min(new.delay, latest), self.now)

    # --- unique keys ---

    def owner(self, queue: Queue, key: bytes) -> str | None:
        """The id of the job that has a key, or that holds it by time."""
        job_id, held_until = queue.takers.get(key, ("", 0.0))
        job = queue.jobs.get(job_id)
        return job_id if held_until > self.now or (job is not None and _has_key(job, key)) else None

    def is_taken(self, queue: Queue, job: Job) -> bool:
        """Whether another job has the job's key."""
        return job.unique is not None and self.owner(queue, job.unique.key) not in {None, job.id}

    def _take_again(self, queue: Queue, job: Job) -> None:
        if job.unique is not None and self.owner(queue, job.unique.key) is None:
            queue.takers[job.unique.key] = job.id, 0.0

    # --- reserves ---

    def eligible(self, order: Iterable[str]) -> list[tuple[Queue, Job]]:
        """The jobs that a reserve of these queues hands out, in this order."""
        queues = [self.queues[name] for name in order]
        return [
            (queue, job)
            for queue in queues
            if queue.paused_until <= self.now
            for job in queue.ready()
            if queue.is_open(job)
        ]

    def hand_out(self, lease: Lease, order: Iterable[str]) -> Job:
        """Check that the backend may hand out this job as the next one."""
        job = self.queues[lease.queue].jobs.get(lease.id)
        what = f"{lease.id} of queue {lease.queue[-1]} was handed out, but"
        if job is None:
            raise DiffersError(f"{what} it is gone or was never added")
        if job.state is not State.READY:
            raise DiffersError(f"{what} it is {job.state}")
        if (lease.queue, lease.id, lease.token) in self._tokens:
            raise DiffersError(f"{what} its token is that of an earlier lease")
        eligible = self.eligible(order)
        if not any(one is job for _, one in eligible):
            raise DiffersError(f"{what} its queue is paused, a gate is closed, or the call does not have this queue")
        for queue, other in eligible:
            if other is job:
                break
            is_ranked = self._ranks or queue.name != lease.queue
            if is_ranked and (queue.name, other.id) not in self.late:
                raise DiffersError(f"{what} {other.id} of queue {queue.name[-1]} goes before it")
        job.state, job.end, job.token = State.RESERVED, self.now + job.ttr, lease.token
        self._tokens.add((lease.queue, lease.id, lease.token))
        job.attempt += 1
        return job

    # --- verdicts ---

    def leased(self, lease: Lease) -> Job | None:
        """The job of a lease that is live."""
        job = self.queues[lease.queue].jobs.get(lease.id)
        return job if job is not None and job.state is State.RESERVED and job.token == lease.token else None

    def settle(self, verdicts: Sequence[Verdict]) -> list[bool]:
        """Apply verdicts with their steps. Returns which of them are accepted."""
        answers: list[bool] = []
        later: list[Step] = []
        for verdict in verdicts:
            job = self.leased(verdict.lease)
            answers.append(job is not None)
            name = verdict.lease.queue
            if job is None:
                if isinstance(verdict, Ack) and verdict.after is not None and verdict.after.keep > 0:
                    self._may_drop(self.queues[name], 2)  # a refused ack may delete expired outcomes, too
                continue
            self._apply(verdict, self.queues[name], job)
            after = None if isinstance(verdict, Abandon) else verdict.after
            for step in after.steps if after is not None else ():
                if self._steps_later and (home_of(step) != name or not self._ranks):
                    later.append(step)
                else:
                    self.step(step)
        self._carry_out_later(later)
        return answers

    def _carry_out_later(self, steps: Sequence[Step]) -> None:
        before = self._ready_now()
        for step in steps:
            self.step(step)
        self.late = self._ready_now() - before

    def _ready_now(self) -> set[tuple[str, str]]:
        return {(queue.name, job.id) for queue in self.queues.values() for job in queue.ready()}

    def _apply(self, verdict: Verdict, queue: Queue, job: Job) -> None:
        match verdict:
            case Ack(after=after):
                del queue.jobs[job.id]
                self.keep(queue, job, after)
                if after is not None and after.keep > 0 and self._ranks:  # a partition drops only its own outcomes
                    queue.most_expired = max(0, queue.most_expired - 2)
            case Release(delay=delay, priority=priority, reason=reason, after=after):
                job.priority = job.priority if priority is None else priority
                job.reason, job.detail = reason, (after.detail or b"") if after else b""
                _store_memo(job, after)
                job.become(delay, self.now)
            case Bury(reason=reason, after=after):
                job.reason, job.detail = reason, (after.detail or b"") if after else b""
                _store_memo(job, after)
                self._burials += 1
                job.state, job.buried, job.token = State.BURIED, self._burials, ""
            case Touch(after=after):
                _store_memo(job, after)
                job.end = self.now + job.ttr
            case GiveBack(delay=delay, after=after):
                _store_memo(job, after)
                job.attempt -= 1
                job.become(delay, self.now)
            case Abandon(reason=reason):
                job.reason, job.detail = reason, b""
                job.crashes += 1
                job.become(0, self.now)

    def keep(self, queue: Queue, job: Job, after: After | None) -> None:
        """Keep the outcome of a job that is gone."""
        if after is not None and after.keep > 0:
            queue.outcomes[job.id] = Kept(after.kind, after.outcome, job.attempt, self.now, self.now + after.keep)
            self._may_drop(queue, 3)  # it may replace an expired outcome, and it deletes up to two others

    def _may_drop(self, queue: Queue, most: int) -> None:
        queue.fewest_expired = max(0, queue.fewest_expired - most)

    # --- steps ---

    def carry_out(self, steps: Sequence[Step], when: Sequence[Version]) -> bool:
        for condition in when:
            note = self.queues[condition.home].notes.get(condition.key)
            if condition.version != ("" if note is None else note.version):
                return False
        for step in steps:
            self.step(step)
        return True

    def step(self, step: Step) -> None:
        match step:
            case Enqueue(queue=name, job=new):
                self.enqueue(name, new)
            case Arrive():
                self._arrive(step)
            case Put(home=home, key=key, value=value, ttl=ttl):
                self.queues[home].notes[key] = Noted(value, None if ttl is None else self.now + ttl)
            case Drop(home=home, key=key):
                self.queues[home].notes.pop(key, None)

    def _arrive(self, step: Arrive) -> None:
        job = self.queues[step.queue].jobs.get(step.id)
        if job is None or job.state is not State.HELD:
            return
        if step.doom:
            job.doomed = step.doom
            job.become(0, self.now)
        elif step.member not in job.members:
            job.members.add(step.member)
            job.awaits += step.expect - 1
            if not job.awaits:
                job.become(job.delay, self.now)

    # --- management ---

    def kick(self, queue: Queue, job: Job) -> bool:
        """Make a job ready that is not reserved. Returns False if another job has its key."""
        is_buried = job.state is State.BURIED
        if is_buried and self.is_taken(queue, job):
            return False
        job.kicks += is_buried
        job.become(0, self.now)
        if is_buried:
            self._take_again(queue, job)
        return True

    def kick_many(self, queue: Queue, most: int) -> int:
        kicked = 0
        for job in queue.buried():
            if kicked < most:
                kicked += self.kick(queue, job)
        return kicked

    def reschedule(self, queue: Queue, job: Job, delay: float) -> None:
        self._places += 1
        job.place, job.born = self._places, self.now
        _start_over(job)
        job.become(delay, self.now)
        self._take_again(queue, job)


def home_of(step: Step) -> str:
    """The queue of a step."""
    return step.home if isinstance(step, Put | Drop) else step.queue


def _store_memo(job: Job, after: After | None) -> None:
    if after is not None and after.memo is not None:
        job.memo = after.memo


def _start_over(job: Job) -> None:
    job.attempt = job.crashes = job.kicks = 0
    job.reason, job.memo, job.detail, job.doomed = None, b"", b"", ""


def _has_key(job: Job, key: bytes) -> bool:
    """Whether a job has a key, unless another job has taken the key."""
    if job.unique is None or job.unique.key != key:
        return False
    if job.unique.until == "buried":
        return job.state is not State.BURIED
    return job.unique.until == "gone" or job.attempt == 0
