"""``Snooze`` and ``expires`` on each real store, with each store's own clock and way of counting attempts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import multiq
from multiq import Snooze, State, events

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def app(url: str) -> Iterator[multiq.App]:
    with multiq.App(url) as app:
        yield app


def drain(app: multiq.App) -> None:
    assert multiq.Worker(app, stop_when_empty=True).run() == 0


def test_a_snoozed_job_runs_again_and_costs_no_attempt_where_the_store_gives_back(app: multiq.App) -> None:
    attempts: list[int] = []

    # Given a job that may be tried twice, and snoozes twice
    @app.task(max_attempts=2)
    def work() -> None:
        attempts.append(multiq.current_job().attempt)
        if len(attempts) <= 2:
            raise Snooze(0.2)

    handle = work.enqueue()
    until = time.monotonic() + 60
    # When it is due again and again
    while handle.state() is not State.GONE:
        assert time.monotonic() < until
        drain(app)
        time.sleep(0.05)
    # Then its third run is its first attempt, or the store's third attempt, and the job was not buried
    assert attempts == ([1, 1, 1] if app.backend.capabilities.give_back else [1, 2, 3])


def test_a_job_that_waited_too_long_is_dropped_by_the_store_s_clock(app: multiq.App) -> None:
    ran, expired = list[int](), list[str]()
    app.on(events.JobExpired)(lambda event: expired.append(event.job.id))
    task = app.task(name="note", expires=1)(ran.append)
    late, in_time = task.enqueue(1), task.options(expires=3600).enqueue(2)
    time.sleep(2.2)  # beanstalkd's ages are whole seconds
    drain(app)
    assert (ran, expired) == ([2], [late.id])
    assert [handle.state() for handle in (late, in_time)] == [State.GONE, State.GONE]
