"""The memory backend: the contract as an executable specification, and a real queue inside one process.

====================  ======================================================================  =================
guarantee             how                                                                     cost
====================  ======================================================================  =================
atomic calls          one lock around each                                                    one call at a time
priority, then age    a heap ordered by (priority, sequence); a job keeps its sequence        O(log n)
never early           a heap of due times, checked before every call                          O(log n)
one live lease        a token per reservation, compared on every settle                       O(1)
waiting               a condition, notified by every call that can make a job ready           none while idle
====================  ======================================================================  =================

Tests compare every other backend with this one, so clear code is more important here than fast code.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from multiq.backend import check_state, check_states
from multiq.driverkit.clock import SECOND, nanoseconds
from multiq.driverkit.fork import forks
from multiq.errors import JobHeld, JobNotFound, JobReserved, LeaseLost, UniqueTaken

from .base import Consumer, Holds, Inspection, Limits, Management, Notes, Outcomes, Pausing, Purging
from .capabilities import Capabilities, Gap
from .effects import Arrive, Enqueue
from .memory_limits import KeptLimits, Lines
from .memory_notes import KeptNotes
from .memory_outcomes import KeptOutcome, KeptOutcomes
from .memory_unique import TakenKey, UniqueKeys, has_key
from .types import Abandon, Ack, Bury, GiveBack, JobRecord, Lease, Page, QueueStats, Release, State, Touch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

    from .effects import After, Note, NotePage, Outcome, OutcomeKind, OutcomePage, Step, Version
    from .limits import Gate, LimitState, Quota
    from .types import NewJob, Verdict
    from .unique import UniqueKey

_LONGEST_SLEEP = 1.0  # seconds: if the expected next due time is wrong, a job is at most this late
_PINNED_SLEEP = 0.005  # seconds: when a test moves a clock by hand, no waiting thread is notified
_STALE_KEPT = 64  # stale entries that a heap may have in addition to one for each job

_sharing = threading.Lock()
"""Held while a named store is looked up or made. ``setdefault`` of a weak dictionary could make two stores."""

forks.hold(_sharing)  # a fork while another thread holds the lock would leave it locked in the child


class Job:
    """A job as the store holds it.

    The meaning of ``due_at`` depends on the state. DELAYED: the time at which the job is due. RESERVED: the time at
    which its lease ends. BURIED: its place among the buried jobs.
    """

    __slots__ = (
        "arrived", "attempt", "awaits", "body", "crashes", "delay", "detail", "doomed", "due_at", "enqueued_at",
        "gates", "id", "kicks", "memo", "outcome", "parked", "priority", "reason", "sequence", "stamp", "state",
        "token", "ttr", "unique",
    )  # fmt: skip

    def __init__(self, new: NewJob) -> None:
        self.id = new.id
        self.body = new.body
        self.priority = new.priority
        self.ttr = new.ttr
        self.state = State.READY
        self.token: str | None = None
        self.reason: str | None = None
        self.outcome: KeptOutcome | None = None
        """The outcome that is kept when the job is GONE. After an asynchronous exception, ``mend`` stores it."""
        self.awaits = new.terms.awaits if new.terms is not None else 0
        """The number of arrivals that a held job still waits for."""
        self.arrived: set[str] = set()
        self.gates = new.terms.gates if new.terms is not None else ()
        self.parked: Gate | None = None
        """The gate in whose line a ready job waits. None: it waits in no line."""
        self.delay = new.delay
        """Seconds of delay that begin when the job is no longer held."""
        self.unique = new.terms.unique if new.terms is not None else None
        self.due_at = 0
        self.stamp = 0  # counts this job's moves; a heap entry with an older stamp is stale
        self.start_over(sequence=0, now=0)

    def start_over(self, sequence: int, now: int) -> None:
        self.sequence = sequence  # age: lower was enqueued earlier
        self.enqueued_at = now
        self.forget_runs()

    def forget_runs(self) -> None:
        """Delete everything that earlier reservations have stored with the job."""
        self.attempt = self.crashes = self.kicks = 0
        self.memo = self.detail = b""
        self.reason = None
        self.doomed = ""

    def values(self) -> tuple[Any, ...]:
        """Return all values that a verdict, a reschedule or a replacing enqueue may change."""
        return (
            self.priority, self.sequence, self.state, self.due_at, self.token, self.enqueued_at, self.attempt,
            self.crashes, self.kicks, self.reason, self.memo, self.detail, self.doomed, self.awaits,
            self.arrived, self.body, self.ttr, self.delay, self.gates,
        )  # fmt: skip

    def restore(self, values: tuple[Any, ...]) -> None:
        (
            self.priority, self.sequence, self.state, self.due_at, self.token, self.enqueued_at, self.attempt,
            self.crashes, self.kicks, self.reason, self.memo, self.detail, self.doomed, self.awaits,
            self.arrived, self.body, self.ttr, self.delay, self.gates,
        ) = values  # fmt: skip


class JobQueue:
    """One queue's jobs and their moves. This class has no lock: callers hold the store's lock around each call."""

    lines_class: type[Lines] = Lines

    def __init__(
        self,
        name: str,
        sequence: itertools.count[int],
        outcomes: KeptOutcomes,
        unique_keys: UniqueKeys,
        limits: KeptLimits,
    ) -> None:
        self.name = name
        self.outcomes = outcomes
        self.unique_keys = unique_keys
        self.lines = self.lines_class(limits)
        self.jobs: dict[str, Job] = {}
        self.paused_until = 0
        self.is_whole = True
        """False while jobs are moved. If it is False at the beginning of a call, an asynchronous exception has
        interrupted a move."""
        self._incoming: list[str] = []  # the ids that a batch has added so far
        self._before: tuple[Job, tuple[Any, ...]] | None = None  # a job that is changed now, and its values before
        self._arriving = ""  # the member whose arrival is counted now
        self._ready: list[tuple[int, int, int, Job]] = []  # priority, sequence, stamp
        self._timed: list[tuple[int, int, int, Job]] = []  # due_at, sequence, stamp
        self._sequence = sequence

    # --- moves ---

    def add_all(self, batch: Sequence[NewJob], now: int) -> list[str]:
        """Add the whole batch.

        If an asynchronous exception (Ctrl-C, a time limit) interrupts the call, ``mend`` removes the part that was
        added.
        """
        self.is_whole = False
        ids: list[str] = []
        for new in batch:
            if new.id not in self.jobs:
                self._incoming.append(new.id)
            ids.append(self.add(new, now))
        self._incoming = []
        self.is_whole = True
        return ids

    def begin(self, job: Job) -> None:
        """Begin to change a job in several places. If an exception is raised before ``end`` is called, ``mend`` undoes
        the change."""
        self.is_whole = False
        self._before = job, job.values()

    def end(self) -> None:
        self._before = None
        self.is_whole = True

    def mend(self) -> bool:
        """Repair the queue after an asynchronous exception (Ctrl-C, a time limit).

        Removes an incomplete batch, undoes an incomplete change of a job, and completes the removal of a job. Rebuilds
        the heaps. Returns whether a change of one job was undone.
        """
        is_undone = False
        if self._before is not None:
            job, values = self._before
            if job.state is not State.GONE:
                job.restore(values)
                job.arrived.discard(self._arriving)
                is_undone = True
            self._before = None
        for job_id in self._incoming:
            self.jobs.pop(job_id, None)
            self.unique_keys.give_up(self.name, job_id)
        self._incoming = []
        for job in self.jobs.values():
            if job.state is State.GONE and job.outcome is not None:
                self.outcomes.keep(self.name, job.outcome)
        self.jobs = {job.id: job for job in self.jobs.values() if job.state is not State.GONE}
        self._ready, self._timed = [], []
        self.lines.clear()
        for job in self.jobs.values():
            self._move(job, job.state, job.due_at)
        self.is_whole = True
        return is_undone

    def add(self, new: NewJob, now: int) -> str:
        """Add a job. Returns its id, or the id of the job that has its unique key."""
        if new.id not in self.jobs:
            unique = new.terms.unique if new.terms is not None else None
            if unique is not None:
                taken = self.taken(unique.key, now)
                if taken is not None and taken.id != new.id:
                    owner = self.jobs.get(taken.id)
                    if unique.on_conflict == "replace" and owner is not None and has_key(owner, unique.key):
                        self.replace(owner, new, unique, now)
                    return taken.id
                if taken is not None:  # a repetition: the job was added, and is gone
                    return new.id
            job = self.jobs[new.id] = Job(new)
            job.start_over(self.next_sequence(), now)
            if job.awaits > 0:
                self._move(job, State.HELD, 0)
            else:
                self.make_due(job, new.delay, now)
            if unique is not None:
                held_until = now + nanoseconds(unique.hold) if unique.hold > 0 else 0
                self.unique_keys.take(self.name, unique.key, TakenKey(new.id, held_until), self.jobs, now)
        return new.id

    def taken(self, key: bytes, now: int) -> TakenKey | None:
        """Return the job that has a unique key. None: no job has the key, so the next job may take it."""
        taken = self.unique_keys.find(self.name, key)
        if taken is None or (taken.held_until <= now and not has_key(self.jobs.get(taken.id), key)):
            return None
        return taken

    def replace(self, job: Job, new: NewJob, unique: UniqueKey, now: int) -> None:
        """Replace a job's data by the data of another enqueue. The job has not started, or waits for its next
        attempt."""
        if job.state not in {State.READY, State.DELAYED, State.HELD}:
            return
        delay = new.delay
        if unique.max_wait is not None:
            delay = min(delay, max(0.0, unique.max_wait - (now - job.enqueued_at) / SECOND))
        self.begin(job)
        if job.parked is not None:
            self.lines.look_at(job.parked)  # The next job of the line may have other gates than this job.
        job.forget_runs()
        job.body, job.priority, job.ttr = new.body, new.priority, new.ttr
        job.gates = new.terms.gates if new.terms is not None else ()
        if job.state is State.HELD:
            job.delay = new.delay
        else:
            self.make_due(job, delay, now)
        self._before = None  # not end(): the batch of the enqueue is not complete yet

    def may_start_over(self, job: Job, now: int) -> bool:
        """Whether no other job has the job's unique key."""
        taken = None if job.unique is None else self.taken(job.unique.key, now)
        return taken is None or taken.id == job.id

    def take_again(self, job: Job, now: int) -> None:
        """Take the unique key of a job that is kicked or rescheduled. ``may_start_over`` has returned True."""
        if job.unique is not None and self.taken(job.unique.key, now) is None:
            self.unique_keys.take(self.name, job.unique.key, TakenKey(job.id, 0), self.jobs, now)

    def arrive(self, step: Arrive, now: int) -> None:
        """Count the first arrival of a member at a held job, and release the job after the last arrival."""
        job = self.jobs.get(step.id)
        if job is None or job.state is not State.HELD:
            return
        if not step.doom and step.member in job.arrived:
            return
        self._arriving = step.member
        self.begin(job)
        if step.doom:
            job.doomed = step.doom
            self.make_ready(job)
        else:
            job.awaits += step.expect - 1
            job.arrived.add(step.member)
            if job.awaits <= 0:
                self.make_due(job, job.delay, now)
        self.end()

    def promote(self, now: int) -> None:
        """Make ready the jobs that are due, and the jobs whose lease has ended."""
        self.lines.promote(now)
        if not self._timed or self._timed[0][0] > now:
            return
        self.is_whole = False
        while self._timed and self._timed[0][0] <= now:
            *_, stamp, job = heapq.heappop(self._timed)
            if job.stamp == stamp:
                self.make_ready(job, crashed=job.state is State.RESERVED)
        self.is_whole = True

    def take(self, now: int, token: str, *, with_gates: bool = True) -> Job | None:
        """Reserve the best ready job, with a lease that begins now. Returns None if no job is ready, or if the queue is
        paused.

        *with_gates*: whether the job may have gates.
        """
        if self.paused_until > now:
            return None
        self.is_whole = False
        job = self._best(now, with_gates=with_gates)
        if job is not None:
            job.attempt += 1
            job.token = token
            self.extend(job, now)
        self.is_whole = True
        return job

    def _best(self, now: int, *, with_gates: bool) -> Job | None:
        """Remove the best ready job from the heap, or from a line."""
        while True:
            while self._ready and self._ready[0][2] != self._ready[0][3].stamp:
                heapq.heappop(self._ready)
            in_line = self.lines.best(now) if with_gates else None
            if in_line is None or (self._ready and self._ready[0][:2] < in_line[0]):
                return heapq.heappop(self._ready)[3] if self._ready else None
            if (job := self.lines.take(in_line[1], now)) is not None:
                return job

    def kick(self, job: Job, now: int) -> bool:
        """Make a job ready. Returns False, and changes nothing, if the job is buried and another job has taken its
        unique key."""
        is_buried = job.state is State.BURIED
        if is_buried and not self.may_start_over(job, now):
            return False
        self.is_whole = False
        job.kicks += is_buried
        self.make_ready(job)
        self.is_whole = True
        if is_buried:
            self.take_again(job, now)
        return True

    def make_due(self, job: Job, delay: float, now: int) -> None:
        if delay > 0:
            self._move(job, State.DELAYED, now + nanoseconds(delay))
        else:
            self.make_ready(job)

    def make_ready(self, job: Job, *, crashed: bool = False) -> None:
        job.crashes += crashed
        self._move(job, State.READY, 0)

    def bury(self, job: Job) -> None:
        self._move(job, State.BURIED, self.next_sequence())

    def remove(self, job: Job, outcome: KeptOutcome | None = None) -> None:
        self.is_whole = False
        job.outcome = outcome
        self._move(job, State.GONE, 0)
        if job.unique is not None:
            self.unique_keys.leave(self.name, job.unique.key, job.id)
        if outcome is not None:
            self.outcomes.keep(self.name, outcome)
        del self.jobs[job.id]
        job.body = job.memo = job.detail = b""
        job.reason = job.outcome = None  # a stale heap entry may keep the job in memory, but not its data
        self.is_whole = True

    def _move(self, job: Job, state: State, due_at: int) -> None:
        if job.gates:
            self.lines.end_lease(job)
            if state is State.RESERVED:
                self.lines.lease(job)
        job.state, job.due_at, job.parked = state, due_at, None
        job.stamp += 1
        if state is not State.RESERVED:
            job.token = None
        if state is not State.HELD:
            job.awaits = 0
            job.arrived = set()
        if state is State.READY and job.gates:
            self.lines.park(job)
        elif state is State.READY:
            heapq.heappush(self._ready, (job.priority, job.sequence, job.stamp, job))
        elif state in {State.DELAYED, State.RESERVED}:
            heapq.heappush(self._timed, (due_at, job.sequence, job.stamp, job))
        most = 2 * len(self.jobs) + _STALE_KEPT
        if len(self._ready) > most:
            self._ready = _without_stale(self._ready)
        if len(self._timed) > most:
            self._timed = _without_stale(self._timed)

    def extend(self, job: Job, now: int) -> None:
        """Let the job's lease end a full ttr from now."""
        self._move(job, State.RESERVED, now + nanoseconds(job.ttr))

    # --- questions ---

    def next_sequence(self) -> int:
        return next(self._sequence)

    def held(self, lease: Lease) -> Job | None:
        """Return the job of this lease. None: the lease is not the job's live lease any more."""
        job = self.jobs.get(lease.id)
        return job if job is not None and job.token == lease.token else None

    def unreserved(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        if job is None:
            raise JobNotFound(self.name, job_id)
        if job.state is State.RESERVED:
            raise JobReserved(self.name, job_id)
        return job

    def next_change_at(self, now: int) -> int | None:
        """Return the time at which the next delay, lease or pause ends. At that time, a job may become reservable.
        None: never."""
        if self.paused_until > now:
            return self.paused_until
        changes = [at for at in (self._timed[0][0] if self._timed else None, self.lines.next_change_at()) if at]
        return min(changes, default=None)

    def listing(self, state: State) -> list[tuple[str, Job]]:
        """The jobs in a state, in order, each with a cursor. A cursor is the job's place in the listing, as text."""
        found = [job for job in self.jobs.values() if job.state is state]
        if state is State.READY:
            keys = [(job.priority, job.sequence, job) for job in found]
        else:
            keys = [(job.due_at, job.sequence, job) for job in found]
        keys.sort(key=lambda key: key[:2])
        return [(f"{major:020}.{minor:020}", job) for major, minor, job in keys]


def _without_stale(heap: list[tuple[int, int, int, Job]]) -> list[tuple[int, int, int, Job]]:
    """Remove the stale entries from the heap. An entry is stale if its job has moved since the entry was made.

    If stale entries stayed, they would keep jobs in memory after the jobs are gone.
    """
    live = [entry for entry in heap if entry[2] == entry[3].stamp]
    heapq.heapify(live)
    return live


class Store:
    """Everything that backends of one name share: the queues, the lock, and the condition on which consumers wait."""

    queue_class: type[JobQueue] = JobQueue
    outcomes_class: type[KeptOutcomes] = KeptOutcomes

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.epoch = time.time_ns() - clock() if clock is time.monotonic_ns else 0
        """Nanoseconds between 1970 and the clock's zero."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._sequence = itertools.count(1)
        self._queues: dict[str, JobQueue] = {}
        self.outcomes = self.outcomes_class()
        self.unique_keys = UniqueKeys()
        self.notes = KeptNotes()
        self._limits: dict[str, KeptLimits] = {}
        self.unfinished: tuple[JobQueue | None, Sequence[Step], int] | None = None
        """The steps that are carried out now: the queue of their verdict, the steps, and the time.

        The queue is None if the verdict is already carried out, or if the steps have no verdict. If an asynchronous
        exception interrupts the steps, ``finish`` carries out the rest.
        """

    def queue(self, name: str, now: int) -> JobQueue:
        """The queue as it is at the time *now*. A new queue is not stored until ``keep`` is called."""
        self.finish()
        queue = self._queue(name, now)
        self.forget_if_empty(queue, now)
        return queue

    def _queue(self, name: str, now: int) -> JobQueue:
        queue = self._queues.get(name)
        if queue is None:
            return self.queue_class(name, self._sequence, self.outcomes, self.unique_keys, self.limits(name))
        if not queue.is_whole:
            queue.mend()
        queue.promote(now)
        return queue

    def keep(self, queue: JobQueue) -> None:
        """Store the queue, because it holds a job or is paused from now on."""
        self._queues[queue.name] = queue

    def forget_if_empty(self, queue: JobQueue, now: int) -> None:
        """Delete the queue from the store if it has no jobs and is not paused."""
        if not queue.jobs and queue.paused_until <= now and self._queues.get(queue.name) is queue:
            del self._queues[queue.name]

    def carry_out(self, steps: Sequence[Step], now: int) -> None:
        """Carry out steps. The caller has already carried out their verdict, if there is one."""
        self.unfinished = None, steps, now
        self._carry_out(steps, now)
        self.unfinished = None

    def finish(self) -> None:
        """Carry out the steps that an asynchronous exception has interrupted.

        A step that was carried out before the exception changes nothing now. If the verdict of the steps is undone,
        none of them is carried out.
        """
        if self.unfinished is None:
            return
        queue, steps, now = self.unfinished
        if queue is None or queue.is_whole or not queue.mend():
            self._carry_out(steps, now)
        self.unfinished = None

    def _carry_out(self, steps: Sequence[Step], now: int) -> None:
        for step in steps:
            if isinstance(step, Enqueue):
                queue = self._queue(step.queue, now)
                queue.add_all([step.job], now)
                self.keep(queue)
            elif isinstance(step, Arrive):
                self._queue(step.queue, now).arrive(step, now)
            else:
                self.notes.change(step, now)

    def limits(self, name: str) -> KeptLimits:
        """The limits of a queue. The limits are kept even while the queue has no jobs."""
        kept = self._limits.get(name)
        return KeptLimits() if kept is None else kept

    def change_limits(self, name: str, change: Mapping[str, Quota | None], *, pinned: bool, now: int) -> None:
        kept = self._limits.setdefault(name, self.limits(name))
        kept.change(change, now, pinned=pinned)
        queue = self.queue(name, now)
        queue.lines.kept = kept
        queue.lines.look_at_all()
        if not kept.stored and not queue.jobs:
            del self._limits[name]

    def names(self, now: int) -> list[str]:
        self.finish()
        for queue in list(self._queues.values()):
            self.forget_if_empty(queue, now)
        return sorted(self._queues)


class MemoryJobs(Inspection, Management, Pausing, Purging):
    """The memory backend without outcomes, steps and notes, for tests of backends that lack them."""

    store_class: ClassVar[type[Store]] = Store

    _shared: ClassVar[weakref.WeakValueDictionary[str, Store]] = weakref.WeakValueDictionary()

    def __init__(self, *, name: str = "", clock: Clock = time.monotonic_ns) -> None:
        self.name = name
        if name:
            with _sharing:
                self._store = self._shared.setdefault(name, self.store_class(clock))
        else:
            self._store = self.store_class(clock)

    @classmethod
    def from_url(cls, url: BackendUrl) -> Self:
        return cls(name=url.host or "")

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        if connection is not None:
            raise self.unsupported("transactional_enqueue")
        store = self._store
        with store.lock:
            now = store.clock()
            held = store.queue(queue, now)
            ids = held.add_all(jobs, now)
            if ids:
                store.keep(held)
            store.changed.notify_all()
        return ids

    def consumer(self, queues: Sequence[str]) -> MemoryConsumer:
        return MemoryConsumer(self._store, queues)

    def peek(self, queue: str, job_id: str) -> JobRecord:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            job = held.jobs.get(job_id)
            if job is None:
                raise JobNotFound(queue, job_id)
            return _record(held, job, now)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            places = held.listing(state)
            if after is not None:
                places = [place for place in places if place[0] > after]
            found = [_record(held, job, now) for _, job in places[:limit]]
            more = len(places) > limit
        return Page(found, places[limit - 1][0] if more else None)

    def delete(self, queue: str, job_id: str) -> None:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            held.remove(held.unreserved(job_id))
            self._store.forget_if_empty(held, now)

    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        if after is not None and after.keep > 0 and not self.declared.outcomes:
            raise self.unsupported("outcomes")
        answers: list[JobNotFound | JobReserved | None] = []
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            for job_id in ids:
                try:
                    job = held.unreserved(job_id)
                except (JobNotFound, JobReserved) as exc:
                    answers.append(exc)
                else:
                    held.remove(job, KeptOutcome.of(job.id, job.attempt, after, now))
                    answers.append(None)
            self._store.forget_if_empty(held, now)
        return answers

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        store = self._store
        with store.lock:
            now = store.clock()
            held = store.queue(queue, now)
            job = held.unreserved(job_id)
            if job.state is State.HELD:
                raise JobHeld(queue, job_id)
            if not held.may_start_over(job, now):
                raise UniqueTaken(queue, job_id)
            held.begin(job)
            job.start_over(held.next_sequence(), now)
            held.make_due(job, delay, now)
            held.end()
            held.take_again(job, now)
            store.changed.notify_all()
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            kicked = 0
            for _, job in held.listing(State.BURIED):
                if kicked == limit:
                    break
                kicked += held.kick(job, now)
            self._store.changed.notify_all()
        return kicked

    def kick_job(self, queue: str, job_id: str) -> None:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            job = held.unreserved(job_id)
            if job.state is State.READY:
                return
            if not held.kick(job, now):
                raise UniqueTaken(queue, job_id)
            self._store.changed.notify_all()

    def queues(self) -> list[str]:
        with self._store.lock:
            return self._store.names(self._store.clock())

    def stats(self, queue: str) -> QueueStats:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            counts = defaultdict[State, int](int)
            for job in held.jobs.values():
                counts[job.state] += 1
            left = held.paused_until - now
        return QueueStats(
            queue=queue,
            ready=counts[State.READY],
            delayed=counts[State.DELAYED],
            reserved=counts[State.RESERVED],
            buried=counts[State.BURIED],
            held=counts[State.HELD],
            paused_for=left / SECOND if left > 0 else None,
        )

    def pause(self, queue: str, seconds: float) -> None:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            held.paused_until = now + nanoseconds(seconds)
            self._store.keep(held)
            self._store.changed.notify_all()

    def resume(self, queue: str) -> None:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            held.paused_until = 0
            self._store.forget_if_empty(held, now)
            self._store.changed.notify_all()

    def purge(self, queue: str, states: Sequence[State]) -> int:
        states = check_states(states)
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            doomed = [job for job in held.jobs.values() if job.state in states and job.state is not State.RESERVED]
            for job in doomed:
                held.remove(job)
            self._store.forget_if_empty(held, now)
        return len(doomed)

    def close(self) -> None:
        with self._store.lock:
            self._store.changed.notify_all()


class MemoryBackend(MemoryJobs, Outcomes, Holds, Notes, Limits):
    """Jobs in this process's memory. ``memory://`` is private to one backend, ``memory://name`` is shared by all
    backends of this name."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="memory",
        delay_resolution=1e-6,
        client_ids=True,
        atomic_batches=True,
        waits_in_server=True,
        shared=Gap("never", "the jobs live in one process's memory"),
        persistent=Gap("never", "the jobs end with the process"),
        disconnect_ends_lease=Gap("never", "there is no connection that could drop"),
        give_back=True,
        lists_jobs=True,
        durable_attempts=Gap("never", "nothing survives the process"),
        transactional_enqueue=Gap("never", "there is no database whose transaction it could join"),
        reasons=True,
        stable_ids=True,
        portable_leases=True,
        fenced_late=True,
        memos=True,
        outcomes=True,
        holds=True,
        notes=True,
        unique=True,
        limits=True,
        one_step_everywhere=True,
        diagnosis=Gap("never", "there is no server whose settings could be checked"),
    )

    def outcomes(self, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
        with self._kept(queue) as (kept, now):
            return kept.find(queue, ids, now)

    def history(
        self, queue: str, *, kind: OutcomeKind | None = None, limit: int = 100, after: str | None = None
    ) -> OutcomePage:
        with self._kept(queue) as (kept, now):
            return kept.page(queue, kind, limit, after, now)

    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        with self._kept(queue) as (kept, now):
            return kept.drop_expired(queue, limit, now) if ids is None else kept.delete(queue, ids, now)

    @contextlib.contextmanager
    def _kept(self, queue: str) -> Iterator[tuple[KeptOutcomes, int]]:
        with self._store.lock:
            now = self._store.clock()
            self._store.queue(queue, now)  # repairs the queue first: an interrupted ack may not have stored its outcome
            yield self._store.outcomes, now

    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        store = self._store
        with store.lock:
            now = store.clock()
            store.finish()
            if not store.notes.have(when, now):
                return False
            store.carry_out(steps, now)
            store.changed.notify_all()
        return True

    def relay(self, queues: Sequence[str]) -> int:  # noqa: ARG002 - as Backend.relay has it
        """Return 0: a verdict and all its steps are carried out together."""
        return 0

    def note(self, home: str, key: str) -> Note | None:
        with self._store.lock:
            self._store.finish()
            return self._store.notes.find(home, key, self._store.clock())

    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        with self._store.lock:
            self._store.finish()
            return self._store.notes.page(home, prefix, limit, after, self._store.clock())

    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        store = self._store
        with store.lock:
            now = store.clock()
            if change:
                store.finish()
                store.change_limits(queue, change, pinned=pinned, now=now)
                store.changed.notify_all()
            held = store.queue(queue, now)
            return held.lines.states(held.jobs)

    def now(self, home: str) -> float:  # noqa: ARG002 - one clock for all queues
        return (self._store.clock() + self._store.epoch) / SECOND


class MemoryConsumer(Consumer):
    """Reserves under the store's lock, and sleeps on the store's condition."""

    _tokens = itertools.count(1)

    def __init__(self, store: Store, queues: Sequence[str]) -> None:
        self.queues = tuple(queues)
        self._store = store
        self._interrupted = False

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        order = self.queues if queues is None else self.in_order(queues)
        with self._store.lock:
            while True:
                self.asked_at, now = time.monotonic(), self._store.clock()
                leases = self._take(limit, now, order)
                left = give_up_at - time.monotonic()
                if leases or left <= 0 or self._interrupted:
                    self._interrupted = False
                    return leases
                self._store.changed.wait(min(left, self._nap(now)))

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        with self._store.lock:
            now = self._store.clock()
            lost = [self._settle_one(verdict, now) for verdict in verdicts]
            self._store.changed.notify_all()
        return lost

    def interrupt(self) -> None:
        with self._store.lock:
            self._interrupted = True
            self._store.changed.notify_all()

    def close(self) -> None:
        """Do nothing: a consumer has nothing to close, and its leases end by themselves."""

    def _take(self, limit: int, now: int, order: Sequence[str]) -> list[Lease]:
        leases: list[Lease] = []
        gated = 0
        for name in order:
            queue = self._store.queue(name, now)
            while len(leases) < limit:
                with_gates = self.most_gated is None or gated < self.most_gated
                job = queue.take(now, token=str(next(self._tokens)), with_gates=with_gates)
                if job is None:
                    break
                gated += bool(job.gates)
                leases.append(lease_of(name, job, now))
        return leases

    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        lease = verdict.lease
        queue = self._store.queue(lease.queue, now)
        job = queue.held(lease)
        if job is None:
            return LeaseLost(lease.queue, lease.id)
        queue.begin(job)
        steps = steps_of(verdict)
        if steps:
            self._store.unfinished = queue, steps, now
        self._carry_out(verdict, queue, job, now)
        queue.end()
        if steps:
            self._store.carry_out(steps, now)
        self._store.forget_if_empty(queue, now)
        return None

    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        match verdict:
            case Ack(after=after):
                queue.remove(job, KeptOutcome.of(job.id, job.attempt, after, now))
            case Release(delay=delay, priority=priority, reason=reason, after=after):
                job.priority = job.priority if priority is None else priority
                job.reason = reason
                _note(job, after, detail=True)
                queue.make_due(job, delay, now)
            case Bury(reason=reason, after=after):
                job.reason = reason
                _note(job, after, detail=True)
                queue.bury(job)
            case Touch(after=after):
                _note(job, after)
                queue.extend(job, now)
            case GiveBack(delay=delay, after=after):
                job.attempt -= 1
                _note(job, after)
                queue.make_due(job, delay, now)
            case Abandon(reason=reason):
                job.reason, job.detail = reason, b""
                queue.make_ready(job, crashed=True)

    def _nap(self, now: int) -> float:
        """Return the seconds until a delay, a lease or a pause ends, at most ``_LONGEST_SLEEP``.

        Waiting consumers are notified of any other change.
        """
        if self._store.clock is not time.monotonic_ns:
            return _PINNED_SLEEP
        changes = (self._store.queue(name, now).next_change_at(now) for name in self.queues)
        nearest = min((at for at in changes if at is not None), default=None)
        return _LONGEST_SLEEP if nearest is None else min(_LONGEST_SLEEP, max(0.0, (nearest - now) / SECOND))


def steps_of(verdict: Verdict) -> tuple[Step, ...]:
    """Return the steps that the verdict carries out if it is accepted."""
    return () if verdict.after is None else verdict.after.steps


def _note(job: Job, after: After | None, *, detail: bool = False) -> None:
    """Store a verdict's memo and detail. *detail*: whether a verdict without a detail deletes the stored one."""
    if after is not None and after.memo is not None:
        job.memo = after.memo
    if detail:
        job.detail = (after.detail or b"") if after is not None else b""


def lease_of(queue: str, job: Job, now: int) -> Lease:
    assert job.token is not None  # noqa: S101 - just reserved
    return Lease(
        queue=queue,
        id=job.id,
        token=job.token,
        body=job.body,
        priority=job.priority,
        ttr=job.ttr,
        attempt=job.attempt,
        crashes=job.crashes,
        kicks=job.kicks,
        age=(now - job.enqueued_at) / SECOND,
        memo=job.memo,
        doomed=job.doomed,
    )


def _record(queue: JobQueue, job: Job, now: int) -> JobRecord:
    due_in = {State.READY: 0.0, State.BURIED: None, State.HELD: None}.get(job.state, (job.due_at - now) / SECOND)
    return JobRecord(
        queue=queue.name,
        id=job.id,
        state=job.state,
        body=job.body,
        priority=job.priority,
        ttr=job.ttr,
        attempt=job.attempt,
        crashes=job.crashes,
        kicks=job.kicks,
        due_in=due_in,
        age=(now - job.enqueued_at) / SECOND,
        reason=job.reason,
        memo=job.memo,
        detail=job.detail,
        awaits=job.awaits,
        unique_key=None if job.unique is None else job.unique.key,
        held_by=queue.lines.held_by(job, now),
    )
