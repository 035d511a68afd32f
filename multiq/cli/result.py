"""``multiq result`` prints what a job has returned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from multiq.backend import State
from multiq.errors import JobCancelled, JobFailed, JobNotFound, MultiqError, OptionInvalid
from multiq.terminal_escapes import safe

from .argument_types import JobId, QueueName
from .exits import FAILED, OK
from .history import outcome_document
from .options import common_options
from .output import note, print_json

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.history import OutcomeInfo
    from multiq.job import JobInfo


_WHY_NONE = "it was not kept, has expired, or the job was never there"


class NoOutcome(JobNotFound):
    """Neither the job nor its outcome is known, or the job is not done yet."""

    sentence = "{queue}"  # JobNowhere names only the job's id, and NoOutcome names the queue and the id


@click.command(short_help="Print what a job has returned.")
@click.argument("job_id", type=JobId(), metavar="ID")
@click.option(
    "-q",
    "--queue",
    type=QueueName(),
    metavar="QUEUE",
    help="The job's queue (default: search all known).",
)
@common_options
def result(job_id: str, queue: str | None, as_json: bool) -> int:
    """Print the value that a job with `keep` has returned, as JSON. ID may also be the job's `ref` (QUEUE~ID).

    Exits with 0 if the job is done. Exits with 1 if the job failed or was cancelled. Exits with 3 if the job is not
    done yet, or if no outcome is kept.
    """
    from multiq.history import OutcomeInfo
    from multiq.job_ref import read_ref

    from .apps import open_app
    from .find_job import known_queues

    with open_app() as app:
        if not app.backend.capabilities.outcomes:
            raise app.backend.unsupported("outcomes")
        queues = known_queues(app) if queue is None else [queue]
        all_found = [each for name in queues if (each := _look(app, name, job_id)) is not None]
        if not all_found and queue is None and "~" in job_id:
            queue, job_id = read_ref(job_id)
            all_found = [each for each in [_look(app, queue, job_id)] if each is not None]
    if len(all_found) > 1:
        names = ", ".join(each.queue for each in all_found)
        raise OptionInvalid(f"queues {names} each have a job {job_id}, or its outcome: say which one with -q QUEUE")
    found = all_found[0] if all_found else None
    if not isinstance(found, OutcomeInfo):
        raise _no_result(job_id, found, queue)
    if found.kind == "cancelled" and not as_json:
        raise JobCancelled(found.queue, job_id, found.document.get("omitted"))
    if as_json:
        print_json(outcome_document(found))
        return OK if found.kind == "done" else FAILED
    if found.omitted is not None:
        note(f"the job is done, and its value was left out: {safe(found.omitted)}")
    else:
        print_json(found.value)
    return OK


def _look(app: App, queue: str, job_id: str) -> JobInfo | OutcomeInfo | None:
    """Return the job, or its kept outcome if the job is gone.

    If both a job and an outcome exist, the outcome belongs to an earlier job with the same id. The job is read first,
    because an ack deletes the job and keeps its outcome in one step. If the job ends between the two reads, the second
    read finds the outcome.
    """
    from multiq.history import OutcomeInfo

    try:
        return app.queue(queue).peek(job_id)
    except JobNotFound:
        (outcome,) = app.backend.outcomes(queue, [job_id])
        return None if outcome is None else OutcomeInfo.of(outcome)


def _no_result(job_id: str, job: JobInfo | None, queue: str | None) -> MultiqError:
    if job is not None and job.state is State.BURIED:
        if job.failure is not None:
            note(f"multiq failed show {job_id} has the traceback")
        return JobFailed(job.queue, job_id, job.reason)
    if job is not None:
        return NoOutcome(f"job {job_id} of queue {job.queue} is not done yet: it is {job.state.value}", job_id)
    where = "no known queue has an" if queue is None else f"queue {queue} has no"
    more = "; a queue that holds no job is not known: name it with -q" if queue is None else ""
    return NoOutcome(f"{where} outcome of job {job_id}: {_WHY_NONE}{more}", job_id)
