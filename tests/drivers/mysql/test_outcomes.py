"""Outcomes, memos and details on MySQL: their cost, faults, limits, and rows that another program has written."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pymysql
import pytest
from processes import until

from multiq.backend import Ack, After, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, LeaseLost, PayloadTooLarge
from multiq.ids import new_ids
from multiq.settings.url import parse_url
from multiq_mysql.backend import MysqlBackend
from multiq_mysql.connection import Session
from multiq_mysql.dsn import Dsn
from multiq_mysql.records import AGAIN, READY, body_limit, insert_statements
from multiq_mysql.scan_window import FROM_START, ExpiredScan
from multiq_mysql.statements import NOW, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.mysql import MysqlDatabases, MysqlServer, Place

    from multiq.backend import Consumer, Lease, Verdict

QUEUE = "mail"
HOUR = 3600.0  # seconds


def enqueue(backend: MysqlBackend, count: int = 1, **options: Any) -> list[str]:
    return backend.enqueue(QUEUE, [NewJob(b"x", job_id, **options) for job_id in new_ids(count)])


def keeping(lease: Lease, outcome: bytes = b"done", keep: float = HOUR) -> Ack:
    return Ack(lease, After(keep=keep, outcome=outcome))


def rows(server: MysqlDatabases, place: Place) -> int:
    ((count,),) = server.ask("SELECT COUNT(*) FROM multiq_outcomes", database=place.name)
    return int(count)


def pack(backend: MysqlBackend) -> int:
    backend.stats(QUEUE)
    return backend._pool.max_packet or 0


# --- what it costs ---------------------------------------------------------------------------------------


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


def verbs(packet: tuple[str, ...]) -> list[str]:
    """The first word of each statement."""
    return [text.split()[0] for text in packet]


def test_a_verdict_without_after_costs_the_same_statements_as_before_outcomes(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    enqueue(backend, 20)
    with backend.consumer([QUEUE]) as consumer:
        first, second, *leases = consumer.reserve(10, 0)
        for lease in (first, second):  # The first one writes tickets, and the second one looks for old receipts.
            assert consumer.settle([Ack(lease)]) == [None]
        packets.clear()
        # When verdicts store nothing, or an After that has nothing to store
        for ack in (Ack(leases.pop()), Ack(leases.pop(), After())):
            assert consumer.settle([ack]) == [None]
        consumer.settle([Ack(leases.pop()), Ack(leases.pop())])
        consumer.settle([Touch(leases[-1])])
        consumer.settle([GiveBack(leases.pop())])
        consumer.exchange([Ack(lease) for lease in leases], 5, 0)
    # Then the driver sends these statements, none of which names an outcome
    *settled, claimed, reserved = packets
    assert [verbs(packet) for packet in settled] == [
        ["DELETE"],
        ["DELETE"],
        ["BEGIN", "DELETE"],
        ["COMMIT"],
        ["BEGIN", "SELECT"],
        ["UPDATE", "INSERT", "COMMIT"],
        ["BEGIN", "SELECT"],
        ["UPDATE", "INSERT", "COMMIT"],
    ]
    assert verbs(claimed) == ["BEGIN", "DELETE", "SELECT", "SELECT", "SELECT"]
    assert verbs(reserved) == ["UPDATE", "COMMIT"]
    assert "outcome" not in str(packets)


def test_an_outcome_costs_no_round_trip(backend: MysqlBackend, packets: list[tuple[str, ...]]) -> None:
    enqueue(backend, 20)
    with backend.consumer([QUEUE]) as consumer:
        first, second, *leases = consumer.reserve(10, 0)
        for lease in (first, second):
            assert consumer.settle([keeping(lease)]) == [None]
        packets.clear()
        assert consumer.settle([keeping(leases.pop())]) == [None]
        assert [verbs(packet) for packet in packets] == [["BEGIN", "DELETE", "REPLACE", "DELETE", "COMMIT"]]
        packets.clear()
        assert consumer.settle([keeping(leases.pop()), Ack(leases.pop()), keeping(leases.pop())]) == [None] * 3
        assert [verbs(packet) for packet in packets] == [["BEGIN", "DELETE"], ["SET", "REPLACE", "DELETE", "COMMIT"]]
        packets.clear()
        answers, more = consumer.exchange([keeping(lease) for lease in leases], 5, 0)
        assert (answers, len(more)) == ([None] * 4, 5)
        assert [verbs(packet) for packet in packets] == [
            ["BEGIN", "DELETE", "SELECT", "SELECT", "SELECT"],
            ["SET", "REPLACE", "DELETE", "UPDATE", "COMMIT"],
        ]


def test_a_job_without_a_memo_costs_no_byte_of_the_claims_reply(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a job without a memo, and one with a memo
    enqueue(backend, 2)
    with backend.consumer([QUEUE]) as consumer:
        assert consumer.settle([Release(consumer.reserve(1, 0)[0], after=After(memo=b"\x00\xff"))]) == [None]

    def claimed(state: int) -> tuple[Any, ...]:
        claim = render("reserve", queue=QUEUE.encode(), state=state, condition=FROM_START, limit=1, now=NOW, inline=100)
        (row,) = mysql_server.ask(claim, database=place.name)
        return row

    # Then a claim returns two columns, and the first one ends with the age, or with the memo
    plain, noted = claimed(READY), claimed(AGAIN)
    assert (len(plain), plain[0].count(",")) == (2, 7)
    assert (len(noted), noted[0].split(",")[8]) == (2, '"00FF"')


@pytest.mark.long
def test_outcomes_of_many_bytes_go_in_as_many_packets_as_they_need(
    mysql_server: MysqlDatabases, place: Place, backend: MysqlBackend
) -> None:
    # Given outcomes, memos and details that take several packets together
    large = [bytes([number]) * (pack(backend) // 8) for number in range(8)]
    enqueue(backend, 8)
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(8, 0)
        notes = [Touch(lease, After(memo=some)) for lease, some in zip(leases, large, strict=True)]
        assert consumer.settle(notes) == [None] * 8
        assert [backend.peek(QUEUE, lease.id).memo for lease in leases] == large
        acks = [keeping(lease, some) for lease, some in zip(leases, large, strict=True)]
        assert consumer.settle(acks) == [None] * 8
    found = backend.outcomes(QUEUE, [lease.id for lease in leases])
    assert [outcome and outcome.body for outcome in found] == large
    assert rows(mysql_server, place) == 8


# --- limits ----------------------------------------------------------------------------------------------


@pytest.fixture
def small(new_mysql: Callable[..., MysqlServer]) -> Iterator[MysqlBackend]:
    """A backend on a server with small packets."""
    server = new_mysql(max_allowed_packet=1024 * 1024)
    with server.database() as place, open_backend(place.url) as backend:
        yield cast("MysqlBackend", backend)


def test_the_largest_outcome_memo_and_detail_fit_and_a_larger_one_is_refused(small: MysqlBackend) -> None:
    limit = body_limit(pack(small))
    most, more = b"m" * limit, b"m" * (limit + 1)
    enqueue(small, 3)
    with small.consumer([QUEUE]) as consumer:
        one, two, three = consumer.reserve(3, 0)
        too_large: list[Verdict] = [
            keeping(one, more),
            Touch(one, After(memo=more)),
            Release(one, after=After(memo=more)),
            Bury(one, after=After(detail=more)),
            GiveBack(one, after=After(memo=more)),
        ]
        # When one verdict of a call stores too much, then no verdict of the call is carried out
        for verdict in too_large:
            with pytest.raises(PayloadTooLarge, match=f"{limit:,}"):
                consumer.settle([Ack(two), verdict])
            with pytest.raises(PayloadTooLarge, match=f"{limit:,}"):
                consumer.exchange([verdict], 1, 0)
        assert small.stats(QUEUE).reserved == 3
        # And data that a verdict does not store may have any size
        assert consumer.settle([Ack(two, After(outcome=more, memo=more))]) == [None]
        assert consumer.settle([Touch(three, After(detail=more, outcome=more, keep=5))]) == [None]
        # And the largest outcome and memo are stored, and read back
        reason = "r" * limit
        assert consumer.settle([Release(one, reason=reason, after=After(memo=most, detail=most))]) == [None]
        record = small.peek(QUEUE, one.id)
        assert (record.memo, record.detail) == (most, most)
        (again,) = consumer.reserve(1, 0)
        assert again.memo == most
        assert consumer.settle([keeping(again, most)]) == [None]
        assert consumer.settle([keeping(three, most)]) == [None]
    found = small.outcomes(QUEUE, [one.id, three.id])
    assert [outcome and outcome.body for outcome in found] == [most, most]
    assert [outcome.body for outcome in small.history(QUEUE).outcomes] == [most, most]


def test_a_memo_that_was_stored_before_the_packets_became_smaller_is_still_read(small: MysqlBackend) -> None:
    """The server's HEX() of this memo would be NULL, because it exceeds ``max_allowed_packet``."""
    memo = b"m" * body_limit(pack(small))
    enqueue(small)
    with small.consumer([QUEUE]) as consumer:
        assert consumer.settle([Release(consumer.reserve(1, 0)[0], after=After(memo=memo))]) == [None]
    small._run(lambda session: session.execute(f"SET GLOBAL max_allowed_packet = {256 * 1024}"))
    small.close()
    with small.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0)[0].memo == memo


@pytest.mark.parametrize("size", [0, 1, 8192, 8193, 100_000])
def test_a_memo_of_any_size_comes_back_unchanged(backend: MysqlBackend, size: int) -> None:
    memo = bytes(number % 256 for number in range(size))
    enqueue(backend, 3)
    with backend.consumer([QUEUE]) as consumer:
        one, two, three = consumer.reserve(3, 0)
        verdicts: list[Verdict] = [Release(one, after=After(memo=memo)), Release(two), Release(three)]
        assert consumer.settle(verdicts) == [None] * 3
        assert [lease.memo for lease in consumer.reserve(3, 0)] == [memo, b"", b""]


# --- names -----------------------------------------------------------------------------------------------


def test_ids_and_queues_are_compared_byte_by_byte(backend: MysqlBackend) -> None:
    # Given jobs whose ids or queues differ in case, accent, or spaces at the end
    ids = ["straße", "STRASSE", "strasse", "strasse ", "stra\u00dfe\u0301", "\udcff", "0" * 254, str(new_ids(1)[0])]
    for queue in ("q", "Q"):
        backend.enqueue(queue, [NewJob(b"x", job_id) for job_id in ids])
        with backend.consumer([queue]) as consumer:
            for lease in consumer.reserve(100, 0):
                assert consumer.settle([keeping(lease, f"{queue} {lease.id!a}".encode())]) == [None]
    # Then each has an outcome of its own
    for queue in ("q", "Q"):
        found = backend.outcomes(queue, ids)
        assert [outcome and (outcome.id, outcome.body) for outcome in found] == [
            (job_id, f"{queue} {job_id!a}".encode()) for job_id in ids
        ]
        assert {outcome.id for outcome in backend.history(queue).outcomes} == set(ids)
        assert backend.forget(queue, [*ids, *ids]) == len(ids)


def test_a_job_that_another_program_wrote_keeps_its_outcome(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a row whose id is not UTF-8, and whose attempt is the largest number
    enqueue(backend)
    mysql_server.ask("UPDATE multiq_jobs SET id = REPEAT(x'fe', 255), attempt = 4294967295", database=place.name)
    # When it is acked with an outcome
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([keeping(lease)]) == [None]
    # Then the outcome is found under the id that the lease has
    (outcome,) = backend.outcomes(QUEUE, [lease.id])
    assert outcome is not None
    assert (outcome.body, outcome.attempt) == (b"done", 2**32 - 1)
    assert backend.forget(QUEUE, [lease.id]) == 1


# --- job and outcome agree -------------------------------------------------------------------------------


def agree(backend: MysqlBackend, answers: dict[str, list[bytes]]) -> None:
    """Each job either exists without an outcome, or is gone with the outcome of the only ack that was accepted."""
    left = {job.id for state in (State.READY, State.RESERVED) for job in backend.jobs(QUEUE, state, limit=5000).jobs}
    found = backend.outcomes(QUEUE, list(answers))
    for (job_id, accepted), outcome in zip(answers.items(), found, strict=True):
        if job_id in left:
            assert (accepted, outcome) == ([], None), job_id
        else:
            assert outcome is not None, job_id
            assert accepted == [outcome.body], job_id


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.long
def test_two_holders_at_once_leave_one_outcome(backend: MysqlBackend, size: int) -> None:
    # Given jobs whose leases end while their holder acks them, and another consumer that gets those that have ended
    ids = enqueue(backend, 600, ttr=1.0)
    answers: dict[str, list[bytes]] = {job_id: [] for job_id in ids}
    refused = []

    def settle(consumer: Any, leases: list[Lease], name: bytes) -> None:
        for at in range(0, len(leases), size):
            some = leases[at : at + size]
            for lease, answer in zip(some, consumer.settle([keeping(lease, name) for lease in some]), strict=True):
                if answer is None:
                    answers[lease.id].append(name)
                else:
                    refused.append(answer)

    def take_over() -> None:
        with backend.consumer([QUEUE]) as other:
            while leases := other.reserve(50, 3):
                settle(other, leases, b"second")

    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(600, 0)
        began = time.monotonic()
        second = threading.Thread(target=take_over)
        second.start()
        until(lambda: time.monotonic() > began + 0.9)
        settle(consumer, leases[:300], b"first")
        # and the first holder is not done when the other consumer begins
        until(lambda: any(b"second" in names for names in answers.values()))
        settle(consumer, leases[300:], b"first")
        second.join()
    # Then no job has two outcomes, and none is without an outcome
    assert refused
    agree(backend, answers)


def test_a_session_that_is_killed_at_any_time_leaves_job_and_outcome_in_agreement(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    ids = enqueue(backend, 3000)
    done = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        running = "SELECT id FROM information_schema.processlist WHERE db = %s AND info LIKE %s"
        with mysql_server.client() as administrator, administrator.cursor() as cursor:
            while not done.is_set():
                cursor.execute(running, (place.name, "%REPLACE INTO multiq_outcomes%"))
                for (session,) in cursor.fetchall():
                    killed.append(session)
                    with contextlib.suppress(pymysql.OperationalError):  # The session has ended.
                        cursor.execute(f"KILL {session:d}")
                time.sleep(0.002)

    # Given an administrator who kills sessions while they store outcomes
    administrator = threading.Thread(target=kill)
    answers: dict[str, list[bytes]] = {job_id: [] for job_id in ids}
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(3000, 0)
        administrator.start()
        try:
            for number, lease in enumerate(leases):
                if len(killed) >= 10:
                    break
                ack = keeping(lease, str(number).encode())
                # When the caller repeats each ack until it has an answer
                assert _answer(consumer, ack) is None
                answers[lease.id].append(str(number).encode())
        finally:
            done.set()
            administrator.join()
    # Then each ack was carried out once
    assert len(killed) >= 10
    agree(backend, answers)


def _answer(consumer: Consumer, ack: Ack) -> LeaseLost | None:
    while True:
        with contextlib.suppress(BackendUnavailable):
            (answer,) = consumer.settle([ack])
            return answer


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_an_ack_waits_for_a_lock_on_its_outcome_and_changes_nothing_meanwhile(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, count: int
) -> None:
    """The lock wait rolls back the REPLACE alone (1205), so the driver must undo the DELETE itself."""
    enqueue(backend, count)
    with backend.consumer([QUEUE]) as consumer, mysql_server.client(place.name, autocommit=False) as other:
        leases = consumer.reserve(count, 0)
        # Given another program that has locked a row of that id
        with other.cursor() as cursor:
            key = bytes.fromhex(leases[-1].id.replace("-", ""))
            cursor.execute("INSERT INTO multiq_outcomes VALUES (%s, %s, 0, 1, 1, 1, '')", (QUEUE, key))
        # When the ack waits for the lock until its lock wait times out
        answers: list[object] = []
        acking = threading.Thread(target=lambda: answers.extend(consumer.settle([keeping(lease) for lease in leases])))
        acking.start()
        time.sleep(2.3)  # longer than the lock wait timeout of the driver's sessions
        assert backend.stats(QUEUE).reserved == count
        other.rollback()
        acking.join()
        # Then the driver repeats the whole transaction
        assert answers == [None] * count
        assert {outcome.id for outcome in backend.history(QUEUE).outcomes} == {lease.id for lease in leases}
        assert backend.stats(QUEUE).reserved == 0


def test_a_refused_ack_keeps_nothing_whether_it_is_alone_or_not(backend: MysqlBackend) -> None:
    enqueue(backend, 4)
    with backend.consumer([QUEUE]) as consumer:
        one, two, three, four = consumer.reserve(4, 0)
        assert consumer.settle([Ack(one), Ack(two)]) == [None, None]
        for verdicts in ([keeping(one)], [keeping(two), keeping(three)]):
            answers = consumer.settle(verdicts)
            assert isinstance(answers[0], LeaseLost)
            assert answers[1:] == [None] * len(answers[1:])
        answers, leases = consumer.exchange([keeping(one), keeping(four)], 1, 0)
        assert isinstance(answers[0], LeaseLost)
        assert (answers[1], leases) == (None, [])
    assert {outcome.id for outcome in backend.history(QUEUE).outcomes} == {three.id, four.id}


def test_an_ack_whose_ticket_is_gone_keeps_its_outcome(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    enqueue(backend, 2)
    with backend.consumer([QUEUE]) as consumer:
        one, two = consumer.reserve(2, 0)
        assert consumer.settle([keeping(one)]) == [None]
        mysql_server.ask("DELETE FROM multiq_receipts", database=place.name)
        assert consumer.settle([keeping(two)]) == [None]
    assert len(backend.history(QUEUE).outcomes) == 2


def test_the_last_memo_of_a_job_counts_within_a_call(backend: MysqlBackend) -> None:
    enqueue(backend, 2)
    with backend.consumer([QUEUE]) as consumer:
        one, two = consumer.reserve(2, 0)
        verdicts: list[Verdict] = [
            Touch(two, After(memo=b"b")),
            Touch(one, After(memo=b"a")),
            Release(one, after=After(memo=b"b")),
            Touch(two, After(memo=b"a")),
        ]
        assert consumer.settle(verdicts) == [None] * 4
    assert [backend.peek(QUEUE, lease.id).memo for lease in (one, two)] == [b"b", b"a"]


# --- expiry ----------------------------------------------------------------------------------------------


@pytest.fixture
def clocked(place: Place) -> Iterator[tuple[MysqlBackend, list[int]]]:
    """A backend and its clock, in nanoseconds."""
    now = [1_800_000_000 * 10**9]
    dsn = Dsn.from_url(parse_url(place.url, MysqlBackend.options))
    with MysqlBackend(dsn, clock=lambda: now[0]) as backend:
        yield backend, now


def test_each_kept_outcome_deletes_two_expired_ones_of_its_queue(
    clocked: tuple[MysqlBackend, list[int]], mysql_server: MysqlDatabases, place: Place
) -> None:
    backend, now = clocked
    enqueue(backend, 20)
    backend.enqueue("other", [NewJob(b"x", "other")])
    with backend.consumer([QUEUE]) as consumer, backend.consumer(["other"]) as other:
        leases = consumer.reserve(20, 0)
        assert other.settle([keeping(other.reserve(1, 0)[0], keep=1)]) == [None]
        assert consumer.settle([keeping(lease, keep=1) for lease in leases[:10]]) == [None] * 10
        now[0] += 2 * 10**9
        # When no outcome is stored, then no expired outcome is deleted
        assert consumer.settle([Ack(leases[10])]) == [None]
        assert rows(mysql_server, place) == 11
        # And each outcome that is stored deletes two expired ones: alone, in a batch, and if a job of the batch is gone
        assert consumer.settle([keeping(leases[11])]) == [None]
        assert rows(mysql_server, place) == 10
        assert consumer.settle([keeping(leases[12]), Ack(leases[13]), Ack(leases[10])])[:2] == [None, None]
        assert rows(mysql_server, place) == 9
        assert consumer.exchange([keeping(lease) for lease in leases[14:16]], 1, 0)[0] == [None, None]
        assert rows(mysql_server, place) == 7
        assert consumer.settle([keeping(lease) for lease in leases[16:]]) == [None] * 4
        assert rows(mysql_server, place) == 9  # eight new outcomes, and one of the other queue
        # And an outcome that expires later is found as well
        now[0] += int((HOUR + 1) * 10**9)
        assert backend.forget(QUEUE, limit=3) == 3
        assert backend.forget(QUEUE) == 5
        assert backend.forget("other") == 1
    assert rows(mysql_server, place) == 0


def test_consumers_that_keep_outcomes_do_not_wait_for_each_others_expired_ones(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given expired outcomes, the first of which another transaction is deleting
    backend.stats(QUEUE)
    mysql_server.ask(
        "INSERT INTO multiq_outcomes SELECT %s, seq, 0, 1, seq, 1, '' FROM seq_1_to_6", QUEUE, database=place.name
    )
    enqueue(backend)
    with mysql_server.client(place.name, autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(render("drop_expired", queue=QUEUE.encode(), now=100, limit=2, floor=0))
        # When an ack keeps an outcome, then it deletes the next ones
        with backend.consumer([QUEUE]) as consumer:
            assert consumer.settle([keeping(consumer.reserve(1, 0)[0])]) == [None]
        other.commit()
    assert rows(mysql_server, place) == 6 + 1 - 2 - 2


def test_a_scan_for_expired_outcomes_starts_behind_those_that_are_deleted_and_now_and_then_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scan, now = ExpiredScan(), 1000.0
    monkeypatch.setattr("multiq_mysql.scan_window.time.monotonic", lambda: now)
    assert scan.floor() == 0
    scan.found_all(50_000_000)
    assert scan.floor() == 40_000_000
    scan.found_all(45_000_000)
    assert scan.floor() == 40_000_000
    now += 61
    assert scan.floor() == 0


@pytest.mark.long
def test_a_kept_outcome_reads_no_more_pages_behind_deleted_rows_that_cannot_be_purged(
    new_mysql: Callable[..., MysqlServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_mysql(innodb_flush_log_at_trx_commit=2)
    with (
        server.database() as place,
        open_backend(place.url) as backend,
        server.client(place.name) as reader,
        reader.cursor() as cursor,
    ):
        # Given an open snapshot, and many outcomes that were deleted after it began
        backend.stats(QUEUE)
        server.ask(
            "INSERT INTO multiq_outcomes SELECT %s, seq, 0, 1, seq, 1, '' FROM seq_1_to_20000",
            QUEUE,
            database=place.name,
        )
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        assert backend.forget(QUEUE, limit=20_000) == 20_000

        def read(consumer: Any) -> int:
            (lease,) = consumer.reserve(1, 0)
            before = server.status("Innodb_buffer_pool_read_requests")
            assert consumer.settle([keeping(lease)]) == [None]
            return server.status("Innodb_buffer_pool_read_requests") - before

        enqueue(cast("MysqlBackend", backend), 60)
        with backend.consumer([QUEUE]) as consumer:
            consumer.settle([keeping(consumer.reserve(1, 0)[0])])
            behind = sorted(read(consumer) for _ in range(20))
            monkeypatch.setattr(ExpiredScan, "floor", lambda self: 0)
            from_the_start = sorted(read(consumer) for _ in range(20))
        # Then an ack reads few pages, and many more if its scan begins at the start
        assert from_the_start[5] > 2 * behind[5], (behind, from_the_start)


# --- history ---------------------------------------------------------------------------------------------


def test_pages_of_a_history_show_each_outcome_once_though_all_expire_at_one_time(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given outcomes of which many expire at the same time
    backend.stats(QUEUE)
    mysql_server.ask(
        "INSERT INTO multiq_outcomes SELECT %s, CONCAT(x'ff', seq), seq MOD 2, 1, 4000000000000000 + seq DIV 40, 1, '' "
        "FROM seq_1_to_100",
        QUEUE,
        database=place.name,
    )
    for kind, count in ((None, 100), ("done", 50), ("cancelled", 50)):
        # When they are listed in pages
        shown, after = [], None
        while True:
            page = backend.history(QUEUE, kind=cast("Any", kind), limit=7, after=after)
            assert len(page.outcomes) <= 7
            shown += page.outcomes
            if (after := page.after) is None:
                break
        # Then each outcome is listed once, and the outcome that expires last comes first
        assert len({outcome.id for outcome in shown}) == len(shown) == count
        assert [outcome.expires_in for outcome in shown] == pytest.approx(
            sorted((outcome.expires_in for outcome in shown), reverse=True), abs=1
        )


# --- older programs --------------------------------------------------------------------------------------


def test_programs_of_version_2_work_beside_newer_ones(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a job with a memo and a detail
    (job_id,) = enqueue(backend)
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Release(lease, after=After(memo=b"half", detail=b"why"))]) == [None]
    # When a program of version 2 releases it, by the statement of that version
    old = (
        "UPDATE multiq_jobs SET reason = 'old', state = 4, place = priority WHERE queue = %s",
        insert_statements(QUEUE, [NewJob(b"old", "old")], NOW)[0],
    )
    mysql_server.ask(old[0], QUEUE, database=place.name)
    mysql_server.ask(old[1], database=place.name)
    # Then the memo is kept, and a job that this program enqueues has none
    assert backend.peek(QUEUE, job_id).memo == b"half"
    assert backend.peek(QUEUE, "old").memo == b""
