"""A consumer keeps the answer to a verdict until a call returns it, whatever it calls in between."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from proxy import CutReply, CutRequest, Proxy

from multiq.backend import Ack, After, Bury, Enqueue, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.redis import RedisServer

    from multiq.backend import Backend, Consumer, Lease, Verdict

QUEUE = "mail"
OTHER = "other"

VERDICTS: list[Callable[[Lease], Verdict]] = [Ack, Release, lambda lease: Bury(lease, "was bad"), GiveBack]
BETWEEN: dict[str, Callable[[Consumer, Lease], object]] = {
    "a heartbeat": lambda consumer, other: consumer.settle([Touch(other)]),
    "a reserve": lambda consumer, _: consumer.reserve(1, 0),
    "another verdict": lambda consumer, other: consumer.settle([Ack(other)]),
    "a reserve that waits": lambda consumer, _: consumer.reserve(1, 0.05),
    "three calls": lambda consumer, other: [consumer.settle([Touch(other)]) for _ in range(3)],
}


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(("127.0.0.1", server.port)) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: Proxy) -> Iterator[Backend]:
    with open_backend(f"redis://127.0.0.1:{proxy.port}") as backend:
        yield backend


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("verdict", VERDICTS, ids=["ack", "release", "bury", "give back"])
def test_verdict_that_counted_is_not_reported_lost_after_another_call(
    proxy: Proxy,
    backend: Backend,
    through: Backend,
    verdict: Callable[[Lease], Verdict],
    between: Callable[[Consumer, Lease], object],
) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    backend.enqueue(OTHER, [NewJob(b"x", "other")])
    with through.consumer([QUEUE]) as consumer, backend.consumer([OTHER]) as second:
        (lease,), (other,) = consumer.reserve(1, 0), second.reserve(1, 0)
        # Given a verdict that was accepted, whose reply is lost, also to all repetitions
        proxy.arm(CutReply(times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.settle([verdict(lease)])
        proxy.disarm()
        # When the same consumer makes another call first
        leases = between(consumer, other)
        # Then a repetition of the verdict is answered with its first result
        assert consumer.settle([verdict(lease)]) == [None]
        # And the answer is given only once: a second verdict is refused
        (lost,) = consumer.settle([verdict(lease)])
        assert isinstance(lost, LeaseLost)
        del leases


def test_a_callers_list_may_change_after_a_call_whose_reply_is_lost(
    proxy: Proxy, backend: Backend, through: Backend
) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", name) for name in ("one", "two", "three")])
    backend.enqueue(OTHER, [NewJob(b"x", "other")])
    with through.consumer([QUEUE]) as consumer, backend.consumer([OTHER]) as second:
        one, two, three = consumer.reserve(3, 0)
        (other,) = second.reserve(1, 0)
        assert backend.consumer([QUEUE]).settle([GiveBack(two)]) == [None]  # so the second of the verdicts is refused
        # Given verdicts that have arrived, whose reply is lost, and a caller that uses its list again
        verdicts: list[Verdict] = [Ack(one), Ack(two), Ack(three)]
        proxy.arm(CutReply(times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.settle(verdicts)
        proxy.disarm()
        verdicts[:] = [Touch(other)]
        assert consumer.settle(verdicts) == [None]
        # Then each verdict has its own first answer
        first, lost, third = consumer.settle([Ack(one), Ack(two), Ack(three)])
        assert (first, third) == (None, None)
        assert isinstance(lost, LeaseLost)


def test_verdict_that_did_not_arrive_is_carried_out_after_another_call(
    proxy: Proxy, backend: Backend, through: Backend
) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    backend.enqueue(OTHER, [NewJob(b"x", "other")])
    with through.consumer([QUEUE]) as consumer, backend.consumer([OTHER]) as second:
        (lease,), (other,) = consumer.reserve(1, 0), second.reserve(1, 0)
        proxy.refuse()
        with pytest.raises(BackendUnavailable):
            consumer.settle([Ack(lease)])
        proxy.accept()
        assert consumer.settle([Touch(other)]) == [None]
        assert consumer.settle([Ack(lease)]) == [None]
        assert backend.stats(QUEUE).reserved == 0


def test_lost_lease_answer_is_kept_too(proxy: Proxy, backend: Backend, through: Backend) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    with through.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Release(lease)]) == [None]
        proxy.arm(CutReply(times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.settle([Ack(lease)])
        proxy.disarm()
        (again,) = consumer.reserve(1, 0)
        assert [type(answer) for answer in consumer.settle([Ack(lease)])] == [LeaseLost]
        assert consumer.settle([Ack(again)]) == [None]


def test_verdict_sent_twice_in_a_call_counts_once_when_its_reply_is_lost(
    proxy: Proxy, backend: Backend, through: Backend
) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    with through.consumer([QUEUE]) as consumer:
        (lease,) = consumer.reserve(1, 0)
        proxy.arm(CutReply(times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.settle([Ack(lease), Ack(lease)])
        proxy.disarm()
        first, second = consumer.settle([Ack(lease), Ack(lease)])
        assert first is None
        assert isinstance(second, LeaseLost)


@pytest.mark.parametrize("ttr", [1, 60])
def test_job_reserved_by_a_failed_call_is_returned_only_while_its_lease_lasts(
    proxy: Proxy, backend: Backend, through: Backend, ttr: float
) -> None:
    backend.enqueue(OTHER, [NewJob(b"x", "other", ttr=60)])
    with through.consumer([QUEUE, OTHER]) as consumer, backend.consumer([QUEUE]) as second:
        (held,) = consumer.reserve(1, 0)
        # Given a call that reserves a job of one queue, and fails to settle a verdict in the other
        backend.enqueue(QUEUE, [NewJob(b"x", "job", ttr=ttr)])
        proxy.arm(CutReply(after=b"{other}:jobs", times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.exchange([Ack(held)], 1, 0)
        proxy.disarm()
        assert backend.peek(QUEUE, "job").state is State.RESERVED
        # When the new lease ends before the next call, then only the second consumer gets the job
        time.sleep(1.1)
        theirs = second.reserve(1, 0)
        ours = consumer.reserve(1, 0)
        assert [len(theirs), len(ours)] == ([1, 0] if ttr == 1 else [0, 1])
        assert (theirs + ours)[0].attempt == (2 if ttr == 1 else 1)


def test_results_of_a_failed_call_stay_with_the_parent_after_a_fork(
    proxy: Proxy, backend: Backend, through: Backend
) -> None:
    # Given a call that reserved a job in one queue, and failed to settle a verdict in the other
    backend.enqueue(OTHER, [NewJob(b"x", "other", ttr=60)])
    with through.consumer([QUEUE, OTHER]) as consumer:
        (held,) = consumer.reserve(1, 0)
        backend.enqueue(QUEUE, [NewJob(b"x", "job", ttr=60)])
        proxy.arm(CutRequest(after=b"{other}:jobs", times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.exchange([Ack(held)], 1, 0)
        proxy.disarm()
        # When a forked child uses the same consumer, then it gets neither the answer nor the job
        pid = os.fork()
        if pid == 0:  # pragma: no cover - in the child
            try:
                os._exit(0 if consumer.reserve(5, 0) == [] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # And the parent gets both
        answers, leases = consumer.exchange([Ack(held)], 1, 0)
        assert answers == [None]
        assert [lease.id for lease in leases] == ["job"]


def test_repeated_touch_carries_out_its_steps_once(proxy: Proxy, backend: Backend, through: Backend) -> None:
    backend.enqueue(QUEUE, [NewJob(b"x", "job")])
    with through.consumer([QUEUE]) as consumer, backend.consumer([OTHER]) as second:
        (lease,) = consumer.reserve(1, 0)
        warm_up, touch, later = (
            Touch(lease, After(steps=(Enqueue(OTHER, NewJob(b"x", name)),))) for name in ("warm-up", "next", "later")
        )
        assert consumer.settle([warm_up]) == [None]  # the server knows the script now
        assert len(second.reserve(1, 0)) == 1
        # Given a touch whose step was carried out, but whose reply is lost, also to all repetitions
        proxy.arm(CutReply(times=1000))
        with pytest.raises(BackendUnavailable):
            consumer.settle([touch])
        proxy.disarm()
        backend.relay([QUEUE])
        # And the step's job has run
        (new,) = second.reserve(1, 0)
        assert second.settle([Ack(new)]) == [None]
        # When the touch is repeated
        assert consumer.settle([touch]) == [None]
        # Then the job is not added again
        assert second.reserve(1, 0) == []
        # And a later touch with other steps is another request
        assert consumer.settle([later]) == [None]
        assert [one.id for one in second.reserve(1, 0)] == ["later"]
