"""multiq on Redis beside its limit, in one run: ``python benchmarks/redis_beside_limit.py --help``.

Each figure of multiq and the plain redis-py loop it is compared with are taken in turns on one private server, over
TCP, that writes nothing to its disk. Every job is accounted for. Needs redis-server and the extra ``dev``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from bench_app import app, noop
from beside import (
    BODY,
    QUEUE,
    Figures,
    Workers,
    arguments,
    expect,
    in_turns,
    latencies,
    median_rate,
    per_second,
    report,
    send,
)
from limits import limit_of, pushes_through_redis_py
from servers.process import until
from servers.redis import RedisServer

from multiq.backend import NewJob
from multiq.bench.place import PUT_AT_ONCE as BULK
from multiq.ids import new_id, new_ids

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from multiq.bench.place import Limit

IDLE_SECONDS = 10


def main() -> None:
    options = arguments(__doc__)
    with RedisServer() as server:
        app.connect(server.url)
        named = {name: partial(measure, server, options) for name, measure in MEASUREMENTS.items()}
        report(f"multiq on Redis, redis-py {redis.__version__}", named, as_json=options.json)
        app.close()


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(server: RedisServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of 1,000 jobs at a time, ids included, against 1,000 jobs in a script."""

    def put() -> None:
        for _ in range(0, options.jobs, BULK):
            app.backend.enqueue(QUEUE, [NewJob(BODY, job_id) for job_id in new_ids(BULK)])

    def ours() -> float:
        rate = per_second(options.jobs, put)
        expect(app.queue().stats().ready, options.jobs)
        return rate

    figures = _beside(server, options, ours, lambda: _leanest(server, lambda limit: limit.put_in_batches(options.jobs)))
    return {**figures, "as tasks /s": _as_tasks(server, options, options.jobs, _enqueue_many)}


def single_enqueue(server: RedisServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of one job at a time, its id included, against ``LPUSH`` through redis-py."""
    count = options.jobs // 4

    def put() -> None:
        for _ in range(count):
            app.backend.enqueue(QUEUE, [NewJob(BODY, new_id())])

    def ours() -> float:
        rate = per_second(count, put)
        expect(app.queue().stats().ready, count)
        return rate

    def one_by_one(jobs: int) -> None:
        for number in range(jobs):
            noop.enqueue(number)

    figures = _beside(server, options, ours, lambda: pushes_through_redis_py(server.port, BODY, count))
    return {**figures, "as tasks /s": _as_tasks(server, options, count, one_by_one)}


def drain(server: RedisServer, options: argparse.Namespace) -> Figures:
    """Two inline worker processes, against one loop that forgets the last 100 and takes the next 100."""
    commands: list[float] = []

    def empty() -> None:
        app.queue().resume()
        with server.client() as client:
            while client.exists(f"multiq:{{{QUEUE}}}:jobs"):
                time.sleep(0.002)

    def ours() -> float:
        with Workers(server.url, processes=2):
            _all_wait(server, 2)
            app.queue().pause(3600)
            _enqueue_many(options.jobs)
            time.sleep(0.2)
            before = _calls(server)
            rate = per_second(options.jobs, empty)
            commands.append((_calls(server) - before) / options.jobs)
        return rate

    def limit(plain: Limit) -> float:
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return {
        **_beside(server, options, ours, lambda: _leanest(server, limit)),
        "scripts per job": statistics.median(commands),
    }


# --- figures without a limit ----------------------------------------------------------------------------------


def latency(server: RedisServer, options: argparse.Namespace) -> Figures:
    """Pickup by a worker that waits, and how late it begins delayed jobs."""
    server.ask("FLUSHALL")
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder:
        stamps = Path(folder, "stamps")
        with Workers(server.url, processes=1, stamps=stamps):
            _all_wait(server, 1)
            send(stamps, 20)  # warm
            pickup = latencies("pickup", send(stamps, options.samples))
            return {**pickup, **latencies("delayed, late", send(stamps, options.samples, 0.5))}


def idle(server: RedisServer, _options: argparse.Namespace) -> Figures:
    """What a worker that waits asks of the server."""
    server.ask("FLUSHALL")
    with Workers(server.url, processes=1):
        _all_wait(server, 1)
        time.sleep(1)
        before = _commands(server)
        time.sleep(IDLE_SECONDS)
        return {"commands/s": (_commands(server) - before) / IDLE_SECONDS}


MEASUREMENTS: dict[str, Callable[[RedisServer, argparse.Namespace], Figures]] = {
    "enqueue one by one": single_enqueue,
    "bulk enqueue by 1,000": bulk_enqueue,
    "drain, two inline workers": drain,
    "one idle worker": latency,
    "idle worker": idle,
}


# --- how ------------------------------------------------------------------------------------------------------


def _beside(
    server: RedisServer, options: argparse.Namespace, ours: Callable[[], float], limit: Callable[[], float]
) -> Figures:
    return in_turns(options.repeats, ours, limit, lambda: server.ask("FLUSHALL"))


def _leanest(server: RedisServer, work: Callable[[Limit], float]) -> float:
    with limit_of(server.url, BODY) as limit:
        return work(limit)


def _as_tasks(server: RedisServer, options: argparse.Namespace, count: int, enqueue: Callable[[int], None]) -> float:
    """The same through a task: arguments encoded, a handle made."""
    return median_rate(
        options.repeats, lambda: per_second(count, lambda: enqueue(count)), lambda: server.ask("FLUSHALL")
    )


def _enqueue_many(jobs: int) -> None:
    for at in range(0, jobs, BULK):
        noop.enqueue_many([(number,) for number in range(at, at + BULK)])


def _all_wait(server: RedisServer, processes: int) -> None:
    def waiting() -> bool:
        return bool(server.ask("INFO", "clients")["blocked_clients"] >= processes)

    until(waiting, "the workers wait for jobs")


def _calls(server: RedisServer) -> int:
    """How many scripts were run so far."""
    stats = server.ask("INFO", "commandstats")
    return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])


def _commands(server: RedisServer) -> int:
    """How many commands the workers have sent so far: not those inside their scripts, nor ours that look."""
    stats = server.ask("INFO", "commandstats")
    words = ("evalsha", "eval", "bzpopmin", "client|unblock", "hello", "select", "auth")
    return sum(int(stats[f"cmdstat_{word}"]["calls"]) for word in words if f"cmdstat_{word}" in stats)


if __name__ == "__main__":
    main()
