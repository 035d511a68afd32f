"""Parking: a reserve puts ready jobs of closed or fair limits into lines, and other work does not wait for this."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, Gate, NewJob, Quota, Terms
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer
    from multiq_redis.consumer import RedisConsumer

QUEUE = "q"
PARKED = 200  # jobs that one script parks


@pytest.fixture
def consumer(backend: Backend) -> Iterator[RedisConsumer]:
    with backend.consumer([QUEUE]) as consumer:
        yield consumer  # type: ignore[misc]  # the backend is one on Redis


@pytest.fixture
def long_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, all jobs are parked before one of them is handed out."""
    monkeypatch.setattr("multiq_redis.exchange._PARKING_TIME", 60.0)
    monkeypatch.setattr("multiq_redis.exchange._ONLY_PARKING_TIME", 60.0)


def add(backend: Backend, count: int, *gates: Gate, queue: str = QUEUE, body: bytes = b"x", **options: Any) -> None:
    terms = Terms(gates=gates) if gates else None
    backend.enqueue(queue, [NewJob(body, new_id(), terms=terms, **options) for _ in range(count)])


def parked(server: RedisServer) -> int:
    return int(server.ask("ZCARD", f"multiq:{{{QUEUE}}}:lines"))


def requests_of(consumer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[str]]]:
    """The time of each further request of a consumer, and the partitions that it is for."""
    sent: list[tuple[float, list[str]]] = []
    perform_each = consumer._client.perform_each

    def record(calls: Sequence[Any], until: float | None = None) -> Any:
        sent.append((time.monotonic(), [call.partition for call in calls]))
        return perform_each(calls, until)

    monkeypatch.setattr(consumer._client, "perform_each", record)
    return sent


@pytest.mark.usefixtures("long_parking")
def test_the_jobs_of_a_fair_limit_are_parked_before_one_is_handed_out(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 1000, Gate("tenant", "a"))
    add(backend, 1, Gate("tenant", "b"), body=b"b")
    assert b"b" in {lease.body for lease in consumer.reserve(2, 0)}
    assert parked(server) == 999


def test_a_slow_server_hands_out_a_job_of_a_fair_limit_before_all_are_parked(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that takes too long to park more jobs than one script parks
    monkeypatch.setattr("multiq_redis.exchange._PARKING_TIME", 0.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 1000, Gate("tenant", "a"))
    # Then a reserve has a job after the second script, and the next one does not park first again
    assert len(consumer.reserve(1, 0)) == 1
    assert parked(server) < 2 * PARKED
    sent = requests_of(consumer, monkeypatch)
    assert len(consumer.reserve(1, 0)) == 1
    assert len(sent) == 1


def test_a_reserve_that_ends_early_is_followed_by_one_that_does_not_park_first(
    server: RedisServer, backend: Backend, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server so slow that a reserve ends before it may hand out a job
    monkeypatch.setattr("multiq_redis.exchange._ONLY_PARKING_TIME", 0.0)
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 2000, Gate("tenant", "a"))
    assert consumer.reserve(1, 0) == []
    # Then the next one hands out a job
    assert len(consumer.reserve(1, 0)) == 1
    assert parked(server) < 1000


def test_a_reserve_behind_a_closed_gate_ends_when_a_worker_has_to_touch_its_leases(
    server: RedisServer, backend: Backend, consumer: RedisConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiq_redis.exchange._ONLY_PARKING_TIME", 0.0)
    backend.limits(QUEUE, {"api": Quota(slots=0)})
    add(backend, 1000, Gate("api"))
    # Then a reserve parks some of the jobs, and says that it has not looked at all of them
    assert consumer.reserve(1, 0) == []
    assert not consumer.sees_all
    assert parked(server) < 3 * PARKED
    # And the next ones park the others
    for _ in range(10):
        if consumer.reserve(1, 0) == [] and consumer.sees_all:
            break
    assert parked(server) == 1000


@pytest.mark.usefixtures("long_parking")
def test_the_leases_count_from_the_request_that_began_them(
    backend: Backend, consumer: RedisConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # When a reserve parks many jobs before it hands out one of them
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 1000, Gate("tenant", "a"))
    sent = requests_of(consumer, monkeypatch)
    assert len(consumer.reserve(1, 0)) == 1
    # Then the time before the parking is not a part of the lease
    assert len(sent) > 3
    assert sent[-2][0] < consumer.asked_at <= sent[-1][0]


@pytest.mark.usefixtures("long_parking")
def test_jobs_in_hand_do_not_wait_for_parking(server: RedisServer, backend: Backend, consumer: Consumer) -> None:
    # Given an urgent job without gates before many jobs of a fair limit
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 1, body=b"plain", priority=1)
    add(backend, 1000, Gate("tenant", "a"))
    # Then a reserve hands out this job and jobs of the limit, and does not park all of them
    assert [lease.body for lease in consumer.reserve(10, 0)] == [b"plain", *[b"x"] * 9]
    assert parked(server) < 3 * PARKED


@pytest.mark.usefixtures("long_parking")
def test_an_urgent_job_of_a_fair_limit_does_not_wait_until_less_urgent_ones_are_parked(
    server: RedisServer, backend: Backend, consumer: Consumer
) -> None:
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 1, Gate("tenant", "a"), body=b"urgent", priority=1)
    add(backend, 1000, Gate("tenant", "b"), priority=2000)
    assert [lease.body for lease in consumer.reserve(1, 0)] == [b"urgent"]
    assert parked(server) < 2 * PARKED


@pytest.mark.usefixtures("long_parking")
def test_a_verdict_for_another_queue_does_not_wait_for_parking(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a consumer of two queues with a job of the second one, and many jobs of a fair limit in the first one
    with backend.consumer([QUEUE, "z"]) as consumer:
        add(backend, 1, queue="z")
        (lease,) = consumer.reserve(1, 0)
        backend.limits(QUEUE, {"tenant": Quota(fair=True)})
        add(backend, 1000, Gate("tenant", "a"))
        # When the consumer acks this job and asks for another one
        sent = requests_of(consumer, monkeypatch)
        answers, leases = consumer.exchange([Ack(lease)], 1, 0)
        # Then the ack is sent after the first script that parks jobs
        assert answers == [None]
        assert len(leases) == 1
        asked = [partition for _, partitions in sent for partition in partitions]
        assert asked.index("z") <= 2
        assert asked.count("z") == 1


@pytest.mark.parametrize("is_short", [True, False])
def test_an_unreadable_place_after_the_parked_jobs_stops_nothing(
    server: RedisServer, backend: Backend, consumer: Consumer, is_short: bool
) -> None:
    # Given many jobs of a fair limit, and an unreadable place in their order after those that the first script parks
    backend.limits(QUEUE, {"tenant": Quota(fair=True)})
    add(backend, 400, Gate("tenant", "a"))
    ready = f"multiq:{{{QUEUE}}}:ready"
    with server.client() as client:
        places: Any = client.zrange(ready, PARKED - 1, PARKED - 1, withscores=True)
        ((before, score),) = places
        place = before[:8] + b"\xff" if is_short else before + b"\xff" * 20
        client.zadd(ready, {place: score})
        assert client.zrank(ready, place) == PARKED
    # Then all jobs are handed out
    taken = []
    while leases := consumer.reserve(1, 0):
        taken += leases
    assert len(taken) == len({lease.id for lease in taken}) == 400
