"""When schedules are due: cron expressions, times of day and intervals, also around clock changes."""

from __future__ import annotations

import datetime as dt
import itertools
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiq.errors import ScheduleInvalid
from multiq.schedules.at import check_times
from multiq.schedules.cron import check_cron
from multiq.schedules.every import check_every
from multiq.schedules.record import timetable
from multiq.schedules.timetable import Timetable, milliseconds, moment
from multiq.schedules.zone_database import find_zone, library_versions

#: Zones with gaps and repetitions of an hour, of half an hour and of two hours, at night and at midnight, and with
#: other rules than summer and winter.
ZONES = [
    "Europe/Berlin", "Europe/London", "Europe/Dublin", "America/New_York", "America/St_Johns", "America/Havana",
    "America/Santiago", "America/Asuncion", "America/Nuuk", "America/Sao_Paulo", "Australia/Lord_Howe",
    "Australia/Adelaide", "Pacific/Chatham", "Pacific/Auckland", "Pacific/Apia", "Antarctica/Troll",
    "Africa/Casablanca", "Africa/Cairo", "Asia/Gaza", "Asia/Beirut", "Asia/Kathmandu", "UTC",
]  # fmt: skip
DAILY = ["00:00", "00:30", "01:30", "02:00", "02:30", "03:00", "12:00", "23:30"]
YEARS = dt.date(2025, 1, 1), dt.date(2027, 1, 1)


def at(text: str) -> int:
    return milliseconds(dt.datetime.fromisoformat(text))


def cron_of(time: str) -> str:
    hour, minute = time.split(":")
    return f"{int(minute)} {int(hour)} * * *"


def cron(expression: str, zone: str = "UTC") -> Timetable:
    return timetable(check_cron(expression), 0, (), zone)


def daily(time: str, zone: str) -> Timetable:
    return timetable("", 0, check_times(time), zone)


def days_of(times: Timetable, zone: str, time: str) -> list[dt.date]:
    """The local days of all occurrences in the two years.

    Nuuk leaves out the last hour of a day. The end of this gap is midnight, which ends the same day.
    """
    place = ZoneInfo(zone)
    first, last = (milliseconds(dt.datetime.combine(day, dt.time(), tzinfo=place)) for day in YEARS)
    found: list[dt.date] = []
    now = first - 1
    while True:
        following = times.next(now)
        assert following is not None
        assert following > now
        if following >= last:
            return found
        there = moment(following).astimezone(place)
        is_end_of_day = there.time() == dt.time() and time != "00:00"
        found.append(there.date() - dt.timedelta(days=is_end_of_day and time == "23:30"))
        now = following


def all_days() -> list[dt.date]:
    return [YEARS[0] + dt.timedelta(days=day) for day in range((YEARS[1] - YEARS[0]).days)]


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("zone", "time"),
    [
        pytest.param(zone, time, marks=[] if (row + column) % 11 == 0 else pytest.mark.long)
        for row, zone in enumerate(ZONES)
        for column, time in enumerate(DAILY)
    ],
)
def test_a_daily_time_is_due_once_on_each_local_day_of_two_years(zone: str, time: str) -> None:
    assert days_of(cron(cron_of(time), zone), zone, time) == all_days()
    assert days_of(daily(time, zone), zone, time) == all_days()


@pytest.mark.parametrize(
    ("zone", "time", "day", "due"),
    [
        ("Europe/Berlin", "02:30", "2025-03-30", "2025-03-30T03:00+02:00"),
        ("Europe/Berlin", "02:30", "2025-10-26", "2025-10-26T02:30+02:00"),
        ("America/New_York", "02:30", "2025-03-09", "2025-03-09T03:00-04:00"),
        ("America/New_York", "01:30", "2025-11-02", "2025-11-02T01:30-04:00"),
        ("Australia/Lord_Howe", "02:15", "2025-10-05", "2025-10-05T02:30+11:00"),
        ("America/Santiago", "00:30", "2025-09-07", "2025-09-07T01:00-03:00"),
        ("Pacific/Chatham", "03:00", "2025-09-28", "2025-09-28T03:45+13:45"),
        ("Antarctica/Troll", "01:30", "2025-03-30", "2025-03-30T03:00+02:00"),
        ("America/Havana", "00:30", "2025-03-09", "2025-03-09T01:00-04:00"),
    ],
)
def test_a_fixed_time_in_a_gap_is_due_at_its_end_and_a_repeated_one_the_first_time(
    zone: str, time: str, day: str, due: str
) -> None:
    # Given the end of the day before
    before = dt.datetime.combine(dt.date.fromisoformat(day), dt.time(), tzinfo=ZoneInfo(zone)) - dt.timedelta(seconds=1)
    # Then the expression and the time of day are due at the same time
    for times in cron(cron_of(time), zone), daily(time, zone):
        found = times.next(milliseconds(before))
        assert found == at(due)


@pytest.mark.parametrize("time", ["00:00", "07:00", "23:30"])
def test_a_day_that_a_zone_leaves_out_has_no_occurrence(time: str) -> None:
    # Apia went from 29 to 31 December 2011
    for times in cron(cron_of(time), "Pacific/Apia"), daily(time, "Pacific/Apia"):
        days, now = [], at("2011-12-28T00:00-10:00") - 1
        for _ in range(4):
            following = times.next(now)
            assert following is not None
            now = following
            days.append(moment(now).astimezone(ZoneInfo("Pacific/Apia")).day)
        assert days == [28, 29, 31, 1]


@pytest.mark.parametrize("expression", ["*/10 * * * *", "15 * * * *", "0 */2 * * *"])
def test_an_expression_with_a_star_follows_real_time_through_a_repeated_hour(expression: str) -> None:
    # Given the night on which Berlin repeats an hour
    times = cron(expression, "Europe/Berlin")
    found = times.between(at("2025-10-26T00:00+02:00"), at("2025-10-26T06:00+01:00"), 100)
    # Then no two occurrences are further apart, in real time, than on other days
    apart = {later - earlier for earlier, later in itertools.pairwise(found)}
    assert max(apart) <= {"*/10": 600, "15": 3600, "0": 3 * 3600}[expression.split(maxsplit=1)[0]] * 1000


@pytest.mark.parametrize(
    ("zone", "day"),
    [
        ("Australia/Lord_Howe", "2026-04-05"), ("Australia/Lord_Howe", "2026-10-04"), ("Pacific/Chatham", "2026-04-05"),
        ("Pacific/Chatham", "2026-09-27"), ("Antarctica/Troll", "2026-03-29"), ("Europe/Berlin", "2026-10-25"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("expression", "hours", "minutes"),
    [
        ("* 3 * * *", {3}, set(range(60))),
        ("*/10 2 * * *", {2}, {0, 10, 20, 30, 40, 50}),
        ("45 * * * *", set(range(24)), {45}),
        ("0 */3 * * *", set(range(0, 24, 3)), {0}),
        ("0 0 0 * * *", {0}, {0}),
        ("0 15 1-3 * * *", {1, 2, 3}, {15}),
    ],
)
def test_an_expression_in_real_time_is_due_whenever_a_clock_in_the_zone_shows_it(
    zone: str, day: str, expression: str, hours: set[int], minutes: set[int]
) -> None:
    # Given each minute of two days, by a clock in the zone
    place = ZoneInfo(zone)
    first = milliseconds(dt.datetime.combine(dt.date.fromisoformat(day), dt.time(), tzinfo=place))
    shown = {minute: moment(minute).astimezone(place) for minute in range(first, first + 48 * 3_600_000, 60_000)}
    # Then the expression is due in those minutes, also before the end of an hour that a clock change repeats
    due = [minute for minute, clock in shown.items() if clock.hour in hours and clock.minute in minutes]
    assert list(itertools.takewhile(lambda at: at <= max(shown), cron(expression, zone).following(first - 1))) == due


_EXPRESSIONS = st.sampled_from(
    [
        "* * * * *", "*/7 * * * *", "30 2 * * *", "15,45 0-3 * * *", "0 0 1 * *", "59 23 L * *", "0 3 29 2 *",
        "0 9 * * mon-fri", "0 12 13 * 5", "* * * * * *", "*/30 * 1-3 * * *", "10 30 2 * * *", "0 0 * * 1#2",
    ]
)  # fmt: skip
_MOMENTS = st.integers(at("2024-06-01T00:00Z"), at("2027-06-01T00:00Z"))


@settings(max_examples=150, deadline=None)
@given(expression=_EXPRESSIONS, zone=st.sampled_from(ZONES), start=_MOMENTS, share=st.floats(0, 1, exclude_max=True))
def test_the_next_occurrence_is_later_and_the_same_from_any_time_before_it(
    expression: str, zone: str, start: int, share: float
) -> None:
    times = cron(expression, zone)
    first = times.next(start)
    assert first is not None
    assert first > start
    assert times.next(start + int((first - start) * share)) == first
    following = times.next(first)
    assert following is not None
    assert following > first


@settings(max_examples=60, deadline=None)
@given(
    expression=st.sampled_from(["*/7 * * * *", "30 2 * * *", "15,45 0-3 * * *", "0 9 * * mon-fri"]),
    zone=st.sampled_from(ZONES),
    start=_MOMENTS,
    hours=st.integers(1, 60),
    most=st.integers(1, 9),
)
def test_the_latest_occurrences_are_the_last_ones_of_all(
    expression: str, zone: str, start: int, hours: int, most: int
) -> None:
    # Given all occurrences of some hours, one by one
    times, end, walked = cron(expression, zone), start + hours * 3_600_000, []
    for found in times.following(start):
        if found > end:
            break
        walked.append(found)
    # Then a search from the end finds the last of these occurrences
    assert times.latest(start, end) == (walked[-1] if walked else None)
    assert times.between(start, end, most) == walked[-most:]


def test_the_last_of_a_million_missed_seconds_are_found_without_walking_through_all() -> None:
    times = cron("* * * * * *")
    end = at("2026-01-31T00:00Z")
    assert times.between(at("2026-01-01T00:00Z"), end, 3) == [end - 2000, end - 1000, end]


@given(every=st.floats(1, 100_000), start=_MOMENTS)
def test_an_interval_is_due_at_its_multiples_since_1970(every: float, start: int) -> None:
    interval = check_every(every)
    times = timetable("", interval, (), "UTC")
    found = times.next(start)
    assert found is not None
    assert found % interval == 0
    assert start < found <= start + interval
    assert times.latest(start, found) == found


def test_several_times_of_a_day_are_due_in_their_order() -> None:
    times = timetable("", 0, check_times(["19:30", dt.time(7), "07:00:15"]), "Europe/Berlin")
    found = times.between(at("2026-07-01T00:00+02:00"), at("2026-07-01T23:00+02:00"), 9)
    assert found == [at(f"2026-07-01T{time}+02:00") for time in ("07:00", "07:00:15", "19:30")]


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * * *",
        "61 * * * *",
        "0 0 30 2 *",
        "@daily",
        "every day",
        "0 0 * * * * *",
        5,
        None,
        "1" * 5000 + " * * * *",
    ],
)
def test_a_wrong_expression_is_refused(expression: str) -> None:
    with pytest.raises(ScheduleInvalid, match="a cron expression must"):
        check_cron(expression)


@pytest.mark.parametrize("zone", ["", "Mars", "Europe", "../etc/passwd", "CET+", 1])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(ScheduleInvalid, match="zone must be the name of a time zone like Europe/Berlin"):
        find_zone(zone)


@pytest.mark.parametrize("every", [0, 0.5, -1, True, "5", float("nan"), float("inf"), dt.timedelta(days=400)])
def test_a_wrong_interval_is_refused(every: float) -> None:
    with pytest.raises(ScheduleInvalid, match="every must be from 1 second to 366 days"):
        check_every(every)


@pytest.mark.parametrize("times", ["7:00", "24:00", "07:00 ", [], ["07:00", "noon"], [7], "0\u0667:00"])
def test_a_wrong_time_of_day_is_refused(times: str) -> None:
    with pytest.raises(ScheduleInvalid, match="at must"):
        check_times(times)


def test_the_versions_of_the_libraries_are_told() -> None:
    assert library_versions().startswith("cronsim ")
