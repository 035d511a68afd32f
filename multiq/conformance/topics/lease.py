"""Leases: how long a lease lasts, and which numbers it changes. Verdicts without a valid lease change nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, Bury, GiveBack, Release, State, Touch
from multiq.conformance.case import LONG, VERDICTS, Topic, promise, requires, without

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import JobRecord, Lease, Verdict
    from multiq.conformance.case import TrackedConsumer


class LeaseTests(Topic):
    # --- how long ---

    @promise("4.1")
    def test_a_lease_lasts_its_ttr_and_no_less(self) -> None:
        # Given a job that is reserved
        self.enqueue(ttr=self.short_ttr)
        over = self.in_(self.short_ttr)
        self.take()
        # When almost all of the job's ttr has passed, then no other consumer gets the job
        self.harness.nearly(over)
        self.nothing_before(over)

    @promise("4.1", "4.2")
    def test_a_lease_ends_after_its_ttr_and_the_job_is_ready_by_itself(self) -> None:
        # Given a job whose holder sends no verdict
        lease = self.abandoned()
        # Then another consumer gets the job, without a background process
        assert self.take(by=self.another_consumer(backend=self.another_backend())).id == lease.id

    @promise("1.2", "4.2")
    def test_an_ended_lease_shows_in_every_answer_before_another_reserve(self) -> None:
        # Given a job whose lease has ended. No consumer has reserved the job after the end of its lease
        lease = self.abandoned()
        # Then peek and stats show the job as ready
        record = self.peek(lease.id)
        assert (record.state, record.due_in) == (State.READY, 0)
        assert self.counts() == (1, 0, 0, 0)

    @promise("4.1")
    def test_a_verdict_is_accepted_until_the_end(self) -> None:
        # Given a lease that has almost ended
        self.enqueue(ttr=self.short_ttr)
        over = self.in_(self.short_ttr)
        lease = self.take()
        self.harness.nearly(over)
        # When the holder acks, then the ack is accepted, except if this machine stalled until the lease had ended
        (answer,) = self.worker.settle([Ack(lease)])
        assert answer is None or self.harness.now() >= over

    @promise("4.1")
    def test_leases_taken_together_end_each_by_its_own_ttr(self) -> None:
        # Given a short and a long lease from one reserve
        self.enqueue(b"short", ttr=self.short_ttr)
        self.enqueue(b"long", ttr=LONG)
        short, long = sorted(self.reserve(), key=lambda lease: lease.ttr)
        # When the short lease has ended
        self.harness.past(self.in_(self.short_ttr))
        # Then the long lease has not ended
        assert self.counts() == (1, 0, 1, 0)
        assert self.bodies() == [b"short"]
        self.refused(Ack(short))
        self.settle(Ack(long))

    @promise("4.1")
    def test_a_short_ttr_is_raised_to_the_shortest_that_there_is(self) -> None:
        # Given a ttr below the backend's shortest ttr
        if self.can.min_ttr <= 1:
            self.does_not_apply("its shortest lease is not longer than multiq's shortest ttr")
        self.enqueue(ttr=1)
        over = self.in_(self.can.min_ttr)
        lease = self.take()
        # Then the lease has the backend's shortest ttr, and lasts that long
        assert lease.ttr == self.can.min_ttr
        self.harness.nearly(over)
        self.nothing_before(over)

    @promise("3.2", "4.1")
    def test_a_short_lease_at_hand_does_not_make_a_waiting_consumer_spin(self) -> None:
        # Given a consumer that holds a job with the shortest lease
        self.enqueue(ttr=self.can.min_ttr)
        self.take()
        # When the consumer waits for another job until its shortest lease ends
        started, spent = time.monotonic(), time.thread_time()
        self.worker.reserve(1, self.can.min_ttr)
        # Then the consumer slept most of the time
        assert time.thread_time() - spent < 0.25 * (time.monotonic() - started)

    # --- late ---

    @promise("4.3")
    @requires("priorities")
    @pytest.mark.parametrize("verdict", VERDICTS.values(), ids=VERDICTS.keys())
    def test_a_late_verdict_is_refused_though_no_other_consumer_has_the_job(
        self, verdict: Callable[[Lease], Verdict]
    ) -> None:
        # Given a lease that has ended, and a job that no consumer has reserved since the end of the lease
        lease = self.abandoned(body=b"once", priority=5)
        # When the old holder sends a verdict
        self.refused(verdict(lease))
        # Then the job is ready, and unchanged
        record = self.peek(lease.id)
        assert (record.state, record.priority, record.reason) == (State.READY, 5, None)
        assert self.take().body == b"once"

    @promise("4.3")
    @requires("fenced_late")
    def test_the_store_itself_refuses_a_late_verdict_of_a_consumer_that_cannot_know(self) -> None:
        # Given a lease that has ended, and a consumer that cannot know when the lease began
        lease = self.abandoned()
        stranger = self.another_consumer(backend=self.another_backend())
        # When the consumer acks the ended lease, then the store refuses the ack
        self.refused(Ack(lease), by=stranger)
        assert self.stands(lease.id, State.READY)

    # --- stale ---

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_another_consumer_holds_the_jobs(self) -> None:
        # Given jobs whose leases have ended. Another consumer has reserved the jobs after the end of the leases
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        # When the old holder sends a verdict of each kind, then all verdicts are refused
        self._refuse_all_kinds(leases)
        # And the new holder's verdicts are accepted
        self.settle(*map(Ack, other.held.values()), by=other)
        assert self.counts() == (0, 0, 0, 0)

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_the_same_consumer_holds_the_jobs_again(self) -> None:
        # Given a consumer that let its leases end, and has reserved the same jobs again
        leases = self._leases_that_have_ended()
        again = self.reserve()
        assert len(again) == len(leases)
        # When the consumer settles with its first leases, then all verdicts are refused
        self._refuse_all_kinds(leases)
        # And the consumer's verdicts with its second leases are accepted
        self.settle(*map(Ack, again))
        assert self.counts() == (0, 0, 0, 0)

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_another_consumer_released_the_jobs(self) -> None:
        # Given jobs with ended leases that another consumer has reserved and released
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        self.settle(*map(Release, other.held.values()), by=other)
        # When the old holder sends its verdicts, then nothing changes
        self._refuse_all_kinds(leases)
        self._assert_untouched(leases, State.READY)

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_another_consumer_put_the_jobs_off(self) -> None:
        # Given jobs with ended leases that another consumer has reserved, and released with a delay
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        self.settle(*(Release(lease, delay=LONG) for lease in other.held.values()), by=other)
        # When the old holder sends its verdicts, then nothing changes
        self._refuse_all_kinds(leases)
        self._assert_untouched(leases, State.DELAYED)

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_another_consumer_buried_the_jobs(self) -> None:
        # Given jobs with ended leases that another consumer has reserved and buried
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        self.settle(*map(Bury, other.held.values()), by=other)
        # When the old holder sends its verdicts, then nothing changes
        self._refuse_all_kinds(leases)
        self._assert_untouched(leases, State.BURIED)

    @promise("4.4")
    def test_stale_verdicts_are_refused_when_the_jobs_were_buried_and_kicked(self) -> None:
        # Given jobs with ended leases that another consumer has buried and a caller has kicked
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        self.settle(*map(Bury, other.held.values()), by=other)
        assert self.backend.kick(self.queue, len(leases)) == len(leases)
        # When the old holder sends its verdicts, then nothing changes
        self._refuse_all_kinds(leases)
        self._assert_untouched(leases, State.READY)

    @promise("4.4", "7.1")
    @requires("management")
    def test_stale_verdicts_are_refused_when_the_jobs_were_rescheduled(self) -> None:
        # Given jobs that were rescheduled after their leases had ended
        leases = self._leases_that_have_ended()
        ids = [self.backend.reschedule(self.queue, lease.id, LONG) for lease in leases]
        # When the old holder sends its verdicts, then nothing changes
        self._refuse_all_kinds(leases)
        assert all(self.stands(job_id, State.DELAYED) for job_id in ids)

    @promise("4.4", "8.1")
    @requires("management")
    def test_stale_verdicts_are_refused_when_the_jobs_were_deleted(self) -> None:
        # Given jobs that were deleted after their leases had ended
        leases = self._leases_that_have_ended()
        for lease in leases:
            self.backend.delete(self.queue, lease.id)
        # When the old holder sends its verdicts, then no job comes back
        self._refuse_all_kinds(leases)
        assert self.counts() == (0, 0, 0, 0)

    @promise("4.4", "5.1")
    def test_stale_verdicts_are_refused_when_another_consumer_acked_the_jobs(self) -> None:
        # Given jobs with ended leases that another consumer has reserved and acked
        leases, other = self._ended_leases_of_jobs_that_another_consumer_holds()
        self.settle(*map(Ack, other.held.values()), by=other)
        # When the old holder sends its verdicts, then no job comes back
        self._refuse_all_kinds(leases)
        assert self.counts() == (0, 0, 0, 0)

    @promise("4.4", "2.4")
    @requires("client_ids", "management")
    def test_stale_verdicts_are_refused_when_the_ids_were_enqueued_again(self) -> None:
        # Given leases that have ended. The leases' jobs were deleted, and another consumer holds new jobs with the same
        # ids
        leases = self._leases_that_have_ended()
        for lease in leases:
            self.backend.delete(self.queue, lease.id)
            self.enqueue(b"new", id=lease.id)
        other = self.another_consumer()
        assert len(self.reserve(by=other)) == len(leases)
        # When the old holder sends its verdicts, then the new jobs stay reserved by their holder
        self._refuse_all_kinds(leases)
        self.settle(*map(Ack, other.held.values()), by=other)

    # --- counters ---

    @promise("4.5")
    def test_attempt_counts_reservations_from_one(self) -> None:
        # Given a job that is released several times
        self.enqueue()
        attempts = []
        for _ in range(4):
            lease = self.take()
            attempts.append(lease.attempt)
            self.settle(Release(lease))
        # Then the attempts of the leases are 1, 2, 3 and 4
        assert attempts == [1, 2, 3, 4]

    @promise("4.5", "4.6")
    def test_an_ended_lease_counts_as_an_attempt_and_as_a_crash(self) -> None:
        # Given a job of which two leases have ended
        first = self.abandoned()
        assert (first.attempt, first.crashes) == (1, 0)
        second = self.take()
        self.harness.past(self.in_(self.short_ttr))
        # Then the leases count the job's attempts and crashes
        third = self.take()
        assert (second.attempt, second.crashes) == (2, 1)
        assert (third.attempt, third.crashes) == (3, 2)

    @promise("4.6")
    @requires("management")
    def test_verdicts_count_no_crashes(self) -> None:
        # Given a job that got a verdict of each kind, and became ready again each time
        job_id = self.enqueue()
        self.settle(Release(self.take()))
        self.settle(GiveBack(self.take()))
        lease = self.take()
        self.settle(Touch(lease), Bury(lease))
        self.backend.kick_job(self.queue, job_id)
        # Then no crash is counted
        assert self.take().crashes == 0

    @promise("4.6", "9.1")
    def test_a_crash_is_counted_once_however_often_it_is_looked_at(self) -> None:
        # Given an ended lease
        lease = self.abandoned()
        # When several calls read the job
        for _ in range(3):
            self.counts()
            record = self.peek(lease.id)
            self.backend.queues()
        # Then only one crash is counted
        assert self.tells(record.crashes, 1, "durable_attempts")
        assert self.take().crashes == 1

    @promise("4.7")
    @requires("management")
    def test_kicks_count_how_often_a_job_came_back_from_being_buried(self) -> None:
        # Given a job that is buried and kicked twice, first with kick and then with kick_job
        job_id = self.enqueue()
        kicks = []
        for kick in (lambda: self.backend.kick(self.queue, 1), lambda: self.backend.kick_job(self.queue, job_id)):
            lease = self.take()
            kicks.append(lease.kicks)
            self.settle(Bury(lease))
            kick()
        # Then each lease has the number of kicks so far
        assert [*kicks, self.take().kicks] == [0, 1, 2]

    @promise("4.8")
    def test_age_runs_from_the_enqueue_through_delays_and_releases(self) -> None:
        # Given a job that was delayed, released, and delayed again
        started = self.harness.now()
        self.enqueue(delay=self.short_delay)
        self.harness.past(self.in_(self.short_delay))
        first = self.take()
        at_first = self.harness.now() - started
        self.settle(Release(first, delay=self.short_delay))
        self.harness.past(self.in_(self.short_delay))
        second = self.take()
        # Then the job's age is the time since its enqueue
        assert self.about(first.age, at_first)
        assert self.about(second.age, self.harness.now() - started)
        assert second.age > first.age

    # --- a holder that is gone ---

    @promise("11.1", "4.2")
    def test_a_job_whose_consumer_closed_is_handed_out_when_its_lease_has_ended(self) -> None:
        # Given a consumer that is closed while it holds a job
        job_id = self.enqueue(ttr=self.short_ttr)
        self.take()
        self.worker.close()
        # When the lease has ended, then another consumer gets the job
        self.harness.past(self.in_(self.short_ttr))
        assert self.take(by=self.another_consumer()).id == job_id

    @promise("4.2")
    @requires("disconnect_ends_lease")
    def test_a_job_whose_consumer_closed_is_ready_at_once(self) -> None:
        # Given a consumer that is closed while it holds a job
        job_id = self.enqueue(ttr=LONG)
        self.take()
        # When the consumer's connection ends
        self.worker.close()
        # Then another consumer gets the job as soon as the server has noticed the end of the connection
        assert [lease.id for lease in self.another_consumer().reserve(1, self.harness.patience)] == [job_id]

    @promise("4.1")
    @without("disconnect_ends_lease")
    def test_a_lease_outlives_its_consumers_connection(self) -> None:
        # Given a consumer that is closed while it holds a job
        job_id = self.enqueue(ttr=LONG)
        self.take()
        self.worker.close()
        # Then the job stays reserved until the lease ends
        assert self.stands(job_id, State.RESERVED)
        assert self.reserve(by=self.another_consumer()) == []

    # --- internals ---

    def _leases_that_have_ended(self) -> list[Lease]:
        self.enqueue_all(*(kind.encode() for kind in VERDICTS), ttr=self.short_ttr, priority=5)
        leases = self.reserve()
        assert len(leases) == len(VERDICTS)
        self.harness.past(self.in_(self.short_ttr))
        return leases

    def _ended_leases_of_jobs_that_another_consumer_holds(self) -> tuple[list[Lease], TrackedConsumer]:
        leases = self._leases_that_have_ended()
        other = self.another_consumer(backend=self.another_backend())
        assert len(self.reserve(by=other)) == len(leases)
        return leases, other

    def _refuse_all_kinds(self, leases: list[Lease]) -> None:
        for lease, verdict in zip(leases, VERDICTS.values(), strict=True):
            self.refused(verdict(lease))

    def _assert_untouched(self, leases: list[Lease], state: State) -> None:
        records: list[JobRecord] = [self.peek(lease.id) for lease in leases]
        assert [(record.state, record.priority, record.reason) for record in records] == [(state, 5, None)] * len(
            leases
        )
