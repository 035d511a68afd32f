"""Where subscribers that are coroutines run: beside the jobs, on one event loop of the process.

With ``--concurrency`` that is the worker's own loop; elsewhere a thread of its own has one, begun at the first event.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import TimeoutError as TimedOut
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .events import Event

_log = logging.getLogger("multiq.events")

MOST = 10_000  # events that are being told at a time: beyond that somebody is slower than the jobs, and memory ends
_LATE = 0.5  # seconds beyond its patience that a loop may take to say how far it got: a job may hold it

_inherited: list[_Loop] = []  # of a parent: closing one in a forked child would stir the parent's


class Background:
    """Starts coroutines, and waits for them at the end. Any thread may call it, in a forked child, too."""

    def __init__(self) -> None:
        self._guest: _Loop | None = None
        self._own: _Loop | None = None
        self._begin_anew()

    def start(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        """Tell *subscriber* of *event*, soon. What it raises is logged."""
        self._loop().start(subscriber, event)

    def move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, use this loop, which somebody else runs."""
        self._guest = _Loop(loop)

    def finish(self, patience: float) -> None:
        """Wait for all that has been started, so many seconds, and cancel the rest. Leaves all loops."""
        if self._pid != os.getpid():
            self._begin_anew()
        for loop in (self._guest, self._own):
            if loop is not None:
                loop.finish(patience)
        with self._lock:
            own, self._own, self._guest = self._own, None, None
        if isinstance(own, _OwnLoop):
            own.close()

    def _loop(self) -> _Loop:
        if self._pid != os.getpid():
            self._begin_anew()
        if self._guest is not None:
            return self._guest
        with self._lock:
            if self._own is None:
                self._own = _OwnLoop()
            return self._own

    def _begin_anew(self) -> None:
        """In a forked child: its parent's threads are not here."""
        _inherited.extend(loop for loop in (self._guest, self._own) if loop is not None)
        self._guest = self._own = None
        self._lock = threading.Lock()
        self._pid = os.getpid()


class _Loop:
    """An event loop that runs in some thread, and what was started on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        self._is_full = False

    def start(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        self._loop.call_soon_threadsafe(self._begin, subscriber, event)

    def finish(self, patience: float) -> None:
        done = asyncio.run_coroutine_threadsafe(self._finish(patience), self._loop)
        try:
            left = done.result(patience + _LATE)
        except TimedOut:
            done.cancel()
            _log.warning("subscribers were not waited for: a job holds the event loop")
        else:
            if left:
                _log.warning(
                    "%d subscribers took longer than %g s at the worker's end, and were cancelled", left, patience
                )

    def _begin(self, subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
        """In the loop's thread."""
        if len(self._tasks) >= MOST:
            if not self._is_full:  # told once for each time that it fills up
                _log.error("%d events are being told at a time, so others are not: a subscriber is too slow", MOST)
            self._is_full = True
            return
        self._is_full = False
        task = self._loop.create_task(_tell(subscriber, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, patience: float) -> int:
        """Returns how many had to be cancelled."""
        if not self._tasks:
            return 0
        _, left = await asyncio.wait(self._tasks, timeout=patience)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_LATE / 2)
        return len(left)


class _OwnLoop(_Loop):
    """A loop with a thread of its own. It is a daemon: who leaves without a finish does not wait for it."""

    def __init__(self) -> None:
        super().__init__(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._loop.run_forever, name="multiq-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LATE)
        if not self._thread.is_alive():
            self._loop.close()


async def _tell(subscriber: Callable[[Event], Awaitable[object]], event: Event) -> None:
    try:
        await subscriber(event)
    except (Exception, SystemExit):  # noqa: BLE001 - logged, and the job goes on
        _log.exception("a subscriber of %s failed; the job's fate is not affected", type(event).__name__)
