"""Sends the enqueues of coroutines. Enqueues that wait at the same time are sent to the backend in one call.

- Few round trips: while a call for a queue is being made, the next enqueues for this queue are gathered. The next call
  sends all gathered enqueues. An enqueue that is alone is sent at once. If the event loop is busy, an enqueue waits
  until the loop has begun all enqueues that are ready.
- Order: one call for a queue is made at a time. A call sends its jobs in the order in which ``aenqueue`` was called.
- Each caller gets its own error: after an error, the jobs that were certainly not stored are sent again in two halves.
  If the backend could not be reached, no job is sent again.
- Uncertain jobs are reported: each caller gets an ``EnqueueUncertain`` about its own jobs. The method ``repeat`` of the
  error sends only the uncertain jobs.
- The jobs of one ``aenqueue_many`` are never split between two calls.
- A cancelled enqueue is not sent, or is sent to its end. A note of the ``CancelledError`` says whether the enqueue was
  sent.
- The caller's transaction: an enqueue with ``connection=`` is a call of its own. A cancelled enqueue with
  ``connection=`` waits for the call's end, because the call uses the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from .async_calls import (
    MOST_WAIT,
    Answer,
    PerOwner,
    copy_error,
    deliver,
    run_in_order,
    run_to_end,
    running_loop,
    threads_of,
)
from .driverkit.external_transaction import is_asyncio, of_asyncio
from .enqueue import add_jobs, make_job, make_jobs, put, put_one
from .errors import (
    BackendCorrupt,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    LockedByCaller,
    PayloadTooLarge,
    SchemaNotReady,
)
from .job import JobHandle
from .uncertain_enqueue import Delivery, later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .app import App
    from .backend import Backend, NewJob
    from .limits import Limit

T = TypeVar("T")

MOST_JOBS = 1000
"""The largest number of jobs that are sent together. A backend with ``atomic_batches`` stores up to ``MOST_JOBS`` jobs
in one step."""

MOST_BYTES = 1_000_000
"""The largest total size, in bytes, of the bodies that are sent together."""

_NOT_ABOUT_JOBS = (BackendUnavailable, BackendCorrupt, LockedByCaller, SchemaNotReady)
"""Errors that do not depend on the jobs: a call with other jobs would raise the same error."""


async def aopen(app: App, queue: str) -> Backend:
    """Return the backend of *app* for an enqueue. The enqueues of a loop keep their order."""
    if app.is_open:
        return app.backend
    try:
        return await app.abackend()
    except (asyncio.CancelledError, GeneratorExit) as exc:
        exc.add_note(f"multiq: the enqueue for queue {queue!r} was not sent")
        raise


async def aput_one(
    backend: Backend,
    queue: str,
    body: bytes,
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    own_id: str | None = None,
) -> JobHandle:
    """``put_one`` without blocking the event loop."""
    if connection is not None or not backend.gathers_enqueues:
        return await _beside(
            backend,
            connection,
            lambda own: put_one(
                backend, queue, body, priority=priority, delay=delay, ttr=ttr, connection=own, own_id=own_id
            ),
        )
    job = make_job(backend, body, priority=priority, delay=delay, ttr=ttr, own_id=own_id)
    (job_id,) = await _send(backend, queue, [job], is_one=True, has_own_ids=own_id is not None)
    return JobHandle(backend, queue, job_id)


async def astore_limits(backend: Backend, queue: str, limits: Sequence[Limit], connection: Any = None) -> None:
    """``store_limits`` without blocking the event loop. Enqueues that follow this call keep their order."""
    from .limits import missing_limits, store_limits

    if not missing_limits(backend, queue, limits):
        return
    if connection is not None:
        await _beside(backend, connection, lambda own: store_limits(backend, queue, limits, own))
        return
    try:
        await run_in_order(backend, store_limits, backend, queue, limits)
    except (asyncio.CancelledError, GeneratorExit) as exc:
        exc.add_note(f"multiq: the enqueue for queue {queue!r} was not sent")
        raise


async def aput(
    backend: Backend,
    queue: str,
    bodies: Sequence[bytes],
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    ids: Iterable[str] | None = None,
) -> list[JobHandle]:
    """``put`` without blocking the event loop."""
    if connection is not None or not backend.gathers_enqueues:
        return await _beside(
            backend,
            connection,
            lambda own: put(backend, queue, bodies, priority=priority, delay=delay, ttr=ttr, connection=own, ids=ids),
        )
    jobs = make_jobs(backend, bodies, priority=priority, delay=delay, ttr=ttr, ids=ids)
    if not jobs:
        return []
    stored = await _send(backend, queue, jobs, is_one=False, has_own_ids=ids is not None)
    return [JobHandle(backend, queue, job_id) for job_id in stored]


async def asend_jobs(
    backend: Backend, queue: str, jobs: Sequence[NewJob], *, connection: Any, is_one: bool, has_own_ids: bool
) -> list[str]:
    """``add_jobs`` without blocking the event loop."""
    if connection is not None or not backend.gathers_enqueues:
        return await _beside(backend, connection, lambda own: add_jobs(backend, queue, jobs, own, is_one=is_one))
    return await _send(backend, queue, jobs, is_one=is_one, has_own_ids=has_own_ids)


async def _beside(backend: Backend, connection: Any, enqueue: Callable[[Any], T]) -> T:
    """Call ``enqueue(connection)`` on a thread. With an asyncio connection of SQLAlchemy, SQLAlchemy calls *enqueue* on
    the connection's event loop."""
    if connection is None or not is_asyncio(connection):
        return await run_to_end(backend, enqueue, connection)
    answer: T = await of_asyncio(connection).run_sync(enqueue)
    return answer


async def _send(backend: Backend, queue: str, jobs: Sequence[NewJob], *, is_one: bool, has_own_ids: bool) -> list[str]:
    parcel = _Parcel(jobs, is_one=is_one, has_own_ids=has_own_ids)
    waiting = _waiting.of(backend)
    waiting.add(backend, queue, parcel)
    try:
        return await parcel.future
    except (asyncio.CancelledError, GeneratorExit) as exc:
        ids = ", ".join(job.id for job in jobs[:3]) + (" and others" if len(jobs) > 3 else "")
        if waiting.withdraw(parcel):
            exc.add_note(f"multiq: the enqueue for queue {queue!r} was not sent (ids {ids})")
        else:
            exc.add_note(f"multiq: the enqueue for queue {queue!r} was sent, and goes on (ids {ids})")
        raise
    finally:
        del parcel  # without this line, the error and this frame would form a reference cycle


async def finish_enqueues(backend: Backend) -> None:
    """Wait for the end of all enqueues that have already begun."""
    waiting = _waiting.of(backend)
    # an enqueue of no jobs ends after all earlier enqueues
    await asyncio.gather(*(_send(backend, queue, [], is_one=False, has_own_ids=False) for queue in waiting.queues()))


class _Parcel:
    """The jobs of one ``aenqueue`` or ``aenqueue_many``."""

    __slots__ = ("began", "future", "has_own_ids", "is_one", "is_taken", "is_withdrawn", "jobs", "loop", "size")

    def __init__(self, jobs: Sequence[NewJob], *, is_one: bool, has_own_ids: bool) -> None:
        self.loop = running_loop()
        self.future: asyncio.Future[list[str]] = self.loop.create_future()
        self.jobs = jobs
        self.is_one = is_one
        self.has_own_ids = has_own_ids
        self.began = time.monotonic()
        self.size = sum(len(job.body) for job in jobs)
        self.is_taken = False
        self.is_withdrawn = False


class _Waiting:
    """Keeps the parcels that wait to be sent to one backend. A parcel is the jobs of one call of ``aenqueue``.

    The dict ``_parcels`` has a queue as long as a thread sends the queue's parcels, or a loop is about to start such a
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parcels: dict[str, deque[_Parcel]] = {}
        self._late: dict[str, asyncio.AbstractEventLoop] = {}
        """By queue, the event loop that will start the calls after it has begun all enqueues that are ready."""
        self._last: tuple[str, Callable[[], asyncio.Future[list[str]] | None]] = ("", lambda: None)
        """The queue of the last parcel that has started calls, and a weak reference to the parcel's future."""

    def add(self, backend: Backend, queue: str, parcel: _Parcel) -> None:
        """Send *parcel* with the next call. Raises ``BackendUnavailable`` if the system refuses to start a thread."""
        with self._lock:
            parcels = self._parcels.get(queue)
            is_late = False
            if parcels is not None:
                parcels.append(parcel)
                if self._late.get(queue, parcel.loop) is parcel.loop:
                    return
                del self._late[queue]  # the loop that was to start the calls may not run any more
            else:
                self._parcels[queue] = deque([parcel])
                is_late = self._is_loop_busy(queue, parcel)
                self._last = queue, weakref.ref(parcel.future)
                if is_late:
                    self._late[queue] = parcel.loop
        if is_late:
            parcel.loop.call_soon(self._start_late, backend, queue, parcel.loop)
        else:
            self._start(backend, queue, parcel)

    def _is_loop_busy(self, queue: str, parcel: _Parcel) -> bool:
        """Whether the loop has not yet received the answer of the queue's last call.

        Many enqueues may be ready on a busy loop. A separate call for each enqueue would be too short to gather other
        enqueues.
        """
        last_queue, find = self._last
        last = None if last_queue != queue else find()
        return last is not None and not last.done() and last.get_loop() is parcel.loop

    def _start_late(self, backend: Backend, queue: str, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._late.get(queue) is not loop:  # another loop has started the call
                return
            del self._late[queue]
        with contextlib.suppress(BackendUnavailable):
            self._start(backend, queue, None)

    def _start(self, backend: Backend, queue: str, own: _Parcel | None) -> None:
        """Start the calls for the queue. *own*: the parcel whose caller gets the error that ``_start`` raises."""
        try:
            threads_of(backend).submit(lambda: self._send_all(backend, queue))
        except BackendUnavailable as exc:
            with self._lock:
                others = [other for other in self._parcels.pop(queue) if other is not own]
            _deliver([(other, copy_error(exc)) for other in others])
            raise

    def queues(self) -> list[str]:
        """The queues whose parcels a thread sends."""
        with self._lock:
            return list(self._parcels)

    def withdraw(self, parcel: _Parcel) -> bool:
        """Do not send *parcel*. Returns False if the parcel was sent."""
        with self._lock:
            parcel.is_withdrawn = not parcel.is_taken
            return parcel.is_withdrawn

    def _send_all(self, backend: Backend, queue: str) -> None:
        while parcels := self._take(queue):
            now = time.monotonic()
            late = [parcel for parcel in parcels if now - parcel.began > MOST_WAIT]
            if late:
                _deliver([(parcel, _too_late(queue)) for parcel in late])
                parcels = [parcel for parcel in parcels if now - parcel.began <= MOST_WAIT]
            if parcels:
                _send_together(backend, queue, parcels)
            del parcels, late  # without this line, an error and this frame would form a reference cycle

    def _take(self, queue: str) -> list[_Parcel]:
        """Return the parcels for the next call. If there are no parcels, the thread must end, and the next parcel
        starts another thread.
        """
        taken: list[_Parcel] = []
        count = size = 0
        own_ids: set[str] = set()
        with self._lock:
            parcels = self._parcels[queue]
            while parcels:
                parcel = parcels[0]
                if not parcel.is_withdrawn:
                    count += len(parcel.jobs)
                    size += parcel.size
                    if taken and (count > MOST_JOBS or size > MOST_BYTES):
                        break
                    if parcel.has_own_ids:  # all ids in one call must be different
                        ids = {job.id for job in parcel.jobs}
                        if taken and not own_ids.isdisjoint(ids):
                            break
                        own_ids |= ids
                    parcel.is_taken = True
                    taken.append(parcel)
                parcels.popleft()
            if not taken:
                del self._parcels[queue]
        return taken


_waiting = PerOwner(_Waiting)


def _send_together(backend: Backend, queue: str, parcels: list[_Parcel]) -> None:
    """Enqueue the jobs of all *parcels* in one call, and answer their callers."""
    now = time.monotonic()
    jobs = [later(job, now - parcel.began) for parcel in parcels for job in parcel.jobs]
    try:
        ids = iter(add_jobs(backend, queue, jobs) if jobs else ())
    except BaseException as exc:  # noqa: BLE001 - the callers get the error
        _fail(backend, queue, parcels, exc)
    else:
        _deliver([(parcel, [next(ids) for _ in parcel.jobs]) for parcel in parcels])
    finally:
        del parcels, jobs  # without this line, an error and this frame would form a reference cycle


def _fail(backend: Backend, queue: str, parcels: list[_Parcel], error: BaseException) -> None:
    """Answer the callers after a failed call. If one parcel may have caused the error, send the other parcels again."""
    there = error.accepted if isinstance(error, EnqueueUncertain | EnqueuePartial) else {}
    uncertain = {job.id for job in error.jobs} if isinstance(error, EnqueueUncertain) else set()
    cause = error
    if isinstance(error, EnqueueUncertain | EnqueuePartial):
        cause = error.__cause__ or BackendError(error.why)
    answers: list[tuple[_Parcel, list[str] | BaseException]] = []
    left: list[_Parcel] = []
    first = 0
    for parcel in parcels:
        count = len(parcel.jobs)
        stored = {at: there[first + at] for at in range(count) if first + at in there}
        unknown = [at for at in range(count) if parcel.jobs[at].id in uncertain]
        first += count
        if len(stored) == count:
            answers.append((parcel, list(stored.values())))
        elif stored or unknown:
            delivery = Delivery(backend, queue, parcel.jobs, parcel.began, is_one=parcel.is_one)
            assert isinstance(error, BackendError)  # noqa: S101 - only a BackendError has stored or uncertain jobs
            told = delivery.fail(stored, unknown, error)
            told.__cause__ = cause
            answers.append((parcel, told))
        else:
            left.append(parcel)
    if len(parcels) == 1 or isinstance(cause, _NOT_ABOUT_JOBS) or not isinstance(cause, BackendError | PayloadTooLarge):
        answers += [(parcel, cause if len(parcels) == 1 else copy_error(cause)) for parcel in left]
        left = []
    _deliver(answers)
    if len(left) < len(parcels):
        if left:
            _send_together(backend, queue, left)
        return
    half = len(left) // 2
    _send_together(backend, queue, left[:half])
    _send_together(backend, queue, left[half:])


def _deliver(answers: Sequence[tuple[_Parcel, list[str] | BaseException]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for parcel, answer in answers:
        if isinstance(answer, BaseException):
            complete = Answer(parcel.future, None, answer)
        else:
            complete = Answer(parcel.future, answer)
        by_loop.setdefault(parcel.loop, []).append(complete)
    for loop, of_loop in by_loop.items():
        deliver(loop, of_loop)


def _too_late(queue: str) -> BackendTimeout:
    return BackendTimeout(
        f"the enqueue for queue {queue!r} was not sent: for {MOST_WAIT:g} s, earlier calls have been waiting for the "
        "backend"
    )
