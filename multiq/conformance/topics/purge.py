"""Purge: one call deletes all jobs of a queue that are not reserved."""

from __future__ import annotations

import pytest

from multiq.backend import STORED_STATES, Ack, State
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.errors import JobNotFound

UNRESERVED = [State.READY, State.DELAYED, State.BURIED]


@requires("purging")
class PurgeTests(Topic):
    """The race of a purge with a reserve is tested in ``concurrency``."""

    @promise("10.4")
    @pytest.mark.parametrize("state", UNRESERVED)
    def test_a_purge_deletes_the_jobs_of_its_state_and_no_others(self, state: State) -> None:
        # Given two jobs in each state
        self._two_in_each_state()
        before = self.counts()
        assert before == (2, 2, 2, 2)
        # When one state is purged
        assert self.backend.purge(self.queue, [state]) == 2
        # Then no job is left in that state, and the jobs in other states stay
        expected = dict.fromkeys((*UNRESERVED, State.RESERVED), 2) | {state: 0}
        assert self.counts() == tuple(expected[other] for other in STORED_STATES if other is not State.HELD)

    @promise("10.4")
    def test_a_purge_of_several_states_counts_them_together(self) -> None:
        # Given two jobs in each state
        self._two_in_each_state()
        # When all states except reserved are purged, then six jobs are deleted
        assert self.backend.purge(self.queue, UNRESERVED) == 6
        assert self.counts() == (0, 0, 2, 0)

    @promise("10.4")
    def test_a_purge_never_deletes_a_reserved_job(self) -> None:
        # Given a job that is reserved
        self.enqueue()
        lease = self.take()
        # When all states are purged, including reserved
        assert self.backend.purge(self.queue, list(STORED_STATES)) == 0
        # Then the holder still has the job, and can settle the job
        assert self.counts() == (0, 0, 1, 0)
        self.settle(Ack(lease))

    @promise("10.4")
    def test_purged_jobs_never_start(self) -> None:
        # Given ready, delayed and buried jobs that were purged
        self.given(State.BURIED)
        due = self.enqueue(delay=self.short_delay)
        self.enqueue()
        self.backend.purge(self.queue, UNRESERVED)
        # When the delay has passed, and a kick is tried
        self.harness.past(self.in_(self.short_delay))
        assert self.backend.kick(self.queue, 10) == 0
        # Then no job is handed out
        assert self.reserve() == []
        with pytest.raises(JobNotFound):
            self.peek(due)

    @promise("10.4", "1.2")
    def test_due_and_abandoned_jobs_are_purged_as_ready_ones(self) -> None:
        # Given a delayed job that is due, a delayed job that is not yet due, and a job whose lease has ended
        self.enqueue(delay=self.short_delay)
        later = self.enqueue(delay=2 * LONG)
        self.abandoned()
        self.harness.past(self.in_(self.short_delay))
        # When the ready jobs are purged, then the due job and the job of the ended lease are deleted
        assert self.backend.purge(self.queue, [State.READY]) == 2
        assert self.counts() == (0, 1, 0, 0)
        assert self.stands(later, State.DELAYED)

    @promise("10.4")
    def test_a_purge_of_an_unused_queue_does_nothing(self) -> None:
        assert self.backend.purge(self.queue, UNRESERVED) == 0

    @promise("10.4")
    def test_a_purge_of_no_states_does_nothing(self) -> None:
        # Given a job
        self.enqueue()
        # When a purge names no state, then the job stays
        assert self.backend.purge(self.queue, []) == 0
        assert self.counts() == (1, 0, 0, 0)

    @promise("10.4", "11.5")
    def test_a_purge_leaves_other_queues_alone(self) -> None:
        # Given jobs in two queues
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue_all(b"c", b"d", queue=other)
        # When one queue is purged, then the other queue's jobs stay
        self.backend.purge(self.queue, UNRESERVED)
        assert self.counts(other) == (2, 0, 0, 0)

    @promise("10.4", "3.4")
    def test_a_purged_queue_can_be_used_at_once(self) -> None:
        # Given a queue that was purged
        self.enqueue_all(*[b"old"] * 20)
        self.backend.purge(self.queue, UNRESERVED)
        # When new jobs are enqueued, then the queue has only the new jobs
        self.enqueue_all(b"1", b"2")
        assert self.in_line(self.bodies(), [b"1", b"2"])

    @promise("10.4")
    def test_many_jobs_are_purged_in_one_call(self) -> None:
        # Given more jobs than a driver may delete with one statement
        for _ in range(5):
            self.enqueue_all(*[b"x"] * 500)
        # When all jobs are purged, then the returned count is exact
        assert self.backend.purge(self.queue, [State.READY]) == 2500
        assert self.counts() == (0, 0, 0, 0)

    @promise("10.4", "8.4")
    @requires("client_ids")
    def test_a_purged_jobs_id_can_be_enqueued_again(self) -> None:
        # Given a job that was purged
        job_id = self.enqueue(b"old")
        self.backend.purge(self.queue, [State.READY])
        # When the job's id is enqueued again, then a new job is added
        self.enqueue(b"new", id=job_id)
        assert self.bodies() == [b"new"]

    def _two_in_each_state(self) -> None:
        for state in (State.DELAYED, State.BURIED, State.RESERVED, State.READY):
            self.given(state, ttr=LONG)
            self.given(state, ttr=LONG)
