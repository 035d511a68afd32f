"""A backend with wrong answers makes the run fail: each kind of wrong answer, in each workload and in the warm-up."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, cast

import pytest
from msgspec import structs

from multiq.backend import NewJob
from multiq.bench import runner, scenario
from multiq.bench.environment import Meter
from multiq.bench.planted import PLANTED_BUGS
from multiq.bench.run_log import RunLogs
from multiq.bench.targets import open_targets
from multiq.bench.workloads import WORKLOADS, Variant, Workload, working
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq.bench.processes import WorkerProcess
    from multiq.bench.report import Report

FEWER = {"jobs": 40, "waiting": 300, "batches": 3, "batch": 10, "calls": 6, "bytes": 100, "from": 0.05, "to": 0.1}
#: planted bug -> the kinds of violation that may be reported for it
KINDS = {
    "half-lost": {"lost", "doubled"},
    "stored-twice": {"doubled"},
    "twin-left": {"left over"},
    "twin-uncounted": {"left over"},
    "shadowed": {"left over"},
    "buried-for-acked": {"left over"},
    "kept-back": {"lost", "left over"},
    "swallowed": {"lost"},
    "kept-secretly": {"lost"},
    "counts-nothing": {"lost"},
    "acks-forgotten": {"doubled"},
}
QUICKEST = {"backlog"}
BY_NAME = {workload.name: workload for workload in WORKLOADS}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Run one workload with a few jobs."""
    monkeypatch.setattr(scenario, "_QUIET", 0.2)
    monkeypatch.setattr(working, "_HUNT", 0.5)
    monkeypatch.setattr(runner, "_WARM_UP", 20)

    def run(workload: Workload, *names: str) -> Report:
        # The bugs show within half a second. On a busy machine, a worker's processes may need seconds until they run
        # their first jobs, and jobs that are not run by then are reported as left over instead of lost.
        monkeypatch.setattr(scenario, "PATIENCE", 5.0 if workload.name == "recovery" else 0.5)
        variants = [_smaller(variant) for variant in workload.variants(is_quick=True)]
        monkeypatch.setattr(type(workload), "variants", lambda _self, *, is_quick: variants)
        servers, run_logs = tmp_path / "servers", tmp_path / "run_logs"
        servers.mkdir()
        run_logs.mkdir()
        with open_targets(names, "fast", servers) as targets:
            setting = runner.Setting(targets, run_logs, Meter(), {})
            options = runner.Options(repeats=1, is_quick=True, workloads=[workload])
            return runner.run(setting, options, lambda *_: None)

    return run


def _smaller(variant: Variant) -> Variant:
    fewer = {name: min(value, FEWER.get(name, value)) for name, value in variant.parameters.items()}
    return structs.replace(variant, parameters=fewer, times=1)


def _named(lie: str, workload: str, tmp_path: Path) -> str:
    """Return the bug's name as a target. The workload recovery needs a store that processes share."""
    return f"planted:{lie}" + (f"@sqlite:///{tmp_path}/{lie}.db" if workload == "recovery" else "")


@pytest.mark.long
@pytest.mark.parametrize(
    "workload", [name if name in QUICKEST else pytest.param(name, marks=pytest.mark.long) for name in BY_NAME]
)
def test_every_kind_of_wrong_answer_is_noticed(quick: Callable[..., Report], tmp_path: Path, workload: str) -> None:
    names = {lie: _named(lie, workload, tmp_path) for lie in PLANTED_BUGS}
    report = quick(BY_NAME[workload], *names.values())
    for lie, kinds in KINDS.items():
        for where in (workload, "warm-up"):
            found = [
                violation
                for result, violation in report.violations
                if (result.target, result.workload) == (names[lie], where)
            ]
            assert {violation.kind for violation in found} & kinds, (lie, where, found, report.results)
            assert all(violation.count > 0 for violation in found)


@pytest.mark.long
def test_wrong_answers_are_noticed_even_if_the_figure_is_missing(
    quick: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a machine on which the bench finds no process in the middle of a job before all jobs are done
    monkeypatch.setattr(working, "_HUNT", 0.0)
    name = _named("buried-for-acked", "recovery", tmp_path)
    report = quick(BY_NAME["recovery"], name)
    kinds = {violation.kind for result, violation in report.violations if result.workload == "recovery"}
    assert kinds == {"failed", "left over"}


def test_a_worker_that_has_begun_no_job_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a worker's process that has made its run log, and has not run any job
    monkeypatch.setattr(scenario, "PATIENCE", 0.05)
    monkeypatch.setattr(working, "_HUNT", 0.1)
    code = f"import time; from multiq.bench.run_log import RunLog; RunLog({str(tmp_path)!r}, 10); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code]) as process, contextlib.closing(RunLogs(tmp_path)) as run_logs:
        running = scenario.RunningWorker(cast("WorkerProcess", process), run_logs)
        try:
            with pytest.raises(working.NobodyToKill, match="was found in the middle of a job"):
                working._kill_one(running, 3)
            assert process.poll() is None
        finally:
            process.kill()


def test_every_planted_bug_has_its_kinds_of_violation() -> None:
    assert set(KINDS) == set(PLANTED_BUGS)


@pytest.mark.parametrize("lie", [lie for lie in PLANTED_BUGS if lie in {"kept-back", "swallowed", "kept-secretly"}])
def test_a_hidden_job_is_hidden_from_a_worker_that_takes_one_at_a_time(lie: str) -> None:
    # Slow jobs: a worker on a busy machine never asks for more than one.
    backend = PLANTED_BUGS[lie].open()
    backend.enqueue("q", [NewJob(b"x", new_id()) for _ in range(40)])
    with backend.consumer(["q"]) as consumer:
        assert sum(len(consumer.exchange([], 1, 0)[1]) for _ in range(40)) == 4
    backend.close()
