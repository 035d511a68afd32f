"""Random walks over plain verbs and effects on each backend, and planted bugs that they must find.

A failure names the walk's seed. ``python tests/soak/effect_walks.py --backend NAME --seed N --walks 1`` repeats it.

The seeds are fixed, so each run of the tests plays the same walks. ``python tests/soak/effect_walks.py --backend NAME``
draws new seeds, and finds more.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import pytest
from soak.effect_walks import play
from soak.limit_model import DiffersError
from soak.walked_stores import BACKENDS, PARTITIONS, Store, stores

from multiq.backend import State
from multiq.backend.memory import JobQueue, MemoryConsumer
from multiq.conformance.planted import PLANTED, PlantedBug
from multiq.conformance.planted.registry import Planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Backend, Lease, NewJob, UniqueKey, Verdict
    from multiq.backend.memory import Job
    from multiq.driverkit.clock import ManualClock
    from multiq.errors import LeaseLost

STEPS = 120  # of a quick walk
WALKS = 100  # in which a planted bug must be found
LONG_WALKS = {"memory": 50, "sqlite": 14, "redis": 7, PARTITIONS: 5, "mysql": 3}
MORE = 3  # times as many with ``make test-exhaustive``


@pytest.mark.one_row
@pytest.mark.parametrize("name", [*BACKENDS, PARTITIONS])
def test_a_short_walk_gets_only_answers_that_the_contract_allows(name: str) -> None:
    with stores(name) as store:
        play(store, range(1), STEPS)


@pytest.mark.long
@pytest.mark.parametrize("share", [1, pytest.param(MORE, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", LONG_WALKS)
def test_many_long_walks_get_only_answers_that_the_contract_allows(name: str, share: int) -> None:
    with stores(name) as store:
        play(store, range(share * LONG_WALKS[name]), 400)


# --- planted bugs ----------------------------------------------------------------------------------------


class _MemoKeptQueue(JobQueue):
    """Leaves the memo of a job that is replaced."""

    def replace(self, job: Job, new: NewJob, unique: UniqueKey, now: int) -> None:
        memo = job.memo
        super().replace(job, new, unique, now)
        job.memo = memo


class _MemoKept(Planted):
    queue_class: ClassVar[type[JobQueue]] = _MemoKeptQueue


class _UncountedQueue(JobQueue):
    """Counts no crash of a doomed job."""

    def make_ready(self, job: Job, *, crashed: bool = False) -> None:
        super().make_ready(job, crashed=crashed and not job.doomed)


class _CrashNotCounted(Planted):
    queue_class: ClassVar[type[JobQueue]] = _UncountedQueue


class _DelayingQueue(JobQueue):
    """Delays a held job that is kicked."""

    def kick(self, job: Job, now: int) -> bool:
        was_held = job.state is State.HELD and job.delay > 0
        kicked = super().kick(job, now)
        if was_held:
            self.make_due(job, job.delay, now)
        return kicked


class _KickDelays(Planted):
    queue_class: ClassVar[type[JobQueue]] = _DelayingQueue


class _ReorderingConsumer(MemoryConsumer):
    """An exchange carries out its releases last."""

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        order = sorted(range(len(verdicts)), key=lambda at: type(verdicts[at]).__name__ == "Release")
        answers, leases = super().exchange([verdicts[at] for at in order], limit, timeout, queues)
        found = dict(zip(order, answers, strict=True))
        return [found[at] for at in range(len(verdicts))], leases


class _VerdictsReordered(Planted):
    consumer_class: ClassVar[type[MemoryConsumer]] = _ReorderingConsumer


BUGS = [
    PlantedBug("memo kept", "a job that is replaced keeps its memo", "", _MemoKept),
    PlantedBug("crash not counted", "the end of a doomed job's lease counts no crash", "", _CrashNotCounted),
    PlantedBug("kick delays", "a kick of a held job begins its delay", "", _KickDelays),
    PlantedBug("verdicts reordered", "an exchange carries out its releases last", "", _VerdictsReordered),
    PLANTED["memo lost at the lease's end"],
    PLANTED["expect too late"],
    PLANTED["steps of the neighbour"],
    PLANTED["steps, then ack"],
    PLANTED["version reused"],
    PLANTED["condition checked last"],
    PLANTED["plain ack clears"],
    PLANTED["replaced at the old time"],
    PLANTED["order kept"],
]


@pytest.mark.long
@pytest.mark.one_row
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_walks_find_a_planted_bug(bug: PlantedBug) -> None:
    names = itertools.count()

    def opened(clock: ManualClock) -> Backend:
        return bug.open(name=f"{next(names) // 2}", clock=clock)  # both backends of a walk have one store

    with pytest.raises(DiffersError) as caught:
        play(Store(opened), range(WALKS), 400)
    notes = "\n".join(caught.value.__notes__)
    assert "the walk:" in notes
    assert "the seed of this walk: " in notes
