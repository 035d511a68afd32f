"""Reorder: a consumer's queues in another order."""

from __future__ import annotations

import pytest

from multiq.backend import PRIORITY_MAX, Ack
from multiq.conformance.case import Topic, promise, requires


class ReorderTests(Topic):
    """What ``Consumer.reorder`` promises."""

    @promise("3.9")
    @requires("priorities")
    def test_the_new_order_holds_from_the_next_reserve_on(self) -> None:
        # Given a consumer of three queues that has taken a job of the first one
        first, second, third = (self.another_queue() for _ in range(3))
        for queue, priority in ((first, 0), (second, 500), (third, PRIORITY_MAX)):
            self.enqueue_all(*[queue.encode()] * 4, queue=queue, priority=priority)
        consumer = self.another_consumer(first, second, third)
        assert self.take(by=consumer).queue == first
        # When it is given other orders, one after the other, then each holds at once, whatever the priorities
        for order in ((third, first, second), (second, third, first), (third, second, first), (first, second, third)):
            consumer.reorder(order)
            assert consumer.queues == order
            assert self.take(by=consumer).queue == order[0]

    @promise("3.9")
    def test_a_batch_follows_the_new_order(self) -> None:
        # Given two queues, whose order is turned round
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue_all(b"c", b"d", queue=other)
        consumer = self.another_consumer(self.queue, other)
        consumer.reorder([other, self.queue])
        # When more is asked for than the first one has, then the other one fills up
        assert [lease.queue for lease in self.reserve(3, by=consumer)] == [other, other, self.queue]

    @promise("3.9", "5.9")
    def test_an_exchange_follows_the_new_order_and_settles_what_was_taken_in_the_old_one(self) -> None:
        # Given a job of the first queue, and more in both
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue_all(b"c", b"d", queue=other)
        consumer = self.another_consumer(self.queue, other)
        lease = self.take(by=consumer)
        # When the order is turned round before it is settled
        consumer.reorder([other, self.queue])
        refusals, leases = consumer.exchange([Ack(lease)], 1, 0)
        # Then the verdict counts, and the next job is of the other queue
        assert refusals == [None]
        assert [lease.queue for lease in leases] == [other]

    @promise("3.9", "3.7")
    @pytest.mark.parametrize("at", [0, 1])
    def test_after_it_a_waiting_consumer_wakes_for_each_of_its_queues(self, at: int) -> None:
        # Given a consumer that has found nothing, was given another order, and waits
        queues = [self.queue, self.another_queue()]
        consumer = self.another_consumer(*queues)
        assert self.reserve(by=consumer) == []
        consumer.reorder(queues[::-1])
        waiting = self.background(lambda: consumer.reserve(1, 3 * self.harness.patience))
        # When a job comes in one of them, then it wakes
        self.enqueue(b"late", queue=queues[at])
        assert [lease.queue for lease in self.woken(waiting)] == [queues[at]]

    @promise("3.9")
    def test_a_first_queue_without_jobs_does_not_hold_up_the_second(self) -> None:
        # Given jobs in one queue, and an empty one in front of it from now on
        empty = self.another_queue()
        self.enqueue_all(b"a", b"b")
        consumer = self.another_consumer(self.queue, empty)
        # When the orders change, then the jobs come
        for order in ([empty, self.queue], [self.queue, empty]):
            consumer.reorder(order)
            assert self.take(by=consumer).queue == self.queue

    @promise("3.9")
    @pytest.mark.parametrize("change", ["one less", "one more", "another one", "one twice"])
    def test_other_queues_are_refused_and_change_nothing(self, change: str) -> None:
        # Given a consumer of two queues
        other, stranger = self.another_queue(), self.another_queue()
        consumer = self.another_consumer(self.queue, other)
        asked = {
            "one less": [other],
            "one more": [other, self.queue, stranger],
            "another one": [other, stranger],
            "one twice": [other, other],
        }[change]
        # When it is given other queues, then it refuses, and goes on as before
        with pytest.raises(ValueError, match="in another order"):
            consumer.reorder(asked)
        self.enqueue(b"there", queue=other)
        self.enqueue(b"here")
        assert [lease.queue for lease in self.reserve(by=consumer)] == [self.queue, other]
