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
        # Then the other jobs are handed out in their order
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

    # --- many at once ---

    @promise("8.5")
    def test_of_many_jobs_those_are_deleted_that_are_not_reserved(self) -> None:
        # Given a ready, a delayed and a reserved job, and another ready job
        reserved = self.enqueue()
        lease = self.take()
        ready, delayed, other = self.enqueue(), self.enqueue(delay=100), self.enqueue()
        # When several jobs are deleted, one of which does not exist
        missing = new_id()
        asked = [delayed, reserved, missing, ready]
        answers = self.backend.delete_many(self.queue, asked)
        # Then each answer is about its own job, and the other jobs stay
        assert [type(answer) for answer in answers] == [type(None), JobReserved, JobNotFound, type(None)]
        assert [answer.job_id for answer in answers if answer is not None] == [reserved, missing]
        self.settle(Ack(lease))
        assert self.peek(other).state is State.READY
        assert self.counts() == (1, 0, 0, 0)

    @promise("8.5", "1.2")
    @pytest.mark.parametrize("state", [State.DELAYED, State.BURIED, "lease ended"])
    def test_a_job_is_deleted_with_others_in_any_state_but_reserved(self, state: State | str) -> None:
        # Given a job in one of the states, or with an ended lease
        if isinstance(state, State):
            job_id = self.given(state)
        else:
            job_id = self.enqueue(ttr=self.short_ttr)
            self.take(by=self.another_consumer())
            self.harness.past(self.in_(self.short_ttr))
        other = self.enqueue()
        # When the job and another job are deleted
        answers = self.backend.delete_many(self.queue, [other, job_id])
        # Then both jobs are gone, and their ids can be used again
        assert answers == [None, None]
        assert self.counts() == (0, 0, 0, 0)
        assert self.backend.kick(self.queue, 10) == 0
        if self.can.client_ids:
            assert self.enqueue(b"new", id=job_id) == job_id
            lease = self.take()
            assert (lease.body, lease.attempt, lease.crashes, lease.kicks) == (b"new", 1, 0, 0)

    @promise("8.5")
    def test_a_call_that_deletes_no_job_deletes_none(self) -> None:
        # Given a job
        job_id = self.enqueue()
        # When no jobs are deleted, and when the job is deleted twice in one call
        assert self.backend.delete_many(self.queue, []) == []
        answers = self.backend.delete_many(self.queue, [job_id, job_id])
        # Then the second answer says that the job does not exist
        assert [type(answer) for answer in answers] == [type(None), JobNotFound]
        assert self.counts() == (0, 0, 0, 0)

    @promise("8.5")
    @pytest.mark.parametrize("count", [3, 1100])
    def test_as_many_jobs_are_deleted_as_are_asked_for(self, count: int) -> None:
        # Given many jobs, and one job that is not deleted
        ids = self.enqueue_all(*[b"x"] * (count + 1))
        # When all other jobs are deleted
        answers = self.backend.delete_many(self.queue, ids[1:])
        # Then only the one job is left
        assert answers == [None] * count
        assert self.counts() == (1, 0, 0, 0)
