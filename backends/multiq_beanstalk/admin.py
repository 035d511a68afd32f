"""Inspects and changes jobs and queues, on connections that hold no lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import QueueStats, State
from multiq.errors import BackendUnavailable, JobNotFound

from .commands import (
    cannot_kick,
    delete_job,
    job_number,
    kick_job,
    read_stats,
    read_unreserved,
    stats_in,
    was_deleted,
    was_kicked,
    why_not_deleted,
)
from .errors import CONNECTION_ERRORS, reply_error
from .records import is_queue, record
from .stats import NO_TUBE, names, parse_tube_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import JobRecord

    from .pool import Pool, Session
    from .replies import Reply
    from .stats import JobStats, TubeStats

_MAX_ATTEMPTS = 10  # attempts to read a job that changes between the read's commands
_TUBES_AT_ONCE = 500  # tubes whose stats are requested in one packet

_PEEK = {State.READY: b"peek-ready", State.DELAYED: b"peek-delayed", State.BURIED: b"peek-buried"}


class Admin:
    """All operations of the backend except enqueuing, consuming, rescheduling and pausing."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    # --- inspecting ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        number = job_number(queue, job_id)
        with self._pool.borrowed() as session:
            (found, body), reply = session.ask(b"peek %b" % number, b"stats-job %b" % number, is_safe=True)
            stats = stats_in(session, reply)
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
                    stats = read_stats(session, number)
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
        number = job_number(queue, job_id)
        with self._pool.borrowed() as session:
            stats = read_unreserved(session, queue, number)
            if not delete_job(session, number, stats):
                raise why_not_deleted(session, queue, number)

    def kick_job(self, queue: str, job_id: str) -> None:
        number = job_number(queue, job_id)
        with self._pool.borrowed() as session:
            before: JobStats | None = None
            for _ in range(_MAX_ATTEMPTS):
                stats = read_unreserved(session, queue, number)
                if before is not None and stats.is_unchanged_since(before):
                    raise cannot_kick(session, number, queue)
                if stats.state == b"ready" or kick_job(session, number):
                    return
                before = stats
        raise BackendUnavailable(f"job {job_id} of queue {queue!r} changed in each of {_MAX_ATTEMPTS} reads: try again")

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
                if was_kicked(session, line):
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
        before = read_stats(session, number)
        if before is None or before.state != b"buried":
            return False
        if kick_job(session, number):
            return True
        after = read_stats(session, number)
        if after is not None and after.is_unchanged_since(before):
            raise cannot_kick(session, number, queue, kicked)
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
                    stats = read_stats(session, number)
                    purged += stats is not None and stats.state == b"buried" and delete_job(session, number, stats)
                    ((head, _),) = session.ask(_PEEK[state])
                else:
                    (line, _), (head, _) = session.ask(b"delete %b" % number, _PEEK[state])
                    purged += was_deleted(session, line)
                if purged > before:
                    session.extend_deadline()  # only after progress: otherwise the call ends at its deadline
        return purged

    def resume(self, queue: str) -> None:
        ((line, _),) = self._pool.ask(b"pause-tube %b 0" % queue.encode())
        if line not in {b"PAUSED", b"NOT_FOUND"}:
            raise reply_error(line, self._pool.address)

    # --- helpers ---

    def _tube_stats(self, reply: Reply) -> TubeStats:
        line, body = reply
        if line.startswith(b"OK "):
            return parse_tube_stats(body)
        if line != b"NOT_FOUND":
            raise reply_error(line, self._pool.address)
        return NO_TUBE
