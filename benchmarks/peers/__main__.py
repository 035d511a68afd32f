"""The same work on multiq and on its peers, in one run: ``make bench-peers``, or ``make bench-peers ARGS=--quick``."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import pytest
from peers import results
from peers.catalogue import ENTRIES, JOBS, Entry
from peers.chart import picture
from peers.client import ProgramError
from peers.environments import NotInstalledError, interpreter
from peers.measure import NothingRanError, Size, take_turn
from peers.report import include, markdown, show
from peers.stores import STORES, Store
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_RESULTS = Path(__file__).parents[1] / "results"
_PAGE = Path(__file__).parents[2] / "docs" / "peers.md"
_QUICK = Size(share=0.1, pickup_seconds=1.5, idle_seconds=2.0)
_SHOWN = 300  # the largest number of characters of a reason


@click.command(help=__doc__)
@click.option("--repeats", default=3, show_default=True, help="Turns of each library, taken by all in turn.")
@click.option("--quick", is_flag=True, help="One small turn each, which shows that all of it works. Writes no files.")
@click.option("--only", multiple=True, metavar="NAME", help="Like huey or celery-mysql; may be repeated. No files.")
@click.option("--into", type=click.Path(path_type=Path), help="Write the files there; by default benchmarks/results.")
@click.option("--render", is_flag=True, help="Measure nothing: make table and chart from the file of the last run.")
def main(repeats: int, quick: bool, only: Sequence[str], into: Path | None, render: bool) -> None:
    console = Console(stderr=True)
    folder = into or (None if quick or only else _RESULTS)
    if render:
        run = msgspec.json.decode(((folder or _RESULTS) / "peers.json").read_bytes(), type=results.Run)
    else:
        chosen = [entry for entry in ENTRIES if not only or set(only) & {entry.key, entry.library, entry.store}]
        if not chosen:
            raise click.UsageError(f"nothing is called {', '.join(only)}; names: {', '.join(e.key for e in ENTRIES)}")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a SIGTERM also ends the servers and workers
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes start with SIGINT ignored
        run = _run(chosen, 1 if quick else repeats, _QUICK if quick else Size(), console)
    show(run)
    if folder is not None:
        _write(run, folder)
    # A lost or doubled job of another library is only a result. If multiq loses or doubles a job, that is a bug, and
    # the exit code is 1.
    sys.exit(0 if all(row.is_clean for row in run.rows if row.entry.is_ours) else 1)


def _run(chosen: Sequence[Entry], repeats: int, size: Size, console: Console) -> results.Run:
    rows = {entry.key: results.Row(entry.key) for entry in chosen}
    machine = results.machine()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as opened, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen) * (repeats + 1))
        interpreters = {}
        for entry in chosen:
            progress.update(task, description=f"installing {entry.library}")
            with _failing_into(rows[entry.key], console):
                interpreters[entry.key] = interpreter(entry.library)
            progress.advance(task)
        stores: dict[str, Store] = {}
        for repeat in range(1, repeats + 1):
            for entry in chosen:
                row = rows[entry.key]
                progress.update(task, description=f"turn {repeat}: {entry.key}")
                with _failing_into(row, console):
                    if entry.store not in stores:
                        stores[entry.store] = opened.enter_context(STORES[entry.store]())
                    if row.failure is None:
                        row.turns.append(take_turn(entry, interpreters[entry.key], stores[entry.store], size))
                progress.advance(task)
        records = {name: results.StoreRecord(store.version(), store.durability) for name, store in stores.items()}
    jobs = round(JOBS * size.share)
    return results.Run(results.today(), machine, repeats, records, list(rows.values()), jobs)


@contextlib.contextmanager
def _failing_into(row: results.Row, console: Console) -> Iterator[None]:
    """If a library or a server is missing or crashes, its row shows the reason. The other rows are still measured."""
    try:
        yield
    except (NotInstalledError, ProgramError, NothingRanError, AssertionError, OSError) as error:
        reason = str(error)
    except (pytest.skip.Exception, pytest.fail.Exception) as error:  # raised if a server is not installed
        reason = str(error.msg)
    else:
        return
    row.failure = row.failure or " ".join(reason.split())[:_SHOWN]
    console.print(f"{row.key}: {row.failure}", style="red", markup=False)


def _write(run: results.Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")
    (folder / "peers.md").write_text(markdown(run))
    (folder / "peers.svg").write_text(picture(run))
    if folder == _RESULTS:
        _PAGE.write_text(include(run, _PAGE.read_text()))


if __name__ == "__main__":
    main()
