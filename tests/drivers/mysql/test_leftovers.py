"""The rows that queues without jobs and pauses leave in the tables: no job, and no pause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import NewJob
    from multiq_mysql.backend import MysqlBackend

    Jobs = Callable[..., list[NewJob]]


def acked(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.enqueue("q", jobs(3))
    with backend.consumer(["q"]) as consumer:
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(5, 0)]) == [None] * 3


def resumed(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.pause("q", 60)
    backend.resume("q")


def paused_for_a_moment_and_asked_for_jobs(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.pause("q", 0.01)
    time.sleep(0.02)
    with backend.consumer(["q"]) as consumer:
        assert consumer.reserve(1, 0) == []


def paused_for_a_moment_with_jobs(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.pause("q", 0.2)
    backend.enqueue("q", jobs())
    with backend.consumer(["q"]) as consumer:
        assert consumer.exchange([Ack(lease) for lease in consumer.reserve(1, 30)], 1, 0.2) == ([None], [])


def paused_for_a_moment_and_another_one_after(backend: MysqlBackend, jobs: Jobs) -> None:
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
def test_an_empty_queue_leaves_nothing_behind(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs, way: Callable[..., None]
) -> None:
    way(backend, jobs)
    assert mysql_server.ask("SELECT * FROM multiq_jobs", database=place.name) == ()
    assert mysql_server.ask("SELECT * FROM multiq_queues", database=place.name) == ()


def test_a_pause_that_goes_on_stays(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    backend.pause("over", 0.01)
    backend.pause("q", 60)
    time.sleep(0.02)
    with backend.consumer(["q", "over"]) as consumer:
        assert consumer.reserve(1, 0) == []
    assert mysql_server.ask("SELECT queue FROM multiq_queues", database=place.name) == ((b"q",),)


def test_a_worker_that_may_not_delete_pauses_works_all_the_same(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    # Given a user that may not delete from the table of pauses, and a pause that is over
    backend.pause("q", 0.01)
    time.sleep(0.02)
    with mysql_server.account("SELECT", f"{place.name}.*") as reader:
        mysql_server.ask(f"GRANT INSERT, UPDATE, DELETE ON {place.name}.multiq_jobs TO {reader.user}")
        mysql_server.ask(f"GRANT INSERT, UPDATE, DELETE ON {place.name}.multiq_receipts TO {reader.user}")
        with open_backend(reader.url(place.name)) as other, other.consumer(["q"]) as consumer:
            # Then it waits for jobs, and takes them
            assert consumer.reserve(1, 0.2) == []
            backend.enqueue("q", jobs())
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 30)]) == [None]
