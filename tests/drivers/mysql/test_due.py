"""Due jobs become ready in one round: neither another session's locks nor a stream of due jobs delay a consumer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from processes import until

from multiq.backend import NewJob, State
from multiq.ids import new_ids
from multiq_mysql import scan_window
from multiq_mysql.connection import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.connections import Connection
    from servers.mysql import MysqlDatabases, Place

    from multiq_mysql.backend import MysqlBackend


@pytest.fixture
def plain(mysql_server: MysqlDatabases, place: Place, backend: MysqlBackend) -> Callable[..., Any]:
    """Runs a statement as another program would, without multiq."""
    return lambda text: mysql_server.ask(text, database=place.name)


@pytest.fixture
def locker(mysql_server: MysqlDatabases, place: Place, backend: MysqlBackend) -> Iterator[Connection[Any]]:
    """A connection of another client, for a transaction that locks rows."""
    with mysql_server.client(place.name, autocommit=False) as other:
        yield other


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The packets that the driver sends, each as its statements."""
    sent: list[tuple[str, ...]] = []
    original = Session.execute

    def noted(self: Session, *texts: str) -> Any:
        sent.append(texts)
        return original(self, *texts)

    monkeypatch.setattr(Session, "execute", noted)
    return sent


def due_jobs(plain: Callable[..., Any], queue: str, count: int = 1, *, state: int = 1) -> None:
    """Jobs that have been due for long, or whose leases ended long ago."""
    plain(
        "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, token, body) "  # noqa: S608
        f"SELECT '{queue}', CONCAT(x'ff', '{queue}-', UUID_SHORT()), {state}, seq, 1024, 60000000, 0, {state - 1}, 'x' "
        f"FROM seq_1_to_{count}"
    )


def ready_jobs(backend: MysqlBackend, queue: str, count: int, **options: Any) -> list[str]:
    return backend.enqueue(queue, [NewJob(b"x", job_id, **options) for job_id in new_ids(count)])


def lock(other: Connection[Any], where: str) -> None:
    with other.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SELECT seq FROM multiq_jobs WHERE {where} FOR UPDATE")  # noqa: S608 - ours
        assert cursor.fetchall()


# --- another client's lock -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [1, 2], ids=["delayed", "lease ended"])
@pytest.mark.parametrize("queues", [["a", "b"], ["b", "a"], ["b"]])
def test_a_locked_due_row_stops_no_other_job(  # noqa: PLR0917 - of every kind
    backend: MysqlBackend, plain: Any, locker: Connection[Any], packets: list[Any], state: int, queues: list[str]
) -> None:
    # Given a due row that another client has locked, and ready jobs in another queue and in the same one
    due_jobs(plain, "a", state=state)
    lock(locker, "queue = 'a'")
    made = ready_jobs(backend, "b", 5)
    with backend.consumer(queues) as consumer:
        assert [lease.id for lease in consumer.reserve(10, 5)] == made
        assert len(packets) < 20
        if "a" in queues:
            made = ready_jobs(backend, "a", 5)
            assert [lease.id for lease in consumer.reserve(10, 5)] == made
            # And it gets the job of the due row as soon as the lock is released
            locker.rollback()
            assert len(consumer.reserve(10, 30)) == 1


def test_a_wait_beside_a_locked_due_row_polls_seldom_and_ends_in_time(
    backend: MysqlBackend, plain: Any, locker: Connection[Any], packets: list[Any]
) -> None:
    due_jobs(plain, "a")
    lock(locker, "queue = 'a'")
    with backend.consumer(["a"]) as consumer:
        assert consumer.reserve(10, 0.5) == []
        assert len(packets) < 150, len(packets)
        # And an interrupt ends its wait
        waiting = threading.Thread(target=consumer.reserve, args=(10, 3600))
        waiting.start()
        until(lambda: backend._pool.poller.waiting)
        consumer.interrupt()
        waiting.join(60)
        assert not waiting.is_alive()


# --- a stream of due jobs --------------------------------------------------------------------------------


def test_a_stream_of_due_jobs_delays_no_ready_job(
    backend: MysqlBackend, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given that another job becomes due with each statement
    looks: list[str] = []
    original = Session.execute

    def one_more(self: Session, *texts: str) -> Any:
        if len(looks) < 60 and any("CONCAT_WS(' '" in text for text in texts):
            looks.append("one")
            due_jobs(plain, "a")
        return original(self, *texts)

    monkeypatch.setattr(Session, "execute", one_more)
    with backend.consumer(["a"]) as consumer:
        assert len(consumer.reserve(10, 0)) > 0
        assert len(looks) <= 4


def test_a_due_job_of_a_later_queue_waits_for_its_turn(backend: MysqlBackend, plain: Any) -> None:
    due_jobs(plain, "late", 3000)
    made = ready_jobs(backend, "early", 10)
    with backend.consumer(["early", "late"]) as consumer:
        assert [lease.id for lease in consumer.reserve(10, 0)] == made
        assert plain("SELECT COUNT(*) FROM multiq_jobs WHERE state = 1") == ((3000,),)
        # And the next reserve promotes a part of the due jobs, without a wait
        assert len(consumer.reserve(10, 0)) == 10
        ((left,),) = plain("SELECT COUNT(*) FROM multiq_jobs WHERE state = 1")
        assert 1500 <= left < 3000


def test_all_that_is_due_is_handed_out_once_and_in_order(backend: MysqlBackend, plain: Any) -> None:
    due_jobs(plain, "a", 2500)
    due_jobs(plain, "a", 300, state=2)
    taken: list[str] = []
    with backend.consumer(["a"]) as consumer:
        while leases := consumer.reserve(400, 0):
            taken += [lease.token.partition(":")[0] for lease in leases]
    assert len(taken) == len(set(taken)) == 2800
    assert plain("SELECT COUNT(*), SUM(attempt), SUM(crashes) FROM multiq_jobs") == ((2800, 2800, 300),)


def test_a_listing_beside_a_locked_due_row_and_a_stream_ends(
    backend: MysqlBackend, plain: Any, locker: Connection[Any]
) -> None:
    due_jobs(plain, "a", 3)
    lock(locker, "queue = 'a' AND state = 1 AND place = 1")
    assert len(backend.jobs("a", State.READY).jobs) == 2
    assert backend.stats("a").ready == 3


# --- dropped claims --------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on which every scan from the bottom takes too long to be made often."""
    monkeypatch.setattr(scan_window, "CHEAP", -1.0)
    monkeypatch.setattr(scan_window, "MANY", 0)
    monkeypatch.setattr(scan_window, "_LONGEST", 3600.0)
    monkeypatch.setattr(scan_window, "_LONGEST_BUSY", 3600.0)
    monkeypatch.setattr(scan_window, "BUSY", 10**9)


def urgent_job(plain: Callable[..., Any], queue: str = "a") -> None:
    """Enqueue an urgent job like another process, so that this process is not notified."""
    plain(
        "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, body) "  # noqa: S608
        f"VALUES ('{queue}', CONCAT(x'ff', 'urgent'), 0, 0, 0, 60000000, 0, 'urgent')"
    )


def test_an_urgent_job_whose_claim_a_deadlock_undid_is_not_hidden_by_the_scan_window(
    backend: MysqlBackend, plain: Any, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a scan window, and an urgent job outside of it
    ready_jobs(backend, "a", 30)
    with backend.consumer(["a"]) as consumer:
        assert len(consumer.reserve(5, 0)) == len(consumer.reserve(5, 0)) == 5
        urgent_job(plain)
        # When a scan from the start has found it, and the transaction is run again
        backend._pool.poller.scan_windows.of("a").ready.restart.request()
        commit, failures = Session.commit, [True]

        def unlucky(self: Session, *texts: str, **options: Any) -> Any:
            if failures and failures.pop():
                raise pymysql.OperationalError(1213, "as the server would say")
            return commit(self, *texts, **options)

        monkeypatch.setattr(Session, "commit", unlucky)
        # Then the urgent job still comes first
        assert [lease.body for lease in consumer.reserve(2, 0)] == [b"urgent", b"x"]


def test_an_urgent_job_that_was_locked_and_not_claimed_is_not_hidden_by_the_scan_window(
    backend: MysqlBackend, plain: Any, slow: None
) -> None:
    # Given a consumer that claims from the second queue, where it has a scan window
    ready_jobs(backend, "b", 30)
    with backend.consumer(["a", "b"]) as consumer:
        assert len(consumer.reserve(5, 0)) == len(consumer.reserve(5, 0)) == 5
        # When a scan finds an urgent job in the second queue, but the first queue has enough jobs
        urgent_job(plain, "b")
        backend._pool.poller.scan_windows.of("b").ready.restart.request()
        made = ready_jobs(backend, "a", 2)
        assert [lease.id for lease in consumer.reserve(2, 0)] == made
        # Then the urgent job is the first that the consumer takes from the second queue
        assert [lease.body for lease in consumer.reserve(2, 5)] == [b"urgent", b"x"]


def test_the_clock_is_read_once_a_round(backend: MysqlBackend, plain: Any, packets: list[tuple[str, ...]]) -> None:
    """A job that becomes due between two statements of a round is promoted in the next round."""
    due_jobs(plain, "a")
    before = int(time.time() * 1e6) - 3_600_000_000
    with backend.consumer(["a"]) as consumer:
        assert len(consumer.reserve(5, 0)) == 1
    (due,) = [text for texts in packets for text in texts if "place <=" in text and "SKIP LOCKED" in text]
    assert int(due.partition("place <= ")[2].split()[0]) > before
