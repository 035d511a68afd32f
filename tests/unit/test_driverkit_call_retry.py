"""The policy by which drivers repeat failed calls, on a simulated clock."""

from __future__ import annotations

import random
import time

import pytest

from multiq.driverkit.call_retry import (
    CONFLICT_PAUSES,
    REJECTED_PAUSES,
    Attempts,
    Failure,
    Pauses,
    repetitions,
)

PAUSED = {Failure.REJECTED: REJECTED_PAUSES, Failure.CONFLICT: CONFLICT_PAUSES}
RECONNECTED = (Failure.STALE, Failure.REPLY_LOST)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses_until_the_end(attempts: Attempts, clock: Clock, failure: Failure) -> list[float]:
    """Return all pauses of a call whose attempts take no time and all fail in this way."""
    pauses = []
    while (pause := attempts.next_pause(failure)) is not None:
        clock.now += pause
        pauses.append(pause)
    return pauses


@pytest.mark.parametrize("failure", RECONNECTED)
@pytest.mark.parametrize("next_one", RECONNECTED)
def test_lost_connection_is_replaced_at_once_and_once(clock: Clock, failure: Failure, next_one: Failure) -> None:
    attempts = Attempts(clock.now + 60, clock=clock)
    assert attempts.next_pause(failure) == 0.0
    assert attempts.next_pause(next_one) is None


@pytest.mark.parametrize("failure", RECONNECTED)
def test_lost_connection_is_replaced_once_among_other_failures(clock: Clock, failure: Failure) -> None:
    attempts = Attempts(clock.now + 60, clock=clock)
    assert attempts.next_pause(Failure.CONFLICT)
    assert attempts.next_pause(failure) == 0.0
    assert attempts.next_pause(Failure.CONFLICT)
    assert attempts.next_pause(failure) is None


@pytest.mark.parametrize("failure", [*RECONNECTED, Failure.UNREACHABLE])
def test_servers_that_take_over_are_waited_for_until_the_deadline(clock: Clock, failure: Failure) -> None:
    attempts = Attempts(clock.now + 5, has_failover=True, clock=clock)
    pauses = pauses_until_the_end(attempts, clock, failure)
    if failure in RECONNECTED:
        assert pauses.pop(0) == 0.0
    assert len(pauses) >= 5 / REJECTED_PAUSES.longest
    assert all(pauses)


def test_unreachable_server_without_another_is_not_attempted_again(clock: Clock) -> None:
    assert Attempts(clock.now + 60, clock=clock).next_pause(Failure.UNREACHABLE) is None


@pytest.mark.parametrize("has_failover", [False, True])
def test_final_failure_is_not_attempted_again(clock: Clock, has_failover: bool) -> None:
    assert Attempts(clock.now + 60, has_failover=has_failover, clock=clock).next_pause(Failure.FINAL) is None


@pytest.mark.parametrize("failure", PAUSED)
def test_pauses_double_up_to_the_longest_and_are_randomised(clock: Clock, failure: Failure) -> None:
    first, longest = PAUSED[failure]
    calls = []
    for _ in range(50):
        attempts = Attempts(clock.now + 1000, clock=clock)
        calls.append([attempts.next_pause(failure) for _ in range(12)])
    bounds = [min(longest, first * 2**number) for number in range(12)]
    assert bounds[-1] == longest
    for bound, pauses in zip(bounds, zip(*calls, strict=True), strict=True):
        assert all(0.2 * bound <= pause <= bound for pause in pauses)
        assert len(set(pauses)) > 1  # so that clients that failed at the same time do not retry at the same time
        assert max(pauses) > 0.8 * bound
        assert min(pauses) < 0.4 * bound


def test_driver_with_short_locks_sets_the_pauses_after_a_conflict(clock: Clock) -> None:
    attempts = Attempts(clock.now + 1000, conflict_pauses=Pauses(0.0002, 0.003), clock=clock)
    pauses = [attempts.next_pause(Failure.CONFLICT) or 0.0 for _ in range(2000)]
    assert pauses[0] <= 0.0002
    assert 0.0006 <= min(pauses[10:]) <= max(pauses) <= 0.003


@pytest.mark.parametrize("failure", [*PAUSED, Failure.UNREACHABLE])
@pytest.mark.parametrize("seed", range(20))
def test_no_pause_passes_the_deadline(clock: Clock, failure: Failure, seed: int) -> None:
    random.seed(seed)
    deadline = clock.now + 1.0
    pauses = pauses_until_the_end(Attempts(deadline, has_failover=True, clock=clock), clock, failure)
    assert pauses
    assert clock.now < deadline
    assert deadline - clock.now <= 0.25  # the last attempt is at most the longest pause before the deadline


@pytest.mark.parametrize("failure", Failure)
def test_no_attempt_follows_the_deadline(clock: Clock, failure: Failure) -> None:
    assert Attempts(clock.now, has_failover=True, clock=clock).next_pause(failure) is None


def test_call_may_be_done_once_a_reply_was_lost(clock: Clock) -> None:
    attempts = Attempts(clock.now + 60, has_failover=True, clock=clock)
    for failure in (Failure.STALE, Failure.UNREACHABLE, Failure.REJECTED, Failure.CONFLICT, Failure.FINAL):
        attempts.next_pause(failure)
        assert not attempts.may_be_done
    attempts.next_pause(Failure.REPLY_LOST)
    attempts.next_pause(Failure.FINAL)  # an error of a later attempt does not undo an earlier one
    assert attempts.may_be_done


def test_reply_lost_at_the_deadline_may_be_done(clock: Clock) -> None:
    attempts = Attempts(clock.now, clock=clock)
    assert attempts.next_pause(Failure.REPLY_LOST) is None
    assert attempts.may_be_done


def test_again_sleeps_for_the_pause() -> None:
    began = time.monotonic()
    attempts = Attempts(began + 60)
    assert attempts.again(Failure.REPLY_LOST)
    for _ in range(4):
        assert attempts.again(Failure.REJECTED)
    assert time.monotonic() - began >= 0.2 * (0.01 + 0.02 + 0.04 + 0.08)
    assert not attempts.again(Failure.FINAL)


def test_repetitions_are_counted_by_the_failure_before(clock: Clock) -> None:
    before = repetitions.copy()
    attempts = Attempts(clock.now + 60, clock=clock)
    for failure in (Failure.CONFLICT, Failure.CONFLICT, Failure.STALE, Failure.STALE, Failure.FINAL):
        attempts.next_pause(failure)
    assert repetitions - before == {Failure.CONFLICT: 2, Failure.STALE: 1}
