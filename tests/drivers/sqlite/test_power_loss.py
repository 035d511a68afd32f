"""Power loss, by a model: a trace shows what had reached the disk (``tests/disk.py``).

Two processes enqueue, ack and release under strace, and create the file. Then the model loses power at many moments
of that trace, at each in several ways, and the test opens the file that is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import strace
from disk import CALLS, Disk, calls, texts, written

from multiq.backend import NewJob
from multiq.errors import MultiqError
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from pathlib import Path

QUEUE = "mail"
ROUNDS = int(os.environ.get("MULTIQ_TEST_POWER_ROUNDS", "150"))  # the log is restarted at least once
MOMENTS = int(os.environ.get("MULTIQ_TEST_POWER_MOMENTS", "8"))
BEGINS_A_LOG = ", 32, 0) = 32"  # a write of a log's header: 32 bytes at offset 0
TORN = 2  # power losses per moment, in addition to the strict one

#: prints its calls: an enqueue returned (+), an ack begins (~), an ack returned (-)
PRODUCER = """
import os, sys
from multiq.backend import Ack, After, NewJob, Release
from multiq_sqlite.backend import SqliteBackend

path, diary, synchronous, rounds = sys.argv[1:]
name = "a" if os.fork() else "b"
said = os.open(diary, os.O_WRONLY | os.O_APPEND)

def say(word):
    os.write(said, (word + " ").encode())

backend = SqliteBackend(path, synchronous=synchronous, timeout=60)
consumer = backend.consumer(["mail"])
for number in range(int(rounds)):
    job_id = f"{name}-{number:05}"
    backend.enqueue("mail", [NewJob(b"x" * (3000 if number % 10 == 0 else 10), job_id, ttr=3600)])
    say("+" + job_id)
    if number % 3 == 2:
        first, second = consumer.reserve(2, 10)
        say("~" + first.id)
        assert consumer.settle([Ack(first, After(keep=3600, outcome=b"y" * 300)), Release(second)]) == [None, None]
        say("-" + first.id)
# without a last word to the file, as one that loses power
os._exit(os.waitstatus_to_exitcode(os.wait()[1]) if name == "a" else 0)
"""


@dataclass
class Record:
    """What the processes had printed before some moment."""

    enqueued: list[str] = field(default_factory=list)
    acking: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    synced: int = 0
    """How many enqueues had returned when the last completed sync of the log began."""

    def read(self, words: str) -> None:
        for word in words.split():
            if word[0] == "+":
                self.enqueued.append(word[1:])
            else:
                (self.acking if word[0] == "~" else self.acked).add(word[1:])

    @property
    def waiting(self) -> list[str]:
        """Jobs that must be there."""
        return [job_id for job_id in self.enqueued if job_id not in self.acking]


@dataclass
class Found:
    """The results of the power losses at all moments."""

    failures: int = 0
    lost: int = 0
    """The number of acknowledged jobs that were lost, at the worst moment."""
    of: int = 0
    """The number of jobs that were acknowledged and not acked at that moment."""
    back: int = 0
    """The number of acked jobs that were stored again, at the worst moment."""
    damaged: list[str] = field(default_factory=list)
    holes: list[str] = field(default_factory=list)
    """Lost jobs of which a later job of the same process was not lost."""
    old: list[str] = field(default_factory=list)
    """Lost jobs after whose enqueue the log had been synced."""
    apart: list[str] = field(default_factory=list)
    """Acked jobs that were stored together with their outcome, or gone without an outcome."""
    logs: int = 0
    """How often the log was started from its beginning. Each time after the first, it overwrites changes that were
    moved into the file."""


@pytest.fixture(autouse=True)
def _can_trace() -> None:
    strace.require()


def trace(folder: Path, synchronous: str) -> list[str]:
    """Run the processes, and return the lines of strace."""
    store, diary, notes = folder / "store", folder / "diary", folder / "trace"
    store.mkdir()
    diary.touch()
    producer = [sys.executable, "-c", PRODUCER, str(store / "jobs.db"), str(diary), synchronous, str(ROUNDS)]
    subprocess.run(strace.noting(CALLS, notes, producer, data=1 << 20), check=True, timeout=300)
    return notes.read_text().splitlines()


def lose_power(folder: Path, lines: list[str], luck: random.Random) -> Found:
    """Lose power at many moments of a trace, and check the file that is left."""
    whole = list(calls(lines))
    store, diary = folder / "store", str(folder / "diary")
    said = next(at for at, call in enumerate(whole) if call.path == diary)
    began = next(at for at, call in enumerate(whole) if f"{store}/jobs.db" in texts(call))
    moments = {said, len(whole) - 1}
    moments |= {luck.randrange(began, said) for _ in range(MOMENTS // 5)}
    moments |= {luck.randrange(said, len(whole)) for _ in range(MOMENTS)}
    disk, record, found, syncing = Disk(store), Record(), Found(), dict[str, int]()
    for at, call in enumerate(whole):
        disk.follow(call)
        if call.path == diary and call.begins:
            record.read(written(call).decode())
        elif call.path == f"{store}/jobs.db-wal" and call.name in {"fsync", "fdatasync"}:
            if call.begins:
                syncing[call.who] = len(record.enqueued)
            if call.result is not None:
                record.synced = max(record.synced, syncing.pop(call.who))
        elif (
            call.name == "pwrite64" and call.begins and call.path.endswith("-wal") and call.rest.endswith(BEGINS_A_LOG)
        ):
            found.logs += 1
        if at in moments:
            for image in [disk.strict(), *(disk.torn(luck) for _ in range(TORN))]:
                found.failures += 1
                left = folder / "left"
                try:
                    judge(left, image, record, found)
                except (sqlite3.DatabaseError, MultiqError) as exc:
                    found.damaged.append(f"failure {found.failures}: {exc!r}")
                shutil.rmtree(left)
    return found


def judge(folder: Path, image: dict[str, bytes], record: Record, found: Found) -> None:
    """Open the files that are left, as SQLite does after a power failure: the index of the log is rebuilt."""
    folder.mkdir()
    for name, content in image.items():
        if not name.endswith("-shm"):
            (folder / name).write_bytes(content)
    there: set[str] = set()
    kept: set[str] = set()
    with contextlib.closing(sqlite3.connect(folder / "jobs.db")) as db:
        (status,) = db.execute("PRAGMA integrity_check").fetchone()
        if status != "ok":
            found.damaged.append(f"failure {found.failures}: {status}")
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'multiq_jobs'").fetchone():
            there = {str(job_id) for (job_id,) in db.execute("SELECT id FROM multiq_jobs")}
            kept = {str(job_id) for (job_id,) in db.execute("SELECT id FROM multiq_outcomes")}
    lost = set(record.waiting) - there
    if len(lost) >= found.lost:
        found.lost, found.of = len(lost), len(record.waiting)
    found.back = max(found.back, len(record.acked & there))
    found.apart += sorted((there & kept) | ((record.acking & set(record.enqueued[: record.synced])) - there - kept))
    found.old += sorted(lost & set(record.enqueued[: record.synced]))
    found.holes += [job_id for job_id in lost if any(one[0] == job_id[0] and one > job_id for one in there)]
    # and the file can still be used
    with SqliteBackend(str(folder / "jobs.db"), synchronous="normal") as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [NewJob(b"x", "later")])
        assert consumer.reserve(1, 0)


@pytest.mark.parametrize("synchronous", ["full", pytest.param("normal", marks=pytest.mark.long)])
@pytest.mark.long
def test_power_failure_loses_nothing_that_the_setting_keeps(synchronous: str, tmp_path: Path) -> None:
    found = lose_power(tmp_path, trace(tmp_path, synchronous), random.Random(7))
    print(f"synchronous={synchronous}: {found}")
    assert found.damaged == []
    assert found.holes == []
    assert found.old == []
    assert found.apart == []
    assert found.logs > 1
    if synchronous == "full":
        assert (found.lost, found.back) == (0, 0)
    else:  # with "normal", SQLite syncs only when it moves the log into the file
        assert found.lost


@pytest.mark.long
def test_power_loss_model_detects_an_unsynced_file(tmp_path: Path) -> None:
    # Given synchronous=off, which no URL allows: SQLite never syncs
    found = lose_power(tmp_path, trace(tmp_path, "off"), random.Random(7))
    # Then acknowledged jobs are lost, and some files cannot be read
    print(f"synchronous=off: {found}")
    assert found.lost
    assert found.damaged
