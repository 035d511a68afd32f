"""Decides which occurrences of a schedule are made now, by its option ``overlap``. This module uses no clock and no
connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .misfire import missed_of
from .timetable import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record
    from .timetable import Milliseconds, Timetable

DECIDE = 2 * SECOND  # seconds before an occurrence: the time of the check whether the previous job is done (overlap)
RETRY = 2 * SECOND  # seconds between two checks whether the previous occurrence is done (overlap="follow")
_MOST_AHEAD = 300  # occurrences of the next minute or two; each second has at most one
NEVER: Milliseconds = 2**62


class Plan(NamedTuple):
    record: Record
    """The schedule after the plan. If this is the object that was passed in, nothing has changed, so nothing needs to
    be stored."""
    made: list[Milliseconds]
    """The occurrences to make, in ascending order."""
    wake: Milliseconds
    """The time at which to plan the schedule again, by the server's clock."""


def plan(record: Record, now: Milliseconds, ahead: Milliseconds, is_there: Callable[[Milliseconds], bool]) -> Plan:
    """Plan the occurrences until *now* plus *ahead*.

    *is_there*: a function that takes an occurrence that was made. It returns whether the job still exists and is not
    buried.
    """
    definition = record.definition
    if record.is_paused:
        return Plan(record, [], NEVER)
    times = definition.timetable
    first = times.next(record.through)
    if first is None:
        return Plan(record, [], NEVER)
    if first > now + ahead:
        return Plan(record, [], first - ahead)
    if definition.overlap == "allow":
        return _all_at_once(record, times, first, now, ahead)
    return _one_by_one(record, times, first, now, ahead, is_there)


def _all_at_once(record: Record, times: Timetable, first: Milliseconds, now: Milliseconds, ahead: Milliseconds) -> Plan:
    missed, through = [], record.through
    if first <= now:
        missed = missed_of(record.definition, times, through, now)
        through = _last(times, through, now)
    coming = times.between(through, now + ahead, _MOST_AHEAD)
    through = coming[-1] if coming else through
    made = [*missed, *coming]
    changed = _made(record, made, through, now) if made else msgspec.structs.replace(record, through=through)
    following = times.next(through)
    return Plan(changed, made, NEVER if following is None else following - ahead)


def _one_by_one(  # noqa: PLR0917 - all of them are of one plan
    record: Record,
    times: Timetable,
    first: Milliseconds,
    now: Milliseconds,
    ahead: Milliseconds,
    is_there: Callable[[Milliseconds], bool],
) -> Plan:
    """Plan at most one occurrence. It is made only if the job of the previous occurrence is gone or buried."""
    definition, through = record.definition, record.through
    if record.last is not None and is_there(record.last):
        if first > now + DECIDE:
            return Plan(record, [], first - DECIDE)
        if definition.overlap == "follow":
            waiting = record if record.is_waiting else msgspec.structs.replace(record, is_waiting=True)
            return Plan(waiting, [], now + RETRY)
        through = _last(times, through, now + DECIDE)
        changed = msgspec.structs.replace(record, through=through, left_out=record.left_out + 1)
        return Plan(changed, [], _soon(times, through, now, ahead))
    made: list[Milliseconds] = []
    if first <= now:
        last = _last(times, through, now)
        made = [last] if record.is_waiting else missed_of(definition, times, through, now)[-1:]
        through = last
    if not made:
        made = times.between(through, now + ahead, _MOST_AHEAD)[:1]
        through = made[0] if made else through
    changed = _made(record, made, through, now) if made else msgspec.structs.replace(record, through=through)
    return Plan(changed, made, _soon(times, through, now, ahead))


def _last(times: Timetable, through: Milliseconds, until: Milliseconds) -> Milliseconds:
    last = times.latest(through, until)
    return through if last is None else last


def _soon(times: Timetable, through: Milliseconds, now: Milliseconds, ahead: Milliseconds) -> Milliseconds:
    """Return the time at which the next occurrence can be made, or at which the decision about it is due."""
    following = times.next(through)
    if following is None:
        return NEVER
    if following - ahead > now:
        return following - ahead
    return following - DECIDE if following - DECIDE > now else now + RETRY


def _made(record: Record, made: list[Milliseconds], through: Milliseconds, now: Milliseconds) -> Record:
    late = max(0, now - record.definition.due(made[-1])) / SECOND
    return msgspec.structs.replace(record, through=through, last=made[-1], late=late, is_waiting=False)
