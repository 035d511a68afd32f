"""What the scripts that set multiq beside a limit share: turns, medians, latency, accounting, the table.

A figure of multiq and its limit are taken in turns (A B A B...), because such numbers move with the machine's mood;
the ratio is of the medians.
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

from multiq.codec import ENVELOPE_VERSION, Envelope, encode_envelope

sys.path.append(str(Path(__file__).parent.parent / "tests"))

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

Figures = dict[str, float]

HERE = Path(__file__).parent
QUEUE = "default"
BODY = encode_envelope(Envelope(ENVELOPE_VERSION, "noop", [12345]))

_PAUSE = 0.02  # seconds between two jobs, so that each finds the worker idle


def arguments(about: str | None, **extra: int) -> argparse.Namespace:
    """The options that all scripts have; *extra* adds more numbers with their defaults."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n", 1)[0])
    for name, default in {"repeats": 5, "jobs": 20_000, "samples": 300, **extra}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def report(title: str, measurements: Mapping[str, Callable[[], Figures]], *, as_json: bool) -> None:
    """Take each measurement, saying which on the terminal, and print them all."""
    figures = {}
    with Console(stderr=True).status("") as status:
        for name, measure in measurements.items():
            status.update(name)
            figures[name] = measure()
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(_table(title, figures))


def in_turns(
    repeats: int, ours: Callable[[], float], limit: Callable[[], float], clean: Callable[[], object] = lambda: None
) -> Figures:
    """Medians of two rates, both measured *repeats* times, each after *clean*."""
    rates: dict[str, list[float]] = {"multiq": [], "limit": []}
    for _ in range(repeats):
        for name, measure in (("multiq", ours), ("limit", limit)):
            clean()
            rates[name].append(measure())
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "multiq /s": medians["multiq"],
        "limit /s": medians["limit"],
        "share of the limit": medians["multiq"] / medians["limit"],
        "spread": max(rates["multiq"]) / min(rates["multiq"]),
    }


def median_rate(repeats: int, measure: Callable[[], float], clean: Callable[[], object] = lambda: None) -> float:
    """The median of one rate, measured *repeats* times, each after *clean*."""
    rates = []
    for _ in range(repeats):
        clean()
        rates.append(measure())
    return statistics.median(rates)


def per_second(count: int, work: Callable[[], object]) -> float:
    """How many of *count* things *work* does a second."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def expect(seen: int | None, wanted: int) -> None:
    """Void all figures when a job was lost or doubled."""
    if seen != wanted:
        raise SystemExit(f"the figures are void: {seen} jobs where {wanted} should be")


def environment(url: str, stamps: Path | None = None) -> dict[str, str]:
    """What a process needs to find ``bench_app``, its backend, and the file that it stamps."""
    return {**os.environ, "MULTIQ_URL": url, "PYTHONPATH": str(HERE), "BENCH_STAMPS": str(stamps)}


class Workers:
    """A worker of the benchmark's app in processes of its own, one inline loop each, until the end of the ``with``."""

    def __init__(self, url: str, *, processes: int, stamps: Path | None = None) -> None:
        code = f"import multiq, bench_app; multiq.Worker(bench_app.app, processes={processes}, threads=1).run()"
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment(url, stamps))  # noqa: S603 - our own interpreter

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def send(stamps: Path, count: int, delay: float = 0.0) -> list[float]:
    """Enqueue one by one, each finding the worker idle. Returns how late each began, in ms, sorted."""
    stamps.write_text("")
    task = stamp.options(delay=delay) if delay else stamp
    for _ in range(count):
        time.sleep(_PAUSE)
        task.enqueue(time.monotonic_ns() + int(delay * 1e9))
    while len(stamps.read_text().split()) < count:
        time.sleep(_PAUSE)
    return sorted(int(line) / 1e6 for line in stamps.read_text().split())


def latencies(name: str, values: Sequence[float]) -> Figures:
    """Median and 99th percentile of sorted milliseconds."""
    return {f"{name} p50 ms": statistics.median(values), f"{name} p99 ms": values[int(len(values) * 0.99)]}


def _table(title: str, figures: dict[str, Figures]) -> Table:
    table = Table("what", "figure", "value", title=f"{title}, Python {sys.version.split()[0]}")
    for name, values in figures.items():
        for row, (what, value) in enumerate(values.items()):
            table.add_row(name if row == 0 else "", what, f"{value:,.2f}" if value < 1000 else f"{value:,.0f}")
        table.add_section()
    return table
