"""The retry policy: whether a job is started, and what follows a failure."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiq import BuryJob, OptionInvalid, ReleaseJob
from multiq.backend import DELAY_MAX, Bury, Lease, Release
from multiq.retry import MAX_ATTEMPTS_DEFAULT, RetryPolicy, fixed
from multiq.validation import REASON_MAX


def lease(*, attempt: int = 1, crashes: int = 0, kicks: int = 0, age: float = 0.0) -> Lease:
    return Lease("q", "1", "token", b"", 1024, 60.0, attempt, crashes, kicks, age)


def is_released(verdict: Release | Bury) -> bool:
    return isinstance(verdict, Release)


# --- after a failure ---


def test_a_failed_job_is_released_after_its_backoff() -> None:
    verdict = RetryPolicy(backoff=lambda attempt: attempt * 10).after_failure(lease(attempt=3), "no luck")
    assert verdict == Release(lease(attempt=3), 30.0, reason="no luck")


def test_the_last_attempt_buries() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert [is_released(policy.after_failure(lease(attempt=n), "")) for n in (1, 2, 3)] == [True, True, False]
    assert policy.after_failure(lease(attempt=3), "why") == Bury(lease(attempt=3), "why")


def test_five_attempts_are_made_unless_said_otherwise() -> None:
    verdicts = [is_released(RetryPolicy().after_failure(lease(attempt=n), "")) for n in range(1, 7)]
    assert verdicts == [True] * (MAX_ATTEMPTS_DEFAULT - 1) + [False, False]


def test_zero_attempts_means_no_limit() -> None:
    assert is_released(RetryPolicy(max_attempts=0, backoff=fixed(1)).after_failure(lease(attempt=10**9), ""))


def test_a_kicked_job_gets_one_more_attempt_for_each_kick() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert not is_released(policy.after_failure(lease(attempt=4, kicks=1), ""))
    assert is_released(policy.after_failure(lease(attempt=4, kicks=2), ""))
    assert policy.refuse(lease(attempt=4, kicks=1)) is None
    assert policy.refuse(lease(attempt=5, kicks=1)) is not None


def test_retry_for_bounds_the_time_and_lifts_the_default_count() -> None:
    policy = RetryPolicy(retry_for=60, backoff=fixed(10))
    assert is_released(policy.after_failure(lease(attempt=1000, age=49), ""))
    assert not is_released(policy.after_failure(lease(attempt=1, age=51), ""))


def test_retry_for_and_max_attempts_hold_both() -> None:
    policy = RetryPolicy(max_attempts=2, retry_for=60, backoff=fixed(10))
    assert not is_released(policy.after_failure(lease(attempt=2, age=1), ""))
    assert not is_released(policy.after_failure(lease(attempt=1, age=55), ""))


def test_a_delay_that_the_task_asked_for_overrides_the_backoff() -> None:
    verdict = RetryPolicy(backoff=fixed(99)).after_failure(lease(), "", delay=0)
    assert verdict == Release(lease(), 0.0, reason="")


@pytest.mark.parametrize(
    ("returned", "waited"), [(math.inf, DELAY_MAX), (-5, 0.0), (math.nan, 0.0), (10**9, 10.0**9), (10**300, DELAY_MAX)]
)
def test_any_number_that_a_backoff_function_returns_becomes_a_delay(returned: float, waited: float) -> None:
    verdict = RetryPolicy(backoff=lambda _attempt: returned).after_failure(lease(), "")
    assert isinstance(verdict, Release)
    assert verdict.delay == waited


def test_a_long_reason_is_cut() -> None:
    for attempt in (1, 5):
        verdict = RetryPolicy().after_failure(lease(attempt=attempt), "x" * 10_000)
        assert verdict.reason is not None
        assert len(verdict.reason) == REASON_MAX


# --- before a run ---


def test_a_job_that_took_down_its_workers_too_often_is_not_started() -> None:
    policy = RetryPolicy(max_crashes=3)
    assert policy.refuse(lease(attempt=3, crashes=2)) is None
    refusal = policy.refuse(lease(attempt=4, crashes=3))
    assert refusal == (
        "poison: attempt 4 did not begin, as 3 before it ended without a verdict (crash, kill, or lease too short)"
    )


def test_a_kicked_poison_job_is_started_once_more() -> None:
    policy = RetryPolicy(max_crashes=3)
    assert policy.refuse(lease(attempt=4, crashes=3, kicks=1)) is None
    assert policy.refuse(lease(attempt=5, crashes=4, kicks=1)) is not None


def test_zero_crashes_means_no_limit() -> None:
    assert RetryPolicy(max_attempts=0, max_crashes=0).refuse(lease(attempt=100, crashes=99)) is None


def test_a_job_whose_attempts_were_used_up_by_crashes_is_not_started() -> None:
    refusal = RetryPolicy(max_attempts=2, max_crashes=0).refuse(lease(attempt=3, crashes=2))
    assert refusal == "attempts exhausted: attempt 3 did not begin, as 2 are allowed"


def test_no_retry_is_started_after_its_time_but_a_first_attempt_is() -> None:
    policy = RetryPolicy(retry_for=60)
    assert policy.refuse(lease(attempt=1, age=1000)) is None  # only the wait for a worker was long
    assert policy.refuse(lease(attempt=2, age=59)) is None
    assert policy.refuse(lease(attempt=2, age=61)) == "too late: enqueued 61 s ago, retried for 60 s"
    assert policy.refuse(lease(attempt=2, age=61, kicks=1)) is None


def test_a_job_that_was_only_given_back_is_started_where_the_store_counts_that() -> None:
    policy = RetryPolicy(max_attempts=3, retry_for=60)
    assert policy.refuse(lease(attempt=9, age=100), counts_given_back=True) is None
    # And on a store that counts every reservation, crashes count as attempts
    assert policy.refuse(lease(attempt=9, crashes=2), counts_given_back=True) is None
    assert RetryPolicy(max_attempts=3, max_crashes=0).refuse(lease(attempt=9, crashes=3), counts_given_back=True) == (
        "attempts exhausted: attempt 9 did not begin, as 3 are allowed"
    )


@given(
    limit=st.integers(1, 20),
    outcomes=st.lists(st.sampled_from(["fails", "crashes", "is kicked"]), max_size=60),
)
def test_no_job_is_started_more_often_than_allowed_and_once_per_kick(limit: int, outcomes: list[str]) -> None:
    # Given a job that never succeeds, simulated by the rules of the contract
    policy = RetryPolicy(max_attempts=limit, max_crashes=0, backoff=fixed(0))
    attempt = starts = kicks = 0
    buried = False
    for outcome in outcomes:
        if outcome == "is kicked":
            kicks += buried
            buried = False
            continue
        if buried:
            continue
        attempt += 1
        held = lease(attempt=attempt, kicks=kicks)
        if policy.refuse(held) is not None:
            buried = True
            continue
        starts += 1
        buried = outcome == "fails" and not is_released(policy.after_failure(held, ""))
    # Then it was started at most this number of times
    assert starts <= limit + kicks


# --- what a task can raise ---


def test_release_takes_seconds_or_a_timedelta() -> None:
    assert ReleaseJob(1.5).delay == 1.5
    assert ReleaseJob(dt.timedelta(minutes=2)).delay == 120.0
    assert ReleaseJob().delay is None
    assert str(ReleaseJob(3, "the van is full")) == "the van is full"


WRONG: list[Any] = [-1, math.nan, math.inf, "60", dt.timedelta(seconds=-1)]


@pytest.mark.parametrize("delay", WRONG, ids=str)
def test_release_refuses_an_invalid_delay(delay: Any) -> None:
    with pytest.raises(OptionInvalid, match="delay must be"):
        ReleaseJob(delay)


def test_bury_says_why() -> None:
    assert (BuryJob("no such address").reason, str(BuryJob("no such address"))) == ("no such address",) * 2
