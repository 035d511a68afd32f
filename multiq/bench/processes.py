"""The processes of a run: producers and workers.

A fork server that has imported everything starts each process in milliseconds. If only one process can see a backend's
jobs, as with ``memory``, producers and workers are threads of this process instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from multiq import Worker
from multiq.errors import MultiqError
from multiq.job import describe

from .app import BenchApp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path
    from typing import Self

R = TypeVar("R")

_PATIENCE = 20.0  # the longest time, in seconds, for a process to get ready, or for a worker to end
_LAST_CHANCE = 3.0  # seconds
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)

_processes = multiprocessing.get_context("forkserver")


class ProcessFailed(MultiqError, RuntimeError):
    """A process or thread of the bench failed. If a worker failed, the message has the last line of the worker's
    log."""


class Done(msgspec.Struct, Generic[R], frozen=True):
    """The result of a process."""

    result: R
    cpu: float
    """CPU seconds since the start signal."""


class WorkerOptions(msgspec.Struct, frozen=True):
    """The options of a worker."""

    queue: str
    folder: Path
    """The folder of the worker's run logs and log file."""
    capacity: int
    """The number of runs for which the run log of one process has room."""
    processes: int = 2


def preload(modules: Sequence[str]) -> None:
    """Start the fork server with these modules imported, unless the server runs already."""
    _processes.set_forkserver_preload([__name__, *modules])
    process = _processes.Process(target=_nothing, daemon=True)
    process.start()
    process.join()


class LoadProcess(Generic[R]):
    """Runs one function. The process gets ready, waits for the start signal, and returns the function's result."""

    def __init__(self, url: str, function: Callable[..., R], arguments: tuple[Any, ...], *, is_process: bool) -> None:
        self._line, far_end = _processes.Pipe()
        self._runner: Any
        if is_process:
            self._runner = _processes.Process(target=_serve, args=(url, far_end, function, arguments), daemon=True)
            self._runner.start()
            far_end.close()  # the parent's copy must be closed, so that the pipe ends when the process dies
        else:
            self._runner = threading.Thread(target=_do, args=(url, far_end, function, arguments), daemon=True)
            self._runner.start()
        self._receive(_PATIENCE)

    def go(self) -> None:
        self._line.send(None)

    def result(self, patience: float) -> Done[R]:
        """Wait for the result. Raises ``ProcessFailed`` if the process fails, or needs more than *patience* seconds."""
        done: Done[R] = self._receive(patience)
        self._line.close()
        self._runner.join()
        return done

    def end(self) -> None:
        """End the process, even if it is busy. If the work runs in a thread, the thread ends by itself, because all its
        waits are short."""
        self._line.close()
        if not isinstance(self._runner, threading.Thread) and self._runner.is_alive():
            self._runner.kill()
            self._runner.join()

    def _receive(self, patience: float) -> Any:
        try:
            if not self._line.poll(patience):
                raise ProcessFailed(f"a process of the bench must answer within {patience:.0f} s, got no answer")
            answer = self._line.recv()
        except (EOFError, OSError) as exc:
            raise ProcessFailed("a process of the bench ended before it sent its result") from exc
        if isinstance(answer, str):
            raise ProcessFailed(answer)
        return answer


class WorkerProcess:
    """A ``multiq.Worker`` with its supervisor, in a separate process.

    If *is_process* is false, threads of this process run the workers. The number of threads is the *options*' number of
    processes.
    """

    def __init__(self, url: str, options: WorkerOptions, *, is_process: bool) -> None:
        self._log = options.folder / "worker.log"
        self._process: Any = None
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        if is_process:
            self._process = _processes.Process(target=_work, args=(url, options), daemon=True)
            self._process.start()
            return
        for _ in range(options.processes):
            app = BenchApp(url, options.folder, options.capacity)
            worker = Worker(app, [options.queue], processes=0)
            thread = threading.Thread(target=worker.run, daemon=True)
            thread.start()
            self._workers.append(worker)
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop the worker in the same way as SIGTERM, and wait for its end.

        Raises ``ProcessFailed`` if the worker does not end, or ends with an error.
        """
        for worker in self._workers:
            worker.stop()
        for thread in self._threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                raise ProcessFailed(
                    f"a thread of the worker must end within {_PATIENCE:.0f} s after stop, but it still runs"
                )
        if self._process is not None:
            self._process.terminate()
            self._process.join(_PATIENCE)
            code = self._process.exitcode
            if code is None:
                self.end()
                raise ProcessFailed(
                    f"the worker must end within {_PATIENCE:.0f} s after SIGTERM, but it still ran{self._last_words()}"
                )
            if code != 0:
                raise ProcessFailed(f"the worker must end with exit code 0, got {code}{self._last_words()}")

    def end(self) -> None:
        """End the process, even if it is busy.

        The worker is first asked to stop. A worker that ends cleanly leaves no folder and no sidecar process.
        """
        for worker in self._workers:
            worker.stop()
        if self._process is not None and self._process.is_alive():
            self._process.terminate()
            self._process.join(_LAST_CHANCE)
            self._process.kill()
            self._process.join()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return f": {lines[-1]}" if lines else ""
        return ""


class RunProcesses:
    """All processes of one repeat. At the end of the repeat, this class ends the processes that still run."""

    def __init__(self, url: str, *, are_processes: bool) -> None:
        self._url = url
        self.are_processes = are_processes
        self._all: list[LoadProcess[Any] | WorkerProcess] = []

    def take(self, function: Callable[..., R], *arguments: Any) -> LoadProcess[R]:
        """Start a process for *function*.

        The process calls the function with an app, a callable that waits for the start signal, and *arguments*. Raises
        ``ProcessFailed``.
        """
        process: LoadProcess[R] = LoadProcess(self._url, function, arguments, is_process=self.are_processes)
        self._all.append(process)
        return process

    def start_worker(self, options: WorkerOptions) -> WorkerProcess:
        """Start a worker. This method returns before the worker has begun to reserve."""
        worker = WorkerProcess(self._url, options, is_process=self.are_processes)
        self._all.append(worker)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.end()


# --- in the process itself ----------------------------------------------------------------------------


def _nothing() -> None:
    """The function of the first process. When the process with this function ends, the fork server has imported
    everything."""


def _serve(url: str, line: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _leave_terminal()
    _do(url, line, function, arguments, time.process_time)


def _do(
    url: str,
    line: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    clock: Callable[[], float] = time.thread_time,
) -> None:
    began = 0.0

    def wait_for_go() -> None:
        nonlocal began
        line.send(None)
        line.recv()
        began = clock()

    with contextlib.suppress(EOFError, OSError):  # the parent has closed its end
        try:
            with BenchApp(url) as app:
                result = function(app, wait_for_go, *arguments)
                answer: Any = Done(result, clock() - began)
        except (EOFError, OSError):
            raise
        except Exception as exc:  # noqa: BLE001 - the parent raises it
            answer = describe(exc)
        line.send(answer)


def _work(url: str, options: WorkerOptions) -> None:
    _leave_terminal()
    # Failures are part of the work. The log lines of planned failures would break up the progress bar.
    handler = logging.FileHandler(options.folder / "worker.log")
    logging.basicConfig(handlers=[handler], level=logging.ERROR, force=True)
    with BenchApp(url, options.folder, options.capacity) as app:
        sys.exit(Worker(app, [options.queue], processes=options.processes).run())


def _leave_terminal() -> None:
    """Leave the terminal's session, so that Ctrl-C does not reach this process. The bench ends its processes itself.

    If the bench is killed, all its processes end. The fork server ends by itself. On Linux, the end of the fork server
    makes the kernel send SIGTERM to all processes that the fork server has forked (``PR_SET_PDEATHSIG``).
    """
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() == 1:
            sys.exit(1)
