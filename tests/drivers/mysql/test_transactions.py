"""Enqueuing inside the caller's own transaction: with PyMySQL, and with SQLAlchemy over it."""

from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from multiq.backend import NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendTimeout, OptionInvalid, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.connections import Connection
    from servers.mysql import MysqlDatabases, Place

    from multiq_mysql.backend import MysqlBackend

    Jobs = Callable[..., list[NewJob]]

#: settings of the caller's session, none of which may change the result
SETTINGS = {
    "ansi": "SET SESSION sql_mode = 'ANSI'",
    "no backslashes": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT'",
    "traditional": "SET SESSION sql_mode = 'TRADITIONAL'",
    "oracle": "SET SESSION sql_mode = 'ORACLE'",
    "stopped clock": "SET SESSION timestamp = 4000000000",
    "no mode": "SET SESSION sql_mode = ''",
    "zone": "SET SESSION time_zone = '+13:00'",
    "latin1": "SET NAMES latin1",
    "gbk": "SET NAMES gbk",
    "serializable": "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "read uncommitted": "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
}
#: a body that would be stored wrongly if it were quoted by the wrong rules
NASTY = b"\\' \" ` -- \x00\xff\xbf\x5c\x27 %s {x} \\\\' \r\n" + "ß日本".encode()


@pytest.fixture
def app(mysql_server: MysqlDatabases, place: Place) -> Iterator[Connection[Any]]:
    """The caller's connection, in a transaction of its own."""
    with mysql_server.client(place.name, autocommit=False) as connection:
        yield connection


@pytest.fixture
def engine(mysql_server: MysqlDatabases, place: Place) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(
        "mysql+pymysql://", creator=lambda: mysql_server.connect(place.name, autocommit=False)
    )
    yield engine
    engine.dispose()


def bodies(backend: MysqlBackend) -> list[bytes]:
    return [job.body for job in backend.jobs("q", State.READY).jobs]


def run(connection: Connection[Any], text: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(text)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_callers_settings_do_not_matter(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs, setting: str
) -> None:
    run(app, SETTINGS[setting])
    backend.enqueue("q", jobs(1, NASTY), connection=app)
    backend.enqueue("q", jobs(1, b"late", delay=60), connection=app)
    assert bodies(backend) == []
    app.commit()
    assert bodies(backend) == [NASTY]
    (late,) = backend.jobs("q", State.DELAYED).jobs
    assert late.due_in is not None
    assert 30 < late.due_in <= 60
    assert late.age is not None
    assert 0 <= late.age < 30


def test_the_callers_own_rows_and_the_job_share_their_fate(
    backend: MysqlBackend, app: Connection[Any], mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    mysql_server.ask("CREATE TABLE orders (id INT AUTO_INCREMENT PRIMARY KEY)", database=place.name)
    for end in (app.rollback, app.commit):
        run(app, "INSERT INTO orders VALUES ()")
        backend.enqueue("q", jobs(2), connection=app)
        end()
    assert mysql_server.ask("SELECT COUNT(*) FROM orders", database=place.name) == ((1,),)
    assert len(bodies(backend)) == 2


def test_another_default_database_and_a_cursor_of_theirs(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs
) -> None:
    app.select_db("mysql")
    app.cursorclass = pymysql.cursors.SSDictCursor
    backend.enqueue("q", jobs(), connection=app)
    app.commit()
    assert len(bodies(backend)) == 1


def test_a_connection_that_commits_by_itself_commits(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    with mysql_server.client(place.name) as app:
        backend.enqueue("q", jobs(), connection=app)
        assert len(bodies(backend)) == 1
        app.begin()
        backend.enqueue("q", jobs(), connection=app)
        app.rollback()
    assert len(bodies(backend)) == 1


@pytest.mark.one_row
@pytest.mark.parametrize("autocommit", [False, True])
def test_a_batch_of_several_statements_is_whole_or_nothing(
    new_mysql: Callable[..., Any], jobs: Jobs, autocommit: bool
) -> None:
    server = new_mysql(max_allowed_packet=1 << 20)
    with server.database() as place, open_backend(place.url) as backend:
        backend.stats("q")
        large = backend.capabilities.max_body
        assert large is not None
        with server.client(place.name, autocommit=autocommit) as app:
            run(app, "SET SESSION sql_mode = 'ORACLE'")  # in this mode BEGIN begins a block
            backend.enqueue("q", [*jobs(3, b"y" * large), *jobs()], connection=app)
            app.commit()
            assert [len(job.body) for job in backend.jobs("q", State.READY).jobs] == [large, large, large, 1]
            # the second statement fails: a table that is full, a deadlock...
            server.ask("ALTER TABLE multiq_jobs ADD CHECK (priority <> 7)", database=place.name)
            with pytest.raises(Exception, match="failed"):
                backend.enqueue("q", [*jobs(1, b"z" * large), *jobs(1, b"z" * large, priority=7)], connection=app)
            app.commit()
        assert backend.stats("q").ready == 4


def test_a_body_that_is_too_large_is_refused_before_anything_is_sent(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs
) -> None:
    limit = backend.capabilities.max_body
    assert limit is not None
    with pytest.raises(PayloadTooLarge):
        backend.enqueue("q", [*jobs(), *jobs(1, b"x" * (limit + 1))], connection=app)
    app.commit()
    assert bodies(backend) == []


def test_tables_are_made_on_a_connection_of_our_own(
    place: Place, app: Connection[Any], mysql_server: MysqlDatabases, jobs: Jobs
) -> None:
    mysql_server.ask("CREATE TABLE orders (id INT PRIMARY KEY)", database=place.name)
    run(app, "INSERT INTO orders VALUES (1)")
    with open_backend(place.url) as backend:
        backend.enqueue("q", jobs(), connection=app)
        app.rollback()  # a DDL statement on the caller's connection would have committed the order
        assert mysql_server.ask("SELECT COUNT(*) FROM orders", database=place.name) == ((0,),)
        assert backend.stats("q").ready == 0


@pytest.mark.parametrize("wrong", [object(), 7, "mysql://"])
def test_an_object_that_is_not_a_connection_is_refused(backend: MysqlBackend, jobs: Jobs, wrong: object) -> None:
    with pytest.raises(OptionInvalid, match=type(wrong).__name__):
        backend.enqueue("q", jobs(), connection=wrong)


def test_a_closed_connection_is_an_error_of_ours(backend: MysqlBackend, app: Connection[Any], jobs: Jobs) -> None:
    from multiq.errors import BackendUnavailable

    app.close()
    with pytest.raises(BackendUnavailable) as caught:
        backend.enqueue("q", jobs(), connection=app)
    assert isinstance(caught.value.__cause__, pymysql.MySQLError)
    app.connect()  # so that the fixture can close it


def test_a_deadlock_is_the_callers_to_run_again(
    backend: MysqlBackend, app: Connection[Any], mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given two callers, each of which waits for a lock of the other
    run(app, "SET SESSION innodb_lock_wait_timeout = 20")
    with mysql_server.client(place.name, autocommit=False) as other:
        run(other, "SET SESSION innodb_lock_wait_timeout = 20")
        backend.enqueue("q", [NewJob(b"1", "a")], connection=app)
        backend.enqueue("q", [NewJob(b"1", "b")], connection=other)
        outcomes: list[BaseException | None] = []

        def enqueue(connection: Connection[Any], job_id: str) -> None:
            try:
                backend.enqueue("q", [NewJob(b"2", job_id)], connection=connection)
                outcomes.append(None)
                connection.commit()
            except BackendTimeout as exc:
                outcomes.append(exc)
                connection.rollback()

        threads = [threading.Thread(target=enqueue, args=args) for args in ((app, "b"), (other, "a"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # Then one of the two gets the error that its whole transaction was rolled back
    (told,) = [outcome for outcome in outcomes if outcome is not None]
    assert "run all of it again" in str(told)
    assert len(bodies(backend)) == 2


def test_a_waiting_consumer_wakes_when_the_caller_commits(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs
) -> None:
    backend.enqueue("q", jobs(), connection=app)
    timer = threading.Timer(0.2, app.commit)
    timer.start()
    assert len(backend.consumer(["q"]).reserve(1, 30)) == 1
    timer.join()


def test_a_job_that_is_committed_late_is_not_overlooked(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs
) -> None:
    # Given a job that was enqueued before others which are worked off already
    backend.enqueue("q", jobs(1, b"late"), connection=app)
    backend.enqueue("q", jobs(20))
    consumer = backend.consumer(["q"])
    for _ in range(2):
        assert len(consumer.reserve(10, 0)) == 10
    # When its transaction commits, then the job is there
    app.commit()
    assert [lease.body for lease in consumer.reserve(10, 0)] == [b"late"]


def test_a_read_only_transaction_is_reported_as_read_only(
    backend: MysqlBackend, app: Connection[Any], jobs: Jobs
) -> None:
    run(app, "START TRANSACTION READ ONLY")
    with pytest.raises(OptionInvalid, match=r"READ ONLY.*begin it READ WRITE"):
        backend.enqueue("q", jobs(), connection=app)


def test_a_connection_to_another_server_is_refused(
    backend: MysqlBackend, new_mysql: Callable[..., Any], place: Place, jobs: Jobs
) -> None:
    # Given another server with a database and tables of the same names
    other = new_mysql()
    other.ask(f"CREATE DATABASE {place.name}")
    with open_backend(other.url(place.name)) as there, other.client(place.name, autocommit=False) as theirs:
        there.stats("q")
        # When its connection is passed, then nothing is written there
        with pytest.raises(OptionInvalid, match=rf"{other.port}.*URL"):
            backend.enqueue("q", jobs(), connection=theirs)
        theirs.commit()
        assert there.stats("q").ready == 0
        there.enqueue("q", jobs(), connection=theirs)
        theirs.commit()
        assert there.stats("q").ready == 1


@pytest.mark.parametrize("kind", ["pymysql", "sqlalchemy"])
def test_a_database_whose_name_has_a_percent_sign(mysql_server: MysqlDatabases, jobs: Jobs, kind: str) -> None:
    name = f"multiq_50%s_{uuid.uuid4().hex}"
    mysql_server.ask(f"CREATE DATABASE `{name}`")
    try:
        with open_backend(mysql_server.url(name.replace("%", "%25"))) as backend:
            if kind == "pymysql":
                with mysql_server.client() as app:
                    backend.enqueue("q", jobs(), connection=app)
            else:
                engine = sqlalchemy.create_engine("mysql+pymysql://", creator=mysql_server.connect)
                with engine.begin() as connection:
                    backend.enqueue("q", jobs(), connection=connection)
                engine.dispose()
            assert backend.stats("q").ready == 1
    finally:
        mysql_server.ask(f"DROP DATABASE `{name}`")


# --- SQLAlchemy ------------------------------------------------------------------------------------------


def test_an_sqlalchemy_connection(backend: MysqlBackend, engine: sqlalchemy.Engine, jobs: Jobs) -> None:
    # Given connections without a transaction: SQLAlchemy begins one at the first statement
    with engine.connect() as connection:
        backend.enqueue("q", jobs(1, NASTY), connection=connection)
    assert bodies(backend) == []
    with engine.connect() as connection:
        backend.enqueue("q", jobs(1, NASTY), connection=connection)
        connection.rollback()
        backend.enqueue("q", jobs(1, NASTY), connection=connection)
        connection.commit()
    assert bodies(backend) == [NASTY]
    with engine.begin() as connection:
        backend.enqueue("q", jobs(1, b"2"), connection=connection)
    assert bodies(backend) == [NASTY, b"2"]


def test_an_sqlalchemy_session(backend: MysqlBackend, engine: sqlalchemy.Engine, jobs: Jobs) -> None:
    with Session(engine) as session:
        backend.enqueue("q", jobs(1, b"no"), connection=session)
        session.rollback()
        backend.enqueue("q", jobs(1, b"yes"), connection=session)
        assert bodies(backend) == []
        session.commit()
    with Session(engine) as session:
        backend.enqueue("q", jobs(1, b"no"), connection=session)
    assert bodies(backend) == [b"yes"]


def test_an_sqlalchemy_savepoint(backend: MysqlBackend, engine: sqlalchemy.Engine, jobs: Jobs) -> None:
    with engine.begin() as connection:
        backend.enqueue("q", jobs(1, b"outer"), connection=connection)
        nested = connection.begin_nested()
        backend.enqueue("q", jobs(1, b"inner"), connection=connection)
        nested.rollback()
    assert bodies(backend) == [b"outer"]


def test_sqlalchemy_over_another_driver_is_refused(backend: MysqlBackend, jobs: Jobs) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(OptionInvalid, match=r"mysql\+pymysql"):
        backend.enqueue("q", jobs(), connection=connection)
    engine.dispose()


def test_sqlalchemys_errors_are_ours_too(
    backend: MysqlBackend, engine: sqlalchemy.Engine, mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    from multiq.errors import BackendCorrupt

    mysql_server.ask("DROP TABLE multiq_jobs", database=place.name)
    with engine.connect() as connection, pytest.raises(BackendCorrupt, match="multiq schema show-sql"):
        backend.enqueue("q", jobs(), connection=connection)
