"""multiq on MariaDB beside its limit, in one run: ``python benchmarks/mysql_beside_limit.py --help``.

Each figure of multiq and the plain PyMySQL loop it is compared with are taken in turns on one private server, over TCP,
with ``innodb_flush_log_at_trx_commit=1``. Every job is accounted for. Needs mariadbd and the extra ``dev``.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql
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
)
from limits import limit_of
from servers.mysql import MysqlDatabases, MysqlServer, Place
from servers.process import until

from multiq.backend import NewJob
from multiq.bench.place import PUT_AT_ONCE as BULK
from multiq.codec import ENVELOPE_VERSION, Envelope, encode_envelope
from multiq.ids import new_id, new_ids
from multiq.registry import open_backend

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from multiq.bench.place import Limit

IDLE_SECONDS = 10
IDLE_WORKERS = 10  # side by side, each in a database of its own, so that ten of them are sampled in one idle time


def main() -> None:
    options = arguments(__doc__, samples=200)
    with MysqlServer() as server:
        version = server.ask("SELECT VERSION()")[0][0]
        named = {name: partial(measure, server, options) for name, measure in MEASUREMENTS.items()}
        report(f"multiq on {version}, PyMySQL {pymysql.VERSION_STRING}", named, as_json=options.json)


# --- the three figures beside their limits ----------------------------------------------------------------


def bulk_enqueue(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of 1,000 jobs at a time, ids included, against 1,000 rows in an INSERT."""

    def put() -> None:
        for _ in range(0, options.jobs, BULK):
            app.backend.enqueue(QUEUE, [NewJob(BODY, job_id) for job_id in new_ids(BULK)])

    def ours() -> float:
        with _fresh(server):
            rate = per_second(options.jobs, put)
            expect(app.queue().stats().ready, options.jobs)
            return rate

    figures = _beside(server, options, ours, lambda limit: limit.put_in_batches(options.jobs))
    return {**figures, "as tasks /s": _as_tasks(server, options, options.jobs, _enqueue_many)}


def single_enqueue(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """The backend's enqueue of one job at a time, its id included, against an autocommitted INSERT."""
    count = options.jobs // 10

    def put() -> None:
        for _ in range(count):
            app.backend.enqueue(QUEUE, [NewJob(BODY, new_id())])

    def ours() -> float:
        with _fresh(server):
            rate = per_second(count, put)
            expect(app.queue().stats().ready, count)
            return rate

    def one_by_one(jobs: int) -> None:
        for number in range(jobs):
            noop.enqueue(number)

    figures = _beside(server, options, ours, lambda limit: limit.put_one_by_one(count))
    return {**figures, "as tasks /s": _as_tasks(server, options, count, one_by_one)}


def drain(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """Two inline worker processes, against one loop that deletes the last 100 and takes the next 100."""
    questions: list[float] = []

    def ours() -> float:
        with _fresh(server) as place, Workers(place.url, processes=2):
            _all_wait(server, place, 3)
            app.queue().pause(3600)
            _enqueue_many(options.jobs)
            time.sleep(0.2)
            before = server.status("Questions")
            with server.client(place.name) as client:
                rate = per_second(options.jobs, lambda: _until_empty(client))
            questions.append((server.status("Questions") - before) / options.jobs)
            return rate

    def limit(plain: Limit) -> float:
        plain.put_in_batches(options.jobs)
        return plain.take_in_batches()

    return {**_beside(server, options, ours, limit), "statements per job": statistics.median(questions)}


# --- figures without a limit ----------------------------------------------------------------------------------


def pickup(server: MysqlServer, options: argparse.Namespace) -> Figures:
    """How late a job begins whose worker has had nothing to do for ten seconds."""
    with tempfile.TemporaryDirectory(prefix="multiq-bench-") as folder, ExitStack() as stack:
        stamps = Path(folder, "stamps")
        stamps.write_text("")
        backends = []
        for _ in range(IDLE_WORKERS):
            place = stack.enter_context(server.database())
            backends.append(stack.enter_context(open_backend(place.url)))
            backends[-1].queues()
            stack.enter_context(Workers(place.url, processes=1, stamps=stamps))
            _all_wait(server, place, 2)
        sent = 0
        while sent < options.samples:
            time.sleep(IDLE_SECONDS)
            for backend in backends:
                time.sleep(random.uniform(0.02, 0.1))  # noqa: S311 - spreads them
                backend.enqueue(QUEUE, [_stamp()])
                sent += 1
        until(lambda: len(stamps.read_text().split()) == sent, "all have begun")
        return latencies("pickup", sorted(int(line) / 1e6 for line in stamps.read_text().split()))


def idle(server: MysqlServer, _options: argparse.Namespace) -> Figures:
    """What a worker that has nothing to do asks of the server."""
    with _fresh(server) as place, Workers(place.url, processes=1):
        _all_wait(server, place, 2)
        time.sleep(IDLE_SECONDS)
        before = server.status("Questions")
        time.sleep(IDLE_SECONDS)
        return {"statements/s": (server.status("Questions") - before) / IDLE_SECONDS}


MEASUREMENTS: dict[str, Callable[[MysqlServer, argparse.Namespace], Figures]] = {
    "enqueue one by one": single_enqueue,
    "bulk enqueue by 1,000": bulk_enqueue,
    "drain, two inline workers": drain,
    "one idle worker": pickup,
    "idle worker": idle,
}


# --- how ------------------------------------------------------------------------------------------------------


def _beside(
    server: MysqlServer,
    options: argparse.Namespace,
    ours: Callable[[], float],
    limit: Callable[[Limit], float],
) -> Figures:
    def plain() -> float:
        with server.database() as place, limit_of(place.url, BODY) as loop:
            return limit(loop)

    return in_turns(options.repeats, ours, plain)


@contextmanager
def _fresh(server: MysqlDatabases) -> Iterator[Place]:
    """The app on a new database, connected and with its tables made."""
    with server.database() as place:
        app.connect(place.url)
        app.backend.queues()
        try:
            yield place
        finally:
            app.close()


def _as_tasks(server: MysqlServer, options: argparse.Namespace, count: int, enqueue: Callable[[int], None]) -> float:
    """The same through a task: arguments encoded, a handle made."""

    def measure() -> float:
        with _fresh(server):
            return per_second(count, lambda: enqueue(count))

    return median_rate(options.repeats, measure)


def _enqueue_many(jobs: int) -> None:
    for at in range(0, jobs, BULK):
        noop.enqueue_many([(number,) for number in range(at, at + BULK)])


def _stamp() -> NewJob:
    return NewJob(encode_envelope(Envelope(ENVELOPE_VERSION, "stamp", [time.monotonic_ns()])), new_id())


def _until_empty(client: pymysql.connections.Connection[pymysql.cursors.Cursor]) -> None:
    """From the end of the resume: the last row is asked for, as the first ones have been deleted but not purged."""
    app.queue().resume()
    with client.cursor() as cursor:
        while cursor.execute("SELECT seq FROM multiq_jobs ORDER BY seq DESC LIMIT 1"):
            time.sleep(0.002)


def _all_wait(server: MysqlServer, place: Place, connections: int) -> None:
    def waiting() -> bool:
        asked = "SELECT COUNT(*) FROM information_schema.processlist WHERE db = %s"
        return bool(server.ask(asked, place.name)[0][0] >= connections)

    until(waiting, "the workers are connected")
    time.sleep(0.5)


if __name__ == "__main__":
    main()
