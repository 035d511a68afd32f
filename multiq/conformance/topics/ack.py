"""Ack: the job is done and is deleted."""

from __future__ import annotations

import pytest

from multiq.backend import Ack
from multiq.conformance.case import LONG, Topic, promise
from multiq.errors import JobNotFound


class AckTests(Topic):
    @promise("5.1")
    def test_an_acked_job_is_gone(self) -> None:
        # Given a job that is done
        job_id = self.enqueue()
        self.settle(Ack(self.take()))
        # Then the job does not exist any more
        with pytest.raises(JobNotFound):
            self.peek(job_id)
        assert self.counts() == (0, 0, 0, 0)
        assert self.queue not in self.backend.queues()

    @promise("5.1", "11.1")
    def test_an_acked_job_never_comes_back(self) -> None:
        # Given a job that was done in time
        self.enqueue(ttr=self.short_ttr)
        self.settle(Ack(self.take()))
        # When the time of the job's lease is over, then no consumer gets the job
        self.harness.past(self.in_(self.short_ttr))
        assert self.reserve() == []

    @promise("5.1")
    def test_an_ack_leaves_the_jobs_around_it_alone(self) -> None:
        # Given three jobs, the second of which is done
        self.enqueue_all(b"a", b"b", b"c", ttr=LONG)
        leases = self.reserve()
        self.settle(Ack(leases[1]))
        # Then the other jobs are still reserved, and can be settled
        assert self.counts() == (0, 0, 2, 0)
        self.settle(Ack(leases[0]), Ack(leases[2]))

    @promise("5.7")
    def test_jobs_can_be_acked_in_any_order(self) -> None:
        # Given jobs that are acked in the opposite order
        self.enqueue_all(*[b"x"] * 6)
        for lease in reversed(self.reserve()):
            self.settle(Ack(lease))
        # Then no job is left
        assert self.counts() == (0, 0, 0, 0)

    @promise("5.8")
    def test_a_second_ack_is_refused(self) -> None:
        # Given a job that was acked
        self.enqueue()
        lease = self.take()
        self.settle(Ack(lease))
        # When the job is acked again, then the ack is refused
        self.refused(Ack(lease))
