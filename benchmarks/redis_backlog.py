"""multiq on Redis with a long queue, on a private server: ``python benchmarks/redis_backlog.py --help``.

Three questions. What a waiting job costs in memory; what enqueue and reserve cost in front of a million of them,
compared with an empty queue; and how long everybody else waits when a hundred thousand jobs fall due in one instant.
Needs the extra ``dev``, and redis-server (``.ci/install-servers``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from multiq.backend import Ack, Lease, NewJob
from multiq.ids import new_ids
from multiq.registry import open_backend

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from servers.redis import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from multiq.backend import Backend

QUEUE = "mail"
BODY = b"x" * 100
BATCH = 1_000
SAMPLES = 500


def main() -> None:
    options = _arguments()
    figures: dict[str, float] = {}
    console = Console(stderr=True)
    with console.status("") as status:
        for name, measure in (("waiting jobs", waiting_jobs), ("due at once", due_at_once)):
            status.update(name)
            with RedisServer() as server, open_backend(server.url) as backend:
                figures.update(measure(server, backend, options))
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)


# --- a long queue ----------------------------------------------------------------------------------------


def waiting_jobs(server: RedisServer, backend: Backend, options: argparse.Namespace) -> dict[str, float]:
    """Memory per waiting job, and the price of the verbs in front of all of them."""
    empty = _verbs(backend)
    before = _memory(server)
    for start in range(0, options.waiting, BATCH):
        backend.enqueue(QUEUE, _jobs(min(BATCH, options.waiting - start)))
    per_job = (_memory(server) - before) / options.waiting
    full = _verbs(backend)
    figures: dict[str, float] = {
        "waiting jobs": options.waiting,
        "bytes of the server's memory per waiting job, 100-byte body": per_job,
    }
    for verb, (median, p99) in full.items():
        figures[f"{verb}, empty queue: median ms"] = empty[verb][0] * 1000
        figures[f"{verb}, full queue: median ms"] = median * 1000
        figures[f"{verb}, full queue: p99 ms"] = p99 * 1000
        figures[f"{verb}, full : empty"] = median / empty[verb][0]
    return figures


def _verbs(backend: Backend) -> dict[str, tuple[float, float]]:
    """Median and p99 seconds of each verb; the queue is as long afterwards as before."""
    with backend.consumer([QUEUE]) as consumer:
        enqueue, reserve, settle = [], [], []
        for _ in range(SAMPLES):
            (job,) = _jobs(1)
            enqueue.append(_timed(lambda job=job: backend.enqueue(QUEUE, [job])))  # type: ignore[misc]
            leases: list[Lease] = []
            reserve.append(_timed(lambda into=leases: into.extend(consumer.reserve(1, 0))))  # type: ignore[misc]
            settle.append(_timed(lambda leases=leases: consumer.settle([Ack(leases[0])])))  # type: ignore[misc]
    return {"enqueue": _summary(enqueue), "reserve": _summary(reserve), "ack": _summary(settle)}


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _memory(server: RedisServer) -> int:
    return int(server.ask("INFO", "memory")["used_memory"])


# --- one instant -----------------------------------------------------------------------------------------


def due_at_once(server: RedisServer, backend: Backend, options: argparse.Namespace) -> dict[str, float]:
    """All jobs are due at one moment: how long another client's PING takes until they are handed out."""
    lead = 2 + options.due / 15_000  # seconds to enqueue them in
    moment = time.time() + lead
    for start in range(0, options.due, BATCH):
        backend.enqueue(QUEUE, _jobs(min(BATCH, options.due - start), delay=max(0.001, moment - time.time())))
    with Bystander(server) as quiet:
        time.sleep(1)
    time.sleep(max(0, moment - time.time()))
    server.set("slowlog-log-slower-than", "500")  # microseconds
    start_at = time.perf_counter()
    with Bystander(server) as bystander:
        _drain(backend, options.due)
    took = time.perf_counter() - start_at
    busy = bystander.waits
    return {
        "jobs due at once": options.due,
        "handed out and acked per second": options.due / took,
        "PING meanwhile: median ms": statistics.median(busy) * 1000,
        "PING meanwhile: p99 ms": _summary(busy)[1] * 1000,
        "PING meanwhile: longest ms": max(busy) * 1000,
        "PING on a quiet server: longest ms": max(quiet.waits) * 1000,
        "longest command in the server's slow log, ms": _slowest(server),
    }


def _slowest(server: RedisServer) -> float:
    """What the server itself measured: no scheduling of ours in it."""
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
    """Another client in a process of its own, which asks for nothing but an answer, about 500 times a second."""

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
        """Seconds from each PING to its answer, once it is over."""
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


# --- shared ----------------------------------------------------------------------------------------------


def _jobs(count: int, delay: float = 0) -> list[NewJob]:
    return [NewJob(BODY, job_id, delay=delay) for job_id in new_ids(count)]


def _summary(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=1_000_000, help="jobs in the long queue")
    parser.add_argument("--due", type=int, default=100_000, help="jobs that fall due at once")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
