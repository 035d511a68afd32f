"""multiq on Redis with a long queue, on a private server: ``python benchmarks/redis_backlog.py --help``.

The script measures how much memory a waiting job takes. The script measures enqueue, reserve and ack while a million
jobs wait (``--waiting``), and compares the times with an empty queue. The script also measures how long other clients
wait when a hundred thousand jobs (``--due``) become due at the same time. The script needs the extra ``dev``, and
redis-server (``.ci/install-servers``).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from backlog import QUEUE, batches, beside_empty, fill, some_jobs, verbs
from beside import Figures, arguments, median_and_p99, report, timed
from servers.redis import RedisServer

from multiq.backend import Ack, Lease
from multiq.backend.registry import open_backend

if TYPE_CHECKING:
    import argparse
    from typing import Self

    from multiq.backend import Backend


def main() -> None:
    options = arguments(__doc__, waiting=1_000_000, due=100_000)
    measurements = {"waiting jobs": partial(waiting_jobs, options), "due at once": partial(due_at_once, options)}
    report("multiq on Redis with a long queue", measurements, as_json=options.json)


# --- a long queue ----------------------------------------------------------------------------------------


def waiting_jobs(options: argparse.Namespace) -> Figures:
    """The memory of each waiting job, and how long enqueue, reserve and ack take. A full and an empty server take
    turns."""
    with (
        RedisServer() as server,
        open_backend(server.url) as long,
        RedisServer() as other,
        open_backend(other.url) as short,
    ):
        before = _memory(server)
        fill(long, options.waiting)
        per_job = (_memory(server) - before) / options.waiting
        empty, full = verbs(short, long)
    return {
        "waiting jobs": options.waiting,
        "bytes of the server's memory per waiting job, 100-byte body": per_job,
        **beside_empty(empty, full),
    }


def _memory(server: RedisServer) -> int:
    return int(server.ask("INFO", "memory")["used_memory"])


# --- one instant -----------------------------------------------------------------------------------------


def due_at_once(options: argparse.Namespace) -> Figures:
    """All jobs become due at one moment. Measures another client's PING until all jobs are handed out."""
    lead = 2 + options.due / 15_000  # seconds in which the jobs are enqueued
    with RedisServer() as server, open_backend(server.url) as backend:
        moment = time.time() + lead
        for size in batches(options.due):
            backend.enqueue(QUEUE, some_jobs(size, delay=max(0.001, moment - time.time())))
        with Bystander(server) as quiet:
            time.sleep(1)
        time.sleep(max(0, moment - time.time()))
        server.set("slowlog-log-slower-than", "500")  # microseconds
        with Bystander(server) as bystander:
            took = timed(lambda: _drain(backend, options.due))
        slowest = _slowest(server)
    busy = bystander.waits
    return {
        "jobs due at once": options.due,
        "handed out and acked per second": options.due / took,
        "PING meanwhile: median ms": statistics.median(busy) * 1000,
        "PING meanwhile: p99 ms": median_and_p99(busy)[1] * 1000,
        "PING meanwhile: longest ms": max(busy) * 1000,
        "PING on a quiet server: longest ms": max(quiet.waits) * 1000,
        "longest command in the server's slow log, ms": slowest,
    }


def _slowest(server: RedisServer) -> float:
    """The server's own measurement, which scheduling delays of this process do not affect."""
    with server.client() as client:
        entries = client.slowlog_get(1000)
    mine = [entry["duration"] for entry in entries if entry["command"].upper().startswith(b"EVAL")]
    return max(mine, default=0) / 1000


def _drain(backend: Backend, count: int) -> None:
    done, held = 0, list[Lease]()
    with backend.consumer([QUEUE]) as consumer:
        while done < count or held:
            _, held = consumer.exchange([Ack(lease) for lease in held], 100, 5 if done < count else 0)
            done += len(held)
            if not held and done < count:
                raise SystemExit(f"{count - done} of {count} jobs were not handed out")


class Bystander:
    """Another client in a separate process, which sends PING about 500 times a second."""

    _SOURCE = """
import sys, threading, time, redis
client, waits, is_over = redis.Redis(unix_socket_path=sys.argv[1]), [], threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
client.ping()
print(flush=True)
while not is_over.is_set():
    start = time.perf_counter()
    client.ping()
    waits.append(time.perf_counter() - start)
    time.sleep(0.002)
print(*waits)
"""

    def __init__(self, server: RedisServer) -> None:
        self.waits: list[float] = []
        """The seconds from each PING to its answer, after the measurement has ended."""
        self._command = [sys.executable, "-c", self._SOURCE, str(server.socket)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._process.stdout is not None:
            self._process.stdout.readline()
        return self

    def __exit__(self, *_exception: object) -> None:
        answer, _ = self._process.communicate()
        self.waits = [float(word) for word in answer.split()]


if __name__ == "__main__":
    main()
