"""multiq on Redis, compared with its baseline in one run: ``python benchmarks/redis_beside_baseline.py --help``.

For each figure, multiq and a plain redis-py loop take turns on one private server over TCP that writes nothing to its
disk. The script checks that no job was lost or doubled. The script needs redis-server and the extra ``dev``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import redis
from baselines import pushes_through_redis_py
from bench_app import app
from beside import BODY, QUEUE, arguments, report
from beside_server import BesideServer
from servers.process import until
from servers.redis import RedisServer

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator


def main() -> None:
    options = arguments(__doc__, repeats=5, jobs=20_000, samples=300)
    with RedisServer() as server:
        app.connect(server.url)
        measurements = BesideRedis(server, options).measurements()
        report(f"multiq on Redis, redis-py {redis.__version__}", measurements, as_json=options.json)
        app.close()


class BesideRedis(BesideServer):
    """The rate of single enqueues is compared with ``LPUSH`` through redis-py. The app stays connected."""

    drain_asks = "scripts"

    def __init__(self, server: RedisServer, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._server = server

    @contextmanager
    def empty(self) -> Iterator[str]:
        self._server.ask("FLUSHALL")
        yield self._server.url

    def all_wait(self, _url: str, workers: int) -> None:
        def waiting() -> bool:
            return bool(self._server.ask("INFO", "clients")["blocked_clients"] >= workers)

        until(waiting, "the workers wait for jobs")

    @contextmanager
    def emptiness(self, _url: str) -> Iterator[Callable[[], bool]]:
        with self._server.client() as client:
            yield lambda: not client.exists(f"multiq:{{{QUEUE}}}:jobs")

    def asked(self) -> int:
        return self._server.consumers_sent

    def asked_by_drain(self) -> int:
        stats = self._server.ask("INFO", "commandstats")
        return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])

    def limit_one_by_one(self, count: int) -> float:
        with self.empty():
            return pushes_through_redis_py(self._server.port, BODY, count)


if __name__ == "__main__":
    main()
