"""Faults of the server and of the network: a server that is stopped, slow, draining, full or old, for example.

Each fault has one deterministic test, on a real server.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from faults import (
    DEADLINE,
    GRACE,
    QUEUE,
    all_timed_out,
    leaves_no_open_file,
    new,
    numbers,
    outlives_a_stop,
    somebody_else,
    stopped,
    timed_out,
    verbs,
    waits_for_its_server,
)
from processes import until, worker
from proxy import Hole, Latency, Pass, Proxy
from servers.process import HOST
from worker_app import app, nap, quick

from multiq.backend import Ack, Bury, Release, State, Touch
from multiq.backend.registry import open_backend
from multiq.errors import (
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    EnqueuePartial,
    EnqueueUncertain,
    LeaseLost,
    MultiqError,
    PayloadTooLarge,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers.beanstalk import BeanstalkServer

    NewBeanstalk = Callable[..., BeanstalkServer]


def url_of(port: int, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"beanstalk://{HOST}:{port}" + (f"?{query}" if query else "")


@pytest.fixture
def proxy(beanstalk_server: BeanstalkServer) -> Iterator[Proxy]:
    with Proxy(beanstalk_server.address) as proxy:
        yield proxy


# --- no answer -----------------------------------------------------------------------------------------


def test_stopped_server_is_a_timeout_for_every_call(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        # Given connections that are open, and a lease
        backend.enqueue(QUEUE, [new()])
        (lease,) = consumer.reserve(1, 0)
        calls: dict[str, Callable[[], Any]] = {**verbs(backend, consumer, lease)}
        enqueue, settle = calls.pop("enqueue"), calls.pop("settle")
        # When the server is stopped, then all calls time out
        with stopped(server):
            all_timed_out(calls.values())
            # And a lease ends with the connection that does not answer
            start = time.monotonic()
            (answer,) = settle()
            assert isinstance(answer, LeaseLost)
            assert time.monotonic() - start < DEADLINE + GRACE
            # And an enqueue that was sent is uncertain
            start = time.monotonic()
            with pytest.raises((EnqueueUncertain, BackendTimeout)):
                enqueue()
            assert time.monotonic() - start < DEADLINE + GRACE
        # And when the server continues, the next call gets the right answer
        assert backend.stats(QUEUE).queue == QUEUE


def test_enqueue_to_stopped_server_reports_its_jobs(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend:
        backend.enqueue(QUEUE, [new()])
        jobs = [new(), new()]
        with stopped(server), pytest.raises(EnqueueUncertain) as caught:
            backend.enqueue(QUEUE, jobs)
        assert list(caught.value.jobs) == jobs
        assert caught.value.__cause__ is not None
        assert backend.stats(QUEUE).ready in {1, 2, 3}  # the two jobs are uncertain


@pytest.mark.parametrize("wait", [0.0, 1.5])
def test_stopped_server_is_a_timeout_for_a_waiting_reserve(new_beanstalk: NewBeanstalk, wait: float) -> None:
    server = new_beanstalk()
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
        with stopped(server):
            timed_out(lambda: consumer.reserve(1, wait), wait + DEADLINE)
        (job_id,) = backend.enqueue(QUEUE, [new()])
        assert [lease.id for lease in consumer.reserve(1, 5)] == [job_id]


@pytest.mark.long
def test_waiting_reserve_notices_that_the_server_stops(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with (
        open_backend(url_of(server.port, timeout=DEADLINE)) as backend,
        backend.consumer([QUEUE]) as consumer,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        noticed = pool.submit(timed_out, lambda: consumer.reserve(1, 5), 5 + DEADLINE)
        until(lambda: client.stats()["current-waiting"] == "1")
        with stopped(server):
            noticed.result()


@pytest.mark.long
def test_wait_without_a_reply_ends_by_its_time_and_loses_no_job(new_beanstalk: NewBeanstalk) -> None:
    # Given a client that holds a job, and another that holds one and waits for more on the same connection
    server = new_beanstalk()
    with (
        open_backend(url_of(server.port, timeout=DEADLINE)) as backend,
        backend.consumer([QUEUE]) as consumer,
        server.client() as holder,
        server.client() as both,
        ThreadPoolExecutor(1) as pool,
    ):
        job_id = holder.put(b"x", tube=QUEUE, ttr=2)
        holder.watch(QUEUE)
        assert holder.reserve() == (job_id, b"x")
        both.put(b"y", tube="other", ttr=3)
        both.watch("other")
        assert both.reserve() is not None
        # And a consumer that waits
        waited = pool.submit(timed_out, lambda: consumer.reserve(1, 6), 6 + DEADLINE)
        until(lambda: holder.stats()["current-waiting"] == "1")
        both.send(b"reserve-with-timeout 30")
        until(lambda: holder.stats()["current-waiting"] == "2")
        # When the server stands still until both leases are over, then the server hands out both jobs, and
        # leaves a client without an answer
        with stopped(server):
            time.sleep(4)
        assert both.reply() == b"DEADLINE_SOON"
        # Then the consumer's wait ends in time, and its next call gets the job
        waited.result()
        (lease,) = consumer.reserve(1, 5)
        assert lease.id == str(job_id)


def test_address_that_accepts_and_never_answers_is_a_timeout(proxy: Proxy) -> None:
    proxy.mode = Hole()
    with open_backend(url_of(proxy.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        all_timed_out([lambda: backend.stats(QUEUE), lambda: consumer.reserve(1, 0)])
        with pytest.raises((EnqueueUncertain, BackendTimeout)):
            backend.enqueue(QUEUE, [new()])
        proxy.mode = Pass()
        assert backend.stats("never-used").ready == 0


@pytest.mark.long
def test_worker_outlives_a_stopped_server(
    new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_beanstalk()
    producer(server.url)
    outlives_a_stop(server, url_of(server.port, timeout=DEADLINE), tmp_path)


# --- no server ----------------------------------------------------------------------------------------


def test_refused_connection_fails_at_once_with_the_address(proxy: Proxy) -> None:
    proxy.refuse()
    with open_backend(url_of(proxy.port)) as backend:
        # nothing was sent, so nothing is uncertain
        with pytest.raises(BackendUnavailable, match=str(proxy.port)) as refused:
            backend.enqueue(QUEUE, [new()])
        assert refused.value.__cause__ is not None


def test_missing_socket_is_unavailable(tmp_path: Path) -> None:
    with (
        open_backend(f"beanstalk+unix://{tmp_path}/no.sock") as backend,
        pytest.raises(BackendUnavailable, match=r"no\.sock"),
    ):
        backend.enqueue(QUEUE, [new()])


def test_unknown_host_is_unavailable() -> None:
    with open_backend("beanstalk://no-such-host.invalid:11300") as backend, pytest.raises(BackendUnavailable):
        backend.stats(QUEUE)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR unknown command\r\n", b"OK x\r\n", b""])
def test_server_of_another_protocol_is_a_typed_error(answer: bytes) -> None:
    with somebody_else(answer) as port, open_backend(url_of(port, timeout=DEADLINE)) as backend:
        with pytest.raises(BackendError):
            backend.stats(QUEUE)
        with pytest.raises(BackendError):
            backend.enqueue(QUEUE, [new()])


def test_worker_waits_for_a_server_that_starts_later(
    new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_beanstalk()
    producer(server.url)
    waits_for_its_server(server, server.url, tmp_path)


# --- the connection goes away ----------------------------------------------------------------------------


@pytest.mark.long
def test_hundred_reconnects_leave_no_open_file(proxy: Proxy) -> None:
    queue = "reconnects"
    with open_backend(url_of(proxy.port)) as backend, backend.consumer([queue]) as consumer:

        def turn() -> None:
            (job_id,) = backend.enqueue(queue, [new()])
            (lease,) = consumer.reserve(1, 5)
            assert lease.id == job_id
            proxy.cut()
            assert isinstance(consumer.settle([Ack(lease)])[0], LeaseLost)
            (again,) = consumer.reserve(1, 5)
            assert again.id == job_id
            assert consumer.settle([Ack(again)]) == [None]

        leaves_no_open_file(turn)
        assert queue not in backend.queues()


def test_enqueue_replaces_a_connection_closed_while_idle(proxy: Proxy) -> None:
    with open_backend(url_of(proxy.port)) as backend:
        backend.enqueue("closed", [new()])
        proxy.cut()
        # until the client can see that the connection has ended: then it sends nothing on this connection
        time.sleep(0.1)
        backend.enqueue("closed", [new()])
        assert backend.stats("closed").ready == 2
        assert backend.purge("closed", [State.READY]) == 2


def test_job_is_reserved_again_as_soon_as_its_consumers_connection_drops(
    proxy: Proxy, beanstalk_server: BeanstalkServer
) -> None:
    with (
        open_backend(url_of(proxy.port)) as far,
        open_backend(beanstalk_server.url) as near,
        far.consumer(["dropped"]) as holder,
        near.consumer(["dropped"]) as next_one,
    ):
        near.enqueue("dropped", [new(ttr=3600)])
        (lost,) = holder.reserve(1, 0)
        proxy.cut()
        (lease,) = next_one.reserve(1, 20)
        assert (lease.id, lease.attempt, lease.crashes) == (lost.id, 2, 1)
        assert isinstance(holder.settle([Ack(lost)])[0], LeaseLost)
        assert next_one.settle([Ack(lease)]) == [None]


def test_worker_notices_its_lost_connection_and_runs_the_job_again(
    new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_beanstalk()
    producer(server.url)
    with Proxy(server.address) as proxy, worker(tmp_path, url_of(proxy.port)) as process:
        process.wait_until_working()
        nap.enqueue(1, 1.0)
        until(lambda: numbers(process.diary, "start") == [1])
        proxy.cut()
        until(lambda: len(numbers(process.diary, "end")) == 2, what=lambda: process.log)
        until(lambda: app.backend.queues() == [], what=lambda: process.log)
        assert "lost" in process.log


@pytest.mark.long
def test_slow_link_ends_no_lease_early(
    proxy: Proxy, new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_beanstalk()
    producer(server.url)
    with Proxy(server.address) as slow:
        slow.mode = Latency(0.15)
        nap.enqueue_many([(number, 0.4) for number in range(12)])  # the jobs' ttr is 3 s
        with worker(tmp_path, url_of(slow.port), "stop_when_empty=True, threads=2") as process:
            assert process.wait(60) == 0, process.log
            assert sorted(numbers(process.diary, "start")) == list(range(12))


class _Interrupted(BaseException):
    """What a signal's handler raises, at any line of ours."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], object]]:
    """``alarm(seconds)``: after this time, a signal handler raises ``_Interrupted`` in the main thread."""

    def ring(*_: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# an exception within socket.socket() leaves a socket that no variable refers to yet
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["stats", "enqueue", "reserve", "settle", "wait"])
def test_exception_in_the_middle_of_a_call_does_not_shift_later_replies(
    new_beanstalk: NewBeanstalk, alarm: Callable[[float], object], what: str
) -> None:
    server = new_beanstalk()
    with (
        Proxy(server.address) as proxy,
        open_backend(url_of(proxy.port)) as backend,
        backend.consumer([QUEUE]) as consumer,
        open_backend(server.url) as near,
    ):
        interrupted = 0
        for step in range(30):
            near.enqueue(QUEUE, [new()])
            (lease,) = consumer.reserve(1, 5)
            calls: dict[str, Callable[[], object]] = {
                "stats": lambda: backend.stats(QUEUE),
                "enqueue": lambda: backend.enqueue("elsewhere", [new()]),
                "reserve": lambda: consumer.reserve(1, 0),
                "settle": partial(consumer.settle, [Ack(lease)]),
                "wait": lambda: consumer.reserve(1, 0.5),
            }
            proxy.mode = Latency(0.02)
            try:
                alarm(0.0005 + step * 0.001)
                calls[what]()
                alarm(0)
            except _Interrupted:
                interrupted += 1
            proxy.mode = Pass()
            # Then each call gets its own answer
            assert backend.stats("never-used").ready == 0
            (job_id,) = near.enqueue("probe", [new(b"probe")])
            assert backend.peek("probe", job_id).body == b"probe"
            # And no job is lost: it is settled now, or ready again
            consumer.settle([Ack(lease)])
            while QUEUE in near.queues():  # a connection's jobs are ready once the server has seen that it ended
                consumer.settle([Ack(one) for one in consumer.reserve(5, 0)])
        assert interrupted > 10


# --- the server refuses ----------------------------------------------------------------------------------


def test_draining_server_refuses_new_jobs_and_finishes_its_own(
    new_beanstalk: NewBeanstalk, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_beanstalk()
    producer(server.url)
    quick.enqueue_many([(number,) for number in range(20)])
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new(delay=3600)])
        (lease,) = consumer.reserve(1, 0)
        server.drain()
        for jobs in ([new()], [new(), new()]):
            with pytest.raises(BackendError, match=r"(?i)drain") as refused:
                backend.enqueue(QUEUE, jobs)
            assert not isinstance(refused.value, EnqueueUncertain | EnqueuePartial)
        assert consumer.settle([Touch(lease), Release(lease)]) == [None, None]
        (lease,) = consumer.reserve(1, 0)
        assert consumer.settle([Bury(lease)]) == [None]
        assert backend.kick(QUEUE, 1) == 1
        assert backend.stats(QUEUE).ready == 1
    with worker(tmp_path, server.url, "stop_when_empty=True") as process:
        assert process.wait(60) == 0, process.log
    assert sorted(numbers(process.diary, "end")) == list(range(20))


def test_reschedule_on_draining_server_leaves_the_job_unchanged(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend:
        (job_id,) = backend.enqueue(QUEUE, [new(delay=3600)])
        server.drain()
        with pytest.raises(BackendError, match=r"(?i)drain"):
            backend.reschedule(QUEUE, job_id, 0)
        assert backend.peek(QUEUE, job_id).state == State.DELAYED
        assert backend.stats(QUEUE).ready == 0


def test_server_without_memory_is_full_and_can_be_worked_off(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk(max_job_size=10_000_000)
    large = b"x" * 5_000_000
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new()])
        with server.little_memory(1_000_000):
            with pytest.raises(BackendFull, match=r"(?i)memory"):
                backend.enqueue(QUEUE, [new(large)])
            # for a batch, the error says which jobs were accepted
            with pytest.raises(EnqueuePartial, match=r"(?i)memory") as partial:
                backend.enqueue(QUEUE, [new(b"first"), new(large), new(b"last")])
            (lease,) = consumer.reserve(1, 0)
            assert consumer.settle([Ack(lease)]) == [None]
        assert sorted(partial.value.accepted) == [0, 2] or sorted(partial.value.accepted) == [0]
        for position, job_id in partial.value.accepted.items():
            assert backend.peek(QUEUE, job_id).body == (b"first", large, b"last")[position]
        assert backend.stats(QUEUE).ready == len(partial.value.accepted)
        backend.enqueue(QUEUE, [new(large)])


def test_job_buried_by_its_put_is_refused_and_deleted(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend, server.client() as client:
        client.fill(QUEUE)
        with server.little_memory(128 * 1024), pytest.raises(BackendFull):
            backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).buried == 0
        assert backend.stats(QUEUE).ready == 2**15 - 2


@pytest.mark.parametrize("limit", [100, 65535, 200_000])
def test_body_over_the_servers_limit_is_refused_before_it_is_sent(new_beanstalk: NewBeanstalk, limit: int) -> None:
    server = new_beanstalk(max_job_size=limit)
    with Proxy(server.address) as proxy, open_backend(url_of(proxy.port)) as backend:
        backend.enqueue(QUEUE, [new(b"x" * limit)])
        sent = proxy.sent
        with pytest.raises(PayloadTooLarge, match="-z") as refused:
            backend.enqueue(QUEUE, [new(), new(b"x" * (limit + 1))])
        assert (refused.value.size_bytes, refused.value.limit_bytes) == (limit + 1, limit)
        assert proxy.sent == sent
        assert backend.stats(QUEUE).ready == 1


def test_body_over_a_lowered_limit_is_a_typed_refusal(new_beanstalk: NewBeanstalk) -> None:
    generous = new_beanstalk()
    strict = new_beanstalk(max_job_size=100)
    with Proxy(generous.address) as proxy, open_backend(url_of(proxy.port)) as backend:
        backend.enqueue(QUEUE, [new(b"x" * 1000)])
        proxy._upstream = strict.address
        proxy.cut()
        time.sleep(0.1)
        with pytest.raises(PayloadTooLarge):
            backend.enqueue(QUEUE, [new(b"x" * 1000)])
        backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 1


class OldLink(Proxy):
    """Makes the real server refuse a word, by misspelling the word on its way to the server."""

    unknown: tuple[bytes, ...] = ()

    def _of_request(self, data: bytes) -> Any:
        for word in self.unknown:
            data = data.replace(word, b"?" + word[1:])
        return super()._of_request(data)


def test_error_names_version_of_server_that_lacks_a_command(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with OldLink(server.address) as link, open_backend(url_of(link.port)) as backend, server.client() as client:
        job_id = str(client.put(b"x", tube=QUEUE, delay=3600))
        assert backend.peek(QUEUE, job_id).state == State.DELAYED
        link.unknown = (b"kick-job ", b"pause-tube ")
        with pytest.raises(MultiqError, match=r"(?i)unknown|version|old"):
            backend.kick_job(QUEUE, job_id)
        with pytest.raises(MultiqError, match=r"(?i)unknown|version|old"):
            backend.pause(QUEUE, 60)
        # and later calls still get their own replies
        assert backend.peek(QUEUE, job_id).state == State.DELAYED
        assert backend.stats(QUEUE).delayed == 1


def test_lease_about_to_end_makes_no_busy_loop(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer, server.client() as client:
        backend.enqueue(QUEUE, [new(ttr=3)])
        (first,) = consumer.reserve(1, 0)
        before = int(client.stats()["cmd-reserve-with-timeout"])
        # the server answers DEADLINE_SOON during the lease's last second, and then the job is ready again
        (again,) = consumer.reserve(1, 30)
        assert again.id == first.id
        assert int(client.stats()["cmd-reserve-with-timeout"]) - before < 20


def test_restart_without_log_ends_leases_and_serves_new_jobs(new_beanstalk: NewBeanstalk) -> None:
    server = new_beanstalk()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new(), new(delay=3600)])
        (lease,) = consumer.reserve(1, 0)
        server.stop()
        server.start()
        with server.client() as client:
            assert client.put(b"another", tube=QUEUE) == int(lease.id)  # after the restart, ids begin at 1 again
        (answer,) = consumer.settle([Ack(lease)])
        assert isinstance(answer, LeaseLost)
        assert [found.body for found in consumer.reserve(5, 5)] == [b"another"]
