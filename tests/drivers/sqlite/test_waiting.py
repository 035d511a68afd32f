"""Waiting consumers are woken by other processes, by other threads, and by due times."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waits import ENDS, is_quiet, woken_by_interrupt, woken_by_time

from multiq.backend import Ack, NewJob
from multiq.driverkit.clock import ManualClock
from multiq.driverkit.shared_poller import Notifier
from multiq_sqlite.backend import SqliteBackend
from multiq_sqlite.file_watch import FileWatch

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Jobs = Callable[..., list[NewJob]]
    Spawn = Callable[..., subprocess.Popen[str]]
    Line = Callable[[subprocess.Popen[str]], str]


@pytest.fixture
def other_process(backend: SqliteBackend, spawn: Spawn) -> Callable[[], None]:
    """Lets another process enqueue a job whose body is the time of its enqueue."""
    backend.stats("q")
    producer = spawn(
        """
        backend = SqliteBackend(sys.argv[1])
        for number, _ in enumerate(sys.stdin):
            backend.enqueue("q", [NewJob(str(time.monotonic()).encode(), str(number))])
        """,
        backend.path,
    )

    def enqueue() -> None:
        assert producer.stdin is not None
        producer.stdin.write("go\n")
        producer.stdin.flush()

    return enqueue


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting consumers poll only once a minute."""
    monkeypatch.setattr("multiq_sqlite.waiting._FIRST_PAUSE", 60.0)
    monkeypatch.setattr("multiq_sqlite.waiting._LONGEST_PAUSE", 60.0)
    monkeypatch.setattr("multiq_sqlite.consumer._LONGEST_SLEEP", 60.0)


@pytest.mark.one_row
@pytest.mark.parametrize("hints", ["of the kernel", "not available"])
@pytest.mark.parametrize("idle", [0.1, 0.5])
def test_job_of_another_process_wakes_a_consumer(
    backend: SqliteBackend,
    other_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    hints: str,
    idle: float,
) -> None:
    if hints == "not available":
        monkeypatch.setattr(FileWatch, "of", lambda _: None)

    def no_job_came_without_a_hint() -> bool:
        consumer = backend.consumer(["q"])
        for _ in range(3):
            threading.Timer(idle, other_process).start()
            (lease,) = consumer.reserve(1, 60)
            # the consumer gets the job long before its wait ends; a benchmark measures how soon
            assert time.monotonic() - float(lease.body) < 30
            consumer.settle([Ack(lease)])
        return consumer._waiter._hints._are_reliable

    # if the system has hints, each job came with a hint; on a busy machine one or two hints may be late
    assert any(no_job_came_without_a_hint() for _ in range(3))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives hints")
def test_consumer_stops_relying_on_missing_hints(
    backend: SqliteBackend, other_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given a consumer that watches a file to which no process writes
    (tmp_path / "else-wal").touch()
    misled = FileWatch.of(str(tmp_path / "else-wal"))
    monkeypatch.setattr(FileWatch, "of", lambda _: misled)
    consumer = backend.consumer(["q"])
    for idle in (0.5, 0.5):
        threading.Timer(idle, other_process).start()
        (lease,) = consumer.reserve(1, 30)
        consumer.settle([Ack(lease)])
    assert not consumer._waiter._hints._are_reliable


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_closed_consumers_leave_no_file_descriptor(backend: SqliteBackend) -> None:
    backend.consumer(["q"]).reserve(1, 0.5)
    gc.collect()
    before = _open_files()
    for close in (True, False):
        consumer = backend.consumer(["q"])
        consumer.reserve(1, 0.5)
        assert _open_files() > before
        if close:
            consumer.close()
        del consumer
        gc.collect()
        assert _open_files() == before


def test_enqueue_in_another_thread_wakes_a_consumer_without_polling(
    backend: SqliteBackend, jobs: Jobs, no_looks: None
) -> None:
    with SqliteBackend(backend.path) as same_file:
        producer = threading.Timer(0.2, same_file.enqueue, ("q", jobs()))
        producer.start()
        assert len(backend.consumer(["q"]).reserve(1, 50)) == 1
        producer.join()


@pytest.mark.parametrize("end", ENDS)
def test_due_time_wakes_a_consumer(backend: SqliteBackend, end: str, no_looks: None) -> None:
    woken_by_time(backend, end)


def test_moved_clock_is_noticed(path: Path, jobs: Jobs) -> None:
    clock = ManualClock()
    with SqliteBackend(str(path), clock=clock) as backend:
        backend.enqueue("q", jobs(1, delay=3600.0))
        threading.Timer(0.1, clock.advance, (3600.0,)).start()
        assert len(backend.consumer(["q"]).reserve(1, 30)) == 1


@pytest.mark.parametrize("idle", [0.1, 0.5])
def test_interrupt_ends_the_current_or_the_next_wait(backend: SqliteBackend, idle: float) -> None:
    woken_by_interrupt(backend.consumer(["q"]), idle)


def test_file_replaced_while_a_consumer_waits_is_noticed(backend: SqliteBackend, path: Path, jobs: Jobs) -> None:
    backend.stats("q")

    def replace() -> None:
        for name in list(path.parent.iterdir()):
            name.unlink()
        with SqliteBackend(str(path)) as other:
            other._pool.notifier.notify = lambda: None  # type: ignore[method-assign]
            other.enqueue("q", jobs())

    threading.Timer(0.2, replace).start()
    assert len(backend.consumer(["q"]).reserve(1, 30)) == 1


def test_idle_consumer_uses_little_cpu(backend: SqliteBackend) -> None:
    consumer = backend.consumer(["q"])
    consumer.reserve(1, 0.2)
    gc.collect()

    def spent() -> float:
        before = time.process_time()
        consumer.reserve(1, 2.0)
        return time.process_time() - before

    # seconds of CPU time: a consumer that polls all the time uses more, even on a slow machine
    is_quiet(spent, 0.2)


def test_many_consumers_get_all_jobs_once(path: Path, jobs: Jobs) -> None:
    backend = SqliteBackend(str(path), timeout=100.0)  # on a busy machine, six writers wait long for one another
    taken: list[str] = []

    def take() -> None:
        consumer = backend.consumer(["q"])
        while leases := consumer.reserve(3, 1.0):
            taken.extend(lease.id for lease in leases)
            consumer.settle([Ack(lease) for lease in leases])

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    made = [job_id for _ in range(20) for job_id in backend.enqueue("q", jobs(10))]
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(made)
    backend.close()


def test_listener_that_left_is_not_released() -> None:
    """The file of the listener may be closed by then, and its number may belong to a socket of the application."""
    notifier = Notifier()
    begun, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    class Listener:
        def release(self) -> None:
            begun.set()
            go_on.wait(20)
            order.append("released")

    notifying = threading.Thread(target=notifier.notify)
    with notifier.listening(Listener()):
        notifying.start()
        assert begun.wait(20)
        threading.Timer(0.2, go_on.set).start()
    order.append("left")
    notifying.join()
    assert order == ["released", "left"]


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_interrupt_before_a_reserve_hides_no_ready_job(backend: SqliteBackend, jobs: Jobs) -> None:
    backend.enqueue("q", jobs(1, b"1"))
    with backend.consumer(["q"]) as consumer:
        consumer.interrupt()
        assert [lease.body for lease in consumer.reserve(5, 0)] == [b"1"]
