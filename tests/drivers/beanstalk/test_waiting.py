"""Waiting: on which connection, at what cost, and with jobs that arrive together with an interrupt."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until
from waits import is_quiet

from multiq.backend import Ack, NewJob, Release, Touch
from multiq.backend.registry import open_backend
from multiq.ids import new_id

if TYPE_CHECKING:
    from servers.beanstalk import BareClient, BeanstalkServer

    from multiq.backend import Backend

QUEUE = "mail"
QUEUES = (QUEUE, "other", "third")


def new(body: bytes = b"x", **options: Any) -> NewJob:
    return NewJob(body, new_id(), **options)


def commands(client: BareClient) -> int:
    """How many commands other clients have sent to the server."""
    stats = client.stats()
    return sum(int(count) for name, count in stats.items() if name.startswith("cmd-") and name != "cmd-stats")


def waiting(client: BareClient, queue: str = QUEUE) -> int:
    return int(client.stats("tube", queue).get("current-waiting", 0))


@pytest.mark.long
@pytest.mark.parametrize("queues", [QUEUES[:1], QUEUES], ids=["one queue", "three queues"])
def test_idle_consumer_sends_few_commands(backend: Backend, client: BareClient, queues: tuple[str, ...]) -> None:
    with backend.consumer(queues) as consumer:
        consumer.reserve(1, 1)

        def sent() -> int:
            before = commands(client)
            assert consumer.reserve(1, 3) == []
            return commands(client) - before

        is_quiet(sent, len(queues) + 1)  # one poll of each queue, and one wait


def test_waiting_consumer_watches_all_its_queues(backend: Backend, client: BareClient) -> None:
    with backend.consumer(QUEUES) as consumer, ThreadPoolExecutor(1) as pool:
        wait = pool.submit(consumer.reserve, 1, 60)
        until(lambda: all(waiting(client, queue) == 1 for queue in QUEUES), "it waits")
        assert {client.stats("tube", queue)["current-watching"] for queue in QUEUES[1:]} == {"1"}
        consumer.interrupt()
        assert wait.result(10) == []


@pytest.mark.parametrize("queues", [QUEUES[:1], QUEUES], ids=["one queue", "three queues"])
def test_leases_stay_alive_while_their_consumer_waits_and_is_interrupted(
    backend: Backend, client: BareClient, queues: tuple[str, ...]
) -> None:
    backend.enqueue(QUEUE, [new(), new()])
    with backend.consumer(queues) as consumer, ThreadPoolExecutor(1) as pool:
        first, second = consumer.reserve(2, 0)
        for _ in range(3):
            wait = pool.submit(consumer.reserve, 1, 60)
            until(lambda: waiting(client) == 1, "it waits")
            consumer.interrupt()
            assert wait.result(10) == []
        assert consumer.settle([Touch(first), Ack(first), Ack(second)]) == [None] * 3


def test_job_from_a_wait_is_settled_beside_earlier_ones(backend: Backend, client: BareClient) -> None:
    backend.enqueue(QUEUE, [new(b"held")])
    with backend.consumer([QUEUE]) as consumer, ThreadPoolExecutor(1) as pool:
        (held,) = consumer.reserve(1, 0)
        for number in range(3):
            wait = pool.submit(consumer.reserve, 1, 60)
            until(lambda: waiting(client) == 1, "it waits")
            backend.enqueue(QUEUE, [new(b"%d" % number)])
            (came,) = wait.result(10)
            assert came.body == b"%d" % number
            assert consumer.settle([Touch(held), Ack(came)]) == [None, None]
        answers, leases = consumer.exchange([Release(held)], 5, 0)
        assert (answers, [lease.attempt for lease in leases]) == ([None], [2])


def test_interrupted_waits_leave_no_connection_behind(
    server: BeanstalkServer, backend: Backend, client: BareClient
) -> None:
    backend.enqueue(QUEUE, [new()])
    with backend.consumer([QUEUE]) as consumer:
        consumer.reserve(1, 0)  # its connection holds a job, so the consumer waits on another one
        for _ in range(20):
            assert consumer.reserve(1, 0.05) == []
        # the test's client, an idle connection, and the connection that holds the job
        until(lambda: int(client.stats()["current-connections"]) <= 3, "the others are closed")


def test_job_that_arrives_with_the_interrupt_is_reserved_or_ready(
    server: BeanstalkServer, backend: Backend, client: BareClient
) -> None:
    with backend.consumer([QUEUE]) as consumer, open_backend(server.url) as other, ThreadPoolExecutor(2) as pool:
        other.enqueue("elsewhere", [new()])
        for _ in range(100):
            start = threading.Barrier(2)

            def interrupt(start: threading.Barrier = start) -> None:
                start.wait()
                consumer.interrupt()

            wait = pool.submit(consumer.reserve, 1, 60)
            until(lambda: waiting(client) == 1, "it waits")
            interrupted = pool.submit(interrupt)
            start.wait()
            (job_id,) = other.enqueue(QUEUE, [new()])
            leases = wait.result(10) or consumer.reserve(1, 10)
            while not leases:  # a late interrupt ends the second wait
                leases = consumer.reserve(1, 10)
            assert [lease.id for lease in leases] == [job_id]
            interrupted.result(10)
            assert consumer.exchange([Ack(lease) for lease in leases], 1, 0) == ([None], [])


def test_stale_wakeup_ends_no_wait_and_blocks_no_interrupt(backend: Backend, client: BareClient) -> None:
    with backend.consumer([QUEUE]) as consumer, ThreadPoolExecutor(1) as pool:
        assert consumer.reserve(1, 0.05) == []
        consumer._waiter._wakeup.notify()  # type: ignore[attr-defined]
        wait = pool.submit(consumer.reserve, 1, 60)
        until(lambda: waiting(client) == 1, "it waits")
        time.sleep(0.1)
        assert not wait.done()
        consumer.interrupt()
        assert wait.result(10) == []


def test_waiting_consumer_replaces_a_lost_connection_and_waits_on(backend: Backend, client: BareClient) -> None:
    with backend.consumer([QUEUE]) as consumer, ThreadPoolExecutor(1) as pool:
        wait = pool.submit(consumer.reserve, 1, 60)
        until(lambda: waiting(client) == 1, "it waits")
        before = int(client.stats()["total-connections"])
        backend.close()
        until(lambda: int(client.stats()["total-connections"]) > before and waiting(client) == 1, "it waits again")
        (job_id,) = backend.enqueue(QUEUE, [new()])
        assert [lease.id for lease in wait.result(10)] == [job_id]
