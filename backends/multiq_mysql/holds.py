"""Held jobs: counts the arrivals at a held job, and makes the job ready with the last arrival.

====================  ======================================================================  =======================
guarantee             how                                                                     cost
====================  ======================================================================  =======================
a member counts once  a row in ``multiq_arrivals``, read while its held job is locked         one row per member
in their order        the driver computes the result of all arrivals from the locked rows     one statement per held
                                                                                              job, and a few per call
few deadlocks         held jobs are locked in the order of their queues and ids               none
no leftovers          each DELETE has a limit of a thousand arrivals; the clean-up deletes     one DELETE per call that
                      the others                                                              releases a job
====================  ======================================================================  =======================
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

from multiq.backend import Arrive, Enqueue

from .records import chunked, pack_id
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Step

    from .connection import Reply
    from .pool import Pool

Key: TypeAlias = tuple[str, str]
"""The queue and the id of a job."""

MOST_DROPPED = 1_000  # arrivals that one statement deletes
_JOBS_PER_DROP = 100
_CHUNK = 1_000_000  # bytes
_LONGEST_DOOM = 8_192  # bytes
DOOM_MARK = "!"
"""The first character of the column ``doomed``. A memo never begins with this character, because a memo is in hex
digits."""


class Arrivals:
    """The arrivals among the steps of one transaction, as statements.

    ``read`` takes the replies to ``first``. The statements of ``moves`` and ``drops`` are sent next, in either order.
    """

    def __init__(self, pool: Pool, steps: Sequence[Step]) -> None:
        self._pool = pool
        self._steps = steps
        self._held: dict[Key, _Held] = {}
        chunk = min(_CHUNK, (pool.max_packet or 0) // 2)
        self._targets, self._members = _targets(steps, chunk)
        """The held jobs at which members arrive, and the members. Each entry is a statement of ``first``. The jobs are
        in the order in which they are locked."""
        self.first = [
            *(render("targets", queue=queue.encode(), ids=_list(ids)) for queue, ids in self._targets),
            *(
                render("arrived", queue=queue.encode(), id=pack_id(job_id), members=_list(members))
                for (queue, job_id), members in self._members
            ),
        ]
        """The statements that lock the held jobs, and read which members have arrived. Empty if no member arrives."""
        self.moves: list[str] = []
        """The statements that count the arrivals and release the held jobs."""
        self.drops: list[str] = []
        """The statements that delete the arrivals at the released jobs."""
        self.released: frozenset[str] = frozenset()
        """The queues of the jobs that are not held any more."""

    def read(self, replies: Sequence[Reply], missing: set[Key]) -> None:
        """Read the replies to ``first``, and compute the result of the arrivals.

        *missing*: the jobs that did not exist before the steps. This method removes each at its ``Enqueue``.
        """
        self._read_held(replies)
        for step in self._steps:
            if isinstance(step, Enqueue):
                missing.discard((step.queue, step.job.id))
            elif isinstance(step, Arrive) and (key := (step.queue, step.id)) not in missing and key in self._held:
                self._held[key].arrive(step)
        self.moves = self._made_moves()
        released = sorted(held.seq for held in self._held.values() if not held.is_held)
        if released:
            self.drops = _drop_arrivals(released)
            self.released = frozenset({queue for (queue, _), held in self._held.items() if not held.is_held})

    def readied(self, queue: str) -> tuple[int, int] | None:
        """Return the place of the first job of a queue that the arrivals make ready. None: they make no job ready."""
        ready = [held.place for (name, _), held in self._held.items() if name == queue and held.is_ready]
        return min(ready, default=None)

    def _read_held(self, replies: Sequence[Reply]) -> None:
        for (queue, ids), reply in zip(self._targets, replies, strict=False):
            names = {pack_id(job_id): job_id for job_id in ids}
            for seq, kept, *row in reply.rows:
                self._held[queue, names[kept]] = _Held((seq, *row))
        for (key, members), reply in zip(self._members, replies[len(self._targets) :], strict=True):
            if held := self._held.get(key):
                names = {pack_id(member): member for member in members}
                held.arrived.update(names[kept] for (kept,) in reply.rows)

    def _made_moves(self) -> list[str]:
        rows: list[str] = []
        awaiting: defaultdict[int, list[int]] = defaultdict(list)
        doomed: defaultdict[str, list[int]] = defaultdict(list)
        let_go: list[int] = []
        for held in self._held.values():
            if held.doomed:
                doomed[held.doomed].append(held.seq)
            elif not held.is_held:
                let_go.append(held.seq)
            elif held.new:
                awaiting[held.awaits].append(held.seq)
                rows += [f"({held.seq},{literal(pack_id(member))})" for member in held.new]
        moves = [_arrive(some) for some in chunked(rows, min(_CHUNK, (self._pool.max_packet or 0) // 2))]
        moves += [render("awaits", awaits=awaits, seqs=sorted(seqs)) for awaits, seqs in awaiting.items()]
        moves += [render("doom", reason=_reason(reason), seqs=sorted(seqs)) for reason, seqs in doomed.items()]
        return [*moves, render("let_go", seqs=sorted(let_go), now=self._pool.now)] if let_go else moves


class _Held:
    """A held job that the transaction has locked, with the changes of the steps so far."""

    def __init__(self, row: Sequence[int]) -> None:
        self.seq, self.awaits, self.has_delay, self.priority = row
        self.arrived: set[str] = set()
        """The members that had arrived before, and the members that arrive with this transaction."""
        self.new: list[str] = []
        """The members that arrive with this transaction."""
        self.doomed = ""
        self.is_held = True

    def arrive(self, step: Arrive) -> None:
        if not self.is_held:
            return
        if step.doom:
            self.doomed = step.doom
            self.is_held = False
        elif step.member not in self.arrived:
            self.arrived.add(step.member)
            self.new.append(step.member)
            self.awaits += step.expect - 1
            self.is_held = self.awaits > 0

    @property
    def is_ready(self) -> bool:
        return not self.is_held and (bool(self.doomed) or not self.has_delay)

    @property
    def place(self) -> tuple[int, int]:
        """The sort key of ready jobs within a queue."""
        return self.priority, self.seq


def _drop_arrivals(seqs: Sequence[int]) -> list[str]:
    """Return the statements that delete arrivals at these jobs.

    A statement names only a few jobs. For many jobs, the servers would only estimate the number of arrivals, and might
    read the whole table.
    """
    slices = (seqs[at : at + _JOBS_PER_DROP] for at in range(0, len(seqs), _JOBS_PER_DROP))
    return [render("drop_arrivals", seqs=some, limit=MOST_DROPPED) for some in slices]


def _targets(steps: Sequence[Step], chunk: int) -> tuple[list[tuple[str, list[str]]], list[tuple[Key, list[str]]]]:
    """Return the held jobs of each queue at which members arrive, and the members that arrive at each job. A queue or a
    job has several entries if its ids or its members have more than about *chunk* bytes in SQL."""
    found: defaultdict[Key, dict[str, None]] = defaultdict(dict)
    for step in steps:
        if isinstance(step, Arrive):
            found[step.queue, step.id][step.member] = None
    by_queue: defaultdict[str, list[str]] = defaultdict(list)
    for queue, job_id in sorted(found, key=lambda key: (key[0].encode(), pack_id(key[1]))):
        by_queue[queue].append(job_id)
    targets = [(queue, some) for queue, ids in by_queue.items() for some in chunked(ids, chunk, _size_in_sql)]
    members = [
        ((queue, job_id), some)
        for queue, ids in targets
        for job_id in ids
        for some in chunked(found[queue, job_id], chunk, _size_in_sql)
    ]
    return targets, members


def _size_in_sql(text: str) -> int:
    return 2 * len(pack_id(text)) + len("x''")


def _list(texts: Iterable[str]) -> Sql:
    return Sql(",".join([literal(pack_id(text)) for text in texts]))


def _arrive(rows: list[str]) -> str:
    return render("arrive", row=Sql(",".join(rows)[1:-1]))


def _reason(text: str) -> bytes:
    """Return the reason as the column takes it. A reason is cut after 8 kB."""
    kept = text.encode("utf-8", "backslashreplace")[:_LONGEST_DOOM].decode("utf-8", "ignore").encode()
    return f"{DOOM_MARK}{kept.hex()}".encode()


# --- clean-up --------------------------------------------------------------------------------------------


class ArrivalCleanup:
    """Finds arrivals at jobs that are not held any more, in slices."""

    def __init__(self) -> None:
        self._after = 0
        self._found: list[int] = []
        self._over: list[int] = []

    def find(self) -> str:
        return render("old_arrivals", after=self._after, limit=MOST_DROPPED)

    def drop(self, found: Reply) -> str | None:
        """Return the statement that deletes some of the arrivals at the jobs that were found."""
        self._found = [job for job, _ in found.rows]
        self._over = [job for job, is_over in found.rows if is_over]
        statements = _drop_arrivals(self._over)
        return statements[0] if statements else None

    def has_more(self, dropped: int) -> bool:
        """Whether more arrivals may remain. *dropped*: the number of arrivals that were deleted."""
        if dropped == MOST_DROPPED or len(self._over) > _JOBS_PER_DROP:
            return True  # The next call reads the same jobs again.
        is_full = len(self._found) == MOST_DROPPED
        self._after = self._found[-1] if is_full else 0
        return is_full
