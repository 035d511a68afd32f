"""Outcomes, memos and details in the file: what they cost, where they are stored, and what deletes them."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import pytest
from sqlite_versions import VERSION_2

from multiq.backend import Abandon, Ack, After, Arrive, Bury, GiveBack, NewJob, Put, Release, State, Terms, Touch
from multiq.driverkit.clock import ManualClock
from multiq.errors import BackendFull, BackendUnavailable, PayloadTooLarge
from multiq_sqlite import schema
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from multiq.backend import Consumer, Lease, Verdict

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


VERDICTS: dict[str, Callable[[Lease, After | None], Verdict]] = {
    "remove": Ack,
    "touch": Touch,
    "give_back": lambda lease, after: GiveBack(lease, 0.0, after),
    "release": lambda lease, after: Release(lease, 0.0, None, "why", after),
    "bury": lambda lease, after: Bury(lease, "why", after),
    "abandon": lambda lease, _: Abandon(lease, "why"),
}


# --- what costs nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_that_stores_nothing_runs_only_its_own_statement(
    backend: SqliteBackend, consumer: Consumer, statements: list[str], name: str
) -> None:
    leases = reserved(backend, consumer, "one", "two")
    statements.clear()
    assert consumer.settle([VERDICTS[name](lease, None) for lease in leases]) == [None, None]
    calls = 1 if name in {"remove", "touch", "give_back"} else 2
    assert statements == ["held", *[name] * calls]


def test_ack_that_keeps_nothing_runs_only_its_own_statement(
    backend: SqliteBackend, consumer: Consumer, statements: list[str]
) -> None:
    (lease,) = reserved(backend, consumer, "one")
    statements.clear()
    assert consumer.settle([Ack(lease, After(keep=0, outcome=b"y", memo=b"m", detail=b"d"))]) == [None]
    assert statements == ["held", "remove"]


def test_acks_that_keep_run_two_more_statements_and_a_third_if_outcomes_have_expired(
    backend: SqliteBackend, consumer: Consumer, statements: list[str], clock: ManualClock
) -> None:
    keep = "INSERT OR REPLACE INTO multiq_outcomes"
    for ids, expected in (("abcd", [keep, "expired"]), ("efgh", [keep, "expired", "forget"])):
        leases = reserved(backend, consumer, *ids)
        statements.clear()
        assert consumer.settle([Ack(lease, After(keep=1, outcome=b"y")) for lease in leases]) == [None] * 4
        assert statements == ["held", *expected, "remove"]
        clock.advance(1)


@pytest.mark.parametrize("body", [b"x", LARGE])
def test_jobs_without_effects_take_the_bytes_of_version_2(
    backend: SqliteBackend, consumer: Consumer, connect: Connect, body: bytes
) -> None:
    # Given jobs in all states
    leases = reserved(backend, consumer, *(f"{number:03}" for number in range(50)), body=body)
    verdicts = [make(lease, None) for make, lease in zip(VERDICTS.values(), leases, strict=False)]
    assert set(consumer.settle(verdicts)) == {None}
    # When they are copied into the tables of version 2
    sqlite = connect(isolation_level=None)
    sqlite.execute("ATTACH ':memory:' AS old")
    sqlite.executescript(re.sub("(TABLE|INDEX|TRIGGER|INTO) multiq", r"\1 old.multiq", VERSION_2))
    for table in ("jobs", "bodies"):
        columns = ", ".join(row[1] for row in sqlite.execute(f"PRAGMA old.table_info(multiq_{table})"))
        sqlite.execute(f"INSERT INTO old.multiq_{table} ({columns}) SELECT {columns} FROM main.multiq_{table}")  # noqa: S608 - of this page
    # Then the rows and the entries of the indexes have as many bytes
    if ("ENABLE_DBSTAT_VTAB",) not in sqlite.execute("PRAGMA compile_options").fetchall():
        pytest.skip("this SQLite was built without dbstat")
    sizes = [
        sqlite.execute(
            "SELECT name, sum(payload) FROM dbstat(?) WHERE name GLOB 'multiq_jobs*' OR name = 'multiq_bodies'"
            " GROUP BY 1 ORDER BY 1",
            (schema_name,),
        ).fetchall()
        for schema_name in ("main", "old")
    ]
    assert len(sizes[0]) == 5
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_that_stores_nothing_takes_the_steps_of_version_2(
    tmp_path: Path, connect: Connect, machine_steps: MachineSteps, name: str
) -> None:
    steps: list[int] = []
    for version in (2, schema.VERSION):
        path = tmp_path / f"{version}.db"
        with SqliteBackend(str(path), synchronous="normal") as backend, backend.consumer(["q"]) as consumer:
            backend.queues()
            if version == 2:
                without_triggers_of_version_3(connect(path, isolation_level=None))
            for lease in reserved(backend, consumer, "warm-up", "measured"):
                with machine_steps(consumer) as counted:
                    assert consumer.settle([VERDICTS[name](lease, None)]) == [None]
            steps += counted
    assert steps[0] == steps[1] > 0


def without_triggers_of_version_3(sqlite: sqlite3.Connection) -> None:
    for trigger in ("memos_end_with_a_reschedule", "bodies_follow_their_job"):
        sqlite.execute(f"DROP TRIGGER multiq_{trigger}")
    _, create, trigger = VERSION_2.partition("CREATE TRIGGER")
    sqlite.execute(create + trigger.partition("END;")[0] + "END")


# --- outcomes --------------------------------------------------------------------------------------------


def test_each_ack_that_keeps_deletes_two_expired_outcomes(
    backend: SqliteBackend, consumer: Consumer, connect: Connect, clock: ManualClock
) -> None:
    # Given ten expired outcomes of two kinds, and three of another queue
    settle_all(backend, consumer, [str(number) for number in range(7)], After(keep=1))
    settle_all(backend, consumer, ["seven", "eight", "nine"], After(keep=1, kind="cancelled"))
    sqlite = connect(isolation_level=None)
    sqlite.execute(
        "INSERT INTO multiq_outcomes SELECT seq + 100, 'other', id, kind, kept_at, expires_at, attempt, body "
        "FROM multiq_outcomes WHERE kind = 1"
    )
    clock.advance(1)
    left = []
    for ids in (["a"], ["b"], ["c", "d"], ["e"]):
        settle_all(backend, consumer, ids, After(keep=60))
        left.append(sqlite.execute("SELECT count(*) FROM multiq_outcomes WHERE expires_at <= ? AND queue = 'q'",
            (clock(),)).fetchone()[0])  # fmt: skip
    assert left == [8, 6, 2, 0]
    assert sqlite.execute("SELECT count(*) FROM multiq_outcomes").fetchone() == (5 + 3,)


def test_outcomes_are_forgotten_in_slices(
    backend: SqliteBackend, consumer: Consumer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_sqlite.backend.SLICE", 10)
    slices: list[float] = []
    monkeypatch.setattr("multiq_sqlite.backend.time.sleep", slices.append)  # replaces the pause between two slices
    ids = [f"{number:03}" for number in range(90)]
    settle_all(backend, consumer, ids, After(keep=1))
    assert backend.forget("q", [*ids[:35], *ids[:10], "unknown"]) == 35
    assert len(slices) == 3
    slices.clear()
    clock.advance(1)
    assert backend.forget("q", ids[40:50]) == 0
    assert backend.forget("q", limit=25) == 25
    assert len(slices) == 3
    assert backend.forget("q") == 30
    assert backend.forget("q") == 0


def test_page_deep_in_a_long_history_costs_no_more_than_the_first(
    backend: SqliteBackend, consumer: Consumer, clock: ManualClock
) -> None:
    # Given many outcomes, one in a hundred of another kind, half of which expire at the same time
    for start in range(0, 10_000, 1000):
        ids = [f"{number:05}" for number in range(start, start + 1000)]
        backend.enqueue("q", [NewJob(b"", job_id) for job_id in ids])
        acks = []
        for lease in consumer.reserve(1000, 0):
            keep = 60 + max(0, int(lease.id) - 5000)
            acks.append(Ack(lease, After(keep=keep, kind="cancelled" if lease.id.endswith("42") else "done")))
        assert set(consumer.settle(acks)) == {None}
    steps: list[int] = []
    with backend._pool.borrowed() as connection:
        connection._open(1.0).set_progress_handler(lambda: steps.append(1), 100)
    # When they are listed page by page
    for kind, size, number in ((None, 1000, 10_000), ("cancelled", 10, 100)):
        costs: list[int] = []
        found: list[tuple[float, str]] = []
        after: str | None = None
        while after is not None or not found:
            steps.clear()
            page = backend.history("q", kind=kind, limit=size, after=after)  # type: ignore[arg-type]
            costs.append(len(steps))
            found += [(outcome.expires_in, outcome.id) for outcome in page.outcomes]
            after = page.after
        # Then all pages cost about the same, each outcome is on one page, and the outcome that expires last comes first
        assert len(set(found)) == len(found) == number
        assert [expires_in for expires_in, _ in found] == sorted((at for at, _ in found), reverse=True)
        assert max(costs) <= 2 * costs[0] + 1


def test_outcome_over_the_limit_carries_out_no_verdict(backend: SqliteBackend, consumer: Consumer) -> None:
    leases = reserved(backend, consumer, "one", "two")
    connection = consumer._connection  # type: ignore[attr-defined]
    connection._open(1.0).setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2_000_000)
    too_large = b"x" * 2_000_000
    for verdict in (
        Ack(leases[1], After(keep=1, outcome=too_large)),
        Touch(leases[1], After(memo=too_large)),
        GiveBack(leases[1], 0.0, After(memo=too_large)),
        Release(leases[1], after=After(detail=too_large)),
        Bury(leases[1], after=After(memo=too_large)),
    ):
        with pytest.raises(PayloadTooLarge, match="no verdict was carried out") as told:
            consumer.settle([Ack(leases[0]), verdict])
        with pytest.raises(PayloadTooLarge):
            consumer.exchange([Ack(leases[0]), verdict], 1, 0)
        assert (told.value.size_bytes, told.value.limit_bytes) == (2_000_000, 1_999_000)
    # and data that a verdict ignores may have any size
    ignored = After(outcome=too_large, detail=too_large)
    assert consumer.settle([Touch(leases[0], ignored), Ack(leases[1], ignored)]) == [None, None]


def test_full_file_takes_neither_the_ack_nor_its_outcome(backend: SqliteBackend, consumer: Consumer) -> None:
    # Given a file that may not grow
    (lease,) = reserved(backend, consumer, "one")
    sqlite = consumer._connection._open(1.0)  # type: ignore[attr-defined]
    (pages,) = sqlite.execute("PRAGMA page_count").fetchone()
    sqlite.execute(f"PRAGMA max_page_count = {pages}")
    # When an ack stores an outcome that does not fit into the file
    with pytest.raises(BackendFull, match="nothing was stored"):
        consumer.settle([Ack(lease, After(keep=60, outcome=b"x" * 100_000))])
    # Then the job is still reserved, and can be acked
    assert backend.outcomes("q", ["one"]) == [None]
    assert backend.peek("q", "one").state is State.RESERVED
    assert consumer.settle([Ack(lease)]) == [None]


def test_backend_without_create_reads_outcomes_and_refuses_a_missing_file(
    backend: SqliteBackend, consumer: Consumer, clock: ManualClock, tmp_path: Path
) -> None:
    settle_all(backend, consumer, ["one"], After(keep=60, outcome=b"y"))
    with SqliteBackend(backend.path, create=False, clock=clock) as reader:
        assert [outcome.body for outcome in reader.history("q").outcomes] == [b"y"]
    with (
        SqliteBackend(str(tmp_path / "none.db"), create=False) as reader,
        pytest.raises(BackendUnavailable, match="there is no file"),
    ):
        reader.outcomes("q", ["one"])
    assert not (tmp_path / "none.db").exists()


def settle_all(backend: SqliteBackend, consumer: Consumer, ids: list[str], after: After) -> None:
    leases = reserved(backend, consumer, *ids)
    assert consumer.settle([Ack(lease, after) for lease in leases]) == [None] * len(ids)


# --- memos and details -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"x", LARGE])
@pytest.mark.parametrize("end", ["ack", "delete", "purge", "reschedule"])
def test_memo_and_detail_end_with_their_job(
    backend: SqliteBackend, consumer: Consumer, connect: Connect, body: bytes, end: str
) -> None:
    (lease,) = reserved(backend, consumer, "one", body=body)
    assert consumer.settle([Release(lease, 60, after=After(memo=b"m", detail=b"d"))]) == [None]
    sqlite = connect(isolation_level=None)
    assert stored(sqlite) == (1, 1)
    if end == "ack":
        backend.kick_job("q", "one")
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
    elif end == "purge":
        assert backend.purge("q", [State.DELAYED]) == 1
    elif end == "delete":
        backend.delete("q", "one")
    else:
        backend.reschedule("q", "one", 0)
        (job,) = backend.jobs("q", State.READY).jobs
        assert (job.memo, job.detail, job.body) == (b"", b"", body)
    assert stored(sqlite) == (int(end == "reschedule"), 0)


def stored(sqlite: sqlite3.Connection) -> tuple[int, int]:
    """The number of bodies, and the number of memos, that are stored outside the jobs' rows."""
    found = sqlite.execute("SELECT (SELECT count(*) FROM multiq_bodies), (SELECT count(*) FROM multiq_memos)")
    bodies, memos = found.fetchone()
    return bodies, memos


def test_memo_is_stored_without_rewriting_a_large_body(
    backend: SqliteBackend, consumer: Consumer, path: Path, connect: Connect
) -> None:
    (lease,) = reserved(backend, consumer, "one", body=b"x" * 1_000_000)
    sqlite = connect(isolation_level=None)
    sqlite.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert consumer.settle([Touch(lease, After(memo=b"m"))]) == [None]
    assert path.with_name("jobs.db-wal").stat().st_size < 100_000


def test_detail_is_deleted_by_the_verdict_of_another_process(
    backend: SqliteBackend, consumer: Consumer, clock: ManualClock
) -> None:
    """A worker passes only the lease's queue, id and token to other processes."""
    for verdict in (Release, Bury, Abandon):
        (lease,) = reserved(backend, consumer, "one")
        assert consumer.settle([Release(lease, after=After(detail=b"d"))]) == [None]
        (lease,) = consumer.reserve(1, 0)
        assert backend.peek("q", "one").detail == b"d"
        known = type(lease)(lease.queue, lease.id, lease.token, b"", 0, 60, 1, 0, 0, 0.0)
        with SqliteBackend(backend.path, clock=clock) as other, other.consumer([]) as theirs:
            assert theirs.settle([Touch(known), verdict(known)]) == [None, None]
        assert backend.peek("q", "one").detail == b""
        backend.delete("q", "one")


def test_token_of_a_lease_with_a_detail_fences_like_any_other(backend: SqliteBackend, consumer: Consumer) -> None:
    (lease,) = reserved(backend, consumer, "one")
    assert consumer.settle([Release(lease, after=After(detail=b"d"))]) == [None]
    (with_detail,) = consumer.reserve(1, 0)
    assert consumer.settle([Ack(lease)]) != [None]
    assert consumer.settle([Release(with_detail)]) == [None]
    (without,) = consumer.reserve(1, 0)
    assert consumer.settle([Ack(with_detail)]) != [None]
    assert consumer.settle([Ack(without)]) == [None]


def test_job_whose_body_was_deleted_keeps_its_memo(
    backend: SqliteBackend, consumer: Consumer, connect: Connect
) -> None:
    # Given a job with a memo, whose body another program has deleted
    (lease,) = reserved(backend, consumer, "one")
    assert consumer.settle([Release(lease, after=After(memo=b"m"))]) == [None]
    sqlite = connect(isolation_level=None)
    sqlite.execute("DELETE FROM multiq_bodies")
    # When it is buried, because it cannot be read
    assert consumer.reserve(1, 0) == []
    # Then the job has an empty body and its memo, and a delete removes both
    job = backend.peek("q", "one")
    assert (job.state, job.body, job.memo) == (State.BURIED, b"", b"m")
    backend.delete("q", "one")
    assert stored(sqlite) == (0, 0)


# --- files of other versions and programs ----------------------------------------------------------------


def test_reschedule_by_an_older_multiq_leaves_no_memo_to_another_job(
    backend: SqliteBackend, consumer: Consumer, connect: Connect
) -> None:
    """An older multiq that has the file open since before the upgrade still runs its own statements."""
    (lease,) = reserved(backend, consumer, "one", body=LARGE)
    assert consumer.settle([Release(lease, after=After(memo=b"m"))]) == [None]
    sqlite = connect(isolation_level=None)
    sqlite.execute(
        "UPDATE multiq_jobs SET seq = 2, state = 0, due_at = 0, enqueued_at = 0, "
        "attempt = 0, crashes = 0, kicks = 0, token = NULL, reason = NULL WHERE seq = 1"
    )
    sqlite.execute("UPDATE multiq_bodies SET seq = 2 WHERE seq = 1")
    assert stored(sqlite) == (1, 0)
    sqlite.execute("DELETE FROM multiq_jobs WHERE seq = 2")
    assert stored(sqlite) == (0, 0)


@pytest.mark.parametrize(
    "change",
    ["kind = 7", "kind = 'done'", "kept_at = 'now'", "expires_at = 'never'", "attempt = x'00'", "id = x'ff'",
     "id = CAST(x'ff' AS TEXT)", "queue = x'ff'"],
)  # fmt: skip
def test_malformed_outcome_is_deleted_when_it_is_read(
    backend: SqliteBackend, consumer: Consumer, connect: Connect, change: str
) -> None:
    # Given two outcomes in tables that are not STRICT, of which another program has changed one
    settle_all(backend, consumer, ["good", "bad", "grün"], After(keep=60, outcome=b"y"))
    sqlite = connect(isolation_level=None)
    sqlite.execute("PRAGMA writable_schema = ON")
    sqlite.execute("UPDATE sqlite_schema SET sql = replace(sql, ' STRICT', '') WHERE name = 'multiq_outcomes'")
    backend.close()
    sqlite = connect(isolation_level=None)
    sqlite.execute(f"UPDATE multiq_outcomes SET {change} WHERE id = 'bad'")  # noqa: S608 - of this page
    # Then every call works
    found = backend.outcomes("q", ["good", "bad"])
    assert found[0] is not None
    assert found[1] is None or "id" not in change
    assert {outcome.id for outcome in backend.history("q").outcomes} - {"bad"} == {"good", "grün"}
    assert backend.forget("q", ["good", "grün"]) == 2
    settle_all(backend, consumer, ["bad"], After(keep=60))
    assert [outcome.id for outcome in backend.history("q").outcomes] == ["bad"]


def test_version_2_file_gets_outcomes_memos_held_jobs_and_notes(
    backend: SqliteBackend, consumer: Consumer, connect: Connect
) -> None:
    (lease,) = reserved(backend, consumer, "one", body=LARGE)
    sqlite = connect(isolation_level=None)
    without_triggers_of_version_3(sqlite)
    sqlite.execute("DROP VIEW multiq_opened")
    for table in ("memos", "terms", "arrivals", "outcomes", "notes", "unique", "limits", "gates", "rates", "turns"):
        sqlite.execute(f"DROP TABLE multiq_{table}")
    sqlite.execute("ALTER TABLE multiq_queues DROP COLUMN has_gates")
    sqlite.execute("UPDATE multiq_schema SET version = 2")
    backend.close()
    consumer.close()
    # When the file is opened again while a job is reserved
    assert consumer.settle([Release(lease, after=After(memo=b"m"))]) == [None]
    (lease,) = consumer.reserve(1, 0)
    assert (lease.body, lease.memo) == (LARGE, b"m")
    backend.enqueue("q", [NewJob(b"h", "held", terms=Terms(1))])
    steps = (Arrive("q", "held", "m"), Put("q", "key", b"value"))
    assert consumer.settle([Ack(lease, After(keep=60, steps=steps))]) == [None]
    assert [note.value for note in backend.notes("q").notes] == [b"value"]
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
    assert [outcome.attempt for outcome in backend.history("q").outcomes] == [2]
    assert sqlite.execute("SELECT version FROM multiq_schema").fetchone() == (schema.VERSION,)
    assert stored(sqlite) == (0, 0)
