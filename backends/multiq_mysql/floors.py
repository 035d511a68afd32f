"""Floors: from where on the index is worth reading.

A job that leaves its place leaves an entry behind, until InnoDB purges it, and purges nothing that the oldest open
snapshot on the server might read. Behind somebody's long report every job of the last hour is still there for a scan to
step over. So each process remembers how far it has seen that only such entries are left, and begins there.

What is below a floor and alive is found all the same, a little later, because every now and then a look begins at the
bottom, the more seldom the longer it takes: a batch that was given its numbers first and was committed last, or jobs
whose claim was rolled back. Jobs that were released, kicked or became due never are below a floor: they are ready in
another part of the index (state 4), which has none.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .jobs import SECOND
from .statements import Sql

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORTEST = 0.05  # seconds between two looks from the bottom
_SHARE = 100  # such a look takes at most this part of the time
_LONGEST = 10.0
_CHEAP = 0.005  # seconds; a look from the bottom that takes no longer may be taken at any time
_PRIORITIES = 16  # that one queue has floors for
_MARGIN = 1 * SECOND  # microseconds, in which a transaction that was given a time is committed

BOTTOM = Sql("TRUE")
"""The condition of a scan of ready jobs that begins at the bottom."""


class _Bottom:
    """When to begin at the bottom again."""

    def __init__(self) -> None:
        self._due_at = 0.0
        self._took = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    @property
    def is_cheap(self) -> bool:
        """Whether nothing speaks against beginning at the bottom right now."""
        return self._took <= _CHEAP

    def hurry(self) -> None:
        """Begin at the bottom next time, if that is cheap."""
        if self.is_cheap:
            self._due_at = 0.0

    def looked(self, took: float) -> None:
        self._took = took
        self._due_at = time.monotonic() + min(max(_SHORTEST, _SHARE * took), _LONGEST)


class ReadyFloor:
    """One queue's ready jobs: below which age a priority has none."""

    def __init__(self) -> None:
        self.bottom = _Bottom()
        self._ages: dict[int, int] = {}

    @property
    def sql(self) -> Sql:
        """The condition: disjoint ranges of the index, in its order."""
        if not self._ages:
            return BOTTOM
        ranges = []
        above = -1
        for priority, seq in sorted(self._ages.items()):
            if priority > above + 1:
                ranges.append(f"(place > {above} AND place < {priority})")
            ranges.append(f"(place = {priority} AND seq >= {seq})")
            above = priority
        ranges.append(f"place > {above}")
        return Sql(f"({' OR '.join(ranges)})")

    def found(self, places: Sequence[tuple[int, int]]) -> None:
        """These are the first ones, as (priority, seq): what is before the last of a priority is taken, too."""
        for priority, seq in places:
            if priority in self._ages or len(self._ages) < _PRIORITIES:
                self._ages[priority] = max(seq, self._ages.get(priority, 0))


class TimeFloor:
    """One queue's delayed or reserved jobs: before which time there are none."""

    def __init__(self) -> None:
        self.bottom = _Bottom()
        self._time = 0

    @property
    def sql(self) -> Sql:
        """The smallest place that is worth reading."""
        return Sql(self._time)

    def found(self, now: int, left: int | None) -> None:
        """The first one's time is *left* microseconds from *now*; None: there is none."""
        latest = now - _MARGIN  # whatever is added from now on is later than now
        self._time = latest if left is None else min(latest, now + left)


class Floors:
    """One queue's floors."""

    def __init__(self) -> None:
        self.ready = ReadyFloor()
        self.delayed = TimeFloor()
        self.reserved = TimeFloor()
