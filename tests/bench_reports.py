"""Reports as ``multiq bench`` writes them, with invented figures of realistic size."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, NamedTuple

from hdrh.histogram import HdrHistogram

from multiq.bench.adapter import Durability
from multiq.bench.report import (
    VERSION,
    Metric,
    Report,
    Result,
    Sample,
    TargetInfo,
    Verification,
    Violation,
    Workload,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COSTS = [
    Metric("commands", "commands/job", "lower"),
    Metric("bytes", "bytes/job", "lower"),
    Metric("client CPU", "us/job", "lower"),
    Metric("server CPU", "us/job", "lower"),
    Metric("server memory", "MB", "lower", counts=False),
]
PERCENTILES = (50, 90, 99, 99.9)


class Work(NamedTuple):
    """A workload, its variants, and its headline on redis; ``spread`` is the standard deviation of a repeat."""

    workload: Workload
    variants: Mapping[str, float]
    spread: float = 0.03
    histogram: str = ""
    repeats: int | None = None
    has_timeline: bool = False


class Target(NamedTuple):
    """A target, and its speed relative to that of redis."""

    target: TargetInfo
    speed: float


def percentiles(word: str) -> list[Metric]:
    return [Metric(f"{word} p{percentile}", "ms", "lower") for percentile in PERCENTILES]


def speed_of(name: str, title: str, about: str, *metrics: Metric) -> Workload:
    return Workload(name, title, about, [*metrics, *COSTS])


WORKS = [
    Work(
        speed_of(
            "enqueue",
            "Enqueue one by one",
            "One producer calls task.enqueue() in a loop, and each call waits for the server's answer.",
            Metric("enqueued", "jobs/s", "higher"),
        ),
        {"": 7_800},
        histogram="latency",
    ),
    Work(
        speed_of(
            "bulk",
            "Enqueue in bulk",
            "One producer calls task.enqueue_many() with 1,000 jobs at a time.",
            Metric("enqueued", "jobs/s", "higher"),
        ),
        {"": 118_000},
        has_timeline=True,
    ),
    Work(
        speed_of(
            "drain",
            "Drain",
            "Two worker processes run 20,000 jobs that do nothing, from the first start to the last end.",
            Metric("drained", "jobs/s", "higher"),
        ),
        {"": 41_000},
        has_timeline=True,
    ),
    Work(
        speed_of(
            "latency",
            "Latency under load",
            "Jobs arrive at 500 a second by the clock, whether or not the ones before were taken. A figure is the time "
            "from when a job was meant to be enqueued to when it began, so a stall counts for all waiting jobs.",
            *percentiles("pickup"),
        ),
        {"": 0.9},
        spread=0.12,
        histogram="latency",
    ),
    Work(
        speed_of(
            "delayed",
            "Lateness of delayed jobs",
            "Jobs that are due at points spread over two seconds; a figure is how long after its due time a job began.",
            *percentiles("late"),
        ),
        {"": 1.6},
        spread=0.15,
        histogram="lateness",
    ),
    Work(
        speed_of(
            "backlog",
            "With a backlog",
            "Enqueue and drain while so many other jobs wait in the queue.",
            Metric("drained", "jobs/s", "higher"),
            Metric("enqueued", "jobs/s", "higher"),
        ),
        {"0": 36_000, "10k": 35_000, "1M": 31_000},
    ),
    Work(
        speed_of(
            "bodies",
            "Body sizes",
            "Drain, with arguments of so many bytes.",
            Metric("drained", "jobs/s", "higher"),
        ),
        {"body 100 B": 39_000, "body 4 KB": 21_000, "body 60 KB": 4_100},
    ),
    Work(
        speed_of(
            "recovery",
            "Recovery",
            "A worker's process is killed with SIGKILL in mid-run: the time until its jobs run again elsewhere.",
            Metric("back after", "ms", "lower"),
        ),
        {"": 31},
        spread=0.2,
        has_timeline=True,
    ),
    Work(
        Workload(
            "settle",
            "Settle",
            "A consumer of the driver itself reserves 100 jobs and acks them; the time of one job's ack.",
            [Metric("settle", "us/job", "lower"), Metric("reserve", "us/job", "lower")],
        ),
        {"": 7.4},
        spread=0.02,
        repeats=20,
    ),
]


def target(  # noqa: PLR0917 - a table row
    name: str, server: str, speed: float, durability: Durability, ids: str, waits: str
) -> Target:
    promises = {
        "delivery": "at least once",
        "order": "by priority, then age",
        "enqueue twice": ids,
        "waiting": waits,
        "delays to": "1 s" if name == "beanstalk" else "1 ms",
    }
    return Target(TargetInfo(name, name, server, True, durability, promises, 0.2 if speed > 0.5 else 11.5), speed)


TARGETS = [
    target(
        "redis",
        "redis 7.0.15",
        1.0,
        Durability("server crash", {"appendonly": "no", "save": '""'}),
        "one job",
        "in the server",
    ),
    target("beanstalk", "beanstalkd 1.12", 0.8, Durability("client crash", {"-b": "off"}), "two jobs", "in the server"),
    target(
        "mysql",
        "MariaDB 10.11.6",
        0.24,
        Durability("server crash", {"innodb_flush_log_at_trx_commit": "2", "log_bin": "OFF", "sync_binlog": "0"}),
        "one job",
        "polls",
    ),
    target(
        "sqlite", "SQLite 3.40.1", 0.62, Durability("server crash", {"synchronous": "NORMAL"}), "one job", "watches"
    ),
]

ENVIRONMENT = {
    "CPU": "AMD EPYC 7R13, 2 cores",
    "memory": "24 GB",
    "kernel": "Linux 6.1.0-18-amd64",
    "Python": "3.11.7",
    "client libraries": "hiredis 3.2.1, greenstalk 2.1.1, PyMySQL 1.1.1, sqlite3 3.40.1",
    "load at the start": "0.12",
}


def report(
    *,
    seed: int = 1,
    repeats: int = 5,
    noise: float = 1.0,
    factors: Mapping[tuple[str, str], float] | None = None,
    targets: Sequence[Target] = TARGETS,
    violations: Mapping[tuple[str, str], Violation] | None = None,
    is_quick: bool = False,
    has_histograms: bool = False,
) -> Report:
    """The report of a run.

    *factors* are by (workload, metric), *violations* by (workload, target); *noise* is a factor, too.
    """
    made = _Maker(
        rng=random.Random(seed),
        noise=noise,
        factors=dict(factors or {}),
        violations=dict(violations or {}),
        repeats=repeats,
        has_histograms=has_histograms,
    )
    return Report(
        version=VERSION,
        multiq="0.1.0",
        started_at="2026-11-21T12:30:00+00:00",
        seconds=412.0,
        profile="fast",
        is_quick=is_quick,
        repeats=repeats,
        environment=ENVIRONMENT,
        noise=None if noise <= 2 else "a fixed piece of work took up to 2.3 times as long as at its fastest",
        workloads=[work.workload for work in WORKS],
        targets=[one.target for one in targets],
        results=[made.result(work, variant, one) for work in WORKS for variant in work.variants for one in targets],
    )


class _Maker:
    def __init__(
        self,
        *,
        rng: random.Random,
        noise: float,
        factors: dict[tuple[str, str], float],
        violations: dict[tuple[str, str], Violation],
        repeats: int,
        has_histograms: bool,
    ) -> None:
        self._rng, self._noise, self._factors, self._violations = rng, noise, factors, violations
        self._repeats, self._has_histograms = repeats, has_histograms
        self._clock = 0.0

    def result(self, work: Work, variant: str, one: Target) -> Result:
        name = one.target.name
        if work.workload.name == "bodies" and variant == "body 60 KB" and name == "beanstalk":
            skipped = "a body of 65,536 bytes is over the limit of 65,535 bytes: raise the server's -z"
            return Result(name, work.workload.name, variant, {}, [], skipped=skipped)
        centre = work.variants[variant]
        is_speed = work.workload.metrics[0].better == "higher"
        return Result(
            target=name,
            workload=work.workload.name,
            variant=variant,
            parameters={"jobs": 20_000, "processes": 2, "queue": "bench"},
            samples=[self._sample(work, centre, one, index) for index in range(work.repeats or self._repeats)],
            baseline=centre * one.speed * 2.1 if is_speed and not variant else None,
        )

    def _sample(self, work: Work, centre: float, one: Target, index: int) -> Sample:
        self._clock += 1.3
        broken = self._violations.get((work.workload.name, one.target.name)) if index == 0 else None
        histograms = {}
        if work.histogram and self._has_histograms:
            histograms[work.histogram] = self._histogram(centre / one.speed if centre < 100 else 1000 / centre)
        return Sample(
            started=self._clock,
            seconds=1.1,
            metrics={metric.name: self._figure(work, metric, centre, one) for metric in work.workload.metrics},
            verification=Verification(
                20_000, 20_000, 20_000, 0, [broken] if broken else [], ["lost", "doubled", "early"]
            ),
            histograms=histograms,
            timeline=self._timeline(work, centre * one.speed) if work.has_timeline else [],
            calm=1 + abs(self._rng.gauss(0, 0.02 * self._noise)),
        )

    def _figure(self, work: Work, metric: Metric, centre: float, one: Target) -> float | None:
        costs = {"bytes": 212.0, "client CPU": 24.0, "server CPU": 9.0, "server memory": 11.2}
        if metric.name == "commands":
            return None if one.target.name == "sqlite" else round(0.022 / one.speed, 3)
        if metric.name in costs:
            value = costs[metric.name] / one.speed
        elif metric.better == "higher":
            value = centre * one.speed
        else:
            value = centre / one.speed * _tail(metric.name)
        value *= self._factors.get((work.workload.name, metric.name), 1.0)
        return value * math.exp(self._rng.gauss(0, work.spread * self._noise))

    def _histogram(self, median_ms: float) -> str:
        found = HdrHistogram(1, 60_000_000, 3)
        for _ in range(800):
            found.record_value(max(1, round(median_ms * 1000 * self._rng.lognormvariate(0, 0.4))))
        for _ in range(12):
            found.record_value(round(median_ms * 1000 * self._rng.uniform(3, 14)))
        encoded: bytes = found.encode()
        return encoded.decode()

    def _timeline(self, work: Work, speed: float) -> list[tuple[float, float]]:
        points = 40
        rate = 12_000.0 if work.workload.name == "recovery" else speed
        dip = range(14, 18) if work.workload.name == "recovery" else range(0)
        return [
            (index * 0.05, rate * (0.45 if index in dip else 1) * self._rng.uniform(0.9, 1.05))
            for index in range(points)
        ]


def _tail(name: str) -> float:
    return {"p50": 1.0, "p90": 1.7, "p99": 3.1, "p99.9": 9.0}.get(name.rpartition(" ")[2], 1.0)
