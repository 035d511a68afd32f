"""Raises ``SoftTimeout`` or ``JobCancelled`` in a job of the main thread, and holds it back while a library runs.

A signal interrupts the main thread. Its handler raises the exception if the thread is in the task's own code, or in an
unprotected library. Protected packages have locks or connections, or swallow exceptions. Examples are ``threading``,
``logging`` and ``redis``. In a protected package, the exception is raised later, when the job is back in its own code.

This moment is found by tracing (``Steps``). A signal handler mostly runs when a thread returns from waiting. In a job
that often logs or waits for a ``queue.Queue``, the handler may always find the thread inside the library ``logging`` or
``queue``. Without tracing, the handler could then never interrupt the job. Tracing calls this module at the safe points
of the job's own code: backward jumps and function calls. The interpreter itself handles signals at these points, so an
exception cannot come between a lock and its ``with`` block. Tracing slows down a job, so only jobs that must end are
traced.
"""

from __future__ import annotations

import contextlib
import opcode
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from multiq import timeout_notices
from multiq.job import JobContext
from multiq.job_steps import run_step
from multiq.worker.processes import signal_handlers

from .task_stack import RUNNER, down_to_the_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from types import CodeType, FrameType

    from .timeouts import TimedJob

INTERRUPT = signal.SIGURG
"""The signal for a job in the main thread. The system ignores this signal by default, so a late signal does no harm."""

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
_CALLS_THE_TASK = frozenset({JobContext.step.__code__, run_step.__code__})
_PROTECTED_FUNCTIONS = frozenset({"__enter__", "__exit__", "__aenter__", "__aexit__", "__del__", "acquire", "release"})

_TURNS = frozenset(
    number for name, number in opcode.opmap.items() if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name
)


class MainThreadInterrupt:
    """Interrupts the jobs of the main thread.

    - *running*: the running jobs that have a timeout.
    - *protected*: additional top-level packages in which nothing is raised.
    """

    def __init__(self, running: Collection[TimedJob], protected: Iterable[str]) -> None:
        self._running = running
        self._protected = _PROTECTED.union(protected)
        self.is_on = False
        self.handler = self._interrupt  # stored, because each access to a bound method creates a new object
        self.steps = Steps(self._raise_if_over)

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Let ``INTERRUPT`` interrupt jobs in the main thread while the block lasts. Call it in the main thread."""
        before = signal_handlers.take_signal(INTERRUPT, self.handler)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
            signal_handlers.restore_signal(INTERRUPT, before)

    def send(self) -> None:
        """Interrupt the main thread, if this is possible. Thread-safe."""
        thread = threading.main_thread().ident
        if self.is_on and thread is not None:
            signal.pthread_kill(thread, INTERRUPT)

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """The signal handler. The handler runs in the main thread, and may interrupt any code there."""
        self._raise_if_over(frame)
        if any(
            timed.is_in_main_thread and timed.has_notice and not timed.is_notified for timed in tuple(self._running)
        ):
            # The job is in a library, so the exception is raised when the job is back in its own code.
            self.steps.begin(each for each in down_to_the_runner(frame) if each is not None)

    def _raise_if_over(self, frame: FrameType | None) -> None:
        now, thread = time.monotonic(), threading.get_ident()
        for timed in tuple(self._running):
            if timed.thread != thread or timed.notify_at > now or timed.is_notified:
                continue
            if (
                timed.has_notice and thread not in timeout_notices.pending
            ):  # a call of multiq has already raised ``SoftTimeout``
                timed.is_notified = True
            elif self.may_raise(frame):
                error = timed.take_error()
                timeout_notices.pending.pop(thread, None)
                raise error

    def may_raise(self, frame: FrameType | None) -> bool:
        """Whether the code is the task's own or an unprotected library, so that ``SoftTimeout`` may be raised."""
        if frame is None or _package(frame) in _PROTECTED_AT_THE_TOP or frame.f_code in _CALLS_THE_TASK:
            return False
        if frame.f_globals.get("__name__") == RUNNER:  # the runner may be in the middle of its own bookkeeping
            return False
        for each in down_to_the_runner(frame):
            if each is None:
                return False
            if each.f_code in _CALLS_THE_TASK:
                continue
            if _package(each) in self._protected or each.f_code.co_name in _PROTECTED_FUNCTIONS:
                return False
        return True


class Steps:
    """Calls *look* with the frame at each safe point of the traced thread. If *look* raises an exception, it is raised
    at the safe point."""

    def __init__(self, look: Callable[[FrameType], None]) -> None:
        self._look = look
        self._codes: dict[CodeType, bytes] = {}
        self._is_on = False

    def begin(self, frames: Iterable[FrameType]) -> None:
        """Trace these frames, and all later calls. Does nothing if a debugger already traces."""
        if self._is_on or sys.gettrace() is not None:
            return
        self._is_on = True
        for frame in frames:
            frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._stepped, False, True
        sys.settrace(self._called)

    def end(self) -> None:
        """Stop tracing. Call it in the same thread."""
        if self._is_on:
            self._is_on = False
            self._codes.clear()
            if sys.gettrace() == self._called:
                sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _what: Any) -> None:
        self._look(frame)

    def _stepped(self, frame: FrameType, event: str, _what: Any) -> Any:
        code = self._codes.get(frame.f_code)
        if code is None:
            code = self._codes[frame.f_code] = frame.f_code.co_code
        if event == "opcode" and code[frame.f_lasti] in _TURNS:
            self._look(frame)
        return self._stepped


def _package(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]
