"""Runs Django's tasks in a worker, and sends Django's signals about them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from multiq.async_calls import PerOwner, Threads
from multiq.events import WorkerStopped
from multiq.failure_record import app_traceback, class_path, traceback_of
from multiq.job import current_job
from multiq.middleware import Middleware

from .connections import after_the_run, close_all_here, is_on_loop
from .framework import TaskContext, TaskError, normalize_json, task_finished, task_started
from .results import finish, kept_value, running_result
from .signatures import plain_signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.job import JobContext
    from multiq.middleware import Ending

    from .apps_of_backends import DjangoApp


_log = logging.getLogger("multiq.django")

_IDLE = 5.0  # seconds
_MOST_PENDING = 1000  # calls of receivers; if there are more, the event loop waits


def runner_of(app: DjangoApp, task: Any) -> Callable[..., Any]:
    """Return the function that runs a Django task as a job of *app*. The attribute ``django_task`` of the function is
    the task."""
    function = task.func

    def begin(args: tuple[Any, ...]) -> tuple[JobContext, Any, tuple[Any, ...]]:
        job = current_job()
        result = running_result(app, job, worker_name())
        if task.takes_context:
            args = (TaskContext(task_result=result), *args)
        return job, result, args

    def end(job: JobContext, result: Any, value: Any) -> dict[str, Any]:
        value = normalize_json(value)
        finish(result, value=value)
        return kept_value(job, value, app.settings.max_result)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> dict[str, Any]:
        job, result, args = begin(args)
        _send(app, task_started, result)
        kept = end(job, result, function(*args, **kwargs))
        _send(app, task_finished, result)
        return kept

    @functools.wraps(function)
    async def arun(*args: Any, **kwargs: Any) -> dict[str, Any]:
        job, result, args = begin(args)
        await _asend(app, task_started, result)
        kept = end(job, result, await function(*args, **kwargs))
        await _asend(app, task_finished, result)
        return kept

    runner: Any = arun if inspect.iscoroutinefunction(function) else run
    runner.__signature__ = plain_signature(function, takes_context=task.takes_context)
    runner.django_task = task
    return runner  # type: ignore[no-any-return]


class Finished(Middleware):
    """Sends the signal ``task_finished`` for each task of Django's that has failed for good."""

    def __init__(self, app: DjangoApp) -> None:
        self._app = app
        app.events.subscribe(WorkerStopped, self._finish)

    def _finish(self, _event: WorkerStopped) -> None:
        _receivers.of(self._app).finish(self._app.settings.worker.grace)

    def ended(self, job: JobContext, ending: Ending) -> None:
        """Called when the verdict on a job is known."""
        if ending.verdict != "buried" or job.task is None:
            return
        result, error = running_result(self._app, job, worker_name(), ending.seconds), ending.error
        if result is not None:
            path = "multiq.errors.JobFailed" if error is None else class_path(error)
            finish(result, error=_task_error(path, traceback_of(error) or f"{ending.reason}\n"))
            _outside_the_loop(self._app, lambda: _send_while_handling(self._app, result, error))


def _task_error(path: str, traceback: str) -> Any:
    return TaskError(exception_class_path=path, traceback=traceback)


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _send(app: DjangoApp, signal: Any, result: Any) -> None:
    """Send a signal. Errors of receivers are logged by Django, and do not change what happens to the job."""
    signal.send_robust(sender=app.sender, task_result=result)


async def _asend(app: DjangoApp, signal: Any, result: Any) -> None:
    await signal.asend_robust(sender=app.sender, task_result=result)


def _send_while_handling(app: DjangoApp, result: Any, error: BaseException | None) -> None:
    """Send the signal while *error* is being handled. Django's own receiver logs the exception that is being handled.
    So the receiver logs the frames of the task's code."""
    if error is None:
        _send(app, task_finished, result)
        return
    whole = error.__traceback__
    try:
        raise error.with_traceback(app_traceback(error))  # noqa: TRY301 - only so that it is being handled
    except BaseException:  # noqa: BLE001 - any error that a task has raised
        _send(app, task_finished, result)
    finally:
        error.__traceback__ = whole


def _outside_the_loop(app: DjangoApp, work: Callable[[], None]) -> None:
    """Do *work* on a thread where receivers may query the database.

    If an event loop runs on the calling thread, the thread of ``_Receivers`` does *work*, and this function does not
    wait. A worker waits for the thread of ``_Receivers`` when the worker ends.
    """
    if not is_on_loop():
        with after_the_run(app):
            work()
    else:
        _receivers.of(app).submit(work)


class _Receivers:
    """A thread that calls receivers, one at a time. It ends when it is idle."""

    def __init__(self) -> None:
        self._threads = Threads(1, "multiq-django-signal", _IDLE)
        self._room = threading.Semaphore(_MOST_PENDING)

    def submit(self, work: Callable[[], None]) -> None:
        """Do *work* on the thread. If too much work is pending, wait for room."""

        def run() -> None:
            try:
                work()
            except BaseException:  # noqa: BLE001 - such as SystemExit, which Django does not catch
                _log.exception("a receiver of task_finished failed; the outcome of the task is not affected")
            finally:
                self._room.release()
                close_all_here()

        self._room.acquire()
        self._threads.submit(run)

    def finish(self, patience: float) -> None:
        """Wait up to *patience* seconds until all pending work is done."""
        if self._threads.is_busy:
            done = threading.Event()
            self._threads.submit(done.set)
            done.wait(patience)


_receivers = PerOwner(_Receivers)
