"""Workloads that measure how soon jobs start after an enqueue or a delay."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar

from multiq.bench.latency import encoded, histogram, percentiles
from multiq.bench.report import Metric
from multiq.bench.scenario import Cost
from multiq.bench.work import enqueue_delayed, enqueue_on_schedule

from .base import COSTS, Outcome, Parameters, Variant, Workload, waits

if TYPE_CHECKING:
    from multiq.bench.scenario import Scenario

_SEED = 20


class Latency(Workload):
    name = "latency"
    title = "Latency"
    about = (
        "One process enqueues at a fixed rate, by the clock: a late call does not delay the planned times of the next "
        "calls. Pickup is the time from the planned time of an enqueue to the job's start in a worker, so a stall "
        "lengthens the pickup of every job that it delays. The variant `idle` has so few jobs that each one finds a "
        "waiting worker."
    )
    metrics: ClassVar = [
        Metric("pickup p50", "ms", "lower"),
        Metric("pickup p90", "ms", "lower"),
        Metric("pickup p99", "ms", "lower"),
        Metric("pickup p99.9", "ms", "lower", counts=False),
        *COSTS,
    ]
    wants_idle = True

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [
                Variant({"jobs": 15, "per second": 30, "processes": 1}, "idle", 0.8, 2),
                Variant({"jobs": 120, "per second": 200, "processes": 2}, "200/s", 0.9, 1),
            ]
        return [
            Variant({"jobs": 200, "per second": 30, "processes": 1}, "idle", 7.5),
            Variant({"jobs": 2000, "per second": 200, "processes": 2}, "200/s", 11),
            Variant({"jobs": 5000, "per second": 1000, "processes": 2}, "1,000/s", 6),
        ]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs, rate, processes = int(parameters["jobs"]), parameters["per second"], int(parameters["processes"])
        cost = Cost()
        with scenario.working(processes, cost, runs=jobs) as running:
            running.wait_until_ready(processes)
            enqueuing = scenario.enqueue(enqueue_on_schedule, jobs, rate)
            scenario.drain(running)
        cost.before, cost.after = enqueuing.before, enqueuing.after
        recorded = histogram(waits(scenario.evidence.sent, scenario.evidence.runs))
        return Outcome(
            {**percentiles("pickup", recorded, 50, 90, 99, 99.9), **cost.metrics(jobs)},
            {"latency": encoded(recorded)},
        )


class Delayed(Workload):
    name = "delayed"
    title = "Delayed jobs"
    about = (
        "Jobs with fractional delays are enqueued while a worker of one process waits. Lateness is the time from "
        "the moment at which a job is due (its delay after the call that enqueues it) to its start. If a backend "
        "rounds delays up (see its capabilities), lateness includes the rounding."
    )
    metrics: ClassVar = [
        Metric("late by p50", "ms", "lower"),
        Metric("late by p90", "ms", "lower"),
        Metric("late by p99", "ms", "lower"),
    ]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [Variant({"jobs": 60, "from": 0.2, "to": 0.9}, seconds=1.1, repeats=1)]
        return [Variant({"jobs": 500, "from": 0.5, "to": 4.5}, seconds=6)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        chance = random.Random(_SEED)  # noqa: S311 - mixes delays
        jobs = int(parameters["jobs"])
        delays = [round(chance.uniform(parameters["from"], parameters["to"]), 3) for _ in range(jobs)]
        with scenario.working(1, runs=jobs) as running:
            running.wait_until_ready(1)
            scenario.enqueue(enqueue_delayed, delays)
            scenario.drain(running)
        recorded = histogram(waits(scenario.evidence.sent, scenario.evidence.runs))
        return Outcome(percentiles("late by", recorded, 50, 90, 99), {"lateness": encoded(recorded)})
