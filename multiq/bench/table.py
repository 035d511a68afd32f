"""Shows a run, or a comparison of two runs, as text that fits the width of the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from multiq.formatting import duration, many
from multiq.terminal_escapes import safe

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

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from .compare import Comparison, Row
    from .report import Metric, Report, Result, TargetInfo, Workload

_GAP = 2  # width of the space between two columns
_SUSPECTS = 10  # how many figures are listed that look worse without certainty; only the worst are shown
_VERDICT_STYLES = {"worse": "bold red", "better": "green", "cannot tell": "yellow"}


def render(report: Report) -> RenderableType:
    """The whole run: its targets, a table for each workload, and the result of the verification."""
    return _Run(report)


def render_comparison(comparison: Comparison) -> RenderableType:
    """The figures that are worse or better, and the figures that look worse. The worst figures come first. The
    comparison's verdict comes last."""
    return _Compared(comparison)


class _Run:
    """A report to print. The layout is made when the library rich prints, because the terminal's width is not known
    earlier."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self._report
        yield from _head(report)
        for workload in report.workloads:
            by_variant = variants(report, workload)
            if by_variant:
                yield Text()
                yield Text(safe(workload.title), style="bold")
                yield from _figures(workload, by_variant, options.max_width)
        yield Text()
        yield Text("±: the largest difference between a repeat and the median", style="dim")
        yield from _verdict(report)


def _head(report: Report) -> Iterator[RenderableType]:
    length = "quick run" if report.is_quick else "full run"
    yield Text(
        f"{when(report)}, multiq {safe(report.multiq)}, {length} of {duration(report.seconds)}, "
        f"profile {safe(report.profile)}, {many(report.repeats, 'repeat')}"
    )
    yield Text(safe(", ".join(f"{name} {value}" for name, value in report.environment.items())), style="dim")
    yield Text()
    grid = _grid("", "SERVER", "ACKNOWLEDGED JOBS SURVIVE")
    for target in report.targets:
        grid.add_row(Text(safe(target.name), style="bold"), safe(_server(target)), _durability(target))
    yield grid


def _server(target: TargetInfo) -> str:
    return target.server if target.is_ours else f"{target.server}, yours"


def _durability(target: TargetInfo) -> Text:
    settings = ", ".join(f"{name} {value}" for name, value in target.durability.settings.items())
    text = Text(safe(target.durability.survives))
    return text.append(f" ({safe(settings)})", style="dim") if settings else text


# --- figures ---------------------------------------------------------------------------------------------


def _figures(workload: Workload, by_variant: dict[str, list[Result]], width: int) -> Iterator[RenderableType]:
    """The workload's table. If the targets do not fit the width, the table is split into several tables."""
    rows = _rows(workload, by_variant)
    first = max(row[0].cell_len for row in rows)
    names = list(dict.fromkeys(result.target for results in by_variant.values() for result in results))
    cells = [max(len(name), *(row[1][name].cell_len for row in rows if name in row[1])) for name in map(safe, names)]
    for start, end in _chunks(first, cells, width):
        grid = _grid("", *map(safe, names[start:end]), right=True)
        for title, by_name in rows:
            grid.add_row(title, *(by_name.get(safe(name), Text()) for name in names[start:end]))
        yield grid
    yield from _skipped(by_variant)


def _chunks(first: int, cells: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """The columns of each table. A table has as many columns as fit, but at least one."""
    start, used = 0, first
    for index, cell in enumerate(cells):
        if index > start and used + _GAP + cell > width:
            yield start, index
            start, used = index, first
        used += _GAP + cell
    yield start, len(cells)


def _rows(workload: Workload, by_variant: dict[str, list[Result]]) -> list[tuple[Text, dict[str, Text]]]:
    """The title of each row, and its cells by target. Only the first variant has the rows of costs, so that the costs
    are not repeated."""
    rows: list[tuple[Text, dict[str, Text]]] = []
    for index, (variant, results) in enumerate(by_variant.items()):
        if variant:
            rows.append((Text(safe(variant), style="italic"), {}))
        for metric in speeds(workload):
            rows.append((Text(safe(label(metric))), _cells(results, metric)))
            if metric is workload.metrics[0] and any(result.baseline for result in results):
                rows.append((Text("of the baseline"), _shares(results, metric)))
        if index == 0:
            rows += [
                (Text(safe(label(metric)), style="dim"), _cells(results, metric, style="dim"))
                for metric in costs(workload)
            ]
    return rows


def _cells(results: Sequence[Result], metric: Metric, style: str = "") -> dict[str, Text]:
    winner = None if style else best(results, metric)
    cells = {}
    for result in results:
        found = summary(result, metric)
        text = UNKNOWN if found is None else (number(found.median) if style else str(found))
        cells[safe(result.target)] = Text(text, style="bold green" if result.target == winner else style)
    return cells


def _shares(results: Sequence[Result], headline: Metric) -> dict[str, Text]:
    shares = {safe(result.target): share_of_baseline(result, headline) for result in results}
    return {name: Text(UNKNOWN if share is None else f"{share:.0%}") for name, share in shares.items()}


def _skipped(by_variant: dict[str, list[Result]]) -> Iterator[Text]:
    for variant, results in by_variant.items():
        for result in results:
            if result.skipped:
                place = f"{result.target}, {variant}" if variant else result.target
                yield Text(safe(f"not on {place}: {result.skipped}"), style="yellow")


# --- verification ----------------------------------------------------------------------------------------


def _verdict(report: Report) -> Iterator[Text]:
    if report.noise:
        yield Text(safe(f"take the figures with care: {report.noise}"), style="yellow")
    broken = report.violations
    for result, violation in broken:
        yield Text(safe(sentence(result, violation)), style="bold red")
    found = proof(report)
    if broken:
        yield Text(f"{many(len(broken), 'broken promise')} among {found.enqueued:,} jobs", style="bold red")
        return
    none = f"; none {safe(', '.join(found.checked))}" if found.checked else ""
    again = f"; {many(found.explained, 'repeated run')}, each with a known cause" if found.explained else ""
    yield Text(f"{many(found.enqueued, 'job')}, each accounted for{none}{again}", style="bold green")


# --- two runs --------------------------------------------------------------------------------------------


class _Compared:
    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._comparison
        yield Text(safe(f"{found.new}, compared with {found.old}"))
        for caveat in found.caveats:
            yield Text(safe(caveat), style="yellow")
        suspects = found.suspects()
        shown = [*found.changes(), *suspects[:_SUSPECTS]]
        if shown:
            yield Text()
            yield from _changes(shown, options.max_width)
        if suspects[_SUSPECTS:]:
            yield Text(f"and {many(len(suspects) - _SUSPECTS, 'figure')} more that may be worse, or not")
        yield Text()
        yield Text(
            found.summary(), style="bold red" if found.regressed else "bold yellow" if found.is_unsure else "bold"
        )


def _changes(rows: Sequence[Row], width: int) -> Iterator[RenderableType]:
    """A line for each row. A narrow terminal gets fewer columns."""
    is_narrow = width < 90
    grid = _grid("FIGURE", *(() if is_narrow else ("OLD", "NEW")), "RATIO", "95% INTERVAL", "VERDICT", right=True)
    for row in rows:
        verdict = Text(row.verdict, style=_VERDICT_STYLES[row.verdict])
        medians = () if is_narrow else (number(row.old), number(row.new))
        grid.add_row(safe(row.title), *medians, _ratio(row.ratio), f"{_ratio(row.low)} to {_ratio(row.high)}", verdict)
    yield grid


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _grid(first: str, *others: str, right: bool = False) -> Table:
    """A table without lines. Long cells wrap."""
    grid = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    grid.add_column(first, overflow="fold")
    for title in others:
        grid.add_column(title, justify="right" if right else "left", overflow="fold")
    return grid
