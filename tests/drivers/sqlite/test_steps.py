"""Held jobs, steps and notes in the file: what they cost, where they are stored, and what deletes them."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

from multiq.backend import (
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    GiveBack,
    NewJob,
    Put,
    Release,
    State,
    Terms,
    Touch,
    Version,
)
from multiq.driverkit.clock import ManualClock
from multiq.errors import BackendFull, PayloadTooLarge
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from multiq.backend import Consumer, Lease, Step, Verdict

    Connect = Callable[..., sqlite3.Connection]
    MachineSteps = Callable[[Consumer], AbstractContextManager[list[int]]]

LARGE = b"x" * 5000  # stored outside the job's row


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def backend(path: Path, clock: ManualClock) -> Iterator[SqliteBackend]:
    with SqliteBackend(str(path), synchronous="normal", clock=clock) as backend:
        yield backend


@pytest.fixture
def consumer(backend: SqliteBackend) -> Iterator[Consumer]:
    with backend.consumer(["q"]) as consumer:
        yield consumer


def reserved(backend: SqliteBackend, consumer: Consumer, *ids: str, body: bytes = b"x") -> list[Lease]:
    backend.enqueue("q", [NewJob(body, job_id, ttr=3600) for job_id in ids])
    leases = consumer.reserve(len(ids), 0)
    assert [lease.id for lease in leases] == [*ids]
    return leases


def hold(backend: SqliteBackend, *ids: str, awaits: int = 1, body: bytes = b"h", delay: float = 0.0) -> None:
    backend.enqueue("q", [NewJob(body, job_id, delay=delay, ttr=3600, terms=Terms(awaits)) for job_id in ids])


def arrivals(job_id: str, *members: object) -> list[Step]:
    return [Arrive("q", job_id, str(member)) for member in members]


def stored(sqlite: sqlite3.Connection) -> dict[str, int]:
    """The number of rows of each table that is not empty, without the table of jobs."""
    tables = ("bodies", "memos", "terms", "arrivals", "notes")
    counts = {name: sqlite.execute(f"SELECT count(*) FROM multiq_{name}").fetchone()[0] for name in tables}  # noqa: S608
    return {name: count for name, count in counts.items() if count}


# --- what costs nothing ----------------------------------------------------------------------------------


def test_enqueue_of_jobs_without_terms_runs_only_its_own_statement(
    backend: SqliteBackend, statements: list[str]
) -> None:
    insert = "INSERT INTO multiq_jobs (queue, enqueued_at,"
    backend.enqueue("q", [NewJob(b"x", "0")])
    backend.enqueue("q", [NewJob(b"x", str(number)) for number in range(1, 5)])
    assert [text.replace("main.", "") for text in statements] == [insert] * 2


def test_verdicts_with_an_after_without_steps_run_only_their_own_statement(
    backend: SqliteBackend, consumer: Consumer, statements: list[str]
) -> None:
    leases = reserved(backend, consumer, "one", "two")
    statements.clear()
    assert consumer.settle([Ack(lease, After()) for lease in leases]) == [None, None]
    assert statements == ["held", "remove"]


def test_held_jobs_add_nothing_to_the_cost_of_a_queue_with_a_buried_job(
    tmp_path: Path, clock: ManualClock, machine_steps: MachineSteps
) -> None:
    counts: list[list[int]] = []
    for held in (0, 1, 3000):
        path = tmp_path / f"{held}.db"
        with (
            SqliteBackend(str(path), synchronous="normal", clock=clock) as backend,
            backend.consumer(["q"]) as consumer,
        ):
            hold(backend, *(f"held-{number}" for number in range(held)), awaits=2)
            backend.enqueue("q", [NewJob(b"", str(number)) for number in range(8)])
            backend.enqueue("q", [NewJob(b"", "delayed", delay=1)])
            consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
            # When jobs are reserved and settled, and the queue is polled
            with machine_steps(consumer) as counted:
                one, two, three = consumer.reserve(3, 0)
                consumer.exchange([Ack(one), Release(two), Bury(three)], 2, 0)
                clock.advance(1)
                consumer.settle([Ack(lease) for lease in consumer.reserve(10, 0)])
                assert consumer.reserve(10, 0) == []
            counts.append(counted)
    # Then SQLite's virtual machine takes as many steps as without held jobs
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][0] > 100


# --- what they cost --------------------------------------------------------------------------------------


def test_many_arrivals_at_one_job_are_few_statements(
    backend: SqliteBackend, consumer: Consumer, statements: list[str]
) -> None:
    # Given a job that waits for many members, some of which are reserved
    hold(backend, "then", awaits=1000)
    leases = reserved(backend, consumer, *map(str, range(100)))
    statements.clear()
    # When the members are acked in one call, each with its arrival
    assert set(consumer.settle([Ack(one, After(steps=(Arrive("q", "then", one.id),))) for one in leases])) == {None}
    # Then this takes a statement for each batch of 64, 32 and 4 arrivals
    arrive = "INSERT INTO multiq_arrivals (seq, member)"
    assert statements == ["held", "remove", "terms", *[arrive] * 3, "await"]
    assert backend.peek("q", "then").awaits == 900


def test_last_arrival_and_its_release_are_four_statements(
    backend: SqliteBackend, consumer: Consumer, statements: list[str]
) -> None:
    hold(backend, "then")
    (lease,) = reserved(backend, consumer, "one")
    statements.clear()
    consumer.settle([Ack(lease, After(steps=(Arrive("q", "then", "one"), Arrive("q", "unknown", "one"))))])
    assert statements[2:] == [
        "terms", "INSERT INTO multiq_arrivals (seq, member)", "let_go", "forget_terms", "terms",
    ]  # fmt: skip


def test_arrival_costs_as_much_after_thousands_of_others(
    backend: SqliteBackend, consumer: Consumer, machine_steps: MachineSteps
) -> None:
    hold(backend, "then", awaits=100_000)
    costs: list[int] = []
    for number in range(6):
        (lease,) = reserved(backend, consumer, f"member-{number}")
        with machine_steps(consumer) as counted:
            consumer.settle([Ack(lease, After(steps=(Arrive("q", "then", lease.id),)))])
        costs += counted
        backend.carry_out(arrivals("then", *(f"{number}-{other}" for other in range(1000))))
    assert len(set(costs[1:])) == 1
    assert backend.peek("q", "then").awaits == 100_000 - 6006


def test_page_deep_in_many_notes_costs_no_more_than_the_first(backend: SqliteBackend) -> None:
    for home in ("q", "other"):
        for start in range(0, 5000, 1000):
            backend.carry_out([Put(home, f"key-{number:04}", b"x") for number in range(start, start + 1000)])
    ticks: list[int] = []
    with backend._pool.borrowed() as connection:
        connection._open(1.0).set_progress_handler(lambda: ticks.append(1), 100)
    costs: list[int] = []
    keys: list[str] = []
    after: str | None = None
    while after is not None or not keys:
        ticks.clear()
        page = backend.notes("q", "key-", limit=500, after=after)
        costs.append(len(ticks))
        keys += [note.key for note in page.notes]
        after = page.after
    assert keys == [f"key-{number:04}" for number in range(5000)]
    assert max(costs) <= 2 * costs[0] + 1


# --- where they lie, and what deletes them ---------------------------------------------------------------


@pytest.mark.parametrize("body", [b"h", LARGE])
@pytest.mark.parametrize("end", ["release", "expect", "doom", "kick_job", "delete", "purge"])
def test_what_a_held_job_waits_for_ends_with_its_hold(
    backend: SqliteBackend, consumer: Consumer, connect: Connect, end: str, body: bytes
) -> None:
    # Given a held job at which members have arrived
    hold(backend, "one", awaits=4, body=body)
    backend.carry_out(arrivals("one", "a", "b"))
    sqlite = connect(isolation_level=None)
    assert stored(sqlite) == {"bodies": 1, "terms": 1, "arrivals": 2}
    # When the job is no longer held
    ends: dict[str, Callable[[], object]] = {
        "release": lambda: backend.carry_out(arrivals("one", "c", "d", "e")),
        "expect": lambda: backend.carry_out([Arrive("q", "one", "c", 1), *arrivals("one", "d", "e")]),
        "doom": lambda: backend.carry_out([*arrivals("one", "c"), Arrive("q", "one", "d", doom="why")]),
        "kick_job": lambda: backend.kick_job("q", "one"),
        "delete": lambda: backend.delete("q", "one"),
        "purge": lambda: backend.purge("q", [State.HELD]),
    }
    ends[end]()
    # Then its terms and its arrivals are gone, and after its ack no row is left
    if end in {"delete", "purge"}:
        assert stored(sqlite) == {}
        return
    assert stored(sqlite) == ({"bodies": 1, "memos": 1} if end == "doom" else {"bodies": 1})
    (lease,) = consumer.reserve(1, 0)
    assert (lease.body, lease.doomed, lease.kicks) == (body, "why" if end == "doom" else "", 0)
    assert consumer.settle([Ack(lease)]) == [None]
    assert stored(sqlite) == {}


def test_reason_of_a_doomed_job_outlives_memo_and_detail_and_ends_with_a_reschedule(
    backend: SqliteBackend, consumer: Consumer
) -> None:
    hold(backend, "one")
    backend.carry_out([Arrive("q", "one", "a", doom="weil \ud800 \N{SNOWMAN}")])
    reason = "weil \\ud800 \N{SNOWMAN}"
    (lease,) = consumer.reserve(1, 0)
    assert lease.doomed == reason
    assert consumer.settle([Release(lease, after=After(memo=b"m", detail=b"d"))]) == [None]
    (lease,) = consumer.reserve(1, 0)
    assert (lease.doomed, lease.memo) == (reason, b"m")
    assert consumer.settle([Release(lease)]) == [None]
    backend.reschedule("q", "one", 0)
    (lease,) = consumer.reserve(1, 0)
    assert (lease.doomed, lease.memo) == ("", b"")


def test_members_that_are_no_valid_unicode_are_told_apart(backend: SqliteBackend) -> None:
    hold(backend, "one", awaits=4)
    backend.carry_out(arrivals("one", "\ud800", "\udfff", "\\ud800", "\ud800"))
    assert backend.peek("q", "one").awaits == 1


def test_enqueue_of_the_id_of_another_job_adds_no_terms_and_no_body(backend: SqliteBackend, connect: Connect) -> None:
    backend.enqueue("q", [NewJob(b"x", "plain"), NewJob(LARGE, "large"), NewJob(b"x", "both")])
    hold(backend, "held", awaits=3)
    sqlite = connect(isolation_level=None)
    before = stored(sqlite)
    # When these ids are enqueued again, held and not held
    hold(backend, "plain", "large", "held", "both", "held", body=b"other")
    backend.enqueue("q", [NewJob(LARGE, "held"), NewJob(b"y", "plain", terms=Terms(1)), NewJob(LARGE, "plain")])
    # Then no job is added
    assert stored(sqlite) == before == {"bodies": 2, "terms": 1}
    assert [backend.peek("q", one).body for one in ("plain", "large", "held")] == [b"x", LARGE, b"h"]
    assert backend.peek("q", "held").awaits == 3


def test_held_job_joins_the_callers_transaction(backend: SqliteBackend, connect: Connect) -> None:
    app = connect()
    for is_kept in (False, True):
        backend.enqueue("q", [NewJob(b"h", "one", delay=5, terms=Terms(2)), NewJob(b"x", "two")], connection=app)
        app.commit() if is_kept else app.rollback()
        assert stored(app) == ({"bodies": 1, "terms": 1} if is_kept else {})
    assert (backend.stats("q").held, backend.stats("q").ready) == (1, 1)
    backend.carry_out(arrivals("one", "a", "b"))
    assert backend.peek("q", "one").due_in == 5


def test_each_put_deletes_two_expired_notes_of_its_home(
    backend: SqliteBackend, connect: Connect, clock: ManualClock
) -> None:
    for home in ("q", "other"):
        backend.carry_out([Put(home, f"{number}", b"x", 1) for number in range(9)])
    clock.advance(1)
    sqlite = connect(isolation_level=None)
    left = []
    for steps in ([Put("q", "a", b"x")], [Drop("q", "a")], [Put("q", "b", b"x"), Put("q", "c", b"x", 9)],
                  [Put("q", "0", b"x")], [Put("q", "d", b"x")]):  # fmt: skip
        backend.carry_out(steps)
        expired = "SELECT count(*) FROM multiq_notes WHERE expires_at <= ? AND home = 'q'"
        left.append(sqlite.execute(expired, (clock(),)).fetchone()[0])
    assert left[:3] == [7, 7, 3]
    assert left[-1] == 0
    assert [note.key for note in backend.notes("q").notes] == ["0", "b", "c", "d"]
    assert sqlite.execute("SELECT count(*) FROM multiq_notes WHERE home = 'other'").fetchone() == (9,)


# --- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enqueues_first", [True, False])
def test_enqueue_of_an_id_that_another_verdict_of_the_call_acks_goes_by_the_order_of_the_verdicts(
    backend: SqliteBackend, consumer: Consumer, enqueues_first: bool
) -> None:
    # Given a verdict that enqueues the id of a job, and an ack of that job
    one, two = reserved(backend, consumer, "one", "two")
    verdicts: list[Verdict] = [Release(one, 60, after=After(steps=(Enqueue("q", NewJob(b"new", "two")),))), Ack(two)]
    # When both verdicts are in one call
    assert consumer.settle(verdicts if enqueues_first else verdicts[::-1]) == [None, None]
    # Then the new job is stored if the ack comes first
    assert [job.body for job in backend.jobs("q", State.READY).jobs] == ([] if enqueues_first else [b"new"])


def test_arrivals_and_enqueues_keep_their_order(backend: SqliteBackend) -> None:
    held = NewJob(b"h", "held", terms=Terms(1))
    backend.carry_out([Arrive("q", "held", "early"), Enqueue("q", held), Put("q", "key", b"1"), Drop("q", "key")])
    assert backend.peek("q", "held").state is State.HELD
    later = NewJob(b"h", "later", terms=Terms(1))
    backend.carry_out([Enqueue("q", later), Arrive("q", "later", "m"), Put("q", "key", b"1"), Put("q", "key", b"2")])
    assert backend.peek("q", "later").state is State.READY
    assert [note.value for note in backend.notes("q").notes] == [b"2"]


# --- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["enqueue", "put"])
def test_step_over_the_limit_carries_out_nothing(backend: SqliteBackend, consumer: Consumer, kind: str) -> None:
    too_large = b"x" * 2_000_000
    step: Step = Enqueue("q", NewJob(too_large, "new")) if kind == "enqueue" else Put("q", "key", too_large)
    hold(backend, "held")
    leases = reserved(backend, consumer, "one", "two")
    consumer._connection._open(1.0).setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2_000_000)  # type: ignore[attr-defined]
    with backend._pool.borrowed() as connection:
        connection._open(1.0).setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2_000_000)
    steps = (Arrive("q", "held", "a"), step)
    for make in (Ack, Touch, Bury, Release, GiveBack):
        verdict = make(leases[1], after=After(steps=steps))
        with pytest.raises(PayloadTooLarge, match="no verdict was carried out") as told:
            consumer.settle([Ack(leases[0]), verdict])
        assert (told.value.size_bytes, told.value.limit_bytes) == (2_000_000, 1_999_000)
    with pytest.raises(PayloadTooLarge, match="no step was carried out"):
        backend.carry_out(steps)
    assert (backend.stats("q").held, backend.stats("q").reserved) == (1, 2)
    assert backend.notes("q").notes == []


def test_full_disk_refuses_new_jobs_of_carry_out_and_takes_all_other_steps(
    backend: SqliteBackend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that reports no free blocks
    hold(backend, "held", awaits=2)
    (lease,) = reserved(backend, consumer, "one")
    there = os.statvfs(backend.path)
    full = os.statvfs_result((*there[:3], 0, 0, *there[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    backend._pool.disk_space._next_check_at = 0.0
    with pytest.raises(BackendFull, match="nothing was stored"):
        backend.carry_out([Arrive("q", "held", "a"), Enqueue("q", NewJob(b"x", "new"))])
    # Then arrivals and verdicts still succeed
    assert backend.carry_out(arrivals("held", "a"))
    steps = (Arrive("q", "held", "b"), Put("q", "key", b"x"), Enqueue("q", NewJob(b"x", "new")))
    assert consumer.settle([Ack(lease, After(steps=steps))]) == [None]
    assert sorted(lease.id for lease in consumer.reserve(9, 0)) == ["held", "new"]


# --- records of other programs ---------------------------------------------------------------------------


@pytest.fixture
def loose(backend: SqliteBackend, consumer: Consumer, connect: Connect) -> sqlite3.Connection:
    """A connection to tables that are not STRICT, as those of every file that was upgraded."""
    backend.queues()
    sqlite = connect(isolation_level=None)
    sqlite.execute("PRAGMA writable_schema = ON")
    sqlite.execute("UPDATE sqlite_schema SET sql = replace(replace(sql, ', STRICT', ''), ' STRICT', '')")
    backend.close()
    consumer.close()
    return connect(isolation_level=None)


@pytest.mark.parametrize(
    "change", ["DELETE FROM multiq_terms", "UPDATE multiq_terms SET awaits = 'all'",
               "UPDATE multiq_terms SET delay = x'00'"]
)  # fmt: skip
@pytest.mark.parametrize("call", ["carry_out", "jobs", "peek", "settle"])
def test_held_job_whose_terms_cannot_be_read_is_buried(
    backend: SqliteBackend, consumer: Consumer, loose: sqlite3.Connection, change: str, call: str
) -> None:
    # Given a held job whose terms another program has changed
    (lease,) = reserved(backend, consumer, "one")
    hold(backend, "bad", awaits=2)
    loose.execute(change)
    hold(backend, "good", awaits=1)
    # When a call reads the job
    steps = tuple(arrivals("bad", "a")) + tuple(arrivals("good", "a"))
    calls: dict[str, Callable[[], object]] = {
        "carry_out": lambda: backend.carry_out(steps),
        "settle": lambda: consumer.settle([Ack(lease, After(steps=steps))]),
        "jobs": lambda: backend.jobs("q", State.HELD),
        "peek": lambda: backend.peek("q", "bad"),
    }
    calls[call]()
    backend.carry_out(steps)
    # Then the job is buried, and the other jobs are not affected
    job = backend.peek("q", "bad")
    assert job.state is State.BURIED
    assert job.reason == "it could not be read: what it waits for is missing"
    assert [one.id for one in consumer.reserve(9, 0)] == ["good"]
    # and the job can be kicked and rescheduled, and after its ack no row is left
    backend.kick_job("q", "bad")
    backend.reschedule("q", "bad", 0)
    assert [one.body for one in consumer.reserve(9, 0)] == [b"h"]
    assert "terms" not in stored(loose)


@pytest.mark.parametrize(
    "change",
    ["version = 'x'", "expires_at = 'never'", "expires_at = 1.5e300", "home = x'ff'", "key = x'ff'",
     "key = CAST(x'ff' AS TEXT)"],
)  # fmt: skip
def test_malformed_note_is_deleted_when_it_is_read(
    backend: SqliteBackend, loose: sqlite3.Connection, change: str
) -> None:
    # Given two notes, of which another program has changed one
    backend.carry_out([Put("q", "bad", b"x", 60), Put("q", "good", b"y", 60), Put("q", "grün", b"z")])
    loose.execute(f"UPDATE multiq_notes SET {change} WHERE key = 'bad'")  # noqa: S608 - of this page
    # Then every call works
    note = backend.note("q", "bad")
    assert note is None
    assert backend.carry_out([Put("q", "new", b"n")], when=[Version("q", "bad", "")])
    assert [note.key for note in backend.notes("q").notes] == ["good", "grün", "new"]
    backend.carry_out([Put("q", "bad", b"again")])
    assert [note.value for note in backend.notes("q", "b").notes] == [b"again"]


def test_reason_of_a_doomed_job_that_is_no_text_does_not_block_the_queue(
    backend: SqliteBackend, consumer: Consumer, loose: sqlite3.Connection
) -> None:
    hold(backend, "one", "two", "three")
    backend.carry_out([Arrive("q", one, "a", doom="why") for one in ("one", "two", "three")])
    values = {"one": "x'ff'", "two": "CAST(x'ff' AS TEXT)", "three": "17"}
    for job_id, value in values.items():
        loose.execute(
            f"UPDATE multiq_memos SET doomed = {value} WHERE seq = (SELECT seq FROM multiq_jobs WHERE id = ?)",  # noqa: S608
            (job_id,),
        )
    assert [lease.doomed for lease in consumer.reserve(3, 0)] == ["\N{REPLACEMENT CHARACTER}"] * 2 + ["17"]


def test_older_multiq_that_buries_and_reschedules_a_held_job_leaves_no_arrival_to_another(
    backend: SqliteBackend, connect: Connect
) -> None:
    """An older multiq that has the file open since before the upgrade still runs its own statements."""
    # Given a held job with an arrival, which an older multiq cannot read, buries, and reschedules
    hold(backend, "one", awaits=2)
    backend.carry_out(arrivals("one", "a"))
    sqlite = connect(isolation_level=None)
    sqlite.execute("UPDATE multiq_jobs SET state = 3, due_at = 1, reason = 'it could not be read: state'")
    assert backend.peek("q", "one").awaits == 0
    sqlite.execute("UPDATE multiq_jobs SET seq = 2, state = 0, due_at = 0 WHERE seq = 1")
    sqlite.execute("UPDATE multiq_bodies SET seq = 2 WHERE seq = 1")
    # Then its terms and its arrivals are deleted
    assert stored(sqlite) == {"bodies": 1}
    backend.delete("q", "one")
    hold(backend, "two", awaits=2)
    backend.carry_out(arrivals("two", "a"))
    assert backend.peek("q", "two").awaits == 1


# --- forks -----------------------------------------------------------------------------------------------


def test_parent_and_child_carry_out_steps_after_a_fork(path: Path, spawn: Callable[..., Sequence[object]]) -> None:
    source = """
    import warnings
    from multiq.backend import After, Arrive, Put, Terms, Version
    warnings.simplefilter("ignore", DeprecationWarning)
    backend = SqliteBackend(sys.argv[1])
    backend.enqueue("q", [NewJob(b"x", "held", terms=Terms(3)), NewJob(b"x", "one")])
    backend.carry_out([Put("q", "key", b"parent"), Arrive("q", "held", "a")])
    version = backend.note("q", "key").version
    consumer = backend.consumer(["q"])
    lease, = consumer.reserve(1, 0)
    child = os.fork()
    if child == 0:
        steps = [Put("q", "key", b"child"), Arrive("q", "held", "b")]
        done = backend.carry_out(steps, when=[Version("q", "key", version)])
        os._exit(0 if done else 1)
    say(os.waitpid(child, 0)[1])
    say(backend.carry_out([Arrive("q", "held", "c")], when=[Version("q", "key", version)]))
    say(consumer.settle([Ack(lease, After(steps=(Arrive("q", "held", "c"),)))]))
    say(consumer.reserve(1, 0)[0].id, backend.note("q", "key").value)
    """
    process = spawn(source, path)
    assert process.communicate()[0].split("\n") == ["0", "False", "[None]", "held b'child'", ""]  # type: ignore[attr-defined]
