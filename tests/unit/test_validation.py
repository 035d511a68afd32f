"""The options that callers may pass with a body, and the errors for wrong values."""

from __future__ import annotations

import datetime as dt
import enum
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.backend import DELAY_MAX, PRIORITY_MAX, check_state, check_states
from multiq.errors import MultiqError, OptionInvalid
from multiq.formatting import shown
from multiq.ids import check_id
from multiq.validation import (
    REASON_MAX,
    check_count,
    check_delay,
    check_priority,
    check_reason,
    check_timeout,
    check_ttr,
)

anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.timedeltas()
    | st.datetimes()
    | st.lists(st.integers(), max_size=3)
    | st.just(10**5000)
)

NEVER_A_NUMBER: list[Any] = [
    None,
    True,
    "5",
    b"5",
    [],
    {},
    Ellipsis,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**5000),
    1j,
]


@pytest.mark.parametrize(("delay", "seconds"), [(0, 0.0), (1, 1.0), (0.25, 0.25), (DELAY_MAX, DELAY_MAX), (None, 0.0)])
def test_a_delay_is_seconds(delay: Any, seconds: float) -> None:
    assert check_delay(delay) == seconds


def test_a_delay_may_be_a_timedelta() -> None:
    assert check_delay(dt.timedelta(minutes=30, microseconds=1)) == 1800.000001


@pytest.mark.parametrize(
    "delay", [-1, -0.001, DELAY_MAX + 1, dt.timedelta(days=-1), dt.timedelta.max, *NEVER_A_NUMBER[1:]], ids=shown
)
def test_an_invalid_delay_is_refused(delay: Any) -> None:
    with pytest.raises(OptionInvalid, match=r"^delay must be"):
        check_delay(delay)


def test_a_point_in_time_is_as_far_away_as_it_is() -> None:
    in_a_minute = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)
    assert 50 < check_delay(None, in_a_minute) <= 60
    assert 50 < check_delay(None, in_a_minute.astimezone(dt.timezone(dt.timedelta(hours=-9, minutes=-30)))) <= 60


def test_a_point_in_the_past_is_now() -> None:
    assert check_delay(None, dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) == 0.0
    assert check_delay(None, dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14)))) == 0.0


@pytest.mark.parametrize(
    ("at", "complaint"),
    [
        (dt.datetime(2035, 1, 1), "at must have a time zone, got .*: use"),  # noqa: DTZ001 - the point of it
        (dt.datetime(2999, 1, 1, tzinfo=dt.UTC), "at must be within a century"),
        (dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-14))), "at must be within a century"),
        (dt.date(2035, 1, 1), "at must be a datetime with a time zone"),
        (1_900_000_000, "at must be a datetime with a time zone"),
        ("2035-01-01T00:00:00Z", "at must be a datetime with a time zone"),
    ],
)
def test_an_invalid_point_in_time_is_refused(at: Any, complaint: str) -> None:
    with pytest.raises(OptionInvalid, match=complaint):
        check_delay(None, at)


def test_delay_and_at_together_are_refused() -> None:
    with pytest.raises(OptionInvalid, match="delay and at must not both be given"):
        check_delay(0, dt.datetime.now(dt.UTC))


class Urgency(enum.IntEnum):
    HIGH = 10


@pytest.mark.parametrize(
    ("priority", "number"), [(0, 0), (1024, 1024), (PRIORITY_MAX, PRIORITY_MAX), (Urgency.HIGH, 10)]
)
def test_a_priority_is_a_whole_number(priority: int, number: int) -> None:
    assert check_priority(priority) == number
    assert type(check_priority(priority)) is int


@pytest.mark.parametrize("priority", [-1, PRIORITY_MAX + 1, 1.0, *NEVER_A_NUMBER], ids=shown)
def test_a_priority_out_of_range_is_refused(priority: Any) -> None:
    with pytest.raises(OptionInvalid, match=r"^priority must be .* from 0 \(first\) to 4294967295 \(last\), got "):
        check_priority(priority)


def test_a_ttr_is_a_second_or_more() -> None:
    assert check_ttr(1) == 1.0
    assert check_ttr(86400) == 86400.0


@pytest.mark.parametrize("ttr", [0, 0.999, -1, DELAY_MAX * 2, *NEVER_A_NUMBER], ids=shown)
def test_a_ttr_below_a_second_is_refused(ttr: Any) -> None:
    with pytest.raises(OptionInvalid, match=r"^ttr must be"):
        check_ttr(ttr)


@pytest.mark.parametrize("timeout", [-1, DELAY_MAX * 2, *NEVER_A_NUMBER], ids=shown)
def test_a_timeout_below_zero_is_refused_under_its_own_name(timeout: Any) -> None:
    assert check_timeout(0) == 0.0
    with pytest.raises(OptionInvalid, match=r"^retry_for must be"):
        check_timeout(timeout, "retry_for")


@pytest.mark.parametrize("count", [0, -1, 1.0, 2**31, *NEVER_A_NUMBER], ids=shown)
def test_a_count_below_one_is_refused(count: Any) -> None:
    assert check_count(1, "limit") == 1
    assert check_count(0, "limit", least=0) == 0
    with pytest.raises(OptionInvalid, match=r"^limit must be a whole number from 1 to 2147483647, got "):
        check_count(count, "limit")


@pytest.mark.parametrize("job_id", ["0190f3b4-0000-7000-8000-000000000001", "17", "a b", "ä"])
def test_an_id_is_opaque_text(job_id: str) -> None:
    assert check_id(job_id) is job_id


@pytest.mark.parametrize(
    "job_id", ["", "a\nb", "\x00", "\ud800", "x" * 201, None, True, 17, b"17", 10**5000], ids=shown
)
def test_an_invalid_id_is_refused(job_id: Any) -> None:
    with pytest.raises(OptionInvalid, match=r"a job's id must be .*handle\.id"):
        check_id(job_id)


def test_states_are_named_one_or_many() -> None:
    assert check_state("buried") == "buried"
    assert check_states("ready") == ["ready"]
    assert check_states(("ready", "delayed")) == ["ready", "delayed"]


@pytest.mark.parametrize("state", ["gone", "READY", "", None, 3, ["ready"]])
def test_a_state_in_which_no_job_is_kept_is_refused(state: Any) -> None:
    with pytest.raises(OptionInvalid, match="a job's state must be one of ready, delayed, reserved, buried"):
        check_state(state)


def test_a_reason_is_kept_cut_and_made_printable() -> None:
    assert check_reason(None) is None
    assert check_reason("why") == "why"
    assert check_reason("x" * REASON_MAX) == "x" * REASON_MAX
    assert check_reason("x" * (REASON_MAX + 1)) == "x" * (REASON_MAX - 3) + "..."
    assert check_reason("broken \ud800") == "broken ?"


@given(anything, st.sampled_from([check_delay, check_priority, check_ttr, check_timeout, check_id, check_state]))
def test_whatever_is_passed_is_taken_or_refused_in_one_short_line(value: Any, check: Any) -> None:
    try:
        check(value)
    except MultiqError as refused:
        message = str(refused)
        assert "\n" not in message
        assert len(message.encode("utf-8")) < 400


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_without_a_repr_is_shown_by_its_type() -> None:
    assert shown(Broken()) == "a Broken"
    assert shown(10**5000) == "a int"
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
