"""Decides which missed occurrences of a schedule are still made: the policy ``misfire`` and the ``grace``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .timetable import SECOND

if TYPE_CHECKING:
    from .record import Definition
    from .timetable import Milliseconds, Timetable

# seconds between two searches for due occurrences; so an occurrence that is late by less than this was not missed
SKIP_GRACE = 20.0


def missed_of(definition: Definition, times: Timetable, through: Milliseconds, now: Milliseconds) -> list[Milliseconds]:
    """Return those missed occurrences that are still made."""
    grace = definition.grace
    if grace is None and definition.misfire == "skip":
        grace = SKIP_GRACE
    if grace is not None:
        through = max(through, now - int(grace * SECOND) - 1)
    if definition.misfire == "once":
        last = times.latest(through, now)
        return [] if last is None else [last]
    return times.between(through, now, definition.most)
