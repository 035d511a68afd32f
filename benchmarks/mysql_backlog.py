"""multiq on MariaDB with a long queue, and with many deleted jobs: ``python benchmarks/mysql_backlog.py --help``.

The script measures two things. First, the script measures enqueue, reserve and ack while a million jobs wait
(``--waiting``), and compares the times with an empty queue. Second, the script measures reserve while another client
holds a snapshot open. The snapshot prevents InnoDB from purging a hundred thousand finished jobs (``--past``). The
servers are private, with ``innodb_flush_log_at_trx_commit=1``. The script needs the extra ``dev``, and mariadbd
(``.ci/install-servers``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from backlog import QUEUE, SAMPLES, beside_empty, fill, verbs
from beside import Figures, arguments, median_and_p99, report, timed
from servers.mysql import MysqlServer

from multiq.backend import Ack, Lease
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    import argparse

SETTLING = 3  # seconds in which the server writes the enqueued jobs to its files
SETTINGS: dict[str, Any] = {"innodb_buffer_pool_size": "1G", "innodb_log_file_size": "512M"}
TAKEN = 100  # jobs in a batch of the consumer
_NEWCOMER = """
import sys, time
from multiq.backend.registry import open_backend
with open_backend(sys.argv[1]) as backend, backend.consumer([sys.argv[2]]) as consumer:
    backend.stats("other")
    times = []
    for _ in range(20):
        start = time.perf_counter()
        consumer.reserve(1, 0)
        times.append(time.perf_counter() - start)
    print(times[0], sorted(times)[len(times) // 2])
"""


def main() -> None:
    options = arguments(__doc__, waiting=1_000_000, past=100_000)
    measurements = {"waiting jobs": partial(waiting_jobs, options), "an open snapshot": partial(open_snapshot, options)}
    report("multiq on MariaDB with a long queue", measurements, as_json=options.json)


# --- a long queue ----------------------------------------------------------------------------------------


def waiting_jobs(options: argparse.Namespace) -> Figures:
    """How long enqueue, reserve and ack take on a long queue, and how much disk space a job takes."""
    with (
        MysqlServer(**SETTINGS) as server,
        server.database() as place,
        open_backend(place.url) as long,
        server.database() as other,
        open_backend(other.url) as short,
    ):
        fill(long, options.waiting)
        empty, full = verbs(short, long)
        size = sum(file.stat().st_size for file in (server.data / place.name).glob("multiq_jobs*.ibd"))
    return {
        "waiting jobs": options.waiting,
        "bytes on disk per job, 100-byte body": size / options.waiting,
        **beside_empty(empty, full),
    }


# --- a long past -----------------------------------------------------------------------------------------


def open_snapshot(options: argparse.Namespace) -> Figures:
    """Does the same work on two servers. On one server, another client's transaction began before the work.

    The two servers are measured one after the other, because a second busy server would distort the 99th percentile.
    """
    figures: Figures = {"jobs worked off": options.past}
    for name, is_held in (("snapshot held", True), ("no snapshot", False)):
        with ExitStack() as stack:
            side = _Side(stack, stack.enter_context(MysqlServer(**SETTINGS)))
            fill(side.backend, options.past)
            time.sleep(SETTLING)
            if is_held:
                side.hold_snapshot(stack)
            while not side.step(options.past):
                pass
            for _ in range(SAMPLES):
                side.times["reserve of nothing"].append(timed(partial(side.consumer.reserve, 1, 0)))
            figures.update({f"{name}: {what}": value for what, value in side.figures().items()})
    return figures


class _Side:
    """Times on one server while a queue is drained: reserves of 100 jobs, with reserves of single jobs in between."""

    def __init__(self, stack: ExitStack, server: MysqlServer) -> None:
        self.server = server
        self.place = stack.enter_context(server.database())
        self.backend = stack.enter_context(open_backend(self.place.url))
        self.consumer = stack.enter_context(self.backend.consumer([QUEUE]))
        self.times: dict[str, list[float]] = {"reserve of one": [], "reserve of 100": [], "reserve of nothing": []}
        self._done = 0

    def hold_snapshot(self, stack: ExitStack) -> None:
        reader = stack.enter_context(self.server.client(self.place.name))
        with reader.cursor() as cursor:
            cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
            cursor.execute("SELECT COUNT(*) FROM multiq_jobs")

    def step(self, count: int) -> bool:
        """Reserve and ack one job, then 100 jobs. Returns whether all *count* jobs are done."""
        for limit, name in ((1, "reserve of one"), (TAKEN, "reserve of 100")):
            if self._done == count:
                return True
            leases: list[Lease] = []
            self.times[name].append(timed(partial(self._reserve, leases, limit)))
            if not leases or any(self.consumer.settle([Ack(lease) for lease in leases])):
                raise SystemExit(f"the figures are void: {count - self._done} of {count} jobs were lost")
            self._done += len(leases)
        return self._done == count

    def figures(self) -> Figures:
        figures: Figures = {"history list length": self.server.status("Innodb_history_list_length")}
        for what, values in self.times.items():
            median, p99 = median_and_p99(values)
            figures |= {f"{what}: median ms": median * 1000, f"{what}: p99 ms": p99 * 1000}
        first, median = _newcomer(self.place.url)
        return figures | {
            "a new process, its first reserve ms": first * 1000,
            "a new process, its later reserves: median ms": median * 1000,
        }

    def _reserve(self, into: list[Lease], limit: int) -> None:
        into += self.consumer.reserve(limit, 0)


def _newcomer(url: str) -> tuple[float, float]:
    """Run a new process that measures its first reserve and its later reserves. Returns the seconds."""
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-c", _NEWCOMER, url, QUEUE], capture_output=True, text=True, check=True
    )
    first, median = map(float, done.stdout.split())
    return first, median


if __name__ == "__main__":
    main()
