"""The stores that hold the jobs: private servers and files, all empty at the beginning of each turn."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from servers.mysql import MysqlServer
from servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

_BUFFER = 1 << 16


class Store(ABC):
    """A server or file that exists until the end of the ``with`` block."""

    durability: str
    """What survives a crash, in a few words."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()

    @abstractmethod
    def fresh(self) -> contextlib.AbstractContextManager[str]:
        """The URL of an empty store for one turn."""

    @abstractmethod
    def version(self) -> str:
        """The program's name and version."""

    def commands(self, seconds: float) -> float | None:
        """How many commands or statements clients send in *seconds*. If the result is None, the store has no server."""
        time.sleep(seconds)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class RedisStore(Store):
    """redis-server, over loopback TCP."""

    durability = "nothing is written to disk"

    def __init__(self) -> None:
        super().__init__()
        self._server = self._opened.enter_context(RedisServer())

    @contextlib.contextmanager
    def fresh(self) -> Iterator[str]:
        self._server.ask("FLUSHALL")
        yield f"{self._server.url}/0"

    def version(self) -> str:
        return f"Redis {self._server.ask('INFO', 'server')['redis_version']}"

    def commands(self, seconds: float) -> float:
        """Counts with MONITOR, because the server's own counters include the commands inside scripts."""
        seen = bytearray()
        end = time.monotonic() + seconds
        with socket.create_connection((self._server.url.split("/")[2].split(":")[0], self._server.port)) as connection:
            connection.sendall(b"MONITOR\r\n")
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    seen += connection.recv(_BUFFER)
        lines = seen.decode(errors="replace").splitlines()
        return sum(line.startswith("+") and line != "+OK" and " lua]" not in line for line in lines)


class MysqlStore(Store):
    """mariadbd, over loopback TCP."""

    durability = "innodb_flush_log_at_trx_commit=1: each commit is on disk"

    def __init__(self) -> None:
        super().__init__()
        self._server = self._opened.enter_context(MysqlServer())

    @contextlib.contextmanager
    def fresh(self) -> Iterator[str]:
        with self._server.database() as place:
            yield place.url

    def version(self) -> str:
        return f"MariaDB {str(self._server.ask('SELECT VERSION()')[0][0]).partition('-')[0]}"

    def commands(self, seconds: float) -> float:
        before = self._server.status("Questions")
        time.sleep(seconds)
        own = 1  # the status query
        return self._server.status("Questions") - before - own


class SqliteStore(Store):
    """A new file for each turn, in the folder for temporary files."""

    durability = "write-ahead log, synchronous=full: each commit is on disk"

    @contextlib.contextmanager
    def fresh(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="multiq-peers-", ignore_cleanup_errors=True) as folder:
            yield f"sqlite:///{Path(folder) / 'jobs.db'}"

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"


STORES: dict[str, type[Store]] = {"redis": RedisStore, "mysql": MysqlStore, "sqlite": SqliteStore}
