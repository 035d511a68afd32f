"""Reschedule: a job is treated as if it were enqueued now, with the new delay."""

from __future__ import annotations

import pytest

from multiq.backend import Ack, Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires, without
from multiq.errors import JobNotFound, JobReserved
from multiq.ids import new_id


@requires("management")
class RescheduleTests(Topic):
    """The topic ``waiting`` tests how a reschedule wakes consumers."""

    @promise("7.1")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED])
    def test_a_job_is_put_off(self, state: State) -> None:
        # Given a job that is not reserved
        job_id = self.given(state)
        # When the job is rescheduled
        job_id = self.backend.reschedule(self.queue, job_id, 2 * LONG)
        # Then the job is due after the new delay, and is counted once
        record = self.peek(job_id)
        assert record.state is State.DELAYED
        assert self.about(record.due_in, 2 * LONG)
        assert self.counts() == (0, 1, 0, 0)
        assert self.reserve() == []

    @promise("7.1")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED])
    def test_a_job_is_brought_forward_to_now(self, state: State) -> None:
        # Given a job that is not reserved
        job_id = self.given(state)
        # When the job is rescheduled without delay
        job_id = self.backend.reschedule(self.queue, job_id, 0)
        # Then the job is ready
        assert self.stands(job_id, State.READY)
        assert self.take().id == job_id

    @promise("7.1", "2.5")
    def test_a_job_can_become_due_earlier(self) -> None:
        # Given a job with a long delay
        job_id = self.enqueue(delay=LONG)
        # When the job is rescheduled with a short delay
        moment = self.in_(self.short_delay)
        job_id = self.backend.reschedule(self.queue, job_id, self.short_delay)
        over = self.in_(self.short_delay)
        # Then the job is handed out after its new due time, and not before
        self.harness.nearly(moment)
        self.nothing_before(moment)
        self.harness.past(over)
        assert job_id in {lease.id for lease in self.worker.held.values()} or self.take().id == job_id

    @promise("7.1", "2.5")
    def test_a_job_put_off_does_not_start_at_its_old_time(self) -> None:
        # Given a job with a short delay
        job_id = self.enqueue(delay=self.short_delay)
        # When the job is rescheduled with a long delay
        job_id = self.backend.reschedule(self.queue, job_id, LONG)
        # Then the job is not handed out at its old due time
        self.harness.past(self.in_(self.short_delay))
        assert self.reserve() == []
        assert self.stands(job_id, State.DELAYED)

    @promise("7.1")
    def test_a_job_can_be_rescheduled_again_and_again(self) -> None:
        # Given a job that is rescheduled several times
        job_id = self.enqueue(delay=LONG)
        for delay in (2 * LONG, 0, LONG, 0):
            job_id = self.backend.reschedule(self.queue, job_id, delay)
        # Then the last reschedule applies, and there is one job
        assert self.counts() == (1, 0, 0, 0)
        self.settle(Ack(self.take()))
        assert self.counts() == (0, 0, 0, 0)

    @promise("7.1")
    @requires("priorities")
    def test_body_priority_and_ttr_stay(self) -> None:
        # Given a job with its own body, priority and ttr
        job_id = self.enqueue(b"\0body\xff", priority=33, ttr=90, delay=LONG)
        # When the job is rescheduled
        self.backend.reschedule(self.queue, job_id, 0)
        # Then the job's body, priority and ttr are unchanged
        lease = self.take()
        assert (lease.body, lease.priority, lease.ttr) == (b"\0body\xff", 33, 90)

    @promise("7.1", "4.5", "4.6", "4.7")
    def test_attempts_crashes_and_kicks_start_over(self) -> None:
        # Given a job that was abandoned, buried and kicked
        lease = self.abandoned()
        self.settle(Bury(self.take()))
        self.backend.kick(self.queue, 1)
        lease = self.take()
        assert (lease.attempt, lease.crashes, lease.kicks) == (3, 1, 1)
        self.settle(Release(lease))
        # When the job is rescheduled, then its attempts, crashes and kicks start at 0 again
        self.backend.reschedule(self.queue, lease.id, 0)
        lease = self.take()
        assert (lease.attempt, lease.crashes, lease.kicks) == (1, 0, 0)

    @promise("7.1", "5.6")
    @requires("reasons")
    def test_the_reason_starts_over(self) -> None:
        # Given a job that was buried with a reason
        job_id = self.enqueue()
        self.settle(Bury(self.take(), reason="why"))
        # When the job is rescheduled, then its reason is deleted
        job_id = self.backend.reschedule(self.queue, job_id, LONG)
        assert self.peek(job_id).reason is None

    @promise("7.1", "4.8")
    def test_the_age_starts_over(self) -> None:
        # Given a job that has waited
        job_id = self.enqueue()
        self.harness.advance(3 * self.short_delay)
        # When the job is rescheduled, then its age starts at 0 again
        rescheduled = self.harness.now()
        job_id = self.backend.reschedule(self.queue, job_id, 0)
        assert self.about(self.peek(job_id).age, self.harness.now() - rescheduled)
        assert self.about(self.take().age, self.harness.now() - rescheduled)

    @promise("7.1", "3.4")
    @requires("total_order")
    def test_the_place_starts_over(self) -> None:
        # Given three jobs, the first of which is rescheduled to now
        first = self.enqueue(b"first")
        self.enqueue_all(b"second", b"third")
        self.backend.reschedule(self.queue, first, 0)
        # Then the rescheduled job comes last, as if it were enqueued now
        assert self.bodies() == [b"second", b"third", b"first"]

    @promise("7.2")
    @requires("stable_ids")
    def test_the_id_stays(self) -> None:
        # Given a job
        job_id = self.enqueue()
        # When the job is rescheduled, then it keeps its id
        assert self.backend.reschedule(self.queue, job_id, 0) == job_id
        assert self.take().id == job_id

    @promise("7.2")
    @without("stable_ids")
    def test_a_new_id_replaces_the_old_one(self) -> None:
        # Given a backend that gives a rescheduled job another id
        old = self.enqueue()
        new = self.backend.reschedule(self.queue, old, LONG)
        # Then the job has the new id, and no job has the old id
        assert self.stands(new, State.DELAYED)
        with pytest.raises(JobNotFound):
            self.peek(old)

    @promise("7.4")
    def test_a_reserved_job_cannot_be_rescheduled(self) -> None:
        # Given a job that is reserved
        job_id = self.enqueue()
        lease = self.take()
        # When the job is rescheduled, then the call raises JobReserved, and the holder can still settle the job
        with pytest.raises(JobReserved):
            self.backend.reschedule(self.queue, job_id, 0)
        assert self.counts() == (0, 0, 1, 0)
        self.settle(Ack(lease))

    @promise("7.4")
    def test_a_job_that_is_not_there_cannot_be_rescheduled(self) -> None:
        # Given a job that is done, and an id that no job ever had
        job_id = self.enqueue()
        self.settle(Ack(self.take()))
        for missing in (job_id, new_id()):
            with pytest.raises(JobNotFound):
                self.backend.reschedule(self.queue, missing, 0)
        # Then no job was created
        assert self.counts() == (0, 0, 0, 0)

    @promise("1.2", "7.1")
    def test_a_job_whose_lease_has_ended_can_be_rescheduled(self) -> None:
        # Given an abandoned job
        lease = self.abandoned()
        # When the job is rescheduled, then it is delayed
        job_id = self.backend.reschedule(self.queue, lease.id, LONG)
        assert self.stands(job_id, State.DELAYED)
        assert self.reserve() == []
