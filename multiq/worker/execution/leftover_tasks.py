"""Cancels the tasks that a finished coroutine job has left behind on its event loop, and warns about them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Iterable
    from typing import Any

    from multiq.job import JobTasks
    from multiq.worker.processes.inflight import Held

_log = logging.getLogger("multiq.worker")

PATIENCE = 1.0  # seconds that cancelled tasks get to clean up


def cancel_leftovers(held: Held, tasks: JobTasks) -> None:
    """Cancel the tasks that a job has left behind on the shared loop. The loop runs on, so nothing waits for them.

    Call it in the job's own task.
    """
    this = asyncio.current_task()
    left = [task for task in tasks if not (task.done() or task is this or _is_closing(task))]
    for task in left:
        task.cancel()
    if left:
        where = held.lease.queue, held.lease.id
        _log.warning("[%s] %s left %d tasks behind on the event loop; they are cancelled", *where, len(left))


def end_leftovers(loop: AbstractEventLoop, left: Iterable[asyncio.Task[Any]], task: asyncio.Task[Any]) -> bool:
    """End the tasks that a job has left behind on a loop that runs only this job. *task* is the job's own task.

    Returns whether a task ignores its cancellation. It does not continue if nothing runs its loop any more.
    """
    stuck = end_tasks(loop, left)
    forgotten = [each for each in left if each is not task and not _is_closing(each)]
    if forgotten:
        _log.warning("a job left %d tasks behind on its event loop; they are cancelled", len(forgotten))
    if stuck:
        _log.error("%d tasks that a job left behind ignore their cancellation; their loop is abandoned", stuck)
    return stuck > 0


def end_tasks(loop: AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]]) -> int:
    """Cancel *tasks*, and run the loop until they have ended, for up to a second. Returns the number of remaining
    tasks.

    Tasks that close an asynchronous generator are cancelled only after that second, and get another second.
    """
    waiting = list(tasks)
    closing = [task for task in waiting if _is_closing(task)]
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


def _is_closing(task: asyncio.Task[Any]) -> bool:
    """Whether the loop itself has started the task in order to close an asynchronous generator."""
    return type(task.get_coro()).__name__ == "async_generator_athrow"


def _run_until_done(loop: AbstractEventLoop, tasks: list[asyncio.Task[Any]]) -> None:
    give_up_at = loop.time() + PATIENCE
    while any(not task.done() for task in tasks) and loop.time() < give_up_at:
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=max(0.0, give_up_at - loop.time())))
        except BaseException:  # noqa: BLE001 - SystemExit of a task, or loop.stop()
            _log.debug("a cancelled task stopped its event loop", exc_info=True)
