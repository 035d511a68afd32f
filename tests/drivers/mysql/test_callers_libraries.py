"""Enqueuing inside a transaction of mysqlclient's, of SQLAlchemy's over each driver, and of Django's."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from typing import TYPE_CHECKING, Any

import djangos
import pymysql
import pytest
import sqlalchemy
from django.db import transaction
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from multiq.backend import State
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendError, BackendUnavailable, OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import NewJob
    from multiq_mysql.backend import MysqlBackend

    Jobs = Callable[..., list[NewJob]]

NASTY = b"\\' \" ` -- \x00\xff\xbf\x5c\x27 %s %% {x} \\\\' \r\n" + "ß日本".encode()
NO_MYSQLCLIENT = "mysqlclient is built from source, against the headers of MariaDB's or MySQL's client library"
NO_ASYNCMY = "asyncmy is not installed"
DRIVERS = {
    "pymysql": ("pymysql", ""),
    "mysqldb": ("MySQLdb", NO_MYSQLCLIENT),
    "aiomysql": ("aiomysql", ""),
    "asyncmy": ("asyncmy", NO_ASYNCMY),
}


def bodies(backend: MysqlBackend) -> list[bytes]:
    return [job.body for job in backend.jobs("q", State.READY).jobs]


@pytest.fixture
def server(mysql_server: MysqlDatabases, place: Place) -> MysqlDatabases:
    mysql_server.ask("CREATE TABLE orders (id INT)", database=place.name)
    return mysql_server


@pytest.fixture
def mysqldb(server: MysqlDatabases, place: Place) -> Iterator[Any]:
    """A connection of mysqlclient's, with an open transaction."""
    module = pytest.importorskip("MySQLdb", reason=NO_MYSQLCLIENT)
    connection = module.connect(**dsn(server, place.name))
    yield connection
    with contextlib.suppress(module.Error):  # this fails if the test has closed the connection
        connection.close()


@pytest.fixture
def django(server: MysqlDatabases, place: Place) -> Iterator[Any]:
    pytest.importorskip("MySQLdb", reason=NO_MYSQLCLIENT)
    at = dsn(server, place.name)
    with djangos.connected(ENGINE="django.db.backends.mysql", NAME=place.name, OPTIONS=at) as connection:
        yield connection


@pytest.fixture(params=DRIVERS)
def url(request: pytest.FixtureRequest, server: MysqlDatabases, place: Place) -> sqlalchemy.URL:
    """SQLAlchemy's URL of the database, for each driver that it has."""
    module, why = DRIVERS[request.param]
    pytest.importorskip(module, reason=why)
    return url_of(request.param, server, place.name)


def url_of(driver: str, server: MysqlDatabases, database: str) -> sqlalchemy.URL:
    return sqlalchemy.URL.create(
        f"mysql+{driver}", server.user, server.password, server.host, server.port, database, {"charset": "utf8mb4"}
    )


def dsn(server: MysqlDatabases, database: str) -> dict[str, Any]:
    at = {"host": server.host, "port": server.port, "user": server.user, "password": server.password}
    return {**at, "database": database}


def in_one(url: sqlalchemy.URL, *, session: bool, work: Callable[[Any], object], end: str) -> None:
    """Do *work* with a connection or session of SQLAlchemy's, through ``run_sync`` where the driver is asynchronous."""
    if not url.drivername.endswith(("aiomysql", "asyncmy")):
        engine = sqlalchemy.create_engine(url)
        with Session(engine) if session else engine.connect() as opened:
            work(opened)
            getattr(opened, end)()
        engine.dispose()
        return

    async def run() -> None:
        engine = create_async_engine(url)
        async with AsyncSession(engine) if session else engine.connect() as opened:
            await opened.run_sync(work)
            await getattr(opened, end)()
        await engine.dispose()

    asyncio.run(run())


# --- SQLAlchemy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.long
def test_sqlalchemy_over_each_driver(
    backend: MysqlBackend, url: sqlalchemy.URL, server: MysqlDatabases, jobs: Jobs, session: bool
) -> None:
    def work(opened: Any) -> None:
        opened.execute(sqlalchemy.text("INSERT INTO orders VALUES (7)"))
        backend.enqueue("q", jobs(1, NASTY), connection=opened)
        backend.enqueue("q", jobs(2), connection=opened)
        assert bodies(backend) == []

    for end, expected in (("rollback", 0), ("commit", 1)):
        in_one(url, session=session, work=work, end=end)
        assert server.ask("SELECT COUNT(*) FROM orders", database=url.database) == ((expected,),)
        assert bodies(backend)[:1] == [NASTY] * expected
        assert len(bodies(backend)) == 3 * expected


@pytest.mark.one_row
def test_sqlalchemy_over_each_driver_when_nothing_else_is_done(
    backend: MysqlBackend, url: sqlalchemy.URL, jobs: Jobs
) -> None:
    def work(opened: Any) -> None:
        backend.enqueue("q", jobs(), connection=opened)

    for end, expected in (("rollback", 0), ("commit", 1)):
        in_one(url, session=False, work=work, end=end)
        assert len(bodies(backend)) == expected


def test_a_batch_of_several_statements_over_each_driver(new_mysql: Callable[..., Any], jobs: Jobs) -> None:
    server = new_mysql(max_allowed_packet=1 << 20)
    with server.database() as place, open_backend(place.url) as backend:
        backend.stats("q")
        large = b"y" * (backend.capabilities.max_body or 0)
        server.ask("ALTER TABLE multiq_jobs ADD CHECK (priority <> 7)", database=place.name)

        def work(opened: Any) -> None:
            backend.enqueue("q", [*jobs(2, large), *jobs()], connection=opened)
            with pytest.raises(BackendError, match="failed"):
                backend.enqueue("q", [*jobs(1, large), *jobs(1, large, priority=7)], connection=opened)

        drivers = [name for name, (module, _) in DRIVERS.items() if importlib.util.find_spec(module)]
        for driver in drivers:
            in_one(url_of(driver, server, place.name), session=False, work=work, end="commit")
            assert backend.stats("q").ready == 3
            backend.purge("q", [State.READY])
        # and on a bare connection of mysqlclient's, which begins a transaction by itself or commits by itself
        module = pytest.importorskip("MySQLdb", reason=NO_MYSQLCLIENT)
        for autocommit in (False, True):
            with contextlib.closing(module.connect(**dsn(server, place.name), autocommit=autocommit)) as app:
                work(app)
                assert backend.stats("q").ready == (3 if autocommit else 0)
                app.commit()
            assert backend.stats("q").ready == 3
            backend.purge("q", [State.READY])


def test_the_drivers_own_errors_are_ours(
    backend: MysqlBackend, url: sqlalchemy.URL, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    server.ask("DROP TABLE multiq_jobs", database=place.name)

    def work(opened: Any) -> None:
        with pytest.raises(BackendCorrupt, match="multiq schema show-sql"):
            backend.enqueue("q", jobs(), connection=opened)

    in_one(url, session=False, work=work, end="rollback")


def test_sqlalchemys_autocommit_stores_the_job_at_once(backend: MysqlBackend, url: sqlalchemy.URL, jobs: Jobs) -> None:
    def work(opened: Any) -> None:
        opened.execution_options(isolation_level="AUTOCOMMIT")
        backend.enqueue("q", jobs(), connection=opened)
        assert len(bodies(backend)) == 1

    in_one(url, session=False, work=work, end="rollback")
    assert len(bodies(backend)) == 1


@pytest.mark.one_row
def test_a_database_whose_name_has_a_percent_sign(
    backend: MysqlBackend, url: sqlalchemy.URL, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    name = place.name + "_50%s"
    server.ask(f"CREATE DATABASE `{name}`")
    try:
        with open_backend(server.url(name.replace("%", "%25"))) as other:
            in_one(url, session=False, work=lambda o: other.enqueue("q", jobs(), connection=o), end="commit")
            assert other.stats("q").ready == 1
    finally:
        server.ask(f"DROP DATABASE `{name}`")


@pytest.mark.one_row
def test_an_unreachable_server_is_reported_as_unreachable(
    backend: MysqlBackend, url: sqlalchemy.URL, jobs: Jobs
) -> None:
    backend.stats("q")
    engine = sqlalchemy.create_engine(url.set(drivername="mysql+pymysql", port=1))
    with Session(engine) as session, pytest.raises(BackendUnavailable):
        backend.enqueue("q", jobs(), connection=session)
    engine.dispose()


# --- mysqlclient -----------------------------------------------------------------------------------------


def test_mysqlclients_connection(
    backend: MysqlBackend, mysqldb: Any, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    from MySQLdb.cursors import SSDictCursor

    mysqldb.cursorclass = SSDictCursor
    for end, expected in ((mysqldb.rollback, 0), (mysqldb.commit, 1)):
        mysqldb.query("INSERT INTO orders VALUES (7)")
        backend.enqueue("q", jobs(1, NASTY), connection=mysqldb)
        backend.enqueue("q", jobs(1, b"2"), connection=mysqldb)
        assert bodies(backend) == []
        end()
        assert server.ask("SELECT COUNT(*) FROM orders", database=place.name) == ((expected,),)
        assert bodies(backend) == [NASTY, b"2"][: 2 * expected]


def test_mysqlclients_connection_that_commits_by_itself(backend: MysqlBackend, mysqldb: Any, jobs: Jobs) -> None:
    mysqldb.autocommit(True)
    backend.enqueue("q", jobs(), connection=mysqldb)
    assert len(bodies(backend)) == 1


def test_mysqlclients_closed_connection_is_an_error_of_ours(backend: MysqlBackend, mysqldb: Any, jobs: Jobs) -> None:
    mysqldb.close()
    with pytest.raises(BackendUnavailable) as caught:
        backend.enqueue("q", jobs(), connection=mysqldb)
    assert type(caught.value.__cause__).__module__.startswith("MySQLdb")


# --- Django ----------------------------------------------------------------------------------------------


def test_djangos_connection_inside_atomic(
    backend: MysqlBackend, django: Any, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    for is_broken, expected in ((True, 0), (False, 1)):
        with transaction.atomic(using=django.alias):
            with django.cursor() as cursor:
                cursor.execute("INSERT INTO orders VALUES (7)")
            backend.enqueue("q", jobs(1, NASTY), connection=django)
            assert bodies(backend) == []
            transaction.set_rollback(is_broken, using=django.alias)
        assert bodies(backend) == [NASTY] * expected
        assert server.ask("SELECT COUNT(*) FROM orders", database=place.name) == ((expected,),)


def test_djangos_connection_that_is_not_open_yet_and_commits_by_itself(
    backend: MysqlBackend, django: Any, jobs: Jobs
) -> None:
    assert django.connection is None
    backend.enqueue("q", jobs(), connection=django)
    assert len(bodies(backend)) == 1


def test_djangos_broken_transaction_is_reported(backend: MysqlBackend, django: Any, jobs: Jobs) -> None:
    with transaction.atomic(using=django.alias):
        transaction.set_rollback(True, using=django.alias)
        with pytest.raises(OptionInvalid, match="end of the 'atomic' block"):
            backend.enqueue("q", jobs(), connection=django)
    assert bodies(backend) == []


def test_djangos_errors_are_ours(
    backend: MysqlBackend, django: Any, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    server.ask("DROP TABLE multiq_jobs", database=place.name)
    with pytest.raises(BackendCorrupt, match="multiq schema show-sql"):
        backend.enqueue("q", jobs(), connection=django)


# --- refused connections ---------------------------------------------------------------------------------


def test_an_unsupported_connection_is_refused_with_the_way_out(
    backend: MysqlBackend, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    engine = sqlalchemy.create_engine("mysql+pymysql://", creator=lambda: server.connect(place.name))
    closed = engine.connect()
    closed.close()
    elsewhere = sqlalchemy.create_engine("sqlite://")
    with elsewhere.connect() as wrong_store, contextlib.closing(pymysql.connect(**dsn(server, place.name))) as app:
        for wrong, way_out in (
            (engine, r"engine\.begin\(\)"),
            (sessionmaker(engine), "call it"),
            (closed, "closed"),
            (Session(), "bind"),
            (wrong_store, r"mysql\+pymysql.*sqlite3"),
            (app.cursor(), "PyMySQL.*Cursor"),
        ):
            with pytest.raises(OptionInvalid, match=way_out):
                backend.enqueue("q", jobs(), connection=wrong)
    elsewhere.dispose()
    engine.dispose()
    assert bodies(backend) == []


def test_an_asynchronous_connection_is_refused_with_the_way_out(
    backend: MysqlBackend, server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    import aiomysql

    at = dsn(server, place.name)
    url = sqlalchemy.URL.create("mysql+aiomysql", at["user"], at["password"], at["host"], at["port"], place.name)

    async def run() -> None:
        engine = create_async_engine(url)
        bare = await aiomysql.connect(at["host"], at["user"], at["password"], place.name, at["port"])
        async with engine.connect() as connection, AsyncSession(engine) as session:
            await connection.exec_driver_sql("SELECT 1")
            for wrong in (engine, connection, session, connection.sync_connection, session.sync_session, bare):
                with pytest.raises(OptionInvalid, match="run_sync"):
                    backend.enqueue("q", jobs(), connection=wrong)
        bare.close()
        await engine.dispose()

    asyncio.run(run())
    assert bodies(backend) == []
