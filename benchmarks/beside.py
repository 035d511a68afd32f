"""Shared by all scripts in this folder: options, turns, medians, latency, verification, workers and the table.

multiq and its baseline are measured in turns (A B A B...), because the machine's speed changes over time. The reported
ratio is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench_app import stamp
from rich.console import Console
from rich.table import Table

from multiq.envelope import ENVELOPE_VERSION, Envelope, encode_envelope

sys.path.append(str(Path(__file__).parent.parent / "tests"))

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

Figures = dict[str, float]

HERE = Path(__file__).parent
QUEUE = "default"
BODY = encode_envelope(Envelope(ENVELOPE_VERSION, "noop", [12345]))

_PAUSE = 0.02  # seconds between two jobs, so that the worker is idle before each job


def arguments(about: str | None, **numbers: int) -> argparse.Namespace:
    """The options of a script: *numbers* with their default values, and ``--json``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default:,} unless told")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def report(title: str, measurements: Mapping[str, Callable[[], Figures]], *, as_json: bool) -> None:
    """Take the measurements one after the other, and print the name of each. At the end, print all figures."""
    figures = {}
    with Console(stderr=True).status("") as status:
        for name, measure in measurements.items():
            status.update(name)
            figures[name] = measure()
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(_table(title, figures))


def in_turns(repeats: int, ours: Callable[[], float], baseline: Callable[[], float]) -> Figures:
    """Medians of two rates, both measured *repeats* times."""
    rates: dict[str, list[float]] = {"multiq": [], "baseline": []}
    for _ in range(repeats):
        for name, measure in (("multiq", ours), ("baseline", baseline)):
            rates[name].append(measure())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "multiq /s": medians["multiq"],
        "baseline /s": medians["baseline"],
        "share of the baseline": medians["multiq"] / medians["baseline"],
        "spread": max(rates["multiq"]) / min(rates["multiq"]),
    }


def median_rate(repeats: int, measure: Callable[[], float]) -> float:
    """The median of one rate, measured *repeats* times."""
    return statistics.median(measure() for _ in range(repeats))


def timed(work: Callable[[], object]) -> float:
    """How many seconds *work* takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def per_second(count: int, work: Callable[[], object]) -> float:
    """The rate per second of *work*, which does *count* things."""
    return count / timed(work)


def median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return statistics.median(values), sorted(values)[int(len(values) * 0.99)]


def expect(seen: int | None, wanted: int) -> None:
    """Raise an error if a job was lost or doubled, because the figures would then be worthless."""
    if seen != wanted:
        raise SystemExit(f"the figures are void: {seen} jobs where {wanted} should be")


def environment(url: str, stamps: Path | None = None) -> dict[str, str]:
    """The environment variables through which a process finds ``bench_app``, its backend, and the file for the
    times."""
    return {**os.environ, "MULTIQ_URL": url, "PYTHONPATH": str(HERE), "BENCH_STAMPS": str(stamps)}


class Workers:
    """Worker processes for the benchmark's app, which run until the end of the ``with`` block.

    By default, each process runs one job at a time. *threads* or *concurrency* change this.
    """

    def __init__(
        self, url: str, *, processes: int, threads: int = 1, concurrency: int = 0, stamps: Path | None = None
    ) -> None:
        slots = f"processes={processes}, threads={threads}, concurrency={concurrency}"
        code = f"import multiq, bench_app; multiq.Worker(bench_app.app, {slots}).run()"
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment(url, stamps))  # noqa: S603 - this interpreter

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def send(stamps: Path, count: int, delay: float = 0.0) -> list[float]:
    """Enqueue jobs one by one while the worker is idle. Returns by how many milliseconds each job began late."""
    stamps.write_text("")
    task = stamp.options(delay=delay) if delay else stamp
    for _ in range(count):
        time.sleep(_PAUSE)
        task.enqueue(time.monotonic_ns() + int(delay * 1e9))
    while len(late := lateness(stamps)) < count:
        time.sleep(_PAUSE)
    return late


def lateness(stamps: Path) -> list[float]:
    """By how many milliseconds each job began late, for the jobs that have written their time to the file."""
    return [int(line) / 1e6 for line in stamps.read_text().split()]


def latencies(name: str, values: Sequence[float]) -> Figures:
    """The median and the 99th percentile, in milliseconds."""
    median, p99 = median_and_p99(values)
    return {f"{name} p50 ms": median, f"{name} p99 ms": p99}


def _table(title: str, figures: dict[str, Figures]) -> Table:
    table = Table("what", "figure", "value", title=f"{title}, Python {sys.version.split()[0]}")
    for name, values in figures.items():
        for row, (what, value) in enumerate(values.items()):
            table.add_row(name if row == 0 else "", what, f"{value:,.2f}" if value < 1000 else f"{value:,.0f}")
        table.add_section()
    return table
