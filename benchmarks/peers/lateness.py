"""How late the jobs of schedules begin, in multiq and its peers.

    PYTHONPATH=benchmarks:tests python -m peers.lateness

Each library runs the same 20 schedules, each due at the beginning of every minute. One scheduler and one worker run
with no other work. A job's lateness is the time from the beginning of the minute to the job's beginning. The libraries
take turns, because at the beginning of a minute they would slow down each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, NamedTuple

import click
from peers import marks
from peers.environments import NotInstalledError, interpreter
from peers.protocol import BROKER
from peers.schedules import SCHEDULES
from peers.stores import STORES

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS = [
    ("multiq", "redis"), ("multiq", "sqlite"), ("multiq", "mysql"),
    ("celery", "redis"), ("rq", "redis"), ("huey", "redis"), ("huey", "sqlite"),
]  # fmt: skip
_MINUTE = 60.0
_START = 12.0  # seconds before the first minute that counts, so that the programs can start
_END = 70.0  # seconds after the beginning of the last minute: Huey begins jobs at any second of their minute
_EARLY = 1.0  # seconds: a job that begins in the last second of a minute belongs to the next minute


class Row(NamedTuple):
    library: str
    store: str
    late: list[float]
    """How many milliseconds after the beginning of the minute each job began."""
    lost: int
    doubled: int


@click.command(help=__doc__)
@click.option("--minutes", default=5, show_default=True, help="Minutes in each turn.")
@click.option("--only", multiple=True, metavar="NAME", help="Like huey or multiq-mysql; may be repeated.")
def main(minutes: int, only: tuple[str, ...]) -> None:
    rows = [row for row in _ROWS if not only or set(only) & {row[0], "-".join(row)}]
    click.echo(f"{SCHEDULES} schedules, each due every minute, for {minutes} minutes: {len(rows)} turns", err=True)
    click.echo("| library | store | p50 | p99 | largest | never ran | ran twice |\n|---|---|---|---|---|---|---|")
    for library, store in rows:
        try:
            row = take_turn(library, store, minutes)
        except NotInstalledError as error:
            click.echo(f"| {library} | {store} | {error} |")
            continue
        p50, p99 = (quantiles(row.late, n=100)[at] for at in (49, 98)) if len(row.late) > 1 else (0.0, 0.0)
        cells = [f"{value:,.1f} ms" for value in (p50, p99, max(row.late, default=0.0))]
        click.echo(f"| {library} | {store} | {' | '.join(cells)} | {row.lost} | {row.doubled} |")


def take_turn(library: str, store: str, minutes: int) -> Row:
    python = interpreter(library)
    with (
        tempfile.TemporaryDirectory(prefix="multiq-lateness-") as folder,
        STORES[store]() as opened,
        opened.fresh() as url,
    ):
        first = _next_minute()
        with _programs(python, f"peers.schedules.{library}_schedules", url, Path(folder)):
            time.sleep(max(0.0, first + minutes * _MINUTE - _MINUTE + _END - time.time()))
        seen = marks.read(Path(folder, "marks"))
    offset = time.time() - time.monotonic()
    runs: Counter[tuple[int, int]] = Counter()
    late = []
    for mark in seen:
        since = mark.at / 1e9 + offset - first
        minute = int((since + _EARLY) // _MINUTE)
        if 0 <= minute < minutes:
            runs[mark.number, minute] += 1
            late.append((since - minute * _MINUTE) * 1000)
    lost = SCHEDULES * minutes - len(runs)
    return Row(library, store, late, lost, runs.total() - len(runs))


def _next_minute() -> float:
    """The next beginning of a minute, late enough for all programs to have started."""
    return ((time.time() + _START) // _MINUTE + 1) * _MINUTE


@contextlib.contextmanager
def _programs(python: Path, module: str, url: str, folder: Path) -> Iterator[None]:
    (folder / "marks").mkdir()
    environment = {
        **os.environ,
        BROKER: url,
        marks.FOLDER: str(folder / "marks"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TZ": "UTC",
    }
    listing = f"import json, {module} as module; print(json.dumps(module.PROGRAMS))"
    commands = json.loads(subprocess.check_output([python, "-c", listing], env=environment, cwd=folder))  # noqa: S603
    with contextlib.ExitStack() as opened:
        for number, command in enumerate(commands):
            log = opened.enter_context(Path(folder, f"{number}.log").open("wb"))
            program = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)  # noqa: S603
            opened.callback(_end, program)
        yield


def _end(program: subprocess.Popen[bytes]) -> None:
    program.terminate()
    try:
        program.wait(10)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


if __name__ == "__main__":
    sys.exit(main())
