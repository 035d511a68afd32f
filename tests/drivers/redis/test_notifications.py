"""Notifications of jobs that are due soon: no job waits for the next poll of a consumer that can be notified."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from proxy import CutReply, Proxy
from servers.process import until

from multiq.backend import NewJob, Touch
from multiq.backend.registry import open_backend
from multiq.ids import new_id

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Backend

QUEUE = "mail"
OTHER = "other"


def asleep(server: RedisServer, count: int = 1) -> None:
    until(lambda: server.ask("INFO", "clients")["blocked_clients"] >= count, f"{count} wait at the server")


def test_job_of_one_queue_hands_over_the_notification_of_another(server: RedisServer, backend: Backend) -> None:
    # Given a consumer that was notified of a soon due job of the other queue, and a second consumer of that queue
    with backend.consumer([QUEUE, OTHER]) as watcher, backend.consumer([OTHER]) as second:
        found: list[Any] = []

        def wait() -> None:
            leases = second.reserve(1, 20)
            found.extend((lease.id, lease.age) for lease in leases)

        watching = threading.Thread(target=watcher.reserve, args=(1, 20))
        watching.start()
        asleep(server)
        waiting = threading.Thread(target=wait)
        waiting.start()
        asleep(server, 2)
        backend.enqueue(OTHER, [NewJob(b"", "due", delay=1.0)])
        time.sleep(0.2)
        asleep(server, 2)
        # When the first consumer gets a job of the first queue
        backend.enqueue(QUEUE, [NewJob(b"", new_id())])
        watching.join()
        # Then the second consumer is woken when the job is due, earlier than by its own poll
        waiting.join()
        ((job_id, age),) = found
        assert job_id == "due"
        assert age < 3


@pytest.mark.long
def test_heartbeat_does_not_hide_when_the_next_job_is_due(backend: Backend) -> None:
    # Given a consumer that has learned by a poll when the next job is due
    with backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, [NewJob(b"", new_id(), ttr=60)])
        (held,) = consumer.reserve(1, 0)
        assert consumer.reserve(1, 0.1) == []  # pops the marker
        backend.enqueue(QUEUE, [NewJob(b"", "due", delay=6.2)])  # beyond the horizon of notifications
        time.sleep(4.7)
        assert consumer.reserve(1, 0.1) == []
        # When the consumer touches its lease, then it still gets the next job in time
        assert consumer.settle([Touch(held)]) == [None]
        (lease,) = consumer.reserve(1, 10)
        assert lease.id == "due"
        assert lease.age < 8


def test_lost_reply_does_not_mean_that_nothing_is_due(server: RedisServer, backend: Backend) -> None:
    # Given more due jobs than one script makes ready, and a lost reply to this script
    with (
        Proxy(("127.0.0.1", server.port)) as proxy,
        open_backend(f"redis://127.0.0.1:{proxy.port}") as behind,
        behind.consumer([QUEUE]) as consumer,
    ):
        consumer.reserve(1, 0)
        backend.enqueue(QUEUE, [NewJob(b"", new_id(), delay=0.01) for _ in range(700)])
        time.sleep(0.1)
        server.ask("DEL", "multiq:{mail}:hint")
        proxy.arm(CutReply(at=0, after=b"EVALSHA"))
        # When the call is repeated, then it gets a job at once
        assert len(consumer.reserve(1, 0)) == 1


class Interrupted(BaseException):
    """What a time limit or a signal raises."""


def test_interrupted_wait_loses_no_marker(server: RedisServer, backend: Backend, monkeypatch: Any) -> None:
    with backend.consumer([QUEUE, OTHER]) as consumer:
        assert consumer.reserve(1, 0) == []
        waiter: Any = consumer._waiter  # type: ignore[attr-defined]
        finish = waiter._finish

        def interrupted(*args: Any) -> None:
            finish(*args)  # pops the marker
            raise Interrupted

        monkeypatch.setattr(waiter, "_finish", interrupted)
        ends: list[BaseException] = []

        def wait() -> None:
            try:
                consumer.reserve(1, 20)
            except Interrupted as exc:
                ends.append(exc)

        waiting = threading.Thread(target=wait)
        waiting.start()
        asleep(server)
        (job_id,) = backend.enqueue(OTHER, [NewJob(b"", new_id())])
        waiting.join()
        assert len(ends) == 1
        monkeypatch.undo()
        (lease,) = consumer.reserve(1, 1)
        assert lease.id == job_id
