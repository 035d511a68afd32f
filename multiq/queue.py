"""A queue without tasks: any JSON value or raw bytes, in and out."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from .backend import PRIORITY_DEFAULT, TTR_DEFAULT, NewJob, State
from .codec import encode_json
from .errors import BackendTimeout, BackendUnavailable, QueueEmpty
from .ids import new_ids
from .job import Job, JobHandle, JobInfo, JobPage
from .names import check_name
from .options import check_count, check_delay, check_priority, check_state, check_states, check_timeout, check_ttr

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Sequence

    from .app import App
    from .backend import Backend, Consumer, QueueStats

T = TypeVar("T")

#: seconds that an enqueue keeps trying when the backend drops a connection; ids make the repetition harmless
PATIENCE = 1.0
_FIRST_PAUSE = 0.02


class Queue:
    """One named queue of an app's connection. Threads may share it; each reserves on a connection of its own."""

    def __init__(self, app: App, name: str) -> None:
        self.name = check_name(name)
        self._app = app
        self._local = threading.local()

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
    ) -> JobHandle:
        """Add one job: bytes as they are, anything else as JSON.

        *delay* is seconds or a timedelta, *at* a datetime with a zone; *priority* 0 goes first; *ttr* is how long a
        reservation lasts, in seconds. With *connection* the job is written inside your own transaction on that
        connection, and exists exactly if you commit.

        Raises ``OptionInvalid``, ``PayloadInvalid``, ``PayloadTooLarge``, ``Unsupported``, ``BackendError``.
        """
        return self.enqueue_many([body], delay=delay, at=at, priority=priority, ttr=ttr, connection=connection)[0]

    def enqueue_many(
        self,
        bodies: Iterable[Any],
        *,
        delay: float | dt.timedelta | None = None,
        at: dt.datetime | None = None,
        priority: int = PRIORITY_DEFAULT,
        ttr: float = TTR_DEFAULT,
        connection: Any = None,
    ) -> list[JobHandle]:
        """Add many jobs in one round trip, with the same options. All or nothing where the backend can."""
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
        consumer = self._consumer()
        leases = consumer.reserve(check_count(limit, "limit"), check_timeout(timeout))
        return [Job(lease, consumer) for lease in leases]

    # --- looking and managing ---

    def stats(self) -> QueueStats:
        """Counts of ready, delayed, reserved and buried jobs, and how long the queue is still paused."""
        return self._app.backend.stats(self.name)

    def peek(self, job_id: str) -> JobInfo:
        """One job, untouched. Raises ``JobNotFound``."""
        return JobInfo.of(self._app.backend.peek(self.name, job_id))

    def jobs(self, state: str, *, limit: int = 100, after: str | None = None) -> JobPage:
        """The jobs in a state, a page at a time: pass a page's ``after`` to get the next one."""
        page = self._app.backend.jobs(self.name, check_state(state), limit=check_count(limit, "limit"), after=after)
        return JobPage([JobInfo.of(record) for record in page.jobs], page.after)

    def delete(self, job_id: str) -> None:
        """The job never starts. Raises ``JobReserved`` if it runs, ``JobNotFound`` if it is not there."""
        self._app.backend.delete(self.name, job_id)

    def reschedule(
        self, job_id: str, delay: float | dt.timedelta | None = None, *, at: dt.datetime | None = None
    ) -> JobHandle:
        """The job becomes due in *delay* seconds or at *at*, as if it were enqueued now.

        Returns its handle, with the id to use from now on. Raises ``JobReserved``, ``JobNotFound``.
        """
        backend = self._app.backend
        return JobHandle(backend, self.name, backend.reschedule(self.name, job_id, check_delay(delay, at)))

    def kick(self, limit: int = 1) -> int:
        """Up to *limit* buried jobs, the longest buried first, become ready. Returns how many."""
        return self._app.backend.kick(self.name, check_count(limit, "limit"))

    def kick_job(self, job_id: str) -> None:
        """One buried or delayed job becomes ready now. Raises ``JobNotFound``, ``JobReserved``."""
        self._app.backend.kick_job(self.name, job_id)

    def pause(self, seconds: float) -> None:
        """No new reservations for so long; delays and leases run on."""
        self._app.backend.pause(self.name, check_timeout(seconds, "seconds"))

    def resume(self) -> None:
        """End a pause now."""
        self._app.backend.resume(self.name)

    def purge(self, states: Sequence[str] | str = (State.READY, State.DELAYED, State.BURIED)) -> int:
        """Delete all jobs in these states, never reserved ones. Returns how many."""
        return self._app.backend.purge(self.name, check_states(states))

    def __repr__(self) -> str:
        return f"Queue({self.name!r})"

    def _consumer(self) -> Consumer:
        """This thread's consumer."""
        consumer: Consumer | None = getattr(self._local, "consumer", None)
        if consumer is None:
            consumer = self._local.consumer = self._app.backend.consumer([self.name])
            self._app.on_close(consumer.close)
        return consumer


def put(
    backend: Backend, queue: str, bodies: Sequence[bytes], *, priority: int, delay: float, ttr: float, connection: Any
) -> list[JobHandle]:
    """Enqueue checked bodies with checked options."""
    jobs = [
        NewJob(body, job_id, priority, delay, ttr) for body, job_id in zip(bodies, new_ids(len(bodies)), strict=True)
    ]
    if not jobs:
        return []
    if connection is not None:
        ids = backend.enqueue(queue, jobs, connection=connection)
    else:
        ids = _persist(backend, lambda: backend.enqueue(queue, jobs))
    return [JobHandle(backend, queue, job_id) for job_id in ids]


def _persist(backend: Backend, call: Callable[[], T]) -> T:
    """Repeat a call that a dropped connection broke: the jobs' ids make sure that nothing is added twice.

    What ran into its deadline is not repeated, and neither is anything on a backend that chooses ids itself.
    """
    give_up_at = time.monotonic() + PATIENCE
    pause = _FIRST_PAUSE
    while True:
        try:
            return call()
        except BackendTimeout:
            raise
        except BackendUnavailable:
            if not backend.declared.client_ids or time.monotonic() + pause > give_up_at:
                raise
            time.sleep(pause)
            pause *= 2
