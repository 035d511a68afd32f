"""Looking at jobs and managing them from outside, on connections that hold none.

A job's tube never changes and its id is never given out again while the server runs, and a connection does not outlive
the server: so the tube is looked at first, and what follows on the same connection is about that very job.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import NewJob, QueueStats, State
from multiq.errors import BackendUnavailable, EnqueueUncertain, JobNotFound, JobReserved

from .facts import NO_TUBE, job_facts, names, tube_facts
from .failures import FAILURES, explain, refused
from .jobs import id_of, is_queue, put, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import JobRecord

    from .facts import JobFacts, TubeFacts
    from .wires import Session, Wires

_TRIES = 10  # looks at a job that moves between two commands of one look
_TUBES_AT_ONCE = 500  # asked about in one packet

_PEEK = {State.READY: b"peek-ready", State.DELAYED: b"peek-delayed", State.BURIED: b"peek-buried"}


class Manager:
    """What is not enqueuing or consuming."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires

    # --- looking ---

    def peek(self, queue: str, job_id: str) -> JobRecord:
        number = _number(queue, job_id)
        with self._wires.borrowed() as session:
            (found, body), stats = session.ask(b"peek %b" % number, b"stats-job %b" % number, is_safe=True)
            facts = self._job_facts(stats)
        if not found.startswith(b"FOUND ") or facts is None or facts.tube != queue.encode():
            raise JobNotFound(queue, job_id)
        return record(queue, number, facts, body)

    def first(self, queue: str, state: State) -> tuple[JobRecord | None, int]:
        """The first job in a state, None if there is none or it cannot be seen, and how many there are."""
        with self._wires.borrowed() as session:
            for _ in range(_TRIES):
                stats, *heads = session.ask(
                    b"stats-tube %b" % queue.encode(),
                    *([_PEEK[state]] if state in _PEEK else []),
                    tube=queue,
                    is_safe=True,
                )
                count = getattr(self._tube_facts(stats), state.value)
                if not heads or not heads[0][0].startswith(b"FOUND "):
                    if count == 0 or not heads:
                        return None, count
                    continue
                line, body = heads[0]
                number = line.split()[1]
                facts = self._state(session, number)
                if facts is not None and facts.state == state.value.encode():
                    return record(queue, number, facts, body), max(count, 1)
        return None, 0

    def queues(self) -> list[str]:
        with self._wires.borrowed() as session:
            ((line, body),) = session.ask(b"list-tubes", is_safe=True)
            if not line.startswith(b"OK "):
                raise refused(line, self._wires.address)
            tubes = [name for name in names(body) if is_queue(name)]
            in_use = []
            for at in range(0, len(tubes), _TUBES_AT_ONCE):
                some = tubes[at : at + _TUBES_AT_ONCE]
                replies = session.ask(*(b"stats-tube %b" % name.encode() for name in some), is_safe=True)
                in_use += [name for name, reply in zip(some, replies, strict=True) if self._tube_facts(reply).is_in_use]
        return sorted(in_use)

    def stats(self, queue: str) -> QueueStats:
        with self._wires.borrowed() as session:
            tube = self._tube_facts(session.ask(b"stats-tube %b" % queue.encode(), is_safe=True)[0])
        return QueueStats(
            queue=queue,
            ready=tube.ready,
            delayed=tube.delayed,
            reserved=tube.reserved,
            buried=tube.buried,
            paused_for=float(tube.pause_left) if tube.pause else None,
        )

    # --- managing one job ---

    def delete(self, queue: str, job_id: str) -> None:
        number = _number(queue, job_id)
        with self._wires.borrowed() as session:
            facts = self._unreserved(session, queue, number)
            if not self._delete(session, number, facts):
                self._unreserved(session, queue, number)
                raise JobNotFound(queue, job_id)

    def kick_job(self, queue: str, job_id: str) -> None:
        number = _number(queue, job_id)
        with self._wires.borrowed() as session:
            for _ in range(_TRIES):
                if self._unreserved(session, queue, number).state == b"ready" or self._kick(session, number):
                    return
        raise BackendUnavailable(f"job {job_id} of queue {queue!r} moves faster than it can be looked at")

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        """Put it anew, then delete the old one: the other way round, a crash in between would lose it.

        Until the old one is gone the new one is kept from being due, so that nobody gets both.
        """
        number = _number(queue, job_id)
        with self._wires.borrowed() as session:
            facts = self._unreserved(session, queue, number)
            line, body = session.ask(b"peek %b" % number)[0]
            if not line.startswith(b"FOUND "):
                raise JobNotFound(queue, job_id)
            new = self._put_again(session, queue, NewJob(body, job_id, facts.priority, delay, float(facts.ttr)))
            try:
                self._replace(session, queue, number, facts, new, is_due=delay <= 0)
            except FAILURES as exc:
                error = explain(exc, self._wires.address, self._wires.timeout)
                raise type(error)(
                    f"{error}; job {job_id} of queue {queue!r} is being replaced by job {new.decode()}, and both may "
                    "be there for the moment"
                ) from exc
        return new.decode()

    def _put_again(self, session: Session, queue: str, job: NewJob) -> bytes:
        hidden = msgspec.structs.replace(job, delay=job.delay or math.ceil(self._wires.timeout) + 1.0)
        try:
            ((line, _),) = session.ask(put(hidden)[:-2], tube=queue)
        except FAILURES as exc:
            why = explain(exc, self._wires.address, self._wires.timeout)
            raise EnqueueUncertain(queue, [job], str(why)) from exc
        if not line.startswith(b"INSERTED "):
            if line.startswith(b"BURIED ") and not session.facts().has_log:
                session.ask(b"delete %b" % line[7:])
            raise refused(line, self._wires.address)
        return line[9:]

    def _replace(self, session: Session, queue: str, old: bytes, facts: JobFacts, new: bytes, *, is_due: bool) -> None:
        try:
            is_gone = self._delete(session, old, facts)
        except ConnectionError:
            # on another connection, once more: if it is not there any more, then because of us
            session.renew()
            is_gone = self._delete(session, old, facts) or self._state(session, old) is None
        if not is_gone:
            session.ask(b"delete %b" % new)
            self._unreserved(session, queue, old)
            raise JobNotFound(queue, old.decode())
        if is_due:
            session.ask(b"kick-job %b" % new, is_safe=True)

    # --- managing many ---

    def kick(self, queue: str, limit: int) -> int:
        """One by one, by their ids: the server's own ``kick`` takes delayed jobs when it finds none buried."""
        kicked = 0
        before: list[bytes] = []
        while True:
            with self._wires.borrowed() as session:
                *answer, (head, _) = session.ask(*before, b"peek-buried", tube=queue)
            kicked += bool(answer) and self._was_kicked(answer[0][0])
            if kicked == limit or not head.startswith(b"FOUND "):
                return kicked
            before = [b"kick-job %b" % head.split()[1]]

    def purge(self, queue: str, states: Sequence[State]) -> int:
        purged = 0
        for state in _PEEK:
            if state in states:
                purged += self._purge(queue, state)
        return purged

    def _purge(self, queue: str, state: State) -> int:
        _, most = self.first(queue, state)  # so that those who enqueue meanwhile cannot keep us here
        purged = 0
        before: list[bytes] = []
        with self._wires.borrowed() as session:
            must_look = state is State.BURIED and session.facts().has_log
        while purged < most:
            with self._wires.borrowed() as session:
                *answer, (head, _) = session.ask(*before, _PEEK[state], tube=queue)
                purged += bool(answer) and answer[0][0] == b"DELETED"
                if not head.startswith(b"FOUND ") or purged >= most:
                    break
                number = head.split()[1]
                if must_look:
                    facts = self._state(session, number)
                    purged += facts is not None and facts.state == b"buried" and self._delete(session, number, facts)
                    before = []
                else:
                    before = [b"delete %b" % number]
        return purged

    def resume(self, queue: str) -> None:
        ((line, _),) = self._wires.ask(b"pause-tube %b 0" % queue.encode())
        if line not in {b"PAUSED", b"NOT_FOUND"}:
            raise refused(line, self._wires.address)

    # --- how ---

    def _unreserved(self, session: Session, queue: str, number: bytes) -> JobFacts:
        facts = self._state(session, number)
        if facts is None or facts.tube != queue.encode():
            raise JobNotFound(queue, number.decode())
        if facts.state == b"reserved":
            raise JobReserved(queue, number.decode())
        return facts

    def _state(self, session: Session, number: bytes) -> JobFacts | None:
        return self._job_facts(session.ask(b"stats-job %b" % number, is_safe=True)[0])

    def _delete(self, session: Session, number: bytes, job: JobFacts) -> bool:
        """Delete what nobody holds. False: somebody holds it, or it is gone.

        A job that was buried with its put, for lack of memory, is not in the log, and deleting it would spoil the log.
        Kicking writes it there.
        """
        if job.state == b"buried" and job.file == 0 and session.facts().has_log:
            self._kick(session, number)
        ((line, _),) = session.ask(b"delete %b" % number)
        if line not in {b"DELETED", b"NOT_FOUND"}:
            raise refused(line, self._wires.address)
        return line == b"DELETED"

    def _kick(self, session: Session, number: bytes) -> bool:
        return self._was_kicked(session.ask(b"kick-job %b" % number)[0][0])

    def _was_kicked(self, line: bytes) -> bool:
        if line not in {b"KICKED", b"NOT_FOUND"}:
            raise refused(line, self._wires.address)
        return line == b"KICKED"

    def _job_facts(self, reply: tuple[bytes, bytes]) -> JobFacts | None:
        line, body = reply
        if line.startswith(b"OK "):
            return job_facts(body)
        if line != b"NOT_FOUND":
            raise refused(line, self._wires.address)
        return None

    def _tube_facts(self, reply: tuple[bytes, bytes]) -> TubeFacts:
        line, body = reply
        if line.startswith(b"OK "):
            return tube_facts(body)
        if line != b"NOT_FOUND":
            raise refused(line, self._wires.address)
        return NO_TUBE


def _number(queue: str, job_id: str) -> bytes:
    number = id_of(job_id)
    if number is None:
        raise JobNotFound(queue, job_id)
    return number
