"""``multiq kick`` makes buried jobs ready again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.formatting import count, many

from .argument_types import JobCount, JobId, QueueName
from .options import common_options
from .output import say

if TYPE_CHECKING:
    from multiq.app import App


_SLICE = 1000  # the number of jobs that one call kicks


@click.command(short_help="Make buried jobs ready again.")
@click.argument("queue", type=QueueName(), required=False)
@click.argument("number", type=JobCount(), required=False, metavar="[N|all]")
@click.option("--id", "job_id", type=JobId(), metavar="ID", help="Kick only this job, which may be delayed or held.")
@click.option("-q", "--queue", "job_queue", type=QueueName(), metavar="QUEUE", help="With --id: the job's queue.")
@common_options
def kick(queue: str | None, number: float | None, job_id: str | None, job_queue: str | None, as_json: bool) -> None:
    """Make buried jobs of a queue ready: one job, N jobs, or all jobs. The job that was buried first is kicked first.
    With --id, kick one job by its id.

    A kicked job gets one more attempt.

    \b
      multiq kick mail 10
      multiq kick mail all
      multiq kick --id 019b7c2e-...
    """
    from .apps import open_app
    from .find_job import find_queue

    if job_id is not None:
        if number is not None or (queue and job_queue):
            raise click.UsageError("--id kicks one job: give no number, and its queue at most once")
        with open_app() as app:
            place = find_queue(app, job_id, queue or job_queue)
            app.queue(place).kick_job(job_id)
        say(as_json, f"job {job_id} of queue {place} is ready", queue=place, id=job_id, kicked=1)
        return
    if queue is None or job_queue is not None:
        raise click.UsageError("say what to kick: QUEUE [N|all], or --id ID")
    with open_app() as app:
        kicked = _kick(app, queue, number or 1)
        left = app.backend.stats(queue).buried
    text = f"kicked {many(kicked, 'job')} of queue {queue}"
    say(as_json, f"{text}; {count(left)} still buried" if left else text, queue=queue, kicked=kicked, buried=left)


def _kick(app: App, queue: str, number: float) -> int:
    """Kick *number* jobs, but not more jobs than are buried now. Without this limit, ``all`` might never end, because a
    job that fails again immediately would be kicked again.
    """
    buried = app.backend.stats(queue).buried if app.backend.declared.exact_counts else None
    left = number if buried is None else min(number, buried)
    kicked = 0
    while left > 0:
        more = app.queue(queue).kick(int(min(left, _SLICE)))
        kicked, left = kicked + more, left - more
        if not more:
            break
    return kicked
