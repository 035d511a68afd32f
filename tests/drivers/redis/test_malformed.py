"""Jobs that another program has written into a queue's keys: they are set aside, and other jobs are not affected."""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING

import pytest
from waits import is_quiet

from multiq.backend import Ack, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendCorrupt, MultiqError

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Backend

UUID = b"u" * 16


def key(name: str) -> str:
    return f"multiq:{{q}}:{name}"


def record(*, sequence: int = 0, priority: int = 0, ttr: int = 60_000_000, attempts: int = 0) -> bytes:
    return struct.pack(">QQIQIIIB12s", sequence, 1, priority, ttr, attempts, 0, 0, 0, bytes(12)) + b"evil"


def place(packed_id: bytes, *, sequence: int = 0, priority: int = 0) -> bytes:
    return struct.pack(">QI", sequence, priority) + packed_id


def plant(server: RedisServer, packed_id: bytes, stored: bytes, at: bytes, where: tuple[str, str]) -> None:
    server.ask("HSET", key("jobs"), packed_id, stored)
    server.ask("ZADD", key(where[0]), where[1], at)


def work_off(backend: Backend) -> list[str]:
    done: list[str] = []
    with backend.consumer(["q"]) as consumer:
        while leases := consumer.reserve(10, 0):
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            done += [lease.id for lease in leases]
            assert len(done) < 100
    return done


def long_id(text: bytes) -> bytes:
    return (text + b"\x80").ljust(17, b"\0")


MALFORMED = {
    "an id that is not UTF-8": (long_id(b"\xff\xfe"), record(), place(long_id(b"\xff\xfe"))),
    "an overlong id": (long_id(b"\xc0\xaf"), record(), place(long_id(b"\xc0\xaf"))),
    "an id without its end": (b"a" * 20, record(), place(b"a" * 20)),
    "an empty record": (UUID, b"", place(UUID)),
    "a record of text": (UUID, b'{"task": "mail"}', place(UUID)),
    "a ttr of ages": (UUID, record(ttr=2**63), place(UUID)),
    "no ttr": (UUID, record(ttr=0), place(UUID)),
    "a short place": (UUID, record(), b"evil"),
    "an empty place": (UUID, record(), b""),
}


@pytest.mark.parametrize("state", ["ready", "delayed", "reserved", "buried"])
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_job_is_set_aside_with_its_reason(
    server: RedisServer, backend: Backend, case: str, state: str
) -> None:
    packed_id, stored, at = MALFORMED[case]
    backend.enqueue("q", [NewJob(b"1", "before", priority=0), NewJob(b"2", "after", priority=9)])
    plant(server, packed_id, stored, at, (state, "1"))
    for shown in (State.READY, State.DELAYED, State.RESERVED, State.BURIED):
        backend.jobs("q", shown)
    if state == "buried":
        assert backend.kick("q", 10) == 1
    assert work_off(backend) == ["before", "after"]
    ((name, value),) = server.ask("HGETALL", key("unreadable")).items()
    why, _, kept = value.partition(b"\n")
    assert b"its " in why
    if at[12:] == packed_id:
        assert name == packed_id
        assert kept == stored
        assert server.ask("EXISTS", key("jobs")) == 0
    assert backend.stats("q").ready == 0
    assert work_off(backend) == []


def test_many_malformed_jobs_block_no_others(server: RedisServer, backend: Backend) -> None:
    for number in range(50):
        packed = long_id(b"\xff%d" % number)
        plant(server, packed, record(), place(packed), ("ready", "0"))
    backend.enqueue("q", [NewJob(b"x", str(number)) for number in range(20)])
    assert sorted(work_off(backend), key=int) == [str(number) for number in range(20)]
    assert server.ask("HLEN", key("unreadable")) == 50


def test_ids_in_any_language_and_lone_surrogates_are_valid(backend: Backend) -> None:
    ids = ["grün", "緑の仕事", "\U0001f600", "\ud800", "a" * 200, ""]
    backend.enqueue("q", [NewJob(b"x", job_id) for job_id in ids])
    assert work_off(backend) == ids


@pytest.mark.parametrize("score", ["inf", "-inf", "1.5", "1e300"])
@pytest.mark.parametrize("state", ["delayed", "reserved", "buried", "ready"])
def test_infinite_score_blocks_no_others(server: RedisServer, backend: Backend, state: str, score: str) -> None:
    plant(server, UUID, record(), place(UUID), (state, score))
    backend.enqueue("q", [NewJob(b"1", "good")])
    for shown in (State.READY, State.DELAYED, State.RESERVED, State.BURIED):
        backend.jobs("q", shown)
    backend.peek("q", "75757575-7575-7575-7575-757575757575")
    assert "good" in work_off(backend)


def test_pause_that_is_not_a_number_is_ignored(server: RedisServer, backend: Backend) -> None:
    server.ask("SET", key("paused"), "for ever")
    backend.enqueue("q", [NewJob(b"1", "good")])
    assert backend.stats("q").paused_for is None
    assert work_off(backend) == ["good"]


def test_reason_that_is_not_utf8_is_shown_with_escapes(server: RedisServer, backend: Backend) -> None:
    flagged = record()[:40] + b"\x02" + record()[41:]
    plant(server, UUID, flagged, place(UUID), ("ready", "0"))
    server.ask("HSET", key("reasons"), UUID, b"\xff")
    (job,) = backend.jobs("q", State.READY).jobs
    assert job.reason == "\\xff"


@pytest.mark.parametrize("verb", ["peek", "delete", "kick_job"])
def test_verb_on_a_malformed_job_raises_a_multiq_error(server: RedisServer, backend: Backend, verb: str) -> None:
    plant(server, UUID, b"short", place(UUID), ("ready", "0"))
    try:
        getattr(backend, verb)("q", "75757575-7575-7575-7575-757575757575")
    except MultiqError:
        return
    assert verb == "kick_job"


WRONG = {"list": ("RPUSH", "x"), "string": ("SET", "x"), "hash": ("HSET", "x", "y"), "stream": ("XADD", "*", "x", "y")}


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jobs", "list"),
        ("ready", "string"),
        ("delayed", "hash"),
        ("reserved", "stream"),
        ("paused", "list"),
        ("partitions", "hash"),
    ],
)
def test_key_of_another_type_blocks_only_its_own_queue(
    server: RedisServer, backend: Backend, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend.enqueue("q", [NewJob(b"1", "before")])
    backend.enqueue("other", [NewJob(b"1", "good")])
    command, *words = WRONG[kind]
    server.ask("DEL", key(name))
    server.ask(command, key(name), *words)
    with backend.consumer(["q", "other"]) as consumer:
        (lease,) = consumer.reserve(1, 5)
        assert consumer.settle([Ack(lease)]) == [None]
        assert consumer.reserve(1, 1.5) == []  # polls the queue several times
        assert len([record for record in caplog.records if "partition q" in record.getMessage()]) == 1
        server.ask("DEL", key(name))
        backend.enqueue("q", [NewJob(b"1", "mended")])
        done = [lease.id for _ in range(2) for lease in consumer.reserve(1, 1.5)]
    assert "mended" in done


def test_consumer_waits_at_the_server_after_a_verdict_on_an_unreadable_queue_of_another_consumer(
    server: RedisServer, backend: Backend
) -> None:
    # Given a lease of another consumer's queue, whose keys another program has changed
    backend.enqueue("q", [NewJob(b"x", "job")])
    with backend.consumer(["q"]) as other, backend.consumer(["own"]) as consumer:
        (lease,) = other.reserve(1, 0)
        server.ask("RENAME", key("reserved"), "saved")
        server.ask("SET", key("reserved"), "junk")
        with pytest.raises(BackendCorrupt):
            consumer.settle([Ack(lease)])
        # When the time has passed for which the queue is left out
        time.sleep(1.1)

        def commands() -> int:
            before: int = server.ask("INFO", "stats")["total_commands_processed"]
            assert consumer.reserve(1, 1.0) == []
            after: int = server.ask("INFO", "stats")["total_commands_processed"]
            return after - before

        # Then the consumer waits, and does not poll its own queue again and again
        is_quiet(commands, 50)
        # And it settles the job when the queue can be read again
        server.ask("RENAME", "saved", key("reserved"))
        assert consumer.settle([Ack(lease)]) == [None]


def test_consumer_whose_only_queue_is_unreadable_raises(server: RedisServer, backend: Backend) -> None:
    server.ask("SET", key("ready"), "x")
    with backend.consumer(["q"]) as consumer, pytest.raises(BackendCorrupt):
        consumer.reserve(1, 0)


@pytest.mark.parametrize("stored", ["inf", "nan", "1e300", "-5", "9" * 400])
def test_pause_that_is_not_a_time_is_ignored(server: RedisServer, backend: Backend, stored: str) -> None:
    server.ask("SET", key("paused"), stored)
    backend.enqueue("q", [NewJob(b"1", "good")])
    assert backend.stats("q").paused_for is None
    assert work_off(backend) == ["good"]


@pytest.mark.parametrize("stored", ["x", "1.5", "", "-5", "inf", "9" * 5000])
def test_invalid_partition_count_is_ignored(server: RedisServer, stored: str) -> None:
    for partitions in (1, 3):
        server.ask("SET", key("partitions"), stored)
        with contextlib.closing(open_backend(f"{server.url}/?partitions={partitions}")) as backend:
            backend.enqueue("q", [NewJob(b"1", f"good {partitions}")])
            assert backend.stats("q").ready == 1
            assert work_off(backend) == [f"good {partitions}"]
