"""``multiq delete`` deletes one job that is not running."""

from __future__ import annotations

from typing import Literal

import click

from .argument_types import JobId
from .options import common_options, followers_option, queue_option
from .output import say


@click.command(short_help="Delete a job that is not running.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@followers_option
@common_options
def delete(job_id: str, queue: str | None, followers: Literal["go", "stop"] | None, as_json: bool) -> None:
    """Delete one job that is not running. The deleted job never starts.

    If other jobs of a flow wait for this job, --followers must say what happens to the waiting jobs.
    """
    from .apps import open_app
    from .find_job import find_queue

    with open_app() as app:
        place = find_queue(app, job_id, queue)
        app.queue(place).delete(job_id, followers=followers or "refuse")
    say(as_json, f"deleted job {job_id} of queue {place}", queue=place, id=job_id, deleted=1)
