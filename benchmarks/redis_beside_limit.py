"""multiq on Redis beside its limit, in one run: ``python benchmarks/redis_beside_limit.py --help``.

Each figure of multiq and the plain redis-py loop it is compared with are taken in turns (A B A B...), because these
numbers move with the machine's mood; the ratio is of the medians. One private server for both, over TCP, that writes
nothing to its disk. Every job is accounted for. Needs redis-server and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from bench_app import app, noop, stamp
from limits import BULK, RedisLimit
from rich.console import Console
from rich.table import Table

from multiq.backend import NewJob
from multiq.codec import ENVELOPE_VERSION, Envelope, encode_envelope
from multiq.ids import new_id, new_ids

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from servers.process import until
from servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
BODY = encode_envelope(Envelope(ENVELOPE_VERSION, "noop", [12345]))
IDLE_SECONDS = 10
QUEUE = "default"


def main() -> None:
    options = _arguments()
    figures: dict[str, dict[str, float]] = {}
    console = Console(stderr=True)
    with RedisServer() as server, console.status("") as status:
        app.connect(server.url)
        for name, measure in MEASUREMENTS.items():
            status.update(name)
            figures[name] = measure(server, options)
        app.close()
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(_table(figures))


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(server: RedisServer, options: argparse.Namespace) -> dict[str, float]:
    """The backend's enqueue of 500 jobs at a time, ids included, against 500 jobs in a script."""

    def ours() -> float:
        start = time.perf_counter()
        for _ in range(0, options.jobs, BULK):
            app.backend.enqueue(QUEUE, [NewJob(BODY, job_id) for job_id in new_ids(BULK)])
        rate = options.jobs / (time.perf_counter() - start)
        _expect(app.queue().stats().ready, options.jobs)
        return float(rate)

    def tasks() -> float:
        start = time.perf_counter()
        for at in range(0, options.jobs, BULK):
            noop.enqueue_many([(number,) for number in range(at, at + BULK)])
        return float(options.jobs / (time.perf_counter() - start))

    figures = _in_turns(server, options.repeats, ours, lambda limit: limit.put_in_batches(options.jobs))
    return {**figures, "as tasks /s": _median(server, options.repeats, tasks)}


def single_enqueue(server: RedisServer, options: argparse.Namespace) -> dict[str, float]:
    """The backend's enqueue of one job at a time, its id included, against ``LPUSH`` through redis-py."""
    count = options.jobs // 4

    def ours() -> float:
        start = time.perf_counter()
        for _ in range(count):
            app.backend.enqueue(QUEUE, [NewJob(BODY, new_id())])
        rate = count / (time.perf_counter() - start)
        _expect(app.queue().stats().ready, count)
        return float(rate)

    def tasks() -> float:
        start = time.perf_counter()
        for number in range(count):
            noop.enqueue(number)
        return float(count / (time.perf_counter() - start))

    figures = _in_turns(server, options.repeats, ours, lambda limit: limit.put_one_by_one(count))
    return {**figures, "as tasks /s": _median(server, options.repeats, tasks)}


def drain(server: RedisServer, options: argparse.Namespace) -> dict[str, float]:
    """Two inline worker processes, against one loop that forgets the last 100 and takes the next 100."""
    commands: list[float] = []

    def ours() -> float:
        queue = app.queue()
        with _Worker(server, processes=2):
            queue.pause(3600)
            for at in range(0, options.jobs, BULK):
                noop.enqueue_many([(number,) for number in range(at, at + BULK)])
            time.sleep(0.2)
            before = _calls(server)
            start = time.perf_counter()
            queue.resume()
            with server.client() as client:
                while client.exists(f"multiq:{{{QUEUE}}}:jobs"):
                    time.sleep(0.002)
            rate = options.jobs / (time.perf_counter() - start)
            commands.append((_calls(server) - before) / options.jobs)
        return float(rate)

    def limit(plain: RedisLimit) -> float:
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return {**_in_turns(server, options.repeats, ours, limit), "scripts per job": statistics.median(commands)}


# --- figures without a limit ----------------------------------------------------------------------------------


def latency(server: RedisServer, options: argparse.Namespace) -> dict[str, float]:
    """Pickup by a worker that waits, and how late it begins delayed jobs."""
    server.ask("FLUSHALL")
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder:
        stamps = Path(folder, "stamps")
        with _Worker(server, processes=1, stamps=stamps):
            _send(stamps, 20, 0.0)  # warm
            pickup = _send(stamps, options.samples, 0.0)
            late = _send(stamps, options.samples, 0.5)
    return {
        "pickup p50 ms": statistics.median(pickup),
        "pickup p99 ms": pickup[int(len(pickup) * 0.99)],
        "delayed, late p50 ms": statistics.median(late),
        "delayed, late p99 ms": late[int(len(late) * 0.99)],
    }


def idle(server: RedisServer, _options: argparse.Namespace) -> dict[str, float]:
    """What a worker that waits asks of the server."""
    server.ask("FLUSHALL")
    with _Worker(server, processes=1):
        time.sleep(1)
        before = _commands(server)
        time.sleep(IDLE_SECONDS)
        return {"commands/s": (_commands(server) - before) / IDLE_SECONDS}


MEASUREMENTS: dict[str, Callable[[RedisServer, argparse.Namespace], dict[str, float]]] = {
    "enqueue one by one": single_enqueue,
    "bulk enqueue by 500": bulk_enqueue,
    "drain, two inline workers": drain,
    "one idle worker": latency,
    "idle worker": idle,
}


# --- how ------------------------------------------------------------------------------------------------------


class _Worker:
    """A worker in processes of its own, inline, until the end of the ``with``."""

    def __init__(self, server: RedisServer, *, processes: int, stamps: Path | None = None) -> None:
        self._server = server
        self._processes = processes
        code = f"import multiq, bench_app; multiq.Worker(bench_app.app, processes={processes}, threads=1).run()"
        environment = {**os.environ, "MULTIQ_URL": server.url, "PYTHONPATH": str(HERE), "BENCH_STAMPS": str(stamps)}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment)  # noqa: S603 - our own interpreter

    def __enter__(self) -> None:
        def all_wait() -> bool:
            return bool(self._server.ask("INFO", "clients")["blocked_clients"] >= self._processes)

        until(all_wait, "the workers wait for jobs")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _in_turns(
    server: RedisServer, repeats: int, ours: Callable[[], float], limit: Callable[[RedisLimit], float]
) -> dict[str, float]:
    """Medians of both, each repeat on an empty server."""
    rates: dict[str, list[float]] = {"multiq": [], "limit": []}
    for _ in range(repeats):
        server.ask("FLUSHALL")
        rates["multiq"].append(ours())
        server.ask("FLUSHALL")
        plain = RedisLimit(server.port, BODY)
        rates["limit"].append(limit(plain))
        plain.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "multiq /s": medians["multiq"],
        "limit /s": medians["limit"],
        "share of the limit": medians["multiq"] / medians["limit"],
        "spread": max(rates["multiq"]) / min(rates["multiq"]),
    }


def _median(server: RedisServer, repeats: int, measure: Callable[[], float]) -> float:
    rates = []
    for _ in range(repeats):
        server.ask("FLUSHALL")
        rates.append(measure())
    return statistics.median(rates)


def _send(stamps: Path, count: int, delay: float) -> list[float]:
    """Enqueue one by one, with pauses that find the worker idle. Returns how late each began, in ms, sorted."""
    stamps.write_text("")
    task = stamp.options(delay=delay) if delay else stamp
    for _ in range(count):
        time.sleep(0.02)
        task.enqueue(time.monotonic_ns() + int(delay * 1e9))
    until(lambda: len(stamps.read_text().split()) >= count, "all jobs have run")
    return sorted(int(line) / 1e6 for line in stamps.read_text().split())


def _calls(server: RedisServer) -> int:
    """How many scripts were run so far."""
    stats = server.ask("INFO", "commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])


def _commands(server: RedisServer) -> int:
    """How many commands the workers have sent so far: not those inside their scripts, nor ours that look."""
    stats = server.ask("INFO", "commandstats")
    words = ("evalsha", "eval", "bzpopmin", "client|unblock", "hello", "select", "auth")
    return sum(int(stats[f"cmdstat_{word}"]["calls"]) for word in words if f"cmdstat_{word}" in stats)


def _expect(seen: int | None, wanted: int) -> None:
    if seen != wanted:
        raise SystemExit(f"the figures are void: {seen} jobs where {wanted} should be")


def _table(figures: dict[str, dict[str, float]]) -> Table:
    title = f"multiq on Redis, Python {sys.version.split()[0]}, redis-py {redis.__version__}"
    table = Table("what", "figure", "value", title=title)
    for name, values in figures.items():
        for row, (what, value) in enumerate(values.items()):
            table.add_row(name if row == 0 else "", what, f"{value:,.2f}" if value < 1000 else f"{value:,.0f}")
        table.add_section()
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
