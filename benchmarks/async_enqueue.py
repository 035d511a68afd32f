"""How fast coroutines enqueue, and what a hung server does to their event loop: ``benchmarks/async_enqueue.py --help``.

- One by one: each ``aenqueue`` begins when the previous call has returned. *Alone*: one by one, with a pause before
  each call.
- 200 at a time: 200 coroutines enqueue without a pause, so the rate is what one event loop and one queue can take.
- 200 now and then: 200 coroutines pause at random. The 200 coroutines' total rate is a quarter, a half and all of the
  one-by-one rate. The latency counts from the moment at which the call should have begun.
- Hung: the server is stopped for two seconds by SIGSTOP. On SQLite, another connection holds the write lock instead.
  While the server hangs, an enqueue and a call for statistics begin every 10 ms, 200 of each. The event loop's lag is
  measured every millisecond, as is the lag of an unrelated ``asyncio.to_thread``. A time during which the loop's thread
  waits for a CPU core is not counted. For comparison, the measurement is repeated with the plain calls in
  ``asyncio.to_thread``, and with no calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from beside import HERE, arguments, expect, latencies, report

sys.path.append(str(HERE.parent / "tests" / "integration"))
from servers.mysql import MysqlServer
from servers.redis import RedisServer

import multiq

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from contextlib import AbstractContextManager

    from beside import Figures
    from servers.process import Server

Hung: TypeAlias = "Callable[[], AbstractContextManager[None]]"
"""Makes the store hang until the end of the ``with`` block."""

CALLERS = 200
HANGS = 2.0  # seconds
_PAUSE = 0.005  # seconds before each call that is alone
_TICK = 0.001
_ARRIVALS = 0.01  # seconds between two pairs of calls to the hung server


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[tuple[str, Hung]]:
    url = f"sqlite:///{folder}/jobs.db"

    @contextlib.contextmanager
    def hung() -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(folder / "jobs.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield

    yield url, hung


@contextlib.contextmanager
def redis(_: Path) -> Iterator[tuple[str, Hung]]:
    with RedisServer() as server:
        yield server.url, partial(stopped, server)


@contextlib.contextmanager
def mariadb(_: Path) -> Iterator[tuple[str, Hung]]:
    with MysqlServer() as server, server.database() as place:
        yield place.url, partial(stopped, server)


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.go_on()


STORES = {"SQLite": sqlite, "MariaDB": mariadb, "Redis": redis}


def main() -> None:
    options = arguments(__doc__, repeats=15, jobs=4000)
    measurements = {}
    with contextlib.ExitStack() as stack:
        for name, store in STORES.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, hung = stack.enter_context(store(folder))
            app = multiq.App(url)
            measurements[f"{name}: rate"] = partial(measured, rates, app, options.repeats, options.jobs)
            measurements[f"{name}: hung"] = partial(measured, hangs, app, hung)
        report(f"aenqueue from {CALLERS} coroutines", measurements, as_json=options.json)


def measured(measure: Callable[..., Coroutine[Any, Any, Figures]], *options: Any) -> Figures:
    return asyncio.run(measure(*options))


def never(number: int) -> None:
    """A task that no worker runs."""


async def rates(app: multiq.App, repeats: int, jobs: int) -> Figures:
    """Rates and latencies without a fault."""
    work, queue = app.task(never), app.queue()
    for number in range(50):
        await work.aenqueue(number)
    one: list[float] = []
    many: list[float] = []
    alone: list[float] = []
    busy: list[float] = []
    spread: dict[float, list[float]] = {0.25: [], 0.5: [], 1.0: []}
    sent, count = 50, jobs // 10
    for _ in range(repeats):  # in turns, because the machine's speed changes over time
        gc.collect()
        one.append(await rate(count, in_a_row(work, count)))
        many.append(await rate(jobs, side_by_side(work, jobs // CALLERS, busy)))
        alone += [await latency(work, pause=_PAUSE) for _ in range(50)]
        sent += count + jobs + 50
        for times in spread:
            spread[times] += await now_and_then(work, times * one[-1], seconds=0.5)
    sent += sum(map(len, spread.values()))
    expect((await queue.astats()).ready, sent)
    await queue.apurge()
    await app.aclose()
    usual, worst = statistics.median(alone), sorted(alone)[int(0.99 * len(alone))]
    figures = {
        "one by one /s": statistics.median(one),
        f"{CALLERS} at a time /s": statistics.median(many),
        "the median of the ratios of all turns": statistics.median(
            after / before for before, after in zip(one, many, strict=True)
        ),
        **latencies("alone", ms(alone)),
        **latencies(f"{CALLERS} at a time", ms(busy)),
        f"the p99 of {CALLERS} at a time, over the p99 of alone": sorted(busy)[int(0.99 * len(busy))] / worst,
    }
    for times, found in spread.items():
        named = latencies(f"{CALLERS} now and then, {times:g} x the rate of one by one:", ms(found))
        figures |= named
        p99 = list(named.values())[1] / 1000
        figures[f"the p99 of {times:g} x, over the median of alone"] = p99 / usual
        figures[f"the p99 of {times:g} x, over the p99 of alone"] = p99 / worst
    return figures


def ms(seconds: list[float]) -> list[float]:
    return [1000 * value for value in seconds]


async def rate(count: int, work: Awaitable[object]) -> float:
    start = time.perf_counter()
    await work
    return count / (time.perf_counter() - start)


async def in_a_row(work: multiq.Task[[int], None], count: int) -> None:
    for number in range(count):
        await work.aenqueue(number)


async def latency(work: multiq.Task[[int], None], pause: float = 0.0) -> float:
    if pause:
        await asyncio.sleep(pause)
    start = time.perf_counter()
    await work.aenqueue(1)
    return time.perf_counter() - start


async def side_by_side(work: multiq.Task[[int], None], each: int, found: list[float]) -> None:
    async def caller() -> None:
        found.extend([await latency(work) for _ in range(each)])

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def now_and_then(work: multiq.Task[[int], None], per_second: float, seconds: float) -> list[float]:
    """The latencies of calls that begin at random, *per_second* on average, from ``CALLERS`` coroutines."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def caller() -> None:
        due = began
        while (due := due + random.expovariate(per_second / CALLERS)) < began + seconds:
            await asyncio.sleep(due - loop.time())
            await work.aenqueue(1)
            found.append(loop.time() - due)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return found


async def hangs(app: multiq.App, hung: Hung) -> Figures:
    """How late the event loop's other work is while the server does not answer."""
    work, queue = app.task(never), app.queue()
    await work.aenqueue(1)

    plain = asyncio.to_thread
    ways: dict[str, tuple[Callable[[], Awaitable[object]], ...]] = {
        "no calls": (),
        "multiq's threads": (lambda: work.aenqueue(1), queue.astats),
        "asyncio.to_thread": (lambda: plain(work.enqueue, 1), lambda: plain(queue.stats)),
    }
    figures: Figures = {}
    for name, calls in ways.items():
        loop_lags: list[float] = []
        thread_lags: list[float] = []
        tasks: list[asyncio.Future[object]] = []
        gc.collect()
        gc.freeze()
        with hung():
            watchers = [
                asyncio.ensure_future(watch(loop_lags, lambda: asyncio.sleep(_TICK), _TICK)),
                asyncio.ensure_future(watch(thread_lags, lambda: plain(time.sleep, _TICK), _TICK)),
            ]
            give_up_at = time.monotonic() + HANGS
            while time.monotonic() < give_up_at:
                tasks += [asyncio.ensure_future(call()) for call in calls]
                await asyncio.sleep(_ARRIVALS)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        figures[f"{name}: the loop's longest lag ms"] = 1000 * max(loop_lags)
        figures[f"{name}: the loop's lag p99 ms"] = sorted(ms(loop_lags))[int(0.99 * len(loop_lags))]
        figures[f"{name}: the longest lag of another to_thread ms"] = 1000 * max(thread_lags)
    await queue.apurge()
    await app.aclose()
    return figures


async def watch(lags: list[float], nap: Callable[[], Awaitable[object]], expected: float) -> None:
    """Note how late the event loop resumes after each *nap*. The time that its thread waited for a CPU core is
    subtracted."""
    while True:
        start, waited = time.perf_counter(), waited_for_core()
        try:
            await nap()
        finally:  # the wait that the end of the measurement cancels is also recorded
            late = time.perf_counter() - start - expected
            lags.append(max(0.0, late - (waited_for_core() - waited)))


def waited_for_core() -> float:
    """How many seconds this thread was ready to run but had no CPU core, because the machine was busy."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    main()
