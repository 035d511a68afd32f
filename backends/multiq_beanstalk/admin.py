"""Inspects and changes jobs and queues, on connections that hold no lease.

Each call first reads the job's tube. The tube of a job never changes, and a running server never gives out an id a
second time. So on the same connection, the id means the same job in all later commands. On a new connection, the id may
belong to another job: the server may have been restarted, or its name may now lead to another server. So commands that
follow such a read are never repeated on a new connection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import NewJob, QueueStats, State
from multiq.errors import BackendFull, BackendUnavailable, EnqueueUncertain, JobNotFound, JobReserved

from .errors import CONNECTION_ERRORS, explain, is_refusal, reply_error
from .records import id_of, is_queue, put, record
from .server_info import NO_TUBE, names, parse_job_stats, parse_tube_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import JobRecord

    from .pool import Pool, Session
    from .server_info import JobStats, TubeStats

_MAX_ATTEMPTS = 10  # attempts to read a job that changes between the read's commands
_TUBES_AT_ONCE = 500  # tubes whose stats are requested in one packet

_PEEK = {State.READY: b"peek-ready", State.DELAYED: b"peek-delayed", State.BURIED: b"peek-buried"}


class Admin:
    """All operations of the backend except enqueuing and consuming."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    # --- inspecting ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        number = _number(queue, job_id)
        with self._pool.borrowed() as session:
            (found, body), reply = session.ask(b"peek %b" % number, b"stats-job %b" % number, is_safe=True)
            stats = self._job_stats(reply)
        if not found.startswith(b"FOUND ") or stats is None or stats.tube != queue.encode():
            raise JobNotFound(queue, job_id)
        return record(queue, number, stats, body)

    def first(self, queue: str, state: State) -> tuple[JobRecord | None, int]:
        """Return the first job in a state, and the number of jobs in that state. The job is None if it cannot be
        read."""
        with self._pool.borrowed() as session:
            for _ in range(_MAX_ATTEMPTS):
                reply, *heads = session.ask(
                    b"stats-tube %b" % queue.encode(),
                    *([_PEEK[state]] if state in _PEEK else []),
                    tube=queue,
                    is_safe=True,
                )
                count = getattr(self._tube_stats(reply), state.value)
                if not heads or not heads[0][0].startswith(b"FOUND "):
                    if count == 0 or not heads:
                        return None, count
                    continue
                line, body = heads[0]
                number = line.split()[1]
                try:
                    stats = self._state(session, number)
                except CONNECTION_ERRORS as exc:
                    if not session.reconnect_after(exc):
                        raise
                    continue
                if stats is not None and stats.state == state.value.encode():
                    return record(queue, number, stats, body), max(count, 1)
        return None, 0

    def queues(self) -> list[str]:
        with self._pool.borrowed() as session:
            ((line, body),) = session.ask(b"list-tubes", is_safe=True)
            if not line.startswith(b"OK "):
                raise reply_error(line, self._pool.address)
            tubes = [name for name in names(body) if is_queue(name)]
            in_use = []
            for at in range(0, len(tubes), _TUBES_AT_ONCE):
                some = tubes[at : at + _TUBES_AT_ONCE]
                replies = session.ask(*(b"stats-tube %b" % name.encode() for name in some), is_safe=True)
                in_use += [name for name, reply in zip(some, replies, strict=True) if self._tube_stats(reply).is_in_use]
        return sorted(in_use)

    def stats(self, queue: str) -> QueueStats:
        with self._pool.borrowed() as session:
            tube = self._tube_stats(session.ask(b"stats-tube %b" % queue.encode(), is_safe=True)[0])
        return QueueStats(
            queue=queue,
            ready=tube.ready,
            delayed=tube.delayed,
            reserved=tube.reserved,
            buried=tube.buried,
            paused_for=float(tube.pause_left) if tube.pause else None,
        )

    # --- one job ---

    def delete(self, queue: str, job_id: str) -> None:
        number = _number(queue, job_id)
        with self._pool.borrowed() as session:
            stats = self._unreserved(session, queue, number)
            if not self._delete(session, number, stats):
                raise self._why_not_deleted(session, queue, number)

    def kick_job(self, queue: str, job_id: str) -> None:
        number = _number(queue, job_id)
        with self._pool.borrowed() as session:
            before: JobStats | None = None
            for _ in range(_MAX_ATTEMPTS):
                stats = self._unreserved(session, queue, number)
                if before is not None and stats.is_unchanged_since(before):
                    raise self._cannot_kick(number, queue)
                if stats.state == b"ready" or self._kick(session, number):
                    return
                before = stats
        raise BackendUnavailable(f"job {job_id} of queue {queue!r} changed in each of {_MAX_ATTEMPTS} reads: try again")

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Put a copy of the job, and then delete the old job. If the old job were deleted first, a crash in between
        would lose the job.

        The copy is delayed until the old job is deleted, so that no consumer gets both jobs.
        """
        number = _number(queue, job_id)
        with self._pool.borrowed() as session:
            stats = self._unreserved(session, queue, number)
            line, body = session.ask(b"peek %b" % number)[0]
            if not line.startswith(b"FOUND "):
                raise JobNotFound(queue, job_id)
            new = self._put_replacement(session, queue, NewJob(body, job_id, stats.priority, delay, float(stats.ttr)))
            what = f"is being replaced by job {new.decode()}, and both may exist: if so, the job runs twice"
            try:
                self._replace(session, queue, number, stats, new)
                if delay <= 0:
                    late = self._hide_for()
                    what = f"is replaced by job {new.decode()}, which may become due only after {late:g} s"
                    session.ask(b"kick-job %b" % new)
            except CONNECTION_ERRORS as exc:
                error = explain(exc, self._pool.address, self._pool.timeout)
                raise type(error)(f"{error}; job {job_id} of queue {queue!r} {what}") from exc
        return new.decode()

    def _hide_for(self) -> float:
        """Return the seconds after which the deletion of the old job has certainly succeeded or failed."""
        return math.ceil(self._pool.timeout) + 1.0

    def _put_replacement(self, session: Session, queue: str, job: NewJob) -> bytes:
        hidden = msgspec.structs.replace(job, delay=job.delay or self._hide_for())
        session.use(queue)
        try:
            ((line, _),) = session.ask(put(hidden)[:-2])
        except CONNECTION_ERRORS as exc:
            why = explain(exc, self._pool.address, self._pool.timeout)
            raise EnqueueUncertain(queue, [job], str(why)) from exc
        if not is_refusal(line) and not (line.startswith(b"INSERTED ") and line[9:].isdigit()):
            error = reply_error(line, self._pool.address)
            session.close()
            raise EnqueueUncertain(queue, [job], str(error)) from error
        if not line.startswith(b"INSERTED "):
            if line.startswith(b"BURIED ") and not session.server_info().has_log:
                session.ask(b"delete %b" % line[7:])
            raise reply_error(line, self._pool.address)
        return line[9:]

    def _replace(self, session: Session, queue: str, old: bytes, stats: JobStats, new: bytes) -> None:
        if not self._delete(session, old, stats):
            session.ask(b"delete %b" % new)
            raise self._why_not_deleted(session, queue, old)

    # --- many jobs ---

    def kick(self, queue: str, limit: int) -> int:
        """Kick buried jobs one by one, by id. The server's own ``kick`` is not used, because it kicks delayed jobs if
        no job is buried."""
        kicked = 0
        with self._pool.borrowed() as session:
            ((head, _),) = session.ask(b"peek-buried", tube=queue, is_safe=True)
            while kicked < limit and head.startswith(b"FOUND "):
                number = head.split()[1]
                (line, _), (head, _) = session.ask(b"kick-job %b" % number, b"peek-buried")
                if self._was_kicked(line):
                    kicked += 1
                    session.extend_deadline()  # only after progress: otherwise the call ends at its deadline
                elif self._kick_again(session, queue, number, kicked):
                    kicked += 1
                    ((head, _),) = session.ask(b"peek-buried")
        return kicked

    def _kick_again(self, session: Session, queue: str, number: bytes, kicked: int) -> bool:
        """Kick the first buried job once more, because a kick has failed. Returns False if the job is not buried any
        more.

        Raises ``BackendFull`` if the job is still buried.
        """
        before = self._state(session, number)
        if before is None or before.state != b"buried":
            return False
        if self._kick(session, number):
            return True
        after = self._state(session, number)
        if after is not None and after.is_unchanged_since(before):
            raise self._cannot_kick(number, queue, kicked)
        return False

    def purge(self, queue: str, states: Sequence[State]) -> int:
        purged = 0
        for state in _PEEK:
            if state in states:
                purged += self._purge(queue, state)
        return purged

    def _purge(self, queue: str, state: State) -> int:
        purged = 0
        with self._pool.borrowed() as session:
            reply, (head, _) = session.ask(b"stats-tube %b" % queue.encode(), _PEEK[state], tube=queue, is_safe=True)
            most = getattr(self._tube_stats(reply), state.value)  # counted once: later jobs must not prolong the call
            must_check = state is State.BURIED and most and session.server_info().has_log
            while purged < most and head.startswith(b"FOUND "):
                number, before = head.split()[1], purged
                if must_check:
                    stats = self._state(session, number)
                    purged += stats is not None and stats.state == b"buried" and self._delete(session, number, stats)
                    ((head, _),) = session.ask(_PEEK[state])
                else:
                    (line, _), (head, _) = session.ask(b"delete %b" % number, _PEEK[state])
                    purged += self._was_deleted(line)
                if purged > before:
                    session.extend_deadline()  # only after progress: otherwise the call ends at its deadline
        return purged

    def resume(self, queue: str) -> None:
        ((line, _),) = self._pool.ask(b"pause-tube %b 0" % queue.encode())
        if line not in {b"PAUSED", b"NOT_FOUND"}:
            raise reply_error(line, self._pool.address)

    # --- helpers ---

    def _unreserved(self, session: Session, queue: str, number: bytes) -> JobStats:
        stats = self._state(session, number, is_safe=True)
        if stats is None or stats.tube != queue.encode():
            raise JobNotFound(queue, number.decode())
        if stats.state == b"reserved":
            raise JobReserved(queue, number.decode())
        return stats

    def _state(self, session: Session, number: bytes, *, is_safe: bool = False) -> JobStats | None:
        """Return the job's stats.

        *is_safe*: the command may be repeated on a new connection, because the call has not read the job before.
        """
        return self._job_stats(session.ask(b"stats-job %b" % number, is_safe=is_safe)[0])

    def _delete(self, session: Session, number: bytes, job: JobStats) -> bool:
        """Delete a job that is not reserved. Returns False if a consumer has the job, or the job is gone.

        If a put buries its job for lack of memory, the job is not in the log. The deletion of such a job would corrupt
        the log. So the job is kicked before the deletion. The kick writes the job to the log.
        """
        if job.is_out_of_log and session.server_info().has_log and not self._kick(session, number):
            now = self._state(session, number)
            if now is not None and now.is_out_of_log:
                raise self._cannot_kick(number, job.tube.decode())
        ((line, _),) = session.ask(b"delete %b" % number)
        return self._was_deleted(line)

    def _why_not_deleted(self, session: Session, queue: str, number: bytes) -> JobNotFound | JobReserved:
        """Return the error for a job that could not be deleted, because it is gone or a consumer had reserved it."""
        missing = self._state(session, number) is None
        return (JobNotFound if missing else JobReserved)(queue, number.decode())

    def _was_deleted(self, line: bytes) -> bool:
        if line not in {b"DELETED", b"NOT_FOUND"}:
            raise reply_error(line, self._pool.address)
        return line == b"DELETED"

    def _kick(self, session: Session, number: bytes) -> bool:
        return self._was_kicked(session.ask(b"kick-job %b" % number)[0][0])

    def _cannot_kick(self, number: bytes, queue: str, kicked: int = 0) -> BackendFull:
        others = f"; {kicked} jobs were kicked before it" if kicked else ""
        return BackendFull(
            f"{self._pool.server_name} has no room in its log, or no memory, to make job {number.decode()} of queue "
            f"{queue!r} ready: give it more, then kick again{others}"
        )

    def _was_kicked(self, line: bytes) -> bool:
        if line not in {b"KICKED", b"NOT_FOUND"}:
            raise reply_error(line, self._pool.address)
        return line == b"KICKED"

    def _job_stats(self, reply: tuple[bytes, bytes]) -> JobStats | None:
        line, body = reply
        if line.startswith(b"OK "):
            return parse_job_stats(body)
        if line != b"NOT_FOUND":
            raise reply_error(line, self._pool.address)
        return None

    def _tube_stats(self, reply: tuple[bytes, bytes]) -> TubeStats:
        line, body = reply
        if line.startswith(b"OK "):
            return parse_tube_stats(body)
        if line != b"NOT_FOUND":
            raise reply_error(line, self._pool.address)
        return NO_TUBE


def _number(queue: str, job_id: str) -> bytes:
    number = id_of(job_id)
    if number is None:
        raise JobNotFound(queue, job_id)
    return number
