"""Enqueue: each job is stored once and unchanged. A due job is handed out in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.backend import DELAY_MAX, PRIORITY_DEFAULT, PRIORITY_MAX, TTR_DEFAULT, Ack, NewJob, Release, State
from multiq.conformance.case import ALL, BODIES, BOUNDARIES, IDS, LONG, Topic, promise, requires, without
from multiq.errors import PayloadTooLarge
from multiq.ids import new_id, new_ids

if TYPE_CHECKING:
    from multiq.backend import Lease


class EnqueueTests(Topic):
    # --- fields of a job ---

    @promise("2.1", "4.9")
    @requires("priorities")
    def test_a_job_comes_out_as_it_went_in(self) -> None:
        # Given a job with its own priority and ttr
        job_id = self.enqueue(b"body", priority=17, ttr=90)
        # When the job is reserved
        lease = self.take()
        # Then the lease has the values that were enqueued
        assert (lease.queue, lease.id, lease.body) == (self.queue, job_id, b"body")
        assert (lease.priority, lease.ttr) == (17, 90)

    @promise("2.1")
    def test_a_job_without_options_has_the_default_priority_and_ttr(self) -> None:
        # Given a job that was enqueued without options
        self.enqueue()
        # Then the job is due immediately, with the default options
        lease = self.take()
        assert (lease.priority, lease.ttr) == (PRIORITY_DEFAULT, TTR_DEFAULT)

    @promise("2.1", "4.9")
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_a_body_is_given_back_to_the_byte(self, body: bytes) -> None:
        # Given a body with bytes that some encodings would damage
        job_id = self.enqueue(body)
        # Then peek and reserve both return the same body
        assert self.peek(job_id).body == body
        assert self.take().body == body

    @promise("2.1", "4.9")
    def test_bodies_around_64_kib_are_given_back_whole(self) -> None:
        # Given bodies whose lengths are typical limits of buffers and length fields
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        bodies = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
        self.enqueue_all(*bodies)
        # Then each body is complete and separate from the next body
        assert self.in_line(self.bodies(), bodies)

    @promise("2.1")
    @requires("total_order", "priorities")
    def test_the_first_and_the_last_priority_can_be_used(self) -> None:
        # Given jobs with the last and the first priority
        last = self.enqueue(b"last", priority=PRIORITY_MAX)
        first = self.enqueue(b"first", priority=0)
        # Then both priorities are stored unchanged
        assert self.peek(last).priority == PRIORITY_MAX
        assert self.peek(first).priority == 0
        assert self.bodies() == [b"first", b"last"]

    @promise("2.1", "2.2")
    @requires("priorities")
    def test_each_job_of_a_batch_has_its_own_options(self) -> None:
        # Given a batch whose jobs have different options
        late, low, high = self.backend.enqueue(
            self.queue,
            [
                self.new(b"late", delay=LONG),
                self.new(b"low", priority=9, ttr=70),
                self.new(b"high", priority=3, ttr=80),
            ],
        )
        # Then each job has its own options
        assert self.stands(late, State.DELAYED)
        leases = self.reserve()
        assert self.in_line([(lease.id, lease.priority, lease.ttr) for lease in leases], [(high, 3, 80), (low, 9, 70)])

    # --- ids and order ---

    @promise("2.2")
    def test_ids_come_back_in_the_order_of_the_jobs(self) -> None:
        # Given a batch of bodies
        bodies = [b"%d" % number for number in range(12)]
        # When the batch is enqueued
        ids = self.enqueue_all(*bodies)
        # Then each id is the id of the job at the same position
        assert [self.peek(job_id).body for job_id in ids] == bodies

    @promise("2.2", "3.4")
    @requires("total_order")
    def test_a_batch_is_as_old_as_its_order_says_whatever_its_ids_are(self) -> None:
        # Given ids whose sort order is the reverse of the batch's order
        ids = sorted(new_ids(12), reverse=True)
        bodies = [b"%d" % number for number in range(12)]
        self.backend.enqueue(self.queue, [NewJob(body, job_id) for body, job_id in zip(bodies, ids, strict=True)])
        # Then the jobs are handed out in the order of the batch
        assert self.bodies() == bodies

    @promise("1.3")
    def test_no_two_jobs_have_one_id(self) -> None:
        # Given many jobs that are equal, except for the time of their enqueue
        ids = [job_id for _ in range(5) for job_id in self.enqueue_all(*[b"same"] * 20)]
        # Then each job has its own id
        assert len(set(ids)) == len(ids)

    @promise("1.3")
    @requires("client_ids")
    def test_the_callers_id_is_the_jobs_id(self) -> None:
        # Given an id that the caller has made
        job_id = new_id()
        # When a job is enqueued with the caller's id, then every answer has the job under this id
        assert self.enqueue(id=job_id) == job_id
        assert self.peek(job_id).id == job_id
        assert self.take().id == job_id

    @promise("1.3", "2.4", "11.5")
    @requires("client_ids")
    def test_ids_of_other_kinds_are_kept_as_they_are_and_distinguished(self) -> None:
        # Given ids that are not UUIDs, and UUIDs in several spellings. A table could treat some of the ids as equal.
        uuid = new_id()
        ids = [*IDS, uuid, uuid.upper(), uuid.replace("-", "")]
        batch = [NewJob(b"%d" % number, job_id) for number, job_id in enumerate(ids)]
        # When jobs are enqueued with the unusual ids, twice, in one call and one by one
        for jobs in (batch, *([job] for job in batch)):
            assert self.backend.enqueue(self.queue, jobs) == [job.id for job in jobs]
        # Then each id is one job in every answer
        assert self.counts() == (len(ids), 0, 0, 0)
        assert [self.peek(job_id).body for job_id in ids] == [job.body for job in batch]
        leases = self.reserve(ALL)
        assert self.in_line([(lease.id, lease.body) for lease in leases], [(job.id, job.body) for job in batch])
        self.settle(*[Ack(lease) for lease in leases])
        assert self.counts() == (0, 0, 0, 0)

    @promise("2.2")
    def test_an_empty_batch_changes_nothing(self) -> None:
        # When an empty batch is enqueued
        assert self.backend.enqueue(self.queue, []) == []
        # Then there is no job
        assert self.counts() == (0, 0, 0, 0)

    @promise("2.2")
    def test_a_thousand_jobs_in_one_call_all_arrive_in_order(self) -> None:
        # Given a batch of 1,000 jobs. A driver may send the batch in several parts
        bodies = [b"%04d" % number for number in range(1000)]
        ids = self.enqueue_all(*bodies)
        # Then all jobs are stored, in order
        assert len(set(ids)) == 1000
        assert self.counts() == (1000, 0, 0, 0)
        leases = self.reserve(ALL)
        assert self.in_line([lease.body for lease in leases], bodies)

    # --- again ---

    @promise("2.4")
    @requires("client_ids")
    def test_a_repeated_enqueue_makes_no_second_job(self) -> None:
        # Given an enqueue whose reply was lost
        job = self.new(b"once")
        self.backend.enqueue(self.queue, [job])
        # When the call is repeated
        assert self.backend.enqueue(self.queue, [job]) == [job.id]
        # Then there is still one job
        assert self.counts() == (1, 0, 0, 0)
        assert self.bodies() == [b"once"]

    @promise("2.4")
    @requires("client_ids", "total_order", "priorities")
    def test_a_known_id_keeps_its_first_body_priority_delay_and_place(self) -> None:
        # Given two jobs
        job_id = self.enqueue(b"first", priority=5, ttr=90)
        self.enqueue(b"second", priority=5)
        # When the first job's id is enqueued again with different options
        self.enqueue(b"other", id=job_id, priority=0, delay=LONG, ttr=120)
        # Then the first job's options and its place in the order are unchanged
        record = self.peek(job_id)
        assert (record.body, record.priority, record.ttr, record.state) == (b"first", 5, 90, State.READY)
        assert self.bodies() == [b"first", b"second"]

    @promise("2.4")
    @requires("client_ids", "priorities")
    @pytest.mark.parametrize("state", [State.DELAYED, State.RESERVED, State.BURIED])
    def test_a_known_id_leaves_the_job_in_its_state(self, state: State) -> None:
        # Given a job that is not ready
        job_id = self.given(state, priority=5, ttr=90)
        # When the job's id is enqueued again with another body, priority and ttr, to be due now or later
        for delay in (0.0, LONG / 4):
            assert self.enqueue(b"again", id=job_id, delay=delay, priority=0, ttr=120) == job_id
            # Then the job keeps its state and its options, and there is no second job
            record = self.peek(job_id)
            assert (record.state, record.body, record.priority, record.ttr) == (state, b"x", 5, 90)
        assert sum(count or 0 for count in self.counts()) == 1
        assert self.reserve() == []

    @promise("2.4")
    @requires("client_ids", "priorities")
    def test_a_known_id_does_not_re_time_a_delayed_job(self) -> None:
        # Given a delayed job
        job_id = self.enqueue(delay=LONG, priority=5, ttr=90)
        # When the job's id is enqueued again with another delay (none, shorter or longer), priority and ttr
        for delay in (0.0, LONG / 4, 4 * LONG):
            assert self.enqueue(b"again", id=job_id, delay=delay, priority=0, ttr=120) == job_id
            # Then the job's due time and options are unchanged
            record = self.peek(job_id)
            assert record.state is State.DELAYED
            assert self.about(record.due_in, LONG)
            assert (record.body, record.priority, record.ttr) == (b"x", 5, 90)

    @promise("2.4")
    @requires("client_ids")
    def test_one_id_twice_in_a_batch_is_one_job(self) -> None:
        # Given a batch that has one id twice
        job_id = new_id()
        ids = self.backend.enqueue(self.queue, [NewJob(b"a", job_id), NewJob(b"b", new_id()), NewJob(b"c", job_id)])
        # Then the first of the two jobs is stored
        assert (ids[0], ids[2]) == (job_id, job_id)
        assert self.in_line(self.bodies(), [b"a", b"b"])

    @promise("2.4")
    @requires("client_ids")
    def test_a_batch_that_is_half_known_adds_the_other_half(self) -> None:
        # Given a batch of which only one job was stored
        batch = [self.new(b"%d" % number) for number in range(4)]
        self.backend.enqueue(self.queue, batch[1:2])
        # When the whole batch is sent again
        ids = self.backend.enqueue(self.queue, batch)
        # Then each job is stored once
        assert ids == [job.id for job in batch]
        assert sorted(self.bodies()) == [b"0", b"1", b"2", b"3"]

    @promise("2.4")
    @requires("client_ids", "management")
    def test_one_id_in_two_queues_is_two_jobs(self) -> None:
        # Given two jobs of the same id in two queues
        other = self.another_queue()
        job_id = self.enqueue(b"here")
        self.enqueue(b"there", queue=other, id=job_id)
        # When one of the two jobs is deleted
        self.backend.delete(self.queue, job_id)
        # Then the other job still exists
        assert self.peek(job_id, other).body == b"there"
        assert self.reserve() == []

    @promise("2.4")
    @requires("client_ids")
    def test_an_acked_jobs_id_can_be_enqueued_again(self) -> None:
        # Given a job that is done
        job_id = self.enqueue(b"old")
        self.settle(Ack(self.take()))
        # When the job's id is enqueued again
        self.enqueue(b"new", id=job_id)
        # Then the id has a new job
        lease = self.take()
        assert (lease.body, lease.attempt) == (b"new", 1)

    @promise("1.3", "2.4")
    @requires("management")
    @without("client_ids")
    def test_a_backend_that_chooses_ids_chooses_a_new_one_each_time(self) -> None:
        # Given a caller that enqueues twice with the same id
        job = self.new(b"twice")
        one, other = (self.backend.enqueue(self.queue, [job])[0] for _ in range(2))
        # Then there are two jobs, and each job is found by the id that was returned
        assert one != other
        self.backend.delete(self.queue, one)
        assert self.peek(other).body == b"twice"

    # --- limits ---

    @promise("2.6")
    def test_the_largest_body_goes_in_and_comes_out(self) -> None:
        # Given a body of exactly the limit
        body = b"\xa5" * self.modest_limit()
        self.enqueue(body)
        # Then the whole body is stored
        assert self.take().body == body

    @promise("2.6")
    def test_one_byte_more_is_refused_with_both_sizes(self) -> None:
        # Given a body that is one byte over the limit
        limit = self.modest_limit()
        # When the body is enqueued, then the call raises PayloadTooLarge
        with pytest.raises(PayloadTooLarge) as refusal:
            self.enqueue(b"x" * (limit + 1))
        assert (refusal.value.size_bytes, refusal.value.limit_bytes) == (limit + 1, limit)
        # And nothing is stored, and the backend still works
        assert self.counts() == (0, 0, 0, 0)
        self.enqueue(b"small")
        assert self.bodies() == [b"small"]

    @promise("2.3", "2.6")
    def test_a_batch_with_one_body_too_large_stores_nothing(self) -> None:
        # Given a batch with one body that is too large
        limit = self.modest_limit()
        # When the batch is enqueued, then the whole batch is refused
        with pytest.raises(PayloadTooLarge):
            self.enqueue_all(b"good", b"x" * (limit + 1), b"good as well")
        assert self.counts() == (0, 0, 0, 0)

    # --- when ---

    @promise("2.5")
    def test_a_job_without_delay_is_due_at_once(self) -> None:
        # Given a job with a delay of 0
        job_id = self.enqueue(delay=0)
        # Then the job is ready
        assert self.stands(job_id, State.READY)
        assert self.take().id == job_id

    @promise("2.5")
    @pytest.mark.parametrize("delay", [0.001, 0.999, 1.0, 2.5], ids="{:g} s".format)
    def test_a_delayed_job_is_never_early(self, delay: float) -> None:
        # Given a job with a delay
        moment = self.in_(delay)
        self.enqueue(delay=delay)
        over = self.in_(delay + self.can.delay_resolution)
        # When almost all of the delay has passed, then the job is not handed out
        self.harness.nearly(moment)
        self.nothing_before(moment)
        # And when the delay is over, rounded up to the backend's resolution, then the job is handed out
        self.harness.past(over)
        assert self.worker.held or self.take()

    @promise("2.5")
    @pytest.mark.parametrize("verb", ["enqueue", "release", "reschedule"])
    def test_no_fraction_of_a_delay_is_cut_off(self, verb: str) -> None:
        if verb == "reschedule":
            self.need("management")
        for delay in (0.0197, 0.0291) if self.can.delay_resolution < 0.01 else (1.3 * self.can.delay_resolution,):
            # Given a job with a delay of a fraction of a second
            lease = None
            if verb == "release":
                self.enqueue()
                lease = self.take()
            job_id = self.enqueue(delay=LONG) if verb == "reschedule" else ""
            moment = self.in_(delay)
            if lease is not None:
                self.settle(Release(lease, delay=delay))
            elif job_id:
                self.backend.reschedule(self.queue, job_id, delay)
            else:
                self.enqueue(delay=delay)
            # When the job is handed out, then the whole delay has passed
            leases: list[Lease] = []
            give_up_at = self.in_(delay + self.can.delay_resolution + self.harness.patience)
            while not leases:
                leases = self.reserve(1)
                assert not leases or self.harness.now() >= moment, "a job was handed out too early"
                assert self.harness.now() < give_up_at, "a delayed job is not handed out"
                if not leases:
                    self.harness.advance(0.0005)
            self.settle(Ack(leases[0]))

    @promise("2.5")
    def test_a_month_is_a_delay_like_any_other(self) -> None:
        self._keeps_delay(30 * 86400.0)

    @promise("2.5")
    def test_the_longest_delay_is_kept(self) -> None:
        longest = self.can.longest_delay
        self._keeps_delay(float(DELAY_MAX) if longest is None else longest)

    def _keeps_delay(self, delay: float) -> None:
        if self.harness.real_time and not self.can.inspection:
            self.not_tried("whether a long delay is cut is seen by looking at the job, or by moving the store's clock")
        # Given a job with a long delay
        job_id = self.enqueue(delay=delay)
        # Then the job is due when the delay has passed, and not earlier
        if self.can.inspection:
            record = self.peek(job_id)
            assert record.state is State.DELAYED
            assert self.about(record.due_in, delay)
        if not self.harness.real_time:
            self.harness.advance(delay - 1)
            assert self.reserve() == []
            self.harness.advance(1)
            assert self.take().id == job_id

    @promise("2.8")
    def test_a_job_is_there_for_all_clients_once_enqueue_returns(self) -> None:
        # Given two backend objects on one store
        other = self.another_backend()
        # When one of the two objects enqueues a job
        job_id = self.enqueue(b"news")
        # Then the other object sees the job and can reserve it
        if self.can.exact_counts:
            assert other.stats(self.queue).ready == 1
        if self.can.inspection:
            assert other.peek(self.queue, job_id).body == b"news"
        assert self.take(by=self.another_consumer(backend=other)).id == job_id
