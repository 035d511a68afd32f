"""Runs a bench: a warm-up, baselines, and the workloads.

The targets take turns in each workload, so that noise of the machine affects all targets alike.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from multiq import __version__
from multiq.job import describe

from . import processes
from .adapter import Profile  # noqa: TC001 - msgspec looks it up
from .app import BenchApp
from .report import VERSION, Report, Result, Sample, TargetInfo
from .scenario import Scenario
from .targets import PLANTED
from .verification import verify
from .work import enqueue_in_bulk, measure_baseline
from .workloads import WORKLOADS, Infeasible, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .environment import Meter
    from .report import Verification
    from .targets import Target
    from .workloads import Variant, Workload

_UNITS = {"s": 1, "ms": 1000, "us": 1_000_000}
_WARM_UP = 200  # jobs
_IDLE = 20.0  # seconds for which idle workers are measured; an idle worker asks for jobs every five seconds


class Options(msgspec.Struct, frozen=True):
    """The workloads to run, and the number of their repeats."""

    profile: Profile = "durable"
    is_quick: bool = False
    repeats: int = 5
    workloads: Sequence[Workload] = WORKLOADS


class Setting(NamedTuple):
    """The targets and the machine of a run."""

    targets: Sequence[Target]
    folder: Path
    """The folder of the run logs, on a file system in memory if there is one."""
    meter: Meter
    environment: dict[str, str]


class Step(NamedTuple):
    """One repeat of one variant, measured on all targets."""

    workload: Workload
    variant: Variant

    @property
    def title(self) -> str:
        name = self.variant.name
        return f"{self.workload.title} ({name})" if name else self.workload.title


class OnProgress(Protocol):
    """Called with the current work, its target, and the estimated seconds that have passed."""

    def __call__(self, what: str, target: str, seconds: float, /) -> object: ...


def steps(options: Options) -> list[Step]:
    """All repeats in their order: the first repeat of every variant, then the second of every variant, and so on."""
    return [
        Step(workload, variant)
        for turn in range(options.repeats)
        for workload in options.workloads
        for variant in workload.variants(is_quick=options.is_quick)
        for _ in range(variant.times)
        if variant.repeats is None or turn < variant.repeats
    ]


def estimate(options: Options, targets: int) -> float:
    """The estimated seconds of a run, without the start of its servers."""
    return _idle(options) + targets * (1.0 + sum(step.variant.seconds for step in steps(options)))


def run(setting: Setting, options: Options, on_progress: OnProgress) -> Report:
    """Run everything. A failure on one target becomes a violation of that target. The run continues on the other
    targets."""
    began_at = dt.datetime.now(dt.UTC)
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_without_warnings())
        in_progress = _RunInProgress(setting, options, on_progress, stack)
        results = in_progress.results()
    return Report(
        version=VERSION,
        multiq=__version__,
        started_at=began_at.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        profile=options.profile if any(target.is_ours for target in setting.targets) else "as set",
        is_quick=options.is_quick,
        repeats=options.repeats,
        environment=setting.environment,
        noise=setting.meter.verdict(),
        workloads=[workload.definition() for workload in options.workloads],
        targets=in_progress.targets,
        results=results,
        warm_ups=in_progress.warm_ups,
        reference=setting.meter.reference,
    )


class _RunInProgress:
    def __init__(self, setting: Setting, options: Options, on_progress: OnProgress, stack: ExitStack) -> None:
        self._targets = targets = setting.targets
        self._options = options
        self._meter = setting.meter
        self._reading = setting.meter.read()  # the reading between two repeats belongs to both repeats
        self._folder = setting.folder
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._seconds = 0.0
        self._count = 0
        self._apps = {target.name: stack.enter_context(BenchApp(target.url)) for target in targets}
        self._samples: dict[tuple[str, str, str], list[Sample]] = {}
        self._infeasible: dict[tuple[str, str, str], str] = {}
        self._baselines: dict[tuple[str, str], list[float]] = {}
        processes.preload(sorted({type(app.backend).__module__ for app in self._apps.values()}))
        self.warm_ups: list[Result] = []
        for target in targets:
            self._say("warming up", target)
            self._warm_up(target)
        idle = self._watch_idle()
        self.targets = [self._target_info(target, idle.get(target.name)) for target in targets]

    def results(self) -> list[Result]:
        """Measure the baselines, then run all repeats. A full run measures the baselines again at its end."""
        self._measure_baselines()
        for index, step in enumerate(steps(self._options)):
            start = index % len(self._targets)  # the targets are rotated, so that no target always comes first
            for target in [*self._targets[start:], *self._targets[:start]]:
                self._take(step, target)
        if not self._options.is_quick:
            self._measure_baselines()
        return [
            self._result(target, workload, variant)
            for workload in self._options.workloads
            for variant in workload.variants(is_quick=self._options.is_quick)
            for target in self._targets
        ]

    # --- repeats ---

    def _take(self, step: Step, target: Target) -> None:
        workload, variant = step
        if workload.lacks(self._apps[target.name].backend.capabilities, variant.parameters) is None:
            self._say(step.title, target)
            key = (target.name, workload.name, variant.name)
            try:
                self._samples.setdefault(key, []).append(self._sample(step, target))
            except Infeasible as exc:
                self._infeasible[key] = str(exc)
        self._seconds += variant.seconds

    def _sample(self, step: Step, target: Target) -> Sample:
        before = self._reading
        started = time.monotonic() - self._began
        outcome, verification = self._perform(step, target)
        seconds = time.monotonic() - self._began - started
        self._reading = self._meter.read()
        return Sample(
            started=started,
            seconds=seconds,
            metrics={metric.name: outcome.metrics.get(metric.name) for metric in step.workload.metrics},
            verification=verification,
            histograms=outcome.histograms,
            timeline=outcome.timeline,
            calm=self._meter.calm([before, self._reading]),
        )

    def _perform(self, step: Step, target: Target) -> tuple[Outcome, Verification]:
        """Run one repeat in its own queue and folder, and verify its jobs."""
        outcome = Outcome({})
        scenario = self._scenario(target, step.workload.name)
        try:
            outcome = step.workload.run(scenario, step.variant.parameters)
        except Infeasible:
            scenario.empty()  # removes the jobs that were enqueued before the error
            self._record_aside(target, step.workload.name, verify(scenario.close()))
            raise
        except Exception as exc:  # noqa: BLE001 - the report has the error
            scenario.evidence.complaint = describe(exc)
        return outcome, verify(scenario.close())

    def _result(self, target: Target, workload: Workload, variant: Variant) -> Result:
        key = (target.name, workload.name, variant.name)
        lacks = workload.lacks(self._apps[target.name].backend.capabilities, variant.parameters)
        baselines = self._baselines.get((target.name, workload.baseline)) if workload.baseline is not None else None
        return Result(
            target=target.name,
            workload=workload.name,
            variant=variant.name,
            parameters=dict(variant.parameters),
            samples=self._samples.get(key, []),
            baseline=median(baselines) if baselines else None,
            skipped=lacks or self._infeasible.get(key),
        )

    # --- per target ---

    def _warm_up(self, target: Target) -> None:
        """Run a few jobs, so that no repeat has to create connections, scripts, tables or their first pages."""
        scenario = self._scenario(target, "warm-up")
        try:
            scenario.enqueue(enqueue_in_bulk, 0, _WARM_UP)
            with scenario.working(1) as running:
                scenario.drain(running)
        finally:
            evidence = scenario.close()
        self._record_aside(target, "warm-up", verify(evidence))

    def _record_aside(self, target: Target, what: str, verification: Verification) -> None:
        """Record the verification of jobs that are not measured."""
        sample = Sample(
            started=time.monotonic() - self._began,
            seconds=0.0,
            metrics={},
            verification=verification,
            histograms={},
            timeline=[],
            calm=1.0,
        )
        self.warm_ups.append(Result(target=target.name, workload=what, variant="", parameters={}, samples=[sample]))

    def _watch_idle(self) -> dict[str, float | None]:
        """Requests per second of one idle worker on each target.

        All targets are measured at the same time, which takes no longer than one target.
        """
        seconds = _idle(self._options)
        if not seconds:
            return {}
        adapters = {}
        with ExitStack() as stack:
            for target in self._targets:
                self._say("starting an idle worker", target)
                scenario = self._scenario(target, "idle")
                stack.callback(self._close_idle, scenario, target)
                running = stack.enter_context(scenario.working(1))
                running.wait_until_ready(1)
                adapters[target.name] = target.adapter
            before = {name: adapter.counters() for name, adapter in adapters.items()}
            self._on_progress("watching idle workers", "", self._seconds)
            time.sleep(seconds)
            spent = {name: adapter.counters().since(before[name]).commands for name, adapter in adapters.items()}
        self._seconds += seconds
        return {name: None if commands is None else commands / seconds for name, commands in spent.items()}

    def _close_idle(self, scenario: Scenario, target: Target) -> None:
        self._record_aside(target, "idle", verify(scenario.close()))

    def _measure_baselines(self) -> None:
        """On each target, measure the baselines to which the workloads of this run are compared."""
        wanted = [workload.baseline for workload in self._options.workloads if workload.baseline is not None]
        for target in self._targets if wanted else ():
            if target.backend == PLANTED:
                continue
            self._say("baseline", target)
            scale = 1 if self._options.is_quick else 10
            with processes.RunProcesses(target.url, are_processes=True) as own:
                process = own.take(measure_baseline, target.backend, 300 * scale, 2_000 * scale)
                process.go()
                for name, speed in process.result(120.0).result.items():
                    self._baselines.setdefault((target.name, name), []).append(speed)
            self._seconds += 0.5

    def _target_info(self, target: Target, idle: float | None) -> TargetInfo:
        return TargetInfo(
            name=target.name,
            backend=target.backend,
            server=target.adapter.version(),
            is_ours=target.is_ours,
            durability=target.adapter.durability(),
            promises=_promises(self._apps[target.name]),
            idle_commands=idle,
        )

    def _scenario(self, target: Target, word: str) -> Scenario:
        self._count += 1
        word = f"{word}-{self._count}"
        own = "" if target.is_ours else target.prefix
        return Scenario(self._apps[target.name], target.adapter, target.queue(word), self._folder / word, own=own)

    def _say(self, what: str, target: Target) -> None:
        self._on_progress(what, target.name, self._seconds)


def _step(seconds: float) -> str:
    """Seconds as text, in the largest unit that fits: ``1 us``, ``1 ms``, ``1 s``."""
    return next(f"{seconds * scale:g} {unit}" for unit, scale in _UNITS.items() if seconds * scale >= 1 or unit == "us")


def _idle(options: Options) -> float:
    """How many seconds idle workers are measured. 0 in a quick run, because its few seconds would show nothing."""
    is_wanted = any(workload.wants_idle for workload in options.workloads)
    return _IDLE if is_wanted and not options.is_quick else 0.0


def _promises(app: BenchApp) -> dict[str, str]:
    """The promises that are shown beside the speeds, in a few words each."""
    can = app.backend.capabilities

    def either(power: str, yes: str, no: str) -> str:
        return yes if can.claim(power) else no

    return {
        "delays": f"never early, to {_step(can.delay_resolution)}",
        "order": either("total_order", "by priority, then age", "by priority, then age, in each partition"),
        "a repeated enqueue": either("client_ids", "adds nothing", "may add a second job"),
        "a batch": either("atomic_batches", "whole or not at all", "may be accepted in part"),
        "jobs": either("persistent", "outlive the server, as it is set up", "end with the process or server"),
        "attempts": either("durable_attempts", "outlive the server", "are forgotten when the server ends"),
        "a late verdict": either("fenced_late", "is refused by the store", "is refused by the client's clock"),
    }


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warnings of planned failures in workers that are threads of this process."""
    log = logging.getLogger("multiq")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
