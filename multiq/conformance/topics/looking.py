"""Peek, listings, stats and the names of queues, none of which changes anything."""

from __future__ import annotations

import pytest

from multiq.backend import STORED_STATES, Ack, Bury, GiveBack, JobRecord, Release, State, Terms, Touch
from multiq.conformance.case import LONG, Topic, promise, requires, without
from multiq.errors import JobNotFound, Unsupported
from multiq.ids import new_id


@requires("inspection")
class PeekTests(Topic):
    @promise("9.1")
    @requires("priorities")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_peek_returns_the_state_and_all_else(self, state: State) -> None:
        # Given a job in one of the states
        job_id = self.given(state, b"body", priority=5, ttr=2 * LONG)
        record = self.peek(job_id)
        # Then peek shows all values of the job
        assert (record.queue, record.id, record.state) == (self.queue, job_id, state)
        assert (record.body, record.priority, record.ttr) == (b"body", 5, 2 * LONG)
        was_reserved = state in {State.RESERVED, State.BURIED}
        assert self.tells(record.attempt, int(was_reserved), "durable_attempts")
        assert self.tells(record.crashes, 0, "durable_attempts")
        assert self.tells(record.kicks, 0, "durable_attempts")
        assert record.reason is None

    @promise("9.1")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_peek_returns_when_a_job_is_due(self, state: State) -> None:
        # Given a job in one of the states, with LONG as its delay or 2 * LONG as its ttr
        job_id = self.given(state, ttr=2 * LONG)
        due_in = self.peek(job_id).due_in
        # Then a ready job is due now, and a buried or held job is never due. Any other job is due after the delay or
        # the ttr
        if state in {State.BURIED, State.HELD}:
            assert due_in is None
        else:
            expected = {State.READY: 0.0, State.DELAYED: LONG, State.RESERVED: 2 * LONG}
            assert self.about(due_in, expected[state])

    @promise("9.1")
    def test_peek_counts_the_time_that_is_left(self) -> None:
        # Given a delayed job
        job_id = self.enqueue(delay=LONG)
        # When time passes, then less of the job's delay is left, and the job is older
        self.harness.advance(2 * self.short_delay)
        record = self.peek(job_id)
        assert self.about(record.due_in, LONG - 2 * self.short_delay)
        assert self.about(record.age, 2 * self.short_delay)

    @promise("9.1")
    def test_peek_changes_nothing(self) -> None:
        # Given two jobs. A caller peeks at the first job once, and at the second job five times
        first, second = self.enqueue_all(b"first", b"second")
        for _ in range(5):
            self.peek(second)
        self.peek(first)
        # Then both jobs are handed out as if no caller had peeked at them
        leases = self.reserve()
        assert self.in_line([(lease.body, lease.attempt) for lease in leases], [(b"first", 1), (b"second", 1)])

    @promise("9.1")
    def test_a_job_that_is_not_there_cannot_be_seen(self) -> None:
        # Given a job that is done, and an id that no job ever had
        job_id = self.enqueue()
        self.settle(Ack(self.take()))
        for missing in (job_id, new_id()):
            with pytest.raises(JobNotFound):
                self.peek(missing)

    @promise("9.1", "1.3")
    def test_a_job_is_not_seen_in_another_queue(self) -> None:
        # Given a job, and another queue that is in use
        job_id = self.enqueue()
        other = self.another_queue()
        self.enqueue(queue=other)
        # Then the job is only in its own queue
        with pytest.raises(JobNotFound):
            self.peek(job_id, other)

    @promise("1.2", "9.1")
    def test_a_delayed_job_past_its_due_time_is_ready(self) -> None:
        # Given a delayed job that is due by now, and that no consumer has reserved
        job_id = self.enqueue(delay=self.short_delay)
        self.harness.past(self.in_(self.short_delay))
        # Then peek shows the job as ready
        record = self.peek(job_id)
        assert (record.state, record.due_in) == (State.READY, 0)

    @promise("9.1", "4.5", "4.7")
    def test_peek_follows_a_job_through_its_life(self) -> None:
        # Given a job that was released, buried and kicked
        job_id = self.enqueue()
        self.settle(Release(self.take()))
        self.settle(Bury(self.take()))
        self.backend.kick(self.queue, 1)
        # Then peek shows the job's attempts and kicks
        record = self.peek(job_id)
        assert self.tells(record.attempt, 2, "durable_attempts")
        assert self.tells(record.kicks, 1, "durable_attempts")

    @promise("9.1")
    def test_a_reserved_job_is_in_its_first_attempt_for_all_clients(self) -> None:
        # Given a job that one backend's consumer holds
        job_id = self.enqueue(b"held")
        self.take()
        # Then another backend sees the job as reserved
        record = self.another_backend().peek(self.queue, job_id)
        assert (record.state, record.body) == (State.RESERVED, b"held")
        assert self.tells(record.attempt, 1, "durable_attempts")


@requires("inspection")
class JobsTests(Topic):
    @promise("9.2")
    @requires("lists_jobs", "total_order", "priorities")
    def test_ready_jobs_are_listed_as_they_would_be_reserved(self) -> None:
        # Given jobs of several priorities and ages, one of which was reserved and released
        for number, priority in enumerate((5, 1, 5, 0, 1)):
            self.enqueue(b"%d" % number, priority=priority)
        self.settle(Release(self.take()))
        # Then the jobs are listed in the order in which they would be reserved
        listed = self._list(State.READY)
        assert listed == [b"3", b"1", b"4", b"0", b"2"]
        assert self.bodies() == listed

    @promise("9.2")
    @requires("lists_jobs", "total_order", "priorities")
    def test_delayed_jobs_are_listed_by_due_time(self) -> None:
        # Given delayed jobs whose due times are not in the order of their enqueues
        for number in (4, 2, 3, 1):
            self.enqueue(b"%d" % number, delay=number * LONG, priority=number)
        # Then the job that is due next is listed first
        assert self._list(State.DELAYED) == [b"1", b"2", b"3", b"4"]

    @promise("9.2")
    @requires("lists_jobs", "total_order")
    def test_reserved_jobs_are_listed_by_the_end_of_their_leases(self) -> None:
        # Given leases of several lengths
        for number in (3, 1, 2):
            self.enqueue(b"%d" % number, ttr=number * LONG)
        self.reserve()
        # Then the job whose lease ends next is listed first
        assert self._list(State.RESERVED) == [b"1", b"2", b"3"]

    @promise("9.2", "5.4")
    @requires("lists_jobs", "total_order")
    def test_a_touched_job_is_listed_by_its_new_end(self) -> None:
        # Given two leases, one of which ends shortly after the other
        self.enqueue(b"touched", ttr=LONG)
        self.enqueue(b"other", ttr=LONG + self.short_delay / 2)
        touched, _ = self.reserve()
        assert self._list(State.RESERVED) == [b"touched", b"other"]
        # When the lease that ends first is touched a little later, then its job is listed last
        self.harness.advance(self.short_delay)
        self.settle(Touch(touched))
        assert self._list(State.RESERVED) == [b"other", b"touched"]

    @promise("9.2", "6.1")
    @requires("lists_jobs", "total_order")
    def test_buried_jobs_are_listed_as_they_would_be_kicked(self) -> None:
        # Given jobs that were buried, the youngest first
        self.enqueue_all(b"1", b"2", b"3")
        for lease in reversed(self.reserve()):
            self.settle(Bury(lease))
        # Then the jobs are listed in the order in which they would be kicked
        assert self._list(State.BURIED) == [b"3", b"2", b"1"]

    @promise("9.2")
    @requires("lists_jobs")
    def test_each_job_is_listed_in_its_state_and_in_no_other(self) -> None:
        # Given a job in each state
        ids = {State.DELAYED: self.enqueue(delay=LONG)}
        for state in (State.BURIED, State.RESERVED, State.READY):
            ids[state] = self.given(state)
        if self.can.holds:
            ids[State.HELD] = self.given(State.HELD)
        # Then the listing of each state has only the job in this state
        for state, job_id in ids.items():
            assert [record.id for record in self.backend.jobs(self.queue, state).jobs] == [job_id]

    @promise("9.2", "9.1")
    @requires("lists_jobs", "priorities")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_a_listing_says_of_a_job_what_peek_says(self, state: State) -> None:
        # Given a job with options other than the defaults
        job_id = self.given(state, b"\0body", priority=7, ttr=LONG)
        # When the job is listed, and peeked at
        (listed,) = self.backend.jobs(self.queue, state).jobs
        peeked = self.peek(job_id)
        # Then both records have the same values, apart from the time between the two calls
        assert self._timeless(listed) == self._timeless(peeked)
        assert self.about(listed.age, peeked.age or 0.0)
        assert listed.due_in == peeked.due_in or self.about(listed.due_in, peeked.due_in or 0.0)

    @promise("1.2", "9.2")
    @requires("lists_jobs")
    def test_due_and_abandoned_jobs_are_listed_as_ready(self) -> None:
        # Given a delayed job that is due, and a job whose lease has ended. No consumer has called reserve after the due
        # time and the end of the lease
        due = self.enqueue(delay=self.short_delay)
        abandoned = self.abandoned()
        self.harness.past(self.in_(self.short_delay))
        # Then both jobs are listed as ready, and in no other state
        assert {record.id for record in self.backend.jobs(self.queue, State.READY).jobs} == {due, abandoned.id}
        assert self._list(State.DELAYED) == self._list(State.RESERVED) == []

    @promise("9.2", "9.3")
    @requires("lists_jobs")
    def test_an_empty_listing_is_one_empty_page(self) -> None:
        # Given a queue without jobs
        for state in STORED_STATES:
            page = self.backend.jobs(self.queue, state)
            # Then the first page is empty, and there is no next page
            assert (page.jobs, page.after) == ([], None)

    @promise("9.3")
    @requires("lists_jobs")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_pages_follow_each_other_without_gap_or_overlap(self, state: State) -> None:
        # Given more jobs than fit on a page, many of one priority and one due time
        bodies = [b"%02d" % number for number in range(11)]
        if state is State.HELD:
            self.need("holds")
        terms = Terms(awaits=1) if state is State.HELD else None
        self.enqueue_all(*bodies, delay=LONG if state is State.DELAYED else 0, ttr=LONG, terms=terms)
        if state in {State.RESERVED, State.BURIED}:
            leases = self.reserve()
            self.settle(*map(Bury, leases if state is State.BURIED else []))
        # When the pages are read one after the other
        pages = self._pages(state, 3)
        # Then all pages except the last are full, and the pages together have all jobs
        assert [len(page) for page in pages] == [3, 3, 3, 2]
        assert sorted(body for page in pages for body in page) == bodies

    @promise("9.3")
    @requires("lists_jobs")
    def test_a_page_that_has_all_remaining_jobs_is_the_last(self) -> None:
        # Given as many jobs as fill two pages
        self.enqueue_all(*[b"x"] * 6)
        # Then there are two pages, and no empty third page
        assert [len(page) for page in self._pages(State.READY, 3)] == [3, 3]

    @promise("9.3")
    @requires("lists_jobs", "total_order", "management")
    def test_a_job_that_stays_is_seen_once_while_others_go(self) -> None:
        # Given a listing whose first page was read
        ids = self.enqueue_all(*[b"%d" % number for number in range(8)])
        page = self.backend.jobs(self.queue, State.READY, limit=3)
        seen = [record.id for record in page.jobs]
        # When jobs are deleted before, at and after the cursor
        for gone in (ids[0], ids[2], ids[4]):
            self.backend.delete(self.queue, gone)
        # Then the remaining jobs follow, and no job is missing
        page = self.backend.jobs(self.queue, State.READY, limit=100, after=page.after)
        assert seen + [record.id for record in page.jobs] == [ids[0], ids[1], ids[2], ids[3], ids[5], ids[6], ids[7]]

    @promise("9.3")
    @requires("lists_jobs", "total_order", "priorities")
    def test_a_job_that_stays_is_seen_once_while_others_come(self) -> None:
        # Given a listing whose first page was read
        ids = self.enqueue_all(*[b"x"] * 6, priority=5)
        page = self.backend.jobs(self.queue, State.READY, limit=3)
        seen = [record.id for record in page.jobs]
        # When two jobs are enqueued, one before the cursor and one after the cursor
        self.enqueue(priority=1)
        late = self.enqueue(priority=9)
        # Then each job that existed before is listed once
        page = self.backend.jobs(self.queue, State.READY, limit=100, after=page.after)
        assert seen + [record.id for record in page.jobs] == [*ids, late]

    @promise("9.2")
    @requires("lists_jobs")
    def test_a_listing_changes_nothing(self) -> None:
        # Given ready jobs, and a listing of each state
        self.enqueue_all(b"a", b"b")
        for state in STORED_STATES:
            self.backend.jobs(self.queue, state, limit=1)
        # Then the jobs are handed out in order, each in its first attempt
        assert self.in_line([(lease.body, lease.attempt) for lease in self.reserve()], [(b"a", 1), (b"b", 1)])

    @promise("9.2", "11.5")
    @requires("lists_jobs")
    def test_a_listing_has_the_jobs_of_its_queue_only(self) -> None:
        # Given jobs in another queue
        self.enqueue(queue=self.another_queue())
        assert self._list(State.READY) == []

    @promise("9.2", "11.3")
    @without("lists_jobs")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_a_state_that_cannot_be_listed_is_refused_and_never_an_empty_list(self, state: State) -> None:
        if state is State.HELD and self.can.holds and not self.can.one_step:
            self.does_not_apply("held jobs are in another store than the other jobs, and that store lists them")
        # Given several jobs in one state, on a backend that cannot list them
        for _ in range(3):
            self.given(state)
        # When all pages are read, then one page raises Unsupported before all jobs are listed
        seen: list[str] = []
        with pytest.raises(Unsupported) as refusal:
            self._list_on(state, seen)
        assert refusal.value.capability == "lists_jobs"
        assert len(seen) == len(set(seen)) < 3

    def _list_on(self, state: State, seen: list[str]) -> None:
        after = None
        while True:
            page = self.backend.jobs(self.queue, state, limit=100, after=after)
            seen += [record.id for record in page.jobs]
            after = page.after
            if after is None:
                return

    def _list(self, state: State) -> list[bytes]:
        page = self.backend.jobs(self.queue, state, limit=100)
        assert page.after is None
        return [record.body for record in page.jobs]

    def _pages(self, state: State, limit: int) -> list[list[bytes]]:
        pages: list[list[bytes]] = []
        after = None
        while not pages or after is not None:
            assert len(pages) < 100, "the listing does not come to an end"
            page = self.backend.jobs(self.queue, state, limit=limit, after=after)
            pages.append([record.body for record in page.jobs])
            after = page.after
        return pages

    @staticmethod
    def _timeless(record: JobRecord) -> tuple[object, ...]:
        return (
            record.queue, record.id, record.state, record.body, record.priority, record.ttr, record.attempt,
            record.crashes, record.kicks, record.reason, record.memo, record.detail, record.awaits,
        )  # fmt: skip


@requires("exact_counts")
class StatsTests(Topic):
    @promise("9.5")
    def test_a_queue_that_was_never_used_counts_zero(self) -> None:
        # Given a name that has never been used
        stats = self.backend.stats(self.queue)
        # Then stats raises no error
        assert (stats.queue, stats.paused_for) == (self.queue, None)
        assert self.counts() == (0, 0, 0, 0)

    @promise("9.5")
    def test_each_state_is_counted_by_itself(self) -> None:
        # Given different numbers of jobs in each state
        self.enqueue_all(*[b"x"] * 10)
        leases = self.reserve(7)
        self.settle(*map(Bury, leases[:4]))
        self.enqueue_all(*[b"x"] * 2, delay=LONG)
        # Then the counts are correct
        assert self.counts() == (3, 2, 3, 4)

    @promise("9.5", "5.7")
    @requires("management")
    def test_the_counts_follow_every_verb(self) -> None:
        # Given a queue on which several operations are called
        self.enqueue_all(*[b"x"] * 6, ttr=LONG)
        seen = [self.counts()]
        leases = self.reserve(5)
        seen.append(self.counts())
        ids = [lease.id for lease in leases]
        self.settle(Ack(leases[0]), Release(leases[1]), Release(leases[2], LONG), Bury(leases[3]), GiveBack(leases[4]))
        seen.append(self.counts())
        self.backend.delete(self.queue, ids[1])
        self.backend.kick(self.queue, 1)
        seen.append(self.counts())
        self.backend.reschedule(self.queue, ids[4], LONG)
        self.backend.kick_job(self.queue, ids[2])
        seen.append(self.counts())
        # Then the counts are correct after each operation
        assert seen == [(6, 0, 0, 0), (1, 0, 5, 0), (3, 1, 0, 1), (3, 1, 0, 0), (3, 1, 0, 0)]

    @promise("1.2", "9.5")
    def test_due_jobs_count_as_ready_before_another_reserve(self) -> None:
        # Given delayed jobs, two of which are due by now
        self.enqueue_all(b"a", b"b", delay=self.short_delay)
        self.enqueue(b"later", delay=LONG)
        self.harness.past(self.in_(self.short_delay))
        # Then stats counts the two due jobs as ready
        assert self.counts() == (2, 1, 0, 0)

    @promise("9.5", "10.1")
    @requires("pausing")
    def test_stats_return_how_long_a_queue_is_still_paused(self) -> None:
        # Given a paused queue
        self.backend.pause(self.queue, LONG)
        assert self.about(self.backend.stats(self.queue).paused_for, LONG)
        # When time passes, then less of the pause is left
        self.harness.advance(self.short_delay)
        assert self.about(self.backend.stats(self.queue).paused_for, LONG - self.short_delay)
        # And after a resume, the queue is not paused
        self.backend.resume(self.queue)
        assert self.backend.stats(self.queue).paused_for is None

    @promise("9.5", "11.5")
    def test_other_queues_are_not_counted(self) -> None:
        # Given another queue with ready, delayed and buried jobs
        other = self.another_queue()
        consumer = self.another_consumer(other)
        self.enqueue_all(*[b"x"] * 4, queue=other)
        self.settle(Bury(self.take(by=consumer)), by=consumer)
        self.enqueue(queue=other, delay=LONG)
        # Then the tested queue's counts have only its own jobs
        assert self.counts() == (0, 0, 0, 0)


class QueuesTests(Topic):
    @promise("9.4")
    def test_queues_are_named_in_order(self) -> None:
        # Given queues that are used in an order other than the alphabetical order of their names
        names = [self.another_queue() for _ in range(12)]
        for name in (names[3], names[11], names[0], names[2], names[10]):
            self.enqueue(queue=name)
        # Then the queues are listed in the alphabetical order of their names
        assert self._ours() == sorted([names[3], names[11], names[0], names[2], names[10]])

    @promise("9.4")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_a_queue_is_named_while_it_holds_a_job_in_any_state(self, state: State) -> None:
        # Given a queue whose only job is in one of the states
        self.given(state)
        assert self._ours() == [self.queue]

    @promise("9.4")
    @requires("pausing")
    def test_a_queue_is_named_while_it_is_paused(self) -> None:
        # Given an empty queue that is paused
        self.backend.pause(self.queue, LONG)
        assert self._ours() == [self.queue]
        # When the queue is resumed, then the queue is not listed any more
        self.backend.resume(self.queue)
        assert self._ours() == []

    @promise("9.4")
    @requires("pausing", "purging")
    def test_a_queue_that_was_only_asked_about_is_not_named(self) -> None:
        # Given a queue that never had a job, but was counted, reserved from, resumed and purged
        self.counts()
        self.reserve()
        self.backend.resume(self.queue)
        self.backend.purge(self.queue, [State.READY])
        assert self._ours() == []

    @promise("9.4")
    @requires("management")
    def test_an_emptied_queue_is_not_named(self) -> None:
        # Given a queue whose last jobs were acked and deleted
        job_id = self.enqueue(delay=LONG)
        self.enqueue()
        self.settle(Ack(self.take()))
        assert self._ours() == [self.queue]
        self.backend.delete(self.queue, job_id)
        assert self._ours() == []

    def _ours(self) -> list[str]:
        """The queues of this test. The server may have queues of other users."""
        return [name for name in self.backend.queues() if name.startswith(self.harness.prefix)]
