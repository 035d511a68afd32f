"""The tables: processes create them once, migrate them while programs run, and finish a migration after a kill."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pymysql
import pytest
from servers.process import until

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendTimeout, SchemaNotReady
from multiq_mysql import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from servers.mysql import MysqlDatabases, MysqlServer, Place

ONE = "CREATE TABLE IF NOT EXISTS multiq_one (a INT PRIMARY KEY) ENGINE=InnoDB;"
TWO = "-- oldest: 1\nALTER TABLE multiq_one ADD COLUMN b INT NULL;\nALTER TABLE multiq_one ADD INDEX multiq_b (b);"
THREE = "-- takes b away, which version 1 never asked for\n-- oldest: 2\nUPDATE multiq_one SET a = a;"
TABLES = (
    "multiq_arrivals", "multiq_gates", "multiq_jobs", "multiq_leases", "multiq_limits", "multiq_lines", "multiq_notes",
    "multiq_outcomes", "multiq_queues", "multiq_receipts", "multiq_schema", "multiq_unique",
)  # fmt: skip
NAMES = ["0001_jobs", "0002_receipts", "0003_outcomes", "0004_holds", "0005_unique", "0006_limits"]


@pytest.fixture
def three(tmp_path: Path) -> tuple[schema.Migration, ...]:
    """Three migrations of these tests: the third one excludes programs of version 1."""
    for name, text in {"0001_one": ONE, "0002_two": TWO, "0003_three": THREE}.items():
        (tmp_path / f"{name}.sql").write_text(text)
    return schema.read(tmp_path)


def tables(server: MysqlDatabases, place: Place) -> tuple[str, ...]:
    return tuple(name for (name,) in server.ask("SHOW TABLES", database=place.name))


def columns(server: MysqlDatabases, place: Place) -> list[str]:
    return [row[0] for row in server.ask("SHOW COLUMNS FROM multiq_one", database=place.name)]


def run_up(
    server: MysqlDatabases, place: Place, migrations: Sequence[schema.Migration] | None = None, timeout: float = 20
) -> list[str]:
    with server.client(place.name) as connection:
        return schema.up(connection, timeout=timeout, migrations=migrations)


def found(server: MysqlDatabases, place: Place) -> schema.Found:
    with server.client(place.name) as connection:
        return schema.look(connection)


# --- the first connection makes them ---------------------------------------------------------------------


def test_the_first_connection_makes_the_tables_and_the_next_one_finds_them(
    mysql_server: MysqlDatabases, place: Place
) -> None:
    with mysql_server.client(place.name) as connection:
        schema.ensure(connection)
        version = len(schema.shipped())
        assert schema.look(connection) == schema.Found(version, schema.shipped()[-1].oldest, None)
        assert tables(mysql_server, place) == TABLES
        before = mysql_server.ask("SELECT @@lock_wait_timeout")
        schema.ensure(connection)
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@lock_wait_timeout")
            assert cursor.fetchall() == before


def test_a_look_makes_no_tables_and_finds_existing_ones(mysql_server: MysqlDatabases, place: Place) -> None:
    # Given a backend that creates no tables, and an empty database
    with open_backend(place.url, create=False) as looking, open_backend(place.url) as program:
        # Then its calls raise an error, and the database stays empty
        with pytest.raises(SchemaNotReady, match=rf"{place.name} has no tables of multiq's.*MULTIQ_URL"):
            looking.queues()
        assert tables(mysql_server, place) == ()
        # And after a program has created the tables, the backend finds its jobs
        program.enqueue("mail", [NewJob(b"x", "one")])
        assert looking.queues() == ["mail"]


def test_many_that_begin_together_make_the_tables_once(mysql_server: MysqlDatabases, place: Place) -> None:
    start, errors = threading.Barrier(8), list[BaseException]()

    def begin() -> None:
        with mysql_server.client(place.name) as connection:
            start.wait()
            try:
                schema.ensure(connection, timeout=20)
            except BaseException as exc:
                errors.append(exc)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found(mysql_server, place).version == len(schema.shipped())


def test_the_script_that_is_shown_makes_the_same_tables(mysql_server: MysqlDatabases, place: Place) -> None:
    with mysql_server.client(place.name, client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS) as connection:
        with connection.cursor() as cursor:
            cursor.execute(schema.sql())
            while cursor.nextset():
                pass
        by_hand = {name: mysql_server.ask(f"SHOW CREATE TABLE {name}", database=place.name) for name in TABLES}
        schema.ensure(connection)
    with mysql_server.database() as other, mysql_server.client(other.name) as connection:
        schema.ensure(connection)
        assert {name: mysql_server.ask(f"SHOW CREATE TABLE {name}", database=other.name) for name in TABLES} == by_hand
        assert found(mysql_server, other) == found(mysql_server, place)


def test_without_the_right_to_make_tables_the_error_has_the_command(mysql_server: MysqlDatabases, place: Place) -> None:
    with (
        mysql_server.account("SELECT, INSERT, UPDATE, DELETE", f"{place.name}.*") as account,
        account.client(place.name) as connection,
    ):
        with pytest.raises(SchemaNotReady, match="multiq schema up") as caught:
            schema.ensure(connection)
        assert isinstance(caught.value.__cause__, pymysql.MySQLError)
        assert tables(mysql_server, place) == ()
        # When a user that may create tables has run the migrations
        run_up(mysql_server, place)
        schema.ensure(connection)


def test_a_server_whose_mode_is_oracle_can_be_used(new_mysql: Callable[..., MysqlServer]) -> None:
    server = new_mysql(sql_mode="ORACLE")
    with server.database() as place, open_backend(place.url) as backend:
        assert backend.schema().up() == NAMES
        backend.enqueue("mail", [NewJob(b"x", "one")])
        assert backend.queues() == ["mail"]


# --- several versions apart ------------------------------------------------------------------------------


def test_older_tables_are_left_alone_and_the_error_has_the_command(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...]
) -> None:
    run_up(mysql_server, place, three[:1])
    with mysql_server.client(place.name) as connection:
        with pytest.raises(SchemaNotReady, match=r"version 1.*needs 3.*multiq schema up"):
            schema.ensure(connection, migrations=three)
        assert columns(mysql_server, place) == ["a"]


def test_several_versions_are_migrated_in_one_run_and_a_second_run_changes_nothing(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...]
) -> None:
    run_up(mysql_server, place, three[:1])
    assert run_up(mysql_server, place, three) == ["0002_two", "0003_three"]
    assert found(mysql_server, place) == schema.Found(3, 2, None)
    assert columns(mysql_server, place) == ["a", "b"]
    assert run_up(mysql_server, place, three) == []


def test_an_old_program_goes_on_with_newer_tables_as_long_as_they_say_that_it_can(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...]
) -> None:
    with mysql_server.client(place.name) as old:
        schema.ensure(old, migrations=three[:1])
        run_up(mysql_server, place, three[:2])
        schema.ensure(old, migrations=three[:1])
        run_up(mysql_server, place, three)
        with pytest.raises(BackendCorrupt, match=r"at least schema version 2.*upgrade multiq"):
            schema.ensure(old, migrations=three[:1])
        schema.ensure(old, migrations=three[:2])


def test_a_table_of_that_name_that_is_not_ours_is_reported(mysql_server: MysqlDatabases, place: Place) -> None:
    mysql_server.ask("CREATE TABLE multiq_schema (v INT)", database=place.name)
    with mysql_server.client(place.name) as connection, pytest.raises(BackendCorrupt, match="not multiq's"):
        schema.ensure(connection)


def test_migrations_that_are_not_numbered_without_gaps_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0001_one.sql").write_text(ONE)
    (tmp_path / "0003_three.sql").write_text(THREE)
    with pytest.raises(ValueError, match=r"1, 2, 3"):
        schema.read(tmp_path)


@pytest.mark.one_row
@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_the_columns_of_a_later_version_are_added_without_a_rebuild_of_the_table(
    mysql_server: MysqlDatabases, place: Place, version: int
) -> None:
    # Given jobs of the version before
    run_up(mysql_server, place, schema.shipped()[: version - 1])
    mysql_server.ask(
        "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, body) "
        "SELECT 'mail', CONCAT(x'ff', seq), 0, 1024, 1024, 60000000, 0, 'x' FROM seq_1_to_100",
        database=place.name,
    )
    # When the columns are added with ALGORITHM = INSTANT, which forbids a rebuild of the table
    columns, *_ = schema.shipped()[version - 1].statements
    mysql_server.ask(f"{columns}, ALGORITHM = INSTANT", database=place.name)
    mysql_server.ask("UPDATE multiq_schema SET doing = 0", database=place.name)
    # Then the next run finishes the migration, and the jobs are handed out
    assert run_up(mysql_server, place) == NAMES[version - 1 :]
    with open_backend(place.url) as backend, backend.consumer(["mail"]) as consumer:
        assert [(lease.memo, lease.doomed) for lease in consumer.reserve(100, 0)] == [(b"", "")] * 100


# --- killed, and under load ------------------------------------------------------------------------------


@pytest.mark.parametrize("took_effect", [False, True])
@pytest.mark.parametrize("statement", [0, 1])
def test_a_migration_that_was_killed_is_finished_by_the_next_one(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...], statement: int, took_effect: bool
) -> None:
    """After a kill between a statement and its record, it is unknown whether the statement was carried out."""
    run_up(mysql_server, place, three[:1])
    for text in three[1].statements[: statement + took_effect]:
        mysql_server.ask(text, database=place.name)
    mysql_server.ask("UPDATE multiq_schema SET doing = %s", statement, database=place.name)
    assert run_up(mysql_server, place, three) == ["0002_two", "0003_three"]
    assert columns(mysql_server, place) == ["a", "b"]
    assert len(mysql_server.ask("SHOW INDEX FROM multiq_one WHERE Key_name = 'multiq_b'", database=place.name)) == 1


def test_a_statement_that_fails_for_another_reason_stops_and_says_so(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...]
) -> None:
    run_up(mysql_server, place, three[:1])
    mysql_server.ask("ALTER TABLE multiq_one ADD COLUMN b INT", database=place.name)
    with pytest.raises(pymysql.OperationalError, match="Duplicate column"):
        run_up(mysql_server, place, three)
    assert found(mysql_server, place) == schema.Found(1, 1, 0)


def test_a_first_start_that_was_killed_is_finished_by_the_next_start(
    mysql_server: MysqlDatabases, place: Place
) -> None:
    for text in (*schema._BOOKKEEPING, schema.shipped()[0].statements[0]):
        mysql_server.ask(text, database=place.name)
    mysql_server.ask("UPDATE multiq_schema SET doing = 0", database=place.name)
    with mysql_server.client(place.name) as connection:
        schema.ensure(connection)
    assert tables(mysql_server, place) == TABLES


def test_a_runner_that_is_killed_lets_the_next_one_in(mysql_server: MysqlDatabases, place: Place) -> None:
    code = f"""
import sys, time
sys.path[:0] = {sys.path!r}
import pymysql
from multiq_mysql import schema
with pymysql.connect(host={mysql_server.host!r}, port={mysql_server.port}, user={mysql_server.user!r},
                     password={mysql_server.password!r}, database={place.name!r}) as connection:
    with schema._migration_lock(connection, 20):
        print("alone", flush=True)
        time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "alone\n"
        with pytest.raises(BackendTimeout, match="another process"):
            run_up(mysql_server, place, timeout=1)
        process.kill()
    assert run_up(mysql_server, place) == NAMES


def test_a_migration_waits_for_a_busy_client_without_holding_up_the_others(
    mysql_server: MysqlDatabases, place: Place, three: tuple[schema.Migration, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements queue behind an ALTER that waits for a long transaction, so the ALTER waits only briefly."""
    monkeypatch.setattr(schema, "_LOCK_WAIT", 1)
    run_up(mysql_server, place, three[:1])
    with mysql_server.client(place.name, autocommit=False) as busy:
        with busy.cursor() as cursor:
            cursor.execute("SELECT * FROM multiq_one")
        runner = threading.Thread(target=run_up, args=(mysql_server, place, three))
        runner.start()
        until(lambda: _waits_for_metadata(mysql_server, place), "the ALTER waits")
        for number in range(3):  # each INSERT runs between two attempts of the ALTER
            mysql_server.ask("INSERT INTO multiq_one (a) VALUES (%s)", number, database=place.name)
        assert columns(mysql_server, place) == ["a"]
        busy.commit()
        runner.join()
    assert found(mysql_server, place).version == 3
    assert columns(mysql_server, place) == ["a", "b"]


def _waits_for_metadata(server: MysqlDatabases, place: Place) -> bool:
    rows = server.ask(
        "SELECT 1 FROM information_schema.processlist WHERE db = %s AND state LIKE %s", place.name, "%metadata%"
    )
    return bool(rows)
