"""A server that hangs: it reads requests and never answers. No call may take much longer than its deadline."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, TypeVar

import pytest

from multiq.backend import OPTIONAL_PARTS, Ack, After, Arrive, State
from multiq.backend.base import methods_of
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.conformance.threads import Lag
from multiq.errors import BackendTimeout, BackendUnavailable, EnqueueUncertain, LeaseLost
from multiq.fault_proxy import Hole, Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from multiq.fault_proxy import Proxy

T = TypeVar("T")

LATE = 1.0  # a call must have ended this many seconds after its deadline
WAIT_LATE = 2.0  # the same limit for a reserve that waits: the server must first end the wait


class HangsTests(Topic):
    @promise("11.10")
    def test_every_call_to_a_server_that_hangs_ends_with_a_timeout_in_time(self) -> None:
        # Given a connected backend, and a lease
        proxy, far = self.proxied()
        job_id = self.enqueue(ttr=LONG)
        consumer = self.another_consumer(backend=far)
        (lease,) = consumer.reserve(1, 0)
        other = self.another_consumer(backend=far)
        other.reserve(1, 0)
        calls: dict[str, Callable[[], object]] = {
            "enqueue": lambda: far.enqueue(self.queue, [self.new()]),
            "reserve": lambda: other.reserve(1, 0),
            "settle": lambda: consumer.settle([Ack(lease)]),
            "peek": lambda: far.peek(self.queue, job_id),
            "jobs": lambda: far.jobs(self.queue, State.READY, limit=1),
            "delete": lambda: far.delete(self.queue, job_id),
            "reschedule": lambda: far.reschedule(self.queue, job_id, LONG),
            "kick": lambda: far.kick(self.queue, 1),
            "kick_job": lambda: far.kick_job(self.queue, job_id),
            "pause": lambda: far.pause(self.queue, LONG),
            "resume": lambda: far.resume(self.queue),
            "purge": lambda: far.purge(self.queue, [State.READY]),
            "outcomes": lambda: far.outcomes(self.queue, [job_id]),
            "history": lambda: far.history(self.queue),
            "forget": lambda: far.forget(self.queue, [job_id]),
            "carry_out": lambda: far.carry_out([Arrive(self.queue, job_id, "member")]),
            "note": lambda: far.note(self.queue, "key"),
            "notes": lambda: far.notes(self.queue),
            "stats": lambda: far.stats(self.queue),
            "queues": far.queues,
        }
        for power in OPTIONAL_PARTS:
            if not self.can.claim(power):
                for method in methods_of(power):
                    calls.pop(method, None)
        with self._hanging(proxy):
            # When all operations are called at the same time, then each operation ends in time, with an error that has
            # the reason
            self._all_time_out(calls)
            # And calls that must open a connection end in time, too
            self._all_time_out({name: calls[name] for name in ("enqueue", "reserve", "stats")})
        # When the server answers again, then the backend works again
        assert self._answers(lambda: far.stats(self.queue)).queue == self.queue
        assert self._answers(lambda: other.reserve(1, 0)) is not None

    @promise("2.9", "11.10", "2.4")
    @requires("client_ids")
    def test_an_enqueue_that_a_server_does_not_answer_is_uncertain_and_can_be_repeated(self) -> None:
        # Given a connected backend, and an enqueue that timed out
        proxy, far = self.proxied()
        far.enqueue(self.queue, [self.new()])
        job = self.new(delay=LONG)
        with self._hanging(proxy), pytest.raises(EnqueueUncertain) as caught:
            far.enqueue(self.queue, [job])
        # Then the error names the job, because the server may have stored the job
        assert caught.value.ids == (job.id,)
        assert isinstance(caught.value.__cause__, BackendTimeout)
        # When the job is enqueued again on a server that answers, then the job exists once
        for _ in range(2):
            assert self._answers(lambda: far.enqueue(self.queue, caught.value.jobs)) == [job.id]
        assert self.counts() == (1, 1, 0, 0)

    @promise("11.10", "5.9")
    def test_an_exchange_with_a_server_that_hangs_ends_in_time(self) -> None:
        # Given a lease
        proxy, far = self.proxied()
        self.enqueue(ttr=LONG)
        consumer = self.another_consumer(backend=far)
        (lease,) = consumer.reserve(1, 0)
        with self._hanging(proxy):
            # When an exchange acks the lease, then the whole exchange takes no longer than one call may take
            self._all_time_out({"exchange": lambda: consumer.exchange([Ack(lease)], 1, 0)})

    @promise("11.10", "11.9", "5.1")
    @requires("portable_leases")
    def test_a_verdict_that_a_server_took_no_notice_of_can_be_said_again(self) -> None:
        # Given a verdict that timed out and that the server has not received
        proxy, far = self.proxied()
        job_id = self.enqueue(ttr=LONG)
        consumer = self.another_consumer(backend=far)
        (lease,) = consumer.reserve(1, 0)
        with self._hanging(proxy), pytest.raises(BackendTimeout):
            consumer.settle([Ack(lease)])
        assert self.stands(job_id, State.RESERVED)
        # When the verdict is repeated on a server that answers, then the verdict is carried out
        assert self._answers(lambda: consumer.settle([Ack(lease)])) == [None]
        assert self.counts() == (0, 0, 0, 0)

    @promise("11.10", "11.9", "12.1")
    @requires("outcomes", "portable_leases")
    def test_an_outcome_that_a_server_took_no_notice_of_is_kept_when_its_ack_is_said_again(self) -> None:
        # Given an ack with an outcome. The ack timed out, and the server has not received the ack
        proxy, far = self.proxied()
        job_id = self.enqueue(ttr=LONG)
        consumer = self.another_consumer(backend=far)
        (lease,) = consumer.reserve(1, 0)
        ack = Ack(lease, After(keep=LONG, outcome=b"result"))
        with self._hanging(proxy), pytest.raises(BackendTimeout):
            consumer.settle([ack])
        assert self.backend.outcomes(self.queue, [job_id]) == [None]
        # When the ack is repeated on a server that answers, then the outcome is kept
        assert self._answers(lambda: consumer.settle([ack])) == [None]
        assert [kept and kept.body for kept in self.backend.outcomes(self.queue, [job_id])] == [b"result"]

    @promise("11.10", "3.2")
    def test_a_waiting_reserve_on_a_server_that_hangs_ends_in_time(self) -> None:
        # Given a consumer that waits
        proxy, far = self.proxied()
        consumer = self.another_consumer(backend=far)
        consumer.reserve(1, 0)
        seconds = self.harness.deadline
        with self._hanging(proxy):
            # When the server hangs, then the wait ends soon after its timeout and the deadline
            took, answer = self._timed(lambda: consumer.reserve(1, seconds))
        assert isinstance(answer, BackendTimeout)
        assert took <= seconds + self.harness.deadline + WAIT_LATE, f"it took {took:.1f} s"

    @promise("11.10", "11.1")
    def test_connections_that_die_without_a_sign_are_replaced(self) -> None:
        # Given a backend whose connections are frozen, while new connections work
        proxy, far = self.proxied()
        consumer = self.another_consumer(backend=far)
        consumer.reserve(1, 0)
        proxy.freeze()
        # When the backend is called, then each call ends in time, and the next job is handed out
        took, _ = self._timed(lambda: far.stats(self.queue))
        assert took <= self.harness.deadline + LATE, f"it took {took:.1f} s"
        took, _ = self._timed(lambda: consumer.reserve(1, 0))
        assert took <= self.harness.deadline + LATE, f"it took {took:.1f} s"
        proxy.cut_server()
        job_id = self.enqueue(ttr=LONG)
        assert self._answers(lambda: [lease.id for lease in consumer.reserve(1, self.harness.patience)]) == [job_id]

    # --- internals ---

    @contextlib.contextmanager
    def _hanging(self, proxy: Proxy) -> Iterator[None]:
        proxy.mode = Hole()
        try:
            yield
        finally:
            proxy.mode = Pass()
            proxy.cut()

    def _all_time_out(self, calls: dict[str, Callable[[], object]]) -> None:
        threads = {name: self.background(lambda call=call: self._timed(call)) for name, call in calls.items()}  # type: ignore[misc]
        for name, thread in threads.items():
            took, answer = thread.result(2 * self.harness.deadline + self.harness.patience)
            assert self._says_so(answer), f"{name}: {answer!r} instead of a BackendTimeout"
            assert took <= self.harness.deadline + LATE, f"{name}: it took {took:.1f} s"

    def _says_so(self, answer: object) -> bool:
        if isinstance(answer, EnqueueUncertain):
            return not self.can.client_ids or isinstance(answer.__cause__, BackendTimeout)
        if isinstance(answer, tuple):  # the answer of an exchange
            answer, leases = answer
            assert leases == []
        if isinstance(answer, list):  # the answer of a settle
            return bool(self.can.disconnect_ends_lease) and [type(lost) for lost in answer] == [LeaseLost]
        return isinstance(answer, BackendTimeout)

    @staticmethod
    def _timed(call: Callable[[], object]) -> tuple[float, object]:
        """Returns the seconds that a call took, and the call's answer or error. The delay that this machine caused
        (``Lag``) is subtracted.
        """
        with Lag() as lag:
            started = time.monotonic()
            try:
                answer = call()
            except Exception as exc:  # noqa: BLE001 - any error is compared with the expected answer
                answer = exc
            took = time.monotonic() - started
        return max(0.0, took - lag.seconds), answer

    def _answers(self, call: Callable[[], T]) -> T:
        give_up_at = time.monotonic() + self.harness.patience
        while True:
            try:
                return call()
            except BackendUnavailable:
                assert time.monotonic() < give_up_at, "the server answers again, and the backend does not"
                time.sleep(0.05)
