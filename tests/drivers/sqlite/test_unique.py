"""Unique jobs in a file: many producers at once, killed producers, and leftover keys."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, NewJob, State, Terms, UniqueKey
from multiq.driverkit.clock import ManualClock
from multiq.ids import new_id
from multiq_sqlite.backend import SqliteBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def backend(tmp_path: Path, clock: ManualClock) -> Iterator[SqliteBackend]:
    with SqliteBackend(str(tmp_path / "jobs.db"), clock=clock) as backend:
        yield backend


def job(key: bytes, hold: float = 0.0, body: bytes = b"x") -> NewJob:
    return NewJob(body, new_id(), terms=Terms(unique=UniqueKey(key, until="buried", hold=hold)))


def keys_in(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        (count,) = connection.execute("SELECT count(*) FROM multiq_unique").fetchone()
    connection.close()
    return int(count)


def test_no_key_is_left_of_jobs_that_are_gone(tmp_path: Path, backend: SqliteBackend) -> None:
    # Given jobs with keys that have ended in several ways
    consumer = backend.consumer(["q"])
    for number in range(5):
        backend.enqueue("q", [job(b"%d" % number)])
    acked, buried, deleted, *others = consumer.reserve(5, 0)
    consumer.settle([Ack(acked), Bury(buried), Bury(deleted)])
    backend.delete("q", deleted.id)
    backend.purge("q", [State.BURIED])
    consumer.settle([Ack(lease) for lease in others])
    # Then the file has no key
    assert keys_in(tmp_path / "jobs.db") == 0
    consumer.close()


def test_keys_that_were_held_by_time_do_not_accumulate(
    tmp_path: Path, backend: SqliteBackend, clock: ManualClock
) -> None:
    # Given many jobs that are gone, whose keys were held for a while
    consumer = backend.consumer(["q"])
    for number in range(50):
        backend.enqueue("q", [job(b"%d" % number, hold=10)])
    consumer.settle([Ack(lease) for lease in consumer.reserve(50, 0)])
    assert keys_in(tmp_path / "jobs.db") == 50
    # When the time is over, then each further job with a key removes two of these keys
    clock.advance(10)
    for number in range(25):
        backend.enqueue("q", [job(b"more %d" % number)])
    assert keys_in(tmp_path / "jobs.db") == 25
    consumer.close()


def test_a_job_that_outlives_the_time_of_its_key_keeps_the_key(backend: SqliteBackend, clock: ManualClock) -> None:
    (job_id,) = backend.enqueue("q", [job(b"old", hold=10)])
    clock.advance(10)
    for number in range(5):
        backend.enqueue("q", [job(b"more %d" % number)])
    assert backend.enqueue("q", [job(b"old")]) == [job_id]


def test_a_key_is_free_while_a_job_of_another_queue_has_the_row_number_of_its_last_job(
    backend: SqliteBackend, clock: ManualClock
) -> None:
    # Given a job that is gone, whose key was held for a while
    consumer = backend.consumer(["q"])
    backend.enqueue("q", [job(b"key", hold=10)])
    consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)])
    clock.advance(10)
    # When a job of another queue has the same key, and SQLite gives it the same row number
    backend.enqueue("other", [job(b"key")])
    # Then the next job with the key is added
    later = job(b"key")
    assert backend.enqueue("q", [later]) == [later.id]
    assert backend.stats("q").ready == 1
    consumer.close()


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_many_producers_add_one_job_for_each_key(tmp_path: Path, rounds: int) -> None:
    # When producers enqueue jobs with some keys at the same time, some of them in transactions that are rolled back
    path = str(tmp_path / "jobs.db")
    producers = 64 if rounds > 40 else 8
    answers: dict[bytes, set[str]] = {b"%d" % number: set() for number in range(rounds)}

    def produce(seed: int) -> None:
        choices = random.Random(seed)
        keys = list(answers)
        choices.shuffle(keys)
        with SqliteBackend(path, timeout=60) as backend:
            backend.stats("q")
            own = sqlite3.connect(path, timeout=60, isolation_level=None)
            for key in keys[: max(20, rounds // 8)]:
                if choices.random() < 0.25:
                    own.execute("BEGIN IMMEDIATE")
                    backend.enqueue("q", [job(key)], connection=own)
                    own.execute("ROLLBACK")
                else:
                    answers[key].add(backend.enqueue("q", [job(key)])[0])
            own.close()

    with ThreadPoolExecutor(producers) as pool:
        list(pool.map(produce, range(producers)))
    # Then there is one job for each key, and all its producers have its id
    used = [ids for ids in answers.values() if ids]
    assert {len(ids) for ids in used} == {1}
    with SqliteBackend(path) as backend:
        assert backend.stats("q").ready == len(used)
    assert keys_in(tmp_path / "jobs.db") == len(used)


_LOOP = """
import sys
from multiq.backend import Ack, NewJob, Terms, UniqueKey
from multiq.ids import new_id
from multiq_sqlite.backend import SqliteBackend

with SqliteBackend(sys.argv[1]) as backend, backend.consumer(["q"]) as consumer:
    print("begun", flush=True)
    while True:
        for number in range(5):
            backend.enqueue("q", [NewJob(b"x", new_id(), terms=Terms(unique=UniqueKey(b"%d" % number)))])
        consumer.settle([Ack(lease) for lease in consumer.reserve(3, 0)])
"""


@pytest.mark.parametrize(
    "kills", [3, pytest.param(15, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.exhaustive)]
)
def test_a_killed_process_leaves_no_key_without_its_job(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "jobs.db"
    for number in range(kills):
        # Given a process that enqueues and acks jobs with keys, and is killed at some moment
        process = subprocess.Popen([sys.executable, "-c", _LOOP, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.02 + number % 7 * 0.011)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # Then each key has its job, and each job has its key
        with SqliteBackend(str(path)) as backend:
            stats = backend.stats("q")
            jobs = (stats.ready or 0) + (stats.reserved or 0)
            assert keys_in(path) == jobs <= 5
            held = {
                record.unique_key: record.id
                for state in (State.READY, State.RESERVED)
                for record in backend.jobs("q", state).jobs
            }
            assert len(held) == jobs
            # And an enqueue with a free key adds a job at once
            for key in (b"%d" % at for at in range(5)):
                new = job(key)
                assert backend.enqueue("q", [new]) == [held.get(key, new.id)]
