"""Timeouts: a job that runs longer than its ``timeout`` is notified. If the job runs on, its process must end.

A job that is cancelled is notified in the same way, with ``JobCancelled`` in the place of ``SoftTimeout``.

The notification must not break other code than the task's own. The kind of notification depends on where the job runs:

- A coroutine is cancelled by its event loop (``Runner``).
- A plain function in the main thread is interrupted by a signal. The handler runs in that thread, and raises
  ``SoftTimeout`` if the thread is in the task's own code or in an unprotected library. Protected packages have locks
  or connections, or swallow exceptions. Examples are ``threading``, ``logging`` and ``redis``. In a protected package,
  ``SoftTimeout`` is raised later, when the job is back in its own code (``safe_points``).
- A plain function on another thread must poll: ``current_job().check()`` raises ``SoftTimeout``. An exception raised
  from outside could arrive anywhere, even between a lock and its ``with`` block.
- A call of multiq itself (``enqueue``) raises before it returns (``multiq.timeout_notices``).

A job that still runs ``kill_after`` seconds after its notification is overdue.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Protocol

from multiq import timeout_notices
from multiq.job import JobContext
from multiq.retry import SoftTimeout
from multiq.worker.processes import fork

from .safe_points import Steps

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from multiq.worker.processes.inflight import Held, InflightWriter

    from .cancels import Cancel
    from .runner import TaskCall

_log = logging.getLogger("multiq.worker")

INTERRUPT = signal.SIGURG
"""The signal for a job in the main thread. The system ignores this signal by default, so a late signal does no harm."""

_STOOD_STILL = 1.0  # seconds without a check, after which the process counts as suspended
_LOOP_IS_BLOCKED = 0.1  # seconds without a callback of the loop; the heartbeat requests one every 25 ms
_RUNNER = "multiq.worker.execution.runner"

#: Packages that hold locks or connections, or that swallow exceptions. ``SoftTimeout`` is raised neither in their code
#: nor in code that they call.
_PROTECTED = frozenset(
    [
        "multiq",
        "_weakrefset",
        "asyncio",
        "concurrent",
        "importlib",
        "logging",
        "multiprocessing",
        "queue",
        "selectors",
        "sqlite3",
        "threading",
        "weakref",
        "greenstalk",
        "hiredis",
        "MySQLdb",
        "pymysql",
        "redis",
        "sqlalchemy",
    ]
)
#: Packages that call the task's own code. Nothing is raised in their code, but the code that they call is not
#: protected.
_PROTECTED_AT_THE_TOP = frozenset({"contextlib", "functools", "_bootstrap", "_frozen_importlib"})
#: Code of multiq that calls the task's own code. Nothing is raised in this code, but the task's code is not protected.
_CALLS_THE_TASK = frozenset({JobContext.step.__code__})
_PROTECTED_FUNCTIONS = frozenset({"__enter__", "__exit__", "__aenter__", "__aexit__", "__del__", "acquire", "release"})


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
        self._protected = _PROTECTED.union(protected)
        self._inflight = inflight
        self._running: dict[TimedJob, None] = {}
        self._lock = threading.Lock()
        self._can_interrupt = False
        self._handler = self._interrupt  # stored, because each access to a bound method creates a new object
        self._steps = Steps(self._raise_if_over)
        self._loop: AbstractEventLoop | None = None
        self._shared: SharedLoop | None = None
        self._loop_answered_at = float("inf")
        self._logged_stall = 0.0  # the beginning of the last stall that was logged
        self._checked_at = 0.0

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let ``INTERRUPT`` interrupt jobs in the main thread while the block lasts. Call it in the main thread."""
        before = fork.take_signal(INTERRUPT, self._handler)
        self._can_interrupt = True
        try:
            yield
        finally:
            self._can_interrupt = False
            fork.restore_signal(INTERRUPT, before)

    def share_loop(self, loop: AbstractEventLoop, shared: SharedLoop) -> None:
        self._loop, self._shared = loop, shared

    def begin(self, call: TaskCall, held: Held, *, thread: int | None) -> TimedJob:
        """Watch *call* until its deadline. *thread* is the job's thread, or None for a coroutine on the shared loop."""
        timed = TimedJob(call, held, call.deadline, self._kill_after, thread)
        if self._can_interrupt and timed.is_in_main_thread and fork.handler_of(INTERRUPT) is not self._handler:
            signal.signal(INTERRUPT, self._handler)  # an earlier job has replaced the handler
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
            timed.notify_at = now if task is None else now + _LOOP_IS_BLOCKED  # the loop may cancel the task earlier
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

    def lost_time(self, timed: TimedJob, since: float) -> float:
        """Return the seconds in which other jobs blocked the loop, and which are not yet added to the job's time.

        *since* is the end of the job's time. If the heartbeat has not run since then, one call into C has held the GIL,
        and the job that made this call is unknown. In this case, all time after *since* counts as blocked by other
        jobs.
        """
        lost_time, timed.blocked = timed.blocked, 0.0
        return lost_time if self._checked_at >= since else max(lost_time, time.monotonic() - since)

    def postpone(self, timed: TimedJob, seconds: float) -> None:
        """Do not notify the job before *seconds* seconds have passed. Also moves ``kill_at``."""
        timed.notify_at = time.monotonic() + seconds
        with self._lock:
            self._set_kill_at(timed, timed.notify_at + self._kill_after)

    def check(self) -> list[TimedJob]:
        """Notify each job that exceeds its timeout. Returns the overdue jobs, each one only once."""
        if not self._running:
            self._loop_answered_at = float("inf")
            return []
        now = time.monotonic()
        # Without a check for so long, the process may have been suspended.
        was_suspended = now - self._checked_at > _STOOD_STILL
        holder = self._blocks_the_loop(now, was_suspended=was_suspended)
        self._checked_at = now
        with self._lock:
            running = list(self._running)
        for timed in running:
            if timed.thread is None and holder is not False and holder is not timed.held:
                timed.blocked += now - max(timed.counted_at, self._loop_answered_at)
            timed.counted_at = now
        if was_suspended:
            self._spare(running, now)
        if holder is None:
            self._log_stuck_loop(running, now)
        return [timed for timed in running if self._is_overdue(timed, now, holder)]

    def is_loop_stuck(self) -> bool:
        """Whether the shared loop is blocked for too long, by code that belongs to no running job. Call it after
        ``check``.

        The limit is the longest timeout of the running jobs plus ``kill_after``. A job without a timeout may block the
        loop forever. While a job without a timeout runs, the loop counts as stuck only if the code belongs to an ended
        job.
        """
        shared = self._shared
        if shared is None or time.monotonic() - self._loop_answered_at <= _LOOP_IS_BLOCKED:
            return False
        with self._lock:
            longest = [timed.call.timeout or 0.0 for timed in self._running if timed.thread is None]
        if not longest or time.monotonic() - self._loop_answered_at <= max(longest) + self._kill_after:
            return False
        return shared.holder() is None and (shared.is_held_by_leftover() or len(longest) == shared.jobs())

    def is_held_by_leftover(self) -> bool:
        """Whether code of an ended job blocks the shared loop. In this case, no running job is responsible."""
        return self._shared is not None and self._shared.is_held_by_leftover()

    def _is_overdue(self, timed: TimedJob, now: float, holder: Held | bool | None) -> bool:
        """*holder*: False: the loop makes progress. None: an unknown job blocks the loop. Else the job that blocks the
        loop.
        """
        if now < timed.notify_at:
            return False
        if timed.thread is None and holder is not False and holder is not timed.held:
            with self._lock:  # another job blocks the loop, so this job cannot be notified
                self._set_kill_at(timed, now + self._kill_after)
            return False
        is_notified = timed.is_notified  # read once, because the job may raise its error itself at any time
        if is_notified and not timed.has_notice:
            self._begin_grace(timed, now)
        elif timed.thread is not None and not is_notified:
            self._notify(timed, timed.thread, now)
        if now < timed.kill_at or (timed.thread is None and holder is False and not is_notified):
            return False
        timed.kill_at = float("inf")
        return True

    def _log_stuck_loop(self, running: Sequence[TimedJob], now: float) -> None:
        """Log once that the loop is blocked, when a job cannot be notified because of this."""
        since, shared = self._loop_answered_at, self._shared
        if shared is None or since == self._logged_stall:
            return
        if not any(timed.thread is None and now >= timed.notify_at for timed in running):
            return
        self._logged_stall = since
        whose = "a job that has ended" if shared.is_held_by_leftover() else "a callback of an unknown job"
        _log.error("the event loop has been blocked by %s for %.1f s:\n%s", whose, now - since, shared.stack())

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
        if timed.is_in_main_thread and self._can_interrupt:
            signal.pthread_kill(thread, INTERRUPT)

    def _take_back_notice(self, timed: TimedJob) -> None:
        if timed.thread is not None:
            timeout_notices.pending.pop(timed.thread, None)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """The signal handler. The handler runs in the main thread, and may interrupt any code there."""
        self._raise_if_over(frame)
        if any(
            timed.is_in_main_thread and timed.has_notice and not timed.is_notified for timed in tuple(self._running)
        ):
            # The job is in a library, so the exception is raised when the job is back in its own code.
            self._steps.begin(each for each in _down_to_the_runner(frame) if each is not None)

    def _raise_if_over(self, frame: FrameType | None) -> None:
        now, thread = time.monotonic(), threading.get_ident()
        for timed in tuple(self._running):
            if timed.thread != thread or timed.notify_at > now or timed.is_notified:
                continue
            if (
                timed.has_notice and thread not in timeout_notices.pending
            ):  # a call of multiq has already raised ``SoftTimeout``
                timed.is_notified = True
            elif self._may_raise(frame):
                error = timed.take_error()
                timeout_notices.pending.pop(thread, None)
                raise error

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether the code is the task's own or an unprotected library, so that ``SoftTimeout`` may be raised."""
        if frame is None or _package(frame) in _PROTECTED_AT_THE_TOP or frame.f_code in _CALLS_THE_TASK:
            return False
        if frame.f_globals.get("__name__") == _RUNNER:  # the runner may be in the middle of its own bookkeeping
            return False
        for each in _down_to_the_runner(frame):
            if each is None:
                return False
            if each.f_code in _CALLS_THE_TASK:
                continue
            if _package(each) in self._protected or each.f_code.co_name in _PROTECTED_FUNCTIONS:
                return False
        return True

    def _blocks_the_loop(self, now: float, *, was_suspended: bool) -> Held | bool | None:
        """Return False if the shared loop makes progress. Otherwise return the job whose code blocks the loop, or None
        if this job is unknown.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        answered_at = min(self._loop_answered_at, now)
        if was_suspended:  # the job whose code runs right after a suspension does not block the loop
            answered_at = now
        self._loop_answered_at = answered_at
        loop.call_soon_threadsafe(self._loop_answers)
        if self._shared is None or now - answered_at <= _LOOP_IS_BLOCKED:
            return False
        return self._shared.holder()

    def _loop_answers(self) -> None:
        self._loop_answered_at = time.monotonic()

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


def stack_of(frame: FrameType | None) -> str | None:
    """Return the frames of the task's call, formatted as in a traceback."""
    if frame is None:
        return None
    frames = sum(each is not None for each in _down_to_the_runner(frame))
    return "".join(traceback.format_stack(frame, limit=frames or None))


def frame_of(thread: int | None) -> FrameType | None:
    return sys._current_frames().get(thread or 0)  # noqa: SLF001 - Python has no public way


def _down_to_the_runner(frame: FrameType | None) -> Iterator[FrameType | None]:
    """Yield the frames of the task's call, innermost first. If the runner is not below these frames, yield None at the
    end."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _RUNNER:
            return
        yield frame
        frame = frame.f_back
    yield None


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
