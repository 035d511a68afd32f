"""Reschedules a job: the job becomes due after a new delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from multiq.backend import NewJob, State
from multiq.errors import JobHeld, JobNotFound, JobReserved, UniqueTaken

from .gates import wake_lines
from .records import AGAIN, HELD, PARKED, SECOND, effective_state, insert_statements, pack_id
from .statements import render
from .unique import ask_entry, read_entry, take_again, terms_of

if TYPE_CHECKING:
    from .connection import Session
    from .pool import Pool

_TEMPLATE = NewJob(body=b"", id="")


def reschedule(
    session: Session, pool: Pool, queue: str, job_id: str, delay: float, *, key: bytes | None = None
) -> None:
    """Remove the row and insert it again. Only an insert gives the job a new seq, and the seq is the job's age.

    The row is inserted in the state AGAIN. At least every second, other processes scan the jobs in this state, and
    begin with the first job. So they find the row.

    *key*: the job's unique key, if it is known. The entry of the key is locked before the job, in the same order as
    in an enqueue.
    """
    now = pool.now
    *locks, asked = ask_entry(pool, queue, job_id, key) if key else [""]
    taking = render("take_out", queue=queue.encode(), id=pack_id(job_id), now=now)
    *_, (rows, _) = session.begin(*locks, taking)
    if session.done_before():
        return session.roll_back()
    if not rows:
        raise JobNotFound(queue, job_id)
    ((seq, code, is_due, priority, ttr, body, column, gates),) = rows
    if effective_state(code, is_due=bool(is_due)) is State.RESERVED:
        raise JobReserved(queue, job_id)
    if code == HELD:
        raise JobHeld(queue, job_id)
    taken: list[str] = []
    if column:
        if column[1:] != key:
            session.roll_back()
            return reschedule(session, pool, queue, job_id, delay, key=column[1:])
        ((entries, _),) = session.execute(asked)
        entry = read_entry(entries[0])
        if entry.is_taken and entry.id != job_id:
            session.roll_back()
            raise UniqueTaken(queue, job_id)
        taken = take_again(queue, job_id, column[1:], entry)
    waking = wake_lines(session, queue, [seq]) if code == PARKED else []
    settings = {"priority": priority, "delay": delay, "ttr": ttr / SECOND, "terms": terms_of(column, gates)}
    job = msgspec.structs.replace(_TEMPLATE, body=body, id=job_id, **settings)
    inserts = insert_statements(queue, [job], now, ready=AGAIN)
    session.commit(render("remove", seqs=[seq]), *waking, *inserts, *taken, done=1)
    return None
