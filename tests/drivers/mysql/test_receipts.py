"""Lost replies: a receipt or a ticket shows whether the call was carried out; a missing job does not show that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from processes import until
from proxy import CutReply, CutRequest, Hole, Pass, Proxy
from pymysql.constants import CLIENT
from servers.process import HOST

from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.conformance.forks import ended_well, fork
from multiq.errors import BackendUnavailable, JobNotFound, JobReserved, LeaseLost, SchemaNotReady
from multiq.ids import new_ids
from multiq_mysql import receipts
from multiq_mysql.pool import Pool
from multiq_mysql.read_back import UnconfirmedLeases
from multiq_mysql.receipts import ReceiptBook
from multiq_mysql.waiting import Poller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Lease, Verdict
    from multiq_mysql.backend import MysqlBackend

QUEUE = "mail"
TTR = 1.0  # seconds, the shortest

VERDICTS: dict[str, Callable[[Lease], Verdict]] = {
    "ack": Ack,
    "release": Release,
    "release with a delay": lambda lease: Release(lease, delay=3600),
    "bury": Bury,
    "give back": GiveBack,
    "abandon": Abandon,
}
every_verdict = pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())


@pytest.fixture
def proxy(mysql_server: MysqlDatabases) -> Iterator[Proxy]:
    with Proxy((mysql_server.host, mysql_server.port)) as proxy:
        yield proxy


@pytest.fixture
def ours(mysql_server: MysqlDatabases, place: Place, proxy: Proxy) -> Iterator[Any]:
    """The backend under test, whose connections go through the proxy."""
    with open_backend(mysql_server.url(place.name, port=proxy.port)) as ours:
        yield ours


def enqueue(backend: MysqlBackend, count: int = 1, **options: Any) -> list[str]:
    return backend.enqueue(QUEUE, [NewJob(b"x", job_id, **options) for job_id in new_ids(count)])


def taken_over(backend: MysqlBackend) -> Lease:
    """Return the lease that another consumer gets after the first lease has ended."""
    with backend.consumer([QUEUE]) as other:
        (lease,) = other.reserve(1, 30)
    return lease


# --- effects of other clients ----------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.few_rows
@every_verdict
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cut", ["idle", "reply"])
def test_a_stale_verdict_is_refused_though_its_connection_is_cut(  # noqa: PLR0917 - of every kind
    backend: MysqlBackend, ours: Any, proxy: Proxy, verdict: Any, cut: str, count: int
) -> None:
    # Given leases that have ended, and another consumer that has acked their jobs
    enqueue(backend, count, ttr=TTR)
    with ours.consumer([QUEUE]) as consumer, backend.consumer([QUEUE]) as other:
        leases = consumer.reserve(count, 0)
        until(lambda: backend.stats(QUEUE).ready == count)
        assert other.settle([Ack(lease) for lease in other.reserve(count, 30)]) == [None] * count
        # When the connection is cut, before the call or with its reply
        proxy.cut() if cut == "idle" else proxy.arm(CutReply())
        answers = consumer.settle([verdict(lease) for lease in leases])
        # Then all late verdicts are refused
        assert [type(answer) for answer in answers] == [LeaseLost] * count
        assert not proxy.is_armed


@pytest.mark.parametrize("then", ["done", "deleted", "purged"])
def test_a_stale_ack_that_goes_with_a_reserve_is_refused(
    backend: MysqlBackend, ours: Any, proxy: Proxy, then: str
) -> None:
    (job_id,) = enqueue(backend, ttr=TTR)
    with ours.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        until(lambda: backend.stats(QUEUE).ready == 1)
        if then == "done":
            with backend.consumer([QUEUE]) as other:
                assert other.settle([Ack(other.reserve(1, 30)[0])]) == [None]
        elif then == "deleted":
            backend.delete(QUEUE, job_id)
        else:
            assert backend.purge(QUEUE, [State.READY]) == 1
        enqueue(backend)
        proxy.arm(CutReply(after=b"COMMIT"))
        (answer,), leases = consumer.exchange([Ack(lease)], 1, 0)
        assert isinstance(answer, LeaseLost)
        assert len(leases) == 1
        assert not proxy.is_armed


def test_a_delete_whose_request_is_lost_does_not_claim_what_a_worker_has_done(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8.3: of a delete and a reserve at the same time, exactly one succeeds."""
    (job_id,) = enqueue(backend)
    ours.stats(QUEUE)
    _meanwhile(monkeypatch, ours, lambda: _work_off(backend))
    proxy.arm(CutRequest(after=b"DELETE"))
    with pytest.raises(JobNotFound):
        ours.delete(QUEUE, job_id)
    assert not proxy.is_armed


def test_a_job_that_is_kicked_and_buried_again_is_not_kicked_twice_by_a_lost_reply(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue(backend)
    with backend.consumer([QUEUE]) as consumer:

        def bury() -> None:
            assert consumer.settle([Bury(lease) for lease in consumer.reserve(1, 30)]) == [None]

        bury()
        ours.stats(QUEUE)
        # When the reply to the kick is lost, and another consumer buries the job before the next attempt
        _meanwhile(monkeypatch, ours, bury)
        proxy.arm(CutReply(after=b";COMMIT"))
        ours.kick_job(QUEUE, job_id)
        # Then the job stays buried
        assert not proxy.is_armed
        record = backend.peek(QUEUE, job_id)
        assert (record.state, record.kicks) == (State.BURIED, 1)


def test_uncertain_leases_stay_with_the_process_that_claimed_them(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.6, 11.4."""
    enqueue(backend, 5)
    with ours.consumer([QUEUE]) as consumer:
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
        # Given a claim that was carried out, whose reply was lost, and whose server is unreachable
        with monkeypatch.context() as patch:
            proxy.arm(CutReply(after=b";COMMIT"))
            _meanwhile(patch, ours, proxy.refuse)
            with pytest.raises(BackendUnavailable):
                consumer.reserve(2, 0)
        proxy.accept()
        first_two = [job.id for job in backend.jobs(QUEUE, State.RESERVED).jobs]
        assert len(first_two) == 2

        def reserve_others() -> None:
            leases = consumer.reserve(2, 30)
            assert len(leases) == 2
            assert {lease.id for lease in leases}.isdisjoint(first_two)

        # When the process forks, then the child gets other jobs
        assert ended_well(fork(reserve_others))
        assert sorted(lease.id for lease in consumer.reserve(2, 30)) == sorted(first_two)


def test_a_kick_whose_request_is_lost_counts_nothing_that_others_kicked(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(backend, 2)
    with backend.consumer([QUEUE]) as consumer:
        first, second = consumer.reserve(2, 0)
        consumer.settle([Bury(first), Bury(second)])
    ours.stats(QUEUE)
    _meanwhile(monkeypatch, ours, lambda: backend.kick_job(QUEUE, first.id))
    proxy.arm(CutRequest(after=b"UPDATE multiq_jobs"))
    assert ours.kick(QUEUE, 2) == 1
    assert not proxy.is_armed
    assert backend.peek(QUEUE, first.id).kicks == 1


def test_a_purge_whose_request_is_lost_counts_nothing_that_others_deleted(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = enqueue(backend, 3)
    ours.stats(QUEUE)
    _meanwhile(monkeypatch, ours, lambda: backend.delete(QUEUE, first))
    proxy.arm(CutRequest(after=b"DELETE"))
    assert ours.purge(QUEUE, [State.READY]) == 2
    assert not proxy.is_armed


def test_a_reschedule_whose_request_is_lost_is_refused_if_another_consumer_has_the_job_now(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue(backend)
    ours.stats(QUEUE)
    _meanwhile(monkeypatch, ours, lambda: taken_over(backend))
    proxy.arm(CutRequest(after=b"DELETE"))
    with pytest.raises(JobReserved):
        ours.reschedule(QUEUE, job_id, 5)
    assert not proxy.is_armed


# --- verdicts that counted -------------------------------------------------------------------------------


@pytest.mark.few_rows
@every_verdict
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("between", ["nothing", "touch", "reserve", "another verdict"])
def test_a_verdict_that_counted_is_not_lost_whatever_call_comes_between(  # noqa: PLR0917 - of every kind
    backend: MysqlBackend,
    ours: Any,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    verdict: Any,
    count: int,
    between: str,
) -> None:
    # Given verdicts that were carried out and whose replies were lost
    enqueue(backend, count + 2)
    with ours.consumer([QUEUE]) as consumer:
        *leases, held, other = consumer.reserve(count + 2, 0)
        verdicts = [verdict(lease) for lease in leases]
        commits = b"writer =" if verdicts == [Ack(leases[0])] else b"COMMIT"  # one ack needs no COMMIT
        _answer_is_lost(monkeypatch, ours, proxy, lambda: consumer.settle(verdicts), commits)
        # When the same consumer makes another call
        calls: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "touch": lambda: consumer.settle([Touch(held)]),
            "reserve": lambda: consumer.reserve(5, 0),
            "another verdict": lambda: consumer.settle([Ack(other), Touch(held)]),
        }
        calls[between]()
        # Then the verdicts are accepted when they are repeated, but only once
        assert consumer.settle(verdicts) == [None] * count
        assert [type(answer) for answer in consumer.settle(verdicts)] == [LeaseLost] * count


def test_a_release_that_counted_is_not_lost_though_another_consumer_has_the_job_now(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(backend)
    with ours.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        _answer_is_lost(monkeypatch, ours, proxy, lambda: consumer.settle([Release(lease)]))
        assert taken_over(backend).attempt == 2
        assert consumer.settle([Release(lease)]) == [None]
    assert backend.stats(QUEUE).reserved == 1


def test_a_batch_whose_reply_is_lost_twice_has_its_answers_one_by_one(
    backend: MysqlBackend, ours: Any, proxy: Proxy
) -> None:
    enqueue(backend, 3)
    with ours.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(3, 0)
        with backend.consumer([QUEUE]) as other:
            assert other.settle([Ack(leases[1])]) == [None]
        verdicts = [Ack(lease) for lease in leases]
        proxy.arm(CutReply(after=b"UPDATE number", times=2))
        with pytest.raises(BackendUnavailable):
            consumer.settle(verdicts)
        assert not proxy.is_armed
        assert [answer is None for answer in consumer.settle(verdicts)] == [True, False, True]


def test_a_delete_and_a_kick_that_counted_are_done_though_the_job_is_gone(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue(backend, delay=3600)
    ours.stats(QUEUE)
    _meanwhile(monkeypatch, ours, lambda: _work_off(backend))
    proxy.arm(CutReply(after=b"UPDATE multiq_jobs"))
    ours.kick_job(QUEUE, job_id)
    assert not proxy.is_armed
    assert backend.queues() == []


def test_leases_whose_reply_is_lost_in_an_exchange_are_handed_out_all_the_same(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdicts are settled, but the claim after the wait fails."""
    enqueue(backend)
    with ours.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        made = []

        def feed() -> None:
            made.extend(enqueue(backend, 100))
            proxy.arm(CutReply(after=b"COMMIT", times=2))

        _while_it_waits(monkeypatch, feed)
        answers, leases = consumer.exchange([Ack(lease)], 100, 30)
        assert answers == [None]
        assert not proxy.is_armed
        assert [lease.id for lease in leases] == made
        assert {(lease.attempt, lease.crashes) for lease in leases} == {(1, 0)}
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 100
        assert backend.queues() == []


def test_leases_whose_reply_is_lost_are_given_back_when_the_consumer_closes(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = enqueue(backend, 100)
    with ours.consumer([QUEUE]) as consumer:
        assert consumer.reserve(0, 0) == []  # its connection is open
        _answer_is_lost(monkeypatch, ours, proxy, lambda: consumer.reserve(100, 0))
        assert backend.stats(QUEUE).reserved == 100
    with backend.consumer([QUEUE]) as other:
        leases = other.reserve(100, 0)
    assert [(lease.id, lease.attempt, lease.crashes) for lease in leases] == [(job_id, 1, 0) for job_id in made]


def test_a_reply_is_cut_when_all_its_request_has_been_carried_out(
    mysql_server: MysqlDatabases, place: Place, proxy: Proxy
) -> None:
    """The tests above rely on this: MariaDB replies to each statement, and stops when it cannot send a reply."""
    statements = ["BEGIN", "INSERT INTO written VALUES (1)", *["SELECT REPEAT('x', 10000)"] * 300, "COMMIT"]
    with mysql_server.client(place.name) as other, other.cursor() as cursor:
        cursor.execute("CREATE TABLE written (number INTEGER) ENGINE=InnoDB")
        ours = mysql_server.connect(
            place.name, host=HOST, port=proxy.port, unix_socket=None, client_flag=CLIENT.MULTI_STATEMENTS
        )
        with ours:
            proxy.arm(CutReply(at=20_000, after=b"COMMIT"))
            with ours.cursor() as cut:
                cut.execute(";".join(statements))
                with pytest.raises(pymysql.OperationalError):
                    any(not cut.nextset() for _ in statements)
        assert not proxy.is_armed
        cursor.execute("SELECT number FROM written")
        assert cursor.fetchall() == ((1,),)


# --- receipts --------------------------------------------------------------------------------------------


def test_receipts_do_not_pile_up(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, jobs: Callable[..., Any]
) -> None:
    # Given receipts of last week's connections
    week = (int(time.time()) // 60 - 7 * 24 * 60) << 38
    many = ",".join(f"({week + number}, 1, 1)" for number in range(500))
    mysql_server.ask(f"INSERT INTO multiq_receipts VALUES {many}", database=place.name)  # noqa: S608
    # When a producer and a consumer work
    backend.enqueue(QUEUE, jobs(20))
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(20):
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
    # Then only rows of the connections in use are left: of each stock of 9 or 33 rows, the unused ones
    ((oldest, count),) = mysql_server.ask("SELECT MIN(writer), COUNT(*) FROM multiq_receipts", database=place.name)
    assert oldest > week + 500
    assert count <= 1 + 8 + 1 + 32 - 20


def test_tickets_do_not_pile_up_on_a_connection_that_acks_for_long(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    enqueue(backend, 400)
    with backend.consumer([QUEUE]) as consumer:
        for lease in consumer.reserve(400, 0):
            assert consumer.settle([Ack(lease)]) == [None]
    # Then one stock is left, after stocks of 8, 32, and three times 128 tickets
    ((stocks,),) = mysql_server.ask("SELECT COUNT(DISTINCT writer DIV 1024) FROM multiq_receipts", database=place.name)
    ((rows,),) = mysql_server.ask("SELECT COUNT(*) FROM multiq_receipts", database=place.name)
    assert stocks <= 2  # a stock's numbers may lie on both sides of a multiple of 1,024
    assert rows == 1 + 8 + 32 + 3 * 128 - 400


def test_more_old_receipts_than_one_statement_deletes_are_soon_gone(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given more old receipts than one call deletes
    week = (int(time.time()) // 60 - 7 * 24 * 60) << 38
    many = ",".join(f"({week + number}, 0, 0)" for number in range(2500))
    mysql_server.ask(f"INSERT INTO multiq_receipts VALUES {many}", database=place.name)  # noqa: S608
    enqueue(backend)

    with backend.consumer([QUEUE]) as consumer:

        def work() -> bool:
            assert consumer.settle([Release(lease) for lease in consumer.reserve(1, 30)]) == [None]
            asked = "SELECT COUNT(*) FROM multiq_receipts WHERE writer < %s"
            return mysql_server.ask(asked, week + 2500, database=place.name) == ((0,),)

        # Then all are deleted within seconds, although the clean-up usually runs once an hour
        until(work)


@pytest.mark.parametrize("verdict", [Ack, Bury])
def test_a_call_that_is_interrupted_as_old_receipts_are_deleted_loses_no_answer(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch, verdict: Any
) -> None:
    enqueue(backend, 2)

    def interrupt(minute: int) -> str:
        raise KeyboardInterrupt

    with backend.consumer([QUEUE]) as consumer:
        interrupted = []
        leases = consumer.reserve(2, 0)
        with monkeypatch.context() as patch:
            patch.setattr(receipts, "old", interrupt)
            for lease in leases:
                try:
                    assert consumer.settle([verdict(lease)]) == [None]
                except KeyboardInterrupt:
                    interrupted.append(lease)
        assert len(interrupted) == 1
        assert consumer.settle([verdict(lease) for lease in interrupted]) == [None]


@pytest.mark.parametrize("count", [1, 2])
def test_a_stock_of_tickets_whose_numbers_are_taken_gets_other_numbers(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Connections draw random numbers, 2**38 for each minute. At some thousand acks a second, two collide every day."""
    enqueue(backend, 1 + count)
    drawn: list[int] = []
    drawing = ReceiptBook._writer

    def draw_the_first_twice(self: ReceiptBook) -> int:
        drawn.append(drawn[0] + 3 if len(drawn) == 1 else drawing(self))
        return drawn[-1]

    monkeypatch.setattr(ReceiptBook, "_writer", draw_the_first_twice)
    with backend.consumer([QUEUE]) as consumer, backend.consumer([QUEUE]) as other:
        first, *leases = consumer.reserve(1 + count, 0)
        assert consumer.settle([Ack(first)]) == [None]
        assert other.settle([Ack(lease) for lease in leases]) == [None] * count
    assert len(drawn) == 3
    assert backend.queues() == []


@pytest.mark.parametrize("count", [1, 2])
def test_acks_are_carried_out_without_their_tickets(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, count: int
) -> None:
    # Given a consumer whose tickets an administrator or a failover has deleted
    enqueue(backend, 1 + count)
    with backend.consumer([QUEUE]) as consumer:
        first, *leases = consumer.reserve(1 + count, 0)
        assert consumer.settle([Ack(first)]) == [None]
        mysql_server.ask("DELETE FROM multiq_receipts", database=place.name)
        # Then its acks count
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * count
    assert backend.queues() == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_ticket_that_another_client_deleted_proves_nothing(  # noqa: PLR0917 - all of them
    backend: MysqlBackend,
    ours: Any,
    mysql_server: MysqlDatabases,
    place: Place,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    # Given acks whose request is lost, by a connection that has tickets
    enqueue(backend, 1 + count, ttr=TTR)
    with ours.consumer([QUEUE]) as consumer:
        first, *leases = consumer.reserve(1 + count, 0)
        assert consumer.settle([Ack(first)]) == [None]
        until(lambda: backend.stats(QUEUE).ready == count)

        def take_away() -> None:
            mysql_server.ask("DELETE FROM multiq_receipts", database=place.name)
            with backend.consumer([QUEUE]) as other:
                assert other.settle([Ack(lease) for lease in other.reserve(count, 30)]) == [None] * count

        _meanwhile(monkeypatch, ours, take_away)
        proxy.arm(CutRequest(after=b"DELETE job"))
        # Then the driver does not take another consumer's acks for this connection's acks, although its tickets are
        # gone, too
        assert [type(answer) for answer in consumer.settle([Ack(lease) for lease in leases])] == [LeaseLost] * count
        assert not proxy.is_armed


def test_old_receipts_are_deleted_though_another_transaction_locks_the_oldest_of_the_others(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    backend.stats(QUEUE)
    week, today = ((int(time.time()) // 60 - days * 24 * 60) << 38 for days in (7, 0))
    mysql_server.ask("INSERT INTO multiq_receipts VALUES (%s, 1, 1), (%s, 1, 1)", week, today - 1, database=place.name)
    with mysql_server.client(place.name, autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("UPDATE multiq_receipts SET number = 2 WHERE writer = %s", (today - 1,))
        enqueue(backend, 2)
        with backend.consumer([QUEUE]) as consumer:
            for lease in consumer.reserve(2, 0):
                assert consumer.settle([Ack(lease)]) == [None]
        seen = mysql_server.ask("SELECT writer FROM multiq_receipts WHERE writer < %s", today, database=place.name)
        assert seen == ((today - 1,),)


# --- an exchange that fails as it waits ------------------------------------------------------------------


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a bug"), SchemaNotReady("no tables")])
@pytest.mark.parametrize("again", ["settle", "exchange"])
def test_verdicts_of_an_exchange_that_fails_as_it_waits_count_when_they_are_repeated(
    backend: MysqlBackend, monkeypatch: pytest.MonkeyPatch, failure: BaseException, again: str
) -> None:
    enqueue(backend, 2)
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(2, 0)
        verdicts: list[Verdict] = [Ack(leases[0]), Bury(leases[1])]

        def fail() -> None:
            raise failure

        answers = None
        with monkeypatch.context() as patch:
            _while_it_waits(patch, fail)
            try:
                answers, _ = consumer.exchange(verdicts, 1, 30)
            except type(failure):
                answers = consumer.settle(verdicts) if again == "settle" else consumer.exchange(verdicts, 1, 0)[0]
        assert answers == [None, None]
        # and only once
        assert [type(answer) for answer in consumer.settle(verdicts)] == [LeaseLost] * 2


def test_verdicts_of_an_exchange_that_is_interrupted_as_it_reads_claims_back_count_when_they_are_repeated(
    backend: MysqlBackend, ours: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue(backend, 2)
    with ours.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(2, 0)
        verdicts: list[Verdict] = [Ack(leases[0]), Bury(leases[1])]

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        def feed() -> None:
            """The claim's reply is lost twice. The driver then reads the leases back, and is interrupted there."""
            enqueue(backend, 100)
            proxy.arm(CutReply(after=b"COMMIT", times=2))
            monkeypatch.setattr(UnconfirmedLeases, "recover", interrupt)

        _while_it_waits(monkeypatch, feed)
        with pytest.raises(KeyboardInterrupt):
            consumer.exchange(verdicts, 100, 30)
        assert not proxy.is_armed
        monkeypatch.undo()
        assert consumer.settle(verdicts) == [None, None]
        # and only once
        assert [type(answer) for answer in consumer.settle(verdicts)] == [LeaseLost] * 2
        # and the leases are the next reserve's
        assert {(lease.attempt, lease.crashes) for lease in consumer.reserve(100, 0)} == {(1, 0)}


def test_an_exchange_whose_claim_is_uncertain_takes_no_second_deadline(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = enqueue(backend)
    granted: list[float] = []
    opened = Pool.open

    def open_and_note(self: Pool, timeout: float) -> Any:
        granted.append(timeout)
        return opened(self, timeout)

    with (
        open_backend(mysql_server.url(place.name, "timeout=1", port=proxy.port)) as ours,
        ours.consumer([QUEUE]) as consumer,
    ):
        (lease,) = consumer.reserve(1, 0)
        assert lease.id == first

        def feed() -> None:
            """The claim is committed, its reply is lost, and from then on the server is unreachable."""
            enqueue(backend, 100)
            proxy.arm(CutReply(after=b";COMMIT"))
            monkeypatch.setattr(Pool, "open", open_and_note)
            _meanwhile(monkeypatch, ours, lambda: setattr(proxy, "mode", Hole()))

        _while_it_waits(monkeypatch, feed)
        answers, leases = consumer.exchange([Ack(lease)], 100, 30)
        assert (answers, leases) == ([None], [])
        assert len(granted) == 1
        # and the leases are the next reserve's
        proxy.mode = Pass()
        leases = consumer.reserve(100, 0)
        assert {(lease.attempt, lease.crashes) for lease in leases} == {(1, 0)}
        assert len(leases) == 100


def _answer_is_lost(
    monkeypatch: pytest.MonkeyPatch, ours: Any, proxy: Proxy, call: Callable[[], object], after: bytes = b"COMMIT"
) -> None:
    """The call is carried out, but raises: its reply is cut, and the server is unreachable at the next attempt."""
    proxy.arm(CutReply(after=after))
    with monkeypatch.context() as patch:
        _meanwhile(patch, ours, proxy.refuse)
        with pytest.raises(BackendUnavailable):
            call()
    proxy.accept()
    assert not proxy.is_armed


def _meanwhile(monkeypatch: pytest.MonkeyPatch, ours: Any, act: Callable[[], object]) -> None:
    """Let another client *act* between a lost reply and the next attempt."""
    opened, acts = Pool.open, [act]

    def open_later(self: Pool, timeout: float) -> Any:
        if self is ours._pool and acts:
            acts.pop()()
        return opened(self, timeout)

    monkeypatch.setattr(Pool, "open", open_later)


def _while_it_waits(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another client *act* as soon as a consumer begins to wait."""
    sleep, acts = Poller.sleep, [act]

    def act_first(self: Poller, *args: Any) -> None:
        if acts:
            acts.pop()()
        else:
            sleep(self, *args)

    monkeypatch.setattr(Poller, "sleep", act_first)


def _work_off(backend: MysqlBackend) -> None:
    with backend.consumer([QUEUE]) as other:
        assert other.settle([Ack(other.reserve(1, 30)[0])]) == [None]
