"""The write lock: processes that hold it too long, calls that wait for it, and calls that never take it."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, Release, State
from multiq.errors import BackendError, BackendTimeout
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Jobs = Callable[..., list[NewJob]]
    Spawn = Callable[..., subprocess.Popen[str]]
    Line = Callable[[subprocess.Popen[str]], str]


@pytest.fixture
def hasty(path: Path) -> Iterator[SqliteBackend]:
    """A backend that waits a third of a second for the lock."""
    with SqliteBackend(str(path), timeout=0.3) as backend:
        yield backend


@pytest.fixture
def holder(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of another program, to hold the lock with."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


def test_process_stopped_inside_its_transaction_is_named(
    hasty: SqliteBackend, jobs: Jobs, spawn: Spawn, line: Line
) -> None:
    # Given a process that was stopped while it had the lock
    hasty.enqueue("q", jobs())
    consumer = hasty.consumer(["q"])
    (lease,) = consumer.reserve(1, 0)
    stopped = spawn(
        """
        other = sqlite3.connect(sys.argv[1], isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM multiq_jobs")
        say("locked")
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        hasty.path,
    )
    assert line(stopped) == "locked"
    # Then writers get an error at their deadline, and not before
    started = time.monotonic()
    for call in (
        lambda: hasty.enqueue("q", jobs()),
        lambda: consumer.settle([Ack(lease)]),
        lambda: consumer.exchange([Release(lease)], 1, 0),
    ):
        with pytest.raises(BackendTimeout, match=rf"locked by the process {stopped.pid} for 0\.3 s") as caught:
            call()
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    assert time.monotonic() - started >= 3 * 0.3
    # And readers are not blocked
    assert hasty.stats("q").reserved == 1
    # And when that process is killed, its changes are rolled back, and other calls succeed
    stopped.send_signal(signal.SIGKILL)
    stopped.wait()
    assert consumer.settle([Ack(lease)]) == [None]
    # And no job of the failed enqueues is stored: without the lock, nothing is uncertain
    assert hasty.queues() == []


def test_exchange_reports_its_verdicts_whatever_fails_afterwards(
    hasty: SqliteBackend, jobs: Jobs, holder: sqlite3.Connection
) -> None:
    # Given an exchange that has settled and waits, and a program that locks the file before the next job is due
    hasty.enqueue("q", [*jobs(), *jobs(1, delay=2)])
    consumer = hasty.consumer(["q"])
    (lease,) = consumer.reserve(1, 0)
    locker = threading.Timer(0.5, holder.execute, ("BEGIN IMMEDIATE",))
    locker.start()
    # Then the exchange returns the answers to its verdicts, and the next call raises the error
    assert consumer.exchange([Ack(lease)], 1, 30) == ([None], [])
    with pytest.raises(BackendTimeout):
        consumer.reserve(1, 0)
    holder.execute("COMMIT")
    assert len(consumer.reserve(1, 0)) == 1


def test_lock_released_in_time_is_waited_for(backend: SqliteBackend, jobs: Jobs, holder: sqlite3.Connection) -> None:
    backend.stats("q")
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, holder.execute, ("COMMIT",))
    release.start()
    backend.enqueue("q", jobs())
    release.join()
    assert backend.stats("q").ready == 1


def test_single_enqueues_wait_for_each_other(backend: SqliteBackend, spawn: Spawn) -> None:
    """Each enqueue is one statement. SQLite refuses it if another connection writes between its read and its write."""
    # Given two processes and this one, which all enqueue one by one
    backend.stats("q")
    others = [
        spawn(
            """
            backend = SqliteBackend(sys.argv[1], synchronous="normal")
            for number in range(500):
                backend.enqueue("q", [NewJob(b"x", f"{sys.argv[2]}-{number}")])
            """,
            backend.path,
            name,
        )
        for name in ("a", "b")
    ]
    for number in range(100):
        backend.enqueue("q", [NewJob(b"x", f"own-{number}")])
    # Then no call reports a lock, and every job is there
    assert [other.wait() for other in others] == [0, 0]
    assert backend.stats("q").ready == 1100


@pytest.mark.parametrize(("count", "size", "begins"), [(1, 2048, 0), (1, 2049, 1), (2, 1, 1)])
def test_single_enqueue_is_one_statement(
    backend: SqliteBackend, jobs: Jobs, count: int, size: int, begins: int
) -> None:
    backend.stats("q")
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        made: list[str] = []
        sqlite.set_trace_callback(made.append)
    backend.enqueue("q", jobs(count, b"x" * size))
    sqlite.set_trace_callback(None)
    assert [text[:6] for text in made].count("BEGIN ") == begins
    assert begins or len(made) == 1


def test_idle_consumer_takes_no_lock(hasty: SqliteBackend, jobs: Jobs, holder: sqlite3.Connection) -> None:
    # Given jobs that cannot be handed out: a delayed job, a buried one, a ready one in a paused queue, and one in
    # another queue
    hasty.enqueue("q", jobs(1, delay=1000))
    hasty.enqueue("q", jobs(1))
    consumer = hasty.consumer(["q", "paused"])
    consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
    hasty.enqueue("paused", jobs())
    hasty.pause("paused", 1000)
    hasty.enqueue("other", jobs())
    # When another connection always has the lock
    holder.execute("BEGIN IMMEDIATE")
    # Then a consumer that waits longer than its lock timeout raises no error
    assert consumer.reserve(1, 1.0) == []
    assert consumer.reserve(1, 0) == []


def test_idle_consumer_lets_the_log_restart(hasty: SqliteBackend, jobs: Jobs) -> None:
    """A reader that keeps its snapshot open makes the write-ahead log grow for ever."""
    hasty.stats("q")
    consumer = hasty.consumer(["idle"])
    waiter = threading.Thread(target=consumer.reserve, args=(1, 30))
    waiter.start()
    for _ in range(60):
        hasty.enqueue("q", jobs(20, b"x" * 2000))
        hasty.purge("q", [State.READY])
    consumer.interrupt()
    waiter.join()
    with sqlite3.connect(hasty.path) as reader:
        busy, _, _ = reader.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
    reader.close()
    assert busy == 0


def test_settle_that_fails_half_way_changes_nothing(backend: SqliteBackend, jobs: Jobs) -> None:
    # Given a trigger that makes each bury fail
    backend.enqueue("q", jobs(2))
    consumer = backend.consumer(["q"])
    first, second = consumer.reserve(2, 0)
    fault = sqlite3.connect(backend.path)
    fault.execute(
        "CREATE TRIGGER fault BEFORE UPDATE ON multiq_jobs WHEN new.state = 3 BEGIN SELECT RAISE(ABORT, 'fault'); END"
    )
    # When a bury is in one call with an ack
    with pytest.raises(BackendError, match="fault"):
        consumer.settle([Ack(first), Bury(second)])
    fault.execute("DROP TRIGGER fault")
    fault.close()
    # Then neither verdict was carried out, the lock is free, and both can be repeated
    assert backend.stats("q").reserved == 2
    assert consumer.settle([Ack(first), Bury(second)]) == [None, None]


@pytest.mark.parametrize("count", [1, 2])
def test_keyboard_interrupt_leaves_no_open_transaction(backend: SqliteBackend, jobs: Jobs, count: int) -> None:
    class Interrupting:
        """A clock that raises KeyboardInterrupt. The driver reads this clock inside the transaction."""

        def __call__(self) -> int:
            raise KeyboardInterrupt

    backend.enqueue("q", jobs())
    with SqliteBackend(backend.path, clock=Interrupting()) as interrupted:
        with pytest.raises(KeyboardInterrupt):
            interrupted.enqueue("q", jobs(count))
        backend.enqueue("q", jobs())
        assert backend.stats("q").ready == 2


def test_threads_share_a_backend(backend: SqliteBackend, jobs: Jobs) -> None:
    batches = [jobs(5) for _ in range(40)]
    threads = [threading.Thread(target=backend.enqueue, args=("q", batch)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert backend.stats("q").ready == 200
    assert len(backend._pool._idle) <= 8
