"""Lists jobs page by page through a queue's partitions. If the server takes no writes, it lists without writing."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import hiredis

from multiq.backend import Page, State
from multiq.driverkit.paging import foreign_cursor
from multiq.errors import BackendUnavailable

from . import keys
from .errors import REFUSES_WRITES, code_of
from .partitions import MOST
from .records import parse_listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import JobRecord

    from .pool import Pool

_SLICE = 500  # jobs that one script lists: a few milliseconds of the server
_MOST_PARTS = 3 * MOST


class _Part(NamedTuple):
    """A part of a listing: from one sorted set of one partition, all jobs, only those due, or only those not due."""

    partition: str
    set: State
    which: str  # lua/jobs.lua


class _Cursor(NamedTuple):
    """The job after which a page begins: ``score.sequence`` in the first part, ``part:score.sequence`` in later parts.

    ``part:`` alone means: from the first job of that part.
    """

    part: int
    place: tuple[int, int] | tuple[str, str] = ("", "")
    """Score and sequence; empty before the first."""

    @classmethod
    def read(cls, after: str) -> _Cursor:
        where, _, place = after.rpartition(":")
        score, _, sequence = place.partition(".")
        with contextlib.suppress(ValueError):
            part = int(where or 0)
            numbers = (int(score), int(sequence)) if place or not where else ()
            if 0 <= part < _MOST_PARTS and all(0 <= number < 2**63 for number in numbers):
                return cls(part, numbers or ("", ""))
        raise foreign_cursor(after)

    def __str__(self) -> str:
        place = ".".join(map(str, self.place)) if self.place[0] != "" else ""
        return f"{self.part}:{place}" if self.part else place


def list_jobs(pool: Pool, partitions: Sequence[str], state: State, limit: int, after: str | None) -> Page:
    """Return one page of the jobs in these partitions. Raises ``OptionInvalid``, ``BackendError``."""
    parts = [part for partition in partitions for part in _parts(partition, state)]
    at = _Cursor(0) if after is None else _Cursor.read(after)
    jobs: list[JobRecord] = []
    for number in range(at.part, len(parts)):
        part = parts[number]
        at = at if number == at.part else _Cursor(number)
        if state is State.READY and part.set is state:
            _make_ready(pool, part.partition)
        for place, job in _listed(pool, part, state, at, limit + 1 - len(jobs)):
            if len(jobs) == limit:
                return Page(jobs, str(at))
            jobs.append(job)
            at = place
    return Page(jobs, None)


def promote_all(pool: Pool, partition: str) -> None:
    """Make a partition's due jobs ready, slice by slice, for as long as a call may take. The rest stay delayed."""
    give_up_at = time.monotonic() + pool.servers.timeout
    while pool.call("promote", partition) == b"1" and time.monotonic() < give_up_at:
        pass


def _make_ready(pool: Pool, partition: str) -> None:
    """Make due jobs ready, so that they are listed in their order.

    If the server takes no writes, due jobs are listed after the jobs that are ready already.
    """
    try:
        promote_all(pool, partition)
    except BackendUnavailable as exc:
        if not isinstance(exc.__cause__, hiredis.ReplyError) or code_of(exc.__cause__) not in REFUSES_WRITES:
            raise


def _parts(partition: str, state: State) -> list[_Part]:
    """The parts that have the jobs of a state. A due job counts as ready, even if no script has made it ready yet."""
    if state is State.READY:
        return [
            _Part(partition, state, ""),
            _Part(partition, State.DELAYED, "due"),
            _Part(partition, State.RESERVED, "due"),
        ]
    return [_Part(partition, state, "" if state is State.BURIED else "later")]


def _listed(pool: Pool, part: _Part, state: State, at: _Cursor, limit: int) -> Iterator[tuple[_Cursor, JobRecord]]:
    """The jobs of one part after a cursor, each with the cursor that points to it."""
    queue = keys.queue_and_number(part.partition)[0]
    was_abandoned = state is State.READY and part.set is State.RESERVED
    while limit > 0:
        asked = min(limit, _SLICE)
        reply = pool.call("jobs", part.partition, (asked, *at.place, part.which), state=part.set.value)
        found, now = parse_listing(state, reply, was_abandoned=was_abandoned)
        for place, job in found:
            at = _Cursor(at.part, place)
            if job.record:  # else it cannot be decoded, and is set aside when it would be reserved
                yield at, job.to_record(queue, now)
        limit -= asked
        if len(found) < asked:
            return
