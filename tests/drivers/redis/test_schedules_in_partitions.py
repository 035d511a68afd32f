"""Schedules whose jobs go into several partitions: a job may be stored in a step of its own, after the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import multiq
from multiq.backend import State
from multiq.schedules import Scheduler
from multiq_redis.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.redis import RedisServer

QUEUE = "mail"
NAMES = [
    f"s{number}" for number in range(6)
]  # the job of at least one of them is nearly certainly in another partition


class KilledError(BaseException):
    """Stands for the death of the process."""


@pytest.fixture
def apps(server: RedisServer) -> Iterator[list[multiq.App]]:
    """The apps of two processes."""
    with multiq.App(f"{server.url}?partitions=8") as first, multiq.App(f"{server.url}?partitions=8") as second:
        yield [first, second]


def make_and_die(app: multiq.App, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
    """Make jobs of schedules. The process dies when the schedules' notes are stored, and the jobs are not."""

    @app.task(queue=QUEUE)
    def work() -> None: ...

    def die(*_: object) -> None:
        raise KilledError

    for name in NAMES:
        app.schedules.add(name, work.s(), every=30, **options)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(Relay, "after", die)
        with pytest.raises(KilledError):
            Scheduler(app).look()


def made(app: multiq.App) -> int:
    app.backend.relay([QUEUE])
    return sum(len(app.backend.jobs(QUEUE, state).jobs) for state in (State.READY, State.DELAYED))


@pytest.mark.parametrize("overlap", ["skip", "follow"])
def test_a_job_that_a_dead_scheduler_has_left_in_the_outbox_keeps_the_next_one_from_being_made(
    apps: list[multiq.App], overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scheduler that dies while it makes the jobs
    first, second = apps
    make_and_die(first, monkeypatch, overlap=overlap)
    # When another scheduler looks
    Scheduler(second).look()
    # Then there is one job of each schedule
    assert made(second) == len(NAMES)


def test_a_pause_deletes_the_jobs_that_a_dead_scheduler_has_left_in_the_outbox(
    apps: list[multiq.App], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scheduler that dies while it makes the jobs
    first, second = apps
    make_and_die(first, monkeypatch)
    # When another process, which cannot relay now, pauses the schedules
    with monkeypatch.context() as patch:
        patch.setattr(Relay, "after", lambda *_: set())
        for name in NAMES:
            second.schedules.pause(name)
    # Then the schedules have no jobs
    assert made(second) == 0
