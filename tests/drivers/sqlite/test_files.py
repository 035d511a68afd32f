"""Files: which ones can be used, how they are created, and the errors for the others."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import (
    BackendCorrupt,
    BackendFull,
    BackendNotInstalled,
    BackendUnavailable,
    MultiqError,
    OptionInvalid,
    PayloadTooLarge,
    UrlInvalid,
)
from multiq_sqlite import opening
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# --- URLs ---


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_in_memory_database_is_refused_with_advice(url: str) -> None:
    with pytest.raises(UrlInvalid, match="memory://"):
        open_backend(url)


@pytest.mark.parametrize("url", ["sqlite://jobs.db", "sqlite://host/jobs.db", "sqlite://a:b@/jobs.db"])
def test_url_with_a_host_or_credentials_is_refused(url: str) -> None:
    with pytest.raises(UrlInvalid, match="three slashes") as caught:
        open_backend(url)
    assert "a:b" not in str(caught.value)


def test_url_with_three_slashes_is_relative_with_four_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    near, far = open_backend("sqlite:///sub/jobs.db"), open_backend("sqlite:////var/lib/jobs.db")
    monkeypatch.chdir("/")
    assert isinstance(near, SqliteBackend)
    assert isinstance(far, SqliteBackend)
    assert (near.path, far.path) == (f"{tmp_path}/sub/jobs.db", "/var/lib/jobs.db")


def test_constructor_does_no_io(path: Path) -> None:
    open_backend(f"sqlite:///{path}").consumer(["q"]).close()
    assert not path.exists()


@pytest.mark.parametrize(("option", "pragma"), [("full", 2), ("normal", 1)])
def test_synchronous_reaches_every_connection(path: Path, option: str, pragma: int) -> None:
    with open_backend(f"sqlite:///{path}?synchronous={option}") as backend:
        assert isinstance(backend, SqliteBackend)
        with backend._pool.borrowed() as connection:
            sqlite = connection._open(1.0)
            assert sqlite.execute("PRAGMA synchronous").fetchone() == (pragma,)


@pytest.mark.parametrize("query", ["synchronous=off", "timeout=-1", "timeout=nan", "journal=wal"])
def test_wrong_option_is_refused(query: str) -> None:
    with pytest.raises(UrlInvalid, match="cannot be used"):
        open_backend(f"sqlite:///jobs.db?{query}")


@pytest.mark.parametrize("name", ["with space.db", "50%.db", "what?.db", "straße.db", 'o\'clock "x".db', "file:x.db"])
def test_any_file_name_is_accepted(tmp_path: Path, name: str) -> None:
    with SqliteBackend(str(tmp_path / name)) as backend:
        backend.enqueue("q", [NewJob(b"x", "1")])
    assert (tmp_path / name).exists()


# --- files that cannot be used ---


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UrlInvalid, match=rf"no folder {tmp_path}/nowhere "):
        SqliteBackend(str(tmp_path / "nowhere" / "jobs.db")).stats("q")


def test_folder_as_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UrlInvalid, match="is a folder"):
        SqliteBackend(str(tmp_path)).stats("q")


def test_file_of_another_kind_is_left_unchanged(path: Path) -> None:
    text = b"These are my notes, not a database.\n" * 100
    path.write_bytes(text)
    with pytest.raises(BackendCorrupt, match="not an SQLite database"):
        SqliteBackend(str(path)).enqueue("q", [NewJob(b"x", "1")])
    assert path.read_bytes() == text


def test_damaged_file_raises_backend_corrupt(path: Path) -> None:
    with SqliteBackend(str(path)) as backend:
        backend.enqueue("q", [NewJob(b"x" * 2000, str(number)) for number in range(200)])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    with pytest.raises(BackendCorrupt, match="damaged"):
        SqliteBackend(str(path)).stats("q")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_file_of_another_user_is_refused_with_advice(open_folder: Path) -> None:
    path = open_folder / "jobs.db"
    with SqliteBackend(str(path)) as backend:
        backend.enqueue("q", [NewJob(b"x", "1")])
    for mode, words in ((0o600, "needs to read and write the file"), (0o644, "needs to write the file")):
        path.chmod(mode)
        complaint = _complaint_of_nobody(path)
        assert complaint.startswith("BackendUnavailable")
        assert words in complaint
    complaint = _complaint_of_nobody(open_folder / "new.db")
    assert complaint.startswith("BackendUnavailable")
    assert "Permission denied" in complaint


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a process as another user")
def test_forbidden_folder_raises_a_typed_error(open_folder: Path) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    path = closed / "jobs.db"
    with SqliteBackend(str(path)) as backend:
        backend.enqueue("q", [NewJob(b"x", "1")])
    assert _complaint_of_nobody(path) == f"BackendUnavailable {path} cannot be reached: Permission denied\n"


def _complaint_of_nobody(path: Path) -> str:
    # imported while still root, which can read this checkout anywhere
    source = f"""
import os
from multiq_sqlite.backend import SqliteBackend
from multiq.backend import NewJob
os.setgid(65534); os.setuid(65534)
try:
    SqliteBackend({str(path)!r}).enqueue("q", [NewJob(b"x", "1")])
except Exception as exc:
    print(type(exc).__name__, exc)
"""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout


def test_full_disk_raises_and_leaves_nothing_half_done(path: Path) -> None:
    # Given a process that may not make files larger than 400 kB
    source = f"""
import resource, signal
from multiq_sqlite.backend import SqliteBackend
from multiq.backend import Ack, NewJob
from multiq.errors import BackendFull, BackendUnavailable
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
backend = SqliteBackend({str(path)!r})
backend.enqueue("q", [NewJob(b"x" * 1000, str(number)) for number in range(50)])
try:
    backend.enqueue("q", [NewJob(b"y" * 1000, f"y{{number}}") for number in range(1000)])
except (BackendFull, BackendUnavailable) as exc:
    print(type(exc).__name__)
print(backend.stats("q").ready)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=True)
    error, ready = done.stdout.split()
    # Then no job of the refused batch is stored
    assert error in {"BackendFull", "BackendUnavailable"}
    assert ready == "50"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 400_000


def test_file_size_limit_raises_backend_full(backend: SqliteBackend) -> None:
    # Given a database that may not grow any more
    backend.enqueue("q", [NewJob(b"x", "1")])
    connection = backend._pool._idle[0]
    connection._open(1.0).execute("PRAGMA max_page_count = 1")  # SQLite raises the limit to the present size
    # When a batch does not fit
    with pytest.raises(BackendFull, match="no room"):
        backend.enqueue("q", [NewJob(b"y" * 2000, f"y{number}") for number in range(50)])
    # Then no job of the batch is stored, and the old job can be reserved and acked
    assert backend.stats("q").ready == 1
    consumer = backend.consumer(["q"])
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]


def test_single_enqueues_fill_a_file_up_to_the_last_accepted_job(backend: SqliteBackend) -> None:
    # Given a database that may not grow any more
    backend.stats("q")
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        sqlite.execute("PRAGMA max_page_count = 1")
    # When jobs come one by one until one does not fit
    taken: list[str] = []
    with pytest.raises(BackendFull, match="no room"):
        taken += (backend.enqueue("q", [NewJob(b"y" * 2000, f"y{number}")])[0] for number in range(1000))
    # Then the earlier jobs are stored, and no others
    assert [job.id for job in backend.jobs("q", State.READY, limit=1000).jobs] == taken


# --- new files, and files that go away ---


def test_new_file_is_accessible_to_its_owner_only(path: Path, backend: SqliteBackend) -> None:
    before = os.umask(0)
    try:
        backend.enqueue("q", [NewJob(b"x", "1")])
    finally:
        os.umask(before)
    modes = {name.name: stat.S_IMODE(name.stat().st_mode) for name in path.parent.iterdir()}
    assert modes == {"jobs.db": 0o600, "jobs.db-wal": 0o600, "jobs.db-shm": 0o600}


def test_dangling_link_creates_no_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(UrlInvalid, match=rf"a symbolic link to {path}, which does not exist"):
        SqliteBackend(str(tmp_path / "link.db")).enqueue("q", [NewJob(b"x", "1")])
    assert not path.exists()
    path.touch(0o600)
    with SqliteBackend(str(tmp_path / "link.db")) as backend:
        backend.enqueue("q", [NewJob(b"x", "1")])


def test_existing_file_keeps_its_mode(path: Path, backend: SqliteBackend) -> None:
    path.touch(0o664)
    path.chmod(0o664)
    backend.enqueue("q", [NewJob(b"x", "1")])
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_file_may_be_the_applications_own_database(path: Path, backend: SqliteBackend) -> None:
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE orders (number INTEGER)")
        theirs.execute("INSERT INTO orders VALUES (7)")
    theirs.close()
    backend.enqueue("q", [NewJob(b"x", "1")])
    with sqlite3.connect(path) as theirs:
        names = {name for (name,) in theirs.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")}
        assert theirs.execute("SELECT * FROM orders").fetchall() == [(7,)]
    theirs.close()
    assert {name for name in names if not name.startswith("multiq_")} == {"orders"}


def test_deleted_file_is_created_again(path: Path, backend: SqliteBackend) -> None:
    backend.enqueue("q", [NewJob(b"old", "1")])
    consumer = backend.consumer(["q"])
    assert len(consumer.reserve(1, 0)) == 1
    for name in list(path.parent.iterdir()):
        name.unlink()
    # Then new jobs are in the new file, which other processes open
    backend.enqueue("q", [NewJob(b"new", "2")])
    with SqliteBackend(str(path)) as other:
        assert [job.body for job in other.jobs("q", State.READY).jobs] == [b"new"]
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"new"]


def test_file_deleted_while_it_is_opened_is_created_again(path: Path, backend: SqliteBackend) -> None:
    # Given a first call that must create the tables, and waits for an application's transaction
    theirs = sqlite3.connect(path, isolation_level=None)
    theirs.execute("PRAGMA journal_mode = WAL")
    theirs.execute("BEGIN IMMEDIATE")
    with backend._pool.borrowed() as connection:  # later calls use the same connection
        waiting = threading.Thread(target=connection.prepare, args=(60.0,))
        waiting.start()
        time.sleep(0.3)
        # When the file is deleted before that transaction ends
        for name in list(path.parent.iterdir()):
            name.unlink()
        theirs.execute("ROLLBACK")
        waiting.join()
    theirs.close()
    # Then later calls do not write into the deleted file
    backend.enqueue("q", [NewJob(b"new", "1")])
    with SqliteBackend(str(path)) as other:
        assert other.stats("q").ready == 1


def test_exchange_reports_its_verdicts_though_the_folder_is_gone_before_it_reserves(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    with SqliteBackend(str(folder / "jobs.db")) as backend:
        backend.enqueue("q", [NewJob(b"x", "1")])
        consumer = backend.consumer(["q"])
        (lease,) = consumer.reserve(1, 0)
        remover = threading.Timer(0.3, folder.rename, (tmp_path / "elsewhere",))  # atomic, unlike a deletion
        remover.start()
        # When the folder disappears while the consumer waits, which checks the file once a second
        assert consumer.exchange([Ack(lease)], 1, 3.0) == ([None], [])
        remover.join()
        # Then the next call raises an error with this cause
        with pytest.raises(UrlInvalid, match="no folder"):
            consumer.reserve(1, 0)


def test_replaced_file_is_noticed(path: Path, backend: SqliteBackend, tmp_path: Path) -> None:
    backend.enqueue("q", [NewJob(b"old", "1")])
    with SqliteBackend(str(tmp_path / "other.db")) as other:
        other.enqueue("q", [NewJob(b"new", "2")])
    for log in ("jobs.db-wal", "jobs.db-shm"):  # otherwise SQLite would use the old log with the new file
        path.with_name(log).unlink()
    (tmp_path / "other.db").replace(path)
    assert [job.body for job in backend.jobs("q", State.READY).jobs] == [b"new"]


def test_dropped_tables_raise_once_and_are_created_again(path: Path, backend: SqliteBackend) -> None:
    backend.enqueue("q", [NewJob(b"x", "1")])
    vandal = sqlite3.connect(path)
    vandal.execute("DROP VIEW multiq_opened")
    for (table,) in vandal.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
        vandal.execute(f"DROP TABLE {table}")
    vandal.close()
    with pytest.raises(BackendCorrupt, match="dropped"):
        backend.enqueue("q", [NewJob(b"y", "2")])
    backend.enqueue("q", [NewJob(b"y", "2")])
    assert backend.stats("q").ready == 1


def test_closed_backend_opens_again(backend: SqliteBackend) -> None:
    backend.enqueue("q", [NewJob(b"x", "1")])
    consumer = backend.consumer(["q"])
    (lease,) = consumer.reserve(1, 0)
    backend.close()
    assert backend.stats("q").reserved == 1
    assert consumer.settle([Ack(lease)]) == [None]


# --- looking where nothing is ---


@pytest.fixture
def looking(path: Path) -> Iterator[SqliteBackend]:
    """A backend that creates nothing."""
    with SqliteBackend(str(path), create=False) as backend:
        yield backend


def test_without_create_no_file_is_created(path: Path, looking: SqliteBackend) -> None:
    looks: list[Callable[[], object]] = [
        looking.queues,
        lambda: looking.stats("q"),
        lambda: looking.peek("q", "1"),
        lambda: looking.jobs("q", State.READY),
        lambda: looking.kick("q", 1),
        lambda: looking.delete("q", "1"),
        lambda: looking.purge("q", [State.READY]),
    ]
    for look in looks:
        with pytest.raises(BackendUnavailable, match=f"there is no file {path}: nothing was enqueued there yet"):
            look()
    assert list(path.parent.iterdir()) == []


def test_without_create_no_tables_are_created_and_the_journal_mode_is_kept(path: Path, looking: SqliteBackend) -> None:
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE orders (number INTEGER)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(BackendUnavailable, match=f"the file {path} has no tables of multiq's"):
        looking.queues()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_without_create_files_are_followed_that_appear_and_disappear(path: Path, looking: SqliteBackend) -> None:
    with pytest.raises(BackendUnavailable):
        looking.queues()
    with SqliteBackend(str(path)) as other:
        other.enqueue("q", [NewJob(b"x", "1")])
    assert looking.queues() == ["q"]
    assert looking.peek("q", "1").body == b"x"
    for name in list(path.parent.iterdir()):
        name.unlink()
    with pytest.raises(BackendUnavailable, match="there is no file"):
        looking.queues()
    assert list(path.parent.iterdir()) == []


def test_without_create_a_file_of_another_kind_is_reported(path: Path, looking: SqliteBackend) -> None:
    path.write_bytes(b"These are my notes, not a database.\n" * 100)
    with pytest.raises(BackendCorrupt, match="not an SQLite database"):
        looking.queues()


# --- the library ---


def test_old_sqlite_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    opening.require_library.cache_clear()
    with pytest.raises(BackendNotInstalled, match=r"3\.35"):
        SqliteBackend(str(path)).stats("q")
    opening.require_library.cache_clear()
    assert not path.exists()


def test_every_error_has_sqlites_error_as_cause(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(MultiqError) as caught:
        SqliteBackend(str(path)).queues()
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)


# --- bodies and cursors ---


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 100_000])
def test_bodies_of_all_sizes_round_trip_and_leave_nothing(backend: SqliteBackend, size: int, path: Path) -> None:
    body = os.urandom(size)
    backend.enqueue("q", [NewJob(body, f"{number}") for number in range(5)])
    backend.enqueue("q", [NewJob(b"of no use", "0")])
    backend.reschedule("q", "4", 0)
    assert [job.body for job in backend.jobs("q", State.READY).jobs] == [body] * 5
    consumer = backend.consumer(["q"])
    leases = consumer.reserve(2, 0)
    assert [lease.body for lease in leases] == [body] * 2
    consumer.settle([Ack(lease) for lease in leases])
    backend.delete("q", "2")
    assert backend.peek("q", "4").body == body
    assert backend.purge("q", [State.READY]) == 2
    reader = sqlite3.connect(path)
    assert reader.execute(
        "SELECT (SELECT count(*) FROM multiq_jobs), (SELECT count(*) FROM multiq_bodies)"
    ).fetchall() == [(0, 0)]
    reader.close()


def test_moving_a_job_does_not_rewrite_its_large_body(path: Path, backend: SqliteBackend) -> None:
    backend.enqueue("q", [NewJob(b"x" * 3_000_000, "1")])
    consumer = backend.consumer(["q"])
    log = path.with_name("jobs.db-wal")
    before = _written(path, log)
    for _ in range(20):
        (lease,) = consumer.reserve(1, 0)
        consumer.settle([Touch(lease)])
        consumer.settle([Release(lease)])
    assert _written(path, log) - before < 1_000_000


def _written(path: Path, log: Path) -> int:
    return path.stat().st_size + log.stat().st_size


def test_body_over_sqlites_limit_is_refused_before_anything_is_written(backend: SqliteBackend) -> None:
    backend.stats("q")
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        sqlite.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2_000_000)
    with pytest.raises(PayloadTooLarge) as caught:
        backend.enqueue("q", [NewJob(b"x", "1"), NewJob(b"x" * 2_000_000, "2")])
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (2_000_000, 1_999_000)
    assert backend.stats("q").ready == 0
    backend.enqueue("q", [NewJob(b"x" * 1_999_000, "2")])


@pytest.mark.parametrize("after", ["", "1", "a.b", "1.2.3", "9" * 30 + ".1"])
def test_invalid_cursor_is_refused(backend: SqliteBackend, after: str) -> None:
    with pytest.raises(OptionInvalid, match="cursor"):
        backend.jobs("q", State.READY, after=after)


def test_reason_that_is_not_unicode_is_kept(backend: SqliteBackend, jobs: Callable[..., list[NewJob]]) -> None:
    backend.enqueue("q", jobs())
    consumer = backend.consumer(["q"])
    (lease,) = consumer.reserve(1, 0)
    assert consumer.settle([Bury(lease, "no file 'caf\udce9'\0")]) == [None]
    assert backend.peek("q", lease.id).reason == "no file 'caf\\udce9'\0"
