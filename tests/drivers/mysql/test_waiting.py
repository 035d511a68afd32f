"""Waiting consumers: threads of the same process wake them at once; jobs of other processes are found by a poll."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest
from servers.mysql import A_NEW_COPY
from servers.process import until
from waits import ENDS, is_quiet, woken_by_interrupt, woken_by_time

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable
from multiq_mysql import waiting
from multiq_mysql.connection import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.mysql import MysqlDatabases, MysqlServer, Place

    from multiq_mysql.backend import MysqlBackend

    Jobs = Callable[..., list[NewJob]]

FOR_EVER = 60.0  # seconds, longer than any test


@pytest.fixture
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting consumers poll only once a minute."""
    monkeypatch.setattr(waiting, "_FIRST_PAUSE", FOR_EVER)
    monkeypatch.setattr(waiting, "IDLE_POLL", FOR_EVER)
    monkeypatch.setattr("multiq_mysql.consumer._LONGEST_SLEEP", FOR_EVER)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The polls, each as its statement."""
    made: list[str] = []
    original = Connection.select

    def noted(self: Connection, text: str) -> object:
        made.append(text)
        return original(self, text)

    monkeypatch.setattr(Connection, "select", noted)
    return made


def test_a_producer_of_this_process_wakes_at_once(
    backend: MysqlBackend, place: Place, jobs: Jobs, no_looks: None
) -> None:
    with open_backend(place.url) as same_database:
        producer = threading.Timer(0.2, same_database.enqueue, ("q", jobs()))
        producer.start()
        assert len(backend.consumer(["q"]).reserve(1, 50)) == 1
        producer.join()


@pytest.mark.parametrize("end", ENDS)
def test_time_alone_wakes(backend: MysqlBackend, end: str) -> None:
    woken_by_time(backend, end)


def test_another_process_wakes(backend: MysqlBackend, place: Place) -> None:
    source = """
        import sys
        from multiq.backend import NewJob
        from multiq.backend.registry import open_backend

        backend = open_backend(sys.argv[1])
        backend.stats("q")
        for number, _ in enumerate(sys.stdin):
            backend.enqueue("q", [NewJob(b"x", str(number))])
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source), place.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as other, backend.consumer(["q"]) as consumer:
        assert other.stdin is not None
        for _ in range(3):
            other.stdin.write("go\n")
            other.stdin.flush()
            (lease,) = consumer.reserve(1, 30)
            assert consumer.settle([Ack(lease)]) == [None]
        other.stdin.close()


@pytest.mark.parametrize("idle", [0.05, 1.2])
def test_an_interrupt_ends_the_wait_or_else_the_next_one(backend: MysqlBackend, idle: float, no_looks: None) -> None:
    woken_by_interrupt(backend.consumer(["q"]), idle)


def test_one_process_polls_once_for_all_its_waiting_consumers(backend: MysqlBackend, looks: list[str]) -> None:
    consumers = [backend.consumer([f"q{number}"]) for number in range(5)]
    threads = [threading.Thread(target=consumer.reserve, args=(1, FOR_EVER)) for consumer in consumers]
    for thread in threads:
        thread.start()
    until_all_wait(backend, 5)
    # Then, after the first poll of each consumer, every poll is for all five
    until(lambda: [text.count("CONCAT_WS") for text in looks[-10:]] == [5] * 10, "ten looks in a row are for all")
    for consumer in consumers:
        consumer.interrupt()
    for thread in threads:
        thread.join()


def test_when_the_polling_consumer_leaves_another_one_polls(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    first, second = backend.consumer(["a"]), backend.consumer(["b"])
    found: list[bytes] = []
    threads = [
        threading.Thread(target=first.reserve, args=(1, FOR_EVER)),
        threading.Thread(target=lambda: found.extend(lease.body for lease in second.reserve(1, FOR_EVER))),
    ]
    threads[0].start()
    until_all_wait(backend, 1)
    threads[1].start()
    until_all_wait(backend, 2)
    # When the polling consumer's wait is interrupted, and the job comes without a notification
    first.interrupt()
    threads[0].join()
    mysql_server.ask(
        "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, body) "
        "VALUES ('b', '1234567890123456', 0, 5, 5, 60000000, 0, 'not notified')",
        database=place.name,
    )
    threads[1].join()
    assert found == [b"not notified"]


@pytest.mark.long
def test_an_idle_process_looks_less_and_less_often(backend: MysqlBackend, looks: list[str]) -> None:
    consumer = backend.consumer(["q"])
    consumer.reserve(1, 1.5)

    def looked() -> int:
        looks.clear()
        consumer.reserve(1, 2.0)
        return len(looks)

    # at most one poll in each IDLE_POLL less its jitter, and the polls of the call itself
    is_quiet(looked, 2.0 / (waiting.IDLE_POLL * 0.9) + 3)


def test_a_waiting_consumer_holds_no_locks(backend: MysqlBackend, mysql_server: MysqlDatabases, jobs: Jobs) -> None:
    waiter = threading.Thread(target=backend.consumer(["q"]).reserve, args=(1, FOR_EVER))
    waiter.start()
    until_all_wait(backend, 1)
    for _ in range(4):
        time.sleep(A_NEW_COPY)
        held = mysql_server.ask("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_rows_locked > 0")
        assert held == ((0,),)
    backend.enqueue("q", jobs())
    waiter.join()


def test_a_server_that_goes_away_ends_the_wait_with_an_error(new_mysql: Callable[..., MysqlServer]) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(place.url) as backend, backend.consumer(["q"]) as consumer:
        assert consumer.reserve(1, 0) == []
        threading.Timer(0.3, server.kill).start()
        with pytest.raises(BackendUnavailable):
            consumer.reserve(1, FOR_EVER)
        # and when the server runs again, the consumer gets jobs
        server.start()
        backend.enqueue("q", [NewJob(b"x", "id")])
        assert len(consumer.reserve(1, 30)) == 1


def until_all_wait(backend: MysqlBackend, count: int) -> None:
    give_up_at = time.monotonic() + 30
    while backend._pool.poller.waiting < count:
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
