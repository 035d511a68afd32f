"""Searches behind the ready jobs that a claim reads for jobs of other keys of fair limits.

Without a search, a key with many ready jobs would keep the jobs of other keys waiting until its jobs are parked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .gates import Candidate
from .records import AGAIN, READY, gates_in
from .statements import Sql, literal, render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multiq.backend import Gate

    from .connection import Session
    from .gates import Line

# A search reads this number of ready jobs first, then twice as many each time, and at most so many.
_SOUGHT_FIRST, _MOST_SOUGHT = 250, 4_000
# seconds that a search may take: less than PARKING_TIME in parking_time.py. An idle server reads 50,000 small jobs
SEARCH_TIME = 0.2
# rows for each ready job: if there are more, an index is read. It takes 2.5 times as long for each row
_SPARSEST = 2
_MOST_KNOWN = 20  # different texts of gates that a search leaves out
_MOST_FOUND = 50  # jobs that a search finds


class FairSearch:
    """The search of one transaction. It may search once, or not at all."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self.jobs: list[Candidate] = []
        """The jobs that were found, in their order. Each has other gates than all jobs before the search."""
        self._locked: set[int] = set()
        """The seqs of those of ``jobs`` that this transaction could not lock."""
        self.is_begun = False
        self.knows_all_keys = False
        """Whether the transaction knows all keys of fair limits that the ready jobs of the priority have."""

    def run(self, session: Session, last: Candidate, known: set[bytes]) -> None:
        """Lock the first ready jobs behind the job *last* whose gates are none of the *known* texts.

        The jobs have the priority of *last*, because jobs with this priority go before less urgent jobs. If a job is
        found, all earlier jobs with other texts are found, too.
        """
        if not 0 < len(known) <= _MOST_KNOWN:
            return
        self.is_begun = True
        found = self._found(session, last, Sql(",".join(map(literal, sorted(known)))))
        if not found:
            return
        own: dict[str, int | bytes] = {"queue": self._queue.encode(), "place": last.priority, "seq": last.seq}
        (locked,) = session.execute(render("reserve_others", seqs=sorted(found), **own))
        now = {seq: Candidate(last.priority, seq, gates_in(text), None) for seq, text in locked.rows}
        self.jobs = [now.get(seq, job) for seq, job in sorted(found.items())]
        self._locked = found.keys() - now.keys()

    def free_jobs(self, scan: Iterable[Candidate], lines: Mapping[Gate, Line]) -> list[Candidate]:
        """Return those of ``jobs`` that have a fair gate, and that share no fair gate with an earlier job. *scan*: the
        jobs before the search. *lines*: the gates that the transaction has locked.

        Otherwise the job would have to wait for that job, and perhaps for jobs between the two that were not read. Jobs
        that are returned may share a gate.
        """
        before = {gate for job in scan for gate in job.gates}
        found = []
        for job in self.jobs:
            fair = [gate for gate in job.gates if gate not in lines or lines[gate].is_fair]
            if fair and job.seq not in self._locked and before.isdisjoint(fair):
                found.append(job)
                continue
            before.update(job.gates)
            if fair:
                self.knows_all_keys = False
        return found

    def _found(self, session: Session, last: Candidate, known: Sql) -> dict[int, Candidate]:
        """Return the first ready jobs behind the job *last* that have gates, but none of the *known* texts, by seq."""
        began = time.monotonic()
        found: dict[int, Candidate] = {}
        seq, examined = last.seq, _SOUGHT_FIRST
        while True:
            began_part = time.monotonic()
            own: dict[str, int | bytes] = {"queue": self._queue.encode(), "place": last.priority, "seq": seq}
            ends = session.execute(
                *(render("others_end", state=state, examined=examined, **own) for state in (AGAIN, READY))
            )
            counted = [reply.rows[0] for reply in ends]
            rest = [highest for count, highest in counted if count == examined]
            end = min(rest) if rest else max((highest for _, highest in counted if highest), default=seq)
            # If other jobs have many of the rows in between, an index is read.
            is_dense = end - seq <= _SPARSEST * sum(count for count, _ in counted)
            verbs = [("others_by_seq", READY)] if is_dense else [("others", AGAIN), ("others", READY)]
            replies = session.execute(
                *(render(verb, state=state, known=known, end=end, limit=_MOST_FOUND, **own) for verb, state in verbs)
            )
            cut = min((reply.rows[-1][0] for reply in replies if len(reply.rows) == _MOST_FOUND), default=end)
            for reply in replies:
                found.update(
                    (job, Candidate(last.priority, job, gates_in(text), None)) for job, text in reply.rows if job <= cut
                )
            now = time.monotonic()
            self.knows_all_keys = not rest and cut == end
            # The next part takes about twice as long as this one.
            is_late = now - began + 2 * (now - began_part) > SEARCH_TIME
            if self.knows_all_keys or cut < end or len(found) >= _MOST_FOUND or is_late:
                return found
            seq, examined = end, min(2 * examined, _MOST_SOUGHT)
