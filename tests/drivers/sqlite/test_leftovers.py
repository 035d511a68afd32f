"""Leftovers: the file keeps nothing of queues that are empty and not paused."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from multiq.backend import NewJob
    from multiq_sqlite.backend import SqliteBackend

    Jobs = Callable[..., list[NewJob]]

TABLES = ("multiq_jobs", "multiq_bodies", "multiq_queues")


def acked(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.enqueue("q", jobs(3, b"x" * 9000))
    with backend.consumer(["q"]) as consumer:
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(5, 0)]) == [None] * 3


def resumed(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.pause("q", 60)
    backend.resume("q")


def paused_for_a_moment_and_asked_for_jobs(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.pause("q", 0.01)
    time.sleep(0.02)
    with backend.consumer(["q"]) as consumer:
        assert consumer.reserve(1, 0) == []


def paused_for_a_moment_with_jobs(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.pause("q", 0.2)
    backend.enqueue("q", jobs())
    with backend.consumer(["q"]) as consumer:
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 30)]) == [None]


def paused_for_a_moment_and_another_one_after(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.pause("q", 0.01)
    backend.pause("r", 60)
    time.sleep(0.02)
    backend.resume("r")


@pytest.mark.parametrize(
    "way",
    [
        acked,
        resumed,
        paused_for_a_moment_and_asked_for_jobs,
        paused_for_a_moment_with_jobs,
        paused_for_a_moment_and_another_one_after,
    ],
)
def test_empty_queue_leaves_nothing_behind(
    backend: SqliteBackend, connect: Callable[..., sqlite3.Connection], jobs: Jobs, way: Callable[..., None]
) -> None:
    way(backend, jobs)
    for table in TABLES:
        assert connect().execute(f"SELECT * FROM {table}").fetchall() == []  # noqa: S608 - one of TABLES


def test_current_pause_stays_and_causes_no_writes(
    backend: SqliteBackend, connect: Callable[..., sqlite3.Connection], jobs: Jobs
) -> None:
    # Given a pause that is over in one queue, and a pause that lasts in another queue
    backend.pause("over", 0.01)
    backend.pause("q", 60)
    time.sleep(0.02)
    with backend.consumer(["q", "over"]) as consumer:
        assert consumer.reserve(1, 0) == []
        app = connect()
        assert [queue for (queue,) in app.execute("SELECT queue FROM multiq_queues")] == ["q"]
        # Then a consumer that looks again writes nothing
        version = app.execute("PRAGMA data_version").fetchone()
        assert [consumer.reserve(1, 0) for _ in range(3)] == [[]] * 3
        assert app.execute("PRAGMA data_version").fetchone() == version
