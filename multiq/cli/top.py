"""``multiq top``: shows the queues and the workers, and refreshes the display."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multiq.control.flags import missing_for_control
from multiq.errors import BackendUnavailable, EnqueueUncertain
from multiq.formatting import UNKNOWN, count, duration, many
from multiq.terminal_escapes import safe

from .durations import Duration
from .options import common_options
from .output import Column, console, print_json, show, table, width
from .top_workers import Workers, headline, jobs_table, workers_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from multiq.app import App
    from multiq.backend import QueueStats

    from .top_workers import WorkerNow

_COUNTS = ("ready", "delayed", "reserved", "buried")
_SHORT = ("ready", "del", "res", "bur")
_GAP = 2  # spaces between two columns of a table
# the least columns for a queue's name; with fewer columns, the changes and the long titles are left out
_NAME_ROOM = 20
_FRAME = 6  # lines around the rows of the queues, such as the title, the table's header and the footer
_WORKERS_FRAME = 6  # lines around the workers and their jobs: a blank line, a header and a rule for each of two tables
_LEAST = 0.1  # the least number of seconds between refreshes


class Look(NamedTuple):
    """The counts of the queues, and the answers of the workers, at one moment."""

    at: float
    """The time by ``time.monotonic()``."""
    queues: Mapping[str, QueueStats]
    workers: Sequence[WorkerNow] | None = None
    """The workers that have answered. None means that the workers were not asked."""


@click.command(short_help="Watch the queues and the workers.")
@click.option(
    "-i",
    "--interval",
    type=Duration(),
    default="1",
    metavar="TIME",
    help="Time between refreshes; 1 (second) unless given.",
)
@click.option("--once", is_flag=True, help="Print the counts once and end.")
@click.option(
    "-w/-W",
    "--workers/--no-workers",
    "with_workers",
    default=None,
    help="Show the workers, too. Default: only on a terminal. All workers have answered after 7 s.",
)
@common_options
def top(interval: float, once: bool, with_workers: bool | None, as_json: bool) -> None:
    """Watch the queues and the workers. The display shows each queue's counts, the changes since the last refresh, and
    the workers' jobs.

    If ten jobs were added and ten jobs were done between two refreshes, the change is zero. Press q or Ctrl-C to end
    the display. Without a terminal, the counts are printed once. With --json, a line is printed for each refresh.
    """
    from .apps import open_app

    if interval < _LEAST:
        raise click.BadParameter(f"must be {_LEAST:g} s or more, got {interval:g}", param_hint="--interval")
    with open_app() as app:
        is_live = not (as_json or once) and sys.stdout.isatty()
        if with_workers is None:
            can_ask = app.backend.capabilities.shared is True and missing_for_control(app.backend) is None
            with_workers = is_live and can_ask
        with Workers(app) if with_workers else nullcontext() as workers:
            if is_live:
                _watch(app, workers, interval)
                return
            if workers is not None:
                workers.wait()
            if as_json:
                _stream(app, workers, interval, once=once)
            else:
                show(frame(look(app, workers), None, place=_place(app), rows=None, width=width()))


def look(app: App, workers: Workers | None = None) -> Look:
    """Read the counts of all queues, and the last answer of each worker."""
    from multiq.control.flags import visible_queues

    names = visible_queues(app.backend)
    stats = {name: app.backend.stats(name) for name in names}
    return Look(time.monotonic(), stats, None if workers is None else workers.now())


def frame(
    now: Look, before: Look | None, *, place: str, rows: int | None, width: int | None = None, trouble: str = ""
) -> RenderableType:
    """Return one screen. The queues come first, the busiest queue at the top, with the change of their counts. The
    workers follow.

    *rows*: the number of rows on the screen. None: no limit. *width*: the screen's width in columns. If the queues'
    names have too little room, the changes are left out. If the queues' names still have too little room without the
    changes, the titles are shortened.
    """
    from rich.console import Group
    from rich.text import Text

    ordered = sorted(now.queues.values(), key=_busy_first)
    shown = ordered if rows is None else ordered[: _room_for_queues(now, rows)]
    title = Text.assemble(("multiq top", "bold"), f"  {place}  {time.strftime('%H:%M:%S')}", no_wrap=True)
    title.overflow = "ellipsis"
    parts: list[RenderableType] = [title]
    if ordered:
        parts.append(_fitting_table(before, shown, width))
    else:
        parts.append(Text("no queue holds a job", style="dim"))
    if len(shown) < len(ordered):
        parts.append(Text(f"and {many(len(ordered) - len(shown), 'more queue')}", style="dim"))
    if now.workers is not None:
        parts += _workers_part(now.workers, None if rows is None else rows - len(shown) - _WORKERS_FRAME)
    if trouble:
        parts.append(Text(trouble, style="red"))
    return Group(*parts)


# --- drawing ---------------------------------------------------------------------------------------------


def _busy_first(stats: QueueStats) -> tuple[int, int, int, str]:
    def busy(*numbers: int | None) -> int:
        return -sum(number or 0 for number in numbers)

    return busy(stats.ready, stats.reserved), busy(stats.delayed), busy(stats.buried), stats.queue


def _room_for_queues(now: Look, rows: int) -> int:
    """Return the number of rows for the queues: half of the screen, or more if the workers need less than half."""
    if now.workers is None:
        return max(1, rows)
    others = _WORKERS_FRAME + len(now.workers) + sum(len(worker.jobs) for worker in now.workers) if now.workers else 2
    return max(1, rows // 2, rows - others)


def _workers_part(workers: Sequence[WorkerNow], room: int | None) -> list[RenderableType]:
    """Return the workers that fit on the screen, and their jobs. The job that has run longest is first."""
    from rich.text import Text

    if not workers:
        return [Text(), Text("no worker has answered: it takes up to 7 s", style="dim")]
    shown = workers if room is None else workers[: max(1, room // 2)]
    parts: list[RenderableType] = [Text(), Text(headline(workers), style="bold"), workers_table(shown)]
    if any(worker.jobs for worker in workers):
        parts += [Text(), jobs_table(workers, None if room is None else max(1, room - len(shown)))]
    return parts


def _fitting_table(before: Look | None, shown: list[QueueStats], width: int | None) -> Table:
    """Return the most detailed table that still has room for ``_NAME_ROOM`` characters of each queue's name."""
    name = min(_NAME_ROOM, max(len(safe(stats.queue)) for stats in shown))
    is_paused = any(stats.paused_for is not None for stats in shown)
    for old, titles in ((before, _COUNTS), (None, _COUNTS), (None, _SHORT)):
        sizes = [
            max(len(title), *(len(count(getattr(stats, field))) for stats in shown))
            for title, field in zip(titles, _COUNTS, strict=True)
        ]
        sizes += [*([len("+1,234")] * len(titles) if old is not None else []), *([len("59m 59s")] if is_paused else [])]
        if width is None or name + sum(sizes) + _GAP * len(sizes) <= width:
            break
    return _table(old, shown, titles)


def _table(before: Look | None, shown: list[QueueStats], titles: Sequence[str]) -> Table:
    with_change, with_pause = before is not None, any(stats.paused_for is not None for stats in shown)
    columns = [Column("QUEUE", gives_way=True, fills=with_change)]
    for title in titles:
        columns.append(Column(title.upper(), right=True))
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
            # A queue that is not in the previous counts had no jobs at the previous refresh.
            yield _change(number, getattr(old, name) if old is not None else 0)


def _change(number: int | None, before: int | None) -> str:
    if number is None or before is None:
        return UNKNOWN
    return "" if number == before else f"{number - before:+,}"


def _place(app: App) -> str:
    from multiq.settings.url import redact

    return safe(redact(app.url))


# --- watching --------------------------------------------------------------------------------------------


def _watch(app: App, workers: Workers | None, interval: float) -> None:
    """Draw the display until q or Ctrl-C is pressed. If the backend does not answer, show the error and try again at
    the next refresh."""
    from rich.live import Live

    out = console()
    place = _place(app)
    now, before, trouble = look(app, workers), None, ""
    with _keys() as wait_for_key, Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            rows = out.height - _FRAME
            live.update(
                _Screen(frame(now, before, place=place, rows=rows, width=out.width, trouble=trouble), interval),
                refresh=True,
            )
            keys = wait_for_key(interval)
            if keys == "\x1b" or not {"q", "Q", "\x03"}.isdisjoint(keys):
                return
            try:
                now, before, trouble = look(app, workers), now, ""
            # EnqueueUncertain: a viewer asks the workers by enqueueing a job
            except (BackendUnavailable, EnqueueUncertain) as exc:
                trouble = safe(f"no answer, these are the last counts: {exc}")


def _stream(app: App, workers: Workers | None, interval: float, *, once: bool) -> None:
    while True:
        now = look(app, workers)
        document = {"at": time.time(), "connection": _place(app), "queues": list(now.queues.values())}
        print_json(document if now.workers is None else {**document, "workers": now.workers}, indent=0)
        sys.stdout.flush()
        if once:
            return
        time.sleep(interval)


class _Screen:
    """A frame with a footer in the terminal's last line."""

    def __init__(self, content: RenderableType, interval: float) -> None:
        self._content = content
        self._foot = f"q ends; every {duration(interval)}; +/- is the change since the last refresh"

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
    """Read keys during the ``with`` block, without waiting for Enter. The ``with`` block gets a function that waits
    some seconds, and returns the keys that were pressed. A key such as an arrow sends several characters."""
    if sys.stdin is None or not sys.stdin.isatty():
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
    # not sys.stdin.read, which keeps further keys in a buffer that select does not see
    try:
        keys = os.read(sys.stdin.fileno(), 1024) if ready else b""
    except OSError:
        keys = b""
    return keys.decode(errors="replace") or ("q" if ready else "")  # readable without a key: the terminal is gone


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
