"""Abandoning: before a lease ends, a process reports that the job's worker has died."""

from __future__ import annotations

from multiq.backend import Abandon, Ack, Release, State, Touch
from multiq.conformance.case import Topic, promise, requires, without


class AbandonTests(Topic):
    """The tests of ``abandon`` also check that a consumer other than the holder may settle a lease."""

    @promise("5.10")
    @requires("priorities")
    def test_an_abandoned_job_is_ready_for_others(self) -> None:
        # Given a job whose worker died in the first attempt
        job_id = self.enqueue(priority=9)
        self.settle(Abandon(self.take()))
        # Then another consumer gets the job immediately, for the second attempt
        assert self.stands(job_id, State.READY)
        lease = self.take(by=self.another_consumer())
        assert (lease.id, lease.priority, lease.attempt) == (job_id, 9, 2)

    @promise("5.10", "4.6")
    @requires("portable_leases")
    def test_each_crash_is_counted_once(self) -> None:
        # Given a job that was abandoned twice, and released between the two abandons
        self.enqueue()
        self.settle(Abandon(self.take()))
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (2, 1)
        self.settle(Release(lease))
        self.settle(Abandon(self.take()))
        # Then two crashes are counted, and the next attempt is the fourth
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (4, 2)

    @promise("5.10", "3.5")
    @requires("total_order")
    def test_abandoned_jobs_are_in_their_old_places(self) -> None:
        # Given jobs whose worker died, and a job that came later
        self.enqueue_all(b"1", b"2", b"3")
        leases = self.reserve(2)
        self.enqueue(b"4")
        # When the jobs are abandoned in any order, then the order of the queue is as before
        self.settle(Abandon(leases[1]), Abandon(leases[0]))
        assert self.bodies() == [b"1", b"2", b"3", b"4"]

    @promise("5.8", "5.10")
    def test_an_abandoned_job_takes_no_second_verdict(self) -> None:
        # Given a worker that was reported as dead
        job_id = self.enqueue()
        lease = self.take()
        self.settle(Abandon(lease))
        # When the worker comes back, then its verdict is refused
        self.refused(Ack(lease), Touch(lease), Abandon(lease))
        assert self.stands(job_id, State.READY)

    @promise("5.10", "5.6")
    @requires("reasons")
    def test_abandoning_keeps_its_reason(self) -> None:
        # Given a job that failed before its worker died
        job_id = self.enqueue()
        self.settle(Release(self.take(), reason="failed before"))
        self.settle(Abandon(self.take(), "killed by SIGKILL"))
        # Then the newer reason is stored
        assert self.peek(job_id).reason == "killed by SIGKILL"

    @promise("5.11")
    @requires("portable_leases")
    def test_another_consumer_that_knows_the_lease_may_settle_it(self) -> None:
        # Given a lease that another consumer knows, too
        self.enqueue_all(b"gone", b"kept")
        leases = self.reserve(2)
        other = self.another_consumer()
        # When the other consumer settles the lease
        self.settle(Ack(leases[0]), Touch(leases[1]), by=other)
        # Then the other consumer's verdict is accepted, and the holder's own verdict is refused
        self.refused(Ack(leases[0]))
        self.settle(Ack(leases[1]))
        assert [self.counts()[2], self.bodies()] == [0, []]

    @promise("5.11", "4.4")
    @without("portable_leases")
    def test_where_leases_are_not_portable_no_other_process_can_settle_them(self) -> None:
        # Given a lease that another consumer knows, too
        job_id = self.enqueue()
        lease = self.take()
        # When the other consumer settles the lease, then its verdict is refused, and the holder can still settle the
        # lease
        self.refused(Ack(lease), by=self.another_consumer())
        assert self.stands(job_id, State.RESERVED)
        self.settle(Ack(lease))
