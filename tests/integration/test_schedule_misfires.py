"""Real stores that are down while occurrences are due: which of the missed occurrences run when the store is back."""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import pytest
from processes import until
from servers.beanstalk import BeanstalkServer
from servers.mysql import MysqlServer
from servers.redis import RedisServer

import multiq
from multiq.backend import Ack
from multiq.envelope import decode_envelope
from multiq.errors import BackendError
from multiq.schedules import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

POLICIES = {"skip": 20.0, "once": None, "all": None, "all(3)": None}
"""Policies of missed occurrences, and the age in seconds that each policy allows."""
QUEUE = "default"


class Run(NamedTuple):
    occurrence: int
    schedule: str
    is_late: bool
    """Whether the job was made after the time of the occurrence."""


class Place(NamedTuple):
    """A store that can be taken down. The store keeps its data."""

    url: str
    is_down: Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def redis(_folder: Path) -> Iterator[Place]:
    with RedisServer(appendonly="yes", appendfsync="always") as server:

        @contextlib.contextmanager
        def is_down() -> Iterator[None]:
            server.kill()
            yield
            server.start()

        yield Place(server.url, is_down)


@contextlib.contextmanager
def mysql(_folder: Path) -> Iterator[Place]:
    with MysqlServer() as server, server.database() as place:

        @contextlib.contextmanager
        def is_down() -> Iterator[None]:
            server.kill()
            yield
            server.start()

        yield Place(place.url, is_down)


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[Place]:
    file = folder / "jobs.db"

    @contextlib.contextmanager
    def is_down() -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.execute("ROLLBACK")

    yield Place(f"sqlite:///{file}?timeout=0.2", is_down)


@contextlib.contextmanager
def beanstalk(folder: Path) -> Iterator[Place]:
    """beanstalkd with a Redis beside it. Both are down."""
    with BeanstalkServer(binlog=True) as server, redis(folder) as store:

        @contextlib.contextmanager
        def is_down() -> Iterator[None]:
            server.kill()
            with store.is_down():
                yield
            server.start()

        yield Place(f"{server.url}?store={quote(store.url, safe='')}", is_down)


@pytest.mark.long
@pytest.mark.parametrize(("missed", "period", "ahead"), [(0, 5, 60.0), (1, 5, 2.0), (50, 1, 2.0)])
@pytest.mark.parametrize("backend", [redis, mysql, sqlite, beanstalk])
def test_missed_occurrences_run_by_the_policy_after_the_store_was_down(
    backend: Callable[[Path], AbstractContextManager[Place]], missed: int, period: int, ahead: float, tmp_path: Path
) -> None:
    with backend(tmp_path) as place, multiq.App(place.url) as app:
        # Given a schedule of each policy, of which some occurrences are made
        @app.task(queue=QUEUE, ttr=600)
        def tick() -> None: ...

        for policy in POLICIES:
            app.schedules.add(name_of(policy), tick.s(), every=period, misfire=policy)
        scheduler = Scheduler(app, ahead=ahead)
        until(lambda: looks(scheduler) and all(info.last for info in app.schedules.list()))
        looked_at = time.time()
        lasts = {info.name: round(info.last.timestamp()) for info in app.schedules.list() if info.last}
        # When the store is down until so many further occurrences have passed
        with place.is_down():
            end = max(lasts.values()) + missed * period + 0.5 if missed else time.time() + 3
            until(lambda: not looks(scheduler) and time.time() > end, timeout=120)
        began = time.time()
        until(lambda: looks(scheduler))
        ended = time.time()
        # Then those missed occurrences of each schedule run that its policy allows
        runs = taken(app, scheduler, after=ended, until_=ended + 2 * period)
        for policy, grace in POLICIES.items():
            name = name_of(policy)
            late = [
                run.occurrence for run in runs if run.schedule == name and run.occurrence > lasts[name] and run.is_late
            ]
            passed = [
                [*range(lasts[name] + period, int(at) + 1, period)]
                for at in {began, ended, *range(int(began) + 1, int(ended) + 1)}
            ]
            assert late in [chosen(policy, grace, some) for some in passed]
            # And each occurrence runs once, and the others run as usual
            every = [run.occurrence for run in runs if run.schedule == name]
            assert sorted({*every}) == sorted(every)
            coming = [occurrence for occurrence in every if occurrence > ended]
            assert coming == [*range(coming[0], coming[-1] + 1, period)]
            assert coming[0] <= ended + period
        # An occurrence before the first look may be late. On a busy machine, the store may be down for longer than the
        # jobs were made ahead.
        if ended < min(lasts.values()):
            assert not any(run.is_late for run in runs if run.occurrence > looked_at)


def chosen(policy: str, grace: float | None, passed: list[int]) -> list[int]:
    """Which of the past occurrences run."""
    if policy == "skip":
        return [at for at in passed if at >= passed[-1] + 1 - (grace or 0)]
    return passed if policy == "all" else passed[-3 if policy == "all(3)" else -1 :]


def looks(scheduler: Scheduler) -> bool:
    """Look once. Returns whether the store answered."""
    time.sleep(0.1)  # between two looks
    try:
        scheduler.look()
    except BackendError:
        return False
    return True


def taken(app: multiq.App, scheduler: Scheduler, after: float, until_: float) -> list[Run]:
    """Take jobs until a time, and until each schedule has an occurrence after another time. Return them in order."""
    found: list[Run] = []
    with app.backend.consumer([QUEUE]) as consumer:
        while time.time() < until_ or len({run.schedule for run in found if run.occurrence > after}) < len(POLICIES):
            assert time.time() < until_ + 60, found
            looks(scheduler)
            leases = consumer.reserve(1000, 0)
            for lease in leases:
                headers = decode_envelope(lease.body).headers
                at = round(dt.datetime.fromisoformat(headers["multiq-occurrence"]).timestamp())
                found.append(Run(at, headers["multiq-schedule"], float(headers["multiq-delay"]) <= 0))
            consumer.settle([Ack(lease) for lease in leases])
    return sorted(found)


def name_of(policy: str) -> str:
    return policy.replace("(", "").replace(")", "")
