"""Leases end in time although the server misses their ends, and late verdicts are refused."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from servers.process import until

from multiq.backend import Ack, Bury, NewJob, State, Touch
from multiq.backend.registry import open_backend
from multiq.conformance.forks import ended_well, fork
from multiq.errors import LeaseLost
from multiq.ids import new_id
from multiq_beanstalk.leases import NOOP_DELAYS, HeldLeases, LeaseTimer, now

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.beanstalk import BareClient, BeanstalkServer

    from multiq.backend import Backend, Lease

TTR = 3.0  # seconds, the shortest
_numbers = itertools.count(1)


def new(body: bytes = b"x", **options: Any) -> NewJob:
    return NewJob(body, new_id(), **options)


@pytest.fixture
def queue() -> str:
    """A name that was not used on this server before."""
    return f"leases-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def backend(beanstalk_server: BeanstalkServer) -> Iterator[Backend]:
    with open_backend(beanstalk_server.url) as backend:
        yield backend


@pytest.fixture
def client(beanstalk_server: BeanstalkServer) -> Iterator[BareClient]:
    with beanstalk_server.client() as client:
        yield client


@pytest.mark.long
def test_leases_of_many_silent_consumers_end_in_time(backend: Backend, queue: str) -> None:
    # Given consumers that hold one job or several, and send no verdict
    counts = [1, 1, 1, 1, 1, 5, 20]
    backend.enqueue(queue, [new(ttr=TTR)] * sum(counts))
    consumers = [backend.consumer([queue]) for _ in counts]
    for consumer, count in zip(consumers, counts, strict=True):
        assert len(consumer.reserve(count, 0)) == count
    over = time.monotonic() + TTR
    # When the leases end, then all jobs are ready: without the driver's no-ops, most would stay reserved
    time.sleep(over + 1.0 - time.monotonic())
    stats = backend.stats(queue)
    assert (stats.ready, stats.reserved) == (sum(counts), 0)
    for consumer in consumers:
        consumer.close()
    assert backend.purge(queue, [State.READY]) == sum(counts)


def test_leases_end_with_the_consumer_while_a_child_forked_before_lives(backend: Backend, queue: str) -> None:
    # Given a consumer with a lease, and a forked child that makes no calls
    backend.enqueue(queue, [new(ttr=600)])
    consumer = backend.consumer([queue])
    assert len(consumer.reserve(1, 0)) == 1
    reader, writer = os.pipe()

    def wait_for_the_parent() -> None:
        os.close(writer)
        os.read(reader, 1)

    child = fork(wait_for_the_parent)
    os.close(reader)
    # When the parent closes its consumer, then the server sees the connection's end: the child has no copy of the
    # connection
    try:
        consumer.close()
        until(lambda: backend.stats(queue).ready == 1, "the job is ready again")
    finally:
        os.close(writer)
    assert ended_well(child)
    assert backend.purge(queue, [State.READY]) == 1


def test_lease_of_a_forked_child_ends_in_time(backend: Backend, queue: str) -> None:
    # Given a lease timer's thread in the parent, which the child does not have
    backend.enqueue(queue, [new(ttr=60), new(ttr=TTR)])
    with backend.consumer([queue]) as consumer:
        (ours,) = consumer.reserve(1, 0)

        def work() -> None:
            assert isinstance(consumer.settle([Ack(ours)])[0], LeaseLost)  # the lease is the parent's
            assert len(consumer.reserve(1, 0)) == 1
            time.sleep(TTR + 1)
            assert backend.stats(queue).ready == 1

        # When the child's lease ends, then the job is ready for all consumers
        assert ended_well(fork(work))
        assert consumer.settle([Ack(ours)]) == [None]
    assert backend.purge(queue, [State.READY]) == 1


def test_consumer_reads_its_own_replies_after_noops(backend: Backend, queue: str) -> None:
    backend.enqueue(queue, [new(b"short", ttr=TTR), new(b"long", ttr=60)])
    with backend.consumer([queue]) as consumer:
        short, long = consumer.reserve(2, 0)
        time.sleep(TTR + NOOP_DELAYS[1] + 0.2)
        # the replies to the no-ops that were sent meanwhile are not taken for other replies
        (lost, *rest) = consumer.settle([Ack(short), Touch(long)])
        assert isinstance(lost, LeaseLost)
        assert rest == [None]
        (again,) = consumer.reserve(5, 0)
        assert (again.body, again.attempt, again.crashes) == (b"short", 2, 1)
        assert consumer.settle([Ack(long), Ack(again)]) == [None, None]


def test_unsettled_lease_is_forgotten(backend: Backend, queue: str) -> None:
    backend.enqueue(queue, [new(ttr=TTR)])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        held = consumer._held_leases._held  # type: ignore[attr-defined]
        assert lease.token in held
        until(lambda: not held, "it is forgotten")
        assert isinstance(consumer.settle([Ack(lease)])[0], LeaseLost)
    assert backend.purge(queue, [State.READY]) == 1


def touches(client: BareClient) -> int:
    return int(client.stats()["cmd-touch"])


def near_its_end(lease: Lease, reserved_at: float) -> None:
    time.sleep(reserved_at + lease.ttr - 0.4 - time.monotonic())


def test_ack_near_the_end_of_the_lease_is_preceded_by_a_touch(backend: Backend, client: BareClient, queue: str) -> None:
    backend.enqueue(queue, [new(ttr=TTR), new(ttr=TTR), new(ttr=60)])
    with backend.consumer([queue]) as consumer:
        reserved_at = time.monotonic()
        acked, buried, long = consumer.reserve(3, 0)
        before = touches(client)
        near_its_end(acked, reserved_at)
        answers = consumer.settle([Ack(acked), Bury(buried), Ack(long)])
        if time.monotonic() < reserved_at + TTR:
            assert answers == [None, None, None]
            # only one touch is sent: the server itself refuses a late bury, and the other lease has much time left
            assert touches(client) - before == 1
    assert backend.purge(queue, [State.BURIED, State.READY]) == 1


def test_ack_is_not_sent_after_a_refused_touch(backend: Backend, client: BareClient, queue: str) -> None:
    # Given a lease that has ended on the server, and not yet by the consumer's clock
    backend.enqueue(queue, [new(ttr=TTR)])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        consumer._held_leases._held[lease.token].ends_at += 0.9  # type: ignore[attr-defined]
        time.sleep(TTR + 0.2)
        consumer._main.send_noop()  # type: ignore[attr-defined]
        until(lambda: client.stats("job", lease.id)["state"] == "ready", "the server has noticed")
        deletes = int(client.stats()["cmd-delete"])
        # When the consumer acks, then the server refuses the touch before the delete, and nothing is deleted
        assert isinstance(consumer.settle([Ack(lease)])[0], LeaseLost)
        assert int(client.stats()["cmd-delete"]) == deletes
        assert backend.peek(queue, lease.id).state == State.READY
    assert backend.purge(queue, [State.READY]) == 1


@pytest.mark.long
def test_job_from_a_wait_has_its_whole_lease(backend: Backend, client: BareClient, queue: str) -> None:
    # Given a job that comes after a wait as long as its ttr
    backend.enqueue(queue, [new(ttr=TTR, delay=TTR)])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 30)
        reserved_at = time.monotonic()
        time.sleep(TTR - 1)
        # Then its lease began after the wait, not with the wait
        (answer,) = consumer.settle([Ack(lease)])
        assert answer is None or time.monotonic() > reserved_at + TTR


def test_foreign_job_with_a_ttr_of_one_second_can_be_worked(backend: Backend, client: BareClient, queue: str) -> None:
    client.put(b"foreign", tube=queue, ttr=1)
    with backend.consumer([queue]) as consumer:
        reserved_at = time.monotonic()
        (lease,) = consumer.reserve(1, 0)
        assert lease.ttr == 1
        answers = consumer.settle([Touch(lease), Ack(lease)])
        assert answers == [None, None] or time.monotonic() > reserved_at + 1
    assert backend.purge(queue, [State.READY]) <= 1


def test_ack_of_a_one_second_lease_needs_few_touches(backend: Backend, client: BareClient, queue: str) -> None:
    for ttr in (1, 60):
        client.put(b"foreign", tube=queue, ttr=ttr)
    with backend.consumer([queue]) as consumer:
        reserved_at = time.monotonic()
        short, long = consumer.reserve(2, 0) + consumer.reserve(1, 0)
        before = touches(client)
        near_its_end(short, reserved_at)
        answers = consumer.settle([Ack(short), Ack(long)])
        assert touches(client) - before <= 3  # one touch is sent, unless the machine is busy
        assert answers[1] is None
    backend.purge(queue, [State.READY])


def test_late_verdict_leaves_the_job_to_other_consumers(backend: Backend, client: BareClient, queue: str) -> None:
    """The server misses the ends of most leases, so the driver must still remind it."""
    queues = [f"{queue}-{number}" for number in range(10)]
    with contextlib.ExitStack() as stack:
        leases = []
        for name in queues:
            backend.enqueue(name, [new(ttr=TTR)])
            consumer = stack.enter_context(backend.consumer([name]))
            leases += [(consumer, lease) for lease in consumer.reserve(1, 0)]
            time.sleep(0.03)  # so that the server is idle at each end
        for consumer, lease in leases:
            end = consumer._held_leases._held[lease.token].ends_at  # type: ignore[attr-defined]
            time.sleep(max(0.0, end - now()) + 0.0005)
            assert isinstance(consumer.settle([Ack(lease)])[0], LeaseLost)
        for name in queues:
            until(lambda name=name: client.stats("tube", name)["current-jobs-ready"] == "1", "it is ready")  # type: ignore[misc]
    for name in queues:
        assert backend.purge(name, [State.READY]) == 1


def test_consumer_with_an_ended_lease_waits_and_can_be_interrupted(
    backend: Backend, client: BareClient, queue: str
) -> None:
    # Given a job on the second connection, which has unread replies to no-ops
    backend.enqueue(queue, [new(b"held", ttr=60)])
    with backend.consumer([queue]) as consumer, ThreadPoolExecutor(1) as pool:
        (held,) = consumer.reserve(1, 0)
        wait = pool.submit(consumer.reserve, 1, 60)
        until(lambda: client.stats("tube", queue).get("current-waiting") == "1", "it waits")
        backend.enqueue(queue, [new(b"forgotten", ttr=TTR)])
        (lease,) = wait.result(10)
        leases = consumer._held_leases._held  # type: ignore[attr-defined]
        until(lambda: len(leases) == 1, "it is forgotten")
        backend.delete(queue, lease.id)
        # When the consumer waits on that connection, then it can be interrupted, and woken by a job
        for is_interrupted in (True, False):
            wait = pool.submit(consumer.reserve, 1, 60)
            until(lambda: client.stats("tube", queue).get("current-waiting") == "1", "it waits")
            if is_interrupted:
                consumer.interrupt()
                assert wait.result(10) == []
            else:
                (job_id,) = backend.enqueue(queue, [new()])
                (came,) = wait.result(10)
                assert came.id == job_id
                assert consumer.settle([Ack(came)]) == [None]
        assert consumer.settle([Ack(held)]) == [None]


# --- the lease timer's thread --------------------------------------------------------------------------------


def timer_threads() -> int:
    return sum(thread.name == "multiq-beanstalk-lease-timer" for thread in threading.enumerate())


def test_lease_timer_starts_after_the_system_has_refused_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    timer, held_leases, before = LeaseTimer(), HeldLeases(), timer_threads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            timer.schedule(held_leases, now() + 60)
    timer.schedule(held_leases, now() + 60)
    assert timer_threads() == before + 1


@pytest.mark.long
def test_lease_timer_serves_all_threads_of_a_child_that_begin_at_once() -> None:
    timer = LeaseTimer()
    timer.schedule(HeldLeases(), now() + 60)

    def begin() -> None:
        sys.setswitchinterval(1e-6)
        held = [HeldLeases() for _ in range(4)]
        barrier = threading.Barrier(len(held))

        def schedule(one: HeldLeases) -> None:
            barrier.wait()
            timer.schedule(one, now() + 60)

        with ThreadPoolExecutor(len(held)) as executor:
            list(executor.map(schedule, held))
        assert timer_threads() == 1
        assert all(one in timer._consumers for one in held)

    for _ in range(20):
        assert ended_well(fork(begin))
