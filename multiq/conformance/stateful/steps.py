"""The steps of a random walk as plain data, and the drawing of walks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from multiq.backend import PRIORITY_DEFAULT, STORED_STATES, State

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities

QUEUES = 2
WAYS: tuple[tuple[int, ...], ...] = ((0, 1), (1, 0), (0,))  # the queues of each consumer, in the consumer's order
PRIORITIES = (0, 5, 5, 1024, 2**32 - 1)
TICKS = (0, 0, 1, 2, 3, 5)  # delays, in ticks
TTRS = (2, 3, 6)  # leases, in ticks


class Job(NamedTuple):
    """A job to enqueue. ``ticks`` (the delay) and ``ttr`` are numbers of ticks."""

    body: bytes
    priority: int
    ticks: int
    ttr: int


class Say(NamedTuple):
    """A verdict on a lease that a consumer has had. The lease may have ended."""

    kind: str
    lease: int
    ticks: int
    priority: int | None
    reason: str | None


class Enqueue(NamedTuple):
    queue: int
    jobs: list[Job]


class EnqueueAgain(NamedTuple):
    """Enqueue a job with the id of an earlier job and with other options."""

    job: int
    ticks: int
    priority: int


class Reserve(NamedTuple):
    consumer: int
    limit: int


class Reorder(NamedTuple):
    """Reverse the order of queues that a consumer's next calls name. If the order is reversed already, the next calls
    name no order.
    """

    consumer: int


class Settle(NamedTuple):
    consumer: int
    verdicts: list[Say]


class Exchange(NamedTuple):
    consumer: int
    verdicts: list[Say]
    limit: int


class Kick(NamedTuple):
    queue: int
    limit: int


class KickJob(NamedTuple):
    job: int


class Reschedule(NamedTuple):
    job: int
    ticks: int


class Delete(NamedTuple):
    job: int


class Peek(NamedTuple):
    job: int


class List(NamedTuple):
    queue: int
    state: State


class Pause(NamedTuple):
    queue: int
    ticks: int


class Resume(NamedTuple):
    queue: int


class Purge(NamedTuple):
    queue: int
    states: list[State]


class Tick(NamedTuple):
    ticks: int


Step: TypeAlias = (
    Enqueue
    | EnqueueAgain
    | Reserve
    | Reorder
    | Settle
    | Exchange
    | Kick
    | KickJob
    | Reschedule
    | Delete
    | Peek
    | List
    | Pause
    | Resume
    | Purge
    | Tick
)


def draw_walks(can: Capabilities, count: int, *, real_time: bool, derandomize: bool = False) -> list[list[Step]]:
    """Draw at most *count* random walks of steps that the backend can take.

    No two walks take the same kinds of steps in the same order.
    """
    drawn: dict[tuple[type, ...], list[Step]] = {}

    @settings(
        max_examples=5 * count,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        print_blob=False,
    )
    @given(_walks(can, real_time=real_time))
    def draw(steps: list[Step]) -> None:
        # Hypothesis draws the simplest walk first. Later walks are often variations of the walk before.
        drawn.setdefault(tuple(type(step) for step in steps), steps)
        if len(drawn) > count:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        draw()
    return list(drawn.values())[-count:]


class _EnoughError(Exception):
    """Ends the drawing when enough walks have been drawn."""


def _walks(can: Capabilities, *, real_time: bool) -> st.SearchStrategy[list[Step]]:
    """Walks of steps that the backend can take. A walk has several groups of steps, with ticks between the groups.

    On a backend with a real clock a walk has fewer groups and fewer ticks, because each tick waits.
    """
    stretches, ticks = (4, [1, 1, 2]) if real_time else (10, [1, 1, 1, 2, 3])
    queue = st.sampled_from([0, 0, 0, 1])  # mostly one queue, so that several steps concern the same jobs
    consumer = st.integers(0, len(WAYS) - 1)
    recent = st.integers(0, 7)  # counted from the newest job, so that most steps concern jobs that still exist
    later = st.sampled_from(TICKS)
    limit = st.integers(1, 4)
    kinds = ["ack", "release", "bury", "touch", *(["give_back"] if can.give_back else [])]
    kinds += ["abandon"] if can.portable_leases else []
    priorities = st.sampled_from(PRIORITIES if can.priorities else (PRIORITY_DEFAULT,))
    priority = st.one_of(st.none(), priorities)
    reason = st.sampled_from([None, "one", "other"])
    verdicts = st.lists(st.builds(Say, st.sampled_from(kinds), recent, later, priority, reason), min_size=1, max_size=4)
    jobs = st.builds(Job, st.binary(max_size=3), priorities, later, st.sampled_from(TTRS))
    enqueue = st.builds(Enqueue, queue, st.lists(jobs, min_size=1, max_size=6))
    reserve = st.builds(Reserve, consumer, limit)
    settle = st.builds(Settle, consumer, verdicts)
    step: st.SearchStrategy[Any] = st.one_of(
        enqueue, enqueue, enqueue, reserve, reserve, reserve, settle, settle,
        st.builds(Exchange, consumer, verdicts, limit),
        st.builds(Reorder, consumer),
        *([st.builds(EnqueueAgain, recent, later, priorities)] if can.client_ids else []),
        st.builds(Kick, queue, limit),
        *([st.builds(KickJob, recent), st.builds(Reschedule, recent, later), st.builds(Delete, recent)]
          if can.management else []),
        *([st.builds(Peek, recent), st.builds(List, queue, st.sampled_from(STORED_STATES))] if can.inspection else []),
        *([st.builds(Pause, queue, st.sampled_from([1, 2, 4])), st.builds(Resume, queue)] if can.pausing else []),
        *([st.builds(Purge, queue, st.lists(st.sampled_from(STORED_STATES), max_size=3))] if can.purging else []),
    )  # fmt: skip
    tick = st.builds(Tick, st.sampled_from(ticks))
    stretch = st.lists(step, min_size=4, max_size=10)
    return st.lists(st.tuples(stretch, tick), min_size=min(6, stretches), max_size=stretches).map(
        lambda parts: [step for stretch, tick in parts for step in (*stretch, tick)]
    )
