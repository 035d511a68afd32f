"""Jobs with limits on Redis: drift under random calls and kills, old workers, and what jobs without limits cost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from redis_old_worker import OldWorker
from servers.process import until

from multiq.backend import Ack, Arrive, Bury, Gate, NewJob, Quota, Release, State, Terms, Touch, UniqueKey
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, BackendFull, MultiqError
from multiq.ids import new_id
from multiq_redis.connection import Connection
from multiq_redis.pool import Pool
from multiq_redis.records import pack_gate, pack_id, unpack_gate, unpack_id
from multiq_redis.scripts import script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisCluster, RedisServer

    from multiq.backend import Backend, Consumer, Lease

FOLDERS = [str(Path(__file__).parent), *sys.path]
QUEUE = "q"
API = Gate("api")
LONG = 3600.0
STATES = (State.READY, State.DELAYED, State.RESERVED, State.BURIED, State.HELD)


@pytest.fixture
def consumer(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer


def job(*gates: Gate, body: bytes = b"x", unique: UniqueKey | None = None, awaits: int = 0, **options: Any) -> NewJob:
    return NewJob(body, new_id(), terms=Terms(awaits, unique, gates or (API,)), **options)


def add(backend: Backend, count: int = 1, *gates: Gate, **options: Any) -> list[str]:
    return backend.enqueue(QUEUE, [job(*gates, **options) for _ in range(count)])


def key(name: str) -> str:
    return f"multiq:{{{QUEUE}}}:{name}"


def left(server: RedisServer) -> set[str]:
    """The keys that never expire."""
    with server.client() as client:
        return {name.decode().rpartition(":")[2] for name in client.scan_iter("multiq:*") if client.ttl(name) == -1}


def gates_in(member: bytes) -> tuple[Gate, bytes]:
    """The gate at the beginning of a member, and the rest."""
    size = 0
    for _ in range(2):
        size += 2 + int.from_bytes(member[size : size + 2], "big")
    return unpack_gate(member[:size]), member[size:]


def unpack_ids(packed: bytes) -> list[bytes]:
    """The ids of a group of leases. They are not UTF-8, so msgspec does not decode them."""
    words = [bytes(word) for word in msgspec.msgpack.decode(packed, type=list[msgspec.Raw])]
    return [word[1:] if word[0] < 0xC0 else word[2:] for word in words]  # a short text, or one with a byte for its size


def leases_in(server: RedisServer, *, live: bool = False) -> set[tuple[Gate, str]]:
    """The leases that the limits count. With *live*: those that have not ended."""
    with server.client() as client:
        pipeline = client.pipeline(transaction=True)
        for name in ("slot_counts", "slot_ids", "jobs"):
            pipeline.hgetall(key(name))
        pipeline.zrange(key("slot_ends"), 0, -1)
        pipeline.zrange(key("reserved"), 0, -1, withscores=True)
        pipeline.time()
        counts, packed, jobs, entries, reserved, (seconds, fraction) = pipeline.execute()
    now = seconds * 1_000_000 + fraction if live else 0
    lives = {place[12:]: at > now for place, at in reserved}
    found, numbers = set(), Counter[bytes]()
    for entry in entries:
        gate, rest = gates_in(entry)
        ids, number = [rest], 1
        if len(rest) == 12:
            ids, number = unpack_ids(packed.pop(entry)), int(counts[entry])
            ids = [one for one in ids if one in jobs and jobs[one][41:53] == rest]
            assert len(ids) <= number  # some leases have ended, and no reserve has divided the group
            numbers[entry] = number
        numbers[pack_gate(gate)] += number
        found |= {(gate, unpack_id(one)) for one in ids if not live or lives.get(one)}
    assert {name: int(number) for name, number in counts.items()} == numbers
    assert not packed
    return found


def check(server: RedisServer, backend: Backend, gates: dict[str, tuple[Gate, ...]]) -> None:
    """Check that the limits count the reserved jobs and no others, and that each parked job is in one line."""
    reserved = {record.id for record in backend.jobs(QUEUE, State.RESERVED, limit=10_000).jobs}
    expected = {(gate, job_id) for job_id in reserved for gate in gates[job_id]}
    assert leases_in(server, live=True) <= expected <= leases_in(server)  # some leases end in between
    with server.client() as client:
        members: Any = client.zrange(key("lines"), 0, -1)
        fields: Any = client.hgetall(key("parked"))
    lines = [gates_in(member) for member in members]
    parked = {unpack_id(job_id): unpack_gate(gate) for job_id, gate in fields.items()}
    assert {unpack_id(rest[12:]): gate for gate, rest in lines} == parked
    assert len(lines) == len(parked)
    counted, ready = -1, [""]
    for _ in range(20):  # a lease or a delay may end in between
        counted = backend.stats(QUEUE).ready or 0
        ready = [record.id for record in backend.jobs(QUEUE, State.READY, limit=10_000).jobs]
        if counted == len(ready):
            break
    assert counted == len(ready) == len(set(ready))
    assert parked.keys() <= set(ready)


# --- jobs without gates ----------------------------------------------------------------------------------


def test_jobs_without_gates_use_no_script_of_limits(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "one"), NewJob(b"x" * 5000, "two"), NewJob(b"x", "three")])
    backend.enqueue(QUEUE, [NewJob(b"x", "four", terms=Terms(unique=UniqueKey(b"key")))])
    one, two, three, four = consumer.reserve(10, 0)
    assert consumer.settle([Ack(one), Bury(two), Release(three), Touch(four)]) == [None] * 4
    backend.reschedule(QUEUE, "two", 0)
    backend.delete(QUEUE, "two")
    assert backend.purge(QUEUE, [State.READY]) == 1
    verbs = ["exchange_gated", "delete_gated", "delete_many_gated", "purge_parked", "parked_count", "held_by", "limits"]
    assert server.ask("SCRIPT", "EXISTS", *(script(verb).sha for verb in verbs)) == [0] * len(verbs)


def test_consumer_uses_the_plain_script_again_after_the_last_job_with_gates(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_redis.consumer._GATED_FOR", 0.05)
    # Given a consumer that has handed out a job with a gate
    add(backend)
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
    time.sleep(0.06)
    server.ask("SCRIPT", "FLUSH")
    # When it hands out another job, then it uses the plain script for this
    backend.enqueue(QUEUE, [NewJob(b"x", "one")])
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 0)]) == [None]
    assert server.ask("SCRIPT", "EXISTS", script("exchange").sha, script("exchange_gated").sha) == [1, 0]


def test_consumer_uses_the_plain_script_while_all_jobs_with_gates_are_parked(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_redis.consumer._GATED_FOR", 0.05)
    # Given jobs behind a closed gate
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    ids = add(backend, 2)
    assert consumer.reserve(10, 0) == []
    time.sleep(0.06)
    server.ask("SCRIPT", "FLUSH")
    # When the consumer hands out a job without gates, then it uses the plain script for this
    backend.enqueue(QUEUE, [NewJob(b"x", "one")])
    assert consumer.settle([Ack(lease) for lease in consumer.reserve(10, 0)]) == [None]
    assert server.ask("SCRIPT", "EXISTS", script("exchange").sha, script("exchange_gated").sha) == [1, 0]
    # And it hands out the parked jobs when the gate opens
    backend.limits(QUEUE, {"api": None})
    assert sorted(lease.id for lease in consumer.reserve(10, 5)) == sorted(ids)


def test_consumer_restores_the_marker_of_parked_jobs_that_an_older_worker_has_removed(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_redis.consumer._GATED_FOR", 0.05)
    monkeypatch.setattr("multiq_redis.consumer._RESTORE_EVERY", 0.05)
    # Given parked jobs without their marker
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 2)
    assert consumer.reserve(10, 0) == []
    assert server.ask("DEL", key("delayed"), key("ready")) == 1
    time.sleep(0.06)
    # When the consumer reserves a job without gates, then the marker is there again
    backend.enqueue(QUEUE, [NewJob(b"x", "one")])
    assert [lease.id for lease in consumer.reserve(10, 0)] == ["one"]
    assert server.ask("ZCARD", key("delayed")) == 1


def test_consumer_that_knows_of_no_gates_finds_parked_jobs(server: RedisServer, backend: Backend) -> None:
    # Given jobs that one consumer has parked
    backend.limits(QUEUE, {"api": Quota(rate=1, per=0.3)})
    add(backend, 3)
    with backend.consumer([QUEUE]) as first:
        assert len(first.reserve(10, 0)) == 1
    # When only new consumers are left, then they get the jobs in time
    for _ in range(2):
        with open_backend(server.url) as other, other.consumer([QUEUE]) as consumer:
            assert len(consumer.reserve(10, 30)) == 1


# --- what is left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "delete_many", "purge"])
def test_queue_that_a_manager_empties_leaves_only_its_limits(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str
) -> None:
    # Given parked jobs, open lines, and a lease that has ended
    backend.limits(QUEUE, {"api": Quota(slots=1), "fair": Quota(fair=True)})
    ids = add(backend, 4, API, Gate("fair", "1"), ttr=0.5)
    assert len(consumer.reserve(10, 0)) == 1
    assert consumer.reserve(10, 0) == []
    until(lambda: backend.stats(QUEUE).reserved == 0, "the lease has ended")
    # When all jobs are deleted, and no consumer is there
    if how == "delete":
        for job_id in ids:
            backend.delete(QUEUE, job_id)
    elif how == "delete_many":
        assert backend.delete_many(QUEUE, ids) == [None] * 4
    else:
        assert backend.purge(QUEUE, [State.READY]) == 4
    # Then no key of the jobs is left
    assert left(server) == {"limits"}


@pytest.mark.parametrize("how", ["delete", "delete_many", "purge"])
@pytest.mark.parametrize("state", [State.READY, State.DELAYED])
def test_last_job_of_a_queue_leaves_no_slot_of_a_lease_that_has_ended(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str, state: State
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    (job_id,) = add(backend, ttr=0.05)
    assert len(consumer.reserve(1, 0)) == 1
    until(lambda: backend.stats(QUEUE).reserved == 0, "the lease has ended")
    if state is State.DELAYED:
        backend.reschedule(QUEUE, job_id, LONG)
    remove(backend, job_id, state, how)
    assert left(server) == {"limits"}


def remove(backend: Backend, job_id: str, state: State, how: str) -> None:
    if how == "delete":
        backend.delete(QUEUE, job_id)
    elif how == "delete_many":
        assert backend.delete_many(QUEUE, [job_id]) == [None]
    else:
        assert backend.purge(QUEUE, [state]) == 1


@pytest.mark.parametrize("how", ["delete", "delete_many", "purge"])
def test_job_without_gates_that_is_acked_last_leaves_no_slot_of_a_lease_that_has_ended(
    server: RedisServer, backend: Backend, how: str
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    (job_id,) = add(backend, ttr=0.05)
    with open_backend(server.url) as other, other.consumer([QUEUE]) as plain:
        backend.enqueue(QUEUE, [NewJob(b"x", new_id(), priority=0)])
        (lease,) = plain.reserve(1, 0)
        with backend.consumer([QUEUE]) as consumer:
            assert len(consumer.reserve(1, 0)) == 1
        until(lambda: backend.stats(QUEUE).ready == 1, "the lease has ended")
        remove(backend, job_id, State.READY, how)
        assert plain.settle([Ack(lease)]) == [None]
    assert left(server) == {"limits"}


def test_purge_deletes_the_jobs_that_a_reserve_parks_meanwhile(
    backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 10)
    assert len(consumer.reserve(1, 0)) == 1
    before(monkeypatch, "purge", lambda: consumer.reserve(1, 0))
    assert backend.purge(QUEUE, [State.READY]) == 9
    assert backend.stats(QUEUE).ready == 0


def test_job_that_is_handed_out_during_stats_is_counted_once(
    backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend)
    assert consumer.reserve(1, 0) == []
    backend.limits(QUEUE, {"api": None})
    for verb in ("parked_count", "stats_gated"):
        before(monkeypatch, verb, lambda: consumer.reserve(1, 0))
    stats = backend.stats(QUEUE)
    assert (stats.ready or 0) + (stats.reserved or 0) == 1


def test_page_has_a_job_once_that_is_parked_while_the_page_is_read(
    backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    ids = add(backend, 3)
    before(monkeypatch, "jobs_parked", lambda: consumer.reserve(1, 0))
    assert [record.id for record in backend.jobs(QUEUE, State.READY).jobs] == ids
    assert len(backend.jobs(QUEUE, State.READY).jobs) == 3


def before(monkeypatch: pytest.MonkeyPatch, verb: str, action: Callable[[], object]) -> None:
    """Carry out an action once, before the first script *verb*."""
    call, actions = Pool.call, [action]

    def act_and_call(pool: Pool, name: str, *args: Any, **options: Any) -> Any:
        if name == verb and actions:
            actions.pop()()
        return call(pool, name, *args, **options)

    monkeypatch.setattr(Pool, "call", act_and_call)


def test_parked_job_is_held_by_no_lease_that_has_ended(backend: Backend, consumer: Consumer) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    first, second = add(backend, 2, ttr=0.3)
    assert len(consumer.reserve(2, 0)) == 1
    assert consumer.reserve(2, 0) == []
    assert backend.peek(QUEUE, second).held_by == "limit api"
    until(lambda: backend.stats(QUEUE).reserved == 0, "the lease has ended")
    assert backend.peek(QUEUE, second).held_by is None
    listed = {record.id: record.held_by for record in backend.jobs(QUEUE, State.READY).jobs}
    assert listed == {first: None, second: None}


@pytest.mark.parametrize("how", ["ack", "delete", "delete_many", "purge", "replace"])
def test_empty_queue_leaves_only_its_limits(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1), "fair": Quota(fair=True)})
    ids = add(backend, 4, API, Gate("fair", "1"))
    (lease,) = consumer.reserve(10, 0)
    assert len(leases_in(server)) == 2
    if how == "delete":
        for job_id in ids[1:]:
            backend.delete(QUEUE, job_id)
    elif how == "delete_many":
        assert backend.delete_many(QUEUE, [*ids, "none"])[1:4] == [None] * 3
    elif how == "purge":
        assert backend.purge(QUEUE, [State.READY, State.DELAYED]) == 3
    assert consumer.settle([Ack(lease)]) == [None]
    while leases := consumer.reserve(10, 0):
        assert consumer.settle([Ack(lease) for lease in leases]) == [None]
    assert left(server) == {"limits"}
    assert backend.queues() == []
    assert backend.limits(QUEUE, {"api": None, "fair": None}) == []
    assert left(server) == set()


@pytest.mark.parametrize("how", ["purge", "delete", "delete_many", "reschedule", "replace"])
def test_parked_jobs_that_a_program_removes_leave_no_line_beside_a_job_that_runs(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str
) -> None:
    # Given a job that runs, and parked jobs of many keys: open lines, and lines that wait for another gate
    backend.limits(QUEUE, {"api": Quota(slots=1), "fair": Quota(fair=True)})
    add(backend, 1, Gate("other"))
    assert len(consumer.reserve(1, 0)) == 1
    ids: list[str] = []
    for number in range(30):
        ids += add(backend, 1, API, Gate("fair", str(number)), unique=UniqueKey(b"%d" % len(ids)))
        ids += add(backend, 1, Gate("fair", f"open {number}"), unique=UniqueKey(b"%d" % len(ids)))
    reserved = {lease.id for lease in consumer.reserve(3, 0)}
    assert len(reserved) == 3
    lines = {"line_states", "open_lines", "fair_lines", "blocked", "openings"}
    assert lines & left(server)
    # When the parked jobs are purged, deleted or delayed
    if how == "purge":
        backend.purge(QUEUE, [State.READY])
    elif how == "delete_many":
        backend.delete_many(QUEUE, ids)
    for number, job_id in enumerate(ids):
        if how == "delete" and job_id not in reserved:
            backend.delete(QUEUE, job_id)
        elif how == "reschedule" and job_id not in reserved:
            backend.reschedule(QUEUE, job_id, LONG)
        elif how == "replace":
            backend.enqueue(QUEUE, [job(unique=UniqueKey(b"%d" % number, on_conflict="replace"), delay=LONG)])
    # Then nothing is left of their lines
    assert not lines & left(server)
    # And a job that comes later is handed out
    add(backend, 1, Gate("fair", "1"))
    assert len(consumer.reserve(1, 0)) == 1


@pytest.mark.parametrize("how", ["purge", "plain script"])
def test_queue_that_other_scripts_empty_has_no_turns_of_keys(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str
) -> None:
    # Given keys that took turns, and a job without gates
    backend.limits(QUEUE, {"fair": Quota(fair=True)})
    for number in range(2):
        add(backend, 2, Gate("fair", str(number)))
    leases = consumer.reserve(10, 0)
    backend.enqueue(QUEUE, [NewJob(b"x", new_id())])
    assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 4
    # When a script that knows no gates removes this job
    if how == "purge":
        assert backend.purge(QUEUE, [State.READY]) == 1
    else:
        with open_backend(server.url) as other, other.consumer([QUEUE]) as plain:
            assert plain.settle([Ack(lease) for lease in plain.reserve(1, 0)]) == [None]
    assert left(server) == {"limits"}


def test_times_of_rates_do_not_accumulate(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    backend.limits(QUEUE, {"api": Quota(rate=1000)})
    for number in range(30):
        add(backend, 1, Gate("api", str(number)))
        time.sleep(0.002)
        assert consumer.settle([Ack(lease) for lease in consumer.reserve(1, 1)]) == [None]
    assert server.ask("ZCARD", key("rates")) <= 3


# --- lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "delete_many", "reschedule", "replace"])
def test_next_job_of_a_line_does_not_wait_for_a_gate_of_a_job_that_left_it(
    server: RedisServer, backend: Backend, consumer: Consumer, how: str
) -> None:
    # Given two jobs of a fair limit, of which the first one waits for another gate
    backend.limits(QUEUE, {"fair": Quota(fair=True), "api": Quota(slots=0)})
    first = job(API, Gate("fair"), unique=UniqueKey(b"key"))
    backend.enqueue(QUEUE, [first])
    (second,) = add(backend, 1, Gate("fair"))
    assert consumer.reserve(10, 0) == []
    # When the first one leaves the line, then a waiting consumer gets the second one
    waiting: list[Lease] = []
    with open_backend(server.url) as other, other.consumer([QUEUE]) as idle:
        thread = threading.Thread(target=lambda: waiting.extend(idle.reserve(10, 30)))
        thread.start()
        if how == "delete":
            backend.delete(QUEUE, first.id)
        elif how == "delete_many":
            assert backend.delete_many(QUEUE, [first.id]) == [None]
        elif how == "reschedule":
            backend.reschedule(QUEUE, first.id, LONG)
        else:
            replacing = UniqueKey(b"key", on_conflict="replace")
            assert backend.enqueue(QUEUE, [job(API, unique=replacing)]) == [first.id]
        thread.join()
    assert [lease.id for lease in waiting] == [second]


@pytest.mark.parametrize("call", ["settle", "exchange in a paused queue"])
@pytest.mark.parametrize("first", ["are deleted", "wait for another gate"])
def test_keys_that_wait_for_an_open_gate_do_not_wait_for_keys_before_them(
    backend: Backend, consumer: Consumer, first: str, call: str
) -> None:
    # Given many keys of a fair limit whose first jobs wait for a gate that they share
    backend.limits(QUEUE, {"fair": Quota(fair=True), "api": Quota(slots=1), "closed": Quota(slots=0)})
    add(backend, 1, API, Gate("fair"))
    (lease,) = consumer.reserve(10, 0)
    others = () if first == "are deleted" else (Gate("closed"),)
    ids = [add(backend, 1, API, Gate("fair", str(number)), *others)[0] for number in range(30)]
    (last,) = add(backend, 1, API, Gate("fair", "last"))
    assert consumer.reserve(10, 0) == []
    # When the gate opens in a call that hands out no jobs, and the first of these jobs cannot be handed out
    if call == "settle":
        assert consumer.settle([Ack(lease)]) == [None]
    else:
        backend.pause(QUEUE, LONG)
        assert consumer.exchange([Ack(lease)], 1, 0) == ([None], [])
        backend.resume(QUEUE)
    if first == "are deleted":
        assert backend.delete_many(QUEUE, ids) == [None] * len(ids)
    # Then another one of them is handed out
    assert [lease.id for lease in consumer.reserve(10, 5)] == [last]


@pytest.mark.parametrize("limit", [20, 60])
def test_keys_that_wait_for_a_rate_do_not_wait_for_a_verdict(backend: Backend, consumer: Consumer, limit: int) -> None:
    """A script looks at 20 of the keys that wait for a gate. If these use up the rate, its next time counts."""
    backend.limits(QUEUE, {"fair": Quota(fair=True), "rate": Quota(rate=500, burst=20)})
    for number in range(60):
        add(backend, 1, Gate("fair", str(number)), Gate("rate"))
    count = len(consumer.reserve(60, 0))
    time.sleep(0.05)
    while count < 60:
        found = consumer.reserve(limit, 2.0)
        assert found, f"{count} of 60"
        count += len(found)


def test_open_lines_share_the_slots_once_their_limit_is_fair(backend: Backend, consumer: Consumer) -> None:
    # Given open lines of a limit that is not fair
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    for name in ("a", "b"):
        add(backend, 3, Gate("api", name), body=name.encode())
    assert consumer.reserve(10, 0) == []
    backend.limits(QUEUE, {"api": Quota(slots=10)})
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"a"]
    # When the limit becomes fair, then the lines without a lease are next, also one that begins later
    backend.limits(QUEUE, {"api": Quota(slots=10, fair=True)})
    add(backend, 3, Gate("api", "c"), body=b"c")
    bodies = [lease.body for lease in consumer.reserve(10, 0)]
    assert sorted(bodies[:2]) == [b"b", b"c"]
    assert len(bodies) == 8


@pytest.mark.one_row
@pytest.mark.parametrize("shared", [False, True])
def test_changed_limit_of_many_keys_is_looked_at_by_many_scripts(
    server: RedisServer, backend: Backend, consumer: Consumer, shared: bool
) -> None:
    # Given a parked job of each of many keys
    count, others = 700, (Gate("fair", "all"),) if shared else ()
    closed = {"api": Quota(fair=shared, slots=None if shared else 0), "fair": Quota(slots=0)}
    backend.limits(QUEUE, closed)
    backend.enqueue(QUEUE, [job(Gate("api", str(number)), *others) for number in range(count)])
    assert consumer.reserve(count, 0) == []
    name = "fair" if shared else "api"
    assert server.ask("ZCARD", key("blocked" if shared else "lines")) == count
    # When the limit changes, then the call changes no line
    before = _writes(server)
    backend.limits(QUEUE, {name: Quota(slots=count)})
    assert _writes(server) - before < 10
    # And each reserve looks at some of the lines, until all jobs are handed out
    leases: list[Lease] = []
    while len(leases) < count:
        before = _writes(server)
        leases += consumer.reserve(20, 5)
        assert _writes(server) - before < 4_000
    assert len({lease.id for lease in leases}) == count


def _writes(server: RedisServer) -> int:
    """How many times sets and hashes have been changed, also by scripts."""
    stats = server.ask("INFO", "commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("zadd", "zrem", "hset", "hdel"))


def test_rates_of_many_keys_become_faster(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    # Given more keys than one script looks at, which a slow rate has closed
    count = 700
    backend.limits(QUEUE, {"api": Quota(rate=1, per=LONG)})
    for expected in (count, 0):
        backend.enqueue(QUEUE, [job(Gate("api", str(number))) for number in range(count)])
        assert len(consumer.reserve(count, 0)) == expected
    # When the rate becomes faster, then no key waits for the old rate
    backend.limits(QUEUE, {"api": Quota(rate=1, per=0.01)})
    leases: list[Lease] = []
    while len(leases) < count:
        found = consumer.reserve(count, 30)
        assert found
        leases += found


def test_jobs_keep_their_order_behind_many_that_are_parked(backend: Backend, consumer: Consumer) -> None:
    # Given a job in an open line, and more urgent ones behind more jobs than one script parks
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 1, body=b"late", priority=9)
    assert consumer.reserve(10, 0) == []
    backend.limits(QUEUE, {"api": None, "closed": Quota(slots=0)})
    add(backend, 700, Gate("closed"), priority=1)
    backend.enqueue(QUEUE, [NewJob(b"urgent", new_id(), priority=2)])
    # Then the urgent job goes first
    assert [lease.body for lease in consumer.reserve(1, 5)] == [b"urgent"]
    assert [lease.body for lease in consumer.reserve(1, 5)] == [b"late"]


def test_a_reserve_that_has_jobs_does_not_go_on_parking(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given some jobs without gates before many jobs behind a closed gate
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    first = backend.enqueue(QUEUE, [NewJob(b"x", new_id(), priority=0) for _ in range(5)])
    add(backend, 3000)
    # When they are reserved, then the call does not hold their leases while it parks all others
    assert [lease.id for lease in consumer.reserve(100, 0)] == first
    with server.client() as client:
        assert 0 < client.hlen(key("parked")) < 3000
    assert consumer.reserve(100, 0) == []


def test_listing_in_pages_has_all_ready_and_delayed_jobs_beside_parked_ones(
    backend: Backend, consumer: Consumer
) -> None:
    # Given parked jobs, and a place in the ready or in the delayed set that is no job
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    gated = add(backend, 5, ttr=LONG)
    (lease,) = consumer.reserve(10, 0)
    delayed = backend.enqueue(QUEUE, [NewJob(b"x", new_id(), delay=2 * LONG) for _ in range(5)])
    ready = backend.enqueue(QUEUE, [NewJob(b"x", new_id()) for _ in range(5)])

    def listed(state: State) -> list[str]:
        page = backend.jobs(QUEUE, state, limit=2)
        found = [record.id for record in page.jobs]
        while page.after is not None:
            page = backend.jobs(QUEUE, state, limit=2, after=page.after)
            found += [record.id for record in page.jobs]
        return found

    for _ in range(2):
        # Then listings and counts have all jobs and nothing else
        assert sorted(listed(State.READY)) == sorted([*ready, *gated[1:]])
        assert listed(State.DELAYED) == delayed
        stats = backend.stats(QUEUE)
        assert (stats.ready, stats.delayed) == (9, 5)
        # Also if the gate is open
        consumer.settle([Ack(lease)])
    assert backend.purge(QUEUE, [State.DELAYED]) == 5
    assert backend.purge(QUEUE, [State.READY]) == 9


def test_reserve_that_ends_before_it_has_parked_all_jobs_does_not_see_all(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_backend(f"{server.url}?timeout=2") as backend, backend.consumer([QUEUE]) as consumer:
        # Given more jobs behind a closed gate than one script parks, and a server that takes all of a call's time
        backend.limits(QUEUE, {"api": Quota(slots=0)})
        add(backend, 300)
        (behind,) = backend.enqueue(QUEUE, [NewJob(b"x", "behind")])
        perform = consumer._perform  # type: ignore[attr-defined]

        def perform_slowly(*args: Any) -> Any:
            result = perform(*args)
            time.sleep(2)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(consumer, "_perform", perform_slowly)
            # Then the call that has not looked at all jobs says so
            assert (consumer.reserve(1, 0), consumer.sees_all) == ([], False)
        # And the next call goes on at once
        (lease,) = consumer.reserve(1, 0)
        assert lease.id == behind
        assert consumer.settle([Ack(lease)]) == [None]
        assert (consumer.reserve(1, 0), consumer.sees_all) == ([], True)


# --- servers ---------------------------------------------------------------------------------------------


def test_full_server_hands_out_and_parks(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 3)
    server.set("maxmemory", "1")
    with pytest.raises(BackendFull):
        add(backend)
    for _ in range(3):
        (lease,) = consumer.reserve(10, 0)
        assert consumer.settle([Ack(lease)]) == [None]


def test_limits_work_before_7(new_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "is_before_7", property(lambda _: True))
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.limits(QUEUE, {"api": Quota(slots=1)})
        ids = add(backend, 3)
        (lease,) = consumer.reserve(10, 0)
        assert backend.peek(QUEUE, ids[1]).held_by == "limit api"
        server.set("maxmemory", "1")
        assert consumer.settle([Ack(lease)]) == [None]
        assert len(consumer.reserve(10, 0)) == 1
        backend.delete(QUEUE, ids[2])


@pytest.mark.parametrize("number", [None, b"", b"abc", b"-5", b"0", b"inf", b"1e300", b"nan"])
def test_number_that_another_program_changed_is_counted_again(
    server: RedisServer, backend: Backend, consumer: Consumer, number: bytes | None
) -> None:
    # Given running jobs of a limit, whose stored number is no longer right
    backend.limits(QUEUE, {"api": Quota(slots=3)})
    add(backend, 6)
    leases = consumer.reserve(3, 0)
    if number is None:
        server.ask("HDEL", key("slot_counts"), pack_gate(API))
    else:
        server.ask("HSET", key("slot_counts"), pack_gate(API), number)
    # When one of them is settled, then the number is that of the other jobs, and one further job can start
    assert consumer.settle([Ack(leases[0])]) == [None]
    assert len(leases_in(server)) == 2
    assert len(consumer.reserve(3, 0)) == 1
    assert len(leases_in(server)) == 3


def test_many_jobs_whose_leases_have_ended_are_counted_once(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    # Given a job that waits at a closed gate, and more leases of a dead consumer than one script frees, all ended
    backend.limits(QUEUE, {"tenant": Quota(slots=3), "closed": Quota(slots=0)})
    gates = [Gate("tenant", str(key)) for key in range(220)]
    backend.enqueue(QUEUE, [job(gate, ttr=2) for gate in gates])
    dead = backend.consumer([QUEUE])  # when a consumer is closed, it gives its jobs back
    while dead.reserve(50, 0):
        pass
    add(backend, 1, Gate("closed"))
    assert consumer.reserve(1, 0) == []
    backend.enqueue(QUEUE, [job(gate, ttr=60) for _ in range(2) for gate in gates])
    time.sleep(2)
    # When another consumer takes all jobs that can start, then these are all jobs, and each is counted once
    taken = [lease for _ in range(20) for lease in consumer.reserve(500, 0)]
    assert len(taken) == 3 * len(gates)
    assert len(leases_in(server)) == 3 * len(gates)
    states = {state.name: state for state in backend.limits(QUEUE)}
    assert states["tenant"].running == 3 * len(gates)
    dead.close()


@pytest.mark.parametrize("details", [b"r0::", b"g"])
def test_lease_that_an_older_worker_ended_uses_its_slot_until_its_time_is_over(
    server: RedisServer, backend: Backend, consumer: Consumer, details: bytes
) -> None:
    # Given two jobs that an older worker has returned, which knows no limits, and further jobs of their limit
    backend.limits(QUEUE, {"api": Quota(slots=4)})
    add(backend, 2, ttr=1)
    old = OldWorker(server)
    for lease in (*consumer.reserve(1, 0), *consumer.reserve(1, 0)):
        old.settle((pack_id(lease.id), bytes.fromhex(lease.token[:24])), details)
    add(backend, 6)
    # When a new worker takes both in one call, and touches them until their first leases would have ended
    leases = consumer.reserve(2, 0)
    assert len(leases) == 2
    for _ in range(3):
        time.sleep(0.4)
        assert consumer.settle([Touch(lease) for lease in leases]) == [None, None]
    # Then each of them uses one slot
    assert len(consumer.reserve(4, 0)) == 2
    assert len(leases_in(server)) == 4
    assert consumer.settle([Ack(lease) for lease in leases]) == [None, None]
    assert len(consumer.reserve(4, 0)) == 2


def test_a_call_settles_many_jobs_with_many_gates(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    # Given 500 pairs of jobs, each reserved by a call of its own, with four gates that no other pair has
    names = ("a", "b", "c", "d")
    backend.limits(QUEUE, {name: Quota(slots=2) for name in names})
    for key in range(500):
        add(backend, 2, *(Gate(name, str(key)) for name in names))
    leases = [consumer.reserve(2, 0) for _ in range(500)]
    # When one call settles a job of each pair, then the other jobs are counted
    assert consumer.settle([Ack(first) for first, _ in leases]) == [None] * 500
    assert [state.running for state in backend.limits(QUEUE)] == [500] * 4
    assert len(leases_in(server)) == 2_000


@pytest.mark.parametrize("counts", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_leases_of_a_call_that_was_repeated_too_late_are_counted(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]
) -> None:
    # Given a call that is repeated after the server has forgotten it, so that the leases of both have the same token
    client = consumer._client  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "token", lambda _number: b"t" * 12)
    backend.limits(QUEUE, {"api": Quota(slots=sum(counts))})
    add(backend, 8, ttr=0.3)
    leases = [lease for count in counts for lease in consumer.reserve(count, 0)]
    # Then all of them are counted, and all slots are free at the latest when the leases would have ended
    assert len(leases_in(server)) == len(leases) == sum(counts)
    assert consumer.reserve(1, 0) == []
    assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
    time.sleep(0.3)
    assert len(consumer.reserve(8, 0)) == sum(counts)
    assert int(server.ask("HGET", key("slot_counts"), pack_gate(API))) == sum(counts)


@pytest.mark.parametrize(
    "name", ["slot_counts", "slot_ends", "slot_ids", "lines", "parked", "limits", "line_states", "openings"]
)
def test_key_of_another_type_fails_a_reserve_before_it_changes_anything(
    server: RedisServer, backend: Backend, consumer: Consumer, name: str
) -> None:
    add(backend)
    server.ask("RPUSH", key(name), "x")
    before = left(server)
    assert consumer.reserve(1, 0) == []
    with pytest.raises(BackendCorrupt):
        consumer.reserve(1, 0)
    assert left(server) == before
    assert backend.stats(QUEUE).ready == 1


def test_gates_count_across_clients_with_other_numbers_of_partitions(server: RedisServer) -> None:
    backends = [open_backend(f"{server.url}?partitions={count}") for count in (1, 3, 8)]
    backends[0].limits(QUEUE, {"api": Quota(slots=2)})
    for backend in backends:
        add(backend, 3)
    found = []
    for backend in backends:
        with backend.consumer([QUEUE]) as consumer:
            found += consumer.reserve(10, 0)
    assert len(found) == 2
    assert [state.parked for state in backends[2].limits(QUEUE)] == [7]
    assert backends[2].stats(QUEUE).ready == 7
    assert len(backends[2].jobs(QUEUE, State.READY).jobs) == 7
    for backend in backends:
        backend.close()


def test_limits_on_a_cluster(redis_cluster: RedisCluster) -> None:
    queues = [f"queue {number}" for number in range(4)]
    with open_backend(redis_cluster.url) as backend, backend.consumer(queues) as consumer:
        for queue in queues:
            backend.limits(queue, {"api": Quota(slots=1)})
            backend.enqueue(queue, [job(), job()])
        for _ in range(2):
            leases = consumer.reserve(10, 5)
            while len(leases) < 4:
                leases += consumer.reserve(10, 5)
            assert sorted(lease.queue for lease in leases) == queues
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * 4


class History:
    """What consumers have been handed out and have settled, with the times. It reads nothing of the store."""

    def __init__(self, backend: Backend, slots: int, ttr: float) -> None:
        self.backend, self.slots, self.ttr = backend, slots, ttr
        self.waiting = Counter[Gate]()
        """The jobs of each gate that are not done."""
        self.gate_of: dict[str, Gate] = {}
        self.running: dict[str, tuple[float, Lease]] = {}
        """Id -> a time until which the lease surely lasts, and the lease."""

    def enqueue(self, gates: list[Gate]) -> None:
        for first in range(0, len(gates), 500):
            jobs = [job(gate, ttr=self.ttr) for gate in gates[first : first + 500]]
            self.gate_of.update(zip(self.backend.enqueue(QUEUE, jobs), gates[first : first + 500], strict=True))
        self.waiting.update(gates)

    def reserve(self, consumer: Consumer, most: int) -> None:
        """Reserve jobs, and check that no gate has more live leases than slots."""
        began = time.monotonic()
        taken = consumer.reserve(most, 0)
        now = time.monotonic()
        self.running.update((lease.id, (began + self.ttr, lease)) for lease in taken)
        live = Counter(self.gate_of[one] for one, (end, _) in self.running.items() if end > now)
        assert max(live.values(), default=0) <= self.slots

    def settle(self, consumer: Consumer, verdict: type[Ack | Touch | Release], leases: list[Lease]) -> None:
        began = time.monotonic()
        answers = consumer.settle([verdict(lease) for lease in leases])
        for lease in (one for one, refused in zip(leases, answers, strict=True) if refused is None):
            if verdict is Touch:
                self.running[lease.id] = began + self.ttr, lease
                continue
            del self.running[lease.id]
            if verdict is Ack:
                self.waiting[self.gate_of.pop(lease.id)] -= 1

    def check_all_that_can_run(self, consumer: Consumer) -> None:
        """Check that jobs are handed out until no gate has both a job and a free slot."""
        for _ in range(20):
            self.reserve(consumer, 500)
        running = Counter(self.gate_of[one] for one in self.running)
        assert running == +Counter({gate: min(self.slots, count) for gate, count in self.waiting.items()})


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, *range(3, 9)))])
def test_history_of_many_leases_that_end_together_is_possible(backend: Backend, seed: int) -> None:
    # Given a job that waits at a closed gate
    choices, gates = random.Random(seed), [Gate("tenant", str(number)) for number in range(220)]
    backend.limits(QUEUE, {"tenant": Quota(slots=3), "closed": Quota(slots=0)})
    add(backend, 1, Gate("closed"))
    history = History(backend, slots=3, ttr=1.0)
    with backend.consumer([QUEUE]) as dead, backend.consumer([QUEUE]) as alive:
        for _ in range(3):
            # And jobs of which some are reserved in one call, and some alone, and some are touched or settled
            history.enqueue(choices.choices(gates, k=choices.choice([100, 700])))
            for _ in range(choices.randrange(40)):
                history.reserve(choices.choice([dead, alive]), choices.choice([1, 1, 2, 50, 500]))
            for verdict in (Ack, Touch, Release, Touch):
                leases = [lease for _, lease in history.running.values()]
                some = choices.sample(leases, min(len(leases), choices.choice([1, 30, 300])))
                history.settle(alive, verdict, some)
            # When more leases end together than one script frees, then as many jobs can start as there are slots
            time.sleep(history.ttr + 0.1)
            history.running.clear()
            history.check_all_that_can_run(alive)
            # And so it is after half of them are settled
            history.settle(alive, Ack, [lease for _, lease in history.running.values()][::2])
            history.check_all_that_can_run(alive)


# --- workers of an older multiq --------------------------------------------------------------------------


@pytest.mark.parametrize("details", [b"a", b"r0::", b"b", b"x", b"g", b"t"])
@pytest.mark.long
def test_slot_that_an_old_worker_frees_is_free_at_the_end_of_the_lease(
    server: RedisServer, backend: Backend, consumer: Consumer, details: bytes
) -> None:
    # Given a running job that an old worker settles
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    add(backend, 3, ttr=0.5)
    (lease,) = consumer.reserve(10, 0)
    OldWorker(server).settle((pack_id(lease.id), bytes.fromhex(lease.token.partition(".")[0])), details)
    # Then the next job is handed out, at the latest when the lease has ended
    assert len(consumer.reserve(10, 30)) == 1
    assert len(leases_in(server)) == 1


def test_old_worker_is_not_handed_parked_jobs_and_loses_none(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    backend.limits(QUEUE, {"api": Quota(slots=1)})
    ids = add(backend, 4)
    (lease,) = consumer.reserve(10, 0)
    old = OldWorker(server)
    assert len(old.run("exchange", b"t" * 12, 5)) == 5
    # When old clients delete and reschedule parked jobs
    assert old.run("delete", pack_id(ids[1])) == b"ok"
    assert old.run("reschedule", pack_id(ids[2]), 0) == b"ok"
    # Then the others are handed out, each once
    assert consumer.settle([Ack(lease)]) == [None]
    order = []
    while leases := consumer.reserve(10, 0):
        order += [one.id for one in leases]
        assert consumer.settle([Ack(one) for one in leases]) == [None]
    assert sorted(order) == sorted(ids[2:])
    assert left(server) == {"limits"}


# --- soak ------------------------------------------------------------------------------------------------

LIMITS = {
    "api": Quota(slots=2),
    "smtp": Quota(slots=1),
    "fast": Quota(rate=500, burst=20),
    "fair": Quota(fair=True),
    "tenant": Quota(slots=2, fair=True),
}


def random_gates(choices: random.Random) -> tuple[Gate, ...]:
    names = choices.sample(sorted(LIMITS), choices.choice([0, 1, 1, 2, 3]))
    return tuple(Gate(name, choices.choice(["", "a", "b"])) for name in names)


def random_call(
    backend: Backend, consumer: Consumer, choices: random.Random, gates: dict[str, tuple[Gate, ...]]
) -> None:
    """Make one of the calls that change jobs with gates."""

    def some_id() -> str:
        return choices.choice([*gates] or ["none"])

    def enqueue() -> None:
        jobs = []
        for _ in range(choices.randint(1, 5)):
            own = random_gates(choices)
            delay, ttr = choices.choice([0, 0, 0.01]), choices.choice([0.05, 5])
            priority = choices.choice([5, 5, 1])
            jobs.append(NewJob(b"x", new_id(), priority, delay, ttr, Terms(choices.choice([0] * 5 + [1]), None, own)))
            gates[jobs[-1].id] = own
        backend.enqueue(QUEUE, jobs)

    def work() -> None:
        consumer.most_gated = choices.choice([None, None, 0, 1])
        leases = consumer.reserve(choices.randint(1, 8), choices.choice([0, 0, 0.02]))
        verdicts: list[Any] = []
        for lease in leases:
            kind = choices.choice([Ack, Ack, Ack, Bury, Touch, Release, None])
            if kind is not None:
                verdicts.append(kind(lease))
        consumer.settle(verdicts)

    def change() -> None:
        name = choices.choice([*LIMITS])
        quota = choices.choice([LIMITS[name], LIMITS[name], None, Quota(slots=choices.randint(0, 3))])
        backend.limits(QUEUE, {name: quota})

    calls: list[Callable[[], object]] = [
        enqueue, enqueue, work, work, work, work, change,
        lambda: backend.kick(QUEUE, 3),
        lambda: backend.kick_job(QUEUE, some_id()),
        lambda: backend.delete(QUEUE, some_id()),
        lambda: backend.delete_many(QUEUE, [some_id(), some_id()]),
        lambda: backend.reschedule(QUEUE, some_id(), choices.choice([0, 0.01])),
        lambda: backend.carry_out([Arrive(QUEUE, some_id(), "m")]),
        lambda: backend.purge(QUEUE, [choices.choice(STATES[:2])]) if choices.random() < 0.02 else None,
    ]  # fmt: skip
    try:
        choices.choice(calls)()
    except MultiqError as exc:
        if type(exc).__name__ not in {"JobNotFound", "JobReserved", "JobHeld"}:
            raise


def drain(server: RedisServer, backend: Backend) -> None:
    """Hand out all jobs that are left, and check that no key stays."""
    backend.kick(QUEUE, 100_000)
    backend.purge(QUEUE, [State.HELD])
    backend.limits(QUEUE, dict(LIMITS))
    with backend.consumer([QUEUE]) as consumer:
        give_up_at = time.monotonic() + 120
        # one reply has all counts: between two replies, a lease may end, and its job is then counted as ready
        while any(((stats := backend.stats(QUEUE)).ready, stats.delayed, stats.reserved)):
            leases = consumer.reserve(50, 1)
            consumer.settle([Ack(lease) for lease in leases])
            assert time.monotonic() < give_up_at, stats
    assert left(server) <= {"limits", "rates"}


@pytest.mark.long
@pytest.mark.parametrize("rounds", [2_000, pytest.param(8_000, marks=pytest.mark.exhaustive)])
def test_limits_do_not_drift(server: RedisServer, backend: Backend, consumer: Consumer, rounds: int) -> None:
    # Given limits of all kinds
    seed = random.randrange(2**32)
    print("seed", seed)
    choices = random.Random(seed)
    gates: dict[str, tuple[Gate, ...]] = {}
    backend.limits(QUEUE, dict(LIMITS))
    for number in range(rounds):
        # When random calls are made, then the limits count the live leases, and nothing else
        random_call(backend, consumer, choices, gates)
        if number % 20 == 0:
            consumer.most_gated = 0
            for lease in consumer.reserve(1, 0):  # frees what has ended
                consumer.settle([Ack(lease)])
            check(server, backend, gates)
    drain(server, backend)


_LOOP = """
import random, sys
sys.path[:0] = sys.argv[3:]
from test_gates import random_call
from multiq.backend.registry import open_backend

with open_backend(sys.argv[1]) as backend, backend.consumer(["q"]) as consumer:
    backend.stats("q")
    print("begun", flush=True)
    choices, gates = random.Random(int(sys.argv[2])), {}
    while True:
        random_call(backend, consumer, choices, gates)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.long
def test_killed_processes_leak_no_slot(server: RedisServer, backend: Backend, kills: int) -> None:
    backend.limits(QUEUE, dict(LIMITS))
    for number in range(kills):
        # Given processes that use limits, and are killed at some moment
        processes = [
            subprocess.Popen([sys.executable, "-c", _LOOP, server.url, str(number), *FOLDERS], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
        time.sleep(0.1 + number % 7 * 0.05)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()
        # Then each lease that is counted is a reserved job or ends with its time, and each parked job is in one line
        with server.client() as client:
            # read at one moment, because the server may still run a call that a killed process has sent
            reading: Any = client.pipeline(transaction=True)
            reading.zrange(key("lines"), 0, -1)
            reading.hkeys(key("jobs"))
            reading.hkeys(key("parked"))
            lines, jobs, parked = reading.execute()
        assert {job_id for _, job_id in leases_in(server)} <= set(map(unpack_id, jobs))
        assert {gates_in(member)[1][12:] for member in lines} == set(parked)
        assert len(lines) == len(parked)
    # And in the end, all jobs are handed out
    drain(server, backend)


@pytest.mark.long
def test_at_most_as_many_leases_are_live_as_there_are_slots(server: RedisServer, backend: Backend) -> None:
    # Given consumers that reserve and settle, or hang past the end of their leases, and a consumer that watches the
    # store
    slots, is_over = 3, threading.Event()
    backend.limits(QUEUE, {"api": Quota(slots=slots)})
    add(backend, 2000, ttr=0.05)
    gate = pack_gate(API)
    worst = 0

    def watch() -> None:
        nonlocal worst
        with server.client() as client:
            while not is_over.is_set():
                now = client.time()
                at = now[0] * 1_000_000 + now[1]
                worst = max(worst, client.zcount(key("reserved"), at, "+inf"))

    def work(seed: int) -> None:
        choices = random.Random(seed)
        with open_backend(server.url) as own, own.consumer([QUEUE]) as consumer:
            while not is_over.is_set():
                leases: list[Lease] = consumer.reserve(2, 0.05)
                if choices.random() < 0.8:
                    consumer.settle([Ack(lease) for lease in leases])

    threads = [threading.Thread(target=watch), *(threading.Thread(target=work, args=(seed,)) for seed in range(8))]
    for thread in threads:
        thread.start()
    time.sleep(2)
    is_over.set()
    for thread in threads:
        thread.join()
    # Then never more leases were live than there are slots
    assert 0 < worst <= slots
    assert backend.stats(QUEUE).ready != 2000
    assert int(server.ask("HGET", key("slot_counts"), gate) or 0) <= slots
