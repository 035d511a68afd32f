"""Exceptions from outside, Ctrl-C or a time limit, at each line of the memory backend: no stuck jobs, no half batch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State
from multiq.backend.memory import MemoryBackend
from multiq.driverkit.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class Interrupt(BaseException):
    """From outside."""


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Make *call*, and interrupt it at the *at*-th line of the backend. False: it has fewer."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if not frame.f_code.co_filename.endswith("multiq/backend/memory.py"):
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
        # Then a batch is there whole, or not at all, and not early
        records = [record for state in State if state is not State.GONE for record in backend.jobs("q", state).jobs]
        new = [record.state for record in records if record.id in BATCH]
        expected = State.DELAYED if verb == "enqueue delayed" else State.READY
        assert new in ([], [expected] * 3)
        # And every job that is there can be had, once all delays and leases are over
        clock.advance(1000)
        backend.kick("q", 100)
        assert {lease.id for lease in consumer.reserve(100, 0)} == {record.id for record in records}
        if not was_interrupted:
            assert at > 5
            return
    pytest.fail("it never came to its end")
