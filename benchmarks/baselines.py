"""What multiq is compared with: the drivers' baselines of ``multiq bench``, and two simple loops. Each loop makes
single puts through a client library that multiq does not use.

These baselines guarantee less than multiq: they have no fencing, no delays and no counters, and support one reader
only.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import greenstalk
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from multiq.bench.targets import load_bench

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.bench.adapter import Baseline


@contextmanager
def baseline_of(url: str, body: bytes) -> Iterator[Baseline]:
    """The simplest possible loops on the server of *url*, for bodies as large as those of a no-op task."""
    bench = load_bench(url.partition(":")[0])
    assert bench is not None  # noqa: S101 - all drivers that are measured here have one
    with bench.at(url) as adapter:
        baseline = adapter.baseline(body)
        assert baseline is not None  # noqa: S101
        with closing(baseline):
            yield baseline


def pushes_through_redis_py(port: int, body: bytes, count: int) -> float:
    """Calls of ``LPUSH`` per second through plain redis-py with hiredis, with one round trip for each call."""
    with closing(redis.Redis(port=port, protocol=2, retry=Retry(NoBackoff(), 0))) as client:
        client.lpush("baseline:list", body)
        start = time.perf_counter()
        for _ in range(count):
            client.lpush("baseline:list", body)
        rate = count / (time.perf_counter() - start)
        client.delete("baseline:list")
    return rate


def puts_through_greenstalk(address: tuple[str, int], body: bytes, count: int) -> float:
    """Calls of greenstalk's ``put`` per second, with one round trip for each call. The function deletes its jobs at the
    end."""
    with greenstalk.Client(address, encoding=None, use="baseline", watch="baseline") as client:
        put = client.put
        start = time.perf_counter()
        for _ in range(count):
            put(body, 1024, 0, 60)
        rate = count / (time.perf_counter() - start)
        for _ in range(count):
            client.delete(client.reserve(0))
    return rate
