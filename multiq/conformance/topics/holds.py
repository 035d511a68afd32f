"""Held jobs and arrivals. A held job waits until members have arrived."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import Ack, After, Arrive, Bury, Enqueue, GiveBack, Release, State, Terms
from multiq.conformance.case import ALL, BODIES, LONG, SLEEP_GRACE, Topic, promise, requires
from multiq.conformance.threads import together
from multiq.errors import JobHeld, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import JobRecord

#: Different members. A collation, a pattern or trimming would treat some of the members as equal.
MEMBERS = [
    "a", "A", "a ", " a", "a\n", "\u00e1", "a\u0301", "\uff41", "*", "%", "_", "a%", "a*", "[a]", "\\", "'", '"',
    "a:b", "a/b", "1", "01", "1.0", "1e0", "nil", "null", "\u2603", "\U0001d11e", "x" * 200, "x" * 199, "x" * 199 + "y",
    "\u2603" * 200,
]  # fmt: skip
#: Pairs of a job's id and a member. Some pairs are the same text when the two parts are joined.
JOINED = [("job-1", "1x"), ("job-11", "x"), ("job-", "11x"), ("job-1:1", "x"), ("job-1", ":1:x")]
#: Arrivals that would change a held job.
CHANGES: dict[str, dict[str, Any]] = {"arrival": {}, "expect": {"expect": 3}, "doom": {"doom": "why"}}


@requires("holds", "inspection")
class HoldsTests(Topic):
    # --- waiting ---

    @promise("14.1", "14.8")
    @pytest.mark.parametrize("awaits", [1, 2, 5])
    def test_a_job_is_held_until_so_many_members_have_arrived(self, awaits: int) -> None:
        # Given a job that waits for several members
        job_id = self.held(awaits, b"body", ttr=LONG)
        for left in range(awaits, 0, -1):
            # When fewer members have arrived, then the job is held, and is not handed out
            record = self.peek(job_id)
            assert (record.state, record.awaits, record.due_in) == (State.HELD, left, None)
            assert self.reserve() == []
            self.arrive(job_id, f"member-{left}")
        # When the last member has arrived, then the job is like any other job
        record = self.peek(job_id)
        assert (record.state, record.awaits, record.due_in) == (State.READY, 0, 0)
        lease = self.take()
        assert (lease.id, lease.body, lease.ttr, lease.doomed) == (job_id, b"body", LONG, "")
        assert (lease.attempt, lease.crashes, lease.kicks) == (1, 0, 0)
        self.settle(Ack(lease))
        assert self.counts() == (0, 0, 0, 0)

    @promise("14.1")
    def test_a_job_that_waits_for_no_member_is_not_held(self) -> None:
        # Given jobs whose terms have no members
        self.enqueue_all(b"a", b"b", terms=Terms())
        delayed = self.enqueue(terms=Terms(awaits=0), delay=LONG)
        # Then the jobs are ready or delayed
        assert self.held_count() == 0
        assert self.in_line(self.bodies(), [b"a", b"b"])
        assert self.state(delayed) is State.DELAYED

    @promise("14.1", "2.2")
    def test_a_batch_can_have_held_jobs_and_others(self) -> None:
        # Given a batch with held, ready and delayed jobs
        jobs = [
            self.new(b"held"), self.new(b"ready"), self.new(b"held and delayed", delay=LONG),
            self.new(b"delayed", delay=LONG), self.new(b"ready as well"),
        ]  # fmt: skip
        terms = [Terms(2), None, Terms(1), None, Terms(0)]
        batch = [
            self.new(job.body, id=job.id, delay=job.delay, terms=held) for job, held in zip(jobs, terms, strict=True)
        ]
        # When the batch is enqueued, then each job is in its own state
        ids = self.backend.enqueue(self.queue, batch)
        keeps_id = [bool(self.can.client_ids or (job.terms and job.terms.awaits)) for job in batch]
        assert [own for own, keeps in zip(ids, keeps_id, strict=True) if keeps] == [
            job.id for job, keeps in zip(jobs, keeps_id, strict=True) if keeps
        ]
        states = [self.peek(job_id).state for job_id in ids]
        assert states == [State.HELD, State.READY, State.HELD, State.DELAYED, State.READY]
        assert [self.peek(job_id).awaits for job_id in ids] == [2, 0, 1, 0, 0]

    @promise("14.1", "4.2")
    def test_time_does_not_release_a_held_job(self) -> None:
        # Given held jobs, one of which has a delay
        ids = [self.held(), self.held(delay=self.short_delay)]
        # When more time than the delay passes
        self.harness.past(self.in_(2 * self.short_delay))
        # Then all held jobs are still held
        assert [self.state(job_id) for job_id in ids] == [State.HELD] * 2
        assert self.reserve() == []

    @promise("14.1", "14.2")
    def test_a_job_can_wait_for_thousands(self) -> None:
        # Given a job that waits for 2,500 members
        job_id = self.held(2500)
        members = [f"member-{number}" for number in range(2500)]
        # When the 2,500 members arrive in large calls, some members twice
        self.arrive(job_id, *members[:1000])
        self.arrive(job_id, *members[500:1500])
        assert self.peek(job_id).awaits == 1000
        self.arrive(job_id, *members[1500:2499])
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        # Then the job is ready as soon as the last member has arrived
        self.arrive(job_id, members[2499])
        assert self.take().id == job_id

    # --- members ---

    @promise("14.2")
    def test_a_member_that_arrives_several_times_in_one_call_counts_once(self) -> None:
        job_id = self.held(2)
        self.arrive(job_id, "a", "a", "a")
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        self.arrive(job_id, "a", "b", "a")
        assert self.state(job_id) is State.READY

    @promise("14.2")
    def test_a_member_that_arrives_in_several_calls_counts_once(self) -> None:
        job_id = self.held(2)
        for backend in (self.backend, self.backend, self.another_backend()):
            assert backend.carry_out([Arrive(self.queue, job_id, "a")]) is True
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.2", "15.1")
    def test_a_member_that_arrives_twice_with_one_verdict_counts_once(self) -> None:
        job_id = self.held(3)
        self.enqueue()
        step = Arrive(self.queue, job_id, "a")
        self.settle(Ack(self.take(), After(steps=(step, step, Arrive(self.queue, job_id, "b"), step))))
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.2", "5.7")
    def test_a_member_that_arrives_with_several_verdicts_of_a_call_counts_once(self) -> None:
        job_id = self.held(2)
        self.enqueue_all(b"x", b"y", b"z")
        after = After(steps=(Arrive(self.queue, job_id, "a"),))
        self.settle(*(Ack(lease, after) for lease in self.reserve()))
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.2")
    def test_a_member_that_arrives_with_verdicts_of_several_consumers_counts_once(self) -> None:
        job_id = self.held(2)
        self.enqueue_all(b"x", b"y")
        consumers = [self.another_consumer(), self.another_consumer(backend=self.another_backend())]
        leases = [self.take(by=consumer) for consumer in consumers]
        after = After(steps=(Arrive(self.queue, job_id, "a"),))
        for consumer, lease in zip(consumers, leases, strict=True):
            self.settle(Ack(lease, after), by=consumer)
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.2", "4.2")
    def test_a_member_that_runs_twice_counts_once(self) -> None:
        # Given a held job, and a member that runs twice. On each run, the member arrives with the verdict
        job_id = self.held(2)
        member = self.enqueue(ttr=LONG)
        after = After(steps=(Arrive(self.queue, job_id, member),))
        lease = self.take()
        self.settle(Release(lease, after=after))
        self.settle(Ack(self.take(), after))
        # Then the held job waits for another member
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.2")
    def test_members_are_the_same_only_if_all_their_characters_are(self) -> None:
        # Given a job that waits for members that are easily mistaken for each other
        job_id = self.held(len(MEMBERS))
        for at, member in enumerate(MEMBERS):
            assert self.peek(job_id).awaits == len(MEMBERS) - at, MEMBERS[at - 1]
            self.arrive(job_id, member)
        # Then each of the similar members counts
        assert self.state(job_id) is State.READY

    @promise("14.2", "1.3")
    @requires("client_ids")
    def test_jobs_and_members_are_not_mixed_up(self) -> None:
        # Given held jobs, and one arrival for each pair of job and member
        for job_id in dict.fromkeys(job_id for job_id, _ in JOINED):
            self.held(3, id=job_id)
        for job_id, member in JOINED:
            self.arrive(job_id, member)
        # Then each arrival has counted at its own job
        arrived = Counter(job_id for job_id, _ in JOINED)
        assert {job_id: 3 - (self.peek(job_id).awaits or 0) for job_id in arrived} == arrived

    @promise("14.2", "1.3", "11.5")
    @requires("client_ids")
    def test_an_arrival_counts_in_its_queue_only(self) -> None:
        # Given held jobs of one id in two queues
        other = self.another_queue()
        job_id = self.held(2)
        self.held(2, id=job_id, queue=other)
        # When a member arrives in one queue, then the job in the other queue still waits for this member
        self.arrive(job_id, "a", queue=other)
        assert [self.peek(job_id, queue).awaits for queue in (self.queue, other)] == [2, 1]
        self.arrive(job_id, "a", "b")
        assert [self.peek(job_id, queue).state for queue in (self.queue, other)] == [State.READY, State.HELD]

    @promise("14.2", "14.6")
    def test_an_arrival_counts_at_its_job_only(self) -> None:
        # Given two held jobs
        one, other = self.held(), self.held()
        # When a member arrives at one of the two jobs, then the other job stays held
        self.arrive(one, "a")
        assert (self.state(one), self.state(other)) == (State.READY, State.HELD)

    # --- released ---

    @promise("14.3", "2.5")
    def test_a_released_job_with_a_delay_is_delayed(self) -> None:
        # Given a held job with a delay
        job_id = self.held(2, delay=LONG)
        assert self.peek(job_id).due_in is None
        # When the job's last member arrives, then its delay begins
        self.arrive(job_id, "a", "b")
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.DELAYED, 0)
        assert self.about(record.due_in, LONG)
        assert self.reserve() == []

    @promise("14.3", "2.5")
    def test_the_delay_begins_with_the_last_arrival(self) -> None:
        # Given a held job that has waited for as long as its delay
        job_id = self.held(2, delay=self.short_delay)
        self.arrive(job_id, "a")
        self.harness.past(self.in_(self.short_delay))
        # When the held job's last member arrives
        moment = self.in_(self.short_delay)
        self.arrive(job_id, "b")
        over = self.in_(self.short_delay + self.can.delay_resolution)
        # Then the job is not handed out before the whole delay has passed, and is handed out after the delay
        self.harness.nearly(moment)
        self.nothing_before(moment)
        self.harness.past(over)
        assert self.worker.held or self.take()

    @promise("14.3")
    def test_a_later_arrival_does_not_begin_the_delay_again(self) -> None:
        # Given a job that was held and is now delayed, after a part of its delay has passed
        job_id = self.held(1, delay=LONG)
        self.arrive(job_id, "a")
        self.harness.advance(2 * self.short_delay)
        # When members arrive, then the delay continues
        self.arrive(job_id, "a", "b")
        assert self.about(self.peek(job_id).due_in, LONG - 2 * self.short_delay)

    @promise("14.3", "5.2")
    def test_a_verdict_on_a_job_that_was_held_has_its_own_delay(self) -> None:
        # Given a running job that was enqueued as held, with a delay
        job_id = self.held(1, delay=self.short_delay)
        self.arrive(job_id, "a")
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        lease = self.take()
        # When the running job is released without a delay, then it is ready immediately
        self.settle(Release(lease))
        assert self.state(job_id) is State.READY
        self.settle(Release(self.take(), delay=LONG))
        assert self.about(self.peek(job_id).due_in, LONG)

    @promise("14.3", "3.4", "3.5")
    @requires("total_order", "priorities")
    def test_a_released_job_has_its_old_place(self) -> None:
        # Given a held job, and younger jobs of several priorities
        job_id = self.held(1, b"held", priority=5)
        for body, priority in ((b"young", 5), (b"best", 1), (b"worst", 9)):
            self.enqueue(body, priority=priority)
        # When the held job is released, then it is handed out by its priority and its age
        self.arrive(job_id, "a")
        assert self.bodies() == [b"best", b"held", b"young", b"worst"]

    @promise("14.3", "3.5")
    @requires("total_order")
    def test_jobs_released_in_another_order_go_by_age(self) -> None:
        # Given held jobs that are released in the opposite order
        ids = [self.held(1, b"%d" % number) for number in range(4)]
        for job_id in reversed(ids):
            self.arrive(job_id, "a")
        # Then the jobs are handed out by their ages
        assert self.bodies() == [b"0", b"1", b"2", b"3"]

    @promise("14.3", "4.8")
    def test_the_age_of_a_held_job_counts_from_its_enqueue(self) -> None:
        # Given a job that was held for a while
        job_id = self.held()
        self.harness.advance(2 * self.short_delay)
        assert self.about(self.peek(job_id).age, 2 * self.short_delay)
        # When the job is released, then its age counts from its enqueue
        self.arrive(job_id, "a")
        assert self.about(self.take().age, 2 * self.short_delay)

    @promise("14.3", "3.7")
    @pytest.mark.parametrize("how", ["carry_out", "verdict", "doom", "other queue"])
    def test_the_last_arrival_wakes_a_waiting_consumer(self, how: str) -> None:
        # Given a consumer that waits, and a held job of its queue
        elsewhere = self.another_queue()
        self.enqueue(queue=elsewhere if how == "other queue" else self.queue)
        sender = self.another_consumer(elsewhere, self.queue)
        lease = self.take(by=sender)
        job_id = self.held()
        waiting = self.waiting(self.another_consumer(backend=self.another_backend()))
        # When the last member arrives
        if how == "carry_out":
            self.arrive(job_id, "a")
        else:
            doom = "why" if how == "doom" else ""
            self.settle(Ack(lease, After(steps=(Arrive(self.queue, job_id, "a", doom=doom),))), by=sender)
        # Then the consumer has the job
        assert [woken.id for woken in self.woken(waiting)] == [job_id]

    @promise("14.3", "3.7")
    def test_the_end_of_the_delay_wakes_a_waiting_consumer(self) -> None:
        # Given a consumer that waits, and a held job with a delay
        job_id = self.held(1, delay=self.short_delay)
        waiting = self.waiting(self.another_consumer())
        # When the last member arrives, and the delay passes, then the consumer has the job
        self.arrive(job_id, "a")
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        assert [woken.id for woken in self.woken(waiting)] == [job_id]

    @promise("14.1", "3.2")
    def test_an_arrival_that_is_not_the_last_gives_a_waiting_consumer_nothing(self) -> None:
        # Given a consumer that waits, and a job that waits for two members
        job_id = self.held(2)
        waiting = self.waiting(self.another_consumer())
        # When one member arrives, then the consumer continues to wait
        self.arrive(job_id, "a")
        time.sleep(SLEEP_GRACE)
        assert waiting.is_alive()
        # And when the second member arrives, the consumer has the job
        self.arrive(job_id, "b")
        assert [woken.id for woken in self.woken(waiting)] == [job_id]

    # --- expect ---

    @promise("14.4")
    def test_an_arrival_can_make_the_job_wait_for_more(self) -> None:
        # Given a job that waits for one member
        job_id = self.held(1)
        # When that member arrives and adds two more members, then the job waits for the two new members
        self.arrive(job_id, "a", expect=2)
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 2)
        self.arrive(job_id, "b", "c")
        assert self.state(job_id) is State.READY

    @promise("14.4")
    def test_only_the_first_arrival_makes_the_job_wait_for_more(self) -> None:
        # Given a member that arrives three times, and each time adds two more members
        job_id = self.held(2)
        step = Arrive(self.queue, job_id, "a", expect=2)
        assert self.backend.carry_out([step, step])
        assert self.backend.carry_out([step])
        # Then the job waits for only two more members
        assert self.peek(job_id).awaits == 3
        # And a member that has arrived without adding members cannot add members later
        self.arrive(job_id, "b")
        self.arrive(job_id, "b", expect=5)
        assert self.peek(job_id).awaits == 2

    @promise("14.4")
    def test_the_last_member_can_make_the_job_wait_for_one_more_again_and_again(self) -> None:
        # Given a held job, and ten members. Each member arrives and adds one more member
        job_id = self.held(1)
        for number in range(10):
            self.arrive(job_id, f"member-{number}", expect=1)
            assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        # When a member arrives and adds no further member, then the job is ready
        self.arrive(job_id, "last")
        assert self.state(job_id) is State.READY

    @promise("14.4", "15.4")
    def test_several_arrivals_of_a_call_are_added_up(self) -> None:
        # Given arrivals in one call, the second of which adds three more members
        job_id = self.held(3)
        steps = [
            Arrive(self.queue, job_id, "a"), Arrive(self.queue, job_id, "b", expect=3), Arrive(self.queue, job_id, "c"),
        ]  # fmt: skip
        assert self.backend.carry_out(steps)
        # Then all arrivals count
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 3)

    @promise("14.4", "15.4")
    def test_what_comes_after_the_last_arrival_of_a_call_is_too_late(self) -> None:
        # Given arrivals in one call, the second of which releases the job
        job_id = self.held(2)
        steps = [
            Arrive(self.queue, job_id, "a"), Arrive(self.queue, job_id, "b"),
            Arrive(self.queue, job_id, "c", expect=3), Arrive(self.queue, job_id, "d", doom="too late"),
        ]  # fmt: skip
        assert self.backend.carry_out(steps)
        # Then the later arrivals change nothing
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.READY, 0)
        assert self.take().doomed == ""

    # --- doom ---

    @promise("14.5")
    def test_a_doomed_job_is_ready_at_once_with_the_reason(self) -> None:
        # Given a job that waits for several members, one of which has arrived
        job_id = self.held(3, b"body")
        self.arrive(job_id, "a")
        # When another member dooms the job
        self.arrive(job_id, "b", doom="b has failed")
        # Then the job is ready, and its lease has the reason
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.READY, 0)
        lease = self.take()
        assert (lease.id, lease.body, lease.doomed, lease.attempt) == (job_id, b"body", "b has failed", 1)

    @promise("14.5")
    def test_a_doomed_job_does_not_wait_for_its_delay(self) -> None:
        job_id = self.held(1, delay=LONG)
        self.arrive(job_id, "a", doom="why")
        assert self.state(job_id) is State.READY
        assert self.take().doomed == "why"

    @promise("14.5")
    def test_a_member_that_has_arrived_can_doom_the_job_later(self) -> None:
        job_id = self.held(2)
        self.arrive(job_id, "a")
        self.arrive(job_id, "a", doom="after all")
        assert self.take().doomed == "after all"

    @promise("14.5")
    def test_doom_ends_what_expect_has_begun(self) -> None:
        job_id = self.held(1)
        self.arrive(job_id, "a", expect=3)
        self.arrive(job_id, "b", expect=3, doom="why")
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.READY, 0)
        assert self.take().doomed == "why"

    @promise("14.5", "14.6")
    def test_the_first_reason_stays(self) -> None:
        # Given two jobs, each doomed by two members: one job in one call, the other job in two calls
        one, other = self.held(2), self.held(2)
        self.arrive(one, "a", doom="first")
        self.arrive(one, "b", doom="second")
        steps = [Arrive(self.queue, other, member, doom=f"{member} first") for member in ("a", "b")]
        assert self.backend.carry_out(steps)
        # Then the leases have the first reason
        assert {lease.id: lease.doomed for lease in self.reserve()} == {one: "first", other: "a first"}

    @promise("14.5", "14.6")
    def test_members_that_arrive_at_a_doomed_job_change_nothing(self) -> None:
        job_id = self.held(2)
        self.arrive(job_id, "a", doom="why")
        self.arrive(job_id, "b", "c")
        self.arrive(job_id, "d", expect=4)
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.READY, 0)
        assert self.take().doomed == "why"

    @promise("14.5")
    @pytest.mark.parametrize(
        "body", [body for body in BODIES.values() if body.isascii() and body and b"\0" not in body]
    )
    def test_a_reason_is_given_back_as_it_was(self, body: bytes) -> None:
        reason = body.decode() + " naïve ☃ 𝄞"
        job_id = self.held()
        self.arrive(job_id, "a", doom=reason)
        assert self.take().doomed == reason

    @promise("14.5")
    def test_a_doomed_job_stays_doomed_through_its_verdicts(self) -> None:
        # Given a doomed job
        job_id = self.held(ttr=LONG)
        self.arrive(job_id, "a", doom="why")
        # When the doomed job is released, given back, buried and kicked
        self.settle(Release(self.take(), reason="other"))
        seen = [lease := self.take()]
        if self.can.give_back:
            self.settle(GiveBack(lease))
            seen.append(lease := self.take())
        self.settle(Bury(lease, reason="another"))
        assert self.backend.kick(self.queue, 1) == 1
        seen.append(self.take())
        # Then each lease has the reason
        assert {lease.doomed for lease in seen} == {"why"}
        assert {lease.id for lease in seen} == {job_id}

    @promise("14.5", "4.2")
    def test_a_doomed_job_stays_doomed_when_its_lease_ends(self) -> None:
        job_id = self.held(ttr=self.short_ttr)
        self.arrive(job_id, "a", doom="why")
        self.take()
        self.harness.past(self.in_(self.short_ttr))
        lease = self.take()
        assert (lease.id, lease.doomed, lease.crashes) == (job_id, "why", 1)

    @promise("14.5", "7.1")
    @requires("management")
    def test_a_rescheduled_job_is_not_doomed(self) -> None:
        job_id = self.held()
        self.arrive(job_id, "a", doom="why")
        self.backend.reschedule(self.queue, job_id, 0)
        assert self.take().doomed == ""

    @promise("14.5")
    def test_other_jobs_are_not_doomed(self) -> None:
        # Given a doomed job among other jobs, one of which was held
        released, doomed = self.held(), self.held()
        plain = self.enqueue()
        assert self.backend.carry_out([Arrive(self.queue, released, "a"), Arrive(self.queue, doomed, "a", doom="why")])
        # Then only the doomed job's lease has the reason
        assert {lease.id: lease.doomed for lease in self.reserve()} == {released: "", doomed: "why", plain: ""}

    # --- arrivals at jobs that are not held ---

    @promise("14.6")
    @pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.RESERVED, State.BURIED])
    def test_an_arrival_at_a_job_that_is_not_held_changes_nothing(self, state: State, options: dict[str, Any]) -> None:
        # Given a job that is not held
        job_id = self.given(state, b"body", ttr=2 * LONG)
        before = self.peek(job_id)
        # When members arrive at the job
        self.arrive(job_id, "a", "b", **options)
        # Then the job is unchanged
        after = self.peek(job_id)
        assert _timeless(after) == _timeless(before)
        assert after.due_in == before.due_in or self.about(after.due_in, before.due_in or 0.0)
        # And neither the job's present lease nor a later lease is doomed
        if state is State.RESERVED:
            self.settle(Release(next(iter(self.worker.held.values()))))
        elif state is State.BURIED:
            assert self.backend.kick(self.queue, 1) == 1
        elif state is State.DELAYED:
            return
        assert self.take().doomed == ""

    @promise("14.6")
    @pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
    def test_an_arrival_at_a_job_that_is_gone_or_never_was_changes_nothing(self, options: dict[str, Any]) -> None:
        # Given a deleted job in a queue that has another job, and a queue that was never used
        gone = self.enqueue()
        self.settle(Ack(self.take()))
        self.enqueue(b"other")
        unused = self.another_queue()
        # When members arrive at jobs that do not exist
        for job_id, queue in ((gone, self.queue), ("no-such-job", self.queue), (gone, unused)):
            self.arrive(job_id, "a", "b", queue=queue, **options)
        # Then there is no new job, and no new queue
        assert (self.counts(), self.held_count()) == ((1, 0, 0, 0), 0)
        assert (self.counts(unused), self.held_count(unused)) == ((0, 0, 0, 0), 0)
        assert [name for name in self.backend.queues() if name in self.harness.handed_out] == [self.queue]

    @promise("14.6", "1.3")
    def test_an_arrival_in_another_queue_does_not_find_the_job(self) -> None:
        # Given a held job, and another queue that is in use
        job_id = self.held()
        other = self.another_queue()
        self.held(queue=other)
        # When a member arrives at the job's id in the other queue, then the job still waits
        self.arrive(job_id, "a", queue=other)
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        # And in the right queue, an arrival of the same member still counts
        self.arrive(job_id, "a")
        assert self.state(job_id) is State.READY

    @promise("14.6")
    @requires("client_ids")
    def test_an_arrival_before_the_job_is_enqueued_does_not_count(self) -> None:
        # Given a member that arrives before the job is enqueued
        job_id = self.new().id
        self.arrive(job_id, "a")
        self.arrive(job_id, "b", doom="too early")
        # When the job is enqueued, then it waits for all of its members
        self.held(2, id=job_id)
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 2)
        self.arrive(job_id, "a", "b")
        assert self.take().doomed == ""

    @promise("14.6", "8.4")
    @requires("client_ids", "management")
    @pytest.mark.parametrize("end", ["delete", "purge", "kick_job", "released", "doomed"])
    def test_a_later_job_of_the_same_id_begins_without_arrivals(self, end: str) -> None:
        # Given a held job that has ended or was released, after a member had arrived at it
        job_id = self.held(2)
        self.arrive(job_id, "a")
        if end == "delete":
            self.backend.delete(self.queue, job_id)
        elif end == "purge":
            self.need("purging")
            assert self.backend.purge(self.queue, [State.HELD]) == 1
        else:
            if end == "kick_job":
                self.backend.kick_job(self.queue, job_id)
            else:
                self.arrive(job_id, "b", doom="why" if end == "doomed" else "")
            self.settle(Ack(self.take()))
        # When the same id is enqueued again, then the new job waits for all of its members
        self.held(2, id=job_id)
        assert self.peek(job_id).awaits == 2
        self.arrive(job_id, "a")
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        self.arrive(job_id, "b")
        assert self.take().doomed == ""

    # --- several at once ---

    @promise("14.2", "11.4")
    def test_a_member_that_arrives_by_many_threads_at_once_counts_once(self) -> None:
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        for _ in range(self.harness.rounds):
            # Given a job that waits for two members
            job_id = self.held(2)
            # When all threads send the arrival of one member at the same time, then the arrival counts once
            step = Arrive(self.queue, job_id, "a")
            assert all(together([partial(backend.carry_out, [step, step]) for backend in backends]))
            assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)

    @promise("14.4", "11.4")
    def test_an_expectation_by_many_threads_at_once_counts_once(self) -> None:
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        for _ in range(self.harness.rounds):
            job_id = self.held(1)
            step = Arrive(self.queue, job_id, "a", expect=2)
            assert all(together([partial(backend.carry_out, [step]) for backend in backends]))
            assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 2)

    @promise("14.1", "14.3", "11.4", "15.1")
    def test_members_that_arrive_at_once_with_their_acks_release_the_job_once(self) -> None:
        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(self.harness.threads)]
        for _ in range(self.harness.rounds):
            # Given a held job, and its members. Several consumers have reserved the members
            count = 3 * len(consumers)
            job_id = self.held(count, b"last", ttr=LONG)
            self.enqueue_all(*[b"member"] * count, ttr=LONG)
            acks = [self._acks(job_id, consumer.reserve(3, 0)) for consumer in consumers]
            # When all members are acked at the same time
            together([partial(self.settle, *some, by=who) for some, who in zip(acks, consumers, strict=True)])
            # Then the held job is handed out exactly once. A backend with two servers may need a moment to move the job
            assert [lease.body for lease in self.worker.reserve(ALL, self.harness.patience)] == [b"last"]
            self.settle(*map(Ack, list(self.worker.held.values())))
            assert (self.counts(), self.held_count()) == ((0, 0, 0, 0), 0)

    @promise("14.3", "3.6", "11.4")
    def test_a_released_job_is_handed_to_one_of_several_waiting_consumers(self) -> None:
        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(self.harness.threads)]
        job_id = self.held(2, ttr=LONG)
        waiting = [self.waiting(consumer) for consumer in consumers]
        # When two members arrive at the same time
        works = [partial(self.another_backend().carry_out, [Arrive(self.queue, job_id, name)]) for name in "ab"]
        assert together(works) == [True, True]
        # Then one of the consumers that wait has the job
        self.eventually(lambda: sum(not thread.is_alive() for thread in waiting) == 1)
        for thread, consumer in zip(waiting, consumers, strict=True):
            if thread.is_alive():
                consumer.interrupt()
        assert [lease.id for thread in waiting for lease in self.woken(thread)] == [job_id]

    def _acks(self, job_id: str, leases: Sequence[Any]) -> list[Ack]:
        return [Ack(lease, After(steps=(Arrive(self.queue, job_id, lease.id),))) for lease in leases]


@requires("holds", "inspection")
class HeldJobsTests(Topic):
    """Held jobs and the operations that show and manage jobs."""

    # --- managing ---

    @promise("14.7", "6.2", "4.7")
    @requires("management")
    @pytest.mark.parametrize("delay", [0.0, LONG])
    def test_a_held_job_that_is_kicked_is_ready_now(self, delay: float) -> None:
        # Given a held job at which one member has arrived
        job_id = self.held(2, delay=delay)
        self.arrive(job_id, "a")
        # When the held job is kicked, then it is ready, and no kick is counted
        self.backend.kick_job(self.queue, job_id)
        record = self.peek(job_id)
        assert (record.state, record.awaits, record.due_in) == (State.READY, 0, 0)
        # And members that arrive later change nothing
        self.arrive(job_id, "b", "c")
        lease = self.take()
        assert (lease.id, lease.kicks, lease.doomed) == (job_id, 0, "")

    @promise("14.7", "3.7")
    @requires("management")
    def test_a_held_job_that_is_kicked_wakes_a_waiting_consumer(self) -> None:
        job_id = self.held()
        waiting = self.waiting(self.another_consumer())
        self.backend.kick_job(self.queue, job_id)
        assert [woken.id for woken in self.woken(waiting)] == [job_id]

    @promise("14.7", "8.1")
    @requires("management")
    def test_a_held_job_that_is_deleted_never_starts(self) -> None:
        # Given a held job that is deleted
        job_id = self.held(2)
        self.arrive(job_id, "a")
        self.backend.delete(self.queue, job_id)
        # When the other member arrives, then there is no job
        self.arrive(job_id, "b")
        assert self.reserve() == []
        assert (self.counts(), self.held_count()) == ((0, 0, 0, 0), 0)
        with pytest.raises(JobNotFound):
            self.peek(job_id)
        with pytest.raises(JobNotFound):
            self.backend.delete(self.queue, job_id)

    @promise("14.7", "10.4")
    @requires("purging")
    def test_a_purge_of_held_jobs_deletes_them_and_no_others(self) -> None:
        # Given jobs in all states
        self._one_in_each_state()
        self.held(2)
        # When the held jobs are purged, then the other jobs stay
        assert self.backend.purge(self.queue, [State.HELD]) == 2
        assert (self.counts(), self.held_count()) == ((1, 1, 1, 1), 0)

    @promise("14.7", "10.4")
    @requires("purging")
    def test_a_purge_of_other_states_leaves_held_jobs_alone(self) -> None:
        # Given jobs in all states
        held = self._one_in_each_state()
        self.arrive(held, "a")
        # When all jobs except the held jobs are purged, then the held job still waits
        assert self.backend.purge(self.queue, [State.READY, State.DELAYED, State.BURIED]) == 3
        assert (self.counts(), self.held_count()) == ((0, 0, 1, 0), 1)
        assert self.peek(held).awaits == 1

    @promise("14.7", "10.4")
    @requires("purging")
    def test_many_held_jobs_are_purged_in_one_call(self) -> None:
        ids = self.enqueue_all(*[b"x"] * 1000, terms=Terms(2))
        assert self.backend.carry_out([Arrive(self.queue, job_id, "a") for job_id in ids])
        assert self.backend.purge(self.queue, [State.HELD, State.READY]) == 1000
        assert self.held_count() == 0

    @promise("14.7", "7.4")
    @requires("management")
    @pytest.mark.parametrize("delay", [0.0, LONG])
    def test_a_held_job_cannot_be_rescheduled(self, delay: float) -> None:
        # Given a held job at which one member has arrived
        job_id = self.held(2)
        self.arrive(job_id, "a")
        before = self.peek(job_id)
        # When the held job is rescheduled, then the call raises JobHeld
        with pytest.raises(JobHeld) as refusal:
            self.backend.reschedule(self.queue, job_id, delay)
        assert (refusal.value.queue, refusal.value.job_id) == (self.queue, job_id)
        # And the job has not changed
        assert _timeless(self.peek(job_id)) == _timeless(before)
        self.arrive(job_id, "a")
        assert self.state(job_id) is State.HELD
        self.arrive(job_id, "b")
        assert self.take().id == job_id

    @promise("14.7", "7.1")
    @requires("management")
    def test_a_job_that_was_held_can_be_rescheduled(self) -> None:
        job_id = self.held(1, delay=2 * LONG)
        self.arrive(job_id, "a")
        self.backend.reschedule(self.queue, job_id, LONG)
        assert self.about(self.peek(job_id).due_in, LONG)
        self.backend.reschedule(self.queue, job_id, 0)
        assert self.take().id == job_id

    @promise("14.7", "6.1")
    def test_a_kick_of_many_leaves_held_jobs_alone(self) -> None:
        # Given a held and a buried job
        held = self._one_in_each_state()
        # When more jobs are kicked than there are buried jobs, then the held job still waits
        assert self.backend.kick(self.queue, 100) == 1
        assert (self.counts(), self.held_count()) == ((2, 1, 1, 0), 1)
        assert self.backend.kick(self.queue, 100) == 0
        assert self.state(held) is State.HELD

    @promise("14.7", "10.1")
    @requires("pausing")
    def test_members_arrive_during_a_pause(self) -> None:
        # Given a held job in a paused queue
        job_id = self.held(2)
        self.backend.pause(self.queue, LONG)
        # When the held job's members arrive, then the job is ready, but is not handed out
        self.arrive(job_id, "a", "b")
        assert self.state(job_id) is State.READY
        assert self.reserve() == []
        # And the job is handed out after the pause
        self.backend.resume(self.queue)
        assert self.take().id == job_id

    @promise("14.7", "8.3", "11.4")
    @requires("management")
    def test_a_job_that_is_deleted_while_its_last_member_arrives_is_gone_or_was_released(self) -> None:
        other = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a held job
            job_id = self.held(1)

            def delete(job_id: str = job_id) -> bool:
                other.delete(self.queue, job_id)
                return True

            def arrive(job_id: str = job_id) -> bool:
                return self.backend.carry_out([Arrive(self.queue, job_id, "a")])

            # When the held job is deleted while its last member arrives, then it is gone, because no consumer had
            # reserved it
            assert together([delete, arrive]) == [True, True]
            assert (self.counts(), self.held_count()) == ((0, 0, 0, 0), 0)

    # --- looking ---

    @promise("14.8", "9.5")
    def test_stats_count_held_jobs_by_themselves(self) -> None:
        assert self.held_count() == 0
        # Given jobs in all states
        held = self._one_in_each_state()
        assert (self.counts(), self.held_count()) == ((1, 1, 1, 1), 1)
        # When the held job is released, then it counts as ready
        self.arrive(held, "a", "b")
        assert (self.counts(), self.held_count()) == ((2, 1, 1, 1), 0)

    @promise("14.8", "9.1")
    @requires("priorities")
    def test_peek_shows_all_of_a_held_job(self) -> None:
        job_id = self.held(3, b"\0body", priority=7, ttr=LONG, delay=LONG)
        self.arrive(job_id, "a")
        record = self.peek(job_id)
        assert (record.queue, record.id, record.state, record.awaits) == (self.queue, job_id, State.HELD, 2)
        assert (record.body, record.priority, record.ttr, record.due_in) == (b"\0body", 7, LONG, None)
        assert self.tells(record.attempt, 0, "durable_attempts")
        assert (record.reason, record.memo or b"", record.detail or b"") == (None, b"", b"")

    @promise("14.8", "9.2")
    @requires("lists_jobs", "total_order", "priorities")
    def test_held_jobs_are_listed_the_oldest_first(self) -> None:
        # Given held jobs of several priorities and delays, among other jobs
        for number, (priority, delay) in enumerate([(5, 0.0), (1, LONG), (9, 0.0), (0, 2 * LONG)], 1):
            self.held(number, b"%d" % number, priority=priority, delay=delay)
            self.enqueue(b"other", priority=priority)
        # Then the held jobs are listed by their ages, with the number of members that each job waits for
        page = self.backend.jobs(self.queue, State.HELD)
        assert [(record.body, record.awaits) for record in page.jobs] == [(b"1", 1), (b"2", 2), (b"3", 3), (b"4", 4)]
        assert {record.state for record in page.jobs} == {State.HELD}
        assert {record.due_in for record in page.jobs} == {None}
        assert page.after is None

    @promise("14.8", "9.3")
    @requires("lists_jobs", "total_order", "management")
    def test_a_held_job_that_stays_is_listed_once_while_others_go(self) -> None:
        # Given a listing whose first page was read
        ids = [self.held() for _ in range(7)]
        page = self.backend.jobs(self.queue, State.HELD, limit=3)
        seen = [record.id for record in page.jobs]
        # When held jobs before, at and after the cursor are released or deleted
        self.arrive(ids[1], "a")
        self.backend.delete(self.queue, ids[2])
        self.arrive(ids[4], "a")
        late = self.held()
        # Then the next pages list the other jobs
        page = self.backend.jobs(self.queue, State.HELD, after=page.after)
        assert seen + [record.id for record in page.jobs] == [*ids[:3], ids[3], ids[5], ids[6], late]

    @promise("14.8")
    @requires("lists_jobs")
    def test_a_released_job_is_listed_as_what_it_is_now(self) -> None:
        # Given a released job, and a job whose delay has begun
        ready, delayed = self.held(), self.held(delay=LONG)
        self.arrive(ready, "a")
        self.arrive(delayed, "a")
        # Then each job is listed in its state, and no job is listed as held
        listed: dict[State, list[Any]] = {
            state: [(record.id, record.awaits) for record in self.backend.jobs(self.queue, state).jobs]
            for state in (State.READY, State.DELAYED, State.HELD)
        }
        assert listed == {State.READY: [(ready, 0)], State.DELAYED: [(delayed, 0)], State.HELD: []}

    @promise("14.8", "9.4")
    @requires("management")
    def test_a_queue_is_named_while_it_has_a_held_job(self) -> None:
        # Given a queue that has only a held job
        job_id = self.held()
        self.arrive(job_id, "a", expect=1)
        assert self._is_named()
        # When the held job is deleted, then the queue is not named
        self.backend.delete(self.queue, job_id)
        assert not self._is_named()

    @promise("14.8", "9.5", "11.5")
    def test_held_jobs_of_other_queues_are_not_counted(self) -> None:
        other = self.another_queue()
        self.held(queue=other)
        assert (self.counts(), self.held_count()) == ((0, 0, 0, 0), 0)
        if self.can.lists_jobs:
            assert self.backend.jobs(self.queue, State.HELD).jobs == []

    # --- enqueuing ---

    @promise("14.9", "2.4")
    @requires("client_ids")
    @pytest.mark.parametrize("terms", [None, Terms(), Terms(1), Terms(5)], ids=["none", "nothing", "fewer", "more"])
    @pytest.mark.parametrize("delay", [0.0, LONG])
    @pytest.mark.parametrize("how", ["enqueue", "step"])
    def test_a_held_job_is_not_changed_by_enqueuing_its_id(self, terms: Terms | None, delay: float, how: str) -> None:
        # Given a held job at which one of three members has arrived
        job_id = self.held(3, b"old")
        self.arrive(job_id, "a")
        before = self.peek(job_id)
        # When the held job's id is enqueued again
        new = self.new(b"new", id=job_id, delay=delay, terms=terms, ttr=LONG)
        if how == "enqueue":
            assert self.backend.enqueue(self.queue, [new]) == [job_id]
        else:
            assert self.backend.carry_out([Enqueue(self.queue, new)])
        # Then the job still waits for the same members
        assert _timeless(self.peek(job_id)) == _timeless(before)
        self.arrive(job_id, "a", "b")
        assert self.state(job_id) is State.HELD
        self.arrive(job_id, "c")
        assert self.take().body == b"old"

    @promise("14.9", "2.4")
    @requires("client_ids")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.RESERVED, State.BURIED])
    def test_a_job_that_is_there_is_not_held_by_enqueuing_its_id(self, state: State) -> None:
        # Given a job that is not held
        job_id = self.given(state, ttr=LONG)
        # When the job's id is enqueued again with a number of members, then the job is unchanged
        self.backend.enqueue(self.queue, [self.new(id=job_id, terms=Terms(2))])
        assert (self.state(job_id), self.peek(job_id).awaits) == (state, 0)

    @promise("14.1", "2.7")
    @requires("transactional_enqueue")
    def test_a_job_of_the_callers_transaction_is_held_once_it_commits(self) -> None:
        self.counts()
        with self.transaction() as connection:
            (job_id,) = self.backend.enqueue(self.queue, [self.new(terms=Terms(1))], connection=connection)
            connection.commit()
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        self.arrive(job_id, "a")
        assert self.take().id == job_id

    @promise("14.1", "11.7")
    @requires("persistent")
    def test_held_jobs_and_their_arrivals_outlive_all_clients(self) -> None:
        # Given a held job at which one member has arrived, and a doomed job
        job_id = self.held(2, delay=LONG)
        self.arrive(job_id, "a")
        doomed = self.held()
        self.arrive(doomed, "a", doom="why")
        # When all backends are closed, and the store is restarted
        self._start_anew()
        # Then the arrival still counts, and the doomed job still has its reason
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        self.arrive(job_id, "a")
        assert self.state(job_id) is State.HELD
        self.arrive(job_id, "b")
        assert self.about(self.peek(job_id).due_in, LONG)
        lease = self.take()
        assert (lease.id, lease.doomed) == (doomed, "why")

    # --- internals ---

    def _one_in_each_state(self) -> str:
        """Add a job in each state. Returns the id of the held job. The held job waits for two members."""
        for state in (State.DELAYED, State.BURIED, State.RESERVED, State.READY):
            self.given(state, ttr=LONG)
        return self.held(2)

    def _is_named(self) -> bool:
        return self.queue in self.backend.queues()

    def _start_anew(self) -> None:
        for consumer in self._consumers:
            consumer.close()
        for backend in self._backends:
            backend.close()
        self._worker = None
        self.harness.restart()
        self.backend = self.another_backend()


def _timeless(record: JobRecord) -> tuple[object, ...]:
    return (
        record.queue, record.id, record.state, record.body, record.priority, record.ttr, record.attempt,
        record.crashes, record.kicks, record.reason, record.memo, record.detail, record.awaits,
    )  # fmt: skip
