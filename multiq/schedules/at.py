"""Schedules that are due at times of day: the option ``at``.

If a clock change leaves out a time, the schedule is due at the end of the gap. If a clock change repeats a time, the
schedule is due only at the first of the two times. These are the rules of Debian's cron.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown

from .timetable import Milliseconds, Timetable, milliseconds, moment

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_DAY = dt.timedelta(days=1)
_MINUTE = dt.timedelta(minutes=1)
TIME_OF_DAY = r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?"  # not \d, which matches the digits of all scripts


class TimesOfDay(Timetable):
    """Due at times of day."""

    def __init__(self, times: Iterable[str], zone: ZoneInfo) -> None:
        self._times = [dt.time.fromisoformat(time) for time in times]
        self._zone = zone

    def next(self, after: Milliseconds) -> Milliseconds | None:
        # Computed from the day before, because a gap can move the last time of a day into the next day.
        day = moment(after).astimezone(self._zone).date() - _DAY
        for _ in range(5):
            found = [time for time in map(functools.partial(self._on, day), self._times) if time and time > after]
            following = [time for time in map(functools.partial(self._on, day + _DAY), self._times) if time]
            if found:
                return min(found + [time for time in following if time > after])
            day += _DAY
        return None

    def _on(self, day: dt.date, time: dt.time) -> Milliseconds | None:
        """Return the time on a day. None: the zone leaves out the whole day."""
        local = dt.datetime.combine(day, time, tzinfo=self._zone)
        for _ in range(24 * 60):
            there = local.astimezone(dt.UTC)
            if there.astimezone(self._zone).replace(tzinfo=None) == local.replace(tzinfo=None):
                return milliseconds(there)
            local = local.replace(second=0) + _MINUTE  # to the end of the gap
            if local.date() != day and _is_left_out(day, self._zone):
                break
        return None


def check_times(at: str | dt.time | Iterable[str | dt.time]) -> tuple[str, ...]:
    """Return times of day as text, in ascending order. Raises ``ScheduleInvalid``."""
    times = [at] if isinstance(at, str | dt.time) or not isinstance(at, Iterable) else list(at)
    checked = set()
    for time in times:
        text = time.isoformat() if isinstance(time, dt.time) else time
        if not isinstance(text, str) or not re.fullmatch(TIME_OF_DAY, text):
            raise ScheduleInvalid(
                f"at must be a time of day like '07:30' or '23:59:30', or a list of them, got {shown(time)}: the time "
                "zone is zone="
            )
        checked.add(text if len(text) > 5 and not text.endswith(":00") else text[:5])
    if not checked:
        raise ScheduleInvalid("at must have a time of day, got none")
    return tuple(sorted(checked))


def _is_left_out(day: dt.date, zone: ZoneInfo) -> bool:
    """Whether the zone leaves out a whole day. For example, Apia left out 30 December 2011."""
    noon = dt.datetime.combine(day, dt.time(12), tzinfo=zone)
    return noon.astimezone(dt.UTC).astimezone(zone).date() != day
