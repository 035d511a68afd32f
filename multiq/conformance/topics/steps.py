"""Steps. A verdict or ``carry_out`` carries out either all of its steps or none of them."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import pytest

from multiq.backend import (
    MAX_STEPS,
    STORED_STATES,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    Enqueue,
    GiveBack,
    Put,
    Release,
    State,
    Terms,
    Touch,
    Version,
)
from multiq.conformance.case import BODIES, BOUNDARIES, LONG, Topic, promise, requires
from multiq.conformance.threads import HANGS, together
from multiq.errors import JobNotFound, LeaseLost, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Backend, Consumer, Lease, NewJob, Step, Verdict

    Make = Callable[[Lease, After], Verdict]

#: The verdicts that can have steps.
KINDS: dict[str, Make] = {
    "ack": Ack,
    "ack with an outcome": lambda lease, after: Ack(lease, After(keep=LONG, outcome=b"result", steps=after.steps)),
    "release": lambda lease, after: Release(lease, reason="why", after=after),
    "delayed release": lambda lease, after: Release(lease, delay=LONG, after=after),
    "bury": lambda lease, after: Bury(lease, reason="why", after=after),
    "touch": Touch,
    "give back": lambda lease, after: GiveBack(lease, after=after),
    "delayed give back": lambda lease, after: GiveBack(lease, delay=LONG, after=after),
}
#: The states that the verdicts lead to. If the state is None, the job is gone.
ENDS: dict[str, State | None] = {
    "ack": None, "ack with an outcome": None, "release": State.READY, "delayed release": State.DELAYED,
    "bury": State.BURIED, "touch": State.RESERVED, "give back": State.READY, "delayed give back": State.DELAYED,
}  # fmt: skip


class _Steps(Topic):
    """The helpers of this file's topics."""

    def verdict(self, kind: str, lease: Lease, *steps: Step) -> Verdict:
        if kind == "ack with an outcome":
            self.need("outcomes")
        if "give back" in kind:
            self.need("give_back")
        return KINDS[kind](lease, After(steps=steps))

    def step(
        self, job_id: str, member: str = "a", *, queue: str | None = None, expect: int = 0, doom: str = ""
    ) -> Step:
        return Arrive(queue or self.queue, job_id, member, expect, doom)

    def add(self, job: NewJob, queue: str | None = None) -> Step:
        return Enqueue(queue or self.queue, job)

    def is_there(self, job_id: str, backend: Backend | None = None) -> bool:
        try:
            (backend or self.backend).peek(self.queue, job_id)
        except JobNotFound:
            return False
        return True

    def now_state(self, job_id: str) -> State | None:
        return self.state(job_id) if self.is_there(job_id) else None

    def total(self, queue: str) -> int:
        """The number of all jobs of a queue."""
        return sum(count or 0 for count in (*self.counts(queue), self.held_count(queue)))

    def reserved(self, body: bytes = b"sender", *, queue: str | None = None, by: Consumer | None = None) -> Lease:
        """The lease of a new job. The consumer's queues must have no other ready job."""
        self.enqueue(body, queue=queue, ttr=LONG)
        return self.take(by=by)

    def watch(self, observer: Backend, sender: str, job_id: str, queue: str) -> None:
        """Peek at two jobs until the job *sender* is gone. Fail if the job *job_id* is not released at the same
        moment."""
        while True:
            was_gone = not self.is_there(sender, observer)  # read first, because the release may come after this peek
            is_released = observer.peek(queue, job_id).state is not State.HELD
            assert is_released or not was_gone, "the job is gone, and has not arrived"
            was_released = observer.peek(queue, job_id).state is not State.HELD
            is_gone = not self.is_there(sender, observer)
            assert is_gone or not was_released, "the job has arrived, and is not gone"
            if was_gone:
                return


@requires("holds", "inspection")
class StepsTests(_Steps):
    # --- of a verdict ---

    @promise("15.1", "14.2")
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_accepted_verdict_carries_out_its_steps(self, kind: str) -> None:
        # Given a lease, and two held jobs
        sender = self.reserved()
        released, waiting = self.held(), self.held(2)
        new, delayed, held = self.new(b"new"), self.new(b"delayed", delay=LONG), self.new(b"held", terms=Terms(2))
        # When a verdict arrives at both held jobs, and enqueues three jobs
        steps = [self.step(released), self.step(waiting), *map(self.add, (new, delayed, held))]
        self.settle(self.verdict(kind, sender, *steps))
        # Then the verdict and all steps are carried out
        assert self.now_state(sender.id) is ENDS[kind]
        assert (self.state(released), self.peek(waiting).awaits) == (State.READY, 1)
        assert [self.state(job.id) for job in (new, delayed, held)] == [State.READY, State.DELAYED, State.HELD]
        assert self.peek(held.id).awaits == 2
        assert self.about(self.peek(delayed.id).due_in, LONG)
        if kind == "ack with an outcome":
            (outcome,) = self.backend.outcomes(self.queue, [sender.id])
            assert outcome is not None
            assert outcome.body == b"result"

    @promise("15.1", "15.2")
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_accepted_verdict_carries_out_its_steps_in_other_queues(self, kind: str) -> None:
        # Given a lease, and held jobs in two other queues
        sender = self.reserved()
        others = [self.another_queue(), self.another_queue()]
        ids = [self.held(queue=queue) for queue in others]
        new = [self.new(b"new") for _ in others]
        # When a verdict has steps in both queues
        steps: list[Step] = []
        for queue, job_id, job in zip(others, ids, new, strict=True):
            steps += [self.step(job_id, queue=queue), self.add(job, queue)]
        self.settle(self.verdict(kind, sender, *steps))
        # Then all steps are carried out exactly once, and no step is left over
        assert self.now_state(sender.id) is ENDS[kind]
        assert [self.counts(queue) for queue in others] == [(2, 0, 0, 0)] * 2
        assert self.backend.relay([self.queue, *others]) == 0
        assert [self.counts(queue) for queue in others] == [(2, 0, 0, 0)] * 2

    @promise("15.1")
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if "touch" not in kind and "ack" not in kind])
    def test_a_verdict_with_steps_does_all_else_that_it_does(self, kind: str) -> None:
        # Given a verdict with steps
        sender = self.reserved(b"body")
        job_id = self.held()
        self.settle(self.verdict(kind, sender, self.step(job_id)))
        # Then the verdict has the same effect on its job as a verdict without steps
        record = self.peek(sender.id)
        assert (record.state, record.body, record.awaits) == (ENDS[kind], b"body", 0)
        assert self.tells(record.attempt, 0 if "give back" in kind else 1, "durable_attempts")
        if kind in {"release", "bury"}:
            assert self.tells(record.reason, "why", "reasons")
        if "delayed" in kind:
            assert self.about(record.due_in, LONG)

    @promise("15.1", "5.4")
    def test_each_touch_carries_out_its_steps(self) -> None:
        # Given a lease that is touched twice, each time with a step
        sender = self.reserved()
        job_id = self.held(3)
        self.settle(self.verdict("touch", sender, self.step(job_id, "a")))
        self.settle(self.verdict("touch", sender, self.step(job_id, "b")))
        # Then both steps are carried out, and the lease stays alive
        assert self.peek(job_id).awaits == 1
        self.settle(self.verdict("ack", sender, self.step(job_id, "c")))
        assert self.state(job_id) is State.READY

    @promise("15.1", "13.1")
    @requires("memos")
    def test_a_verdict_can_have_steps_a_memo_and_a_detail(self) -> None:
        sender = self.reserved()
        job_id = self.held()
        self.settle(Bury(sender, "why", After(memo=b"memo", detail=b"detail", steps=(self.step(job_id),))))
        record = self.peek(sender.id)
        assert (record.state, record.memo, record.detail) == (State.BURIED, b"memo", b"detail")
        assert self.state(job_id) is State.READY

    @promise("15.1", "16.1")
    @requires("notes")
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_verdict_changes_notes(self, kind: str) -> None:
        # Given a lease, a note of its queue, and a note of another queue
        sender = self.reserved()
        home = self.another_queue()
        assert self.backend.carry_out([Put(self.queue, "old", b"1")])
        assert self.backend.carry_out([Put(home, "old", b"1")])
        # When a verdict drops one note of each queue, and stores another note
        steps: list[Step] = [
            Drop(self.queue, "old"),
            Put(self.queue, "new", b"2"),
            Put(home, "new", b"3", LONG),
            Drop(home, "old"),
        ]
        self.settle(self.verdict(kind, sender, *steps))
        # Then the notes are changed
        found = {name: self.backend.notes(name).notes for name in (self.queue, home)}
        assert {name: [(note.key, note.value) for note in notes] for name, notes in found.items()} == {
            self.queue: [("new", b"2")], home: [("new", b"3")],
        }  # fmt: skip
        assert self.about(found[home][0].expires_in, LONG)

    @promise("15.1", "2.1")
    @requires("priorities")
    def test_a_step_enqueues_a_job_with_all_that_a_job_can_have(self) -> None:
        # Given steps that enqueue jobs with options
        sender = self.reserved()
        jobs = [
            self.new(b"\0a", priority=7, ttr=2 * LONG), self.new(b"b", delay=LONG, priority=2**32 - 1, ttr=90),
            self.new(b"", terms=Terms(3), delay=LONG, priority=0),
        ]  # fmt: skip
        self.settle(self.verdict("ack", sender, *map(self.add, jobs)))
        # Then the jobs have the given options, and are as if enqueued now
        for job in jobs:
            record = self.peek(job.id)
            assert (record.body, record.priority, record.ttr) == (job.body, job.priority, job.ttr)
            assert self.about(record.age, 0.0)
            assert self.tells(record.attempt, 0, "durable_attempts")
        assert [self.peek(job.id).awaits for job in jobs] == [0, 0, 3]
        assert self.about(self.peek(jobs[1].id).due_in, LONG)

    @promise("15.1", "2.4")
    @requires("client_ids")
    @pytest.mark.parametrize("state", STORED_STATES)
    def test_a_step_that_enqueues_a_known_id_changes_nothing(self, state: State) -> None:
        # Given a job in one of the states
        sender = self.reserved()
        job_id = self.given(state, b"old", ttr=LONG)
        # When a step enqueues the job's id again
        again = self.new(b"new", id=job_id, delay=2 * LONG, ttr=2 * LONG)
        self.settle(self.verdict("ack", sender, self.add(again)))
        # Then the job is as before
        record = self.peek(job_id)
        assert (record.state, record.body, record.ttr) == (state, b"old", LONG)
        assert self.total(self.queue) == 1

    @promise("15.1", "2.4", "1.3")
    @requires("client_ids")
    def test_a_step_can_enqueue_the_id_of_the_job_that_is_acked(self) -> None:
        # Given an ack with a step that enqueues the id of the acked job
        sender = self.reserved(b"old")
        self.settle(self.verdict("ack", sender, self.add(self.new(b"new", id=sender.id))))
        # Then the id has a new job, because the verdict is carried out first
        lease = self.take()
        assert (lease.id, lease.body, lease.attempt) == (sender.id, b"new", 1)

    @promise("15.1", "2.4")
    @requires("client_ids")
    def test_a_step_with_the_id_of_the_job_that_is_released_changes_nothing(self) -> None:
        sender = self.reserved(b"old")
        self.settle(self.verdict("release", sender, self.add(self.new(b"new", id=sender.id))))
        assert self.take().body == b"old"
        assert self.total(self.queue) == 1

    @promise("15.1", "2.4")
    @requires("client_ids")
    def test_one_id_in_several_steps_is_enqueued_once(self) -> None:
        sender = self.reserved()
        job_id = self.new().id
        other = self.another_queue()
        jobs = [self.new(b"first", id=job_id), self.new(b"second", id=job_id, delay=LONG)]
        self.settle(self.verdict("ack", sender, *map(self.add, jobs), *(self.add(job, other) for job in jobs)))
        assert [self.peek(job_id, queue).body for queue in (self.queue, other)] == [b"first"] * 2
        assert [self.total(queue) for queue in (self.queue, other)] == [1, 1]

    @promise("15.1", "2.8", "3.7")
    @pytest.mark.parametrize("is_elsewhere", [False, True], ids=["same queue", "other queue"])
    def test_a_job_that_a_step_enqueues_wakes_a_waiting_consumer(self, is_elsewhere: bool) -> None:
        sender = self.reserved()
        queue = self.another_queue() if is_elsewhere else self.queue
        waiting = self.waiting(self.another_consumer(queue, backend=self.another_backend()))
        job = self.new(b"new")
        self.settle(self.verdict("ack", sender, self.add(job, queue)))
        assert [woken.id for woken in self.woken(waiting)] == [job.id]

    @promise("15.1")
    def test_a_verdict_without_steps_is_like_one_without_an_after(self) -> None:
        leases = [self.reserved() for _ in range(2)]
        self.settle(Ack(leases[0], After()), Ack(leases[1], After(steps=())))
        assert self.counts() == (0, 0, 0, 0)

    @promise("15.1", "15.5")
    @pytest.mark.parametrize("by", ["verdict", "carry_out"])
    def test_a_thousand_steps_are_carried_out(self, by: str) -> None:
        # Given the largest number of steps. The steps enqueue jobs, and arrive at two of the new jobs
        sender = self.reserved()
        other = self.another_queue()
        waiting = self.held(400)
        new = [self.new(b"%d" % number) for number in range(300)]
        far = [self.new(b"%d" % number) for number in range(299)]
        last = self.new(b"last", terms=Terms(1))
        steps: list[Step] = [self.add(job) for job in new]
        steps += [self.step(waiting, f"member-{number}") for number in range(400)]
        steps += [self.add(job, other) for job in far] + [self.add(last)]
        assert len(steps) == MAX_STEPS
        # When all the steps are carried out
        if by == "verdict":
            self.settle(self.verdict("ack", sender, *steps))
        else:
            assert self.backend.carry_out(steps) is True
            self.settle(Ack(sender))
        # Then all steps have an effect, at the latest after a call of relay
        assert self.backend.relay([self.queue, other]) == 0
        assert (self.counts(), self.held_count()) == ((301, 0, 0, 0), 1)
        assert self.counts(other) == (299, 0, 0, 0)
        assert self.state(waiting) is State.READY
        consumer = self.another_consumer(other)
        assert self.in_line([lease.body for lease in self.reserve(by=consumer)], [job.body for job in far])

    @promise("15.1", "2.1")
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_a_step_stores_the_bytes_of_a_body_unchanged(self, body: bytes) -> None:
        sender = self.reserved()
        other = self.another_queue()
        self.settle(self.verdict("ack", sender, self.add(self.new(body)), self.add(self.new(body), other)))
        assert [self.take(by=self.another_consumer(queue)).body for queue in (self.queue, other)] == [body] * 2

    @promise("15.1", "2.1")
    def test_steps_store_bodies_around_64_kib_whole(self) -> None:
        sender = self.reserved()
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        bodies = [bytes([65 + at]) * size for at, size in enumerate(sizes)]
        self.settle(self.verdict("ack", sender, *(self.add(self.new(body)) for body in bodies)))
        assert sorted(lease.body for lease in self.reserve()) == bodies

    # --- refused ---

    @promise("15.3", "4.3")
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_late_verdict_carries_out_no_step(self, kind: str) -> None:
        # Given a lease that has ended, and whose job no consumer has reserved afterwards
        lease = self.abandoned(body=b"x")
        job_id, steps = self._steps()
        # When the holder of the ended lease sends a verdict with steps, then nothing happens
        self.refused(self.verdict(kind, lease, *steps))
        self._assert_untouched(job_id, ready=1)

    @promise("15.3", "4.4")
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_stale_verdict_carries_out_no_step(self, kind: str) -> None:
        # Given a job whose lease has ended, and that another consumer has reserved afterwards
        lease = self.abandoned(body=b"x")
        self.take(by=self.another_consumer())
        job_id, steps = self._steps()
        # When the old holder sends a verdict with steps, then nothing happens
        self.refused(self.verdict(kind, lease, *steps))
        self._assert_untouched(job_id, reserved=1)

    @promise("15.3", "5.8")
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_second_verdict_carries_out_no_step(self, kind: str) -> None:
        # Given a lease that was settled
        lease = self.reserved()
        self.settle(Ack(lease))
        job_id, steps = self._steps()
        # When another verdict with steps comes, then nothing happens
        self.refused(self.verdict(kind, lease, *steps))
        self._assert_untouched(job_id)

    @promise("15.3", "5.8", "15.4")
    def test_of_two_verdicts_about_one_lease_in_a_call_the_first_carries_out_its_steps(self) -> None:
        # Given two verdicts about one lease, with different steps
        lease = self.reserved()
        first, second = self.held(), self.held()
        new = [self.new(b"first"), self.new(b"second")]
        answers = self.worker.settle([
            self.verdict("ack", lease, self.step(first), self.add(new[0])),
            self.verdict("bury", lease, self.step(second), self.add(new[1])),
        ])  # fmt: skip
        # Then the second verdict is refused, and its steps are not carried out
        assert [type(answer) for answer in answers] == [type(None), LeaseLost]
        assert (self.state(first), self.state(second)) == (State.READY, State.HELD)
        assert [self.is_there(job.id) for job in new] == [True, False]

    @promise("15.3", "5.7")
    def test_of_several_verdicts_of_a_call_only_the_accepted_ones_carry_out_their_steps(self) -> None:
        # Given four leases, two of which were settled
        self.enqueue_all(b"a", b"b", b"c", b"d", ttr=LONG)
        leases = self.reserve()
        self.settle(Ack(leases[0]), Bury(leases[2]))
        ids = [self.held() for _ in leases]
        new = [self.new(lease.body) for lease in leases]
        other = self.another_queue()
        far = [self.held(queue=other) for _ in leases]
        # When all four jobs are acked, and each ack has its own steps
        answers = self.worker.settle([
            self.verdict("ack", lease, self.step(ids[at]), self.add(new[at]), self.step(far[at], queue=other))
            for at, lease in enumerate(leases)
        ])  # fmt: skip
        # Then each accepted verdict has carried out only its own steps
        assert [answer is None for answer in answers] == [False, True, False, True]
        assert [self.state(job_id) is State.READY for job_id in ids] == [False, True, False, True]
        assert [self.is_there(job.id) for job in new] == [False, True, False, True]
        assert [self.peek(job_id, other).state is State.READY for job_id in far] == [False, True, False, True]

    @promise("15.3", "15.1", "16.1")
    @requires("notes")
    def test_a_refused_verdict_changes_no_note(self) -> None:
        lease = self.reserved()
        self.settle(Ack(lease))
        assert self.backend.carry_out([Put(self.queue, "old", b"1")])
        before = self.backend.notes(self.queue)
        self.refused(self.verdict("ack", lease, Put(self.queue, "old", b"2"), Put(self.queue, "new", b"2")))
        self.refused(self.verdict("ack", lease, Drop(self.queue, "old")))
        assert self.backend.notes(self.queue) == before

    # --- order ---

    @promise("15.4", "14.6")
    def test_the_steps_of_a_verdict_are_carried_out_in_their_order(self) -> None:
        # Given steps that enqueue a job and then arrive at it, and other steps that arrive before they enqueue the job
        sender = self.reserved()
        right, wrong = self.new(b"right", terms=Terms(1)), self.new(b"wrong", terms=Terms(1))
        steps = [self.add(right), self.step(right.id), self.step(wrong.id), self.add(wrong)]
        self.settle(self.verdict("ack", sender, *steps))
        # Then only the first arrival counts
        assert (self.state(right.id), self.state(wrong.id)) == (State.READY, State.HELD)
        assert self.peek(wrong.id).awaits == 1

    @promise("15.4", "15.2", "14.6")
    def test_the_steps_in_another_queue_are_carried_out_in_their_order(self) -> None:
        sender = self.reserved()
        other = self.another_queue()
        right, wrong = self.new(b"right", terms=Terms(1)), self.new(b"wrong", terms=Terms(1))
        jobs = [self.add(right, other), self.step(right.id, queue=other)]
        self.settle(self.verdict("ack", sender, *jobs, self.step(wrong.id, queue=other), self.add(wrong, other)))
        assert [self.peek(job.id, other).state for job in (right, wrong)] == [State.READY, State.HELD]

    @promise("15.1", "15.4", "14.6")
    @pytest.mark.parametrize("expect", [0, 1])
    def test_a_job_that_a_step_enqueues_stays_although_the_ack_and_an_arrival_find_the_queue_empty(
        self, expect: int
    ) -> None:
        # Given the ack of the only job of a queue, and an arrival at a job that does not exist
        sender = self.reserved()
        new = self.new(b"new", terms=Terms(1))
        self.settle(self.verdict("ack", sender, self.step(new.id, expect=expect), self.add(new), self.step(new.id)))
        # Then the job that the next step enqueues is in the queue, and a later arrival has released it
        assert self.total(self.queue) == 1
        assert self.take().id == new.id

    @promise("15.4", "5.7")
    @requires("atomic_batches")  # otherwise the two leases may be in two parts of the queue
    def test_the_verdicts_of_a_call_are_carried_out_in_their_order(self) -> None:
        # Given two leases. The first verdict enqueues a job, and the second verdict releases the same job
        self.enqueue_all(b"a", b"b", ttr=LONG)
        one, other = self.reserve()
        job = self.new(b"new", terms=Terms(2))
        self.settle(
            self.verdict("ack", one, self.add(job), self.step(job.id, "a")),
            self.verdict("ack", other, self.step(job.id, "b")),
        )
        # Then both arrivals count
        assert self.state(job.id) is State.READY

    @promise("15.4", "5.7")
    @requires("atomic_batches")  # otherwise the two leases may be in two parts of the queue
    def test_a_verdict_can_arrive_at_a_job_that_an_earlier_one_of_the_call_dooms(self) -> None:
        self.enqueue_all(b"a", b"b", ttr=LONG)
        one, other = self.reserve()
        job_id = self.held(2)
        self.settle(
            self.verdict("bury", one, self.step(job_id, "a", doom="a has failed")),
            self.verdict("ack", other, self.step(job_id, "b", doom="b has failed")),
        )
        assert self.take().doomed == "a has failed"

    @promise("15.4", "3.4")
    @requires("total_order")
    def test_jobs_that_steps_enqueue_go_in_the_order_of_the_steps(self) -> None:
        # Given a job, and two verdicts whose steps enqueue more jobs
        self.enqueue_all(b"x", b"y", ttr=LONG)
        one, other = self.reserve()
        self.enqueue(b"0")
        self.settle(
            self.verdict("ack", one, *(self.add(self.new(b"%d" % number)) for number in (1, 2, 3))),
            self.verdict("ack", other, *(self.add(self.new(b"%d" % number)) for number in (4, 5))),
        )
        # Then the jobs are handed out in the order of their enqueues
        assert self.bodies() == [b"0", b"1", b"2", b"3", b"4", b"5"]

    @promise("15.4", "15.1")
    def test_verdicts_of_all_kinds_go_in_one_call_with_their_steps(self) -> None:
        # Given a lease for a verdict of each kind, and a held job that waits for one arrival more than there are leases
        kinds = [kind for kind in KINDS if ("give back" not in kind or self.can.give_back) and "outcome" not in kind]
        self.enqueue_all(*[b"x"] * (len(kinds) + 1), ttr=LONG)
        *leases, plain = self.reserve()
        job_id = self.held(len(kinds) + 1)
        # When all leases are settled in one call, together with one verdict without steps
        verdicts = [
            self.verdict(kind, lease, self.step(job_id, kind)) for kind, lease in zip(kinds, leases, strict=True)
        ]
        self.settle(*verdicts[:3], Ack(plain), *verdicts[3:])
        # Then all verdicts with steps have arrived
        assert [self.now_state(lease.id) for lease in leases] == [ENDS[kind] for kind in kinds]
        assert self.peek(job_id).awaits == 1

    @promise("15.4", "15.2", "5.7")
    def test_verdicts_about_several_queues_carry_out_steps_in_each_other_s_queue(self) -> None:
        # Given leases of two queues, and a held job in each queue
        other = self.another_queue()
        consumer = self.another_consumer(self.queue, other)
        leases = [self.reserved(by=consumer), self.reserved(queue=other, by=consumer)]
        ids = [self.held(2), self.held(2, queue=other)]
        steps = [self.step(ids[0]), self.step(ids[1], queue=other)]
        moves = [self.step(ids[0], "b"), self.step(ids[1], "b", queue=other)]
        # When both leases are settled in one call, then the steps of both verdicts are carried out
        self.settle(self.verdict("ack", leases[0], *steps), self.verdict("release", leases[1], *moves), by=consumer)
        assert [self.peek(job_id, queue).state for job_id, queue in zip(ids, (self.queue, other), strict=True)] == [
            State.READY, State.READY,
        ]  # fmt: skip

    @promise("15.4", "5.9")
    def test_an_exchange_hands_out_what_its_verdicts_have_released(self) -> None:
        # Given a lease, and a held job
        lease = self.reserved()
        job_id = self.held(1, b"held")
        # When an exchange acks the lease and the ack releases the held job, then the same exchange hands out the held
        # job
        answers, leases = self.worker.exchange([self.verdict("ack", lease, self.step(job_id))], 5, 0)
        assert answers == [None]
        assert [(found.id, found.body) for found in leases] == [(job_id, b"held")]

    @promise("15.4", "5.9")
    def test_an_exchange_hands_out_what_its_verdicts_have_enqueued(self) -> None:
        lease = self.reserved()
        job = self.new(b"new")
        steps = [self.add(job), self.add(self.new(b"later", delay=LONG)), self.add(self.new(b"held", terms=Terms(1)))]
        answers, leases = self.worker.exchange([self.verdict("ack", lease, *steps)], 5, 0)
        assert answers == [None]
        assert [found.id for found in leases] == [job.id]

    @promise("15.3", "5.9")
    def test_an_exchange_hands_out_nothing_that_a_refused_verdict_would_have_released(self) -> None:
        lease = self.reserved()
        self.settle(Ack(lease))
        job_id = self.held()
        answers, leases = self.worker.exchange([self.verdict("ack", lease, self.step(job_id))], 5, 0)
        assert [type(answer) for answer in answers] == [LeaseLost]
        assert leases == []
        assert self.state(job_id) is State.HELD

    @promise("15.4", "5.9", "3.2")
    def test_an_exchange_that_waits_hands_out_what_its_verdicts_have_released(self) -> None:
        lease = self.reserved()
        job_id = self.held(1, b"held")
        exchange = partial(
            self.worker.exchange, [self.verdict("ack", lease, self.step(job_id))], 1, 3 * self.harness.patience
        )
        answers, leases = self.woken(self.background(exchange))
        assert (answers, [found.id for found in leases]) == ([None], [job_id])

    # --- without a verdict ---

    @promise("15.5")
    def test_carry_out_carries_out_all_steps(self) -> None:
        # Given a held job in each of two queues
        other = self.another_queue()
        ids = [self.held(), self.held(queue=other)]
        new = [self.new(b"new", delay=LONG), self.new(b"new", terms=Terms(2))]
        # When steps in both queues are carried out without a verdict
        steps = [self.step(ids[0]), self.add(new[0]), self.step(ids[1], queue=other), self.add(new[1], other)]
        assert self.backend.carry_out(steps) is True
        # Then all steps are carried out
        assert (self.state(ids[0]), self.peek(ids[1], other).state) == (State.READY, State.READY)
        assert (self.state(new[0].id), self.peek(new[1].id, other).state) == (State.DELAYED, State.HELD)
        assert self.backend.relay([self.queue, other]) == 0

    @promise("15.5", "15.4")
    def test_the_steps_of_carry_out_are_carried_out_in_their_order(self) -> None:
        right, wrong = self.new(b"right", terms=Terms(1)), self.new(b"wrong", terms=Terms(1))
        steps = [self.step(wrong.id), self.add(wrong), self.add(right), self.step(right.id)]
        assert self.backend.carry_out(steps) is True
        assert (self.state(right.id), self.state(wrong.id)) == (State.READY, State.HELD)

    @promise("15.5", "15.7")
    @requires("client_ids")
    def test_carry_out_can_be_repeated(self) -> None:
        # Given steps that were carried out
        job_id, other = self.held(3), self.another_queue()
        job = self.new(b"new", terms=Terms(2))
        steps = [
            self.step(job_id, expect=1), self.add(job), self.step(job.id), self.add(self.new(id=job.id), other),
        ]  # fmt: skip
        assert self.backend.carry_out(steps) is True
        # When the same steps are carried out again, then nothing changes
        assert self.backend.carry_out(steps) is True
        assert (self.peek(job_id).awaits, self.peek(job.id).awaits) == (3, 1)
        assert (self.held_count(), self.total(self.queue), self.total(other)) == (2, 2, 1)

    @promise("15.5", "15.2")
    def test_relay_of_queues_without_steps_returns_0(self) -> None:
        self.enqueue()
        assert self.backend.relay([self.queue, self.another_queue()]) == 0
        assert self.backend.relay([]) == 0
        assert self.counts() == (1, 0, 0, 0)

    @promise("15.5", "9.4")
    def test_steps_leave_no_queue_behind(self) -> None:
        # Given steps in queues that have no job afterwards
        other = self.another_queue()
        sender = self.reserved()
        self.settle(self.verdict("ack", sender, self.step("no-such-job", queue=other)))
        assert self.backend.carry_out([self.step("no-such-job"), self.step("no-such-job", queue=other)]) is True
        # Then the queues without jobs are not named
        assert [name for name in self.backend.queues() if name in self.harness.handed_out] == []

    # --- too large ---

    @promise("15.6")
    @pytest.mark.parametrize("kind", [*KINDS, "carry_out"])
    @pytest.mark.parametrize("is_elsewhere", [False, True], ids=["same queue", "other queue"])
    def test_a_job_that_is_too_large_is_refused_with_all_of_the_call(self, kind: str, is_elsewhere: bool) -> None:
        # Given a body that is one byte over the limit
        limit = self.modest_limit()
        large = self.new(b"x" * (limit + 1))
        where = self.another_queue() if is_elsewhere else self.queue
        self._refuses(kind, self.add(large, where), limit)

    @promise("15.6")
    @requires("notes")
    @pytest.mark.parametrize("kind", ["ack", "release", "carry_out"])
    def test_a_note_that_is_too_large_is_refused_with_all_of_the_call(self, kind: str) -> None:
        limit = self.modest_limit()
        self._refuses(kind, Put(self.queue, "key", b"x" * (limit + 1)), limit)
        assert self.backend.note(self.queue, "key") is None

    @promise("15.6")
    def test_the_largest_job_of_a_step_is_stored_whole(self) -> None:
        body = b"\xa5" * self.modest_limit()
        sender = self.reserved()
        self.settle(self.verdict("ack", sender, self.add(self.new(body))))
        assert self.take().body == body

    @promise("15.6", "16.1")
    @requires("notes")
    def test_the_largest_note_is_stored_whole(self) -> None:
        value = b"\xa5" * self.modest_limit()
        assert self.backend.carry_out([Put(self.queue, "key", value)]) is True
        note = self.backend.note(self.queue, "key")
        assert note is not None
        assert note.value == value

    def _refuses(self, kind: str, too_large: Step, limit: int) -> None:
        # Given two leases, and several steps, one of which is too large
        self.enqueue_all(b"a", b"b", ttr=LONG)
        one, other = self.reserve()
        job_id, steps = self._steps()
        # When the steps are carried out, then the call raises PayloadTooLarge
        call: Callable[[], object] = partial(self.backend.carry_out, [*steps, too_large])
        if kind != "carry_out":
            verdicts = [self.verdict("ack", one, *steps), self.verdict(kind, other, *steps, too_large)]
            call = partial(self.worker.settle, verdicts)
        with pytest.raises(PayloadTooLarge) as refusal:
            call()
        assert (refusal.value.size_bytes, refusal.value.limit_bytes) == (limit + 1, limit)
        # And no part of the call was carried out
        self._assert_untouched(job_id, reserved=2)
        self.settle(Ack(one), Ack(other))

    # --- internals ---

    def _steps(self) -> tuple[str, list[Step]]:
        """A held job, and steps that would change the held job and enqueue other jobs."""
        self._other = self.another_queue()
        job_id = self.held(2)
        return job_id, [
            self.step(job_id), self.step(job_id, "b", doom="why"), self.add(self.new(b"new")),
            self.add(self.new(b"new"), self._other),
        ]  # fmt: skip

    def _assert_untouched(self, job_id: str, *, ready: int = 0, reserved: int = 0) -> None:
        """Fail if a step of ``_steps`` was carried out. *ready*, *reserved*: how many other jobs of the test are ready
        and reserved."""
        record = self.peek(job_id)
        assert (record.state, record.awaits) == (State.HELD, 2)
        assert (self.counts(), self.held_count()) == ((ready, 0, reserved, 0), 1)
        assert self.total(self._other) == 0
        assert self.backend.relay([self.queue]) == 0
        assert self.total(self._other) == 0


@requires("holds", "inspection")
class OneStepTests(_Steps):
    """What other clients see while a call's steps are carried out: either all steps or none."""

    @promise("15.1", "11.4")
    @requires("atomic_batches", "one_step")
    def test_an_ack_is_never_seen_without_its_arrival_nor_its_arrival_without_the_ack(self) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a lease, a held job, and an observer that peeks at both jobs until the first job is gone
            lease, job_id = self.reserved(), self.held()
            watching = self.background(partial(self.watch, observer, lease.id, job_id, self.queue))
            # When the leased job is acked and arrives at the held job, then the observer sees both changes at the same
            # time
            self.settle(self.verdict("ack", lease, self.step(job_id)))
            watching.result(HANGS)
            self.settle(Ack(self.take()))

    @promise("15.1", "15.5", "11.4")
    @requires("atomic_batches")
    def test_the_steps_of_carry_out_are_seen_together(self) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given two held jobs, and an observer
            one, other = self.held(), self.held()

            def watch(one: str = one, other: str = other) -> None:
                for first, second in itertools.cycle(((one, other), (other, one))):
                    was_released = observer.peek(self.queue, first).state is not State.HELD
                    is_released = observer.peek(self.queue, second).state is not State.HELD
                    assert is_released or not was_released, "an observer must see both steps or none, saw one of them"
                    if was_released:
                        return

            # When one call arrives at both held jobs, then the observer sees both jobs released at the same time
            watching = self.background(watch)
            assert self.backend.carry_out([self.step(one), self.step(other)]) is True
            watching.result(HANGS)
            self.settle(*map(Ack, self.reserve()))

    @promise("15.1", "15.5", "16.2", "11.4")
    @requires("notes", "atomic_batches")
    def test_a_step_is_never_seen_without_the_note_of_its_call(self) -> None:
        observer = self.another_backend()
        for at in range(self.harness.rounds):
            # Given a call that changes a note and enqueues a job, under a condition
            version = self._version("key")
            job = self.new()

            def watch(job_id: str = job.id, value: bytes = b"%d" % at) -> None:
                while True:
                    note = observer.note(self.queue, "key")
                    was_put = note is not None and note.value == value
                    is_there = self.is_there(job_id, observer)
                    assert is_there or not was_put, "the note was changed, and the job is not there"
                    was_there = self.is_there(job_id, observer)
                    note = observer.note(self.queue, "key")
                    assert not was_there or (note is not None and note.value == value), "the job is there, not the note"
                    if was_put:
                        return

            # When the call is carried out, then the observer sees both changes at the same time
            watching = self.background(watch)
            steps = [self.add(job), Put(self.queue, "key", b"%d" % at)]
            assert self.backend.carry_out(steps, when=[Version(self.queue, "key", version)]) is True
            watching.result(HANGS)

    @promise("15.1", "4.4", "11.4")
    @requires("portable_leases", "management")
    def test_of_two_holders_of_one_job_only_the_accepted_one_carries_out_its_steps(self) -> None:
        for _ in range(self.harness.rounds):
            # Given a lease. Two verdicts about the job are sent at the same time, and each verdict has its own steps
            lease = self.reserved()
            ids = [self.held(), self.held()]
            consumers = [self.another_consumer(backend=self.another_backend()) for _ in ids]
            works = [
                partial(consumer.settle, [self.verdict(kind, lease, self.step(job_id))])
                for consumer, job_id, kind in zip(consumers, ids, ("ack", "bury"), strict=True)
            ]
            answers = together(works)
            # Then only the steps of the accepted verdict are carried out
            accepted = [answer == [None] for answer in answers]
            assert sorted(accepted) == [False, True]
            assert [self.state(job_id) is State.READY for job_id in ids] == accepted
            assert self.is_there(lease.id) is accepted[1]
            for job_id in (*ids, lease.id):
                if self.is_there(job_id):
                    self.backend.delete(self.queue, job_id)

    @promise("15.2", "15.4", "11.4")
    def test_steps_to_and_fro_between_queues_all_happen(self) -> None:
        # Given two queues with jobs. In each queue, a held job waits for all jobs of the other queue
        other = self.another_queue()
        count = 20
        pairs = [(self.queue, other), (other, self.queue)]
        held = {queue: self.held(2 * count, b"last", queue=queue, ttr=LONG) for queue, _ in pairs}
        for queue, _ in pairs:
            self.enqueue_all(*[b"member"] * count, queue=queue, ttr=LONG)
        consumers = [self.another_consumer(queue, backend=self.another_backend()) for queue, _ in pairs for _ in (1, 2)]

        def work(at: int) -> int:
            queue, far = pairs[at // 2]
            done = 0
            while leases := consumers[at].reserve(3, 0):
                self.settle(*(self._acked(lease, queue, far, held) for lease in leases if lease.body == b"member"),
                            by=consumers[at])  # fmt: skip
                done += sum(lease.body == b"member" for lease in leases)
            return done

        # When consumers of both queues ack the jobs at the same time, each job with steps in both queues
        done = sum(together([partial(work, at) for at in range(len(consumers))]))
        # Then no step is lost, and no step counts twice
        assert done == 2 * count
        assert self.backend.relay([self.queue, other]) == 0
        assert [self.held_count(queue) for queue, _ in pairs] == [0, 0]
        assert sum(self.total(queue) for queue, _ in pairs) == 2

    def _acked(self, lease: Lease, queue: str, far: str, held: dict[str, str]) -> Ack:
        near = [self.step(held[queue], lease.id, queue=queue), self.step(held[far], lease.id, queue=far)]
        return Ack(lease, After(steps=tuple(near)))

    def _version(self, key: str) -> str:
        note = self.backend.note(self.queue, key)
        return "" if note is None else note.version


@requires("one_step_everywhere", "holds", "inspection")
class OneStepEverywhereTests(_Steps):
    """What other clients see while steps in several queues are carried out."""

    @promise("15.1", "11.4")
    def test_an_ack_is_never_seen_without_its_arrival_in_another_queue(self) -> None:
        observer = self.another_backend()
        other = self.another_queue()
        consumer = self.another_consumer(other)
        for _ in range(self.harness.rounds):
            lease, job_id = self.reserved(), self.held(queue=other)
            watching = self.background(partial(self.watch, observer, lease.id, job_id, other))
            self.settle(self.verdict("ack", lease, self.step(job_id, queue=other)))
            watching.result(HANGS)
            self.settle(Ack(self.take(by=consumer)), by=consumer)

    @promise("15.5", "11.4")
    @requires("notes")
    def test_the_steps_of_carry_out_in_several_homes_are_seen_together(self) -> None:
        observer = self.another_backend()
        homes = [self.queue, self.another_queue()]
        for at in range(self.harness.rounds):
            value = b"%d" % at

            def watch(value: bytes = value) -> None:
                for first, second in itertools.cycle(((0, 1), (1, 0))):
                    was_put = self._value(observer, homes[first]) == value
                    is_put = self._value(observer, homes[second]) == value
                    assert is_put or not was_put, "both notes must change or none, but one of them changed"
                    if was_put:
                        return

            # When notes of two queues are changed in one call, then an observer sees both changes at the same time
            watching = self.background(watch)
            assert self.backend.carry_out([Put(home, "key", value) for home in homes]) is True
            watching.result(HANGS)

    def _value(self, observer: Backend, home: str) -> bytes | None:
        note = observer.note(home, "key")
        return None if note is None else note.value
