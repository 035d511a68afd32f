"""Runs the coroutines of event subscribers while jobs run.

With ``--concurrency``, the coroutines run on the worker's own event loop. Without ``--concurrency``, the first event
starts an event loop in a separate thread. The coroutines never run on the loop of another worker in the process,
because the other worker's loop may end earlier.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import TimeoutError as TimedOut
from typing import TYPE_CHECKING

from .driverkit.fork import forks
from .job import job_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .events import Event, EventSession

_log = logging.getLogger("multiq.events")

MAX_PENDING = 10_000  # the most running coroutines; the limit is reached only if subscribers are slower than the jobs
_LOOP_MARGIN = 0.5  # seconds by which the loop may answer late, because a job may block the loop

#: The event loops that a forked child has inherited. The list keeps the inherited loops in the child's memory. If the
#: child's garbage collector closed an inherited loop, the parent's loop would wake.
_inherited: list[_Loop] = []


class AsyncSubscribers:
    """Runs subscribers' coroutines for the workers that *sessions* lists.

    Any thread may call the methods. A forked child may call the methods, too.
    """

    def __init__(self, sessions: Sequence[EventSession]) -> None:
        self._sessions = sessions
        self._own: _Loop | None = None
        self._worker_loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._reset()

    def start(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        """Start *subscriber* with *event*. An error of the subscriber is logged."""
        self._loop().start(subscriber, event)

    def finish(self, loop: asyncio.AbstractEventLoop | None, patience: float) -> None:
        """Wait up to *patience* seconds for the subscribers on *loop*, the loop of a worker. Cancel the subscribers
        that are still unfinished.

        Afterwards, wait up to *patience* seconds for the subscribers on the separate thread's loop. Cancel the thread's
        unfinished subscribers only if the app has no other worker in this process.
        """
        if self._generation != forks.generation:
            self._reset()
        worker_loop = None if loop is None else self._worker_loops.pop(loop, None)
        if worker_loop is not None:
            worker_loop.finish(patience, cancel=True)
        own = self._own
        if own is not None:
            own.finish(patience, cancel=len(self._sessions) <= 1)

    def close(self) -> None:
        """Cancel the subscribers on the separate thread's loop, and end the thread's loop. No event may be emitted
        after this call."""
        with self._lock:
            own, self._own = self._own, None
        if isinstance(own, _OwnLoop):
            own.finish(0.0, cancel=True)
            own.close()

    def _loop(self) -> _Loop:
        if self._generation != forks.generation:
            self._reset()
        worker_loop = self._worker_loop()
        if worker_loop is not None:
            return self._worker_loops.setdefault(worker_loop, _Loop(worker_loop))
        with self._lock:
            if self._own is None:
                self._own = _OwnLoop()
            return self._own

    def _worker_loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop of the worker in which the event happened. None means that the worker is unknown, or has no
        loop."""
        sessions = list(self._sessions)
        if len(sessions) == 1 and sessions[0].generation == self._generation:
            return sessions[0].loop
        loops = [
            session.loop for session in sessions if session.generation == self._generation and session.loop is not None
        ]
        here = asyncio._get_running_loop() if loops else None  # noqa: SLF001 - a public function of asyncio
        return here if here in loops else None

    def _reset(self) -> None:
        """Forget all loops. A forked child calls ``_reset``, because the threads of its parent's loops do not run in
        the child."""
        _inherited.extend(loop for loop in (*self._worker_loops.values(), self._own) if loop is not None)
        self._worker_loops, self._own = {}, None
        self._lock = threading.Lock()
        self._generation = forks.generation


class _Loop:
    """An event loop of any thread, and the tasks that this class has started on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # strong references, because the loop itself keeps only weak references to its tasks
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False

    def start(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        self._loop.call_soon_threadsafe(self._start_task, subscriber, event)

    def finish(self, patience: float, *, cancel: bool) -> None:
        """Wait up to *patience* seconds for the tasks. With *cancel*, cancel the tasks that still run after *patience*
        seconds."""
        try:
            self._await(patience, cancel=cancel)
        except RuntimeError:  # another thread has closed the loop
            return

    def _await(self, patience: float, *, cancel: bool) -> None:
        done = asyncio.run_coroutine_threadsafe(self._finish(patience, cancel=cancel), self._loop)
        try:
            left = done.result(patience + _LOOP_MARGIN)
        except TimedOut:
            done.cancel()
            _log.warning("subscribers were not waited for: a job holds the event loop")
        else:
            if left and cancel:
                _log.warning(
                    "%d subscribers took longer than %g s at the worker's end, and were cancelled", left, patience
                )

    def _start_task(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        """Start a task. Must be called in the event loop's thread."""
        if len(self._tasks) >= MAX_PENDING:
            if not self._is_full:  # the error is logged only once each time the limit is reached
                _log.error("%d calls of subscribers run, so no more are started: a subscriber is too slow", MAX_PENDING)
            self._is_full = True
            return
        self._is_full = False
        job_tasks.set(None)  # affects only this callback's context; the subscriber may run longer than the event's job
        task = self._loop.create_task(_call(subscriber, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, patience: float, *, cancel: bool) -> int:
        """Wait for the tasks. The result is the number of tasks that still ran after *patience* seconds."""
        if not self._tasks:
            return 0
        _, left = await asyncio.wait(self._tasks, timeout=patience)
        if not cancel:
            return len(left)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LOOP_MARGIN / 2)
        return len(left)


class _OwnLoop(_Loop):
    """A loop in a separate daemon thread. A process that exits without ``finish`` does not wait for the loop's
    thread."""

    def __init__(self) -> None:
        super().__init__(asyncio.new_event_loop())
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="multiq-events", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001 - for example, SystemExit in a task that a subscriber made
                _log.exception("a task of a subscriber stopped the event loop; the loop runs again")

    def close(self) -> None:
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LOOP_MARGIN)
        if not self._thread.is_alive():
            self._loop.close()


async def _call(subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
    try:
        await subscriber(event)
    except (asyncio.CancelledError, GeneratorExit):  # cancelled by the loop
        raise
    except BaseException:  # noqa: BLE001 - the error is logged, and the job continues
        _log.exception("a subscriber of %s failed; the outcome of the job is not affected", type(event).__name__)
