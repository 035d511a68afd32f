"""Time limits: a job that runs longer than its ``timeout`` is told so; what does not heed it ends with its process.

A coroutine is cancelled on its event loop. A plain function finds ``SoftTimeout`` raised in its own code, between two
of its lines: never in the middle of a driver or of multiq itself, whose connections would be out of step then. What
is deaf to that (a call into C, code that catches everything) is over its limit for good a little later.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING

from multiq import notices
from multiq.retry import SoftTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from multiq.backend import Lease

    from .runner import Call

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Limit:
    """One running job and its moments, as ``time.monotonic``."""

    __slots__ = ("call", "has_notice", "is_told", "kill_at", "tell_at", "thread")

    def __init__(self, call: Call, timeout: float, kill_after: float, thread: int | None) -> None:
        now = time.monotonic()
        self.call = call
        self.tell_at = now + timeout
        self.kill_at = now + timeout + kill_after
        self.thread = thread  # None: a coroutine, which its loop cancels
        self.is_told = thread is None
        self.has_notice = False


class Limits:
    """The limits of all jobs that run now. ``tell`` is called by whoever watches, the rest by the jobs' own threads.

    *untouchable* are the top-level packages in whose code nothing is ever raised.
    """

    def __init__(self, kill_after: float, untouchable: Iterable[str]) -> None:
        self._kill_after = kill_after
        self._untouchable = frozenset(untouchable)
        self._running: dict[int, Limit] = {}
        self._lock = threading.Lock()
        self.on_begin: Callable[[Lease, float], None] | None = None

    def begin(self, call: Call, timeout: float, *, thread: int | None) -> Limit:
        """From now on *call* may run for *timeout* seconds, in the thread of this identity if it is no coroutine."""
        limit = Limit(call, timeout, self._kill_after, thread)
        with self._lock:
            self._running[id(limit)] = limit
        if self.on_begin is not None:
            self.on_begin(call.job.lease, limit.kill_at)
        return limit

    def end(self, limit: Limit) -> None:
        """It has ended: nothing is raised any more. May be called twice."""
        with self._lock:
            if self._running.pop(id(limit), None) is None or limit.thread is None:
                return
            notices.waiting.discard(limit.thread)
            if limit.is_told:
                _raise_in_thread(ctypes.c_ulong(limit.thread), None)  # takes back what has not got there yet

    def tell(self) -> None:
        """Tell each job that runs longer than it may, once."""
        if not self._running:
            return
        now = time.monotonic()
        with self._lock:
            for limit in self._running.values():
                if limit.tell_at <= now and not limit.is_told and limit.thread is not None:
                    self._tell(limit, limit.thread)

    def overdue(self) -> list[Call]:
        """What did not listen, each once."""
        if not self._running:
            return []
        now = time.monotonic()
        with self._lock:
            late = [limit for limit in self._running.values() if limit.kill_at <= now]
            for limit in late:
                limit.kill_at = float("inf")
        return [limit.call for limit in late]

    def _tell(self, limit: Limit, thread: int) -> None:
        if limit.has_notice and thread not in notices.waiting:  # it was told on its way out
            limit.is_told = True
        elif self._is_in_own_code(thread):
            notices.waiting.discard(thread)
            limit.is_told = True
            _raise_in_thread(ctypes.c_ulong(thread), ctypes.py_object(SoftTimeout))
        else:
            limit.has_notice = True
            notices.waiting.add(thread)

    def _is_in_own_code(self, thread: int) -> bool:
        """Whether a thread is in its job's own code, all the way down from the runner's."""
        frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - there is no other way to ask
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module == "multiq.worker.runner":
                return True
            if module.partition(".")[0] in self._untouchable:
                return False
            frame = frame.f_back
        return False
