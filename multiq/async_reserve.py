"""Reserves jobs for coroutines. One thread and one connection serve all coroutines that wait for jobs of a queue.

- No job is lost: jobs for a coroutine that was cancelled go to the next waiting coroutine. If no coroutine waits, or if
  much of the lease has passed, the jobs are given back. On some backends, a job that is given back has used an attempt.
- Coroutines are served in order: the thread reserves jobs for all waiting coroutines. The thread hands out the jobs in
  the order in which the coroutines began to wait.
- Each coroutine has its own timeout: a coroutine whose wait ends earlier than the current call interrupts the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from .async_calls import copy_error, running_loop, start_daemon, threads_of
from .backend import GiveBack
from .driverkit.fork import forks
from .errors import BackendUnavailable
from .formatting import many

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backend import Backend, Lease
    from .queue import SharedConsumer

_IDLE = 30.0  # seconds without a waiting coroutine, after which the thread ends
_MOST_JOBS = 1000  # the largest number of jobs that one call reserves
_PASSED_ON_SHARE = 1 / 3  # a job is passed on until this share of its ttr has passed; a worker touches a job then

_log = logging.getLogger("multiq.async")

#: The reservers of a parent process. A forked child keeps the reservers, because its garbage collector would report the
#: parent's tasks as destroyed.
_inherited: list[AsyncReserver] = []


class _Reserved(NamedTuple):
    """Jobs that one call has reserved."""

    leases: Sequence[Lease]
    consumer: SharedConsumer
    asked_at: float
    """The monotonic time from which the leases run."""


class AsyncReserver:
    """Reserves the jobs of one queue for coroutines on any event loop. The first coroutine starts the thread."""

    def __init__(self, backend: Backend, new_consumer: Callable[[], SharedConsumer]) -> None:
        self.generation = forks.generation
        self.backend = backend
        self._new_consumer = new_consumer
        self._changed = threading.Condition()
        self._waiters: OrderedDict[_Waiter, None] = OrderedDict()  # a list would need a search for each removal
        self._consumer: SharedConsumer | None = None  # set while the thread runs
        self._call_ends_at: float | None = None  # None while the thread makes no call

    async def reserve(self, limit: int, timeout: float) -> tuple[Sequence[Lease], SharedConsumer]:  # noqa: ASYNC109
        """Return the leases of up to *limit* jobs and their consumer. Waits up to *timeout* seconds for the first
        job."""
        waiter = _Waiter(limit, time.monotonic() + timeout, self._pass_on)
        self._add(waiter)
        try:
            jobs: _Reserved = await waiter.future
        except (asyncio.CancelledError, GeneratorExit):
            waiter.is_gone = True
            self._leave(waiter)
            raise
        else:
            return jobs.leases, jobs.consumer
        finally:
            del waiter  # without this line, the error and this frame would form a reference cycle

    def keep_from_collector(self) -> None:
        """Keep this object from being garbage-collected. A forked child calls no other method of an inherited
        object."""
        _inherited.append(self)

    def stop(self) -> None:
        """End all waits with ``BackendUnavailable``, and let the thread end. A later ``reserve`` starts another
        thread."""
        with self._changed:
            waiters, self._waiters = self._waiters, OrderedDict()
            self._interrupt()
            self._consumer = None
            self._changed.notify()
        for waiter in waiters:
            waiter.fail(BackendUnavailable("no job was reserved: the queue was closed while the coroutine waited"))

    def _add(self, waiter: _Waiter) -> None:
        with self._changed:
            if self._consumer is None:
                self._start()
            elif self._call_ends_at is None:
                self._changed.notify()
            elif waiter.deadline < self._call_ends_at:
                self._interrupt()
            self._waiters[waiter] = None  # last: if no thread was started, the caller gets an error and does not wait

    def _start(self) -> None:
        consumer = self._consumer = self._new_consumer()
        self._call_ends_at = None
        try:
            start_daemon(lambda: self._serve(consumer), "multiq-async-reserve")
        except RuntimeError as exc:
            self._consumer = None
            raise BackendUnavailable(f"no job was reserved, because no thread could be started: {exc}") from exc

    def _leave(self, waiter: _Waiter) -> None:
        """Handle the cancellation of a waiting coroutine."""
        if self.generation != forks.generation:
            return  # the parent's coroutine, and the lock may be held by a thread that does not exist here
        with self._changed:
            if waiter in self._waiters:
                del self._waiters[waiter]
                if not self._waiters:
                    self._interrupt()  # an uninterrupted call might reserve a job that no coroutine waits for
        waiter.refuse()

    def _interrupt(self) -> None:
        if self._consumer is not None and self._call_ends_at is not None:
            self._consumer.interrupt()

    def _serve(self, consumer: SharedConsumer) -> None:
        while waiters := self._next_waiters(consumer):
            self._reserve_for(waiters, consumer)
            del waiters  # without this line, an error and this frame would form a reference cycle

    def _next_waiters(self, consumer: SharedConsumer) -> Sequence[_Waiter]:
        """Wait for a coroutine, and return all waiting coroutines. An empty result means that no coroutine came, so the
        thread must end."""
        with self._changed:
            while self._consumer is consumer:
                if self._waiters:
                    waiters = tuple(self._waiters)
                    self._call_ends_at = min(waiter.deadline for waiter in waiters)
                    return waiters
                self._call_ends_at = None
                if not self._changed.wait(_IDLE) and not self._waiters and self._consumer is consumer:
                    self._consumer = None
        return ()

    def _reserve_for(self, waiters: Sequence[_Waiter], consumer: SharedConsumer) -> None:
        began = time.monotonic()
        limit = min(_MOST_JOBS, sum(waiter.limit for waiter in waiters))
        timeout = max(0.0, min(waiter.deadline for waiter in waiters) - began)
        try:
            leases = consumer.reserve(limit, timeout)
        except BaseException as exc:  # noqa: BLE001 - the callers get the error
            for waiter in self._taken(waiters):
                waiter.fail(exc)
            return
        finally:
            with self._changed:
                if self._consumer is consumer:
                    self._call_ends_at = None
        self._hand_out(_Reserved(leases, consumer, consumer.asked_at))
        now = time.monotonic()
        # only coroutines that have waited since the call began: the call may have looked before a later one asked
        for waiter in self._taken([waiter for waiter in waiters if waiter.deadline <= now]):
            waiter.serve(_Reserved([], consumer, now))

    def _pass_on(self, jobs: _Reserved) -> None:
        """Hand out the jobs of a coroutine that was cancelled before it got them.

        A job whose lease has run for long is given back. If coroutines are cancelled again and again before they get
        the job, the lease would end meanwhile. The next coroutine would get a job that another consumer may have, too.
        """
        age = time.monotonic() - jobs.asked_at
        give_back([lease for lease in jobs.leases if age > lease.ttr * _PASSED_ON_SHARE], jobs.consumer)
        self._hand_out(jobs._replace(leases=[lease for lease in jobs.leases if age <= lease.ttr * _PASSED_ON_SHARE]))

    def _hand_out(self, jobs: _Reserved) -> None:
        """Hand reserved jobs to the coroutines that wait now, and give the remaining jobs back.

        The coroutines that wait now need not be those that waited when the jobs were reserved. If these jobs were given
        back, coroutines whose waits are shorter than a reserve would never get a job.
        """
        remaining = list(jobs.leases)
        served: list[tuple[_Waiter, list[Lease]]] = []
        with self._changed:
            # after ``stop``, the consumer may be closed, and the coroutines wait for another consumer
            while remaining and self._waiters and self._consumer is jobs.consumer:
                waiter, _ = self._waiters.popitem(last=False)
                served.append((waiter, remaining[: waiter.limit]))
                del remaining[: waiter.limit]
            if served and not self._waiters:
                self._interrupt()  # as in _leave
        for waiter, part in served:
            waiter.serve(jobs._replace(leases=part))
        give_back(remaining, jobs.consumer)

    def _taken(self, waiters: Sequence[_Waiter]) -> list[_Waiter]:
        with self._changed:
            taken = [waiter for waiter in waiters if waiter in self._waiters]
            for waiter in taken:
                self._waiters.pop(waiter, None)
        return taken


class _Waiter:
    """A coroutine that waits for jobs."""

    def __init__(self, limit: int, deadline: float, pass_on: Callable[[_Reserved], None]) -> None:
        """*pass_on* gets the jobs of a coroutine that was cancelled before it got them."""
        self._pass_on = pass_on
        self._loop = running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.limit = limit
        self.deadline = deadline
        self.is_gone = False
        """Whether the coroutine has ended. If the coroutine was closed, its future is not done."""

    def serve(self, jobs: _Reserved) -> None:
        """Complete the wait. If the coroutine has gone, pass the jobs on. If its loop has gone, give the jobs back."""
        delivery = _Delivery(self, jobs)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(delivery)

    def fail(self, error: BaseException) -> None:
        try:
            self._loop.call_soon_threadsafe(self._fail, error)
        except RuntimeError:
            return

    def refuse(self) -> None:
        """Pass on the jobs of a completed wait if the coroutine was cancelled before it got the jobs."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            self._pass_on(self.future.result())

    def complete(self, jobs: _Reserved) -> None:
        """Hand the jobs to the coroutine, on its loop."""
        if self.is_gone or self.future.done():
            self._pass_on(jobs)
        else:
            self.future.set_result(jobs)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            if isinstance(error, StopIteration):  # a future refuses this exception
                error = RuntimeError(f"the call raised {error!r}")
            self.future.set_exception(copy_error(error))


class _Delivery:
    """Jobs on their way to a coroutine. If the loop never calls this object, because it was stopped or closed, the jobs
    are given back."""

    __slots__ = ("_jobs", "_waiter")

    def __init__(self, waiter: _Waiter, jobs: _Reserved) -> None:
        self._waiter = waiter
        self._jobs = jobs

    def __call__(self) -> None:
        jobs, self._jobs = self._jobs, self._jobs._replace(leases=())
        self._waiter.complete(jobs)

    def __del__(self) -> None:
        leases, consumer, _ = self._jobs
        if leases and consumer.generation == forks.generation:  # a forked child has a copy of this object
            # on another thread, because this thread may hold any lock when Python deletes the object
            with contextlib.suppress(RuntimeError):
                start_daemon(functools.partial(give_back, leases, consumer), "multiq-async-give-back")


def give_back(leases: Sequence[Lease], consumer: SharedConsumer) -> None:
    """Give jobs back on a thread."""
    if not leases:
        return
    try:
        threads_of(consumer.backend).submit(lambda: _give_back(leases, consumer))
    except BackendUnavailable as exc:
        _log_left(leases, exc)


def _give_back(leases: Sequence[Lease], consumer: SharedConsumer) -> None:
    try:
        consumer.settle([GiveBack(lease) for lease in leases])
    except Exception as exc:  # noqa: BLE001 - without this call, the leases end later
        _log_left(leases, exc)


def _log_left(leases: Sequence[Lease], exc: Exception) -> None:
    _log.warning("%s of a cancelled reserve stay reserved until their leases end: %s", many(len(leases), "job"), exc)
