"""Computes when a schedule is due, by a cron expression, times of day, or an interval in seconds.

Times are whole milliseconds since 1970. All processes compute the same occurrences. An occurrence depends neither on
the start time of a process nor on its earlier results.

If a clock change leaves out a fixed time, the schedule is due at the end of the gap. If a clock change repeats a fixed
time, the schedule is due only at the first of the two times. In a cron expression a time is fixed if neither its minute
nor its hour begins with ``*``. These are the rules of Debian's cron.
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from multiq.errors import ScheduleInvalid
from multiq.formatting import shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zoneinfo import ZoneInfo

Milliseconds: TypeAlias = int

SECOND: Milliseconds = 1000
_DAY = dt.timedelta(days=1)
_MINUTE = dt.timedelta(minutes=1)
_SECOND = dt.timedelta(seconds=1)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LEAST_EVERY = 1.0  # seconds
_MOST_EVERY = 366 * 86400.0  # seconds; a longer interval is probably not in seconds
TIME_OF_DAY = r"([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?"  # not \d, which matches the digits of all scripts
_OF_ONE_MACHINE = {"localtime", "posixrules"}  # names of zones that differ between machines
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


class Every(Timetable):
    """Due whenever the time since 1970 is a multiple of the interval."""

    def __init__(self, interval: Milliseconds) -> None:
        self._interval = interval

    def next(self, after: Milliseconds) -> Milliseconds:
        return (after // self._interval + 1) * self._interval

    def latest(self, after: Milliseconds, until: Milliseconds) -> Milliseconds | None:
        last = until // self._interval * self._interval
        return last if last > after else None


class DailyTimes(Timetable):
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


def _is_left_out(day: dt.date, zone: ZoneInfo) -> bool:
    """Whether the zone leaves out a whole day. For example, Apia left out 30 December 2011."""
    noon = dt.datetime.combine(day, dt.time(12), tzinfo=zone)
    return noon.astimezone(dt.UTC).astimezone(zone).date() != day


@functools.lru_cache(maxsize=4096)
def timetable(cron: str, every: Milliseconds, at: tuple[str, ...], zone: str) -> Timetable:
    """Return the timetable of checked options.

    Raises ``ScheduleInvalid`` if this machine does not know the zone, or if its cron library refuses the expression.
    """
    if every:
        return Every(every)
    place = find_zone(zone)
    if at:
        return DailyTimes(at, place)
    check_cron(cron)  # a process with another version of the library may have stored the expression
    return Cron(cron, dt.UTC if zone == "UTC" else place)  # dt.UTC is ten times as fast


def find_zone(name: str) -> ZoneInfo:
    """Return the time zone of a name like ``Europe/Berlin``. Raises ``ScheduleInvalid``."""
    from zoneinfo import ZoneInfo

    if isinstance(name, str) and name not in _OF_ONE_MACHINE:
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):  # ZoneInfoNotFoundError is a KeyError; OSError: the name of a folder
            pass
    raise ScheduleInvalid(
        f"zone must be the name of a time zone like Europe/Berlin, got {shown(name)}: see "
        "zoneinfo.available_timezones(); if that is empty, this system has no time zones: pip install tzdata"
    )


# --- checks ----------------------------------------------------------------------------------------------


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


def check_every(every: float | dt.timedelta) -> Milliseconds:
    """Return an interval in milliseconds. Raises ``ScheduleInvalid``."""
    seconds = every.total_seconds() if isinstance(every, dt.timedelta) else every
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _LEAST_EVERY <= seconds <= _MOST_EVERY:
        raise ScheduleInvalid(f"every must be from 1 second to 366 days, in seconds or a timedelta, got {shown(every)}")
    return round(seconds * SECOND)


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


def library_versions() -> str:
    """Return the versions of the cron library and of the time zones, for ``multiq doctor``."""
    from importlib.metadata import version

    return f"cronsim {version('cronsim')}, time zones {zones_version()}"


@functools.cache
def zones_version() -> str:
    """Return the version of this machine's time zones, like ``2026a``. Empty: the version is not known."""
    import zoneinfo
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    for folder in zoneinfo.TZPATH:
        for name in ("tzdata.zi", "+VERSION"):
            try:
                with (Path(folder) / name).open() as file:
                    words = file.readline().split()
            except OSError:
                continue
            if words:
                return words[-1]
        if (Path(folder) / "UTC").exists():
            return "the time zones of the system, of an unknown version"
    try:
        return f"{version('tzdata')} of the package tzdata"
    except PackageNotFoundError:
        return "missing: pip install tzdata"
