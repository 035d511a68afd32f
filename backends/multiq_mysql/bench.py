"""MySQL's adapter for ``multiq bench``. It starts a MariaDB, and reads a server's settings and counters."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.constants import ER

from multiq.bench import servers
from multiq.bench.adapter import Adapter, Bench, Counters, Durability
from multiq.bench.servers import HOST, ServerFailed, cpu_seconds, free_port, resident_bytes
from multiq.settings.url import parse_url

from .backend import MysqlBackend
from .baseline import MysqlBaseline
from .doctor import name_and_version, survives
from .dsn import Dsn
from .errors import explain
from .opening import open_connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pymysql.connections import Connection

    from multiq.bench.adapter import Baseline, Profile

_PACKAGE = "mariadb-server"
_DATABASE = "multiq_bench"
_DURABILITY_SETTINGS = ("innodb_flush_log_at_trx_commit", "innodb_doublewrite", "log_bin", "sync_binlog")

_DENIED = frozenset({ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR})

#: innodb_flush_log_at_trx_commit: with 0, a commit leaves the log in the server's memory. With 1, it syncs the log to
#: the disk.
_PROFILES = {"fast": "0", "durable": "1"}

#: The cache and the log are so large that they do not limit the measurement.
_SETTINGS = {
    "innodb_buffer_pool_size": "256M",
    "innodb_log_file_size": "96M",
    "max_connections": "300",
    "skip_name_resolve": "1",
    "skip_log_bin": "1",
}


class MysqlServer(servers.Server):
    """``mariadbd`` on a loopback port and a UNIX socket, with a data folder of its own. User root needs no password."""

    program, package = "mariadbd", _PACKAGE

    def __init__(self, folder: Path, profile: Profile) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._socket = folder / "m.sock"
        self._settings = {
            **_SETTINGS,
            "innodb_flush_log_at_trx_commit": _PROFILES[profile],
            "datadir": folder / "data",
            "socket": self._socket,
            "port": self.port,
            "bind_address": HOST,
            "pid_file": folder / "pid",
            "tmpdir": folder,
            **({"user": "root"} if os.geteuid() == 0 else {}),  # mariadbd runs as root only with this option
        }
        shutil.copytree(empty_data(), folder / "data")

    @property
    def url(self) -> str:
        return f"mysql://root@{HOST}:{self.port}/{_DATABASE}"

    def arguments(self) -> Sequence[str]:
        return ["--no-defaults", *(f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items())]

    def answers(self) -> bool:
        """Whether the server answers. If the server answers, this property also creates the database."""
        with suppress(pymysql.MySQLError, OSError):
            with socket.socket(socket.AF_UNIX) as probe:  # PyMySQL does not close a socket that fails to connect
                probe.connect(str(self._socket))
            with closing(pymysql.connect(unix_socket=str(self._socket), user="root", ssl_disabled=True)) as connection:
                connection.query(f"CREATE DATABASE IF NOT EXISTS {_DATABASE}")
            return True
        return False


class MysqlAdapter(Adapter):
    """The adapter for the server that a URL names.

    The server's memory and CPU are known only if the server runs on this machine and its pid file can be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url, MysqlBackend.options)
        self._dsn = Dsn.from_url(parsed)
        self._timeout = parsed.options["timeout"]
        self._connection: Connection[Any] | None = None
        self._asked = 0

    def version(self) -> str:
        return name_and_version(self._pairs("SHOW GLOBAL VARIABLES LIKE 'version'"))

    def durability(self) -> Durability:
        settings = self._pairs("SHOW GLOBAL VARIABLES")
        durable = {name: settings[name] for name in _DURABILITY_SETTINGS if name in settings}
        if durable.get("log_bin", "OFF") in {"OFF", "0"}:
            durable.pop("sync_binlog", None)  # without a binlog the setting has no effect
        return Durability(survives(settings), durable)

    def counters(self) -> Counters:
        pid = self._pid  # read first, because the server also counts the statements that find the pid
        status = self._pairs("SHOW GLOBAL STATUS WHERE variable_name IN ('Questions', 'Bytes_received', 'Bytes_sent')")
        return Counters(
            commands=int(status["questions"]) - self._asked,
            received=int(status["bytes_received"]),
            sent=int(status["bytes_sent"]),
            memory=None if pid is None else resident_bytes(pid),
            cpu=None if pid is None else cpu_seconds(pid),
        )

    def baseline(self, body: bytes) -> Baseline | None:
        """Return the baseline. None if this user may not create tables."""
        try:
            return MysqlBaseline(
                open_connection(self._dsn, 60.0, autocommit=True, client_flag=MysqlBaseline.FLAG), body
            )
        except pymysql.OperationalError as exc:
            if exc.args[0] in _DENIED:
                return None
            raise self._explained(exc) from exc

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @functools.cached_property
    def _pid(self) -> int | None:
        """The server's process id.

        None if the server runs on another machine or in a container. In that case, another process on this machine may
        have this id.
        """
        variables = self._pairs("SHOW GLOBAL VARIABLES WHERE variable_name IN ('hostname', 'datadir', 'pid_file')")
        if variables.get("hostname") != socket.gethostname():
            return None
        with suppress(OSError, ValueError):
            return int(Path(variables["datadir"], variables["pid_file"]).read_text())
        return None

    def _pairs(self, poll: str) -> dict[str, str]:
        """The rows of a ``SHOW`` statement, with names in lower case."""
        try:
            if self._connection is None or not self._connection.open:
                self._connection = open_connection(self._dsn, self._timeout, autocommit=True)
                self._asked += 1  # The counter of questions includes the opening of a session.
            with self._connection.cursor() as cursor:
                cursor.execute(poll)
                self._asked += 1
                return {str(name).lower(): str(value) for name, value in cursor.fetchall()}
        except (pymysql.MySQLError, OSError) as exc:
            raise self._explained(exc) from exc

    def _explained(self, exc: Exception) -> Exception:
        return explain(exc, self._dsn.place, self._timeout)


class MysqlBench(Bench):
    """A throwaway ``mariadbd``, or the server of any URL that this driver takes."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:
        with MysqlServer(folder, profile) as server, cls.at(server.url) as place:
            yield place

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        with closing(MysqlAdapter(url)) as place:
            yield place


@functools.cache
def empty_data() -> Path:
    """Return an empty data folder. It is created once per process, which takes half a second. It is then copied for
    each server.

    Raises ``ServerMissing``, ``ServerFailed``.
    """
    install = servers.find("mariadb-install-db", _PACKAGE)
    folder = tempfile.TemporaryDirectory(prefix="multiq-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    data = Path(folder.name) / "data"
    done = subprocess.run(  # noqa: S603 - found on the PATH, with fixed arguments
        [
            install,
            "--no-defaults",
            f"--datadir={data}",
            f"--tmpdir={folder.name}",  # in a shared folder it would remove temporary tables of another server
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
            "--innodb-log-file-size=8M",
            "--innodb-buffer-pool-size=16M",
            *(["--user=root"] if os.geteuid() == 0 else []),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServerFailed(f"mariadb-install-db failed:\n{done.stdout[-3000:]}")
    return data
