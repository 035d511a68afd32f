"""Kick one job: a buried or a delayed job becomes ready now."""

from __future__ import annotations

import pytest

from multiq.backend import Ack, Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.errors import JobNotFound, JobReserved
from multiq.ids import new_id


@requires("management")
class KickJobTests(Topic):
    @promise("6.2")
    @pytest.mark.parametrize("state", [State.BURIED, State.DELAYED])
    def test_a_kicked_job_is_ready_now(self, state: State) -> None:
        # Given a buried or a delayed job
        job_id = self.given(state)
        # When the job is kicked
        self.backend.kick_job(self.queue, job_id)
        # Then the job is handed out
        assert self.stands(job_id, State.READY)
        assert self.take().id == job_id

    @promise("6.2")
    def test_a_ready_job_stays_as_it_is(self) -> None:
        # Given ready jobs
        self.enqueue_all(b"1", b"2")
        job_id = self.enqueue(b"3")
        # When the last job is kicked, then the kick raises no error, and the order of the jobs stays the same
        self.backend.kick_job(self.queue, job_id)
        assert self.counts() == (3, 0, 0, 0)
        assert self.in_line(self.bodies(), [b"1", b"2", b"3"])

    @promise("6.4")
    def test_a_reserved_job_cannot_be_kicked(self) -> None:
        # Given a job that is reserved
        job_id = self.enqueue()
        lease = self.take()
        # When the job is kicked, then the kick raises JobReserved, and the holder can still settle the job
        with pytest.raises(JobReserved):
            self.backend.kick_job(self.queue, job_id)
        assert self.stands(job_id, State.RESERVED)
        self.settle(Ack(lease))

    @promise("6.4")
    def test_a_job_that_is_not_there_cannot_be_kicked(self) -> None:
        # Given a job that is done, and an id that no job ever had
        job_id = self.enqueue()
        self.settle(Ack(self.take()))
        for missing in (job_id, new_id()):
            with pytest.raises(JobNotFound):
                self.backend.kick_job(self.queue, missing)

    @promise("6.2")
    def test_the_jobs_around_it_stay_where_they_are(self) -> None:
        # Given two buried and two delayed jobs
        buried = self.enqueue_all(b"a", b"b")
        self.settle(*map(Bury, self.reserve()))
        delayed = self.enqueue_all(b"c", b"d", delay=LONG)
        # When the second job of each kind is kicked, then the first buried and the first delayed job stay unchanged
        self.backend.kick_job(self.queue, buried[1])
        self.backend.kick_job(self.queue, delayed[1])
        assert self.counts() == (2, 1, 0, 1)
        assert self.in_line(self.bodies(), [b"b", b"d"])

    @promise("6.3")
    @requires("total_order", "priorities")
    def test_a_kicked_job_keeps_its_priority_and_its_place(self) -> None:
        # Given a delayed job, and younger jobs
        job_id = self.enqueue(b"old", priority=5, delay=LONG)
        self.enqueue(b"young", priority=5)
        self.enqueue(b"best", priority=1)
        # When the delayed job is kicked, then all jobs are handed out by priority, and within a priority by age
        self.backend.kick_job(self.queue, job_id)
        assert self.bodies() == [b"best", b"old", b"young"]

    @promise("6.3", "4.5")
    def test_a_kicked_job_keeps_its_count_of_attempts(self) -> None:
        # Given a job that was released with a delay after its first attempt
        job_id = self.enqueue()
        self.settle(Release(self.take(), delay=LONG))
        # When the job is kicked, then its next attempt is the second
        self.backend.kick_job(self.queue, job_id)
        assert self.take().attempt == 2

    @promise("4.7")
    def test_kicking_a_delayed_job_does_not_count_as_a_kick(self) -> None:
        # Given a delayed job that was never buried
        job_id = self.given(State.DELAYED)
        # When the job is kicked, then its next lease has 0 kicks
        self.backend.kick_job(self.queue, job_id)
        assert self.take().kicks == 0

    @promise("6.2", "2.5")
    def test_a_kicked_jobs_old_due_time_means_nothing_any_more(self) -> None:
        # Given a delayed job that was kicked and then acked
        job_id = self.enqueue(delay=self.short_delay)
        self.backend.kick_job(self.queue, job_id)
        self.settle(Ack(self.take()))
        # When the job's due time comes, then no job is handed out
        self.harness.past(self.in_(self.short_delay))
        assert self.reserve() == []
        assert self.counts() == (0, 0, 0, 0)

    @promise("1.2", "6.2")
    def test_a_job_whose_lease_has_ended_counts_as_ready(self) -> None:
        # Given an abandoned job
        lease = self.abandoned()
        # When the job is kicked, then the kick raises no error
        self.backend.kick_job(self.queue, lease.id)
        assert self.take().id == lease.id
