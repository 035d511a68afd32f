"""The suite against backends with a planted bug each: it finds every one, and by the test that is about it."""

from __future__ import annotations

import functools
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
from multiq.conformance.stateful.steps import Step, draw_walks
from multiq.conformance.stateful.walks import take_walks
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from multiq.backend import Lease

_NOT_WALKED = ("LostReplies.", "Hangs.", "Waking.", "Waiting.", "Reserve.test_the_moment")

# what a walk of one thread, without waits and long batches, cannot meet
BEYOND_WALKS = {
    "declared and refused",  # by an error, which ends a walk
    "half a batch",
    "batches in parts",
    "handed out twice",
    "sleeps too long",
    "long delays cut",  # no step is delayed by more than a year
    "wakes for nothing",
    "duplicates dig up",  # an id that comes again while its job is buried, with a delay: rare
    "duplicates prolong",  # an id that comes again has the ttr of before
    "put off, put behind",  # two jobs of one priority, the older put off and due again while the younger waits: rare
    *(name for name, bug in PLANTED.items() if bug.test.startswith(_NOT_WALKED)),
}


def in_turn(names: Iterable[str]) -> list[Any]:
    """All of them; but for a third, ``make test-long`` has them."""
    return [pytest.param(name, marks=pytest.mark.long if zlib.crc32(name.encode()) % 3 else ()) for name in names]


@pytest.mark.parametrize("name", in_turn(PLANTED))
def test_the_test_that_is_about_a_bug_finds_it(name: str) -> None:
    # Given a backend with a bug, and the test that is about it
    bug = PLANTED[name]
    topic, _, test = bug.test.partition(".")
    # When that test is run
    report = run_harness(bug.harness(), select=[test])
    # Then it fails, for a reason that can be read
    rows = {(row.topic, row.name): row for row in report.rows}
    assert rows[topic, test].outcome == "failed"
    assert rows[topic, test].reason
    assert not report.ok


@functools.cache
def walks(count: int) -> list[list[Step]]:
    """The same ones each time, for one state of the sources: Hypothesis takes some of its values from these."""
    return draw_walks(MemoryBackend.declared, count, real_time=False, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PLANTED.keys() - BEYOND_WALKS))
def test_random_walks_find_the_bug_without_a_test_for_it(name: str) -> None:
    # When a backend with a bug is compared with the model, then they differ, and the story of the walk is told; what
    # few walks happen to miss, more of them find
    for count in (60, 200):
        harness = PLANTED[name].harness()()
        backend = harness.open()
        try:
            take_walks(harness, backend, backend.capabilities, walks(count))
        except AssertionError as exc:
            story = r"(?s)should be .*the walk, with this backend's answers:\n +1\. "
            assert re.search(story, str(exc))  # noqa: PT017 - it is tried again if nothing is raised
            return
    pytest.fail("no walk has found it")


@pytest.mark.long
def test_a_wire_without_a_bug_loses_and_doubles_nothing() -> None:
    bug = PlantedBug("honest", "nothing wrong", "", WiredBackend)
    report = run_harness(bug.harness(), select=["lost_replies", "hangs"])
    assert [(row.name, row.reason) for row in report.failed] == []
    assert len(report.kept) >= 20
    assert report.not_tried == []


def test_each_planted_backend_works_but_for_its_bug() -> None:
    for bug in PLANTED.values():
        with bug.open(name="a") as backend, bug.open(name="a") as other:
            (job_id,) = backend.enqueue("q", [NewJob(b"x", new_id())])
            assert [lease.id for lease in other.consumer(["q"]).reserve(1, 0)] == [job_id], bug.name


class LooksNowAndThen(MemoryConsumer):
    """Looks every eight seconds, and is woken by nothing but an interrupt."""

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
    assert len({bug.test for bug in PLANTED.values()}) == len(PLANTED)
    assert all(bug.backend is not MemoryBackend for bug in PLANTED.values())
