"""Reserve: the order of jobs, the number of jobs that a call returns, and the time that a call waits."""

from __future__ import annotations

import time

import pytest

from multiq.backend import PRIORITY_MAX, Ack, Bury, Release, State
from multiq.conformance.case import ALL, LONG, Topic, promise, requires

NUMBERS = [b"%d" % number for number in range(1, 13)]  # as text, 10 sorts before 2 and 9


class ReserveTests(Topic):
    """Tests with a single consumer. The topic ``concurrency`` tests races, and the topic ``waiting`` tests waits."""

    # --- how many ---

    @promise("3.2")
    def test_an_empty_queue_gives_an_empty_list(self) -> None:
        assert self.reserve() == []

    @promise("3.1")
    def test_no_more_jobs_than_the_limit_are_handed_out(self) -> None:
        # Given more jobs than a call asks for
        self.enqueue_all(*NUMBERS)
        # When a call asks for five jobs, then it returns five jobs, and the other jobs stay ready
        bodies = [lease.body for lease in self.reserve(5)]
        assert self.in_line(bodies, NUMBERS[:5]) or (len(bodies) == 5 and not self.can.total_order)
        assert self.counts() == (7, 0, 5, 0)

    @promise("3.2")
    def test_fewer_jobs_than_the_limit_are_handed_out_without_waiting_for_more(self) -> None:
        # Given fewer jobs than a call asks for, and a long timeout
        self.enqueue_all(b"a", b"b")
        waiting = self.background(lambda: self.worker.reserve(10, 3 * self.harness.patience))
        # Then the call returns the existing jobs immediately
        assert self.in_line([lease.body for lease in self.woken(waiting)], [b"a", b"b"])

    @promise("3.2")
    def test_a_wait_for_nothing_lasts_its_timeout(self) -> None:
        # Given an empty queue
        started = time.monotonic()
        # When a consumer waits, then the wait lasts for the whole timeout
        assert self.worker.reserve(1, 0.25) == []
        assert time.monotonic() - started >= 0.25

    @promise("3.1")
    def test_each_lease_has_a_token_of_its_own(self) -> None:
        # Given two jobs that are reserved together, one of which is released and reserved again
        self.enqueue_all(b"a", b"b")
        first, second = self.reserve()
        self.settle(Release(first))
        again = self.take()
        # Then no two leases have the same token
        assert len({first.token, second.token, again.token}) == 3

    @promise("3.6")
    def test_a_reserved_job_is_handed_to_no_other_consumer(self) -> None:
        # Given a job that one consumer holds
        self.enqueue()
        self.take()
        # Then no consumer gets the job, not even its holder
        assert self.reserve(by=self.another_consumer(backend=self.another_backend())) == []
        assert self.reserve() == []

    @promise("1.1")
    @pytest.mark.parametrize("state", [State.DELAYED, State.BURIED])
    def test_only_ready_jobs_are_handed_out(self, state: State) -> None:
        # Given a job that is not ready
        job_id = self.given(state)
        # When a consumer reserves, then it does not get the job
        assert self.reserve() == []
        assert self.stands(job_id, state)

    # --- order within a queue ---

    @promise("3.4")
    @requires("total_order", "priorities")
    def test_the_lowest_priority_number_goes_first(self) -> None:
        # Given jobs of which the younger ones are more urgent
        for priority in (30, 20, 10):
            self.enqueue(b"%d" % priority, priority=priority)
        # Then the jobs are handed out by priority
        assert self.bodies() == [b"10", b"20", b"30"]

    @promise("3.4")
    @requires("total_order", "priorities")
    def test_priorities_next_to_each_other_are_distinguished_over_the_whole_range(self) -> None:
        # Given neighbouring priorities that a driver could confuse by lost precision or a changed sign
        edges = (0, 1, 1023, 1024, 1025, 2**21 - 1, 2**21, 2**31 - 1, 2**31, 2**31 + 1, PRIORITY_MAX - 1, PRIORITY_MAX)
        for priority in reversed(edges):
            self.enqueue(b"%d" % priority, priority=priority)
        # Then the jobs are handed out in the order of their priorities
        assert self.bodies() == [b"%d" % priority for priority in edges]

    @promise("3.4")
    @requires("total_order")
    def test_jobs_of_one_priority_go_oldest_first_past_the_tenth(self) -> None:
        # Given twelve jobs that are enqueued one by one
        for number in NUMBERS:
            self.enqueue(number)
        # Then the tenth job comes after the ninth job, and not after the first job
        assert self.bodies() == NUMBERS

    @promise("3.4")
    @requires("total_order")
    def test_jobs_go_oldest_first_past_the_hundredth(self) -> None:
        # Given more than a hundred jobs
        numbers = [b"%d" % number for number in range(1, 121)]
        for at in range(0, 120, 40):
            self.enqueue_all(*numbers[at : at + 40])
        # Then the jobs come by age. The jobs' numbers are not compared as text
        assert self.bodies() == numbers

    @promise("3.4")
    @requires("total_order", "priorities")
    def test_a_batch_of_leases_is_in_the_same_order_as_one_by_one(self) -> None:
        # Given jobs of several priorities
        for number, priority in enumerate((5, 1, 5, 0, 1, 0)):
            self.enqueue(b"%d" % number, priority=priority)
        # When all jobs are reserved in one call, then they come by priority, then by age
        assert [lease.body for lease in self.reserve()] == [b"3", b"5", b"1", b"4", b"0", b"2"]

    @promise("3.4")
    @requires("total_order", "priorities")
    def test_a_limit_takes_the_best_jobs_and_leaves_the_rest(self) -> None:
        # Given a less urgent job, and a more urgent job that is enqueued later
        worse = self.enqueue(b"worse", priority=2)
        self.enqueue(b"better", priority=1)
        # When one job is reserved, then it is the more urgent job
        assert self.take().body == b"better"
        assert self.stands(worse, State.READY)

    @promise("3.4")
    @requires("total_order")
    def test_jobs_of_several_producers_go_by_the_order_of_their_enqueues(self) -> None:
        # Given two producers that enqueue by turns
        producers = [self.backend, self.another_backend()]
        for turn, number in enumerate(NUMBERS):
            producers[turn % 2].enqueue(self.queue, [self.new(number)])
        # Then the jobs come in the order in which the two producers enqueued
        assert self.bodies() == NUMBERS

    @promise("3.4")
    @requires("total_order", "priorities")
    def test_a_job_enqueued_later_with_a_better_priority_overtakes(self) -> None:
        # Given a consumer that has reserved the first of two jobs
        self.enqueue_all(b"1", b"2")
        assert self.take().body == b"1"
        # When a more urgent job is enqueued, then the urgent job is reserved next
        self.enqueue(b"urgent", priority=0)
        assert self.bodies() == [b"urgent", b"2"]

    @promise("3.1", "4.1")
    @pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
    def test_the_moment_at_which_a_consumer_asked_is_before_its_leases_begin(self, waits: bool) -> None:
        # Given a consumer. The consumer's asked_at is a time on the clock of time.monotonic().
        self.worker.reserve(1, 0)
        began = time.monotonic()
        if waits:
            waiting = self.waiting(self.worker)
        job_id = self.enqueue(ttr=LONG)
        # When the consumer has a job
        (lease,) = self.woken(waiting) if waits else self.reserve(1)
        asked_at = self.worker.asked_at
        left, looked = self.peek(job_id).due_in, time.monotonic()
        # Then asked_at is a moment between the call and the beginning of the lease. It is 0 if the consumer does not
        # know the moment
        assert lease.id == job_id
        assert asked_at == 0.0 or began <= asked_at <= looked
        assert left is not None
        if self.harness.real_time:
            assert asked_at <= looked - (LONG - left) + self.can.delay_resolution

    # --- a job that comes back keeps its place ---

    @promise("3.5")
    @requires("total_order")
    def test_a_released_job_goes_before_younger_ones(self) -> None:
        # Given a job that was reserved, and that was released after a younger job had come
        self.enqueue(b"old")
        lease = self.take()
        self.enqueue(b"young")
        self.settle(Release(lease))
        # Then the older job is first
        assert self.bodies() == [b"old", b"young"]

    @promise("3.5")
    @requires("total_order")
    def test_a_job_that_becomes_due_goes_before_younger_ones(self) -> None:
        # Given a delayed job, and a younger job without delay
        self.enqueue(b"old", delay=self.short_delay)
        due = self.in_(self.short_delay)
        self.enqueue(b"young")
        # When the delay has passed, then the older job is first
        self.harness.past(due)
        assert self.bodies() == [b"old", b"young"]

    @promise("3.5", "4.2")
    @requires("total_order")
    def test_a_job_whose_lease_ended_goes_before_younger_ones(self) -> None:
        # Given a job whose holder sends no verdict, and a younger job
        self.enqueue(b"old", ttr=self.short_ttr)
        self.take()
        over = self.in_(self.short_ttr)
        self.enqueue(b"young")
        # When the lease has ended, then the older job is first
        self.harness.past(over)
        assert self.bodies() == [b"old", b"young"]

    @promise("3.4", "3.5")
    @requires("total_order", "priorities")
    def test_jobs_that_are_due_go_by_priority_not_by_due_time(self) -> None:
        # Given two delayed jobs. The less urgent job is due first
        self.enqueue(b"worse", priority=2, delay=self.short_delay)
        self.enqueue(b"better", priority=1, delay=2 * self.short_delay)
        # When both jobs are due, then the more urgent job is first
        self.harness.past(self.in_(2 * self.short_delay))
        assert self.bodies() == [b"better", b"worse"]

    @promise("3.5")
    @requires("total_order")
    def test_jobs_due_at_one_moment_go_by_age(self) -> None:
        # Given a batch of jobs with the same delay
        self.enqueue_all(*NUMBERS, delay=self.short_delay)
        # When the jobs are due, then they come in the order of the batch
        self.harness.past(self.in_(self.short_delay))
        assert self.bodies() == NUMBERS

    @promise("3.5")
    @requires("total_order")
    def test_a_job_released_with_a_delay_is_still_the_oldest_when_it_is_due(self) -> None:
        # Given a job that is released with a delay after a younger job came
        self.enqueue(b"old")
        lease = self.take()
        self.enqueue(b"young")
        self.settle(Release(lease, delay=self.short_delay))
        due = self.in_(self.short_delay)
        # When the job is due again, then it comes before the younger job
        self.harness.past(due)
        assert self.bodies() == [b"old", b"young"]

    # --- order between queues ---

    @promise("3.3", "3.6")
    @pytest.mark.parametrize("limit", [1, ALL])
    def test_a_queue_that_is_named_twice_counts_where_it_is_named_first(self, limit: int) -> None:
        # Given a consumer that names one queue twice, before and after another queue
        other = self.another_queue()
        consumer = self.another_consumer(self.queue, other, self.queue)
        for queue in (self.queue, other):
            self.enqueue_all(queue.encode(), queue.encode(), queue=queue)
        # When the consumer reserves all jobs, then each job comes once, and the first-named queue's jobs come first
        found = [lease for _ in range(5) for lease in self.reserve(limit, by=consumer)]
        assert [lease.body for lease in found] == [name.encode() for name in (self.queue,) * 2 + (other,) * 2]
        assert len({lease.id for lease in found}) == 4
        self.settle(*[Ack(lease) for lease in found], by=consumer)

    @promise("3.3")
    @requires("priorities")
    def test_earlier_queues_come_first_against_all_priorities(self) -> None:
        # Given the best priorities in the last queue, and the worst priorities in the first queue
        high, middle, low = (self.another_queue() for _ in range(3))
        for queue, priority in ((low, 0), (middle, 500), (high, PRIORITY_MAX)):
            self.enqueue_all(queue.encode(), queue.encode(), queue=queue, priority=priority)
        consumer = self.another_consumer(high, middle, low)
        # Then only the order of the queues counts
        assert self.bodies(by=consumer) == [queue.encode() for queue in (high, high, middle, middle, low, low)]

    @promise("3.3")
    @requires("priorities")
    def test_a_batch_empties_the_first_queue_before_it_takes_from_the_second(self) -> None:
        # Given two queues. The second queue has the more urgent jobs
        other = self.another_queue()
        self.enqueue_all(b"a", b"b", priority=900)
        self.enqueue_all(b"c", b"d", queue=other, priority=1)
        # When a call asks for more jobs than the first queue has, then the other jobs come from the second queue
        first, second, third = self.reserve(3, by=self.another_consumer(self.queue, other))
        assert [lease.queue for lease in (first, second, third)] == [self.queue, self.queue, other]
        assert self.in_line([first.body, second.body], [b"a", b"b"])
        assert third.body == b"c" or not self.can.total_order

    @promise("3.3")
    def test_each_consumer_has_its_own_order_of_queues(self) -> None:
        # Given two queues, and two consumers that name these queues in opposite orders
        other = self.another_queue()
        for _ in range(2):
            self.enqueue(b"here")
            self.enqueue(b"there", queue=other)
        # Then each consumer gets a job of the queue that it names first
        assert self.take(by=self.another_consumer(self.queue, other)).body == b"here"
        assert self.take(by=self.another_consumer(other, self.queue)).body == b"there"

    @promise("3.3")
    @pytest.mark.parametrize("state", [State.DELAYED, State.RESERVED, State.BURIED])
    def test_a_first_queue_with_nothing_ready_does_not_hold_up_the_second(self, state: State) -> None:
        # Given a first queue whose only job is not ready
        other = self.another_queue()
        self.given(state)
        self.enqueue(b"second", queue=other)
        # Then a job of the second queue is handed out
        assert self.take(by=self.another_consumer(self.queue, other)).body == b"second"

    @promise("3.3")
    @requires("priorities")
    def test_a_job_that_becomes_due_in_an_earlier_queue_goes_first(self) -> None:
        # Given a delayed job in the first queue, and ready jobs in the second queue
        other = self.another_queue()
        self.enqueue(b"first", delay=self.short_delay)
        self.enqueue_all(b"second", b"third", queue=other, priority=0)
        # When the delayed job is due, then it is handed out next
        self.harness.past(self.in_(self.short_delay))
        assert self.take(by=self.another_consumer(self.queue, other)).body == b"first"

    @promise("3.3")
    def test_twenty_queues_are_served_in_their_order(self) -> None:
        # Given a consumer of many queues, with a job in each queue
        queues = [self.another_queue() for _ in range(20)]
        for queue in reversed(queues):
            self.enqueue(queue=queue)
        # Then the jobs come in the order in which the consumer names the queues
        leases = self.reserve(by=self.another_consumer(*queues))
        assert [lease.queue for lease in leases] == queues

    @promise("11.5")
    @requires("priorities")
    def test_a_consumer_gets_nothing_from_queues_that_it_did_not_name(self) -> None:
        # Given a job in another queue
        self.enqueue(queue=self.another_queue(), priority=0)
        # Then a consumer of the test's own queue gets no job
        assert self.reserve() == []

    @promise("1.1", "3.6")
    @requires("management")
    def test_a_job_is_in_one_state_at_a_time(self) -> None:
        # Given a job that goes through all states
        job_id = self.enqueue()
        seen = [self.counts()]
        lease = self.take()
        seen.append(self.counts())
        self.settle(Release(lease, delay=LONG))
        seen.append(self.counts())
        self.backend.kick_job(self.queue, job_id)
        self.settle(Bury(self.take()))
        seen.append(self.counts())
        # Then the counts show the job in exactly one state each time
        assert seen == [(1, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 0, 0, 1)]
