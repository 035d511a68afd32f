"""Deletes a single job of a flow. Other jobs may wait for this job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from multiq.backend import DELAY_MAX, Arrive, State
from multiq.envelope import decode_envelope
from multiq.errors import JobAwaited, JobNotFound, JobReserved, PayloadInvalid

from .followers import check_followers, find_record, steps_after

if TYPE_CHECKING:
    from multiq.backend import Backend
    from multiq.envelope import FlowPart

    from .followers import End, Followers

_MEMBER_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}\.\d+", re.ASCII)
_DELETION = "deletion"  # the arrival for which a job waits while it is about to be deleted
_ANY_SIZE = 2**62  # bytes: the body was stored, so it may be read


def prepare_delete(backend: Backend, queue: str, job_id: str, followers: Followers = "refuse") -> bool:
    """Before a job is deleted, send its arrivals to the jobs that wait for it. The job need not belong to a flow.

    Returns whether other jobs were told.

    Raises ``JobAwaited`` if other jobs wait for it and *followers* is ``"refuse"``, and the errors of
    ``Backend.delete``. Reads the job only if its id has the form of a flow's job id.
    """
    check_followers(followers)
    if _MEMBER_ID.fullmatch(job_id) and backend.declared.holds:
        job = backend.peek(queue, job_id)
        if job.state is State.RESERVED:  # checked before the steps for its followers
            raise JobReserved(queue, job_id)
        flow = flow_of(job.body)
        if flow is not None:
            if followers == "refuse" and any(tell.mode != "catch" for tell in flow.tells):
                raise JobAwaited(queue, job_id)
            record = find_record(backend, flow) if flow.ends else None
            end: End = "done" if followers == "go" else "cancelled"
            steps = steps_after(flow, job_id, end, "a job for which it waited was deleted", record)
            if steps:  # comes before the delete: if this program dies in between, no follower waits forever
                _keep_from_workers(backend, queue, job_id, job.state)
                backend.carry_out(steps)
                return True
    return False


def refuse_awaited(backend: Backend, queue: str, job_id: str) -> None:
    """Raise ``JobAwaited`` if other jobs of a flow wait for the job."""
    if _MEMBER_ID.fullmatch(job_id) and backend.declared.holds:
        try:
            flow = flow_of(backend.peek(queue, job_id).body)
        except JobNotFound:
            return
        if flow is not None and any(tell.mode != "catch" for tell in flow.tells):
            raise JobAwaited(queue, job_id)


def _keep_from_workers(backend: Backend, queue: str, job_id: str, state: State) -> None:
    """Let no worker get a job that is about to be deleted. Raises ``JobReserved``, ``JobNotFound``.

    If a worker got the job, it could run although its followers already count it as deleted. Nothing is done for a
    buried job, because a buried job is never handed out.
    """
    if state is State.BURIED:
        return
    if state is State.HELD:
        # the job itself, and an arrival that never comes
        backend.carry_out([Arrive(queue, job_id, _DELETION, expect=2)])
        if backend.peek(queue, job_id).state is State.HELD:
            return
    backend.reschedule(queue, job_id, backend.shortened(DELAY_MAX))


def flow_of(body: bytes) -> FlowPart | None:
    """Return the part of a job that concerns its flow. None: the job is of no flow, or cannot be read."""
    try:
        return decode_envelope(body, max_body=_ANY_SIZE).flow
    except PayloadInvalid:
        return None
