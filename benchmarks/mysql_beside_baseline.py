"""multiq on MariaDB, compared with its baseline in one run: ``python benchmarks/mysql_beside_baseline.py --help``.

For each figure, multiq and a plain PyMySQL loop take turns on one private server over TCP, with
``innodb_flush_log_at_trx_commit=1``. The script checks that no job was lost or doubled. The script needs mariadbd and
the extra ``dev``.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql
from bench_app import app
from beside import QUEUE, Figures, Workers, arguments, latencies, lateness, report
from beside_server import IDLE_SECONDS, BesideServer
from servers.mysql import MysqlServer
from servers.process import until

from multiq.backend import NewJob
from multiq.backend.registry import open_backend
from multiq.envelope import ENVELOPE_VERSION, Envelope, encode_envelope
from multiq.ids import new_id

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

IDLE_WORKERS = 10  # each worker has its own database, so that one idle period gives ten samples


def main() -> None:
    options = arguments(__doc__, repeats=5, jobs=20_000, samples=200)
    with MysqlServer() as server:
        version = server.ask("SELECT VERSION()")[0][0]
        measurements = BesideMysql(server, options).measurements()
        report(f"multiq on {version}, PyMySQL {pymysql.VERSION_STRING}", measurements, as_json=options.json)


class BesideMysql(BesideServer):
    """Each repeat has its own database. In a shared database, deleted rows that are not yet purged would slow down the
    next repeat."""

    asks = drain_asks = "statements"
    singles = 1 / 10
    settling = IDLE_SECONDS

    def __init__(self, server: MysqlServer, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._server = server

    @contextmanager
    def empty(self) -> Iterator[str]:
        with self._server.database() as place:
            yield place.url

    @contextmanager
    def connected(self) -> Iterator[str]:
        with self.empty() as url:
            app.connect(url)
            app.backend.queues()  # makes the tables
            try:
                yield url
            finally:
                app.close()

    def all_wait(self, url: str, workers: int) -> None:
        """Wait until the workers and the producer are connected."""

        def waiting() -> bool:
            asked = "SELECT COUNT(*) FROM information_schema.processlist WHERE db = %s"
            return bool(self._server.ask(asked, _database(url))[0][0] > workers)

        until(waiting, "the workers are connected")
        time.sleep(0.5)

    @contextmanager
    def emptiness(self, url: str) -> Iterator[Callable[[], bool]]:
        """The check reads the last row. A scan from the first row would pass deleted rows that are not yet purged."""
        with self._server.client(_database(url)) as client, client.cursor() as cursor:
            yield lambda: not cursor.execute("SELECT seq FROM multiq_jobs ORDER BY seq DESC LIMIT 1")

    def asked(self) -> int:
        return self._server.status("Questions")

    def latency(self) -> Figures:
        """How late a worker begins its first job after ten idle seconds."""
        with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder, ExitStack() as stack:
            stamps = Path(folder, "stamps")
            stamps.write_text("")
            backends = []
            for _ in range(IDLE_WORKERS):
                url = stack.enter_context(self.empty())
                backends.append(stack.enter_context(open_backend(url)))
                backends[-1].queues()
                stack.enter_context(Workers(url, processes=1, stamps=stamps))
                self.all_wait(url, 1)
            sent = 0
            while sent < self.samples:
                time.sleep(IDLE_SECONDS)
                for backend in backends:
                    time.sleep(random.uniform(0.02, 0.1))  # noqa: S311 - spreads them
                    backend.enqueue(QUEUE, [_stamp()])
                    sent += 1
            until(lambda: len(lateness(stamps)) == sent, "all have begun")
            return latencies("pickup", lateness(stamps))


def _database(url: str) -> str:
    return url.rpartition("/")[2]


def _stamp() -> NewJob:
    return NewJob(encode_envelope(Envelope(ENVELOPE_VERSION, "stamp", [time.monotonic_ns()])), new_id())


if __name__ == "__main__":
    main()
