"""The write-ahead log: its size, its place, and what delays its restart."""

from __future__ import annotations

import math
import sqlite3
import sys
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import NewJob
from multiq_sqlite.backend import SqliteBackend
from multiq_sqlite.write_ahead_log import LONG

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Jobs = Callable[..., list[NewJob]]
    Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def backend(path: Path) -> Iterator[SqliteBackend]:
    with SqliteBackend(str(path), synchronous="normal") as backend:
        yield backend


@pytest.fixture
def reader(path: Path, backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """A connection of another program, with an open transaction that has read."""
    for pause in ("CHECK_PAUSE", "_CHECKPOINT_PAUSE"):
        monkeypatch.setattr(f"multiq_sqlite.write_ahead_log.{pause}", 0.0)
    backend.stats("q")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM multiq_jobs").fetchone()
    yield connection
    connection.close()


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def link_to(path: Path) -> Path:
    link = path.with_name("link.db")
    link.symlink_to(path)
    return link


def lengthen(backend: SqliteBackend, log: Path) -> None:
    """Enqueue until the log is long."""
    for number in range(100):
        if log.stat().st_size > LONG:
            return
        backend.enqueue("filler", [NewJob(b"x" * 2000, f"{number}-{one}") for one in range(500)])
    pytest.fail("the log does not grow")


@pytest.mark.parametrize("is_link", [False, True])
def test_long_reader_does_not_delay_writers(
    backend: SqliteBackend, reader: sqlite3.Connection, path: Path, jobs: Jobs, is_link: bool
) -> None:
    # Given a log that cannot be cleared because of a reader
    lengthen(backend, log_of(path))
    if is_link:
        backend = SqliteBackend(str(link_to(path)), synchronous="normal")
        backend.stats("q")
    with backend._pool.borrowed() as connection:
        sqlite = connection._open(1.0)
        made: list[str] = []
        sqlite.set_trace_callback(made.append)
    # When jobs are enqueued
    for _ in range(64):
        backend.enqueue("q", jobs())
    # Then commits try to move the log into the file, but none waits for the reader while it has the write lock
    assert sum(text.startswith("INSERT") for text in made) == 64
    assert {text for text in made if "checkpoint" in text} == {"PRAGMA wal_checkpoint(PASSIVE)"}
    backend.close()


def test_long_log_of_few_large_pages_is_restarted(backend: SqliteBackend, path: Path, jobs: Jobs) -> None:
    # Given a file of an application's, with pages of 64 kB
    with sqlite3.connect(path) as theirs:
        theirs.execute("PRAGMA page_size = 65536")
        theirs.execute("CREATE TABLE orders (number INTEGER)")
    theirs.close()
    # And a log that has become long between two checks
    backend.stats("q")
    backend._pool.next_log_check_at = math.inf
    lengthen(backend, log_of(path))
    with backend._pool.borrowed() as connection:
        made: list[str] = []
        connection._open(1.0).set_trace_callback(made.append)
    # When the next commit checks the log's length
    backend._pool.next_log_check_at = 0.0
    backend.enqueue("q", jobs())
    # Then the log is restarted
    assert "PRAGMA wal_checkpoint(RESTART)" in made


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives hints")
@pytest.mark.parametrize("is_link", [False, True])
def test_idle_consumer_gets_hints_through_a_symbolic_link(path: Path, is_link: bool) -> None:
    path.touch()  # the driver creates no file at the target of a link
    with SqliteBackend(str(link_to(path) if is_link else path)) as backend:
        consumer = backend.consumer(["q"])
        consumer.reserve(1, 0.5)
        assert consumer._waiter._hints._watch is not None
        consumer.close()


@pytest.mark.long
def test_producers_of_large_batches_keep_the_log_short(backend: SqliteBackend, path: Path, spawn: Spawn) -> None:
    """Each producer makes so few commits that a check in every n-th commit of a process would miss the log's growth."""
    backend.stats("q")
    processes = [
        spawn(
            """
            backend = SqliteBackend(sys.argv[1], synchronous="normal", timeout=60)
            for batch in range(20):
                backend.enqueue("q", [NewJob(b"x" * 2000, f"{sys.argv[2]}-{batch}-{one}") for one in range(1000)])
            """,
            path,
            name,
        )
        for name in range(8)
    ]
    longest = 0
    while any(process.poll() is None for process in processes):
        longest = max(longest, log_of(path).stat().st_size)
        time.sleep(0.002)  # seconds
    assert [process.returncode for process in processes] == [0] * 8
    assert backend.stats("q").ready == 8 * 20 * 1000
    # each round of commits writes 32 MB, all rounds together 650 MB; on a machine with a load of 18 it was 354 MB
    assert longest < 500e6
