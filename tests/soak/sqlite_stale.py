"""Verdicts around their leases' ends, with failed commits and a busy lock: no stale verdict may be accepted.

    python tests/soak/sqlite_stale.py --verdicts 1000

Two processes reserve jobs under leases of 0.2 s and settle each a moment before or after its lease's end, some of them
twice. A third process sometimes holds the write lock for longer than the two processes wait for it. During some calls
the files of these processes may not grow, so that a COMMIT fails with a real error of the system. A call that raised is
repeated.

The answers are judged by triggers on the tables, which record inside each transaction the lease token that a job had
when it was removed, released or buried. In the end each answer is compared with that record, read with plain sqlite3.
Exits with 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import operator
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiq.backend import Ack, Bury, NewJob, Release
from multiq.errors import BackendError, BackendTimeout
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Consumer, Lease, Verdict

WORKERS = 2
TTR = 0.2  # seconds
LOCK_PATIENCE = 0.03  # seconds that a worker waits for the lock
NEAR = 0.06  # seconds, at most, between a lease's end and its verdict

JUDGE = """
CREATE TABLE verdicts (seq INTEGER, token INTEGER);
CREATE TRIGGER judge_removal AFTER DELETE ON multiq_jobs WHEN old.state = 2
BEGIN
    INSERT INTO verdicts VALUES (old.seq, old.token);
END;
CREATE TRIGGER judge_move AFTER UPDATE ON multiq_jobs
WHEN old.state = 2 AND new.state <> 2 AND new.crashes = old.crashes -- else the lease had ended, and it was promoted
BEGIN
    INSERT INTO verdicts VALUES (old.seq, old.token);
END;
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verdicts", type=int, default=1000)
    parser.add_argument("--role", nargs=4, metavar=("ROLE", "FILE", "DIARY", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        role, file, diary, count = given.role
        return lock(file) if role == "lock" else work(file, Path(diary), int(count))
    with tempfile.TemporaryDirectory() as folder:
        return supervise(Path(folder), given.verdicts)


def supervise(folder: Path, count: int) -> int:
    """Run the processes, and judge the answers. Returns the exit code."""
    file = str(folder / "jobs.db")
    with SqliteBackend(file) as backend:
        backend.queues()
        with contextlib.closing(sqlite3.connect(file)) as judge:
            judge.executescript(JUDGE)
        backend.enqueue("q", [NewJob(b"x", f"{number}", ttr=TTR) for number in range(count * 2)])
    diaries = [folder / f"{name}.json" for name in range(WORKERS)]
    locker = start("lock", file, folder, 0)
    workers = [start("work", file, diary, count // WORKERS) for diary in diaries]
    codes = [worker.wait() for worker in workers]
    locker.kill()
    locker.wait()
    if any(codes):
        print(f"a worker ended with {codes}")
        return 1
    with contextlib.closing(sqlite3.connect(file)) as judge:
        counted = collections.Counter(token for (token,) in judge.execute("SELECT seq || ':' || token FROM verdicts"))
        (status,) = judge.execute("PRAGMA integrity_check").fetchone()
    return pronounce([entry for diary in diaries for entry in json.loads(diary.read_text())], counted, status)


def start(role: str, file: str, diary: Path, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--role", role, file, str(diary), str(count)])


def pronounce(entries: list[dict[str, Any]], counted: collections.Counter[str], status: str) -> int:
    """Compare the answers with what the triggers recorded. All answers to one lease are one entry."""
    stale = sum(bool(entry["done"]) and entry["began_at"] > entry["ended_at"] for entry in entries)
    invented = sum(bool(entry["done"]) and not counted[entry["token"]] for entry in entries)
    lost_though_counted = sum(not entry["done"] and counted[entry["token"]] > 0 for entry in entries)
    too_early = sum(not entry["done"] and entry["answered_at"] < entry["ended_at"] for entry in entries)
    twice = sum(entry["second"] is True for entry in entries) + sum(times > 1 for times in counted.values())
    print(
        f"{len(entries):,} leases settled, {sum(bool(entry['done']) for entry in entries):,} in time, "
        f"{sum(entry['locked'] for entry in entries):,} calls failed on the lock and "
        f"{sum(entry['failed'] for entry in entries):,} in the commit, and were repeated; "
        f"stale accepted {stale}, done but not counted {invented}, counted but told lost {lost_though_counted}, "
        f"told lost before the lease's end {too_early}, counted twice {twice}, file {status}"
    )
    return int(bool(stale or invented or lost_though_counted or too_early or twice) or status != "ok")


# --- the processes ---------------------------------------------------------------------------------------------


def lock(file: str) -> int:
    """Hold the write lock now and then."""
    luck = random.Random(1)
    other = sqlite3.connect(file, isolation_level=None, timeout=5)
    while True:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(luck.uniform(0.0, 2.5 * LOCK_PATIENCE))
        other.execute("COMMIT")
        time.sleep(luck.uniform(0.0, 0.1))


def work(file: str, diary: Path, count: int) -> int:
    """Reserve and settle until *count* verdicts are answered."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    luck = random.Random(os.getpid())
    entries: list[dict[str, Any]] = []
    backend = SqliteBackend(file, timeout=LOCK_PATIENCE, synchronous="normal")
    consumer = backend.consumer(["q"])
    raw = sqlite3.connect(file, timeout=5, isolation_level=None)
    while len(entries) < count:
        leases: list[Lease] = []
        with contextlib.suppress(BackendError):
            leases = consumer.reserve(5, 1.0)
        ends = [
            raw.execute("SELECT due_at FROM multiq_jobs WHERE seq = ? AND token = ?", lease.token.split(":")).fetchone()
            for lease in leases
        ]
        planned = [
            (end[0] + luck.uniform(-NEAR, NEAR) * 1e9, end[0], lease)
            for end, lease in zip(ends, leases, strict=True)
            if end is not None  # otherwise the process was too slow, and the lease has already ended
        ]
        for settle_at, ended_at, lease in sorted(planned, key=operator.itemgetter(0)):
            verdict = luck.choice((Ack, Ack, Release, Bury))(lease)
            time.sleep(max(0.0, (settle_at - time.time_ns()) / 1e9))
            entries.append(settle(consumer, verdict, luck, file) | {"token": lease.token, "ended_at": ended_at})
    diary.write_text(json.dumps(entries))
    return 0


def settle(consumer: Consumer, verdict: Verdict, luck: random.Random, file: str) -> dict[str, Any]:
    """Repeat one verdict until it is answered; repeat some verdicts once more after their answer."""
    locked = failed = 0
    while True:
        began_at = time.time_ns()
        try:
            with may_not_grow(file) if luck.random() < 0.3 and not failed else contextlib.nullcontext():
                (answer,) = consumer.settle([verdict])
            break
        except BackendTimeout:
            locked += 1
        except BackendError:
            failed += 1
    answered_at = time.time_ns()
    second = None
    if luck.random() < 0.3:
        with contextlib.suppress(BackendError):
            second = consumer.settle([verdict]) == [None]
    return {
        "done": answer is None,
        "began_at": began_at,
        "answered_at": answered_at,
        "locked": locked,
        "failed": failed,
        "second": second,
    }


@contextlib.contextmanager
def may_not_grow(file: str) -> Iterator[None]:
    """In the block this process can add only a few bytes to the log, so that COMMIT fails in the middle of writing."""
    log = Path(file + "-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = log.stat().st_size if log.exists() else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2 + 2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
