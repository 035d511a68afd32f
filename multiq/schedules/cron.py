"""Schedules that are due by a cron expression. The library ``cronsim`` evaluates the expression.

In a cron expression a time is fixed if neither its minute nor its hour begins with ``*``. If a clock change leaves out
a fixed time, the schedule is due at the end of the gap. If a clock change repeats a fixed time, the schedule is due
only at the first of the two times. These are the rules of Debian's cron.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown

from .timetable import Milliseconds, Timetable, milliseconds, moment

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_DAY = dt.timedelta(days=1)
_SECOND = dt.timedelta(seconds=1)


class Cron(Timetable):
    """Due by a cron expression of five fields, or of six with seconds in front."""

    def __init__(self, expression: str, zone: ZoneInfo | dt.timezone) -> None:
        self._expression = expression
        self._zone = zone
        fields = expression.split()
        self._is_fixed = len(fields) == 5 and not any(field.startswith("*") for field in fields[:2])

    def next(self, after: Milliseconds) -> Milliseconds | None:
        if not self._is_fixed and self._zone is not dt.UTC:
            return self._next_in_real_time(after)
        from cronsim import CronSim

        for found in CronSim(self._expression, moment(after).astimezone(self._zone)):
            time = milliseconds(found.astimezone(dt.UTC))
            # a fixed time in the hour that a clock change repeats may be found again
            if time > after and not self._is_of_day_left_out(found):
                return time
        return None

    def _next_in_real_time(self, after: Milliseconds) -> Milliseconds | None:
        """Like ``next``, for an expression that follows real time.

        cronsim gets local times without a zone, one clock change after the other. With a zone, it misses occurrences
        after a clock change that is not at a full hour or not of a full hour (Lord Howe, Chatham), and may not end.
        """
        at = moment(after)
        local = at.astimezone(self._zone).replace(tzinfo=None)
        found = self._next_local(local)
        while found is not None:
            due = found.replace(tzinfo=dt.UTC) - self._offset(at)
            change = self._first_change(at, due)
            if change is None:
                return milliseconds(due)
            at, before = change, local
            local = at.astimezone(self._zone).replace(tzinfo=None) - _SECOND
            if not before <= local < found:  # otherwise there is nothing between the two local times
                found = self._next_local(local)
        return None

    def _next_local(self, local: dt.datetime) -> dt.datetime | None:
        from cronsim import CronSim

        return next(CronSim(self._expression, local), None)

    def _first_change(self, after: dt.datetime, until: dt.datetime) -> dt.datetime | None:
        """Return the first clock change that is later than *after* and not later than *until*."""
        offset = self._offset(after)
        while after < until:
            low, high = after, min(after + _DAY, until)
            if self._offset(high) == offset:
                after = high
                continue
            low = low.replace(microsecond=0)
            while high - low > _SECOND:
                middle = low + (high - low) // 2
                middle = middle.replace(microsecond=0)
                low, high = (middle, high) if self._offset(middle) == offset else (low, middle)
            return high
        return None

    def _offset(self, moment: dt.datetime) -> dt.timedelta:
        return moment.astimezone(self._zone).utcoffset() or dt.timedelta()

    def _is_of_day_left_out(self, found: dt.datetime) -> bool:
        """Whether the time is the end of a gap of a whole day, although the expression means a time in the gap."""
        before = (found.astimezone(dt.UTC) - dt.timedelta(seconds=1)).astimezone(self._zone)
        if found.date() - before.date() <= _DAY:
            return False
        from cronsim import CronSim

        local = found.replace(tzinfo=None)
        return next(CronSim(self._expression, local - dt.timedelta(seconds=1))) != local


def check_cron(expression: str) -> str:
    """Return a cron expression with single spaces. Raises ``ScheduleInvalid``."""
    from cronsim import CronSim, CronSimError

    if not isinstance(expression, str):
        raise ScheduleInvalid(f"a cron expression must be text like '*/5 * * * *', got {shown(expression)}")
    try:
        is_ever = next(CronSim(expression, dt.datetime(2024, 1, 1, tzinfo=dt.UTC)), None)
    except (CronSimError, ValueError) as exc:  # ValueError: a number of more than 4300 digits
        raise ScheduleInvalid(
            "a cron expression must have 5 fields (minute, hour, day of the month, month, day of the week), or 6 with "
            f"the seconds in front, got {shown(expression)}: {str(exc)[:1].lower()}{str(exc)[1:]}"
        ) from exc
    if is_ever is None:
        raise ScheduleInvalid(f"a cron expression must be due at some time within 50 years, got {shown(expression)}")
    return " ".join(expression.split())
