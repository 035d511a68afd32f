"""A job without keep, progress and steps costs no more than before these existed: no more bytes, calls or verdicts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

import multiq
from multiq.backend import Ack
from multiq.backend.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from multiq.backend import NewJob

#: bytecodes of one enqueue, without those of the backend, before there were outcomes; by the number of named arguments
_BEFORE = {0: 297, 1: 505}
#: bytecodes of a run with plain annotations, with and without keeping its result. 30 of them make the run cancellable:
#: a look at its attempt, and its thread and call for an interruption
_RUN_BEFORE = {False: 342, True: 580}
_SLACK = 1.01  # factor, for options that were added later


class Sent(MemoryBackend):
    """A memory backend that records the jobs and verdicts that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[NewJob] = []

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        self.sent += jobs
        return super().enqueue(queue, jobs, connection=connection)


class Sink(MemoryBackend):
    """A backend whose enqueue does nothing, so that only the core's bytecodes are counted."""

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        return [job.id for job in jobs]


def bytecodes(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_job_that_is_not_kept_has_the_same_bytes_as_before_outcomes() -> None:
    backend = Sent()
    with multiq.App(backend=backend) as app:

        @app.task
        def add(a: int, b: int = 0) -> int:
            return a + b

        add.enqueue(1, b=2)
        add.options(keep=0, priority=3).enqueue(1)
        add.enqueue_many([(1, 2)])
    assert [job.body for job in backend.sent] == [
        b'{"multiq":1,"task":"add","args":[1],"kwargs":{"b":2}}',
        b'{"multiq":1,"task":"add","args":[1]}',
        b'{"multiq":1,"task":"add","args":[1,2]}',
    ]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the number of bytecodes is that of CPython 3.11")
@pytest.mark.parametrize("named", _BEFORE)
def test_an_enqueue_that_is_not_kept_runs_no_more_bytecodes_than_before(named: int) -> None:
    with multiq.App(backend=Sink()) as app:

        @app.task
        def add(a: int, b: int = 0) -> int:
            return a + b

        def enqueue() -> None:
            add.enqueue(1, b=2) if named else add.enqueue(1, 2)

        enqueue()
        assert min(bytecodes(enqueue) for _ in range(5)) <= _BEFORE[named] * _SLACK


def test_the_ack_of_a_job_that_is_not_kept_stores_nothing() -> None:
    from multiq.worker.execution.runner import Runner
    from multiq.worker.execution.timeouts import Timeouts
    from multiq.worker.processes.inflight import Held

    with multiq.App("memory://") as app:

        class Told(multiq.Middleware):
            def ended(self, job: multiq.JobContext, ending: multiq.Ending) -> None: ...

        @app.task(middleware=[Told()])
        def add(a: int, b: int) -> int:
            return a + b

        add.enqueue(1, 2)
        (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
        assert Runner(app, Timeouts(2.0)).run(Held(lease, None, 0.0, 0.0)) == Ack(lease, None)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the number of bytecodes is that of CPython 3.11")
@pytest.mark.parametrize("is_kept", _RUN_BEFORE)
def test_a_run_with_plain_annotations_decodes_nothing(is_kept: bool) -> None:
    from multiq.worker.execution.runner import Runner
    from multiq.worker.execution.timeouts import Timeouts
    from multiq.worker.processes.inflight import Held

    with multiq.App("memory://") as app:

        @app.task
        def add(a: int, b: int = 0) -> int:
            return a + b

        add.options(keep=60 if is_kept else 0).enqueue(1, 2)
        (lease,) = app.backend.consumer(["default"]).reserve(1, 0)
        runner, held = Runner(app, Timeouts(2.0)), Held(lease, None, 0.0, 0.0)
        runner.run(held)
        count = min(bytecodes(lambda: runner.run(held)) for _ in range(5))
    assert count <= _RUN_BEFORE[is_kept] * _SLACK + 1  # for the call of the function
