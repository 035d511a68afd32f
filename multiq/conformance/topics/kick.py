"""Kick: buried jobs become ready again, and no other jobs change."""

from __future__ import annotations

from multiq.backend import Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires


class KickTests(Topic):
    @promise("6.1")
    def test_a_kick_makes_buried_jobs_ready_and_says_how_many(self) -> None:
        # Given three buried jobs
        self._bury(b"a", b"b", b"c")
        # When all three buried jobs are kicked
        assert self.backend.kick(self.queue, 100) == 3
        # Then all three jobs are ready
        assert self.counts() == (3, 0, 0, 0)

    @promise("6.1")
    def test_no_more_jobs_than_the_limit_are_kicked(self) -> None:
        # Given five buried jobs
        self._bury(b"a", b"b", b"c", b"d", b"e")
        # When a kick of two jobs is called four times
        kicked = [self.backend.kick(self.queue, 2) for _ in range(4)]
        # Then each call returns the number of jobs that it kicked
        assert kicked == [2, 2, 1, 0]
        assert self.counts() == (5, 0, 0, 0)

    @promise("6.1")
    @requires("total_order", "priorities")
    def test_the_longest_buried_job_is_kicked_first(self) -> None:
        # Given jobs that are buried in the reverse order of their age and urgency
        self.enqueue(b"1", priority=1)
        self.enqueue(b"2", priority=2)
        self.enqueue(b"3", priority=3)
        for lease in sorted(self.reserve(), key=lambda lease: lease.body, reverse=True):
            self.settle(Bury(lease))
        # When the jobs are kicked one at a time, then each kick takes the job that was buried first
        kicked = []
        for _ in range(3):
            assert self.backend.kick(self.queue, 1) == 1
            kicked += self.bodies()
        assert kicked == [b"3", b"2", b"1"]

    @promise("6.1")
    @requires("total_order")
    def test_a_job_buried_again_goes_to_the_end_of_the_buried(self) -> None:
        # Given two buried jobs, the first of which is kicked and buried again
        self._bury(b"first", b"second")
        self.backend.kick(self.queue, 1)
        self.settle(Bury(self.take()))
        # When one more job is kicked, then the other job becomes ready
        self.backend.kick(self.queue, 1)
        assert self.bodies() == [b"second"]

    @promise("6.1")
    def test_a_kick_never_touches_delayed_jobs(self) -> None:
        # Given a buried and a delayed job
        delayed = self.enqueue(b"delayed", delay=LONG)
        self._bury(b"buried")
        # When two kicks ask for more jobs than are buried
        kicked = [self.backend.kick(self.queue, 10) for _ in range(2)]
        # Then only the buried job has become ready
        assert kicked == [1, 0]
        assert self.stands(delayed, State.DELAYED)
        assert self.bodies() == [b"buried"]

    @promise("6.1")
    def test_a_kick_of_a_queue_with_nothing_buried_does_nothing(self) -> None:
        # Given a queue with a job in every other state
        self.given(State.RESERVED)
        self.enqueue()
        self.enqueue(delay=LONG)
        # When the queue is kicked, then no job changes
        assert self.backend.kick(self.queue, 10) == 0
        assert self.counts() == (1, 1, 1, 0)

    @promise("6.1")
    def test_a_kick_of_an_unused_queue_returns_0(self) -> None:
        assert self.backend.kick(self.queue, 10) == 0

    @promise("6.3")
    @requires("total_order", "priorities")
    def test_kicked_jobs_keep_their_priority_and_their_place(self) -> None:
        # Given buried jobs, and younger jobs that are ready
        self.enqueue(b"old", priority=5)
        self.enqueue(b"best", priority=1)
        for lease in self.reserve():
            self.settle(Bury(lease))
        self.enqueue(b"young", priority=5)
        # When the buried jobs are kicked, then all jobs are handed out by priority, and within a priority by age
        self.backend.kick(self.queue, 10)
        assert self.bodies() == [b"best", b"old", b"young"]

    @promise("6.3", "4.5")
    def test_kicked_jobs_keep_their_count_of_attempts(self) -> None:
        # Given a job that was buried in its second attempt
        self.enqueue()
        self.settle(Release(self.take()))
        self.settle(Bury(self.take()))
        # When the job is kicked, then its next attempt is the third
        self.backend.kick(self.queue, 1)
        assert self.take().attempt == 3

    @promise("6.3", "4.8")
    def test_kicked_jobs_keep_their_age(self) -> None:
        # Given a job that was buried for a while
        started = self.harness.now()
        self.given(State.BURIED)
        self.harness.advance(self.short_delay)
        # When the job is kicked, then its age is still the time since its enqueue
        self.backend.kick(self.queue, 1)
        assert self.about(self.take().age, self.harness.now() - started)

    @promise("6.3", "5.6")
    @requires("reasons")
    def test_kicked_jobs_keep_their_reason(self) -> None:
        # Given a job that was buried with a reason
        job_id = self.enqueue()
        self.settle(Bury(self.take(), reason="why"))
        # When the job is kicked, then the reason can still be read
        self.backend.kick(self.queue, 1)
        assert self.peek(job_id).reason == "why"

    @promise("6.1", "11.5")
    def test_a_kick_leaves_other_queues_alone(self) -> None:
        # Given a buried job in each of two queues
        other = self.another_queue()
        self._bury(b"here")
        self._bury(b"there", queue=other)
        # When one queue is kicked, then the other queue's job stays buried
        assert self.backend.kick(self.queue, 10) == 1
        assert self.counts(other) == (0, 0, 0, 1)

    def _bury(self, *bodies: bytes, queue: str | None = None) -> None:
        consumer = self.another_consumer(queue or self.queue)
        for body in bodies:
            self.enqueue(body, queue=queue)
            self.settle(Bury(self.take(by=consumer)), by=consumer)
