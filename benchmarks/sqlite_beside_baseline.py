"""multiq on SQLite, compared with its baseline in one run: ``python benchmarks/sqlite_beside_baseline.py --help``.

For each figure, multiq and a plain ``sqlite3`` loop take turns, on new files. multiq and the loop have the same
durability: WAL and ``synchronous=FULL``, one fsync per commit. The script checks that no job was lost or doubled.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from baselines import baseline_of
from bench_app import app, noop
from beside import (
    BODY,
    Figures,
    Workers,
    arguments,
    environment,
    expect,
    in_turns,
    latencies,
    per_second,
    report,
    send,
    timed,
)

from multiq.bench.adapter import PUT_BATCH as BATCH

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from multiq.bench.adapter import Baseline


def main() -> None:
    options = arguments(__doc__, repeats=5, jobs=20_000, samples=300)
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder:
        named = {name: partial(measure, Path(folder), options) for name, measure in MEASUREMENTS.items()}
        report("multiq on SQLite", named, as_json=options.json)
        app.close()


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(folder: Path, options: argparse.Namespace) -> Figures:
    """``task.enqueue_many`` with 1,000 jobs per call, compared with 1,000 rows in a transaction."""

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        calls = [[(number,) for number in range(at, at + BATCH)] for at in range(0, options.jobs, BATCH)]
        rate = per_second(options.jobs, lambda: [noop.enqueue_many(batch) for batch in calls])
        expect(app.queue().stats().ready, options.jobs)
        return rate

    return _beside(folder, options, ours, lambda baseline: baseline.put_in_batches(options.jobs))


def single_enqueue(folder: Path, options: argparse.Namespace) -> Figures:
    """``task.enqueue``, compared with one row in each transaction."""
    count = options.jobs // 10

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        noop.enqueue(0)
        rate = per_second(count, lambda: [noop.enqueue(number) for number in range(count)])
        expect(app.queue().stats().ready, count + 1)
        return rate

    return _beside(folder, options, ours, lambda baseline: baseline.put_one_by_one(count))


def drain(folder: Path, options: argparse.Namespace) -> Figures:
    """One worker process with one job at a time, from its start to the last job's ack. The baseline takes and deletes
    100 jobs at a time."""

    def ours(path: Path) -> float:
        app.connect(f"sqlite:///{path}")
        noop.enqueue_many([(number,) for number in range(options.jobs)])
        code = (
            "import time, multiq, bench_app as b;"
            "at = []; mark = lambda _: at.append(time.perf_counter());"
            "b.app.on(multiq.events.WorkerStarted)(mark); b.app.on(multiq.events.WorkerStopping)(mark);"
            "multiq.Worker(b.app, stop_when_empty=True, processes=0, threads=1).run();"
            "print(at[1] - at[0])"
        )
        seconds = float(_python(code, path).stdout)
        expect(len(app.backend.queues()), 0)
        return float(options.jobs / seconds)

    def baseline(plain: Baseline) -> float:
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return _beside(folder, options, ours, baseline)


# --- figures without a baseline ----------------------------------------------------------------------------------


def idle_worker(folder: Path, options: argparse.Namespace) -> Figures:
    """The pickup latency, the memory and the CPU time of a waiting worker. Another process enqueues."""
    path, stamps = folder / "idle.db", folder / "stamps"
    app.connect(f"sqlite:///{path}")
    with Workers(f"sqlite:///{path}", processes=1, stamps=stamps) as worker:
        send(stamps, 20)  # warm
        pickup = latencies("pickup", send(stamps, options.samples))
        process = psutil.Process(worker.pid)
        before, watched = sum(process.cpu_times()[:2]), 5.0
        time.sleep(watched)
        cpu = (sum(process.cpu_times()[:2]) - before) / watched * 100
        return {**pickup, "memory MiB": process.memory_info().rss / 2**20, "idle CPU %": cpu}


def import_time(folder: Path, options: argparse.Namespace) -> Figures:
    """The time of ``import multiq``, compared with an interpreter that imports nothing."""
    path = folder / "none.db"
    ours, nothing = [], []
    for _ in range(options.repeats * 2):
        ours.append(timed(lambda: _python("import multiq", path)))
        nothing.append(timed(lambda: _python("pass", path)))
    return {"import multiq ms": (statistics.median(ours) - statistics.median(nothing)) * 1000}


MEASUREMENTS: dict[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "bulk enqueue by 1,000": bulk_enqueue,
    "enqueue one by one": single_enqueue,
    "drain, one inline worker": drain,
    "idle worker": idle_worker,
    "import": import_time,
}


# --- how ------------------------------------------------------------------------------------------------------


def _beside(
    folder: Path, options: argparse.Namespace, ours: Callable[[Path], float], baseline: Callable[[Baseline], float]
) -> Figures:
    def fresh() -> Path:
        return folder / f"{time.monotonic_ns()}.db"

    def leanest() -> float:
        with baseline_of(f"sqlite:///{fresh()}", BODY) as plain:
            return baseline(plain)

    return in_turns(options.repeats, lambda: ours(fresh()), leanest)


def _python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], env=environment(f"sqlite:///{path}"), capture_output=True, text=True, check=True
    )


if __name__ == "__main__":
    main()
