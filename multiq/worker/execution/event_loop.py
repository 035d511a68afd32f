"""Creates, runs and closes event loops for coroutine jobs."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from multiq.job import JobTasks, job_tasks

from .leftover_tasks import PATIENCE, end_leftovers
from .thread_pool import ThreadPool

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Coroutine
    from typing import Any

_log = logging.getLogger("multiq.worker")

_THREADS = min(32, (os.cpu_count() or 1) + 4)  # threads of a loop for ``asyncio.to_thread``, as many as in asyncio


def new_event_loop(threads: ThreadPool | None = None) -> AbstractEventLoop:
    """Create a loop for one thread. The caller closes the loop. The loop's executor is *threads*, or a new pool of
    daemon threads.

    The loop is asyncio's own, whatever the event loop policy is, because the timeouts read the loop's handles
    (``CoroutineExecutor``).
    """
    loop = asyncio.SelectorEventLoop()
    loop.set_default_executor(threads or threads_of_loop())
    return loop


def threads_of_loop() -> ThreadPool:
    return ThreadPool(_THREADS, "multiq-to-thread")


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
        job = JobTasks()  # ``ThreadPool`` reads it; the loop does not, because all its tasks are this job's
        job_tasks.set(job)
        task = loop.create_task(work)
        try:
            return loop.run_until_complete(task)
        finally:
            job.is_over = True
            left = asyncio.all_tasks(loop)
            if left and end_leftovers(loop, left, task):  # a stuck task must not run beside the next job
                self._loop = None

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            close_loop(loop)


def close_loop(loop: AbstractEventLoop) -> None:
    """Close the loop. The loop's asynchronous generators first get a second to end."""
    try:
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), PATIENCE))
    except BaseException as exc:  # noqa: BLE001 - an error of the user's code must not keep the loop open
        _log.warning("asynchronous generators that jobs left behind do not end: %r", exc)
    loop.close()
