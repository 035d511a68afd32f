"""multiq on beanstalkd, compared with its baseline in one run: ``python benchmarks/beanstalk_beside_baseline.py
--help``.

For each figure, multiq and a plain loop take turns on one private server over TCP. By default the server writes nothing
to its disk; with ``--binlog 1`` it syncs before each answer. The script checks that no job was lost or doubled. The
script needs beanstalkd and the extra ``dev``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import greenstalk
from baselines import puts_through_greenstalk
from bench_app import app
from beside import BODY, QUEUE, arguments, expect, report
from beside_server import BesideServer
from servers.beanstalk import BeanstalkServer
from servers.process import HOST, until

from multiq.backend import State

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

#: commands with which this script watches the workers' progress
_OURS = frozenset({"cmd-stats", "cmd-stats-tube", "cmd-pause-tube", "cmd-put", "cmd-use"})


def main() -> None:
    options = arguments(__doc__, repeats=5, jobs=20_000, samples=300, binlog=0)
    with BeanstalkServer(binlog=bool(options.binlog)) as server:
        app.connect(server.url)
        measurements = BesideBeanstalk(server, options).measurements()
        kept = "-b -f0" if options.binlog else "no log"
        report(
            f"multiq on beanstalkd ({kept}), greenstalk {greenstalk.__version__}", measurements, as_json=options.json
        )
        app.close()


class BesideBeanstalk(BesideServer):
    """The rate of single enqueues is compared with greenstalk's ``put``. The app stays connected."""

    delay = 1.0  # the server's delays are whole seconds

    def __init__(self, server: BeanstalkServer, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._server = server

    @contextmanager
    def empty(self) -> Iterator[str]:
        """All jobs are ready when no worker runs."""
        app.backend.purge(QUEUE, [State.READY])
        with self._server.client() as client:
            expect(_jobs(client.stats()), 0)
        yield self._server.url

    def all_wait(self, _url: str, workers: int) -> None:
        with self._server.client() as client:
            until(lambda: int(client.stats()["current-waiting"]) >= workers, "the workers wait for jobs")

    @contextmanager
    def emptiness(self, _url: str) -> Iterator[Callable[[], bool]]:
        with self._server.client() as client:
            yield lambda: not _jobs(client.stats("tube", QUEUE))

    def asked(self) -> int:
        """How many commands the server received, without those that only the script itself sends."""
        with self._server.client() as client:
            stats = client.stats()
        return sum(int(value) for name, value in stats.items() if name.startswith("cmd-") and name not in _OURS)

    def limit_one_by_one(self, count: int) -> float:
        with self.empty():
            return puts_through_greenstalk((HOST, self._server.port), BODY, count)


def _jobs(stats: dict[str, str]) -> int:
    """How many jobs a tube holds. beanstalkd keeps no statistics of a tube without jobs."""
    states = ("ready", "reserved", "delayed", "buried")
    return sum(int(stats.get(f"current-jobs-{state}", 0)) for state in states)


if __name__ == "__main__":
    main()
