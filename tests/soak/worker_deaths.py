"""How long a job waits for its next start after its process was killed: ``python tests/soak/worker_deaths.py --help``.

A worker has two children, one of which runs a job that would last for minutes. The child that has the job is killed
again and again, and the other one must start the job. The time in between is measured on each backend.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "integration")]

from processes import until, worker  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from stores import NAMES, STORES  # noqa: E402
from worker_app import app, nap, read_diary  # noqa: E402

BUCKETS = (5, 10, 20, 50, 100, 200, 500, 1000, float("inf"))  # milliseconds


def main() -> None:
    options = _arguments()
    table = Table(
        "backend", "p50 ms", "p99 ms", "most ms", *(f"<= {edge:g}" for edge in BUCKETS), title="kill to restart"
    )
    for name in options.backends:
        with tempfile.TemporaryDirectory(prefix="multiq-soak-") as folder, STORES[name](Path(folder)) as url:
            app.connect(url)
            times = _kill(Path(folder), url, options.kills)
            app.close()
        counts = [
            sum(low < value <= high for value in times) for low, high in zip((0.0, *BUCKETS), BUCKETS, strict=False)
        ]
        figures = (statistics.median(times), times[int(len(times) * 0.99)], times[-1])
        table.add_row(name, *(f"{figure:.1f}" for figure in figures), *(str(count or "") for count in counts))
    Console().print(table)


def _kill(folder: Path, url: str, kills: int) -> list[float]:
    """Milliseconds from each kill to the next start, sorted."""
    nap.options(ttr=60).enqueue(0, 3600)
    times: list[float] = []
    with worker(folder, url, "processes=2") as process:
        for _ in range(kills):
            until(lambda: _starts(process.diary) == len(times) + 1)
            until(lambda: process.log.count(" working ") == len(times) + 2)  # the killed child has been replaced
            victim = read_diary(process.diary)[-1][2]
            killed_at = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            until(lambda: _starts(process.diary) == len(times) + 2, timeout=90)
            times.append((read_diary(process.diary)[-1][3] - killed_at) / 1e6)
    return sorted(times)


def _starts(diary: Path) -> int:
    return len(read_diary(diary))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("backends", nargs="*", default=NAMES)
    parser.add_argument("--kills", type=int, default=500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
