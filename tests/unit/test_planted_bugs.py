"""Backends with one planted bug each: the suite finds every bug, by the test that is meant to find it."""

from __future__ import annotations

import re
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import NewJob
from multiq.backend.memory import JobQueue, MemoryBackend, MemoryConsumer, Store
from multiq.conformance import Harness
from multiq.conformance.memory_server import WiredBackend
from multiq.conformance.planted import PLANTED, PlantedBug
from multiq.conformance.runner import run_harness
from multiq.conformance.stateful.drawing import draw_walks
from multiq.conformance.stateful.walk_comparison import take_walks
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease

WALKS = 600
_NOT_WALKED = ("LostReplies.", "Hangs.", "Waking.", "Waiting.", "Reserve.test_the_moment", "OneStep")

# bugs that a walk of one thread, without waits and long batches, cannot find, or finds rarely
BEYOND_WALKS = {
    "arrivals in advance",  # a member arrives at an id before its held job is enqueued: rare
    "time of the first call",  # a walk does not ask for the time
    "declared and refused",  # an error ends a walk
    "answers in another order",  # as for the next three bugs: no step of a walk is a delete_many
    "an ended lease denies",
    "outcome after the deletion",
    "outcome of each mention",
    "half a batch",
    "batches in parts",
    "handed out twice",
    "sleeps too long",
    "long delays cut",  # no step is delayed by more than a year
    "is not woken",
    "duplicates dig up",  # an id is enqueued again with a delay while its job is buried: rare
    "duplicates prolong",  # a walk enqueues an id again with the same ttr
    "outcome after the ack",
    "half a call",  # no outcome of a walk is large
    "piles up",  # a walk cannot see expired outcomes
    "no ids means expired",
    "plain ack clears",  # an id is enqueued again while its outcome is kept, and is then acked without an outcome: rare
    "replaced at the old time",
    "queue ignored",  # needs an id that is in both queues
    "counts expired ones",  # a forget names outcomes that have expired, and that no ack has deleted yet: rare
    "empty memo ignored",  # this bug and the next three need a second verdict on a job with a memo
    "no memo means an empty one",
    "reschedule keeps the memo",
    "abandon keeps the detail",
    "outcomes make a queue",  # a queue has only outcomes at the end of a walk: rare
    "arrivals kept",  # the id of a deleted held job is enqueued again, and the same member arrives: rare
    "id and member joined",  # no id of a walk is the beginning of another
    "ids across queues",  # no id of a walk is in two queues
    "exchange, then steps",
    "steps, then ack",  # a step enqueues the id of its own verdict's job: rare
    "half the steps",
    "homes are queues",  # a walk compares the lists of queues only at its end, when most have jobs
    "key freed on touch",  # as for the next five bugs: no job of a walk has a unique key
    "key freed on release",
    "lock with a lifetime",
    "running job replaced",
    "key outlives its job",
    "kick takes no key",
    "version reused",  # a note has a version that it had before it was dropped: rare
    "version of the bytes",
    "condition before, steps after",
    "put off, put behind",  # an older job is rescheduled, and due while a younger one of its priority waits: rare
    *(name for name, bug in PLANTED.items() if bug.test.startswith(_NOT_WALKED)),
}

# no job of a walk has gates
BEYOND_WALKS |= {name for name, bug in PLANTED.items() if bug.test.startswith("Limits.")}


def in_turn(names: Iterable[str]) -> list[Any]:
    """All bugs. ``make test`` runs one in thirty, ``make test-long`` one in five, ``make test-exhaustive`` the rest."""
    return [pytest.param(name, marks=_marks(zlib.crc32(name.encode()))) for name in names]


def _marks(number: int) -> list[pytest.MarkDecorator]:
    if number % 30 == 2:
        return []
    return [pytest.mark.exhaustive if number % 5 else pytest.mark.long]


@pytest.mark.parametrize("name", in_turn(PLANTED))
def test_the_test_that_is_about_a_bug_finds_it(name: str) -> None:
    # Given a backend with a bug, and the test that is meant to find it
    bug = PLANTED[name]
    topic, _, test = bug.test.partition(".")
    # When that test is run
    report = run_harness(bug.harness(), select=[test])
    # Then it fails, with a readable reason
    rows = {(row.topic, row.name): row for row in report.rows}
    assert rows[topic, test].outcome == "failed"
    assert rows[topic, test].reason
    assert not report.ok


@pytest.mark.long
@pytest.mark.parametrize("name", in_turn(sorted(PLANTED.keys() - BEYOND_WALKS)))
def test_random_walks_find_the_bug_without_a_test_for_it(name: str) -> None:
    # When a backend with a bug is compared with the model, then they differ, and the error has the walk's steps.
    harness = PLANTED[name].harness()()
    backend = harness.open()
    walks = draw_walks(backend.capabilities, WALKS, real_time=False, seed=1)
    with pytest.raises(AssertionError) as caught:
        take_walks(harness, backend, backend.capabilities, walks)
    assert re.search(r"(?s)should be .*the walk, with this backend's answers:\n +1\. ", str(caught.value))


@pytest.mark.long
def test_a_simulated_connection_without_a_bug_loses_and_doubles_nothing() -> None:
    bug = PlantedBug("honest", "nothing wrong", "", WiredBackend)
    report = run_harness(bug.harness(), select=["lost_replies", "hangs"])
    assert [(row.name, row.reason) for row in report.failed] == []
    assert len(report.kept) >= 20
    assert report.not_tried == []


def test_each_planted_backend_works_except_for_its_bug() -> None:
    for bug in PLANTED.values():
        with bug.open(name="a") as backend, bug.open(name="a") as other:
            (job_id,) = backend.enqueue("q", [NewJob(b"x", new_id())])
            assert [lease.id for lease in other.consumer(["q"]).reserve(1, 0)] == [job_id], bug.name


class LooksNowAndThen(MemoryConsumer):
    """A consumer that polls every eight seconds, and that only an interrupt wakes."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._told = threading.Event()

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        while not (leases := super().reserve(limit, 0)) and (left := give_up_at - time.monotonic()) > 0:
            if self._told.wait(min(left, 8.0)):
                break
        self._told.clear()
        return leases

    def interrupt(self) -> None:
        self._told.set()


class LooksNowAndThenBackend(MemoryBackend):
    def consumer(self, queues: Sequence[str]) -> LooksNowAndThen:
        return LooksNowAndThen(self._store, queues)


class LooksNowAndThenHarness(Harness):
    def open(self) -> LooksNowAndThenBackend:
        return LooksNowAndThenBackend(name=self.prefix)


@pytest.mark.long
def test_a_consumer_that_does_not_notice_the_end_of_a_lease_is_found() -> None:
    report = run_harness(LooksNowAndThenHarness, select=["once its lease has ended"])
    (row,) = report.failed
    assert "had its job late" in (row.reason or "")


def test_planting_leaves_the_honest_backend_alone() -> None:
    assert Store.queue_class is JobQueue
    assert len(PLANTED) >= 14
    modules = {bug.backend.__module__.rpartition(".")[2] for bug in PLANTED.values()}
    assert modules == {"flows", "jobs", "limits", "memos", "outcomes", "schedules", "unique"}
    assert len({bug.test for bug in PLANTED.values()}) == len(PLANTED)
    assert all(bug.backend is not MemoryBackend for bug in PLANTED.values())
