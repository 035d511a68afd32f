"""Notices that a job or a callback blocks the event loop that coroutine jobs share.

The blocked time does not count towards the timeouts of the other jobs on the loop (``CoroutineTimer``). A process whose
loop is blocked for too long must end (``BlockedLoop.is_stuck``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Sequence

    from multiq.worker.processes.inflight import Held

    from .timeouts import TimedJob, Timeouts

_log = logging.getLogger("multiq.worker")

IS_BLOCKED = 0.1  # seconds without a callback of the loop; the heartbeat requests one every 25 ms
_LATE = 0.05  # seconds; a job's timeout is extended only if other jobs block the loop for longer than this


class SharedLoop(Protocol):
    """An event loop that several jobs share."""

    def holder(self) -> Held | None:
        """Return the job whose code the loop runs now. None if the job is unknown or there is no job."""

    def is_held_by_leftover(self) -> bool:
        """Whether the loop runs code of an ended job."""

    def jobs(self) -> int:
        """The number of jobs on the loop."""

    def stack(self) -> str | None:
        """Return the stack of the loop's thread as text."""


class BlockedLoop:
    """Watches the shared loop. The heartbeat calls ``blocker``, and then ``count_blocked_time``."""

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None
        self._shared: SharedLoop | None = None
        self._answered_at = float("inf")
        self._counted_at = 0.0
        self._logged_stall = 0.0  # the beginning of the last stall that was logged

    def watch(self, loop: AbstractEventLoop, shared: SharedLoop) -> None:
        self._loop, self._shared = loop, shared

    def rest(self) -> None:
        """Note that no job with a timeout runs, so that the loop is not asked until the next one."""
        self._answered_at = float("inf")

    def blocker(self, now: float, *, was_suspended: bool) -> Held | bool | None:
        """Return False if the shared loop makes progress. Otherwise return the job whose code blocks the loop, or None
        if this job is unknown.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        answered_at = min(self._answered_at, now)
        if was_suspended:  # the job whose code runs right after a suspension does not block the loop
            answered_at = now
        self._answered_at = answered_at
        loop.call_soon_threadsafe(self._answers)
        if self._shared is None or now - answered_at <= IS_BLOCKED:
            return False
        return self._shared.holder()

    def count_blocked_time(self, running: Sequence[TimedJob], now: float, blocker: Held | bool | None) -> None:
        """Add the time since the last call to ``TimedJob.blocked``, for each job that another job has blocked."""
        self._counted_at = now
        for timed in running:
            if timed.thread is None and blocker is not False and blocker is not timed.held:
                timed.blocked += now - max(timed.counted_at, self._answered_at)
            timed.counted_at = now

    def lost_time(self, timed: TimedJob, since: float) -> float:
        """Return the seconds in which other jobs blocked the loop, and which are not yet added to the job's time.

        *since* is the end of the job's time. If the heartbeat has not run since then, one call into C has held the GIL,
        and the job that made this call is unknown. In this case, all time after *since* counts as blocked by other
        jobs.
        """
        lost_time, timed.blocked = timed.blocked, 0.0
        return lost_time if self._counted_at >= since else max(lost_time, time.monotonic() - since)

    def log_once(self, running: Sequence[TimedJob], now: float) -> None:
        """Log once that the loop is blocked, when a job cannot be notified because of this."""
        since, shared = self._answered_at, self._shared
        if shared is None or since == self._logged_stall:
            return
        if not any(timed.thread is None and now >= timed.notify_at for timed in running):
            return
        self._logged_stall = since
        whose = "a job that has ended" if shared.is_held_by_leftover() else "a callback of an unknown job"
        _log.error("the event loop has been blocked by %s for %.1f s:\n%s", whose, now - since, shared.stack())

    @property
    def is_blocked(self) -> bool:
        return self._shared is not None and time.monotonic() - self._answered_at > IS_BLOCKED

    def is_stuck(self, timeouts: Sequence[float], kill_after: float) -> bool:
        """Whether the loop is blocked for too long, by code that belongs to no running job.

        *timeouts*: the timeouts of the running jobs on the loop. The limit is the longest of them plus *kill_after*. A
        job without a timeout may block the loop forever. While a job without a timeout runs, the loop counts as stuck
        only if the code belongs to an ended job.
        """
        shared = self._shared
        if shared is None or not timeouts or time.monotonic() - self._answered_at <= max(timeouts) + kill_after:
            return False
        return shared.holder() is None and (shared.is_held_by_leftover() or len(timeouts) == shared.jobs())

    def is_held_by_leftover(self) -> bool:
        """Whether code of an ended job blocks the loop. In this case, no running job is responsible."""
        return self._shared is not None and self._shared.is_held_by_leftover()

    def _answers(self) -> None:
        self._answered_at = time.monotonic()


class CoroutineTimer:
    """Expires a coroutine's ``asyncio.timeout`` at its deadline. Time in which other jobs block the loop does not
    count.
    """

    def __init__(self, timed: TimedJob, timeouts: Timeouts) -> None:
        self.patience = asyncio.timeout(None)
        self._timed = timed
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._plan(self._loop.time() + timed.notify_at - time.monotonic())

    def cancel(self) -> None:
        self._handle.cancel()

    def _plan(self, at: float) -> None:
        self._at = at
        self._handle = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        now = self._loop.time()
        lost_time = self._timeouts.blocked_loop.lost_time(self._timed, self._at) if self._timed.thread is None else 0.0
        if self._timed.is_notified:
            return  # current_job().check() has notified the job, so the job may clean up now
        if lost_time > _LATE:
            self._timeouts.postpone(self._timed, lost_time)
            self._plan(now + lost_time)
        else:
            self._timeouts.mark_notified(self._timed)
            self.patience.reschedule(now)
