"""The output of the examples: sentences while they run, progress bars on a terminal, and a table at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self


class Counts(NamedTuple):
    """What happened to a story's jobs."""

    queued: int
    delayed: int
    retried: int
    cancelled: int
    worked_off: int
    buried: int


class Check(NamedTuple):
    """A claim about what the example has observed."""

    claim: str
    holds: bool


class Outcome(NamedTuple):
    """The counts that a story expected of its jobs, the counts that it saw, and its further checks."""

    title: str
    expected: Counts
    seen: Counts
    checks: list[Check]

    @property
    def is_as_expected(self) -> bool:
        return self.expected == self.seen and all(check.holds for check in self.checks)


class Narrator:
    """Prints sentences. On a terminal it shows progress bars below them; elsewhere it prints plain lines only."""

    def __init__(self, titles: Sequence[str]) -> None:
        self._console = Console(highlight=False)
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]\u2713"),
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("jobs came to an end"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {title: self._bars.add_task(title, total=None) for title in titles}
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say(self, title: str, sentence: str) -> None:
        """One line, with the time since the beginning."""
        seconds = time.monotonic() - self._started_at
        self._console.print(
            f"[dim]{seconds:5.1f} s[/]  [cyan]{title:<14}[/] {escape(sentence)}",
            soft_wrap=not self._console.is_terminal,
        )

    def progress(self, title: str, ended: int, total: int) -> None:
        self._bars.update(self._tasks[title], completed=ended, total=total)

    def close(self) -> None:
        self._bars.stop()


def report(outcomes: Sequence[Outcome], seconds: float, console: Console | None = None) -> int:
    """Print the table, the checks and the verdict. Returns the exit code: 0 if all is as expected, else 1."""
    out = Console(highlight=False) if console is None else console
    out.print()
    out.print(_table(outcomes))
    for outcome in outcomes:
        for check in outcome.checks:
            mark = "[green]\u2713[/]" if check.holds else "[bold red]\u2717[/]"
            out.print(f" {mark} [cyan]{outcome.title:<14}[/] {escape(check.claim)}", soft_wrap=True)
    out.print()
    wrong = [outcome.title for outcome in outcomes if not outcome.is_as_expected]
    if wrong:
        out.print(f"[bold red]not as it should be: {', '.join(wrong)}[/]", soft_wrap=True)
        return 1
    out.print(f"[bold green]all is as it should be[/], in {seconds:.1f} s", soft_wrap=True)
    return 0


def report_failure(why: str, log: str) -> int:
    """Print why an example failed, with the end of the worker's log. Returns the exit code, 1."""
    out = Console(highlight=False)
    out.print("\n".join(log.splitlines()[-20:]), markup=False, soft_wrap=True)
    out.print(f"[bold red]{escape(why)}[/]", soft_wrap=True)
    return 1


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="what happened to the jobs (expected where it differs)")
    table.add_column("example")
    for name in Counts._fields:
        table.add_column(name.replace("_", " "), justify="right")
    for outcome in outcomes:
        cells = [_cell(seen, wanted) for seen, wanted in zip(outcome.seen, outcome.expected, strict=True)]
        table.add_row(outcome.title, *cells)
    return table


def _cell(seen: int, wanted: int) -> str:
    return f"[green]{seen}[/]" if seen == wanted else f"[bold red]{seen} (expected {wanted})[/]"
