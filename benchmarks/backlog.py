"""Shared by the scripts on long queues: fills a queue, and measures enqueue, reserve and ack on the full queue."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from beside import Figures, median_and_p99, timed

from multiq.backend import Ack, Lease, NewJob
from multiq.ids import new_ids

if TYPE_CHECKING:
    from multiq.backend import Backend, Consumer

QUEUE = "mail"
BODY = b"x" * 100
BATCH = 1_000
SAMPLES = 500

Verbs = dict[str, list[float]]


def batches(count: int) -> list[int]:
    """The sizes of the bulk enqueues that add up to *count* jobs."""
    return [min(BATCH, count - start) for start in range(0, count, BATCH)]


def some_jobs(count: int, delay: float = 0) -> list[NewJob]:
    return [NewJob(BODY, job_id, delay=delay) for job_id in new_ids(count)]


def fill(backend: Backend, count: int) -> None:
    for size in batches(count):
        backend.enqueue(QUEUE, some_jobs(size))


def verbs(*backends: Backend) -> list[Verbs]:
    """How many seconds each enqueue, reserve and ack takes on each backend. The backends take turns. The queues'
    lengths do not change during the measurement."""
    times: list[Verbs] = [{"enqueue": [], "reserve": [], "ack": []} for _ in backends]
    with ExitStack() as stack:
        consumers = [stack.enter_context(backend.consumer([QUEUE])) for backend in backends]
        for _ in range(SAMPLES):
            for backend, consumer, into in zip(backends, consumers, times, strict=True):
                _take(backend, consumer, into)
    return times


def beside_empty(empty: Verbs, full: Verbs) -> Figures:
    """The time of each verb (enqueue, reserve, ack) on a full queue and on an empty one."""
    figures: Figures = {}
    for verb, times in full.items():
        median, p99 = median_and_p99(times)
        least, _ = median_and_p99(empty[verb])
        figures[f"{verb}, empty queue: median ms"] = least * 1000
        figures[f"{verb}, full queue: median ms"] = median * 1000
        figures[f"{verb}, full queue: p99 ms"] = p99 * 1000
        figures[f"{verb}, full : empty"] = median / least
    return figures


def _take(backend: Backend, consumer: Consumer, into: Verbs) -> None:
    job = some_jobs(1)
    leases: list[Lease] = []
    into["enqueue"].append(timed(lambda: backend.enqueue(QUEUE, job)))
    into["reserve"].append(timed(lambda: leases.extend(consumer.reserve(1, 0))))
    into["ack"].append(timed(lambda: consumer.settle([Ack(leases[0])])))
