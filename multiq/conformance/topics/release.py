"""Release: the job goes back to its queue, now or after a delay, for another attempt."""

from __future__ import annotations

import pytest

from multiq.backend import Ack, Bury, Release, State
from multiq.conformance.case import LONG, Topic, promise, requires, without

REASONS = {
    "a sentence": "the mail server said 451",
    "no ASCII": "naïve ☃ 𝄞",
    "lines": "Traceback:\r\n  one\n\ttwo",
    "quotes": '\'; -- "%s" {0} \\',
}


class ReleaseTests(Topic):
    @promise("5.2")
    def test_a_released_job_is_ready_again(self) -> None:
        # Given a job that is reserved
        job_id = self.enqueue()
        # When the job is released
        self.settle(Release(self.take()))
        # Then any consumer can reserve the job
        assert self.stands(job_id, State.READY)
        assert self.take(by=self.another_consumer()).id == job_id

    @promise("5.2", "2.5")
    def test_a_job_released_with_a_delay_is_not_early(self) -> None:
        # Given a job that is released with a delay
        job_id = self.enqueue()
        lease = self.take()
        moment = self.in_(self.short_delay)
        self.settle(Release(lease, delay=self.short_delay))
        over = self.in_(self.short_delay)
        # When almost all of the delay has passed, then the job is not handed out
        self.harness.nearly(moment)
        self.nothing_before(moment)
        # And when all of the delay has passed, the job is handed out
        self.harness.past(over)
        assert job_id in {held.id for held in self.worker.held.values()} or self.take().id == job_id

    @promise("5.2")
    def test_a_job_released_with_a_delay_is_delayed(self) -> None:
        # Given a job that is released with a long delay
        job_id = self.enqueue()
        self.settle(Release(self.take(), delay=LONG))
        # Then stats and peek show the job as delayed
        assert self.counts() == (0, 1, 0, 0)
        assert self.about(self.peek(job_id).due_in, LONG)

    @promise("5.2")
    @requires("priorities")
    def test_a_released_job_keeps_its_priority_and_its_ttr(self) -> None:
        # Given a job with its own body, priority and ttr, which is released without a new priority
        self.enqueue(b"body", priority=77, ttr=90)
        self.settle(Release(self.take()))
        # Then the job's body, priority and ttr are unchanged
        lease = self.take()
        assert (lease.body, lease.priority, lease.ttr) == (b"body", 77, 90)

    @promise("5.2")
    @requires("total_order", "priorities")
    def test_a_release_can_change_the_priority(self) -> None:
        # Given the more urgent of two jobs
        self.enqueue(b"demoted", priority=1)
        self.enqueue(b"other", priority=5)
        # When the urgent job is released with a less urgent priority, then the other job is reserved first
        self.settle(Release(self.take(), priority=9))
        leases = self.reserve()
        assert [(lease.body, lease.priority) for lease in leases] == [(b"other", 5), (b"demoted", 9)]

    @promise("5.2")
    @requires("priorities")
    def test_a_release_can_give_the_first_priority_of_all(self) -> None:
        # Given a job that is released with priority 0. Priority 0 is a priority like any other
        self.enqueue(priority=900)
        self.settle(Release(self.take(), priority=0))
        # Then the job's priority is 0
        assert self.take().priority == 0

    @promise("5.2")
    @requires("total_order", "priorities")
    def test_a_new_priority_holds_when_the_delay_is_over(self) -> None:
        # Given a job that is released with a delay and a better priority
        self.enqueue(b"late", priority=500)
        self.settle(Release(self.take(), delay=self.short_delay, priority=3))
        over = self.in_(self.short_delay)
        self.enqueue(b"other", priority=4)
        # When the job is due, then its new priority decides its place
        self.harness.past(over)
        assert self.bodies() == [b"late", b"other"]

    @promise("5.8")
    def test_a_released_job_takes_no_second_verdict(self) -> None:
        # Given a job that was released
        job_id = self.enqueue()
        lease = self.take()
        self.settle(Release(lease))
        # When the old holder acks, buries and releases the job, then all three verdicts are refused
        self.refused(Ack(lease), Bury(lease), Release(lease))
        assert self.stands(job_id, State.READY)

    @promise("5.6")
    @requires("reasons")
    @pytest.mark.parametrize("reason", REASONS.values(), ids=REASONS.keys())
    def test_a_release_keeps_its_reason(self, reason: str) -> None:
        # Given a job that is released with a reason
        job_id = self.enqueue()
        self.settle(Release(self.take(), reason=reason))
        # Then peek shows the same reason
        assert self.peek(job_id).reason == reason

    @promise("5.6")
    @requires("reasons")
    def test_the_last_reason_is_the_one_that_is_kept(self) -> None:
        # Given a job that was released twice, with a different reason each time
        job_id = self.enqueue()
        for reason in ("first", "second"):
            self.settle(Release(self.take(), reason=reason))
        assert self.peek(job_id).reason == "second"
        # When the job is then released without a reason, then peek shows no reason
        self.settle(Release(self.take()))
        assert self.peek(job_id).reason is None

    @promise("5.6")
    @requires("reasons")
    def test_a_reason_stays_while_the_job_is_tried_again(self) -> None:
        # Given a job that was released with a reason
        job_id = self.enqueue()
        self.settle(Release(self.take(), reason="failed before"))
        # When the job is reserved, then the reason can still be read
        self.take()
        assert self.peek(job_id).reason == "failed before"

    @promise("5.6", "11.3")
    @without("reasons")
    def test_a_backend_that_keeps_no_reasons_shows_none(self) -> None:
        # Given a backend that does not store reasons, and a job that is released with a reason
        job_id = self.enqueue()
        self.settle(Release(self.take(), reason="why"))
        # Then peek shows None, which means unknown
        assert self.peek(job_id).reason is None
