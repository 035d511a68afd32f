"""Records as of now: what has become due or has ended by time is shown as ready."""

from __future__ import annotations

import pytest

from multiq.backend import STORED_STATES, State
from multiq.driverkit.records import effective_state, job_record


def _record(stored: State, left: float, *, crashes: int = 0) -> tuple[State, float | None, int | None]:
    record = job_record(
        queue="q", id="1", body=b"x", stored=stored, left=left, priority=7, ttr=60.0, attempt=2, crashes=crashes,
        kicks=3, age=5.0, reason="why",
    )  # fmt: skip
    kept = ("q", "1", b"x", 7, 60.0, 2, 3, 5.0, "why")
    found = (record.queue, record.id, record.body, record.priority, record.ttr, record.attempt, record.kicks)
    assert (*found, record.age, record.reason) == kept
    return record.state, record.due_in, record.crashes


@pytest.mark.parametrize("stored", STORED_STATES)
def test_state_before_the_time_is_the_stored_one(stored: State) -> None:
    assert effective_state(stored, is_due=False) is stored


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        (State.READY, State.READY),
        (State.DELAYED, State.READY),
        (State.RESERVED, State.READY),
        (State.BURIED, State.BURIED),
    ],
)
def test_state_after_the_time(stored: State, now: State) -> None:
    assert effective_state(stored, is_due=True) is now


def test_delayed_job_is_ready_when_it_is_due() -> None:
    assert _record(State.DELAYED, 2.5) == (State.DELAYED, 2.5, 0)
    assert _record(State.DELAYED, 0.0) == (State.READY, 0.0, 0)


def test_lease_that_has_ended_counts_as_a_crash() -> None:
    assert _record(State.RESERVED, 2.5, crashes=4) == (State.RESERVED, 2.5, 4)
    assert _record(State.RESERVED, -1.0, crashes=4) == (State.READY, 0.0, 5)


def test_buried_job_is_never_due() -> None:
    assert _record(State.BURIED, -1.0, crashes=4) == (State.BURIED, None, 4)
