"""A queue without tasks: any JSON value or raw bytes, in and out."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT, State, check_state, check_states
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
    from .backend import Consumer, Lease, QueueStats, Verdict
    from .errors import LeaseLost

_STEP_ASIDE = 0.0005  # seconds between two looks whether those that settle are through
_CALL_AGAIN = 0.002  # seconds after which whoever waits for jobs is interrupted: most calls are over before


class Queue:
    """One named queue of an app's connection. Threads may share it; each reserves on a connection of its own."""

    def __init__(self, app: App, name: str) -> None:
        self.name = check_name(name)
        self._app = app
        self._local = threading.local()
        self._desks: weakref.WeakSet[Desk] = weakref.WeakSet()

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
        """Add one job: bytes as they are, anything else as JSON.

        *delay* is seconds or a timedelta, *at* a datetime with a zone; *priority* 0 goes first; *ttr* is how long a
        reservation lasts, in seconds. With *connection* the job is written inside your own transaction on that
        connection, and exists exactly if you commit. *id* is an id of your own, one word of ASCII: as long as the
        queue has a job of this id, nothing is added or changed.

        Raises ``OptionInvalid``, ``PayloadInvalid``, ``PayloadTooLarge``, ``Unsupported``, ``EnqueueUncertain`` if it
        cannot be told whether the job is there, ``BackendError``.
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
        """Add many jobs in one round trip, with the same options. All or nothing where the backend can.

        *ids* are ids of your own, one for each job.

        Raises as ``enqueue``, and ``ArgumentsInvalid`` for one body where a list of them belongs.
        """
        if isinstance(bodies, str | bytes | dict):
            raise ArgumentsInvalid(f"{shown(bodies)} is one body: enqueue_many takes a list of them")
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
        """The next due job, waiting up to *timeout* seconds for it. Raises ``QueueEmpty`` if none came.

        Use it as a ``with`` block: leaving it acks the job, an exception releases it with a backoff.
        """
        jobs = self.reserve_many(1, timeout)
        if not jobs:
            raise QueueEmpty(f"queue {self.name!r} had no due job within {timeout:g} s")
        return jobs[0]

    def reserve_many(self, limit: int, timeout: float = 0) -> list[Job]:
        """Up to *limit* due jobs, waiting up to *timeout* seconds for the first; an empty list if none came."""
        desk = self._desk()
        leases = desk.reserve(check_count(limit, "limit"), check_timeout(timeout))
        return [Job(lease, desk) for lease in leases]

    # --- looking and managing ---

    def stats(self) -> QueueStats:
        """Counts of ready, delayed, reserved and buried jobs, and how long the queue is still paused."""
        return self._app.backend.stats(self.name)

    def peek(self, job_id: str) -> JobInfo:
        """One job, untouched. Raises ``JobNotFound``."""
        return JobInfo.of(self._app.backend.peek(self.name, check_id(job_id)))

    def jobs(self, state: str, *, limit: int = 100, after: str | None = None) -> JobPage:
        """The jobs in a state, a page at a time: pass a page's ``after`` to get the next one."""
        page = self._app.backend.jobs(
            self.name, check_state(state), limit=check_count(limit, "limit"), after=check_cursor(after)
        )
        return JobPage([JobInfo.of(record) for record in page.jobs], page.after)

    def delete(self, job_id: str) -> None:
        """The job never starts. Raises ``JobReserved`` if it runs, ``JobNotFound`` if it is not there."""
        self._app.backend.delete(self.name, check_id(job_id))

    def reschedule(
        self, job_id: str, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None
    ) -> JobHandle:
        """The job becomes due in *delay* seconds or at *at*, as if it were enqueued now.

        Returns its handle, with the id to use from now on. Raises ``JobReserved``, ``JobNotFound``.
        """
        backend = self._app.backend
        return JobHandle(backend, self.name, backend.reschedule(self.name, check_id(job_id), check_delay(delay, at)))

    def kick(self, limit: int = 1) -> int:
        """Up to *limit* buried jobs, the longest buried first, become ready. Returns how many."""
        return self._app.backend.kick(self.name, check_count(limit, "limit"))

    def kick_job(self, job_id: str) -> None:
        """One buried or delayed job becomes ready now. Raises ``JobNotFound``, ``JobReserved``."""
        self._app.backend.kick_job(self.name, check_id(job_id))

    def pause(self, seconds: float) -> None:
        """No new reservations for so long; delays and leases run on."""
        self._app.backend.pause(self.name, check_timeout(seconds, "seconds"))

    def resume(self) -> None:
        """End a pause now."""
        self._app.backend.resume(self.name)

    def purge(self, states: Sequence[str] | str = (State.READY, State.DELAYED, State.BURIED)) -> int:
        """Delete all jobs in these states, never reserved ones. Returns how many."""
        return self._app.backend.purge(self.name, check_states(states))

    def close(self) -> None:
        """Drop the connections of all threads that reserved. They open again if they are needed again."""
        for desk in list(self._desks):
            desk.close()

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    def _desk(self) -> Desk:
        """This thread's; a forked child has its own."""
        desk: Desk | None = getattr(self._local, "desk", None)
        if desk is None or desk.pid != os.getpid():
            desk = self._local.desk = Desk(self._app.backend.consumer([self.name]))
            self._desks.add(desk)
        return desk


class Desk:
    """The consumer of one thread, whose jobs any thread may settle: it is never used by two at a time.

    It closes when nobody has it any more: its thread has ended, and its jobs are forgotten.
    """

    def __init__(self, consumer: Consumer) -> None:
        self.pid = os.getpid()
        self._consumer = consumer
        self._lock = threading.Lock()
        self._callers: set[int] = set()  # threads that want to settle while somebody waits for jobs
        # not at exit: a daemon thread may be in the middle of a call, and the system closes everything anyway
        weakref.finalize(self, consumer.close).atexit = False

    def reserve(self, limit: int, timeout: float) -> list[Lease]:
        """As ``Consumer.reserve``; it lets others settle while it waits."""
        give_up_at = time.monotonic() + timeout
        while True:
            with self._lock:
                leases = self._consumer.reserve(limit, max(0.0, give_up_at - time.monotonic()))
            if leases or time.monotonic() >= give_up_at:
                return leases
            while self._callers:
                time.sleep(_STEP_ASIDE)

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """As ``Consumer.settle``, from any thread."""
        if not self._lock.acquire(blocking=False):
            self._call()
        try:
            return self._consumer.settle(verdicts)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Drop the connection. It opens again if it is needed again."""
        self._consumer.close()

    def _call(self) -> None:
        """Have the lock, from a thread that may be waiting with it for jobs that never come."""
        self._callers.add(threading.get_ident())
        try:
            while not self._lock.acquire(timeout=_CALL_AGAIN):
                self._consumer.interrupt()
        finally:
            self._callers.discard(threading.get_ident())
