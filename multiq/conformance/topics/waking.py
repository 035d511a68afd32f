"""Waking in time: a waiting consumer has a job soon after the job is ready. A waiting consumer need not wait for an
occasional poll."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Abandon, Ack, Arrive, Enqueue, GiveBack, Release, State, Touch
from multiq.conformance.case import LONG, SLEEP_GRACE, Topic, promise, requires
from multiq.conformance.forks import ended_well, fork
from multiq.conformance.requirements import NotTriedError
from multiq.conformance.threads import Lag
from multiq.errors import BackendTimeout
from multiq.fault_proxy import Latency

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend, Lease
    from multiq.conformance.case import TrackedConsumer
    from multiq.conformance.threads import Background

WITHIN = 0.5  # seconds from the moment when a job is ready until a waiting consumer must have the job
LEASE_LATE = 1.0  # seconds from a lease's end until the lease's job must be ready (4.2)
BASELINES = 5  # this many times ``_baseline`` is added to the allowed delay, because this machine may be slow
TRIES = 3
GOOD = 2  # how many of ``TRIES`` runs must be in time: a single poll may be in time by chance
OFFSETS = 12  # the number of moments at which a job comes while a consumer begins to wait
LATENCY = 0.03  # seconds by which the replies to the consumer are delayed

#: Operations that give a waiting consumer a job.
VERBS = (
    "enqueue",
    "a batch",
    "release",
    "give_back",
    "abandon",
    "kick",
    "kick_job",
    "reschedule",
    "resume",
    "arrive",
    "enqueue step",
)
#: Operations after which a waiting consumer gets a job when some time has passed.
TIMES = ("enqueue", "release", "reschedule", "pause")


class WakingTests(Topic):
    """Tests of how soon a waiting ``Consumer.reserve`` returns when there is a job."""

    @promise("3.10", "3.7")
    @pytest.mark.parametrize("verb", VERBS)
    def test_a_waiting_consumer_has_the_job_in_time(self, verb: str) -> None:
        # Given a consumer that waits, when another caller gives it a job, then the consumer has the job in time
        if verb == "give_back" and not self.can.give_back:
            self.does_not_apply("this backend has no give_back")
        if verb == "abandon" and not self.can.portable_leases:
            self.does_not_apply("this backend's leases are not portable")
        self._in_time(lambda: self._wakes(partial(self._given_for, verb)))

    @promise("3.10", "3.7")
    @requires("shared")
    @pytest.mark.parametrize("verb", ["enqueue", "kick", "kick_job", "reschedule", "resume", "arrive", "enqueue step"])
    def test_a_waiting_consumer_has_another_process_s_job_in_time(self, verb: str) -> None:
        # Given a consumer that waits, when another process gives it a job, then the consumer has the job in time
        self._in_time(lambda: self._wakes(partial(self._given_for, verb), elsewhere=True))

    @promise("3.10", "3.7", "5.9")
    @pytest.mark.parametrize("how", ["reserve", "exchange"])
    def test_a_consumer_is_woken_in_time_again_and_in_each_of_its_queues(self, how: str) -> None:
        # Given a consumer of two queues. The consumer was woken before, and now waits again in a reserve or exchange.
        # When a job is enqueued in one of the queues, then the consumer has the job in time
        for at in (1, 0):
            self._in_time(partial(self._wakes_again, how, at))

    @promise("3.10", "3.7")
    def test_two_jobs_wake_two_consumers_in_time(self) -> None:
        # Given two consumers that wait, when two jobs are enqueued together, then each consumer has one job in time
        self._in_time(self._wake_two)

    @promise("3.10", "2.5", "7.3", "10.2")
    @pytest.mark.parametrize("what", TIMES)
    def test_a_waiting_consumer_has_a_job_in_time_once_it_is_due(self, what: str) -> None:
        if not self.harness.real_time:
            self.does_not_apply("its clock is moved by hand")
        # Given a consumer that waits, when a job becomes due during the wait, then the consumer has the job in time
        delay = self.short_delay
        later = delay + self.can.delay_resolution  # due times may be rounded up by this much
        self._in_time(lambda: self._wakes(partial(self._given_soon, what, delay), after=later), good=1)

    @promise("3.10", "3.7", "4.2")
    def test_a_waiting_consumer_has_a_job_in_time_once_its_lease_has_ended(self) -> None:
        if not self.harness.real_time:
            self.does_not_apply("its clock is moved by hand")
        # Given a job whose holder touches the lease once while another consumer waits
        ttr = self.short_ttr

        def prepared() -> Callable[[Backend], object]:
            self.enqueue(ttr=ttr)
            holder = self.another_consumer()
            lease = self.take(by=holder)
            return lambda _: holder.settle([Touch(lease)])

        # When the lease ends without a further verdict, then the waiting consumer has the job in time
        self._in_time(lambda: self._wakes(prepared, after=ttr + LEASE_LATE), good=1)

    @promise("3.10", "2.7")
    @requires("transactional_enqueue")
    def test_a_commit_is_noticed_in_time_however_late_it_comes(self) -> None:
        # Given a consumer that waits, and a transaction that stays open for a while after its enqueue
        def prepared() -> Callable[[Backend], None]:
            return self._commit_late

        # When the transaction commits, then the consumer has the job in time
        self._in_time(lambda: self._wakes(prepared))

    @promise("3.10", "3.7")
    def test_a_job_that_comes_while_a_consumer_falls_asleep_wakes_it_in_time(self) -> None:
        # Given a consumer that needs some time to begin its wait. The consumer's replies are delayed, if the harness
        # can delay them.
        far, step = self.backend, 0.001
        try:
            proxy, far = self.harness.proxied()
        except NotTriedError:
            pass
        else:
            self._proxies.append(proxy)
            self._backends.append(far)
            far.stats(self.queue)
            proxy.mode, step = Latency(LATENCY), LATENCY / 2
        for at in range(OFFSETS):
            # When a job is enqueued while the consumer begins to wait, then the consumer has the job in time
            self._in_time(partial(self._while_falling_asleep, far, at * step), good=1)

    # --- sources of jobs ---

    def _given_for(self, verb: str) -> Callable[[Backend], object]:
        """Prepare the queue. Returns a function that gives the waiting consumer a job."""
        queue = self.queue
        if verb in {"enqueue", "a batch"}:
            jobs = [self.new(b"x" * 1000) for _ in range(200 if verb == "a batch" else 1)]
            return lambda backend: backend.enqueue(queue, jobs)
        if verb in {"release", "give_back", "abandon"}:
            self.enqueue()
            holder = self.another_consumer()
            lease = self.take(by=holder)
            verdict = {"release": Release, "give_back": GiveBack, "abandon": Abandon}[verb](lease)
            return lambda _: self.settle(verdict, by=holder)
        if verb == "resume":
            self.need("pausing")
            self.enqueue()
            self.backend.pause(queue, LONG)
            return lambda backend: backend.resume(queue)
        if verb in {"arrive", "enqueue step"}:
            return self._given_by_step(queue, verb)
        self._worker = None
        job_id = self.given(State.BURIED if verb == "kick" else State.DELAYED)
        if verb == "kick":
            return lambda backend: backend.kick(queue, 1)
        self.need("management")
        calls: dict[str, Callable[[Backend], object]] = {
            "kick_job": lambda backend: backend.kick_job(queue, job_id),
            "reschedule": lambda backend: backend.reschedule(queue, job_id, 0),
        }
        return calls[verb]

    def _given_by_step(self, queue: str, verb: str) -> Callable[[Backend], object]:
        self.need("holds")
        if verb == "arrive":
            job_id = self.held(queue=queue)
            return lambda backend: backend.carry_out([Arrive(queue, job_id, "member")])
        return lambda backend: backend.carry_out([Enqueue(queue, self.new())])

    def _given_soon(self, what: str, delay: float) -> Callable[[Backend], object]:
        """Like ``_given_for``, but the job becomes due after *delay* seconds."""
        queue = self.queue
        if what == "enqueue":
            return lambda backend: backend.enqueue(queue, [self.new(delay=delay)])
        if what == "pause":
            self.need("pausing")
            self.backend.pause(queue, LONG)
            self.enqueue()
            return lambda backend: backend.pause(queue, delay)
        if what == "reschedule":
            self.need("management")
            job_id = self.enqueue(delay=LONG)
            return lambda backend: backend.reschedule(queue, job_id, delay)
        self.enqueue()
        holder = self.another_consumer()
        verdict = Release(self.take(by=holder), delay=delay)
        return lambda _: self.settle(verdict, by=holder)

    def _commit_late(self, backend: Backend) -> None:
        with self.transaction() as connection:
            backend.enqueue(self.queue, [self.new()], connection=connection)
            time.sleep(SLEEP_GRACE)
            connection.commit()

    # --- internals ---

    def _in_time(self, late: Callable[[], tuple[float, float]], good: int = GOOD) -> None:
        """Raise ``AssertionError`` if fewer than *good* of ``TRIES`` runs are in time.

        *late* makes one run. *late* returns the delay of the consumer, and the longest delay that is allowed.
        """
        seen: list[str] = []
        for _ in range(TRIES):
            try:
                took, most = late()
            except BackendTimeout as exc:  # the server had no time for the call, which shows nothing about waking
                took, most = 1.0, 0.0
                seen.append(str(exc))
            else:
                seen.append(f"{took:.2f} s (the limit is {most:.2f} s)")
            good -= took <= most
            if good <= 0:
                return
            if good > TRIES - len(seen):
                break
        raise AssertionError(f"a waiting consumer had its job late, delay in each run: {'; '.join(seen)}")

    def _most(self, baseline: float, lag: Lag) -> float:
        promised = WITHIN if self.can.waits_in_server else max(WITHIN, self.can.poll_interval)
        return promised + BASELINES * baseline + lag.seconds

    def _baseline(self, consumer: TrackedConsumer) -> float:
        """The seconds from an enqueue until another thread has reserved the job without waiting."""
        started = time.monotonic()
        self.enqueue(queue=consumer.queues[-1])
        assert self.background(lambda: consumer.reserve(1, 0)).result(self.harness.patience + WITHIN)
        return time.monotonic() - started

    def _wakes(
        self, prepare: Callable[[], Callable[[Backend], object]], *, elsewhere: bool = False, after: float = 0.0
    ) -> tuple[float, float]:
        """Returns the delay until a waiting consumer had its job, and the longest delay that is allowed.

        *prepare*: returns the operation to call. *elsewhere*: whether another process calls the operation. *after*: how
        many seconds after the operation the job is ready.
        """
        self.queue = self.another_queue()
        consumer = self.another_consumer(self.queue, self.another_queue())
        baseline = self._baseline(consumer)
        act = prepare()
        say = self._elsewhere(act) if elsewhere else partial(self._here, act, self.another_backend())
        with Lag() as lag:
            waiting = self._asleep(consumer)
            there_at = say() + after
            return self._late(consumer, waiting, there_at, partial(self._most, baseline, lag)), self._most(
                baseline, lag
            )

    def _wakes_again(self, how: str, at: int) -> tuple[float, float]:
        consumer = self.another_consumer(self.another_queue(), self.another_queue())
        baseline = self._baseline(consumer)
        queue, other = consumer.queues[at], consumer.queues[1 - at]
        waiting = self._asleep(consumer)
        self.enqueue(queue=other)
        (lease,), _ = waiting.result(3 * self.harness.patience + 10)
        patience = 3 * self.harness.patience + 10

        def wait() -> tuple[list[Lease], float]:
            if how == "exchange":
                return consumer.exchange([Ack(lease)], 1, patience)[1], time.monotonic()
            return consumer.reserve(1, patience), time.monotonic()

        with Lag() as lag:
            waiting = self.background(wait)
            time.sleep(SLEEP_GRACE)
            there_at = self._here(lambda backend: backend.enqueue(queue, [self.new()]), self.backend)
            return self._late(consumer, waiting, there_at, partial(self._most, baseline, lag)), self._most(
                baseline, lag
            )

    def _wake_two(self) -> tuple[float, float]:
        self.queue = self.another_queue()
        consumers = [self.another_consumer() for _ in range(2)]
        baseline = self._baseline(consumers[0])
        with Lag() as lag:
            waiting = [(consumer, self._asleep(consumer)) for consumer in consumers]
            there_at = self._here(lambda backend: backend.enqueue(self.queue, [self.new(), self.new()]), self.backend)
            most = partial(self._most, baseline, lag)
            return max(self._late(consumer, thread, there_at, most) for consumer, thread in waiting), most()

    def _while_falling_asleep(self, far: Backend, offset: float) -> tuple[float, float]:
        self.queue = self.another_queue()
        consumer = self.another_consumer(self.queue, self.another_queue(), backend=far)
        baseline = self._baseline(consumer)
        with Lag() as lag:
            waiting = self.background(lambda: (consumer.reserve(1, 3 * self.harness.patience), time.monotonic()))
            time.sleep(offset)
            there_at = self._here(lambda backend: backend.enqueue(self.queue, [self.new()]), self.backend)
            return self._late(consumer, waiting, there_at, partial(self._most, baseline, lag)), self._most(
                baseline, lag
            )

    def _asleep(self, consumer: TrackedConsumer) -> Background[Any]:
        waiting = self.background(lambda: (consumer.reserve(1, 3 * self.harness.patience + 10), time.monotonic()))
        time.sleep(SLEEP_GRACE)
        return waiting

    def _late(
        self, consumer: TrackedConsumer, waiting: Background[Any], there_at: float, most: Callable[[], float]
    ) -> float:
        """The seconds from *there_at*, when the job was ready, until the consumer had the job.

        The wait takes only a little longer than ``most()`` seconds.
        """
        while waiting.is_alive() and time.monotonic() < there_at + most():
            waiting.join(0.01)
        if waiting.is_alive():
            consumer.interrupt()
            waiting.join(self.harness.patience)
            return time.monotonic() - there_at
        leases, had_at = waiting.result(self.harness.patience)
        assert leases, "a waiting consumer came back with nothing"
        return max(0.0, float(had_at) - there_at)

    @staticmethod
    def _here(act: Callable[[Backend], object], backend: Backend) -> float:
        act(backend)
        return time.monotonic()

    def _elsewhere(self, act: Callable[[Backend], object]) -> Callable[[], float]:
        """Start a process that calls *act* when the returned function is called.

        The returned function returns the moment at which *act* had returned.
        """
        (go_read, go_write), (ready_read, ready_write) = os.pipe(), os.pipe()

        def obey() -> None:
            with self.harness.open() as backend:
                backend.stats(self.queue)
                os.write(ready_write, b"!")
                os.read(go_read, 1)
                act(backend)
                os.write(ready_write, b"!")

        child = fork(obey)
        os.close(ready_write)
        os.read(ready_read, 1)

        def say() -> float:
            os.write(go_write, b"!")
            os.read(ready_read, 1)
            done_at = time.monotonic()
            for end in (go_read, go_write, ready_read):
                os.close(end)
            assert ended_well(child), "the other process ended with an error"
            return done_at

        return say
