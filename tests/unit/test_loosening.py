"""A job's own limits may be stricter than its task's, and looser only if the task allows it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.envelope import Envelope
from multiq.errors import OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def app() -> Iterator[multiq.App]:
    with multiq.App(settings=multiq.Settings(url="memory://")) as app:
        yield app


def slip_in(app: multiq.App, task: str, **limits: float) -> None:
    """Enqueue a job as another client may write it."""
    app.queue().enqueue(json.dumps({"multiq": 1, "task": task, **limits}).encode())


def work_off(app: multiq.App) -> None:
    multiq.Worker(app, stop_when_empty=True).run()


def test_an_envelope_without_a_time_limit_is_held_to_its_tasks(app: multiq.App) -> None:
    slept = []

    @app.task(timeout=0.2, max_attempts=1)
    def sleep() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.02)
        slept.append(True)

    for timeout in (0, 3600, 1e300):
        slip_in(app, "sleep", timeout=timeout)
    work_off(app)
    assert slept == []
    assert [job.reason for job in app.queue().jobs("buried")] == ["the task ran longer than its timeout of 0.2 s"] * 3


@pytest.mark.parametrize("limit", [0, 1000])
def test_an_envelope_gets_no_more_attempts_than_its_task_has(app: multiq.App, limit: int) -> None:
    tries = []

    @app.task(max_attempts=2, backoff=0)
    def fail() -> None:
        tries.append(1)
        raise ValueError("550")

    slip_in(app, "fail", max_attempts=limit, retry_for=1e9, max_crashes=0)
    work_off(app)
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("own", "asked", "granted"),
    [
        ({}, {}, (5, 3, None, None)),
        ({}, {"max_attempts": 0, "max_crashes": 0, "retry_for": 1e9}, (5, 3, 1e9, None)),
        ({}, {"max_attempts": 3, "max_crashes": 1, "retry_for": 0.0, "timeout": 4.0}, (3, 1, 0.0, 4.0)),
        ({"max_attempts": 0, "max_crashes": 0, "timeout": 0}, {"max_attempts": 9, "timeout": 9.0}, (9, 0, None, 9.0)),
        ({"retry_for": 60}, {"max_attempts": 9, "retry_for": 90.0}, (9, 3, 60.0, None)),
        ({"retry_for": 60}, {"retry_for": 30.0}, (0, 3, 30.0, None)),
        ({"timeout": 5}, {"timeout": 9.0}, (5, 3, None, 5.0)),
        ({"timeout": 5}, {"timeout": 0.0}, (5, 3, None, 5.0)),
        ({"timeout": 5}, {"timeout": 2.0}, (5, 3, None, 2.0)),
        ({"timeout": 5, "loosen": True}, {"timeout": 0.0, "max_attempts": 0}, (0, 3, None, None)),
        ({"loosen": True}, {"max_crashes": 0, "retry_for": 9.0}, (0, 0, 9.0, None)),
    ],
    ids=str,
)
def test_the_stricter_limit_holds(
    app: multiq.App, own: dict[str, Any], asked: dict[str, Any], granted: tuple[object, ...]
) -> None:
    @app.task(**own)
    def work() -> None: ...

    envelope = Envelope(1, "work", **asked)
    policy = work.policy_of(envelope)
    found = (policy.attempts(), policy.max_crashes, policy.retry_for, work.timeout_of(envelope) or None)
    assert found == granted


@pytest.mark.parametrize(
    "looser",
    [{"timeout": 0}, {"timeout": 6}, {"max_attempts": 0}, {"max_attempts": 6}, {"max_crashes": 4}, {"retry_for": 61}],
    ids=str,
)
def test_enqueue_refuses_a_limit_that_is_too_loose(app: multiq.App, looser: dict[str, Any]) -> None:
    @app.task(timeout=5, max_attempts=5, retry_for=60)
    def work() -> None: ...

    @app.task(timeout=5, max_attempts=5, retry_for=60, loosen=True)
    def free() -> None: ...

    with pytest.raises(OptionInvalid, match="loosen=True"):
        work.options(**looser)
    free.options(**looser)
    work.options(timeout=5, max_attempts=5, max_crashes=3, retry_for=0)


def test_loosen_is_yes_or_no(app: multiq.App) -> None:
    with pytest.raises(OptionInvalid, match="loosen must be True or False"):

        @app.task(loosen="yes")  # type: ignore[call-overload, untyped-decorator]
        def work() -> None: ...
