"""The adapter of ``multiq bench`` for beanstalkd."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

from multiq.bench.adapter import Adapter, Bench, Counters, Durability
from multiq.bench.servers import HOST, Server, free_port, resident_bytes
from multiq.ids import new_id
from multiq.settings.url import parse_url

from .backend import BeanstalkBackend
from .baseline import BeanstalkBaseline
from .connection import open_connection
from .doctor import pairs, read_server, survives
from .dsn import address_of
from .errors import CONNECTION_ERRORS
from .pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from multiq.bench.adapter import Baseline, Profile

    from .doctor import Server as Examined

_STATS_COMMAND = "cmd-stats"  # the command that reads the counters


class BeanstalkServer(Server):
    """``beanstalkd`` on a loopback port. With a durable *profile*, the server syncs its log before each reply."""

    program = package = "beanstalkd"

    def __init__(self, folder: Path, profile: Profile) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._arguments = ["-l", HOST, "-p", str(self.port)]
        if profile == "durable":
            log = folder / "log-of-jobs"
            log.mkdir()
            self._arguments += ["-b", str(log), "-f0"]

    @property
    def url(self) -> str:
        return f"beanstalk://{HOST}:{self.port}"

    def arguments(self) -> Sequence[str]:
        return self._arguments

    def answers(self) -> bool:
        with suppress(*CONNECTION_ERRORS):
            deadline = time.monotonic() + 1
            connection = open_connection((HOST, self.port), deadline)
            try:
                return bool(connection.ask(b"stats\r\n", 1, deadline))
            finally:
                connection.close()
        return False


class BeanstalkAdapter(Adapter):
    """One server. The bytes of requests are not counted. The memory is known only for a server on this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        parsed = parse_url(url, BeanstalkBackend.options)
        self._pool = Pool(address_of(parsed), parsed.options["timeout"])

    def version(self) -> str:
        return f"beanstalkd {pairs(self._ask(b'stats'))['version']}"

    def durability(self) -> Durability:
        server = self._examined()
        return Durability(survives(server), _settings(server))

    def counters(self) -> Counters:
        server = self._examined()
        stats = server.later
        return Counters(
            commands=sum(int(n) for name, n in stats.items() if name.startswith("cmd-") and name != _STATS_COMMAND),
            memory=None if server.options is None else resident_bytes(int(stats["pid"])),
            cpu=float(stats["rusage-utime"]) + float(stats["rusage-stime"]),
        )

    def baseline(self, body: bytes) -> Baseline:
        return BeanstalkBaseline(self._pool.open(self._pool.deadline()), f"multiq.bench.{new_id()}", body)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def _examined(self) -> Examined:
        return read_server(self._ask, self._pool.address, pairs(self._ask(b"stats")))

    def _ask(self, command: bytes) -> bytes:
        ((_, body),) = self._pool.ask(command)
        return body


class BeanstalkBench(Bench):
    """A ``beanstalkd`` that the bench starts, or the server of a multiq URL."""

    @classmethod
    @contextmanager
    def throwaway(cls, folder: Path, profile: Profile) -> Iterator[Adapter]:
        with BeanstalkServer(folder, profile) as server, cls.at(server.url) as adapter:
            yield adapter

    @classmethod
    @contextmanager
    def at(cls, url: str) -> Iterator[Adapter]:
        with closing(BeanstalkAdapter(url)) as adapter:
            yield adapter


def _settings(server: Examined) -> dict[str, str]:
    """Return the settings that decide durability, without the log's folder."""
    settings = {"-b": "yes" if server.has_log else "no"}
    if server.has_log and server.options is not None:
        settings |= {f"-{name}": value or "yes" for name, value in server.options.items() if name in "fF"}
    return settings
