"""multiq in applications with SQLAlchemy: jobs exist only if a session's transaction commits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest
import sqlalchemy as sa
from servers.beanstalk import BeanstalkServer
from servers.mysql import MysqlDatabases, any_server
from servers.process import until
from servers.redis import RedisServer
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool
from stores import PAIRED, STORES

import multiq
from multiq import errors, testing
from multiq.conformance.forks import ended_well, fork
from multiq.contrib.sqlalchemy import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(sa.String(20))


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = mapped_column(primary_key=True)


class Shop:
    """An app with a task, a database with an outbox, and a record of what the jobs have done."""

    def __init__(self, url: str, database: str, **options: Any) -> None:
        self.app = multiq.App(url)
        self.engine = sa.create_engine(database)
        Base.metadata.create_all(self.engine)
        self.outbox = Outbox(self.app, self.engine, **options)
        self.outbox.create()
        self.done: list[int] = []

        @self.app.task(queue="mail", max_attempts=1)
        def send(order: int) -> None:
            self.done.append(order)

        self.send = send

    def session(self, **options: Any) -> Session:
        return Session(self.engine, **options)

    def settle(self) -> None:
        """Wait until all committed jobs are enqueued."""
        until(lambda: not self.outbox.waiting(), "the outbox is empty")
        self.outbox.relay()

    def work(self) -> list[int]:
        """Run all enqueued jobs, and return the record of what they have done."""
        self.done.clear()
        multiq.Worker(self.app, stop_when_empty=True).run()
        return sorted(self.done)

    def rows(self, table: str = "multiq_outbox") -> int:
        with self.engine.connect() as connection:
            return int(connection.scalar(sa.select(sa.func.count()).select_from(sa.table(table))) or 0)

    def close(self) -> None:
        until(lambda: "multiq-outbox" not in [thread.name for thread in threading.enumerate()], "the relay ends")
        self.app.close()
        self.engine.dispose()


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def mysql() -> Iterator[MysqlDatabases]:
    with any_server() as server:
        yield server


@pytest.fixture
def store(redis: RedisServer) -> Iterator[str]:
    """An empty Redis."""
    yield redis.url
    redis.ask("FLUSHALL")


@pytest.fixture(params=["sqlite", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An application's database, as SQLAlchemy's URL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/shop.db"
        return
    server: MysqlDatabases = request.getfixturevalue("mysql")
    with server.database() as place:
        yield place.url.replace("mysql:", "mysql+pymysql:")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def make() -> Iterator[Callable[..., Shop]]:
    with contextlib.ExitStack() as stack:

        def made(*args: Any, **options: Any) -> Shop:
            shop = Shop(*args, **options)
            stack.callback(shop.close)
            return shop

        yield made


# --- transactions ---


def test_a_job_keeps_its_key_in_the_outbox(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    unique = multiq.Unique(by=["order"])
    # When two transactions enqueue a job with the same key
    with shop.session() as session, session.begin():
        first = shop.send.options(connection=session, unique=unique).enqueue(1)
    shop.settle()
    with shop.session() as session, session.begin():
        second = shop.send.options(connection=session, unique=unique).enqueue(1)
    shop.settle()
    # Then the relay adds one job, and an enqueue finds its key
    assert (first.state(), second.state()) == ("ready", "gone")
    assert shop.send.options(unique=unique).enqueue(1) == first
    assert shop.work() == [1]


def test_the_outbox_raises_nothing_for_a_key_that_is_taken(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file, after_commit=False)
    unique = multiq.Unique(on_conflict="error")
    with shop.session() as session, session.begin():
        handles = [shop.send.options(connection=session, unique=unique).enqueue(1) for _ in range(2)]
    assert [handle.was_new for handle in handles] == [True, True]
    shop.outbox.relay()
    assert [handle.state() for handle in handles] == ["ready", "gone"]
    assert shop.outbox.waiting() == []


def test_a_job_exists_if_the_transaction_commits(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    with shop.session() as session, session.begin():
        session.add(Order(id=1, item="teapot"))
        handle = shop.send.options(connection=session).enqueue(1)
        many = shop.send.options(connection=session).enqueue_many([(2,), (3,)])
        assert [each.state() for each in (handle, *many)] == ["gone"] * 3
    shop.settle()
    assert [each.state() for each in (handle, *many)] == ["ready"] * 3
    assert shop.work() == [1, 2, 3]
    assert shop.rows("orders") == 1


def test_a_rollback_takes_the_job_with_it(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    with contextlib.suppress(LookupError), shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
        raise LookupError
    with shop.session() as session:  # closed without a commit
        shop.send.options(connection=session).enqueue(2)
    shop.outbox.relay()
    assert (shop.rows(), shop.work()) == (0, [])


def test_a_savepoint_takes_only_its_own_jobs_with_it(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    if database.startswith("sqlite"):
        _begin_properly(shop.engine)
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
        with contextlib.suppress(LookupError), session.begin_nested():
            shop.send.options(connection=session).enqueue(2)
            raise LookupError
        with session.begin_nested():
            shop.send.options(connection=session).enqueue(3)
        assert shop.outbox.relay() == 0  # nothing is committed yet
    shop.settle()
    assert shop.work() == [1, 3]


def test_a_session_is_used_again(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    with shop.session() as session:
        for number in range(4):
            shop.send.options(connection=session).enqueue(number)
            session.rollback() if number == 2 else session.commit()
    scoped = scoped_session(sessionmaker(shop.engine))
    shop.send.options(connection=scoped).enqueue(4)
    scoped.commit()
    scoped.remove()
    with shop.engine.begin() as connection:
        shop.send.options(connection=connection).enqueue(5)
    shop.settle()
    assert shop.work() == [0, 1, 3, 4, 5]


def test_a_failed_flush_leaves_no_job(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    with shop.session() as session:
        session.add(Order(id=1, item="teapot"))
        session.commit()
        session.expunge_all()
        session.add(Order(id=1, item="again"))
        shop.send.options(connection=session).enqueue(1)
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()

        # and a session whose transaction has failed accepts no enqueue
        session.rollback()
        session.add(Order(id=1, item="again"))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(errors.OptionInvalid, match="rolled back"):
            shop.send.options(connection=session).enqueue(2)
        session.rollback()
    shop.outbox.relay()
    assert shop.work() == []


def test_an_autocommitting_connection_stores_at_once(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    with shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        shop.send.options(connection=connection).enqueue(1)
        assert shop.rows() == 1
    shop.settle()
    assert shop.work() == [1]


def test_jobs_of_a_queue_without_tasks(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    queue = shop.app.queue("raw")
    with shop.session() as session, session.begin():
        queue.enqueue(b"\x00\xffbytes", connection=session, priority=7, ttr=30, id="mine")
        queue.enqueue_many([{"a": "\x00ß"}, [2]], connection=session)
    shop.settle()
    jobs = queue.reserve_many(10)
    assert [(job.body, job.priority) for job in jobs] == [(b"\x00\xffbytes", 7), ({"a": "\x00ß"}, 1024), ([2], 1024)]
    assert jobs[0].id == "mine"
    for job in jobs:
        job.ack()


def test_a_delay_counts_from_the_enqueue(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file, after_commit=False)
    with shop.session() as session, session.begin():
        late = shop.send.options(connection=session, delay=3600).enqueue(1)
        soon = shop.send.options(connection=session, delay=0.2).enqueue(2)
    time.sleep(0.3)
    assert shop.outbox.relay() == 2
    assert (late.state(), soon.state()) == ("delayed", "ready")
    assert 3000 < (late.peek().due_in or 0) < 3599.8


@pytest.mark.one_row
def test_a_large_batch_is_stored_whole(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    with shop.session() as session, session.begin():
        shop.app.queue("many").enqueue_many([b"x" * 3000 for _ in range(1200)], connection=session)
    shop.settle()
    assert shop.app.queue("many").stats().ready == 1200


# --- asyncio ---


@pytest.mark.parametrize("scoped", [False, True])
def test_an_async_session(make: Callable[..., Shop], store: str, database: str, scoped: bool) -> None:
    shop = make(store, database)
    url = database.replace("pymysql", "aiomysql").replace("sqlite:", "sqlite+aiosqlite:")

    async def run() -> None:
        engine = create_async_engine(url)
        maker = async_sessionmaker(engine)
        session: Any = async_scoped_session(maker, asyncio.current_task) if scoped else maker()
        async with session.begin():
            session.add(Order(id=1, item="teapot"))
            await shop.send.options(connection=session).aenqueue(1)
            await shop.send.options(connection=session).aenqueue_many([(2,), (3,)])
            await shop.app.queue("mail").aenqueue(
                {"multiq": 1, "task": shop.send.name, "args": [4]}, connection=session
            )
            with pytest.raises(errors.OptionInvalid, match="aenqueue"):
                shop.send.options(connection=session).enqueue(9)
        with contextlib.suppress(LookupError):
            async with session.begin():
                await shop.send.options(connection=session).aenqueue(5)
                raise LookupError
        await session.close()
        async with engine.begin() as connection:
            await shop.send.options(connection=connection).aenqueue(6)
        await engine.dispose()

    asyncio.run(run())
    shop.settle()
    assert shop.work() == [1, 2, 3, 4, 6]


def test_an_outbox_on_an_async_engine(store: str, tmp_path: Path) -> None:
    # given an outbox whose engine is of asyncio
    app, done = multiq.App(store), []
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/shop.db")
    outbox = Outbox(app, engine)

    @app.task
    def send(order: int) -> None:
        done.append(order)

    async def run() -> None:
        await outbox.acreate()
        async with AsyncSession(engine) as session, session.begin():
            await send.options(connection=session).aenqueue(1)
        with pytest.raises(multiq.MultiqError, match=r"await outbox\.arelay"):
            outbox.relay()
        await outbox.arelay()
        assert await outbox.awaiting() == []
        await engine.dispose()

    # when it is used on a loop, and afterwards by a worker, which has no loop
    asyncio.run(run())
    multiq.Worker(app, stop_when_empty=True).run()

    # then
    assert done == [1]
    assert (outbox.relay(), outbox.waiting()) == (0, [])
    app.close()


def test_a_database_in_memory(store: str) -> None:
    shop = Shop(store, "sqlite://")
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
    assert shop.outbox.relay() == 1
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(2)
    assert shop.work() == [1, 2]  # a worker in this thread relays at its start
    shop.close()


def test_a_database_in_memory_with_asyncio(store: str) -> None:
    app = multiq.App(store)

    async def run() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        outbox = Outbox(app, engine)
        await outbox.acreate()
        async with AsyncSession(engine) as session, session.begin():
            await app.queue("mail").aenqueue(1, connection=session)
        assert await outbox.arelay() == 1
        await engine.dispose()

    asyncio.run(run())
    assert app.queue("mail").stats().ready == 1
    app.close()


# --- joining ---


def test_a_backend_joins_a_transaction_on_its_own_database(
    make: Callable[..., Shop], database: str, tmp_path: Path
) -> None:
    shop = make(database.replace("+pymysql", ""), database)
    with shop.session() as session, session.begin():
        handle = shop.send.options(connection=session).enqueue(1)
        assert session.connection().scalar(sa.text("SELECT count(*) FROM multiq_outbox")) == 0
    assert handle.state() == "ready"
    with shop.session() as session:
        gone = shop.send.options(connection=session).enqueue(2)
    assert gone.state() == "gone"

    async def run() -> None:
        engine = create_async_engine(
            database.replace("pymysql", "aiomysql").replace("sqlite:", "sqlite+aiosqlite:"), poolclass=NullPool
        )
        async with AsyncSession(engine) as session, session.begin():
            await shop.send.options(connection=session).aenqueue(3)
            count = await session.scalar(sa.text("SELECT count(*) FROM multiq_outbox"))
            assert count == 0
        await engine.dispose()

    asyncio.run(run())
    assert shop.work() == [1, 3]


def test_a_backend_elsewhere_does_not_join(
    make: Callable[..., Shop], database: str, tmp_path: Path, mysql: MysqlDatabases
) -> None:
    # given jobs in another database than the session's
    with mysql.database() as place:
        url = place.url if database.startswith("sqlite") else f"sqlite:///{tmp_path}/jobs.db"
        shop = make(url, database, after_commit=False)
        for number in (1, 2):
            # when
            with shop.session() as session, session.begin():
                shop.send.options(connection=session).enqueue(number)

            # then the outbox stores them
            assert shop.rows() == number
        assert shop.work() == [1, 2]


def test_a_connection_of_another_library_needs_a_backend_that_joins(
    make: Callable[..., Shop], store: str, file: str
) -> None:
    shop = make(store, file)
    raw = shop.engine.raw_connection()
    with pytest.raises(errors.Unsupported, match="transactional"):
        shop.send.options(connection=raw).enqueue(1)
    raw.close()


def test_two_phases_are_refused(make: Callable[..., Shop], store: str, mysql: MysqlDatabases) -> None:
    with mysql.database() as place:
        for url in (store, place.url):
            shop = make(url, place.url.replace("mysql:", "mysql+pymysql:"))
            with (
                shop.session(twophase=True) as session,
                pytest.raises(errors.OptionInvalid, match="one phase, got one of two"),
            ):
                shop.send.options(connection=session).enqueue(1)
            with shop.engine.connect() as connection, connection.begin_twophase() as transaction:
                with pytest.raises(errors.OptionInvalid, match="one phase, got one of two"):
                    shop.send.options(connection=connection).enqueue(1)
                transaction.rollback()
            assert shop.work() == []


# --- several engines ---


def test_the_session_of_several_engines(make: Callable[..., Shop], store: str, tmp_path: Path) -> None:
    # given a session whose tables are in two databases
    shop = make(store, f"sqlite:///{tmp_path}/shop.db")
    users = sa.create_engine(f"sqlite:///{tmp_path}/users.db")
    Base.metadata.create_all(users)
    binds: dict[Any, Any] = {Order: shop.engine, User: users}

    # when the session has no engine for the outbox, then the error names this cause
    with Session(binds=binds) as session, pytest.raises(errors.OptionInvalid, match=r"add outbox\.table to its binds"):
        shop.send.options(connection=session).enqueue(1)

    # when it has one
    with Session(binds={**binds, shop.outbox.table: shop.engine}) as session, session.begin():
        session.add(User(id=1))
        shop.send.options(connection=session).enqueue(1)
    shop.settle()
    assert shop.work() == [1]

    # when the session's database is not the outbox's database
    with Session(users) as session, pytest.raises(errors.ConnectionElsewhere, match=r"users\.db, and the outbox"):
        shop.send.options(connection=session).enqueue(2)

    # when each database has an outbox
    second = Outbox(shop.app, users)
    second.create()
    for engine in (users, shop.engine):
        with Session(engine) as session, session.begin():
            shop.send.options(connection=session).enqueue(3)
    until(lambda: not second.waiting() and not shop.outbox.waiting(), "both are empty")
    second.relay()
    assert shop.work() == [3, 3]
    users.dispose()


def test_engines_with_options_of_their_own_add_no_listeners(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    engines = [shop.engine.execution_options(tenant=number) for number in range(5)]
    for number, engine in enumerate(engines):
        with Session(engine) as session, session.begin():
            shop.send.options(connection=session).enqueue(number)
    shop.engine.dispose()
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(5)
    assert len(shop.engine.pool.dispatch.checkin) == 1
    shop.settle()
    assert shop.work() == [0, 1, 2, 3, 4, 5]


def test_another_engine_of_the_same_database(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    other = sa.create_engine(database, poolclass=NullPool)
    with Session(other) as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
    with other.execution_options(foo=1).begin() as connection:
        shop.send.options(connection=connection).enqueue(2)
    shop.settle()
    assert shop.work() == [1, 2]


def test_a_session_on_a_connection_waits_for_the_transaction_around_it(
    make: Callable[..., Shop], store: str, database: str
) -> None:
    shop = make(store, database)
    if database.startswith("sqlite"):
        _begin_properly(shop.engine)
    for ends in ("commit", "rollback"):
        with shop.engine.connect() as connection, connection.begin() as transaction:
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                shop.send.options(connection=session).enqueue(1)
                session.commit()
            getattr(transaction, ends)()
    shop.settle()
    assert shop.work() == [1]


def test_a_pool_of_one_connection(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    shop.engine.dispose()
    shop.engine = sa.create_engine(file, pool_size=1, max_overflow=0, pool_timeout=5)
    second = Outbox(shop.app, shop.engine, table="second")
    second.create()
    for number in range(20):
        with shop.session() as session, session.begin():
            shop.send.options(connection=session).enqueue(number)
    until(lambda: not second.waiting() and not shop.outbox.waiting(), "the outboxes are empty")
    shop.settle()
    assert shop.work() == list(range(20))


def _begin_properly(engine: sa.Engine) -> None:
    """SQLAlchemy's recipe for savepoints with sqlite3."""

    @event.listens_for(engine, "connect")
    def no_begin(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    engine.dispose()


def test_listeners_of_the_orm_enqueue_on_their_connection(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    maker = sessionmaker(shop.engine)

    def after_insert(_mapper: Any, connection: sa.Connection, order: Order) -> None:
        shop.send.options(connection=connection).enqueue(order.id)

    event.listen(Order, "after_insert", after_insert)
    event.listen(maker, "before_commit", lambda session: shop.send.options(connection=session).enqueue(100))
    try:
        with maker.begin() as session:
            session.add_all([Order(item="teapot"), Order(item="cup")])
    finally:
        event.remove(Order, "after_insert", after_insert)
    shop.settle()
    assert shop.work() == [1, 2, 100]


def test_a_schema_translate_map_does_not_move_the_rows(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    with shop.engine.execution_options(schema_translate_map={None: "tenant"}).begin() as connection:
        shop.send.options(connection=connection).enqueue(1)
        shop.send.options(connection=connection).enqueue_many([(2,), (3,)])
    shop.settle()
    assert shop.work() == [1, 2, 3]


# --- the table ---


@pytest.mark.one_row
@pytest.mark.parametrize(
    "name", ["50%", "%s", ":x", "a`b\"c'd", "a.b c", "order", "größe", "a;b--", "x" * 60], ids=ascii
)
def test_the_table_may_have_any_name(store: str, database: str, name: str) -> None:
    # given an outbox whose table's name needs quotes, or is as long as MySQL allows
    with multiq.App(store) as app:
        engine = sa.create_engine(database)
        outbox = Outbox(app, engine, table=name, after_commit=False)
        outbox.create()

        @app.task
        def send(order: int) -> None: ...

        # when jobs are stored with a transaction
        with Session(engine) as session:
            send.options(connection=session).enqueue(1)
            send.options(connection=session).enqueue_many([(2,), (3,)])
            session.commit()

        # then they are listed, and relayed once
        assert len(outbox.waiting()) == 3
        assert outbox.relay() == 3
        assert outbox.waiting() == []
        assert outbox.relay() == 0
        assert app.queue().stats().ready == 3
        engine.dispose()


def test_the_table_may_be_in_another_schema(store: str, mysql: MysqlDatabases) -> None:
    # given two databases of a server, of which the second one has the outbox
    with multiq.App(store) as app, mysql.database() as place, mysql.database() as other:
        engine = sa.create_engine(place.url.replace("mysql:", "mysql+pymysql:"))
        schema = other.url.rpartition("/")[2]
        outbox = Outbox(app, engine, schema=schema, table="50%", after_commit=False)
        outbox.create()

        @app.task
        def send(order: int) -> None: ...

        with Session(engine) as session:
            send.options(connection=session).enqueue_many([(1,), (2,)])
            session.commit()
        assert outbox.relay() == 2
        assert outbox.waiting() == []
        engine.dispose()


def test_two_apps_with_one_table_are_refused(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file)
    with pytest.raises(errors.OptionInvalid, match="no other app uses"):
        Outbox(multiq.App("memory://"), shop.engine)
    Outbox(multiq.App("memory://"), shop.engine, table="other_outbox")


def test_a_missing_table_is_named(store: str, database: str) -> None:
    engine = sa.create_engine(database)
    app = multiq.App(store)
    outbox = Outbox(app, engine, table="jobs_to_come")
    with Session(engine) as session, pytest.raises(errors.SchemaNotReady, match=r"jobs_to_come.*outbox\.create"):
        app.queue("mail").enqueue(1, connection=session)
    with pytest.raises(errors.SchemaNotReady, match="jobs_to_come"):
        outbox.relay()
    outbox.create()
    outbox.create()
    assert outbox.relay() == 0
    engine.dispose()
    app.close()


def test_the_table_is_made_with_an_application_s_own(store: str, file: str) -> None:
    metadata = sa.MetaData()
    engine = sa.create_engine(file)
    app = multiq.App(store)
    first, second = (Outbox(app, lambda: engine, metadata=metadata) for _ in range(2))
    assert first.table is second.table is metadata.tables["multiq_outbox"]
    metadata.create_all(engine)
    assert first.waiting() == []
    sa.Table("orders", metadata)
    with pytest.raises(errors.OptionInvalid, match="no other table"):
        Outbox(app, engine, metadata=metadata, table="orders")
    engine.dispose()


@pytest.mark.parametrize("engine", ["sqlite://", None, sa.Engine])
def test_an_engine_is_checked(engine: Any) -> None:
    with pytest.raises(errors.ArgumentsInvalid, match="Engine or AsyncEngine"):
        Outbox(multiq.App("memory://"), engine)
    with pytest.raises(errors.ArgumentsInvalid, match="Engine or AsyncEngine"):
        _ = Outbox(multiq.App("memory://"), lambda: engine).engine
    with pytest.raises(errors.OptionInvalid, match="claim_for"):
        Outbox(multiq.App("memory://"), lambda: engine, claim_for=0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("app", None, r"app must be a multiq\.App, got None"),
        ("metadata", {}, r"metadata must be a MetaData of SQLAlchemy, got \{\}"),
        ("table", None, "table must be a text, the name of a table, got None"),
        ("table", "", "table must be a text, the name of a table, got ''"),
        ("table", ["jobs"], r"table must be a text, the name of a table, got \['jobs'\]"),
        ("table", "x%(job)s", r"table must be a name without '%\(\.\.\.\)s' .*, got 'x%\(job\)s'"),
        ("table", "__[POSTCOMPILE_due]", "table must be a name without"),
        ("schema", "%(job)s", "schema must be a name without"),
        ("schema", 5, "schema must be a text, the name of a schema, or None, got 5"),
    ],
)
def test_what_an_outbox_is_made_of_is_checked(name: str, value: Any, told: str) -> None:
    with multiq.App("memory://") as app:
        options: dict[str, Any] = {"app": app, "engine": sa.create_engine("sqlite://"), name: value}
        with pytest.raises((errors.ArgumentsInvalid, errors.OptionInvalid), match=told):
            Outbox(**options)


def test_the_number_of_waiting_jobs_to_list_is_checked(make: Callable[..., Shop], file: str) -> None:
    with pytest.raises(errors.OptionInvalid, match="limit must be a whole number"):
        make("memory://", file).outbox.waiting("all")  # type: ignore[arg-type]


# --- relaying ---


def test_a_commit_does_not_wait_for_a_backend_that_is_down(make: Callable[..., Shop], file: str) -> None:
    # given a server that has died
    with RedisServer() as server:
        shop = make(server.url, file)
        shop.app.queue("mail").stats()
        server.kill()

        # when
        with shop.session() as session, session.begin():
            handle = shop.send.options(connection=session).enqueue(1)
        until(lambda: shop.outbox.waiting()[0].error, "a relay has failed")

        # then the job is in the queue once the server is back
        (job,) = shop.outbox.waiting()
        assert (job.queue, job.id, job.attempts) == ("mail", handle.id, 1)
        server.start()
        until(lambda: shop.outbox.relay() == 1, "the job is relayed")
        assert shop.work() == [1]


@pytest.mark.parametrize("scope", ["queue", "app"])
def test_a_job_with_a_new_limit_goes_to_the_outbox_while_the_backend_is_down(
    make: Callable[..., Shop], file: str, scope: Literal["queue", "app"]
) -> None:
    with RedisServer() as server:
        shop = make(server.url, file, after_commit=False)

        @shop.app.task(queue="mail", limits=multiq.Limit("api", slots=1, scope=scope))
        def call(order: int) -> None: ...

        # given a server that has died before this process has stored the limit
        shop.app.queue("mail").stats()
        server.kill()
        # when transactions enqueue jobs, and one is not part of a transaction
        for order in (1, 2):
            with shop.session() as session, session.begin():
                call.options(connection=session).enqueue(order)
        with pytest.raises(errors.BackendUnavailable):
            call.enqueue(3)
        # and when a job has a limit that no worker knows
        with shop.session() as session, session.begin(), pytest.raises(errors.BackendUnavailable):
            shop.send.options(limits=multiq.Limit("own", slots=1), connection=session).enqueue(4)
        # then the jobs of the app's code wait in the outbox, and a later enqueue stores their limit
        assert len(shop.outbox.waiting()) == 2
        server.start()
        until(lambda: shop.outbox.relay() == 2, "the jobs are relayed")
        call.enqueue(3)
        (states,) = shop.app.limits.list().values()
        assert [state.name for state in states] == ["api"]


def test_a_refused_job_does_not_keep_others_waiting(make: Callable[..., Shop], file: str) -> None:
    with BeanstalkServer(max_job_size=1000) as server:
        shop = make(server.url, file, after_commit=False)
        queue = shop.app.queue("raw")
        with shop.session() as session, session.begin():
            for size in (10, 5000, 20):
                queue.enqueue(b"x" * size, connection=session)
        with pytest.raises(errors.PayloadTooLarge):
            shop.outbox.relay()
        assert queue.stats().ready == 2
        (left,) = shop.outbox.waiting()
        assert "1,000" in left.error
        assert left.retry_in > 60
        assert shop.outbox.relay() == 0


@pytest.mark.parametrize("limit", [None, 200_000])
def test_a_job_that_the_backend_would_refuse_is_refused_at_the_enqueue(
    make: Callable[..., Shop], file: str, limit: int | None
) -> None:
    with BeanstalkServer(max_job_size=limit) as server:
        shop = make(server.url, file, after_commit=False)
        queue = shop.app.queue("raw")
        with shop.session() as session, session.begin():
            if limit is None:
                with pytest.raises(errors.PayloadTooLarge, match="65,535"):
                    queue.enqueue(b"x" * 100_000, connection=session)
            else:
                queue.enqueue(b"x" * 100_000, connection=session)
        assert shop.outbox.relay() == (0 if limit is None else 1)


@pytest.mark.few_rows
@pytest.mark.parametrize("kind", ["redis", "beanstalk", "sqlite"])
@pytest.mark.long
def test_relays_at_the_same_time_enqueue_each_job_once(
    make: Callable[..., Shop], database: str, kind: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(STORES[kind](tmp_path))
        shop = make(url, database, after_commit=False)
        queue = shop.app.queue("raw")
        for at in range(4):
            with shop.session() as session, session.begin():
                queue.enqueue_many([at * 200 + number for number in range(200)], connection=session)
        boxes = [Outbox(shop.app, shop.engine, after_commit=False) for _ in range(4)]
        threads = [threading.Thread(target=box.relay_or_log) for box in boxes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        shop.outbox.relay()
        jobs = queue.reserve_many(1000)
        assert sorted(job.body for job in jobs) == list(range(800))
        for job in jobs:
            job.ack()
        assert shop.rows() == 0


@pytest.mark.one_row
@pytest.mark.parametrize("count", [1, 90, 250])
def test_relays_and_transactions_on_mysql_do_not_wait_for_each_other(
    make: Callable[..., Shop], store: str, mysql: MysqlDatabases, count: int
) -> None:
    with mysql.database() as place:
        shop = make(store, place.url.replace("mysql:", "mysql+pymysql:"), after_commit=False)
        queue = shop.app.queue("raw")
        shop.engine.dispose()

        @event.listens_for(shop.engine, "connect")
        def be_impatient(connection: Any, _record: Any) -> None:
            connection.cursor().execute("SET innodb_lock_wait_timeout = 1")

        @event.listens_for(shop.engine, "after_cursor_execute")
        def enqueue_meanwhile(*given: Any) -> None:
            # then, while the relay has its locks, another transaction enqueues and commits
            if str(given[2]).startswith(("UPDATE", "DELETE")) and len(others) < 5:
                with shop.session() as other, other.begin():
                    others.append(queue.enqueue(b"other", connection=other).id)

        others: list[str] = []
        # given committed jobs, and a job that is not committed
        with shop.session() as session, session.begin():
            queue.enqueue_many([b"job"] * count, connection=session)
        with shop.session() as slow, slow.begin():
            queue.enqueue(b"slow", connection=slow)
            # when a relay enqueues the committed jobs
            assert shop.outbox.relay() == count + len(others)
        assert len(others) >= 2
        assert shop.outbox.relay() == 1


def test_no_note_stays_behind(make: Callable[..., Shop], store: str, file: str) -> None:
    shop = make(store, file, after_commit=False)
    for number in range(3):
        with shop.session() as session, session.begin():
            shop.send.options(connection=session).enqueue(number)
        shop.outbox.relay()
    assert shop.app.backend.notes("mail", "multiq.outbox").notes == []


def test_a_test_with_a_fake_connection(make: Callable[..., Shop], file: str) -> None:
    shop = make("redis://127.0.0.1:1", file, after_commit=False)
    with testing.fake(shop.app) as enqueued:
        with shop.session() as session, session.begin():
            shop.send.options(connection=session).enqueue(7)
        enqueued.assert_nothing_else_enqueued()
        shop.outbox.relay()
        enqueued.assert_enqueued(shop.send, (7,))
        enqueued.run()
    assert shop.done == [7]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_uses_connections_of_its_own(make: Callable[..., Shop], store: str, database: str) -> None:
    shop = make(store, database)
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
    shop.settle()
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            with shop.session() as session, session.begin():
                shop.send.options(connection=session).enqueue(2)
            shop.settle()
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(3)
    shop.settle()
    assert shop.work() == [1, 2, 3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_waits_for_the_statement_of_a_relay_on_sqlite(make: Callable[..., Shop], store: str, file: str) -> None:
    # Given a relay on another thread that is in the middle of a statement of SQLite
    shop = make(store, file, after_commit=False)
    began, is_inside = threading.Event(), False

    def linger(*_: Any) -> None:
        nonlocal is_inside
        is_inside = True
        began.set()
        time.sleep(0.3)  # a fork that does not wait happens in this time
        is_inside = False

    event.listen(shop.engine, "before_cursor_execute", linger)
    relay = threading.Thread(target=shop.outbox.relay)
    relay.start()
    assert began.wait(30)
    # When this thread forks, then the child begins between two statements, and can use SQLite
    child = fork(lambda: shop.outbox.waiting() if not is_inside else os._exit(3))
    event.remove(shop.engine, "before_cursor_execute", linger)
    assert ended_well(child)
    relay.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_does_not_wait_for_a_relay_that_waits_for_its_backend(
    make: Callable[..., Shop], store: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a relay on another thread, in a call of a backend that does not answer
    shop = make(store, file, after_commit=False)
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
    called, answered = threading.Event(), threading.Event()
    carry_out = shop.app.backend.carry_out

    def wait(*args: Any, **options: Any) -> bool:
        called.set()
        answered.wait(60)
        return carry_out(*args, **options)

    monkeypatch.setattr(shop.app.backend, "carry_out", wait)
    relay = threading.Thread(target=shop.outbox.relay)
    relay.start()
    assert called.wait(30)
    # When this thread forks, then it does so before the backend answers, and the child can use SQLite
    assert ended_well(fork(shop.outbox.waiting))
    assert relay.is_alive()
    answered.set()
    relay.join()
    assert shop.work() == [1]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_no_child_hangs_beside_a_busy_relay_on_sqlite(make: Callable[..., Shop], store: str, tmp_path: Path) -> None:
    # Given a thread that relays again and again, with a new connection each time
    shop = make(store, f"sqlite:///{tmp_path}/shop.db", after_commit=False)
    busy = Outbox(shop.app, sa.create_engine(shop.engine.url, poolclass=NullPool), after_commit=False)
    ended = threading.Event()

    def relay() -> None:
        while not ended.is_set():
            busy.relay()

    relaying = threading.Thread(target=relay)
    relaying.start()
    # When the process forks, then each child can open a database
    try:
        for _ in range(100):
            assert ended_well(fork(lambda: sqlite3.connect(tmp_path / "other.db").close()))
    finally:
        ended.set()
        relaying.join()


# --- losses ---

_MODULE = """
import os, signal, sys
import multiq, sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session
from multiq.contrib.sqlalchemy import Outbox

app = multiq.App(os.environ["STORE"])
engine = sa.create_engine(os.environ["DATABASE"])
outbox = Outbox(app, engine, claim_for=2, after_commit="after_commit" in sys.argv)

@app.task(queue="mail")
def send(order):
    with open("told", "a") as file:
        file.write(f"{order}\\n")

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def commit():
    with Session(engine) as session, session.begin():
        send.options(connection=session).enqueue_many([(1,), (2,)])

if __name__ == "__main__":
    outbox.create()
    if "after_commit" in sys.argv:  # a program that ends at once
        commit()
        sys.exit()
    commit()
    if "claimed" in sys.argv:  # dies before it has sent anything
        app.backend.carry_out = app.backend.enqueue = die
    if "sent" in sys.argv:  # dies before it has deleted the rows
        @event.listens_for(engine, "before_cursor_execute")
        def on(connection, cursor, statement, *_):
            if statement.startswith("DELETE"):
                die()
    if sys.argv[1:] != ["committed"]:
        outbox.relay()
    die()
"""


class Losses:
    """A program that commits and dies, and workers in processes of their own."""

    def __init__(self, folder: Path, url: str, database: str) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(_MODULE)
        self.environment = {**os.environ, "STORE": url, "DATABASE": database}

    def run(self, *when: str) -> int:
        done = subprocess.run(
            [sys.executable, "shop.py", *when], cwd=self.folder, env=self.environment, check=False, timeout=60
        )
        return done.returncode

    def multiq(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "multiq", *arguments],
            cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @property
    def told(self) -> list[str]:
        path = self.folder / "told"
        return sorted(path.read_text().split()) if path.exists() else []

    @contextlib.contextmanager
    def worker(self, *options: str) -> Iterator[None]:
        worker = self.multiq("worker", "shop:app", *options)
        try:
            yield
            worker.send_signal(signal.SIGTERM)
            out, _ = worker.communicate(timeout=60)
            assert worker.returncode == 0, out
            assert "Traceback" not in out
        finally:
            worker.kill()
            worker.wait()


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("-p", "1")], ids=["alone", "supervised"])
def test_a_worker_relays_for_a_program_that_died_after_its_commit(
    store: str, database: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    losses = Losses(tmp_path, store, database)
    assert losses.run("committed") == -signal.SIGKILL
    with losses.worker(*options):
        until(lambda: losses.told == ["1", "2"], "the jobs ran")


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "kind"),
    [
        ("sent", "redis"),
        *(
            pytest.param(when, kind, marks=pytest.mark.long)
            for when, kind in itertools.product(["claimed", "sent"], ["redis", "sqlite", "mysql", PAIRED])
            if (when, kind) != ("sent", "redis")
        ),
    ],
)
def test_jobs_run_once_although_a_relay_died(file: str, tmp_path: Path, when: str, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        # given a relay process that dies before or after it has enqueued the jobs
        url = stack.enter_context(STORES[kind](tmp_path))
        losses = Losses(tmp_path, url, file)
        assert losses.run(when) == -signal.SIGKILL

        # when a worker runs, and relays when the claim has ended
        engine = sa.create_engine(file)
        stack.callback(engine.dispose)

        def rows() -> int:
            with engine.connect() as connection:
                return int(connection.scalar(sa.text("SELECT count(*) FROM multiq_outbox")) or 0)

        assert rows() == 2
        with losses.worker():
            until(lambda: losses.told and not rows(), "the jobs ran, and the outbox is empty")
            until(lambda: len(losses.told) >= 2, "both ran")

        # then no job has run a second time, although the queue had forgotten the job
        assert losses.told == ["1", "2"]
        with multiq.App(url) as app:
            assert app.queue("mail").stats().ready == 0


@pytest.mark.long
def test_on_beanstalkd_a_relay_that_died_may_enqueue_twice(file: str, tmp_path: Path) -> None:
    with BeanstalkServer() as server:
        losses = Losses(tmp_path, server.url, file)
        assert losses.run("sent") == -signal.SIGKILL
        with losses.worker():
            until(lambda: losses.told == ["1", "1", "2", "2"], "the jobs ran twice")


@pytest.mark.long
def test_a_program_that_ends_at_once_relays_before(store: str, file: str, tmp_path: Path) -> None:
    losses = Losses(tmp_path, store, file)
    assert losses.run("after_commit") == 0
    with multiq.App(store) as app:
        assert app.queue("mail").stats().ready == 2


def test_a_stopped_relay_does_not_enqueue_rows_that_another_relay_has_taken(
    make: Callable[..., Shop], store: str, file: str
) -> None:
    # given a relay that has claimed a row, and stops for longer than its claim
    shop = make(store, file, after_commit=False, claim_for=0.3)
    with shop.session() as session, session.begin():
        shop.send.options(connection=session).enqueue(1)
    other = multiq.App(store)
    slow = Outbox(other, shop.engine, after_commit=False, claim_for=0.3)
    claimed, go_on = threading.Event(), threading.Event()
    carry_out = other.backend.carry_out

    def late(*args: Any, **options: Any) -> bool:
        claimed.set()
        go_on.wait(60)
        return carry_out(*args, **options)

    other.backend.carry_out = late  # type: ignore[method-assign]
    thread = threading.Thread(target=slow.relay_or_log)
    thread.start()
    claimed.wait(60)

    # when another relay takes the row over, the job runs, and the first relay continues
    until(lambda: shop.outbox.relay() == 1, "the row is taken over")
    assert shop.work() == [1]
    go_on.set()
    thread.join()

    # then
    assert shop.work() == []
    assert shop.rows() == 0
    other.close()


# --- the command line ---


@pytest.mark.long
def test_the_command_line_lists_and_relays(store: str, file: str, tmp_path: Path) -> None:
    losses = Losses(tmp_path, store, file)
    assert losses.run("committed") == -signal.SIGKILL
    out, _ = (listing := losses.multiq("outbox", "list", "shop:app", "--json")).communicate(timeout=60)
    assert listing.returncode == 0
    jobs = json.loads(out)["jobs"]
    assert [(job["outbox"], job["queue"], job["attempts"]) for job in jobs] == [("multiq_outbox", "mail", 0)] * 2
    out, _ = losses.multiq("outbox", "list", "shop:app").communicate(timeout=60)
    assert jobs[0]["id"] in out
    out, _ = losses.multiq("outbox", "relay", "shop:app").communicate(timeout=60)
    assert out == "2 jobs enqueued\n"
    out, _ = losses.multiq("outbox", "list", "shop:app").communicate(timeout=60)
    assert out == "no job waits\n"
    (tmp_path / "bare.py").write_text("import multiq\napp = multiq.App('memory://')\n")
    out, _ = (bare := losses.multiq("outbox", "relay", "bare:app")).communicate(timeout=60)
    assert bare.returncode == 1
    assert "the app has no outbox" in out


@pytest.mark.long
def test_the_command_line_tells_what_is_left(file: str, tmp_path: Path) -> None:
    losses = Losses(tmp_path, "redis://127.0.0.1:1", file)
    losses.run("committed")
    out, _ = (relay := losses.multiq("outbox", "relay", "shop:app")).communicate(timeout=60)
    assert relay.returncode == 1
    assert "jobs wait: multiq_outbox: " in out


@pytest.mark.long
def test_asyncio_is_not_needed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['greenlet'] = None; import multiq, sqlalchemy\n"
        "from multiq.contrib.sqlalchemy import Outbox; app = multiq.App('memory://')\n"
        f"engine = sqlalchemy.create_engine('sqlite:///{tmp_path}/shop.db'); outbox = Outbox(app, engine)\n"
        "outbox.create()\n"
        "with engine.begin() as connection: app.queue('q').enqueue(1, connection=connection)\n"
        "outbox.relay(); print(app.queue('q').stats().ready)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_missing_library_is_named_with_its_extra() -> None:
    code = "import sys; sys.modules['sqlalchemy'] = None; import multiq.contrib.sqlalchemy"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'multiq[sqlalchemy]'" in done.stderr
