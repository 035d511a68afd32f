"""Interrupts: asynchronous exceptions, like Ctrl-C, at each place of a call where Python can raise one."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, Release, State
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    Connect = Callable[..., sqlite3.Connection]
    Jobs = Callable[..., list[NewJob]]


class Interrupt(BaseException):
    """From outside."""


def interrupt(call: Callable[[], object], at: int) -> Interrupt | None:
    """Make *call*, and interrupt it when it enters the driver's or contextlib's Python functions for the *at*-th time.

    None: it enters them less often. An exception from outside is let in where a function begins, among other places.
    """
    entered = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        code = frame.f_code
        is_ours = "multiq_sqlite" in code.co_filename or code.co_filename.endswith("contextlib.py")
        if is_ours and code.co_name != "<genexpr>":  # whose end is reported like a call
            entered += 1
            if entered == at:
                raise Interrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt as exc:
        return exc  # with its traceback, which keeps all that its functions hold
    finally:
        sys.settrace(before)
    return None


@pytest.fixture
def backend(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteBackend]:
    monkeypatch.setattr("multiq_sqlite.records._LARGEST_INSERT", 2)
    with SqliteBackend(str(path), synchronous="normal", timeout=1.0) as backend:
        yield backend


CALLS = ["enqueue one", "enqueue many", "reserve", "settle", "exchange", "kick"]


@pytest.mark.parametrize("name", CALLS)
def test_interrupt_leaves_no_lock_and_nothing_half_done(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, name: str
) -> None:
    backend.stats("q")
    other = connect(isolation_level=None, timeout=0)
    for at in range(1, 1000):
        # Given two reserved jobs and a ready one
        other.execute("DELETE FROM multiq_jobs")
        backend.enqueue("q", jobs(2))
        consumer = backend.consumer(["q"])
        verdicts = [(Ack, Release)[number](lease) for number, lease in enumerate(consumer.reserve(2, 0))]
        backend.enqueue("q", jobs())
        calls: dict[str, Callable[[], object]] = {
            "enqueue one": lambda: backend.enqueue("q", jobs(1)),
            "enqueue many": lambda: backend.enqueue("q", jobs(5)),
            "reserve": lambda c=consumer: c.reserve(2, 0),  # type: ignore[misc]
            "settle": lambda c=consumer, v=verdicts: c.settle(v),  # type: ignore[misc]
            "exchange": lambda c=consumer, v=verdicts: c.exchange(v, 1, 0),  # type: ignore[misc]
            "kick": lambda: backend.kick("q", 1),
        }
        # When a call is interrupted, and while its traceback is kept
        interrupted = interrupt(calls[name], at)
        # Then no other process and no other thread is locked out
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        thread = threading.Thread(target=consumer.settle, args=((),), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        # And either all of it was done or nothing
        left = {job.id: state for state in State if state is not State.GONE for job in backend.jobs("q", state).jobs}
        assert len(left) in {
            "enqueue one": {3, 4},
            "enqueue many": {3, 8},
            "settle": {2, 3},
            "exchange": {2, 3},
        }.get(name, {3})
        if name == "settle":
            assert list(left.values()).count(State.RESERVED) in {0, 2}
        if interrupted is None:
            assert at > 5
            return
    pytest.fail("it never came to its end")


def test_commit_while_handling_an_interrupt_stores_the_whole_batch_or_nothing(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    backend.stats("q")
    for at in range(1, 1000):
        app = connect(timeout=1)
        interrupted = interrupt(lambda app=app: backend.enqueue("q", jobs(5), connection=app), at)  # type: ignore[misc]
        app.commit()
        assert backend.purge("q", [State.READY]) in {0, 5}
        if interrupted is None:
            assert at > 5
            return
    pytest.fail("it never came to its end")
