"""How jobs are stored: their ids, keys in one slot, memory, and the order of jobs with the same priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend import NewJob, Release, State
from multiq.backend.registry import open_backend
from multiq.errors import UrlInvalid
from multiq.ids import new_id, new_ids
from multiq_redis import keys
from multiq_redis.cluster import slot_of
from multiq_redis.records import microseconds, new_jobs, pack_id, pack_ids, unpack_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers.redis import RedisCluster, RedisServer

QUEUE = "mail"
MOST_BYTES = 450  # bytes of the server's memory per waiting job with a body of 100 bytes

IDS = [
    "01890a5d-ac96-774b-8cce-b302099a8057",
    "01890a5d-ac96-774b-bcce-b302099a8057".upper(),
    "01890a5dac96-774b-bcce-b302099a8057-",
    "0" * 36,
    "-" * 36,
    "a",
    "sixteen bytes id",
    "fifteen bytes i",
    "ends in nothing\0\0",
    "ends like a mark\x80",
    "ends like a mark in utf-8 Ā",
    "\N{SNOWMAN}" * 12,
    "half a pair \ud800",
    " 01890a5d-ac96-774b-bcce-b302099a805",
]


@pytest.mark.parametrize("job_id", IDS)
def test_id_is_unpacked_as_it_was(job_id: str) -> None:
    assert unpack_id(pack_id(job_id)) == job_id


def test_no_two_ids_are_stored_alike() -> None:
    assert len({pack_id(job_id) for job_id in IDS}) == len(IDS)
    assert pack_ids(IDS) == [pack_id(job_id) for job_id in IDS]
    assert [len(pack_id(job_id)) == 16 for job_id in IDS] == [True] + [False] * (len(IDS) - 1)


@pytest.mark.parametrize("odd", IDS, ids=map(str, range(len(IDS))))
def test_many_ids_are_packed_as_one_by_one(odd: str) -> None:
    good = new_ids(5)
    for ids in ([*good, odd], [odd, *good], [odd + good[0], *good], [good[0] + odd], [odd[:10], odd[10:], *good]):
        assert pack_ids(ids) == [pack_id(job_id) for job_id in ids]
    # two texts that together are as long as two UUIDs, with dashes at the same places
    assert pack_ids([good[0][:35], good[0][35:] + good[1]]) == [pack_id(good[0][:35]), pack_id(good[0][35:] + good[1])]
    assert pack_ids(good) == [pack_id(job_id) for job_id in good]


def test_first_job_of_a_repeated_id_in_a_batch_counts() -> None:
    jobs = [NewJob(b"1", "a"), NewJob(b"2", "b", ttr=70), NewJob(b"3", "a"), NewJob(b"4", "c")]
    assert new_jobs(jobs) == new_jobs([jobs[0], jobs[1], jobs[3]])


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (1e-9, 1), (0.1, 100_000), (1.0000001, 1_000_001)])
def test_delays_are_rounded_up(seconds: float, expected: int) -> None:
    assert microseconds(seconds) == expected


def test_all_keys_of_a_queue_share_its_hash_tag() -> None:
    base = keys.base("multiq", "a.b-c")
    names = [*(function(base) for function in keys.BY_NAME.values()), keys.call(base, "client")]
    assert {name.partition("{")[2].partition("}")[0] for name in names} == {"a.b-c"}


def test_slots_are_those_of_the_cluster(redis_cluster: RedisCluster) -> None:
    key = keys.ready(keys.base("multiq", "a.b-c"))
    assert redis_cluster.nodes[0].ask("CLUSTER", "KEYSLOT", key) == slot_of("a.b-c")


def test_waiting_job_costs_little_memory(new_redis: Callable[..., RedisServer]) -> None:
    # Given an empty server that knows the scripts
    server = new_redis()
    with open_backend(server.url) as backend:
        backend.enqueue(QUEUE, [NewJob(b"x" * 100, job_id) for job_id in new_ids(500)])
        before = server.ask("INFO", "memory")["used_memory"]
        # When many jobs wait
        count = 20_000
        for _ in range(0, count, 500):
            backend.enqueue(QUEUE, [NewJob(b"x" * 100, job_id) for job_id in new_ids(500)])
        # Then each costs less memory than the documentation says
        assert (server.ask("INFO", "memory")["used_memory"] - before) / count <= MOST_BYTES


def test_jobs_of_one_priority_stay_in_the_order_of_their_enqueuing_beyond_ten(redis_server: RedisServer) -> None:
    # Given 300 jobs, so that their sequence needs one, two and three digits, and two bytes
    redis_server.ask("FLUSHALL")
    with open_backend(redis_server.url) as backend, backend.consumer([QUEUE]) as consumer:
        for number in range(300):
            backend.enqueue(QUEUE, [NewJob(b"%d" % number, new_id())])
        # When some are released, then all jobs come in the order of their age
        leases = consumer.reserve(20, 0)
        consumer.settle([Release(lease) for lease in reversed(leases)])
        assert [int(lease.body) for lease in consumer.reserve(300, 0)] == list(range(300))


def test_extreme_priorities_are_distinguished(redis_server: RedisServer) -> None:
    redis_server.ask("FLUSHALL")
    priorities = [2**32 - 1, 2**32 - 2, 2**31, 1, 0]
    with open_backend(redis_server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [NewJob(b"", new_id(), priority=priority) for priority in priorities])
        assert [lease.priority for lease in consumer.reserve(10, 0)] == sorted(priorities)


def test_large_body_is_stored_apart_and_deleted_with_its_job(redis_server: RedisServer) -> None:
    redis_server.ask("FLUSHALL")
    with open_backend(redis_server.url) as backend:
        backend.enqueue(QUEUE, [NewJob(b"y" * 5000, "large"), NewJob(b"z", "small")])
        assert redis_server.ask("HLEN", keys.bodies(keys.base("multiq", QUEUE))) == 1
        assert backend.peek(QUEUE, "large").body == b"y" * 5000
        assert backend.purge(QUEUE, [State.READY]) == 2
        assert redis_server.ask("EXISTS", keys.bodies(keys.base("multiq", QUEUE))) == 0


def test_prefixes_separate_queues(redis_server: RedisServer) -> None:
    redis_server.ask("FLUSHALL")
    with open_backend(redis_server.url) as one, open_backend(f"{redis_server.url}?prefix=other") as other:
        one.enqueue(QUEUE, [NewJob(b"", "a")])
        assert other.queues() == []
        assert other.stats(QUEUE).ready == 0


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://localhost?prefix=a{b", "prefix"),
        ("redis://one,two", "several hosts"),
        ("redis://localhost/jobs", "must be a number"),
        ("redis+unix://", "three slashes"),
        ("redis+sentinel://one,two", "name the service"),
        ("redis+cluster://one/1", "only one database"),
        ("redis+tcp://one", r"the scheme must be one of .*, got redis\+tcp"),
        ("redis://localhost?ca=/tmp/ca.pem", "ignored without TLS"),
        ("rediss://localhost?ca=/no/such/file", "certificates cannot be used"),
    ],
)
def test_invalid_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(UrlInvalid, match=why):
        open_backend(url)
