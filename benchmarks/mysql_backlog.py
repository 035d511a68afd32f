"""multiq on MariaDB with a long queue, and with a long past: ``python benchmarks/mysql_backlog.py --help``.

Two questions. What enqueue, reserve and ack cost in front of a million waiting jobs, compared with an empty queue; and
what reserve costs while somebody else on the server holds a snapshot open, so that nothing of a hundred thousand jobs
that were worked off can be purged. On private servers with ``innodb_flush_log_at_trx_commit=1``. Needs the extra
``dev``, and mariadbd (``.ci/install-servers``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from multiq.backend import Ack, Lease, NewJob
from multiq.ids import new_ids
from multiq.registry import open_backend

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from servers.mysql import MysqlServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend, Consumer

Figures = dict[str, float]

QUEUE = "mail"
BODY = b"x" * 100
BATCH = 1_000
SAMPLES = 500
SETTLING = 3  # seconds in which the server writes what was enqueued
SETTINGS: dict[str, Any] = {"innodb_buffer_pool_size": "1G", "innodb_log_file_size": "512M"}
TAKEN = 100  # jobs in a batch of who works them off
_NEWCOMER = """
import sys, time
from multiq.registry import open_backend
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
    options = _arguments()
    figures: Figures = {}
    console = Console(stderr=True)
    with console.status("") as status:
        for name, measure in {"waiting jobs": waiting_jobs, "an open snapshot": open_snapshot}.items():
            status.update(name)
            with MysqlServer(**SETTINGS) as server:
                figures.update(measure(server, options))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)


# --- a long queue ----------------------------------------------------------------------------------------


def waiting_jobs(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """The price of the verbs in front of all of them, and what each takes on the disk."""
    with (
        server.database() as place,
        open_backend(place.url) as long,
        server.database() as other,
        open_backend(other.url) as short,
    ):
        _fill(long, options.waiting)
        empty, full = _verbs(short, long)
        size = sum(file.stat().st_size for file in (server.data / place.name).glob("multiq_jobs*.ibd"))
    figures: Figures = {"waiting jobs": options.waiting, "bytes on disk per job, 100-byte body": size / options.waiting}
    for verb, (median, p99) in full.items():
        figures[f"{verb}, empty queue: median ms"] = empty[verb][0] * 1000
        figures[f"{verb}, full queue: median ms"] = median * 1000
        figures[f"{verb}, full queue: p99 ms"] = p99 * 1000
        figures[f"{verb}, full : empty"] = median / empty[verb][0]
    return figures


def _verbs(*backends: Backend) -> list[dict[str, tuple[float, float]]]:
    """Median and p99 seconds of each verb on each backend, taken in turns; queues are as long afterwards as before."""
    times: list[dict[str, list[float]]] = [{"enqueue": [], "reserve": [], "ack": []} for _ in backends]
    with ExitStack() as stack:
        consumers = [stack.enter_context(backend.consumer([QUEUE])) for backend in backends]
        for _ in range(SAMPLES):
            for backend, consumer, into in zip(backends, consumers, times, strict=True):
                _take(backend, consumer, into)
    return [{verb: _summary(seconds) for verb, seconds in into.items()} for into in times]


def _take(backend: Backend, consumer: Consumer, into: dict[str, list[float]]) -> None:
    leases: list[Lease] = []
    into["enqueue"].append(_timed(lambda: backend.enqueue(QUEUE, _jobs(1))))
    into["reserve"].append(_timed(lambda: leases.extend(consumer.reserve(1, 0))))
    into["ack"].append(_timed(lambda: consumer.settle([Ack(leases[0])])))


# --- a long past -----------------------------------------------------------------------------------------


def open_snapshot(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """The same work on two servers: one has a transaction of somebody else's that began before it.

    One after the other, as a second server at work is what p99 would show most of all.
    """
    figures: Figures = {"jobs worked off": options.past}
    for name, is_held in (("snapshot held", True), ("no snapshot", False)):
        with ExitStack() as stack:
            side = _Side(stack, server if is_held else stack.enter_context(MysqlServer(**SETTINGS)))
            _fill(side.backend, options.past)
            time.sleep(SETTLING)
            if is_held:
                side.hold_snapshot(stack)
            while not side.step(options.past):
                pass
            for _ in range(SAMPLES):
                side.times["reserve of nothing"].append(_timed(lambda side=side: side.consumer.reserve(1, 0)))  # type: ignore[misc]
            figures.update({f"{name}: {what}": value for what, value in side.figures().items()})
    return figures


class _Side:
    """One server with a queue that is worked off, by 100 and in between one by itself."""

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
        """Reserve one, then 100, and ack them. Whether all *count* are done."""
        for limit, name in ((1, "reserve of one"), (TAKEN, "reserve of 100")):
            if self._done == count:
                return True
            leases: list[Lease] = []
            self.times[name].append(_timed(partial(self._reserve, leases, limit)))
            if not leases or any(self.consumer.settle([Ack(lease) for lease in leases])):
                raise SystemExit(f"the figures are void: {count - self._done} of {count} jobs were lost")
            self._done += len(leases)
        return self._done == count

    def figures(self) -> Figures:
        figures: Figures = {"history list length": self.server.status("Innodb_history_list_length")}
        for what, values in self.times.items():
            median, p99 = _summary(values)
            figures |= {f"{what}: median ms": median * 1000, f"{what}: p99 ms": p99 * 1000}
        first, median = _newcomer(self.place.url)
        return figures | {
            "a new process, its first reserve ms": first * 1000,
            "a new process, its next ones: median ms": median * 1000,
        }

    def _reserve(self, into: list[Lease], limit: int) -> None:
        into += self.consumer.reserve(limit, 0)


def _newcomer(url: str) -> tuple[float, float]:
    """A process that has not seen anything of this yet: seconds of its first reserve, and of the next ones."""
    done = subprocess.run(  # noqa: S603 - this very interpreter
        [sys.executable, "-c", _NEWCOMER, url, QUEUE], capture_output=True, text=True, check=True
    )
    first, median = map(float, done.stdout.split())
    return first, median


# --- shared ----------------------------------------------------------------------------------------------


def _fill(backend: Backend, count: int) -> None:
    for start in range(0, count, BATCH):
        backend.enqueue(QUEUE, _jobs(min(BATCH, count - start)))


def _jobs(count: int) -> list[NewJob]:
    return [NewJob(BODY, job_id) for job_id in new_ids(count)]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _summary(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1_000_000, help="jobs in the long queue")
    parser.add_argument("--past", type=int, default=100_000, help="jobs that are worked off")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
