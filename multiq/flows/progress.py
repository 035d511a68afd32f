"""Counts the jobs of a flow that have ended, and finds the jobs that the store has lost. Changes nothing.

A job that has ended leaves nothing in the store if its task has no ``keep``. A job that the store has lost leaves
nothing, either. The jobs that wait show the difference: a job that ends arrives at its followers in the same step. So a
held job waits only for jobs that have not ended. If the store has fewer jobs than the held job waits for, the store has
lost the missing jobs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import State
from multiq.errors import FlowNotFound, JobNotFound
from multiq.job import JobHandle

from . import record as records
from .member_deletion import flow_of
from .record import job_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Backend, JobRecord

    from .record import FlowInfo, FlowRecord


class FlowProgress(NamedTuple):
    """The number of a flow's jobs, and the number of those that have ended."""

    done: int
    total: int


class FlowView(NamedTuple):
    """A flow as ``multiq flows show`` shows it."""

    info: FlowInfo
    progress: FlowProgress
    jobs: list[tuple[JobHandle, str, str]]
    """The handle, the task and the status of the first jobs. The status is one of ``JobHandle.status``, or:

    - ``ended``: the job is gone, and no outcome is kept.
    - ``lost``: the same, but the flow still waits for this job.

    ``unknown`` means that the job has either ended or is lost.
    """


def progress_of(backend: Backend, flow_id: str, record: FlowRecord) -> FlowProgress:
    """Return how many jobs have ended. Raises ``BackendError``."""
    return _count(backend, flow_id, record)[0]


def view(backend: Backend, flow_id: str, limit: int) -> FlowView:
    """Return the flow, with the statuses of its first *limit* jobs. Raises ``FlowNotFound``, ``BackendError``."""
    first = itertools.islice(records.read(backend, flow_id)[0].jobs(flow_id), limit)
    handles = [(JobHandle(backend, queue, own_id), task) for queue, own_id, task in first]
    jobs = [(handle, task, str(handle.status())) for handle, task in handles]
    record, _ = records.read(backend, flow_id)  # later: a job that has ended meanwhile must not look like a lost one
    progress, lost = _count(backend, flow_id, record)
    is_all = len(jobs) == record.total()
    if record.state == "open" and record.is_batch and is_all:
        counted = set(_counted(flow_id, record))
        gone = [job for job, _, status in jobs if _is_gone(status) and (job.queue, job.id) in counted]
        lost = max(0, len(gone) - progress.done)
        last = job_id(flow_id, record.last)
        lost += any(job.id == last and status == "unknown" for job, _, status in jobs)
    if record.state != "enqueuing":  # if it is, a job that is not there may come
        unknown = sum(status == "unknown" for _, _, status in jobs)
        word = "ended" if not lost else "lost" if is_all and unknown == lost else "unknown"
        jobs = [(job, task, word if status == "unknown" else status) for job, task, status in jobs]
    return FlowView(records.info(flow_id, record), progress, jobs)


def _count(backend: Backend, flow_id: str, record: FlowRecord) -> tuple[FlowProgress, int]:
    """Return the progress, and the number of lost jobs. A lost job is not in the store, and does not count as done.

    The number of lost jobs is 0 for a flow that has ended, and for a batch. The last job of a batch counts the members.
    """
    own = _counted(flow_id, record)
    total = len(own)
    if record.state == "cancelled":
        if record.done >= 0:
            return FlowProgress(record.done, total), 0
        # one of its jobs has cancelled the flow, so at least this job is not done
        return FlowProgress(min(total - _left(backend, own), total - 1), total), 0
    if record.is_batch:
        return FlowProgress(total - _missing(backend, flow_id, record, total), total), 0
    if record.state == "finished":
        return FlowProgress(total - _left(backend, own), total), 0
    gone, lost = _gone_and_lost(backend, flow_id, record, own)
    return FlowProgress(gone - lost, total), lost


def _gone_and_lost(
    backend: Backend, flow_id: str, record: FlowRecord, own: Sequence[tuple[str, str]]
) -> tuple[int, int]:
    """Return how many jobs of an open flow are not in the store, and how many of them may be lost."""
    gone: list[tuple[str, str]] = []
    told: Counter[tuple[str, str]] = Counter()  # for each job, the number of jobs in the store for which it waits
    lost = 0
    for queue, own_id in own:  # each job comes after the jobs for which it waits
        job = peek(backend, queue, own_id)
        if job is None:
            gone.append((queue, own_id))
            continue
        part = flow_of(job.body)
        told.update((tell.queue, tell.id) for tell in (part.tells if part else ()) if tell.mode != "catch")
        if job.state is State.HELD:
            lost += max(0, (job.awaits or 0) - told[queue, own_id])
    last = record.queue_of(record.last), job_id(flow_id, record.last)
    if not lost and last not in gone:
        return len(gone), 0
    kept = _with_outcome(backend, gone)
    if last in gone and last not in kept and _is_open(backend, flow_id):
        lost += 1
    return len(gone), min(lost, len(gone) - len(kept))


def _with_outcome(backend: Backend, jobs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the jobs whose outcomes are kept. These jobs have certainly ended."""
    by_queue: dict[str, list[str]] = {}
    for queue, own_id in jobs:
        by_queue.setdefault(queue, []).append(own_id)
    return {
        (queue, outcome.id)
        for queue, ids in (by_queue.items() if backend.declared.outcomes else ())
        for outcome in backend.outcomes(queue, ids)
        if outcome is not None
    }


def _is_open(backend: Backend, flow_id: str) -> bool:
    """Whether the flow has not ended meanwhile."""
    try:
        return records.read(backend, flow_id)[0].state not in {"finished", "cancelled"}
    except FlowNotFound:
        return False


def _is_gone(status: str) -> bool:
    return status in {"done", "cancelled", "unknown"}


def _counted(flow_id: str, record: FlowRecord) -> list[tuple[str, str]]:
    """Return the queues and ids of the jobs that count."""
    others = {record.catch, record.last} if record.is_batch else {record.catch}
    return [(queue, own_id) for at, (queue, own_id, _) in enumerate(record.jobs(flow_id)) if at not in others]


def _missing(backend: Backend, flow_id: str, record: FlowRecord, total: int) -> int:
    """Return the number of members for which the last job of a batch still waits."""
    last = peek(backend, record.queue_of(record.last), job_id(flow_id, record.last))
    if last is None:
        return 0 if record.state != "enqueuing" else total
    if last.state is not State.HELD or last.awaits is None:
        return 0
    return max(0, last.awaits - (record.state == "enqueuing"))


def _left(backend: Backend, own: Iterable[tuple[str, str]]) -> int:
    return sum(peek(backend, queue, own_id) is not None for queue, own_id in own)


def peek(backend: Backend, queue: str, own_id: str) -> JobRecord | None:
    """Return a job. None: the store does not have it."""
    try:
        return backend.peek(queue, own_id)
    except JobNotFound:
        return None
