"""Disk space: new jobs are refused before the disk is full, and existing jobs can be worked off."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, State
from multiq.errors import BackendFull
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount anything")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(backend: SqliteBackend, body: bytes, batch: int, round_name: str = "") -> list[str]:
    """Enqueue until the backend is full. Returns the ids of the accepted jobs."""
    taken: list[str] = []
    for number in range(100_000):
        jobs = [NewJob(body, f"{round_name}{number}-{one}") for one in range(batch)]
        try:
            taken += backend.enqueue("q", jobs)
        except BackendFull:
            return taken
    pytest.fail("the disk does not become full")


def drain(backend: SqliteBackend) -> list[str]:
    """Reserve and ack until nothing is left. Returns the ids."""
    consumer = backend.consumer(["q"])
    done: list[str] = []
    leases = consumer.reserve(50, 0)
    while leases:
        answers, following = consumer.exchange([Ack(lease) for lease in leases], 50, 0)
        assert answers == [None] * len(leases)
        done += [lease.id for lease in leases]
        leases = following
    return done


@pytest.mark.long
@pytest.mark.parametrize(("size", "batch"), [(1000, 1), (1000, 500), (300_000, 1)])
def test_full_disk_can_be_worked_off(disk: Path, size: int, batch: int) -> None:
    with SqliteBackend(str(disk / "jobs.db"), synchronous="normal") as backend:
        taken = fill(backend, b"x" * size, batch)
        assert sorted(drain(backend)) == sorted(taken)
        # and new jobs use the room in the file that the deleted jobs had
        again = fill(backend, b"x" * size, batch, "again-")
        assert len(again) > len(taken) / 2
        assert backend.purge("q", [State.READY]) == len(again)


@pytest.mark.long
def test_parallel_producers_leave_enough_space_for_draining(disk: Path, spawn: Spawn) -> None:
    # Given four processes that enqueue until they are refused
    path = disk / "jobs.db"
    producers = [
        spawn(
            """
            from multiq.errors import BackendFull
            backend = SqliteBackend(sys.argv[1], synchronous="normal", timeout=60)
            for number in range(10_000):
                try:
                    backend.enqueue("q", [NewJob(b"x" * 1000, f"{sys.argv[2]}-{number}-{one}") for one in range(100)])
                except BackendFull:
                    break
            """,
            path,
            name,
        )
        for name in range(4)
    ]
    assert [producer.wait() for producer in producers] == [0] * 4
    # Then the accepted jobs can be reserved and acked
    with SqliteBackend(str(path), synchronous="normal") as backend:
        ready = backend.stats("q").ready
        assert ready
        assert len(drain(backend)) == ready


def test_full_disk_is_checked_before_the_callers_transaction_is_used(
    disk: Path, connect: Callable[[Path], sqlite3.Connection]
) -> None:
    with SqliteBackend(str(disk / "jobs.db"), synchronous="normal") as backend:
        fill(backend, b"x" * 1000, 100)
        app = connect(disk / "jobs.db")
        with pytest.raises(BackendFull, match="kept back"):
            backend.enqueue("q", [NewJob(b"x" * 100_000, "theirs")], connection=app)
        assert not app.in_transaction


def test_freed_space_is_noticed_at_once(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a disk that reports no free blocks
    backend.stats("q")
    there = os.statvfs(backend.path)
    full = os.statvfs_result((*there[:3], 0, 0, *there[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: full)
        for _ in range(2):
            with pytest.raises(BackendFull, match=r"has 0\.0 MB free, the new jobs may need 0\.0 MB, and 16\.\d MB"):
                backend.enqueue("q", [NewJob(b"x", "1")])
    backend.enqueue("q", [NewJob(b"x", "1")])
    assert backend.stats("q").ready == 1
