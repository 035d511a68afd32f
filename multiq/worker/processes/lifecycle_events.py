"""Emits the events of a worker process's start and end. If a subscriber hangs, the process still ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multiq.events import WorkerStarted, WorkerStopped, WorkerStopping
from multiq.worker.execution.hanging_calls import run_in_thread

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from multiq.events import Events, EventSession


class LifecycleEvents:
    """Emits ``WorkerStarted``, ``WorkerStopping`` and ``WorkerStopped`` of one process, each once. Thread-safe."""

    def __init__(self, events: Events, worker: str) -> None:
        self._events = events
        self._worker = worker
        self._session: EventSession | None = None
        self._stopping_emitted = threading.Event()
        self._stopping_emitted.set()
        self._stopped_emitted = threading.Event()
        self._stopped_lock = threading.Lock()
        self._is_stopped_begun = False

    def started(self, queues: tuple[str, ...], loop: AbstractEventLoop | None) -> None:
        """Emit ``WorkerStarted``. From now on, coroutine subscribers may run on *loop*."""
        self._session = self._events.open_session(loop)
        self._events.emit(WorkerStarted(worker=self._worker, queues=queues))

    def expect_stopping(self) -> None:
        """Let ``wait_stopping`` wait until ``stopping`` has been called and its event was emitted."""
        self._stopping_emitted.clear()

    def stopping(self, reason: str) -> None:
        """Emit ``WorkerStopping`` from a new thread, because neither the loop nor the next signal may wait for
        subscribers.
        """
        run_in_thread(lambda: self._emit_stopping(reason))

    def wait_stopping(self, timeout: float) -> None:
        """Wait up to *timeout* seconds for the subscribers of ``WorkerStopping``."""
        self._stopping_emitted.wait(timeout)

    def stopped(self, code: int, patience: float | None) -> None:
        """Emit ``WorkerStopped``, and wait up to *patience* seconds for its subscribers.

        None as *patience* means to emit the event in this thread. If another thread already emits the event, this call
        only waits for that thread.
        """
        with self._stopped_lock:
            is_begun, self._is_stopped_begun = self._is_stopped_begun, True
        if not is_begun and patience is None:
            self._emit_stopped(code)  # in the thread of the loop, like WorkerStarted
            return
        if not is_begun:
            run_in_thread(lambda: self._emit_stopped(code))
        self._stopped_emitted.wait(patience)

    def finish(self, patience: float) -> None:
        """Wait up to *patience* seconds for coroutine subscribers, and cancel the subscribers that still run on this
        loop."""
        if self._session is not None:  # None: the process was stopped before it started
            self._session.finish(patience)

    def close(self, patience: float) -> None:
        """Like ``finish``, but this process emits no event afterwards."""
        if self._session is not None:
            self._session.close(patience)

    def _emit_stopping(self, reason: str) -> None:
        try:
            self._events.emit(WorkerStopping(worker=self._worker, reason=reason))
        finally:
            self._stopping_emitted.set()

    def _emit_stopped(self, code: int) -> None:
        try:
            self._events.emit(WorkerStopped(worker=self._worker, exit_code=code))
        finally:
            self._stopped_emitted.set()
