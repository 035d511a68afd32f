"""``multiq reschedule`` changes when a job is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.formatting import duration
from multiq.terminal_escapes import safe

from .argument_types import JobId
from .options import common_options, due_options, queue_option
from .output import say

if TYPE_CHECKING:
    import datetime as dt


@click.command(short_help="Change when a job is due.")
@click.argument("job_id", type=JobId(), metavar="ID")
@due_options
@queue_option
@common_options
def reschedule(job_id: str, delay: float | None, at: dt.datetime | None, queue: str | None, as_json: bool) -> None:
    """Change when a job is due, as if the job were enqueued now. The job must not be running.

    \b
      multiq reschedule 019b7c2e-... --delay 10m
      multiq reschedule 019b7c2e-... --at 2027-01-31T09:00+02:00
    """
    from multiq.validation import check_delay

    from .apps import open_app
    from .find_job import find_queue

    if delay is None and at is None:
        raise click.UsageError("say when it is due: --delay 10m (or 0 for now), or --at 2027-01-31T09:00Z")
    due_in = check_delay(delay, at)
    with open_app() as app:
        place = find_queue(app, job_id, queue)
        new_id = app.queue(place).reschedule(job_id, due_in).id
    when = f"due in {duration(due_in)}" if due_in else "due now"
    renamed = "" if new_id == job_id else f"; its id is {safe(new_id)} from now on"
    say(as_json, f"job {job_id} of queue {place} is {when}{renamed}", queue=place, id=new_id, due_in=due_in)
