"""Deadlines: a call ends in time also in a program that receives signals all the time."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, NewJob, Touch
from multiq.backend.registry import open_backend
from multiq.errors import BackendUnavailable, EnqueueUncertain, LeaseLost
from multiq.ids import new_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from servers.beanstalk import BeanstalkServer

    from multiq.backend import Backend, Consumer, Lease

QUEUE = "mail"
HELD = 20
"""Jobs of one settle, so many that the driver reads their replies by one receive."""


def new(count: int, body: bytes = b"x") -> list[NewJob]:
    return [NewJob(body, job_id) for job_id in new_ids(count)]


def fails(call: Callable[[], object]) -> None:
    with pytest.raises((BackendUnavailable, EnqueueUncertain)):
        call()


def loses(consumer: Consumer, leases: list[Lease], verdict: type[Ack | Touch]) -> None:
    assert all(isinstance(answer, LeaseLost) for answer in consumer.settle([verdict(lease) for lease in leases]))


CALLS: dict[str, Callable[[Backend, Consumer, list[Lease]], None]] = {
    "a look": lambda backend, *_: fails(lambda: backend.stats(QUEUE)),
    "an enqueue": lambda backend, *_: fails(lambda: backend.enqueue(QUEUE, new(1))),
    "a large one": lambda backend, *_: fails(lambda: backend.enqueue(QUEUE, new(150, bytes(60_000)))),
    "a batch": lambda backend, *_: fails(lambda: backend.enqueue(QUEUE, new(100))),
    "a reserve": lambda _, consumer, __: fails(lambda: consumer.reserve(10, 0)),
    "a wait": lambda _, consumer, __: fails(lambda: consumer.reserve(10, 0.5)),
    "an ack": lambda _, consumer, leases: loses(consumer, leases[:1], Ack),
    "many acks": lambda _, consumer, leases: loses(consumer, leases, Ack),
}


@pytest.fixture
def ticking() -> Iterator[None]:
    """Four signals a second that do nothing."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.one_row
@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_signals_do_not_extend_the_deadline(
    server: BeanstalkServer, call: Callable[[Backend, Consumer, list[Lease]], None]
) -> None:
    with open_backend(f"{server.url}?timeout=0.6") as backend, backend.consumer([QUEUE]) as consumer:
        backend.enqueue(QUEUE, new(HELD))
        leases: list[Lease] = []
        while len(leases) < HELD:
            leases += consumer.reserve(HELD, 0)
        server.pause()
        goes_on_by_itself = threading.Timer(40, server.go_on)  # ends the test even if the call never returns
        goes_on_by_itself.start()
        started = time.monotonic()
        try:
            call(backend, consumer, leases)
            assert time.monotonic() - started < 30  # many times what the call may take
        finally:
            goes_on_by_itself.cancel()
            server.go_on()
