"""Makes Django's ``TaskResult`` from a stored job, or from the outcome of a job that is done.

An outcome contains neither the arguments nor the task. So the kept value of a Django task is a ``Kept``, which contains
both.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from django.conf import settings
from django.utils import timezone

from multiq.backend import State
from multiq.envelope import decode_envelope, encode_json
from multiq.errors import JobNotFound, PayloadInvalid
from multiq.failure_record import LATEST, decode_failure
from multiq.memo import readable_memo
from multiq.outcome import decode_outcome

from .framework import InvalidTask, Status, TaskError, TaskResult
from .priorities import from_priority

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.backend import JobRecord
    from multiq.envelope import Envelope
    from multiq.job import JobContext
    from multiq.outcome import AttemptError, JobOutcome

    from .apps_of_backends import DjangoApp

_log = logging.getLogger("multiq.django")

RUN_AFTER = "django.run_after"
"""The header that has the task's ``run_after``."""

_UNKNOWN_WORKER = "unknown"
_UNKNOWN_ERROR = "multiq.errors.JobFailed"
_OMITTED = "multiq.errors.ResultOmitted"

_STATUS = {
    State.READY: Status.READY,
    State.DELAYED: Status.READY,
    State.HELD: Status.READY,
    State.RESERVED: Status.RUNNING,
    State.BURIED: Status.FAILED,
}


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value in the outcome of a task that has succeeded."""

    django_task: str
    value: Any = None
    omitted: str | None = None
    """The reason why there is no value. None: there is a value."""
    args: list[Any] | None = []
    """None: the arguments are too large."""
    kwargs: dict[str, Any] | None = {}
    priority: int = 0
    run_after: str | None = None


def kept_value(job: JobContext, value: Any, most: int) -> dict[str, Any]:
    """Return the value that the outcome of a job keeps. If this value would have more than *most* bytes, the task's
    arguments are left out. If the rest is still too large, the task's value is left out, too."""
    envelope = job.envelope
    assert envelope is not None  # noqa: S101 - the job runs
    kept = Kept(
        django_task=envelope.task,
        value=value,
        args=envelope.args,
        kwargs=envelope.kwargs,
        priority=from_priority(job.lease.priority),
        run_after=envelope.headers.get(RUN_AFTER),
    )
    size = _size(kept)
    if size > most:
        kept = msgspec.structs.replace(kept, args=None, kwargs=None)
    if _size(kept) > most:
        kept = msgspec.structs.replace(
            kept, value=None, omitted=f"the result has {size:,} bytes, and max_result allows {most:,}"
        )
    found: dict[str, Any] = msgspec.to_builtins(kept)
    return found


def find_result(app: DjangoApp, queues: Iterable[str], result_id: str) -> Any:
    """Return the ``TaskResult`` of a job in one of *queues*. None: there is no such job, its task is gone, or it cannot
    be read."""
    for queue in queues:
        try:
            return _of_record(app, app.backend.peek(queue, result_id))
        except JobNotFound:
            (outcome,) = app.backend.outcomes(queue, [result_id])
        if outcome is not None:
            try:
                return _of_outcome(app, decode_outcome(outcome))
            except PayloadInvalid as exc:  # another program has stored it, or this program lacks the keys
                _log.warning("a result does not exist for Django: %s", exc)
                return None
    return None


def new_result(app: DjangoApp, task: Any, args: Any, kwargs: Any, *, result_id: str) -> Any:
    """Return the ``TaskResult`` of a job that is not enqueued yet. Raises ``TypeError`` if a value is not JSON."""
    return TaskResult(
        task=task,
        id=result_id,
        status=Status.READY,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=args,
        kwargs=kwargs,
        backend=app.options.alias,
        errors=[],
        worker_ids=[],
    )


def running_result(app: DjangoApp, job: JobContext, worker: str, seconds: float | None = None) -> Any:
    """Return the ``TaskResult`` of a job that runs in this process. None: the job is not a task of Django's.

    *seconds*: how long the job has run already.
    """
    now = timezone.now() - dt.timedelta(seconds=seconds or 0)
    errors = readable_memo(job.lease.memo).errors
    result = _result(
        app,
        job.envelope,
        job.queue,
        job.id,
        priority=job.lease.priority,
        status=Status.RUNNING,
        enqueued_at=enqueued_at(job.id, job.lease.age),
        worker_ids=_workers(errors, job.attempt, worker),
        errors=[_error(error) for error in errors],
    )
    if result is not None:
        change(result, started_at=_first_start(errors) or now, last_attempted_at=now)
    return result


def finish(result: Any, *, value: Any = None, error: Any = None) -> None:
    """Record that the task has succeeded with *value*, or has failed with *error*, a ``TaskError``."""
    change(result, finished_at=timezone.now())
    if error is None:
        change(result, status=Status.SUCCESSFUL, _return_value=value)
    else:
        result.errors.append(error)
        change(result, status=Status.FAILED)


def change(result: Any, **values: Any) -> None:
    """Set fields of a ``TaskResult``. The class is frozen. Django's own backends set the fields in the same way."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def enqueued_at(job_id: str, age: float | None) -> dt.datetime | None:
    """Return the time at which a job was enqueued. The time comes from the job's id if the id contains it. If the id
    contains no time, the time is computed from the job's age in seconds."""
    try:
        made = uuid.UUID(job_id)
    except ValueError:
        made = None
    if made is not None and made.version == 7:
        return moment((made.int >> 80) / 1000)
    return None if age is None else moment(time.time() - age)


def moment(seconds: float) -> dt.datetime:
    """Return a time in seconds since 1970 as a datetime, with a time zone if ``USE_TZ`` is set.

    Another program may have stored a time that datetime cannot have. Then the nearest possible time is returned.
    """
    at = dt.datetime.fromtimestamp(min(max(seconds, 0.0), LATEST), dt.UTC)
    return at if settings.USE_TZ else timezone.make_naive(at)


def _of_record(app: DjangoApp, record: JobRecord) -> Any:
    try:
        envelope = decode_envelope(record.body, max_body=max(app.settings.max_body, len(record.body)))
    except PayloadInvalid:
        return None
    errors, failure = readable_memo(record.memo).errors, decode_failure(record.detail)
    attempts = record.attempt or 0
    told = [_error(error) for error in errors]
    workers = _workers(errors, attempts)
    started = _last_start(errors) if attempts else None
    finished = None
    if record.state is State.BURIED:
        last = _UNKNOWN_ERROR, f"{record.reason or 'no reason is stored'}\n"
        if failure is not None:
            last = failure.error_class or _UNKNOWN_ERROR, failure.traceback or f"{failure.error}\n"
            finished = failure.at
            if failure.seconds is not None:
                started = moment(failure.at - failure.seconds)
            if attempts and failure.attempt == attempts:
                workers[-1] = failure.worker
        if errors and errors[-1].attempt == attempts:
            told.pop()
            if finished is not None:
                # the time of the failure is rounded; the time of an attempt is not rounded
                finished = max(finished, errors[-1].at)
        told.append(TaskError(exception_class_path=last[0], traceback=last[1]))
    result = _result(
        app,
        envelope,
        record.queue,
        record.id,
        priority=record.priority,
        status=_STATUS[record.state],
        enqueued_at=enqueued_at(record.id, record.age),
        worker_ids=workers,
        errors=told,
    )
    if result is not None:
        change(
            result,
            started_at=_first_start(errors) or started,
            last_attempted_at=started,
            finished_at=None if finished is None else moment(finished),
        )
    return result


def _of_outcome(app: DjangoApp, outcome: JobOutcome) -> Any:
    try:
        kept = msgspec.convert(outcome.value, Kept)
    except msgspec.ValidationError:  # the job was cancelled, or this is the outcome of another kind of task
        return None
    task = _task(app, kept.django_task, outcome.queue, kept.priority, kept.run_after)
    if task is None:
        return None
    result = new_result(app, task, kept.args or [], kept.kwargs or {}, result_id=outcome.id)
    started, errors = moment(outcome.started), [_error(error) for error in outcome.errors]
    if kept.omitted is not None:
        errors.append(TaskError(exception_class_path=_OMITTED, traceback=f"{kept.omitted}\n"))
    change(
        result,
        status=Status.SUCCESSFUL,
        enqueued_at=enqueued_at(outcome.id, None),
        started_at=_first_start(outcome.errors) or started,
        last_attempted_at=started,
        finished_at=moment(outcome.finished),
        errors=errors,
        worker_ids=_workers(outcome.errors, outcome.attempt, outcome.worker),
        _return_value=kept.value,
    )
    return result


def _result(
    app: DjangoApp,
    envelope: Envelope | None,
    queue: str,
    job_id: str,
    *,
    priority: int,
    **values: Any,
) -> Any:
    if envelope is None:
        return None
    task = _task(app, envelope.task, queue, from_priority(priority), envelope.headers.get(RUN_AFTER))
    if task is None:
        return None
    result = new_result(app, task, envelope.args, envelope.kwargs, result_id=job_id)
    change(result, **values)
    return result


def _task(app: DjangoApp, path: str, queue: str, priority: int, run_after: str | None) -> Any:
    """Return the task as it was enqueued."""
    found = app.django_task(path)
    if found is None:
        return None
    try:
        after = None if run_after is None else dt.datetime.fromisoformat(run_after)
    except ValueError:  # another program has written this text
        after = None
    asked = {"queue_name": queue, "priority": priority, "run_after": after, "backend": app.options.alias}
    changed = {name: value for name, value in asked.items() if getattr(found, name) != value}
    try:
        return replace(found, **changed) if changed else found
    except InvalidTask:  # the job is in a queue that QUEUES does not name
        return found


def _error(error: AttemptError) -> Any:
    return TaskError(exception_class_path=error.error_class or _UNKNOWN_ERROR, traceback=f"{error.error}\n")


def _workers(errors: Iterable[AttemptError], attempts: int, last: str | None = None) -> list[str]:
    """Return a worker for each attempt. The worker of an attempt that ended by a crash is not stored."""
    known = {error.attempt: error.worker for error in errors}
    if last is not None:
        known[attempts] = last
    return [known.get(number, _UNKNOWN_WORKER) for number in range(1, attempts + 1)]


def _first_start(errors: list[AttemptError]) -> dt.datetime | None:
    first = errors[0] if errors else None
    return None if first is None or first.attempt != 1 or first.seconds is None else moment(first.at - first.seconds)


def _last_start(errors: list[AttemptError]) -> dt.datetime | None:
    last = errors[-1] if errors else None
    return None if last is None or last.seconds is None else moment(last.at - last.seconds)


def _size(kept: Kept) -> int:
    return len(encode_json(msgspec.to_builtins(kept), max_body=2**31))
