"""``multiq jobs`` lists a queue's jobs."""

from __future__ import annotations

import base64
import shlex
from typing import TYPE_CHECKING, Any

import click

from multiq.backend import STORED_STATES, State
from multiq.errors import Unsupported
from multiq.formatting import UNKNOWN, duration, shorten, summary
from multiq.terminal_escapes import safe

from .argument_types import QueueName
from .connection import chosen_connection
from .options import common_options
from .output import Column, lines_of, note, print_json, show, table, width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table
    from rich.text import Text

    from multiq.app import App
    from multiq.job import JobInfo


_PAGE = 1000  # the number of jobs that each call reads for a long listing
_NARROW = 110  # columns: a narrower terminal has no room for a job's id, counters, reason and body in one line
_STATES = [state.value for state in STORED_STATES]


@click.command(short_help="List a queue's jobs.")
@click.argument("queue", type=QueueName())
@click.argument("state", type=click.Choice(_STATES), required=False, metavar="[STATE]")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many jobs of each state."
)
@click.option("--after", metavar="CURSOR", help="Show the next page: the cursor that the previous page printed.")
@common_options
def jobs(queue: str, state: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """List all jobs of a queue, or only the ready, delayed, reserved, buried or held jobs.

    Ready jobs are listed in the order in which they would be reserved. Buried jobs are listed in the order in which
    they would be kicked. Delayed and reserved jobs are listed by their due times. Held jobs are listed by their age.
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
            note(f"there are more {name} jobs, which cannot be listed: {why}")


def _note_more(queue: str, cursors: dict[str, str]) -> None:
    for name, cursor in cursors.items():
        note(f"there are more: multiq jobs {queue} {name} --after={shlex.quote(safe(cursor))}{_connection_again()}")


def _connection_again() -> str:
    """Return the option ``-c`` for another command, unchanged. A URL with a password is left out."""
    from multiq.settings.url import redact

    given = chosen_connection()
    return "" if given is None or redact(given) != given else f" -c {shlex.quote(safe(given))}"


def _stream(app: App, queue: str, states: Sequence[str], limit: int, after: str | None) -> dict[str, str]:
    """Print a long listing page by page, so that the whole listing is never in memory.

    Returns a cursor for each state that has more jobs.
    """
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
    """Collect the jobs of *states*.

    Returns the jobs, a cursor for each state that has more jobs, and the reason for each state that cannot be listed.
    """
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
    """Return a job in the form that ``--json`` prints. A body that is JSON is in ``body``. Any other body is in
    ``body_base64``.

    ``failure`` has the decoded detail that a worker stores with a buried job.
    """
    value = job.value
    is_bytes = isinstance(value, bytes)
    fields = {
        name: getattr(job, name)
        for name in job.__struct_fields__
        if name not in {"body", "memo", "detail", "unique_key"}
    }
    return {
        **fields,
        "task": job.task,
        "body": None if is_bytes else value,
        "body_base64": base64.b64encode(job.body).decode() if is_bytes else None,
        "size": len(job.body),
        "failure": job.failure,
        "unique_key": None if job.unique_key is None else job.unique_key.hex(),
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
    """Format the jobs for a narrow terminal, with the reason and the body on separate lines."""
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
    if job.held_by is not None:
        return "limit"  # the job waits for a limit, which peek names
    if job.state is State.READY:
        return "now"
    if job.state is State.BURIED:
        return "-"
    return UNKNOWN if job.due_in is None else duration(job.due_in)


def _what(job: JobInfo) -> str:
    text = summary(job)
    return f"{text} - {safe(job.reason)}" if job.reason else text
