"""Stale leases: late verdicts change nothing, though beanstalkd lets any client delete a job that is not reserved.

A thousand leases end, by time or by their connection; another consumer has the jobs meanwhile, in every state; then the
late consumer sends every kind of verdict. ``MULTIQ_TEST_STALE`` is the number of these leases.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from proxy import Proxy
from worker_app import app, nap, read_diary

from multiq.backend import Ack, Bury, GiveBack, NewJob, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import LeaseLost
from multiq.ids import new_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend, Consumer, Lease, Verdict

ATTEMPTS = int(os.environ.get("MULTIQ_TEST_STALE", "1000"))
BATCH = 200
QUEUE = "stale"
TTR = 6.0  # seconds; the other consumer needs much less
LONG = 3600

VERDICTS: dict[str, Callable[[Lease], Verdict]] = {
    "ack": Ack,
    "release": Release,
    "release late": partial(Release, delay=5),
    "bury": Bury,
    "touch": Touch,
    "give back": GiveBack,
}


@dataclass
class OtherConsumer:
    """The consumer that gets the jobs after the leases have ended, and its actions on them."""

    backend: Backend
    consumer: Consumer

    def take(self, count: int) -> dict[str, Lease]:
        leases: list[Lease] = []
        while found := self.consumer.reserve(BATCH, 5 if len(leases) < count else 0):
            leases += found
        return {lease.id: lease for lease in leases}

    def hold(self, leases: Sequence[Lease]) -> None:
        """Keep the leases."""

    def release(self, leases: Sequence[Lease]) -> None:
        assert not any(self.consumer.settle([Release(lease) for lease in leases]))

    def release_late(self, leases: Sequence[Lease]) -> None:
        assert not any(self.consumer.settle([Release(lease, delay=LONG) for lease in leases]))

    def bury(self, leases: Sequence[Lease]) -> None:
        assert not any(self.consumer.settle([Bury(lease) for lease in leases]))

    def reschedule(self, leases: Sequence[Lease]) -> None:
        self.release(leases)
        for lease in leases:
            self.backend.reschedule(QUEUE, lease.id, LONG)

    def ack(self, leases: Sequence[Lease]) -> None:
        assert not any(self.consumer.settle([Ack(lease) for lease in leases]))

    @property
    def actions(self) -> list[Callable[[Sequence[Lease]], None]]:
        return [self.hold, self.release, self.release_late, self.bury, self.reschedule, self.ack]


@pytest.fixture
def other(server: BeanstalkServer) -> Iterator[OtherConsumer]:
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        yield OtherConsumer(backend, consumer)


@pytest.fixture
def proxy(server: BeanstalkServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


@pytest.fixture
def stale(proxy: Proxy) -> Iterator[Consumer]:
    with open_backend(f"beanstalk://127.0.0.1:{proxy.port}") as backend, backend.consumer([QUEUE]) as consumer:
        yield consumer


def reserve_all(stale: Consumer, backend: Backend, count: int, ttr: float) -> list[Lease]:
    backend.enqueue(QUEUE, [NewJob(b"x", job_id, ttr=ttr) for job_id in new_ids(count)])
    leases: list[Lease] = []
    while len(leases) < count:
        leases += stale.reserve(min(BATCH, count - len(leases)), 0)
    return leases


def everything_about(server: BeanstalkServer, ids: Sequence[str]) -> list[dict[str, str]]:
    """The server's stats of these jobs, without the times that change by themselves."""
    with server.client() as client:
        records = [client.stats("job", job_id) for job_id in ids]
    return [{k: v for k, v in record.items() if k not in {"age", "time-left"}} for record in records]


def settle_late(server: BeanstalkServer, stale: Consumer, other: OtherConsumer, leases: Sequence[Lease]) -> None:
    """The other consumer reserves the jobs and does one action on each. All verdicts of the *stale* one are refused."""
    taken = other.take(len(leases))
    assert sorted(taken) == sorted(lease.id for lease in leases)
    pairs = list(islice(cycle(product(other.actions, VERDICTS.values())), len(leases)))
    kept: list[Lease] = []
    for action in other.actions:
        done = [taken[lease.id] for lease, (its, _) in zip(leases, pairs, strict=True) if its == action]
        kept += done if action == other.hold else []
        action(done)
    before = everything_about(server, [lease.id for lease in leases])
    answers: list[LeaseLost | None] = []
    verdicts = [verdict(lease) for lease, (_, verdict) in zip(leases, pairs, strict=True)]
    for at in range(0, len(verdicts), BATCH):
        answers += stale.settle(verdicts[at : at + BATCH])
    refused = [answer for answer in answers if isinstance(answer, LeaseLost)]
    assert len(refused) == len(leases)
    assert everything_about(server, [lease.id for lease in leases]) == before
    assert not any(other.consumer.settle([Ack(lease) for lease in kept]))
    print(f"\n{len(leases)} late verdicts, {len(refused)} refused, nothing changed")


@pytest.mark.timeout(300)
@pytest.mark.long
def test_ended_lease_does_not_change_its_former_job(
    server: BeanstalkServer, stale: Consumer, other: OtherConsumer
) -> None:
    leases = reserve_all(stale, other.backend, ATTEMPTS, TTR)
    with server.client() as client:
        until(lambda: client.stats("tube", QUEUE)["current-jobs-reserved"] == "0", timeout=60)
    settle_late(server, stale, other, leases)


@pytest.mark.timeout(300)
def test_lease_of_a_closed_connection_does_not_change_its_former_job(
    server: BeanstalkServer, proxy: Proxy, stale: Consumer, other: OtherConsumer
) -> None:
    leases = reserve_all(stale, other.backend, ATTEMPTS, LONG)
    proxy.cut()
    settle_late(server, stale, other, leases)


def test_ended_lease_does_not_change_a_job_that_is_ready_again(
    server: BeanstalkServer, stale: Consumer, other: OtherConsumer
) -> None:
    leases = reserve_all(stale, other.backend, 50, 3)
    with server.client() as client:
        until(lambda: client.stats("tube", QUEUE)["current-jobs-reserved"] == "0", timeout=60)
    before = everything_about(server, [lease.id for lease in leases])
    answers = stale.settle([verdict(lease) for lease, verdict in zip(leases, cycle(VERDICTS.values()), strict=False)])
    assert all(isinstance(answer, LeaseLost) for answer in answers)
    assert everything_about(server, [lease.id for lease in leases]) == before


def test_consumer_cannot_settle_an_old_lease_of_a_job_it_holds_again(
    server: BeanstalkServer, stale: Consumer, other: OtherConsumer
) -> None:
    first = reserve_all(stale, other.backend, 50, 3)
    with server.client() as client:
        until(lambda: client.stats("tube", QUEUE)["current-jobs-reserved"] == "0", timeout=60)
    second = stale.reserve(50, 5)
    assert [lease.id for lease in second] == [lease.id for lease in first]
    old = [verdict(lease) for lease, verdict in zip(first, cycle(VERDICTS.values()), strict=False)]
    assert all(isinstance(answer, LeaseLost) for answer in stale.settle(old))
    assert stale.settle([Ack(lease) for lease in second]) == [None] * 50


@pytest.mark.long
def test_worker_stopped_for_longer_than_its_lease_does_not_settle(
    server: BeanstalkServer, proxy: Proxy, other: OtherConsumer, tmp_path: Path
) -> None:
    app.connect(server.url)
    queue = app.queue().name
    handle = nap.enqueue(1, 2.0)  # the job's ttr is 3 s
    with (
        worker(tmp_path, f"beanstalk://127.0.0.1:{proxy.port}") as process,
        other.backend.consumer([queue]) as consumer,
        server.client() as client,
    ):
        # Given a worker in the middle of a job, that is stopped until its lease is over
        until(lambda: read_diary(process.diary), what=lambda: process.log)
        os.killpg(process.process.pid, signal.SIGSTOP)
        try:
            until(lambda: is_over(client.stats("job", handle.id)))
            proxy.cut()  # in case the server has missed the end of the lease (see test_server.py)
            (lease,) = consumer.reserve(1, 30)
            assert lease.id == handle.id
            assert consumer.settle([Bury(lease)]) == [None]
        finally:
            os.killpg(process.process.pid, signal.SIGCONT)
        # When the stopped consumer continues, and ends the job
        until(lambda: "lost" in process.log, what=lambda: process.log)
        # Then the job stays as the other consumer left it
        assert other.backend.peek(queue, handle.id).state == State.BURIED
    app.close()


def is_over(stats: dict[str, str]) -> bool:
    return stats["state"] == "ready" or int(stats["time-left"]) < 0
