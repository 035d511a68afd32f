"""Compares two runs. Each figure is worse, better, not different, or too noisy for a verdict.

Each figure is compared by Welch's test on the logarithms of the repeats. The logarithms are used because "slower" means
a ratio. From ten repeats on, Yuen's test is used. Yuen's test is Welch's test without the lowest and the highest fifth
of the repeats. With Yuen's test, a few repeats that other programs have disturbed do not change the verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from multiq.errors import MultiqError
from multiq.formatting import many

from .figures import label, when
from .report import Metric  # noqa: TC001 - msgspec looks it up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .report import Report, Result, TargetInfo

THRESHOLD = 0.10
"""The largest change for the worse that is not reported as worse."""

ENOUGH = 5
"""The number of repeats that a verdict needs. With fewer repeats, hardly any change can be distinguished from
chance."""

_CONFIDENCE = 0.95  # confidence level of the intervals that are shown
_FALSE_ALARM = 0.05  # chance that a comparison of two equal builds calls any figure worse
_TRIM = 0.2  # share of the repeats that is cut off at each end
_ENOUGH_TO_TRIM = 10  # with fewer repeats, trimming leaves too few for a verdict
_SAME_MACHINE = ("CPU", "cores", "disk")  # entries of the environment that must be equal in two runs
_PASSING = ("load",)  # entries of the environment that describe one moment only

_COUNTED = frozenset({"commands/job", "bytes/job", "jobs", "MB"})  # units that a slower machine does not change

Verdict = Literal["worse", "better", "no difference", "cannot tell"]


class ReportsDiffer(MultiqError, ValueError):
    """Two runs did different work, or ran on different machines. ``obstacles`` lists the differences."""

    def __init__(self, obstacles: Sequence[str]) -> None:
        self.obstacles = tuple(obstacles)
        listed = "\n".join(f"  - {obstacle}" for obstacle in self.obstacles)
        super().__init__(
            f"these runs cannot be compared, as their figures do not mean the same:\n{listed}\n"
            "run both with the same options on the same machine, or compare them anyway, with that in mind"
        )


class Row(msgspec.Struct, frozen=True):
    """One figure that both runs have."""

    workload: str
    variant: str
    target: str
    metric: Metric
    old: float
    """The median of the old repeats."""
    new: float
    ratio: float | None
    """The new median divided by the old median. The ratio is None if the old median is zero."""
    low: float | None
    """The lower end of the ratio's 95 % confidence interval. The lower end is None if there are fewer than two
    repeats."""
    high: float | None
    """The upper end of the ratio's 95 % confidence interval."""
    verdict: Verdict
    why: str = ""
    """The reason why there is no verdict, in a few words."""

    @property
    def title(self) -> str:
        """The full name of the figure, as one line."""
        place = " ".join(filter(None, (self.target, self.workload, self.variant)))
        return f"{place}: {label(self.metric)}"

    @property
    def is_change(self) -> bool:
        """Whether the figure is worse or better."""
        return self.verdict in {"worse", "better"}

    @property
    def harm(self) -> float:
        """The ratio, inverted if more is better. A ratio above 1 always means that the figure is worse."""
        ratio = self.ratio or 1.0
        return 1 / ratio if self.metric.better == "higher" else ratio


class Comparison(msgspec.Struct, frozen=True):
    """The verdicts on all figures that both runs have."""

    old: str
    """The old run's multiq version and its time."""
    new: str
    threshold: float
    """The threshold that the caller has set. 0.1 means ten per cent."""
    drift: float
    """How much slower the machine itself was in the new run, measured by a fixed piece of work. 0.05 means five per
    cent.

    A negative value means that the machine was faster. The absolute value of the drift is added to the threshold of all
    figures that depend on time.
    """
    caveats: list[str]
    """All differences between the runs except multiq's build."""
    rows: list[Row]
    missing: list[str] = []
    """Figures that are missing in the new run, although both runs ran the workload."""

    @property
    def regressed(self) -> bool:
        """Whether any figure is worse."""
        return any(row.verdict == "worse" for row in self.rows)

    @property
    def is_unsure(self) -> bool:
        """Whether a figure is missing, or the repeats of a figure give no verdict."""
        return bool(self.missing) or any(row.verdict == "cannot tell" for row in self.rows)

    @property
    def allowed(self) -> float:
        """The threshold plus the absolute value of the machine's drift."""
        return self.threshold + abs(self.drift)

    def changes(self) -> list[Row]:
        """The figures that are worse or better. The worst figures come first."""
        return sorted((row for row in self.rows if row.is_change), key=lambda row: row.harm, reverse=True)

    def suspects(self) -> list[Row]:
        """Figures that look worse than the allowed change, but not with certainty. The worst figures come first."""
        unsure = (row for row in self.rows if row.verdict == "cannot tell" and row.harm > 1 + self.allowed)
        return sorted(unsure, key=lambda row: row.harm, reverse=True)

    def count(self, verdict: Verdict) -> int:
        return Counter(row.verdict for row in self.rows)[verdict]

    def summary(self) -> str:
        """The verdict in a sentence."""
        figures = f"{len(self.rows) + len(self.missing)} figures"
        worse, better = self.count("worse"), self.count("better")
        unsure = self.count("cannot tell") + len(self.missing)
        rest = f"{better} better, {self.count('no difference')} no different"
        by = f"by more than {self.allowed:.0%}"
        if worse:
            return f"regression: of {figures} {worse} worse {by}, {rest}, {unsure} too noisy to tell"
        if unsure:
            return f"cannot tell for {unsure} of {figures}: none is worse for certain {by}, {rest}"
        return f"{'faster' if better else 'no difference'}: of {figures} none is worse {by}, {rest}"


def compare(old: Report, new: Report, *, threshold: float = THRESHOLD, anyway: bool = False) -> Comparison:
    """Compare the figures that both runs have, except those that a comparison leaves out (``Metric.counts``).

    - *threshold*: how much worse a figure may be. 0.1 means ten per cent.
    - *anyway*: whether to compare runs of different work or of different machines. With *anyway*, the differences
      become caveats.

    Raises ``ReportsDiffer`` if the runs differ and *anyway* is false, or if the runs have no figure in common.
    """
    obstacles = list(_obstacles(old, new))
    if obstacles and not anyway:
        raise ReportsDiffer(obstacles)
    pairs = list(_pairs(old, new))
    if not pairs:
        raise ReportsDiffer(["they have no figure in common"])
    drift = _drift(old, new)
    missing = list(_missing(old, new))
    return Comparison(
        old=_name(old),
        new=_name(new),
        threshold=threshold,
        drift=drift,
        caveats=[*obstacles, *_caveats(old, new, drift), *(f"the new run does not have: {title}" for title in missing)],
        rows=_judged(pairs, threshold, drift),
        missing=missing,
    )


def too_few(repeats: int) -> str:
    """The message for a run with fewer repeats than ``ENOUGH``."""
    return f"{many(repeats, 'repeat')}: with fewer than {ENOUGH} only large changes show, and often none"


def _name(report: Report) -> str:
    return f"multiq {report.multiq} of {when(report)}"


# --- whether they can be compared at all ------------------------------------------------------------------


def _obstacles(old: Report, new: Report) -> Iterator[str]:
    """The reasons why the figures of the two runs cannot be compared."""
    if old.profile != new.profile:
        yield f"profile {old.profile} against {new.profile}"
    if old.is_quick != new.is_quick:
        yield f"a {_length(old)} run against a {_length(new)} one"
    for key in _SAME_MACHINE:
        mine, theirs = old.environment.get(key), new.environment.get(key)
        if mine != theirs:
            yield f"{key}: {mine or 'unknown'} against {theirs or 'unknown'}"
    before = {target.name: target for target in old.targets}
    for target in new.targets:
        other = before.get(target.name)
        if other is not None and other.durability != target.durability:
            yield f"{target.name} keeps jobs differently: {_keeps(other)} against {_keeps(target)}"
    for was, now in _shared(old, new):
        if was.parameters != now.parameters:
            yield f"{_title(was)} was run with {_only(was, now)} against {_only(now, was)}"


def _length(report: Report) -> str:
    return "quick" if report.is_quick else "full"


def _keeps(target: TargetInfo) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in target.durability.settings.items())
    return f"{target.durability.survives} ({settings})" if settings else target.durability.survives


def _title(result: Result) -> str:
    return " ".join(filter(None, (result.workload, result.variant, "on", result.target)))


def _only(one: Result, other: Result) -> str:
    """The parameters of *one* that *other* lacks or has with another value, as text."""
    own = [f"{name} {value}" for name, value in one.parameters.items() if other.parameters.get(name) != value]
    return ", ".join(own) or "fewer parameters"


def _caveats(old: Report, new: Report, drift: float) -> Iterator[str]:
    """Differences that readers of the comparison should know."""
    for key in {**old.environment, **new.environment}:
        mine, theirs = old.environment.get(key), new.environment.get(key)
        if mine != theirs and key not in _SAME_MACHINE and not key.startswith(_PASSING):
            yield f"{key}: {mine or 'unknown'} against {theirs or 'unknown'}"
    before = {target.name: target.server for target in old.targets}
    for target in new.targets:
        server = before.get(target.name, target.server)
        if server != target.server:
            yield f"{target.name} was {server}, and is {target.server}"
    if drift:
        change = "slower" if drift > 0 else "faster"
        yield f"the machine itself was {abs(drift):.1%} {change} in the new run: times may differ by as much more"
    for word, report in (("old", old), ("new", new)):
        if report.repeats < ENOUGH:
            yield f"the {word} run has {too_few(report.repeats)}"
        if report.noise:
            yield f"the {word} run was noisy: {report.noise}"
        if report.violations:
            yield f"the {word} run broke promises, so its figures are of work that was not all done"
    yield from _left_out(old, new)


def _left_out(old: Report, new: Report) -> Iterator[str]:
    was, now = ({_key(result) for result in report.results if result.samples} for report in (old, new))
    for word, only in (("old", was - now), ("new", now - was)):
        if only:
            titles = sorted({f"{workload} on {target}" for target, workload, _ in only})
            yield f"only in the {word} run: {', '.join(titles)}"


def _drift(old: Report, new: Report) -> float:
    """How much longer the fixed piece of work took in the new run. 0.05 means five per cent."""
    if not old.reference or not new.reference:
        return 0.0
    return new.reference / old.reference - 1


# --- the figures ------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """The repeats of one figure in both runs."""

    result: Result
    metric: Metric
    old: list[float]
    new: list[float]


class _Test(NamedTuple):
    """The result of the test of the ratio. ``low`` and ``high`` are the ends of the ratio's interval, as logarithms.

    ``worse`` and ``better`` are p-values. A small ``worse`` is evidence that the figure is worse by more than the
    allowed change. A small ``better`` is evidence that the figure is better by more than the allowed change.
    """

    low: float
    high: float
    worse: float
    better: float


def _key(result: Result) -> tuple[str, str, str]:
    return result.target, result.workload, result.variant


def _shared(old: Report, new: Report) -> Iterator[tuple[Result, Result]]:
    before = {_key(result): result for result in old.results if result.samples}
    for result in new.results:
        if result.samples and _key(result) in before:
            yield before[_key(result)], result


def _pairs(old: Report, new: Report) -> Iterator[_Pair]:
    defined = {workload.name: workload.metrics for workload in old.workloads}
    metrics = {
        workload.name: [metric for metric in workload.metrics if metric.counts and metric in defined[workload.name]]
        for workload in new.workloads
        if workload.name in defined
    }
    for before, after in _shared(old, new):
        for metric in metrics.get(after.workload, ()):
            pair = _Pair(after, metric, before.figures(metric.name), after.figures(metric.name))
            if pair.old and pair.new:
                yield pair


def _missing(old: Report, new: Report) -> Iterator[str]:
    """Figures that the new run lacks, although both runs did the same work."""
    defined = {workload.name: workload.metrics for workload in new.workloads}
    for before, after in _shared(old, new):
        for metric in defined.get(after.workload, ()):
            if metric.counts and before.figures(metric.name) and not after.figures(metric.name):
                yield f"{' '.join(filter(None, (after.target, after.workload, after.variant)))}: {label(metric)}"


def _judged(pairs: Sequence[_Pair], threshold: float, drift: float) -> list[Row]:
    margins = [_margin(pair.metric, threshold, drift) for pair in pairs]
    tests = [_test(pair, allowed) for pair, allowed in zip(pairs, margins, strict=True)]
    worse = _holm([test.worse if test else 1.0 for test in tests])
    better = _holm([test.better if test else 1.0 for test in tests])
    rows = []
    for pair, allowed, test, is_worse, is_better in zip(pairs, margins, tests, worse, better, strict=True):
        verdict: Verdict = "cannot tell"
        why = _why_not(pair)
        if is_worse:
            verdict = "worse"
        elif is_better:
            verdict = "better"
        elif set(pair.old) == set(pair.new) == {0.0} or (test and -allowed <= test.low and test.high <= allowed):
            verdict, why = "no difference", ""
        rows.append(_row(pair, test, verdict, why))
    return rows


def _margin(metric: Metric, threshold: float, drift: float) -> float:
    """The allowed change for the worse, as the logarithm of a ratio."""
    return math.log1p(threshold if metric.unit in _COUNTED else threshold + abs(drift))


def _row(pair: _Pair, test: _Test | None, verdict: Verdict, why: str) -> Row:
    old, new = median(pair.old), median(pair.new)
    return Row(
        workload=pair.result.workload,
        variant=pair.result.variant,
        target=pair.result.target,
        metric=pair.metric,
        old=old,
        new=new,
        ratio=new / old if old > 0 else None,
        low=math.exp(test.low) if test else None,
        high=math.exp(test.high) if test else None,
        verdict=verdict,
        why="" if verdict != "cannot tell" else why or "its repeats spread too far",
    )


def _why_not(pair: _Pair) -> str:
    if min(len(pair.old), len(pair.new)) < 2:
        return "one repeat only"
    if min(*pair.old, *pair.new) <= 0:
        return "a ratio to zero means nothing"
    return ""


def _test(pair: _Pair, allowed: float) -> _Test | None:
    """Test whether the ratio of new to old exceeds the *allowed* change. Returns None if there are too few repeats for
    a test."""
    if _why_not(pair):
        return None
    old, new = [math.log(value) for value in pair.old], [math.log(value) for value in pair.new]
    if max(old) == min(old) and max(new) == min(new):  # the repeats are all equal, for example counts
        return _exact(new[0] - old[0], pair.metric, allowed)
    from scipy import stats

    trim = _TRIM if min(len(old), len(new)) >= _ENOUGH_TO_TRIM else 0.0
    test = partial(stats.ttest_ind, equal_var=False, trim=trim)
    more = test([value - allowed for value in new], old, alternative="greater")
    less = test([value + allowed for value in new], old, alternative="less")
    interval = test(new, old).confidence_interval(_CONFIDENCE)
    worse, better = (less, more) if pair.metric.better == "higher" else (more, less)
    return _Test(float(interval.low), float(interval.high), float(worse.pvalue), float(better.pvalue))


def _exact(change: float, metric: Metric, allowed: float) -> _Test:
    harm = -change if metric.better == "higher" else change
    return _Test(change, change, float(harm <= allowed), float(harm >= -allowed))


def _holm(chances: Sequence[float]) -> list[bool]:
    """The p-values that are significant if all figures are tested together, by Holm's method.

    Holm's method limits the chance of any false alarm to ``_FALSE_ALARM``, whatever the number of tests. Of n p-values,
    the smallest must be at most ``_FALSE_ALARM`` / n, the next at most ``_FALSE_ALARM`` / (n - 1), and so on. The first
    p-value above its limit and all larger p-values are not significant.
    """
    held = [False] * len(chances)
    for rank, index in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[index] > _FALSE_ALARM / (len(chances) - rank):
            break
        held[index] = True
    return held
