"""Faults of a MariaDB server and of the network: stopped, killed, read-only, full, busy, locked, slow.

One deterministic test each. The server and the faults are real.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from faults import (
    DEADLINE,
    QUEUE,
    all_timed_out,
    an_enqueue_in_doubt_can_be_repeated,
    delays_leases_and_counts_outlive_a_kill,
    leaves_no_open_file,
    new,
    no_acknowledged_job_is_lost,
    numbers,
    outlives_a_stop,
    somebody_else,
    stopped,
    timed_out,
    verbs,
    waits_for_its_server,
)
from processes import until, worker
from proxy import Hole, Latency, Pass, Proxy
from pymysql.constants import CLIENT
from servers.mysql import A_NEW_COPY
from servers.process import HOST
from worker_app import app, nap

from multiq.backend import Ack, Bury, GiveBack
from multiq.backend.registry import open_backend
from multiq.conformance.forks import ended_well, fork
from multiq.driverkit.call_retry import Failure, repetitions
from multiq.errors import BackendCorrupt, BackendError, BackendFull, BackendTimeout, BackendUnavailable, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers.mysql import MysqlDatabases, MysqlServer, Place

    from multiq.backend import Backend, NewJob

    NewMysql = Callable[..., MysqlServer]


def hasty(url: str) -> str:
    return f"{url}?timeout={DEADLINE}"


@pytest.fixture
def proxy(mysql_server: MysqlDatabases) -> Iterator[Proxy]:
    with Proxy((mysql_server.host, mysql_server.port)) as proxy:
        yield proxy


# --- no answer -------------------------------------------------------------------------------------------


def test_a_server_that_is_stopped_is_a_timeout_for_every_verb(new_mysql: NewMysql) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(hasty(place.url)) as backend, backend.consumer([QUEUE]) as consumer:
        # Given connections that are open, and a lease
        backend.enqueue(QUEUE, [new()])
        (lease,) = consumer.reserve(1, 0)
        # When the server is stopped, then all calls time out
        with stopped(server):
            all_timed_out(verbs(backend, consumer, lease).values())
        # And when the server continues, the next call gets its own reply
        assert backend.stats(QUEUE).queue == QUEUE


def test_an_enqueue_to_a_server_that_is_stopped_is_uncertain_and_can_be_repeated(new_mysql: NewMysql) -> None:
    server = new_mysql()
    with server.database() as place:
        an_enqueue_in_doubt_can_be_repeated(server, hasty(place.url))
        # an enqueue that was not sent raises BackendTimeout, which is not in doubt
        with stopped(server), open_backend(hasty(place.url)) as backend, pytest.raises(BackendTimeout):
            backend.enqueue(QUEUE, [new()])


@pytest.mark.one_row
@pytest.mark.parametrize("wait", [0.0, 1.5])
def test_a_server_that_is_stopped_is_a_timeout_for_a_reserve_that_waits(new_mysql: NewMysql, wait: float) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(hasty(place.url)) as backend, backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
        with stopped(server):
            timed_out(lambda: consumer.reserve(1, wait), wait + DEADLINE)
        (job_id,) = backend.enqueue(QUEUE, [new()])
        assert [lease.id for lease in consumer.reserve(1, 5)] == [job_id]


def test_an_address_that_accepts_and_never_answers_is_a_timeout(
    mysql_server: MysqlDatabases, place: Place, proxy: Proxy
) -> None:
    proxy.mode = Hole()
    url = hasty(mysql_server.url(place.name, port=proxy.port))
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer:
        all_timed_out([lambda: backend.enqueue(QUEUE, [new()]), lambda: consumer.reserve(1, 0)])
        proxy.mode = Pass()
        assert backend.stats("never used").ready == 0


@pytest.mark.long
def test_a_worker_outlives_a_server_that_is_stopped_for_ten_seconds(
    new_mysql: NewMysql, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_mysql()
    with server.database() as place:
        producer(place.url)
        outlives_a_stop(server, hasty(place.url), tmp_path, seconds=10)


# --- no server -------------------------------------------------------------------------------------------


def test_a_refused_connection_fails_at_once_with_the_address_and_without_the_password(proxy: Proxy) -> None:
    proxy.refuse()
    with open_backend(f"mysql://root:S3CR3T@{HOST}:{proxy.port}/jobs") as backend:
        with pytest.raises(BackendUnavailable, match=str(proxy.port)) as refused:
            backend.enqueue(QUEUE, [new()])
        assert "S3CR3T" not in str(refused.value)
        assert refused.value.__cause__ is not None


def test_a_host_that_does_not_exist_is_unavailable() -> None:
    with open_backend("mysql://root@no-such-host.invalid/jobs") as backend, pytest.raises(BackendUnavailable):
        backend.stats(QUEUE)


def test_a_database_that_does_not_exist_is_reported(mysql_server: MysqlDatabases) -> None:
    with (
        open_backend(mysql_server.url("no_such_database")) as backend,
        pytest.raises(BackendUnavailable, match="CREATE DATABASE"),
    ):
        backend.stats(QUEUE)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00", b""], ids=["http", "zero", "nothing"])
def test_a_server_that_speaks_something_else_is_a_typed_error(said: bytes) -> None:
    with (
        somebody_else(said, unasked=True) as port,
        open_backend(f"mysql://root@{HOST}:{port}/jobs?timeout={DEADLINE}") as backend,
        pytest.raises(BackendError),
    ):
        backend.stats(QUEUE)


@pytest.mark.long
def test_a_worker_that_starts_before_its_server_waits_for_it(
    new_mysql: NewMysql, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_mysql()
    with server.database() as place:
        producer(place.url)
        waits_for_its_server(server, place.url, tmp_path)


def test_a_user_that_may_only_read_gets_the_missing_grant(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(place.url) as backend:
        backend.queues()
    with mysql_server.account("SELECT", f"{place.name}.*") as account:
        with open_backend(account.url(place.name)) as backend, pytest.raises(BackendUnavailable, match="GRANT") as told:
            backend.enqueue(QUEUE, [new()])
        assert account.password not in str(told.value)


# --- the connection goes away ----------------------------------------------------------------------------


@pytest.mark.long
def test_a_hundred_reconnects_leave_no_open_file_behind(
    mysql_server: MysqlDatabases, place: Place, proxy: Proxy
) -> None:
    with (
        open_backend(mysql_server.url(place.name, port=proxy.port)) as backend,
        backend.consumer([QUEUE]) as consumer,
    ):

        def turn() -> None:
            (job_id,) = backend.enqueue(QUEUE, [new()])
            proxy.cut()
            (lease,) = consumer.reserve(1, 5)
            assert (lease.id, lease.attempt) == (job_id, 1)
            proxy.cut()
            assert consumer.settle([Ack(lease)]) == [None]

        leaves_no_open_file(turn)
        assert backend.queues() == []


def test_connections_that_an_administrator_kills_are_silently_opened_again(
    mysql_server: MysqlDatabases, place: Place
) -> None:
    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new()])
        (lease,) = consumer.reserve(1, 0)
        kill_all(mysql_server, place)
        assert backend.stats(QUEUE).ready == 1
        kill_all(mysql_server, place)
        assert consumer.settle([Ack(lease)]) == [None]
        kill_all(mysql_server, place)
        assert len(consumer.reserve(1, 5)) == 1


def test_an_idle_connection_that_the_server_closes_is_silently_opened_again(new_mysql: NewMysql) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new()])
        server.restart()  # closes the connection, which the driver notices at its next call
        (lease,) = consumer.reserve(1, 5)
        server.restart()
        assert consumer.settle([Ack(lease)]) == [None]
        server.restart()
        assert backend.queues() == []


@pytest.mark.long
def test_a_slow_way_makes_no_lease_end_early(
    mysql_server: MysqlDatabases, place: Place, proxy: Proxy, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    producer(place.url)
    nap.enqueue_many([(number, 0.4) for number in range(8)])  # the jobs' ttr is 2 s
    proxy.mode = Latency(0.1)
    url = mysql_server.url(place.name, port=proxy.port)
    with worker(tmp_path, url, "stop_when_empty=True, threads=2") as process:
        assert process.wait(60) == 0, process.log
        assert sorted(numbers(process.diary, "start")) == list(range(8))


# --- the server goes away, and comes back ----------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_no_acknowledged_job_is_lost_when_the_server_is_killed_or_restarted_under_load(
    new_mysql: NewMysql, tmp_path: Path, producer: Callable[[str], None], end: str
) -> None:
    # Given a worker, and a producer that notes what was acknowledged
    server = new_mysql()
    with server.database() as place:
        producer(hasty(place.url))
        no_acknowledged_job_is_lost(server, app.url, tmp_path, end)


def test_delays_leases_and_counts_outlive_a_killed_server(new_mysql: NewMysql) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        delays_leases_and_counts_outlive_a_kill(server, backend, consumer)


# --- the server refuses ----------------------------------------------------------------------------------


def test_a_server_that_became_a_replica_is_reported_and_used_again_as_a_primary(new_mysql: NewMysql) -> None:
    server = new_mysql()
    with server.database() as place, open_backend(place.url) as backend:
        backend.enqueue(QUEUE, [new()])
        with (
            server.account("SELECT, INSERT, UPDATE, DELETE", f"{place.name}.*") as account,
            open_backend(account.url(place.name)) as theirs,
        ):
            server.set("read_only", 1)
            with pytest.raises(BackendUnavailable, match="read-only"):
                theirs.enqueue(QUEUE, [new()])
            assert theirs.stats(QUEUE).ready == 1
            server.set("read_only", 0)
            theirs.enqueue(QUEUE, [new()])
            assert theirs.stats(QUEUE).ready == 2


@pytest.mark.long
def test_an_address_that_leads_to_another_primary_now_is_followed(new_mysql: NewMysql) -> None:
    # Given a proxy in front of a primary, and one that is to take its place
    old, new_one = new_mysql(), new_mysql()
    for server in (old, new_one):
        server.ask("CREATE DATABASE shop")
        server.ask("CREATE USER multiq")
        server.ask("GRANT ALL ON shop.* TO multiq")
    with (
        Proxy((old.host, old.port)) as proxy,
        open_backend(old.url("shop", port=proxy.port, user="multiq")) as backend,
        backend.consumer([QUEUE]) as consumer,
        open_backend(new_one.url("shop")) as there,
    ):
        backend.enqueue(QUEUE, [new()])
        assert len(consumer.reserve(1, 0)) == 1
        # When the first server becomes a read-only replica, and the proxy connects to the second one
        old.set("read_only", 1)
        proxy._upstream = (new_one.host, new_one.port)
        # Then the next call and the consumer use the second server
        backend.enqueue(QUEUE, [new()])
        assert there.stats(QUEUE).ready == 1
        assert len(consumer.reserve(1, 30)) == 1


def test_a_batch_of_verdicts_may_be_larger_than_a_packet(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new() for _ in range(10)])
        leases = consumer.reserve(10, 0)
        size = int(mysql_server.variable("max_allowed_packet")) // 10
        reasons = [f"{number}{'x' * size}" for number in range(10)]  # the value is twice as large in hex
        verdicts = [Bury(lease, reason=reason) for lease, reason in zip(leases, reasons, strict=True)]
        assert consumer.settle(verdicts) == [None] * 10
        assert backend.peek(QUEUE, leases[9].id).reason == reasons[9]


@pytest.mark.long
def test_a_batch_of_any_length_does_not_wait_for_other_rows(mysql_server: MysqlDatabases, place: Place) -> None:
    count = 35_000  # MariaDB gives up on ranges of 32,000 values and more, and would read the whole table
    with (
        open_backend(f"{place.url}?timeout=60") as backend,
        backend.consumer([QUEUE]) as consumer,
        mysql_server.client(place.name, autocommit=False) as other,
        other.cursor() as cursor,
    ):
        backend.enqueue("other", [new()])
        backend.enqueue(QUEUE, [new() for _ in range(count)])
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute("SELECT seq FROM multiq_jobs WHERE queue = 'other' FOR UPDATE")
        leases = consumer.reserve(count, 0)
        assert len(leases) == count
        assert not any(consumer.settle([GiveBack(lease) for lease in leases]))


@pytest.mark.long
def test_a_full_disk_refuses_batches_whole_and_loses_nothing(new_mysql: NewMysql) -> None:
    """A claim moves an index entry. A full InnoDB may have no page for this entry: then the claim raises
    ``BackendFull``."""
    # Given a server with a limited tablespace, and a queue that was filled until the server refused a batch
    server = new_mysql(innodb_file_per_table=0, innodb_data_file_path="ibdata1:12M:autoextend:max:32M")
    with server.database() as place, open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        stored = sum(iter(lambda: _fill(backend), 0))
        with pytest.raises(BackendFull, match="no room"):
            backend.enqueue(QUEUE, _large())
        # Then no job of a refused batch is stored
        assert backend.stats(QUEUE).ready == stored > 0
        with contextlib.suppress(BackendFull):
            consumer.settle([GiveBack(lease) for lease in consumer.reserve(stored, 0)])
        # And when there is room again, all stored jobs can be reserved and acked
        server.change(innodb_data_file_path="ibdata1:12M:autoextend:max:64M")
        server.restart()
        leases = consumer.reserve(stored, 0)
        assert [lease.attempt for lease in leases] == [1] * stored
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * stored
        assert _fill(backend)


def _large() -> list[NewJob]:
    return [new(b"x" * 100_000, ttr=600) for _ in range(10)]


def _fill(backend: Backend) -> int:
    """Enqueue a batch, and return how many jobs were accepted."""
    try:
        return len(backend.enqueue(QUEUE, _large()))
    except BackendFull:
        return 0


@pytest.mark.long
def test_a_server_without_a_free_connection_is_reported(new_mysql: NewMysql) -> None:
    server = new_mysql(max_connections=10, extra_max_connections=1)
    with server.database() as place, open_backend(hasty(place.url)) as backend:
        with (
            server.account("ALL", f"{place.name}.*") as account,
            open_backend(account.url(place.name)) as theirs,
        ):
            with contextlib.ExitStack() as held:
                with contextlib.suppress(pymysql.OperationalError):
                    while True:
                        held.enter_context(account.client(place.name))
                with pytest.raises(BackendUnavailable, match="max_connections"):
                    theirs.stats(QUEUE)
            until(server.answers)
            assert theirs.queues() == []
        assert backend.queues() == []


def test_dropped_tables_raise_a_typed_error_with_the_way_out(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new()])
        mysql_server.ask("DROP TABLE multiq_jobs", database=place.name)
        for call in (lambda: backend.enqueue(QUEUE, [new()]), lambda: consumer.reserve(1, 0)):
            with pytest.raises(BackendCorrupt, match="multiq schema show-sql"):
                call()
        # and with these tables the calls succeed
        with mysql_server.client(place.name, client_flag=CLIENT.MULTI_STATEMENTS) as client, client.cursor() as cursor:
            cursor.execute(backend.schema().sql())
            while cursor.nextset():
                pass
        backend.enqueue(QUEUE, [new()])
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]


# --- locked rows -----------------------------------------------------------------------------------------


def test_a_locked_row_is_waited_for_beyond_the_servers_own_timeout(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(f"{place.url}?timeout=60") as backend:
        (job_id,) = backend.enqueue(QUEUE, [new()])
        counted = repetitions[Failure.CONFLICT]
        with holder(mysql_server, place, "SELECT * FROM multiq_jobs FOR UPDATE") as other, ThreadPoolExecutor() as pool:
            deleted = pool.submit(backend.delete, QUEUE, job_id)
            until(lambda: repetitions[Failure.CONFLICT] > counted, what=lambda: "the transaction is run again")
            other.rollback()
            deleted.result(60)
        assert backend.queues() == []


def test_a_row_that_stays_locked_raises_a_timeout_at_the_deadline(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(hasty(place.url)) as backend:
        (job_id,) = backend.enqueue(QUEUE, [new()])
        with holder(mysql_server, place, "SELECT * FROM multiq_jobs FOR UPDATE"):
            timed_out(lambda: backend.delete(QUEUE, job_id))
        # After a timeout the server may still carry out the delete, when the lock is released
        with contextlib.suppress(JobNotFound):
            backend.delete(QUEUE, job_id)
        assert backend.queues() == []


@pytest.mark.long
def test_a_deadlock_never_reaches_the_caller(mysql_server: MysqlDatabases, place: Place) -> None:
    """A transaction with two acks locks the first row, another transaction the second one; then each waits for the
    other."""
    mysql_server.ask("CREATE TABLE heavy (a INT) ENGINE=InnoDB", database=place.name)
    with open_backend(f"{place.url}?timeout=60") as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(ttr=600), new(ttr=600)])
        leases = consumer.reserve(2, 0)
        (first,), (second,) = mysql_server.ask("SELECT seq FROM multiq_jobs ORDER BY seq", database=place.name)
        counted = repetitions[Failure.CONFLICT]
        heavy = "INSERT INTO heavy VALUES " + ",".join(["(1)"] * 1000)  # noqa: S608 - InnoDB ends the one that has changed less
        with holder(mysql_server, place, heavy) as other, other.cursor() as cursor, ThreadPoolExecutor() as pool:
            cursor.execute("SELECT * FROM multiq_jobs WHERE seq = %s FOR UPDATE", (second,))
            settled = pool.submit(consumer.settle, [Ack(lease) for lease in leases])
            until(lambda: _waits_for_a_lock(mysql_server, place), what=lambda: "we wait for the second row")
            cursor.execute("SELECT * FROM multiq_jobs WHERE seq = %s FOR UPDATE", (first,))
            until(lambda: repetitions[Failure.CONFLICT] > counted, what=lambda: "the transaction is run again")
            other.rollback()
            assert settled.result(60) == [None, None]
        assert backend.queues() == []


def test_a_reserve_skips_locked_jobs(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(hasty(place.url)) as backend, backend.consumer([QUEUE]) as consumer:
        locked, free = backend.enqueue(QUEUE, [new(), new()])
        query = "SELECT * FROM multiq_jobs ORDER BY seq LIMIT 1 FOR UPDATE"
        with holder(mysql_server, place, query):
            assert [lease.id for lease in consumer.reserve(5, 5)] == [free]
        assert [lease.id for lease in consumer.reserve(5, 5)] == [locked]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_worker_that_waits_holds_nothing_that_a_producer_needs(
    mysql_server: MysqlDatabases, place: Place, isolation: str
) -> None:
    """At REPEATABLE READ a claim on an empty queue would lock the gap that every INSERT goes into."""
    with (
        open_backend(place.url) as backend,
        backend.consumer([QUEUE]) as consumer,
        mysql_server.client(place.name) as client,
        client.cursor() as cursor,
        ThreadPoolExecutor() as pool,
    ):
        backend.queues()
        reserved = pool.submit(consumer.reserve, 5, 60)
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        ours = (
            "SELECT * FROM information_schema.innodb_trx JOIN information_schema.processlist "
            "ON id = trx_mysql_thread_id WHERE db = %s AND id <> CONNECTION_ID() AND "
        )
        for _ in range(4):
            time.sleep(A_NEW_COPY)
            assert not cursor.execute(f"{ours} trx_started < NOW() - INTERVAL 5 SECOND", (place.name,))
            assert not cursor.execute(f"{ours} trx_rows_locked > 0", (place.name,))
        backend.enqueue(QUEUE, [new()])
        assert len(reserved.result(60)) == 1


class holder:  # noqa: N801 - reads as a block
    """Another client's transaction, which keeps its locks until the block ends."""

    def __init__(self, server: MysqlDatabases, place: Place, statement: str) -> None:
        self._connection = server.connect(place.name, autocommit=False)
        self._statement = statement

    def __enter__(self) -> pymysql.connections.Connection[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 60")
            cursor.execute(self._statement)
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _waits_for_a_lock(server: MysqlDatabases, place: Place) -> bool:
    time.sleep(A_NEW_COPY)
    rows = server.ask(
        "SELECT 1 FROM information_schema.innodb_trx JOIN information_schema.processlist ON id = trx_mysql_thread_id "
        "WHERE trx_state = 'LOCK WAIT' AND db = %s",
        place.name,
    )
    return bool(rows)


def kill_all(server: MysqlDatabases, place: Place) -> None:
    """End all sessions on a database, and wait until they are gone."""
    asked = "SELECT id FROM information_schema.processlist WHERE db = %s"
    for (thread,) in server.ask(asked, place.name):
        server.ask(f"KILL {thread}")
    until(lambda: not server.ask(asked, place.name))


def test_forked_child_uses_no_connection_of_its_parent_s(mysql_server: MysqlDatabases, place: Place) -> None:
    def sessions() -> set[int]:
        listed = mysql_server.ask("SELECT id FROM information_schema.processlist WHERE db = %s", place.name)
        return {session for (session,) in listed}

    with open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given a backend and a consumer that have used a connection each
        backend.enqueue(QUEUE, [new(), new()])
        assert len(consumer.reserve(1, 0)) == 1
        before = sessions()
        assert len(before) == 2

        # When a forked child uses both, then on two connections of its own
        def in_child() -> None:
            backend.enqueue(QUEUE, [new()])
            assert sessions() > before
            assert len(consumer.reserve(1, 0)) == 1
            assert len(sessions() - before) == 2

        assert ended_well(fork(in_child))
        # And the parent continues with its own connections
        backend.enqueue(QUEUE, [new()])
        assert len(consumer.reserve(9, 0)) == 2
        assert sessions() >= before


def test_a_process_forks_while_another_of_its_threads_reads_a_reply(mysql_server: MysqlDatabases, place: Place) -> None:
    with open_backend(place.url) as backend, mysql_server.client(place.name) as client, client.cursor() as cursor:
        # Given a thread that waits for an answer, which another client's lock delays
        backend.enqueue(QUEUE, [new()])
        cursor.execute("LOCK TABLES multiq_jobs WRITE, multiq_queues WRITE")
        asking = threading.Thread(target=backend.stats, args=(QUEUE,))
        asking.start()
        until(lambda: any("multiq_jobs" in str(row[7]) for row in mysql_server.ask("SHOW FULL PROCESSLIST")))
        # When the process forks, then the child starts
        child = fork(lambda: None)
        assert ended_well(child)
        # And the parent's thread gets its answer
        cursor.execute("UNLOCK TABLES")
        asking.join()
        # And another child makes calls of its own
        assert ended_well(fork(lambda: backend.stats(QUEUE)))
