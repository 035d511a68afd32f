"""Bury: the job is set aside until a person decides about it."""

from __future__ import annotations

from multiq.backend import Ack, Bury, Release, State, Touch
from multiq.conformance.case import LONG, Topic, promise, requires, without


class BuryTests(Topic):
    @promise("5.3")
    def test_a_buried_job_is_not_handed_out(self) -> None:
        # Given a job that was buried
        job_id = self.given(State.BURIED)
        # Then no consumer gets the job, and the job is shown as buried
        assert self.reserve(by=self.another_consumer()) == []
        assert self.stands(job_id, State.BURIED)
        assert self.counts() == (0, 0, 0, 1)

    @promise("5.3")
    def test_time_does_not_bring_a_buried_job_back(self) -> None:
        # Given a buried job whose lease and delay are long over
        job_id = self.given(State.BURIED, ttr=self.short_ttr)
        self.harness.past(self.in_(2 * self.short_ttr))
        # Then the job is still buried
        assert self.reserve() == []
        assert self.stands(job_id, State.BURIED)

    @promise("5.3", "9.1")
    @requires("priorities")
    def test_a_buried_job_keeps_its_body_priority_and_ttr(self) -> None:
        # Given a buried job with its own options
        job_id = self.given(State.BURIED, b"evidence", priority=8, ttr=90)
        # Then all options are unchanged
        record = self.peek(job_id)
        assert (record.body, record.priority, record.ttr) == (b"evidence", 8, 90)

    @promise("5.6")
    @requires("reasons")
    def test_a_bury_keeps_its_reason(self) -> None:
        # Given a job that is buried with a reason
        job_id = self.enqueue()
        self.settle(Bury(self.take(), reason="no such address"))
        # Then peek shows the reason
        assert self.peek(job_id).reason == "no such address"

    @promise("5.6")
    @requires("reasons")
    def test_a_long_reason_is_kept_at_least_in_its_first_line(self) -> None:
        # Given a reason as long as a traceback of a deep recursion
        job_id = self.enqueue()
        self.settle(Bury(self.take(), reason="RecursionError: too deep\n" + "  at the same line again\n" * 2000))
        # Then peek still shows the reason's first line
        assert (self.peek(job_id).reason or "").startswith("RecursionError: too deep\n")

    @promise("5.6", "11.3")
    @without("reasons")
    def test_a_backend_that_keeps_no_reasons_shows_none_for_a_buried_job(self) -> None:
        # Given a job that is buried with a reason, on a backend that does not store reasons
        job_id = self.enqueue()
        self.settle(Bury(self.take(), reason="why"))
        # Then peek shows None, which means unknown
        assert self.peek(job_id).reason is None

    @promise("5.8")
    def test_a_buried_job_takes_no_second_verdict(self) -> None:
        # Given a job that was buried
        job_id = self.enqueue()
        lease = self.take()
        self.settle(Bury(lease))
        # When the old holder sends more verdicts, then they are refused
        self.refused(Ack(lease), Release(lease), Touch(lease), Bury(lease))
        assert self.stands(job_id, State.BURIED)

    @promise("5.3", "5.7")
    def test_a_bury_leaves_the_jobs_around_it_alone(self) -> None:
        # Given three jobs, one of which is buried
        self.enqueue_all(b"a", b"b", b"c", ttr=LONG)
        leases = self.reserve()
        self.settle(Bury(leases[0]))
        # Then the other jobs are still reserved
        assert self.counts() == (0, 0, 2, 1)
        self.settle(Ack(leases[1]), Ack(leases[2]))
