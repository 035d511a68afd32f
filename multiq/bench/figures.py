"""Summarises the repeats of a workload, and formats figures for the table and the page."""

from __future__ import annotations

import math
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Metric, Report, Result, Violation, Workload

UNKNOWN = "-"
"""The text for a figure that the server does not report, or that no repeat has."""


class Summary(NamedTuple):
    """One figure over all repeats."""

    median: float
    lowest: float
    highest: float

    @property
    def spread(self) -> float:
        """The largest distance of a repeat from the median, divided by the median. The result is 0 if the median is
        0."""
        if not self.median:
            return 0.0
        return max(self.highest - self.median, self.median - self.lowest) / abs(self.median)

    def __str__(self) -> str:
        spread = round(self.spread * 100)
        return f"{number(self.median)} ±{spread}%" if spread else number(self.median)


class VerificationSummary(NamedTuple):
    """The totals of the verification of all jobs of a run."""

    enqueued: int
    explained: int
    """Repeated runs of a job that a crash, a failure or the end of a lease explains."""
    checked: list[str]
    """The checks that were made in at least one repeat."""


def summary(result: Result, metric: Metric) -> Summary | None:
    """The figure's median and range. The result is None if no repeat has the figure."""
    values = result.figures(metric.name)
    return Summary(median(values), min(values), max(values)) if values else None


def number(value: float) -> str:
    """The number with about three significant digits, and without decimals from 100 on: ``41,003``, ``31.5``."""
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    return f"{value:,.{2 - math.floor(math.log10(size))}f}"


def label(metric: Metric) -> str:
    """The figure's name and unit: ``pickup p50, ms``. The figure's name is left out if the unit begins with the name:
    ``commands/job``."""
    return metric.unit if metric.unit.startswith(metric.name) else f"{metric.name}, {metric.unit}"


def share_of_baseline(result: Result, headline: Metric) -> float | None:
    """The headline figure divided by the baseline: 0.48 is 48 %. The share is None if there is no baseline."""
    found = summary(result, headline)
    if found is None or not result.baseline or not found.median:
        return None
    return found.median / result.baseline if headline.better == "higher" else result.baseline / found.median


def is_cost(metric: Metric) -> bool:
    """Whether the metric is a cost of the jobs. Every metric that is not a cost is a speed."""
    return metric.unit.endswith("/job") or metric.unit == "MB"


def speeds(workload: Workload) -> list[Metric]:
    """The headline metric, followed by the metrics of speed. The headline metric may be a time per job."""
    headline, *others = workload.metrics
    return [headline, *(metric for metric in others if not is_cost(metric) or metric.unit == headline.unit)]


def costs(workload: Workload) -> list[Metric]:
    """The metrics that are not in ``speeds``."""
    return [metric for metric in workload.metrics if metric not in speeds(workload)]


def best(results: Sequence[Result], metric: Metric) -> str | None:
    """The target with the best median. The result is None if fewer than two targets have the figure."""
    medians = {result.target: found.median for result in results if (found := summary(result, metric))}
    if len(medians) < 2:
        return None
    choose = max if metric.better == "higher" else min
    return choose(medians, key=medians.__getitem__)


def variants(report: Report, workload: Workload) -> dict[str, list[Result]]:
    """The workload's results by variant. In each variant, targets are in the run's order."""
    order = {target.name: place for place, target in enumerate(report.targets)}
    found: dict[str, list[Result]] = {}
    for result in report.results:
        if result.workload == workload.name:
            found.setdefault(result.variant, []).append(result)
    return {variant: sorted(results, key=lambda one: order[one.target]) for variant, results in found.items()}


def proof(report: Report) -> VerificationSummary:
    """The sums of the verification over all repeats and warm-ups."""
    accounts = [sample.verification for result in [*report.warm_ups, *report.results] for sample in result.samples]
    checked = dict.fromkeys(word for account in accounts for word in account.checked)
    return VerificationSummary(
        sum(one.enqueued for one in accounts), sum(one.explained for one in accounts), list(checked)
    )


def when(report: Report) -> str:
    """The time at which the run began: ``21 November 2026, 12:30 UTC``."""
    return f"{datetime.fromisoformat(report.started_at):%-d %B %Y, %H:%M %Z}"


def sentence(result: Result, violation: Violation) -> str:
    """A violation as a sentence that names the workload and the target, and gives an example."""
    place = " ".join(filter(None, (result.workload, result.variant)))
    return f"{violation.kind}: {violation.count:,} on {result.target} in {place}: {violation.example}"
