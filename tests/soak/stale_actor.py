"""One of the processes of ``stale.py``: it uses multiq as any program does, and reads one order per line."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from multiq.backend import Abandon, Ack, Bury, GiveBack, Lease, NewJob, Release, Touch, Verdict
from multiq.backend.registry import open_backend
from multiq.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend, Consumer

T = TypeVar("T")

LONG = 3600.0  # seconds
PATIENCE = 60.0  # seconds, as a guard against a hang

#: by name: a function that makes the verdict, and the state of the job after a verdict that is in time
VERBS: dict[str, tuple[Callable[[Lease], Verdict], str]] = {
    "ack": (Ack, "gone"),
    "release": (Release, "ready"),
    "bury": (Bury, "buried"),
    "touch": (Touch, "reserved"),
    "release later": (lambda lease: Release(lease, delay=LONG), "delayed"),
    "give back": (GiveBack, "ready"),
    "abandon": (Abandon, "ready"),
}


class Order(msgspec.Struct, omit_defaults=True):
    """An order to one of the processes."""

    do: str
    queue: str
    ids: list[str] = []
    leases: list[Lease] = []
    verbs: list[str] = []
    count: int = 0
    ttr: float = 0.0


class Answer(msgspec.Struct, omit_defaults=True):
    ids: list[str] = []
    leases: list[Lease] = []
    lost: list[bool] = []
    """Whether each verdict was refused."""
    repeated: int = 0
    """How often the call raised, and was repeated."""
    error: str = ""


def act(url: str) -> int:
    """Carry out the orders from standard input. Returns the exit code."""
    if os.environ.get("SOAK_MUTANT"):
        os.environ["MULTIQ_URL"] = url
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from soak import mutants

        mutants.apply()
    with open_backend(url) as backend, contextlib.closing(Speaker(backend)) as speaker:
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            try:
                answer = getattr(speaker, order.do)(order) or Answer()
            except Exception:  # the process that gave the order shows the error
                answer = Answer(error=traceback.format_exc())
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
    return 0


class Speaker:
    """The orders, one method each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._consumers: dict[str, Consumer] = {}
        self._held: dict[tuple[str, str], Lease] = {}

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()
        self._consumers.clear()
        self._held.clear()

    def leave(self, _order: Order) -> None:
        self.close()

    def put(self, order: Order) -> Answer:
        jobs = [NewJob(b"x", job_id, ttr=order.ttr) for job_id in order.ids]
        return Answer(ids=self._backend.enqueue(order.queue, jobs))

    def reserve(self, order: Order) -> Answer:
        consumer = self._consumer(order.queue)
        leases: list[Lease] = []
        give_up_at = time.monotonic() + PATIENCE
        while len(leases) < order.count and time.monotonic() < give_up_at:
            with contextlib.suppress(BackendError):  # the connection may be dead after a restart
                leases += consumer.reserve(order.count - len(leases), 1.0)
        self._held.update({(lease.id, lease.token): lease for lease in leases})
        return Answer(leases=leases)

    def settle(self, order: Order) -> Answer:
        consumer, verdicts = self._consumer(order.queue), self._verdicts(order)
        lost, repeated = _insist(lambda: consumer.settle(verdicts))
        return Answer(lost=[error is not None for error in lost], repeated=repeated)

    def exchange(self, order: Order) -> Answer:
        consumer, verdicts = self._consumer(order.queue), self._verdicts(order)
        (lost, leases), repeated = _insist(lambda: consumer.exchange(verdicts, 1, 0.0))
        return Answer(lost=[error is not None for error in lost], leases=leases, repeated=repeated)

    def kick(self, order: Order) -> None:
        for job_id in order.ids:
            self._backend.kick_job(order.queue, job_id)

    def delete(self, order: Order) -> None:
        for job_id in order.ids:
            self._backend.delete(order.queue, job_id)

    def reschedule(self, order: Order) -> None:
        for job_id in order.ids:
            self._backend.reschedule(order.queue, job_id, LONG)

    def pause(self, order: Order) -> None:
        self._backend.pause(order.queue, LONG)

    def look(self, order: Order) -> None:
        """Make a call until the store answers again."""
        _insist(lambda: self._backend.stats(order.queue))

    def _consumer(self, queue: str) -> Consumer:
        if queue not in self._consumers:
            self._consumers[queue] = self._backend.consumer([f"{queue}-valid", queue])
        return self._consumers[queue]

    def _verdicts(self, order: Order) -> list[Verdict]:
        """The verdicts of an order: this process's own leases as the objects it got, others' as they were sent."""
        leases = [self._held.get((lease.id, lease.token), lease) for lease in order.leases]
        return [VERBS[verb][0](lease) for verb, lease in zip(order.verbs, leases, strict=True)]


def _insist(call: Callable[[], T]) -> tuple[T, int]:
    """The call's answer, and how often the call raised: its effect is then unknown, and it is repeated."""
    give_up_at = time.monotonic() + PATIENCE
    for repeated in itertools.count():
        try:
            return call(), repeated
        except BackendError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)
    raise AssertionError


if __name__ == "__main__":
    sys.exit(act(sys.argv[1]))
