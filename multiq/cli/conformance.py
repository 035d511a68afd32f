"""``multiq conformance``: tests whether a backend does what it promises."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from multiq.terminal_escapes import safe

from .exits import BROKEN, OK
from .options import json_option, traceback_option
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table
    from rich.text import Text

    from multiq.conformance import Report, Row

_STYLES = {"kept": "green", "kept in part": "yellow", "refused": "yellow", "broken": "bold red", "not tried": "dim"}
_FAILURE_LINES = 6  # the largest number of lines that are shown of each failure


@click.command(short_help="Test a backend against the contract.")
@click.argument("target", metavar="URL|NAME")
@click.option(
    "-k",
    "--select",
    multiple=True,
    metavar="WORD",
    help="Run only a topic, a paragraph (4.3), or tests by part of their name.",
)
@click.option("--walks", type=int, metavar="N", help="Number of random walks; 0 for none.")
@click.option("--harness", metavar="MODULE:CLASS", help="Your subclass of UrlHarness, with hooks for further tests.")
@click.option("--markdown", is_flag=True, help="Print the report as Markdown.")
@json_option
@traceback_option
def conformance(  # noqa: PLR0917 - click passes all parameters by name
    target: str, select: tuple[str, ...], walks: int | None, harness: str | None, markdown: bool, as_json: bool
) -> int:
    """Run the conformance suite against a backend, and print which promises the backend keeps, refuses or breaks.

    \b
      multiq conformance redis://localhost
      multiq conformance sqlite:///jobs.db -k lease -k 7.1

    The suite works in real time. The suite uses only queues of its own, and empties these queues afterwards. Exits with
    6 if a promise is broken, or if no test tried a capability that the backend claims. Some tests need a method of a
    harness, for example a test in which the server hangs. Without a harness, a test that needs a harness is printed as
    not tried. A test that was not tried is not a failure. The command needs an extra: pip install
    'multiq[conformance]'.
    """
    from multiq.conformance import run
    from multiq.conformance.harness import load_harness

    from .framework_app import current_settings

    if markdown and as_json:
        raise click.UsageError("--markdown or --json: choose one")
    url = current_settings().resolve(target)
    made = None if harness is None else load_harness(harness)
    with _progress() as progress:
        report = run(url, progress=progress, walks=walks, select=_words(select), harness=made)
    if as_json:
        _print_json(report)
    elif markdown:
        click.echo(safe(report.markdown(), keep="\n"), nl=False)
    else:
        _show(report)
    return OK if report.ok else BROKEN


def _words(select: tuple[str, ...]) -> list[str]:
    return [word.strip() for text in select for word in text.split(",") if word.strip()]


# --- while it runs ---------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[[Row, int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    out = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[broken]}{task.description}", markup=False))
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("", total=None, broken="")
        broken = 0

        def step(row: Row, done: int, total: int) -> None:
            nonlocal broken
            broken += row.outcome == "failed"
            failures = f"{broken} broken  " if broken else ""
            bar.update(
                task, completed=done, total=total, description=f"{row.topic}: {_sentence(row)}"[:100], broken=failures
            )

        yield step


# --- afterwards ------------------------------------------------------------------------------------------


def _print_json(report: Report) -> None:
    import msgspec

    print_json(msgspec.json.decode(report.to_json()))


def _show(report: Report) -> None:
    show(_paragraphs_table(report))
    gaps = list(dict.fromkeys((f"{row.power}", f"{row.gap}: {row.reason}") for row in report.refused))
    if gaps:
        show(
            "", table([Column("REFUSED"), Column("WHY", folds=True)], [[safe(power), safe(why)] for power, why in gaps])
        )
    if report.not_tried:
        show("", table([Column("NOT TRIED", folds=True)], [[safe(why)] for why in report.why_not_tried()]))
    for row in report.failed:
        _show_failure(row)
    click.echo()
    click.secho(safe(report.summary()), fg="green" if report.ok else "red", bold=True)
    if not report.is_whole:
        note("only the whole suite checks that every claimed capability was tried")


def _paragraphs_table(report: Report) -> Table:
    from rich.text import Text

    rows: list[list[str | Text]] = [
        [
            paragraph.number,
            safe(paragraph.title),
            Text(paragraph.verdict, style=_STYLES[paragraph.verdict]),
            f"{paragraph.kept}/{paragraph.kept + paragraph.failed}",
        ]
        for paragraph in report.paragraphs()
        if report.is_whole or paragraph.verdict != "not tried"
    ]
    columns = [
        Column("", right=True),
        Column("PROMISE", gives_way=True),
        Column("VERDICT"),
        Column("TESTS", right=True),
    ]
    return table(columns, rows)


def _show_failure(row: Row) -> None:
    place = f" ({', '.join(row.paragraphs)})" if row.paragraphs else ""
    click.echo()
    click.secho(safe(f"broken{place} after {row.seconds:.1f} s: {row.topic}: {_sentence(row)}"), fg="red")
    lines = (row.reason or "").splitlines()
    for line in lines[:_FAILURE_LINES]:
        click.echo(f"  {safe(line)[:400]}")


def _sentence(row: Any) -> str:
    return str(row.name).removeprefix("test_").replace("_", " ")
