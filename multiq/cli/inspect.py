"""``multiq stats``, ``jobs`` and ``peek``: show queues and jobs, and change nothing."""

from __future__ import annotations

import base64
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from multiq.backend import STORED_STATES, State
from multiq.errors import Unsupported
from multiq.formatting import UNKNOWN, count, duration, safe, shorten, size, summary

from .options import JobId, QueueName, common_options, queue_option
from .output import Column, lines_of, note, print_json, show, table, width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table
    from rich.text import Text

    from multiq.app import App
    from multiq.backend import QueueStats
    from multiq.job import JobInfo

_PAGE = 1000  # jobs: longer listings are printed by pages of so many
_NARROW = 110  # columns: an id, its numbers, a reason and a job do not fit into less
_BODY_LINES = 24  # of a body that peek shows
_BODY_CHARACTERS = 4000
COUNTS = ("ready", "delayed", "reserved", "buried")
_STATES = [state.value for state in STORED_STATES]


# --- stats -----------------------------------------------------------------------------------------------


@click.command(short_help="Count the jobs of the queues, by state.")
@click.argument("queues", nargs=-1, type=QueueName(), metavar="[QUEUE...]")
@common_options
def stats(queues: tuple[str, ...], as_json: bool) -> None:
    """Count the jobs of each queue: ready, delayed, reserved and buried.

    A job past its due time counts as ready. A question mark stands for what the backend cannot know.
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
    columns = [Column("QUEUE", gives_way=True), *(Column(name.upper(), right=True) for name in COUNTS)]
    columns += [Column("PAUSED FOR", right=True)] if with_pause else []
    rows = [[safe(stats.queue), *_counts(stats), *([_pause(stats)] if with_pause else [])] for stats in found]
    totals = ["total", *(count(_total(found, name)) for name in COUNTS)]
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


# --- jobs ------------------------------------------------------------------------------------------------


@click.command(short_help="List a queue's jobs.")
@click.argument("queue", type=QueueName())
@click.argument("state", type=click.Choice(_STATES), required=False, metavar="[STATE]")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many jobs of each state."
)
@click.option("--after", metavar="CURSOR", help="Go on after the page that ended with this cursor.")
@common_options
def jobs(queue: str, state: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """List the jobs of a queue: all, or those that are ready, delayed, reserved or buried.

    Ready jobs are in the order in which they would be reserved, delayed and reserved ones in the order of their due
    times, buried ones in the order in which they would be kicked.
    """
    from .apps import open_app

    if after is not None and state is None:
        raise click.UsageError("--after continues the list of one state: name the state")
    with open_app() as app:
        if not app.backend.capabilities.inspection:
            raise app.backend.unsupported("inspection")
        states = [state] if state else _STATES
        lists_all = app.backend.capabilities.claim("lists_jobs") is True
        if limit > _PAGE and not as_json and lists_all:
            cursors = _stream(app, queue, states, limit, after)
            _note_more(queue, cursors)
            return
        found, cursors, unlisted = _collect(app, queue, states, limit, after)
        if not lists_all:
            unlisted |= {state: str(app.backend.unsupported("lists_jobs")) for state in cursors}
            cursors = {}
    if as_json:
        document = {"queue": queue, "jobs": [job_document(job) for job in found], "after": cursors}
        print_json(document | ({"unlisted": unlisted} if unlisted else {}))
    elif not found and not unlisted:
        click.echo(f"queue {queue} has no {state + ' ' if state else ''}jobs")
    else:
        room = width()
        if room is not None and room < _NARROW and any(job.reason for job in found):
            show(_jobs_list(found, state, room))
        else:
            show(_jobs_table(found, state))
        _note_more(queue, cursors)
        for name, why in unlisted.items():
            note(f"there are more that are {name}, not shown: {why}")


def _note_more(queue: str, cursors: dict[str, str]) -> None:
    for name, cursor in cursors.items():
        note(f"there are more: multiq jobs {queue} {name} --after={shlex.quote(safe(cursor))}")


def _stream(app: App, queue: str, states: Sequence[str], limit: int, after: str | None) -> dict[str, str]:
    """Print a long listing page by page, so that memory never holds all of it. Returns the cursors of what is left."""
    state = states[0] if len(states) == 1 else None
    columns = _columns(state)
    widths, cursors, is_empty = [len(column.title) for column in columns], dict[str, str](), True
    room = width()
    for each in states:
        left, cursor = limit, after
        while left:
            page = app.queue(queue).jobs(each, limit=min(left, _PAGE), after=cursor)
            rows: list[list[str]] = [_row(job, state) for job in page.jobs]
            if rows and is_empty:
                rows.insert(0, [column.title for column in columns])
                is_empty = False
            text = "".join(
                (line if room is None else shorten(line, room)) + "\n" for line in lines_of(columns, rows, widths)
            )
            click.echo(text, nl=False)
            left, cursor = left - len(page), page.after
            if cursor is None:
                break
        if cursor is not None:
            cursors[each] = cursor
    if is_empty:
        click.echo(f"queue {queue} has no {state + ' ' if state else ''}jobs")
    return cursors


def _collect(
    app: App, queue: str, states: Sequence[str], limit: int, after: str | None
) -> tuple[list[JobInfo], dict[str, str], dict[str, str]]:
    """The jobs of all these states, the cursors of the states that have more, and why others cannot be listed."""
    found: list[JobInfo] = []
    cursors: dict[str, str] = {}
    unlisted: dict[str, str] = {}
    for state in states:
        try:
            page = app.queue(queue).jobs(state, limit=limit, after=after)
        except Unsupported as exc:
            if len(states) == 1:
                raise
            unlisted[state] = str(exc)
            continue
        found += page.jobs
        if page.after is not None:
            cursors[state] = page.after
    return found, cursors, unlisted


def job_document(job: JobInfo) -> dict[str, Any]:
    """A job as ``--json`` prints it: ``body`` is its JSON, or ``body_base64`` its bytes if they are not JSON."""
    value = job.value
    is_bytes = isinstance(value, bytes)
    fields = {name: getattr(job, name) for name in job.__struct_fields__ if name != "body"}
    return {
        **fields,
        "task": job.task,
        "body": None if is_bytes else value,
        "body_base64": base64.b64encode(job.body).decode() if is_bytes else None,
        "size": len(job.body),
    }


def _jobs_table(found: Sequence[JobInfo], state: str | None) -> Table:
    return table(_columns(state), [_row(job, state) for job in found])


def _columns(state: str | None) -> list[Column]:
    columns = [Column("ID"), *([Column("STATE")] if state is None else [])]
    if state == State.BURIED:
        return [
            *columns,
            Column("TRY", right=True),
            Column("REASON", gives_way=True),
            Column("JOB", gives_way=True),
        ]
    columns += [Column("PRI", right=True), Column("TRY", right=True), Column("DUE", right=True)]
    return [*columns, Column("JOB", gives_way=True)]


def _row(job: JobInfo, state: str | None) -> list[str]:
    if state == State.BURIED:
        return [safe(job.id), _tries(job), safe(job.reason or "-"), summary(job)]
    return [*_place_of(job, state), str(job.priority), _tries(job), _due(job), _what(job)]


def _jobs_list(found: Sequence[JobInfo], state: str | None, room: int) -> Text:
    """For a narrow terminal: an id fills a line, so the reason and the job have lines of their own."""
    from rich.text import Text

    titles = ["ID", *(["STATE"] if state is None else []), "PRI", "TRY", "DUE"]
    rows = [[*_place_of(job, state), str(job.priority), _tries(job), _due(job)] for job in found]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = Text()
    for cells, job in [(titles, None), *zip(rows, found, strict=True)]:
        line = "  ".join(f"{cell:<{size}}" for cell, size in zip(cells, widths, strict=True))
        lines.append(line.rstrip() + "\n", style="bold" if job is None else "")
        if job is not None and job.reason:
            lines.append(f"  {shorten(safe(job.reason), room - 2)}\n")
        if job is not None:
            lines.append(f"  {summary(job, room - 2)}\n", style="dim")
    lines.rstrip()
    return lines


def _place_of(job: JobInfo, state: str | None) -> list[str]:
    return [safe(job.id), *([job.state.value] if state is None else [])]


def _tries(job: JobInfo) -> str:
    return UNKNOWN if job.attempt is None else str(job.attempt)


def _due(job: JobInfo) -> str:
    if job.state is State.READY:
        return "now"
    if job.state is State.BURIED:
        return "-"
    return UNKNOWN if job.due_in is None else duration(job.due_in)


def _what(job: JobInfo) -> str:
    text = summary(job)
    return f"{text} - {safe(job.reason)}" if job.reason else text


# --- peek ------------------------------------------------------------------------------------------------


@click.command(short_help="Show one job.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@click.option("--raw", is_flag=True, help="Print the body alone, byte by byte.")
@common_options
def peek(job_id: str, queue: str | None, raw: bool, as_json: bool) -> None:
    """Show one job: state, attempts, times, reason and body."""
    from .apps import find_queue, open_app

    if raw and as_json:
        raise click.UsageError("--raw prints bytes, --json prints JSON: choose one")
    with open_app() as app:
        job = app.queue(find_queue(app, job_id, queue)).peek(job_id)
    if raw:
        sys.stdout.buffer.write(job.body)
        sys.stdout.buffer.flush()
    elif as_json:
        print_json(job_document(job))
    else:
        _show_job(job)


def _show_job(job: JobInfo) -> None:
    width = 10
    for label, value in _facts(job):
        click.echo(f"{click.style(f'{label:<{width}}', dim=True)}{value}")
    click.echo()
    click.echo(_body(job))


def _facts(job: JobInfo) -> list[tuple[str, str]]:
    facts = [("job", safe(job.id)), ("queue", safe(job.queue))]
    if job.task is not None:
        facts.append(("task", safe(job.task)))
    facts += [
        ("state", _state(job)),
        ("priority", str(job.priority)),
        ("attempts", _attempts(job)),
        ("ttr", duration(job.ttr)),
        ("age", UNKNOWN if job.age is None else duration(job.age)),
        ("size", size(len(job.body))),
    ]
    if job.reason is not None:
        facts.append(("reason", safe(job.reason)))
    return facts


def _state(job: JobInfo) -> str:
    when = UNKNOWN if job.due_in is None else duration(job.due_in)
    if job.state is State.DELAYED:
        return f"delayed, due in {when}"
    if job.state is State.RESERVED:
        return f"reserved, its lease ends in {when}"
    return job.state.value


def _attempts(job: JobInfo) -> str:
    text = UNKNOWN if job.attempt is None else str(job.attempt)
    extras = [
        f"{UNKNOWN if number is None else number} {word}"
        for number, word in ((job.crashes, "without a verdict"), (job.kicks, "kicked"))
        if number != 0
    ]
    return f"{text} ({', '.join(extras)})" if extras else text


def _body(job: JobInfo) -> str:
    """The body, indented if it is JSON, cut to a screen."""
    import msgspec

    value = job.value
    if isinstance(value, bytes):
        text = shorten(repr(value[:_BODY_CHARACTERS]), _BODY_CHARACTERS)
    else:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    lines = safe(text, keep="\n")[:_BODY_CHARACTERS].splitlines()
    cut = len(lines) > _BODY_LINES or len(text) > _BODY_CHARACTERS
    shown = "\n".join(lines[:_BODY_LINES])
    return f"{shown}\n... (--raw prints all of it)" if cut else shown
