"""A pool of threads that no process waits for when it ends: those of ``concurrent.futures`` are joined at the exit."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    _Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(ThreadPoolExecutor):
    """Begins threads as they are needed, up to *most*. A subclass because event loops accept no other executors."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)  # it begins none before its own ``submit``
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._unfinished = 0  # calls that wait or run
        self._is_shut = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError("the pool is shut down: no more calls begin")
            self._unfinished += 1
            self._calls.put((future, function, args, kwargs))
            if self._count < min(self._unfinished, self._most):
                self._begin_thread(future)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """No more calls; threads end when they have run what waits, or what runs now. Never waits for them."""
        with self._lock:
            self._is_shut = True
            waiting = self._drained() if cancel_futures else []
            for _ in range(self._count):
                self._calls.put(None)
        for future, *_ in waiting:
            future.cancel()

    def _begin_thread(self, future: Future[Any]) -> None:
        """One thread more. If the system has no room for it, those that are there take the call, if there are any."""
        self._count += 1
        try:
            threading.Thread(target=self._serve, name=f"{self._name}-{self._count}", daemon=True).start()
        except RuntimeError:
            self._count -= 1
            if not self._count:
                self._unfinished -= 1
                future.cancel()  # and should a thread be there later, it passes over it
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
            future, function, args, kwargs = call
            is_called = future.set_running_or_notify_cancel()
            if is_called:
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as exc:  # noqa: BLE001 - the caller's
                    future.set_exception(exc)
            del call, future, function, args, kwargs  # or they live on until the next call
            with self._lock:
                self._unfinished -= is_called or 0
