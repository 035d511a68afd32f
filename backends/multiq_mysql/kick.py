"""Kicks buried jobs, slice by slice: they become ready again. Jobs with unique keys are kicked only if their keys are
free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import UniqueTaken

from .receipts import CHANGED
from .records import unpack_id
from .statements import render
from .unique import judge_kicks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Session
    from .pool import Pool
    from .unique import KickedRow


class Kick:
    """One slice of a kick. After a lost reply, the next attempt checks whether the slice was committed."""

    def __init__(self, pool: Pool, queue: str, size: int, behind: int) -> None:
        """*behind*: a ``place`` that is greater than the places of all jobs that were buried when the kick began."""
        self._pool = pool
        self._behind = behind
        self._queue = queue
        self._size = size
        self._seqs: list[int] = []

    @property
    def found(self) -> int:
        """The number of buried jobs in the slice. A job with a unique key is counted, but not kicked."""
        return len(self._seqs)

    def run(self, session: Session) -> int:
        """Return the number of jobs that are kicked."""
        if session.unconfirmed:
            session.execute(render("lock", seqs=self._seqs))
            done = session.done_before()
            if done is not None:
                return done
        ((rows, _),) = session.begin(render("buried", queue=self._queue.encode(), place=self._behind, limit=self._size))
        self._seqs = sorted(seq for (seq,) in rows)
        if not self._seqs:
            session.roll_back()
            return 0
        kicked, *_ = session.commit(render("kick", seqs=self._seqs), done=CHANGED)
        return kicked.affected


class KickWithKeys:
    """One page of a kick. Some of its jobs have unique keys. The page is repeated in the same way as a ``Kick``."""

    def __init__(self, pool: Pool, queue: str, rows: Sequence[KickedRow]) -> None:
        self._pool = pool
        self._queue = queue
        self._rows = rows
        self._kicked = 0

    def run(self, session: Session) -> int:
        kicks = judge_kicks(session, self._pool, self._queue, self._rows)
        if session.done_before():
            session.roll_back()
            return self._kicked
        self._kicked = len(kicks.seqs)
        if kicks.seqs:
            session.commit(*kicks.statements, done=1)
        else:
            session.roll_back()
        return self._kicked


def kick_job_with_key(session: Session, pool: Pool, queue: str, row: KickedRow) -> None:
    """Kick a buried job with a unique key. Does nothing if another client has deleted the job or made it ready
    meanwhile."""
    kicks = judge_kicks(session, pool, queue, [row])
    if kicks.seqs:
        session.commit(*kicks.statements, done=1)
        return
    session.roll_back()
    if kicks.refused:
        raise UniqueTaken(queue, unpack_id(row.id))
