"""Enqueues jobs with unique keys. A job whose key is taken is not added."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pymysql

from .errors import is_unsent
from .records import AGAIN, insert_statements
from .unique import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import NewJob

    from .connection import Session
    from .pool import Pool


class UniqueInsert:
    """The enqueue of jobs, some of which have unique keys. ``may_be_done`` says whether an attempt may have been
    committed."""

    def __init__(self, pool: Pool, queue: str, jobs: Sequence[NewJob]) -> None:
        self._pool = pool
        self._queue = queue
        self._jobs = [(queue, job) for job in jobs]
        self._sent: list[str] = []
        """The answers of the last attempt for which a COMMIT was sent."""
        self.may_be_done = False

    def run(self, session: Session) -> list[str]:
        """Insert the jobs, except jobs whose keys are taken. Returns for each job its own id, or the id of the job that
        has its key.

        If a reply was lost and the attempt was committed, the next attempt returns the answers of that attempt. If the
        next attempt inserted again, it could replace a job that another client has replaced since.
        """
        judgement = judge(session, self._pool, self._jobs)
        if session.done_before():
            session.roll_back()
            return self._sent
        now = self._pool.now
        new = [job for job in judgement.new if job is not None]
        changes = judgement.statements(now)
        if not new and not changes:
            session.roll_back()
            return judgement.ids
        inserts = insert_statements(self._queue, new, now, ready=AGAIN) if new else []
        self._sent = judgement.ids
        try:
            session.commit(*judgement.clean_up(now), *changes, *inserts, done=1)
        except (pymysql.MySQLError, OSError) as exc:
            if session.is_broken and not is_unsent(exc):
                self.may_be_done = True
            raise
        return judgement.ids
