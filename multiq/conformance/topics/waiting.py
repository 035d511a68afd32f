"""Waiting: a waiting consumer wakes for everything that gives the consumer a job, and for nothing else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, GiveBack, Release, State
from multiq.conformance.case import LONG, SLEEP_GRACE, Topic, promise, requires
from multiq.conformance.requirements import NotTriedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.conformance.case import TrackedConsumer

IDLE = 3.0  # seconds of a wait during which requests are counted
IDLE_REQUESTS = 2  # the largest number of requests of a consumer during one wait in the server
IDLE_TRIES = 3  # the number of waits; one must be within IDLE_REQUESTS, because a busy machine may disturb the others
SPINNING = 0.25  # the share of a core that a waiting consumer must not exceed


class WaitingTests(Topic):
    # --- wake-ups ---

    @promise("3.7", "2.8")
    def test_a_new_job_wakes_a_waiting_consumer(self) -> None:
        # Given a consumer that waits
        waiting = self.waiting(self.worker)
        # When another backend enqueues
        self.another_backend().enqueue(self.queue, [self.new(b"news")])
        # Then the consumer wakes with the enqueued job
        assert [lease.body for lease in self.woken(waiting)] == [b"news"]

    @promise("3.7", "2.5")
    def test_a_job_that_becomes_due_wakes_a_waiting_consumer(self) -> None:
        # Given a delayed job, and a consumer that waits
        moment = self.in_(self.short_delay)
        job_id = self.enqueue(delay=self.short_delay)
        waiting = self.waiting(self.worker)
        # When the job's due time comes
        self.harness.past(self.in_(self.short_delay))
        # Then the consumer wakes with the due job, and not earlier
        assert [lease.id for lease in self.woken(waiting)] == [job_id]
        assert self.harness.now() >= moment

    @promise("3.7", "2.5")
    def test_a_delayed_job_enqueued_during_the_wait_wakes_when_it_is_due(self) -> None:
        # Given a consumer that waits at an empty queue
        waiting = self.waiting(self.worker)
        # When a delayed job is enqueued, and becomes due
        job_id = self.enqueue(delay=self.short_delay)
        self.harness.past(self.in_(self.short_delay))
        # Then the consumer wakes with the due job
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "4.2")
    def test_a_lease_that_ends_wakes_a_waiting_consumer(self) -> None:
        # Given a job that another consumer holds, and a consumer that waits
        job_id = self.enqueue(ttr=self.short_ttr)
        self.take(by=self.another_consumer())
        waiting = self.waiting(self.worker)
        # When the lease ends, then the waiting consumer gets the job, without a background process
        self.harness.past(self.in_(self.short_ttr))
        assert [(lease.id, lease.crashes) for lease in self.woken(waiting)] == [(job_id, 1)]

    @promise("3.7", "5.2")
    def test_a_release_wakes_a_waiting_consumer(self) -> None:
        # Given a job that another consumer holds, and a consumer that waits
        job_id = self.enqueue()
        holder = self.another_consumer()
        lease = self.take(by=holder)
        waiting = self.waiting(self.worker)
        # When the job is released, then the waiting consumer gets the job
        self.settle(Release(lease), by=holder)
        assert [held.id for held in self.woken(waiting)] == [job_id]

    @promise("3.7", "5.5")
    def test_a_job_given_back_wakes_a_waiting_consumer(self) -> None:
        # Given a job that another consumer has reserved but not begun, and a consumer that waits
        job_id = self.enqueue()
        holder = self.another_consumer()
        lease = self.take(by=holder)
        waiting = self.waiting(self.worker)
        # When the job is given back, then the waiting consumer gets the job
        self.settle(GiveBack(lease), by=holder)
        assert [held.id for held in self.woken(waiting)] == [job_id]

    @promise("3.7", "6.1")
    def test_a_kick_wakes_a_waiting_consumer(self) -> None:
        # Given a buried job, and a consumer that waits
        job_id = self.given(State.BURIED)
        waiting = self.waiting(self.another_consumer())
        # When the job is kicked, then the consumer gets the job
        self.backend.kick(self.queue, 1)
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "6.2")
    @requires("management")
    def test_a_kick_of_one_job_wakes_a_waiting_consumer(self) -> None:
        # Given a delayed job, and a consumer that waits
        job_id = self.given(State.DELAYED)
        waiting = self.waiting(self.another_consumer())
        # When the job is kicked, then the consumer gets the job
        self.backend.kick_job(self.queue, job_id)
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "7.3")
    @requires("management")
    def test_a_job_rescheduled_to_now_wakes_a_waiting_consumer(self) -> None:
        # Given a job with a long delay, and a consumer that waits
        job_id = self.enqueue(delay=LONG)
        waiting = self.waiting(self.worker)
        # When the job is rescheduled to now, then the consumer gets the job
        job_id = self.backend.reschedule(self.queue, job_id, 0)
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "7.3")
    @requires("management")
    def test_an_earlier_due_time_is_noticed_by_a_waiting_consumer(self) -> None:
        # Given a job with a long delay, and a consumer that waits
        job_id = self.enqueue(delay=LONG)
        waiting = self.waiting(self.worker)
        # When the job is rescheduled with a short delay, and the short delay passes
        job_id = self.backend.reschedule(self.queue, job_id, self.short_delay)
        self.harness.past(self.in_(self.short_delay))
        # Then the consumer gets the job, although the job was due much later when the wait began
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "10.2")
    @requires("pausing")
    def test_a_resume_wakes_a_waiting_consumer(self) -> None:
        # Given a paused queue with a job, and a consumer that waits
        job_id = self.enqueue()
        self.backend.pause(self.queue, LONG)
        waiting = self.waiting(self.worker)
        # When the queue is resumed, then the consumer gets the job
        self.backend.resume(self.queue)
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "10.2")
    @requires("pausing")
    def test_the_end_of_a_pause_wakes_a_waiting_consumer(self) -> None:
        # Given a queue that has a job and is paused for a short time, and a consumer that waits
        job_id = self.enqueue()
        self.backend.pause(self.queue, self.short_delay)
        waiting = self.waiting(self.worker)
        # When the pause is over, then the consumer gets the job
        self.harness.past(self.in_(self.short_delay))
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.7", "3.3")
    def test_a_job_in_the_last_of_several_queues_wakes(self) -> None:
        # Given a consumer that waits at three queues
        last = self.another_queue()
        consumer = self.another_consumer(self.queue, self.another_queue(), last)
        waiting = self.waiting(consumer)
        # When a job is enqueued in the last of the three queues, then the consumer wakes
        self.enqueue(b"last", queue=last)
        assert [lease.body for lease in self.woken(waiting)] == [b"last"]

    @promise("3.7", "3.3")
    def test_a_job_that_becomes_due_in_the_last_of_several_queues_wakes(self) -> None:
        # Given a consumer that waits at two queues. The last queue's job is due sooner than the first queue's job
        last = self.another_queue()
        self.enqueue(delay=LONG)
        self.enqueue(b"sooner", queue=last, delay=self.short_delay)
        waiting = self.waiting(self.another_consumer(self.queue, last))
        # When the sooner job is due, then the consumer wakes
        self.harness.past(self.in_(self.short_delay))
        assert [lease.body for lease in self.woken(waiting)] == [b"sooner"]

    @promise("3.7", "10.3")
    @requires("pausing")
    def test_a_paused_first_queue_does_not_keep_a_consumer_asleep(self) -> None:
        # Given a consumer that waits at two queues, the first of which is paused and has jobs
        other = self.another_queue()
        self.enqueue()
        self.backend.pause(self.queue, LONG)
        waiting = self.waiting(self.another_consumer(self.queue, other))
        # When a job is enqueued in the second queue, then the consumer wakes
        self.enqueue(b"second", queue=other)
        assert [lease.body for lease in self.woken(waiting)] == [b"second"]

    @promise("3.7", "3.6")
    def test_each_waiting_consumer_gets_one_job_of_a_batch(self) -> None:
        # Given several consumers that wait
        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(self.harness.threads)]
        waiting = [self.waiting(consumer) for consumer in consumers]
        # When a batch with one job for each consumer is enqueued
        ids = self.enqueue_all(*[b"x"] * len(consumers))
        # Then no consumer sleeps while a job is ready
        woken = [lease.id for thread in waiting for lease in self.woken(thread)]
        assert sorted(woken) == sorted(ids)

    @promise("3.7")
    def test_jobs_that_come_one_by_one_wake_one_consumer_after_the_other(self) -> None:
        # Given two consumers that wait
        waiting = [self.waiting(self.another_consumer()) for _ in range(2)]
        # When two jobs are enqueued, the second after the first was reserved, then each consumer gets one job
        ids = []
        for _ in range(2):
            ids.append(self.enqueue())
            self.eventually(lambda: self.counts()[0] == 0)
        assert sorted(lease.id for thread in waiting for lease in self.woken(thread)) == sorted(ids)

    # --- no wake-up ---

    @promise("3.2", "11.5")
    def test_jobs_for_others_do_not_end_a_wait(self) -> None:
        # Given a consumer that waits for a short time
        started = time.monotonic()
        waiting = self.background(lambda: self.worker.reserve(1, 4 * SLEEP_GRACE))
        # When one job is enqueued in another queue, and one job with a delay in the consumer's queue
        self.enqueue(queue=self.another_queue())
        self.enqueue(delay=LONG)
        # Then the consumer gets no job, and waits until its timeout
        assert waiting.result(4 * SLEEP_GRACE + self.harness.patience) == []
        assert time.monotonic() - started >= 4 * SLEEP_GRACE

    @promise("3.2")
    def test_a_waiting_consumer_sleeps(self) -> None:
        # Given a delayed, a reserved and a buried job, so that no job is ready
        self.given(State.BURIED)
        self.given(State.RESERVED, ttr=LONG)
        self.given(State.DELAYED)
        # When a consumer waits
        started, spent = time.monotonic(), time.thread_time()
        assert self.another_consumer().reserve(1, 4 * SLEEP_GRACE) == []
        # Then the waiting consumer's thread uses little CPU time
        assert time.thread_time() - spent < SPINNING * (time.monotonic() - started)

    @promise("3.2", "3.10")
    @requires("waits_in_server")
    def test_an_idle_consumer_asks_the_server_seldom(self) -> None:
        # Given a consumer that waits, and a harness that may count the requests to the server
        consumer, asked = self._counted()
        consumer.reserve(1, 0)
        seen: list[int] = []
        while not seen or seen[-1] > IDLE_REQUESTS:
            assert len(seen) < IDLE_TRIES, (
                f"an idle consumer must send at most {IDLE_REQUESTS} requests in a wait, got {seen}"
            )
            before = asked()
            seconds = IDLE if before is not None else 4 * SLEEP_GRACE
            # When the consumer waits for a while
            started, spent = time.monotonic(), time.thread_time()
            assert consumer.reserve(1, seconds) == []
            # Then the consumer waits in the server. The consumer sends requests only when its wait begins and ends, and
            # uses little CPU time.
            seen.append((asked() or 0) - (before or 0))
            assert time.thread_time() - spent < SPINNING * (time.monotonic() - started)

    def _counted(self) -> tuple[TrackedConsumer, Callable[[], int | None]]:
        """Returns a consumer, and a function that returns the number of requests. The function is None if this harness
        cannot count requests.

        The number counts all requests to the server, or this consumer's requests through a proxy.
        """
        if self.harness.requests_served() is not None:
            return self.worker, self.harness.requests_served
        try:
            proxy, far = self.harness.proxied()
        except NotTriedError:
            return self.worker, lambda: None
        self._proxies.append(proxy)
        self._backends.append(far)
        return self.another_consumer(backend=far), lambda: proxy.requests

    # --- interrupt ---

    @promise("3.8")
    def test_an_interrupt_ends_a_wait(self) -> None:
        # Given a consumer that waits
        waiting = self.waiting(self.worker)
        # When another thread interrupts the consumer, then its wait ends without a job
        self.worker.interrupt()
        assert self.woken(waiting) == []

    @promise("3.8")
    def test_an_interrupt_before_the_wait_ends_the_next_one(self) -> None:
        # Given a consumer that is interrupted before its wait begins
        self.worker.interrupt()
        # When the consumer begins to wait, then the call returns immediately
        waiting = self.background(lambda: self.worker.reserve(1, 3 * self.harness.patience))
        assert self.woken(waiting) == []

    @promise("3.8", "3.1")
    @pytest.mark.parametrize("waits", [False, True])
    def test_an_interrupt_before_a_reserve_hides_no_ready_job(self, waits: bool) -> None:
        # Given a ready job, and a connected consumer that is interrupted
        assert self.worker.reserve(5, 0) == []
        job_id = self.enqueue()
        self.worker.interrupt()
        # When the consumer reserves, with or without a timeout, then it gets the job
        reserved = self.background(lambda: self.worker.reserve(5, 3 * self.harness.patience if waits else 0))
        assert [lease.id for lease in self.woken(reserved)] == [job_id]

    @promise("3.8")
    def test_an_interrupt_counts_for_one_wait_only(self) -> None:
        # Given a consumer whose wait was interrupted
        waiting = self.waiting(self.worker)
        self.worker.interrupt()
        assert self.woken(waiting) == []
        # When the consumer waits again, then it waits for a job
        waiting = self.waiting(self.worker)
        assert waiting.is_alive()
        job_id = self.enqueue()
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("3.8", "11.1")
    def test_nothing_is_lost_by_interrupts(self) -> None:
        # Given a consumer that is interrupted again and again while jobs come in
        total = 20
        consumer = self.worker
        done: list[str] = []

        def consume() -> None:
            while len(done) < total:
                for lease in consumer.reserve(3, 3 * self.harness.patience):
                    self.settle(Ack(lease))
                    done.append(lease.id)

        consuming = self.background(consume)
        ids = []
        for _ in range(total):
            ids.append(self.enqueue())
            consumer.interrupt()
        # Then the consumer gets each job exactly once
        self.woken(consuming)
        assert sorted(done) == sorted(ids)

    @promise("3.8")
    def test_an_interrupted_consumer_does_not_wake_the_others(self) -> None:
        # Given two consumers that wait
        one, other = self.another_consumer(), self.another_consumer()
        first, second = self.waiting(one), self.waiting(other)
        # When one consumer is interrupted, then the other consumer continues to wait
        one.interrupt()
        assert self.woken(first) == []
        assert second.is_alive()
        job_id = self.enqueue()
        assert [lease.id for lease in self.woken(second)] == [job_id]

    @promise("5.3", "3.7")
    def test_a_job_that_is_buried_ends_no_consumers_wait(self) -> None:
        # Given a reserved job, and a consumer that waits
        self.enqueue()
        holder = self.another_consumer()
        lease = self.take(by=holder)
        waiting = self.waiting(self.worker)
        # When the reserved job is buried, then the consumer continues to wait until there is a job
        self.settle(Bury(lease), by=holder)
        time.sleep(SLEEP_GRACE)
        assert waiting.is_alive()
        job_id = self.enqueue()
        assert [held.id for held in self.woken(waiting)] == [job_id]
