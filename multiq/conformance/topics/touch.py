"""Touch: the holder is alive and needs more time."""

from __future__ import annotations

from multiq.backend import Ack, Release, State, Touch
from multiq.conformance.case import LONG, Topic, promise


class TouchTests(Topic):
    @promise("5.4", "4.1")
    def test_a_touch_gives_the_full_ttr_again(self) -> None:
        # Given a lease of which a third has passed
        self.enqueue(ttr=self.short_ttr)
        end = self.in_(self.short_ttr)
        lease = self.take()
        self.harness.advance(self.short_ttr / 3)
        # When the holder touches the lease
        new_end = self.in_(self.short_ttr)
        self.settle(Touch(lease))
        # Then the job stays reserved beyond the old end of the lease
        self.harness.past(end)
        self.nothing_before(new_end, by=self.another_consumer())
        (answer,) = self.worker.settle([Ack(lease)])
        assert answer is None or self.harness.now() >= new_end

    @promise("5.4", "4.1")
    def test_a_touched_lease_ends_one_ttr_later(self) -> None:
        # Given a lease that was touched once
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        self.harness.advance(self.short_ttr / 3)
        self.settle(Touch(lease))
        # When a whole ttr has passed since the touch, then the lease has ended
        self.harness.past(self.in_(self.short_ttr))
        self.refused(Ack(lease))
        assert self.take().id == lease.id

    @promise("5.4")
    def test_touching_often_adds_nothing_up(self) -> None:
        # Given a lease that is touched three times in a row
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        for _ in range(3):
            self.settle(Touch(lease))
        # When one ttr has passed since the last touch, then the lease has ended
        self.harness.past(self.in_(self.short_ttr))
        assert self.take().id == lease.id

    @promise("5.4")
    def test_a_heartbeat_keeps_a_job_for_many_ttrs(self) -> None:
        # Given a holder that touches its lease in time, again and again
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        for _ in range(3):
            self.harness.advance(self.short_ttr / 3)
            self.settle(Touch(lease))
        # Then the holder still has the job, in its first attempt
        self.settle(Release(lease))
        lease = self.take()
        assert (lease.attempt, lease.crashes) == (2, 0)

    @promise("5.4", "5.8")
    def test_the_token_stays_valid_for_the_verdict(self) -> None:
        # Given a lease that was touched
        self.enqueue(ttr=LONG)
        lease = self.take()
        self.settle(Touch(lease))
        # Then the same lease settles the job
        self.settle(Ack(lease))
        assert self.counts() == (0, 0, 0, 0)

    @promise("5.4", "5.7")
    def test_a_touch_and_a_verdict_go_in_one_call(self) -> None:
        # Given a holder that touches and releases a job in one call
        job_id = self.enqueue()
        lease = self.take()
        self.settle(Touch(lease), Release(lease, delay=LONG))
        # Then both verdicts were accepted, and the job is in the state of the release
        assert self.stands(job_id, State.DELAYED)

    @promise("5.4")
    def test_touching_one_job_does_not_extend_another(self) -> None:
        # Given two jobs of one holder
        self.enqueue_all(b"kept", b"let go", ttr=self.short_ttr)
        kept, let_go = self.reserve()
        end = self.in_(self.short_ttr)
        self.harness.advance(self.short_ttr / 3)
        # When one of the two leases is touched
        new_end = self.in_(self.short_ttr)
        self.settle(Touch(kept))
        # Then the other lease ends at the same time as without the touch
        self.harness.past(end)
        leases = self.reserve(by=self.another_consumer())
        assert let_go.id in {lease.id for lease in leases}
        assert len(leases) == 1 or self.harness.now() >= new_end

    @promise("9.1", "4.1")
    def test_peek_returns_when_the_lease_ends(self) -> None:
        # Given a long lease
        job_id = self.enqueue(ttr=2 * LONG)
        lease = self.take()
        assert self.about(self.peek(job_id).due_in, 2 * LONG)
        # When time passes, then less of the lease is left. After a touch, the full ttr is left again.
        self.harness.advance(self.short_delay)
        assert self.about(self.peek(job_id).due_in, 2 * LONG - self.short_delay)
        self.settle(Touch(lease))
        assert self.about(self.peek(job_id).due_in, 2 * LONG)
