"""A history grouped by job. A story holds the enqueues, reservations, runs and verdicts of a job, and the job's last
state.

At the end of a soak, an audit lists the jobs that the store still holds.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .history import FAIL, INFO, INVOKE, OK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .history import Event

SECOND = 1_000_000_000  # nanoseconds
VERDICTS = frozenset({"ack", "release", "bury", "give_back", "abandon"})
ORDERS = frozenset({"delete", "kick", "reschedule", "purge"})
NEVER = math.inf


@dataclass(slots=True)
class Run:
    """One execution of a job's code, from the job's own record."""

    at: int
    proc: str
    attempt: int
    ended_at: float = NEVER
    outcome: str = ""


@dataclass(slots=True)
class Claim:
    """A lease that a consumer recorded."""

    asked: int
    at: int
    proc: str
    token: str
    attempt: int
    ttr: int
    """Nanoseconds."""
    extended: int
    """The moment at which the claim, or the last successful touch, was sent.

    The lease lasts at least one ttr from this moment.
    """
    over: float = NEVER
    """The moment at which the first verdict on the lease was sent."""
    since: int = 0
    """The earliest moment at which the job may have been handed out.

    The lease may come from an earlier claim of this consumer whose reply was lost.
    """


@dataclass(slots=True)
class Said:
    """A verdict or an order (a delete, reschedule or kick), with its answer."""

    f: str
    asked: int
    at: float
    type: str
    proc: str
    token: str = ""
    delay: float = 0.0


@dataclass(slots=True)
class Story:
    """The records of one job."""

    number: int
    asked: int
    """The moment at which the job's first enqueue began."""
    queue: str
    priority: int
    delay: float
    ttr: float
    max_attempts: int
    max_crashes: int
    digest: str
    stored_at: float = NEVER
    """The moment of the first answer that says that the job is stored."""
    over_at: float = 0.0
    """The end of the job's last enqueue. If an enqueue has no answer, it ends at its deadline."""
    is_stored: bool = False
    is_repeated: bool = False
    """Whether the library repeats an enqueue of unknown effect. The library repeats the enqueues of tasks."""
    is_refused: bool = True
    """Whether every enqueue of the job certainly had no effect."""
    runs: list[Run] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    verdicts: list[Said] = field(default_factory=list)
    orders: list[Said] = field(default_factory=list)
    at_rest: list[str] = field(default_factory=list)
    """The states in which the audit found the job."""

    @property
    def due_at(self) -> float:
        """The earliest moment at which the job may be handed out if it is not rescheduled."""
        return self.asked + self.delay * SECOND

    def lease_of(self, run: Run) -> Claim | None:
        """The claim of this run, if its process records claims."""
        found = [claim for claim in self.claims if claim.at <= run.at and claim.proc == run.proc]
        return found[-1] if found else None


@dataclass(slots=True)
class Fault:
    """One fault that was made on the tested system."""

    at: int
    until: float
    kind: str
    target: str
    proc: str = ""
    """The process that made the fault."""


class Stories:
    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.jobs: dict[int, Story] = {}
        self.strangers: list[Event] = []
        """Events about jobs that were never enqueued, or were enqueued with another payload."""
        self.faults: list[Fault] = []
        self.calls: list[tuple[Event, Event | None]] = []
        """Every call that has a deadline or an error, with its answer."""
        self.notes: dict[str, list[Event]] = defaultdict(list)
        self.audited = False
        self._open: dict[tuple[str, int], Event] = {}
        self._runs: dict[tuple[str, int], Run] = {}
        self._claims: dict[tuple[int, str], Claim] = {}
        self._failed: dict[str, int] = {}
        """For each process, the moment of its first failed claim since its last successful claim."""
        for event in events:
            self._take(event)
        for begun in self._open.values():  # calls whose process has ended
            self._answered(begun, None)
        self._fault_times = [fault.at for fault in self.faults]
        self._longest_fault = max((fault.until - fault.at for fault in self.faults), default=0.0)

    def __iter__(self) -> Iterator[Story]:
        return iter(self.jobs.values())

    @property
    def left_undone(self) -> bool:
        """Whether the time to drain ended before all jobs were done."""
        return any(event.err for event in self.notes["drained"])

    def faults_between(self, begin: float, end: float, procs: set[str]) -> Iterator[Fault]:
        """Faults that overlap with the time from *begin* to *end*: faults on the store, on the link or on one of these
        processes."""
        # The faults are sorted by time. A fault that lasts at *begin* began no earlier than *begin* minus the duration
        # of the longest fault.
        first = bisect.bisect_left(self._fault_times, begin - self._longest_fault)
        last = bisect.bisect_right(self._fault_times, end)
        for fault in self.faults[first:last]:
            if fault.until >= begin and (fault.target in {"store", "link"} or fault.target in procs):
                yield fault

    def _take(self, event: Event) -> None:
        f = event.f
        if f == "start":
            self._start(event)
        elif f == "end":
            run = self._runs.pop((event.proc, event.op), None)
            if run is not None:
                run.ended_at, run.outcome = event.t, event.outcome
        elif f in {"struck", "missed"}:
            self._over(event)
        elif f == "fault":
            self.faults.append(Fault(event.t, event.t + event.value * SECOND, event.kind, event.target, event.proc))
        elif f == "audit":
            self._audit(event)
        elif event.type == INVOKE:
            self._open[event.proc, event.op] = event
            if f == "enqueue":
                self._asked(event)
        elif (event.proc, event.op) in self._open:
            self._answered(self._open.pop((event.proc, event.op)), event)
        else:
            self.notes[f].append(event)

    def _over(self, event: Event) -> None:
        """Extend the last fault of this process, if the fault lasted longer than was recorded at its start."""
        self.notes[event.f].append(event)
        for fault in reversed(self.faults):
            if fault.proc == event.proc:
                if fault.target in {"store", "link"}:
                    fault.until = max(fault.until, event.t + SECOND)
                return

    def _asked(self, event: Event) -> None:
        for at, number in enumerate(event.jobs):
            if number not in self.jobs:
                digest = event.digests[at] if event.digests else ""
                self.jobs[number] = Story(
                    number, event.t, event.queue, event.priority, event.delay, event.ttr, event.max_attempts,
                    event.max_crashes, digest, is_repeated=bool(event.kind),
                )  # fmt: skip

    def _start(self, event: Event) -> None:
        (number,) = event.jobs
        story = self._known(event, number, event.digests[0] if event.digests else "")
        if story is not None:
            run = Run(event.t, event.proc, event.attempts[0] if event.attempts else 0)
            story.runs.append(run)
            self._runs[event.proc, event.op] = run

    def _known(self, event: Event, number: int, digest: str) -> Story | None:
        story = self.jobs.get(number)
        if story is None or (digest and story.digest and digest != story.digest):
            self.strangers.append(event)
            return None
        return story

    def _answered(self, begun: Event, answer: Event | None) -> None:
        type_, at = (INFO, NEVER) if answer is None else (answer.type, float(answer.t))
        if begun.deadline or (answer is not None and answer.err):
            self.calls.append((begun, answer))
        if begun.f == "enqueue":
            self._enqueued(begun, answer, type_, at)
        elif begun.f == "claim" and type_ == OK and answer is not None:
            self._claimed(begun, answer)
        elif begun.f == "claim":
            self._failed.setdefault(begun.proc, begun.t)
        elif begun.f == "touch" and type_ == OK:
            self._touched(begun)
        elif begun.f in VERDICTS:
            self._settled(begun, type_, at)
        elif begun.f in ORDERS:
            for number in begun.jobs:
                if number in self.jobs:
                    self.jobs[number].orders.append(Said(begun.f, begun.t, at, type_, begun.proc, delay=begun.delay))

    def _touched(self, begun: Event) -> None:
        for number, token in zip(begun.jobs, begun.tokens, strict=True):
            if (number, token) in self._claims:
                self._claims[number, token].extended = begun.t

    def _settled(self, begun: Event, type_: str, at: float) -> None:
        for number, token in zip(begun.jobs, begun.tokens, strict=True):
            claim = self._claims.get((number, token))
            if claim is not None:
                claim.over = min(claim.over, begun.t)
            if number in self.jobs:
                said = Said(begun.f, begun.t, at, type_, begun.proc, token, begun.delay)
                self.jobs[number].verdicts.append(said)

    def _enqueued(self, begun: Event, answer: Event | None, type_: str, at: float) -> None:
        refused = set(answer.jobs) if answer is not None and type_ == FAIL and answer.jobs else None
        over_at = at if answer is not None else begun.t + begun.deadline * SECOND
        for number in begun.jobs:
            story = self.jobs[number]
            story.over_at = max(story.over_at, over_at)
            if type_ == OK:
                story.is_stored, story.is_refused = True, False
                story.stored_at = min(story.stored_at, at)
            elif type_ != FAIL or (refused is not None and number not in refused):
                story.is_refused = False

    def _claimed(self, begun: Event, answer: Event) -> None:
        since = self._failed.pop(begun.proc, begun.t)
        for at, number in enumerate(answer.jobs):
            story = self._known(answer, number, answer.digests[at] if answer.digests else "")
            if story is not None and begun.queue and story.queue != begun.queue:
                self.strangers.append(answer)  # the job is from a queue other than the one that the claim named
            elif story is not None:
                token = answer.tokens[at]
                claim = Claim(
                    begun.t, answer.t, begun.proc, token, answer.attempts[at] if answer.attempts else 0,
                    int(story.ttr * SECOND), since, since=since,
                )  # fmt: skip
                story.claims.append(claim)
                self._claims[number, token] = claim

    def _audit(self, event: Event) -> None:
        self.audited = True
        for number, state in zip(event.jobs, event.states, strict=True):
            story = self.jobs.get(number)
            if story is None:
                self.strangers.append(event)
            else:
                story.at_rest.append(state)
