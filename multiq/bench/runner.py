"""The order of a run: warm up, then each workload on each contestant in turns: all share the machine's moods."""

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
from .report import VERSION, Contestant, Report, Result, Sample
from .scenario import Stage
from .targets import PLANTED
from .verification import account
from .work import enqueue_in_bulk, leanest
from .workloads import WORKLOADS, Outcome, Unfit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .environment import Meter
    from .report import Accounting
    from .targets import Entrant
    from .workloads import Variant, Workload

_UNITS = {"s": 1, "ms": 1000, "us": 1_000_000}
_WARM_UP = 200  # jobs
_IDLE = 20.0  # seconds for which idle workers are watched: they ask every five


class Options(msgspec.Struct, frozen=True):
    """What to run."""

    profile: Profile = "durable"
    is_quick: bool = False
    repeats: int = 5
    workloads: Sequence[Workload] = WORKLOADS


class Setting(NamedTuple):
    """Where a run happens."""

    entrants: Sequence[Entrant]
    folder: Path
    """For journals: on a file system in memory, if there is one."""
    meter: Meter
    environment: dict[str, str]


class Step(NamedTuple):
    """One repeat of one variant, on all contestants."""

    workload: Workload
    variant: Variant

    @property
    def title(self) -> str:
        name = self.variant.name
        return f"{self.workload.title} ({name})" if name else self.workload.title


class Listener(Protocol):
    """Hears how a run gets on: what is done on whom, and how many of all seconds, as estimated, are behind it."""

    def __call__(self, what: str, contestant: str, seconds: float, /) -> object: ...


def steps(options: Options) -> list[Step]:
    """All repeats in their order: the second one of anything comes after the first one of everything."""
    return [
        Step(workload, variant)
        for turn in range(options.repeats)
        for workload in options.workloads
        for variant in workload.variants(is_quick=options.is_quick)
        for _ in range(variant.times)
        if variant.repeats is None or turn < variant.repeats
    ]


def estimate(options: Options, contestants: int) -> float:
    """About how many seconds a run takes, its servers' start aside."""
    return _idle(options) + contestants * (1.0 + sum(step.variant.seconds for step in steps(options)))


def run(setting: Setting, options: Options, tell: Listener) -> Report:
    """Run it all. What one contestant cannot carry out is a violation of its own, and the others go on."""
    began_at = dt.datetime.now(dt.UTC)
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_without_warnings())
        race = _Race(setting, options, tell, stack)
        results = race.results()
    return Report(
        version=VERSION,
        multiq=__version__,
        started_at=began_at.isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        profile=options.profile if any(entrant.is_ours for entrant in setting.entrants) else "as set",
        is_quick=options.is_quick,
        repeats=options.repeats,
        environment=setting.environment,
        noise=setting.meter.verdict(),
        workloads=[workload.definition() for workload in options.workloads],
        contestants=race.contestants,
        results=results,
        warm_ups=race.warm_ups,
        reference=setting.meter.reference,
    )


class _Race:
    """A run in progress."""

    def __init__(self, setting: Setting, options: Options, tell: Listener, stack: ExitStack) -> None:
        self._entrants = entrants = setting.entrants
        self._options = options
        self._meter = setting.meter
        self._reading = setting.meter.read()  # between two repeats: the end of the one, the beginning of the other
        self._folder = setting.folder
        self._tell = tell
        self._began = time.monotonic()
        self._seconds = 0.0
        self._count = 0
        self._apps = {entrant.name: stack.enter_context(BenchApp(entrant.url)) for entrant in entrants}
        self._samples: dict[tuple[str, str, str], list[Sample]] = {}
        self._unfit: dict[tuple[str, str, str], str] = {}
        self._limits: dict[tuple[str, str], list[float]] = {}
        processes.preload(sorted({type(app.backend).__module__ for app in self._apps.values()}))
        self.warm_ups: list[Result] = []
        for entrant in entrants:
            self._say("warming up", entrant)
            self._warm_up(entrant)
        idle = self._watch_idle()
        self.contestants = [self._contestant(entrant, idle.get(entrant.name)) for entrant in entrants]

    def results(self) -> list[Result]:
        """Take all repeats; the limits before them, and in a full run after them, too."""
        self._take_limits()
        for index, step in enumerate(steps(self._options)):
            start = index % len(self._entrants)  # nobody is always the one after the idle machine
            for entrant in [*self._entrants[start:], *self._entrants[:start]]:
                self._take(step, entrant)
        if not self._options.is_quick:
            self._take_limits()
        return [
            self._result(entrant, workload, variant)
            for workload in self._options.workloads
            for variant in workload.variants(is_quick=self._options.is_quick)
            for entrant in self._entrants
        ]

    # --- repeats ---

    def _take(self, step: Step, entrant: Entrant) -> None:
        workload, variant = step
        if workload.lacks(self._apps[entrant.name].backend.capabilities, variant.parameters) is None:
            self._say(step.title, entrant)
            key = (entrant.name, workload.name, variant.name)
            try:
                self._samples.setdefault(key, []).append(self._sample(step, entrant))
            except Unfit as exc:
                self._unfit[key] = str(exc)
        self._seconds += variant.seconds

    def _sample(self, step: Step, entrant: Entrant) -> Sample:
        before = self._reading
        started = time.monotonic() - self._began
        outcome, accounting = self._perform(step, entrant)
        seconds = time.monotonic() - self._began - started
        self._reading = self._meter.read()
        return Sample(
            started=started,
            seconds=seconds,
            metrics={metric.name: outcome.metrics.get(metric.name) for metric in step.workload.metrics},
            accounting=accounting,
            histograms=outcome.histograms,
            timeline=outcome.timeline,
            calm=self._meter.calm([before, self._reading]),
        )

    def _perform(self, step: Step, entrant: Entrant) -> tuple[Outcome, Accounting]:
        """The work itself, with its proof, in a queue and a folder of its own."""
        outcome = Outcome({})
        stage = self._stage(entrant, step.workload.name)
        try:
            outcome = step.workload.run(stage, step.variant.parameters)
        except Unfit:
            stage.empty()  # what was put until then
            self._note_aside(entrant, step.workload.name, account(stage.close()))
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it was: this figure cannot be had, and the report says why
            stage.evidence.complaint = describe(exc)
        return outcome, account(stage.close())

    def _result(self, entrant: Entrant, workload: Workload, variant: Variant) -> Result:
        key = (entrant.name, workload.name, variant.name)
        lacks = workload.lacks(self._apps[entrant.name].backend.capabilities, variant.parameters)
        limits = self._limits.get((entrant.name, workload.limit)) if workload.limit is not None else None
        return Result(
            contestant=entrant.name,
            workload=workload.name,
            variant=variant.name,
            parameters=dict(variant.parameters),
            samples=self._samples.get(key, []),
            limit=median(limits) if limits else None,
            skipped=lacks or self._unfit.get(key),
        )

    # --- what belongs to a contestant ---

    def _warm_up(self, entrant: Entrant) -> None:
        """Connections, scripts, tables, and the first pages of everything: nobody's first repeat pays for them."""
        stage = self._stage(entrant, "warm-up")
        try:
            stage.enqueue(enqueue_in_bulk, 0, _WARM_UP)
            with stage.working(1) as crew:
                stage.drain(crew)
        finally:
            evidence = stage.close()
        self._note_aside(entrant, "warm-up", account(evidence))

    def _note_aside(self, entrant: Entrant, what: str, accounting: Accounting) -> None:
        """Jobs that no figure is of: they are accounted for as all others are."""
        sample = Sample(
            started=time.monotonic() - self._began,
            seconds=0.0,
            metrics={},
            accounting=accounting,
            histograms={},
            timeline=[],
            calm=1.0,
        )
        self.warm_ups.append(
            Result(contestant=entrant.name, workload=what, variant="", parameters={}, samples=[sample])
        )

    def _watch_idle(self) -> dict[str, float | None]:
        """Requests a second of one idle worker each, all of them at the same time: that takes nobody's time."""
        seconds = _idle(self._options)
        if not seconds:
            return {}
        stages = {}
        with ExitStack() as stack:
            for entrant in self._entrants:
                self._say("starting an idle worker", entrant)
                stage = self._stage(entrant, "idle")
                stack.callback(self._close_idle, stage, entrant)
                crew = stack.enter_context(stage.working(1))
                crew.wait_until_ready(1)
                stages[entrant.name] = entrant.place
            before = {name: place.counters() for name, place in stages.items()}
            self._tell("watching idle workers", "", self._seconds)
            time.sleep(seconds)
            spent = {name: place.counters().since(before[name]).commands for name, place in stages.items()}
        self._seconds += seconds
        return {name: None if commands is None else commands / seconds for name, commands in spent.items()}

    def _close_idle(self, stage: Stage, entrant: Entrant) -> None:
        self._note_aside(entrant, "idle", account(stage.close()))

    def _take_limits(self) -> None:
        """The leanest loops on each server, where a workload of this run is set beside one."""
        wanted = [workload.limit for workload in self._options.workloads if workload.limit is not None]
        for entrant in self._entrants if wanted else ():
            if entrant.backend == PLANTED:
                continue
            self._say("the limit", entrant)
            scale = 1 if self._options.is_quick else 10
            with processes.Hands(entrant.url, are_processes=True) as own:
                hand = own.take(leanest, entrant.backend, 300 * scale, 2_000 * scale)
                hand.go()
                for name, speed in hand.result(120.0).result.items():
                    self._limits.setdefault((entrant.name, name), []).append(speed)
            self._seconds += 0.5

    def _contestant(self, entrant: Entrant, idle: float | None) -> Contestant:
        return Contestant(
            name=entrant.name,
            backend=entrant.backend,
            server=entrant.place.version(),
            is_ours=entrant.is_ours,
            durability=entrant.place.durability(),
            promises=_promises(self._apps[entrant.name]),
            idle_commands=idle,
        )

    def _stage(self, entrant: Entrant, word: str) -> Stage:
        self._count += 1
        word = f"{word}-{self._count}"
        own = "" if entrant.is_ours else entrant.prefix
        return Stage(self._apps[entrant.name], entrant.place, entrant.queue(word), self._folder / word, own=own)

    def _say(self, what: str, entrant: Entrant) -> None:
        self._tell(what, entrant.name, self._seconds)


def _step(seconds: float) -> str:
    """``1 us``, ``1 ms``, ``1 s``."""
    return next(f"{seconds * scale:g} {unit}" for unit, scale in _UNITS.items() if seconds * scale >= 1 or unit == "us")


def _idle(options: Options) -> float:
    """Seconds for which idle workers are watched; in a quick run not at all, as two seconds would show nothing."""
    is_wanted = any(workload.wants_idle for workload in options.workloads)
    return _IDLE if is_wanted and not options.is_quick else 0.0


def _promises(app: BenchApp) -> dict[str, str]:
    """What stands beside the speeds, in a few words each."""
    can = app.backend.capabilities

    def either(power: str, yes: str, no: str) -> str:
        return yes if can.claim(power) else no

    return {
        "delays": f"never early, to {_step(can.delay_resolution)}",
        "order": either("total_order", "one line by priority, then age", "in several lines beside each other"),
        "a repeated enqueue": either("client_ids", "adds nothing", "may add a second job"),
        "a batch": either("atomic_batches", "whole or not at all", "may be accepted in part"),
        "jobs": either("persistent", "outlive the server, as it is set up", "end with the process or server"),
        "attempts": either("durable_attempts", "outlive the server", "are forgotten when the server ends"),
        "a late verdict": either("fenced_late", "is refused by the store", "is refused by the client's clock"),
    }


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Workers that are threads of this process fail as often as they are told to: nobody wants to read of that."""
    log = logging.getLogger("multiq")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
