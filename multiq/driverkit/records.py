"""Job records as of now, for stores that keep a due time in a column: the stored state of a due job may change later.

A delayed job that is due, and a reserved one whose lease has ended, are ready, even if no statement has changed their
stored state yet. Records and counts show them as ready at once; a lease that ended counts as a crash.
"""

from __future__ import annotations

from multiq.backend import JobRecord, State

_ENDS_BY_TIME = frozenset({State.DELAYED, State.RESERVED})


def effective_state(stored: State, *, is_due: bool) -> State:
    """The state of a job now. *is_due*: the time that is stored with the job (a delay's or a lease's end) has come."""
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
) -> JobRecord:
    """The public record of a job as it stands now.

    Parameters:
        stored: its state in the store.
        left: seconds until its delay or lease ends; 0 or less: it has ended.
        crashes: as stored: a lease that has just ended is not counted there yet.
        age: seconds since it was enqueued.

    The other parameters are passed on as they are.
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
        due_in={State.READY: 0.0, State.BURIED: None}.get(state, left),
        age=age,
        reason=reason,
    )
