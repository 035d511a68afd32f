"""``multiq peek`` shows one job."""

from __future__ import annotations

import datetime as dt
import sys
from typing import TYPE_CHECKING

import click

from multiq.backend import State
from multiq.formatting import UNKNOWN, duration, many, shorten, size
from multiq.terminal_escapes import safe

from .argument_types import JobId
from .jobs import job_document
from .options import common_options, queue_option
from .output import print_json

if TYPE_CHECKING:
    from multiq.job import JobInfo


_BODY_LINES = 24  # the largest number of lines that are shown of a body
_BODY_CHARACTERS = 4000


@click.command(short_help="Show one job.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@click.option("--raw", is_flag=True, help="Print only the body, as raw bytes.")
@common_options
def peek(job_id: str, queue: str | None, raw: bool, as_json: bool) -> None:
    """Show one job: state, attempts, times, reason and body."""
    from .apps import open_app
    from .find_job import find_queue

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
        show_job(job)


def show_job(job: JobInfo) -> None:
    """Print a job: its fields, the traceback of its failure if there is one, and its body."""
    width = 10
    for label, value in _facts(job):
        click.echo(f"{click.style(f'{label:<{width}}', dim=True)}{value}")
    click.echo()
    failure = job.failure
    if failure is not None and failure.traceback:
        click.echo(safe(failure.traceback, keep="\n").rstrip())
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
    if job.unique_key is not None:
        facts.append(("unique", f"key {job.unique_key.hex()}"))
    if job.reason is not None:
        facts.append(("reason", safe(job.reason)))
    if job.failure is not None:
        when = dt.datetime.fromtimestamp(job.failure.at, dt.UTC).isoformat(" ", "seconds")
        facts.append(("failed", f"{when}, on {safe(job.failure.worker)}"))
    return facts


def _state(job: JobInfo) -> str:
    when = UNKNOWN if job.due_in is None else duration(job.due_in)
    if job.state is State.DELAYED:
        return f"delayed, due in {when}"
    if job.state is State.RESERVED:
        return f"reserved, its lease ends in {when}"
    if job.state is State.HELD:
        return f"held, waits for {UNKNOWN if job.awaits is None else many(job.awaits, 'arrival')}"
    if job.held_by is not None:
        return f"ready, waits for {safe(job.held_by)}"
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
    """Return the body, cut to ``_BODY_LINES`` lines. A JSON body is indented."""
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
