"""How a worker's speed grows with processes, threads and coroutines: ``python benchmarks/worker_scaling.py --help``.

To compare processes, the jobs compute for a millisecond, and two processes are compared with one. On two cores, the
ratio is 2 at most. The jobs of threads and coroutines sleep for 10 ms, and their rate is compared with the highest
possible rate. 50 threads can end at most 5,000 of these jobs per second. 200 coroutines can end at most 20,000 jobs per
second. The first and the last tenth of the jobs are not counted, so that the worker's start has no effect.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_app import anap, app, compute, nap
from beside import HERE, Workers, arguments, expect, median_rate, report

sys.path.append(str(HERE.parent / "tests" / "integration"))
from stores import STORES

if TYPE_CHECKING:
    from beside import Figures

    from multiq.task import Task

QUEUE = app.queue()
NAP = 0.010  # seconds
_LOOK = 0.01
_SHARE = 0.1  # the part of the jobs, at the beginning and at the end, that is not counted


def main() -> None:
    options = arguments(__doc__, repeats=5, jobs=20_000)
    with tempfile.TemporaryDirectory() as folder, STORES["redis"](Path(folder)) as url:
        app.connect(url)
        measurements = {
            "two processes beside one, 1 ms of work": lambda: processes(url, options.repeats, options.jobs // 4),
            "50 threads, 10 ms of sleep": lambda: reached(
                url, options.repeats, options.jobs, nap, threads=50, concurrency=0
            ),
            "200 coroutines, 10 ms of sleep": lambda: reached(
                url, options.repeats, 4 * options.jobs, anap, threads=1, concurrency=200
            ),
        }
        report("What a worker gets from its slots, on Redis", measurements, as_json=options.json)
        app.close()


def processes(url: str, repeats: int, jobs: int) -> Figures:
    """The rates of one and of two processes, measured in turns."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for number, found in rates.items():
            found.append(drained(url, compute, jobs, processes=number))
    one, two = statistics.median(rates[1]), statistics.median(rates[2])
    return {"one /s": one, "two /s": two, "ratio": two / one}


def reached(url: str, repeats: int, jobs: int, task: Task[[float], Any], *, threads: int, concurrency: int) -> Figures:
    """The rate of one process, and the highest rate that its threads or coroutines allow."""
    limit = max(threads, concurrency) / NAP
    rate = median_rate(repeats, lambda: drained(url, task, jobs, threads=threads, concurrency=concurrency))
    return {"jobs /s": rate, "arithmetic limit /s": limit, "share": rate / limit}


def drained(
    url: str, task: Task[[float], Any], jobs: int, *, processes: int = 1, threads: int = 1, concurrency: int = 0
) -> float:
    """The jobs per second of a worker with this number of processes, threads and coroutines."""
    task.enqueue_many([(NAP,)] * jobs)
    with Workers(url, processes=processes, threads=threads, concurrency=concurrency):
        begun = _when(jobs * (1 - _SHARE))
        ended = _when(jobs * _SHARE)
        _when(0)
    expect(QUEUE.stats().reserved, 0)
    return (begun[1] - ended[1]) / (ended[0] - begun[0])


def _when(left: float) -> tuple[float, int]:
    """Wait until at most *left* jobs remain. Returns the time and the number of remaining jobs."""
    while True:
        stats = QUEUE.stats()
        count = (stats.ready or 0) + (stats.reserved or 0)
        if count <= left:
            return time.perf_counter(), count
        time.sleep(_LOOK)


if __name__ == "__main__":
    main()
