"""A pool of daemon threads, which starts a new thread in place of a thread that an ended job still occupies.

Python joins the threads of ``concurrent.futures`` when it exits, so a hung job would block the exit.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from multiq.formatting import many
from multiq.job import JobTasks, job_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("multiq.worker")

P = ParamSpec("P")
T = TypeVar("T")


class _Call(NamedTuple):
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    job: JobTasks | None
    """The tasks of the job that made the call."""


class ThreadPool(ThreadPoolExecutor):
    """Starts up to *most* threads when they are needed. Event loops accept only subclasses of ``ThreadPoolExecutor``.

    Each thread calls *at_end* before it ends. After a job's end, its calls may still occupy threads. If other calls
    wait for a thread, the occupied threads no longer count towards *most* (``write_off``).
    """

    def __init__(self, most: int, name: str, at_end: Callable[[], None] | None = None) -> None:
        super().__init__(most, name)  # starts no thread before ``submit``, which is overridden
        self._most = most
        self._name = name
        self._at_end = at_end
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._unfinished = 0  # waiting and running calls
        self._running: dict[Future[Any], JobTasks | None] = {}
        self._is_shut = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the pool is shut down: it accepts no calls")
            self._unfinished += 1
            self._calls.put(_Call(future, function, args, kwargs, job_tasks.get()))
            dropped = self._write_off()
            self._begin_threads(future)
        _cancel(dropped)
        return future

    def write_off(self) -> None:
        """Handle the end of a job.

        If other calls wait, one more thread is allowed for each thread that is still occupied by an ended job.
        """
        if self._unfinished <= self._most:
            return
        with self._lock:
            dropped = self._write_off()
            with contextlib.suppress(RuntimeError):  # after a refusal, the next call makes another attempt
                self._begin_threads(None)
        _cancel(dropped)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Accept no more calls. The threads end when the queue is empty. This method does not wait for the threads."""
        with self._lock:
            self._is_shut = True
            waiting = self._drained() if cancel_futures else []
            for _ in range(self._count):
                self._calls.put(None)
        _cancel(waiting)

    def _write_off(self) -> list[_Call]:
        """Stop counting threads that are occupied by ended jobs. Returns the waiting calls of those jobs, which the
        caller cancels.
        """
        if self._unfinished <= self._most or self._count < self._most or self._is_shut:
            return []
        left = [future for future, job in self._running.items() if job is not None and job.is_over]
        for future in left:
            del self._running[future]
        dropped = []
        for call in self._drained():
            if call.job is not None and call.job.is_over:
                dropped.append(call)
            else:
                self._calls.put(call)
        self._count -= len(left)
        self._unfinished -= len(left) + len(dropped)
        if left:
            _log.warning(
                "%s of ended jobs still run while other calls wait for a thread: the pool may start as many more",
                many(len(left), "thread"),
            )
        return dropped

    def _begin_threads(self, future: Future[Any] | None) -> None:
        """Start missing threads. Raises ``RuntimeError`` if the system refuses a thread and the pool has no other
        thread.
        """
        while self._count < min(self._unfinished, self._most) and not self._is_shut:
            self._count += 1
            try:
                threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
            except RuntimeError:
                self._count -= 1
                if self._count:
                    return
                if future is not None:
                    future.cancel()  # a later thread skips the call
                raise

    def _drained(self) -> list[_Call]:
        drained = []
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    drained.append(call)
        return drained

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args, kwargs, job = call
            with self._lock:  # an ended job's call is dropped here, or write_off finds it in _running
                is_left = job is not None and job.is_over and self._unfinished > self._most
                if not is_left:
                    self._running[future] = job
            if is_left:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as exc:  # noqa: BLE001 - passed on to the caller
                    future.set_exception(exc)
            with self._lock:
                is_written_off = not is_left and self._running.pop(future, self) is self
            if is_written_off:
                break  # other threads have replaced this thread
            del call, future, function, args, kwargs, job  # otherwise the objects would live until the next call
            with self._lock:
                self._unfinished -= 1
        if self._at_end is not None:
            self._at_end()


def _cancel(calls: list[_Call]) -> None:
    for call in calls:
        call.future.cancel()
