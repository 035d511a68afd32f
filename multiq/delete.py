"""Deletes a job that does not run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .backend import DELAY_MAX, After
from .envelope import decode_envelope
from .errors import PayloadInvalid
from .outcome import encode_outcome

if TYPE_CHECKING:
    from .backend import Backend
    from .flows.followers import Followers

_ANY_SIZE = 2**62  # bytes: in effect no limit, because the body is already stored


def delete_job(backend: Backend, queue: str, job_id: str, followers: Followers, after: After | None = None) -> None:
    """Delete a job.

    - *followers*: what happens if other jobs of the flow wait for the deleted job.
    - *after*: the outcome to keep. None: no outcome, unless waiting jobs run and may get the result of the deleted job.
    """
    if "." in job_id or followers != "refuse":  # only jobs of a flow have a dot in their ids
        from .flows.member_deletion import prepare_delete

        is_told = prepare_delete(backend, queue, job_id, followers)
        if is_told and followers == "go" and after is None and backend.declared.outcomes:
            after = cancelled_outcome(backend, queue, job_id, "deleted on request")
    if after is None:
        backend.delete(queue, job_id)
        return
    (error,) = backend.delete_many(queue, [job_id], after=after)
    if error is not None:
        raise error


def cancelled_outcome(backend: Backend, queue: str, job_id: str, reason: str) -> After | None:
    """Return the outcome of a job that is deleted. None means that the job has no ``keep``, or is not a task's job."""
    record = backend.peek(queue, job_id)
    try:
        keep = decode_envelope(record.body, max_body=_ANY_SIZE).keep
    except PayloadInvalid:
        return None
    if not keep:
        return None
    now = time.time()
    body, _ = encode_outcome(
        None,
        reason,
        started=now,
        finished=now,
        worker="",
        attempt=record.attempt or 0,
        errors=[],
        most=backend.capabilities.max_body,
    )
    return After(keep=min(keep, DELAY_MAX), outcome=body, kind="cancelled")
