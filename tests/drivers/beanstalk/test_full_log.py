"""Refusals: a full log, a refused tube, and a link that is too slow for a batch."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from proxy import CutReply, CutRequest, Latency, Pass, Proxy, Throttle
from servers.process import HOST

from multiq.backend import Ack, Bury, NewJob, Release, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendFull, BackendUnavailable, EnqueuePartial, EnqueueUncertain, LeaseLost
from multiq.ids import new_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BareClient, BeanstalkServer

    from multiq.backend import Backend

QUEUE = "room"
OTHER = "other"


def new(count: int = 1, body: bytes = b"x", **options: Any) -> list[NewJob]:
    return [NewJob(body, job_id, **options) for job_id in new_ids(count)]


@pytest.fixture
def proxy(server: BeanstalkServer) -> Iterator[Proxy]:
    with Proxy(server.address) as proxy:
        yield proxy


# --- a log without room ----------------------------------------------------------------------------------


@pytest.fixture
def logging(new_beanstalk: Callable[..., BeanstalkServer]) -> BeanstalkServer:
    return new_beanstalk(binlog=True, fsync_ms=0, log_file_size=8192)


def fill(server: BeanstalkServer, backend: Backend) -> None:
    """Fill the server's log, and prevent the server from creating another file for it."""
    assert server.binlog is not None
    server.binlog.rename(server.folder / "away")
    for size in (500, 1):  # the small jobs fill the last bytes
        with contextlib.suppress(BackendFull):
            for _ in range(10_000):
                backend.enqueue(OTHER, new(body=b"x" * size))
            raise AssertionError("there is room without end")


def make_room(server: BeanstalkServer) -> None:
    assert server.binlog is not None
    (server.folder / "away").rename(server.binlog)


def test_verdict_without_room_in_the_log_ends_the_lease_and_reports_the_job(
    logging: BeanstalkServer, caplog: pytest.LogCaptureFixture
) -> None:
    with open_backend(logging.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, new(4))
        late, bury, ack, held = consumer.reserve(4, 0)
        fill(logging, backend)
        # When it settles two verdicts that need room in the log, an ack, and a touch
        answers = consumer.settle([Release(late, delay=5), Bury(bury), Ack(ack), Touch(held)])
        # Then those verdicts are refused, each with its consequence, and the others are accepted
        assert [type(answer) for answer in answers[2:]] == [type(None), type(None)]
        for answer, lease in zip(answers[:2], (late, bury), strict=True):
            assert isinstance(answer, LeaseLost)
            assert "out of reach until the server restarts" in str(answer)
            assert lease.id in str(answer)
        assert "out of reach until the server restarts" in caplog.text
        # And the refused verdicts' jobs have no lease any more
        assert all(type(answer) is LeaseLost for answer in consumer.settle([Ack(late), Ack(bury)]))
        assert consumer.settle([Release(held)]) == [None]
        make_room(logging)
        # And the restart of the server brings these jobs back
        logging.stop()
        logging.start()
        assert sorted(lease.id for lease in consumer.reserve(9, 5)) == sorted([late.id, bury.id, held.id])


@pytest.mark.timeout(20)
def test_kick_without_room_in_the_log_raises(logging: BeanstalkServer) -> None:
    with open_backend(logging.url) as backend, backend.consumer([QUEUE]) as consumer, logging.client() as client:
        ids = backend.enqueue(QUEUE, new(3))
        assert consumer.settle([Bury(lease) for lease in consumer.reserve(3, 0)]) == [None] * 3
        (delayed,) = backend.enqueue(QUEUE, new(delay=3600))
        fill(logging, backend)
        before = int(client.stats()["cmd-peek-buried"])
        with pytest.raises(BackendFull, match=rf"job \d of queue '{QUEUE}'"):
            backend.kick(QUEUE, 10)
        assert int(client.stats()["cmd-peek-buried"]) - before < 10
        with pytest.raises(BackendFull, match=ids[2]):
            backend.kick_job(QUEUE, ids[2])
        with pytest.raises(BackendFull, match=delayed):
            backend.kick_job(QUEUE, delayed)
        buried = backend.stats(QUEUE).buried  # the log may have had room for one of the kicks
        assert buried in {2, 3}
        make_room(logging)
        assert backend.kick(QUEUE, 10) == buried


# --- a tube that is refused ------------------------------------------------------------------------------


class Misspelling(Proxy):
    """Makes a tube's name one that the real server refuses."""

    name = b""

    def _of_request(self, data: bytes) -> Any:
        if self.name:
            data = data.replace(b" %b\r\n" % self.name, b" -%b\r\n" % self.name[1:])
        return super()._of_request(data)


@pytest.fixture
def misspelling(server: BeanstalkServer) -> Iterator[Misspelling]:
    with Misspelling(server.address) as misspelling:
        yield misspelling


@pytest.mark.parametrize("count", [1, 3])
def test_enqueue_after_a_refused_use_puts_no_job_into_another_queue(
    misspelling: Misspelling, client: BareClient, count: int
) -> None:
    with open_backend(f"beanstalk://{HOST}:{misspelling.port}") as backend:
        backend.enqueue(OTHER, new())
        misspelling.name = QUEUE.encode()
        with pytest.raises(BackendError) as refused:
            backend.enqueue(QUEUE, new(count))
        assert not isinstance(refused.value, EnqueueUncertain | EnqueuePartial)
        assert client.stats("tube", OTHER)["current-jobs-ready"] == "1"
        misspelling.name = b""
        backend.enqueue(QUEUE, new(count))
        assert client.stats("tube", QUEUE)["current-jobs-ready"] == str(count)


def test_reschedule_after_a_refused_use_puts_no_job_into_another_queue(
    misspelling: Misspelling, client: BareClient
) -> None:
    with open_backend(f"beanstalk://{HOST}:{misspelling.port}") as backend:
        backend.enqueue(OTHER, new())
        job_id = str(client.put(b"x", tube=QUEUE))
        misspelling.name = QUEUE.encode()
        with pytest.raises(BackendError):
            backend.reschedule(QUEUE, job_id, 5)
        assert client.stats("tube", OTHER)["current-jobs-delayed"] == "0"
        assert client.stats("tube", OTHER)["total-jobs"] == "1"
        assert client.stats("job", job_id)["state"] == "ready"


def test_reserve_after_a_refused_watch_returns_no_job_of_another_queue(
    misspelling: Misspelling, client: BareClient
) -> None:
    with (
        open_backend(f"beanstalk://{HOST}:{misspelling.port}") as backend,
        backend.consumer([OTHER, QUEUE]) as consumer,
    ):
        client.put(b"x", tube=QUEUE)
        assert [lease.queue for lease in consumer.reserve(1, 0)] == [QUEUE]
        client.put(b"x", tube=QUEUE)
        misspelling.name = OTHER.encode()
        for _ in range(2):
            with pytest.raises(BackendError):
                consumer.reserve(2, 0)
        misspelling.name = b""
        client.put(b"x", tube=OTHER)
        assert next(lease.queue for lease in consumer.reserve(9, 5)) == OTHER


# --- unsent jobs -----------------------------------------------------------------------------------------


def test_cut_enqueue_reports_unsent_jobs(proxy: Proxy, client: BareClient) -> None:
    jobs = new(10_000)
    with open_backend(f"beanstalk://{HOST}:{proxy.port}") as backend:
        backend.enqueue(QUEUE, new())
        proxy.arm(CutReply(after=b"put", nth=1500))
        with pytest.raises(EnqueueUncertain, match="were not sent") as caught:
            backend.enqueue(QUEUE, jobs)
        error = caught.value
        assert 1000 <= len(error.accepted) < 2000
        assert 0 < len(error.jobs) <= 1000
        assert [*error.jobs, *error.unsent] == jobs[len(error.accepted) :]
        # the server never received the unsent jobs, so they can be enqueued again
        assert len(error.unsent) == 8000
        there = int(client.stats("tube", QUEUE)["current-jobs-ready"]) - 1
        assert len(error.accepted) <= there <= len(error.accepted) + len(error.jobs)


def test_partly_sent_packet_reports_the_rest_as_unsent(proxy: Proxy, client: BareClient) -> None:
    jobs = new(60, b"x" * 60_000)
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=1") as backend:
        backend.enqueue(QUEUE, new())
        proxy.freeze()
        with pytest.raises(EnqueueUncertain) as caught:
            backend.enqueue(QUEUE, jobs * 3)
        assert len(caught.value.jobs) > 0
        assert caught.value.unsent


class Boaster(Proxy):
    """Replaces the server's ``max-job-size`` in its replies by a larger one."""

    def _of_reply(self, data: bytes) -> Any:
        passed, fault = super()._of_reply(data)
        return passed.replace(b"max-job-size: 100\n", b"max-job-size: 900\n"), fault


def test_jobs_refused_before_a_cut_are_reported_as_not_stored(
    new_beanstalk: Callable[..., BeanstalkServer],
) -> None:
    server = new_beanstalk(max_job_size=100)
    small, large, uncertain = new(), new(body=b"x" * 500), new(3)
    with Boaster(server.address) as boaster, open_backend(f"beanstalk://{HOST}:{boaster.port}") as backend:
        backend.enqueue(QUEUE, new())
        boaster.arm(CutReply(at=len(b"INSERTED 2\r\nJOB_TOO_BIG\r\n"), after=b"put"))
        with pytest.raises(EnqueueUncertain, match=r"1 .*are not there") as caught:
            backend.enqueue(QUEUE, [*small, *large, *uncertain])
    error = caught.value
    assert error.accepted == {0: "2"}
    assert list(error.jobs) == uncertain
    assert list(error.unsent) == large


def test_job_buried_by_its_put_before_a_cut_is_uncertain(
    proxy: Proxy, server: BeanstalkServer, client: BareClient
) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}") as backend:
        backend.enqueue(QUEUE, new(delay=3600))
        client.fill(QUEUE)
        late, buried = new(delay=3600), new(2)
        # Given a server that buries new jobs for lack of memory, and a cut before the client deletes them
        with server.little_memory(128 * 1024):
            proxy.arm(CutRequest(after=b"delete"))
            with pytest.raises(EnqueueUncertain) as caught:
                backend.enqueue(QUEUE, [*buried[:1], *late, *buried[1:]])
        error = caught.value
        # Then each job is in one of the error's lists
        assert list(error.accepted) == [1]
        assert list(error.jobs) == buried
        assert error.unsent == ()
        assert client.stats("tube", QUEUE)["current-jobs-buried"] == "2"


def test_enqueue_without_any_sent_byte_is_not_uncertain(proxy: Proxy, client: BareClient) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}") as backend:
        backend.enqueue(OTHER, new())
        proxy.arm(CutRequest(after=b"use"))
        with pytest.raises(BackendUnavailable):
            backend.enqueue(QUEUE, new(3))
        assert client.stats("tube", QUEUE) == {}


def test_enqueue_into_another_queue_ends_within_its_timeout(proxy: Proxy) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=2") as backend:
        backend.enqueue(OTHER, new())
        proxy.mode = Latency(1.6)  # for each of two replies: one reply would be in time, two replies together are not
        with pytest.raises(EnqueueUncertain):
            backend.enqueue(QUEUE, new(2))


# --- a slow link -----------------------------------------------------------------------------------------


def test_large_jobs_arrive_over_a_slow_link(proxy: Proxy, client: BareClient) -> None:
    bodies = [b"%05d" % number + b"x" * 20_000 for number in range(50)]
    for body in bodies:
        client.put(body, tube=QUEUE, ttr=120)
    done: list[bytes] = []
    attempts: Counter[int] = Counter()
    until = time.monotonic() + 25
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=1") as backend, backend.consumer([QUEUE]) as consumer:
        proxy.mode = Throttle(400_000)  # so that all bodies together take 2.5 s
        while len(done) < len(bodies) and time.monotonic() < until:
            leases = consumer.reserve(50, 0)
            attempts.update(lease.attempt for lease in leases)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            done += [lease.body for lease in leases]
    assert sorted(done) == bodies
    assert attempts == {1: 50}


@pytest.mark.long
def test_link_that_becomes_slow_costs_a_job_at_most_one_attempt(proxy: Proxy, client: BareClient) -> None:
    with open_backend(f"beanstalk://{HOST}:{proxy.port}?timeout=1") as backend, backend.consumer([QUEUE]) as consumer:
        # Given a consumer that is used to getting many small jobs at once
        backend.enqueue(QUEUE, new(500))
        acked = 0
        while acked < 500:
            leases = consumer.reserve(500, 10)  # with a timeout of 0, a busy server once handed out only two jobs
            assert leases
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
            acked += len(leases)
        proxy.mode = Throttle(400_000)
        for _ in range(50):
            client.put(b"x" * 20_000, tube=QUEUE, ttr=120)
        attempts: Counter[int] = Counter()
        until = time.monotonic() + 25
        while attempts.total() < 50 and time.monotonic() < until:
            try:
                leases = consumer.reserve(50, 0)
            except BackendUnavailable:
                continue
            attempts.update(lease.attempt for lease in leases)
            assert consumer.settle([Ack(lease) for lease in leases]) == [None] * len(leases)
        proxy.mode = Pass()
    assert attempts.total() == 50
    assert max(attempts) <= 2


# --- many queues -----------------------------------------------------------------------------------------


def test_other_queues_are_probed_only_if_the_first_is_short(backend: Backend, client: BareClient) -> None:
    queues = [f"many-{number}" for number in range(30)]
    backend.enqueue(queues[0], new(100))
    with backend.consumer(queues) as consumer:
        before = int(client.stats()["cmd-stats-tube"])
        for _ in range(100):
            (lease,) = consumer.reserve(1, 0)
            assert consumer.settle([Ack(lease)]) == [None]
        assert int(client.stats()["cmd-stats-tube"]) - before <= 2 * len(queues)
        # and where the server does so, it handed out all jobs
        backend.enqueue(queues[7], new(2))
        backend.enqueue(queues[20], new(2))
        leases = consumer.reserve(3, 0)
        assert [lease.queue for lease in leases] == [queues[7], queues[7], queues[20]]
        backend.enqueue(queues[0], new(1))
        assert [lease.queue for lease in consumer.reserve(2, 0)] == [queues[0], queues[20]]
