"""Sends every enqueue to the backend. After an error, ``uncertain_enqueue.py`` repeats it."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from . import timeout_notices
from .backend import PRIORITY_DEFAULT, NewJob
from .errors import BackendError
from .ids import check_new_ids, new_id, new_ids
from .job import JobHandle, handles_of
from .outbox import store
from .uncertain_enqueue import Delivery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .backend import Backend

_Ids = TypeVar("_Ids", str, list[str])


def put(
    backend: Backend,
    queue: str,
    bodies: Sequence[bytes],
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    ids: Iterable[str] | None = None,
) -> list[JobHandle]:
    """Enqueue checked bodies with checked options.

    - *priority*, *delay*, *ttr*, *connection*: the options of ``Queue.enqueue``, which apply to all of the jobs.
      *delay* is in seconds.
    - *ids*: the caller's ids, which ``put`` checks. None: new ids.
    """
    jobs = make_jobs(backend, bodies, priority=priority, delay=delay, ttr=ttr, ids=ids)
    if not jobs:
        return []
    return [JobHandle(backend, queue, job_id) for job_id in _add(backend, queue, jobs, connection, False)]


def put_one(
    backend: Backend,
    queue: str,
    body: bytes,
    *,
    priority: int,
    delay: float,
    ttr: float,
    connection: Any,
    own_id: str | None = None,
) -> JobHandle:
    """Enqueue one job. Does the same as ``put``, but faster. *own_id* is a checked id of the caller, or None for a new
    id."""
    # Called for every enqueue: the code of make_job is repeated here for speed.
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    job_id = new_id() if own_id is None else _allowed(backend, own_id)
    (job_id,) = _add(backend, queue, [NewJob(body, job_id, priority, delay, ttr)], connection, True)
    return JobHandle(backend, queue, job_id)


def put_jobs(
    backend: Backend, queue: str, jobs: Sequence[NewJob], *, connection: Any, is_one: bool = False
) -> list[JobHandle]:
    """Like ``put``, for jobs that already have ids and checked options.

    If another job already has a job's unique key, the other job's handle is returned.
    """
    if not jobs:
        return []
    return handles_of(backend, queue, jobs, _add(backend, queue, jobs, connection, is_one))


def make_job(backend: Backend, body: bytes, *, priority: int, delay: float, ttr: float, own_id: str | None) -> NewJob:
    """Return the job that ``put_one`` enqueues. Calls no server. Raises ``Unsupported``, ``OptionInvalid``."""
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    return NewJob(body, new_id() if own_id is None else _allowed(backend, own_id), priority, delay, ttr)


def make_jobs(
    backend: Backend, bodies: Sequence[bytes], *, priority: int, delay: float, ttr: float, ids: Iterable[str] | None
) -> list[NewJob]:
    """Return the jobs that ``put`` enqueues. Calls no server. Raises ``Unsupported``, ``OptionInvalid``."""
    if delay or priority != PRIORITY_DEFAULT:
        backend.check_terms(priority=priority, delay=delay)
    count = len(bodies)
    used = new_ids(count) if ids is None else _allowed(backend, check_new_ids(ids, count))
    return [NewJob(body, job_id, priority, delay, ttr) for body, job_id in zip(bodies, used, strict=True)]


def add_jobs(
    backend: Backend, queue: str, jobs: Sequence[NewJob], connection: Any = None, *, is_one: bool = False
) -> list[str]:
    """Enqueue jobs that have ids and checked options. Repeats the call, and raises errors, as ``put`` does."""
    return _add(backend, queue, jobs, connection, is_one)


def _allowed(backend: Backend, ids: _Ids) -> _Ids:
    """Return *ids*. Raises ``Unsupported`` if the backend chooses the ids."""
    if not backend.declared.client_ids:
        raise backend.unsupported("client_ids")
    return ids


def _add(backend: Backend, queue: str, jobs: Sequence[NewJob], connection: Any, is_one: bool) -> list[str]:
    began = monotonic()
    try:
        ids = backend.enqueue(queue, jobs) if connection is None else store(backend, queue, jobs, connection)
    except BackendError as exc:
        delivery = Delivery(backend, queue, jobs, began, is_one=is_one)
        ids = delivery.insist(exc, began, may_repeat=connection is None)
    if timeout_notices.pending:
        timeout_notices.raise_if_pending()
    return ids
