"""Limits: the bytes of a reserve, the time of a send, connections, redirections, and polls of empty queues."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from faults import new
from servers.process import HOST, until
from servers.redis import RedisCluster, RedisServer
from waits import is_quiet

from multiq.backend import Ack, Gate, NewJob, Terms
from multiq.backend.registry import open_backend
from multiq.errors import BackendTimeout, BackendUnavailable
from multiq.ids import new_id
from multiq_redis import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.backend import Backend

QUEUE = "mail"
MEGABYTE = b"x" * 1_000_000
MOST = 8_000_000
GATED = Terms(gates=(Gate("api"),))
SMALL = 500 * 1024
"""Bytes by which bodies of up to 1,024 bytes may exceed MOST, because the driver does not count these."""


# --- bytes of a reserve ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 4])
def test_reserve_stops_at_eight_megabytes(server: RedisServer, partitions: int) -> None:
    with (
        open_backend(f"{server.url}?partitions={partitions}") as backend,
        backend.consumer([QUEUE, "later"]) as consumer,
    ):
        ids = [backend.enqueue(QUEUE, [new(MEGABYTE)])[0] for _ in range(40)]
        backend.enqueue("later", [new()])
        found: list[str] = []
        while len(found) < len(ids):
            leases = consumer.reserve(100, 0)
            assert leases
            assert {lease.queue for lease in leases} == {QUEUE} or len(found) + len(leases) > len(ids)
            assert sum(len(lease.body) for lease in leases) <= (MOST + SMALL) * partitions
            assert all(lease.attempt == 1 for lease in leases)
            found += [lease.id for lease in leases if lease.queue == QUEUE]
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        assert sorted(found) == sorted(ids)
        if partitions == 1:
            assert found == ids


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_each_job_of_a_batch_has_its_own_body(backend: Backend, limit: int) -> None:
    # Given jobs with bodies inside and outside their records, small and large, with and without gates, in no order
    sizes = [3, 2_000, 10, 70_000, 1_024, 1_025, 40_000, 0]
    jobs = [
        NewJob(b"%04d" % number + b"x" * sizes[number * 7 % 8], new_id(), terms=GATED if number % 3 else None)
        for number in range(150)
    ]
    backend.enqueue(QUEUE, jobs)
    # When they are reserved, then each comes with its own body
    with backend.consumer([QUEUE]) as consumer:
        found: list[tuple[str, bytes]] = []
        while leases := consumer.reserve(limit, 0):
            found += [(lease.id, lease.body) for lease in leases]
            consumer.settle([Ack(lease) for lease in leases])
    assert found == [(job.id, job.body) for job in jobs]


def test_job_larger_than_the_limit_is_reserved_alone(server: RedisServer, backend: Backend) -> None:
    backend.enqueue(QUEUE, [new(b"first")])
    backend.enqueue(QUEUE, [new(MEGABYTE * 9)])
    backend.enqueue(QUEUE, [new(b"z" * 2000)])
    with backend.consumer([QUEUE]) as consumer:
        sizes = [[len(lease.body) for lease in consumer.reserve(10, 0)] for _ in range(3)]
    assert sizes == [[5], [9_000_000], [2000]]


def test_jobs_left_by_a_reserve_notify_another_consumer(server: RedisServer, backend: Backend) -> None:
    with backend.consumer([QUEUE]) as one, backend.consumer([QUEUE]) as other:
        for _ in range(10):
            backend.enqueue(QUEUE, [new(MEGABYTE)])
        assert len(one.reserve(100, 0)) == 8
        assert len(other.reserve(100, 60)) == 2


# --- time ------------------------------------------------------------------------------------------------


def test_server_that_reads_slowly_is_a_timeout_in_time() -> None:
    # Given a server that answers the greeting, and then reads a few kilobytes from time to time
    with socket.create_server((HOST, 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)

        def take_slowly() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(b"-ERR unknown command 'HELLO'\r\n")
                while True:
                    time.sleep(0.05)
                    if not client.recv(16_384):
                        return

        threading.Thread(target=take_slowly, daemon=True).start()
        with open_backend(f"redis://{HOST}:{listener.getsockname()[1]}?timeout=1") as backend:
            started = time.monotonic()
            with pytest.raises(BackendTimeout):
                backend.enqueue(QUEUE, [new(MEGABYTE[1000:]) for _ in range(8)])
            assert time.monotonic() - started < 15  # the whole send would take 24 s


@pytest.mark.parametrize("timeout", [1.0, 0.0])
def test_exchange_without_jobs_waits_without_commands(server: RedisServer, backend: Backend, timeout: float) -> None:
    with backend.consumer([QUEUE]) as consumer:

        def sent() -> int:
            backend.enqueue(QUEUE, [new()])
            (lease,) = consumer.reserve(1, 0)
            before, busy = server.consumers_sent, time.thread_time()
            assert consumer.exchange([Ack(lease)], 0, timeout) == ([None], [])
            assert time.thread_time() - busy < 0.5  # seconds of CPU time: a busy loop would use nearly the whole time
            return server.consumers_sent - before

        is_quiet(sent, 3)
        threading.Timer(0.1, consumer.interrupt).start()
        assert consumer.exchange([], 0, 60) == ([], [])


# --- connections -----------------------------------------------------------------------------------------


def test_many_threads_keep_their_connections(server: RedisServer, backend: Backend) -> None:
    count, calls = 32, 30
    together = threading.Barrier(count)

    def work() -> None:
        for _ in range(calls):
            together.wait()
            backend.stats(QUEUE)

    threads = [threading.Thread(target=work) for _ in range(count)]
    before = server.ask("INFO", "stats")["total_connections_received"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.ask("INFO", "stats")["total_connections_received"] - before <= 2 * count


def test_idle_connections_are_closed_gradually(
    server: RedisServer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_many_threads_keep_their_connections(server, backend)
    monkeypatch.setattr("multiq_redis.pool._IDLE_FOR", 0.0)
    for _ in range(40):
        backend.stats(QUEUE)
    until(lambda: server.ask("INFO", "clients")["connected_clients"] <= 10, "most are closed")


def test_server_at_maxclients_is_reported(new_redis: Callable[..., RedisServer]) -> None:
    server = new_redis(maxclients="3")
    with server.client() as one, server.client() as two:
        one.ping()
        two.ping()
        held = socket.create_connection((HOST, server.port))
        time.sleep(0.1)
        with (
            held,
            open_backend(server.url + "?timeout=1") as backend,
            pytest.raises(BackendUnavailable, match="maxclients"),
        ):
            backend.stats(QUEUE)


# --- a full server ---------------------------------------------------------------------------------------


def test_marker_is_passed_on_at_maxmemory(server: RedisServer, backend: Backend) -> None:
    hint = keys.hint(keys.base("multiq", QUEUE))
    backend.enqueue(QUEUE, [new(delay=3600)])  # a queue without jobs has no marker
    with backend.consumer([QUEUE]) as consumer:
        server.set("maxmemory", "1")
        consumer._waiter.notify(QUEUE)  # type: ignore[attr-defined]
        assert server.ask("ZCARD", hint) == 1
        # And an interrupted consumer returns in time there, too
        for _ in range(3):
            threading.Timer(0.1, consumer.interrupt).start()
            started = time.monotonic()
            assert consumer.reserve(1, 60) == []
            assert time.monotonic() - started < 30


# --- a cluster -------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[list[RedisServer]]:
    """Nodes of a cluster that knows no slots."""
    node = RedisServer(cluster_enabled="yes").start()
    yield [node]
    node.close()


def test_cluster_without_slots_is_reported(nodes: list[RedisServer]) -> None:
    with open_backend(f"redis+cluster://{HOST}:{nodes[0].port}?timeout=1") as backend:
        assert backend.capabilities.persistent is True  # the declared value, without a server
        calls: list[Callable[[], object]] = [
            lambda: backend.stats(QUEUE),
            backend.queues,
            backend.doctor,
            lambda: backend.enqueue(QUEUE, [new(b"x" * 2_000_000), new()]),
        ]
        for call in calls:
            with pytest.raises(BackendUnavailable, match="slot"):
                call()


@pytest.mark.long
def test_nodes_that_disagree_are_asked_with_pauses() -> None:
    # Given two nodes, each of which names the other one as the owner of a slot
    with RedisCluster() as cluster:
        slot = cluster.slot_of("{mail}")
        owner = cluster.owner(slot)
        other, third = (node for node in cluster.nodes if node is not owner)
        ids = {node.port: node.ask("CLUSTER", "MYID").decode() for node in cluster.nodes}
        third.pause()
        try:
            owner.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[other.port])
            url = f"redis+cluster://{HOST}:{owner.port}?timeout=1"
            before = sum(_redirected(node) for node in (owner, other))
            with open_backend(url) as backend, pytest.raises(BackendUnavailable):
                backend.stats(QUEUE)
            assert sum(_redirected(node) for node in (owner, other)) - before < 100
        finally:
            third.go_on()


def _redirected(node: RedisServer) -> int:
    errors = node.ask("INFO", "errorstats")
    return int(errors.get("errorstat_MOVED", {"count": 0})["count"])
