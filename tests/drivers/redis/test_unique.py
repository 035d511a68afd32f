"""Unique jobs on Redis: many producers at once, kills, old workers, full servers, and leftover keys."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from proxy import CutReply, CutRequest, Proxy
from redis_old_worker import OldWorker
from servers.process import until

from multiq.backend import Ack, Bury, Enqueue, GiveBack, NewJob, Release, State, Terms, UniqueKey
from multiq.backend.effects import After
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendFull, UniqueTaken
from multiq.ids import new_id, new_ids
from multiq_redis.connection import Connection
from multiq_redis.records import pack_id
from multiq_redis.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy import Fault
    from servers.redis import RedisCluster, RedisServer

    from multiq.backend import Backend, Consumer, Lease

QUEUE = "q"
KEY = bytes(range(32))
LONG = 3600.0


@pytest.fixture
def consumer(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer


def job(key: bytes = KEY, body: bytes = b"x", delay: float = 0.0, **options: Any) -> NewJob:
    return NewJob(body, new_id(), delay=delay, terms=Terms(unique=UniqueKey(key, **options)))


def add(backend: Backend, key: bytes = KEY, **options: Any) -> str:
    (job_id,) = backend.enqueue(QUEUE, [job(key, **options)])
    return job_id


def take(consumer: Consumer) -> Lease:
    (lease,) = consumer.reserve(1, 0)
    return lease


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {key.decode() for key in client.scan_iter("multiq:*") if client.ttl(key) == -1}


def entries(server: RedisServer) -> dict[bytes, bytes]:
    """The keys that a job took last, and the packed id of this job."""
    with server.client() as client:
        fields: dict[Any, Any] = client.hgetall(f"multiq:{{{QUEUE}}}:bodies")
    return {
        field[1 : 1 + field[0]]: job_id for field, job_id in fields.items() if field.endswith(b"\3") and len(field) > 16
    }


# --- jobs without a key ----------------------------------------------------------------------------------

KEYS_BEFORE = {
    "enqueue": 7, "enqueue_one": 5, "exchange": 13, "exchange_after": 15, "exchange_at_maxmemory": 15,
    "exchange_steps": 23, "carry_out": 17, "carry_out_removals": 17, "relay": 17, "delete": 14, "delete_many": 16,
    "purge": 7, "purge_held": 10,
    "kick": 8, "kick_job": 11, "reschedule": 11, "peek": 9, "jobs": 5, "stats": 7,
}  # fmt: skip


def test_scripts_for_jobs_without_a_key_take_as_many_keys_as_before() -> None:
    assert {verb: len(script(verb).keys) for verb in KEYS_BEFORE} == KEYS_BEFORE


def test_jobs_without_a_key_use_no_script_of_unique_jobs(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # When jobs without a key pass through all verbs
    backend.enqueue(QUEUE, [NewJob(b"x", "one")])
    backend.enqueue(QUEUE, [NewJob(b"x" * 5000, "two"), NewJob(b"x", "three", delay=LONG)])
    assert backend.carry_out([Enqueue(QUEUE, NewJob(b"x", "four", terms=Terms(1)))])
    first, second = consumer.reserve(2, 0)
    steps = (Enqueue(QUEUE, NewJob(b"x", "five")), Enqueue("other", NewJob(b"x", "six")))
    assert consumer.settle([Bury(first), Ack(second, After(steps=steps))]) == [None, None]
    backend.kick_job(QUEUE, first.id)
    assert backend.kick(QUEUE, 10) == 0
    backend.reschedule(QUEUE, first.id, 0)
    # Then the server has loaded none of the scripts for unique keys
    verbs = [
        f"{verb}_unique" for verb in ("enqueue", "carry_out", "exchange", "relay", "kick", "kick_job", "reschedule")
    ]
    assert server.ask("SCRIPT", "EXISTS", *(script(verb).sha for verb in verbs)) == [0] * len(verbs)


@pytest.mark.parametrize("size", [1, 5000])
def test_settling_a_job_without_a_key_calls_no_more_commands(
    server: RedisServer, backend: Backend, consumer: Consumer, size: int
) -> None:
    def calls(body: bytes, **options: Any) -> int:
        backend.enqueue(QUEUE, [NewJob(body, new_id(), **options), NewJob(b"stays", new_id(), delay=LONG)])
        lease = take(consumer)
        consumer.settle([])
        server.ask("CONFIG", "RESETSTAT")
        assert consumer.settle([Ack(lease)]) == [None]
        statistics = server.ask("INFO", "commandstats")
        return sum(int(one["calls"]) for name, one in statistics.items() if name.startswith("cmdstat_h"))

    # Given the commands about hashes for an ack: HMGET and HDEL of the record; for a body apart, two more HDEL
    plain = calls(b"x" * size)
    assert plain == (2 if size == 1 else 4)
    # Then a job with a key needs two commands more, for its entry
    assert calls(b"x" * size, terms=Terms(unique=UniqueKey(KEY))) == 6


# --- what is left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["gone", "buried", "reserved"])
@pytest.mark.parametrize("how", ["ack", "outcome", "delete", "delete_many", "purge", "purge held"])
def test_no_entry_is_left_of_a_job_that_is_gone(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str, until: str
) -> None:
    # Given a queue that does not become empty, and a job with a key in it
    backend.enqueue(QUEUE, [NewJob(b"stays", "stays", delay=LONG)])
    new = NewJob(b"x", new_id(), terms=Terms(int(how == "purge held"), UniqueKey(KEY, until=until)))  # type: ignore[arg-type]
    backend.enqueue(QUEUE, [new])
    assert entries(server) == {KEY: pack_id(new.id)}
    # When the job ends
    if how in {"ack", "outcome"}:
        after = After(keep=LONG, outcome=b"x") if how == "outcome" else None
        assert consumer.settle([Ack(take(consumer), after)]) == [None]
    elif how == "delete":
        backend.delete(QUEUE, new.id)
    elif how == "delete_many":
        assert backend.delete_many(QUEUE, [new.id]) == [None]
    else:
        assert backend.purge(QUEUE, [State.HELD if how == "purge held" else State.READY]) == 1
    # Then no entry is left
    assert entries(server) == {}


def test_empty_queue_keeps_no_key_unless_it_is_held_by_time(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    for number in range(3):
        add(backend, b"%d" % number, until="reserved")
    for lease in consumer.reserve(3, 0):
        assert consumer.settle([Release(lease)]) == [None]
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(3, 0)]) == [None] * 3
    assert left(server) == set()
    held = add(backend, hold=LONG)
    assert consumer.settle([Ack(take(consumer))]) == [None]
    assert left(server) == {"multiq:{q}:unique_holds", "multiq:{q}:hold_expiry"}
    assert backend.queues() == []
    assert add(backend) == held


def test_keys_that_were_held_by_time_do_not_accumulate(server: RedisServer, backend: Backend) -> None:
    # Given many keys that were held for a moment
    for number in range(10):
        add(backend, b"%d" % number, hold=0.001)
    time.sleep(0.05)
    before = server.ask("HLEN", "multiq:{q}:unique_holds")
    # When further jobs take keys, then each of them removes two of the old entries
    for number in range(5):
        add(backend, b"more %d" % number)
    assert before - server.ask("HLEN", "multiq:{q}:unique_holds") == min(10, before)
    assert server.ask("ZCARD", "multiq:{q}:hold_expiry") == server.ask("HLEN", "multiq:{q}:unique_holds")


def test_the_entry_of_a_later_job_survives_the_end_of_an_earlier_one(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given a running job that has lost its key to another one
    add(backend, until="reserved")
    lease = take(consumer)
    other = add(backend)
    # When the running job ends, then the other job still has the key
    assert consumer.settle([Ack(lease)]) == [None]
    assert entries(server) == {KEY: pack_id(other)}
    assert add(backend) == other


@pytest.mark.parametrize("size", [0, 1, 1024, 5000])
def test_key_and_body_of_any_size_are_stored_apart(backend: Backend, consumer: Consumer, size: int) -> None:
    for key in (b"\3", b"\3" * 15, b"\3" * 16, b"k" * 64, b"\1\3", b"job-id\x80"):
        job_id = add(backend, key, body=b"b" * size)
        assert backend.peek(QUEUE, job_id).unique_key == key
        assert add(backend, key) == job_id
        lease = take(consumer)
        assert (lease.id, lease.body) == (job_id, b"b" * size)


# --- calls -----------------------------------------------------------------------------------------------


def test_repetition_of_a_call_gets_the_same_ids(server: RedisServer, backend: Backend) -> None:
    from multiq_redis.records import details_of, record_of

    client = backend._pool.dedicated()  # type: ignore[attr-defined]
    new = job()
    words = (details_of(new), pack_id(new.id), record_of(new))
    number = client.next_number()
    assert client.call("enqueue_unique", QUEUE, words, number=number) == [pack_id(new.id)]
    # When the job is gone, and the enqueue arrives again, then the answer is the same, and no job is added
    backend.delete(QUEUE, new.id)
    other = add(backend)
    assert client.call("enqueue_unique", QUEUE, words, number=number) == [pack_id(new.id)]
    assert [record.id for record in backend.jobs(QUEUE, State.READY).jobs] == [other]
    client.close()


@pytest.mark.parametrize(
    "fault", [CutReply(at=0), CutReply(at=9), CutRequest(at=100)], ids=["reply", "half", "request"]
)
@pytest.mark.parametrize("on_conflict", ["keep", "replace"])
def test_lost_reply_is_not_taken_for_another_job(server: RedisServer, fault: Fault, on_conflict: str) -> None:
    with Proxy(("127.0.0.1", server.port)) as proxy, open_backend(f"redis://127.0.0.1:{proxy.port}") as backend:
        there = add(backend, b"there")
        # When the reply to an enqueue is lost
        jobs = [job(on_conflict=on_conflict), job(b"there", on_conflict=on_conflict)]
        proxy.arm(fault)
        # Then the driver repeats it, and the repetition finds its own job
        assert backend.enqueue(QUEUE, jobs) == [jobs[0].id, there]
        assert backend.stats(QUEUE).ready == 2


def test_full_server_refuses_jobs_with_keys_and_forgets_keys_of_acked_ones(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given a full server
    add(backend, b"old")
    lease = take(consumer)
    add(backend, b"buried", until="buried")
    assert consumer.settle([Bury(take(consumer))]) == [None]
    server.set("maxmemory", "1")
    # Then it accepts no job with a key, and replaces no job
    refused: list[dict[str, Any]] = [{}, {"key": b"buried", "on_conflict": "replace"}]
    for options in refused:
        with pytest.raises(BackendFull):
            add(backend, **options)
    # And it can kick, reschedule and ack
    assert backend.kick(QUEUE, 1) == 1
    buried = take(consumer)
    assert consumer.settle([Release(buried, LONG), Ack(lease)]) == [None, None]
    backend.reschedule(QUEUE, buried.id, 0)
    assert entries(server) == {b"buried": pack_id(buried.id)}


def test_unique_jobs_work_before_7(new_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "is_before_7", property(lambda _: True))
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        job_id = add(backend, until="buried")
        assert add(backend, on_conflict="replace") == job_id
        assert consumer.settle([Bury(take(consumer))]) == [None]
        other = add(backend, delay=LONG)
        with pytest.raises(UniqueTaken):
            backend.kick_job(QUEUE, job_id)
        assert backend.kick(QUEUE, 1) == 0
        server.set("maxmemory", "1")
        refused: list[dict[str, Any]] = [{"key": b"new"}, {"on_conflict": "replace"}]
        for options in refused:
            with pytest.raises(BackendFull):
                add(backend, **options)
        backend.delete(QUEUE, other)
        assert backend.kick(QUEUE, 1) == 1
        assert consumer.settle([Ack(take(consumer))]) == [None]
    assert left(server) == set()


@pytest.mark.parametrize("name", ["bodies", "buried", "held", "unique_holds", "hold_expiry"])
def test_key_of_another_type_fails_an_enqueue_before_it_changes_anything(
    server: RedisServer, backend: Backend, name: str
) -> None:
    server.ask("RPUSH", f"multiq:{{q}}:{name}", "x")
    with pytest.raises(BackendCorrupt):
        add(backend, hold=LONG)
    assert left(server) == {f"multiq:{{q}}:{name}"}


def test_malformed_key_in_a_record_is_no_key(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    # Given jobs whose records another program has cut
    ids = [add(backend, b"key %d" % number) for number in range(4)]
    for at, job_id in enumerate(ids):
        record = server.ask("HGET", "multiq:{q}:jobs", pack_id(job_id), raw=True)
        server.ask("HSET", "multiq:{q}:jobs", pack_id(job_id), record[: 53 + at])
    # Then the jobs are listed, and can be settled
    assert len(backend.jobs(QUEUE, State.READY).jobs) == 4
    leases = consumer.reserve(4, 0)
    assert consumer.settle([Ack(leases[0]), Bury(leases[1]), Release(leases[2]), GiveBack(leases[3])]) == [None] * 4
    assert backend.kick(QUEUE, 10) == 1
    assert len({add(backend, b"key %d" % number) for number in range(4)} - {*ids}) == 4


# --- partitions and clusters -----------------------------------------------------------------------------


def test_clients_with_other_numbers_of_partitions_meet_each_others_keys(server: RedisServer) -> None:
    # Given clients that enqueue over different numbers of partitions
    backends = [open_backend(f"{server.url}?partitions={count}") for count in (1, 3, 8)]
    # Then each key has one job
    for number in range(20):
        assert len({add(backend, b"%d" % number) for backend in backends}) == 1
    # And all jobs can be looked up, and are handed out
    wide = backends[-1]
    with wide.consumer([QUEUE]) as consumer:
        leases: list[Lease] = []
        while len(leases) < 20:
            found = consumer.reserve(20, 0)
            assert found
            leases += found
        assert all(wide.peek(QUEUE, lease.id).unique_key for lease in leases)
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 20
    for backend in backends:
        backend.close()


def test_batch_over_partitions_returns_the_ids_in_its_order(server: RedisServer) -> None:
    with open_backend(f"{server.url}?partitions=4") as backend:
        there = add(backend, b"there")
        jobs = [NewJob(b"x", job_id) for job_id in new_ids(2500)]
        for at in (5, 1700, 2400):
            jobs[at] = job(b"there")
        jobs[9] = job(b"own")
        expected = [there if at in {5, 1700, 2400} else one.id for at, one in enumerate(jobs)]
        assert backend.enqueue(QUEUE, jobs) == expected
        assert backend.stats(QUEUE).ready == 2498


def test_steps_for_another_node_of_a_cluster_meet_its_keys(redis_cluster: RedisCluster) -> None:
    # Given queues on all nodes of a cluster, each with a job that has a key
    queues = [f"queue {number}" for number in range(6)]
    with open_backend(redis_cluster.url) as backend, backend.consumer([QUEUE]) as consumer:
        there = {queue: backend.enqueue(queue, [job(body=b"there")])[0] for queue in queues}
        backend.enqueue(QUEUE, [NewJob(b"x", new_id())])
        # When the steps of a verdict enqueue jobs with this key, and with a new one, in all of these queues
        steps = [Enqueue(queue, job(key)) for queue in queues for key in (KEY, b"new", b"new")]
        assert consumer.settle([Ack(take(consumer), After(steps=tuple(steps)))]) == [None]
        assert backend.relay([QUEUE]) == 0
        # Then each queue has one job for each key
        for queue in queues:
            jobs = backend.jobs(queue, State.READY).jobs
            assert sorted(record.unique_key or b"" for record in jobs) == [KEY, b"new"]
            assert there[queue] in {record.id for record in jobs}


# --- workers of an older multiq --------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("details", [b"r0::", b"r0::+because", b"r9000000::", b"x", b"g", b"b", b"t"])
def test_old_worker_loses_neither_key_nor_body(
    server: RedisServer, backend: Backend, consumer: Consumer, details: bytes
) -> None:
    job_id = add(backend, body=b"body")
    old = OldWorker(server)
    for _ in range(5):
        old.settle(old.reserve(), details)
        assert add(backend) == job_id
        if details == b"t":
            break
        backend.kick_job(QUEUE, job_id)
    if details != b"t":
        assert take(consumer).body == b"body"
    assert backend.peek(QUEUE, job_id).unique_key == KEY


def test_key_of_a_job_that_an_old_worker_acked_is_free(server: RedisServer, backend: Backend) -> None:
    # Given a queue that is never empty, and a job that an old worker acks or an old client deletes
    backend.enqueue(QUEUE, [NewJob(b"stays", "stays", delay=LONG)])
    old = OldWorker(server)
    first = add(backend)
    old.settle(old.reserve(), b"a")
    second = add(backend)
    assert old.run("delete", pack_id(second)) == b"ok"
    # Then the key is free
    assert len({first, second, add(backend)}) == 3


def test_job_that_an_old_client_reschedules_has_its_key(server: RedisServer, backend: Backend) -> None:
    job_id = add(backend, until="reserved")
    assert OldWorker(server).run("reschedule", pack_id(job_id), 0) == b"ok"
    assert add(backend) == job_id


# --- races and kills -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_many_producers_add_one_job_for_each_key(server: RedisServer, count: int) -> None:
    # When producers enqueue jobs with some keys at the same time, alone and in batches
    producers = 64 if count > 60 else 8
    answers: dict[bytes, set[str]] = {b"%d" % number: set() for number in range(count)}

    def produce(seed: int) -> None:
        choices = random.Random(seed)
        keys = list(answers)
        choices.shuffle(keys)
        with open_backend(f"{server.url}?partitions={choices.choice([1, 3])}") as backend:
            while keys:
                size = choices.choice([1, 1, 20])
                some, keys = keys[:size], keys[size:]
                jobs = [job(key, on_conflict=choices.choice(["keep", "replace"])) for key in some]
                for key, job_id in zip(some, backend.enqueue(QUEUE, jobs), strict=True):
                    answers[key].add(job_id)

    with ThreadPoolExecutor(producers) as pool:
        list(pool.map(produce, range(producers)))
    # Then there is one job for each key, and all its producers have its id
    assert {len(ids) for ids in answers.values()} == {1}
    with open_backend(server.url) as backend:
        assert backend.stats(QUEUE).ready == count
    assert len(entries(server)) == count


_LOOP = """
import sys
from multiq.backend import Ack, Bury, NewJob, Release, Terms, UniqueKey
from multiq.backend.registry import open_backend
from multiq.ids import new_id

with open_backend(sys.argv[1]) as backend, backend.consumer(["q"]) as consumer:
    backend.stats("q")
    print("begun", flush=True)
    while True:
        for number in range(5):
            backend.enqueue("q", [NewJob(b"x", new_id(), ttr=0.2, terms=Terms(unique=UniqueKey(b"%d" % number)))])
        leases = consumer.reserve(3, 0)
        consumer.settle([(Ack, Ack, Bury, Release)[lease.attempt % 4](lease) for lease in leases])
        backend.kick("q", 1)
"""


@pytest.mark.parametrize(
    "kills", [3, pytest.param(15, marks=pytest.mark.long), pytest.param(60, marks=pytest.mark.exhaustive)]
)
@pytest.mark.long
def test_a_killed_process_leaves_no_key_without_its_job(server: RedisServer, backend: Backend, kills: int) -> None:
    for number in range(kills):
        # Given processes that enqueue and settle jobs with keys, and are killed at some moment
        processes = [
            subprocess.Popen([sys.executable, "-c", _LOOP, server.url], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
        time.sleep(0.02 + number % 7 * 0.011)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()
        # Then each key has its job, and each job has its key
        until(lambda: _is_whole(server, backend), "each key has its job, and each job has its key")
        found = entries(server)
        # And an enqueue with a free key adds a job at once
        for key in (b"%d" % at for at in range(5)):
            new = job(key)
            assert backend.enqueue(QUEUE, [new]) == [new.id] or key in found


def _is_whole(server: RedisServer, backend: Backend) -> bool:
    """Whether the keys are those of the jobs. False if a lease ends while the states are listed one after the other."""
    found = {
        record.unique_key: pack_id(record.id)
        for state in (State.READY, State.DELAYED, State.RESERVED, State.BURIED)
        for record in backend.jobs(QUEUE, state).jobs
    }
    stats = backend.stats(QUEUE)
    count = sum(filter(None, (stats.ready, stats.delayed, stats.reserved, stats.buried)))
    return len(found) == count <= 5 and entries(server) == found
