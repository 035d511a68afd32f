"""Queues of JSON values or bytes, for programs that use no tasks."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT, Bury, State, check_state, check_states
from .delete import delete_job
from .driverkit.fork import forks
from .enqueue import put, put_one
from .envelope import encode_json, refusal_of
from .errors import ArgumentsInvalid, BackendError, OptionInvalid, QueueEmpty
from .formatting import shown
from .ids import check_id, check_new_id
from .job import Job, JobHandle, JobInfo, JobPage
from .validation import (
    check_count,
    check_cursor,
    check_delay,
    check_name,
    check_priority,
    check_queue,
    check_reason,
    check_timeout,
    check_ttr,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Sequence

    from .app import App
    from .async_reserve import AsyncReserver
    from .backend import Backend, Lease, QueueStats, Verdict
    from .cancellation import CancelAnswer
    from .errors import LeaseLost
    from .flows.followers import Followers
    from .history import HistoryPage

P = ParamSpec("P")
R = TypeVar("R")

_YIELD_EVERY = 0.0005  # seconds between two checks for other threads that wait to settle
_INTERRUPT_EVERY = 0.002  # seconds between two interrupts of a thread that waits for jobs
_CLOSE_PATIENCE = 1.0  # seconds that ``close`` waits for the end of another thread's call

_reserver_lock = threading.Lock()
"""Guards the creation of reservers. A thread holds this lock only for a moment."""

forks.hold(_reserver_lock)


class Queue:
    """A queue of an app. Threads may share a queue. Each thread reserves on its own connection."""

    def __init__(self, app: App, name: str) -> None:
        self.name = check_name(name)
        self._app = app
        self._local = threading.local()
        self._consumers: weakref.WeakSet[SharedConsumer] = weakref.WeakSet()
        self._async_reserver: AsyncReserver | None = None

    # --- producing ---

    def enqueue(
        self,
        body: Any,
        *,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttr: float = TTR_DEFAULT,
        connection: Any = None,
        id: str | None = None,  # noqa: A002 - a job's attribute has the same name
    ) -> JobHandle:
        """Add a job. A body of bytes is stored unchanged, and any other body is stored as JSON.

        - *delay*: seconds, or a timedelta, before the job may start.
        - *at*: the time, with a time zone, before which the job does not start. Give *at* or *delay*, not both.
        - *priority*: a number from 0 (first) to 4294967295 (last). Default: 1024.
        - *ttr*: seconds that a reservation lasts without a touch. Default: 60.
        - *connection*: your own database connection. The job is part of the connection's transaction, and exists only
          after a commit.
        - *id*: an id of your own, which is one word of ASCII. If the queue already has a job with the same id, nothing
          is added.

        Raises ``OptionInvalid``, ``PayloadInvalid``, ``PayloadTooLarge``, ``Unsupported`` and ``BackendError``. Raises
        ``EnqueueUncertain`` if it is unknown whether the job was added.
        """
        return put_one(
            self._app.backend,
            check_queue(self.name),
            body if isinstance(body, bytes) else encode_json(body, max_body=self._app.settings.max_body),
            priority=check_priority(priority),
            delay=check_delay(delay, at),
            ttr=check_ttr(ttr),
            connection=connection,
            own_id=None if id is None else check_new_id(id),
        )

    def enqueue_many(
        self,
        bodies: Iterable[Any],
        *,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttr: float = TTR_DEFAULT,
        connection: Any = None,
        ids: Iterable[str] | None = None,
    ) -> list[JobHandle]:
        """Add many jobs in one round trip, with the same options. A backend with ``atomic_batches`` adds either all of
        the jobs or no job.

        - *bodies*: a body of bytes is stored unchanged, and any other body is stored as JSON.
        - *delay*, *at*, *priority*, *ttr*, *connection*: the options of ``enqueue``, which apply to all of the jobs.
        - *ids*: ids of your own, one for each job. Default: ids that multiq makes.

        Raises the errors of ``enqueue``. Raises ``ArgumentsInvalid`` if *bodies* is a single body.
        """
        return put(
            self._app.backend,
            check_queue(self.name),
            self._encode_many(bodies),
            priority=check_priority(priority),
            delay=check_delay(delay, at),
            ttr=check_ttr(ttr),
            connection=connection,
            ids=ids,
        )

    async def aenqueue(
        self,
        body: Any,
        *,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttr: float = TTR_DEFAULT,
        connection: Any = None,
        id: str | None = None,  # noqa: A002 - the same name as in enqueue
    ) -> JobHandle:
        """``enqueue`` without blocking the event loop. Enqueues that wait at the same time are sent in one round trip.

        If the coroutine is cancelled before the job is sent, nothing is enqueued. If the job was sent before the
        cancellation, the enqueue continues. A note of the ``CancelledError`` says whether the job was sent.
        """
        from .async_enqueue import aopen, aput_one

        # encode first, because the caller may change the body while the backend is opened
        encoded = body if isinstance(body, bytes) else encode_json(body, max_body=self._app.settings.max_body)
        return await aput_one(
            await aopen(self._app, check_queue(self.name)),
            self.name,
            encoded,
            priority=check_priority(priority),
            delay=check_delay(delay, at),
            ttr=check_ttr(ttr),
            connection=connection,
            own_id=None if id is None else check_new_id(id),
        )

    async def aenqueue_many(
        self,
        bodies: Iterable[Any],
        *,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttr: float = TTR_DEFAULT,
        connection: Any = None,
        ids: Iterable[str] | None = None,
    ) -> list[JobHandle]:
        """``enqueue_many`` without blocking the event loop. A cancelled ``aenqueue_many`` behaves like a cancelled
        ``aenqueue``."""
        from .async_enqueue import aopen, aput

        encoded = self._encode_many(bodies)  # encoded first, as in aenqueue
        return await aput(
            await aopen(self._app, check_queue(self.name)),
            self.name,
            encoded,
            priority=check_priority(priority),
            delay=check_delay(delay, at),
            ttr=check_ttr(ttr),
            connection=connection,
            ids=ids,
        )

    # --- consuming ---

    def reserve(self, timeout: float = 0) -> Job:
        """Return the next due job. Waits up to *timeout* seconds, and raises ``QueueEmpty`` if no job was due.

        Use the job in a ``with`` statement. Leaving the ``with`` block acks the job. An exception in the ``with`` block
        releases the job with a backoff.
        """
        return self._only(self.reserve_many(1, timeout), timeout)

    def reserve_many(self, limit: int, timeout: float = 0) -> list[Job]:
        """Return up to *limit* due jobs. Waits up to *timeout* seconds for the first job. The list may be empty."""
        consumer = self._consumer()
        leases = consumer.reserve(check_count(limit, "limit"), check_timeout(timeout))
        return [Job(lease, consumer) for lease in leases]

    async def areserve(self, timeout: float = 0) -> Job:  # noqa: ASYNC109 - as in reserve
        """``reserve`` without blocking the event loop. Use the job by ``async with await queue.areserve(10) as job``.

        Any number of coroutines may wait. One thread and one connection serve all coroutines that wait for jobs of a
        queue. A job that was reserved for a cancelled coroutine goes to the next waiting coroutine. The job is given
        back if no coroutine waits, or if a third of its ttr has passed.
        """
        return self._only(await self.areserve_many(1, timeout), timeout)

    async def areserve_many(self, limit: int, timeout: float = 0) -> list[Job]:  # noqa: ASYNC109 - as in reserve_many
        """``reserve_many`` without blocking the event loop. Waiting and cancellation work as in ``areserve``."""
        count, seconds = check_count(limit, "limit"), check_timeout(timeout)
        await self._app.abackend()
        leases, consumer = await self._reserver().reserve(count, seconds)
        return [Job(lease, consumer) for lease in leases]

    # --- looking and managing ---

    def stats(self) -> QueueStats:
        """Return the numbers of ready, delayed, reserved and buried jobs, and the seconds until the queue's pause
        ends."""
        return self._app.backend.stats(self.name)

    def peek(self, job_id: str) -> JobInfo:
        """Return a job without changing it. Raises ``JobNotFound``."""
        return JobInfo.of(self._app.backend.peek(self.name, check_id(job_id)))

    def jobs(self, state: str, *, limit: int = 100, after: str | None = None) -> JobPage:
        """Return a page of the jobs that are in the given state. Pass a page's ``after`` to get the next page."""
        stored = check_state(state)
        count, cursor = check_count(limit, "limit"), check_cursor(after)
        if stored is State.HELD and not self._app.backend.declared.holds:
            return JobPage([], None)
        page = self._app.backend.jobs(self.name, stored, limit=count, after=cursor)
        return JobPage([JobInfo.of(record) for record in page.jobs], page.after)

    def delete(self, job_id: str, *, followers: Followers = "refuse") -> None:
        """Delete a job that does not run. Raises ``JobReserved``, ``JobNotFound``, ``JobAwaited``.

        *followers*: as in ``cancel``.
        """
        delete_job(self._app.backend, self.name, check_id(job_id), followers)

    def cancel(
        self,
        job_id: str,
        *,
        followers: Followers = "refuse",
        grace: float | dt.timedelta | None = None,
        reason: str | None = None,
    ) -> CancelAnswer:
        """Delete a job that has not started, or ask the worker of a running job to cancel the job. See
        ``JobHandle.cancel``."""
        handle = JobHandle(self._app.backend, self.name, check_id(job_id))
        return handle.cancel(followers=followers, grace=grace, reason=reason)

    def reschedule(
        self, job_id: str, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None
    ) -> JobHandle:
        """Make a job due in *delay* seconds or at the time *at*, as if it were enqueued now.

        Returns the job's handle, whose id may be new. Raises ``JobReserved``, ``JobHeld``, ``JobNotFound``.
        """
        backend, seconds = self._app.backend, check_delay(delay, at)
        backend.check_terms(delay=seconds)
        return JobHandle(backend, self.name, backend.reschedule(self.name, check_id(job_id), seconds))

    def kick(self, limit: int = 1) -> int:
        """Make up to *limit* buried jobs ready, and return their number. The job that was buried first is made ready
        first."""
        return self._app.backend.kick(self.name, check_count(limit, "limit"))

    def kick_job(self, job_id: str) -> None:
        """Make a buried, delayed or held job ready now. Raises ``JobNotFound``, ``JobReserved``."""
        self._app.backend.kick_job(self.name, check_id(job_id))

    def pause(self, seconds: float) -> None:
        """Pause the queue: no consumer reserves its jobs for *seconds*. Delays and leases continue to count down during
        the pause."""
        self._app.backend.pause(self.name, check_timeout(seconds, "seconds"))

    def resume(self) -> None:
        """End a pause now."""
        self._app.backend.resume(self.name)

    def purge(self, states: Sequence[str] | str = (State.READY, State.DELAYED, State.BURIED)) -> int:
        """Delete all jobs in the given states, except reserved jobs. Returns the number of deleted jobs."""
        backend = self._app.backend
        asked = [state for state in check_states(states) if state is not State.HELD or backend.declared.holds]
        return backend.purge(self.name, asked) if asked else 0

    def history(self, *, kind: str | None = None, limit: int = 100, after: str | None = None) -> HistoryPage:
        """Return a page of the kept outcomes of jobs that are gone. The outcome that expires last comes first.

        - *kind*: ``"done"`` or ``"cancelled"``, to return only outcomes of one kind.
        - *after*: the ``after`` of the previous page.

        Raises ``Unsupported`` if the backend keeps no outcomes.
        """
        from .history import HistoryPage, OutcomeInfo, check_kind  # imported late, because few programs list outcomes

        page = self._app.backend.history(
            self.name, kind=check_kind(kind), limit=check_count(limit, "limit"), after=check_cursor(after)
        )
        return HistoryPage([OutcomeInfo.of(outcome) for outcome in page.outcomes], page.after)

    def forget(self, ids: Iterable[str]) -> int:
        """Delete the kept outcomes of the jobs with the given ids. Returns the number of deleted outcomes.

        ``forget`` deletes no jobs. To delete jobs, see ``delete`` and ``App.failed``. Raises ``Unsupported``.
        """
        if isinstance(ids, str | bytes):
            raise OptionInvalid(f"ids must be a list of ids, got {shown(ids)}")
        return self._app.backend.forget(self.name, [check_id(job_id) for job_id in ids])

    async def astats(self) -> QueueStats:
        """``stats`` without blocking the event loop."""
        return await self._run(self.stats)

    async def apeek(self, job_id: str) -> JobInfo:
        """``peek`` without blocking the event loop."""
        return await self._run(self.peek, job_id)

    async def ajobs(self, state: str, *, limit: int = 100, after: str | None = None) -> JobPage:
        """``jobs`` without blocking the event loop."""
        return await self._run(self.jobs, state, limit=limit, after=after)

    async def acancel(
        self,
        job_id: str,
        *,
        followers: Followers = "refuse",
        grace: float | dt.timedelta | None = None,
        reason: str | None = None,
    ) -> CancelAnswer:
        """``cancel`` without blocking the event loop."""
        return await self._run(self.cancel, job_id, followers=followers, grace=grace, reason=reason)

    async def adelete(self, job_id: str, *, followers: Followers = "refuse") -> None:
        """``delete`` without blocking the event loop."""
        await self._run(self.delete, job_id, followers=followers)

    async def areschedule(
        self, job_id: str, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None
    ) -> JobHandle:
        """``reschedule`` without blocking the event loop."""
        return await self._run(self.reschedule, job_id, delay, at=at)

    async def akick(self, limit: int = 1) -> int:
        """``kick`` without blocking the event loop."""
        return await self._run(self.kick, limit)

    async def akick_job(self, job_id: str) -> None:
        """``kick_job`` without blocking the event loop."""
        await self._run(self.kick_job, job_id)

    async def apause(self, seconds: float) -> None:
        """``pause`` without blocking the event loop."""
        await self._run(self.pause, seconds)

    async def aresume(self) -> None:
        """``resume`` without blocking the event loop."""
        await self._run(self.resume)

    async def apurge(self, states: Sequence[str] | str = (State.READY, State.DELAYED, State.BURIED)) -> int:
        """``purge`` without blocking the event loop."""
        return await self._run(self.purge, states)

    async def ahistory(self, *, kind: str | None = None, limit: int = 100, after: str | None = None) -> HistoryPage:
        """``history`` without blocking the event loop."""
        return await self._run(self.history, kind=kind, limit=limit, after=after)

    async def aforget(self, ids: Iterable[str]) -> int:
        """``forget`` without blocking the event loop."""
        return await self._run(self.forget, ids)

    def close(self) -> None:
        """Close the connections on which threads reserve jobs. The queue's next call opens new connections."""
        for consumer in list(self._consumers):
            consumer.close()

    async def aclose(self) -> None:
        """``close`` without blocking the event loop. Coroutines that wait for jobs get ``BackendUnavailable``."""
        reserver, self._async_reserver = self._async_reserver, None
        if reserver is not None and reserver.generation == forks.generation:
            reserver.stop()
        await self._run(self.close)

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    async def _run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        from .async_calls import run

        return await run(await self._app.abackend(), function, *args, **kwargs)

    def _encode_many(self, bodies: Iterable[Any]) -> list[bytes]:
        if isinstance(bodies, str | bytes | dict):
            raise ArgumentsInvalid(f"enqueue_many must have a list of bodies, got {shown(bodies)}")
        encode, max_body = encode_json, self._app.settings.max_body
        return [body if isinstance(body, bytes) else encode(body, max_body=max_body) for body in bodies]

    def _only(self, jobs: list[Job], timeout: float) -> Job:
        if not jobs:
            raise QueueEmpty(f"queue {self.name!r} had no due job within {timeout:g} s")
        return jobs[0]

    def _reserver(self) -> AsyncReserver:
        from .async_reserve import AsyncReserver

        backend = self._app.backend  # outside of the lock, because reading app.backend may open the backend
        with _reserver_lock:
            reserver = self._async_reserver
            if reserver is not None and reserver.generation != forks.generation:
                reserver.keep_from_collector()
                reserver = None
            if reserver is None or reserver.backend is not backend:  # App.connect and App.using change the backend
                self._app.keep_queue(self)
                reserver = self._async_reserver = AsyncReserver(backend, self._new_consumer)
        return reserver

    def _consumer(self) -> SharedConsumer:
        consumer: SharedConsumer | None = getattr(self._local, "consumer", None)
        if consumer is None or not consumer.is_of(self._app.backend):
            consumer = self._local.consumer = self._new_consumer()
        return consumer

    def _new_consumer(self) -> SharedConsumer:
        self._app.keep_queue(self)
        consumer = SharedConsumer(self._app.backend, [self.name])
        self._consumers.add(consumer)
        return consumer


class SharedConsumer:
    """The consumer of one thread. A lock allows other threads to settle the jobs that the consumer's thread has
    reserved.

    The consumer is closed when its thread and its jobs no longer refer to the consumer.
    """

    def __init__(self, backend: Backend, queues: Sequence[str]) -> None:
        self.generation = forks.generation
        self.backend = backend
        self._consumer = backend.consumer(queues)
        self._lock = threading.Lock()
        self._settling: set[int] = set()  # ids of threads that want to settle jobs, and wait for the lock
        self._is_interrupted = False
        self._is_sealed = hasattr(backend, "payloads")
        # do not close the consumer at the interpreter's exit, because a daemon thread may still use it
        weakref.finalize(self, self._consumer.close).atexit = False

    def is_of(self, backend: Backend) -> bool:
        """Whether this process has made the consumer for *backend*. ``App.connect`` and ``App.using`` change the
        backend of an app."""
        return self.backend is backend and self.generation == forks.generation

    @property
    def asked_at(self) -> float:
        """Like ``Consumer.asked_at``, but never 0. Only the thread that reserves may read it, after ``reserve``."""
        return self._consumer.asked_at or time.monotonic()

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        """Like ``Consumer.reserve``. Other threads may settle jobs while ``reserve`` waits."""
        give_up_at = time.monotonic() + timeout
        while True:
            with self._lock:
                leases = self._consumer.reserve(limit, max(0.0, give_up_at - time.monotonic()))
                if leases and self._is_sealed:
                    leases = self._opened(leases)
            if leases or self._is_interrupted or time.monotonic() >= give_up_at:
                self._is_interrupted = False
                return leases
            while self._settling:
                time.sleep(_YIELD_EVERY)

    def _opened(self, leases: list[Lease]) -> list[Lease]:
        """Bury the jobs whose payloads are refused, and return all other jobs."""
        reasons = [refusal_of(lease.body) for lease in leases]
        refused = [
            Bury(lease, check_reason(reason))
            for lease, reason in zip(leases, reasons, strict=True)
            if reason is not None
        ]
        if refused:
            # after an error, the refused jobs stay reserved until their leases end; the others must reach the caller
            with contextlib.suppress(BackendError):
                self._consumer.settle(refused)
        return [lease for lease, reason in zip(leases, reasons, strict=True) if reason is None]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Like ``Consumer.settle``, but any thread may call ``settle``."""
        if not self._lock.acquire(blocking=False):
            self._interrupt_and_lock()
        try:
            return self._consumer.settle(verdicts)
        finally:
            self._lock.release()

    def interrupt(self) -> None:
        """Make the waiting ``reserve`` return immediately. If no ``reserve`` waits, the next ``reserve`` returns
        immediately. Thread-safe."""
        self._is_interrupted = True
        self._consumer.interrupt()

    def close(self) -> None:
        """Close the connection. The consumer's next call opens a new connection.

        ``close`` interrupts another thread that waits for jobs, because no two threads may use a driver's consumer at
        the same time. A call of another thread that does not end soon, because its server hangs, loses its connection.
        """
        is_ours = self.generation == forks.generation  # in a forked child, no thread would release the lock
        is_locked = is_ours and self._interrupt_and_lock(_CLOSE_PATIENCE)
        try:
            self._consumer.close()
        finally:
            if is_locked:
                self._lock.release()

    def _interrupt_and_lock(self, patience: float | None = None) -> bool:
        """Acquire the lock. If another thread holds the lock while it waits for jobs, interrupt that thread.

        Returns False if the lock was not free within *patience* seconds.
        """
        give_up_at = None if patience is None else time.monotonic() + patience
        self._settling.add(threading.get_ident())
        try:
            while not self._lock.acquire(timeout=_INTERRUPT_EVERY):
                if give_up_at is not None and time.monotonic() >= give_up_at:
                    return False
                self._consumer.interrupt()
        finally:
            self._settling.discard(threading.get_ident())
        return True
