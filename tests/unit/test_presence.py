"""Presence: viewers get the workers of a connection, and no data is left when there is no viewer."""

from __future__ import annotations

import pytest

from multiq.backend import NewJob
from multiq.backend.memory import MemoryBackend
from multiq.control.flags import PRESENCE_QUEUES, Control
from multiq.control.presence import Answer, Responder, TooManyViewers, Viewer
from multiq.driverkit.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def backend(clock: ManualClock) -> MemoryBackend:
    return MemoryBackend(clock=clock)


def answer(worker: str, up_for: float = 1.0) -> Answer:
    return Answer(worker=worker, state="working", up_for=up_for, queues=["q"], at_a_time=1, processes=[], running=0)


def left(backend: MemoryBackend) -> set[str]:
    """Return the viewers' queues that still have jobs."""
    return set(backend.queues()) & set(PRESENCE_QUEUES)


def test_each_viewer_reads_the_last_answer_of_each_worker(backend: MemoryBackend) -> None:
    one, two, worker = Viewer(backend), Viewer(backend), Responder(backend)
    one.start()
    two.start()
    assert Control(backend).read().is_presence_asked
    worker.find_viewers()
    for number in (1.0, 2.0):
        worker.answer(answer("a:1", number))
    worker.answer(answer("b:2"))
    for call in (one, two):
        assert [(each.worker, each.up_for) for each in call.read()] == [("a:1", 2.0), ("b:2", 1.0)]


def test_an_answer_after_the_viewer_s_end_is_cleared_by_its_worker(backend: MemoryBackend) -> None:
    call, worker = Viewer(backend), Responder(backend)
    call.start()
    worker.find_viewers()
    worker.answer(answer("a:1"))
    (view,) = left(backend)
    call.close()
    backend.enqueue(view, [NewJob(b"{}", "late")])
    assert not worker.is_idle
    worker.answer(answer("a:1"))
    worker.answer(answer("a:1"))
    assert not left(backend)
    assert worker.is_idle


def test_answers_that_a_killed_viewer_had_taken_are_cleared_when_their_leases_have_ended(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    # Given a viewer whose call has ended while it held an answer
    call, worker = Viewer(backend), Responder(backend)
    call.start()
    worker.find_viewers()
    worker.answer(answer("a:1"))
    (view,) = left(backend)
    clock.advance(14.9)
    assert [lease.ttr for lease in backend.consumer((view,)).reserve(1, 0)] == [1.0]
    clock.advance(0.1)
    # When the worker clears the viewer's queue, then it continues to clear until the answer's lease has ended
    worker.answer(answer("a:1"))
    assert left(backend) == {view}
    assert not worker.is_idle
    clock.advance(1.0)
    worker.answer(answer("a:1"))
    assert not left(backend)
    worker.answer(answer("a:1"))
    assert worker.is_idle


def test_four_viewers_are_the_most(backend: MemoryBackend) -> None:
    calls = [Viewer(backend) for _ in PRESENCE_QUEUES]
    for call in calls:
        call.start()
    with pytest.raises(TooManyViewers, match="4 viewers already"):
        Viewer(backend).start()
    calls[0].close()
    Viewer(backend).start()


def test_a_malformed_answer_is_ignored(backend: MemoryBackend) -> None:
    call = Viewer(backend)
    call.start()
    (view,) = left(backend)
    backend.enqueue(view, [NewJob(b"\xff{", "1"), NewJob(b'{"worker": 3}', "2")])
    assert call.read() == []
