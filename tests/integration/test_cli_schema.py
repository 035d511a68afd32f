"""``multiq schema``, on a MariaDB of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from servers.mysql import MysqlDatabases, Place, any_server

import multiq
from multiq_mysql import schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shell import Shell

TABLES = (
    "multiq_arrivals", "multiq_gates", "multiq_jobs", "multiq_leases", "multiq_limits", "multiq_lines", "multiq_notes",
    "multiq_outcomes", "multiq_queues", "multiq_receipts", "multiq_schema", "multiq_unique",
)  # fmt: skip
NAMES = [f"{migration.version:04}_{migration.name}" for migration in schema.shipped()]


@pytest.fixture(scope="module")
def server() -> Iterator[MysqlDatabases]:
    with any_server() as server:
        yield server


@pytest.fixture
def place(server: MysqlDatabases) -> Iterator[Place]:
    with server.database() as made:
        yield made


def tables(server: MysqlDatabases, place: Place) -> tuple[str, ...]:
    return tuple(name for (name,) in server.ask("SHOW TABLES", database=place.name))


def test_missing_tables_are_reported_then_made_then_found(shell: Shell, server: MysqlDatabases, place: Place) -> None:
    missing = shell("schema", "check", place.url)
    assert missing.code == 1
    assert "no tables yet" in missing.out
    assert tables(server, place) == ()

    made = shell("schema", "up", place.url)
    assert (made.code, made.out.split()) == (0, NAMES)
    assert tables(server, place) == TABLES

    again = shell("schema", "up", "--json", place.url)
    assert again.json["applied"] == []
    found = shell("schema", "check", "--json", place.url)
    assert found.code == 0
    assert found.json == {
        "connection": place.url,
        "ready": True,
        "state": "ready",
        "found": len(NAMES),
        "needed": len(NAMES),
    }


def test_show_sql_prints_what_would_be_run_and_needs_no_server(
    shell: Shell, server: MysqlDatabases, place: Place
) -> None:
    shown = shell("schema", "show-sql", "mysql://nobody@nowhere.invalid/jobs")
    assert shown.code == 0
    with server.client(place.name) as connection, connection.cursor() as cursor:
        for statement in shown.out.split(";\n"):
            if statement.strip():
                cursor.execute(statement)
    assert shell("schema", "check", place.url).code == 0
    since = shell("schema", "show-sql", "--since", str(len(NAMES)), "--json", "mysql://nobody@nowhere.invalid/jobs")
    assert "CREATE TABLE" not in since.json["sql"]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ("version = 0", "missing"),
        ("version = version - 1", "older"),
        ("version = version + 1", "ready"),
        ("version = version + 1, oldest = version", "newer"),
    ],
)
def test_tables_of_another_version_are_reported(
    shell: Shell, server: MysqlDatabases, place: Place, change: str, state: str
) -> None:
    shell("schema", "up", place.url)
    server.ask(f"UPDATE multiq_schema SET {change}", database=place.name)  # noqa: S608 - ours
    found = shell("schema", "check", "--json", place.url)
    assert found.json["state"] == state
    assert found.code == (0 if state == "ready" else 1)


def test_the_error_of_a_program_that_is_too_old_has_the_way_out(
    shell: Shell, server: MysqlDatabases, place: Place
) -> None:
    shell("schema", "up", place.url)
    server.ask("UPDATE multiq_schema SET version = version + 1, oldest = version + 1", database=place.name)
    done = shell("-c", place.url, "stats")
    assert done.code == 1
    assert "upgrade multiq" in done.err


def test_a_user_that_may_not_make_tables_gets_the_command(shell: Shell, server: MysqlDatabases, place: Place) -> None:
    with server.account("SELECT, INSERT, UPDATE, DELETE", f"{place.name}.*") as account:
        url = account.url(place.name)
        for command in (["schema", "up", url], ["-c", url, "enqueue", "-q", "mail", "--body", "1"]):
            done = shell(*command)
            assert done.code == 1
            assert "multiq schema up" in done.err
        assert multiq.errors.SchemaNotReady.__name__ in shell("schema", "up", "--json", url).err
        shell("schema", "up", place.url)
        assert shell("-c", url, "stats").code == 0


@pytest.mark.parametrize("words", [["check"], ["up"], ["show-sql"]])
def test_a_backend_without_such_tables_refuses_and_names_those_that_have_them(shell: Shell, words: list[str]) -> None:
    done = shell("schema", *words, "--json", "memory://")
    assert done.code == 5
    assert done.error["type"] == "Unsupported"
    assert "these can: mysql" in done.error["message"]


def test_without_a_command_it_says_what_there_is(shell: Shell) -> None:
    done = shell("schema")
    assert done.code == 0
    assert "show-sql" in done.out
