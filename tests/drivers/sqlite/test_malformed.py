"""Malformed records, written by another program: they are buried, and other jobs are not affected."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, NewJob, Release, State
from multiq.driverkit.clock import SECOND
from multiq.errors import JobNotFound
from multiq_sqlite import schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from multiq_sqlite.backend import SqliteBackend

COLUMNS = ("queue", "id", "state", "priority", "due_at", "ttr", "enqueued_at", "attempt", "crashes", "kicks", "body")
GOOD = dict(zip(COLUMNS, ("q", "evil", 0, 0, 0, 60 * SECOND, 0, 0, 0, 0, b"x"), strict=True))
NOT_UTF8 = "CAST(x'ff' AS TEXT)"


@pytest.fixture
def loose(path: Path, backend: SqliteBackend, connect: Callable[..., sqlite3.Connection]) -> sqlite3.Connection:
    """A connection to the file, whose tables are not STRICT, like those of files from older versions."""
    backend.queues()
    sqlite = connect(isolation_level=None)
    texts = [text for (text,) in sqlite.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
    backend.close()
    for (name,) in sqlite.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
        sqlite.execute(f"DROP TABLE {name}")
    sqlite.execute("DROP VIEW multiq_opened")
    for text in texts:
        sqlite.execute(text.replace(", STRICT", "").replace(" STRICT", ""))
    sqlite.execute("INSERT INTO multiq_schema VALUES (?)", (schema.VERSION,))
    return sqlite


def plant(sqlite: sqlite3.Connection, **changed: Any) -> None:
    """Insert a record like another program. A value that begins with CAST is SQL."""
    values = {**GOOD, **changed}
    marks = [value if str(value).startswith("CAST(") else f":{name}" for name, value in values.items()]
    text = f"INSERT INTO multiq_jobs ({', '.join(values)}) VALUES ({', '.join(marks)})"  # noqa: S608 - of this page
    sqlite.execute(text, values)


def work_off(backend: SqliteBackend) -> list[str]:
    """Reserve and ack all jobs, one by one. Returns their ids."""
    consumer = backend.consumer(["q"])
    done = []
    while leases := consumer.reserve(1, 0):
        assert consumer.settle([Ack(leases[0])]) == [None]
        done.append(leases[0].id)
        assert len(done) < 20
    return done


MALFORMED: list[dict[str, Any]] = [
    {"priority": "first"},
    {"priority": b"\0"},
    {"priority": 1.5},
    {"ttr": "soon"},
    {"ttr": 2**63 - 1},
    {"ttr": -1},
    {"attempt": "many"},
    {"attempt": 2**63 - 1},
    {"crashes": b"x"},
    {"crashes": 2**63 - 1, "state": 2, "due_at": 1},
    {"kicks": "x"},
    {"enqueued_at": "yesterday"},
    {"enqueued_at": 1e300},
    {"body": None},
    {"id": b"\xff\xfe"},
    {"id": NOT_UTF8},
    {"state": 1, "due_at": "tomorrow"},
    {"state": 1, "due_at": b"tomorrow"},
    {"state": 1, "due_at": 12.5},
    {"state": 2, "due_at": "tomorrow"},
]


@pytest.mark.parametrize("record", MALFORMED, ids=str)
def test_malformed_record_is_buried_once_with_a_reason(
    backend: SqliteBackend, loose: sqlite3.Connection, record: dict[str, Any]
) -> None:
    backend.enqueue("q", [NewJob(b"1", "before", priority=1)])
    plant(loose, **record)
    backend.enqueue("q", [NewJob(b"2", "after", priority=2)])
    assert work_off(backend) == ["before", "after"]
    (buried,) = backend.jobs("q", State.BURIED).jobs
    assert "could not be read" in (buried.reason or "")
    assert any(name in (buried.reason or "") for name in record)
    assert isinstance(buried.body, bytes)
    assert backend.peek("q", buried.id).reason == buried.reason
    # the job can be kicked like any other job, and then it can be read
    assert backend.kick("q", 10) == 1
    assert work_off(backend) == [buried.id]
    assert backend.queues() == []


@pytest.mark.one_row
@pytest.mark.parametrize(
    "record", [MALFORMED[0], MALFORMED[3], {"body": None}, {"id": NOT_UTF8}, MALFORMED[-4]], ids=str
)
@pytest.mark.parametrize(
    "name", ["jobs", "peek", "kick", "purge", "stats", "queues", "delete", "reschedule", "kick_job"]
)
def test_every_call_works_beside_a_malformed_record(
    backend: SqliteBackend, loose: sqlite3.Connection, record: dict[str, Any], name: str
) -> None:
    plant(loose, **record)
    plant(
        loose,
        id="evil-buried",
        **{"state": 3, **{k: v for k, v in record.items() if k not in ("id", "state", "due_at")}},
    )
    calls: dict[str, Callable[[], object]] = {
        "jobs": lambda: [backend.jobs("q", state) for state in State if state is not State.GONE],
        "peek": lambda: backend.peek("q", "evil-buried"),
        "kick": lambda: backend.kick("q", 10),
        "purge": lambda: backend.purge("q", [State.READY, State.DELAYED, State.BURIED]),
        "stats": lambda: backend.stats("q"),
        "queues": backend.queues,
        "delete": lambda: backend.delete("q", "evil-buried"),
        "reschedule": lambda: backend.reschedule("q", "evil-buried", 0),
        "kick_job": lambda: backend.kick_job("q", "evil-buried"),
    }
    try:
        calls[name]()
    except JobNotFound:
        assert "id" in record
    backend.enqueue("q", [NewJob(b"2", "after", priority=2**32 - 1)])
    assert "after" in work_off(backend)


def test_verdict_beside_a_damaged_lease_counts(backend: SqliteBackend, loose: sqlite3.Connection) -> None:
    backend.enqueue("q", [NewJob(b"1", "one"), NewJob(b"2", "two")])
    consumer = backend.consumer(["q"])
    leases = consumer.reserve(2, 0)
    loose.execute("UPDATE multiq_jobs SET token = 'mine' WHERE id = 'one'")
    lost, kept = consumer.settle([Release(lease, 0.0, None, "why") for lease in leases])
    assert (lost is None, kept) == (False, None)
    assert backend.stats("q").buried == 1


@pytest.mark.parametrize("body", ["text", 5, 1.5])
def test_body_of_another_type_is_read_as_bytes(backend: SqliteBackend, loose: sqlite3.Connection, body: object) -> None:
    plant(loose, body=body)
    plant(loose, body=None, id="large")
    loose.execute("INSERT INTO multiq_bodies SELECT seq, ? FROM multiq_jobs WHERE id = 'large'", (body,))
    expected = str(body).encode()
    assert [job.body for job in backend.jobs("q", State.READY).jobs] == [expected] * 2
    assert [lease.body for lease in backend.consumer(["q"]).reserve(2, 0)] == [expected] * 2


@pytest.mark.parametrize("queue", [b"\xff", NOT_UTF8])
def test_job_with_a_malformed_queue_moves_to_the_unreadable_queue(
    backend: SqliteBackend, loose: sqlite3.Connection, queue: object
) -> None:
    plant(loose, queue=queue)
    backend.enqueue("q", [NewJob(b"1", "one")])
    assert backend.queues() == ["q", "unreadable"]
    assert backend.stats("unreadable").buried == 1


@pytest.mark.parametrize("reason", [b"\xff", NOT_UTF8])
def test_malformed_reason_leaves_the_job_in_its_state(
    backend: SqliteBackend, loose: sqlite3.Connection, reason: object
) -> None:
    plant(loose, reason=reason)
    (job,) = backend.jobs("q", State.READY).jobs
    assert (job.id, job.reason) == ("evil", "\\xff")


@pytest.mark.parametrize(("queue", "until"), [("q", "for ever"), ("q", b"x"), (b"\xff", 2**62), (NOT_UTF8, 2**62)])
def test_malformed_pause_is_ended(
    backend: SqliteBackend, loose: sqlite3.Connection, queue: object, until: object
) -> None:
    name = queue if str(queue).startswith("CAST(") else ":queue"
    text = f"INSERT INTO multiq_queues (queue, paused_until) VALUES ({name}, :until)"  # noqa: S608 - of this page
    loose.execute(text, {"queue": queue, "until": until})
    backend.enqueue("q", [NewJob(b"1", "one")])
    assert backend.stats("q").paused_for is None
    assert backend.queues() == ["q"]
    assert work_off(backend) == ["one"]


def test_ids_and_reasons_in_any_language_stay_unchanged(backend: SqliteBackend, loose: sqlite3.Connection) -> None:
    plant(loose, id="grün-緑", reason="weil\n")
    plant(loose, id="evil", priority="x")
    assert work_off(backend) == ["grün-緑"]


def test_new_file_accepts_no_text_for_a_number(
    backend: SqliteBackend, connect: Callable[..., sqlite3.Connection]
) -> None:
    backend.queues()
    sqlite = connect(isolation_level=None)
    for record in ({"priority": "first"}, {"id": b"\xff"}, {"ttr": 1.5}, {"body": "text"}):
        with pytest.raises(sqlite3.IntegrityError, match="cannot store"):
            plant(sqlite, **record)


@pytest.mark.parametrize(
    "record", [{"body": None}, {"id": NOT_UTF8}, {"ttr": 2**63 - 1}, {"attempt": 2**63 - 1}], ids=str
)
def test_malformed_values_that_a_new_file_accepts_are_buried(
    backend: SqliteBackend, connect: Callable[..., sqlite3.Connection], record: dict[str, Any]
) -> None:
    backend.enqueue("q", [NewJob(b"1", "one")])
    plant(connect(isolation_level=None), **record)
    assert work_off(backend) == ["one"]
    assert backend.stats("q").buried == 1


@pytest.mark.long
def test_malformed_records_are_searched_in_slices(backend: SqliteBackend, loose: sqlite3.Connection) -> None:
    for number in range(2_500):
        plant(loose, id=f"n\n{number}", priority=number % 500 or "x", state=1, due_at=2**62)
    plant(loose, ttr="x")
    assert work_off(backend) == []
    assert backend.stats("q").buried == 6
