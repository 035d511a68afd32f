"""External transactions of SQLAlchemy, asyncio drivers and Django on the same file."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any

import djangos
import pytest
import sqlalchemy
from django.db import connections, transaction
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from multiq.backend import State
from multiq.errors import MultiqError, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from multiq.backend import NewJob
    from multiq_sqlite.backend import SqliteBackend

    Jobs = Callable[..., list[NewJob]]

ORDERS = "CREATE TABLE orders (number INTEGER)"


@pytest.fixture(autouse=True)
def orders(path: Path) -> Iterator[sqlite3.Connection]:
    """The application's own table."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(ORDERS)
    yield connection
    connection.close()


@pytest.fixture
def engine(path: Path) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


@pytest.fixture
def django(path: Path) -> Iterator[Any]:
    """Django's connection to the file."""
    with djangos.connected(ENGINE="django.db.backends.sqlite3", NAME=str(path)) as connection:
        yield connection


def bodies(backend: SqliteBackend) -> list[bytes]:
    return [job.body for job in backend.jobs("q", State.READY).jobs]


def count(orders: sqlite3.Connection) -> int:
    return int(orders.execute("SELECT COUNT(*) FROM orders").fetchone()[0])


# --- SQLAlchemy ------------------------------------------------------------------------------------------


def test_sqlalchemy_connection_without_other_statements(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs
) -> None:
    with engine.connect() as connection:
        backend.enqueue("q", jobs(1, b"no"), connection=connection)
    assert bodies(backend) == []
    with engine.connect() as connection:
        backend.enqueue("q", jobs(1, b"no"), connection=connection)
        connection.rollback()
        backend.enqueue("q", jobs(1, b"yes"), connection=connection)
        assert bodies(backend) == []
        connection.commit()
    assert bodies(backend) == [b"yes"]


def test_sqlalchemy_connection_with_the_callers_rows(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs, orders: sqlite3.Connection
) -> None:
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (7)"))
        backend.enqueue("q", jobs(3), connection=connection)
    assert (len(bodies(backend)), count(orders)) == (3, 1)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (8)"))
        backend.enqueue("q", jobs(3), connection=connection)
    assert (len(bodies(backend)), count(orders)) == (3, 1)


def test_sqlalchemy_session(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs, orders: sqlite3.Connection
) -> None:
    with Session(engine) as session:
        backend.enqueue("q", jobs(1, b"no"), connection=session)
    with Session(engine) as session, session.begin():
        session.execute(sqlalchemy.text("INSERT INTO orders VALUES (7)"))
        backend.enqueue("q", jobs(1, b"yes"), connection=session)
        assert bodies(backend) == []
    assert (bodies(backend), count(orders)) == ([b"yes"], 1)
    scoped = scoped_session(sessionmaker(engine))
    backend.enqueue("q", jobs(1, b"scoped"), connection=scoped)
    scoped.commit()
    scoped.remove()
    assert bodies(backend) == [b"yes", b"scoped"]


def test_sqlalchemy_autocommit_stores_the_job_at_once(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs
) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        backend.enqueue("q", jobs(), connection=connection)
        assert len(bodies(backend)) == 1
        connection.rollback()
    assert len(bodies(backend)) == 1


def test_sqlalchemy_with_begin_immediate_by_an_event(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs
) -> None:
    # Given what SQLAlchemy's page on SQLite recommends for transactions that are serializable
    @sqlalchemy.event.listens_for(engine, "connect")
    def leave_it_to_us(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Then the job is part of that transaction, and so are its tables, if the transaction creates them
    for end, expected in (("rollback", []), ("commit", [b"x"])):
        with engine.connect() as connection:
            backend.enqueue("q", jobs(1, b"x"), connection=connection)
            getattr(connection, end)()
        assert bodies(backend) == expected


def test_sqlalchemy_pool_connection(backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs) -> None:
    pooled = engine.raw_connection()
    backend.enqueue("q", jobs(), connection=pooled)
    pooled.rollback()
    backend.enqueue("q", jobs(), connection=pooled)
    pooled.commit()
    pooled.close()
    assert len(bodies(backend)) == 1


def test_sqlalchemy_async_connection_and_session(
    backend: SqliteBackend, path: Path, jobs: Jobs, orders: sqlite3.Connection
) -> None:
    async def run() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        async with engine.connect() as connection:
            await connection.run_sync(lambda sync: backend.enqueue("q", jobs(1, b"no"), connection=sync))
        async with engine.begin() as connection:
            await connection.execute(sqlalchemy.text("INSERT INTO orders VALUES (7)"))
            await connection.run_sync(lambda sync: backend.enqueue("q", jobs(1, b"x" * 9000), connection=sync))
            assert bodies(backend) == []
        async with AsyncSession(engine) as session:
            await session.run_sync(lambda sync: backend.enqueue("q", jobs(300), connection=sync))
            await session.rollback()
            await session.run_sync(lambda sync: backend.enqueue("q", jobs(1, b"2"), connection=sync))
            await session.commit()
        await engine.dispose()

    asyncio.run(run())
    assert (bodies(backend), count(orders)) == ([b"x" * 9000, b"2"], 1)


# --- Django ----------------------------------------------------------------------------------------------


def test_django_connection_inside_atomic(
    backend: SqliteBackend, django: Any, jobs: Jobs, orders: sqlite3.Connection
) -> None:
    backend.stats("q")

    def shop(*, fail: bool) -> None:
        with transaction.atomic(using=django.alias):
            with django.cursor() as cursor:
                cursor.execute("INSERT INTO orders VALUES (7)")
            backend.enqueue("q", jobs(2), connection=django)
            assert bodies(backend) == []
            if fail:
                raise LookupError

    with pytest.raises(LookupError):
        shop(fail=True)
    assert (bodies(backend), count(orders)) == ([], 0)
    shop(fail=False)
    assert (len(bodies(backend)), count(orders)) == (2, 1)


def test_django_connection_that_is_not_open_yet_with_autocommit(
    backend: SqliteBackend, django: Any, jobs: Jobs
) -> None:
    assert django.connection is None
    backend.enqueue("q", jobs(), connection=django)
    assert len(bodies(backend)) == 1


def test_django_nested_atomic_rolls_back_its_own_jobs(backend: SqliteBackend, django: Any, jobs: Jobs) -> None:
    with transaction.atomic(using=django.alias):
        backend.enqueue("q", jobs(1, b"outer"), connection=django)
        with transaction.atomic(using=django.alias):
            backend.enqueue("q", jobs(1, b"inner"), connection=django)
            transaction.set_rollback(True, using=django.alias)
    assert bodies(backend) == [b"outer"]


def test_django_broken_transaction_raises(backend: SqliteBackend, django: Any, jobs: Jobs) -> None:
    with transaction.atomic(using=django.alias):
        transaction.set_rollback(True, using=django.alias)
        with pytest.raises(OptionInvalid, match="end of the 'atomic' block"):
            backend.enqueue("q", jobs(), connection=django)
    assert bodies(backend) == []


def test_django_connection_proxy_is_accepted(backend: SqliteBackend, django: Any, jobs: Jobs) -> None:
    from django.utils.connection import ConnectionProxy

    backend.enqueue("q", jobs(), connection=ConnectionProxy(connections, django.alias))
    assert len(bodies(backend)) == 1


# --- refused connections ---------------------------------------------------------------------------------


def test_unsuitable_object_is_refused_with_advice(
    backend: SqliteBackend, engine: sqlalchemy.Engine, path: Path, jobs: Jobs
) -> None:
    closed = engine.connect()
    closed.close()
    unbound = Session()
    memory = sqlalchemy.create_engine("sqlite://")
    with memory.connect() as elsewhere:
        for wrong, way_out in (
            (engine, r"engine\.begin\(\)"),
            (sessionmaker(engine), "call it"),
            (closed, "closed"),
            (unbound, "bind"),
            (elsewhere, "in-memory"),
            (connections, r"django\.db\.connection"),
        ):
            with pytest.raises(OptionInvalid, match=way_out):
                backend.enqueue("q", jobs(), connection=wrong)
    memory.dispose()
    assert bodies(backend) == []


def test_asynchronous_connection_is_refused_with_advice(backend: SqliteBackend, path: Path, jobs: Jobs) -> None:
    import aiosqlite

    async def run() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        async with engine.connect() as connection, AsyncSession(engine) as session, aiosqlite.connect(path) as bare:
            await connection.exec_driver_sql("SELECT 1")
            inside = (connection.sync_connection, session.sync_session)
            for wrong in (engine, connection, session, async_sessionmaker(engine), *inside, bare):
                with pytest.raises(OptionInvalid, match="run_sync"):
                    backend.enqueue("q", jobs(), connection=wrong)
        await engine.dispose()

    asyncio.run(run())
    assert bodies(backend) == []


def test_session_of_another_thread_is_refused(backend: SqliteBackend, path: Path, jobs: Jobs) -> None:
    import threading

    outcomes: list[BaseException] = []
    app = sqlite3.connect(path)

    def enqueue() -> None:
        try:
            backend.enqueue("q", jobs(), connection=app)
        except MultiqError as exc:
            outcomes.append(exc)

    thread = threading.Thread(target=enqueue)
    thread.start()
    thread.join()
    app.close()
    (error,) = outcomes
    assert isinstance(error, OptionInvalid)
    assert "thread" in str(error)


def test_sqlalchemy_transaction_that_began_by_reading_raises_with_advice(
    backend: SqliteBackend, engine: sqlalchemy.Engine, jobs: Jobs
) -> None:
    backend.enqueue("q", jobs())
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("SELECT * FROM orders").fetchall()
        connection.exec_driver_sql("SELECT COUNT(*) FROM multiq_jobs").fetchall()
        backend.enqueue("q", jobs())
        with pytest.raises(MultiqError, match="BEGIN IMMEDIATE"):
            backend.enqueue("q", jobs(), connection=connection)
