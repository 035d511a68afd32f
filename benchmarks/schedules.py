"""What schedules cost and how punctual they are.

    python benchmarks/schedules.py [look|lateness|beside] [BACKEND ...]

``look`` stores 10,000 schedules that are due once a day. ``look`` measures the CPU time that a scheduler takes in ten
minutes to look for due schedules. The CPU time for loading the schedules is not counted. ``lateness`` runs a scheduler
with a schedule that is due every second. ``lateness`` reports how late the jobs were reserved, by the server's clock.
``beside`` measures workers with plain jobs. Turns with 10,000 stored schedules alternate with turns without schedules.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path += [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests" / "integration")]

import psutil
from servers.mysql import any_server
from servers.redis import RedisServer
from stores import STORES

import multiq
from multiq.backend import Ack, Enqueue, Put
from multiq.envelope import decode_envelope
from multiq.schedules import Scheduler, record
from multiq.schedules.defining import check_timing, define
from multiq.schedules.record import Record
from multiq.schedules.scheduler import EVERY

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCHEDULES = 10_000
_LOOKS = 30  # of ten minutes
_OCCURRENCES = 60
_JOBS = {"redis": 200_000, "sqlite": 300_000, "mysql": 50_000}
_TURNS = 10  # pairs of drains
_START = 5.0  # seconds for a worker to start, and to read the schedules

app = multiq.App("memory://")


@app.task(queue="bench")
def work() -> None: ...


def store_schedules() -> None:
    """Store schedules that are due in twelve hours."""
    now = int(app.backend.now("bench") * 1000)
    for start in range(0, _SCHEDULES, 500):
        steps: list[Put | Enqueue] = []
        for number in range(start, start + 500):
            # due in twelve hours
            hour = (now // 3_600_000 + 12) % 24
            definition = define(f"s{number}", work.s(), check_timing(f"{number % 60} {hour} * * *"), origin="stored")
            steps.append(record.put(Record(definition, now)))
        app.backend.carry_out([*steps, *record.announce("bench")])


def look(backend: str) -> None:
    """Print the CPU time of a scheduler that has no job to create, and the CPU time of loading the schedules."""
    store_schedules()
    scheduler = Scheduler(app)
    began = time.process_time()
    scheduler.look()
    loaded = time.process_time()
    for _ in range(_LOOKS):
        scheduler.look()
    took = time.process_time() - loaded
    minutes = _LOOKS * EVERY / 60
    print(
        f"{backend}: {_SCHEDULES:,} schedules: load {(loaded - began) * 1000:.0f} ms of CPU, looks "
        f"{took / minutes * 1000:.2f} ms of CPU a minute",
        flush=True,
    )


def lateness(backend: str) -> None:
    """Print how late the jobs of an every-second schedule are reserved while a scheduler runs."""
    app.schedules.add("secondly", work.s(), "* * * * * *")
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "multiq", "-c", app.url, "scheduler"]
    )
    late: list[float] = []
    try:
        with app.backend.consumer(["bench"]) as consumer:
            while len(late) < _OCCURRENCES + 3:
                for lease in consumer.reserve(10, 5.0):
                    late.append(lease.age - float(decode_envelope(lease.body).headers["multiq-delay"]))
                    consumer.settle([Ack(lease)])
    finally:
        process.terminate()
        process.wait()
    # the first jobs were due while the scheduler started
    late = sorted(late[3:])
    print(
        f"{backend}: {len(late)} occurrences: late by p50 {late[len(late) // 2] * 1000:.1f} ms, "
        f"p99 {late[len(late) * 99 // 100] * 1000:.1f} ms, most {late[-1] * 1000:.1f} ms",
        flush=True,
    )


def beside(backend: str) -> None:
    """Print a worker's rate and CPU time with stored schedules, each divided by the value without schedules."""
    jobs = _JOBS[backend]
    rates: list[float] = []
    costs: list[float] = []
    with tempfile.TemporaryDirectory() as folder, two_places(backend, Path(folder)) as (first, other):
        app.connect(first)
        store_schedules()
        for turn in range(_TURNS):
            pair = {}
            for url in (first, other) if turn % 2 else (other, first):
                with multiq.App(url) as place:
                    pair[url] = drain(place, jobs)
            (rate, cost), (rate_of_none, cost_of_none) = pair[first], pair[other]
            rates.append(rate / rate_of_none)
            costs.append(cost / cost_of_none)
    rate, cost = statistics.median(rates), statistics.median(costs)
    print(
        f"{backend}: beside {_SCHEDULES:,} schedules a worker drains {rate:.3f} of the jobs per second, with "
        f"{cost:.3f} of the CPU time per job (medians of {_TURNS} pairs)",
        flush=True,
    )


@contextlib.contextmanager
def two_places(backend: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Two empty places on one server: two servers differ by up to 9 % although they do the same."""
    if backend == "redis":
        with RedisServer() as server:
            yield f"{server.url.rstrip('/')}/0", f"{server.url.rstrip('/')}/1"
    elif backend == "mysql":
        with any_server() as databases, databases.database() as first, databases.database() as second:
            yield first.url, second.url
    else:
        yield f"sqlite:///{folder}/first.db", f"sqlite:///{folder}/second.db"


def drain(place: multiq.App, jobs: int) -> tuple[float, float]:
    """Return the jobs per second and the CPU seconds of a worker that is already running."""
    queue = place.queue("plain")
    queue.pause(600)
    task = place.task(name="work", queue="plain")(work.function)
    for _ in range(0, jobs, 1000):
        task.enqueue_many([()] * 1000)
    command = [sys.executable, "-m", "multiq", "-c", place.url, "worker", f"{Path(__file__).stem}:app"]
    worker = subprocess.Popen(  # noqa: S603 - our own command
        [*command, "-q", "plain", "-p", "1", "--log-level", "error"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        time.sleep(_START)
        processes = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
        before, began = sum(spent(each) for each in processes), time.monotonic()
        queue.resume()
        while worker.poll() is None and ((stats := queue.stats()).ready or stats.reserved):
            time.sleep(0.05)
        took = time.monotonic() - began
        return jobs / took, sum(spent(each) for each in processes) - before
    finally:
        worker.terminate()
        worker.wait()


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    known = {"look": look, "lateness": lateness, "beside": beside}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", choices=[[], *known, *STORES], default=[], metavar="WORD")
    words = parser.parse_args().words
    for name in [word for word in words if word in STORES] or _JOBS:
        for each in [word for word in words if word in known] or known:
            with tempfile.TemporaryDirectory() as folder, STORES[name](Path(folder)) as url:
                app.connect(url)
                known[each](name)
                app.close()


if __name__ == "__main__":
    main()
