"""A run as one page of HTML. The page has charts, and shows the promises of each backend beside its speeds.

The page loads nothing from other servers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from multiq.formatting import duration, many
from multiq.terminal_escapes import safe

from . import charts
from .figures import (
    UNKNOWN,
    best,
    costs,
    label,
    number,
    proof,
    sentence,
    share_of_baseline,
    speeds,
    summary,
    variants,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .compare import Comparison
    from .report import Metric, Report, Result, TargetInfo, Workload

_CODE = re.compile(r"`([^`]+)`")


class _Chart(NamedTuple):
    caption: str
    svg: Markup
    has_legend: bool = False
    """Whether the chart needs a legend for its lines."""


class _Line(NamedTuple):
    """A row of a table of figures."""

    title: str
    cells: list[str]
    best: int | None = None
    """The index of the cell to highlight."""
    kind: str = ""
    """The kind of the row: ``variant``, ``cost``, or empty."""


class _Section(NamedTuple):
    """The page's content for one workload."""

    workload: Workload
    charts: list[_Chart]
    targets: list[str]
    lines: list[_Line]
    skipped: list[str]
    parameters: list[str]


def page(report: Report, comparison: Comparison | None = None) -> str:
    """The page of this run. *comparison* adds a comparison with an older run."""
    suspects = comparison.suspects() if comparison else []
    names = [target.name for target in report.targets]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        proof=proof(report),
        violations=[sentence(*found) for found in report.violations],
        glance=[_glance(report, workload) for workload in report.workloads],
        promises=list(_promises(report.targets)),
        sections=[_section(report, workload, names) for workload in report.workloads],
        calm=_svg(charts.calm(report, "How calm the machine was beside each repeat")),
        comparison=comparison,
        changes=comparison.changes() if comparison else [],
        suspects=suspects,
        others=[row for row in comparison.rows if not row.is_change and row not in suspects] if comparison else [],
        colours={name: charts.colour(names, name) for name in names},
        dashes={name: charts.dash(names, name) for name in names},
        when=when(report),
        prose=_prose,
        label=label,
        number=number,
        many=many,
        duration=duration,
        unknown=UNKNOWN,
    )


def _printable(value: Any) -> Any:
    """The value, with invisible and direction-changing characters escaped. A value may come from a server or a URL."""
    return safe(value, keep="\n") if isinstance(value, str) and not isinstance(value, Markup) else value


def _svg(drawn: str | None) -> Markup | None:
    """The SVG as markup. The template does not escape markup a second time."""
    return Markup(drawn) if drawn else None  # noqa: S704 - Vega and ElementTree have escaped all its text


# --- speeds and promises ----------------------------------------------------------------------------------


def _glance(report: Report, workload: Workload) -> _Line:
    """A workload's headline figure on each target. If there are several variants, the figure of the first variant is
    used."""
    variant, results = next(iter(variants(report, workload).items()), ("", []))
    title = ", ".join(filter(None, (workload.title, variant)))
    return _line(f"{title}: {label(workload.metrics[0])}", results, workload.metrics[0], _names(report))


def _promises(targets: Sequence[TargetInfo]) -> Iterator[_Line]:
    yield _Line("server", [one.server if one.is_ours else f"{one.server}, yours" for one in targets])
    yield _Line("acknowledged jobs survive", [one.durability.survives for one in targets])
    yield _Line("by its settings", [_settings(one) for one in targets])
    for promise in dict.fromkeys(key for one in targets for key in one.promises):
        yield _Line(promise, [one.promises.get(promise, UNKNOWN) for one in targets])
    idle = [UNKNOWN if one.idle_commands is None else number(one.idle_commands) for one in targets]
    yield _Line("commands a second of an idle worker", idle)


def _settings(target: TargetInfo) -> str:
    return ", ".join(f"{name} {value}" for name, value in target.durability.settings.items()) or UNKNOWN


# --- a workload ------------------------------------------------------------------------------------------


def _section(report: Report, workload: Workload, names: Sequence[str]) -> _Section:
    by_variant = variants(report, workload)
    results = [result for found in by_variant.values() for result in found]
    return _Section(
        workload=workload,
        charts=list(_charts(workload, by_variant, names)),
        targets=_names(report),
        lines=list(_lines(workload, by_variant, _names(report))),
        skipped=[
            f"{', '.join(filter(None, (result.target, result.variant)))}: {result.skipped}"
            for result in results
            if result.skipped
        ],
        parameters=_parameters(by_variant),
    )


def _names(report: Report) -> list[str]:
    return [target.name for target in report.targets]


def _charts(workload: Workload, by_variant: dict[str, list[Result]], names: Sequence[str]) -> Iterator[_Chart]:
    """The charts of a workload: curves for histograms, bars for other speeds, time lines, and the CPU time per job."""
    for variant, results in by_variant.items():
        histograms = dict.fromkeys(
            name for result in results for sample in result.samples for name in sample.histograms
        )
        for metric in speeds(workload):
            if histograms and metric.unit in {"ms", "us"}:
                continue  # this metric is already a point of the curve
            has_baseline = metric is workload.metrics[0]
            caption = _caption(label(metric), variant)
            yield from _chart(caption, charts.bars(results, metric, names, caption, has_baseline=has_baseline))
        for name in histograms:
            caption = _caption(f"{name} by percentile", variant)
            yield from _chart(caption, charts.curves(results, name, names, caption), has_legend=True)
        caption = _caption("jobs a second, each line a repeat", variant)
        yield from _chart(caption, charts.timelines(results, names, caption))
    processors = [metric for metric in costs(workload) if metric.unit == "us/job"]
    if processors and by_variant:
        variant, results = next(iter(by_variant.items()))
        caption = _caption("processor time of a job", variant)
        yield from _chart(caption, charts.stacked(results, processors, caption))


def _caption(what: str, variant: str) -> str:
    return f"{variant}: {what}" if variant else what


def _chart(caption: str, drawn: str | None, *, has_legend: bool = False) -> Iterator[_Chart]:
    svg = _svg(drawn)
    if svg is not None:
        yield _Chart(caption, svg, has_legend)


def _lines(workload: Workload, by_variant: dict[str, list[Result]], names: Sequence[str]) -> Iterator[_Line]:
    headline = workload.metrics[0]
    for variant, results in by_variant.items():
        if variant:
            yield _Line(variant, [], kind="variant")
        for metric in speeds(workload):
            yield _line(label(metric), results, metric, names)
            if metric is headline and any(result.baseline for result in results):
                shares = {result.target: share_of_baseline(result, headline) for result in results}
                cells = [UNKNOWN if (share := shares.get(name)) is None else f"{share:.0%}" for name in names]
                yield _Line("of the baseline", cells)
        for metric in costs(workload):
            yield _line(label(metric), results, metric, names)._replace(best=None, kind="cost")


def _line(title: str, results: Sequence[Result], metric: Metric, names: Sequence[str]) -> _Line:
    found = {result.target: summary(result, metric) for result in results}
    winner = best(results, metric)
    cells = [UNKNOWN if (one := found.get(name)) is None else str(one) for name in names]
    return _Line(title, cells, names.index(winner) if winner is not None else None)


def _parameters(by_variant: dict[str, list[Result]]) -> list[str]:
    """A text for each variant, with its parameters: ``10k: jobs 500, waiting 10,000``."""
    captions = []
    for variant, results in by_variant.items():
        words = [f"{name} {_plain(value)}" for name, value in results[0].parameters.items()]
        if words:
            captions.append(_caption(", ".join(words), variant))
    return captions


def _plain(value: str | float) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _prose(text: str) -> Markup:
    """A sentence of a definition, as markup. Text between backticks becomes code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(safe(text)))))  # noqa: S704 - escaped just before
