"""Exceptions from outside, Ctrl-C or a time limit, at each line of the memory backend: no stuck jobs, no half batch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from multiq.backend import (
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    GiveBack,
    NewJob,
    Put,
    Release,
    State,
    Step,
    Terms,
    Touch,
    Version,
)
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from multiq.backend import Lease, Verdict
    from multiq.backend.memory import MemoryConsumer


FILES = ("multiq/backend/memory.py", "multiq/backend/memory_outcomes.py", "multiq/backend/memory_notes.py")


class Interrupt(BaseException):
    """From outside."""


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Make *call*, and interrupt it at the *at*-th line of the backend. False: it has fewer."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


BATCH = [f"new {number}" for number in range(3)]
VERBS = [
    "enqueue",
    "enqueue delayed",
    "ack",
    "release",
    "bury",
    "give back",
    "reserve",
    "kick",
    "reschedule",
    "promote",
]


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_leaves_no_job_stuck_and_no_half_batch(verb: str) -> None:
    for at in range(1, 1000):
        # Given a ready job, two reserved ones, a buried and a delayed one
        clock = ManualClock()
        backend = MemoryBackend(clock=clock)
        consumer = backend.consumer(["q"])
        backend.enqueue("q", [NewJob(b"", "buried"), NewJob(b"", "first"), NewJob(b"", "second"), NewJob(b"", "ready")])
        consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
        one, two = consumer.reserve(2, 0)
        backend.enqueue("q", [NewJob(b"", "delayed", delay=5.0)])
        calls: dict[str, Callable[[], object]] = {
            "enqueue": lambda b=backend: b.enqueue("q", [NewJob(b"", name) for name in BATCH]),  # type: ignore[misc]
            "enqueue delayed": lambda b=backend: b.enqueue(  # type: ignore[misc]
                "q", [NewJob(b"", name, delay=100.0) for name in BATCH]
            ),
            "ack": lambda c=consumer, o=one, t=two: c.settle([Ack(o), Ack(t)]),  # type: ignore[misc]
            "release": lambda c=consumer, o=one, t=two: c.settle([Release(o), Release(t, 3.0)]),  # type: ignore[misc]
            "bury": lambda c=consumer, o=one, t=two: c.settle([Bury(o), Bury(t)]),  # type: ignore[misc]
            "give back": lambda c=consumer, o=one: c.settle([GiveBack(o)]),  # type: ignore[misc]
            "reserve": lambda c=consumer: c.reserve(1, 0),  # type: ignore[misc]
            "kick": lambda b=backend: b.kick("q", 1),  # type: ignore[misc]
            "reschedule": lambda b=backend: b.reschedule("q", "ready", 3.0),  # type: ignore[misc]
            "promote": lambda b=backend, c=clock: (c.advance(5), b.stats("q")),  # type: ignore[misc]
        }
        # When a verb is interrupted
        was_interrupted = interrupted(calls[verb], at)
        # Then the batch is there whole, or not at all, and no job is handed out early
        records = [record for state in State if state is not State.GONE for record in backend.jobs("q", state).jobs]
        new = [record.state for record in records if record.id in BATCH]
        expected = State.DELAYED if verb == "enqueue delayed" else State.READY
        assert new in ([], [expected] * 3)
        # And every job that is there can be reserved, once all delays and leases are over
        clock.advance(1000)
        backend.kick("q", 100)
        assert {lease.id for lease in consumer.reserve(100, 0)} == {record.id for record in records}
        if not was_interrupted:
            assert at > 5
            return
    pytest.fail("it never came to its end")


def _verdicts(lease: Lease) -> dict[str, Verdict]:
    after = After(memo=b"new", detail=b"why")
    return {
        "release": Release(lease, priority=7, reason="later", after=after),
        "delayed release": Release(lease, 3.0, after=after),
        "bury": Bury(lease, "broken", after=after),
        "touch": Touch(lease, after=after),
        "give back": GiveBack(lease, after=after),
        "abandon": Abandon(lease, "died"),
    }


def _with_a_reserved_job() -> tuple[MemoryBackend, MemoryConsumer, Lease]:
    """A job in its second reservation, with a memo and a detail, whose lease has been going on for a second."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    consumer = backend.consumer(["q"])
    backend.enqueue("q", [NewJob(b"", "1", ttr=60.0)])
    consumer.settle([Release(lease, after=After(memo=b"old", detail=b"old")) for lease in consumer.reserve(1, 0)])
    (lease,) = consumer.reserve(1, 0)
    clock.advance(1)
    return backend, consumer, lease


@pytest.mark.parametrize("kind", ["release", "delayed release", "bury", "touch", "give back", "abandon"])
def test_an_interrupt_leaves_no_half_verdict(kind: str) -> None:
    # Given a job, with its states before and after a verdict
    backend, consumer, lease = _with_a_reserved_job()
    before = backend.peek("q", "1")
    consumer.settle([_verdicts(lease)[kind]])
    done = backend.peek("q", "1")
    assert before != done
    for at in range(1, 1000):
        # When the verdict is interrupted
        backend, consumer, lease = _with_a_reserved_job()
        was_interrupted = interrupted(lambda c=consumer, le=lease: c.settle([_verdicts(le)[kind]]), at)  # type: ignore[misc]
        # Then the job is either unchanged, or as it is after the verdict
        assert backend.peek("q", "1") in (before, done)
        if not was_interrupted:
            assert at > 10
            return
    pytest.fail("it never came to its end")


def test_an_interrupted_reschedule_leaves_the_job_as_it_was_or_is_done() -> None:
    for at in range(1, 1000):
        # Given a job with a memo, a detail and a reason
        backend, consumer, lease = _with_a_reserved_job()
        consumer.settle([Release(lease, reason="why", after=After(detail=b"why"))])
        before = backend.peek("q", "1")
        # When a reschedule is interrupted
        was_interrupted = interrupted(lambda b=backend: b.reschedule("q", "1", 5.0), at)  # type: ignore[misc]
        # Then the job is either unchanged, or as it is after the reschedule
        job = backend.peek("q", "1")
        assert job == before or (job.memo, job.detail, job.attempt, job.due_in) == (b"", b"", 0, 5.0)
        if not was_interrupted:
            assert at > 10
            return
    pytest.fail("it never came to its end")


def test_an_interrupted_ack_leaves_the_job_or_its_outcome() -> None:
    for at in range(1, 1000):
        # Given a reserved job, and two outcomes that have expired
        clock = ManualClock()
        backend = MemoryBackend(clock=clock)
        consumer = backend.consumer(["q"])
        backend.enqueue("q", [NewJob(b"", "old 1"), NewJob(b"", "old 2"), NewJob(b"", "1")])
        *old, lease = consumer.reserve(3, 0)
        consumer.settle([Ack(one, After(keep=1.0)) for one in old])
        clock.advance(1)
        # When an ack that keeps an outcome is interrupted
        ack = Ack(lease, After(keep=5.0, outcome=b"result"))
        was_interrupted = interrupted(lambda c=consumer, a=ack: c.settle([a]), at)  # type: ignore[misc]
        # Then either the job or its outcome exists, and later reads return the same
        (outcome,) = backend.outcomes("q", ["1"])
        jobs = [job.id for job in backend.jobs("q", State.RESERVED).jobs]
        assert (outcome is None) == (jobs == ["1"])
        assert [kept.id for kept in backend.history("q").outcomes] == ([] if outcome is None else ["1"])
        assert not outcome or outcome.body == b"result"
        # And each outcome is deleted in the end
        if outcome is None:
            assert consumer.settle([ack]) == [None]
        clock.advance(10)
        backend.forget("q")
        assert backend._store.outcomes._queues == {}
        if not was_interrupted:
            assert at > 10
            return
    pytest.fail("it never came to its end")


def test_an_ack_that_was_interrupted_keeps_no_outcome_when_the_job_is_deleted_later() -> None:
    for at in range(1, 1000):
        # Given an ack that was interrupted, whose job is still there
        backend, consumer, lease = _with_a_reserved_job()
        was_interrupted = interrupted(lambda c=consumer, le=lease: c.settle([Ack(le, After(keep=5.0))]), at)  # type: ignore[misc]
        if not was_interrupted:
            assert at > 10
            return
        if backend.stats("q").reserved:
            # When the job is released and deleted, then no outcome is kept
            consumer.settle([Release(lease)])
            backend.delete("q", "1")
            assert backend.history("q").outcomes == []
    pytest.fail("it never came to its end")


def test_an_interrupted_forget_leaves_no_outcome_that_is_never_deleted() -> None:
    for expired in (False, True):
        for at in range(1, 1000):
            # Given three outcomes
            clock = ManualClock()
            backend = MemoryBackend(clock=clock)
            consumer = backend.consumer(["q"])
            ids = backend.enqueue("q", [NewJob(b"", str(number)) for number in range(3)])
            consumer.settle([Ack(lease, After(keep=5.0)) for lease in consumer.reserve(3, 0)])
            clock.advance(6 if expired else 0)
            # When a forget is interrupted, and repeated
            doomed = None if expired else ids
            was_interrupted = interrupted(lambda b=backend, d=doomed: b.forget("q", d), at)  # type: ignore[misc]
            backend.forget("q", doomed)
            # Then nothing is left
            assert backend._store.outcomes._queues == {}
            if not was_interrupted:
                assert at > 5
                break


#: Two arrivals in the verdict's queue, of which one is repeated and one dooms; jobs in two queues; and notes.
STEPS: tuple[Step, ...] = (
    Arrive("q", "waits", "a", expect=1), Arrive("q", "waits", "old", doom=""), Arrive("q", "released", "a"),
    Arrive("q", "doomed", "old", doom="why"), Enqueue("q", NewJob(b"", "near", terms=Terms(1))),
    Enqueue("far", NewJob(b"", "far", delay=5.0)), Arrive("other", "far held", "a"), Put("q", "key", b"new"),
    Drop("q", "old"),
)  # fmt: skip


def _with_held_jobs() -> tuple[MemoryBackend, MemoryConsumer, Lease]:
    """A lease, and held jobs and notes that ``STEPS`` change."""
    backend, consumer, lease = _with_a_reserved_job()
    held = [NewJob(b"", name, terms=Terms(awaits)) for name, awaits in (("waits", 3), ("released", 1), ("doomed", 3))]
    backend.enqueue("q", held)
    backend.enqueue("other", [NewJob(b"", "far held", terms=Terms(1))])
    backend.carry_out([Arrive("q", name, "old") for name in ("waits", "doomed")])
    backend.carry_out([Put("q", "key", b"old"), Put("q", "old", b"old")])
    return backend, consumer, lease


def _all_of_it(backend: MemoryBackend) -> list[object]:
    """What clients can read from the store, without the versions of notes."""
    records = [
        (record.queue, record.id, record.state, record.awaits, record.attempt, record.memo)
        for queue in ("q", "far", "other")
        for state in State
        if state is not State.GONE
        for record in backend.jobs(queue, state).jobs
    ]
    notes = [(note.key, note.value) for note in backend.notes("q").notes]
    return [records, notes, backend.queues()]


@pytest.mark.parametrize("kind", ["ack", "release", "bury", "touch", "give back", "carry_out"])
@pytest.mark.parametrize("seen_first", ["jobs", "queues", "notes", "carry_out"])
@pytest.mark.long
def test_an_interrupt_leaves_no_half_verdict_with_steps(kind: str, seen_first: str) -> None:
    def call(backend: MemoryBackend, consumer: MemoryConsumer, lease: Lease) -> None:
        after = After(memo=b"new", keep=5.0, steps=STEPS)
        verdicts: dict[str, Verdict] = {
            "ack": Ack(lease, after), "release": Release(lease, after=after), "bury": Bury(lease, after=after),
            "touch": Touch(lease, after=after), "give back": GiveBack(lease, after=after),
        }  # fmt: skip
        if kind == "carry_out":
            note = backend.note("q", "key")
            backend.carry_out(STEPS, when=[Version("q", "key", note.version if note else "")])
        else:
            consumer.settle([verdicts[kind]])

    # Given a store before a verdict with steps, and after it
    there = _with_held_jobs()
    before = _all_of_it(there[0])
    call(*there)
    done = _all_of_it(there[0])
    assert before != done
    for at in range(1, 2000):
        # When the verdict is interrupted
        backend, consumer, lease = _with_held_jobs()
        was_interrupted = interrupted(lambda b=backend, c=consumer, le=lease: call(b, c, le), at)  # type: ignore[misc]
        # Then all of the change is made, or none of it, whichever call follows
        looks: dict[str, Callable[[], object]] = {
            "jobs": lambda b=backend: b.peek("q", "waits"), "queues": backend.queues,  # type: ignore[misc]
            "notes": lambda b=backend: b.note("q", "key"), "carry_out": lambda b=backend: b.carry_out([]),  # type: ignore[misc]
        }  # fmt: skip
        looks[seen_first]()
        assert _all_of_it(backend) in (before, done)
        if not was_interrupted:
            assert at > 50
            return
    pytest.fail("it never came to its end")
