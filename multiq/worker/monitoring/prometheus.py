"""Metrics of workers and queues in Prometheus' text format. ``docs/metrics.md`` describes them."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from multiq.control.flags import visible_queues

from .metrics import BOUNDS
from .queue_metrics import QueueReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from multiq.backend import Backend
    from multiq.settings.process_range import ProcessRange

    from .health import Health, HealthReport
    from .metrics import Counts, Metrics, TaskCounts
    from .queue_metrics import QueueNumbers

_log = logging.getLogger("multiq.metrics")

_PATIENCE = 1.5  # seconds to wait for the numbers of the queues; a worker must answer a page within three seconds
_STATES = ("ready", "delayed", "reserved", "buried", "held")


class _Page(Collector):
    """A page of metrics, collected at each request. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing, because the metrics are known only when they are collected."""
        return []


class WorkerCollector(_Page):
    """The metrics of one worker and of its queues."""

    def __init__(self, metrics: Metrics, health: Health, backend: Backend, queues: Sequence[str]) -> None:
        super().__init__()
        self._metrics = metrics
        self._health = health
        self._backend = backend
        self._reader = QueueReader(backend, lambda: queues, _PATIENCE)

    def collect(self) -> Iterator[Metric]:
        counts = self._metrics.read()
        yield from _of_tasks(counts.tasks)
        for name, help_text, number in (
            ("jobs_lost", "Jobs whose verdict came after the end of the lease.", counts.lost),
            ("jobs_crashed", "Jobs whose process died while it ran them.", counts.crashed),
            ("backend_errors", "Calls that did not reach the backend.", counts.backend_errors),
        ):
            yield CounterMetricFamily(f"multiq_{name}", help_text, number)
        yield _lateness(counts)
        yield from _of_worker(self._health.report(), self._health.limits)
        yield from _of_queues(self._backend, self._reader.read())


class QueueCollector(_Page):
    """The metrics of queues, for ``multiq metrics``.

    - *most*: the largest number of queues on the page. The first queues by name are shown.
    - *patience*: seconds to wait for the backend.
    """

    def __init__(self, backend: Backend, queues: Sequence[str], *, most: int, patience: float) -> None:
        super().__init__()
        self._backend = backend
        self._most = most
        self._left_out = 0
        self._queues = queues
        self._reader = QueueReader(backend, self._find_queues, patience)
        self.is_up = True
        """Whether the backend answered in time for the last page. If not, ``error`` is the reason."""
        self.error = ""

    def collect(self) -> Iterator[Metric]:
        numbers = self._reader.read()
        self._note(None if numbers is not None else self._reader.error)
        yield from _of_queues(self._backend, numbers)
        if numbers is not None:
            yield GaugeMetricFamily("multiq_queues_left_out", "Queues that this page leaves out.", self._left_out)

    def _note(self, error: str | None) -> None:
        was_up, self.is_up = self.is_up, error is None
        if error is not None and (was_up or error != self.error):
            _log.warning("the queues cannot be read: %s", error)
        elif error is None and not was_up:
            _log.info("the queues can be read again")
        self.error = error or ""

    def _find_queues(self) -> Sequence[str]:
        if self._queues:
            return self._queues
        found = visible_queues(self._backend)
        self._left_out = max(0, len(found) - self._most)
        return found[: self._most]


def _of_tasks(tasks: Sequence[TaskCounts]) -> Iterator[Metric]:
    jobs = CounterMetricFamily("multiq_jobs", "Runs of jobs, by their outcome.", labels=["task", "outcome"])
    timed_out = CounterMetricFamily("multiq_jobs_timed_out", "Runs that exceeded their timeout.", labels=["task"])
    seconds = HistogramMetricFamily("multiq_job_seconds", "Duration of the runs that ended.", labels=["task"])
    waits = HistogramMetricFamily("multiq_job_wait_seconds", "From the enqueue to the first start.", labels=["task"])
    for counts in tasks:
        for outcome, number in counts.outcomes.items():
            jobs.add_metric([counts.task, outcome], number)
        timed_out.add_metric([counts.task], counts.timed_out)
        seconds.add_metric([counts.task], _cumulated(counts.buckets), counts.seconds)
        waits.add_metric([counts.task], _cumulated(counts.wait_buckets), counts.wait_seconds)
    yield from (jobs, timed_out, seconds, waits)


def _lateness(counts: Counts) -> Metric:
    metric = HistogramMetricFamily("multiq_schedule_lateness_seconds", "How late schedules' jobs have started.")
    metric.add_metric([], _cumulated(counts.late_buckets), counts.late_seconds)
    return metric


def _cumulated(buckets: list[float]) -> list[tuple[str, float]]:
    return list(zip([*map(str, BOUNDS), "+Inf"], itertools.accumulate(buckets), strict=True))


def _of_worker(report: HealthReport, limits: ProcessRange) -> Iterator[Metric]:
    for name, help_text, number in (
        ("jobs_running", "Jobs that run now.", report.running),
        ("processes", "Processes that work now.", len(report.children)),
        ("processes_wanted", "Processes that the worker needs now.", report.wanted),
        ("processes_min", "The least number of processes that the worker may have.", limits.least),
        ("processes_max", "The largest number of processes that the worker may have.", limits.most),
        ("worker_well", "1: the worker is well.", report.is_well),
        ("worker_ready", "1: the worker is well and takes jobs.", report.is_ready),
        ("worker_up_seconds", "Seconds since the worker started.", report.up_for),
    ):
        yield GaugeMetricFamily(f"multiq_{name}", help_text, float(number))
    if report.backend_answered is not None:
        yield GaugeMetricFamily(
            "multiq_backend_answered_seconds", "Seconds since the last answer of the backend.", report.backend_answered
        )
    yield CounterMetricFamily("multiq_processes_crashed", "Processes that died.", report.crashed)
    yield CounterMetricFamily(
        "multiq_processes_replaced", "Processes that ended in order to be replaced.", report.replaced
    )


def _of_queues(backend: Backend, numbers: list[QueueNumbers] | None) -> Iterator[Metric]:
    """*numbers* None: the backend did not answer in time. A number that the backend does not know is left out."""
    yield GaugeMetricFamily("multiq_up", "1: the backend has answered this page in time.", float(numbers is not None))
    jobs = GaugeMetricFamily("multiq_queue_jobs", "Jobs of a queue, by state.", labels=["queue", "state"])
    ages = GaugeMetricFamily(
        "multiq_queue_oldest_age_seconds", "Age of the ready job that is next, since its enqueue.", labels=["queue"]
    )
    paused = GaugeMetricFamily("multiq_queue_paused", "1: the queue is paused.", labels=["queue"])
    declared = backend.declared
    for stats, age in numbers or ():
        for state in _STATES:
            number = getattr(stats, state)
            if number is not None and (state != "held" or declared.holds):
                jobs.add_metric([stats.queue, state], number)
        if age is not None:
            ages.add_metric([stats.queue], age)
        if declared.pausing:
            paused.add_metric([stats.queue], float(stats.paused_for is not None))
    yield from (jobs, ages, paused)
