"""``Topic``: the base class of all test classes, with the actions and checks that the tests share.

A *power* in the code is a capability that a backend either has or lacks.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import pytest

from multiq.backend import (
    PRIORITY_DEFAULT,
    STORED_STATES,
    Abandon,
    Ack,
    Arrive,
    Bury,
    Consumer,
    GiveBack,
    NewJob,
    Release,
    State,
    Terms,
    Touch,
)
from multiq.errors import LeaseLost, MultiqError
from multiq.ids import new_id

from . import requirements
from .requirements import DOES_NOT_APPLY, NOT_TRIED, NotTriedError, promise, requires, without
from .threads import Background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from multiq.backend import Backend, JobRecord, Lease, Verdict
    from multiq.backend.capabilities import Capabilities
    from multiq.fault_proxy import Proxy

    from .external_connections import ExternalConnection
    from .harness import Harness

T = TypeVar("T")

__all__ = [
    "ALL", "BODIES", "BOUNDARIES", "IDS", "LONG", "SLEEP_GRACE", "VERDICTS", "Topic", "TrackedConsumer", "promise",
    "requires", "without",
]  # fmt: skip

LONG = 900.0  # seconds: a delay or lease of this length does not end during a test, unless the test moves its clock
ALL = 1000  # more jobs than any test has in a queue
SLEEP_GRACE = 0.15  # seconds to let a thread begin its wait in a reserve
_CALLS = 100  # calls of reserve, each of which may end early: the jobs of a test need less than ten

KIB = 1024
MODEST = 64 * KIB * KIB  # bytes: a limit that a test can fill

BODIES = {
    "empty": b"",
    "one NUL": b"\0",
    "NULs inside": b"a\0b\0\0c",
    "line ends": b"\r\nabc\r\n\r\n",
    "every byte": bytes(range(256)),
    "no UTF-8": b"\xff\xfe\xc3\x28",
    "UTF-8": "naïve ☃ 𝄞".encode(),
    "empty JSON list and object": b'{"args":[],"kwargs":{}}',
    "large JSON numbers": b"[9223372036854775808,1234567890123456789,-0.0,1e400]",
    "quotes and format signs": b'\'; -- "%s" {0} ${x} \\',
}
IDS = [
    "7", "order-4711", "Order-4711", "order-4711~", "a/b:c.d{e}", "*?[x]", "'\"`%s\\", "-x", "$1;",
    *("0" * size for size in (15, 16, 17, 32, 36)), "x" * 200, "x" * 199,
]  # fmt: skip
BOUNDARIES = [64 * KIB + extra for extra in (-2, -1, 0, 1)]  # sizes at the limits of buffers, 16-bit lengths and BLOBs


class TrackedConsumer(Consumer):
    """A driver's consumer that records its leases, so that a test can settle the open leases when it ends."""

    def __init__(self, inner: Consumer) -> None:
        self.queues = inner.queues
        self.held: dict[str, Lease] = {}
        self.is_closed = False
        self._inner = inner

    @property
    def asked_at(self) -> float:  # type: ignore[override]
        return self._inner.asked_at

    @property
    def sees_all(self) -> bool:  # type: ignore[override]
        return self._inner.sees_all

    @property
    def most_gated(self) -> int | None:
        return self._inner.most_gated

    @most_gated.setter
    def most_gated(self, value: int | None) -> None:
        self._inner.most_gated = value

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self._remember(self._inner.reserve(limit, timeout, queues))

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._forget(verdicts, self._inner.settle(verdicts))

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        answers, leases = self._inner.exchange(verdicts, limit, timeout, queues)
        return self._forget(verdicts, answers), self._remember(leases)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self.is_closed = True
        self._inner.close()

    def _remember(self, leases: list[Lease]) -> list[Lease]:
        self.held.update({lease.token: lease for lease in leases})
        return leases

    def _forget(self, verdicts: Sequence[Verdict], answers: list[LeaseLost | None]) -> list[LeaseLost | None]:
        for verdict in verdicts:
            if not isinstance(verdict, Touch):
                self.held.pop(verdict.lease.token, None)
        return answers


class Topic:
    """One topic of the contract. A driver's test class is a subclass that sets ``harness_class``.

    Each test has a new harness, a backend, the name of an unused queue, and the backend's capabilities (``can``).
    """

    harness_class: ClassVar[Callable[[], Harness]]

    harness: Harness
    backend: Backend
    queue: str
    can: Capabilities

    @pytest.fixture(autouse=True)
    def _set_up(self, request: pytest.FixtureRequest) -> Iterator[None]:
        self.harness = type(self).harness_class()
        self._request = request
        self._backends: list[Backend] = []
        self._consumers: list[TrackedConsumer] = []
        self._threads: list[Background[Any]] = []
        self._proxies: list[Proxy] = []
        self._worker: TrackedConsumer | None = None
        try:
            self.backend = self.another_backend()
            self.can = self.harness.capabilities(self.backend)
            requirements.check(request.node, self.can, type(self), request.function)
            self.queue = self.another_queue()
            yield
        finally:
            self._leave()

    # --- backends, queues and consumers ---

    @property
    def worker(self) -> TrackedConsumer:
        """A consumer of the test's queue, for a test that needs only one consumer."""
        if self._worker is None:
            self._worker = self.another_consumer()
        return self._worker

    def another_backend(self) -> Backend:
        backend = self.harness.open()
        self._backends.append(backend)
        return backend

    def another_queue(self, ending: str = "") -> str:
        return self.harness.fresh_queue(ending)

    def another_consumer(self, *queues: str, backend: Backend | None = None) -> TrackedConsumer:
        """Open another consumer of these *queues*. If no queue is given, the consumer reads the test's queue."""
        consumer = TrackedConsumer((backend or self.backend).consumer(queues or (self.queue,)))
        self._consumers.append(consumer)
        return consumer

    # --- optional hooks of the harness ---

    def proxied(self) -> tuple[Proxy, Backend]:
        """Open a proxy, and a backend whose connections all go through this proxy."""
        try:
            proxy, backend = self.harness.proxied()
        except NotTriedError as exc:
            self.not_tried(str(exc))
        self._proxies.append(proxy)
        self._backends.append(backend)
        backend.stats(self.queue)
        assert proxy.accepted > 0, "Harness.proxied() opened a backend that does not go through its proxy"
        return proxy, backend

    def transaction(self) -> AbstractContextManager[ExternalConnection]:
        """A database connection that belongs to the caller. The caller's connection is opened without multiq."""
        try:
            return self.harness.transaction()
        except NotTriedError as exc:
            self.not_tried(str(exc))

    # --- enqueuing ---

    def new(self, body: bytes = b"x", **options: Any) -> NewJob:
        job = NewJob(body, options.pop("id", None) or new_id(), **options)
        if job.priority != PRIORITY_DEFAULT:
            self.need("priorities")
        longest = self.can.longest_delay
        if longest is not None and job.delay > longest:
            self.does_not_apply(f"this backend has no delays over {longest:g} s")
        return job

    def enqueue(self, body: bytes = b"x", *, queue: str | None = None, **options: Any) -> str:
        (job_id,) = self.backend.enqueue(queue or self.queue, [self.new(body, **options)])
        return job_id

    def enqueue_all(self, *bodies: bytes, queue: str | None = None, **options: Any) -> list[str]:
        return self.backend.enqueue(queue or self.queue, [self.new(body, **options) for body in bodies])

    def held(self, awaits: int = 1, body: bytes = b"x", *, queue: str | None = None, **options: Any) -> str:
        """Enqueue a job that is held until *awaits* members have arrived."""
        self.need("holds")
        return self.enqueue(body, queue=queue, terms=Terms(awaits), **options)

    def arrive(self, job_id: str, *members: str, queue: str | None = None, **options: Any) -> None:
        """Let *members* arrive at a job, in one call. *options*: fields of ``Arrive``."""
        steps = [Arrive(queue or self.queue, job_id, member, **options) for member in members]
        assert self.backend.carry_out(steps) is True

    # --- consuming ---

    def reserve(self, limit: int = ALL, *, by: Consumer | None = None) -> list[Lease]:
        """Reserve the jobs that are due now, without waiting.

        A call that returns no jobs may have ended early (3.2). So the call is repeated until it has looked at all jobs.
        """
        consumer = by or self.worker
        for _ in range(_CALLS):
            leases = consumer.reserve(limit, 0)
            if leases or consumer.sees_all:
                return leases
        raise AssertionError(f"after {_CALLS} calls of reserve, no call had looked at all jobs")

    def take(self, *, by: Consumer | None = None) -> Lease:
        """Reserve the next job. Fails if no job is due."""
        leases = self.reserve(1, by=by)
        assert len(leases) == 1, "no job was handed out, though one should be ready"
        return leases[0]

    def bodies(self, *, by: Consumer | None = None) -> list[bytes]:
        """Reserve all jobs that are due, one by one. Returns the jobs' bodies in the order of the reservations."""
        bodies = []
        while leases := self.reserve(1, by=by):
            bodies.append(leases[0].body)
        return bodies

    def settle(self, *verdicts: Verdict, by: Consumer | None = None) -> None:
        """Settle, and fail if any verdict is refused."""
        answers = (by or self.worker).settle(verdicts)
        assert answers == [None] * len(verdicts), "a verdict was refused while its lease was alive"

    def refused(self, *verdicts: Verdict, by: Consumer | None = None) -> None:
        """Settle, and fail if any verdict is accepted instead of refused with ``LeaseLost``."""
        answers = (by or self.worker).settle(verdicts)
        assert [type(answer) for answer in answers] == [LeaseLost] * len(verdicts)

    # --- reading ---

    def peek(self, job_id: str, queue: str | None = None) -> JobRecord:
        self.need("inspection")
        return self.backend.peek(queue or self.queue, job_id)

    def state(self, job_id: str) -> State:
        return self.peek(job_id).state

    def stands(self, job_id: str, state: State) -> bool:
        """Whether a job is in *state*. On a backend without ``inspection``, only check whether any job of the queue is
        in *state*."""
        if self.can.inspection:
            return self.state(job_id) is state
        if state is State.HELD:
            return bool(self.held_count())
        return bool(self.counts()[STORED_STATES.index(state)])

    def counts(self, queue: str | None = None) -> tuple[int | None, ...]:
        """The numbers of ready, delayed, reserved and buried jobs."""
        self.need("exact_counts")
        stats = self.backend.stats(queue or self.queue)
        return stats.ready, stats.delayed, stats.reserved, stats.buried

    def held_count(self, queue: str | None = None) -> int | None:
        """The number of held jobs."""
        self.need("exact_counts")
        return self.backend.stats(queue or self.queue).held

    def tells(self, value: T | None, expected: T, power: str) -> bool:
        """Whether *value* equals *expected*. If the backend lacks the capability *power*, None is accepted, too."""
        return value == expected if self.can.claim(power) else value in {expected, None}

    def in_line(self, seen: Sequence[T], expected: Sequence[T]) -> bool:
        """Whether *seen* equals *expected*. The order is compared only if the backend has ``total_order``.

        ``in_line`` is for tests that do not test the order.
        """
        if self.can.total_order:
            return list(seen) == list(expected)
        return len(seen) == len(expected) and all(one in seen for one in expected)

    def about(self, value: float | None, expected: float) -> bool:
        """Whether a time equals *expected* within the resolution of this harness's clock."""
        tolerance = 2.0 + self.can.delay_resolution if self.harness.real_time else 0.002
        return value is not None and abs(value - expected) <= tolerance

    def modest_limit(self) -> int:
        """A body of the largest size that the backend accepts. Ends the test if the largest size is too large for a
        test."""
        if self.can.max_body is None or self.can.max_body > MODEST:
            self.does_not_apply("its largest body is larger than a test should be")
        return self.can.max_body

    # --- jobs in a given state ---

    def given(self, state: State, body: bytes = b"x", **options: Any) -> str:
        """Enqueue a job, move the job to *state*, and return the job's id. The queue must have no other ready job."""
        if state is State.DELAYED:
            return self.enqueue(body, **{"delay": LONG, **options})
        if state is State.HELD:
            return self.held(1, body, **options)
        job_id = self.enqueue(body, **options)
        if state is State.RESERVED:
            self._take_that(job_id)
        elif state is State.BURIED:
            self.settle(Bury(self._take_that(job_id)))
        return job_id

    def _take_that(self, job_id: str) -> Lease:
        lease = self.take()
        assert lease.id == job_id
        return lease

    def abandoned(self, *, by: Consumer | None = None, **options: Any) -> Lease:
        """Reserve a job, and let its lease end without a verdict. Returns the lease."""
        self.enqueue(ttr=self.short_ttr, **options)
        lease = self.take(by=by)
        self.harness.past(self.in_(self.short_ttr))
        return lease

    # --- time ---

    @property
    def short_delay(self) -> float:
        """A delay in seconds, short enough for a test to wait for its end. The backend can distinguish the delay from
        no delay."""
        return max(1.0, self.can.delay_resolution) if self.harness.real_time else 5.0

    @property
    def short_ttr(self) -> float:
        """A ttr (time to run) in seconds. The ttr is short enough to wait for, and long enough for the other calls of a
        test."""
        return max(self.can.min_ttr, 1.5 if self.harness.real_time else 10.0)

    def in_(self, seconds: float) -> float:
        """The moment that is *seconds* from now."""
        return self.harness.now() + seconds

    def nothing_before(self, moment: float, *, by: Consumer | None = None) -> None:
        """Fail if a job is handed out before *moment*. A reserve that ends after *moment* may return a job."""
        leases = self.reserve(1, by=by)
        assert not leases or self.harness.now() >= moment, "a job was handed out too early"

    # --- several at once ---

    def background(self, work: Callable[[], T]) -> Background[T]:
        thread = Background(work)
        self._threads.append(thread)
        return thread

    def waiting(self, consumer: TrackedConsumer, limit: int = 1) -> Background[list[Lease]]:
        """Let *consumer* reserve in a thread, and give the thread time to begin. The timeout of the thread's reserve is
        longer than the test."""
        thread = self.background(lambda: consumer.reserve(limit, 3 * self.harness.patience))
        time.sleep(SLEEP_GRACE)
        return thread

    def woken(self, waiting: Background[T]) -> T:
        """The result of a waiting call. Fails if the call does not end within ``harness.patience`` seconds."""
        return waiting.result(self.harness.patience)

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Wait until another thread's work makes *holds* return true. Fails after ``harness.patience`` seconds."""
        give_up_at = time.monotonic() + self.harness.patience
        while not holds():
            assert time.monotonic() < give_up_at, f"it did not happen within {self.harness.patience:g} s"
            time.sleep(0.005)

    # --- refusals ---

    def need(self, power: str) -> None:
        """End a test, with the result *refused*, if the backend lacks the capability *power*."""
        requirements.need(self._request.node, self.can, power)

    def does_not_apply(self, why: str) -> NoReturn:
        """End a test that does not apply to this backend."""
        requirements.skip(self._request.node, DOES_NOT_APPLY, why)

    def not_tried(self, why: str) -> NoReturn:
        """End a test that needs a method which the harness does not override. A test that was not tried says nothing
        about the backend."""
        requirements.skip(self._request.node, NOT_TRIED, why)

    # --- the end ---

    def _leave(self) -> None:
        for thread, consumer in ((thread, consumer) for thread in self._threads for consumer in self._consumers):
            if thread.is_alive():
                consumer.interrupt()
        for thread in self._threads:
            thread.join(self.harness.patience)
        for consumer in self._consumers:
            self._give_up(consumer)
        for backend in self._backends:
            backend.close()
        for proxy in self._proxies:
            proxy.close()
        self.harness.close()

    def _give_up(self, consumer: TrackedConsumer) -> None:
        """Ack the leases that *consumer* still holds, and close *consumer*. The test then leaves no job reserved."""
        with contextlib.suppress(MultiqError):
            if consumer.held:
                acks = [Ack(lease) for lease in consumer.held.values()]
                if consumer.is_closed:
                    consumer = TrackedConsumer(self.backend.consumer(consumer.queues))
                consumer.settle(acks)
            consumer.close()


#: One verdict of each kind about a lease.
VERDICTS: dict[str, Callable[[Lease], Verdict]] = {
    "ack": Ack,
    "release": lambda lease: Release(lease, priority=7, reason="stale"),
    "bury": lambda lease: Bury(lease, reason="stale"),
    "touch": Touch,
    "give_back": GiveBack,
    "abandon": Abandon,
}
