"""Job records at the present time, for stores that keep a job's due time in a column.

A delayed job that is due is ready. A reserved job whose lease has ended is ready, too. The stored state of such a job
may stay unchanged until a later call. Records and counts already show the job as ready, and count a crash for a lease
that has ended.
"""

from __future__ import annotations

from multiq.backend import JobRecord, State

_ENDS_BY_TIME = frozenset({State.DELAYED, State.RESERVED})


def effective_state(stored: State, *, is_due: bool) -> State:
    """Return the present state of a job. *is_due*: whether the end of its delay or lease has passed."""
    return State.READY if is_due and stored in _ENDS_BY_TIME else stored


def job_record(
    *,
    queue: str,
    id: str,  # noqa: A002 - as JobRecord calls it
    body: bytes,
    stored: State,
    left: float,
    priority: int,
    ttr: float,
    attempt: int,
    crashes: int,
    kicks: int,
    age: float,
    reason: str | None,
    memo: bytes | None = None,
    detail: bytes | None = None,
    awaits: int | None = 0,
    unique_key: bytes | None = None,
    held_by: str | None = None,
) -> JobRecord:
    """Return the public record of a job at the present time.

    Parameters:
        stored: the job's state in the store.
        left: seconds until the job's delay or lease ends. 0 or less: it has ended.
        crashes: the stored number, which does not yet count a lease that has just ended.
        age: seconds since the job was enqueued.

    The other parameters are fields of the record.
    """
    state = effective_state(stored, is_due=left <= 0)
    return JobRecord(
        queue=queue,
        id=id,
        state=state,
        body=body,
        priority=priority,
        ttr=ttr,
        attempt=attempt,
        crashes=crashes + (stored is State.RESERVED and state is State.READY),
        kicks=kicks,
        due_in={State.READY: 0.0, State.BURIED: None, State.HELD: None}.get(state, left),
        age=age,
        reason=reason,
        memo=memo,
        detail=detail,
        unique_key=unique_key,
        held_by=held_by,
        awaits=awaits,
    )
