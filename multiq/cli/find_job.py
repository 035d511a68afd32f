"""Finds the queue that holds a job, and the queues that may hold a job's outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.control.flags import visible_queues
from multiq.errors import JobNotFound, OptionInvalid

if TYPE_CHECKING:
    from multiq.app import App


class JobNowhere(JobNotFound):
    """No queue has the job. The error's ``queue`` is empty."""

    sentence = "no queue has job {job_id}: it is done, was deleted, or was never there"


def find_queue(app: App, job_id: str, queue: str | None) -> str:
    """Find the queue that holds a job. If *queue* is given, return *queue*. Without *queue*, search all queues.

    Raises ``JobNotFound`` if no queue has the job. Raises ``OptionInvalid`` if several queues have a job with this id.
    """
    if queue is not None:
        return queue
    found = [name for name in visible_queues(app.backend) if _has(app, name, job_id)]
    if not found:
        raise JobNowhere("", job_id)
    if len(found) > 1:
        raise OptionInvalid(f"queues {', '.join(found)} each have a job {job_id}: say which one with -q QUEUE")
    return found[0]


def known_queues(app: App) -> list[str]:
    """Return the queues that hold a job, the queue ``default``, and the worker's queues in the settings.

    A backend does not list a queue that has outcomes and no job, so other queues with outcomes may be missing.
    """
    return sorted({*visible_queues(app.backend), "default", *(app.settings.worker.queues or ())})


def _has(app: App, queue: str, job_id: str) -> bool:
    try:
        app.backend.peek(queue, job_id)
    except JobNotFound:
        return False
    return True
