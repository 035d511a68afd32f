"""Faults of a Redis server and of the network: stopped, killed, full, flushed, busy, loading, slow.

One deterministic test each. The server and the faults are real.
"""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import redis
from faults import (
    DEADLINE,
    GRACE,
    QUEUE,
    all_timed_out,
    an_enqueue_in_doubt_can_be_repeated,
    delays_leases_and_counts_outlive_a_kill,
    leaves_no_open_file,
    new,
    no_acknowledged_job_is_lost,
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

from multiq.backend import Ack, Bury, Release, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendError, BackendFull, BackendTimeout, BackendUnavailable, LeaseLost, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from servers.redis import RedisServer

    from multiq.backend import Backend, Verdict

    NewRedis = Callable[..., RedisServer]


def url_of(port: int, **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"redis://{HOST}:{port}" + (f"?{query}" if query else "")


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy((HOST, redis_server.port)) as proxy:
        yield proxy


# --- no answer --------------------------------------------------------------------------------------


def test_stopped_server_is_a_timeout_for_every_verb(new_redis: NewRedis) -> None:
    server = new_redis()
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        # Given connections that are open, and a lease
        backend.enqueue(QUEUE, [new()])
        (lease,) = consumer.reserve(1, 0)
        # When the server is stopped, then all verbs give up
        with stopped(server):
            all_timed_out(verbs(backend, consumer, lease).values())
        # And when the server continues, the next call gets the right answer
        assert backend.stats(QUEUE).queue == QUEUE


def test_enqueue_to_a_stopped_server_is_uncertain_and_can_be_repeated(new_redis: NewRedis) -> None:
    server = new_redis()
    an_enqueue_in_doubt_can_be_repeated(server, url_of(server.port, timeout=DEADLINE))


def test_unsent_enqueue_is_not_uncertain(new_redis: NewRedis, proxy: Proxy) -> None:
    # Given a server that does not accept the connection in time, and one whose port is closed
    server = new_redis()
    with stopped(server), open_backend(url_of(server.port, timeout=0.2)) as backend, pytest.raises(BackendTimeout):
        backend.enqueue(QUEUE, [new()])
    proxy.refuse()
    with open_backend(url_of(proxy.port)) as backend, pytest.raises(BackendUnavailable):
        backend.enqueue(QUEUE, [new()])


@pytest.mark.parametrize("wait", [0.0, 1.5])
def test_stopped_server_is_a_timeout_for_a_waiting_reserve(new_redis: NewRedis, wait: float) -> None:
    server = new_redis()
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        assert consumer.reserve(1, 0) == []
        with stopped(server):
            timed_out(lambda: consumer.reserve(1, wait), wait + DEADLINE)
        (job_id,) = backend.enqueue(QUEUE, [new()])
        assert [lease.id for lease in consumer.reserve(1, 5)] == [job_id]


@pytest.mark.long
def test_server_that_stops_during_a_waiting_reserve_is_noticed(new_redis: NewRedis) -> None:
    server = new_redis()
    with (
        open_backend(url_of(server.port, timeout=DEADLINE)) as backend,
        backend.consumer([QUEUE]) as consumer,
        ThreadPoolExecutor(1) as pool,
    ):
        noticed = pool.submit(timed_out, lambda: consumer.reserve(1, 5), 5 + DEADLINE)
        until(lambda: server.ask("INFO", "clients")["blocked_clients"] == 1)
        with stopped(server):
            noticed.result()


def test_address_that_accepts_and_never_answers_is_a_timeout(proxy: Proxy) -> None:
    proxy.mode = Hole()
    with open_backend(url_of(proxy.port, timeout=DEADLINE)) as backend, backend.consumer([QUEUE]) as consumer:
        all_timed_out([lambda: backend.enqueue(QUEUE, [new()]), lambda: consumer.reserve(1, 0)])
        proxy.mode = Pass()
        assert backend.stats("never used").ready == 0


@pytest.mark.long
def test_worker_survives_a_server_that_is_stopped_for_a_while(
    new_redis: NewRedis, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_redis()
    producer(server.url)
    outlives_a_stop(server, url_of(server.port, timeout=DEADLINE), tmp_path)


# --- no server -------------------------------------------------------------------------------------


def test_refused_connection_fails_at_once_with_the_address_and_without_the_password(proxy: Proxy) -> None:
    proxy.refuse()
    with open_backend(f"redis://:S3CR3T@{HOST}:{proxy.port}") as backend:
        with pytest.raises(BackendUnavailable, match=str(proxy.port)) as refused:
            backend.enqueue(QUEUE, [new()])
        assert "S3CR3T" not in str(refused.value)
        assert refused.value.__cause__ is not None


def test_unknown_host_is_unavailable() -> None:
    with open_backend("redis://no-such-host.invalid:6379") as backend, pytest.raises(BackendUnavailable):
        backend.stats(QUEUE)


def test_foreign_protocol_is_a_typed_error() -> None:
    with (
        somebody_else(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port,
        open_backend(url_of(port, timeout=DEADLINE)) as backend,
        pytest.raises(BackendError),
    ):
        backend.stats(QUEUE)


@pytest.mark.long
def test_worker_that_starts_before_its_server_waits_for_it(
    new_redis: NewRedis, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    server = new_redis()
    producer(server.url)
    waits_for_its_server(server, server.url, tmp_path)


@pytest.mark.parametrize("given", ["", "wrong"])
def test_wrong_password_is_reported_without_showing_it(new_redis: NewRedis, given: str) -> None:
    server = new_redis(requirepass="S3CR3T")
    with open_backend(f"redis://:{given}@{HOST}:{server.port}" if given else url_of(server.port)) as backend:
        with pytest.raises(BackendUnavailable, match=r"(?i)password") as refused:
            backend.enqueue(QUEUE, [new()])
        assert "wrong" not in str(refused.value).replace("wrong password", "")
    with open_backend(f"redis://:S3CR3T@{HOST}:{server.port}") as backend:
        backend.enqueue(QUEUE, [new()])


def test_account_without_scripting_is_named_what_it_lacks(new_redis: NewRedis) -> None:
    server = new_redis()
    server.ask("ACL", "SETUSER", "reader", "on", ">S3CR3T", "~*", "+@read")
    with open_backend(f"redis://reader:S3CR3T@{HOST}:{server.port}") as backend:
        with pytest.raises(BackendUnavailable, match=r"(?i)permission|may not|ACL") as refused:
            backend.enqueue(QUEUE, [new()])
        assert "S3CR3T" not in str(refused.value)


# --- the connection goes away ----------------------------------------------------------------------------


@pytest.mark.long
def test_hundred_reconnects_leave_no_open_file(proxy: Proxy) -> None:
    queue = "reconnects"
    with open_backend(url_of(proxy.port)) as backend, backend.consumer([queue]) as consumer:

        def turn() -> None:
            (job_id,) = backend.enqueue(queue, [new()])
            proxy.cut()
            (lease,) = consumer.reserve(1, 5)
            assert (lease.id, lease.attempt) == (job_id, 1)
            proxy.cut()
            assert consumer.settle([Ack(lease)]) == [None]

        leaves_no_open_file(turn)
        assert backend.queues() == [] or queue not in backend.queues()


@pytest.mark.long
def test_idle_connections_that_the_server_closed_are_reopened_silently(new_redis: NewRedis) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new()])
        (lease,) = consumer.reserve(1, 0)
        server.set("timeout", "1")
        until(lambda: _is_alone(server))
        assert backend.stats(QUEUE).ready == 1
        until(lambda: _is_alone(server))
        assert consumer.settle([Ack(lease)]) == [None]
        until(lambda: _is_alone(server))
        assert len(consumer.reserve(1, 5)) == 1
        assert consumer.reserve(1, 2.5) == []  # the server does not close the connection of a waiting consumer, either


def _is_alone(server: RedisServer) -> bool:
    """Whether this call's connection is the only one."""
    return bool(server.ask("INFO", "clients")["connected_clients"] == 1)


@pytest.mark.long
def test_slow_network_ends_no_lease_early(
    proxy: Proxy, redis_server: RedisServer, tmp_path: Path, producer: Callable[[str], None]
) -> None:
    producer(redis_server.url)
    proxy.mode = Latency(0.15)
    nap.enqueue_many([(number, 0.4) for number in range(12)])  # of a ttr of 2 s
    with worker(tmp_path, url_of(proxy.port), "stop_when_empty=True, threads=2") as process:
        assert process.wait(60) == 0, process.log
        assert sorted(numbers(process.diary, "start")) == list(range(12))


# --- the server goes away, and comes back ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.long)])
def test_no_acknowledged_job_is_lost_when_the_server_is_killed_or_restarted_under_load(
    new_redis: NewRedis, tmp_path: Path, producer: Callable[[str], None], end: str
) -> None:
    # Given a server that writes a log, a worker, and a producer that notes what was acknowledged
    server = new_redis(appendonly="yes", appendfsync="everysec")
    producer(url_of(server.port, timeout=DEADLINE))
    no_acknowledged_job_is_lost(server, app.url, tmp_path, end)


def test_delays_leases_and_counts_survive_a_killed_server(new_redis: NewRedis) -> None:
    server = new_redis(appendonly="yes", appendfsync="always")
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        delays_leases_and_counts_outlive_a_kill(server, backend, consumer)


def test_loading_server_is_waited_for_or_named(new_redis: NewRedis) -> None:
    # Given a server that takes half a minute to load, unless configured otherwise
    server = new_redis(save="3600 1", key_load_delay="3000", loading_process_events_interval_bytes="1024")
    with server.client() as client:
        pipe = client.pipeline(transaction=False)
        for number in range(10_000):
            pipe.set(f"filler:{number}", "x" * 100)
        pipe.execute()
    with (
        open_backend(url_of(server.port, timeout=20)) as patient,
        open_backend(url_of(server.port, timeout=DEADLINE)) as hasty,
    ):
        patient.enqueue(QUEUE, [new()])
        server.stop()
        server.start(wait=False)
        until(lambda: _is_loading(server))
        with pytest.raises(BackendUnavailable, match=r"(?i)load"):
            hasty.stats(QUEUE)
        with ThreadPoolExecutor(1) as pool:
            refused = _refused_for_loading(server)
            waited_for = pool.submit(patient.stats, QUEUE)
            until(lambda: _refused_for_loading(server) > refused)
            server.set("key-load-delay", "0")
            assert waited_for.result().ready == 1


def _is_loading(server: RedisServer) -> bool:
    if not server.listens:
        return False
    try:
        server.ask("PING")
    except redis.BusyLoadingError:
        return True
    except redis.RedisError:
        return False
    raise AssertionError("the server was quicker to load than this test can look")


def _refused_for_loading(server: RedisServer) -> int:
    return int(server.ask("INFO", "errorstats")["errorstat_LOADING"]["count"])


# --- the server refuses ----------------------------------------------------------------------------------


def test_full_server_refuses_whole_enqueues_and_still_drains(new_redis: NewRedis) -> None:
    server = new_redis(maxmemory="4mb")
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        # Given a queue that was filled until the server refused a batch
        backend.enqueue(QUEUE, [new(ttr=600) for _ in range(20)])
        stored = 20 + _fill(backend)
        # Then no job of the refused batch is stored
        assert backend.stats(QUEUE).ready == stored
        # And every verdict, kick, pause and purge still works
        leases = consumer.reserve(4, 0)
        assert len(leases) == 4
        verdicts: list[Verdict] = [
            Touch(leases[0]),
            Release(leases[1]),
            Release(leases[2], delay=3600),
            Bury(leases[3], "bad"),
        ]
        assert consumer.settle(verdicts) == [None] * 4
        assert consumer.settle([Ack(leases[0])]) == [None]
        assert backend.kick(QUEUE, 1) == 1
        backend.pause(QUEUE, 60)
        backend.resume(QUEUE)
        backend.kick_job(QUEUE, leases[2].id)
        # And all jobs can be reserved and acked, and then there is room again
        done = 1
        held: list[Any] = []
        while True:
            lost, held = consumer.exchange([Ack(lease) for lease in held], 50, 0)
            assert set(lost) <= {None}
            done += len(held)
            if not held:
                break
        assert done == stored
        backend.enqueue(QUEUE, [new(b"x" * 2000)])


def _fill(backend: Backend) -> int:
    """Enqueue until the server refuses. Returns how many jobs it took."""
    taken = 0
    while True:
        try:
            taken += len(backend.enqueue(QUEUE, [new(b"x" * 2000) for _ in range(10)]))
        except BackendFull:
            return taken


def test_server_with_failing_snapshots_is_unavailable_until_they_succeed(new_redis: NewRedis, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = new_redis(save="3600 1", dir=str(folder))
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend:
        backend.enqueue(QUEUE, [new()])
        # Given a server that refuses changes because its snapshot failed
        shutil.rmtree(folder)
        server.ask("BGSAVE")
        until(lambda: server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err")
        with pytest.raises(BackendUnavailable, match=r"(?i)snapshot|MISCONF|persist|disk"):
            backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 1
        # When the server accepts changes again
        server.set("stop-writes-on-bgsave-error", "no")
        backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 2


def test_busy_server_is_a_timeout_at_the_deadline(new_redis: NewRedis) -> None:
    server = new_redis(busy_reply_threshold="50")
    with open_backend(url_of(server.port, timeout=DEADLINE)) as backend:
        backend.enqueue(QUEUE, [new()])
        script = threading.Thread(target=_run_for_ever, args=(server,))
        script.start()
        try:
            until(lambda: _is_busy(server))
            start = time.monotonic()
            with pytest.raises(BackendUnavailable):  # on a busy machine no answer may come in time, not even "BUSY"
                backend.enqueue(QUEUE, [new()])
            assert time.monotonic() - start < DEADLINE + GRACE
        finally:
            server.ask("SCRIPT", "KILL")
            script.join()
        backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 2


def test_busy_server_is_waited_for_until_the_deadline(new_redis: NewRedis) -> None:
    server = new_redis(busy_reply_threshold="50")
    with open_backend(url_of(server.port, timeout=20)) as backend:
        script = threading.Thread(target=_run_for_ever, args=(server,))
        script.start()
        until(lambda: _is_busy(server))
        killer = threading.Timer(0.5, server.ask, args=("SCRIPT", "KILL"))
        killer.start()
        backend.enqueue(QUEUE, [new()])
        assert backend.stats(QUEUE).ready == 1
        killer.join()
        script.join()


def _run_for_ever(server: RedisServer) -> None:
    with pytest.raises(redis.ResponseError):
        server.ask("EVAL", "while true do end", 0)


def _is_busy(server: RedisServer) -> bool:
    try:
        server.ask("PING")
    except redis.ResponseError as exc:
        return "BUSY" in str(exc)
    return False


# --- deleted keys ------------------------------------------------------------------------------------


def test_flushed_scripts_are_loaded_again_during_work(new_redis: NewRedis) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE, "other"]) as consumer:
        held: list[Any] = []
        done = []
        for number in range(30):
            server.ask("SCRIPT", "FLUSH")
            backend.enqueue(QUEUE if number % 2 else "other", [new(str(number).encode())])
            server.ask("SCRIPT", "FLUSH")
            lost, held = consumer.exchange([Ack(lease) for lease in held], 1, 5)
            assert set(lost) <= {None}
            done += [lease.body for lease in held]
        assert consumer.settle([Ack(lease) for lease in held]) == [None]
        assert done == [str(number).encode() for number in range(30)]
        assert backend.queues() == []


def test_flushed_server_ends_leases_and_starts_over(new_redis: NewRedis) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new(), new(delay=3600)])
        (lease,) = consumer.reserve(1, 0)
        server.ask("FLUSHALL")
        (answer,) = consumer.settle([Ack(lease)])
        assert isinstance(answer, LeaseLost)
        assert consumer.reserve(1, 0) == []
        assert backend.queues() == []
        (job_id,) = backend.enqueue(QUEUE, [new()])
        assert [lease.id for lease in consumer.reserve(5, 5)] == [job_id]


@pytest.mark.long
def test_worker_survives_a_flush(new_redis: NewRedis, tmp_path: Path, producer: Callable[[str], None]) -> None:
    server = new_redis()
    producer(server.url)
    with worker(tmp_path, server.url) as process:
        process.wait_until_working()
        nap.enqueue(1, 0.5)
        until(lambda: numbers(process.diary, "start") == [1])
        server.ask("FLUSHALL")
        quick.enqueue(2)
        until(lambda: 2 in numbers(process.diary, "end"), what=lambda: process.log)


@pytest.mark.parametrize("name", ["ready", "jobs", "delayed"])
def test_overwritten_keys_are_a_typed_error(new_redis: NewRedis, name: str) -> None:
    server = new_redis()
    with open_backend(server.url) as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [new(), new(delay=3600)])
        keys = [key for key in server.ask("KEYS", "*") if key.endswith(name.encode())]
        assert keys, f"no key ends with {name}"
        for key in keys:
            server.ask("SET", key, "garbage")
        for call in (lambda: backend.enqueue(QUEUE, [new(), new(delay=1)]), lambda: consumer.reserve(1, 0)):
            with pytest.raises(MultiqError):
                call()
