"""How long a failed job waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq.backend import DELAY_MAX
from multiq.errors import OptionInvalid
from multiq.retry import DEFAULT, exponential, fixed, steps, to_backoff

seconds = st.floats(min_value=0, max_value=DELAY_MAX)
attempts = st.integers(min_value=1, max_value=10**9)


def test_a_fixed_wait_is_the_same_after_every_attempt() -> None:
    wait = fixed(30)
    assert [wait(attempt) for attempt in (1, 2, 1000)] == [30, 30, 30]


def test_steps_are_taken_one_by_one_and_the_last_holds() -> None:
    wait = steps(1, 5, 30)
    assert [wait(attempt) for attempt in (1, 2, 3, 4, 1000)] == [1, 5, 30, 30, 30]


def test_an_exponential_wait_doubles_up_to_its_cap() -> None:
    wait = exponential(base=2, cap=60, jitter=0)
    assert [wait(attempt) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_base_first_and_cap_are_as_given() -> None:
    wait = exponential(base=3, cap=600, first=10, jitter=0)
    assert [wait(attempt) for attempt in range(1, 6)] == [10, 30, 90, 270, 600]


def test_a_base_of_one_never_grows() -> None:
    assert exponential(base=1, first=7, jitter=0)(10**6) == 7


def test_a_first_wait_of_zero_means_no_wait_ever() -> None:
    wait = exponential(first=0, jitter=0)
    assert (wait(1), wait(10_000)) == (0, 0)


@given(base=st.floats(min_value=1, max_value=1e9), cap=seconds, first=seconds, attempt=attempts)
def test_an_exponential_wait_stays_between_zero_and_its_cap(
    base: float, cap: float, first: float, attempt: int
) -> None:
    assert 0 <= exponential(base, cap, first=first)(attempt) <= cap


@given(jitter=st.floats(min_value=0, max_value=1), attempt=st.integers(min_value=1, max_value=12))
def test_jitter_takes_off_up_to_its_share(jitter: float, attempt: int) -> None:
    whole = min(3600, 2 ** (attempt - 1))
    waited = exponential(jitter=jitter)(attempt)
    assert whole * (1 - jitter) * 0.999999 <= waited <= whole


def test_jitter_keeps_jobs_that_failed_together_apart() -> None:
    assert len({DEFAULT(5) for _ in range(100)}) > 90


def test_numbers_lists_and_functions_are_all_a_backoff() -> None:
    assert to_backoff(30)(7) == 30
    assert to_backoff(1.5)(7) == 1.5
    assert to_backoff([1, 5])(2) == 5
    assert to_backoff((1, 5))(9) == 5
    assert to_backoff(lambda attempt: attempt * 10)(7) == 70


WRONG: list[Any] = [
    -1,
    math.nan,
    math.inf,
    True,
    None,
    "30",
    b"30",
    {},
    {30},
    [],
    [1, -1],
    [1, "2"],
    [[1]],
    [True],
    10**400,
    DELAY_MAX * 2,
]


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_a_value_that_is_not_a_backoff_is_refused(value: Any) -> None:
    with pytest.raises(OptionInvalid, match="backoff"):
        to_backoff(value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"base": 0.5}, "base must be 1 or more, got 0.5"),
        ({"base": -1}, "base must be seconds >= 0, .* got -1"),
        ({"cap": -1}, "cap must be seconds >= 0, .* got -1"),
        ({"first": math.nan}, "first must be seconds >= 0, .* got nan"),
        ({"jitter": 1.1}, "jitter must be a share from 0 to 1, got 1.1"),
        ({"jitter": -0.1}, "jitter must be a share from 0 to 1, got -0.1"),
        ({"jitter": math.nan}, "jitter must be a share from 0 to 1, got nan"),
        ({"jitter": "half"}, "jitter must be a share from 0 to 1, got 'half'"),
    ],
)
def test_an_exponential_backoff_says_which_of_its_numbers_is_wrong(options: Any, complaint: str) -> None:
    with pytest.raises(OptionInvalid, match=complaint):
        exponential(**options)
