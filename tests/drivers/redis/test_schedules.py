"""Schedules on Redis: steps in other queues and partitions are carried out later, and a process may die before."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process dies when the first steps of its next change are carried out, and the others are not."""

    def die(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Relay, "after", die)
        with pytest.raises(KilledError):
            yield


def make_and_die(app: multiq.App, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
    """Make jobs of schedules. The process dies when the schedules' notes are stored, and the jobs are not."""

    @app.task(queue=QUEUE)
    def work() -> None: ...

    for name in NAMES:
        app.schedules.add(name, work.s(), every=30, **options)  # type: ignore[arg-type]
    with dying(monkeypatch):
        Scheduler(app).look()


def made(app: multiq.App, *states: State) -> int:
    app.backend.relay([QUEUE])
    return sum(len(app.backend.jobs(QUEUE, state).jobs) for state in states or (State.READY, State.DELAYED))


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
    # Then the schedules have no jobs in advance; a job that became due before the pause is left
    assert made(second, State.DELAYED) == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_a_schedule_goes_on_whose_move_to_another_queue_a_dead_process_has_begun(
    apps: list[multiq.App], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = apps

    @first.task(queue=QUEUE)
    def work() -> None: ...

    # Given a schedule, and a scheduler which may have read it
    first.schedules.add("moved", work.s(), every=600)
    scheduler = Scheduler(second, ahead=240)
    if is_known:
        scheduler.look()
    # When a process dies while it moves the schedule to another queue
    with dying(monkeypatch):
        first.schedules.change("moved", work.options(queue="new").s(), every=10)
    # Then the schedule is in the other queue when the scheduler has looked for what is stored
    scheduler._changes = None  # as after half an hour
    scheduler.look()
    assert [info.queue for info in second.schedules.list()] == ["new"]
    assert scheduler.made > 0
