"""Connecting to the server: TLS with a checked certificate, passwords from files, UNIX sockets, and errors in these."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
from servers.certificate import Certificate
from servers.mysql import MysqlServer

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, UrlInvalid
from multiq.ids import new_id
from multiq.settings.url import parse_url
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.dsn import Dsn
from multiq_mysql.opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from servers.mysql import MysqlDatabases, Place

SECRET = "S3CR3T/ü@:?"  # noqa: S105 - of a test


def dsn(url: str) -> Dsn:
    return Dsn.from_url(parse_url(url, MysqlBackend.options))


def works(url: str) -> None:
    with open_backend(url) as backend:
        job = NewJob(b"x", new_id())
        assert backend.enqueue("mail", [job]) == [job.id]
        backend.delete("mail", job.id)


# --- passwords -------------------------------------------------------------------------------------------


@pytest.fixture
def account(mysql_server: MysqlDatabases, place: Place) -> Iterator[MysqlDatabases]:
    with mysql_server.account("ALL", f"{place.name}.*", password=SECRET) as account:
        yield account


def bare(account: MysqlDatabases, place: Place, option: str = "") -> str:
    """The URL without the password."""
    return f"mysql://{account.user}@{account.host}:{account.port}/{place.name}{option}"


def test_a_password_in_the_url_may_have_any_character(account: MysqlDatabases, place: Place) -> None:
    works(account.url(place.name))


def test_a_password_file_is_read_again_for_each_connection(
    mysql_server: MysqlDatabases, account: MysqlDatabases, place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n", encoding="utf-8")
    url = bare(account, place, f"?password_file={file}")
    with open_backend(url) as backend:
        assert backend.queues() == []
        # When the password is changed on the server and in the file
        mysql_server.ask(f"ALTER USER {account.user} IDENTIFIED BY 'another one'")
        file.write_text("another one")
        backend.close()
        assert backend.queues() == []


def test_a_password_of_the_environment(account: MysqlDatabases, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DB_PASSWORD", SECRET)
    works(bare(account, place, "?password_env=SHOP_DB_PASSWORD"))


def test_a_password_that_is_not_where_it_should_be_is_reported(account: MysqlDatabases, place: Place) -> None:
    for option, words in (
        ("?password_env=NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE"),
        ("?password_file=/no/such/file", "/no/such/file"),
    ):
        with open_backend(bare(account, place, option)) as backend, pytest.raises(UrlInvalid, match=words):
            backend.queues()


def test_a_wrong_password_is_reported_without_showing_it(account: MysqlDatabases, place: Place) -> None:
    with open_backend(f"mysql://{account.user}:WR0NG@{account.host}:{account.port}/{place.name}") as backend:
        with pytest.raises(BackendUnavailable, match="password") as refused:
            backend.queues()
        assert "WR0NG" not in str(refused.value)


def test_a_login_does_not_show_its_password() -> None:
    assert "S3CR3T" not in repr(dsn("mysql://ann:S3CR3T@localhost/jobs"))


# --- addresses -------------------------------------------------------------------------------------------


def test_a_unix_socket(new_socket: Path, mysql_server: MysqlDatabases, place: Place) -> None:
    works(f"mysql://root@/{place.name}?unix_socket={new_socket}")


@pytest.fixture
def new_socket(mysql_server: MysqlDatabases) -> Path:
    if mysql_server.socket is None:
        pytest.skip("the server that MULTIQ_TEST_MYSQL_URL names is reached over TCP")
    return mysql_server.socket


def test_a_unix_socket_without_a_server_is_unavailable(tmp_path: Path) -> None:
    with (
        open_backend(f"mysql://root@/jobs?unix_socket={tmp_path}/none.sock") as backend,
        pytest.raises(BackendUnavailable, match=r"none\.sock"),
    ):
        backend.queues()


def test_a_url_in_the_notation_of_sqlalchemy(mysql_server: MysqlDatabases, place: Place) -> None:
    works(place.url.replace("mysql://", "mysql+pymysql://"))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://root@localhost", "name a database"),
        ("mysql://root@localhost/a/b", "name a database"),
        (f"mysql://root@localhost/{'x' * 65}", "name a database"),
        ("mysql:///jobs", "name a host"),
        ("mysql://root@localhost/jobs?unix_socket=/run/x", "not both"),
        ("mysql://root@one,two/jobs", "several hosts"),
        ("mysql+mariadbconnector://root@localhost/jobs", "the scheme must be mysql://"),
        ("mysql://root:S3CR3T@localhost/jobs?password_env=X", "given twice"),
        ("mysql://root@localhost/jobs?password_file=x&password_env=X", "given twice"),
        ("mysql://root@/jobs?unix_socket=/run/x&tls=yes", "a UNIX socket has no TLS"),
        ("mysql://root@localhost/jobs?ssl_ca=/no/such/file", "ssl_ca=/no/such/file"),
        ("mysql://root@localhost/jobs?ssl_cert=/no/such/file&tls=yes", "ssl_cert=/no/such/file"),
        ("mysql://root@localhost/jobs?charset=utf8", "unknown option"),
        ("mysql://root@localhost/jobs?tls=perhaps", "yes, no"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_before_anything_is_asked(url: str, words: str) -> None:
    with pytest.raises(UrlInvalid, match=words) as refused:
        dsn(url)
    assert "S3CR3T" not in str(refused.value)


# --- TLS -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return {
        "good": Certificate.make(folder, "good"),
        "another host": Certificate.make(folder, "another", host="elsewhere.example"),
        "expired": Certificate.make(folder, "expired", expired=True),
    }


@pytest.fixture(scope="module")
def tls_server(certificates: dict[str, Certificate]) -> Iterator[MysqlServer]:
    with MysqlServer(certificate=certificates["good"]) as server:
        yield server


def test_a_certificate_of_the_authority_that_is_named_is_accepted_and_the_way_is_encrypted(
    tls_server: MysqlServer, certificates: dict[str, Certificate]
) -> None:
    with tls_server.database(options=f"ssl_ca={certificates['good'].authority}") as place:
        works(place.url)
        connection = open_connection(dsn(place.url), 5)
        with connection, connection.cursor() as cursor:
            cursor.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
            ((_, cipher),) = cursor.fetchall()
        assert cipher
        with open_backend(place.url) as backend:
            assert {finding.level for finding in backend.doctor() if finding.what != "latency"} <= {"ok"}


def test_an_unknown_authority_is_refused(tls_server: MysqlServer, certificates: dict[str, Certificate]) -> None:
    for option in ("tls=yes", f"ssl_ca={certificates['expired'].authority}"):
        with (
            tls_server.database(options=option) as place,
            open_backend(place.url) as backend,
            pytest.raises(BackendUnavailable, match=r"(?i)certificate"),
        ):
            backend.queues()


@pytest.mark.parametrize("kind", ["another host", "expired"])
def test_a_certificate_for_another_host_or_time_is_refused(certificates: dict[str, Certificate], kind: str) -> None:
    certificate = certificates[kind]
    with (
        MysqlServer(certificate=certificate) as server,
        server.database(options=f"ssl_ca={certificate.authority}") as place,
        open_backend(place.url) as backend,
        pytest.raises(BackendUnavailable, match=r"(?i)certificate"),
    ):
        backend.queues()


def test_a_server_without_tls_is_refused_where_tls_is_asked_for(
    new_socket: Path, mysql_server: MysqlDatabases, place: Place, certificates: dict[str, Certificate]
) -> None:
    url = mysql_server.url(place.name, f"ssl_ca={certificates['good'].authority}")
    with open_backend(url) as backend, pytest.raises(BackendUnavailable, match=r"(?i)ssl|tls"):
        backend.queues()


def test_an_unchecked_certificate_is_warned_of(tls_server: MysqlServer) -> None:
    with tls_server.database(options="dangerously_skip_tls_verification=yes") as place:
        with pytest.warns(UserWarning, match="ssl_ca="):
            backend = open_backend(place.url)
        with backend, warnings.catch_warnings():
            assert backend.queues() == []


def test_an_account_that_must_use_tls_gets_an_error_that_says_so(
    tls_server: MysqlServer, certificates: dict[str, Certificate]
) -> None:
    with (
        tls_server.database() as place,
        tls_server.account("ALL", f"{place.name}.*", password="secret", more="REQUIRE SSL") as account,  # noqa: S106
    ):
        with open_backend(account.url(place.name)) as backend, pytest.raises(BackendUnavailable):
            backend.queues()
        works(account.url(place.name, f"ssl_ca={certificates['good'].authority}"))
