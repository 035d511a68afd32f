"""Held jobs, steps and notes on MySQL: what they cost, what they leave behind, hot jobs, and older programs."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from processes import until

from multiq.backend import (
    MAX_STEPS,
    Ack,
    After,
    Arrive,
    Drop,
    Enqueue,
    NewJob,
    Put,
    State,
    Terms,
    Touch,
    Version,
)
from multiq.backend.registry import open_backend
from multiq.driverkit.call_retry import repetitions
from multiq.errors import JobNotFound
from multiq.ids import new_id, new_ids
from multiq_mysql.connection import Session
from multiq_mysql.records import AGAIN, HELD, READY, insert_statements
from multiq_mysql.scan_window import FROM_START
from multiq_mysql.statements import NOW, render

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from servers.mysql import MysqlDatabases, MysqlServer, Place

    from multiq.backend import Backend, Lease, Step, Verdict
    from multiq_mysql.backend import MysqlBackend

QUEUE = "mail"


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


def enqueue(backend: MysqlBackend, count: int = 1) -> list[str]:
    return backend.enqueue(QUEUE, [NewJob(b"x", job_id) for job_id in new_ids(count)])


def hold(backend: Backend, awaits: int, queue: str = QUEUE, **options: Any) -> str:
    (job_id,) = backend.enqueue(queue, [NewJob(b"held", new_id(), terms=Terms(awaits), **options)])
    return job_id


def arriving(lease: Lease, *ids: str) -> Ack:
    return Ack(lease, After(steps=tuple(Arrive(QUEUE, job_id, lease.id) for job_id in ids)))


def arrivals(server: MysqlDatabases, place: Place) -> int:
    ((count,),) = server.ask("SELECT COUNT(*) FROM multiq_arrivals", database=place.name)
    return int(count)


# --- what it costs ---------------------------------------------------------------------------------------


def test_a_job_without_terms_is_enqueued_with_the_same_bytes_as_before_terms(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    backend.stats(QUEUE)
    packets.clear()
    # When jobs are enqueued, alone, in a batch, and with terms that do not hold them
    enqueue(backend)
    enqueue(backend, 3)
    backend.enqueue(QUEUE, [NewJob(b"x", "delayed", delay=5, terms=None)])
    # Then no statement names a column or table of held jobs
    assert [verbs(packet) for packet in packets] == [["INSERT"], ["SET", "INSERT"], ["INSERT"]]
    head = "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`)\nVALUES ("
    assert all(packet[-1].startswith(head) for packet in packets)
    assert all(packet[-1].endswith(")\nON DUPLICATE KEY UPDATE seq = seq") for packet in packets)


def test_a_verdict_without_steps_names_nothing_that_steps_use(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    enqueue(backend, 10)
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(10, 0)
        packets.clear()
        consumer.settle([Ack(leases.pop())])
        consumer.settle([Ack(leases.pop(), After(steps=())), Ack(leases.pop())])
        consumer.settle([Touch(leases[0])])
        consumer.exchange([Ack(lease) for lease in leases], 5, 0)
    sent = [text for packet in packets for text in packet if "CONCAT_WS(',', HEX(id)" not in text]
    assert not re.search(r"awaits|hold_delay|doomed|multiq_notes", " ".join(sent))
    old = render("old_arrivals", after=0, limit=1000)  # the clean-up, once an hour
    assert [text for text in sent if "multiq_arrivals" in text] in ([], [old])


def test_a_hundred_arrivals_of_an_exchange_at_one_job_are_few_statements_and_no_more_packets(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    # Given a hundred leases whose jobs a held job waits for, among others
    target = hold(backend, 1000)
    enqueue(backend, 150)
    with backend.consumer([QUEUE]) as consumer:
        first, *leases = consumer.reserve(101, 0)
        consumer.settle([Ack(first)])  # writes tickets
        packets.clear()
        # When they are acked
        consumer.exchange([arriving(lease, target) for lease in leases], 10, 0)
    # Then the held job is locked, and the arrivals are counted in the packet that commits
    assert [verbs(packet) for packet in packets] in (
        [
            ["BEGIN", "DELETE", "SELECT", "SELECT", "SELECT", "SELECT", "SELECT"],
            ["INSERT", "UPDATE", "UPDATE", "COMMIT"],
        ],
        [
            ["SELECT"],  # old receipts, once an hour
            ["SELECT"],  # old arrivals
            ["BEGIN", "DELETE", "SELECT", "SELECT", "SELECT", "SELECT", "SELECT"],
            ["INSERT", "UPDATE", "UPDATE", "COMMIT"],
        ],
    )
    assert backend.peek(QUEUE, target).awaits == 900


def test_the_arrivals_at_a_hundred_jobs_are_released_by_one_statement(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    # Given a hundred chains
    targets = [hold(backend, 1) for _ in range(100)]
    enqueue(backend, 101)
    with backend.consumer([QUEUE]) as consumer:
        first, *leases = consumer.reserve(101, 0)
        consumer.settle([Ack(first)])
        packets.clear()
        # When the first job of each flow is acked, then all second jobs are released by one statement
        acks = [arriving(lease, target) for lease, target in zip(leases, targets, strict=True)]
        assert consumer.settle(acks) == [None] * 100
        released = [text for packet in packets for text in packet if "hold_delay > 0, 1, 4" in text]
        assert len(released) == 1
        assert sorted(lease.id for lease in consumer.reserve(200, 0)) == sorted(targets)


# --- what it leaves behind -------------------------------------------------------------------------------


def test_the_last_arrival_deletes_the_others(backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place) -> None:
    target = hold(backend, 700)
    members = [f"member-{number}" for number in range(700)]
    backend.carry_out([Arrive(QUEUE, target, member) for member in members[:699]])
    assert arrivals(mysql_server, place) == 699
    backend.carry_out([Arrive(QUEUE, target, members[699])])
    assert arrivals(mysql_server, place) == 0


@pytest.mark.parametrize("end", ["released", "doomed", "deleted", "kicked", "purged"])
@pytest.mark.long
def test_the_clean_up_deletes_the_arrivals_at_jobs_that_are_not_held_any_more(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, end: str
) -> None:
    # Given a held job with many arrivals, and another job that stays held
    target, other = hold(backend, 2501), hold(backend, 3, "other")
    backend.carry_out([Arrive("other", other, member) for member in ("a", "b")])
    members = [f"member-{number}" for number in range(2501)]
    for at in (0, 1000, 2000):
        backend.carry_out([Arrive(QUEUE, target, member) for member in members[at : min(at + 1000, 2500)]])
    # When the first job is no longer held
    match end:
        case "released" | "doomed":
            backend.carry_out([Arrive(QUEUE, target, members[-1], doom="why" if end == "doomed" else "")])
        case "deleted":
            backend.delete(QUEUE, target)
        case "kicked":
            backend.kick_job(QUEUE, target)
        case _:
            backend.purge(QUEUE, [State.HELD])
    # Then the clean-up of a working consumer deletes the arrivals of this job and no others
    backend._pool._cleaned_up_at = float("-inf")
    with backend.consumer([QUEUE]) as consumer:

        def is_clean() -> bool:
            enqueue(backend)
            consumer.settle([Ack(lease) for lease in consumer.reserve(5, 0)])
            return arrivals(mysql_server, place) == 2

        until(is_clean)
    assert backend.peek("other", other).awaits == 1


def test_a_condition_that_holds_leaves_no_row_of_a_note_that_is_not_stored(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    for steps in ([], [Enqueue(QUEUE, NewJob(b"x", "job"))], [Put(QUEUE, "other", b"x")], [Drop(QUEUE, "key")]):
        assert backend.carry_out(steps, when=[Version(QUEUE, "key", "")]) is True
    assert mysql_server.ask("SELECT name FROM multiq_notes", database=place.name) == ((b"other",),)
    assert backend.carry_out([Put(QUEUE, "key", b"x")], when=[Version(QUEUE, "key", "1")]) is False
    assert mysql_server.ask("SELECT name FROM multiq_notes", database=place.name) == ((b"other",),)


def test_expired_notes_do_not_add_up(backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place) -> None:
    # Given notes that have expired
    backend.carry_out([Put(QUEUE, f"{number}", b"x", 0.2) for number in range(10)])
    time.sleep(0.25)
    # When other notes are stored and deleted, then each of these changes deletes two expired notes
    for number in range(5):
        backend.carry_out([Put(QUEUE, "key", b"x") if number % 2 else Drop(QUEUE, "key")])
        ((count,),) = mysql_server.ask("SELECT COUNT(*) FROM multiq_notes WHERE name <> 'key'", database=place.name)
        assert count == 8 - 2 * number


# --- limits ----------------------------------------------------------------------------------------------


def test_a_long_reason_is_cut(backend: MysqlBackend) -> None:
    target = hold(backend, 1)
    backend.carry_out([Arrive(QUEUE, target, "a", doom="\u2603" * 10_000)])
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
    assert lease.doomed == "\u2603" * (8192 // 3)


@pytest.mark.few_rows
@pytest.mark.parametrize("reason", ["\0", '"\\', "\ud800", "0" * 8192, "!", "\n\t\x01"])
@pytest.mark.parametrize("memo", [None, b"", b"!", b"memo", b"x" * 20_000])
def test_a_doomed_job_has_its_reason_and_its_memo(backend: MysqlBackend, reason: str, memo: bytes | None) -> None:
    target = hold(backend, 1)
    backend.carry_out([Arrive(QUEUE, target, "a", doom=reason)])
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        consumer.settle([Touch(lease, After(memo=memo))])
        backend._pool.poller.notify()
        mysql_ready(backend, lease.id)
        (again,) = consumer.reserve(1, 0)
    assert (again.memo, again.doomed) == (memo or b"", reason.encode("utf-8", "backslashreplace").decode())


def mysql_ready(backend: MysqlBackend, job_id: str) -> None:
    """Make a reserved job ready."""
    with backend._pool.borrowed() as connection:
        connection.select("UPDATE multiq_jobs SET state = 4, place = priority WHERE state = 2")


def test_the_steps_of_the_largest_call_fit(backend: MysqlBackend) -> None:
    # Given the greatest number of steps, with long ids, members and keys
    awaiting = hold(backend, MAX_STEPS)
    steps: list[Step] = []
    for number in range(MAX_STEPS // 4):
        steps += [
            Arrive(QUEUE, awaiting, f"{number}".rjust(200, "\u2603")),
            Enqueue("q" * 128, NewJob(b"x" * 1000, f"{number}".rjust(200, "x"))),
            Put("h" * 128, f"{number}".rjust(200, "\U0001f600"), b"x" * 1000, 60),
            Drop("h" * 128, f"no-{number}".rjust(200, "\U0001f600")),
        ]
    assert backend.carry_out(steps) is True
    # Then all of them are carried out
    assert backend.peek(QUEUE, awaiting).awaits == MAX_STEPS - MAX_STEPS // 4
    assert backend.stats("q" * 128).ready == MAX_STEPS // 4
    assert len(backend.notes("h" * 128, limit=1000).notes) == MAX_STEPS // 4


@pytest.mark.long
def test_the_steps_of_a_settle_may_be_larger_than_a_packet(new_mysql: Callable[..., MysqlServer]) -> None:
    server = new_mysql(max_allowed_packet=1 << 20)
    with server.database() as place, open_backend(place.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given three verdicts whose members, ids and keys, each by themselves, are larger than a packet
        backend.enqueue(QUEUE, [NewJob(b"x", f"job-{number}") for number in range(3)])
        awaiting = hold(backend, 2_000)
        verdicts: list[Verdict] = []
        for lease in consumer.reserve(3, 0):
            texts = [f"{lease.id}-{number}".rjust(200, "x") for number in range(400)]
            members = [text.replace("x", "\U0001f600") for text in texts]
            elsewhere = [Arrive(QUEUE, text, "a") for text in [*texts, *(text.replace("x", "y") for text in texts)]]
            steps = (
                [Arrive(QUEUE, awaiting, member) for member in members],
                elsewhere,
                [Drop(QUEUE, step.id) for step in elsewhere],
            )
            verdicts += [Touch(lease, After(steps=tuple(some))) for some in steps]
        # When they are settled together, then all of them are carried out
        assert consumer.settle(verdicts) == [None] * 9
        assert backend.peek(QUEUE, awaiting).awaits == 2_000 - 3 * 400
        # And a repetition of the arrivals changes nothing
        assert consumer.settle(verdicts) == [None] * 9
        assert backend.peek(QUEUE, awaiting).awaits == 2_000 - 3 * 400


# --- several at once -------------------------------------------------------------------------------------


def _work(url: str, target: str, size: int, results: Any) -> None:
    """Ack the jobs of a queue, each of which arrives at *target*. For a process of its own."""
    acked, doomed = 0, 0
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(size, 0)
        while leases:
            acks = [Ack(lease) if lease.id == target else arriving(lease, target) for lease in leases]
            doomed += sum(lease.id == target for lease in leases)
            answers, leases = consumer.exchange(acks, size, 0)
            assert answers == [None] * len(acks)
            acked += len(acks)
    results.put((acked, doomed, sum(repetitions.values())))


@pytest.mark.parametrize("size", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.long
def test_four_processes_whose_jobs_all_arrive_at_one_job_release_it_once(
    backend: MysqlBackend, place: Place, size: int
) -> None:
    # Given a held job that waits for all jobs of a queue
    count = 150 * size
    target = hold(backend, count)
    for _ in range(size):
        enqueue(backend, 150)
    # When four processes work them off at once
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_work, args=(place.url, target, size, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    # Then the held job has run once, or is ready, and hardly any transaction was repeated
    left = backend.stats(QUEUE)
    ran = sum(runs for _, runs, _ in found)
    assert sum(acked for acked, _, _ in found) - ran == count
    assert (ran, left.ready, left.held) in {(1, 0, 0), (0, 1, 0)}
    assert sum(again for _, _, again in found) <= count // size // 10


def test_settles_that_arrive_at_the_same_jobs_in_opposite_orders_do_not_deadlock(
    backend: MysqlBackend, place: Place, mysql_server: MysqlDatabases
) -> None:
    # Given two held jobs in each of two queues
    count = 60
    targets = [(queue, hold(backend, 2 * count, queue)) for queue in ("a", "b", "a", "b")]
    before = _deadlocks(mysql_server)

    def arrive(name: str, order: Sequence[tuple[str, str]]) -> None:
        with open_backend(place.url) as own:
            for number in range(count):
                own.carry_out([Arrive(queue, job_id, f"{name}-{number}") for queue, job_id in order])

    # When two threads let members arrive at all of them, in opposite orders
    threads = [
        threading.Thread(target=arrive, args=(name, order)) for name, order in (("x", targets), ("y", targets[::-1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then all arrivals count, and there was no deadlock
    assert [backend.peek(queue, job_id).state for queue, job_id in targets] == [State.READY] * 4
    assert _deadlocks(mysql_server) == before


def _deadlocks(server: MysqlDatabases) -> int:
    rows = server.ask("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")
    return int(rows[0][1]) if rows else 0  # MySQL has no such counter


def test_an_arrival_waits_for_another_one_that_is_not_committed(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a held job that another transaction has locked, and at which it has let a member arrive
    target = hold(backend, 2)
    with mysql_server.client(place.name, autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("SELECT seq FROM multiq_jobs WHERE state = %s FOR UPDATE", (HELD,))
        ((seq,),) = cursor.fetchall()
        cursor.execute("INSERT INTO multiq_arrivals VALUES (%s, CONCAT(x'ff', 'a'))", (seq,))
        cursor.execute("UPDATE multiq_jobs SET awaits = 1 WHERE seq = %s", (seq,))
        # When members arrive meanwhile
        waiting = threading.Thread(target=backend.carry_out, args=([Arrive(QUEUE, target, "a")],))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        other.commit()
        waiting.join()
    # Then the same member counts once
    assert (backend.peek(QUEUE, target).state, backend.peek(QUEUE, target).awaits) == (State.HELD, 1)
    backend.carry_out([Arrive(QUEUE, target, "b")])
    assert backend.peek(QUEUE, target).state is State.READY


# --- older programs --------------------------------------------------------------------------------------

#: The claim of version 2, shortened to its condition.
OLD_CLAIM = "SELECT seq FROM multiq_jobs WHERE queue = 'mail' AND state = {state} AND TRUE ORDER BY place, seq LIMIT 10"


def test_a_program_of_version_2_is_never_handed_a_held_job(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a held job, one with a delay, and a plain job that a program of version 2 has enqueued
    hold(backend, 1)
    hold(backend, 1, delay=0.001)
    (old,) = insert_statements(QUEUE, [NewJob(b"old", "old")], NOW)
    mysql_server.ask(old, database=place.name)
    time.sleep(0.01)
    # Then the scans of version 2 for ready and due jobs find only the plain job
    seen = [mysql_server.ask(OLD_CLAIM.format(state=state), database=place.name) for state in (READY, 1, 2, 3, AGAIN)]
    assert [len(rows) for rows in seen] == [1, 0, 0, 0, 0]
    # And a newer program reserves the plain job
    with backend.consumer([QUEUE]) as consumer:
        assert [lease.id for lease in consumer.reserve(5, 0)] == ["old"]
    assert backend.stats(QUEUE).held == 2


def test_a_held_job_that_a_program_of_version_2_has_deleted_begins_anew(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given a held job with an arrival, which an older program has deleted without its arrivals
    target = hold(backend, 2)
    backend.carry_out([Arrive(QUEUE, target, "a")])
    mysql_server.ask("DELETE FROM multiq_jobs", database=place.name)
    with pytest.raises(JobNotFound):
        backend.peek(QUEUE, target)
    # When its id is enqueued again, then it waits for all of its members
    backend.enqueue(QUEUE, [NewJob(b"held", target, terms=Terms(2))])
    backend.carry_out([Arrive(QUEUE, target, "a")])
    assert backend.peek(QUEUE, target).awaits == 1


def test_a_claim_of_a_plain_job_returns_no_more_bytes(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    enqueue(backend)
    asked = render("reserve", queue=QUEUE.encode(), state=READY, condition=FROM_START, limit=1, now=NOW, inline=8193)
    ((text, _),) = mysql_server.ask(asked, database=place.name)
    assert text.count(",") == 7
