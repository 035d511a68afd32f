"""Deletes several jobs, and keeps their outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import JobNotFound, JobReserved

from . import outcomes
from .gates import wake_lines
from .outcomes import keep_deleted
from .records import pack_id
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import After

    from .connection import Session
    from .pool import Pool


class DeleteMany:
    """A call of ``delete_many``. If a reply was lost and the attempt was committed, the next attempt returns the
    answers of that attempt.

    The rows of the jobs do not show whether an attempt was committed. A missing job may have been missing before, and a
    later job may have the same id.
    """

    def __init__(self, pool: Pool, queue: str, ids: Sequence[str], after: After | None) -> None:
        self._pool = pool
        self._queue = queue
        self._names = {pack_id(job_id): job_id for job_id in ids}
        self._after = after
        self._sent: dict[str, JobNotFound | JobReserved | None] = {}
        """The answers of the last attempt for which a COMMIT was sent."""

    def run(self, session: Session) -> dict[str, JobNotFound | JobReserved | None]:
        queue, after = self._queue, self._after
        outcomes.refuse_too_large(0 if after is None else len(after.outcome), self._pool.max_packet or 0)
        asked = Sql(",".join(map(literal, self._names)))
        ((rows, _),) = session.begin(render("deletable", queue=queue.encode(), ids=asked, now=self._pool.now))
        if session.done_before():
            session.roll_back()
            return self._sent
        answers: dict[str, JobNotFound | JobReserved | None] = {
            job_id: JobNotFound(queue, job_id) for job_id in self._names.values()
        }
        for _, own_id, _, is_free, _ in rows:
            job_id = self._names[own_id]
            answers[job_id] = None if is_free else JobReserved(queue, job_id)
        free = [(seq, own_id, attempt) for seq, own_id, attempt, is_free, _ in rows if is_free]
        if not free:
            session.roll_back()
            return answers
        keeps: list[str] = []
        if after is not None and after.keep > 0:
            keeps = keep_deleted(self._pool, queue, [(own_id, attempt) for _, own_id, attempt in free], after)
        parked = [seq for seq, *_, is_parked in rows if is_parked]
        waking = wake_lines(session, queue, parked) if parked else []
        self._sent = answers
        session.commit(*keeps, render("remove", seqs=sorted(seq for seq, *_ in free)), *waking, done=len(free))
        return answers
