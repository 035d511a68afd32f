"""The commands about single jobs, and the server's replies: reading, deleting and kicking a job, and settling a lease.

Each call about one job first reads the job's tube. The tube of a job never changes, and a running server never gives
out an id a second time. So on the same connection, the id means the same job in all later commands. On a new
connection, the id may belong to another job: the server may have been restarted, or its name may now lead to another
server. So commands that follow such a read are never repeated on a new connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Release, Touch
from multiq.errors import BackendFull, JobNotFound, JobReserved, LeaseLost

from .errors import reply_error
from .records import id_of, whole_seconds
from .stats import parse_job_stats

if TYPE_CHECKING:
    from multiq.backend import Verdict

    from .pool import Session
    from .replies import Reply
    from .stats import JobStats

#: verdict -> the server's reply if the verdict was carried out
DONE: dict[type[Verdict], bytes] = {
    Ack: b"DELETED",
    Touch: b"TOUCHED",
    Bury: b"BURIED",
    Release: b"RELEASED",
    GiveBack: b"RELEASED",
    Abandon: b"RELEASED",
}


#: replies to a verdict after which the lease has ended, but the verdict was not carried out
STRANDED = (b"OUT_OF_MEMORY", b"INTERNAL_ERROR")


class OutOfReach(LeaseLost):
    """The server had no room in its log for the verdict. The job is in no queue until the server restarts."""

    sentence = (
        "job {job_id} of queue {queue!r} is out of reach until the server restarts: the server had no room in its log "
        "for this verdict; make room on its disk, then restart it, and the job is run again"
    )


def job_number(queue: str, job_id: str) -> bytes:
    """Return an id as the server writes it. Raises ``JobNotFound`` if no server gives out such an id."""
    number = id_of(job_id)
    if number is None:
        raise JobNotFound(queue, job_id)
    return number


# --- reading ---


def read_unreserved(session: Session, queue: str, number: bytes) -> JobStats:
    """Return the job's stats. Raises ``JobNotFound``, ``JobReserved``."""
    stats = read_stats(session, number, is_safe=True)
    if stats is None or stats.tube != queue.encode():
        raise JobNotFound(queue, number.decode())
    if stats.state == b"reserved":
        raise JobReserved(queue, number.decode())
    return stats


def read_stats(session: Session, number: bytes, *, is_safe: bool = False) -> JobStats | None:
    """Return the job's stats.

    *is_safe*: the command may be repeated on a new connection, because the call has not read the job before.
    """
    return stats_in(session, session.ask(b"stats-job %b" % number, is_safe=is_safe)[0])


def stats_in(session: Session, reply: Reply) -> JobStats | None:
    """Return the stats in the reply to ``stats-job``, or None if there is no such job."""
    line, body = reply
    if line.startswith(b"OK "):
        return parse_job_stats(body)
    if line != b"NOT_FOUND":
        raise reply_error(line, session.pool.address)
    return None


# --- deleting ---


def delete_job(session: Session, number: bytes, job: JobStats) -> bool:
    """Delete a job that is not reserved. Returns False if a consumer has the job, or the job is gone.

    If a put buries its job for lack of memory, the job is not in the log. The deletion of such a job would corrupt
    the log. So the job is kicked before the deletion. The kick writes the job to the log.
    """
    if job.is_out_of_log and session.server_info().has_log and not kick_job(session, number):
        now = read_stats(session, number)
        if now is not None and now.is_out_of_log:
            raise cannot_kick(session, number, job.tube.decode())
    ((line, _),) = session.ask(b"delete %b" % number)
    return was_deleted(session, line)


def why_not_deleted(session: Session, queue: str, number: bytes) -> JobNotFound | JobReserved:
    """Return the error for a job that could not be deleted, because it is gone or a consumer had reserved it."""
    missing = read_stats(session, number) is None
    return (JobNotFound if missing else JobReserved)(queue, number.decode())


def was_deleted(session: Session, line: bytes) -> bool:
    """Whether the reply to ``delete`` says that the job was deleted. Raises ``BackendError``."""
    if line not in {b"DELETED", b"NOT_FOUND"}:
        raise reply_error(line, session.pool.address)
    return line == b"DELETED"


# --- kicking ---


def kick_job(session: Session, number: bytes) -> bool:
    """Kick a job. Returns False if the job is neither buried nor delayed, or the server has no room for the kick."""
    return was_kicked(session, session.ask(b"kick-job %b" % number)[0][0])


def cannot_kick(session: Session, number: bytes, queue: str, kicked: int = 0) -> BackendFull:
    """Return the error for a job that the server has no room to kick. *kicked*: the jobs that were kicked before it."""
    others = f"; {kicked} jobs were kicked before it" if kicked else ""
    return BackendFull(
        f"{session.pool.server_name} has no room in its log, or no memory, to make job {number.decode()} of queue "
        f"{queue!r} ready: give it more, then kick again{others}"
    )


def was_kicked(session: Session, line: bytes) -> bool:
    """Whether the reply to ``kick-job`` says that the job was kicked. Raises ``BackendError``."""
    if line not in {b"KICKED", b"NOT_FOUND"}:
        raise reply_error(line, session.pool.address)
    return line == b"KICKED"


# --- settling ---


def settle_command(verdict: Verdict) -> bytes:
    """Return the command for a verdict, including the line's end."""
    lease = verdict.lease
    number = lease.id.encode()
    match verdict:
        case Ack():
            return b"delete %b\r\n" % number
        case Touch():
            return b"touch %b\r\n" % number
        case Bury():
            return b"bury %b %d\r\n" % (number, lease.priority)
        case Release(delay=delay, priority=priority):
            kept = lease.priority if priority is None else priority
            return b"release %b %d %d\r\n" % (number, kept, whole_seconds(delay) if delay else 0)
        case GiveBack(delay=delay):
            return b"release %b %d %d\r\n" % (number, lease.priority, whole_seconds(delay) if delay else 0)
        case _:
            return b"release %b %d 0\r\n" % (number, lease.priority)
