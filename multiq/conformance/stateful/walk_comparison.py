"""Random walks: a backend and the memory backend take the same steps, and every answer is compared.

A walk is a list of steps drawn at random. Time passes in ticks.

If the clock is set by hand, a tick is exact, and delays and leases end at the moments of steps. A walk that shows a
difference is shortened before it is reported.

On a backend with a real clock, every delay and lease ends half a tick from any step. Because of the half tick, an
answer that comes a few milliseconds late is still the same on a correct backend. If the machine is too slow for a walk,
the walk ends without a result. On a backend with a real clock, a walk that shows a difference is not shortened.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import TYPE_CHECKING

from multiq.backend import STORED_STATES, State
from multiq.backend.memory import MemoryBackend
from multiq.conformance.harness import remove_jobs
from multiq.driverkit.clock import ManualClock

from .calls import Pace, Seconds, Side
from .drawing import draw_walks
from .steps import (  # fmt: skip
    KINDS,
    QUEUES,
    CarryOut,
    Delete,
    Enqueue,
    EnqueueAgain,
    Exchange,
    Forget,
    History,
    Kick,
    KickJob,
    List,
    ListNotes,
    Outcomes,
    Pause,
    Peek,
    Purge,
    Reorder,
    Reschedule,
    Reserve,
    Resume,
    Settle,
    Tick,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from multiq.backend import Backend
    from multiq.backend.capabilities import Capabilities
    from multiq.conformance.harness import Harness

    from .calls import Answer
    from .steps import Step

MARGIN = 0.4  # the steps between two ticks may take at most this share of a tick on a real-time backend
TOGETHER = 8  # walks that run at the same time in real time


class FellBehindError(Exception):
    """This machine could not keep up with real time. The error says nothing about the backend."""


class Walk:
    """Takes the steps of one walk with a backend and with its model."""

    def __init__(self, harness: Harness, backend: Backend, can: Capabilities, pace: Pace) -> None:
        self._harness = harness
        self._can = can
        self._pace = pace
        self._clock = ManualClock()
        queues = [harness.fresh_queue() for _ in range(QUEUES)]
        self._real = Side(backend, queues, self._pace, can)
        self._model = Side(MemoryBackend(clock=self._clock), queues, self._pace, can)
        self._started = 0.0
        self._ticks = 0
        self._steps: list[str] = []

    def stages(self, steps: Sequence[Step]) -> Generator[float, None, None]:
        """Take all steps, in stages. Each stage yields the moment at which the next stage has to begin.

        Raises ``AssertionError`` at the first difference, with the steps and answers so far. Raises ``FellBehindError``
        if the machine is too slow.
        """
        self._started = self._harness.now()
        try:
            for step in (*steps, *_AT_THE_END):
                if isinstance(step, Tick):
                    yield self._tick(step.ticks)
                elif self._takes_place(step):
                    self._take(step)
                if self._can.exact_counts:
                    self._compare_quickly("stats", self._real.stats(), self._model.stats())
            self._compare_quickly("names", self._real.names(), self._model.names())
        finally:
            self._leave()

    def _take(self, step: Step) -> None:
        verb = _VERBS[type(step)]
        # The step is recorded before the call. If the step raises an exception, the note of the exception therefore
        # includes the step.
        self._steps.append(f"{step}")
        try:
            real = getattr(self._real, verb)(step)
        except Exception as exc:
            exc.add_note(self._story())
            raise
        model = getattr(self._model, verb)(step)
        if isinstance(step, List) and step.state in {State.DELAYED, State.RESERVED}:
            real, model = _in_groups(real, model, "due in")
        elif isinstance(step, History):
            real, model = _in_groups(real, model, "expires in")
        self._steps[-1] += f"\n      -> {real}"
        self._compare_quickly(f"{step}", real, model)

    def _takes_place(self, step: Step) -> bool:
        if isinstance(step, List):
            return bool(self._can.lists_jobs) and (bool(self._can.holds) or step.state is not State.HELD)
        if isinstance(step, Resume):
            return bool(self._can.pausing)
        if isinstance(step, History | Outcomes) and not self._can.outcomes:
            return False
        if isinstance(step, ListNotes):
            return bool(self._can.notes)
        about_a_job = isinstance(step, EnqueueAgain | KickJob | Reschedule | Delete | Peek | Outcomes | Forget)
        return not about_a_job or bool(self._model.ids)

    def _tick(self, ticks: int) -> float:
        self._steps.append(f"{ticks * self._pace.step:g} s pass")
        self._ticks += ticks
        self._clock.advance(ticks * self._pace.step)
        return self._started + self._ticks * self._pace.step

    # --- comparing ---

    def _compare_quickly(self, what: str, real: Answer, model: Answer) -> None:
        """Compare two answers.

        Raises ``FellBehindError`` if real time is too far ahead of the model's time. If real time is too far ahead, the
        two answers may differ although both are right.
        """
        late = self._harness.now() - (self._started + self._ticks * self._pace.step)
        if self._pace.is_real and late > MARGIN * self._pace.step:
            raise FellBehindError
        self._compare(what, real, model)

    def _compare(self, what: str, real: Answer, model: Answer) -> None:
        for path, ours, theirs in _differences(real, model):
            if not self._agree(path, ours, theirs):
                raise AssertionError(
                    f"{what}: {path or 'the answer'} is {ours!r}, and should be {theirs!r}\n{self._story()}"
                )

    def _agree(self, path: str, real: Answer, model: Answer) -> bool:
        field = path.rpartition(".")[2]
        if real is None and model is not None and field in _UNKNOWN_WITHOUT:
            return not self._can.claim(_UNKNOWN_WITHOUT[field])
        if isinstance(real, Seconds) and isinstance(model, Seconds):
            tolerance = self._pace.step / 2 + self._can.delay_resolution if self._pace.is_real else 1e-5
            return abs(real - model) <= tolerance
        return bool(real == model)

    def _story(self) -> str:
        lines = [f"{number:4}. {step}" for number, step in enumerate(self._steps, 1)]
        return "the walk, with this backend's answers:\n" + "\n".join(lines)

    def _leave(self) -> None:
        """Remove the walk's jobs and pauses from the store. The next walk uses other queues."""
        self._real.close()
        for queue in self._real.queues:
            remove_jobs(self._real.backend, queue)


#: The end of each walk: list and reserve all remaining jobs, so that every difference is found.
_AT_THE_END: tuple[Step, ...] = (
    *(List(queue, state) for queue in range(QUEUES) for state in STORED_STATES),
    *(History(queue, kind) for queue in range(QUEUES) for kind in (None, *KINDS)),
    *(Outcomes(queue, list(range(8))) for queue in range(QUEUES)),
    *(ListNotes(home, "") for home in range(QUEUES)),
    *(Resume(queue) for queue in range(QUEUES)),
    Reserve(consumer=0, limit=1000),
)

_VERBS: dict[type, str] = {
    Enqueue: "enqueue", EnqueueAgain: "enqueue_again", Reserve: "reserve", Settle: "settle", Exchange: "exchange",
    Kick: "kick", KickJob: "kick_job", Reschedule: "reschedule", Delete: "delete", Peek: "peek", List: "listing",
    Pause: "pause", Resume: "resume", Purge: "purge", Reorder: "reorder",
    Outcomes: "outcomes", History: "history", Forget: "forget", CarryOut: "carry_out", ListNotes: "list_notes",
}  # fmt: skip

#: Fields that may be None if the backend lacks a capability, each with the name of the capability.
_UNKNOWN_WITHOUT = {
    "attempt": "durable_attempts", "crashes": "durable_attempts", "kicks": "durable_attempts", "reason": "reasons",
    "memo": "memos", "detail": "memos", "awaits": "holds", "held": "holds",
}  # fmt: skip


def _differences(real: Answer, model: Answer, path: str = "") -> Iterator[tuple[str, Answer, Answer]]:
    """Yield each pair of values to compare, with the path of the values in the two answers."""
    if isinstance(real, dict) and isinstance(model, dict) and real.keys() == model.keys():
        for name in model:
            yield from _differences(real[name], model[name], f"{path}.{name}".lstrip("."))
    elif isinstance(real, list | tuple) and isinstance(model, list | tuple) and len(real) == len(model):
        for at, (ours, theirs) in enumerate(zip(real, model, strict=True)):
            yield from _differences(ours, theirs, f"{path}[{at}]")
    else:
        yield path, real, model


def _in_groups(real: Answer, model: Answer, time: str) -> tuple[Answer, Answer]:
    """Sort jobs with the same *time* by number in both listings. The contract does not order jobs of equal time."""
    if len(real) != len(model):
        return real, model
    real_sorted: list[Answer] = []
    model_sorted: list[Answer] = []
    for _, group in itertools.groupby(model, key=lambda record: round(record[time], 3)):
        theirs = list(group)
        ours = real[len(real_sorted) : len(real_sorted) + len(theirs)]
        real_sorted += sorted(ours, key=lambda record: int(record["job"]))
        model_sorted += sorted(theirs, key=lambda record: int(record["job"]))
    return real_sorted, model_sorted


def run_walks(harness: Harness, backend: Backend, can: Capabilities) -> int:
    """Draw ``harness.walks`` new random walks and take them. Returns the number of walks that were finished in time.

    The note of an error says how to draw the same walks again.
    """
    seed = random.randrange(2**32)  # noqa: S311 - guards nothing
    try:
        return take_walks(harness, backend, can, draw_walks(can, harness.walks, real_time=harness.real_time, seed=seed))
    except Exception as exc:
        exc.add_note(f"drawn by draw_walks(can, {harness.walks}, real_time={harness.real_time}, seed={seed})")
        raise


def take_walks(harness: Harness, backend: Backend, can: Capabilities, walks: Sequence[list[Step]]) -> int:
    """Take these walks. Returns the number of walks that were finished in time.

    Raises ``AssertionError`` at the first difference, with the walk's steps and answers. If the clock is set by hand,
    the walk in the error is a shortened one.
    """
    taker = _Taker(harness, backend, can)
    if harness.real_time:
        return sum(taker.side_by_side(walks[at : at + TOGETHER]) for at in range(0, len(walks), TOGETHER))
    for steps in walks:
        error = taker.failure(steps)
        if error is not None:
            taker.take(taker.shortened(steps))
            raise error  # the shortened walk does not fail alone, but only after other walks
    return len(walks)


class _Taker:
    """Takes walks one after the other. In real time, walks are taken in parallel, because most of the time is spent
    waiting.
    """

    def __init__(self, harness: Harness, backend: Backend, can: Capabilities) -> None:
        self._harness = harness
        self._backend = backend
        self._can = can
        self._pace = Pace(harness, can)

    def take(self, steps: Sequence[Step]) -> None:
        """Take one walk, on a clock that is set by hand. Raises at the first difference."""
        for moment in self._stages(steps):
            self._harness.advance(moment - self._harness.now())

    def side_by_side(self, walks: Sequence[Sequence[Step]]) -> int:
        """Take several walks in real time. Each walk begins a little after the previous one, so that no walk delays
        another.

        Returns the number of walks that were finished in time. Raises at the first difference. If the walk is repeated,
        the difference may not appear again.
        """
        finished = 0
        started = self._harness.now()
        apart = self._pace.step / len(walks)
        waiting = [(started + at * apart, at, self._stages(steps)) for at, steps in enumerate(walks)]
        try:
            while waiting:
                moment, at, stages = heapq.heappop(waiting)
                self._harness.advance(moment - self._harness.now())
                try:
                    heapq.heappush(waiting, (next(stages), at, stages))
                except StopIteration:
                    finished += 1
                except FellBehindError:
                    continue
        finally:
            for _, _, stages in waiting:
                stages.close()
        return finished

    def shortened(self, steps: list[Step]) -> list[Step]:
        """Leave out the steps that the failure does not need. Large parts are tried first, then single steps."""
        size = len(steps)
        while size:
            at = 0
            while at < len(steps):
                shorter = steps[:at] + steps[at + size :]
                if self.failure(shorter) is not None:
                    steps = shorter
                else:
                    at += size
            size //= 2
        return steps

    def failure(self, steps: Sequence[Step]) -> Exception | None:
        try:
            self.take(steps)
        except Exception as exc:  # noqa: BLE001 - a walk with any error is shortened
            return exc
        return None

    def _stages(self, steps: Sequence[Step]) -> Generator[float, None, None]:
        return Walk(self._harness, self._backend, self._can, self._pace).stages(steps)
