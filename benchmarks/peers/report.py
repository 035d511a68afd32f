"""The tables, for the terminal and for ``peers.md``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from peers.results import percentile, spread
from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers.results import Row, Run

_FIGURES = (
    "enqueue one by one /s",
    "in bulk /s",
    "drain /s",
    "CPU s per 10,000: producer, workers",
    "pickup p50 / p99, ms",
    "delayed, late by p50 / p99, ms",
    "idle commands /s",
)
_PICTURE = "![Bars: jobs a second, drained and enqueued](peers.svg)"
_BEGIN, _END = "<!-- figures of the last recorded run -->", "<!-- end of the figures -->"
_STORES = {"redis": "Redis", "sqlite": "SQLite", "mysql": "MariaDB"}
_WIDE = 2000  # characters: in a file, no line is wrapped
_READABLE = 140  # characters: a narrower terminal would break the words of the headings


def show(run: Run) -> None:
    """The tables, as wide as the terminal."""
    console = Console()
    console.width = max(console.width, _READABLE)
    for store, title in _STORES.items():
        if rows := run.rows_of(store):
            table = Table("library", title=title)
            for figure in _FIGURES:
                table.add_column(figure, justify="right")
            table.add_column("every job once?")
            for row in rows:
                style = "bold red" if not row.is_clean else "bold" if row.entry.is_ours else None
                table.add_row(row.entry.name, *_cells(row), _verdict(row), style=style)
            console.print(table)
    for line in _ratios(run):
        console.print(line)


def markdown(run: Run) -> str:
    """The whole page: tables, ratios, settings and caveats."""
    title = ["# multiq beside its peers", "[What is measured, and how](../../docs/peers.md).", _PICTURE, "## Figures"]
    words = "\n".join(_words(row, run) for row in run.rows)
    return "\n\n".join([*title, figures(run), "## Versions, settings, caveats", words]) + "\n"


def include(run: Run, page: str) -> str:
    """Replace the figures of a documentation page with the figures of this run.

    Raises ``ValueError`` if the page has no place for figures.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page has no place for figures: write {_BEGIN} and {_END} on lines of their own")
    return f"{before}{begin}\n\n{figures(run)}\n\n{end}{after}"


def figures(run: Run) -> str:
    """The time and machine of the run, the tables, and multiq's figures as multiples of its peers' figures."""
    turns = "one turn" if run.repeats == 1 else f"{run.repeats} turns"
    about = (
        f"{run.when}, {run.machine}. Medians of {turns} of each library, and half of the spread where there are "
        "several; percentiles of the samples of all turns."
    )
    if run.jobs:
        about += f" Every library enqueued and drained {run.jobs:,} jobs a turn."
    parts = [about]
    for store, title in _STORES.items():
        if rows := run.rows_of(store):
            record = run.stores.get(store)
            kept_in = f"{record.version}; {record.durability}." if record else ""
            parts += [f"### {title}", kept_in, _markdown_table(rows), *_long_runs(rows)]
    ratios = [f"- {line}" for line in _ratios(run)]
    if ratios:
        parts += ["### multiq beside the best peer", "\n".join(ratios)]
    return "\n\n".join(part for part in parts if part)


def _markdown_table(rows: list[Row]) -> str:
    table = Table("library", *_FIGURES, "jobs of a killed worker", "every job once?", box=box.MARKDOWN)
    for row in rows:
        name = f"**{row.entry.name}**" if row.entry.is_ours else row.entry.name
        table.add_row(name, *_cells(row), row.description.killed if row.description else "", _verdict(row))
    text = io.StringIO()
    Console(file=text, width=_WIDE, color_system=None).print(table)
    return "\n".join(line.strip() for line in text.getvalue().splitlines() if line.strip())


def _cells(row: Row) -> list[str]:
    if not row.turns:
        return [""] * len(_FIGURES)
    idle = row.figures("idle")
    return [
        _rate(row, "enqueue"),
        _rate(row, "bulk"),
        _rate(row, "drain"),
        f"{row.median('producer_cpu') or 0:.2f}, {row.median('cpu') or 0:.2f}",
        _percentiles(row, "pickup"),
        _percentiles(row, "late"),
        f"{sum(idle) / len(idle):.1f}" if idle else "-",
    ]


def _rate(row: Row, name: str) -> str:
    values = row.figures(name)
    if not values:
        return "-"
    shown = f"{row.median(name):,.0f}"
    return f"{shown} ±{spread(values):.0%}" if len(values) > 1 else shown


def _percentiles(row: Row, name: str) -> str:
    ordered = row.samples(name)
    return f"{_short(percentile(ordered, 0.5))} / {_short(percentile(ordered, 0.99))}" if ordered else "-"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _verdict(row: Row) -> str:
    account = row.account
    wrong = [
        f"{count:,} {what}"
        for count, what in ((account.lost, "lost"), (account.doubled, "run twice"), (account.early, "too early"))
        if count
    ]
    if row.failure:
        return f"🔴 {', '.join([*wrong, row.failure])}"
    return f"🔴 {', '.join(wrong)} (of {account.jobs:,})" if wrong else f"yes, all {account.jobs:,}"


def _ratios(run: Run) -> Iterator[str]:
    """multiq's figures as multiples of the best peer's figures."""
    for store, title in _STORES.items():
        rows = run.rows_of(store)
        ours = next((row for row in rows if row.entry.is_ours and row.turns), None)
        others = [row for row in rows if not row.entry.is_ours and row.turns]
        if ours is None or not others:
            continue
        parts = [
            text
            for name, what in (("drain", "drain"), ("bulk", "bulk enqueue"), ("enqueue", "enqueue one by one"))
            if (text := _multiple(ours, others, name, what))
        ]
        best = min(others, key=lambda row: percentile(row.samples("pickup"), 0.5))
        mine, theirs = (percentile(row.samples("pickup"), 0.5) for row in (ours, best))
        parts.append(f"pickup p50 {_short(mine)} ms, {best.entry.name} {_short(theirs)} ms")
        yield f"{title}: {'; '.join(parts)}"


def _multiple(ours: Row, others: list[Row], name: str, what: str) -> str | None:
    able = [row for row in others if row.figures(name)]
    if not able:
        return None
    best = max(able, key=lambda row: row.median(name) or 0)
    return f"{what} {(ours.median(name) or 0) / (best.median(name) or 1):.1f} times {best.entry.name}"


def _long_runs(rows: list[Row]) -> Iterator[str]:
    """The second run with more jobs, for the libraries that finish the first run too quickly."""
    for row in rows:
        if row.figures("long_drain"):
            rates = f"in bulk {_rate(row, 'long_bulk')} /s, drain {_rate(row, 'long_drain')} /s"
            yield f"{row.entry.name}, a long run of {row.entry.long:,} jobs: {rates}."


def _words(row: Row, run: Run) -> str:
    about = row.description
    title = f"**{row.entry.name} on {_STORES[row.entry.store]}**"
    if about is None:
        return f"- {title}: {row.failure}"
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    bulk = f"{about.bulk:,} jobs a bulk call" if about.bulk else ""
    sentences = [versions, about.settings, bulk, *about.caveats]
    rest = "in bulk" if about.bulk else "the same way (not measured)"
    counts = f" A turn: {row.entry.one:,} jobs one by one, the rest of {run.jobs:,} {rest}." if run.jobs else ""
    return f"- {title}: {'; '.join(filter(None, sentences))}.{counts}"
