"""The bench's runner: the order of a run, its estimated time, and workloads that fail or cannot run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import pytest
from msgspec import structs

from multiq.bench import runner
from multiq.bench.adapter import Counters
from multiq.bench.environment import Meter
from multiq.bench.processes import ProcessFailed, RunProcesses
from multiq.bench.report import Metric
from multiq.bench.scenario import Cost, Scenario
from multiq.bench.targets import open_targets
from multiq.bench.work import enqueue_singly
from multiq.bench.workloads import WORKLOADS, Infeasible, Outcome, Variant, Workload
from multiq.errors import ArgumentsInvalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq.bench.app import BenchApp
    from multiq.bench.report import Report
    from multiq.bench.workloads.base import Parameters


class Tiny(Workload):
    """A workload of two variants, the second of which is run once at most."""

    name = "tiny"
    title = "Tiny"
    about = "Next to nothing."
    metrics: ClassVar = [Metric("done", "jobs", "higher")]

    def variants(self, *, is_quick: bool) -> list[Variant]:
        return [Variant({"jobs": 3}, "a", 1.0), Variant({"jobs": 3}, "b", 10.0, 1)]

    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        scenario.enqueue(enqueue_singly, 0, int(parameters["jobs"]))
        scenario.sweep()
        return Outcome({"done": float(len(scenario.evidence.runs))})


class Twice(Tiny):
    name = "twice"

    def variants(self, *, is_quick: bool) -> list[Variant]:
        return [structs.replace(variant, times=2) for variant in super().variants(is_quick=is_quick)]


class Broken(Tiny):
    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        scenario.enqueue(enqueue_singly, 0, 2)
        raise ArgumentsInvalid("no such thing")


class TooMuch(Tiny):
    def run(self, scenario: Scenario, parameters: Parameters) -> Outcome:
        raise Infeasible("it would take a year")


def options(*workloads: Workload, repeats: int = 2) -> runner.Options:
    return runner.Options(repeats=repeats, is_quick=True, workloads=workloads)


def go(
    folder: Path, *workloads: Workload, names: tuple[str, ...] = ("memory",)
) -> tuple[Report, list[tuple[str, str]]]:
    """Make a run. Returns the report and the reported progress."""
    told: list[tuple[str, str]] = []
    servers, run_logs = folder / "servers", folder / "run_logs"
    servers.mkdir()
    run_logs.mkdir()
    with open_targets(names, "durable", servers) as targets:
        setting = runner.Setting(targets, run_logs, Meter(), {})
        report = runner.run(setting, options(*workloads), lambda what, who, _: told.append((what, who)))
    assert list(run_logs.iterdir()) == []
    return report, told


# --- the order -------------------------------------------------------------------------------------------


def test_the_second_repeat_of_a_workload_comes_after_the_first_repeat_of_all_workloads() -> None:
    steps = [(step.workload.name, step.variant.name) for step in runner.steps(options(Tiny(), Twice()))]
    assert steps == [
        ("tiny", "a"), ("tiny", "b"), ("twice", "a"), ("twice", "a"), ("twice", "b"), ("twice", "b"),
        ("tiny", "a"), ("twice", "a"), ("twice", "a"),
    ]  # fmt: skip


@pytest.mark.long
def test_targets_take_turns_in_being_first(tmp_path: Path) -> None:
    report, told = go(tmp_path, Tiny(), names=("memory", "memory"))
    work = [(what, who) for what, who in told if what.startswith("Tiny")]
    assert work == [
        ("Tiny (a)", "memory"), ("Tiny (a)", "memory 2"),
        ("Tiny (b)", "memory 2"), ("Tiny (b)", "memory"),
        ("Tiny (a)", "memory"), ("Tiny (a)", "memory 2"),
    ]  # fmt: skip
    assert [(r.variant, r.target, len(r.samples)) for r in report.results] == [
        ("a", "memory", 2), ("a", "memory 2", 2), ("b", "memory", 1), ("b", "memory 2", 1),
    ]  # fmt: skip
    assert report.violations == []
    assert [sample.metrics for sample in report.results[0].samples] == [{"done": 3.0}] * 2


def test_an_estimate_counts_repeats_and_targets() -> None:
    one = runner.estimate(options(Tiny()), 1)
    assert one == 1.0 + 2 * 1.0 + 10.0
    assert runner.estimate(options(Tiny()), 3) == 3 * one


def test_a_quick_run_of_four_is_estimated_within_a_minute_and_a_bit() -> None:
    assert runner.estimate(runner.Options(is_quick=True, repeats=3), 4) < 70


def test_workloads_have_names_and_variants_of_their_own() -> None:
    names = [workload.name for workload in WORKLOADS]
    assert len(set(names)) == len(names)
    for workload in WORKLOADS:
        metrics = [metric.name for metric in workload.metrics]
        assert len(set(metrics)) == len(metrics)
        for is_quick in (True, False):
            variants = [variant.name for variant in workload.variants(is_quick=is_quick)]
            assert len(set(variants)) == len(variants)


# --- skipped workloads -----------------------------------------------------------------------------------


@pytest.mark.long
def test_work_that_fails_is_a_violation_and_the_run_goes_on(tmp_path: Path) -> None:
    report, _ = go(tmp_path, Broken(), Twice())
    broken = {violation.kind: violation for result, violation in report.violations if result.workload == "tiny"}
    assert broken["failed"].example == "ArgumentsInvalid: no such thing"
    assert "lost" not in broken  # the jobs of this workload were still in the store
    assert [len(result.samples) for result in report.results if result.workload == "twice"] == [4, 2]


def test_a_workload_that_a_target_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    report, _ = go(tmp_path, TooMuch())
    assert {(result.skipped, len(result.samples)) for result in report.results} == {("it would take a year", 0)}
    assert report.violations == []


def fails(_app: BenchApp, go: Callable[[], None]) -> None:
    go()
    raise ArgumentsInvalid("not like this")


def dies(_app: BenchApp, go: Callable[[], None]) -> None:
    go()
    os._exit(3)


def sleeps(_app: BenchApp, go: Callable[[], None]) -> None:
    import time

    go()
    time.sleep(60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "last_words"),
    [
        (fails, "ArgumentsInvalid: not like this"),
        (dies, "ended before it sent its result"),
        (sleeps, "must answer within 1 s, got no answer"),
    ],
)
def test_a_process_that_cannot_do_its_work_reports_why(
    tmp_path: Path, function: Callable[[BenchApp, Callable[[], None]], None], last_words: str
) -> None:
    with RunProcesses(f"sqlite:///{tmp_path}/jobs.db", are_processes=True) as processes:
        process = processes.take(function)
        process.go()
        with pytest.raises(ProcessFailed, match=last_words):
            process.result(1.0)


def test_costs_are_per_job_and_unknown_where_the_server_does_not_tell() -> None:
    before = Counters(commands=10, received=100, sent=50, memory=1, cpu=1.0)
    after = Counters(commands=30, received=300, sent=150, memory=5_000_000, cpu=1.5)
    assert Cost(cpu=0.25, before=before, after=after).metrics(10) == {
        "commands": 2.0,
        "bytes": 30.0,
        "client CPU": 25_000.0,
        "server CPU": 50_000.0,
        "server memory": 5.0,
    }
    assert set(Cost(cpu=None).metrics(10).values()) == {None}
