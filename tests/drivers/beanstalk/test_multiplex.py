"""Replies on several connections: if one connection dies silently, only its own verdicts fail."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from proxy import Proxy
from servers.process import HOST

from multiq.backend import Ack, Lease, NewJob, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendTimeout, LeaseLost
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend, Consumer

QUEUES = ["silent", "silent.too"]
TIMEOUT = 1.5  # seconds that a call may take
GRACE = 1.2  # for a busy machine; less than what a second timeout would take
LONG = 60.0


@pytest.fixture
def proxy(server: BeanstalkServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def consumer(proxy: Proxy) -> Iterator[Consumer]:
    """A consumer of two queues, so that it waits on one connection and reserves without a wait on another."""
    with (
        open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout={TIMEOUT}") as far,
        far.consumer(QUEUES) as consumer,
    ):
        yield consumer


def enqueue(backend: Backend, count: int = 1, ttr: float = LONG) -> None:
    backend.enqueue(QUEUES[0], [NewJob(b"x", new_id(), ttr=ttr) for _ in range(count)])


def waited_for(consumer: Consumer, backend: Backend, pool: ThreadPoolExecutor) -> Lease:
    """A lease on the connection on which the consumer waits."""
    accepted = pool.submit(consumer.reserve, 1, 20)
    time.sleep(0.2)  # until the consumer's first poll is over; if this poll got the job, the test would fail
    enqueue(backend)
    (lease,) = accepted.result(20)
    return lease


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def silent(consumer: Consumer, proxy: Proxy, backend: Backend, pool: ThreadPoolExecutor) -> Lease:
    """A lease on a connection that has died silently. The consumer opens another one, which works."""
    lease = waited_for(consumer, backend, pool)
    proxy.freeze()
    with pytest.raises(BackendTimeout):
        consumer.reserve(1, 0)  # the consumer learns that its other connection is dead, too
    return lease


@pytest.mark.one_row
@pytest.mark.parametrize("verdict", [Ack, Touch])
def test_verdicts_on_other_connections_count(
    consumer: Consumer, backend: Backend, silent: Lease, verdict: type[Ack | Touch]
) -> None:
    enqueue(backend, 3)
    leases = consumer.reserve(3, 0)
    started = time.monotonic()
    answers = consumer.settle([verdict(lease) for lease in (silent, *leases)])
    assert time.monotonic() - started < TIMEOUT + GRACE
    assert isinstance(answers[0], LeaseLost)
    assert answers[1:] == [None] * len(leases)
    if verdict is Touch:
        assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
    assert backend.stats(QUEUES[0]).reserved == 1  # the server still counts the job of the silent connection


def test_leases_on_other_connections_live_on_and_jobs_are_handed_out(
    consumer: Consumer, backend: Backend, silent: Lease
) -> None:
    enqueue(backend)
    (held,) = consumer.reserve(1, 0)
    enqueue(backend, 2)
    started = time.monotonic()
    (answer,), leases = consumer.exchange([Ack(silent)], 2, 0)
    assert time.monotonic() - started < TIMEOUT + GRACE
    assert isinstance(answer, LeaseLost)
    assert len(leases) == 2
    assert consumer.settle([Ack(lease) for lease in (held, *leases)]) == [None] * 3


@pytest.mark.long
def test_ack_counts_though_its_lease_ends_before_the_silent_connection_times_out(
    proxy: Proxy, backend: Backend, pool: ThreadPoolExecutor
) -> None:
    with (
        open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=4") as far,
        far.consumer(QUEUES) as consumer,
    ):
        silent = waited_for(consumer, backend, pool)
        proxy.freeze()
        with pytest.raises(BackendTimeout):
            consumer.reserve(1, 0)
        enqueue(backend, ttr=3)
        (short,) = consumer.reserve(1, 0)
        lost, answer = consumer.settle([Ack(silent), Ack(short)])
        assert isinstance(lost, LeaseLost)
        assert answer is None


def test_settle_beside_a_blocked_call_ends_in_time_and_loses_nothing(
    consumer: Consumer, backend: Backend, silent: Lease, pool: ThreadPoolExecutor
) -> None:
    enqueue(backend)
    (held,) = consumer.reserve(1, 0)
    blocked = pool.submit(consumer.settle, [Touch(silent)])
    time.sleep(0.1)  # until the thread's call has locked the connections
    started = time.monotonic()
    with pytest.raises(BackendTimeout, match="another call"):
        consumer.settle([Touch(held)])
    assert time.monotonic() - started < TIMEOUT + GRACE
    assert isinstance(blocked.result(20)[0], LeaseLost)
    assert consumer.settle([Ack(held)]) == [None]


@pytest.mark.long
def test_settle_that_waits_for_a_blocked_call_takes_no_second_timeout(
    consumer: Consumer, proxy: Proxy, backend: Backend, silent: Lease, pool: ThreadPoolExecutor
) -> None:
    # Given two silent connections, and a call that waits for one of them
    enqueue(backend)
    (held,) = consumer.reserve(1, 0)
    proxy.freeze()
    blocked = pool.submit(consumer.settle, [Touch(silent)])
    time.sleep(0.1)
    # Then a settle on another connection ends at its own deadline
    started = time.monotonic()
    with pytest.raises(BackendTimeout):
        consumer.settle([Touch(held)])
    assert time.monotonic() - started < TIMEOUT + GRACE
    blocked.result(20)
    assert isinstance(consumer.settle([Ack(held)])[0], LeaseLost)
