"""A pool of threads that no process waits for when it ends: those of ``concurrent.futures`` are joined at the exit."""

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
    """That of the job which has made it."""


class DaemonThreads(ThreadPoolExecutor):
    """Begins threads as they are needed, up to *most*. A subclass because event loops accept no other executors.

    Each calls *at_end* before it ends. A thread that still runs the call of a job that has ended does not count once
    other calls wait for it (``write_off``).
    """

    def __init__(self, most: int, name: str, at_end: Callable[[], None] | None = None) -> None:
        super().__init__(most, name)  # it begins none before its own ``submit``
        self._most = most
        self._name = name
        self._at_end = at_end
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._unfinished = 0  # calls that wait or run
        self._running: dict[Future[Any], JobTasks | None] = {}
        self._is_shut = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the pool is shut down: no more calls begin")
            self._unfinished += 1
            self._calls.put(_Call(future, function, args, kwargs, job_tasks.get()))
            dropped = self._write_off()
            self._begin_threads(future)
        _cancel(dropped)
        return future

    def write_off(self) -> None:
        """A job has ended. What it has left in threads keeps no others waiting: there are as many threads more."""
        if self._unfinished <= self._most:
            return
        with self._lock:
            dropped = self._write_off()
            with contextlib.suppress(RuntimeError):  # the system has no room for a thread: at the next call
                self._begin_threads(None)
        _cancel(dropped)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """No more calls; threads end when they have run what waits, or what runs now. Never waits for them."""
        with self._lock:
            self._is_shut = True
            waiting = self._drained() if cancel_futures else []
            for _ in range(self._count):
                self._calls.put(None)
        _cancel(waiting)

    def _write_off(self) -> list[_Call]:
        """Returns the calls of ended jobs that have waited: nobody is to make them any more."""
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
                "%s that jobs have left behind still run, and others wait for one: as many more may begin",
                many(len(left), "thread"),
            )
        return dropped

    def _begin_threads(self, future: Future[Any] | None) -> None:
        """As many as are needed. If the system has no room, those that are there take the calls, if there are any."""
        while self._count < min(self._unfinished, self._most) and not self._is_shut:
            self._count += 1
            try:
                threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
            except RuntimeError:
                self._count -= 1
                if self._count:
                    return
                if future is not None:
                    future.cancel()  # should a thread be there later, it passes over it
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
            with self._lock:  # as write_off: a call of a job that has ended is in _running by now, or is not made
                is_left = job is not None and job.is_over and self._unfinished > self._most
                if not is_left:
                    self._running[future] = job
            if is_left:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as exc:  # noqa: BLE001 - the caller's
                    future.set_exception(exc)
            with self._lock:
                is_written_off = not is_left and self._running.pop(future, self) is self
            if is_written_off:
                break  # others have taken its place
            del call, future, function, args, kwargs, job  # or they live on until the next call
            with self._lock:
                self._unfinished -= 1
        if self._at_end is not None:
            self._at_end()


def _cancel(calls: list[_Call]) -> None:
    for call in calls:
        call.future.cancel()
