"""Promotes due jobs, at most ``SLICE`` in one transaction: delayed jobs whose time has come, and jobs whose leases have
ended, become ready.

A consumer promotes the due jobs of its queue in the transaction that claims jobs. It sends ``due_statements`` and
``promote_statements``. Other callers use ``promote``.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from .records import DELAYED, RESERVED, SLICE
from .statements import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Connection, Reply, Session
    from .records import Outlook


def due_statements(outlook: Outlook) -> list[str]:
    """Return the statements that lock a slice of the jobs that were due at the time of the poll."""
    states = ((RESERVED, outlook.lease_ends_in), (DELAYED, outlook.due_in))
    return [_due(outlook.queue, state, outlook.now) for state, left in states if left is not None and left <= 0]


def promote_statements(found: Sequence[Reply]) -> list[str]:
    """Return the statement that makes the found jobs ready. Empty if no job was found."""
    seqs = sorted(seq for rows, _ in found for (seq,) in rows)
    return [render("promote", seqs=seqs)] if seqs else []


def promote(connection: Connection, outlook: Outlook, give_up_at: float) -> None:
    """In slices, make ready the jobs that were due at the time of a poll.

    Jobs that another session has locked stay unchanged.
    """
    for state in (RESERVED, DELAYED):
        some = functools.partial(_promote_some, queue=outlook.queue, state=state, now=outlook.now)
        while connection.run(some) == SLICE and time.monotonic() < give_up_at:
            pass


def _promote_some(session: Session, queue: str, state: int, now: int) -> int:
    """Make one slice of due jobs ready, in one transaction. Returns the number of these jobs."""
    found = session.begin(_due(queue, state, now))
    promoting = promote_statements(found)
    if promoting:
        session.commit(*promoting)
    else:
        session.roll_back()
    return len(found[0].rows)


def _due(queue: str, state: int, now: int) -> str:
    return render("due", queue=queue.encode(), state=state, now=now, limit=SLICE)
