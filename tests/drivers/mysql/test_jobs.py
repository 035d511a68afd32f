"""How jobs are stored and moved: ids, sizes, batches, deadlock retries, round trips, and scan windows."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from servers.mysql import A_NEW_COPY

from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, State
from multiq.backend.registry import open_backend
from multiq.driverkit.call_retry import Failure, repetitions
from multiq.errors import BackendCorrupt, BackendTimeout, BackendUnavailable, OptionInvalid, PayloadTooLarge
from multiq.ids import new_id
from multiq.settings.url import parse_url
from multiq_mysql import errors, scan_window
from multiq_mysql import pool as pool_module
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.connection import Session
from multiq_mysql.dsn import Dsn
from multiq_mysql.records import AGAIN, body_limit, insert_statements, microseconds, pack_id, unpack_id
from multiq_mysql.scan_window import FROM_START, NO_SCAN, ScanCursor
from multiq_mysql.statements import NOW, literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.mysql import MysqlDatabases, Place

    Jobs = Callable[..., list[NewJob]]

IDS = [
    "01890a5d-ac96-774b-8cce-b302099a8057",
    "01890a5d-ac96-774b-8cce-b302099a8057".upper(),
    "01890a5dac96-774b-bcce-b302099a8057-",
    "0" * 36,
    "a",
    "",
    "fifteen bytes i",
    "sixteen bytes id",
    "ends in nothing\0\0",
    "\xff\xff",
    "\N{SNOWMAN}" * 12,
    "half a pair \ud800",
]


# --- ids and statements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("job_id", IDS, ids=range(len(IDS)))
def test_any_id_comes_back_as_it_was(backend: MysqlBackend, job_id: str) -> None:
    assert unpack_id(pack_id(job_id)) == job_id
    backend.enqueue("q", [NewJob(b"x", job_id)])
    assert backend.peek("q", job_id).id == job_id
    (lease,) = backend.consumer(["q"]).reserve(1, 0)
    assert lease.id == job_id


def test_no_two_ids_are_packed_alike() -> None:
    assert len({pack_id(job_id) for job_id in IDS}) == len(IDS)
    assert len(pack_id(new_id())) == 16


def test_an_id_that_is_too_long_is_refused(backend: MysqlBackend) -> None:
    backend.enqueue("q", [NewJob(b"x", "i" * 254)])
    with pytest.raises(OptionInvalid, match="at most 254 bytes"):
        backend.enqueue("q", [NewJob(b"x", "i" * 255)])
    assert backend.stats("q").ready == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (True, "1"), (b"", "x''"), (b"a'\\", "x'61275c'"), (None, "NULL"), ([1, 2], "1,2"), (NOW, NOW)],
    ids=["number", "truth", "nothing", "quotes", "null", "numbers", "sql"],
)
def test_values_as_sql(value: Any, text: str) -> None:
    assert literal(value) == text


def test_text_is_never_taken_for_sql() -> None:
    with pytest.raises(TypeError, match="encode it"):
        literal("1 OR 1=1")  # type: ignore[arg-type]


def test_delays_are_rounded_up() -> None:
    assert [microseconds(delay) for delay in (0, 1e-9, 1e-6, 1.0000001, 3)] == [0, 1, 1, 1_000_001, 3_000_000]


def test_a_batch_is_cut_only_where_a_statement_would_be_too_long(jobs: Jobs) -> None:
    assert len(insert_statements("q", jobs(1000), NOW)) == 1
    few = insert_statements("q", jobs(10, b"x" * 1000), NOW, chunk=5000)
    assert 1 < len(few) <= 10
    assert max(map(len, few)) < 5000 + 500
    assert len(insert_statements("q", jobs(2, b"x" * 9000), NOW, chunk=5000)) == 2


# --- sizes -----------------------------------------------------------------------------------------------


def test_the_largest_body_is_what_the_server_takes(new_mysql: Callable[..., Any], jobs: Jobs) -> None:
    server = new_mysql(max_allowed_packet=1 << 20)
    with server.database() as place, open_backend(place.url) as backend:
        backend.stats("q")
        limit = backend.capabilities.max_body
        assert limit == body_limit(1 << 20)
        largest = bytes(range(256)) * (limit // 256)
        queue = "q" * 128
        backend.enqueue(queue, [NewJob(largest, "\xe9" * 120, delay=0.000001)])
        with pytest.raises(PayloadTooLarge, match="max_allowed_packet"):
            backend.enqueue(queue, [*jobs(), *jobs(1, b"x" * (limit + 1))])
        (lease,) = backend.consumer([queue]).reserve(5, 10)
        assert lease.body == largest
        # a reschedule inserts the row again
        assert backend.consumer([queue]).settle([Bury(lease, "w" * 1000)]) == [None]
        backend.reschedule(queue, lease.id, 0)
        assert backend.peek(queue, lease.id).body == largest


def test_a_batch_of_many_statements_is_whole(backend: MysqlBackend, jobs: Jobs) -> None:
    made = jobs(40, b"x" * 100_000)
    assert backend.enqueue("q", made) == [job.id for job in made]
    assert backend.stats("q").ready == 40
    # the last one has an id that is too long: nothing of it is stored
    with pytest.raises(OptionInvalid):
        backend.enqueue("q", [*jobs(40, b"x" * 100_000), NewJob(b"x", "i" * 300)])
    assert backend.stats("q").ready == 40


# --- round trips -----------------------------------------------------------------------------------------


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The statements of each packet that is sent."""
    sent: list[tuple[str, ...]] = []
    original = Session.execute

    def noted(self: Session, *texts: str) -> Any:
        sent.append(texts)
        return original(self, *texts)

    monkeypatch.setattr(Session, "execute", noted)
    return sent


def test_round_trips_of_each_verb(backend: MysqlBackend, jobs: Jobs, packets: list[tuple[str, ...]]) -> None:
    consumer = backend.consumer(["q"])
    for _ in range(2):  # once an hour, the first call after a receipt also looks for old receipts
        (job_id,) = backend.enqueue("q", jobs(1))
        backend.delete("q", job_id)

    def taken(verb: Callable[[], Any]) -> tuple[int, Any]:
        packets.clear()
        answer = verb()
        return len(packets), answer

    assert taken(lambda: backend.enqueue("q", jobs(1)))[0] == 1
    assert len(packets[0]) == 1  # a plain INSERT, which commits by itself
    assert taken(lambda: backend.enqueue("q", jobs(999)))[0] == 1
    backend.stats("q")
    count, leases = taken(lambda: consumer.reserve(100, 0))
    assert (count, len(leases)) == (3, 100)  # the first reserve polls; then come the claim and the lease
    count, leases = taken(lambda: consumer.reserve(100, 0))
    assert (count, len(leases)) == (2, 100)
    assert taken(lambda: consumer.settle([Ack(leases.pop())]))[0] == 2  # the first ack also writes tickets
    count, (_, leases) = taken(lambda: consumer.exchange([Ack(lease) for lease in leases], 100, 0))
    assert (count, len(leases)) == (2, 100)
    assert taken(lambda: consumer.settle([Ack(leases[0])]))[0] == 1
    assert taken(lambda: consumer.settle([Ack(lease) for lease in leases[1:50]]))[0] == 2
    assert taken(lambda: consumer.settle([Release(lease, 5) for lease in leases[50:]]))[0] == 2
    assert taken(lambda: backend.delete("q", backend.jobs("q", State.READY, limit=1).jobs[0].id))[0] <= 5


def test_verdicts_from_several_reserves_and_a_lost_one(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.enqueue("q", jobs(6))
    consumer = backend.consumer(["q"])
    leases = consumer.reserve(3, 0) + consumer.reserve(3, 0)
    # another consumer can ack the job, because it has the lease
    assert backend.consumer(["q"]).settle([Ack(leases[1])]) == [None]
    answers = consumer.settle([Ack(lease) for lease in leases])
    assert [answer is None for answer in answers] == [True, False, True, True, True, True]
    assert backend.queues() == []


def test_a_queue_that_is_named_twice_hands_out_a_job_once(backend: MysqlBackend, jobs: Jobs) -> None:
    backend.enqueue("q", jobs(3))
    backend.enqueue("r", jobs(3))
    for queues in (["q", "q", "r"], ["s", "r", "r", "q"]):
        consumer = backend.consumer(queues)
        leases = consumer.reserve(5, 0)
        assert len({(lease.queue, lease.id) for lease in leases}) == len(leases) == 5
        assert consumer.settle([GiveBack(lease) for lease in leases]) == [None] * 5


# --- deadlock retries ------------------------------------------------------------------------------------


def delete_and_look(backend: MysqlBackend, job_id: str) -> bool:
    backend.delete("q", job_id)
    return job_id not in {job.id for job in backend.jobs("q", State.READY).jobs}


@pytest.mark.few_rows
@pytest.mark.parametrize("code", [*sorted(errors.CONFLICTS), errors.NOT_PREPARED])
@pytest.mark.parametrize(
    "verb", ["enqueue", "reserve", "ack", "acks", "release", "kick", "delete", "reschedule", "purge"]
)
def test_every_verb_is_run_again_after_a_deadlock(
    backend: MysqlBackend, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, code: int, verb: str
) -> None:
    backend.enqueue("q", jobs(4))
    backend.enqueue("other", jobs(1))
    consumer = backend.consumer(["q"])
    leases = consumer.reserve(3, 0)
    if verb == "kick":
        consumer.settle([Bury(lease) for lease in leases])
    verbs: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: len(backend.enqueue("q", jobs(2))) == 2,
        "reserve": lambda: len(consumer.reserve(5, 0)) == 1,
        "ack": lambda: consumer.settle([Ack(leases[0])]) == [None],
        "acks": lambda: consumer.settle([Ack(lease) for lease in leases]) == [None] * 3,
        "release": lambda: consumer.settle([Release(lease, 9) for lease in leases]) == [None] * 3,
        "kick": lambda: backend.kick("q", 10) == 3,
        "delete": lambda: delete_and_look(backend, "job-4"),
        "reschedule": lambda: backend.reschedule("q", "job-4", 3) == "job-4",
        "purge": lambda: backend.purge("q", [State.READY]) == 1,
    }
    commit = Session.commit
    failures = iter([True, True, False])

    def unlucky(self: Session, *texts: str, **options: Any) -> Any:
        if next(failures, False):
            if self.in_transaction and texts:
                self.execute(*texts)  # all statements but the COMMIT, so that the transaction is rolled back
            raise pymysql.OperationalError(code, "as the server would say")
        return commit(self, *texts, **options)

    monkeypatch.setattr(Session, "commit", unlucky)
    failure = Failure.CONFLICT if code in errors.CONFLICTS else Failure.REJECTED
    before = repetitions[failure]
    assert verbs[verb]()
    assert repetitions[failure] == before + 2


@pytest.mark.parametrize("code", [errors.REFUSED_BY_GROUP, errors.NOT_PREPARED])
def test_a_statement_that_a_cluster_refuses_is_retried_until_the_deadline(
    mysql_server: MysqlDatabases, place: Place, jobs: Jobs, code: int
) -> None:
    with open_backend(f"{place.url}?timeout=0.5") as backend:
        backend.enqueue("q", jobs(2))
        # Given a server that three times raises the error of a cluster's node
        mysql_server.ask("CREATE TABLE tries (n INT) ENGINE=MyISAM", database=place.name)
        mysql_server.ask(
            "CREATE TRIGGER refuses BEFORE DELETE ON multiq_jobs FOR EACH ROW BEGIN INSERT INTO tries VALUES (1); "  # noqa: S608
            f"IF (SELECT COUNT(*) FROM tries) <= 3 THEN SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}; END IF; END",
            database=place.name,
        )
        # Then the call succeeds after some attempts
        backend.delete("q", "job-1")
        assert mysql_server.ask("SELECT COUNT(*) FROM tries", database=place.name) == ((4,),)
        # And if the server refuses each attempt, the call raises the error
        mysql_server.ask(
            "CREATE OR REPLACE TRIGGER refuses BEFORE DELETE ON multiq_jobs FOR EACH ROW "
            f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}",
            database=place.name,
        )
        with pytest.raises(BackendUnavailable, match="node"):
            backend.delete("q", "job-2")


def test_a_server_clock_that_is_set_back_makes_nothing_early(place: Place, jobs: Jobs) -> None:
    """Delays and leases end later by the same time. New jobs still come after the old ones."""
    hour = 3600 * 10**9
    clock = [500_000 * hour]
    with MysqlBackend(Dsn.from_url(parse_url(place.url, MysqlBackend.options)), clock=lambda: clock[0]) as backend:
        backend.enqueue("q", [NewJob(b"x", "late", delay=60), NewJob(b"x", "held", ttr=60), NewJob(b"x", "first")])
        consumer = backend.consumer(["q"])
        (held,) = consumer.reserve(1, 0)
        clock[0] -= hour
        backend.enqueue("q", [NewJob(b"x", "second")])
        assert [lease.id for lease in consumer.reserve(9, 0)] == ["first", "second"]
        clock[0] += hour - 10**9
        assert backend.stats("q").delayed == 1
        assert consumer.settle([Ack(held)]) == [None]
        clock[0] += 61 * 10**9
        assert "late" in {lease.id for lease in consumer.reserve(9, 0)}


def test_a_kick_ends_though_jobs_are_buried_again_all_the_time(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.enqueue("q", jobs(4))
    bury = "UPDATE multiq_jobs SET state = 3, place = UNIX_TIMESTAMP(SYSDATE(6)) * 1000000"
    mysql_server.ask(bury, database=place.name)
    # Given workers that bury at once what is kicked
    monkeypatch.setattr("multiq_mysql.backend.SLICE", 2)
    commit, buried = Session.commit, list[int]()

    def bury_again(self: Session, *texts: str, **options: Any) -> Any:
        answers = commit(self, *texts, **options)
        if len(buried) < 10:
            buried.append(1)
            mysql_server.ask(f"{bury} WHERE state = 4", database=place.name)
        return answers

    monkeypatch.setattr(Session, "commit", bury_again)
    # Then each job is kicked once
    assert backend.kick("q", 10**6) == 4


def test_a_lock_that_is_never_released_is_a_timeout(mysql_server: MysqlDatabases, place: Place, jobs: Jobs) -> None:
    with (
        open_backend(f"{place.url}?timeout=0.5") as backend,
        mysql_server.client(place.name, autocommit=False) as holder,
    ):
        backend.enqueue("q", jobs(2))
        with holder.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            cursor.execute("SELECT * FROM multiq_jobs FOR UPDATE")
        with pytest.raises(BackendTimeout) as caught:
            backend.delete("q", "job-1")
        assert isinstance(caught.value.__cause__, pymysql.MySQLError)
        # consumers and producers do not wait for the lock
        assert backend.consumer(["q"]).reserve(2, 0) == []
        backend.enqueue("q", jobs(1))
        assert [lease.id for lease in backend.consumer(["q"]).reserve(3, 0)] == ["job-3"]
        holder.rollback()
        backend.delete("q", "job-1")


def test_no_transaction_stays_open_between_calls(
    backend: MysqlBackend, mysql_server: MysqlDatabases, jobs: Jobs
) -> None:
    backend.enqueue("q", jobs(5))
    consumer = backend.consumer(["q"])
    consumer.settle([Release(lease) for lease in consumer.reserve(2, 0)])
    consumer.reserve(9, 0)
    consumer.reserve(9, 0)
    with contextlib.suppress(Exception):
        backend.delete("q", "job-1")
    time.sleep(A_NEW_COPY)
    assert mysql_server.ask("SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state IS NOT NULL") == ((0,),)


# --- foreign tables and rows -----------------------------------------------------------------------------


def test_a_table_that_was_dropped_is_reported_with_the_way_to_make_it_again(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    mysql_server.ask("DROP TABLE multiq_jobs", database=place.name)
    with pytest.raises(BackendCorrupt, match="multiq schema show-sql"):
        backend.stats("q")


def test_names_that_a_collation_would_take_for_one(backend: MysqlBackend, jobs: Jobs) -> None:
    for name in ("mail", "Mail", "MAIL"):
        backend.enqueue(name, jobs())
    assert backend.queues() == ["MAIL", "Mail", "mail"]
    assert all(backend.stats(name).ready == 1 for name in backend.queues())


# --- scan windows ----------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on which every scan from the start takes too long to be made often."""
    monkeypatch.setattr(scan_window, "CHEAP", -1.0)
    monkeypatch.setattr(scan_window, "MANY", 0)
    monkeypatch.setattr(scan_window, "_LONGEST", 3600.0)
    monkeypatch.setattr(scan_window, "BUSY", 10**9)


def test_a_scan_goes_on_where_the_last_one_ended() -> None:
    cursor = ScanCursor(may_wait=True)
    assert cursor.sql is FROM_START
    cursor.taken((5, 9))
    cursor.scanned(1.0, rows=2)
    assert cursor.sql is FROM_START  # a scan of so few jobs is not slow because of deleted rows
    cursor.restart.taken(scan_window.MANY)
    assert cursor.sql == "place = 5 AND seq > 9"
    cursor.enqueued(5)
    assert cursor.sql is not FROM_START
    cursor.enqueued(4)
    assert cursor.sql is FROM_START


def test_after_an_empty_scan_the_table_is_not_read_until_it_is_time() -> None:
    cursor = ScanCursor(may_wait=False)
    cursor.restart.taken(scan_window.MANY)
    cursor.scanned(1.0, rows=0)
    assert cursor.sql is NO_SCAN
    cursor.enqueued(5)
    assert cursor.sql is FROM_START


def test_jobs_outside_the_scan_window_are_found(backend: MysqlBackend, jobs: Jobs, slow: None) -> None:
    consumer = backend.consumer(["q"])
    backend.enqueue("q", jobs(10, priority=7))
    backend.enqueue("q", jobs(10, priority=9))
    found = [lease.id for _ in range(9) for lease in consumer.reserve(3, 0)]
    assert found == [f"job-{number}" for number in range(1, 21)]


def test_a_released_job_is_found_outside_the_scan_window(backend: MysqlBackend, jobs: Jobs, slow: None) -> None:
    consumer = backend.consumer(["q"])
    backend.enqueue("q", jobs(9))
    first = consumer.reserve(3, 0)
    assert consumer.settle([Release(first[1])]) == [None]
    # The next scan from the start follows after ten times the time that the last one took.
    found: list[str] = []
    while len(found) < 7:
        found += [lease.id for lease in consumer.reserve(3, 1)]
    assert sorted(found) == ["job-2", *(f"job-{number}" for number in range(4, 10))]


@pytest.mark.parametrize("how", ["reschedule", "kick_job", "kick"])
def test_a_job_that_this_process_makes_ready_is_found_outside_the_scan_window(
    backend: MysqlBackend, jobs: Jobs, slow: None, how: str
) -> None:
    # Given a consumer with a scan window, and an urgent job outside of it that is delayed or buried
    backend.enqueue("q", [NewJob(b"urgent", "urgent", priority=0, delay=0 if how == "kick" else 3600)])
    consumer = backend.consumer(["q"])
    if how == "kick":
        assert consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)]) == [None]
    backend.enqueue("q", jobs(10, priority=7))
    assert len(consumer.reserve(3, 0)) == len(consumer.reserve(3, 0)) == 3
    # When it is made ready
    if how == "reschedule":
        backend.reschedule("q", "urgent", 0)
    elif how == "kick_job":
        backend.kick_job("q", "urgent")
    else:
        assert backend.kick("q", 1) == 1
    # Then it comes first
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"urgent"]


def test_a_rescheduled_job_is_among_those_that_other_processes_look_for_often(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Jobs
) -> None:
    """Outside the window, a job that was never handed out may wait for 10 s, and a job that became ready again for 1
    s."""
    (job_id,) = backend.enqueue("q", jobs())
    backend.reschedule("q", job_id, 0)
    assert mysql_server.ask("SELECT state FROM multiq_jobs", database=place.name) == ((AGAIN,),)


def test_jobs_are_taken_once_by_many_at_a_time(backend: MysqlBackend, jobs: Jobs) -> None:
    made = [job_id for _ in range(10) for job_id in backend.enqueue("q", jobs(100))]
    taken: list[str] = []

    def take() -> None:
        with backend.consumer(["q"]) as consumer:
            leases = consumer.reserve(7, 5)
            while leases:
                taken.extend(lease.id for lease in leases)
                answers, leases = consumer.exchange([Ack(lease) for lease in leases], 7, 0)
                assert not any(answers)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(made)
    assert backend.queues() == []


# --- reasons ---------------------------------------------------------------------------------------------


@pytest.mark.few_rows
@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600"])
@pytest.mark.parametrize("verdict", [Release, Bury, Abandon])
def test_a_reason_that_is_too_long_is_cut_and_refuses_no_batch(
    backend: MysqlBackend, mysql_server: MysqlDatabases, jobs: Jobs, verdict: Any, letter: str
) -> None:
    backend.enqueue("q", jobs(3))
    with backend.consumer(["q"]) as consumer:
        one, two, three = consumer.reserve(3, 0)
        reason = letter * (20_000_000 // len(letter.encode()))
        assert consumer.settle([verdict(one, reason=reason), verdict(two, reason="short"), Ack(three)]) == [None] * 3
    kept = backend.peek("q", one.id).reason
    assert kept is not None
    assert kept.endswith("...")
    assert set(kept.removesuffix("...")) == {letter}
    longest = int(mysql_server.variable("max_allowed_packet")) // 4
    assert longest - 4 < len(kept.encode()) <= longest
    assert backend.peek("q", two.id).reason == "short"


# --- connections -----------------------------------------------------------------------------------------


def test_callers_at_one_time_find_their_connections_again(backend: MysqlBackend) -> None:
    def sessions(count: int) -> set[int]:
        with contextlib.ExitStack() as stack:
            borrowed = [stack.enter_context(backend._pool.borrowed()) for _ in range(count)]
            return {connection.select("SELECT CONNECTION_ID()")[0][0] for connection in borrowed}

    first = sessions(24)
    assert len(first) == 24
    assert sessions(24) == first


def test_connections_that_were_idle_for_a_while_are_closed(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        borrowed = [stack.enter_context(backend._pool.borrowed()) for _ in range(12)]
        for connection in borrowed:
            connection.select("SELECT 1")
    monkeypatch.setattr(pool_module, "_IDLE_FOR", -1.0)
    for _ in borrowed:  # each call closes one idle connection
        backend.stats("q")
    assert len([connection for connection in borrowed if connection._opened is not None]) <= 1
