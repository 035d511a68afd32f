"""An attack on a driver: every operation is called with one changed reply. Then the driver must work normally again."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, Bury, NewJob, Release, State
from multiq.errors import BackendError, MultiqError, Unsupported
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from attacker import Attacker

    from multiq.backend import Backend

_HANG = 20.0  # seconds: a call that takes longer hangs, as its timeout is a fraction of a second


def calls(backend: Backend) -> list[Callable[[], Any]]:
    """A call of every operation, on jobs that exist."""
    consumer = backend.consumer(["q", "r"])
    ids = [new_id() for _ in range(4)]

    def enqueue() -> None:
        ids[:] = backend.enqueue("q", [NewJob(b"x", new_id()) for _ in range(4)])

    def schema() -> None:
        with contextlib.suppress(Unsupported):
            backend.schema().check()

    def settle() -> None:
        leases = consumer.reserve(4, 0)
        kinds = (Ack, Bury, Release)
        consumer.settle([kinds[at % 3](lease) for at, lease in enumerate(leases)])

    return [
        enqueue,
        lambda: backend.enqueue("q", [NewJob(b"y" * 300, new_id(), delay=0.001)]),
        settle,
        lambda: consumer.exchange([Ack(one) for one in consumer.reserve(1, 0)], 2, 0.01),
        lambda: consumer.reserve(1, 0.05),
        lambda: backend.peek("q", ids[0]),
        lambda: [backend.jobs("q", state) for state in (State.READY, State.BURIED)],
        lambda: backend.reschedule("q", ids[1], 1),
        lambda: backend.kick("q", 5),
        lambda: backend.kick_job("q", ids[2]),
        lambda: backend.delete("q", ids[3]),
        backend.queues,
        lambda: backend.stats("q"),
        lambda: backend.pause("r", 1),
        lambda: backend.resume("r"),
        lambda: backend.purge("q", [State.BURIED]),
        backend.doctor,
        lambda: backend.capabilities,
        schema,
        consumer.close,
    ]


def attack(backend: Backend, attacker: Attacker, seed: int) -> int:
    """Change one reply in each call. Returns how many calls raised."""
    refused = 0
    for number, call in enumerate(calls(backend)):
        attacker.garble(
            seed * 1000 + number,
            at=(seed * 7 + number) % (12 if number % 3 == 0 else 4),
            times=1 + (seed % 5 == 0) * 50,
        )
        start = time.monotonic()
        try:
            call()
        except MultiqError:
            refused += 1
        assert time.monotonic() - start < _HANG
        if seed % 2:
            backend.close()  # so that the next call has to log in
    attacker.relent()
    return refused


def recovers(backend: Backend) -> None:
    """The driver works again. Its timeout is so short that a busy machine may need more than one attempt."""
    for _ in range(30):
        with contextlib.suppress(BackendError):
            backend.stats("q")
            return
    pytest.fail("the driver gets no more answers, although the server works")


def is_well(backend: Backend, queue: str) -> None:
    """All calls work at once, so no reply of an earlier call is left over. A call may still get a dead connection."""
    with contextlib.suppress(BackendError):
        backend.stats(queue)
    (job_id,) = backend.enqueue(queue, [NewJob(b"well", new_id())])
    with backend.consumer([queue]) as consumer:
        (lease,) = consumer.reserve(1, 2)
        assert (lease.id, lease.body) == (job_id, b"well")
        assert consumer.settle([Ack(lease)]) == [None]
