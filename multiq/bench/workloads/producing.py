"""Workloads that measure enqueues. The jobs are taken and verified after the measurement."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, ClassVar

from multiq.bench.adapter import PUT_BATCH
from multiq.bench.report import Metric
from multiq.bench.work import enqueue_in_bulk, enqueue_padded, enqueue_singly, reserve_singly

from .base import COSTS, Infeasible, Outcome, Parameters, Variant, Workload

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities
    from multiq.bench.scenario import Scenario

_PROBE = 10_000  # jobs of a backlog that are enqueued first, to estimate the time for the other jobs
_FILLING = 60.0  # seconds that the enqueue of a backlog may take; the removal of the backlog takes about as long


class EnqueueOne(Workload):
    name = "enqueue-one"
    title = "Enqueue one by one"
    about = (
        "One process calls `task.enqueue(number)` again and again. Each call is a round trip, and with a durable "
        "profile a sync. The time is measured from the first call to the last return."
    )
    metrics: ClassVar = [Metric("enqueued", "jobs/s", "higher"), *COSTS]
    baseline = "put_one_by_one"

    def variants(self, *, is_quick: bool) -> list[Variant]:
        return [Variant({"jobs": 400 if is_quick else 5000}, seconds=0.3 if is_quick else 4)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs = int(parameters["jobs"])
        cost = scenario.enqueue(enqueue_singly, 0, jobs)
        scenario.sweep()
        return Outcome({"enqueued": jobs / cost.seconds, **cost.metrics(jobs)})


class EnqueueBulk(Workload):
    name = "enqueue-bulk"
    title = "Enqueue in bulk"
    about = f"One process calls `task.enqueue_many` with {PUT_BATCH:,} jobs at a time."
    metrics: ClassVar = [Metric("enqueued", "jobs/s", "higher"), *COSTS]
    baseline = "put_in_batches"

    def variants(self, *, is_quick: bool) -> list[Variant]:
        return [Variant({"jobs": 2_000 if is_quick else 50_000}, seconds=0.4 if is_quick else 4)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs = int(parameters["jobs"])
        cost = scenario.enqueue(enqueue_in_bulk, 0, jobs)
        scenario.sweep()
        return Outcome({"enqueued": jobs / cost.seconds, **cost.metrics(jobs)})


class Bodies(Workload):
    name = "bodies"
    title = "Body sizes"
    about = "Does the same as `enqueue-one`, with an argument that makes the body about as large as the variant says."
    metrics: ClassVar = [Metric("enqueued", "jobs/s", "higher"), Metric("throughput", "MB/s", "higher"), *COSTS]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        sizes = {"1 KB": 1000, "60 KB": 60_000} if is_quick else {"1 KB": 1000, "16 KB": 16_000, "60 KB": 60_000}
        small = [
            Variant(
                {"jobs": 100 if is_quick else 1000, "bytes": size}, name, 0.3 if is_quick else 1.5, is_quick or None
            )
            for name, size in sizes.items()
        ]
        return small if is_quick else [*small, Variant({"jobs": 100, "bytes": 1_000_000}, "1 MB", 2)]

    def lacks(self, capabilities: Capabilities, parameters: Parameters) -> str | None:
        most = capabilities.max_body
        if most is None or parameters["bytes"] + 100 <= most:
            return None
        return f"its bodies have at most {most:,} bytes"

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs, size = int(parameters["jobs"]), int(parameters["bytes"])
        cost = scenario.enqueue(enqueue_padded, jobs, size)
        scenario.sweep()
        speed = jobs / cost.seconds
        return Outcome({"enqueued": speed, "throughput": speed * size / 1e6, **cost.metrics(jobs)})


class Backlog(Workload):
    name = "backlog"
    title = "With a backlog"
    about = (
        "The queue already holds as many jobs as the variant says. Then one process enqueues single jobs, and takes "
        "and acks single jobs with `queue.reserve()`. The duration of a call should not depend on the number of "
        "waiting jobs. The figures are medians of single calls."
    )
    metrics: ClassVar = [
        Metric("reserve and ack", "us", "lower"),
        Metric("enqueue", "us", "lower"),
        Metric("server memory", "MB", "lower", counts=False),
    ]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [Variant({"jobs": 60, "waiting": n}, name, 0.5, 1) for name, n in {"none": 0, "10k": 10_000}.items()]
        return [
            Variant({"jobs": 500, "waiting": 0}, "none", 1),
            Variant({"jobs": 500, "waiting": 10_000}, "10k", 1.5),
            Variant({"jobs": 500, "waiting": 1_000_000}, "1M", 45, 1),
        ]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs, waiting = int(parameters["jobs"]), int(parameters["waiting"])
        _fill(scenario, waiting)
        cost = scenario.enqueue(enqueue_singly, waiting, jobs)
        calls = [sent.returned - sent.called for sent in scenario.evidence.sent[-jobs:]]
        process = scenario.take(reserve_singly, jobs)
        process.go()
        taken = process.result(60.0).result
        scenario.evidence.runs += [run for run, _ in taken]
        scenario.evidence.in_order = scenario.capabilities.total_order is True
        scenario.empty()
        return Outcome(
            {
                "reserve and ack": median(took for _, took in taken) / 1000,
                "enqueue": median(calls) / 1000,
                "server memory": cost.metrics(jobs)["server memory"],
            }
        )


def _fill(scenario: Scenario, waiting: int) -> None:
    """Enqueue *waiting* jobs. Raises ``Infeasible`` if the speed of the first jobs shows that the enqueue would take
    too long."""
    probe = min(waiting, _PROBE)
    if not probe:
        return
    speed = probe / scenario.enqueue(enqueue_in_bulk, 0, probe).seconds
    if waiting / speed > _FILLING:
        raise Infeasible(f"at {speed:,.0f} jobs/s, {waiting:,} jobs take {waiting / speed:,.0f} s to enqueue")
    if waiting > probe:
        scenario.enqueue(enqueue_in_bulk, probe, waiting - probe, patience=3 * _FILLING)
