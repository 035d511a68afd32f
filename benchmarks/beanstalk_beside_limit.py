"""multiq on beanstalkd beside its limit, in one run: ``python benchmarks/beanstalk_beside_limit.py --help``.

Each figure of multiq and the plain loop it is compared with are taken in turns on one private server, over TCP, that
writes nothing to its disk, or with ``--binlog 1`` syncs before each answer. Every job is accounted for. Needs
beanstalkd and the extra ``dev``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import greenstalk
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
from limits import limit_of, puts_through_greenstalk
from servers.beanstalk import BeanstalkServer
from servers.process import HOST, until

from multiq.backend import NewJob, State
from multiq.bench.place import PUT_AT_ONCE as BULK
from multiq.ids import new_id, new_ids

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from multiq.bench.place import Limit

IDLE_SECONDS = 10

#: what we ask ourselves to see how far a worker is
_OURS = frozenset({"cmd-stats", "cmd-stats-tube", "cmd-pause-tube", "cmd-put", "cmd-use"})


def main() -> None:
    options = arguments(__doc__, binlog=0)
    with BeanstalkServer(binlog=bool(options.binlog)) as server:
        app.connect(server.url)
        named = {name: partial(measure, server, options) for name, measure in MEASUREMENTS.items()}
        kept = "-b -f0" if options.binlog else "no log"
        report(f"multiq on beanstalkd ({kept}), greenstalk {greenstalk.__version__}", named, as_json=options.json)
        app.close()


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(server: BeanstalkServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of 1,000 jobs at a time, ids included, against 1,000 puts in one go."""

    def put() -> None:
        for _ in range(0, options.jobs, BULK):
            app.backend.enqueue(QUEUE, [NewJob(BODY, job_id) for job_id in new_ids(BULK)])

    def ours() -> float:
        rate = per_second(options.jobs, put)
        expect(app.queue().stats().ready, options.jobs)
        return rate

    figures = _beside(server, options, ours, lambda: _leanest(server, lambda limit: limit.put_in_batches(options.jobs)))
    return {**figures, "as tasks /s": _as_tasks(server, options, options.jobs, _enqueue_many)}


def single_enqueue(server: BeanstalkServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of one job at a time, its id included, against greenstalk's ``put``."""
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

    figures = _beside(server, options, ours, lambda: puts_through_greenstalk((HOST, server.port), BODY, count))
    return {**figures, "as tasks /s": _as_tasks(server, options, count, one_by_one)}


def drain(server: BeanstalkServer, options: argparse.Namespace) -> Figures:
    """Two inline worker processes, against one loop that deletes the last 100 and reserves the next 100."""
    commands: list[float] = []

    def empty() -> None:
        app.queue().resume()
        with server.client() as client:
            while _jobs(client.stats("tube", QUEUE)):
                time.sleep(0.002)

    def ours() -> float:
        with Workers(server.url, processes=2):
            _all_wait(server, 2)
            app.queue().pause(3600)
            _enqueue_many(options.jobs)
            time.sleep(0.2)
            before = _commands(server)
            rate = per_second(options.jobs, empty)
            commands.append((_commands(server) - before) / options.jobs)
        return rate

    def limit(plain: Limit) -> float:
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return {
        **_beside(server, options, ours, lambda: _leanest(server, limit)),
        "commands per job": statistics.median(commands),
    }


# --- figures without a limit ----------------------------------------------------------------------------------


def latency(server: BeanstalkServer, options: argparse.Namespace) -> Figures:
    """Pickup by a worker that waits, and how late it begins delayed jobs, that are due in whole seconds here."""
    _clean(server)
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder:
        stamps = Path(folder, "stamps")
        with Workers(server.url, processes=1, stamps=stamps):
            _all_wait(server, 1)
            send(stamps, 20)  # warm
            pickup = latencies("pickup", send(stamps, options.samples))
            return {**pickup, **latencies("delayed, late", send(stamps, options.samples, 1.0))}


def idle(server: BeanstalkServer, _options: argparse.Namespace) -> Figures:
    """What a worker that waits asks of the server."""
    _clean(server)
    with Workers(server.url, processes=1):
        _all_wait(server, 1)
        time.sleep(1)
        before = _commands(server)
        time.sleep(IDLE_SECONDS)
        return {"commands/s": (_commands(server) - before) / IDLE_SECONDS}


MEASUREMENTS: dict[str, Callable[[BeanstalkServer, argparse.Namespace], Figures]] = {
    "enqueue one by one": single_enqueue,
    "bulk enqueue by 1,000": bulk_enqueue,
    "drain, two inline workers": drain,
    "one idle worker": latency,
    "idle worker": idle,
}


# --- how ------------------------------------------------------------------------------------------------------


def _beside(
    server: BeanstalkServer, options: argparse.Namespace, ours: Callable[[], float], limit: Callable[[], float]
) -> Figures:
    return in_turns(options.repeats, ours, limit, lambda: _clean(server))


def _leanest(server: BeanstalkServer, work: Callable[[Limit], float]) -> float:
    with limit_of(server.url, BODY) as limit:
        return work(limit)


def _as_tasks(server: BeanstalkServer, options: argparse.Namespace, count: int, work: Callable[[int], object]) -> float:
    return median_rate(options.repeats, lambda: per_second(count, lambda: work(count)), lambda: _clean(server))


def _enqueue_many(count: int) -> None:
    for at in range(0, count, BULK):
        noop.enqueue_many([(number,) for number in range(at, at + BULK)])


def _clean(server: BeanstalkServer) -> None:
    """All jobs are ready when no worker runs."""
    app.backend.purge(QUEUE, [State.READY])
    with server.client() as client:
        expect(_jobs(client.stats()), 0)


def _jobs(stats: dict[str, str]) -> int:
    """How many jobs there are; in a tube that has none there are no figures either."""
    states = ("ready", "reserved", "delayed", "buried")
    return sum(int(stats.get(f"current-jobs-{state}", 0)) for state in states)


def _all_wait(server: BeanstalkServer, count: int) -> None:
    with server.client() as client:
        until(lambda: int(client.stats()["current-waiting"]) >= count, "the workers wait for jobs")


def _commands(server: BeanstalkServer) -> int:
    """How many commands the workers have sent so far, without those that only we send."""
    with server.client() as client:
        stats = client.stats()
    return sum(int(value) for name, value in stats.items() if name.startswith("cmd-") and name not in _OURS)


if __name__ == "__main__":
    main()
