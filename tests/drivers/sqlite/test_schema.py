"""The schema: created once by the first process, upgraded, and refused if a newer multiq created it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from typing import TYPE_CHECKING

import pytest
from sqlite_versions import VERSION_1, VERSION_2

from multiq.backend import Ack, NewJob, State
from multiq.driverkit.clock import SECOND
from multiq.errors import BackendCorrupt
from multiq_sqlite import schema
from multiq_sqlite.backend import SqliteBackend
from multiq_sqlite.statements import script

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def old_file(path: Path) -> Path:
    """A file of version 1 with a small and a large ready job, and a buried one."""
    sqlite = sqlite3.connect(path)
    sqlite.executescript(VERSION_1)
    row = "INSERT INTO multiq_jobs (queue, id, state, priority, due_at, ttr, enqueued_at, attempt, body) VALUES "
    for job_id, state, attempt, body in (("small", 0, 0, b"s"), ("large", 0, 2, b"l" * 9000), ("bad", 3, 5, b"")):
        sqlite.execute(row + "('q', ?, ?, 1024, 0, ?, 0, ?, ?)", (job_id, state, 60 * SECOND, attempt, body))
    sqlite.commit()
    sqlite.close()
    return path


@pytest.mark.parametrize("tables", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_upgraded_file_is_like_a_new_one(tables: str, path: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as sqlite:
        sqlite.executescript(tables)
    SqliteBackend(str(path)).queues()
    SqliteBackend(str(tmp_path / "new.db")).queues()
    assert _tables(path) == _tables(tmp_path / "new.db")


def test_jobs_survive_an_upgrade(old_file: Path) -> None:
    with SqliteBackend(str(old_file)) as backend:
        consumer = backend.consumer(["q"])
        leases = consumer.reserve(10, 0)
        assert [(lease.id, lease.body, lease.attempt, lease.kicks) for lease in leases] == [
            ("small", b"s", 1, 0),
            ("large", b"l" * 9000, 3, 0),
        ]
        assert consumer.settle([Ack(lease) for lease in leases]) == [None, None]
        assert backend.kick("q", 1) == 1
        assert backend.peek("q", "bad").kicks == 1
    sqlite = sqlite3.connect(old_file)
    assert sqlite.execute("SELECT count(*) FROM multiq_bodies").fetchone() == (0,)
    sqlite.close()


def test_failed_upgrade_changes_nothing(old_file: Path) -> None:
    # Given an old file whose upgrade fails at its second statement
    sqlite = sqlite3.connect(old_file)
    sqlite.execute("CREATE TABLE multiq_bodies (somebody_elses)")
    sqlite.close()
    with pytest.raises(BackendCorrupt, match="already exists"):
        SqliteBackend(str(old_file)).queues()
    # Then the file still has all of version 1, and nothing newer
    sqlite = sqlite3.connect(old_file)
    assert sqlite.execute("SELECT version FROM multiq_schema").fetchall() == [(1,)]
    assert "kicks" not in [row[1] for row in sqlite.execute("PRAGMA table_info(multiq_jobs)")]
    sqlite.close()


@pytest.mark.parametrize(
    ("version", "words"),
    [(schema.VERSION + 1, "newer multiq"), (0, "must be a positive"), (None, "must be a positive")],
)
def test_unknown_schema_version_is_refused_and_left_unchanged(path: Path, version: int | None, words: str) -> None:
    sqlite = sqlite3.connect(path)
    sqlite.execute("CREATE TABLE multiq_schema (version INTEGER)")
    sqlite.execute("INSERT INTO multiq_schema VALUES (?)", (version,))
    sqlite.commit()
    with pytest.raises(BackendCorrupt, match=words):
        SqliteBackend(str(path)).enqueue("q", [NewJob(b"x", "1")])
    assert sqlite.execute("SELECT name FROM sqlite_schema").fetchall() == [("multiq_schema",)]
    sqlite.close()


def test_foreign_tables_with_multiqs_names_are_left_unchanged(path: Path) -> None:
    sqlite = sqlite3.connect(path)
    sqlite.execute("CREATE TABLE multiq_jobs (theirs)")
    with pytest.raises(BackendCorrupt, match="already exists"):
        SqliteBackend(str(path)).queues()
    assert sqlite.execute("SELECT name FROM sqlite_schema").fetchall() == [("multiq_jobs",)]
    sqlite.close()


@pytest.mark.long
def test_eight_processes_may_open_a_new_file_at_once(
    path: Path, spawn: Callable[..., subprocess.Popen[str]], line: Callable[[subprocess.Popen[str]], str]
) -> None:
    source = """
    backend = SqliteBackend(sys.argv[1])
    say("ready"); sys.stdin.readline()
    backend.enqueue("q", [NewJob(b"x", sys.argv[2])])
    say("done")
    """
    processes = [spawn(source, path, number) for number in range(8)]
    assert [line(process) for process in processes] == ["ready"] * 8
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [line(process) for process in processes] == ["done"] * 8
    with SqliteBackend(str(path)) as backend:
        assert len(backend.jobs("q", State.READY).jobs) == 8


def test_script_is_split_into_statements() -> None:
    assert [text.split()[:2] for text in script("schema")] == [
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "UNIQUE"],
        ["CREATE", "INDEX"],
        ["CREATE", "INDEX"],
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "INDEX"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TABLE"],
        ["CREATE", "UNIQUE"],
        ["CREATE", "INDEX"],
        ["CREATE", "TABLE"],
        ["CREATE", "UNIQUE"],
        ["CREATE", "INDEX"],
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "TABLE"],
        ["CREATE", "INDEX"],
        ["CREATE", "INDEX"],
        ["CREATE", "TABLE"],
        ["CREATE", "INDEX"],
        ["CREATE", "INDEX"],
        ["CREATE", "TABLE"],
        ["CREATE", "UNIQUE"],
        ["CREATE", "INDEX"],
        ["CREATE", "INDEX"],
        ["CREATE", "INDEX"],
        ["CREATE", "VIEW"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["CREATE", "TRIGGER"],
        ["INSERT", "INTO"],
    ]


def _tables(path: Path) -> dict[str, object]:
    """The tables of a file, without the order of their columns and without differences in blanks."""
    sqlite = sqlite3.connect(path)
    found: dict[str, object] = {}
    for kind, name, text in sqlite.execute(
        "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL"
    ).fetchall():
        if kind == "table":
            columns = sqlite.execute(f"PRAGMA table_info({name})").fetchall()
            found[name] = sorted(tuple(column[1:]) for column in columns)
        else:
            found[name] = re.sub(r"\s+", " ", text)
    found["version"] = sqlite.execute("SELECT version FROM multiq_schema").fetchall()
    sqlite.close()
    return found
