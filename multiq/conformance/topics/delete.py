"""Delete: a job that is not reserved is deleted, and never runs."""

from __future__ import annotations

import pytest

from multiq.backend import Ack, State
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.errors import JobNotFound, JobReserved
from multiq.ids import new_id


@requires("management")
class DeleteTests(Topic):
    """The race of a delete with a reserve is tested in ``concurrency``."""

    @promise("8.1")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED])
    def test_a_deleted_job_is_gone(self, state: State) -> None:
        # Given a job that is not reserved
        job_id = self.given(state)
        # When the job is deleted
        self.backend.delete(self.queue, job_id)
        # Then the job does not exist any more
        with pytest.raises(JobNotFound):
            self.peek(job_id)
        assert self.counts() == (0, 0, 0, 0)
        assert self.reserve() == []
        assert self.backend.kick(self.queue, 10) == 0

    @promise("8.1")
    def test_a_deleted_job_does_not_start_at_its_due_time(self) -> None:
        # Given a delayed job that was deleted
        job_id = self.enqueue(delay=self.short_delay)
        self.backend.delete(self.queue, job_id)
        # When the job's due time comes, then no job is handed out
        self.harness.past(self.in_(self.short_delay))
        assert self.reserve() == []
        assert self.counts() == (0, 0, 0, 0)

    @promise("8.1")
    def test_the_jobs_around_it_stay(self) -> None:
        # Given three jobs, the second of which is deleted
        ids = self.enqueue_all(b"a", b"b", b"c")
        self.backend.delete(self.queue, ids[1])
        # Then the others are handed out in their order
        assert self.in_line(self.bodies(), [b"a", b"c"])

    @promise("8.2")
    def test_a_reserved_job_cannot_be_deleted(self) -> None:
        # Given a job that is reserved
        job_id = self.enqueue()
        lease = self.take()
        # When the job is deleted, then the call raises JobReserved, and the holder can still settle the job
        with pytest.raises(JobReserved):
            self.backend.delete(self.queue, job_id)
        assert self.counts() == (0, 0, 1, 0)
        self.settle(Ack(lease))

    @promise("8.2")
    def test_a_job_that_is_not_there_cannot_be_deleted(self) -> None:
        # Given a job that was deleted, a job that is done, and an id that no job ever had
        deleted = self.enqueue()
        self.backend.delete(self.queue, deleted)
        done = self.enqueue()
        self.settle(Ack(self.take()))
        for missing in (deleted, done, new_id()):
            with pytest.raises(JobNotFound):
                self.backend.delete(self.queue, missing)

    @promise("1.2", "8.1")
    def test_a_job_whose_lease_has_ended_can_be_deleted(self) -> None:
        # Given an abandoned job
        lease = self.abandoned()
        # When the job is deleted, then the job does not exist any more
        self.backend.delete(self.queue, lease.id)
        assert self.reserve() == []
        assert self.counts() == (0, 0, 0, 0)

    @promise("8.2", "1.3")
    def test_a_job_is_not_deleted_from_another_queue(self) -> None:
        # Given a job, and another queue
        job_id = self.enqueue()
        other = self.another_queue()
        self.enqueue(queue=other)
        # When the job is deleted from the other queue, then the call raises JobNotFound, and the job stays in its own
        # queue
        with pytest.raises(JobNotFound):
            self.backend.delete(other, job_id)
        assert self.stands(job_id, State.READY)

    @promise("8.4")
    @requires("client_ids")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED])
    def test_a_deleted_jobs_id_can_be_enqueued_again(self, state: State) -> None:
        # Given a job that was deleted
        job_id = self.given(state, b"old")
        self.backend.delete(self.queue, job_id)
        # When the id is enqueued again
        self.enqueue(b"new", id=job_id, delay=LONG)
        # Then the id has a new job
        record = self.peek(job_id)
        assert (record.body, record.state) == (b"new", State.DELAYED)
        assert self.tells(record.attempt, 0, "durable_attempts")
