"""``multiq top``: the queues, live."""

from __future__ import annotations

import select
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multiq.errors import BackendUnavailable
from multiq.text import UNKNOWN, count, duration, many, safe

from .options import Duration, common_options
from .output import Column, console, print_json, show, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType
    from rich.table import Table

    from multiq.app import App
    from multiq.backend import QueueStats

_COUNTS = ("ready", "delayed", "reserved", "buried")
_FRAME = 6  # lines around the rows: title, header with its rule, total, "and N more", foot
_LEAST = 0.1  # seconds between looks


class Look(NamedTuple):
    """The queues at one moment."""

    at: float
    """``time.monotonic()``."""
    queues: Mapping[str, QueueStats]


@click.command(short_help="Watch the queues.")
@click.option(
    "-i", "--interval", type=Duration(), default="1", metavar="TIME", help="Between looks; 1 (second) unless given."
)
@click.option("--once", is_flag=True, help="Print one look and end.")
@common_options
def top(interval: float, once: bool, as_json: bool) -> None:
    """Watch the queues: counts, and by how much they changed since the last look.

    What changed is a difference of two counts: ten jobs added and ten done in between show as no change. q or
    Ctrl-C ends. Without a terminal one look is printed; with --json, one line for each look.
    """
    from .apps import open_app

    if interval < _LEAST:
        raise click.BadParameter(f"look no more often than every {_LEAST:g} s", param_hint="--interval")
    with open_app() as app:
        if as_json:
            _stream(app, interval, once=once)
        elif once or not sys.stdout.isatty():
            show(frame(look(app), None, place=_place(app), rows=None))
        else:
            _watch(app, interval)


def look(app: App) -> Look:
    """The counts of all queues, now."""
    from .apps import visible_queues

    names = visible_queues(app)
    return Look(time.monotonic(), {name: app.backend.stats(name) for name in names})


def frame(now: Look, before: Look | None, *, place: str, rows: int | None, trouble: str = "") -> RenderableType:
    """One screen: at most *rows* queues (None: all), the busiest first, with their change since *before*."""
    from rich.console import Group
    from rich.text import Text

    ordered = sorted(now.queues.values(), key=_busy_first)
    shown = ordered if rows is None else ordered[: max(1, rows)]
    title = Text.assemble(("multiq top", "bold"), f"  {place}  {time.strftime('%H:%M:%S')}", no_wrap=True)
    title.overflow = "ellipsis"
    parts: list[RenderableType] = [title]
    if ordered:
        parts.append(_table(before, shown))
    else:
        parts.append(Text("no queue holds a job", style="dim"))
    if len(shown) < len(ordered):
        parts.append(Text(f"and {many(len(ordered) - len(shown), 'more queue')}", style="dim"))
    if trouble:
        parts.append(Text(trouble, style="red"))
    return Group(*parts)


# --- drawing ---------------------------------------------------------------------------------------------


def _busy_first(stats: QueueStats) -> tuple[int, int, int, str]:
    def busy(*numbers: int | None) -> int:
        return -sum(number or 0 for number in numbers)

    return busy(stats.ready, stats.reserved), busy(stats.delayed), busy(stats.buried), stats.queue


def _table(before: Look | None, shown: list[QueueStats]) -> Table:
    with_change, with_pause = before is not None, any(stats.paused_for is not None for stats in shown)
    columns = [Column("QUEUE", gives_way=True, fills=with_change)]
    for name in _COUNTS:
        columns.append(Column(name.upper(), right=True))
        columns += [Column("+/-", right=True, style="dim")] if with_change else []
    columns += [Column("PAUSED", right=True)] if with_pause else []
    rows: list[list[str]] = []
    for stats in shown:
        old = before.queues.get(stats.queue) if before is not None else None
        paused = "" if stats.paused_for is None else duration(stats.paused_for)
        cells = [safe(stats.queue), *_cells(stats, old, with_change=with_change)]
        rows.append([*cells, *([paused] if with_pause else [])])
    return table(columns, rows)


def _cells(stats: QueueStats, old: QueueStats | None, *, with_change: bool) -> Iterator[str]:
    for name in _COUNTS:
        number = getattr(stats, name)
        yield count(number)
        if with_change:
            # a queue that was not there before held nothing
            yield _change(number, getattr(old, name) if old is not None else 0)


def _change(number: int | None, before: int | None) -> str:
    if number is None or before is None:
        return UNKNOWN
    return "" if number == before else f"{number - before:+,}"


def _place(app: App) -> str:
    from multiq.url import redact

    return safe(redact(app.url))


# --- watching --------------------------------------------------------------------------------------------


def _watch(app: App, interval: float) -> None:
    """Draw until q or Ctrl-C. A backend that is gone for a while is said so, and asked again."""
    from rich.live import Live

    out = console()
    place = _place(app)
    now, before, trouble = look(app), None, ""
    with _keys() as wait_for_key, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            rows = out.height - _FRAME
            live.update(_Screen(frame(now, before, place=place, rows=rows, trouble=trouble), interval), refresh=True)
            if wait_for_key(interval) in {"q", "Q", "\x03", "\x1b"}:
                return
            try:
                now, before, trouble = look(app), now, ""
            except BackendUnavailable as exc:
                trouble = safe(f"no answer, these are the last counts: {exc}")


def _stream(app: App, interval: float, *, once: bool) -> None:
    """A line of JSON for each look."""
    while True:
        print_json({"at": time.time(), "connection": _place(app), "queues": list(look(app).queues.values())}, indent=0)
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval)


class _Screen:
    """A frame with its foot in the last line."""

    def __init__(self, content: RenderableType, interval: float) -> None:
        self._content = content
        self._foot = f"q ends; every {duration(interval)}; +/- is the change since the last look"

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.segment import Segment
        from rich.text import Text

        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        room = options.max_height - 1
        lines = [*lines[:room], *([[]] * (room - len(lines)))]
        for line in lines:
            yield from line
            yield Segment.line()
        yield Text(self._foot, style="dim", end="", no_wrap=True, overflow="ellipsis")


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits for a key for so many seconds; keys need no Enter meanwhile."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import termios
    import tty

    stdin = sys.stdin.fileno()
    settings = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        yield _key
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, settings)


def _key(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
