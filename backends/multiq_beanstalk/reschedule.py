"""Reschedules a job by replacing it with a copy, because beanstalkd cannot change a job."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import NewJob
from multiq.errors import EnqueueUncertain, JobNotFound

from .commands import delete_job, job_number, read_unreserved, why_not_deleted
from .enqueue import put
from .errors import CONNECTION_ERRORS, explain, is_refusal, reply_error

if TYPE_CHECKING:
    from .pool import Pool, Session
    from .stats import JobStats


def reschedule(pool: Pool, queue: str, job_id: str, delay: float) -> str:
    """Put a copy of the job, and then delete the old job. Returns the id of the copy. If the old job were deleted
    first, a crash in between would lose the job.

    The copy is delayed until the old job is deleted, so that no consumer gets both jobs.
    """
    number = job_number(queue, job_id)
    with pool.borrowed() as session:
        stats = read_unreserved(session, queue, number)
        line, body = session.ask(b"peek %b" % number)[0]
        if not line.startswith(b"FOUND "):
            raise JobNotFound(queue, job_id)
        new = _put_replacement(session, queue, NewJob(body, job_id, stats.priority, delay, float(stats.ttr)))
        what = f"is being replaced by job {new.decode()}, and both may exist: if so, the job runs twice"
        try:
            _replace(session, queue, number, stats, new)
            if delay <= 0:
                late = _hide_for(pool)
                what = f"is replaced by job {new.decode()}, which may become due only after {late:g} s"
                session.ask(b"kick-job %b" % new)
        except CONNECTION_ERRORS as exc:
            error = explain(exc, pool.address, pool.timeout)
            raise type(error)(f"{error}; job {job_id} of queue {queue!r} {what}") from exc
    return new.decode()


def _hide_for(pool: Pool) -> float:
    """Return the seconds after which the deletion of the old job has certainly succeeded or failed."""
    return math.ceil(pool.timeout) + 1.0


def _put_replacement(session: Session, queue: str, job: NewJob) -> bytes:
    pool = session.pool
    hidden = msgspec.structs.replace(job, delay=job.delay or _hide_for(pool))
    session.use(queue)
    try:
        ((line, _),) = session.ask(put(hidden)[:-2])
    except CONNECTION_ERRORS as exc:
        why = explain(exc, pool.address, pool.timeout)
        raise EnqueueUncertain(queue, [job], str(why)) from exc
    if not is_refusal(line) and not (line.startswith(b"INSERTED ") and line[9:].isdigit()):
        error = reply_error(line, pool.address)
        session.close()
        raise EnqueueUncertain(queue, [job], str(error)) from error
    if not line.startswith(b"INSERTED "):
        if line.startswith(b"BURIED ") and not session.server_info().has_log:
            session.ask(b"delete %b" % line[7:])
        raise reply_error(line, pool.address)
    return line[9:]


def _replace(session: Session, queue: str, old: bytes, stats: JobStats, new: bytes) -> None:
    if not delete_job(session, old, stats):
        session.ask(b"delete %b" % new)
        raise why_not_deleted(session, queue, old)
