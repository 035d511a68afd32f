"""Queues of JSON values or bytes, for programs that use no tasks."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT, State, check_state, check_states
from .driverkit.fork import forks
from .enqueue import put, put_one
from .envelope import encode_json
from .errors import ArgumentsInvalid, QueueEmpty
from .formatting import shown
from .job import Job, JobHandle, JobInfo, JobPage
from .validation import (
    check_count,
    check_cursor,
    check_delay,
    check_id,
    check_name,
    check_new_id,
    check_priority,
    check_timeout,
    check_ttr,
)

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Sequence

    from .app import App
    from .backend import Backend, Lease, QueueStats, Verdict
    from .errors import LeaseLost

_YIELD_EVERY = 0.0005  # seconds between two checks whether the threads that settle are finished
_INTERRUPT_EVERY = 0.002  # seconds between two interrupts of a thread that waits for jobs


class Queue:
    """A queue of an app. Threads may share it. Each thread reserves on its own connection."""

    def __init__(self, app: App, name: str) -> None:
        self.name = check_name(name)
        self._app = app
        self._local = threading.local()
        self._consumers: weakref.WeakSet[SharedConsumer] = weakref.WeakSet()

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
        id: str | None = None,  # noqa: A002 - as the job calls it
    ) -> JobHandle:
        """Add a job. Bytes are stored as they are, and any other body is stored as JSON.

        - *delay*: seconds, or a timedelta, before the job may start.
        - *at*: the time, with a time zone, before which the job does not start. Give *at* or *delay*, not both.
        - *priority*: 0 goes first, 4294967295 last. Default: 1024.
        - *ttr*: seconds that a reservation lasts without a touch. Default: 60.
        - *connection*: your own database connection. The job is written in its transaction, and exists if you commit.
        - *id*: an id of your own, one word of ASCII. While the queue holds a job with this id, nothing is added.

        Raises ``OptionInvalid``, ``PayloadInvalid``, ``PayloadTooLarge``, ``Unsupported`` and ``BackendError``. Raises
        ``EnqueueUncertain`` if it is unknown whether the job was added.
        """
        return put_one(
            self._app.backend,
            self.name,
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
        """Add many jobs in one round trip, with the same options. A backend with ``atomic_batches`` adds all or none.

        - *bodies*: bytes are stored as they are, and any other body is stored as JSON.
        - *delay*, *at*, *priority*, *ttr*, *connection*: as for ``enqueue``, for all of the jobs.
        - *ids*: ids of your own, one for each job. Default: multiq makes them.

        Raises as ``enqueue`` does, and ``ArgumentsInvalid`` if *bodies* is a single body.
        """
        if isinstance(bodies, str | bytes | dict):
            raise ArgumentsInvalid(f"enqueue_many must have a list of bodies, got {shown(bodies)}")
        encode, max_body = encode_json, self._app.settings.max_body
        raw = [body if isinstance(body, bytes) else encode(body, max_body=max_body) for body in bodies]
        return put(
            self._app.backend,
            self.name,
            raw,
            priority=check_priority(priority),
            delay=check_delay(delay, at),
            ttr=check_ttr(ttr),
            connection=connection,
            ids=ids,
        )

    # --- consuming ---

    def reserve(self, timeout: float = 0) -> Job:
        """Return the next due job. Waits up to *timeout* seconds, and then raises ``QueueEmpty``.

        Use the job in a ``with`` statement. Leaving the block acks the job. An exception releases the job with a
        backoff.
        """
        jobs = self.reserve_many(1, timeout)
        if not jobs:
            raise QueueEmpty(f"queue {self.name!r} had no due job within {timeout:g} s")
        return jobs[0]

    def reserve_many(self, limit: int, timeout: float = 0) -> list[Job]:
        """Return up to *limit* due jobs. Waits up to *timeout* seconds for the first job. The list may be empty."""
        consumer = self._consumer()
        leases = consumer.reserve(check_count(limit, "limit"), check_timeout(timeout))
        return [Job(lease, consumer) for lease in leases]

    # --- looking and managing ---

    def stats(self) -> QueueStats:
        """Return the numbers of ready, delayed, reserved and buried jobs, and the seconds until a pause ends."""
        return self._app.backend.stats(self.name)

    def peek(self, job_id: str) -> JobInfo:
        """Return a job without changing it. Raises ``JobNotFound``."""
        return JobInfo.of(self._app.backend.peek(self.name, check_id(job_id)))

    def jobs(self, state: str, *, limit: int = 100, after: str | None = None) -> JobPage:
        """Return a page of the jobs in a state. Pass a page's ``after`` to get the next page."""
        page = self._app.backend.jobs(
            self.name, check_state(state), limit=check_count(limit, "limit"), after=check_cursor(after)
        )
        return JobPage([JobInfo.of(record) for record in page.jobs], page.after)

    def delete(self, job_id: str) -> None:
        """Delete a job. Raises ``JobReserved`` if the job is running, ``JobNotFound`` if the job is gone."""
        self._app.backend.delete(self.name, check_id(job_id))

    def reschedule(
        self, job_id: str, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None
    ) -> JobHandle:
        """Make a job due in *delay* seconds or at the time *at*, as if it were enqueued now.

        Returns the job's handle, with the id to use from now on. Raises ``JobReserved``, ``JobNotFound``.
        """
        backend, seconds = self._app.backend, check_delay(delay, at)
        backend.check_terms(delay=seconds)
        return JobHandle(backend, self.name, backend.reschedule(self.name, check_id(job_id), seconds))

    def kick(self, limit: int = 1) -> int:
        """Make up to *limit* buried jobs ready, the longest buried first. Returns the number of these jobs."""
        return self._app.backend.kick(self.name, check_count(limit, "limit"))

    def kick_job(self, job_id: str) -> None:
        """Make a buried or delayed job ready now. Raises ``JobNotFound``, ``JobReserved``."""
        self._app.backend.kick_job(self.name, check_id(job_id))

    def pause(self, seconds: float) -> None:
        """Let no consumer reserve jobs for *seconds*. Delays and leases run on."""
        self._app.backend.pause(self.name, check_timeout(seconds, "seconds"))

    def resume(self) -> None:
        """End a pause now."""
        self._app.backend.resume(self.name)

    def purge(self, states: Sequence[str] | str = (State.READY, State.DELAYED, State.BURIED)) -> int:
        """Delete all jobs in these states, except reserved jobs. Returns the number of deleted jobs."""
        return self._app.backend.purge(self.name, check_states(states))

    def close(self) -> None:
        """Close the connections on which threads reserve jobs. The next call opens new connections."""
        for consumer in list(self._consumers):
            consumer.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    def _consumer(self) -> SharedConsumer:
        consumer: SharedConsumer | None = getattr(self._local, "consumer", None)
        if consumer is None or consumer.generation != forks.generation:
            consumer = self._local.consumer = SharedConsumer(self._app.backend, [self.name])
            self._consumers.add(consumer)
        return consumer


class SharedConsumer:
    """The consumer of one thread. Any thread may settle its jobs, under a lock.

    The consumer closes when neither its thread nor any of its jobs refers to it.
    """

    def __init__(self, backend: Backend, queues: Sequence[str]) -> None:
        self.generation = forks.generation
        self.backend = backend
        self._consumer = backend.consumer(queues)
        self._lock = threading.Lock()
        self._settling: set[int] = set()  # threads that wait for the lock to settle
        # not at exit, when a daemon thread may be in the middle of a call
        weakref.finalize(self, self._consumer.close).atexit = False

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        """As ``Consumer.reserve``. Other threads may settle while this waits."""
        give_up_at = time.monotonic() + timeout
        while True:
            with self._lock:
                leases = self._consumer.reserve(limit, max(0.0, give_up_at - time.monotonic()))
            if leases or time.monotonic() >= give_up_at:
                return leases
            while self._settling:
                time.sleep(_YIELD_EVERY)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """As ``Consumer.settle``, from any thread."""
        if not self._lock.acquire(blocking=False):
            self._interrupt_and_lock()
        try:
            return self._consumer.settle(verdicts)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection. The next call opens a new connection."""
        self._consumer.close()

    def _interrupt_and_lock(self) -> None:
        """Acquire the lock, and interrupt a thread that holds the lock while it waits for jobs."""
        self._settling.add(threading.get_ident())
        try:
            while not self._lock.acquire(timeout=_INTERRUPT_EVERY):
                self._consumer.interrupt()
        finally:
            self._settling.discard(threading.get_ident())
