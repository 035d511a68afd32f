"""Runs one soak.

The phases are load with faults, load without faults, draining, an audit of the store, and the check of the history.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from multiq.fault_proxy import Pass

from .counterexamples import check
from .crew import Crew
from .history import Recorder, read
from .invariants import Setting
from .load import TTR, name_of
from .nemesis import Nemesis, has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from .counterexamples import Verdict
    from .load import Load
    from .site import Site

_WITHOUT_FAULTS = 5.0  # seconds of load after all faults are healed
_DRAIN = 60.0  # the longest time, in seconds, until only buried jobs are left
_BETWEEN = 0.7  # seconds from one fault to the next
_LOOK_EVERY = 2.0  # seconds between two checks of a soak that ends with the first violation
_UNWRITTEN = 500_000_000  # in ns; an event that is older than this has certainly been written to its file
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """The duration of a soak, and its faults."""

    seconds: float
    """The duration of the load with faults."""
    faults: Collection[str] | None = None
    """The names of the faults to make, or None for all faults that are available on the tested store."""
    drain: float = _DRAIN
    """The time limit of draining, in seconds."""
    until: str = ""
    """The name of an invariant. The soak ends as soon as the named invariant is violated."""
    plant: str = ""
    """A module that every process of the soak imports first."""


def soak(site: Site, load: Load, plan: Plan, tell: Callable[[str, float, int], object] = lambda *_: None) -> Verdict:
    """Run a soak, and check its history.

    *tell* is called with the phase, the seconds of load so far, and the number of faults so far.
    """
    folder = Path(load.folder)
    recorder = Recorder(folder, "nemesis")
    recorder.note("begun", kind=site.driver, value=float(load.seed))
    crew = Crew(load, site, plan.seconds, plant=plan.plant)
    nemesis = Nemesis(crew, site, recorder, random.Random(load.seed), plan.faults)  # noqa: S311 - repeatable
    setting = setting_for(site.driver, load)
    try:
        verdict = _load(crew, nemesis, recorder, plan, folder, setting, tell)
        if verdict is not None:
            return verdict
        nemesis.heal()
        _keep_up(crew, recorder)
        recorder.note("healed")
        tell("without faults", plan.seconds, nemesis.count)
        time.sleep(min(_WITHOUT_FAULTS, plan.seconds))
        ended = crew.stop("produce", "manage")
        tell("draining", plan.seconds, nemesis.count)
        is_drained = _drain(site, crew, recorder, plan.drain)
        recorder.note("drained", err="" if is_drained else f"jobs were left after {plan.drain:g} s")
        ended |= crew.stop("consume", "lane")
        children = crew.children()
        ended |= crew.end_workers()
        outlived = [child for child in children if not has_ended(child)]
        for child in outlived:
            recorder.note("residue", kind="process", target=f"{child.pid}")
        if crew.kill_all() or outlived or not is_drained:
            time.sleep(TTR + 1)  # the audit needs a store without leases
        tell("checking", plan.seconds, nemesis.count)
        ended |= _audit(site, recorder, crew)
        for name, how in ended.items():
            recorder.note("residue", kind=name, err=how)
    finally:
        crew.kill_all()
        if site.proxy is not None:
            site.proxy.mode = Pass()
        recorder.close()
    return check(read(folder), setting)


def setting_for(driver: str, load: Load) -> Setting:
    """Return the facts about a backend that the invariants need."""
    return Setting(
        ends_leases_with_connection=driver == "beanstalk",
        one_consumer=frozenset({load.lane}),
        counts_exactly=driver != "beanstalk",
        reschedules_by_copy=driver == "beanstalk",
        repeats_enqueues=driver == "mysql",
        locks_rows=driver == "mysql",
        waits_for_the_stopped=driver == "sqlite",
        patience=TTR + 4,
    )


def _load(  # noqa: PLR0917 - the parts of one soak
    crew: Crew,
    nemesis: Nemesis,
    recorder: Recorder,
    plan: Plan,
    folder: Path,
    setting: Setting,
    tell: Callable[[str, float, int], object],
) -> Verdict | None:
    """Run the load with faults. If the invariant ``plan.until`` is violated, the load ends with a verdict."""
    begin = time.monotonic()
    look_at = begin + _LOOK_EVERY
    while (now := time.monotonic()) < begin + plan.seconds:
        tell("load and faults", now - begin, nemesis.count)
        _keep_up(crew, recorder)
        time.sleep(_BETWEEN)
        _measure(crew, recorder)
        nemesis.strike()
        if plan.until and time.monotonic() > look_at:
            written = time.monotonic_ns() - _UNWRITTEN
            verdict = check([event for event in read(folder) if event.t < written], setting)
            if plan.until in verdict.violations:
                return verdict
            look_at = time.monotonic() + _LOOK_EVERY
    return None


def _measure(crew: Crew, recorder: Recorder) -> None:
    """Record the memory and the open files of each process that runs jobs."""
    for child in crew.children():
        try:
            memory, files = child.memory_info().rss / _MIB, child.num_fds()
        except psutil.Error:
            continue  # the process has just ended
        recorder.note("memory", target=name_of(child.pid), value=memory)
        recorder.note("files", target=name_of(child.pid), value=float(files))


def _keep_up(crew: Crew, recorder: Recorder, *, with_producers: bool = True) -> None:
    """Start each process that is not running. Record processes that ended without a fault."""
    for how in crew.keep_up(with_producers=with_producers).values():
        recorder.note("untyped", kind="process", err=how)


def _drain(site: Site, crew: Crew, recorder: Recorder, seconds: float) -> bool:
    """Wait until only buried jobs are left. Returns False if other jobs are left after *seconds*."""
    give_up_at = time.monotonic() + seconds
    while site.is_left():
        if time.monotonic() > give_up_at:
            return False
        _keep_up(crew, recorder, with_producers=False)
        time.sleep(0.5)
    return True


def _audit(site: Site, recorder: Recorder, crew: Crew) -> dict[str, str]:
    ended = crew.count()
    found = site.held()
    recorder.note("audit", jobs=tuple(number for number, _ in found), states=tuple(state for _, state in found))
    return ended
