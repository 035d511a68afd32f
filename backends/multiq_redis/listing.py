"""Listings: page by page through a queue's lines, read only where the server takes no writes."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import hiredis

from multiq.backend import Page, State
from multiq.errors import BackendUnavailable, OptionInvalid

from . import keys
from .errors import REFUSES_WRITES, code_of
from .partitions import MOST
from .records import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import JobRecord

    from .client import Callers

_SLICE = 500  # jobs that one script lists: a few milliseconds of the server
_MOST_PARTS = 3 * MOST


class _Part(NamedTuple):
    """One set of one line, or what in it is due by now, or what is not."""

    line: str
    set: State
    which: str  # lua/jobs.lua


class _Cursor(NamedTuple):
    """After which job a page begins: ``score.sequence`` in the first part, ``part:score.sequence`` in another.

    ``part:`` is where a part begins.
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
        raise OptionInvalid(f"after={after!r} is no page's cursor: pass what the page before gave as its after")

    def __str__(self) -> str:
        place = ".".join(map(str, self.place)) if self.place[0] != "" else ""
        return f"{self.part}:{place}" if self.part else place


def list_jobs(callers: Callers, lines: Sequence[str], state: State, limit: int, after: str | None) -> Page:
    """One page of the jobs of a queue that goes over these lines. Raises ``OptionInvalid``, ``BackendError``."""
    parts = [part for line in lines for part in _parts(line, state)]
    at = _Cursor(0) if after is None else _Cursor.read(after)
    shown: list[JobRecord] = []
    for number in range(at.part, len(parts)):
        part = parts[number]
        at = at if number == at.part else _Cursor(number)
        if state is State.READY and part.set is state:
            _make_ready(callers, part.line)
        for place, job in _listed(callers, part, state, at, limit + 1 - len(shown)):
            if len(shown) == limit:
                return Page(shown, str(at))
            shown.append(job)
            at = place
    return Page(shown, None)


def promote_all(callers: Callers, line: str) -> None:
    """Make ready what is due in a line, slice by slice, as long as a call may take: the rest stays where it is."""
    give_up_at = time.monotonic() + callers.servers.timeout
    while callers.call("promote", line) == b"1" and time.monotonic() < give_up_at:
        pass


def _make_ready(callers: Callers, line: str) -> None:
    """So that what is due is listed in its place; behind the others if the server takes no writes."""
    try:
        promote_all(callers, line)
    except BackendUnavailable as exc:
        if not isinstance(exc.__cause__, hiredis.ReplyError) or code_of(exc.__cause__) not in REFUSES_WRITES:
            raise


def _parts(line: str, state: State) -> list[_Part]:
    """Where jobs of a state are; what is due and was not made ready yet is ready all the same."""
    if state is State.READY:
        return [_Part(line, state, ""), _Part(line, State.DELAYED, "due"), _Part(line, State.RESERVED, "due")]
    return [_Part(line, state, "" if state is State.BURIED else "later")]


def _listed(
    callers: Callers, part: _Part, state: State, at: _Cursor, limit: int
) -> Iterator[tuple[_Cursor, JobRecord]]:
    """The jobs of one part from a place on, each with its own."""
    queue = keys.queue_and_number(part.line)[0]
    was_abandoned = state is State.READY and part.set is State.RESERVED
    while limit > 0:
        asked = min(limit, _SLICE)
        reply = callers.call("jobs", part.line, (asked, *at.place, part.which), state=part.set.value)
        found, now = listed(state, reply, was_abandoned=was_abandoned)
        for place, job in found:
            at = _Cursor(at.part, place)
            if job.record:  # else it cannot be read, and is set aside when its turn comes
                yield at, job.told(queue, now)
        limit -= asked
        if len(found) < asked:
            return
