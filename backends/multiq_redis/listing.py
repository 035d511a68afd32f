"""Lists queues, and lists jobs page by page through a queue's partitions. Listing also works if the server refuses
writes."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import hiredis

from multiq.backend import Page, State
from multiq.driverkit.paging import foreign_cursor
from multiq.errors import BackendTimeout, BackendUnavailable

from . import keys
from .errors import REFUSES_WRITES, code_of
from .partitions import MOST
from .records import parse_listing, parse_parked
from .servers import format_address

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import JobRecord

    from .pool import Pool

_SLICE = 500  # jobs that one script lists, in a few milliseconds
_SCANNED_AT_ONCE = 1000  # keys
_SCANS_FOR = 300.0  # seconds: enough for hundreds of millions of keys; a broken server may never end the scan
_PARKED = "parked:"  # the beginning of cursors in the parked jobs; the member of the page's last job follows, in hex
_MOST_PARTS = 3 * MOST
_WHICH = {State.BURIED: "", State.HELD: "held"}  # ``which`` in these states; "later" in all others


class _Part(NamedTuple):
    """A part of a listing, from one sorted set of one partition."""

    partition: str
    set: State
    which: str  # "": all jobs; "due"; "later": jobs that are not due; "held"; see lua/jobs.lua


class _Cursor(NamedTuple):
    """The job after which a page begins.

    The text is ``score.sequence`` in the first part, and ``part:score.sequence`` in later parts. ``part:`` alone
    means that the page begins with the first job of that part.
    """

    part: int
    place: tuple[int, int] | tuple[str, str] = ("", "")
    """Score and sequence, both empty before the first job."""

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


def list_queues(pool: Pool) -> list[str]:
    """Return the names of all queues, sorted. Raises ``BackendError``."""
    found = {keys.queue_of(key, pool.prefix) for key in _scan(pool)}
    return sorted(queue for queue in found if queue is not None)


def partitioned_queues(pool: Pool) -> set[str]:
    """Return the names of the queues that have a stored number of partitions. Raises ``BackendError``."""
    found = {keys.partitioned_queue_of(key, pool.prefix) for key in _scan(pool)}
    return {queue for queue in found if queue is not None}


def list_jobs(pool: Pool, partitions: Sequence[str], state: State, limit: int, after: str | None) -> Page:
    """Return one page of the jobs in these partitions. Raises ``OptionInvalid``, ``BackendError``."""
    if after is not None and after.startswith(_PARKED) and state is State.READY:
        return _parked(pool, partitions[0], [], limit, after)
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
    return _parked(pool, partitions[0], jobs, limit, _PARKED) if state is State.READY else Page(jobs, None)


def _scan(pool: Pool) -> Iterator[str]:
    """Yields all keys of all queues. SCAN finds them. The store keeps no index of queues, because an index could become
    wrong."""
    give_up_at = time.monotonic() + _SCANS_FOR
    with pool.borrowed() as client:
        for address in client.all_addresses():
            cursor, before = b"0", b""
            while cursor != before:
                before = cursor
                words = ("SCAN", cursor, "MATCH", keys.pattern(pool.prefix), "COUNT", _SCANNED_AT_ONCE)
                cursor, found = client.command(address, *words)
                for key in found:
                    yield key.decode("utf-8", "replace")
                if cursor == b"0":
                    break
                if time.monotonic() > give_up_at:
                    raise BackendTimeout(
                        f"{format_address(address)} has more keys than can be scanned in {_SCANS_FOR:g} s: keep queues "
                        "in a database with fewer other keys"
                    )
            else:
                raise BackendUnavailable(f"{format_address(address)} answers SCAN with the same cursor twice")


def _parked(pool: Pool, queue: str, jobs: list[JobRecord], limit: int, after: str) -> Page:
    """Add the parked jobs after the *jobs* of the page. Parked jobs are in the queue's first partition."""
    try:
        member = bytes.fromhex(after.removeprefix(_PARKED))
    except ValueError:
        raise foreign_cursor(after) from None
    listed = {job.id for job in jobs}  # a reserve may have parked some of these jobs since they were read
    while True:
        asked = min(limit + 1 - len(jobs), _SLICE)
        found, now = parse_parked(pool.call("jobs_parked", queue, (asked, member)))
        held_by = pool.call("held_by", queue, [job.packed_id for _, job in found]) if found else []
        for (following, job), gate in zip(found, held_by, strict=True):
            if not job.record:  # the job is gone
                member = following
                continue
            record = job.to_record(queue, now, gate)
            if record.id not in listed:
                if len(jobs) == limit:
                    return Page(jobs, _PARKED + member.hex())
                jobs.append(record)
            member = following
        if len(found) < asked:
            return Page(jobs, None)


def promote_all(pool: Pool, partition: str) -> None:
    """Make a partition's due jobs ready, slice by slice. This takes at most the time of one call."""
    give_up_at = time.monotonic() + pool.servers.timeout
    while pool.call("promote", partition) == b"1" and time.monotonic() < give_up_at:
        pass


def _make_ready(pool: Pool, partition: str) -> None:
    """Make due jobs ready, so that all ready jobs are listed in order.

    If the server refuses writes, due jobs are listed after the ready jobs.
    """
    try:
        promote_all(pool, partition)
    except BackendUnavailable as exc:
        if not isinstance(exc.__cause__, hiredis.ReplyError) or code_of(exc.__cause__) not in REFUSES_WRITES:
            raise


def _parts(partition: str, state: State) -> list[_Part]:
    """The parts that have the jobs of a state. A due job counts as ready, even if no script has made the job ready
    yet."""
    if state is State.READY:
        return [
            _Part(partition, state, ""),
            _Part(partition, State.DELAYED, "due"),
            _Part(partition, State.RESERVED, "due"),
        ]
    return [_Part(partition, state, _WHICH.get(state, "later"))]


def _listed(pool: Pool, part: _Part, state: State, at: _Cursor, limit: int) -> Iterator[tuple[_Cursor, JobRecord]]:
    """Yields the jobs of one part after a cursor. Each job comes with the cursor that points to the job."""
    queue = keys.queue_and_number(part.partition)[0]
    was_abandoned = state is State.READY and part.set is State.RESERVED
    while limit > 0:
        asked = min(limit, _SLICE)
        reply = pool.call("jobs", part.partition, (asked, *at.place, part.which), state=part.set.value)
        found, now = parse_listing(state, reply, was_abandoned=was_abandoned)
        for place, job in found:
            at = _Cursor(at.part, place)
            if job.record:  # a job without a record cannot be decoded; the next reserve sets it aside
                limit -= 1
                yield at, job.to_record(queue, now)
        if len(found) < asked:
            return
