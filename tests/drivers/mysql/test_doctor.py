"""``multiq doctor`` on real servers with bad settings."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendUnavailable
from multiq.ids import new_id
from multiq_mysql import doctor, waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.mysql import MysqlDatabases, MysqlServer, Place

    from multiq.backend import Finding

    NewMysql = Callable[..., MysqlServer]


def examined(url: str) -> dict[str, Finding]:
    with open_backend(url) as backend:
        found = backend.doctor()
    by_name = {finding.what: finding for finding in found}
    assert len(by_name) == len(found)
    return by_name


def levels(found: dict[str, Finding]) -> dict[str, str]:
    """The findings that are not ``ok``, without the latency, which is long on a busy machine."""
    return {what: finding.level for what, finding in found.items() if finding.level != "ok" and what != "latency"}


def use(place: Place) -> None:
    with open_backend(place.url) as backend:
        backend.enqueue("mail", [NewJob(b"x", new_id())])


def test_a_well_configured_server_is_all_ok_and_nothing_is_changed(mysql_server: MysqlDatabases, place: Place) -> None:
    found = examined(place.url)
    assert levels(found) == {"tables": "unknown"}
    assert mysql_server.ask("SHOW TABLES", database=place.name) == ()
    use(place)
    found = examined(place.url)
    assert levels(found) == {}
    assert "READ COMMITTED" in found["isolation"].why
    assert "MariaDB" in found["version"].why or "MySQL" in found["version"].why
    assert f"{round(waiting.IDLE_POLL * 1100)} ms" in found["polling"].why
    assert "power failure" in found["durability"].why


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("setting", "what", "level", "words"),
    [
        ("innodb_flush_log_at_trx_commit=0", "innodb_flush_log_at_trx_commit", "warn", "killed server"),
        ("innodb_flush_log_at_trx_commit=2", "innodb_flush_log_at_trx_commit", "warn", "power failure"),
        ("innodb_flush_log_at_trx_commit=2", "durability", "warn", "a power failure loses the last second's jobs"),
        ("innodb_doublewrite=0", "innodb_doublewrite", "warn", "torn pages"),
        ("read_only=1", "read_only", "bad", "replica"),
        ("max_allowed_packet=65536", "max_allowed_packet", "warn", "65,536 bytes"),
        ("max_connections=10", "max_connections", "ok", "of 10"),
    ],
)
def test_a_setting_that_costs_jobs_or_time_is_reported(
    new_mysql: NewMysql, setting: str, what: str, level: str, words: str
) -> None:
    server = new_mysql(**dict([setting.split("=")]))
    with server.database() as place:
        finding = examined(place.url)[what]
    assert finding.level == level
    assert words in finding.why
    assert finding.advice or level == "ok" or what == "durability"


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("form", "sync", "expected"),
    [
        ("STATEMENT", "1", {"sync_binlog": "ok", "binlog_format": "bad"}),
        ("MIXED", "0", {"sync_binlog": "warn", "binlog_format": "ok"}),
        ("ROW", "1", {"sync_binlog": "ok", "binlog_format": "ok"}),
    ],
)
def test_a_binary_log_is_looked_at_where_there_is_one(
    new_mysql: NewMysql, form: str, sync: str, expected: dict[str, str]
) -> None:
    server = new_mysql(log_bin="binlog", binlog_format=form, sync_binlog=sync)
    with server.database() as place:
        found = examined(place.url)
        assert {what: found[what].level for what in expected} == expected
        # Then the backend fails on the server that the doctor calls bad, and works on the others
        with pytest.raises(BackendError) if form == "STATEMENT" else contextlib.nullcontext():
            use(place)


def test_a_transaction_that_is_kept_open_is_reported_with_its_connection(
    mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_OLD_SNAPSHOT", 0)
    use(place)
    with mysql_server.client(place.name, autocommit=False) as reader, reader.cursor() as cursor:
        cursor.execute("SELECT * FROM multiq_jobs")
        cursor.execute("SELECT CONNECTION_ID()")
        ((thread,),) = cursor.fetchall()
        finding = examined(place.url)["oldest snapshot"]
        assert (finding.level, f"KILL {thread}" in finding.advice) == ("warn", True)


def test_a_purge_that_lags_behind_is_reported(
    mysql_server: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LONG_HISTORY", 20)
    mysql_server.ask("CREATE TABLE other (a INT) ENGINE=InnoDB", database=place.name)
    mysql_server.ask("INSERT INTO other VALUES (0)", database=place.name)
    with (
        mysql_server.client(place.name, autocommit=False) as reader,
        reader.cursor() as cursor,
        mysql_server.client(place.name) as writer,
        writer.cursor() as writing,
    ):
        cursor.execute("SELECT * FROM other")
        for _ in range(50):
            writing.execute("UPDATE other SET a = a + 1")
        finding = examined(place.url)["history list"]
        assert (finding.level, "wait to be purged" in finding.why) == ("warn", True)


def test_tables_of_another_engine_are_bad(mysql_server: MysqlDatabases, place: Place) -> None:
    use(place)
    mysql_server.ask("ALTER TABLE multiq_jobs ENGINE=MyISAM", database=place.name)
    finding = examined(place.url)["engine"]
    assert (finding.level, "multiq_jobs is MyISAM" in finding.why) == ("bad", True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE multiq_schema SET version = version + 1, oldest = version", "upgrade multiq"),
        ("ALTER TABLE multiq_schema DROP COLUMN oldest", "not multiq's"),
    ],
)
def test_tables_that_this_multiq_cannot_use_are_bad(
    mysql_server: MysqlDatabases, place: Place, change: str, words: str
) -> None:
    use(place)
    mysql_server.ask(change, database=place.name)
    finding = examined(place.url)["tables"]
    assert finding.level == "bad"
    assert words in f"{finding.why} {finding.advice}"


def test_a_finding_that_the_user_may_not_read_is_unknown_and_never_ok(
    mysql_server: MysqlDatabases, place: Place
) -> None:
    use(place)
    with mysql_server.account("SELECT, INSERT, UPDATE, DELETE", f"{place.name}.*") as account:
        found = examined(account.url(place.name))
    assert levels(found) == {"oldest snapshot": "unknown"}
    assert "PROCESS" in found["oldest snapshot"].advice


def test_a_server_that_others_can_reach_wants_a_password_and_encryption(new_mysql: NewMysql) -> None:
    server = new_mysql(bind_address="0.0.0.0")  # noqa: S104 - for a moment, on a port of its own
    with server.database() as place:
        # Given an address that does not look like loopback
        found = examined(f"mysql://root@0.0.0.0:{server.port}/{place.name}")
    assert (found["encryption"].level, found["password"].level) == ("warn", "bad")
    assert "tls=yes" in found["encryption"].advice


def test_a_server_that_is_not_there_is_an_error_and_no_finding(new_mysql: NewMysql) -> None:
    server = new_mysql()
    server.stop()
    with open_backend(server.url("jobs")) as backend, pytest.raises(BackendUnavailable):
        backend.doctor()
