"""``multiq cancel`` deletes one job that has not started, or asks the worker of a running job to cancel the job."""

from __future__ import annotations

from typing import Literal

import click

from .argument_types import JobId
from .durations import Duration
from .options import common_options, queue_option
from .output import say


@click.command(short_help="Cancel a job, also if it is running.")
@click.argument("job_id", type=JobId(), metavar="ID")
@queue_option
@click.option("--grace", type=Duration(), metavar="TIME", help="Time for a running job to end by itself. Default: 5s.")
@click.option("--reason", metavar="TEXT", help="Why, for the job's outcome.")
@click.option(
    "--followers",
    type=click.Choice(["go", "stop"]),
    help="What the jobs of a flow that wait for this job do: run (go), or end without a run (stop).",
)
@common_options
def cancel(
    job_id: str,
    queue: str | None,
    *,
    grace: float | None,
    reason: str | None,
    followers: Literal["go", "stop"] | None,
    as_json: bool,
) -> None:
    """Delete one job that has not started. If the job is running, ask its worker to cancel the job.

    The worker learns of the request within about five seconds. After the grace, the worker interrupts the task. The job
    is neither retried nor buried.
    """
    from .apps import open_app
    from .find_job import find_queue

    with open_app() as app:
        place = find_queue(app, job_id, queue)
        answer = app.queue(place).cancel(job_id, followers=followers or "refuse", grace=grace, reason=reason)
    text = {
        "deleted": f"deleted job {job_id} of queue {place}: it had not started",
        "requested": f"job {job_id} of queue {place} is running: its worker is asked to cancel it",
    }
    say(as_json, text[answer], queue=place, id=job_id, answer=answer)
