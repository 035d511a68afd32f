"""The size of a store in which many outcomes are kept, and the speed of claims in this store.

    python tests/soak/kept_outcomes.py redis --jobs 1000000 --rate 1000 --keep 60

Jobs are enqueued and acked at a steady rate, and each ack keeps an outcome of 200 bytes. The size of the store is read
by the store's own client. Once outcomes expire as fast as they are kept, the size must stay: its median in the last
third of the remaining time may be at most 5 % over its median in the first third.

Then plain jobs are drained in turns, from this store and from one that has no outcomes. Exits with 1 if the size grows.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))

from servers.mysql import MysqlServer
from servers.redis import RedisServer

from multiq.backend import Ack, After, NewJob
from multiq.backend.registry import open_backend
from multiq.bench.servers import cpu_seconds
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend, Consumer, Lease

QUEUE = "kept"
_BATCH = 100
_OUTCOME = b"x" * 200
_MOST_GROWTH = 1.05
_ROUNDS = 40  # drains of each store: many short ones, because the speed of a shared machine changes within seconds
_DRAINED = 5_000  # jobs of one drain


class Store(NamedTuple):
    url: str
    size: Callable[[], int]
    """Bytes that the store uses."""
    cpu: Callable[[], float]
    """Seconds of CPU time that the server has used."""
    kept: Callable[[], int]
    """How many outcomes the store has, expired ones included."""


@contextlib.contextmanager
def _redis() -> Iterator[Store]:
    with RedisServer() as server:
        yield Store(
            server.url,
            lambda: int(server.ask("INFO", "memory")["used_memory"]),
            lambda: cpu_seconds(server.pid) or 0.0,
            lambda: int(server.ask("HLEN", f"multiq:{{{QUEUE}}}:outcomes")),
        )


@contextlib.contextmanager
def _mysql() -> Iterator[Store]:
    with MysqlServer(innodb_flush_log_at_trx_commit="2") as server, server.database() as place:
        yield Store(
            place.url,
            lambda: sum(file.stat().st_size for file in (server.data / place.name).glob("*.ibd")),
            lambda: cpu_seconds(server.pid) or 0.0,
            lambda: int(server.ask(f"SELECT COUNT(*) FROM {place.name}.multiq_outcomes")[0][0]),  # noqa: S608 - of a test
        )


@contextlib.contextmanager
def _sqlite() -> Iterator[Store]:
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"

        def kept() -> int:
            with contextlib.closing(sqlite3.connect(path, timeout=60)) as db:
                return int(db.execute("SELECT COUNT(*) FROM multiq_outcomes").fetchone()[0])

        yield Store(f"sqlite:///{path}?synchronous=normal", lambda: path.stat().st_size, lambda: 0.0, kept)


STORES = {"redis": _redis, "mysql": _mysql, "sqlite": _sqlite}


def run(backend: str, jobs: int, rate: float, keep: float, *, rounds: int = _ROUNDS) -> bool:
    """Returns whether the size stayed the same."""
    with STORES[backend]() as store, STORES[backend]() as without:
        is_flat = _fill(backend, store, jobs, rate, keep)
        if rounds:
            _compare_claims(backend, store, without, rounds)
    return is_flat


def _fill(name: str, store: Store, jobs: int, rate: float, keep: float) -> bool:
    with open_backend(store.url) as backend, backend.consumer([QUEUE]) as consumer:
        sizes, took = _work(store, backend, consumer, jobs, rate=rate, keep=keep)
    steady = [size for at, size in sizes if at > 2 * keep]
    third = len(steady) // 3
    if not third:
        print(f"{name}: {took:.0f} s are too short for outcomes that are kept for {keep:g} s: nothing was proven")
        return False
    first, last = statistics.median(steady[:third]), statistics.median(steady[-third:])
    print(
        f"{name}: {jobs:,} outcomes of {len(_OUTCOME)} bytes at {jobs / took:.0f}/s, kept for {keep:g} s; "
        f"{store.kept():,} in the store at the end; {first / 1e6:.1f} MB, then {last / 1e6:.1f} MB",
        flush=True,
    )
    return last <= first * _MOST_GROWTH


def _work(
    store: Store, backend: Backend, consumer: Consumer, jobs: int, *, rate: float, keep: float
) -> tuple[list[tuple[float, int]], float]:
    """Keep the outcomes. Returns the store's sizes, each with its time, and how long it took."""
    after = After(keep=keep, outcome=_OUTCOME)
    began = told_at = time.monotonic()
    sizes: list[tuple[float, int]] = []
    done = 0
    held: list[Lease] = []
    while done < jobs:
        backend.enqueue(QUEUE, [NewJob(b"x" * 100, new_id()) for _ in range(_BATCH)])
        _, held = consumer.exchange([Ack(lease, after) for lease in held], _BATCH, 1.0)
        done += len(held)
        now = time.monotonic()
        if now - told_at > 1.0:
            told_at = now
            sizes.append((now - began, store.size()))
        time.sleep(max(0.0, began + done / rate - now))
    consumer.settle([Ack(lease, after) for lease in held])
    return sizes, time.monotonic() - began


def _compare_claims(name: str, store: Store, without: Store, rounds: int) -> None:
    with open_backend(store.url) as beside, open_backend(without.url) as alone:
        pairs = []
        for at in range(rounds + 1):
            order = [(store, beside), (without, alone)][:: 1 if at % 2 else -1]
            seconds = {one.url: _drain(one, backend) for one, backend in order}
            if at:  # the first drains also load scripts and open connections
                pairs.append((seconds[without.url], seconds[store.url]))
    ratios = sorted(one / other for one, other in pairs)
    alone_sum, beside_sum = (sum(column) for column in zip(*pairs, strict=True))
    print(
        f"{name}: {beside_sum / rounds / _DRAINED * 1e6:.1f} us of CPU time for a plain job beside {store.kept():,} "
        f"outcomes, {alone_sum / beside_sum:.2f} of the speed without ({rounds} pairs, half of them between "
        f"{ratios[rounds // 4]:.2f} and {ratios[rounds * 3 // 4]:.2f})",
        flush=True,
    )


def _drain(store: Store, backend: Backend) -> float:
    """The seconds of CPU time, of this process and the server, in which plain jobs are reserved and acked."""
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(_DRAINED // 1000):
            backend.enqueue(QUEUE, [NewJob(b"x" * 100, new_id()) for _ in range(1000)])
        began, done = time.process_time() + store.cpu(), 0
        held: list[Lease] = []
        while done < _DRAINED:
            _, held = consumer.exchange([Ack(lease) for lease in held], _BATCH, 1.0)
            done += len(held)
        consumer.settle([Ack(lease) for lease in held])
        return time.process_time() + store.cpu() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend", choices=STORES)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=1000.0, help="jobs per second")
    parser.add_argument("--keep", type=float, default=60.0, help="seconds")
    given = parser.parse_args()
    return 0 if run(given.backend, given.jobs, given.rate, given.keep) else 1


if __name__ == "__main__":
    sys.exit(main())
