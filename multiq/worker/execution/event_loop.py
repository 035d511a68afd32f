"""Creates, runs and closes event loops for coroutine jobs, and ends the tasks that jobs leave behind."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from multiq.job import JobTasks, job_tasks

from .daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Coroutine, Iterable
    from typing import Any

_log = logging.getLogger("multiq.worker")

PATIENCE = 1.0  # seconds that cancelled tasks get to clean up

_THREADS = min(32, (os.cpu_count() or 1) + 4)  # threads of a loop for ``asyncio.to_thread``, as many as in asyncio


def new_event_loop(threads: DaemonThreads | None = None) -> AbstractEventLoop:
    """Create a loop for one thread. The caller closes the loop. The loop's executor is *threads*, or a new pool of
    daemon threads.

    The loop is asyncio's own, whatever the event loop policy is, because the timeouts read the loop's handles
    (``CoroutineExecutor``).
    """
    loop = asyncio.SelectorEventLoop()
    loop.set_default_executor(threads or threads_of_loop())
    return loop


def threads_of_loop() -> DaemonThreads:
    return DaemonThreads(_THREADS, "multiq-to-thread")


class JobLoop:
    """The event loop of one thread, for successive jobs. Tasks that a job leaves behind are cancelled.

    ``asyncio.Runner`` would wait forever for a task that swallows its cancellation, and that task would run on during
    the next job.
    """

    def __init__(self) -> None:
        self._loop: AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run *work* to its end, in the current context. Raises the exceptions of *work*."""
        loop = self._loop = self._loop or new_event_loop()
        job = JobTasks()  # ``DaemonThreads`` reads it; the loop does not, because all its tasks are this job's
        job_tasks.set(job)
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        finally:
            job.is_over = True
            left = asyncio.all_tasks(loop)
            if left:
                self._end(loop, left, task)

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            close_loop(loop)

    def _end(self, loop: AbstractEventLoop, left: Iterable[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
        stuck = end_tasks(loop, left)
        forgotten = [each for each in left if each is not task and not is_closing(each)]
        if forgotten:
            _log.warning("a job left %d tasks behind on its event loop; they are cancelled", len(forgotten))
        if stuck:  # a stuck task does not continue, because nothing runs its loop
            _log.error("%d tasks that a job left behind ignore their cancellation; their loop is abandoned", stuck)
            self._loop = None


def close_loop(loop: AbstractEventLoop) -> None:
    """Close the loop. The loop's asynchronous generators first get a second to end."""
    try:
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), PATIENCE))
    except BaseException as exc:  # noqa: BLE001 - an error of the user's code must not keep the loop open
        _log.warning("asynchronous generators that jobs left behind do not end: %r", exc)
    loop.close()


def is_closing(task: asyncio.Task[Any]) -> bool:
    """Whether the loop itself has started the task in order to close an asynchronous generator."""
    return type(task.get_coro()).__name__ == "async_generator_athrow"


def end_tasks(loop: AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]]) -> int:
    """Cancel *tasks*, and run the loop until they have ended, for up to a second. Returns the number of remaining
    tasks.

    Tasks that close an asynchronous generator are cancelled only after that second, and get another second.
    """
    waiting = list(tasks)
    closing = [task for task in waiting if is_closing(task)]
    for task in waiting:
        if task not in closing:
            task.cancel()
    _run_until_done(loop, waiting)
    for task in closing:
        task.cancel()
    _run_until_done(loop, closing)
    for task in waiting:
        if task.done() and not task.cancelled():
            task.exception()  # marks the exception as retrieved, so that asyncio does not log it
    return sum(not task.done() for task in waiting)


def _run_until_done(loop: AbstractEventLoop, tasks: list[asyncio.Task[Any]]) -> None:
    give_up_at = loop.time() + PATIENCE
    while any(not task.done() for task in tasks) and loop.time() < give_up_at:
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=max(0.0, give_up_at - loop.time())))
        except BaseException:  # noqa: BLE001 - SystemExit of a task, or loop.stop()
            _log.debug("a cancelled task stopped its event loop", exc_info=True)
