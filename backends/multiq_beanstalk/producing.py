"""Putting jobs: many in one packet, and the truth about each whose reply is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from multiq.errors import BackendError, BackendFull, EnqueuePartial, EnqueueUncertain, PayloadTooLarge

from .failures import FAILURES, explain, refused
from .jobs import put

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob

    from .connection import Wire
    from .facts import Facts
    from .wires import Wires

_MOST_JOBS = 1000  # in one packet
_MOST_BYTES = 4_000_000  # of bodies in one packet, the last one not counted


def enqueue(wires: Wires, queue: str, jobs: Sequence[NewJob]) -> list[str]:
    """Put the jobs in their order. Raises as ``Backend.enqueue`` does."""
    deadline = wires.deadline()
    wire = wires.take(deadline)
    try:
        facts = wire.facts
        if facts is None:
            wire, facts = wires.get_to_know(wire, deadline)
        for job in jobs:
            if len(job.body) > facts.max_body:
                raise _too_large(len(job.body), facts.max_body)
        if len(jobs) == 1 and wire.used == queue:
            return _put_alone(wires, wire, queue, jobs[0], deadline)
        return _Batch(wires, queue, jobs, facts).put(wire)
    finally:
        wires.put_back(wire)


def _put_alone(wires: Wires, wire: Wire, queue: str, job: NewJob, deadline: float) -> list[str]:
    """What is done most often, without anything that the others need."""
    try:
        wire.send(put(job), deadline)
        line = wire.read_line(deadline)
    except FAILURES as exc:
        raise EnqueueUncertain(queue, [job], str(explain(exc, wires.address, wires.timeout))) from exc
    if line.startswith(b"INSERTED "):
        return [line[9:].decode()]
    assert wire.facts is not None  # noqa: S101 - they were looked at before
    return _Batch(wires, queue, [job], wire.facts).refuse(wire, {0: line})


class _Batch:
    """One call's jobs, and what has become of them so far."""

    def __init__(self, wires: Wires, queue: str, jobs: Sequence[NewJob], facts: Facts) -> None:
        self._wires = wires
        self._queue = queue
        self._jobs = jobs
        self._facts = facts
        self._accepted: dict[int, str] = {}
        self._refused: dict[int, bytes] = {}

    def put(self, wire: Wire) -> list[str]:
        """In packets, each within a deadline of its own."""
        jobs = self._jobs
        for at, count in _packets(jobs):
            self._put(wire, at, b"".join(map(put, jobs[at : at + count])), count, self._wires.deadline())
            if self._refused:
                self.refuse(wire, self._refused)
        return list(self._accepted.values())

    def refuse(self, wire: Wire, refused: dict[int, bytes]) -> NoReturn:
        """The server did not take these."""
        self._refused = refused
        self._dispose_of_buried(wire)
        raise self._refusal()

    def _put(self, wire: Wire, at: int, packet: bytes, count: int, deadline: float) -> None:
        before = 0
        if wire.used != self._queue:
            before, wire.used = 1, self._queue
            packet = b"use %b\r\n%b" % (self._queue.encode(), packet)
        try:
            wire.send(packet, deadline)
            lines = wire.read_lines(before + count, deadline)
        except FAILURES as exc:
            heard = getattr(exc, "partly_read", [])[before:]
            self._sort(at, heard)
            raise self._uncertain(exc, at + len(heard)) from exc
        self._sort(at, lines[before:] if before else lines)

    def _sort(self, at: int, lines: Sequence[bytes]) -> None:
        for place, line in enumerate(lines, at):
            if line.startswith(b"INSERTED "):
                self._accepted[place] = line[9:].decode()
            else:
                self._refused[place] = line

    def _uncertain(self, exc: Exception, first: int) -> EnqueueUncertain:
        why = explain(exc, self._wires.address, self._wires.timeout)
        return EnqueueUncertain(self._queue, self._jobs[first:], str(why), accepted=self._accepted)

    def _dispose_of_buried(self, wire: Wire) -> None:
        """What was stored and refused at once must not be found later.

        With a log it has to stay: it is not in the log, and a record that deletes what the log does not know ends the
        reading of it at the next start, and loses all that came after.
        """
        buried = [line[7:] for line in self._refused.values() if line.startswith(b"BURIED ")]
        if buried and not self._facts.has_log:
            packet = b"".join(b"delete %b\r\n" % job_id for job_id in buried)
            try:
                wire.ask(packet, len(buried), self._wires.deadline())
            except FAILURES as exc:
                raise explain(exc, self._wires.address, self._wires.timeout) from exc

    def _refusal(self) -> BackendError | PayloadTooLarge:
        place, line = next(iter(self._refused.items()))
        error: BackendError | PayloadTooLarge = refused(line, self._wires.address)
        if line == b"JOB_TOO_BIG":
            cause = error.__cause__
            error = _too_large(len(self._jobs[place].body), self._facts.max_body)
            error.__cause__ = cause
        elif line.startswith(b"BURIED ") and self._facts.has_log:
            cause = error.__cause__
            error = BackendFull(
                f"{error}: it stays buried, as {self._shown_buried()}; when there is memory again, kick it, or kick it "
                "and then delete it"
            )
            error.__cause__ = cause
        if self._accepted:
            partial = EnqueuePartial(self._accepted, len(self._jobs), str(error))
            partial.__cause__ = error
            return partial
        return error

    def _shown_buried(self) -> str:
        return ", ".join(line[7:].decode() for line in self._refused.values() if line.startswith(b"BURIED "))


def _too_large(size: int, limit: int) -> PayloadTooLarge:
    advice = "start beanstalkd with a larger -z, or store it elsewhere, and enqueue where it is"
    return PayloadTooLarge(size, limit, advice)


def _packets(jobs: Sequence[NewJob]) -> Iterator[tuple[int, int]]:
    """Where each packet begins, and how many jobs are in it."""
    at = size = 0
    for place, job in enumerate(jobs):
        if place - at >= _MOST_JOBS or size >= _MOST_BYTES:
            yield at, place - at
            at, size = place, 0
        size += len(job.body)
    yield at, len(jobs) - at
