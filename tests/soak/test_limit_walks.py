"""Random walks over unique keys and limits on each backend, and planted bugs that they must find.

A failure names the walk's seed. ``python tests/soak/limit_walks.py --backend NAME --seed N --walks 1`` repeats it.

The seeds are fixed, so each run of the tests plays the same walks. ``python tests/soak/limit_walks.py --backend NAME``
draws new seeds, and finds more.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import pytest
from soak.limit_model import DiffersError
from soak.limit_walks import play
from soak.walked_stores import BACKENDS, Store, stores

from multiq.backend import State
from multiq.backend.memory import JobQueue
from multiq.backend.memory_limits import Lines
from multiq.conformance.planted import PLANTED, PlantedBug
from multiq.conformance.planted.registry import Planted

if TYPE_CHECKING:
    from multiq.backend import Backend
    from multiq.backend.memory import Job
    from multiq.driverkit.clock import ManualClock

STEPS = 120  # of a quick walk
WALKS = 100  # in which a planted bug must be found
LONG_WALKS = {"memory": 120, "sqlite": 30, "redis": 30, "mysql": 10}
MORE = 4  # times as many with ``make test-exhaustive``


@pytest.mark.one_row
@pytest.mark.parametrize("name", BACKENDS)
def test_a_short_walk_gets_only_answers_that_the_contract_allows(name: str) -> None:
    with stores(name) as store:
        play(store, range(1), steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("share", [1, pytest.param(MORE, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", LONG_WALKS)
def test_many_long_walks_get_only_answers_that_the_contract_allows(name: str, share: int) -> None:
    with stores(name) as store:
        play(store, range(share * LONG_WALKS[name]), steps=400)


# --- planted bugs ----------------------------------------------------------------------------------------


class _UncountedLines(Lines):
    """Does not count the lease of a job that has crashed before."""

    def lease(self, job: Job) -> None:
        if not job.crashes:
            super().lease(job)


class _UncountedQueue(JobQueue):
    lines_class: type[Lines] = _UncountedLines


class _SlotNotCounted(Planted):
    queue_class: ClassVar[type[JobQueue]] = _UncountedQueue


class _EarlyQueue(JobQueue):
    """Frees the key of a job when its lease ends."""

    def make_ready(self, job: Job, *, crashed: bool = False) -> None:
        super().make_ready(job, crashed=crashed)
        if crashed and job.unique is not None and job.state is State.READY:
            self.unique_keys.leave(self.name, job.unique.key, job.id)


class _KeyFreedEarly(Planted):
    queue_class: ClassVar[type[JobQueue]] = _EarlyQueue


BUGS = [
    PlantedBug("slot not counted", "a slot is not counted after a crash", "", _SlotNotCounted),
    PlantedBug("key freed early", "the end of a lease frees the key", "", _KeyFreedEarly),
    PLANTED["touch frees the slot"],
    PLANTED["key freed on release"],
    PLANTED["kick takes no key"],
    PLANTED["running job replaced"],
    PLANTED["keys are joined"],
    PLANTED["lost wake-up"],
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_walks_find_a_planted_bug(bug: PlantedBug) -> None:
    names = itertools.count()

    def opened(clock: ManualClock) -> Backend:
        return bug.open(name=f"{next(names) // 2}", clock=clock)  # both backends of a walk have one store

    with pytest.raises(DiffersError) as caught:
        play(Store(opened), range(WALKS), steps=400)
    notes = "\n".join(caught.value.__notes__)
    assert "the walk:" in notes
    assert "the seed of this walk: " in notes
