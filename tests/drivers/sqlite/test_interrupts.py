"""Interrupts: asynchronous exceptions, like Ctrl-C, at each place of a call where Python can raise one."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest

from multiq.backend import STORED_STATES as STORED
from multiq.backend import Ack, After, Arrive, Enqueue, NewJob, Put, Release, State, Terms, Touch, Version
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

    None: it enters them less often. Python can raise an asynchronous exception where a function begins, for example.
    """
    entered = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        code = frame.f_code
        is_ours = "multiq_sqlite" in code.co_filename or code.co_filename.endswith("contextlib.py")
        if is_ours and code.co_name != "<genexpr>":  # a generator expression's end is traced like a call
            entered += 1
            if entered == at:
                raise Interrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt as exc:
        return exc  # its traceback keeps the functions' local variables alive
    finally:
        sys.settrace(before)
    return None


@pytest.fixture
def backend(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SqliteBackend]:
    monkeypatch.setattr("multiq_sqlite.records._LARGEST_INSERT", 2)
    with SqliteBackend(str(path), synchronous="normal", timeout=1.0) as backend:
        yield backend


CALLS = ["enqueue one", "enqueue many", "reserve", "settle", "exchange", "kick"]


@pytest.mark.one_row
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
        # When a call is interrupted, and the traceback still exists
        interrupted = interrupt(calls[name], at)
        # Then no lock blocks another process or another thread
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
        thread = threading.Thread(target=consumer.settle, args=((),), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        # And the call was carried out as a whole, or not at all
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


def test_interrupted_verdicts_store_their_effects_or_are_not_carried_out(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    backend.stats("q")
    other = connect(isolation_level=None, timeout=0)
    for at in range(1, 1000):
        # Given an expired outcome, and verdicts that store something of each kind
        other.execute("DELETE FROM multiq_jobs")
        other.execute("DELETE FROM multiq_outcomes")
        other.execute("INSERT INTO multiq_outcomes VALUES (1, 'q', 'old', 0, 1, 2, 1, x'')")
        acked, released, touched = backend.enqueue("q", jobs(3))
        consumer = backend.consumer(["q"])
        leases = consumer.reserve(3, 0)
        verdicts = [
            Ack(leases[0], After(keep=60, outcome=b"y")),
            Release(leases[1], 60, None, "why", After(memo=b"m", detail=b"d")),
            Touch(leases[2], After(memo=b"m")),
        ]
        # When the call is interrupted
        interrupted = interrupt(lambda c=consumer, v=verdicts: c.settle(v), at)  # type: ignore[misc]
        # Then all verdicts were carried out, with their outcomes, memos and details, or none
        (outcome,) = backend.outcomes("q", [acked])
        found = {job.id: (job.state, job.memo, job.detail) for state in STORED for job in backend.jobs("q", state).jobs}
        count = other.execute("SELECT count(*) FROM multiq_outcomes").fetchone()[0]
        if outcome is None:
            assert found == dict.fromkeys([acked, released, touched], (State.RESERVED, b"", b""))
        else:
            assert found == {released: (State.DELAYED, b"m", b"d"), touched: (State.RESERVED, b"m", b"")}
        assert count == 1
        if interrupted is None:
            assert outcome is not None
            assert at > 5
            return
    pytest.fail("it never came to its end")


@pytest.mark.one_row
@pytest.mark.parametrize("name", ["settle", "carry_out"])
def test_interrupted_call_carries_out_all_steps_or_none(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, name: str
) -> None:
    backend.stats("q")
    other = connect(isolation_level=None, timeout=0)
    for at in range(1, 1000):
        # Given a reserved job, a job that waits for two members, and an expired note
        other.execute("DELETE FROM multiq_jobs")
        other.execute("DELETE FROM multiq_notes")
        other.execute("INSERT INTO multiq_notes VALUES (1, 'q', 'old', 1, x'', 1)")
        (own,) = backend.enqueue("q", jobs(1))
        consumer = backend.consumer(["q"])
        (lease,) = consumer.reserve(1, 0)
        backend.enqueue("q", [NewJob(b"", "held", terms=Terms(2))])
        steps = (
            Arrive("q", "held", "a"),
            Put("q", "key", b"value"),
            Enqueue("q", NewJob(b"", "new", terms=Terms(1))),
            Arrive("other", "none", "a"),
            Arrive("q", "held", "b", doom="why"),
        )
        # When a call with steps is interrupted
        calls: dict[str, Callable[[], object]] = {
            "settle": lambda c=consumer, lease=lease, s=steps: c.settle([Ack(lease, After(steps=s))]),  # type: ignore[misc]
            "carry_out": lambda s=steps: backend.carry_out(s, when=[Version("q", "key", "")]),  # type: ignore[misc]
        }
        interrupted = interrupt(calls[name], at)
        # Then all steps were carried out, with their verdict, or none
        found = {job.id: (job.state, job.awaits) for state in STORED for job in backend.jobs("q", state).jobs}
        members = other.execute("SELECT count(*) FROM multiq_arrivals").fetchone()[0]
        notes = [key for (key,) in other.execute("SELECT key FROM multiq_notes")]
        is_done = notes == ["key"]
        rest = {} if name == "settle" and is_done else {own: (State.RESERVED, 0)}
        if is_done:
            assert found == {"held": (State.READY, 0), "new": (State.HELD, 1)} | rest
        else:
            assert found == {"held": (State.HELD, 2)} | rest
            assert notes == ["old"]
        assert members == 0
        if interrupted is None:
            assert is_done
            assert at > 10
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
