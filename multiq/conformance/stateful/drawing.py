"""The drawing of random walks."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Literal, TypeVar

from multiq.backend import PRIORITY_DEFAULT, STORED_STATES, State

from .steps import (  # fmt: skip
    KINDS,
    WAYS,
    Act,
    Add,
    AddAgain,
    CarryOut,
    Come,
    Delete,
    DropNote,
    Enqueue,
    EnqueueAgain,
    Exchange,
    Forget,
    History,
    Job,
    Kick,
    KickJob,
    List,
    ListNotes,
    Outcomes,
    Pause,
    Peek,
    Purge,
    PutNote,
    Reorder,
    Reschedule,
    Reserve,
    Resume,
    Say,
    Settle,
    Then,
    Tick,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend.capabilities import Capabilities

    from .steps import Step

T = TypeVar("T")

PRIORITIES = (0, 5, 5, 1024, 2**32 - 1)
TICKS = (0, 0, 1, 2, 3, 5)  # delays, in ticks
TTRS = (2, 3, 6)  # leases, in ticks
KEEPS = (0, 1, 4, 50, 50)  # ticks for which an outcome is kept; 50 ticks last to the end of the walk
STORED = (None, b"", b"new", b"\0")  # memos and details

KEYS = ("a", "a*", "ab", "A")  # of notes
VALUES = (b"", b"\0", b"1", b"22")  # of notes
MEMBERS = ("a", "A", "b", "b ")  # all held jobs have the same members

VERSIONS: tuple[Literal["now", "before", "none"], ...] = ("now", "now", "before", "none")


def draw_walks(can: Capabilities, count: int, *, real_time: bool, seed: int) -> list[list[Step]]:
    """Draw random walks of steps that the backend can take. The same arguments draw the same walks.

    No two walks take the same kinds of steps in the same order.
    """
    chance = random.Random(seed)  # noqa: S311 - repeatable
    drawn: dict[tuple[type, ...], list[Step]] = {}
    while len(drawn) < count:
        flows = bool(can.holds) and chance.random() < 0.5
        steps = _Drawing(can, chance, flows=flows).walk(real_time=real_time)
        drawn.setdefault(tuple(type(step) for step in steps), steps)
    return list(drawn.values())


class _Drawing:
    """Draws the steps of one walk.

    *flows*: whether the walk has held jobs, notes, and steps of verdicts.
    """

    def __init__(self, can: Capabilities, chance: random.Random, *, flows: bool) -> None:
        self._can = can
        self._chance = chance
        self._flows = flows
        self._priorities = PRIORITIES if can.priorities else (PRIORITY_DEFAULT,)
        # Without a total order, a job that was held may come after younger jobs of its priority. Each held job
        # therefore keeps a priority that no other job has.
        self._is_ordered_by_age = bool(can.total_order) or not flows
        self._own_priorities = itertools.count(max(PRIORITY_DEFAULT, *PRIORITIES[:-1]) + 1)
        self._states = [state for state in STORED_STATES if can.holds or state is not State.HELD]
        self._verdicts_kinds = ["ack", "release", "bury", "touch"]
        self._verdicts_kinds += ["give_back"] if can.give_back else []
        self._verdicts_kinds += ["abandon"] if can.portable_leases else []
        self._steps = self._possible_steps()
        self._acts = self._possible_acts()

    def walk(self, *, real_time: bool) -> list[Step]:
        """Several groups of steps, with ticks between the groups.

        On a backend with a real clock, each tick takes time. A walk on a backend with a real clock therefore has fewer
        groups and fewer ticks.
        """
        groups, ticks = (4, (1, 1, 2)) if real_time else (self._chance.randint(6, 10), (1, 1, 1, 2, 3))
        steps: list[Step] = []
        for _ in range(groups):
            for _ in range(self._chance.randint(3, 6)):
                steps += self._work() if self._chance.random() < 0.5 else [self._any(self._steps)()]
            steps.append(Tick(self._any(ticks)))
        return steps

    # --- what can be drawn, by weight ---

    def _possible_steps(self) -> list[Callable[[], Step]]:
        can = self._can
        steps: list[Callable[[], Step]] = [
            *3 * [self._enqueue], *3 * [self._reserve], *2 * [self._settle], self._exchange, self._reorder, self._kick,
            *_draws(can.client_ids, self._enqueue_again),
            *_draws(can.management, self._kick_job, self._reschedule, self._delete),
            *_draws(can.inspection, self._peek, self._list),
            *_draws(can.outcomes, self._outcomes, self._history, self._forget),
            *_draws(can.pausing, self._pause, self._resume),
            *_draws(can.purging, self._purge),
        ]  # fmt: skip
        if not self._flows:
            return steps
        steps += [self._list_notes] if can.notes else []
        one = len(steps)
        return [*3 * steps, *4 * one * [self._carry_out], *2 * one * [self._settle], *one * [self._enqueue]]

    def _possible_acts(self) -> list[Callable[[], Act]]:
        acts: list[Callable[[], Act]] = [*4 * [self._come]]
        acts += [self._add, self._add_again] if self._can.client_ids else []
        acts += [self._put_note, self._put_note, self._drop_note] if self._can.notes else []
        return acts

    # --- steps ---

    def _work(self) -> list[Step]:
        """Several steps that belong together. If all steps were drawn one by one, few steps would find a live lease."""
        verdicts = [self._settle, *_draws(self._can.outcomes, self._exchange, self._finish)]
        return [self._enqueue(), self._reserve(), self._any(verdicts)()]

    def _enqueue(self) -> Enqueue:
        return Enqueue(self._queue(), self._some(self._job, 1, 6))

    def _enqueue_again(self) -> EnqueueAgain:
        return EnqueueAgain(self._recent(), self._any(TICKS), self._any(self._priorities))

    def _reserve(self) -> Reserve:
        return Reserve(self._consumer(), self._limit())

    def _reorder(self) -> Reorder:
        return Reorder(self._consumer())

    def _settle(self) -> Settle:
        return Settle(self._consumer(), self._some(self._say, 1, 4))

    def _finish(self) -> Settle:
        """Acks of several leases."""
        leases = self._chance.sample(range(4), self._chance.randint(3, 4))
        return Settle(self._consumer(), [self._verdict("ack", lease) for lease in leases])

    def _exchange(self) -> Exchange:
        return Exchange(self._consumer(), self._some(self._say, 1, 4), self._limit())

    def _kick(self) -> Kick:
        return Kick(self._queue(), self._limit())

    def _kick_job(self) -> KickJob:
        return KickJob(self._recent())

    def _reschedule(self) -> Reschedule:
        return Reschedule(self._recent(), self._any(TICKS))

    def _delete(self) -> Delete:
        return Delete(self._recent())

    def _peek(self) -> Peek:
        return Peek(self._recent())

    def _list(self) -> List:
        return List(self._queue(), self._any(self._states))

    def _outcomes(self) -> Outcomes:
        return Outcomes(self._queue(), self._some(self._recent, 0, 4))

    def _history(self) -> History:
        return History(self._queue(), self._any((None, *KINDS)))

    def _forget(self) -> Forget:
        return Forget(self._queue(), self._any((None, self._some(self._recent, 0, 4))))

    def _carry_out(self) -> CarryOut:
        conditions = self._any((0, self._chance.randint(0, 2))) if self._can.notes else 0
        when = [(self._any(KEYS), self._any(VERSIONS)) for _ in range(conditions)]
        return CarryOut(self._queue(), self._steps_of_verdict(), when)

    def _list_notes(self) -> ListNotes:
        return ListNotes(self._queue(), self._any(("", "a", "a*")))

    def _pause(self) -> Pause:
        return Pause(self._queue(), self._any((1, 2, 4)))

    def _resume(self) -> Resume:
        return Resume(self._queue())

    def _purge(self) -> Purge:
        return Purge(self._queue(), [self._any(self._states) for _ in range(self._chance.randint(0, 3))])

    # --- jobs, verdicts, and steps of verdicts ---

    def _job(self) -> Job:
        body = self._chance.randbytes(self._chance.randint(0, 3))
        awaits = self._any((0, 0, 1, 2, 3, 4)) if self._flows else 0
        priority = self._any(self._priorities)
        if awaits and not self._is_ordered_by_age:
            priority = next(self._own_priorities)
        return Job(body, priority, self._any(TICKS), self._any(TTRS), awaits)

    def _say(self) -> Say:
        return self._verdict(self._any(self._verdicts_kinds), self._any((0, 0, 1, 1, 2, 3, 5, 7)))

    def _verdict(self, kind: str, lease: int) -> Say:
        """A verdict. *lease*: the number of the lease, counted from the consumer's newest lease."""
        priority = self._any((None, self._any(self._priorities))) if self._is_ordered_by_age else None
        reason = self._any((None, "one", "other"))
        return Say(kind, lease, self._any(TICKS), priority, reason, self._then(), self._steps_of_verdict())

    def _then(self) -> Then | None:
        """The values that a verdict stores, if the backend can store them. Half of the verdicts store nothing."""
        can = self._can
        if not (can.outcomes or can.memos) or self._chance.random() < 0.5:
            return None
        ticks, kind = (self._any(KEEPS), self._any(KINDS)) if can.outcomes else (0, KINDS[0])
        memo, detail = (self._any(STORED), self._any(STORED)) if can.memos else (None, None)
        return Then(ticks, b"%d" % self._chance.randrange(1000), kind, memo, detail)

    def _steps_of_verdict(self) -> list[Act]:
        return self._some(self._act, 0, 4) if self._flows else []

    def _act(self) -> Act:
        return self._any(self._acts)()

    def _come(self) -> Come:
        return Come(
            job=self._any((0, 0, 0, 1, 1, 2, 3, 4, 5, 6)),
            member=self._any(MEMBERS),
            expect=self._any((0, 0, 0, 0, 1, 2)),
            doom=self._any(("", "", "", "", "", "why", "other")),
        )

    def _add(self) -> Add:
        return Add(self._queue(), self._job())

    def _add_again(self) -> AddAgain:
        return AddAgain(self._recent(), self._any(TICKS), self._any(self._priorities))

    def _put_note(self) -> PutNote:
        return PutNote(self._queue(), self._any(KEYS), self._any(VALUES), self._any(TICKS))

    def _drop_note(self) -> DropNote:
        return DropNote(self._queue(), self._any(KEYS))

    # --- numbers ---

    def _queue(self) -> int:
        return self._any((0, 0, 0, 1))  # mostly one queue, so that several steps concern the same jobs

    def _consumer(self) -> int:
        return self._chance.randrange(len(WAYS))

    def _recent(self) -> int:
        return self._chance.randrange(8)  # counted from the newest job, because most older jobs are gone

    def _limit(self) -> int:
        return self._chance.randint(1, 4)

    def _any(self, choices: Sequence[T]) -> T:
        return self._chance.choice(choices)

    def _some(self, draw: Callable[[], T], least: int, most: int) -> list[T]:
        return [draw() for _ in range(self._chance.randint(least, most))]


def _draws(possible: object, *draws: Callable[[], Step]) -> list[Callable[[], Step]]:
    return list(draws) if possible else []
