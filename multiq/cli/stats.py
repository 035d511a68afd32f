"""``multiq stats`` counts the jobs of the queues, by state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.formatting import count, duration
from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .options import common_options
from .output import Column, note, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table
    from rich.text import Text

    from multiq.backend import QueueStats


COUNTS = ("ready", "delayed", "reserved", "buried")
_HELD = "held"


@click.command(short_help="Count the jobs of the queues, by state.")
@click.argument("queues", nargs=-1, type=QueueName(), metavar="[QUEUE...]")
@common_options
def stats(queues: tuple[str, ...], as_json: bool) -> None:
    """Count the jobs of each queue: ready, delayed, reserved and buried.

    A delayed job past its due time counts as ready. The column HELD counts jobs that wait for other jobs of their flow.
    The column HELD is shown only if there are held jobs. A question mark stands for a number that the backend cannot
    know.
    """
    from multiq.control.flags import visible_queues
    from multiq.settings.url import redact

    from .apps import open_app

    with open_app() as app:
        place = redact(app.url)
        found = [app.backend.stats(name) for name in queues or visible_queues(app.backend)]
    if as_json:
        print_json({"connection": place, "queues": found})
    elif found:
        show(_stats_table(found))
        note(f"on {safe(place)}")
    else:
        click.echo(f"no queue on {safe(place)} holds a job")


def _stats_table(found: Sequence[QueueStats]) -> Table:
    with_pause = any(stats.paused_for is not None for stats in found)
    with_held = any(stats.held != 0 for stats in found)
    names = [*COUNTS, *([_HELD] if with_held else [])]
    columns = [Column("QUEUE", gives_way=True), *(Column(name.upper(), right=True) for name in names)]
    columns += [Column("PAUSED FOR", right=True)] if with_pause else []
    rows = [
        [
            safe(stats.queue),
            *_counts(stats),
            *([count(stats.held)] if with_held else []),
            *([_pause(stats)] if with_pause else []),
        ]
        for stats in found
    ]
    totals = ["total", *(count(_total(found, name)) for name in names)]
    return table(columns, rows, footer=totals if len(found) > 1 else ())


def _counts(stats: QueueStats) -> list[str | Text]:
    from rich.text import Text

    buried = Text(count(stats.buried), style="red" if stats.buried else "")
    return [count(stats.ready), count(stats.delayed), count(stats.reserved), buried]


def _pause(stats: QueueStats) -> str:
    return "" if stats.paused_for is None else duration(stats.paused_for)


def _total(found: Sequence[QueueStats], name: str) -> int | None:
    numbers = [getattr(stats, name) for stats in found]
    return None if None in numbers else sum(numbers)
