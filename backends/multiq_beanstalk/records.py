"""Converts times and ids to the server's units, and the server's stats of a job to ``JobRecord``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import JobRecord, State
from multiq.errors import NameInvalid
from multiq.validation import check_name

if TYPE_CHECKING:
    from .stats import JobStats

_MOST_SECONDS = 2**32 - 1
_MOST_ID = 2**64 - 1

RESERVE = b"reserve-with-timeout 0\r\n"

#: replies to RESERVE when there is no job
NOTHING_READY = (b"TIMED_OUT", b"DEADLINE_SOON")


class Reserved(NamedTuple):
    """A job from the reply to a reserve."""

    id: bytes
    body: bytes
    asked_at: float
    """The moment before the reserve was sent. The lease cannot have begun earlier."""


def whole_seconds(seconds: float) -> int:
    """Round *seconds* up, so that a delay is never shorter than the requested one."""
    return min(math.ceil(seconds), _MOST_SECONDS)


def id_of(job_id: str) -> bytes | None:
    """Return an id as the server writes it. None: no server gives out such an id."""
    if job_id.isdecimal() and job_id.isascii() and job_id[0] != "0" and len(job_id) <= 20 and int(job_id) <= _MOST_ID:
        return job_id.encode()
    return None


def is_queue(tube: str) -> bool:
    """Whether a tube's name is a valid queue name."""
    try:
        check_name(tube)
    except NameInvalid:
        return False
    return True


def record(queue: str, number: bytes, stats: JobStats, body: bytes) -> JobRecord:
    """Return the public record of a job."""
    state = State(stats.state.decode())
    due_in = {State.READY: 0.0, State.BURIED: None}.get(state, float(max(0, stats.time_left)))
    return JobRecord(
        queue=queue,
        id=number.decode(),
        state=state,
        body=body,
        priority=stats.priority,
        ttr=float(stats.ttr),
        attempt=stats.reserves,
        crashes=stats.crashes,
        kicks=stats.kicks,
        due_in=due_in,
        age=float(stats.age),
        reason=None,
    )
