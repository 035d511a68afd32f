"""External transactions: enqueues inside the caller's own transaction."""

from __future__ import annotations

import sqlite3
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Gate, NewJob, Quota, State, Terms, UniqueKey
from multiq.errors import BackendTimeout, OptionInvalid, PayloadTooLarge
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Connect = Callable[..., sqlite3.Connection]
    Jobs = Callable[..., list[NewJob]]


def ids(backend: SqliteBackend) -> list[str]:
    return [job.id for job in backend.jobs("q", State.READY).jobs]


def test_jobs_exist_once_the_caller_commits(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    backend.stats("q")
    app = connect()
    app.execute("CREATE TABLE orders (number)")
    app.execute("INSERT INTO orders VALUES (7)")
    made = backend.enqueue("q", jobs(3), connection=app)
    assert app.in_transaction
    assert ids(backend) == []
    app.commit()
    assert ids(backend) == made
    assert connect().execute("SELECT * FROM orders").fetchall() == [(7,)]


def test_jobs_vanish_if_the_caller_rolls_back(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect()
    backend.enqueue("q", jobs(3), connection=app)
    app.rollback()
    assert ids(backend) == []
    backend.enqueue("q", jobs(1))
    assert len(ids(backend)) == 1


def test_enqueue_opens_a_transaction_like_any_insert(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect()
    backend.enqueue("q", jobs(), connection=app)
    assert app.in_transaction
    app.commit()
    assert len(ids(backend)) == 1


def test_autocommit_connection_commits_at_once(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect(isolation_level=None)
    backend.enqueue("q", jobs(300), connection=app)
    assert not app.in_transaction
    assert backend.stats("q").ready == 300


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 brought sqlite3's autocommit attribute")
@pytest.mark.parametrize("autocommit", [True, False])
def test_autocommit_attribute_of_newer_pythons(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, autocommit: bool
) -> None:
    app = connect(autocommit=autocommit)
    backend.enqueue("q", jobs(), connection=app)
    assert len(ids(backend)) == int(autocommit)
    if not autocommit:
        app.commit()
    assert len(ids(backend)) == 1


def test_callers_savepoint_can_undo_an_enqueue(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect(isolation_level=None)
    app.execute("BEGIN")
    (kept,) = backend.enqueue("q", jobs(), connection=app)
    app.execute("SAVEPOINT mine")
    backend.enqueue("q", jobs(), connection=app)
    app.execute("ROLLBACK TO mine")
    app.execute("COMMIT")
    assert ids(backend) == [kept]


def test_large_bodies_and_repeated_ids(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect()
    large = jobs(1, b"x" * 10_000)
    backend.enqueue("q", large, connection=app)
    backend.enqueue("q", large, connection=app)
    app.commit()
    assert [job.body for job in backend.jobs("q", State.READY).jobs] == [b"x" * 10_000]


def test_failed_batch_leaves_nothing_in_the_callers_transaction(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    # Given a table that refuses one job of a batch, and a caller's transaction with an order
    batch = jobs(200)
    backend.stats("q")
    app = connect()
    app.execute("CREATE TABLE orders (number)")
    app.execute(
        f"CREATE TRIGGER refuse BEFORE INSERT ON multiq_jobs WHEN new.id = '{batch[150].id}' "
        "BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    app.execute("INSERT INTO orders VALUES (7)")
    # When the batch fails, and the caller still commits
    with pytest.raises(Exception, match="refused"):
        backend.enqueue("q", batch, connection=app)
    assert app.in_transaction
    app.commit()
    # Then the order is stored, and no job of the batch
    assert ids(backend) == []
    assert app.execute("SELECT * FROM orders").fetchall() == [(7,)]


def test_failed_batch_leaves_no_new_transaction_open(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    backend.stats("q")
    app = connect()
    app.execute("CREATE TRIGGER refuse BEFORE INSERT ON multiq_jobs BEGIN SELECT RAISE(ABORT, 'refused'); END")
    with pytest.raises(Exception, match="refused"):
        backend.enqueue("q", jobs(), connection=app)
    assert not app.in_transaction


def test_attached_file_is_accepted(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, path: Path, tmp_path: Path
) -> None:
    # Given an application whose main file also has multiq's tables
    with SqliteBackend(str(tmp_path / "app.db")) as other:
        other.stats("q")
        app = connect(tmp_path / "app.db")
        app.execute('ATTACH ? AS "job\'s ""file"""', (str(path),))
        # When it enqueues into an attached file
        made = backend.enqueue("q", [*jobs(1), *jobs(1, b"x" * 9000)], connection=app)
        app.commit()
        # Then the jobs are in the attached file
        assert ids(backend) == made
        assert other.stats("q").ready == 0


def test_link_to_the_file_is_accepted(connect: Connect, jobs: Jobs, path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path)
    with SqliteBackend(str(tmp_path / "link.db")) as backend:
        app = connect()
        backend.enqueue("q", jobs(), connection=app)
        app.commit()
        assert len(ids(backend)) == 1


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_utf_16_database_is_accepted(connect: Connect, jobs: Jobs, tmp_path: Path, path: Path, encoding: str) -> None:
    # Given an application's database in UTF-16, in a folder with a name that is not ASCII
    (tmp_path / "größe").mkdir()
    wide, attached = tmp_path / "größe" / "wide.db", tmp_path / "attached.db"
    for file in (wide, attached):
        app = connect(file)
        app.execute(f"PRAGMA encoding = '{encoding}'")
        app.execute("CREATE TABLE orders (number)")
        app.commit()
    # Then jobs can be enqueued in its transactions, to an attached file as well
    app = connect(wide)
    app.execute("ATTACH ? AS other", (str(attached),))
    for file in (wide, attached):
        with SqliteBackend(str(file)) as backend:
            backend.queues()
            backend.enqueue("q", jobs(1, b"a\0\xff"), connection=app)
            app.commit()
            assert [job.body for job in backend.jobs("q", State.READY).jobs] == [b"a\0\xff"]
    # And another file is refused with its name
    with SqliteBackend(str(path)) as backend, pytest.raises(OptionInvalid, match=r"größe/wide\.db"):
        backend.enqueue("q", jobs(), connection=app)


def test_connection_to_another_file_is_refused_with_both_names(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, path: Path, tmp_path: Path
) -> None:
    backend.stats("q")
    for other, name in ((tmp_path / "other.db", "other.db"), (":memory:", "in-memory")):
        with pytest.raises(OptionInvalid, match=name) as caught:
            backend.enqueue("q", jobs(), connection=connect(other))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("thing", ["a string", 7, object(), SimpleNamespace(driver_connection=None)])
def test_object_that_is_not_a_connection_is_refused(backend: SqliteBackend, jobs: Jobs, thing: object) -> None:
    with pytest.raises(OptionInvalid, match=r"sqlite3\.Connection"):
        backend.enqueue("q", jobs(), connection=thing)


def test_closed_connection_is_refused(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect()
    app.close()
    with pytest.raises(OptionInvalid, match="closed"):
        backend.enqueue("q", jobs(), connection=app)


def test_callers_connection_settings_do_not_matter(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    app = connect()
    app.row_factory = lambda _, row: {"row": row}
    app.text_factory = bytes
    backend.enqueue("q", jobs(2), connection=app)
    app.commit()
    assert len(ids(backend)) == 2


@pytest.mark.parametrize("row_factory", [None, sqlite3.Row, lambda _, row: {"row": row}])
@pytest.mark.parametrize("text_factory", [str, bytes, bytearray])
def test_callers_connection_settings_do_not_matter_to_unique_jobs_and_limits(
    backend: SqliteBackend, connect: Connect, row_factory: Any, text_factory: Any
) -> None:
    # Given a job that waits at a limit
    gates = (Gate("api"), Gate("tenant", "7"))
    unique = UniqueKey(b"key", on_conflict="replace")
    backend.limits("q", {"api": Quota(slots=0), "tenant": Quota(slots=5, fair=True)})
    (first,) = backend.enqueue("q", [NewJob(b"old", "first", terms=Terms(gates=gates, unique=unique))])
    with backend.consumer(["q"]) as consumer:
        assert consumer.reserve(1, 0) == []
        # When a connection with settings of its own replaces the job, and adds another
        app = connect()
        app.row_factory, app.text_factory = row_factory, text_factory
        backend.limits_beside("q", {"more": Quota(slots=2)}, app)
        replaced = backend.enqueue(
            "q", [NewJob(b"new", "second", terms=Terms(gates=gates, unique=unique))], connection=app
        )
        added = backend.enqueue("q", [NewJob(b"x", "third", terms=Terms(unique=UniqueKey(b"other")))], connection=app)
        assert (app.row_factory, app.text_factory) == (row_factory, text_factory)
        app.commit()
        # Then both jobs are there
        assert (replaced, added) == ([first], ["third"])
        assert [lease.id for lease in consumer.reserve(5, 0)] == ["third"]
        backend.limits("q", {"api": None})
        (lease,) = consumer.reserve(5, 0)
        assert (lease.id, lease.body) == (first, b"new")


def test_first_use_inside_a_transaction_that_has_the_lock(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    # Given a file without multiq's tables, which the caller has locked
    app = connect(isolation_level=None)
    app.row_factory = sqlite3.Row
    app.execute("CREATE TABLE orders (number)")
    app.execute("BEGIN IMMEDIATE")
    app.execute("INSERT INTO orders VALUES (7)")
    # When the caller rolls back, the tables are gone, too; when it commits, they stay
    backend.enqueue("q", jobs(), connection=app)
    app.execute("ROLLBACK")
    assert ids(backend) == []
    app.execute("BEGIN IMMEDIATE")
    (made,) = backend.enqueue("q", jobs(), connection=app)
    app.execute("COMMIT")
    assert ids(backend) == [made]


def test_first_use_inside_a_transaction_without_statements(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    app = connect(isolation_level=None)
    app.execute("BEGIN")
    (made,) = backend.enqueue("q", jobs(), connection=app)
    assert ids(backend) == []
    app.execute("COMMIT")
    assert ids(backend) == [made]


def test_first_use_in_the_callers_transaction_can_be_the_commit(connect: Connect, jobs: Jobs, path: Path) -> None:
    app = connect(isolation_level=None)
    app.execute("BEGIN EXCLUSIVE")
    with SqliteBackend(str(path)) as backend:
        (made,) = backend.enqueue("q", jobs(1, b"x" * 5000), connection=app)
        app.execute("COMMIT")
        assert ids(backend) == [made]


def test_first_use_of_a_locked_attached_file_raises(
    backend: SqliteBackend, connect: Connect, jobs: Jobs, path: Path
) -> None:
    app = connect(":memory:", isolation_level=None)
    app.execute("ATTACH ? AS jobs", (str(path),))
    app.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BackendTimeout, match="use the queue once before"):
        backend.enqueue("q", jobs(), connection=app)
    app.execute("ROLLBACK")
    backend.enqueue("q", jobs(), connection=app)
    assert len(ids(backend)) == 1


def test_transaction_that_began_by_reading_raises_with_advice(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    backend.enqueue("q", jobs())
    app = connect(isolation_level=None)
    app.execute("BEGIN")
    app.execute("SELECT * FROM multiq_jobs").fetchall()
    backend.enqueue("q", jobs())
    with pytest.raises(BackendTimeout, match="BEGIN IMMEDIATE"):
        backend.enqueue("q", jobs(), connection=app)
    app.execute("ROLLBACK")
    assert len(ids(backend)) == 2


def test_waiting_consumer_wakes_when_the_caller_commits(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    import threading

    app = connect(check_same_thread=False)
    backend.enqueue("q", jobs(), connection=app)
    timer = threading.Timer(0.1, app.commit)
    timer.start()
    assert len(backend.consumer(["q"]).reserve(1, 30)) == 1
    timer.join()


def test_sizes_are_checked_before_the_callers_transaction_is_used(
    backend: SqliteBackend, connect: Connect, jobs: Jobs
) -> None:
    backend.stats("q")
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2_000_000)
    app = connect()
    with pytest.raises(PayloadTooLarge):
        backend.enqueue("q", [*jobs(), *jobs(1, b"x" * 2_000_000)], connection=app)
    assert not app.in_transaction


@pytest.mark.parametrize("how", ["mode=ro", "query_only"])
def test_read_only_connection_is_refused(backend: SqliteBackend, connect: Connect, jobs: Jobs, how: str) -> None:
    backend.stats("q")
    if how == "mode=ro":
        app = connect(f"file:{backend.path}?mode=ro", uri=True)
    else:
        app = connect()
        app.execute("PRAGMA query_only = ON")
    with pytest.raises(OptionInvalid, match="must be able to write"):
        backend.enqueue("q", jobs(), connection=app)
    assert not app.in_transaction


def test_enqueue_effects_on_the_callers_counters(backend: SqliteBackend, connect: Connect, jobs: Jobs) -> None:
    """As docs/sqlite.md says: the cursor's lastrowid stays, last_insert_rowid() does not."""
    app = connect()
    app.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")
    backend.enqueue("q", jobs(3))
    cursor = app.execute("INSERT INTO orders VALUES (700)")
    backend.enqueue("q", jobs(), connection=app)
    assert cursor.lastrowid == 700
    assert app.execute("SELECT last_insert_rowid()").fetchone() == (4,)
    app.commit()
