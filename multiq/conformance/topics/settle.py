"""Settle and exchange: one call has many verdicts, each of which is accepted or refused by itself."""

from __future__ import annotations

from multiq.backend import Ack, Bury, GiveBack, Release, State, Touch
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.errors import LeaseLost


class SettleTests(Topic):
    # --- settle ---

    @promise("5.7")
    def test_settle_accepts_an_empty_list(self) -> None:
        assert self.worker.settle([]) == []

    @promise("5.7")
    def test_verdicts_of_all_kinds_go_in_one_call(self) -> None:
        # Given a job for each of six verdicts
        ids = self.enqueue_all(b"ack", b"release", b"delay", b"bury", b"touch", b"give back")
        acked, released, delayed, buried, touched, given_back = sorted(
            self.reserve(), key=lambda lease: ids.index(lease.id)
        )
        # When all six jobs are settled together
        self.settle(
            Ack(acked), Release(released), Release(delayed, LONG), Bury(buried), Touch(touched), GiveBack(given_back)
        )
        # Then each job is in the state that its verdict leads to
        assert self.counts() == (2, 1, 1, 1)
        assert [self.state(job_id) for job_id in ids[1:]] == [
            State.READY, State.DELAYED, State.BURIED, State.RESERVED, State.READY,
        ]  # fmt: skip

    @promise("5.7", "4.3")
    def test_a_refused_verdict_does_not_touch_the_others(self) -> None:
        # Given three jobs, the second of which was settled before
        self.enqueue_all(b"a", b"b", b"c", ttr=LONG)
        leases = self.reserve()
        self.settle(Release(leases[1]))
        # When all three jobs are acked
        answers = self.worker.settle([Ack(lease) for lease in leases])
        # Then the answers are in the order of the verdicts, and only the second answer is a refusal
        assert [type(answer) for answer in answers] == [type(None), LeaseLost, type(None)]
        assert self.counts() == (1, 0, 0, 0)

    @promise("5.7", "11.2")
    def test_a_refusal_names_the_queue_and_the_job(self) -> None:
        # Given a lease that is no longer valid
        job_id = self.enqueue()
        lease = self.take()
        self.settle(Release(lease))
        # When the old holder settles once more, then the refusal names the queue and the job
        (refusal,) = self.worker.settle([Ack(lease)])
        assert isinstance(refusal, LeaseLost)
        assert (refusal.queue, refusal.job_id) == (self.queue, job_id)

    @promise("5.7")
    def test_verdicts_about_several_queues_go_in_one_call(self) -> None:
        # Given a consumer that holds jobs of three queues
        queues = [self.queue, self.another_queue(), self.another_queue()]
        for queue in queues:
            self.enqueue_all(b"a", b"b", queue=queue)
        consumer = self.another_consumer(*queues)
        leases = self.reserve(by=consumer)
        # When the consumer settles the jobs in a mixed order, then each verdict takes effect in its job's queue
        verdicts = [Ack(lease) if lease.body == b"a" else Bury(lease) for lease in leases]
        self.settle(*reversed(verdicts), by=consumer)
        assert [self.counts(queue) for queue in queues] == [(0, 0, 0, 1)] * 3

    @promise("5.8")
    def test_of_two_verdicts_about_one_lease_in_one_call_the_first_counts(self) -> None:
        # Given a holder that sends two verdicts for one lease in one call
        job_id = self.enqueue()
        lease = self.take()
        answers = self.worker.settle([Bury(lease), Ack(lease)])
        # Then the first verdict is carried out, and the second verdict is refused
        assert [type(answer) for answer in answers] == [type(None), LeaseLost]
        assert self.stands(job_id, State.BURIED)

    @promise("5.7")
    def test_three_hundred_verdicts_go_in_one_call(self) -> None:
        # Given more leases than a driver may expect in one call
        self.enqueue_all(*[b"x"] * 300, ttr=LONG)
        leases = self.reserve()
        assert len(leases) == 300
        # When all jobs are settled in one call, with three alternating kinds of verdicts, then each verdict is carried
        # out
        kinds = [Ack, Bury, Release]
        self.settle(*(kinds[number % 3](lease) for number, lease in enumerate(leases)))
        assert self.counts() == (100, 0, 0, 100)

    @promise("5.7", "4.3")
    def test_live_and_ended_leases_can_be_mixed(self) -> None:
        # Given alternately short and long leases
        ids = [self.enqueue(ttr=LONG if number % 2 else self.short_ttr) for number in range(6)]
        leases = sorted(self.reserve(), key=lambda lease: ids.index(lease.id))
        self.harness.past(self.in_(self.short_ttr))
        # When all jobs are acked, then acks of live leases are accepted, and acks of ended leases are refused
        answers = self.worker.settle([Ack(lease) for lease in leases])
        assert [type(answer) for answer in answers] == [LeaseLost, type(None)] * 3
        assert self.counts() == (3, 0, 0, 0)

    # --- exchange ---

    @promise("5.9")
    def test_exchange_settles_and_hands_out_the_next(self) -> None:
        # Given two jobs, one of which is reserved
        self.enqueue_all(b"first", b"second")
        lease = self.take()
        # When an exchange acks the reserved job and asks for the next job
        answers, leases = self.worker.exchange([Ack(lease)], 1, 0)
        # Then the first job is gone, and the second job is reserved
        assert answers == [None]
        assert self.in_line([lease.body, *(held.body for held in leases)], [b"first", b"second"])
        assert self.counts() == (0, 0, 1, 0)

    @promise("5.9")
    def test_a_job_released_by_an_exchange_may_come_right_back(self) -> None:
        # Given the only job
        job_id = self.enqueue()
        lease = self.take()
        # When an exchange releases the only job
        answers, (again,) = self.worker.exchange([Release(lease)], 1, 0)
        # Then the same exchange hands the job out again, in a new attempt
        assert (answers, again.id, again.attempt) == ([None], job_id, 2)

    @promise("5.9", "3.5")
    @requires("total_order", "priorities")
    def test_exchange_sees_the_order_after_its_own_verdicts(self) -> None:
        # Given a reserved job that is more urgent than the ready job
        self.enqueue(b"best", priority=1)
        lease = self.take()
        self.enqueue(b"good", priority=2)
        # When an exchange releases the urgent job and asks for one job, then the same job comes again
        _, leases = self.worker.exchange([Release(lease)], 1, 0)
        assert [held.body for held in leases] == [b"best"]

    @promise("5.9", "4.4")
    def test_an_exchange_with_a_lost_lease_says_so_and_still_reserves(self) -> None:
        # Given a lease that was lost, and a ready job
        stale = self.abandoned(body=b"lost")
        other = self.another_consumer()
        self.settle(Ack(self.take(by=other)), by=other)
        self.enqueue(b"next")
        # When an exchange acks the lost lease
        answers, leases = self.worker.exchange([Ack(stale)], 5, 0)
        # Then the ack is refused, but the ready job is handed out
        assert [type(answer) for answer in answers] == [LeaseLost]
        assert [lease.body for lease in leases] == [b"next"]

    @promise("5.9", "3.2")
    def test_an_exchange_without_verdicts_is_a_reserve(self) -> None:
        # Given three jobs, and an exchange without verdicts that asks for two jobs
        self.enqueue_all(b"a", b"b", b"c")
        answers, leases = self.worker.exchange([], 2, 0)
        # Then the exchange returns two jobs
        assert answers == []
        assert len(leases) == 2
        assert self.in_line([lease.body for lease in leases] + self.bodies(), [b"a", b"b", b"c"])

    @promise("5.9")
    def test_an_exchange_that_finds_no_job_has_settled(self) -> None:
        # Given an exchange that acks the only job
        self.enqueue()
        answers, leases = self.worker.exchange([Ack(self.take())], 5, 0)
        # Then the job is gone, and the exchange returns no job
        assert (answers, leases) == ([None], [])
        assert self.counts() == (0, 0, 0, 0)

    @promise("5.9", "3.2")
    def test_an_exchange_settles_before_it_waits(self) -> None:
        # Given a consumer that settles a lease, and then waits for the next job
        job_id = self.enqueue()
        lease = self.take()
        consumer = self.worker
        patience = 3 * self.harness.patience
        waiting = self.background(lambda: consumer.exchange([Bury(lease)], 1, patience))
        # When no job has come yet, then the verdict has already been carried out
        self.eventually(lambda: self.stands(job_id, State.BURIED))
        # And the next job ends the wait
        self.enqueue(b"next")
        answers, leases = self.woken(waiting)
        assert (answers, [held.body for held in leases]) == ([None], [b"next"])
