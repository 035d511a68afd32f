"""Pause and resume: a paused queue hands out no jobs, and everything else works as before."""

from __future__ import annotations

from multiq.backend import Ack, Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires


@requires("pausing")
class PauseTests(Topic):
    @promise("10.1")
    def test_a_paused_queue_hands_nothing_out(self) -> None:
        # Given a queue with jobs
        self.enqueue_all(b"a", b"b")
        # When the queue is paused, then no consumer of any backend object gets a job
        self.backend.pause(self.queue, LONG)
        assert self.reserve() == []
        assert self.reserve(by=self.another_consumer(backend=self.another_backend())) == []
        assert self.counts() == (2, 0, 0, 0)

    @promise("10.2")
    def test_a_resumed_queue_goes_on_where_it_stopped(self) -> None:
        # Given a paused queue
        self.enqueue_all(b"a", b"b")
        self.backend.pause(self.queue, LONG)
        # When the queue is resumed, then its jobs are handed out in order
        self.backend.resume(self.queue)
        assert self.in_line(self.bodies(), [b"a", b"b"])

    @promise("10.2")
    def test_a_pause_ends_by_itself_and_not_before(self) -> None:
        # Given a pause of some seconds
        self.enqueue()
        moment = self.in_(self.short_delay)
        self.backend.pause(self.queue, self.short_delay)
        over = self.in_(self.short_delay)
        # When almost all of the pause has passed, then the queue is still paused
        self.harness.nearly(moment)
        self.nothing_before(moment)
        # And when all of the pause has passed, then the queue is not paused any more
        self.harness.past(over)
        assert self.worker.held or self.take()
        assert self.backend.stats(self.queue).paused_for is None

    @promise("10.2")
    def test_a_second_pause_can_shorten_the_first(self) -> None:
        # Given a long pause
        self.enqueue()
        self.backend.pause(self.queue, LONG)
        # When the queue is paused again for a shorter time, then the shorter pause applies
        self.backend.pause(self.queue, self.short_delay)
        self.harness.past(self.in_(self.short_delay))
        assert self.take()

    @promise("10.2")
    def test_a_second_pause_can_lengthen_the_first(self) -> None:
        # Given a short pause
        self.enqueue()
        self.backend.pause(self.queue, self.short_delay)
        # When the queue is paused again for a longer time, then it is still paused after the end of the first pause
        self.backend.pause(self.queue, LONG)
        self.harness.past(self.in_(self.short_delay))
        assert self.reserve() == []

    @promise("10.2")
    def test_a_queue_can_be_paused_again_after_a_resume(self) -> None:
        # Given a queue that was paused and resumed
        self.enqueue()
        self.backend.pause(self.queue, LONG)
        self.backend.resume(self.queue)
        # When the queue is paused again, then no job is handed out
        self.backend.pause(self.queue, LONG)
        assert self.reserve() == []

    @promise("10.2")
    def test_resume_of_a_queue_that_is_not_paused_succeeds(self) -> None:
        # Given a queue that was never paused
        self.enqueue()
        self.backend.resume(self.queue)
        # Then the queue's jobs are handed out
        assert self.take()

    @promise("10.1")
    def test_a_paused_queue_takes_jobs(self) -> None:
        # Given a queue that is paused before its first job is enqueued
        self.backend.pause(self.queue, LONG)
        self.enqueue_all(b"a", b"b")
        # Then the jobs are stored, but not handed out
        assert self.counts() == (2, 0, 0, 0)
        assert self.reserve() == []
        self.backend.resume(self.queue)
        assert self.in_line(self.bodies(), [b"a", b"b"])

    @promise("10.1")
    def test_a_paused_queue_takes_verdicts(self) -> None:
        # Given jobs that were reserved before the pause
        self.enqueue_all(b"a", b"b", b"c")
        leases = self.reserve()
        self.backend.pause(self.queue, LONG)
        # When the jobs are settled, then the verdicts are accepted
        self.settle(Ack(leases[0]), Release(leases[1]), Bury(leases[2]))
        assert self.counts() == (1, 0, 0, 1)
        assert self.reserve() == []

    @promise("10.1")
    def test_delays_run_on_during_a_pause(self) -> None:
        # Given a delayed job in a paused queue
        job_id = self.enqueue(delay=self.short_delay)
        self.backend.pause(self.queue, LONG)
        # When the job's due time comes, then the job is ready, but still not handed out
        self.harness.past(self.in_(self.short_delay))
        assert self.stands(job_id, State.READY)
        assert self.reserve() == []
        self.backend.resume(self.queue)
        assert self.take().id == job_id

    @promise("10.1")
    def test_leases_run_on_during_a_pause(self) -> None:
        # Given a job with a short lease, in a queue that was paused after the reserve
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        self.backend.pause(self.queue, LONG)
        # When the lease ends, then the job is ready, and a verdict is refused
        self.harness.past(self.in_(self.short_ttr))
        assert self.counts() == (1, 0, 0, 0)
        self.refused(Ack(lease))

    @promise("10.1")
    @requires("management")
    def test_a_paused_queue_can_be_managed(self) -> None:
        # Given a paused queue with a job in each state other than reserved
        buried = self.given(State.BURIED)
        delayed = self.enqueue(delay=LONG)
        ready = self.enqueue()
        self.backend.pause(self.queue, LONG)
        # When the jobs are kicked, deleted and rescheduled, then each call succeeds
        assert self.backend.kick(self.queue, 1) == 1
        assert self.stands(buried, State.READY)
        self.backend.delete(self.queue, delayed)
        self.backend.reschedule(self.queue, ready, LONG)
        assert self.counts() == (1, 1, 0, 0)
        assert self.reserve() == []

    @promise("10.3")
    def test_other_queues_are_not_paused(self) -> None:
        # Given two queues, the first of which is paused
        other = self.another_queue()
        self.enqueue(b"paused")
        self.enqueue(b"goes on", queue=other)
        self.backend.pause(self.queue, LONG)
        # Then a consumer of both queues gets the second queue's job
        consumer = self.another_consumer(self.queue, other)
        assert [lease.body for lease in self.reserve(by=consumer)] == [b"goes on"]
        # And when the first queue is resumed, the consumer gets the first queue's job
        self.backend.resume(self.queue)
        assert self.take(by=consumer).body == b"paused"

    @promise("10.3")
    def test_a_pause_of_the_last_queue_does_not_stop_the_first(self) -> None:
        # Given two queues, the second of which is paused
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue(b"paused", queue=other)
        self.backend.pause(other, LONG)
        # Then a consumer of both queues gets only the first queue's jobs
        leases = self.reserve(by=self.another_consumer(self.queue, other))
        assert self.in_line([lease.body for lease in leases], [b"a", b"b"])

    @promise("10.1")
    def test_a_consumer_that_waits_at_a_paused_queue_gets_nothing(self) -> None:
        # Given a paused queue with a job, and a consumer that waits for a short time
        self.enqueue()
        self.backend.pause(self.queue, LONG)
        # Then the wait ends without a job
        assert self.worker.reserve(1, 0.2) == []

    @promise("10.1", "5.9")
    def test_an_exchange_hands_out_nothing_of_a_paused_queue(self) -> None:
        # Given a reserved and a ready job, in a queue that was paused after the reserve
        self.enqueue_all(b"held", b"ready")
        lease = self.take()
        self.backend.pause(self.queue, LONG)
        # When an exchange acks the reserved job, then the ack is accepted, and no job is handed out
        assert self.worker.exchange([Ack(lease)], 2, 0) == ([None], [])
        assert self.counts() == (1, 0, 0, 0)
        # And the same exchange does not hand out a job that it releases
        self.backend.resume(self.queue)
        lease = self.take()
        self.backend.pause(self.queue, LONG)
        assert self.worker.exchange([Release(lease)], 2, 0) == ([None], [])
        # And when the queue is resumed, the released job is handed out
        self.backend.resume(self.queue)
        assert self.take().id == lease.id
