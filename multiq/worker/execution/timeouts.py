"""Timeouts: a job that runs longer than its ``timeout`` is notified. If the job runs on, its process must end.

A job that is cancelled is notified in the same way, with ``JobCancelled`` in the place of ``SoftTimeout``.

The notification must not break other code than the task's own. The kind of notification depends on where the job runs:

- A coroutine is cancelled by its event loop (``CoroutineTimer`` in ``blocked_loop``).
- A plain function in the main thread is interrupted by a signal, whose handler raises ``SoftTimeout`` as soon as this
  breaks no library (``soft_timeout``).
- A plain function on another thread must poll: ``current_job().check()`` raises ``SoftTimeout``. An exception raised
  from outside could arrive anywhere, even between a lock and its ``with`` block.
- A call of multiq itself (``enqueue``) raises before it returns (``multiq.timeout_notices``).

A job that still runs ``kill_after`` seconds after its notification is overdue.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from multiq import timeout_notices
from multiq.retry import SoftTimeout
from multiq.worker.processes import signal_handlers

from .blocked_loop import IS_BLOCKED, BlockedLoop
from .soft_timeout import INTERRUPT, MainThreadInterrupt

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from multiq.worker.processes.inflight import Held, InflightWriter

    from .cancels import Cancel
    from .task_call import TaskCall

_STOOD_STILL = 1.0  # seconds without a check, after which the process counts as suspended


class TimedJob:
    """A running job that has a timeout. Times are ``time.monotonic``."""

    __slots__ = (
        "blocked",
        "call",
        "counted_at",
        "error",
        "has_notice",
        "held",
        "is_in_main_thread",
        "kill_at",
        "notice",
        "notify_at",
        "thread",
        "was_spared",
    )

    def __init__(self, call: TaskCall, held: Held, deadline: float, kill_after: float, thread: int | None) -> None:
        self.call = call
        self.held = held
        self.notify_at = deadline
        self.kill_at = deadline + kill_after
        self.thread = thread  # None: a coroutine on a shared loop
        self.is_in_main_thread = thread is not None and thread == threading.main_thread().ident
        self.error: Callable[[], Exception] = SoftTimeout
        self.notice = call.job.notice or timeout_notices.Notice()
        self.has_notice = False  # the job was notified, or its notice is pending; ``kill_at`` follows from this moment
        self.was_spared = False  # ``kill_at`` was moved once because the process was suspended
        self.blocked = 0.0  # seconds in which other jobs blocked the loop, not yet added to the job's time
        self.counted_at = time.monotonic()

    @property
    def is_notified(self) -> bool:
        return self.notice.is_notified

    @is_notified.setter
    def is_notified(self, value: bool) -> None:
        self.notice.is_notified = value

    def take_error(self) -> Exception:
        """Return the error to raise in the job, which then counts as notified."""
        self.is_notified = True
        return self.error()


class Timeouts:
    """The timeouts of all running jobs. The heartbeat calls ``check``, and the threads of jobs call the other methods.

    - *kill_after*: seconds between a job's notification and the end of its process.
    - *protected*: additional top-level packages in which nothing is raised.
    - *inflight*: shows the supervisor when this process must end.
    """

    def __init__(
        self, kill_after: float, protected: Iterable[str] = (), inflight: InflightWriter | None = None
    ) -> None:
        self._kill_after = kill_after
        self._inflight = inflight
        self._running: dict[TimedJob, None] = {}
        self._lock = threading.Lock()
        self._interrupt = MainThreadInterrupt(self._running, protected)
        self._steps = self._interrupt.steps
        self.blocked_loop = BlockedLoop()
        self._checked_at = 0.0

    def interrupting(self) -> AbstractContextManager[None]:
        """Interrupt jobs in the main thread while the block lasts. Call it in the main thread."""
        return self._interrupt.handling()

    def begin(self, call: TaskCall, held: Held, *, thread: int | None) -> TimedJob:
        """Watch *call* until its deadline. *thread* is the job's thread, or None for a coroutine on the shared loop."""
        timed = TimedJob(call, held, call.deadline, self._kill_after, thread)
        interrupt = self._interrupt
        if (
            interrupt.is_on
            and timed.is_in_main_thread
            and signal_handlers.handler_of(INTERRUPT) is not interrupt.handler
        ):
            signal.signal(INTERRUPT, interrupt.handler)  # an earlier job has replaced the handler
        with self._lock:
            self._running[timed] = None
        self._publish(timed)
        return timed

    def end(self, timed: TimedJob) -> None:
        """Record that the job has ended. Nothing is raised in an ended job."""
        with self._lock:
            if timed in self._running:
                del self._running[timed]
                self._take_back_notice(timed)
        if timed.is_in_main_thread:
            self._steps.end()

    def cancel(self, held: Held, cancel: Cancel) -> bool:
        """Notify a running job that it is cancelled. Returns False if the job's call does not run yet, or has ended."""
        now = time.monotonic()
        with self._lock:
            call, task = held.call, held.task
            if call is None or (call.task.is_coroutine and task is None):
                return False
            timed = next((timed for timed in self._running if timed.held is held), None)
            if timed is None:
                timed = TimedJob(call, held, now, self._kill_after, call.thread)
                self._running[timed] = None
            elif timed.is_notified:  # the job's time is over, so the job is ending
                return True
            timed.error = cancel.error
            timed.notify_at = now if task is None else now + IS_BLOCKED  # the loop may cancel the task earlier
            cancel.notice = timed.notice
            if cancel.is_raised:  # read after ``notice`` is set, because the job may raise the error itself at any time
                timed.is_notified = True
            self._set_kill_at(timed, timed.notify_at + self._kill_after)
        if task is not None and not cancel.is_raised:
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the job has ended
                task.get_loop().call_soon_threadsafe(self._cancel_task, timed, task)
        return True

    def end_cancel(self, held: Held) -> None:
        """Record that a cancelled job has ended. Call it after ``held.call`` was set to None, in the job's thread."""
        with self._lock:
            timed = next((timed for timed in self._running if timed.held is held), None)
        if timed is not None:
            self.end(timed)

    def _cancel_task(self, timed: TimedJob, task: Task[Any]) -> None:
        """Runs in the loop's thread."""
        if not timed.is_notified and not task.done() and timed in self._running:
            self.mark_notified(timed)
            task.cancel()

    def mark_notified(self, timed: TimedJob) -> None:
        """Record that the job's event loop has just cancelled it."""
        with self._lock:
            # The order matters. The heartbeat ends the process for a notified job whose ``kill_at`` has passed. The old
            # ``kill_at`` may have passed while the process was suspended.
            self._set_kill_at(timed, time.monotonic() + self._kill_after)
            timed.has_notice = True
            timed.is_notified = True
            self._take_back_notice(timed)

    def postpone(self, timed: TimedJob, seconds: float) -> None:
        """Do not notify the job before *seconds* seconds have passed. Also moves ``kill_at``."""
        timed.notify_at = time.monotonic() + seconds
        with self._lock:
            self._set_kill_at(timed, timed.notify_at + self._kill_after)

    def check(self) -> list[TimedJob]:
        """Notify each job that exceeds its timeout. Returns the overdue jobs, each one only once."""
        if not self._running:
            self.blocked_loop.rest()
            return []
        now = time.monotonic()
        # Without a check for so long, the process may have been suspended.
        was_suspended = now - self._checked_at > _STOOD_STILL
        blocker = self.blocked_loop.blocker(now, was_suspended=was_suspended)
        self._checked_at = now
        with self._lock:
            running = list(self._running)
        self.blocked_loop.count_blocked_time(running, now, blocker)
        if was_suspended:
            self._spare(running, now)
        if blocker is None:
            self.blocked_loop.log_once(running, now)
        return [timed for timed in running if self._is_overdue(timed, now, blocker)]

    def is_loop_stuck(self) -> bool:
        """Whether code that belongs to no running job blocks the shared loop for too long. Call it after ``check``."""
        if not self.blocked_loop.is_blocked:
            return False
        with self._lock:
            timeouts = [timed.call.timeout or 0.0 for timed in self._running if timed.thread is None]
        return self.blocked_loop.is_stuck(timeouts, self._kill_after)

    def _is_overdue(self, timed: TimedJob, now: float, blocker: Held | bool | None) -> bool:
        """*blocker*: False: the loop makes progress. None: an unknown job blocks the loop. Else the job that blocks the
        loop.
        """
        if now < timed.notify_at:
            return False
        if timed.thread is None and blocker is not False and blocker is not timed.held:
            with self._lock:  # another job blocks the loop, so this job cannot be notified
                self._set_kill_at(timed, now + self._kill_after)
            return False
        is_notified = timed.is_notified  # read once, because the job may raise its error itself at any time
        if is_notified and not timed.has_notice:
            self._begin_grace(timed, now)
        elif timed.thread is not None and not is_notified:
            self._notify(timed, timed.thread, now)
        if now < timed.kill_at or (timed.thread is None and blocker is False and not is_notified):
            return False
        timed.kill_at = float("inf")
        return True

    def _spare(self, running: Sequence[TimedJob], now: float) -> None:
        """Give coroutines that could not be notified during a suspension ``kill_after`` seconds from now.

        A job gets this time only once. A job that makes one long call into C after another must end.
        """
        for timed in running:
            if timed.thread is None and now >= timed.notify_at and not (timed.is_notified or timed.was_spared):
                timed.was_spared = True
                with self._lock:
                    self._set_kill_at(timed, max(timed.kill_at, now + self._kill_after))

    def _begin_grace(self, timed: TimedJob, now: float) -> None:
        """The job has raised its error itself, in ``check``, before this heartbeat."""
        with self._lock:
            if not timed.has_notice:
                self._set_kill_at(timed, max(timed.kill_at, now + self._kill_after))
                timed.has_notice = True

    def _notify(self, timed: TimedJob, thread: int, now: float) -> None:
        with self._lock:
            if not timed.has_notice:
                # a job is always notified before its process ends
                self._set_kill_at(timed, max(timed.kill_at, now + self._kill_after))
            if timed not in self._running or timed.is_notified:
                return
            if (
                timed.has_notice and thread not in timeout_notices.pending
            ):  # a call of multiq has already raised ``SoftTimeout``
                timed.is_notified = True
                return
            timeout_notices.pending[thread] = timed.take_error
            timed.has_notice = True  # set after ``pending``, because a notice that is not pending counts as raised
            if timed.is_notified:  # the job has raised the error itself, in ``check``, since the lines above
                self._take_back_notice(timed)
                return
        if timed.is_in_main_thread:
            self._interrupt.send()

    def _take_back_notice(self, timed: TimedJob) -> None:
        if timed.thread is not None:
            timeout_notices.pending.pop(timed.thread, None)

    def _set_kill_at(self, timed: TimedJob, kill_at: float) -> None:
        """Set ``kill_at``. If the job still runs, also write it to the in-flight table. Call it under the lock.

        The slot of an ended job may belong to another lease. If the time were written to that slot, the supervisor
        would kill this process for the wrong job.
        """
        timed.kill_at = kill_at
        if timed in self._running:
            self._publish(timed)

    def _publish(self, timed: TimedJob) -> None:
        if self._inflight is not None:
            self._inflight.set_kill_at(timed.held, timed.kill_at)
