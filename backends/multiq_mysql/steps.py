"""Steps: enqueues, arrivals, and changes of notes. The transaction of a verdict or of ``carry_out`` carries them out.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
in their order        an arrival before the enqueue of its job counts only if the job         one statement per such
                      existed before; the reply to the enqueue shows this                     job
few deadlocks         held jobs (holds.py) are locked before notes (notes.py); a deadlock's   none
                      transaction is run again
short locks           an exchange locks held jobs in its first packet and commits with its    none
                      second one
====================  ======================================================================  =======================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.backend import Arrive, Drop, Enqueue, Put

from . import notes
from .holds import MOST_DROPPED, Arrivals
from .records import AGAIN, insert_statements
from .statements import Sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import NewJob, Step

    from .connection import Reply
    from .holds import Key
    from .pool import Pool

_NOW = Sql("@multiq_now")


class Steps:
    """The steps of one transaction, as statements.

    The statements of ``first`` follow those of the verdicts. ``read`` takes their replies. The statements of
    ``take_moves`` and of ``last`` are sent next, in either order, and end the transaction.
    """

    def __init__(
        self,
        pool: Pool,
        steps: Sequence[Step],
        drops: Iterable[tuple[str, str]] = (),
        before: Sequence[str] = (),
    ) -> None:
        """Parameters:
        drops: the homes and keys of additional notes to delete. A note that a step stores is not deleted.
        before: statements that are to go before all others.
        """
        self._pool = pool
        self._moves: list[str] = []
        self._drops = 0
        """The number of the statements in ``last`` that delete arrivals. These statements come first."""
        enqueues, self._early = _enqueues(pool, steps, before)
        self._arrivals = Arrivals(pool, steps)
        self._first_of_arrivals = len(enqueues)
        self.enqueued = frozenset({step.queue for step in steps if isinstance(step, Enqueue)})
        """The queues of the new jobs."""
        self.released: frozenset[str] = frozenset()
        """The queues of the jobs that are not held any more."""
        self.first = [*enqueues, *self._arrivals.first]
        self.last = notes.changes(pool, [step for step in steps if isinstance(step, Put | Drop)], drops)

    def read(self, replies: Sequence[Reply]) -> None:
        """Read the replies to ``first``, and compute the result of the arrivals."""
        arrivals = self._arrivals
        if not arrivals.first:
            return
        missing = {key for key, number in self._early.items() if replies[number].affected}
        arrivals.read(replies[self._first_of_arrivals :], missing)
        self._moves, self._drops, self.released = arrivals.moves, len(arrivals.drops), arrivals.released
        self.last = [*arrivals.drops, *self.last]

    def take_moves(self) -> list[str]:
        """Return the statements that count the arrivals and release the held jobs. The next call returns no
        statements."""
        moves, self._moves = self._moves, []
        return moves

    def read_last(self, replies: Sequence[Reply]) -> None:
        """Read the replies to ``last``. If some arrivals remain, the clean-up deletes them soon."""
        if any(reply.affected >= MOST_DROPPED for reply in replies[: self._drops]):
            self._pool.clean_up_again_soon()

    def readied(self, queue: str) -> tuple[int, int] | None:
        """Return the place of the first job of a queue that these steps make ready. None: these steps make no job
        ready."""
        return self._arrivals.readied(queue)


class _NoSteps(Steps):
    """The steps of an exchange without steps. This class makes such an exchange as fast as possible."""

    def __init__(self) -> None:
        self.first, self.last, self.enqueued, self.released = [], [], frozenset(), frozenset()

    def read(self, replies: Sequence[Reply]) -> None:
        """Do nothing: there are no statements."""

    def take_moves(self) -> list[str]:
        return []

    def read_last(self, replies: Sequence[Reply]) -> None:
        """Do nothing, like ``read``."""

    def readied(self, queue: str) -> None:
        """Return None: no job is made ready."""


NO_STEPS: Steps = _NoSteps()


def largest(steps: Iterable[Step]) -> int:
    """Return the size in bytes of the largest body or note of the steps."""
    sizes = (
        len(step.job.body) if isinstance(step, Enqueue) else len(step.value)
        for step in steps
        if isinstance(step, Enqueue | Put)
    )
    return max(sizes, default=0)


def _enqueues(pool: Pool, steps: Sequence[Step], before: Sequence[str]) -> tuple[list[str], dict[Key, int]]:
    """Return the statements that add the jobs of the steps. The statements *before* come first.

    Also returns the jobs that have an ``Arrive`` before their ``Enqueue`` among the steps, each with the index of its
    statement. Such a statement adds only this job, so the reply shows whether the job existed before.
    """
    arrived: set[Key] = set()
    early: dict[Key, int] = {}
    batches: list[tuple[str, list[NewJob], Key | None]] = []
    last: dict[str, list[NewJob]] = {}
    """The batch that takes the next job of each queue."""
    for step in steps:
        if isinstance(step, Arrive):
            arrived.add((step.queue, step.id))
        elif isinstance(step, Enqueue):
            key = step.queue, step.job.id
            if key in arrived and key not in early:
                early[key] = -1
                batches.append((step.queue, [step.job], key))
                last.pop(step.queue, None)
            elif step.queue in last:
                last[step.queue].append(step.job)
            else:
                last[step.queue] = [step.job]
                batches.append((step.queue, last[step.queue], None))
    statements = [*before, *([f"SET {_NOW} = {pool.now}"] if batches else [])]
    for queue, jobs, early_key in batches:
        if early_key is not None:
            early[early_key] = len(statements)
        # AGAIN, because this transaction may wait for a lock and commit late: see external_transaction.py.
        statements += insert_statements(queue, jobs, _NOW, ready=AGAIN)
    return statements, early
