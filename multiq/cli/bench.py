"""``multiq bench``: runs the same work on several backends and prints the figures side by side."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from multiq.formatting import many

from .exits import BROKEN, FAILED, OK, UNSURE
from .options import traceback_option
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.bench.adapter import Profile
    from multiq.bench.compare import Comparison
    from multiq.bench.report import Report
    from multiq.bench.runner import OnProgress, Options
    from multiq.bench.workloads import Workload

_REPEATS_QUICK, _REPEATS = 2, 5
_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder in memory, so that writing run logs does not load the disk


@click.command(short_help="Measure the speed of backends, and check every job.")
@click.argument("given", nargs=-1, metavar="NAME|URL...")
@click.option(
    "--profile",
    type=click.Choice(["durable", "fast"]),
    default="durable",
    show_default=True,
    help="Durability of the servers that the bench starts. durable: acknowledged jobs survive a power loss; fast: not.",
)
@click.option("--quick", "is_quick", is_flag=True, help="Run fewer jobs: under a minute for four backends.")
@click.option("--repeats", type=click.IntRange(1, 100), metavar="N", help="Repeats of each workload (5; quick: 2).")
@click.option("-w", "--workload", "names", multiple=True, metavar="NAME", help="Only these workloads: a,b or -w again.")
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON; - is standard output.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report as HTML.")
@click.option(
    "--compare",
    "old_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="OLD.json",
    help="Compare with an earlier report; exits with 1 if a figure is worse, with 7 if this is uncertain.",
)
@click.option("--threshold", type=click.FloatRange(0, 10), help="How much slower still counts as equal (0.1: 10 %).")
@click.option("--anyway", is_flag=True, help="Compare even if options or machines differ.")
@click.option("--list", "only_list", is_flag=True, help="Show the workloads, and end.")
@traceback_option
def bench(  # noqa: PLR0917 - click passes all parameters by name
    given: tuple[str, ...],
    profile: Profile,
    is_quick: bool,
    repeats: int | None,
    names: tuple[str, ...],
    json_file: str | None,
    html_file: Path | None,
    old_file: Path | None,
    threshold: float | None,
    anyway: bool,
    only_list: bool,
) -> int:
    """Run the same work on several backends in turns, check the outcome of every job, and print the figures.

    \b
      multiq bench redis beanstalk mysql sqlite --quick
      multiq bench redis://localhost sqlite:///jobs.db --html report.html

    For a NAME, the bench starts a server of its own from the installed program, and ends this server afterwards. For a
    URL, the bench uses your server. The bench works in queues of its own, and removes these queues afterwards. Exits
    with 6 if a job was lost, doubled, early, out of order or left over. The command needs an extra: pip install
    'multiq[bench]'.
    """
    from multiq.bench import need_extra

    need_extra()
    from multiq.bench import compare, report, runner

    options = runner.Options(
        profile=profile,
        is_quick=is_quick,
        repeats=repeats or (_REPEATS_QUICK if is_quick else _REPEATS),
        workloads=_chosen(names),
    )
    if only_list:
        _list(options)
        return OK
    if not given:
        raise click.UsageError("name what to run: multiq bench redis sqlite, or a URL")
    old = None if old_file is None else report.read(old_file)
    if old is not None:
        for word, count in (("earlier report", old.repeats), ("new run", options.repeats)):
            if count < compare.ENOUGH:
                note(f"warning: the {word} has {compare.too_few(count)}")
    done = _run(given, options)
    comparison = None
    try:
        if old is not None:
            margin = compare.THRESHOLD if threshold is None else threshold
            comparison = compare.compare(old, done, threshold=margin, anyway=anyway)
    finally:  # prints the figures even if the comparison fails
        _write(done, comparison, json_file, html_file)
    if done.violations:
        return BROKEN
    if comparison is None:
        return OK
    return FAILED if comparison.regressed else UNSURE if comparison.is_unsure else OK


def _chosen(names: tuple[str, ...]) -> Sequence[Workload]:
    from multiq.bench.workloads import WORKLOADS

    words = [word.strip() for text in names for word in text.split(",") if word.strip()]
    known = [workload.name for workload in WORKLOADS]
    for word in words:
        if word not in known:
            raise click.UsageError(f"there is no workload {word!r}; there are: {', '.join(known)}")
    return [workload for workload in WORKLOADS if not words or workload.name in words]


def _list(options: Options) -> None:
    columns = (Column("workload"), Column("variants", folds=True), Column("", folds=True))
    rows = [
        (
            workload.name,
            ", ".join(v.name for v in workload.variants(is_quick=options.is_quick) if v.name),
            workload.about,
        )
        for workload in options.workloads
    ]
    show(table(columns, rows))


# --- while it runs ---------------------------------------------------------------------------------------


def _run(given: Sequence[str], options: Options) -> Report:
    """Start the servers, make the folders, and run the bench. The servers and folders are removed on every exit."""
    from multiq.bench import environment, runner, servers, targets

    seconds = runner.estimate(options, len(given))
    note(f"{many(len(given), 'target')}, {many(options.repeats, 'repeat')}: this takes about {_minutes(seconds)}")
    with ExitStack() as stack:
        folder = stack.enter_context(servers.temporary_folder())
        run_logs = stack.enter_context(servers.temporary_folder(_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        on_progress = stack.enter_context(_progress(seconds))
        on_progress("starting servers", "", 0)
        opened = stack.enter_context(targets.open_targets(given, options.profile, folder))
        setting = runner.Setting(opened, run_logs, environment.Meter(), environment.describe(folder))
        return runner.run(setting, options, on_progress)


@contextmanager
def _progress(seconds: float) -> Iterator[OnProgress]:
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    out = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    # The bar is drawn only a few times a second. Drawing takes CPU time from the processes that are measured.
    with Progress(*columns, console=out, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=seconds)

        def update(what: str, target: str, done: float) -> None:
            bar.update(task, completed=done, description=f"{what}: {target}" if target else what)

        yield update


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


# --- afterwards ------------------------------------------------------------------------------------------


def _write(done: Report, comparison: Comparison | None, json_file: str | None, html_file: Path | None) -> None:
    """Write the report in each requested form. The tables are also printed, except if the JSON is written to standard
    output."""
    from multiq.bench import report
    from multiq.bench import table as tables

    if html_file is not None:
        from multiq.bench import html

        html_file.write_text(html.page(done, comparison), encoding="utf-8")
    if json_file is not None and json_file != "-":
        report.write(done, Path(json_file))
    if json_file == "-":
        print_json(done)
        return
    show(tables.render(done))
    if comparison is not None:
        show(tables.render_comparison(comparison))
