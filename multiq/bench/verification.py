"""Verification compares the enqueued jobs, the runs, and the jobs that the store still has.

Any mismatch is a violation. Each job is identified by the number that it carries as its argument. By the numbers, a
missing job is reported as lost even if another job came twice and the store's counts are right.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multiq.formatting import many

from .report import Verification, Violation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from .run_log import Run

TOLERANCE = 2_000_000
"""Nanoseconds that a job may start early, because the client's and the server's clocks tick at different rates."""

_MS = 1e6


class Sent(NamedTuple):
    """One call that enqueued jobs with consecutive numbers."""

    first: int
    jobs: int
    called: int
    """The beginning of the call: CLOCK_MONOTONIC, ns."""
    returned: int
    """The time of the acknowledgement."""
    delay: float = 0.0
    """Seconds."""
    priority: int = 0
    intended: int = 0
    """The planned time of the call, in ns. If a job has a planned time, latencies are measured from the planned time. 0
    means that there is no schedule."""


class Evidence(msgspec.Struct, kw_only=True):
    """All records about the jobs of one repeat."""

    sent: list[Sent]
    runs: list[Run]
    emptied: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """The numbers of the jobs that were taken out, without running them, after the work. A number may be in the list
    more than once."""
    found_after: int = 0
    """The number of jobs in *emptied* that were found after the workload had finished with its queue. Expected: 0.
    """
    left: Mapping[str, int | None] = {}
    """The number of jobs that the store counted after the workload, by state. The value is None if the store cannot
    count the jobs."""
    elsewhere: Mapping[str, int | None] = {}
    """The number of jobs in each queue that did not exist before the work. The value is None if the store cannot count
    the jobs."""
    purged: int = 0
    """How many jobs the final purge has deleted, according to the store. The purge does not delete reserved jobs."""
    fails: Mapping[int, int] = {}
    """The number of planned failures of each job. The keys are the jobs' numbers."""
    killed: Mapping[int, int] = {}
    """The time of each kill in ns. The keys are the pids of the killed processes. A killed process's jobs are run
    again."""
    in_order: bool = False
    """Whether the jobs must come in the order of priority, then age.

    The order is certain if there was only one consumer, which began after all jobs had been enqueued.
    """
    complaint: str | None = None
    """The reason why the work could not be completed, or why its figure is missing."""
    is_through: bool = False
    """Whether all jobs were run although there is a *complaint*. If all jobs were run in spite of a complaint, only the
    figure is missing."""


def verify(evidence: Evidence) -> Verification:
    """Verify the jobs of one repeat."""
    verifier = _Verifier(evidence)
    found = [
        verifier.failed(),
        verifier.lost(),
        verifier.doubled(),
        verifier.early(),
        verifier.out_of_order(),
        verifier.overlap(),
        verifier.invented(),
        verifier.left_over(),
    ]
    checked = ["lost", "doubled", "early", "overlap", "invented", "left over"]
    if evidence.in_order:
        checked.insert(3, "out of order")
    return Verification(
        enqueued=verifier.enqueued,
        finished=verifier.enqueued - len(verifier.missing),
        runs=len(evidence.runs),
        explained=verifier.explained,
        violations=[violation for violation in found if violation is not None],
        checked=checked,
    )


class _Verifier:
    """Checks the evidence job by job. Each check is a method that returns a violation or None."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._sent = sorted(evidence.sent)
        self._firsts = [sent.first for sent in self._sent]
        self.enqueued = sum(sent.jobs for sent in self._sent)
        self._unknown: list[int] = []
        self._by_number: dict[int, list[Run]] = defaultdict(list)
        for run in sorted(evidence.runs, key=lambda run: run.start):
            if self._sent_with(run.number) is None:
                self._unknown.append(run.number)
            else:
                self._by_number[run.number].append(run)
        finished = {number for number, runs in self._by_number.items() if any(run.is_finished for run in runs)}
        self._emptied = bytearray(
            self.enqueued
        )  # how often each job was taken out, up to 255; a million jobs take a megabyte
        self._unknown += self._note_emptied()
        self.missing = [number for number, taken in self._jobs() if not taken and number not in finished]
        """The jobs that were neither run to the end nor taken out of the queue."""
        self.explained = sum(min(len(runs) - 1, self._may_rerun(runs)) for runs in self._by_number.values())

    def failed(self) -> Violation | None:
        complaint = self._evidence.complaint
        return None if complaint is None else Violation("failed", 1, complaint)

    def lost(self) -> Violation | None:
        """Jobs that were neither run to the end, nor handed out when the queue was emptied.

        A job that the store still counts but never hands out is lost, too. If the work was interrupted, missing jobs
        may still be in the store. After an interruption, missing jobs count as lost only if the store is known to be
        empty.
        """
        if not self.missing or (self._broke_off and self._left != 0):
            return None
        number = self.missing[0]
        how = "begun and never ended" if number in self._by_number else "never begun"
        example = f"job {number} was enqueued, was {how}, and the store does not hand it out"
        return Violation("lost", len(self.missing), example)

    def doubled(self) -> Violation | None:
        """Jobs that were handed out more often than failures and killed processes explain."""
        found = [(number, runs, 0) for number, runs in self._by_number.items() if self._is_doubled(runs, 0)]
        if self._evidence.emptied:
            found = [
                (number, self._by_number.get(number, []), taken)
                for number, taken in self._jobs()
                if self._is_doubled(self._by_number.get(number, []), taken)
            ]
        if not found:
            return None
        number, runs, taken = found[0]
        why = "not all of them explained" if runs and self._may_rerun(runs) else "nothing explains more than one"
        times = f"handed out {len(runs) + taken} times" if taken else f"run {len(runs)} times"
        example = f"job {number} was {times}, {why}: {_times(runs, taken)}"
        return Violation("doubled", len(found), example)

    def early(self) -> Violation | None:
        """Runs that began before the job was due or was enqueued."""
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
        """Jobs that were begun before a job that was to go first.

        A job goes first if it has a lower priority number, or the same number and a greater age.
        """
        if not self._evidence.in_order:
            return None
        firsts = sorted((runs[0] for runs in self._by_number.values()), key=lambda run: run.start)
        places = [self._place(run.number) for run in firsts]
        found = []
        next_due: tuple[int, int] | None = None  # the job that should go first among all later jobs
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
        """Two runs of one job at the same time."""
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
        if not self._unknown:
            return None
        numbers = set(self._unknown)
        return Violation("invented", len(numbers), f"job {min(numbers)} was run, and was never enqueued")

    def left_over(self) -> Violation | None:
        """Jobs that are in the store after all work is done. If the work was interrupted, jobs that remain are not a
        violation."""
        after, left, purged = self._evidence.found_after, self._left or 0, self._evidence.purged
        if self._broke_off or not (after or left or purged or self._evidence.elsewhere):
            return None
        if not (after or left or purged):
            return self._left_elsewhere()
        states = ", ".join(f"{count} {state}" for state, count in self._evidence.left.items() if count)
        counted = f"the store counts {states}" if states else "the store counts none"
        example = f"when all work was done, {counted}, and hands out {after or 'none'}"
        example += f"; a purge then deletes {purged}" if purged else ""
        return Violation("left over", max(after, left, purged), example)

    def _left_elsewhere(self) -> Violation:
        """Jobs that are in queues to which the bench has sent no job."""
        queue, count = next(iter(self._evidence.elsewhere.items()))
        jobs = "jobs, and does not say how many" if count is None else many(count, "job")
        total = sum(1 if count is None else count for count in self._evidence.elsewhere.values())
        example = f"when all work was done, the store had {jobs} in queue {queue!r}, which was not there before"
        return Violation("left over", max(1, total), example)

    # --- small questions ---

    @property
    def _broke_off(self) -> bool:
        return self._evidence.complaint is not None and not self._evidence.is_through

    @property
    def _left(self) -> int | None:
        """The number of jobs that the store counted at the end, in any state. The result is None if the store cannot
        count the jobs."""
        counts = self._evidence.left.values()
        return None if None in counts else sum(count for count in counts if count is not None)

    def _jobs(self) -> Iterator[tuple[int, int]]:
        """The number of each enqueued job, and how often it was taken out when the queue was emptied."""
        numbers = chain.from_iterable(range(sent.first, sent.first + sent.jobs) for sent in self._sent)
        return zip(numbers, self._emptied, strict=True)

    def _note_emptied(self) -> list[int]:
        """Count the jobs that were taken out. Returns the numbers of jobs that were never enqueued.

        After an interruption the enqueued jobs are not known, so no numbers are returned.
        """
        strangers = []
        before = list(accumulate((sent.jobs for sent in self._sent), initial=0))
        for number in self._evidence.emptied:
            place = bisect_right(self._firsts, number) - 1
            if place < 0 or number >= self._sent[place].first + self._sent[place].jobs:
                strangers.append(number)
                continue
            at = before[place] + number - self._firsts[place]
            self._emptied[at] = min(255, self._emptied[at] + 1)
        return [] if self._broke_off else strangers

    def _is_doubled(self, runs: Sequence[Run], taken: int) -> bool:
        return len(runs) + taken > 1 and len(runs) + taken - 1 > (self._may_rerun(runs) if runs else 0)

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
        """How many additional runs, after the first run, are explained.

        A failure explains one more run. A kill of the run's process explains one more run. The process may have
        finished the job without settling it.
        """
        killed: Collection[int] = self._evidence.killed
        return self._evidence.fails.get(runs[0].number, 0) + sum(run.pid in killed for run in runs)

    def _ended(self, run: Run) -> int:
        """The end of a run. An unfinished run ended when its process ended."""
        return run.end or self._evidence.killed.get(run.pid, run.start)


def _times(runs: Sequence[Run], taken: int = 0) -> str:
    start = runs[0].start if runs else 0
    parts = [f"process {run.pid} at +{(run.start - start) / _MS:.1f} ms" for run in runs[:4]]
    return ", ".join([*parts, f"{many(taken, 'time')} when the queue was emptied"] if taken else parts)
