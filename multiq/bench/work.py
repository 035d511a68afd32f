"""The functions that processes of a run execute. Each function gets an app, waits for the start signal, and returns
records.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from multiq.backend import Ack
from multiq.envelope import ENVELOPE_VERSION, Envelope, decode_envelope, encode_envelope

from .adapter import PUT_BATCH
from .run_log import Run
from .targets import load_bench
from .verification import Sent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import Lease

    from .app import BenchApp

Go: TypeAlias = Callable[[], None]
"""Waits for the start signal."""

_MAX_BODY = 2**27  # bytes
_AT_ONCE = 500  # jobs that a sweep takes with one call


def enqueue_singly(app: BenchApp, go: Go, queue: str, first: int, count: int) -> list[Sent]:
    """Enqueue each job with a separate call."""
    noop = app.noop.options(queue=queue)
    app.queue(queue).stats()  # connects before the measurement begins
    sent = []
    go()
    clock = time.monotonic_ns
    for number in range(first, first + count):
        called = clock()
        noop.enqueue(number)
        sent.append(Sent(number, 1, called, clock()))
    return sent


def enqueue_in_bulk(app: BenchApp, go: Go, queue: str, first: int, count: int) -> list[Sent]:
    """Enqueue ``PUT_BATCH`` jobs with each call."""
    noop = app.noop.options(queue=queue)
    app.queue(queue).stats()
    sent = []
    go()
    for start in range(first, first + count, PUT_BATCH):
        size = min(PUT_BATCH, first + count - start)
        called = time.monotonic_ns()
        noop.enqueue_many([(number,) for number in range(start, start + size)])
        sent.append(Sent(start, size, called, time.monotonic_ns()))
    return sent


def enqueue_padded(app: BenchApp, go: Go, queue: str, count: int, size: int) -> list[Sent]:
    """Enqueue jobs one by one, with bodies of about *size* bytes."""
    padded = app.padded.options(queue=queue)
    app.queue(queue).stats()
    padding = "x" * size
    sent = []
    go()
    for number in range(count):
        called = time.monotonic_ns()
        padded.enqueue(number, padding)
        sent.append(Sent(number, 1, called, time.monotonic_ns()))
    return sent


def enqueue_on_schedule(app: BenchApp, go: Go, queue: str, count: int, rate: float) -> list[Sent]:
    """Enqueue a job every 1/*rate* seconds by the clock. If the planned time of a call is already past, the call starts
    immediately."""
    noop = app.noop.options(queue=queue)
    app.queue(queue).stats()
    sent = []
    go()
    begin = time.monotonic_ns() + 1_000_000
    for number in range(count):
        intended = begin + round(number * 1e9 / rate)
        _sleep_until(intended)
        called = time.monotonic_ns()
        noop.enqueue(number)
        sent.append(Sent(number, 1, called, time.monotonic_ns(), intended=intended))
    return sent


def enqueue_delayed(app: BenchApp, go: Go, queue: str, delays: Sequence[float]) -> list[Sent]:
    """Enqueue jobs one by one. Each job has its own delay in seconds."""
    app.queue(queue).stats()
    sent = []
    go()
    for number, delay in enumerate(delays):
        noop = app.noop.options(queue=queue, delay=delay)
        called = time.monotonic_ns()
        noop.enqueue(number)
        sent.append(Sent(number, 1, called, time.monotonic_ns(), delay=delay))
    return sent


def enqueue_by_priority(app: BenchApp, go: Go, queue: str, priorities: Sequence[int], batch: int) -> list[Sent]:
    """Enqueue *batch* jobs with one call for each priority."""
    app.queue(queue).stats()
    sent = []
    go()
    for index, priority in enumerate(priorities):
        noop = app.noop.options(queue=queue, priority=priority)
        first = index * batch
        called = time.monotonic_ns()
        noop.enqueue_many([(number,) for number in range(first, first + batch)])
        sent.append(Sent(first, batch, called, time.monotonic_ns(), priority=priority))
    return sent


def enqueue_flaky(app: BenchApp, go: Go, queue: str, failures: Sequence[int]) -> list[Sent]:
    """Enqueue a job for each number in *failures*. The number says how often the job fails before it succeeds."""
    flaky = app.flaky.options(queue=queue)
    app.queue(queue).stats()
    go()
    called = time.monotonic_ns()
    flaky.enqueue_many(list(enumerate(failures)))
    return [Sent(0, len(failures), called, time.monotonic_ns())]


def enqueue_naps(app: BenchApp, go: Go, queue: str, count: int, seconds: float) -> list[Sent]:
    """Enqueue *count* jobs, each of which sleeps for *seconds* seconds."""
    nap = app.nap.options(queue=queue)
    app.queue(queue).stats()
    go()
    called = time.monotonic_ns()
    nap.enqueue_many([(number, seconds) for number in range(count)])
    return [Sent(0, count, called, time.monotonic_ns())]


def reserve_singly(app: BenchApp, go: Go, queue: str, count: int) -> list[tuple[Run, int]]:
    """Take and ack one job after the other with ``queue.reserve()``.

    Returns each run, with the time in ns that its reserve and its ack took together.
    """
    jobs = app.queue(queue)
    jobs.stats()
    taken = []
    go()
    for _ in range(count):
        called = time.monotonic_ns()
        job = jobs.reserve()
        got = time.monotonic_ns()
        job.ack()
        done = time.monotonic_ns()
        taken.append((_run(job.lease, got), done - called))
    return taken


class SettleTimes(NamedTuple):
    """The durations of a raw consumer's calls, in ns per job. Each duration is the 10th percentile of the calls of one
    kind.

    The slower calls are ignored, because they measure the machine's other load more than multiq.
    """

    reserve: float
    ack: float
    ack_one: float
    runs: list[Run]


def settle_batches(app: BenchApp, go: Go, queue: str, batches: int, batch: int) -> SettleTimes:
    """Take and ack *batches* batches of *batch* jobs with a raw consumer. Then ack *batches* jobs one by one."""
    runs: list[Run] = []
    reserving, acking, acking_one = [], [], []
    with app.backend.consumer([queue]) as consumer:
        app.queue(queue).stats()
        go()
        for _ in range(batches):
            began = time.perf_counter_ns()
            leases = consumer.reserve(batch, 1)
            reserved = time.perf_counter_ns()
            if not leases:
                break
            now = time.monotonic_ns()
            verdicts = [Ack(lease) for lease in leases]
            settling = time.perf_counter_ns()
            _check(consumer.settle(verdicts))
            acking.append((time.perf_counter_ns() - settling) / len(leases))
            reserving.append((reserved - began) / len(leases))
            runs += [_run(lease, now) for lease in leases]
        for lease in consumer.reserve(batches, 1):
            now = time.monotonic_ns()
            verdicts = [Ack(lease)]
            settling = time.perf_counter_ns()
            _check(consumer.settle(verdicts))
            acking_one.append(time.perf_counter_ns() - settling)
            runs.append(_run(lease, now))
    return SettleTimes(_undisturbed(reserving), _undisturbed(acking), _undisturbed(acking_one), runs)


def measure_baseline(app: BenchApp, go: Go, backend: str, singly: int, in_batches: int) -> dict[str, float]:
    """The baseline's rates on this server. The keys are the names of ``Baseline``'s methods. The result is empty if the
    driver has no baseline.

    The jobs have the same body as the workloads' jobs.
    """
    bench = load_bench(backend)
    go()
    if bench is None:
        return {}
    with bench.at(app.url) as adapter:
        baseline = adapter.baseline(
            encode_envelope(Envelope(ENVELOPE_VERSION, "noop", [1_000_000]), max_body=_MAX_BODY)
        )
        if baseline is None:
            return {}
        with contextlib.closing(baseline):
            return {
                "put_one_by_one": baseline.put_one_by_one(singly),
                "put_in_batches": baseline.put_in_batches(in_batches),
                "take_in_batches": baseline.take_in_batches(),
            }


def sweep(app: BenchApp, queue: str, most: int, timeout: float = 0.0) -> list[Run]:
    """Take and ack due jobs in batches, until none is left or more than *most* were taken.

    - *most*: the sweep ends when more jobs than this were taken. Without this limit, the sweep would never end on a
      store that hands out the same jobs again and again.
    - *timeout*: the seconds to wait for the first job.
    """
    return [
        _run(lease, now + index)
        for leases, now in _taken(app, queue, most, timeout)
        for index, lease in enumerate(leases)
    ]


def numbers_of(app: BenchApp, queue: str, most: int) -> array[int]:
    """Take jobs as ``sweep`` does, but return only their numbers. A million numbers take eight megabytes."""
    numbers = array("q")
    for leases, _ in _taken(app, queue, most, 0.0):
        numbers.extend(_number(lease) for lease in leases)
    return numbers


def _taken(app: BenchApp, queue: str, most: int, timeout: float) -> Iterator[tuple[list[Lease], int]]:
    """Yields batches of leases, each with the time of its arrival in ns.

    The call for the next batch acks the previous batch.
    """
    taken = 0
    with app.backend.consumer([queue]) as consumer:
        leases = consumer.reserve(_AT_ONCE, timeout)
        while leases:
            yield leases, time.monotonic_ns()
            taken += len(leases)
            verdicts = [Ack(lease) for lease in leases]
            if taken > most:
                _check(consumer.settle(verdicts))
                return
            lost, leases = consumer.exchange(verdicts, _AT_ONCE, 0)
            _check(lost)


def _undisturbed(took: Sequence[float]) -> float:
    return sorted(took)[len(took) // 10] if took else 0.0


def _check(lost: Sequence[Exception | None]) -> None:
    for error in lost:
        if error is not None:
            raise error


def _run(lease: Lease, now: int) -> Run:
    return Run(_number(lease), now, now + 1, lease.attempt, os.getpid())


def _number(lease: Lease) -> int:
    number: int = decode_envelope(lease.body, max_body=_MAX_BODY).args[0]
    return number


def _sleep_until(moment: int) -> None:
    while (left := moment - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)
