"""The results of soaks, as JSON and as the tables of a page."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING

import msgspec

from .invariants import INVARIANTS
from .stories import SECOND, Stories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .counterexamples import Verdict
    from .history import Event

#: The title of each line of the first table, and the invariant whose violations the line counts.
_PROMISES = (
    ("lost (I1)", "I1"),
    ("invented (I2)", "I2"),
    ("acked twice (I3)", "I3"),
    ("held by two (I4)", "I4"),
    ("stale verdicts that counted, live ones refused (I5)", "I5"),
    ("run again without a reason (I11)", "I11"),
    ("untyped errors, calls beyond their deadline (I15)", "I15"),
)


class Spread(msgspec.Struct, frozen=True):
    """The spread of some times, in seconds."""

    count: int
    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, times: Iterable[float]) -> Spread | None:
        """Return the spread of these times, or None if *times* is empty."""
        ordered = sorted(times)
        if not ordered:
            return None
        return cls(len(ordered), _share(ordered, 0.5), _share(ordered, 0.99), ordered[-1])

    def __str__(self) -> str:
        return f"{self.p50:.3f} / {self.p99:.3f} / {self.longest:.3f} s ({self.count})"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one soak."""

    driver: str
    seed: int
    seconds: float
    """The duration of the load with faults."""
    figures: dict[str, int]
    """Numbers of jobs (requested, stored, run, run again, ...) and totals of faults."""
    faults: dict[str, int]
    """The number of faults of each kind: faults of the nemesis, and faults that jobs made on their own processes."""
    violations: dict[str, int]
    """The number of violations of each invariant. Invariants that hold are left out."""
    refused: int
    """The number of verdicts that were refused because their lease had ended."""
    recovery: dict[str, Spread]
    """For each fault, the time from the recovery of a server or a link until the next job begins."""
    samples: int
    """The number of measurements of job processes' memory."""
    growth: float
    """The growth, in MiB, of the process that grew most. The first fifth of the process's samples is left out."""

    @property
    def is_clean(self) -> bool:
        return not self.violations


def outcome(verdict: Verdict, seconds: float) -> Outcome:
    """The figures of one soak, from its verdict."""
    stories = Stories(verdict.events)
    begun = stories.notes["begun"][0]
    faults = {event.kind: 0 for event in stories.notes["struck"]}
    for event in stories.notes["struck"]:
        faults[event.kind] += 1
    for fault in stories.faults:
        if fault.proc.startswith("job."):
            faults[f"{fault.kind} by a job"] = faults.get(f"{fault.kind} by a job", 0) + 1
    figures = {name: value for name, value in verdict.figures.items() if name not in faults}
    return Outcome(
        driver=begun.kind,
        seed=round(begun.value),
        seconds=seconds,
        figures=figures,
        faults=dict(sorted(faults.items())),
        violations={name: len(found) for name, found in verdict.violations.items()},
        refused=sum(said.type == "fail" for story in stories for said in story.verdicts),
        recovery=_recovery(stories),
        samples=len(stories.notes["memory"]),
        growth=_growth(stories.notes["memory"]),
    )


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The lines of the first table: a title, and a cell for each soak."""
    told: list[tuple[str, Callable[[Outcome], str]]] = [
        ("load with faults", lambda one: _time(one.seconds)),
        ("seed", lambda one: str(one.seed)),
        ("jobs stored", lambda one: f"{one.figures.get('stored', 0):,}"),
        ("runs", lambda one: f"{one.figures.get('run', 0) + one.figures.get('run again', 0):,}"),
        ("runs again, each explained", lambda one: f"{_explained(one):,}"),
        ("of these, enqueued again after they were done", lambda one: f"{one.figures.get('stored again', 0):,}"),
        ("left undone when the time to drain was over", lambda one: f"{one.figures.get('left undone', 0):,}"),
        ("late verdicts, each refused", lambda one: f"{one.refused:,}"),
        ("faults, each seen to happen", lambda one: f"{sum(one.faults.values()):,}"),
        ("faults tried in vain", lambda one: f"{one.figures.get('faults missed', 0):,}"),
    ]
    told += [(title, _count_of(name)) for title, name in _PROMISES]
    named = {name for _, name in _PROMISES}
    others = [name for name in INVARIANTS if name not in named]
    told.append(("all other invariants", _count_of(*others)))
    return [[title, *map(tell, outcomes)] for title, tell in told]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The tables of results, faults, recovery times and memory."""
    head = ["", *(one.driver for one in outcomes)]
    faults = sorted({kind for one in outcomes for kind in one.faults})
    outages = sorted({kind for one in outcomes for kind in one.recovery})
    parts = [
        table(head, rows(outcomes)),
        "Faults by kind:\n",
        table(head, [[kind, *(f"{one.faults.get(kind, 0):,}" for one in outcomes)] for kind in faults]),
    ]
    if outages:
        parts += [
            "Time from the end of an outage to the next job that begins (median / 99 of 100 / longest / number):\n",
            table(head, [[kind, *(str(one.recovery.get(kind, "-")) for one in outcomes)] for kind in outages]),
        ]
    parts += [
        "Growth of job processes after the first fifth of their samples (I18: 8 MiB, or 1 MiB for 100,000 jobs):\n",
        table(
            head,
            [
                ["samples", *(f"{one.samples:,}" for one in outcomes)],
                ["most growth of one process", *(f"{one.growth:.1f} MiB" for one in outcomes)],
            ],
        ),
    ]
    return "\n".join(parts)


def _count_of(*names: str) -> Callable[[Outcome], str]:
    return lambda one: f"{sum(one.violations.get(name, 0) for name in names):,}"


def _explained(one: Outcome) -> int:
    return one.figures.get("run again", 0) - one.violations.get("I11", 0)


def _recovery(stories: Stories) -> dict[str, Spread]:
    starts = sorted(run.at for story in stories for run in story.runs)
    times: dict[str, list[float]] = {}
    for event in stories.notes["back"]:
        at = bisect.bisect(starts, event.t)
        if at < len(starts):
            times.setdefault(event.kind, []).append((starts[at] - event.t) / SECOND)
    return {kind: spread for kind, found in sorted(times.items()) if (spread := Spread.of(found)) is not None}


def _growth(samples: Iterable[Event]) -> float:
    """The growth of the process that grew most, in MiB, calculated as in the invariant I18."""
    by_process: dict[str, list[float]] = {}
    for event in samples:
        by_process.setdefault(event.target, []).append(event.value)
    most = 0.0
    for taken in by_process.values():
        some = taken[len(taken) // 5 :]
        half = max(1, len(some) // 2)
        most = max(most, min(some[-half:]) - min(some[:half]))
    return most


def _share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _time(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
