"""``mariadbd`` with a data folder of its own, or the server that ``MULTIQ_TEST_MYSQL_URL`` names.

with MysqlServer(sql_mode="ANSI") as server, server.database() as place:
    open_backend(place.url)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import pymysql

from multiq_mysql.bench import empty_data
from servers.process import HOST, PATIENCE, Server, free_port, require, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pymysql.connections import Connection

    from servers.certificate import Certificate


A_NEW_COPY = 0.15
"""Seconds to wait before each query of ``INNODB_TRX``: InnoDB shows a cached copy, and renews it only if it has not
been read for 0.1 s (CACHE_MIN_IDLE_TIME_NS in storage/innobase/trx/trx0i_s.cc). A test that polls faster sees the same
copy for ever.
"""

_RUNNING = "MULTIQ_TEST_MYSQL_URL"

#: durable, because the benchmarks and the fault tests need that, and small, because many servers run side by side
_SETTINGS = {
    "innodb_flush_log_at_trx_commit": "1",
    "innodb_buffer_pool_size": "64M",
    "innodb_log_file_size": "48M",
    "performance_schema": "OFF",
    "max_connections": "300",
}


class Place(NamedTuple):
    """A database for one test alone, and how to reach it."""

    url: str
    """The URL for multiq, over TCP."""
    name: str


class MysqlDatabases:
    """A MySQL or MariaDB server on which tests make databases and accounts, and remove them again."""

    def __init__(
        self, host: str, port: int, user: str = "root", password: str = "", unix_socket: Path | None = None
    ) -> None:
        self.host, self.port, self.user, self.password = host, port, user, password
        self.socket = unix_socket
        """The UNIX socket, which ``client`` prefers; None: TCP only."""

    @contextlib.contextmanager
    def database(self, *, options: str = "") -> Iterator[Place]:
        """A new, empty database, dropped at the end; *options* follow the ``?`` of its URL."""
        name = f"multiq_{uuid.uuid4().hex}"
        self.ask(f"CREATE DATABASE {name}")
        try:
            yield Place(self.url(name, options), name)
        finally:
            self.ask(f"DROP DATABASE IF EXISTS {name}")

    @contextlib.contextmanager
    def account(self, rights: str, on: str, *, password: str = "sécret/@:", more: str = "") -> Iterator[MysqlDatabases]:  # noqa: S107 - of a test
        """The same server for a new user with these rights on a database or on ``*.*``; dropped at the end."""
        name = f"u{uuid.uuid4().hex[:16]}"
        self.ask(f"CREATE USER {name} IDENTIFIED BY %s {more}", password)
        try:
            if rights:
                self.ask(f"GRANT {rights} ON {on} TO {name}")
            yield MysqlDatabases(self.host, self.port, user=name, password=password, unix_socket=self.socket)
        finally:
            self.ask(f"DROP USER {name}")

    def url(self, database: str, options: str = "", *, port: int | None = None, user: str | None = None) -> str:
        """The URL for multiq; *port* is for a proxy's port, *user* may contain a password: ``ann:secret``."""
        password = f":{quote(self.password, safe='')}" if self.password else ""
        who = user or f"{quote(self.user, safe='')}{password}"
        return f"mysql://{who}@{self.host}:{port or self.port}/{database}" + (f"?{options}" if options else "")

    def connect(self, database: str | None = None, **options: Any) -> Connection[Any]:
        """A plain connection, without multiq. It commits automatically unless *options* say otherwise."""
        place: dict[str, Any] = {"host": self.host, "port": self.port}
        if self.socket is not None:
            place["unix_socket"] = str(self.socket)
        usual = {
            "connect_timeout": int(PATIENCE),
            "read_timeout": 600,
            "autocommit": True,
            "ssl_disabled": True,  # otherwise PyMySQL reads the system's authorities for each connection
        }
        return pymysql.connect(
            **{
                **place,
                "user": self.user,
                "password": self.password.encode(),
                "database": database,
                **usual,
                **options,
            }
        )

    @contextlib.contextmanager
    def client(self, database: str | None = None, **options: Any) -> Iterator[Connection[Any]]:
        """``connect``, closed at the end."""
        with contextlib.closing(self.connect(database, **options)) as connection:
            yield connection

    def ask(self, statement: str, *values: object, database: str | None = None) -> tuple[tuple[Any, ...], ...]:
        """Execute one statement. Returns its rows."""
        with self.client(database) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return tuple(cursor.fetchall())

    def set(self, name: str, value: object) -> None:
        """``SET GLOBAL``: it holds for new sessions, until the next restart."""
        self.ask(f"SET GLOBAL {name} = %s", value)

    def variable(self, name: str) -> str:
        """The value of a global variable, as text."""
        ((_, value),) = self.ask("SHOW GLOBAL VARIABLES LIKE %s", name)
        return str(value)

    def status(self, name: str) -> int:
        """The value of one of the server's status counters."""
        ((_, value),) = self.ask("SHOW GLOBAL STATUS LIKE %s", name)
        return int(value)


class MysqlServer(MysqlDatabases, Server):
    """``mariadbd`` on a UNIX socket and a TCP port; its data is kept over restarts. User root needs no password.

    Settings are the server's own, with underscores: ``MysqlServer(sql_mode="ANSI")``. *system_zone* is the time zone of
    its machine in POSIX notation, because MariaDB's own setting goes no further than +13:00.
    """

    program = "mariadbd"
    package = "mariadb-server"

    def __init__(
        self, *, certificate: Certificate | None = None, system_zone: str = "UTC0", **settings: object
    ) -> None:
        Server.__init__(self)
        MysqlDatabases.__init__(self, HOST, free_port(), unix_socket=self.folder / "m.sock")
        self._system_zone = system_zone
        self.data = self.folder / "data"
        self._settings = {
            **_SETTINGS,
            "datadir": self.data,
            "socket": self.socket,
            "port": self.port,
            "bind_address": HOST,
            "pid_file": self.folder / "pid",
            "tmpdir": self.folder,
            "skip_name_resolve": 1,
            **({} if certificate is None else _tls(certificate)),
            **settings,
        }
        if os.geteuid() == 0:
            self._settings["user"] = "root"  # without this setting the server refuses to run as root
        require("mariadb-install-db", self.package)
        shutil.copytree(empty_data(), self.data)

    def command(self) -> Sequence[str]:
        return ["env", f"TZ={self._system_zone}", *super().command()]

    def arguments(self) -> Sequence[str]:
        return ["--no-defaults", *(f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items())]

    def change(self, **settings: object) -> None:
        """Change settings for the next start."""
        self._settings.update(settings)

    def restart(self) -> None:
        """Shut down cleanly, and start again."""
        self.stop()
        self.start()

    def pause(self) -> None:
        super().pause()
        until(self._stands_still, "all threads of the server have stopped")

    def answers(self) -> bool:
        with contextlib.suppress(pymysql.MySQLError, OSError):
            with socket.socket(socket.AF_UNIX) as probe:  # PyMySQL does not close a socket that cannot connect
                probe.connect(str(self.socket))
            return self.ask("SELECT 1") == ((1,),)
        return False

    def _stands_still(self) -> bool:
        states = [
            stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ]
        return set(states) == {"T"}


def running() -> MysqlDatabases | None:
    """The server that ``MULTIQ_TEST_MYSQL_URL`` names, or None; its user must be allowed to create databases."""
    text = os.environ.get(_RUNNING)
    if not text:
        return None
    parts = urlsplit(text)
    return MysqlDatabases(
        parts.hostname or HOST,
        parts.port or 3306,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
    )


@contextlib.contextmanager
def any_server() -> Iterator[MysqlDatabases]:
    """The server that is already running, or else a new one; for tests that do not change it."""
    named = running()
    if named is not None:
        yield named
        return
    with MysqlServer() as server:
        yield server


def _tls(certificate: Certificate) -> dict[str, object]:
    return {"ssl_cert": certificate.pair, "ssl_key": certificate.pair, "ssl_ca": certificate.authority}
