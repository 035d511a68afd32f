"""Workloads that measure workers."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, ClassVar

from multiq.bench.report import Metric
from multiq.bench.scenario import Cost, timeline
from multiq.bench.work import (
    enqueue_by_priority,
    enqueue_flaky,
    enqueue_in_bulk,
    enqueue_naps,
    enqueue_singly,
    settle_batches,
)
from multiq.errors import MultiqError

from .base import COSTS, Outcome, Parameters, Variant, Workload, finished_per_second

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities
    from multiq.bench.run_log import Run
    from multiq.bench.scenario import RunningWorker, Scenario

_HUNT = 5.0  # a process must be found in the middle of a job within this number of seconds
_STANDSTILL = 0.005  # seconds from a SIGSTOP until the process has stopped for certain
_SEED = 20  # a fixed seed gives the same jobs to each repeat and each target


class NobodyToKill(MultiqError):
    """No process of the worker runs a job at the moment, so no process can be killed during a job."""


class Drain(Workload):
    name = "drain"
    title = "Drain"
    about = (
        "Jobs that do nothing wait in the queue, and a worker of two processes runs them. The time is measured from "
        "the start of the first job to the end of the last one. This includes the beginning, when the worker's batches "
        "are small."
    )
    metrics: ClassVar = [Metric("drained", "jobs/s", "higher"), *COSTS]
    baseline = "take_in_batches"

    def variants(self, *, is_quick: bool) -> list[Variant]:
        jobs = 2_000 if is_quick else 40_000
        return [Variant({"jobs": jobs, "processes": 2}, seconds=0.5 if is_quick else 8)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs = int(parameters["jobs"])
        scenario.enqueue(enqueue_in_bulk, 0, jobs)
        cost = Cost()
        with scenario.working(int(parameters["processes"]), cost) as running, scenario.measured(cost):
            scenario.drain(running)
        runs = scenario.evidence.runs
        return Outcome({"drained": finished_per_second(runs), **cost.metrics(jobs)}, timeline=_timeline(runs))


class Contention(Workload):
    name = "contention"
    title = "Many at once"
    about = (
        "Several producers enqueue one by one, while a worker of several processes runs the jobs. The time is "
        "measured from the first call to the end of the last job."
    )
    metrics: ClassVar = [Metric("through", "jobs/s", "higher"), *COSTS]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [Variant({"jobs": 300, "producers": 2, "processes": 3}, seconds=0.6, repeats=2)]
        return [Variant({"jobs": 10_000, "producers": 4, "processes": 4}, seconds=6)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs, producers, workers = (int(parameters[name]) for name in ("jobs", "producers", "processes"))
        share = jobs // producers
        enqueuing = [scenario.take(enqueue_singly, index * jobs, share) for index in range(producers)]
        cost = Cost()
        with scenario.working(workers, cost, runs=jobs) as running:
            running.wait_until_ready(workers)
            with scenario.measured(cost):
                for process in enqueuing:
                    process.go()
                brought = [process.result(60.0) for process in enqueuing]
                scenario.evidence.sent += [sent for done in brought for sent in done.result]
                scenario.drain(running)
            cost.cpu = sum(done.cpu for done in brought)
        runs, sent = scenario.evidence.runs, scenario.evidence.sent
        began = min(call.called for call in sent)
        seconds = (max((run.end for run in runs), default=began) - began) / 1e9
        speed = len(runs) / seconds if seconds else None
        return Outcome({"through": speed, **cost.metrics(len(runs))}, timeline=timeline(runs, began))


class Priorities(Workload):
    name = "priorities"
    title = "Mixed priorities"
    about = (
        "One process drains jobs of eight priorities, which were enqueued in random order. If the backend promises an "
        "order by priority, then age, the verification reports each job that runs out of order."
    )
    metrics: ClassVar = [Metric("drained", "jobs/s", "higher"), *COSTS]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        calls = 40 if is_quick else 500
        return [Variant({"calls": calls, "batch": 20}, seconds=0.5 if is_quick else 3, repeats=1 if is_quick else None)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        chance = random.Random(_SEED)  # noqa: S311 - a mix, not a secret
        priorities = [chance.randrange(8) for _ in range(int(parameters["calls"]))]
        scenario.enqueue(enqueue_by_priority, priorities, int(parameters["batch"]))
        cost = Cost()
        with scenario.working(1, cost) as running, scenario.measured(cost):
            scenario.drain(running)
        scenario.evidence.in_order = scenario.capabilities.total_order is True
        return Outcome({"drained": finished_per_second(scenario.evidence.runs), **cost.metrics(scenario.enqueued)})


class Failures(Workload):
    name = "failures"
    title = "Failures with retries"
    about = (
        "A third of the jobs fail in their first run, and a ninth of all jobs also in their second run. They are "
        "retried immediately. The figure includes the failed runs; each of them costs a release with its reason. The "
        "failures are not logged."
    )
    metrics: ClassVar = [Metric("runs", "runs/s", "higher"), *COSTS]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        return [Variant({"jobs": 300}, seconds=0.3, repeats=1)] if is_quick else [Variant({"jobs": 5000}, seconds=4)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs = int(parameters["jobs"])
        failures = [2 if number % 9 == 0 else 1 if number % 3 == 0 else 0 for number in range(jobs)]
        scenario.enqueue(enqueue_flaky, failures)
        scenario.evidence.fails = {number: count for number, count in enumerate(failures) if count}
        expected = jobs + sum(failures)
        cost = Cost()
        with scenario.working(2, cost, runs=expected) as running, scenario.measured(cost):
            scenario.drain(running, expected)
        runs = scenario.evidence.runs
        seconds = (max(run.end for run in runs) - min(run.start for run in runs)) / 1e9 if runs else 0
        return Outcome({"runs": len(runs) / seconds if seconds else None, **cost.metrics(expected)})


class Recovery(Workload):
    name = "recovery"
    title = "Recovery"
    about = (
        "A worker of two processes runs short jobs, and one of the processes is killed (SIGKILL) while it runs a job. "
        "Two times are measured from the kill. The first ends when that job is run again (`job back after`). The "
        "second ends when a new process runs a job (`crew back after`). Jobs that the killed process had finished but "
        "not settled are run again, too, and are counted as explained."
    )
    metrics: ClassVar = [
        Metric("job back after", "ms", "lower"),
        Metric("crew back after", "ms", "lower"),
        Metric("jobs run again", "jobs", "lower", counts=False),
    ]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [Variant({"jobs": 200, "job ms": 3}, seconds=0.8, repeats=1)]
        return [Variant({"jobs": 1500, "job ms": 3}, seconds=4)]

    def lacks(self, capabilities: Capabilities, parameters: Parameters) -> str | None:  # noqa: ARG002
        return None if capabilities.shared else "its jobs exist only in the memory of one process"

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        jobs = int(parameters["jobs"])
        scenario.enqueue(enqueue_naps, jobs, parameters["job ms"] / 1000)
        with scenario.working(2) as running:
            try:
                victim, killed_at = _kill_one(running, jobs // 3)
            except NobodyToKill:
                scenario.drain(running, jobs)
                if running.run_logs.ended() >= jobs:  # a busy machine may read the run logs too late
                    scenario.evidence.is_through = True
                    raise
                return Outcome({})  # the verification reports the missing jobs
            scenario.evidence.killed = {victim.pid: killed_at}
            scenario.drain(running, jobs)
        runs = scenario.evidence.runs
        again = [run.start for run in runs if run.number == victim.number and run.start > killed_at]
        before = {run.pid for run in runs if run.start <= killed_at}
        others = [run.start for run in runs if run.pid not in before]
        return Outcome(
            {
                "job back after": (min(again) - killed_at) / 1e6 if again else None,
                "crew back after": (min(others) - killed_at) / 1e6 if others else None,
                "jobs run again": float(len(runs) - len({run.number for run in runs})),
            },
            timeline=_timeline(runs),
        )


class Settle(Workload):
    name = "settle"
    title = "Reserve and settle"
    about = (
        "One process uses the driver's consumer, without a worker. The figures are the time per job of `reserve` and "
        "`settle` calls with 20 jobs each, and the time of a `settle` of one job. Each figure is the tenth percentile "
        "of its calls, and each turn has several repeats, so the figures of this workload vary least."
    )
    metrics: ClassVar = [
        Metric("ack", "us", "lower"),
        Metric("reserve", "us", "lower"),
        # no comparison judges this figure: a call for one job takes twice as long if client and server are on different
        # cores
        Metric("ack of one", "us", "lower", counts=False),
    ]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        if is_quick:
            return [Variant({"batches": 20, "batch": 20}, seconds=0.2, times=2)]
        return [Variant({"batches": 100, "batch": 20}, seconds=0.6, times=4)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        batches, batch = int(parameters["batches"]), int(parameters["batch"])
        scenario.enqueue(enqueue_in_bulk, 0, batches * (batch + 1))
        process = scenario.take(settle_batches, batches, batch)
        process.go()
        took = process.result(60.0).result
        scenario.evidence.runs += took.runs
        scenario.sweep()  # a call may bring fewer jobs than were asked for
        return Outcome({"ack": took.ack / 1000, "reserve": took.reserve / 1000, "ack of one": took.ack_one / 1000})


def _kill_one(running: RunningWorker, after: int) -> tuple[Run, int]:
    """Kill a worker's process in the middle of a job, after *after* runs have ended.

    Returns the run that was killed, and the time of the kill in ns. Raises ``NobodyToKill``.
    """
    running.wait_until_ended(after)
    give_up_at = time.monotonic() + _HUNT
    reader = max(running.run_logs.look(), key=lambda reader: reader.ended, default=None)
    while reader is not None and time.monotonic() < give_up_at:
        os.kill(reader.pid, signal.SIGSTOP)  # stops the process while its run log is read
        time.sleep(_STANDSTILL)
        runs = list(reader.runs())
        if runs and not runs[-1].end:
            # The time is read while the process is stopped. Directly after the kill, another process may already have
            # the job.
            killed_at = time.monotonic_ns()
            os.kill(reader.pid, signal.SIGKILL)
            return runs[-1], killed_at
        os.kill(reader.pid, signal.SIGCONT)
        time.sleep(_STANDSTILL)
    raise NobodyToKill(f"no process of the worker was found in the middle of a job within {_HUNT:.0f} s")


def _timeline(runs: list[Run]) -> list[tuple[float, float]]:
    return timeline(runs, min((run.start for run in runs), default=0))
