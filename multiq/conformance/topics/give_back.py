"""Giving back: a job that was reserved and never begun goes back to its queue."""

from __future__ import annotations

from multiq.backend import Ack, GiveBack, Release, State
from multiq.conformance.case import Topic, promise, requires, without


class GiveBackTests(Topic):
    @promise("5.5")
    @requires("priorities")
    def test_a_job_given_back_is_ready_for_others(self) -> None:
        # Given a job that its holder has not begun
        job_id = self.enqueue(priority=9)
        self.settle(GiveBack(self.take()))
        # Then another consumer gets the job, unchanged
        assert self.stands(job_id, State.READY)
        lease = self.take(by=self.another_consumer())
        assert (lease.id, lease.priority) == (job_id, 9)

    @promise("5.5", "3.5")
    @requires("total_order")
    def test_jobs_given_back_are_in_their_old_places(self) -> None:
        # Given jobs that were prefetched, and a job that came later
        self.enqueue_all(b"1", b"2", b"3")
        leases = self.reserve(2)
        self.enqueue(b"4")
        # When the jobs are given back in any order, then the order of the queue is as before
        self.settle(GiveBack(leases[1]), GiveBack(leases[0]))
        assert self.bodies() == [b"1", b"2", b"3", b"4"]

    @promise("5.5", "4.5")
    @requires("give_back")
    def test_a_job_given_back_has_not_been_attempted(self) -> None:
        # Given a job that was given back twice
        job_id = self.enqueue()
        for _ in range(2):
            self.settle(GiveBack(self.take()))
        # Then the job's next reservation counts as the first attempt
        assert self.peek(job_id).attempt == 0
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (1, 0)

    @promise("5.5", "4.5")
    @requires("give_back")
    def test_giving_back_undoes_one_attempt_and_no_more(self) -> None:
        # Given a job in its third attempt
        self.enqueue()
        for _ in range(2):
            self.settle(Release(self.take()))
        self.settle(GiveBack(self.take()))
        # Then the attempt after the give-back is the third attempt again
        assert self.take().attempt == 3

    @promise("5.5", "4.5")
    @without("give_back")
    def test_where_it_cannot_be_undone_the_attempt_is_counted(self) -> None:
        # Given a backend that cannot take a reservation back
        self.enqueue()
        self.settle(GiveBack(self.take()))
        # Then the reservation counts as an attempt, and not as a crash
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (2, 0)

    @promise("5.5", "2.5")
    def test_a_job_given_back_with_a_delay_is_ready_after_it_and_not_before(self) -> None:
        # Given a job that was given back with a short delay
        job_id = self.enqueue(b"later")
        lease = self.take()
        moment = self.in_(self.short_delay)
        self.settle(GiveBack(lease, self.short_delay))
        over = self.in_(self.short_delay)
        # Then the job is delayed, and is handed out when the delay has passed
        assert self.counts() == (0, 1, 0, 0)
        self.harness.nearly(moment)
        self.nothing_before(moment)
        self.harness.past(over)
        held = list(self.worker.held.values()) or [self.take()]
        assert [lease.id for lease in held] == [job_id]

    @promise("5.5", "4.5")
    @requires("give_back")
    def test_a_delayed_give_back_counts_no_attempt(self) -> None:
        # Given a job that was given back with a delay, and jobs that were given back without a delay
        self.enqueue_all(b"a", b"b", b"c")
        leases = self.reserve()
        delays = 0.0, self.short_delay, 2 * self.short_delay
        self.settle(*(GiveBack(lease, delay) for lease, delay in zip(leases, delays, strict=True)))
        assert self.counts() == (1, 2, 0, 0)
        # When the delays have passed, then each job is in its first attempt
        self.harness.past(self.in_(2 * self.short_delay))
        assert [(lease.attempt, lease.crashes) for lease in self.reserve()] == [(1, 0)] * 3

    @promise("5.5", "3.5")
    @requires("total_order")
    def test_a_job_given_back_with_a_delay_keeps_its_place_by_age(self) -> None:
        # Given an older job that was given back with a delay, and a younger job
        self.enqueue_all(b"older", b"younger")
        self.settle(GiveBack(self.take(), self.short_delay))
        # When the older job is due, then it is handed out before the younger job
        self.harness.past(self.in_(self.short_delay))
        assert self.bodies() == [b"older", b"younger"]

    @promise("5.8")
    def test_a_job_given_back_takes_no_second_verdict(self) -> None:
        # Given a job that was given back
        job_id = self.enqueue()
        lease = self.take()
        self.settle(GiveBack(lease))
        # When the old holder acks the job, then the ack is refused
        self.refused(Ack(lease), GiveBack(lease))
        assert self.stands(job_id, State.READY)

    @promise("5.5", "5.6")
    @requires("reasons")
    def test_giving_back_keeps_the_reason_of_the_last_verdict(self) -> None:
        # Given a job that was released with a reason, and later given back
        job_id = self.enqueue()
        self.settle(Release(self.take(), reason="failed before"))
        self.settle(GiveBack(self.take()))
        # Then the reason is still stored
        assert self.peek(job_id).reason == "failed before"
