"""Queue order: a call may give a consumer's queues in another order, for this call only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend import PRIORITY_DEFAULT, PRIORITY_MAX, Ack
from multiq.conformance.case import Topic, promise
from multiq.errors import OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Lease


class QueueOrderTests(Topic):
    """Tests of the parameter ``queues`` of ``Consumer.reserve`` and ``Consumer.exchange``."""

    @promise("3.9")
    def test_the_order_holds_for_the_call(self) -> None:
        # Given a consumer of three queues with jobs
        first, second, third = (self.another_queue() for _ in range(3))
        priorities = (0, 500, PRIORITY_MAX) if self.can.priorities else (PRIORITY_DEFAULT,) * 3
        for queue, priority in zip((first, second, third), priorities, strict=True):
            self.enqueue_all(*[queue.encode()] * 4, queue=queue, priority=priority)
        consumer = self.another_consumer(first, second, third)
        # When a reserve is given another order of queues, then the job comes from that order's first queue, whatever
        # its priority
        for order in ((third, first, second), (second, third, first), (third, second, first), (first, second, third)):
            assert [lease.queue for lease in consumer.reserve(1, 0, order)] == [order[0]]
            assert consumer.queues == (first, second, third)

    @promise("3.9")
    def test_the_next_call_without_an_order_has_the_consumer_s_own(self) -> None:
        # Given two queues with jobs, and a reserve and an exchange that were given another order
        other = self.another_queue()
        self.enqueue_all(b"a", b"b", b"c", b"d")
        self.enqueue_all(b"e", b"f", b"g", b"h", queue=other)
        consumer = self.another_consumer(self.queue, other)
        calls: tuple[Callable[[list[str] | None], list[Lease]], ...] = (
            lambda order: consumer.reserve(1, 0, order),
            lambda order: consumer.exchange((), 1, 0, order)[1],
        )
        for call in calls:
            assert [lease.queue for lease in call([other, self.queue])] == [other]
            # When the next call is given no order, then the consumer's own order applies
            assert [lease.queue for lease in call(None)] == [self.queue]

    @promise("3.9")
    def test_a_batch_follows_the_order(self) -> None:
        # Given two queues
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue_all(b"c", b"d", queue=other)
        consumer = self.another_consumer(self.queue, other)
        # When a reserve asks for more jobs than its first queue has, then the other jobs come from the second queue
        leases = consumer.reserve(3, 0, [other, self.queue])
        assert [lease.queue for lease in leases] == [other, other, self.queue]

    @promise("3.9", "5.9")
    def test_an_exchange_follows_the_order_and_settles_what_was_taken_in_another_one(self) -> None:
        # Given a consumer that holds a job of the first queue, and more jobs in both queues
        other = self.another_queue()
        self.enqueue_all(b"a", b"b")
        self.enqueue_all(b"c", b"d", queue=other)
        consumer = self.another_consumer(self.queue, other)
        lease = self.take(by=consumer)
        # When an exchange acks the job and gives the reverse order of queues
        refusals, leases = consumer.exchange([Ack(lease)], 1, 0, [other, self.queue])
        # Then the ack is accepted, and the next job is from the second queue
        assert refusals == [None]
        assert [lease.queue for lease in leases] == [other]

    @promise("3.9", "3.7")
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_consumer_that_waits_in_an_order_wakes_for_each_of_its_queues(self, at: int) -> None:
        # Given a consumer that has found no job, and waits with another order of queues
        queues = [self.queue, self.another_queue()]
        consumer = self.another_consumer(*queues)
        assert self.reserve(by=consumer) == []
        waiting = self.background(lambda: consumer.reserve(1, 3 * self.harness.patience, queues[::-1]))
        # When a job is enqueued in one of the queues, then the consumer wakes
        self.enqueue(b"late", queue=queues[at])
        assert [lease.queue for lease in self.woken(waiting)] == [queues[at]]

    @promise("3.9")
    def test_a_first_queue_without_jobs_does_not_hold_up_the_second(self) -> None:
        # Given one queue with jobs, and one queue without jobs
        empty = self.another_queue()
        self.enqueue_all(b"a", b"b")
        consumer = self.another_consumer(self.queue, empty)
        # When either queue is named first, then the jobs are handed out
        for order in ([empty, self.queue], [self.queue, empty]):
            assert [lease.queue for lease in consumer.reserve(1, 0, order)] == [self.queue]

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
        # When a call names other queues, then the call raises OptionInvalid, and the consumer's own queues still apply
        for call in (lambda: consumer.reserve(1, 0, asked), lambda: consumer.exchange((), 1, 0, asked)):
            with pytest.raises(OptionInvalid, match="in any order"):
                call()
        self.enqueue(b"there", queue=other)
        self.enqueue(b"here")
        assert [lease.queue for lease in self.reserve(by=consumer)] == [self.queue, other]
