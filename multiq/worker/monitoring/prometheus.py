"""A worker's metrics in Prometheus' text format. ``docs/metrics.md`` describes them."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from multiq.errors import MultiqError

from .metrics import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from multiq.backend import Backend, QueueStats

    from .metrics import Metrics, TaskCounts
    from .status import HealthReport, Status

_LOOK_EVERY = 5.0  # seconds during which the backend's counts are reused
_PATIENCE = 1.5  # seconds to wait for the backend's counts; a page may take three seconds
_STATES = ("ready", "delayed", "reserved", "buried")


class WorkerCollector(Collector):
    """Collects all metrics on request. Thread-safe."""

    def __init__(self, metrics: Metrics, status: Status, backend: Backend, queues: Sequence[str]) -> None:
        self._metrics = metrics
        self._status = status
        self._backend = backend
        self._queues = queues
        self._stats: list[QueueStats] = []
        self._looked_at = -_LOOK_EVERY
        self._look: threading.Thread | None = None
        self._looking = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing, because the metrics are known only when they are collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._metrics.read()
        yield from _of_tasks(counts.tasks)
        for name, help_text, number in (
            ("jobs_lost", "Verdicts that came after the end of their leases.", counts.lost),
            ("jobs_crashed", "Jobs whose process died while it ran them.", counts.crashed),
            ("backend_errors", "Calls that did not reach the backend.", counts.backend_errors),
        ):
            yield CounterMetricFamily(f"multiq_{name}", help_text, number)
        yield from _of_worker(self._status.report())
        yield from _of_queues(self._counts())

    def _counts(self) -> list[QueueStats]:
        """Return counts that are at most a few seconds old. Empty if the backend does not answer soon.

        A separate thread asks the backend, because a call to a silent backend takes longer than a page may take.
        """
        with self._looking:
            look, now = self._look, time.monotonic()
            if look is None or (not look.is_alive() and now >= self._looked_at + _LOOK_EVERY):
                look = threading.Thread(target=self._ask, name="multiq-http-counts", daemon=True)
                look.start()
                self._look, self._looked_at = look, now
            patience = self._looked_at + _PATIENCE - now
        look.join(max(0.0, patience))
        return [] if look.is_alive() else self._stats

    def _ask(self) -> None:
        try:
            self._stats = [self._backend.stats(queue) for queue in self._queues]
        except MultiqError:  # other metrics show the outage
            self._stats = []


def _of_tasks(tasks: Sequence[TaskCounts]) -> Iterator[Metric]:
    jobs = CounterMetricFamily("multiq_jobs", "Runs of jobs, by what became of them.", labels=["task", "outcome"])
    timed_out = CounterMetricFamily("multiq_jobs_timed_out", "Runs that took too long.", labels=["task"])
    seconds = HistogramMetricFamily("multiq_job_seconds", "How long runs took that ended.", labels=["task"])
    for counts in tasks:
        for outcome, number in counts.outcomes.items():
            jobs.add_metric([counts.task, outcome], number)
        timed_out.add_metric([counts.task], counts.timed_out)
        bounds = [*map(str, BOUNDS), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(counts.buckets), strict=True))
        seconds.add_metric([counts.task], buckets, counts.seconds)
    yield from (jobs, timed_out, seconds)


def _of_worker(report: HealthReport) -> Iterator[Metric]:
    for name, help_text, number in (
        ("jobs_running", "Jobs that run now.", report.running),
        ("processes", "Processes that work now.", len(report.children)),
        ("worker_well", "1: the worker is well.", report.is_well),
        ("worker_ready", "1: the worker is well and takes jobs.", report.is_ready),
        ("worker_up_seconds", "Since the worker began.", report.up_for),
    ):
        yield GaugeMetricFamily(f"multiq_{name}", help_text, float(number))
    if report.backend_answered is not None:
        yield GaugeMetricFamily(
            "multiq_backend_answered_seconds", "Since the backend last answered.", report.backend_answered
        )
    yield CounterMetricFamily("multiq_processes_crashed", "Processes that died.", report.crashed)
    yield CounterMetricFamily("multiq_processes_replaced", "Processes that were to be replaced.", report.replaced)


def _of_queues(queues: Sequence[QueueStats]) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("multiq_queue_jobs", "Jobs of a watched queue.", labels=["queue", "state"])
    paused = GaugeMetricFamily("multiq_queue_paused", "1: the queue is paused.", labels=["queue"])
    for stats in queues:
        for state in _STATES:
            number = getattr(stats, state)
            if number is not None:  # None: the backend does not know this count, and 0 would be wrong
                jobs.add_metric([stats.queue, state], number)
        paused.add_metric([stats.queue], float(stats.paused_for is not None))
    yield from (jobs, paused)
