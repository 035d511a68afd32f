"""What happens to the jobs of a flow that wait for a job when this job is done, fails, or is cancelled or deleted.

The waiting jobs may run, continue to wait, or are cancelled. A worker adds the steps for this to its verdict on the
job. ``member_deletion.py`` carries them out before it deletes a job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from multiq.backend import Arrive
from multiq.errors import OptionInvalid
from multiq.formatting import shown

from . import record as records

if TYPE_CHECKING:
    from multiq.backend import Backend, Step
    from multiq.envelope import FlowPart

End: TypeAlias = Literal["done", "failed", "cancelled"]
"""How a run of a job ended. ``failed``: the job is buried, and may be kicked."""

Followers: TypeAlias = Literal["refuse", "go", "stop"]
"""What happens if other jobs wait for the deleted job. ``refuse``: the job is not deleted. ``go``: the other
jobs run. ``stop``: the other jobs are cancelled."""

FOLLOWERS: tuple[Followers, ...] = ("refuse", "go", "stop")

NOT_NEEDED = "no job of the flow has failed"


def steps_after(
    flow: FlowPart, own_id: str, end: End, reason: str, record: records.FlowRecord | None
) -> tuple[Step, ...]:
    """Return the steps of the verdict that ends a run: for the waiting jobs, and for the flow's record.

    - *own_id*: the job's id, which is the member that arrives.
    - *reason*: why the job failed or was cancelled.
    - *record*: the flow's record, if this job ends the flow. None: another job ends the flow, or the record is gone.
    """
    steps: list[Step] = []
    for tell in sorted(flow.tells, key=lambda tell: tell.mode != "catch"):  # the last job removes an unused catch
        if tell.mode == "catch":
            if end != "done":
                steps.append(Arrive(tell.queue, tell.id, own_id))
        elif end == "done" or tell.mode == "go":
            steps.append(Arrive(tell.queue, tell.id, own_id))
        elif end == "cancelled" or tell.mode == "stop":
            steps.append(Arrive(tell.queue, tell.id, own_id, doom=reason or "a job before it has failed"))
    if flow.ends and end != "failed" and record is not None:
        if record.catch >= 0:
            catch = records.job_id(flow.id, record.catch)
            steps.append(Arrive(record.queue_of(record.catch), catch, own_id, doom=NOT_NEEDED))
        if record.state != "cancelled":
            state: Literal["finished", "cancelled"] = "finished" if end == "done" else "cancelled"
            steps += records.ending(flow.id, records.ended(record, state))
    return tuple(steps)


def find_record(backend: Backend, flow: FlowPart) -> records.FlowRecord | None:
    """Return the record of a flow. None: the record is gone. Raises ``PayloadInvalid``, ``BackendError``."""
    note = backend.note(records.HOME, records.key_of(flow.id))
    return None if note is None else records.decode(note)


def check_followers(followers: Followers) -> None:
    if followers not in FOLLOWERS:
        raise OptionInvalid(f"followers must be one of {', '.join(FOLLOWERS)}, got {shown(followers)}")
