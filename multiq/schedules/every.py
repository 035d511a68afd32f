"""Schedules that are due at an interval: the option ``every``."""

from __future__ import annotations

import datetime as dt

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown

from .timetable import SECOND, Milliseconds, Timetable

_LEAST = 1.0  # seconds
_MOST = 366 * 86400.0  # seconds; a longer interval is probably not in seconds


class Every(Timetable):
    """Due whenever the time since 1970 is a multiple of the interval."""

    def __init__(self, interval: Milliseconds) -> None:
        self._interval = interval

    def next(self, after: Milliseconds) -> Milliseconds:
        return (after // self._interval + 1) * self._interval

    def latest(self, after: Milliseconds, until: Milliseconds) -> Milliseconds | None:
        last = until // self._interval * self._interval
        return last if last > after else None


def check_every(every: float | dt.timedelta) -> Milliseconds:
    """Return an interval in milliseconds. Raises ``ScheduleInvalid``."""
    seconds = every.total_seconds() if isinstance(every, dt.timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _LEAST <= seconds <= _MOST:
        raise ScheduleInvalid(f"every must be from 1 second to 366 days, in seconds or a timedelta, got {shown(every)}")
    return round(seconds * SECOND)
