"""Deletes a job that does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backend import After, Backend
    from .flows.members import Followers


def delete_job(backend: Backend, queue: str, job_id: str, followers: Followers, after: After | None = None) -> None:
    """Delete a job.

    - *followers*: what happens if other jobs of the flow wait for the deleted job.
    - *after*: the outcome to keep. None: no outcome.
    """
    if "." in job_id or followers != "refuse":  # only jobs of a flow have a dot in their ids
        from .flows.members import prepare_delete

        prepare_delete(backend, queue, job_id, followers)
    if after is None:
        backend.delete(queue, job_id)
        return
    (error,) = backend.delete_many(queue, [job_id], after=after)
    if error is not None:
        raise error
