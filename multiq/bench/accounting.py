"""The proof: what was enqueued, beside what was run, beside what the store still has. Anything odd is a violation."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .report import Accounting, Violation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .journal import Run

TOLERANCE = 2_000_000
"""Nanoseconds: two clocks that tick at slightly different rates are no early start."""

_MS = 1e6


class Sent(NamedTuple):
    """One call that enqueued jobs, of consecutive numbers."""

    first: int
    jobs: int
    called: int
    """When the call began: CLOCK_MONOTONIC, ns."""
    returned: int
    """When the enqueue was acknowledged."""
    delay: float = 0.0
    """Seconds."""
    priority: int = 0
    intended: int = 0
    """When it was to begin, by the schedule: what a latency counts from. 0: there was no schedule."""


class Evidence(msgspec.Struct, kw_only=True):
    """All that is known of the jobs of one repeat."""

    sent: list[Sent]
    runs: list[Run]
    removed: int = 0
    """Jobs that were purged, as the store counted them."""
    left: int | None = 0
    """Jobs that the store had at the end, in any state; None: it cannot tell."""
    fails: Mapping[int, int] = {}
    """Job number -> how many of its runs were to fail."""
    killed: Mapping[int, int] = {}
    """Process that was killed -> when, in ns: what it held is run again."""
    in_order: bool = False
    """Whether one consumer was promised the order of priority, then age, all jobs being there before it began."""
    complaint: str | None = None
    """Why the work could not be carried through."""


def account(evidence: Evidence) -> Accounting:
    """What became of the jobs."""
    ledger = _Ledger(evidence)
    found = [
        ledger.failed(),
        ledger.lost(),
        ledger.doubled(),
        ledger.early(),
        ledger.out_of_order(),
        ledger.overlap(),
        ledger.invented(),
    ]
    checked = ["lost", "doubled", "early", "overlap", "invented"]
    if evidence.in_order:
        checked.insert(3, "out of order")
    return Accounting(
        enqueued=ledger.enqueued,
        finished=len(ledger.finished),
        runs=len(evidence.runs),
        explained=ledger.explained,
        violations=[violation for violation in found if violation is not None],
        checked=checked,
    )


class _Ledger:
    """The evidence by job. Each question is a method; its answer is a violation, or None."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._sent = sorted(evidence.sent)
        self._firsts = [sent.first for sent in self._sent]
        self.enqueued = sum(sent.jobs for sent in self._sent)
        self._strangers: list[Run] = []
        self._by_number: dict[int, list[Run]] = defaultdict(list)
        for run in sorted(evidence.runs, key=lambda run: run.start):
            if self._sent_with(run.number) is None:
                self._strangers.append(run)
            else:
                self._by_number[run.number].append(run)
        self.finished = {number for number, runs in self._by_number.items() if any(run.is_finished for run in runs)}
        self.explained = sum(min(len(runs) - 1, self._may_rerun(runs)) for runs in self._by_number.values())

    def failed(self) -> Violation | None:
        complaint = self._evidence.complaint
        return None if complaint is None else Violation("failed", 1, complaint)

    def lost(self) -> Violation | None:
        """Neither run to the end, nor purged, nor in the store. What the store cannot tell is not lost for certain."""
        if self._evidence.left is None:
            return None
        missing = self.enqueued - len(self.finished) - self._evidence.removed - self._evidence.left
        if missing <= 0:
            return None
        return Violation("lost", missing, self._missing_one())

    def doubled(self) -> Violation | None:
        """Run more often than failures and killed processes explain."""
        found = [(number, runs) for number, runs in self._by_number.items() if len(runs) - 1 > self._may_rerun(runs)]
        if not found:
            return None
        number, runs = found[0]
        why = "nothing explains more than one" if not self._may_rerun(runs) else "not all of them explained"
        return Violation("doubled", len(found), f"job {number} was run {len(runs)} times, {why}: {_times(runs)}")

    def early(self) -> Violation | None:
        """Begun before it was due, or before it was enqueued at all."""
        found = []
        for number, runs in self._by_number.items():
            sent = self._sent_with(number)
            if sent is not None:
                due = sent.called + round(sent.delay * 1e9)
                found += [(due - run.start, run, sent) for run in runs if run.start < due - TOLERANCE]
        if not found:
            return None
        by, run, sent = max(found)
        example = f"job {run.number}, delayed by {sent.delay:.3f} s, was begun {by / _MS:.1f} ms before it was due"
        return Violation("early", len(found), example)

    def out_of_order(self) -> Violation | None:
        """Begun before one that was to go first: a lower priority number, or as low and older."""
        if not self._evidence.in_order:
            return None
        firsts = sorted((runs[0] for runs in self._by_number.values()), key=lambda run: run.start)
        places = [self._place(run.number) for run in firsts]
        found = []
        next_due: tuple[int, int] | None = None  # the job that was to go first, of all that began later
        for place in reversed(places):
            if next_due is not None and place > next_due:
                found.append((place, next_due))
            next_due = place if next_due is None else min(place, next_due)
        if not found:
            return None
        (priority, number), (first_priority, first_number) = found[-1]
        return Violation(
            "out of order",
            len(found),
            f"job {number} of priority {priority} was begun before job {first_number} of priority {first_priority}",
        )

    def overlap(self) -> Violation | None:
        """Two runs of one job at one time."""
        found = [
            (first, second)
            for runs in self._by_number.values()
            for first, second in pairwise(runs)
            if second.start < self._ended(first)
        ]
        if not found:
            return None
        first, second = found[0]
        example = f"job {first.number} was begun by process {second.pid} while process {first.pid} ran it"
        return Violation("overlap", len(found), example)

    def invented(self) -> Violation | None:
        if not self._strangers:
            return None
        numbers = {run.number for run in self._strangers}
        return Violation("invented", len(numbers), f"job {min(numbers)} was run, and nobody enqueued it")

    # --- small questions ---

    def _sent_with(self, number: int) -> Sent | None:
        index = bisect_right(self._firsts, number) - 1
        if index < 0:
            return None
        sent = self._sent[index]
        return sent if number < sent.first + sent.jobs else None

    def _place(self, number: int) -> tuple[int, int]:
        sent = self._sent_with(number)
        return (0 if sent is None else sent.priority), number

    def _may_rerun(self, runs: Sequence[Run]) -> int:
        """How many runs beyond the first are explained: one for each that failed, or whose process was killed.

        A killed process may have finished jobs that it had not settled yet: those come again, too.
        """
        killed: Collection[int] = self._evidence.killed
        return self._evidence.fails.get(runs[0].number, 0) + sum(run.pid in killed for run in runs)

    def _ended(self, run: Run) -> int:
        """When a run was over; one that was cut short ended with its process."""
        return run.end or self._evidence.killed.get(run.pid, run.start)

    def _missing_one(self) -> str:
        unfinished = (
            sent.first + index
            for sent in self._sent
            for index in range(sent.jobs)
            if sent.first + index not in self.finished
        )
        number = next(unfinished)
        how = "was begun and never ended" if number in self._by_number else "was never begun"
        return f"job {number} was enqueued, {how}, and the store does not have it"


def _times(runs: Sequence[Run]) -> str:
    start = runs[0].start
    return ", ".join(f"process {run.pid} at +{(run.start - start) / _MS:.1f} ms" for run in runs[:4])
