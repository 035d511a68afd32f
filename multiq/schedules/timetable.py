"""The occurrences of a schedule: the base class, and times as whole milliseconds since 1970.

All processes compute the same occurrences. An occurrence depends neither on the start time of a process nor on its
earlier results.
"""

from __future__ import annotations

import datetime as dt
import itertools
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Milliseconds: TypeAlias = int

SECOND: Milliseconds = 1000
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_WALKED = 2000  # occurrences that are computed one by one before the search goes backwards


def moment(time: Milliseconds) -> dt.datetime:
    """Return the time as a datetime in UTC."""
    return _EPOCH + dt.timedelta(milliseconds=time)


def milliseconds(moment: dt.datetime) -> Milliseconds:
    """Return a datetime with a time zone as milliseconds, rounded down."""
    return (moment - _EPOCH) // dt.timedelta(milliseconds=1)


class Timetable:
    """The occurrences of one schedule."""

    def next(self, after: Milliseconds) -> Milliseconds | None:
        """Return the first occurrence later than *after*. None: there is no occurrence within 50 years."""
        raise NotImplementedError

    def following(self, after: Milliseconds) -> Iterator[Milliseconds]:
        """Yield the occurrences later than *after*."""
        at = self.next(after)
        while at is not None:
            yield at
            at = self.next(at)

    def latest(self, after: Milliseconds, until: Milliseconds) -> Milliseconds | None:
        """Return the last occurrence that is later than *after* and not later than *until*."""
        span = SECOND
        while True:
            start = max(after, until - span)
            found = self.next(start)
            if found is not None and found <= until:
                break
            if start == after:
                return None
            span *= 4
        low, high = found, until  # an occurrence, and a time after which the next occurrence is too late
        while high - low > 1:
            middle = (low + high) // 2
            found = self.next(middle)
            if found is not None and found <= until:
                low = found
            else:
                high = middle
        return low

    def between(self, after: Milliseconds, until: Milliseconds, most: int) -> list[Milliseconds]:
        """Of the occurrences that are later than *after* and not later than *until*, return the last *most*.

        The occurrences ascend.
        """
        found: list[Milliseconds] = []
        for at in itertools.islice(self.following(after), _WALKED):
            if at > until:
                return found[-most:]
            found.append(at)
        if len(found) < _WALKED:
            return found[-most:]
        found.clear()
        while len(found) < most and (last := self.latest(after, until)) is not None:
            found.append(last)
            until = last - 1
        return found[::-1]
