"""Enqueues in Django's transactions: joined where the jobs are in the same database, and after the commit elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from typing import TYPE_CHECKING, Any

import djangos
import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, transaction
from django_shop import tasks as shop
from django_shop.models import Order
from djangos import tasks, work
from servers.mysql import any_server
from stores import STORES

import multiq
from multiq import errors
from multiq.contrib.django import framework
from multiq.contrib.django.framework import InvalidTask, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers.mysql import MysqlDatabases

    from multiq.contrib.django import TaskBackend


class Place:
    """Django's connection ``default``, and the URL of jobs in the same database."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def connection(self) -> Any:
        return connections["default"]


@pytest.fixture
def sqlite(database: Any) -> Place:
    place = Place(f"sqlite:///{database.settings_dict['NAME']}")
    with multiq.App(place.url) as app:
        app.queue().stats()  # makes the tables
    return place


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlDatabases]:
    with any_server() as server:
        yield server


@pytest.fixture
def mysql(server: MysqlDatabases) -> Iterator[Place]:
    with server.database() as place:
        added = "MySQLdb" not in sys.modules
        if added:
            try:
                import MySQLdb  # noqa: F401
            except ImportError:
                import pymysql

                pymysql.install_as_MySQLdb()
        at = {"host": server.host, "port": server.port, "user": server.user, "password": server.password}
        try:
            options = {**at, "database": place.name}
            with djangos.connected("default", ENGINE="django.db.backends.mysql", NAME=place.name, OPTIONS=options):
                with connections["default"].schema_editor() as editor:
                    editor.create_model(Order)
                yield Place(place.url)
        finally:
            if added and getattr(sys.modules["MySQLdb"], "__name__", "") == "pymysql":
                del sys.modules["MySQLdb"]


@pytest.fixture(params=["sqlite", pytest.param("mysql", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


def ready(backend: TaskBackend) -> int:
    """The jobs that a worker in another connection gets."""
    return backend.app.queue().stats().ready or 0


@contextlib.contextmanager
def rolled_back(using: str = "default") -> Iterator[None]:
    """A transaction that ends with an error."""
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=using):
        yield
        raise ZeroDivisionError


# --- a database with jobs ---


@pytest.mark.parametrize("place", ["sqlite", "mysql"], indirect=True)
@pytest.mark.parametrize("mode", ["auto", "join"])
def test_an_enqueue_joins_the_transaction(place: Place, mode: str) -> None:
    with tasks(place.url, transaction=mode) as backend:
        # given a transaction with a row and a task
        with transaction.atomic():
            Order.objects.create(number=1)
            result = shop.add.enqueue(1, 2)
            assert (result.id != "", result.status) == (True, Status.READY)
            assert result.enqueued_at is not None

            # then no other connection sees the job before the commit
            assert ready(backend) == 0

        # and afterwards both the row and the job are there
        assert (Order.objects.count(), ready(backend)) == (1, 1)
        work(backend)
        result.refresh()
        assert result.return_value == 3


@pytest.mark.parametrize("place", ["sqlite", "mysql"], indirect=True)
@pytest.mark.parametrize("mode", ["auto", "join", "on_commit"])
def test_a_rollback_takes_the_job_back(place: Place, mode: str) -> None:
    with tasks(place.url, transaction=mode) as backend:
        with rolled_back():
            Order.objects.create(number=1)
            shop.add.enqueue(1)
        assert (Order.objects.count(), ready(backend)) == (0, 0)

        # and the rollback of a savepoint removes only the savepoint's own jobs
        with transaction.atomic():
            shop.add.enqueue(1)
            with rolled_back():
                shop.add.enqueue(2)
        assert ready(backend) == 1
        assert [job.value["args"] for job in backend.app.queue().jobs("ready")] == [[1]]


def test_a_rollback_of_the_first_enqueue_takes_the_tables_back_and_the_next_one_makes_them(database: Any) -> None:
    with tasks(f"sqlite:///{database.settings_dict['NAME']}") as backend:
        for _ in range(2):
            with rolled_back():
                shop.add.enqueue(1)
        with transaction.atomic():
            shop.add.enqueue(1)
        assert ready(backend) == 1


def test_an_enqueue_with_now_waits_for_no_commit(place: Place) -> None:
    # for SQLite, the jobs are in another file: the only writer would have to wait for the transaction
    url = place.url if place.connection.vendor == "mysql" else place.url.replace("django.db", "jobs.db")
    with tasks(url, transaction="now") as backend:
        with rolled_back():
            Order.objects.create(number=1)
            shop.add.enqueue(1)
            assert ready(backend) == 1
        assert (Order.objects.count(), ready(backend)) == (0, 1)


def test_outside_of_a_transaction_a_job_is_there_at_once(place: Place) -> None:
    for mode in ("auto", "join", "on_commit", "now"):
        with tasks(place.url, transaction=mode) as backend:
            before = ready(backend)
            shop.add.enqueue(1)
            assert ready(backend) == before + 1


def test_a_connection_without_autocommit_is_a_transaction(place: Place) -> None:
    with tasks(place.url) as backend:
        transaction.set_autocommit(False)
        try:
            Order.objects.create(number=1)
            shop.add.enqueue(1)
            assert ready(backend) == 0
            transaction.rollback()
            assert ready(backend) == 0
            shop.add.enqueue(2)
            transaction.commit()
        finally:
            transaction.set_autocommit(True)
        assert (Order.objects.count(), ready(backend)) == (0, 1)


def test_the_first_statement_of_a_connection_without_autocommit_begins_a_transaction(place: Place) -> None:
    # given AUTOCOMMIT = False in DATABASES, and no connection yet
    connection = connections["default"]
    connection.close()
    connection.settings_dict["AUTOCOMMIT"] = False
    with tasks(place.url) as backend:
        try:
            shop.add.enqueue(1)
            assert ready(backend) == 0
            transaction.rollback()
            assert ready(backend) == 0
        finally:
            connection.settings_dict["AUTOCOMMIT"] = True
            connection.close()


def test_a_transaction_that_is_to_be_rolled_back_takes_no_job(place: Place) -> None:
    with tasks(place.url) as backend:
        with transaction.atomic():
            transaction.set_rollback(True)
            with contextlib.suppress(errors.MultiqError, DatabaseError):
                shop.add.enqueue(1)
        assert ready(backend) == 0


def test_a_transaction_in_a_coroutine_is_joined(place: Place) -> None:
    def place_order() -> None:
        with rolled_back():
            Order.objects.create(number=1)
            shop.add.enqueue(1)

    async def view() -> None:
        await shop.add.aenqueue(5)
        await sync_to_async(place_order)()
        await sync_to_async(connections.close_all)()

    with tasks(place.url) as backend:
        asyncio.run(view())
        assert (Order.objects.count(), ready(backend)) == (0, 1)


def test_the_signal_of_an_enqueue_comes_after_the_commit(place: Place) -> None:
    told: list[bool] = []

    def note(task_result: Any, **_: Any) -> None:
        told.append(place.connection.in_atomic_block)

    framework.task_enqueued.connect(note)
    try:
        for mode in ("auto", "on_commit"):
            with tasks(place.url, transaction=mode), transaction.atomic():
                shop.add.enqueue(1)
                assert told == []
            assert told == [False]
            told.clear()
        with tasks(place.url), rolled_back():
            shop.add.enqueue(1)
        assert told == []
    finally:
        framework.task_enqueued.disconnect(note)


# --- jobs elsewhere ---


@pytest.mark.parametrize("store", ["sqlite", "redis", "beanstalk"])
def test_jobs_elsewhere_are_sent_after_the_commit(store: str, sqlite: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with STORES[store](tmp_path / "elsewhere") as url, tasks(url) as backend:
        chooses_ids = bool(backend.app.backend.declared.client_ids)

        # given a transaction that is committed, and two that are not
        with transaction.atomic():
            result = shop.add.enqueue(1, 2)
            assert (bool(result.id), result.enqueued_at) == (chooses_ids, None)
            assert ready(backend) == 0
        assert ready(backend) == 1
        with rolled_back():
            shop.add.enqueue(1)

        # then the one job is there, and its result has its id
        assert ready(backend) == 1
        assert result.id
        assert result.enqueued_at is not None
        assert backend.app.queue().peek(result.id).value["args"] == [1, 2]
        backend.app.close()


def test_mistakes_are_found_at_the_enqueue_and_not_at_the_commit(sqlite: Place, tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/other.db") as backend:
        with transaction.atomic():
            Order.objects.create(number=1)
            cases: list[tuple[Callable[[], Any], type[Exception]]] = [
                (lambda: shop.add.enqueue(object()), TypeError),
                (lambda: shop.add.enqueue(1, 2, 3), errors.ArgumentsInvalid),
                (lambda: shop.tell.enqueue("x" * 10_000_000), errors.PayloadTooLarge),
                (lambda: shop.add.using(queue_name="x/" * 300).enqueue(1), InvalidTask),
            ]
            for wrong, kind in cases:
                with pytest.raises(kind):
                    wrong()
        assert (Order.objects.count(), ready(backend)) == (1, 0)


def test_a_store_that_is_gone_at_the_commit_raises_there(sqlite: Place) -> None:
    def place_order() -> None:
        with transaction.atomic():
            Order.objects.create(number=1)
            shop.add.enqueue(1)

    with tasks("redis://127.0.0.1:1"):
        with pytest.raises(errors.BackendUnavailable):
            place_order()
        assert Order.objects.count() == 1  # on_commit runs its function after the commit


def test_join_is_refused_where_the_jobs_are_elsewhere(sqlite: Place, tmp_path: Path) -> None:
    for url in ("memory://", "redis://localhost", f"sqlite:///{tmp_path}/other.db"):
        with (
            tasks(url, transaction="join"),
            transaction.atomic(),
            pytest.raises(ImproperlyConfigured, match="must be in the database 'default' of Django"),
        ):
            shop.add.enqueue(1)


def test_the_database_is_the_one_that_the_option_names(sqlite: Place, tmp_path: Path) -> None:
    # given jobs in a second database of Django's
    name = str(tmp_path / "second.db")
    with (
        djangos.connected("second", ENGINE="django.db.backends.sqlite3", NAME=name),
        tasks(f"sqlite:///{name}", database="second") as backend,
    ):
        # when a transaction of that database is rolled back, then so are its jobs
        with rolled_back("second"):
            shop.add.enqueue(1)
        assert ready(backend) == 0

        # and a transaction of another database does not affect them
        with rolled_back():
            shop.add.enqueue(1)
        assert ready(backend) == 1


def test_an_attached_file_is_joined(sqlite: Place, tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/attached.db") as backend:
        ready(backend)  # makes the tables
        with sqlite.connection.cursor() as cursor:
            cursor.execute("ATTACH %s AS jobs", [str(tmp_path / "attached.db")])
        with rolled_back():
            result = shop.add.enqueue(1)
            assert result.enqueued_at is not None
        assert ready(backend) == 0
        with transaction.atomic():
            shop.add.enqueue(1)
        assert ready(backend) == 1


def test_a_hundred_enqueues_elsewhere_ask_only_once_where_the_jobs_are(sqlite: Place, tmp_path: Path) -> None:
    with tasks(f"sqlite:///{tmp_path}/other.db") as backend, transaction.atomic():
        shop.add.enqueue(1)
        assert backend.app.elsewhere
        shop.add.enqueue(1)


def test_the_jobs_file_stays_whole_after_many_transactions(sqlite: Place) -> None:
    with tasks(sqlite.url) as backend:
        for number in range(50):
            with rolled_back() if number % 3 == 0 else transaction.atomic():
                Order.objects.create(number=number)
                shop.add.enqueue(number)
        numbers = sorted(order.number for order in Order.objects.all())
        assert sorted(job.value["args"][0] for job in backend.app.queue().jobs("ready")) == numbers
        assert len(numbers) == 33
    with sqlite3.connect(sqlite.connection.settings_dict["NAME"]) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()
