"""multiq on SQLite beside its limit, in one run: ``python benchmarks/sqlite_beside_limit.py --help``.

Each figure of multiq and the plain ``sqlite3`` loop it is compared with are taken in turns (A B A B...), because these
numbers move with the machine's mood; the ratio is of the medians. Durability is the same for both: WAL and
``synchronous=FULL``, one fsync per commit. Every job is accounted for.
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

import psutil
from bench_app import app, noop, stamp
from limits import BATCH, SqliteLimit
from rich.console import Console
from rich.table import Table

from multiq.codec import ENVELOPE_VERSION, Envelope, encode_envelope

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
BODY = encode_envelope(Envelope(ENVELOPE_VERSION, "noop", [12345]))


def main() -> None:
    options = _arguments()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder:
        figures: dict[str, dict[str, float]] = {}
        with console.status("") as status:
            for name, measure in MEASUREMENTS.items():
                status.update(name)
                figures[name] = measure(Path(folder), options)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(_table(figures))


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """``task.enqueue_many`` by 100, against 100 rows in a transaction."""

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        calls = [[(number,) for number in range(at, at + BATCH)] for at in range(0, options.jobs, BATCH)]
        start = time.perf_counter()
        for batch in calls:
            noop.enqueue_many(batch)
        rate = float(options.jobs / (time.perf_counter() - start))
        _expect(app.queue().stats().ready, options.jobs)
        return rate

    return _in_turns(folder, options.repeats, ours, lambda path: SqliteLimit(path, BODY).put_in_batches(options.jobs))


def single_enqueue(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """``task.enqueue``, against one row in a transaction of its own."""
    count = options.jobs // 10

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        noop.enqueue(0)
        start = time.perf_counter()
        for number in range(count):
            noop.enqueue(number)
        rate = float(count / (time.perf_counter() - start))
        _expect(app.queue().stats().ready, count + 1)
        return rate

    return _in_turns(folder, options.repeats, ours, lambda path: SqliteLimit(path, BODY).put_one_by_one(count))


def drain(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One inline worker process, from its first look to the last job's ack, against take-and-delete by 100."""

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        noop.enqueue_many([(number,) for number in range(options.jobs)])
        code = (
            "import time, multiq, bench_app as b;"
            "at = []; mark = lambda _: at.append(time.perf_counter());"
            "b.app.on(multiq.events.WorkerStarted)(mark); b.app.on(multiq.events.WorkerStopping)(mark);"
            "multiq.Worker(b.app, stop_when_empty=True, processes=1, threads=1).run();"
            "print(at[1] - at[0])"
        )
        seconds = float(_python(code, path).stdout)
        _expect(len(app.backend.queues()), 0)
        return float(options.jobs / seconds)

    def limit(path: Path) -> float:
        plain = SqliteLimit(path, BODY)
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return _in_turns(folder, options.repeats, ours, limit)


# --- figures without a limit ----------------------------------------------------------------------------------


def idle_worker(folder: Path, _options: argparse.Namespace) -> dict[str, float]:
    """Pickup latency from another process, memory and CPU of a worker that waits."""
    path, stamps = folder / "idle.db", folder / "stamps"
    app.connect(f"sqlite:///{path}")
    environment = {**_environment(path), "BENCH_STAMPS": str(stamps)}
    code = "import multiq, bench_app; multiq.Worker(bench_app.app, processes=1, threads=1).run()"
    worker = subprocess.Popen([sys.executable, "-c", code], env=environment)  # noqa: S603 - our own interpreter
    try:
        _send(stamp.enqueue, stamps, 20)  # warm
        count = 300
        _send(stamp.enqueue, stamps, count)
        late = sorted(int(line) / 1e6 for line in stamps.read_text().split()[20:])
        process = psutil.Process(worker.pid)
        before, watched = sum(process.cpu_times()[:2]), 5.0
        time.sleep(watched)
        cpu = (sum(process.cpu_times()[:2]) - before) / watched * 100
        memory = process.memory_info().rss / 2**20
    finally:
        worker.terminate()
        worker.wait()
    return {
        "pickup p50 ms": statistics.median(late),
        "pickup p99 ms": late[int(len(late) * 0.99)],
        "memory MiB": memory,
        "idle CPU %": cpu,
    }


def import_time(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """``import multiq``, beside an interpreter that imports nothing."""
    path = folder / "none.db"
    ours, nothing = [], []
    for _ in range(options.repeats * 2):
        ours.append(_timed("import multiq", path))
        nothing.append(_timed("pass", path))
    return {"import multiq ms": (statistics.median(ours) - statistics.median(nothing)) * 1000}


MEASUREMENTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, float]]] = {
    "bulk enqueue by 100": bulk_enqueue,
    "enqueue one by one": single_enqueue,
    "drain, one inline worker": drain,
    "idle worker": idle_worker,
    "import": import_time,
}


# --- how ------------------------------------------------------------------------------------------------------


def _in_turns(
    folder: Path, repeats: int, ours: Callable[[Path], float], limit: Callable[[Path], float]
) -> dict[str, float]:
    """Medians of both, each repeat on fresh files."""
    rates: dict[str, list[float]] = {"multiq": [], "limit": []}
    for turn in range(repeats):
        for name, measure in (("multiq", ours), ("limit", limit)):
            rates[name].append(measure(folder / f"{measure.__qualname__}-{turn}-{time.monotonic_ns()}.db"))
    app.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "multiq /s": medians["multiq"],
        "limit /s": medians["limit"],
        "share of the limit": medians["multiq"] / medians["limit"],
        "spread": max(rates["multiq"]) / min(rates["multiq"]),
    }


def _send(enqueue: Callable[[int], object], stamps: Path, count: int) -> None:
    """Enqueue one by one, with pauses that find the worker idle, and wait until all have run."""
    done = len(stamps.read_text().split()) if stamps.exists() else 0
    for _ in range(count):
        time.sleep(0.02)
        enqueue(time.monotonic_ns())
    while not stamps.exists() or len(stamps.read_text().split()) < done + count:
        time.sleep(0.05)


def _timed(code: str, path: Path) -> float:
    start = time.perf_counter()
    _python(code, path)
    return time.perf_counter() - start


def _python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], env=_environment(path), capture_output=True, text=True, check=True
    )


def _environment(path: Path) -> dict[str, str]:
    return {**os.environ, "MULTIQ_URL": f"sqlite:///{path}", "PYTHONPATH": str(HERE)}


def _expect(seen: int | None, wanted: int) -> None:
    if seen != wanted:
        raise SystemExit(f"the figures are void: {seen} jobs where {wanted} should be")


def _table(figures: dict[str, dict[str, float]]) -> Table:
    table = Table("what", "figure", "value", title=f"multiq on SQLite, Python {sys.version.split()[0]}")
    for name, values in figures.items():
        for row, (what, value) in enumerate(values.items()):
            table.add_row(name if row == 0 else "", what, f"{value:,.2f}" if value < 1000 else f"{value:,.0f}")
        table.add_section()
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
