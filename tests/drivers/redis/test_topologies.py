"""TLS servers with bad certificates, and failovers, moving slots and dying masters under load."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis
from servers.certificate import Certificate
from servers.process import until
from servers.redis import RedisCluster, RedisServer

from multiq.backend import Ack, NewJob, State
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendUnavailable, EnqueueUncertain
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Self

    from servers.redis import SentinelTrio

    from multiq.backend import Backend

HOST = "127.0.0.1"


def new(body: bytes = b"x") -> NewJob:
    return NewJob(body, new_id())


# --- TLS -------------------------------------------------------------------------------------------------


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts a TLS server, whose certificate depends on the arguments."""
    started: list[RedisServer] = []

    def start(**kind: Any) -> RedisServer:
        started.append(RedisServer(certificate=Certificate.make(tmp_path, "theirs", **kind)).start())
        return started[-1]

    yield start
    for server in started:
        server.close()


def refused(url: str) -> str:
    """Return the error's text for a server that the driver must refuse."""
    with open_backend(url) as backend, pytest.raises(BackendUnavailable) as caught:
        backend.enqueue("mail", [new(b"S3CR3T")])
    return str(caught.value).lower()


def test_expired_certificate_is_refused(tls: Callable[..., RedisServer]) -> None:
    assert "expired" in refused(tls(expired=True).url)


def test_certificate_for_another_host_is_refused(tls: Callable[..., RedisServer]) -> None:
    message = refused(tls(host="elsewhere.example").url)
    assert "certificate" in message
    assert "127.0.0.1" in message


def test_certificate_of_an_unknown_authority_is_refused(tls: Callable[..., RedisServer]) -> None:
    server = tls()
    assert "certificate" in refused(f"rediss://{HOST}:{server.port}")


def test_plaintext_port_is_refused_and_gets_nothing_of_the_job(redis_server: RedisServer, tmp_path: Path) -> None:
    authority = Certificate.make(tmp_path, "ours").authority
    refused(f"rediss://{HOST}:{redis_server.port}?timeout=1&ca={authority}")
    assert redis_server.ask("KEYS", "*S3CR3T*") == []


def test_plaintext_to_a_tls_port_is_refused(redis_tls: RedisServer) -> None:
    refused(f"redis://{HOST}:{redis_tls.port}?timeout=1")


def test_valid_certificate_is_trusted(redis_tls: RedisServer) -> None:
    with open_backend(redis_tls.url) as backend, backend.consumer(["mail"]) as consumer:
        backend.enqueue("mail", [new(b"hello")])
        (lease,) = consumer.reserve(1, 0)
        assert lease.body == b"hello"
        assert consumer.settle([Ack(lease)]) == [None]


# --- load ------------------------------------------------------------------------------------------------


class Load:
    """A producer and a consumer that repeat failed calls, and record which jobs were enqueued and acked."""

    def __init__(self, url: str, queues: tuple[str, ...]) -> None:
        self.acknowledged: set[str] = set()
        """Ids whose enqueue returned."""
        self.done: list[tuple[str, float]] = []
        """The ids that were acked, each with its time."""
        self._url = url
        self._queues = queues
        self._errors: list[BaseException] = []
        self._ended = threading.Event()
        self._producer = threading.Thread(target=self._guarded, args=(self._produce,))
        self._consumer = threading.Thread(target=self._guarded, args=(self._consume,))

    def stop(self) -> None:
        """Stop the producer, and wait until all jobs are acked."""
        self._ended.set()
        self._producer.join()
        self._consumer.join()
        assert not self._errors, self._errors

    def more(self, count: int = 50) -> None:
        """Wait until this number of further jobs is done."""
        known = len(self.done)
        until(lambda: len(self.done) >= known + count or self._errors, f"{count} more jobs are done")
        assert not self._errors, self._errors

    def __enter__(self) -> Self:
        self._producer.start()
        self._consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._producer.join()
        self._consumer.join()

    def _guarded(self, work: Callable[[Backend], None]) -> None:
        try:
            with open_backend(self._url) as backend:
                work(backend)
        except BaseException as exc:  # raised in the test's own thread
            self._errors.append(exc)

    def _produce(self, backend: Backend) -> None:
        number = 0
        while not self._ended.is_set():
            job = new(b"x" * 20)
            while not self._ended.is_set():
                try:
                    self.acknowledged.update(backend.enqueue(self._queues[number % len(self._queues)], [job]))
                    break
                except (BackendUnavailable, EnqueueUncertain):
                    time.sleep(0.02)  # then the same job is enqueued again; because of its id it is stored once
            number += 1
            time.sleep(0.001)

    def _consume(self, backend: Backend) -> None:
        with backend.consumer(self._queues) as consumer:
            verdicts: list[Ack] = []
            idle = 0
            while idle < 3:
                try:
                    lost, leases = consumer.exchange(verdicts, 10, 0.2)
                except BackendUnavailable:
                    time.sleep(0.02)
                    continue
                now = time.monotonic()
                self.done += [
                    (ack.lease.id, now) for ack, error in zip(verdicts, lost, strict=True) if error is None
                ]  # fmt: skip
                verdicts = [Ack(lease) for lease in leases]
                idle = idle + 1 if self._ended.is_set() and not leases else 0


# --- Sentinel --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_work_continues_after_a_failover(redis_sentinel: SentinelTrio) -> None:
    with Load(redis_sentinel.url, ("mail",)) as load:
        load.more(100)
        # When the primary is stopped, so that it neither answers nor closes a connection
        old = redis_sentinel.primary_port
        redis_sentinel.primary.pause()
        stopped_at = time.monotonic()
        until(lambda: redis_sentinel.primary_port != old, "the sentinels agree on a new primary")
        named_at = time.monotonic()
        # Then producer and consumer find the new primary
        load.more(100)
        # And when the old primary comes back as a replica, the clients' calls still succeed
        redis_sentinel.primary.go_on()
        until(lambda: _is_replica(redis_sentinel.primary), "the old one has stepped back")
        load.more(100)
        load.stop()
    finished = [job_id for job_id, _ in load.done]
    lost = load.acknowledged - set(finished)
    twice = len(finished) - len(set(finished))
    print(
        f"failover: the new primary was named after {named_at - stopped_at:.1f} s, nothing was done for "
        f"{_longest_pause(load):.1f} s; "
        f"of {len(load.acknowledged)} acknowledged jobs {len(lost)} were lost, {twice} were acked twice"
    )
    assert len(lost) < 50  # replication is asynchronous, so some jobs may be lost


@pytest.mark.long
def test_consumer_that_waits_while_its_primary_stops_finds_the_new_one(redis_sentinel: SentinelTrio) -> None:
    with open_backend(redis_sentinel.url + "?timeout=1") as backend, backend.consumer(["mail"]) as consumer:
        assert consumer.reserve(1, 0) == []
        old = redis_sentinel.primary_port
        stopper = threading.Timer(0.3, redis_sentinel.primary.pause)
        stopper.start()
        # Given a consumer that waits at the primary when the primary is stopped
        with contextlib.suppress(BackendUnavailable):  # no error if it finds the new primary at once
            assert consumer.reserve(1, 1) == []
        until(lambda: redis_sentinel.primary_port != old, "the sentinels agree on a new primary")
        # Then the next wait is at the new primary, where a job ends it
        assert consumer.reserve(1, 0.5) == []
        later = threading.Timer(0.3, backend.enqueue, args=("mail", [new()]))
        later.start()
        assert len(consumer.reserve(1, 10)) == 1
        later.join()
        stopper.join()


def _is_replica(server: RedisServer) -> bool:
    with contextlib.suppress(redis.ConnectionError):  # a demoted primary closes all connections
        return bool(server.ask("INFO", "replication")["role"] == "slave")
    return False


def _longest_pause(load: Load) -> float:
    return max(after - before for (_, before), (_, after) in itertools.pairwise(load.done))


# --- cluster ---------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    """A cluster of this test's own, because the test changes it."""
    with RedisCluster() as cluster:
        yield cluster


def key_of(cluster: RedisCluster, queue: str, url: str) -> bytes:
    """A key of this queue, as the driver names it."""
    with open_backend(url) as backend:
        backend.enqueue(queue, [new()])
        keys = [key for node in cluster.nodes for key in node.ask("KEYS", "*") if b"{" in key and queue.encode() in key]
        backend.purge(queue, [State.READY])
    return bytes(keys[0])


@pytest.mark.long
def test_queue_whose_slot_moves_under_load_loses_nothing_and_repeats_nothing(cluster: RedisCluster) -> None:
    slot = cluster.slot_of(key_of(cluster, "mail", cluster.url))
    with Load(cluster.url + "?timeout=2", ("mail",)) as load:
        load.more(100)
        for _ in range(3):
            source = cluster.owner(slot)
            target = next(node for node in cluster.nodes if node is not source)
            cluster.move(slot, target, between=lambda: time.sleep(0.02))
            load.more(50)
        load.stop()
    finished = [job_id for job_id, _ in load.done]
    assert load.acknowledged <= set(finished)
    assert len(finished) == len(set(finished))


@pytest.mark.long
def test_other_queues_go_on_when_a_master_dies_and_its_own_when_it_is_back(cluster: RedisCluster) -> None:
    queues = tuple(f"mail-{number}" for number in range(6))
    slots = {queue: cluster.slot_of(key_of(cluster, queue, cluster.url)) for queue in queues}
    victim = cluster.owner(slots[queues[0]])
    others = tuple(queue for queue in queues if cluster.owner(slots[queue]) is not victim)
    assert others, "all queues are on one node"
    with Load(cluster.url + "?timeout=2", others) as load:
        load.more(50)
        victim.kill()
        with (
            open_backend(cluster.url + "?timeout=2") as backend,
            pytest.raises(BackendError),
        ):
            backend.enqueue(queues[0], [new()])
        load.more(50)
        victim.start()
        with open_backend(cluster.url + "?timeout=10") as backend, backend.consumer([queues[0]]) as consumer:
            until(lambda: _takes(backend, queues[0]), "the node serves its slots again")
            assert len(consumer.reserve(1, 5)) == 1
        load.stop()
    finished = [job_id for job_id, _ in load.done]
    assert load.acknowledged <= set(finished)


def _takes(backend: Backend, queue: str) -> bool:
    try:
        backend.enqueue(queue, [new()])
    except (BackendUnavailable, EnqueueUncertain):
        return False
    return True


@pytest.mark.long
def test_consumer_of_queues_on_several_nodes_wakes_for_each_and_keeps_their_order(
    redis_cluster: RedisCluster,
) -> None:
    queues = [f"spread-{number}" for number in range(6)]
    slots = {redis_cluster.slot_of(key_of(redis_cluster, queue, redis_cluster.url)) for queue in queues}
    assert len({redis_cluster.owner(slot).port for slot in slots}) > 1
    with open_backend(redis_cluster.url) as backend, backend.consumer(queues) as consumer:
        for queue in reversed(queues):
            backend.enqueue(queue, [new(queue.encode())])
        assert [lease.queue for lease in consumer.reserve(10, 0)] == queues
        for queue in queues:
            later = threading.Timer(0.2, backend.enqueue, args=(queue, [new()]))
            later.start()
            assert [lease.queue for lease in consumer.reserve(1, 20)] == [queue]
            later.join()
