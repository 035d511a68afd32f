"""Lost replies: a lease ends with its connection, whether that is cut, frozen, or ends behind unread replies.

Each fault has one deterministic test, in which another consumer gets the jobs meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from proxy import CutReply, Hole, Latency, Pass, Proxy
from servers.process import HOST, until

from multiq.backend import Ack, Bury, Lease, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, LeaseLost
from multiq.ids import new_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from servers.beanstalk import BareClient, BeanstalkServer

    from multiq.backend import Backend, Consumer, Verdict

QUEUE = "lost"
TIMEOUT = 1.5  # seconds that a call may take
GRACE = 1.2  # seconds that a busy machine may add: less than a second timeout
TTR = 3.0  # seconds, the shortest


@pytest.fixture
def proxy(server: BeanstalkServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: Proxy) -> Iterator[Backend]:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout={TIMEOUT}") as far:
        yield far


@pytest.fixture
def consumer(far: Backend) -> Iterator[Consumer]:
    with far.consumer([QUEUE]) as consumer:
        yield consumer


@pytest.fixture
def other(backend: Backend) -> Iterator[Consumer]:
    with backend.consumer([QUEUE]) as other:
        yield other


def enqueue(backend: Backend, *ttrs: float) -> None:
    backend.enqueue(
        QUEUE, [NewJob(b"x", job_id, ttr=ttr) for ttr, job_id in zip(ttrs, new_ids(len(ttrs)), strict=True)]
    )


def insist(consumer: Consumer, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
    """Repeat a call that fails, as a worker does."""
    for _ in range(5):
        try:
            return consumer.settle(verdicts)
        except BackendError:
            time.sleep(0.1)
    raise AssertionError("there was no answer")


def test_connection_end_behind_unread_replies_ends_the_lease(
    proxy: Proxy, backend: Backend, consumer: Consumer, other: Consumer, client: BareClient
) -> None:
    # Given two leases, one of which has ended: the driver sent a no-op for it, and did not read the reply
    enqueue(backend, TTR, 60)
    short, long = sorted(consumer.reserve(2, 0), key=lambda lease: lease.ttr)
    until(lambda: client.stats("job", short.id)["state"] == "ready", "the short lease is over")
    # When the connection is cut, and another consumer has done the other job
    proxy.cut()
    until(lambda: client.stats("job", long.id)["state"] == "ready", "the server has noticed")
    leases = {lease.id: lease for lease in other.reserve(2, 5)}
    assert other.settle([Ack(leases[long.id]), Release(leases[short.id])]) == [None, None]
    # Then the ack is refused: the driver notices the end of the connection before it sends anything
    (answer,), (again,) = consumer.exchange([Ack(long)], 1, 0)
    assert isinstance(answer, LeaseLost)
    assert again.id == short.id


VERDICTS: dict[str, Callable[[Lease], Verdict]] = {
    "ack": Ack,
    "bury": Bury,
    "touch": Touch,
}


@pytest.mark.one_row
@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())
def test_verdict_of_another_consumer_after_a_cut_is_not_taken_for_our_own(
    proxy: Proxy, backend: Backend, consumer: Consumer, other: Consumer, verdict: Callable[[Lease], Verdict]
) -> None:
    # Given a connection that the server has closed, without the client noticing
    enqueue(backend, 60)
    (lease,) = consumer.reserve(1, 0)
    proxy.freeze()
    proxy.cut_server()
    # When another consumer has acked the job
    (theirs,) = other.reserve(1, 5)
    assert other.settle([Ack(theirs)]) == [None]
    # Then our verdict is refused, and in time
    start = time.monotonic()
    (answer,) = insist(consumer, [verdict(lease)])
    assert isinstance(answer, LeaseLost)
    assert time.monotonic() - start < TIMEOUT + GRACE


@pytest.mark.parametrize("verdict", [Ack, Touch], ids=["ack", "touch"])
def test_settle_on_a_silent_connection_ends_within_its_timeout(
    proxy: Proxy, backend: Backend, consumer: Consumer, verdict: Callable[[Lease], Verdict]
) -> None:
    # Given a connection that no longer carries data, which the server does not notice
    enqueue(backend, 60, 60)
    leases = consumer.reserve(2, 0)
    proxy.freeze()
    # Then a settle ends at its deadline
    start = time.monotonic()
    answers = consumer.settle([verdict(lease) for lease in leases])
    assert time.monotonic() - start < TIMEOUT + GRACE
    assert all(isinstance(answer, LeaseLost) for answer in answers)
    assert backend.stats(QUEUE).queue == QUEUE


def test_settle_and_exchange_without_replies_end_within_their_timeout(
    proxy: Proxy, backend: Backend, consumer: Consumer
) -> None:
    enqueue(backend, 60, 60, 60)
    first, second, third = consumer.reserve(3, 0)
    proxy.mode = Hole()
    start = time.monotonic()
    assert isinstance(consumer.settle([Ack(first)])[0], LeaseLost)
    assert time.monotonic() - start < TIMEOUT + GRACE
    start = time.monotonic()
    answers, leases = consumer.exchange([Ack(second), Release(third)], 5, 0)
    assert time.monotonic() - start < TIMEOUT + GRACE
    assert all(isinstance(answer, LeaseLost) for answer in answers)
    assert leases == []


def test_verdicts_answered_before_a_cut_count(proxy: Proxy, backend: Backend, consumer: Consumer) -> None:
    enqueue(backend, 60, 60, 60)
    leases = consumer.reserve(3, 0)
    proxy.arm(CutReply(at=len(b"DELETED\r\nDEL"), after=b"delete"))
    first, *others = consumer.settle([Ack(lease) for lease in leases])
    assert first is None
    assert all(isinstance(answer, LeaseLost) for answer in others)
    assert all(isinstance(answer, LeaseLost) for answer in consumer.settle([Ack(lease) for lease in leases]))


@pytest.mark.one_row
@pytest.mark.parametrize("wait", [0.0, 8.0])
def test_job_that_arrives_after_its_lease_is_not_held_twice(
    proxy: Proxy, backend: Backend, other: Consumer, client: BareClient, wait: float
) -> None:
    with (
        open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=10") as far,
        far.consumer([QUEUE]) as consumer,
        ThreadPoolExecutor(2) as pool,
    ):
        assert consumer.reserve(1, 0) == []  # connected
        if wait:
            ours = pool.submit(consumer.reserve, 1, wait)
            until(lambda: client.stats()["current-waiting"] == "1", "it waits")
        else:
            enqueue(backend, TTR)
        # When the consumer is handed a job, and the reply arrives only when the lease is over
        proxy.mode = Latency(TTR + 0.3)
        if wait:
            enqueue(backend, TTR)
        else:
            ours = pool.submit(consumer.reserve, 1, wait)
        until(lambda: backend.stats(QUEUE).reserved == 1, "it is handed out")
        proxy.mode = Pass()
        theirs = pool.submit(other.reserve, 1, 8)
        # Then only one of the two consumers has the job, and keeps it until it settles the job
        taken = 0
        for holder, result in ((consumer, ours), (other, theirs)):
            held = result.result(20)
            taken += len(held)
            assert holder.settle([Ack(lease) for lease in held]) == [None] * len(held)
        assert taken == 1
        assert backend.stats(QUEUE).ready == 0


def test_ack_answered_after_the_end_of_the_lease_is_refused(proxy: Proxy, backend: Backend) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=10") as far, far.consumer([QUEUE]) as consumer:
        enqueue(backend, TTR)
        (lease,) = consumer.reserve(1, 0)
        proxy.mode = Latency(TTR)
        assert isinstance(consumer.settle([Ack(lease)])[0], LeaseLost)
        proxy.mode = Pass()
        assert backend.jobs(QUEUE, State.READY).jobs == []


@pytest.mark.long
def test_ack_is_not_sent_if_its_lease_ends_during_another_touch(
    proxy: Proxy, backend: Backend, client: BareClient
) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=10") as far, far.consumer([QUEUE]) as consumer:
        enqueue(backend, TTR, TTR + 1)
        leases = consumer.reserve(2, 0)
        time.sleep(TTR - 0.8)
        # Given two acks in one call: one lease is in its last second, and the other has 1.8 s left
        proxy.mode = Latency(2.0)
        answers = consumer.settle([Ack(lease) for lease in leases])
        # When the touch of the first lease takes 2 s, then the second lease is touched as well, or its job is not
        # deleted
        proxy.mode = Pass()
        for answer, lease in zip(answers, leases, strict=True):
            assert (answer is None) == (client.stats("job", lease.id) == {})


def test_exception_before_a_lease_begins_gives_the_job_back(
    backend: Backend, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
        enqueue(backend, 60)

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("multiq_beanstalk.leases.parse_job_stats", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.reserve(1, 0)
        monkeypatch.undo()
        until(lambda: backend.stats(QUEUE).ready == 1, "the job is ready")
        assert len(consumer.reserve(1, 5)) == 1
