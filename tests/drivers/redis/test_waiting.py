"""Waiting at the server: its cost, lost and surplus markers, and interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy import CutReply, Proxy, places
from servers.process import until
from waits import is_quiet

from multiq.backend import Ack, NewJob
from multiq.backend.registry import open_backend
from multiq.conformance.forks import fork
from multiq.conformance.threads import HANGS
from multiq.ids import new_id
from multiq_redis import keys

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Backend

QUEUE = "mail"
HINT = keys.hint(keys.base("multiq", QUEUE))


def asleep(server: RedisServer, count: int = 1) -> None:
    until(lambda: server.ask("INFO", "clients")["blocked_clients"] >= count, f"{count} wait at the server")


def test_idle_consumer_sends_next_to_nothing(server: RedisServer, backend: Backend) -> None:
    with backend.consumer([QUEUE, "other", "third"]) as consumer:
        consumer.reserve(1, 0)

        def sent() -> int:
            before = server.consumers_sent
            assert consumer.reserve(1, 3) == []
            return server.consumers_sent - before

        is_quiet(sent, 3)


def test_surplus_marker_ends_no_wait(server: RedisServer, backend: Backend) -> None:
    with backend.consumer([QUEUE]) as consumer:
        server.ask("ZADD", HINT, 0, "1")
        started = time.monotonic()
        assert consumer.reserve(1, 0.5) == []
        assert time.monotonic() - started >= 0.5


def test_killed_consumer_is_handed_no_job_although_a_child_that_it_forked_lives(
    server: RedisServer, backend: Backend
) -> None:
    # Given a process whose consumer waits at the server, and which has forked a child
    reader, writer = os.pipe()

    def wait_and_fork() -> None:
        os.setsid()
        consumer = backend.consumer([QUEUE])
        threading.Thread(target=consumer.reserve, args=(1, HANGS), daemon=True).start()
        asleep(server)
        if os.fork() == 0:
            signal.pause()
        os.write(writer, b"forked")
        time.sleep(HANGS)

    group = fork(wait_and_fork)
    try:
        assert os.read(reader, 6) == b"forked"
        # When the process is killed, but not its child, then the server sees the connection's end
        os.kill(group, signal.SIGKILL)
        os.waitpid(group, 0)
        until(lambda: server.ask("INFO", "clients")["connected_clients"] == 1, "only this test has a connection")
    finally:
        os.killpg(group, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


@pytest.mark.long
def test_lost_marker_delays_no_job_for_ever(server: RedisServer, backend: Backend) -> None:
    # Given a client that will pop the marker and do nothing, and a consumer that began to wait after it
    with server.client() as thief, backend.consumer([QUEUE]) as consumer:
        stealing = threading.Thread(target=thief.bzpopmin, args=(HINT,), kwargs={"timeout": 10})
        stealing.start()
        asleep(server)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(consumer.reserve(1, 15)))
        waiting.start()
        asleep(server, 2)
        # When a job is enqueued, then the consumer finds it in its next poll
        (job_id,) = backend.enqueue(QUEUE, [NewJob(b"", new_id())])
        stealing.join()
        waiting.join()
        assert [lease.id for lease in found] == [job_id]


@pytest.mark.long
def test_reply_to_a_waiting_consumer_cut_at_any_byte_loses_and_doubles_nothing(server: RedisServer) -> None:
    # Given a consumer behind a proxy, which has sent its next commands together with the wait
    with (
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(server.url) as there,
        open_backend(f"redis://127.0.0.1:{proxy.port}") as backend,
        backend.consumer([QUEUE]) as consumer,
    ):

        def a_job_wakes_it() -> None:
            found: list[Any] = []
            waiting = threading.Thread(target=lambda: found.extend(consumer.reserve(10, 30)))
            waiting.start()
            asleep(server)
            (job_id,) = there.enqueue(QUEUE, [NewJob(b"body", new_id())])
            waiting.join()
            assert [(lease.id, lease.attempt) for lease in found] == [(job_id, 1)]
            assert consumer.settle([Ack(lease) for lease in found]) == [None]

        a_job_wakes_it()
        proxy.arm(CutReply(at=10_000, after=b"BZPOPMIN"))  # no reply is that long, so this one is not cut
        before = proxy.replied
        a_job_wakes_it()
        size = proxy.replied - before
        # When the reply is cut at any byte, then the job is handed out once
        for at in places(size)[::5]:  # each takes 0.1 s, until a poll finds the job
            proxy.arm(CutReply(at=at, after=b"BZPOPMIN", rst=at % 2 == 1))
            a_job_wakes_it()
        proxy.disarm()
        assert there.stats(QUEUE).reserved == 0


def test_follow_up_call_survives_a_flushed_script_cache(server: RedisServer, backend: Backend) -> None:
    with backend.consumer([QUEUE]) as consumer:
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(consumer.reserve(10, 30)))
        waiting.start()
        asleep(server)
        server.ask("SCRIPT", "FLUSH")
        (job_id,) = backend.enqueue(QUEUE, [NewJob(b"", new_id())])
        waiting.join()
        assert [(lease.id, lease.attempt) for lease in found] == [(job_id, 1)]


def test_interrupted_consumer_hands_over_its_notification(server: RedisServer, backend: Backend) -> None:
    # Given two waiting consumers, one of which was notified of a delayed job
    one, other = backend.consumer([QUEUE]), backend.consumer([QUEUE])
    found: list[Any] = []
    waiting = [threading.Thread(target=lambda c=c: found.extend(c.reserve(1, 60))) for c in (one, other)]
    for count, thread in enumerate(waiting, start=1):
        thread.start()
        asleep(server, count)
    backend.enqueue(QUEUE, [NewJob(b"", new_id(), delay=1.0)])
    enqueued_at = time.monotonic()
    time.sleep(0.3)
    # When the notified consumer, which waited first, is interrupted
    one.interrupt()
    waiting[0].join()
    # Then the other consumer gets the job when it is due, earlier than by its own poll
    waiting[1].join()
    assert len(found) == 1
    assert time.monotonic() - enqueued_at < 30
    one.close()
    other.close()


def test_interrupt_ends_a_wait_where_client_unblock_is_forbidden(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "worker", "on", ">secret", "~*", "+@all", "-client|unblock")
    url = server.url.replace("redis://", "redis://worker:secret@")
    with open_backend(url) as backend, backend.consumer([QUEUE]) as consumer:
        for _ in range(3):
            found: list[Any] = []
            waiting = threading.Thread(target=lambda found=found: found.extend(consumer.reserve(1, 60)))
            waiting.start()
            asleep(server)
            consumer.interrupt()
            waiting.join()
            assert found == []
        (job_id,) = backend.enqueue(QUEUE, [NewJob(b"", new_id())])
        leases = consumer.reserve(1, 0)
        assert [lease.id for lease in leases] == [job_id]
        assert consumer.settle([Ack(lease) for lease in leases]) == [None]


def test_parent_and_child_have_separate_clients(backend: Backend) -> None:
    # Given a parent process with open connections and a lease
    backend.enqueue(QUEUE, [NewJob(b"", "before")])
    with backend.consumer([QUEUE]) as consumer:
        leases = consumer.reserve(1, 0)
        # When both continue, the child with the same objects
        pid = os.fork()
        if pid == 0:  # pragma: no cover - in the child
            try:
                for number in range(20):
                    backend.enqueue(QUEUE, [NewJob(b"", f"child {number}")])
                lost = consumer.settle([Ack(lease) for lease in leases])
                os._exit(0 if lost == [None] else 1)
            finally:
                os._exit(2)
        for number in range(20):
            backend.enqueue(QUEUE, [NewJob(b"", f"parent {number}")])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # Then no reply was lost, and no process got another process's reply
        expected = {f"{who} {number}" for who in ("child", "parent") for number in range(20)}
        assert {lease.id for lease in consumer.reserve(100, 0)} == expected


def test_child_that_closes_leaves_its_parents_connections_open(server: RedisServer, backend: Backend) -> None:
    with backend.consumer([QUEUE]) as consumer:
        consumer.reserve(1, 0)
        before = server.ask("INFO", "stats")["total_connections_received"]
        pid = os.fork()
        if pid == 0:  # pragma: no cover - in the child
            try:
                backend.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        consumer.reserve(1, 0)
        # the connection of this call
        assert server.ask("INFO", "stats")["total_connections_received"] - before == 1
