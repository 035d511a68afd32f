"""The memory backend: the contract as an executable specification, and a real queue inside one process.

====================  ======================================================================  =================
guarantee             how                                                                     cost
====================  ======================================================================  =================
atomic verbs          one lock around each                                                    one verb at a time
priority, then age    a heap ordered by (priority, sequence); a job keeps its sequence        O(log n)
never early           a heap of due times, checked before every verb                          O(log n)
one live lease        a token per reservation, compared on every settle                       O(1)
waiting               a condition, notified by every verb that can make a job ready           none while idle
====================  ======================================================================  =================

Tests compare every other backend with this one, so its code is clear first, and fast second.
"""

from __future__ import annotations

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
from multiq.errors import JobNotFound, JobReserved, LeaseLost

from .base import Consumer, Inspection, Management, Pausing, Purging
from .capabilities import Capabilities, Gap
from .types import Abandon, Ack, Bury, GiveBack, JobRecord, Lease, Page, QueueStats, Release, State, Touch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.driverkit.clock import Clock
    from multiq.settings.url import BackendUrl

    from .types import NewJob, Verdict

_LONGEST_SLEEP = 1.0  # seconds: even with a wrong guess about the next due time, no job is later than this
_PINNED_SLEEP = 0.005  # seconds: a clock that a test moves by hand wakes no waiting thread
_STALE_KEPT = 64  # entries of a heap that may be stale beside as many as there are jobs

_sharing = threading.Lock()
"""Held while a named store is looked up or made: a weak dictionary's ``setdefault`` lets two threads make two."""

forks.hold(_sharing)  # a child must not inherit it locked by a thread that it does not have


class Job:
    """A job as the store holds it.

    The meaning of ``due_at`` depends on the state. DELAYED: when the job is due. RESERVED: when its lease ends. BURIED:
    its place among the buried jobs.
    """

    __slots__ = (
        "attempt", "body", "crashes", "due_at", "enqueued_at", "id", "kicks", "priority", "reason", "sequence", "stamp",
        "state", "token", "ttr",
    )  # fmt: skip

    def __init__(self, new: NewJob) -> None:
        self.id = new.id
        self.body = new.body
        self.priority = new.priority
        self.ttr = new.ttr
        self.state = State.READY
        self.token: str | None = None
        self.reason: str | None = None
        self.due_at = 0
        self.stamp = 0  # counts this job's moves, so that a heap knows its stale entries
        self.start_over(sequence=0, now=0)

    def start_over(self, sequence: int, now: int) -> None:
        self.sequence = sequence  # age: lower was enqueued earlier
        self.enqueued_at = now
        self.attempt = self.crashes = self.kicks = 0


class JobQueue:
    """One queue's jobs and their moves. It needs no lock of its own: callers hold the store's lock around each verb."""

    def __init__(self, name: str, sequence: itertools.count[int]) -> None:
        self.name = name
        self.jobs: dict[str, Job] = {}
        self.paused_until = 0
        self.is_whole = True
        """False while jobs are moved: an exception from outside may have ended that in the middle."""
        self._incoming: list[str] = []  # the ids that a batch has added so far
        self._ready: list[tuple[int, int, int, Job]] = []  # priority, sequence, stamp
        self._timed: list[tuple[int, int, int, Job]] = []  # due_at, sequence, stamp
        self._sequence = sequence

    # --- moves ---

    def add_all(self, batch: Sequence[NewJob], now: int) -> list[str]:
        """Add the whole batch.

        If an asynchronous exception (Ctrl-C, a time limit) interrupts this, ``mend`` removes the part that was added.
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

    def mend(self) -> None:
        """After an asynchronous exception (Ctrl-C, a time limit): remove half a batch, and make the heaps anew."""
        for job_id in self._incoming:
            self.jobs.pop(job_id, None)
        self._incoming = []
        self.jobs = {job.id: job for job in self.jobs.values() if job.state is not State.GONE}
        self._ready, self._timed = [], []
        for job in self.jobs.values():
            self._move(job, job.state, job.due_at)
        self.is_whole = True

    def add(self, new: NewJob, now: int) -> str:
        if new.id not in self.jobs:
            job = self.jobs[new.id] = Job(new)
            job.start_over(self.next_sequence(), now)
            self.make_due(job, new.delay, now)
        return new.id

    def promote(self, now: int) -> None:
        """Make ready the jobs that are due, and those whose lease has ended."""
        if not self._timed or self._timed[0][0] > now:
            return
        self.is_whole = False
        while self._timed and self._timed[0][0] <= now:
            *_, stamp, job = heapq.heappop(self._timed)
            if job.stamp == stamp:
                self.make_ready(job, crashed=job.state is State.RESERVED)
        self.is_whole = True

    def take(self, now: int, token: str) -> Job | None:
        """Reserve the best ready job, with a lease that begins now; None: no job is ready, or the queue is paused."""
        if self.paused_until > now:
            return None
        found: Job | None = None
        self.is_whole = False
        while self._ready and found is None:
            *_, stamp, job = heapq.heappop(self._ready)
            if job.stamp == stamp:
                job.attempt += 1
                job.token = token
                self.extend(job, now)
                found = job
        self.is_whole = True
        return found

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

    def remove(self, job: Job) -> None:
        self.is_whole = False
        self._move(job, State.GONE, 0)
        del self.jobs[job.id]
        job.body, job.reason = b"", None  # a heap may have a stale entry of it, but not what it holds
        self.is_whole = True

    def _move(self, job: Job, state: State, due_at: int) -> None:
        job.state, job.due_at = state, due_at
        job.stamp += 1
        if state is not State.RESERVED:
            job.token = None
        if state is State.READY:
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
        """The job of this lease; None if the lease is not the job's live lease any more."""
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
        """When the next job may become reservable without a change by anyone; None: never."""
        if self.paused_until > now:
            return self.paused_until
        return self._timed[0][0] if self._timed else None

    def listing(self, state: State) -> list[tuple[str, Job]]:
        """The jobs in a state, in order, each with a cursor: its place in the listing, as text."""
        found = [job for job in self.jobs.values() if job.state is state]
        if state is State.READY:
            keys = [(job.priority, job.sequence, job) for job in found]
        else:
            keys = [(job.due_at, job.sequence, job) for job in found]
        keys.sort(key=lambda key: key[:2])
        return [(f"{major:020}.{minor:020}", job) for major, minor, job in keys]


def _without_stale(heap: list[tuple[int, int, int, Job]]) -> list[tuple[int, int, int, Job]]:
    """The heap without stale entries, which are those of jobs that have moved since.

    A stale entry may be of a job that is gone, and would keep that job in memory.
    """
    live = [entry for entry in heap if entry[2] == entry[3].stamp]
    heapq.heapify(live)
    return live


class Store:
    """Everything that backends of one name share: the queues, the lock, and the condition on which consumers wait."""

    queue_class: type[JobQueue] = JobQueue

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._sequence = itertools.count(1)
        self._queues: dict[str, JobQueue] = {}

    def queue(self, name: str, now: int) -> JobQueue:
        """The queue as it is at the time *now*. A new queue is not stored until ``keep`` is called."""
        queue = self._queues.get(name)
        if queue is None:
            return self.queue_class(name, self._sequence)
        if not queue.is_whole:
            queue.mend()
        queue.promote(now)
        self.forget_if_empty(queue, now)
        return queue

    def keep(self, queue: JobQueue) -> None:
        """Store the queue, because it holds a job or is paused from now on."""
        self._queues[queue.name] = queue

    def forget_if_empty(self, queue: JobQueue, now: int) -> None:
        """Delete the queue from the store if it has no jobs and is not paused."""
        if not queue.jobs and queue.paused_until <= now:
            self._queues.pop(queue.name, None)

    def names(self, now: int) -> list[str]:
        for queue in list(self._queues.values()):
            self.forget_if_empty(queue, now)
        return sorted(self._queues)


class MemoryBackend(Inspection, Management, Pausing, Purging):
    """Jobs in this process's memory. ``memory://`` is private to one backend, ``memory://name`` is shared by all."""

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
        diagnosis=Gap("never", "there is no server whose settings could be checked"),
    )
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
    def from_url(cls, url: BackendUrl) -> MemoryBackend:
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
            job = self._store.queue(queue, now).jobs.get(job_id)
            if job is None:
                raise JobNotFound(queue, job_id)
            return _record(queue, job, now)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        state = check_state(state)
        with self._store.lock:
            now = self._store.clock()
            places = self._store.queue(queue, now).listing(state)
            if after is not None:
                places = [place for place in places if place[0] > after]
            found = [_record(queue, job, now) for _, job in places[:limit]]
            more = len(places) > limit
        return Page(found, places[limit - 1][0] if more else None)

    def delete(self, queue: str, job_id: str) -> None:
        with self._store.lock:
            now = self._store.clock()
            held = self._store.queue(queue, now)
            held.remove(held.unreserved(job_id))
            self._store.forget_if_empty(held, now)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        store = self._store
        with store.lock:
            now = store.clock()
            held = store.queue(queue, now)
            job = held.unreserved(job_id)
            held.is_whole = False
            job.start_over(held.next_sequence(), now)
            job.reason = None
            held.make_due(job, delay, now)
            held.is_whole = True
            store.changed.notify_all()
        return job_id

    def kick(self, queue: str, limit: int) -> int:
        with self._store.lock:
            held = self._store.queue(queue, self._store.clock())
            kicked = held.listing(State.BURIED)[:limit]
            held.is_whole = False
            for _, job in kicked:
                job.kicks += 1
                held.make_ready(job)
            held.is_whole = True
            self._store.changed.notify_all()
        return len(kicked)

    def kick_job(self, queue: str, job_id: str) -> None:
        with self._store.lock:
            held = self._store.queue(queue, self._store.clock())
            job = held.unreserved(job_id)
            if job.state is State.READY:
                return
            held.is_whole = False
            job.kicks += job.state is State.BURIED
            held.make_ready(job)
            held.is_whole = True
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
        for name in order:
            queue = self._store.queue(name, now)
            while len(leases) < limit:
                job = queue.take(now, token=str(next(self._tokens)))
                if job is None:
                    break
                leases.append(_lease(name, job, now))
        return leases

    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        lease = verdict.lease
        queue = self._store.queue(lease.queue, now)
        job = queue.held(lease)
        if job is None:
            return LeaseLost(lease.queue, lease.id)
        queue.is_whole = False
        self._carry_out(verdict, queue, job, now)
        queue.is_whole = True
        self._store.forget_if_empty(queue, now)
        return None

    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        match verdict:
            case Ack():
                queue.remove(job)
            case Release(delay=delay, priority=priority, reason=reason):
                job.priority = job.priority if priority is None else priority
                job.reason = reason
                queue.make_due(job, delay, now)
            case Bury(reason=reason):
                job.reason = reason
                queue.bury(job)
            case Touch():
                queue.extend(job, now)
            case GiveBack(delay=delay):
                job.attempt -= 1
                queue.make_due(job, delay, now)
            case Abandon(reason=reason):
                job.reason = reason
                queue.make_ready(job, crashed=True)

    def _nap(self, now: int) -> float:
        """Seconds until a delay, a lease or a pause ends; at most ``_LONGEST_SLEEP``.

        Consumers that wait are notified of any other change.
        """
        if self._store.clock is not time.monotonic_ns:
            return _PINNED_SLEEP
        changes = (self._store.queue(name, now).next_change_at(now) for name in self.queues)
        nearest = min((at for at in changes if at is not None), default=None)
        return _LONGEST_SLEEP if nearest is None else min(_LONGEST_SLEEP, max(0.0, (nearest - now) / SECOND))


def _lease(queue: str, job: Job, now: int) -> Lease:
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
    )


def _record(queue: str, job: Job, now: int) -> JobRecord:
    due_in = {State.READY: 0.0, State.BURIED: None}.get(job.state, (job.due_at - now) / SECOND)
    return JobRecord(
        queue=queue,
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
    )
