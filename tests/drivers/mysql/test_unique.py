"""Unique jobs on MySQL: what they cost, many producers at once, kills, callers' transactions, and older programs."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pymysql
import pytest

from multiq.backend import Ack, After, Bury, Enqueue, NewJob, State, Terms, UniqueKey
from multiq.backend.registry import open_backend
from multiq.errors import BackendTimeout, BackendUnavailable, EnqueueUncertain, UniqueTaken
from multiq.ids import new_id
from multiq_mysql import schema
from multiq_mysql.connection import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.mysql import MysqlDatabases, Place

    from multiq.backend import Backend
    from multiq_mysql.backend import MysqlBackend

QUEUE = "q"


def job(key: bytes, body: bytes = b"x", *, delay: float = 0.0, **options: Any) -> NewJob:
    return NewJob(body, new_id(), delay=delay, terms=Terms(unique=UniqueKey(key, **options)))


def keys_in(server: MysqlDatabases, place: Place) -> int:
    ((count,),) = server.ask("SELECT COUNT(*) FROM multiq_unique", database=place.name)
    return int(count)


def keys_of_jobs(backend: Backend) -> dict[bytes | None, str]:
    """The keys of all waiting and reserved jobs, each with its job."""
    found = [
        record
        for state in (State.READY, State.RESERVED, State.DELAYED)
        for record in backend.jobs(QUEUE, state, limit=10_000).jobs
    ]
    assert len({record.unique_key for record in found}) == len(found)
    return {record.unique_key: record.id for record in found}


# --- what it costs ---------------------------------------------------------------------------------------


@pytest.fixture
def packets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The statements of each packet that is sent."""
    sent: list[tuple[str, ...]] = []
    original = Session.execute

    def noted(self: Session, *texts: str) -> Any:
        sent.append(texts)
        return original(self, *texts)

    monkeypatch.setattr(Session, "execute", noted)
    return sent


def test_a_job_without_a_key_names_nothing_of_unique_jobs(
    backend: MysqlBackend, packets: list[tuple[str, ...]]
) -> None:
    # When jobs without a key are enqueued, reserved and settled, with steps, too
    backend.enqueue(QUEUE, [NewJob(b"x", new_id())])
    backend.enqueue(QUEUE, [NewJob(b"x", new_id()), NewJob(b"x", new_id(), terms=Terms(1))])
    with backend.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        _, leases = consumer.exchange([Ack(lease, After(steps=(Enqueue(QUEUE, NewJob(b"x", new_id())),)))], 1, 0)
        consumer.settle([Bury(lease) for lease in leases])
    # Then no statement names a key
    assert packets
    assert not [text for packet in packets for text in packet if "unique" in text]


@pytest.mark.parametrize(("before", "count"), [("free", 2), ("gone", 2), ("there", 2), ("replaced", 3)])
def test_an_enqueue_with_a_key_takes_few_packets(
    backend: MysqlBackend, packets: list[tuple[str, ...]], before: str, count: int
) -> None:
    # Given a key that is free, or was taken before
    if before != "free":
        (job_id,) = backend.enqueue(QUEUE, [job(b"k")])
        if before == "gone":
            backend.delete(QUEUE, job_id)
    backend.stats(QUEUE)
    packets.clear()
    # When a job is enqueued with it, then the packets are these
    backend.enqueue(QUEUE, [job(b"k", on_conflict="replace" if before == "replaced" else "keep")])
    assert len(packets) == count


# --- what is left of keys --------------------------------------------------------------------------------


def test_entries_of_jobs_that_are_gone_do_not_accumulate(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given many keys whose jobs are gone, and some whose jobs are there
    live = [job(b"live %d" % number, delay=60) for number in range(3)]
    backend.enqueue(QUEUE, live)
    backend.enqueue(QUEUE, [job(b"%d" % number) for number in range(50)])
    backend.purge(QUEUE, [State.READY])
    assert keys_in(mysql_server, place) == 53
    # When further jobs take keys, then each of them deletes two entries
    for number in range(25):
        backend.enqueue(QUEUE, [job(b"more %d" % number, delay=60)])
    assert keys_in(mysql_server, place) == 28
    assert backend.enqueue(QUEUE, [job(b"live %d" % number) for number in range(3)]) == [kept.id for kept in live]


@pytest.mark.long
def test_entries_do_not_accumulate_if_all_jobs_are_enqueued_in_transactions_of_callers(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    with mysql_server.client(place.name, autocommit=False) as app, backend.consumer([QUEUE]) as consumer:
        for number in range(60):
            backend.enqueue(QUEUE, [job(b"%d" % number)], connection=app)
            app.commit()
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 10)]) == [None]
    assert keys_in(mysql_server, place) < 12


@pytest.mark.long
def test_a_table_of_live_keys_with_few_stale_ones_is_cleaned_up_in_the_end(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given many live keys, and keys whose jobs end at once
    choices = random.Random(1)
    backend.enqueue(QUEUE, [job(choices.randbytes(32), delay=60) for _ in range(200)])
    with backend.consumer([QUEUE]) as consumer:
        for _ in range(150):
            backend.enqueue(QUEUE, [job(choices.randbytes(32))])
            assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 10)]) == [None]
    # Then far fewer entries are left than there have been stale keys
    assert keys_in(mysql_server, place) < 200 + 75


# --- many producers --------------------------------------------------------------------------------------


class Producers:
    """Producers that enqueue jobs with some keys at the same time."""

    def __init__(self, place: Place, server: MysqlDatabases, keys: int) -> None:
        self.answers: dict[bytes, set[str]] = {b"%d" % number: set() for number in range(keys)}
        self._place = place
        self._server = server
        self._each = max(20, keys // 8)

    def produce(self, seed: int) -> None:
        """Enqueue jobs with many of the keys, some of them in transactions that are rolled back."""
        choices = random.Random(seed)
        keys = list(self.answers)
        choices.shuffle(keys)
        with open_backend(f"{self._place.url}?timeout=60") as backend:
            for key in keys[: self._each]:
                way = choices.choice(["rollback", "commit", "batch", "keep", "replace"])
                if way in {"rollback", "commit"}:
                    with contextlib.suppress(BackendUnavailable, pymysql.MySQLError):  # the session was killed
                        self._enqueue_in_transaction(backend, key, commits=way == "commit")
                else:
                    some = choices.sample(list(self.answers), 4 if way == "batch" else 0)
                    self._enqueue(backend, list(dict.fromkeys([key, *some])), way)

    def _enqueue_in_transaction(self, backend: Backend, key: bytes, *, commits: bool) -> None:
        with self._server.client(self._place.name, autocommit=False) as own, own.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM multiq_jobs")  # begins a snapshot
            (job_id,) = backend.enqueue(QUEUE, [job(key)], connection=own)
            if commits:
                own.commit()
                self.answers[key].add(job_id)
            else:
                own.rollback()

    def _enqueue(self, backend: Backend, keys: list[bytes], way: str) -> None:
        jobs = [job(key, on_conflict="keep" if way == "keep" else "replace") for key in keys]
        while True:  # A call whose session is killed too often gives up. The jobs are then enqueued again.
            with contextlib.suppress(EnqueueUncertain, BackendUnavailable):
                for key, job_id in zip(keys, backend.enqueue(QUEUE, jobs), strict=True):
                    self.answers[key].add(job_id)
                return

    @contextlib.contextmanager
    def kills(self) -> Iterator[list[int]]:
        """Kill sessions that are enqueuing with a key, at random. Yields the list of their ids, which grows."""
        choices = random.Random(0)
        is_over = threading.Event()
        killed: list[int] = []

        def kill() -> None:
            while not is_over.wait(0.02):
                rows = self._server.ask(
                    "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = %s AND INFO LIKE %s",
                    self._place.name, "%INTO multiq_unique%",
                )  # fmt: skip
                for (thread,) in choices.sample(rows, min(1, len(rows))):
                    with contextlib.suppress(pymysql.MySQLError):  # it may be gone
                        self._server.ask(f"KILL {thread:d}")
                        killed.append(thread)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            yield killed
        finally:
            is_over.set()
            killer.join()


@pytest.mark.parametrize("rounds", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_many_producers_add_one_job_for_each_key(mysql_server: MysqlDatabases, place: Place, rounds: int) -> None:
    # When producers enqueue jobs with some keys at the same time, while the server kills some of their sessions
    producers = Producers(place, mysql_server, rounds)
    count = 64 if rounds > 40 else 8
    with open_backend(place.url) as backend:
        backend.stats(QUEUE)
        with producers.kills() as killed, ThreadPoolExecutor(count) as pool:
            list(pool.map(producers.produce, range(count)))
        # Then there is one job for each key, and all its producers have its id
        assert killed or rounds == 40
        assert {len(ids) for ids in producers.answers.values() if ids} == {1}
        used = {key: next(iter(ids)) for key, ids in producers.answers.items() if ids}
        there = keys_of_jobs(backend)
        assert {key: there[key] for key in used} == used
        assert backend.stats(QUEUE).ready == len(there) <= rounds


def test_batches_that_name_keys_in_different_orders_do_not_fail(place: Place) -> None:
    # When batches of the same keys are enqueued at the same time, in different orders, some by steps, and some that
    # replace jobs
    keys = [b"%d" % number for number in range(12)]
    begin = threading.Barrier(4)

    def produce(seed: int) -> None:
        choices = random.Random(seed)
        with open_backend(f"{place.url}?timeout=30") as backend:
            backend.stats(QUEUE)
            begin.wait()
            for _ in range(15):
                choices.shuffle(keys)
                jobs = [job(key, on_conflict="replace") for key in keys]
                if seed % 2:
                    backend.enqueue(QUEUE, jobs)
                else:
                    assert backend.carry_out([Enqueue(QUEUE, new) for new in jobs])

    with open_backend(place.url) as backend:
        backend.stats(QUEUE)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(produce, range(4)))
        assert len(keys_of_jobs(backend)) == backend.stats(QUEUE).ready == len(keys)


_LOOP = """
import sys
from multiq.backend import Ack, After, Enqueue, NewJob, Terms, UniqueKey
from multiq.backend.registry import open_backend
from multiq.ids import new_id

def job(number):
    return NewJob(b"x", new_id(), terms=Terms(unique=UniqueKey(b"%d" % number)))

with open_backend(sys.argv[1]) as backend, backend.consumer(["q"]) as consumer:
    print("begun", flush=True)
    while True:
        for number in range(5):
            backend.enqueue("q", [job(number)])
        for lease in consumer.reserve(3, 0):
            consumer.settle([Ack(lease, After(steps=(Enqueue("q", job(4)),)))])
"""


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.long)])
def test_a_killed_process_leaves_no_key_that_is_taken_without_its_job(place: Place, kills: int) -> None:
    with open_backend(place.url) as backend:
        backend.stats(QUEUE)
        for number in range(kills):
            # Given a process that enqueues and acks jobs with keys, and is killed at some moment
            with subprocess.Popen([sys.executable, "-c", _LOOP, place.url], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"begun\n"
                time.sleep(0.02 + number % 7 * 0.011)
                process.send_signal(signal.SIGKILL)
            # Then each key has one job, and an enqueue with a free key adds a job at once
            held = keys_of_jobs(backend)
            for key in (b"%d" % at for at in range(5)):
                new = job(key)
                (job_id,) = backend.enqueue(QUEUE, [new])
                assert job_id in {held.get(key), new.id}
            assert len(keys_of_jobs(backend)) == 5


# --- callers' transactions -------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("before", ["never", "gone", "there"])
def test_a_callers_transaction_with_a_key_blocks_no_other_key(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, isolation: str, before: str
) -> None:
    # Given keys whose jobs are there, or gone
    for number in range(0, 10, 2):
        backend.enqueue(QUEUE, [job(b"%d" % number)])
    if before == "gone":
        backend.purge(QUEUE, [State.READY])
    key = b"5" if before == "never" else b"4"
    with (
        mysql_server.client(place.name, autocommit=False) as app,
        open_backend(f"{place.url}?timeout=3") as other,
        app.cursor() as cursor,
    ):
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        # When a transaction has enqueued with a key, and stays open
        new = job(key)
        assert (backend.enqueue(QUEUE, [new], connection=app) == [new.id]) is (before != "there")
        # Then other jobs can be enqueued, with other keys and without, and reserved
        for number in (0, 1, 3, 7, 9, 10):
            other.enqueue(QUEUE, [job(b"%d" % number)])
        other.enqueue(QUEUE, [NewJob(b"plain", new_id())])
        with other.consumer([QUEUE]) as consumer:
            leases = consumer.reserve(100, 0)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        app.commit()


@pytest.mark.long
def test_an_enqueue_that_waits_for_the_key_of_an_open_transaction_names_the_lock(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    with mysql_server.client(place.name, autocommit=False) as app, open_backend(f"{place.url}?timeout=3") as other:
        # Given a transaction that has taken a key, and stays open
        backend.enqueue(QUEUE, [job(b"taken")], connection=app)
        # When another enqueue with the key waits for it until the end of its time
        with pytest.raises(BackendTimeout, match=r"could not get a lock within 3 s .*as connection="):
            other.enqueue(QUEUE, [job(b"taken")])
        # Then the key is free after a rollback
        app.rollback()
        new = job(b"taken")
        assert other.enqueue(QUEUE, [new]) == [new.id]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_transaction_with_an_old_snapshot_sees_who_has_the_key_now(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, isolation: str
) -> None:
    (gone,) = backend.enqueue(QUEUE, [job(b"gone")])
    with mysql_server.client(place.name, autocommit=False) as app, app.cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        # Given a transaction whose snapshot is older than a job with a key, and than the end of another one
        cursor.execute("SELECT COUNT(*) FROM multiq_jobs")
        (there,) = backend.enqueue(QUEUE, [job(b"there", b"first")])
        backend.delete(QUEUE, gone)
        # When a transaction enqueues with these keys, alone and together, then it finds the job of one key and takes
        # the other key
        new = job(b"gone")
        assert backend.enqueue(QUEUE, [job(b"there"), new], connection=app) == [there, new.id]
        assert backend.enqueue(QUEUE, [job(b"there", b"second", on_conflict="replace")], connection=app) == [there]
        # And it finds and replaces its own job, which is not committed
        assert backend.enqueue(QUEUE, [job(b"gone", b"mine", on_conflict="replace")], connection=app) == [new.id]
        assert backend.enqueue(QUEUE, [new], connection=app) == [new.id]
        app.commit()
    assert backend.peek(QUEUE, there).body == b"second"
    assert backend.peek(QUEUE, new.id).body == b"mine"
    assert backend.stats(QUEUE).ready == 2


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_key_that_is_held_in_a_callers_transaction_is_held_after_the_commit(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place, autocommit: bool
) -> None:
    with mysql_server.client(place.name, autocommit=autocommit) as app, backend.consumer([QUEUE]) as consumer:
        (job_id,) = backend.enqueue(QUEUE, [job(b"k", hold=60)], connection=app)
        assert backend.enqueue(QUEUE, [job(b"k")], connection=app) == [job_id]
        app.commit()
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 10)]) == [None]
        assert backend.enqueue(QUEUE, [job(b"k")], connection=app) == [job_id]
        app.commit()
    assert backend.stats(QUEUE).ready == 0


# --- several versions at once ----------------------------------------------------------------------------


def test_jobs_of_the_version_before_have_no_keys_after_the_migration(
    mysql_server: MysqlDatabases, place: Place
) -> None:
    # Given jobs in tables of the version before, and a session of a program of that version
    with mysql_server.client(place.name) as old:
        schema.up(old, migrations=schema.shipped()[:4])
        insert = (
            "INSERT INTO multiq_jobs (queue, id, state, place, priority, ttr, enqueued_at, `body`) "
            "VALUES (x'71', %s, 0, 1024, 1024, 60000000, 0, x'78')"
        )
        with old.cursor() as cursor:
            cursor.execute(insert, (b"\xffbefore",))
            old.commit()
            # When the tables are migrated, and both programs enqueue
            with open_backend(place.url) as backend:
                assert backend.schema().up()[0] == "0005_unique"
                (job_id,) = backend.enqueue(QUEUE, [job(b"k")])
                cursor.execute(insert, (b"\xffafter",))
                old.commit()
                # Then all jobs are there, and only the new program's has its key
                assert keys_of_jobs_of_all(backend) == {"before": None, "after": None, job_id: b"k"}
                # And after the old program has deleted that job, the key is free
                cursor.execute("DELETE FROM multiq_jobs WHERE id = %s", (bytes.fromhex(job_id.replace("-", "")),))
                old.commit()
                new = job(b"k")
                assert backend.enqueue(QUEUE, [new]) == [new.id]
            schema.ensure(old, migrations=schema.shipped()[:4])  # the old program may still be running


def keys_of_jobs_of_all(backend: Backend) -> dict[str, bytes | None]:
    return {record.id: record.unique_key for record in backend.jobs(QUEUE, State.READY).jobs}


# --- odd rows --------------------------------------------------------------------------------------------


def test_an_entry_that_another_program_has_spoilt_takes_nothing(
    backend: MysqlBackend, mysql_server: MysqlDatabases, place: Place
) -> None:
    (first, second) = backend.enqueue(QUEUE, [job(b"a"), job(b"b")])
    # Given entries that name each other's jobs, and a job whose column is not one of this driver's
    mysql_server.ask("UPDATE multiq_unique SET id = IF(unique_key = 'a', 'x', id)", database=place.name)
    mysql_server.ask("UPDATE multiq_jobs SET unique_key = x'ff' WHERE unique_key LIKE '%%b'", database=place.name)
    # Then the keys are free, and the jobs are shown and handed out
    new = [job(b"a"), job(b"b")]
    assert backend.enqueue(QUEUE, new) == [found.id for found in new]
    assert backend.peek(QUEUE, first).unique_key == b"a"
    assert not backend.peek(QUEUE, second).unique_key
    with backend.consumer([QUEUE]) as consumer:
        assert len(consumer.reserve(10, 0)) == 4


def test_a_buried_job_that_loses_its_key_during_a_kick_stays_buried(backend: MysqlBackend) -> None:
    # Given a buried job, whose key other producers take and lose all the time
    buried = job(b"k", until="buried")
    backend.enqueue(QUEUE, [buried])
    with backend.consumer([QUEUE]) as consumer:
        consumer.settle([Bury(lease) for lease in consumer.reserve(1, 0)])
    is_over = threading.Event()

    def take() -> None:
        while not is_over.is_set():
            new = job(b"k", until="buried")
            if backend.enqueue(QUEUE, [new]) == [new.id]:
                backend.delete(QUEUE, new.id)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    # When it is kicked again and again, then there is never a second job with the key
    refused = kicked = 0
    try:
        for _ in range(60):
            try:
                backend.kick_job(QUEUE, buried.id)
            except UniqueTaken:
                refused += 1
                continue
            kicked += 1
            ready = [record.id for record in backend.jobs(QUEUE, State.READY).jobs]
            assert ready == [buried.id]
            with backend.consumer([QUEUE]) as consumer:
                (lease,) = consumer.reserve(1, 0)
                assert lease.id == buried.id
                consumer.settle([Bury(lease)])
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert refused + kicked == 60


def test_steps_that_only_meet_keys_change_nothing(backend: MysqlBackend) -> None:
    (there,) = backend.enqueue(QUEUE, [job(b"k"), job(b"k")])[:1]
    assert backend.carry_out([Enqueue(QUEUE, job(b"k"))])
    assert [record.id for record in backend.jobs(QUEUE, State.READY).jobs] == [there]
