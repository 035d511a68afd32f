"""Unique jobs: the keys of jobs, and enqueues of a job whose key another job has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import (
    PRIORITY_DEFAULT,
    STORED_STATES,
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Enqueue,
    GiveBack,
    NewJob,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
)
from multiq.conformance.case import LONG, Topic, promise, requires
from multiq.conformance.threads import together
from multiq.errors import UniqueTaken

if TYPE_CHECKING:
    from multiq.backend import Lease

KEY = b"\x00key\xff" + bytes(range(27))
#: Different keys. A collation, a pattern or trimming would treat some of these keys as equal.
KEYS = [
    b"a", b"A", b"a ", b" a", b"a\0", b"a\0\0", b"\0", b"a\n", b"\xe1", b"\xc3\xa1", b"*", b"%", b"_", b"a%", b"[a]",
    b"\\", b"'", b'"', b"1", b"01", b"1.0", b"nil", b"\xff" * 64, b"\xff" * 63, bytes(32), bytes(31) + b"\1",
]  # fmt: skip
UNTIL = ("gone", "buried", "reserved")
#: For each ``until`` and state: whether a job in this state has its key.
HAS_KEY = {
    (until, state): until == "gone"
    or (until == "buried" and state is not State.BURIED)
    or (until == "reserved" and state not in {State.RESERVED, State.BURIED})
    for until in UNTIL
    for state in STORED_STATES
}
#: Ways in which a job ends.
ENDS = ("ack", "delete", "delete_many", "purge", "purge delayed", "purge buried", "ack after lease end")


class _UniqueTopic(Topic):
    def unique(self, body: bytes = b"x", key: bytes = KEY, **options: Any) -> NewJob:
        """Make a job with a key. *options*: fields of ``UniqueKey``, ``Terms`` and ``NewJob``."""
        own = {name: options.pop(name) for name in ("until", "on_conflict", "hold", "max_wait") if name in options}
        return self.new(body, terms=Terms(options.pop("awaits", 0), UniqueKey(key, **own)), **options)

    def add(self, body: bytes = b"x", key: bytes = KEY, queue: str | None = None, **options: Any) -> str:
        """Enqueue a job with a key. Returns the id that the enqueue returned."""
        (job_id,) = self.backend.enqueue(queue or self.queue, [self.unique(body, key, **options)])
        return job_id

    def given_unique(self, state: State, body: bytes = b"x", **options: Any) -> str:
        """Enqueue a job with a key, and move the job to *state*. The queue must have no other ready job."""
        if state is State.DELAYED:
            return self.add(body, **{"delay": LONG, **options})
        if state is State.HELD:
            self.need("holds")
            return self.add(body, awaits=1, **options)
        job_id = self.add(body, **options)
        if state in {State.RESERVED, State.BURIED}:
            lease = self.take()
            assert lease.id == job_id
            if state is State.BURIED:
                self.settle(Bury(lease))
        return job_id

    def total(self) -> int:
        return sum(number or 0 for number in (*self.counts(), self.held_count()))

    def meets(self, job_id: str, **options: Any) -> None:
        """Check that an enqueue with the key adds no job, and returns *job_id*."""
        before = self.total()
        assert self.add(b"other", **options) == job_id
        assert self.total() == before

    def is_free(self, **options: Any) -> str:
        """Check that an enqueue with the key adds a job. Returns its id."""
        before, job = self.total(), self.unique(b"other", **options)
        assert self.backend.enqueue(self.queue, [job]) == [job.id]
        assert self.total() == before + 1
        return job.id


@requires("unique", "inspection", "management")
class UniqueTests(_UniqueTopic):
    # --- keys ---

    @promise("18.1", "18.2", "18.5")
    @pytest.mark.parametrize("on_conflict", ["keep", "replace"])
    @pytest.mark.parametrize("state", list(STORED_STATES), ids=str)
    @pytest.mark.parametrize("until", UNTIL)
    def test_a_job_has_its_key_until_the_state_that_until_names(
        self, until: str, state: State, on_conflict: str
    ) -> None:
        # Given a job with a key, in some state
        job_id = self.given_unique(state, b"first", until=until, ttr=LONG)
        # When another job with the key is enqueued, then it is added only if the first job no longer has the key
        if not HAS_KEY[until, state]:
            self.is_free(on_conflict=on_conflict, delay=LONG)
            assert self.peek(job_id).body == b"first"
            return
        self.meets(job_id, on_conflict=on_conflict, delay=LONG, until=until)
        is_replaced = on_conflict == "replace" and state not in {State.RESERVED, State.BURIED}
        record = self.peek(job_id)
        assert record.body == (b"other" if is_replaced else b"first")
        changed = {State.READY: State.DELAYED}.get(state, state) if is_replaced else state
        assert record.state is changed

    @promise("18.1")
    def test_keys_are_the_same_only_if_all_their_bytes_are(self) -> None:
        # Given a job for each of many keys that are easily mistaken for each other
        ids = [self.add(key=key) for key in KEYS]
        # Then all jobs were added, and an enqueue with a key returns the id of the job that has the key
        assert len({*ids}) == len(KEYS)
        assert [self.add(key=key) for key in KEYS] == ids
        assert self.total() == len(KEYS)

    @promise("18.1", "11.5")
    def test_a_key_belongs_to_its_queue(self) -> None:
        other = self.another_queue()
        job_id = self.add()
        assert self.add(queue=other) != job_id
        assert self.counts(other)[0] == 1

    @promise("18.1")
    def test_jobs_without_a_key_do_not_meet_a_key(self) -> None:
        self.add()
        self.enqueue_all(b"x", b"x")
        assert self.counts()[0] == 3

    @promise("18.1", "2.2")
    def test_a_call_can_have_jobs_with_keys_and_jobs_without(self) -> None:
        # Given a job with a key
        there = self.add(b"there", KEYS[0])
        # When one call has jobs with this key, with other keys, twice with one key, and without a key
        jobs = [
            self.new(b"plain"), self.unique(b"met", KEYS[0]), self.unique(b"new", KEYS[1]),
            self.unique(b"same call", KEYS[1]), self.new(b"late", delay=LONG), self.unique(b"third", KEYS[2]),
        ]  # fmt: skip
        ids = self.backend.enqueue(self.queue, jobs)
        # Then each id is the id of the job that has the key
        assert ids == [jobs[0].id, there, jobs[2].id, jobs[2].id, jobs[4].id, jobs[5].id]
        assert self.in_line(self.bodies(), [b"there", b"plain", b"new", b"third"])

    @promise("18.1", "18.5")
    def test_a_later_job_of_a_call_can_replace_an_earlier_one(self) -> None:
        jobs = [self.unique(b"%d" % number, on_conflict="replace") for number in range(3)]
        assert self.backend.enqueue(self.queue, jobs) == [jobs[0].id] * 3
        assert self.bodies() == [b"2"]

    @promise("18.1", "3.6")
    @pytest.mark.parametrize("on_conflict", ["keep", "replace"])
    def test_producers_at_the_same_time_add_one_job(self, on_conflict: str) -> None:
        backends = [self.backend, self.another_backend()]
        for number in range(5):
            # When several producers enqueue jobs with one key at the same time
            key = b"race %d" % number
            jobs = [self.unique(b"%d" % at, key, on_conflict=on_conflict) for at in range(6)]
            ids = together(
                [lambda at=at, job=job: backends[at % 2].enqueue(self.queue, [job])[0] for at, job in enumerate(jobs)]  # type: ignore[misc]
            )
            # Then all producers get the id of the job that was added
            assert len({*ids}) == 1
            assert self.counts()[0] == number + 1

    # --- until ---

    @promise("18.2")
    @pytest.mark.parametrize("how", ["release", "release late", "give_back", "abandon", "touch", "lease end", "kick"])
    @pytest.mark.parametrize("until", ["gone", "buried"])
    def test_no_other_event_takes_the_key_from_a_job(self, until: str, how: str) -> None:
        # Given a reserved job with a key
        ttr = self.short_ttr if how == "lease end" else LONG
        job_id = self.given_unique(State.RESERVED, until=until, ttr=ttr)
        (lease,) = self.worker.held.values()
        # When another event happens to the job
        self._pass_through(how, lease)
        # Then the job still has its key
        self.meets(job_id)

    @promise("18.2", "4.5")
    @pytest.mark.parametrize("how", ["release", "abandon", "lease end", "kick"])
    def test_a_job_that_was_reserved_once_does_not_get_its_key_back(self, how: str) -> None:
        # Given a job that has its key until it is reserved
        ttr = self.short_ttr if how == "lease end" else LONG
        self.given_unique(State.RESERVED, until="reserved", ttr=ttr)
        (lease,) = self.worker.held.values()
        # When the job waits again, then its key is free
        self._pass_through(how, lease)
        self.is_free()

    @promise("18.2", "5.5")
    @requires("give_back")
    def test_a_reservation_that_was_given_back_does_not_count(self) -> None:
        job_id = self.given_unique(State.RESERVED, until="reserved")
        (lease,) = self.worker.held.values()
        self.settle(GiveBack(lease))
        self.meets(job_id)

    @promise("18.2", "5.5")
    @requires("give_back")
    def test_a_given_back_job_has_its_key_whatever_other_keys_were_taken_meanwhile(self) -> None:
        job_id = self.given_unique(State.RESERVED, until="reserved")
        for number in range(5):
            self.add(b"other", b"other %d" % number, delay=LONG)
        self.settle(GiveBack(next(iter(self.worker.held.values()))))
        self.meets(job_id, until="reserved")

    @promise("18.2", "2.5")
    def test_a_job_has_its_key_past_its_due_time(self) -> None:
        job_id = self.add(delay=self.short_delay)
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        self.meets(job_id)
        assert self.take().id == job_id
        self.meets(job_id)

    @promise("18.2")
    def test_a_job_has_its_key_past_a_minute(self) -> None:
        if self.harness.real_time:
            self.not_tried("its clock cannot be moved by minutes")
        job_id = self.add(delay=2 * LONG)
        self.harness.advance(LONG)
        self.meets(job_id)

    # --- keys without a job ---

    @promise("18.3", "8.4")
    @pytest.mark.parametrize("how", ENDS)
    def test_the_key_of_a_job_that_is_gone_is_free(self, how: str) -> None:
        # Given a job that had a key and was deleted or acked
        self._end(how)
        # Then the key is free, even if the queue was never empty
        job_id = self.is_free()
        self.meets(job_id)

    @promise("18.3")
    @pytest.mark.parametrize("how", ENDS)
    def test_the_key_of_a_job_that_is_gone_is_free_in_a_queue_with_jobs(self, how: str) -> None:
        self.enqueue(b"stays", delay=2 * LONG, priority=1024)
        self.given(State.BURIED, b"stays too")
        self._end(how, has_others=True)
        job_id = self.is_free()
        self.meets(job_id)

    @promise("18.3", "8.4")
    @requires("client_ids")
    def test_a_later_job_of_the_same_id_does_not_have_the_key(self) -> None:
        # Given a job whose id was the id of an earlier job with a key
        job_id = self.add()
        self.backend.delete(self.queue, job_id)
        self.enqueue(b"plain", id=job_id)
        # Then the key is free
        assert self.is_free() != job_id
        assert self.peek(job_id).unique_key in {None, b""}

    # --- held by time ---

    @promise("18.4")
    @pytest.mark.parametrize("how", ["ready", "reserved", "buried", *ENDS])
    def test_a_key_is_held_by_time_whatever_becomes_of_its_job(self, how: str) -> None:
        # Given a job whose key is held
        if how in STORED_STATES:
            job_id = self.given_unique(State(how), until="reserved", hold=LONG)
        else:
            job_id = self._end(how, hold=LONG, until="reserved")
        # Then an enqueue with the key returns the job's id, and changes nothing
        self.meets(job_id, on_conflict="keep")

    @promise("18.4")
    def test_a_held_key_is_free_when_its_time_is_over(self) -> None:
        # Given a job that has ended, and whose key is held for a while
        job_id = self.add(hold=self.short_delay)
        over = self.in_(self.short_delay + self.can.delay_resolution)
        self.settle(Ack(self.take()))
        self.meets(job_id)
        # When the key's time is over, then the key is free
        self.harness.past(over)
        self.is_free()

    @promise("18.4", "18.2")
    def test_a_job_has_its_key_longer_than_the_key_is_held(self) -> None:
        # Given a job that still exists when the time of its key is over
        job_id = self.add(hold=self.short_delay)
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        self.meets(job_id)

    @promise("18.4")
    def test_an_enqueue_that_meets_a_held_key_does_not_prolong_it(self) -> None:
        job_id = self.add(hold=self.short_delay)
        over = self.in_(self.short_delay + self.can.delay_resolution)
        self.settle(Ack(self.take()))
        self.meets(job_id, hold=LONG)
        self.meets(job_id, hold=LONG, on_conflict="replace")
        self.harness.past(over)
        self.is_free()

    # --- repetitions ---

    @promise("18.7", "2.4")
    @requires("client_ids")
    @pytest.mark.parametrize("on_conflict", ["keep", "replace"])
    @pytest.mark.parametrize("state", [*STORED_STATES, "gone"], ids=str)
    def test_a_repeated_enqueue_adds_no_second_job(self, state: State | str, on_conflict: str) -> None:
        # Given a job that was enqueued with a key. The job's key is held for a while
        job = self.unique(b"x", hold=LONG, on_conflict=on_conflict, awaits=int(state == State.HELD))
        self.backend.enqueue(self.queue, [job])
        if state not in {State.READY, State.HELD, State.DELAYED}:
            lease = self.take()
            if state != State.RESERVED:
                self.settle(Bury(lease) if state == State.BURIED else Ack(lease))
        before = self.total()
        # When the same enqueue is repeated, then its answer is the job's own id, and nothing changes
        assert self.backend.enqueue(self.queue, [job]) == [job.id]
        assert self.total() == before

    @promise("18.7", "18.1")
    @requires("client_ids")
    def test_a_repeated_enqueue_that_met_a_key_adds_no_job(self) -> None:
        there, job = self.add(), self.unique()
        assert self.backend.enqueue(self.queue, [job]) == [there]
        assert self.backend.enqueue(self.queue, [job]) == [there]
        assert self.counts()[0] == 1

    # --- transactions ---

    @promise("18.8", "2.7")
    @requires("transactional_enqueue")
    def test_a_rollback_frees_the_key(self) -> None:
        # Given an enqueue with a key in a transaction that is rolled back
        self.counts()
        with self.transaction() as connection:
            job = self.unique()
            assert self.backend.enqueue(self.queue, [job], connection=connection) == [job.id]
            connection.rollback()
        # Then the key is free
        job_id = self.is_free()
        self.meets(job_id)

    @promise("18.8", "18.3", "2.7")
    @requires("transactional_enqueue")
    def test_a_rollback_leaves_the_job_that_had_the_key(self) -> None:
        # Given a job with a key, and a transaction that replaces this job, takes over another key, and is rolled back
        job_id = self.add(b"first")
        gone = self.add(key=b"gone", hold=0)
        self.backend.delete(self.queue, gone)
        with self.transaction() as connection:
            assert self.backend.enqueue(
                self.queue, [self.unique(b"new", on_conflict="replace"), self.unique(key=b"gone")],
                connection=connection,
            )[0] == job_id  # fmt: skip
            connection.rollback()
        # Then the job is unchanged, and the other key is free
        assert self.peek(job_id).body == b"first"
        self.meets(job_id)
        self.is_free(key=b"gone")

    @promise("18.8", "2.7")
    @requires("transactional_enqueue")
    def test_a_committed_key_is_taken(self) -> None:
        self.counts()
        with self.transaction() as connection:
            (job_id,) = self.backend.enqueue(self.queue, [self.unique()], connection=connection)
            connection.commit()
        self.meets(job_id)

    @promise("18.8", "2.7")
    @requires("transactional_enqueue")
    @pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
    def test_a_second_writer_of_a_key_waits_for_the_end_of_the_transaction(self, commits: bool) -> None:
        self.counts()
        other = self.another_backend()
        with self.transaction() as connection:
            # Given a transaction that has taken a key, and a second writer of the same key
            first, second = self.unique(b"first"), self.unique(b"second")
            self.backend.enqueue(self.queue, [first], connection=connection)
            writer = self.background(lambda: other.enqueue(self.queue, [second]))
            # When the transaction ends
            if commits:
                connection.commit()
            else:
                connection.rollback()
            # Then the second writer gets the id of the first job, or adds its own job
            assert self.woken(writer) == [(first if commits else second).id]
        assert self.bodies() == [b"first" if commits else b"second"]

    # --- steps ---

    @promise("18.9", "15.1")
    @requires("holds")
    @pytest.mark.parametrize("how", ["verdict", "carry_out"])
    def test_a_step_with_a_key_that_is_taken_adds_no_job(self, how: str) -> None:
        # Given a job with a key
        self.enqueue(priority=0)
        lease = self.take()
        job_id = self.add(b"first")
        # When steps enqueue a job with this key and a job with another key
        steps = (
            Enqueue(self.queue, self.unique(b"met")), Enqueue(self.queue, self.unique(b"new", b"other key")),
            Enqueue(self.queue, self.unique(b"again", b"other key")),
        )  # fmt: skip
        if how == "verdict":
            self.settle(Ack(lease, After(steps=steps)))
        else:
            assert self.backend.carry_out(steps) is True
        # Then only the job with the other key is added
        self.meets(job_id)
        assert self.in_line(self.bodies(), [b"first", b"new"])

    @promise("18.9", "15.2")
    @requires("holds")
    def test_a_step_in_another_queue_meets_the_keys_there(self) -> None:
        # Given a job with a key in another queue
        other = self.another_queue()
        self.add(b"there", queue=other)
        self.enqueue()
        # When verdicts enqueue jobs with this key, and with another key, in the other queue
        steps = (Enqueue(other, self.unique(b"met")), Enqueue(other, self.unique(b"new", b"another")))
        self.settle(Ack(self.take(), After(steps=steps)))
        self.backend.relay([self.queue])
        # Then one job is added
        assert self.in_line(self.bodies(by=self.another_consumer(other)), [b"there", b"new"])

    @promise("18.9", "18.3", "15.4")
    @requires("holds")
    def test_a_step_can_enqueue_a_successor_with_the_key_of_its_own_job(self) -> None:
        # Given a running job with a key
        self.add(b"first")
        lease = self.take()
        # When the job's ack has a step that enqueues a job with the same key, then the new job is added
        job = self.unique(b"next")
        self.settle(Ack(lease, After(steps=(Enqueue(self.queue, job),))))
        self.meets(job.id)
        assert self.bodies() == [b"next"]

    @promise("18.9", "15.4")
    @requires("holds", "atomic_batches")  # without atomic_batches, the two jobs may be in two parts of the queue
    def test_a_step_comes_before_the_verdicts_after_it(self) -> None:
        # Given two running jobs, the second of which has a key
        self.enqueue()
        other = self.take()
        self.add(b"second")
        lease = self.take()
        # When the first job's verdict enqueues a job with the second job's key, and then the second job is acked
        steps = (Enqueue(self.queue, self.unique(b"met")),)
        self.settle(Ack(other, After(steps=steps)), Ack(lease))
        # Then the step has found the second job, which still had its key
        assert self.total() == 0
        # And if the second job is acked first, the step adds its job
        self.enqueue()
        other = self.take()
        self.add(b"second")
        self.settle(Ack(self.take()), Ack(other, After(steps=steps)))
        assert self.bodies() == [b"met"]

    @promise("18.7", "2.4")
    @requires("atomic_batches")  # otherwise the two jobs may be in two parts of the queue
    def test_an_id_that_a_call_names_again_with_a_key_meets_its_own_job(self) -> None:
        self.need("client_ids")
        # Given a job with a key
        owner = self.add(b"owner")
        # When a call has a job without a key, and a second job with the same id and the existing job's key
        job = self.new(b"first")
        again = self.unique(b"again", id=job.id, on_conflict="replace")
        # Then the second job changes nothing
        assert self.backend.enqueue(self.queue, [job, again]) == [job.id, job.id]
        assert self.peek(owner).body == b"owner"
        assert self.peek(job.id).body == b"first"

    @promise("18.9", "15.4")
    @requires("holds")
    def test_steps_with_and_without_keys_belong_to_verdicts_of_one_call(self) -> None:
        # Given two running jobs
        leases = [self.take() for _ in self.enqueue_all(b"a", b"b")]
        # When one step adds a job with a key, and the other job's step adds a job without a key
        plain = self.new(b"plain")
        steps = [Enqueue(self.queue, self.unique(b"unique")), Enqueue(self.queue, plain)]
        self.settle(*[Ack(lease, After(steps=(step,))) for lease, step in zip(leases, steps, strict=True)])
        # Then both jobs are added
        assert sorted(self.bodies()) == [b"plain", b"unique"]

    # --- looking ---

    @promise("18.10", "9.1", "9.2")
    def test_peek_and_listings_show_the_key(self) -> None:
        job_id, plain = self.add(until="reserved"), self.enqueue(delay=LONG)
        assert self.peek(job_id).unique_key == KEY
        assert not self.peek(plain).unique_key
        lease = self.take()
        assert self.peek(job_id).unique_key == KEY
        self.settle(Bury(lease))
        if self.can.lists_jobs:
            (record,) = self.backend.jobs(self.queue, State.BURIED).jobs
            assert record.unique_key == KEY

    @promise("18.11")
    def test_a_queue_that_has_only_a_held_key_is_empty(self) -> None:
        self.settle(*[Ack(self.take()) for _ in [self.add(hold=LONG)]])
        assert self.queue not in self.backend.queues()
        assert self.total() == 0
        if self.can.purging:
            assert self.backend.purge(self.queue, [State.READY, State.DELAYED, State.BURIED]) == 0

    # --- helpers ---

    def _pass_through(self, how: str, lease: Lease) -> None:
        if how == "release":
            self.settle(Release(lease))
        elif how == "release late":
            self.settle(Release(lease, delay=LONG, priority=3 if self.can.priorities else None))
        elif how == "give_back":
            self.settle(GiveBack(lease))
        elif how == "abandon":
            self.need("portable_leases")
            self.settle(Abandon(lease))
        elif how == "touch":
            self.settle(Touch(lease))
        elif how == "lease end":
            self.harness.past(self.in_(self.short_ttr))
        else:
            self.settle(Bury(lease))
            self.backend.kick_job(self.queue, lease.id)

    def _end(self, how: str, *, has_others: bool = False, **options: Any) -> str:
        """Enqueue a job with a key, and let it end. Returns its id."""
        if how == "ack":
            job_id = self.given_unique(State.RESERVED, **options)
            self.settle(Ack(next(iter(self.worker.held.values()))))
        elif how == "ack after lease end":
            job_id = self.given_unique(State.RESERVED, ttr=self.short_ttr, **options)
            self.harness.past(self.in_(self.short_ttr))
            self.settle(Ack(self.take()))
        elif how in {"delete", "delete_many"}:
            job_id = self.given_unique(State.DELAYED, **options)
            if how == "delete":
                self.backend.delete(self.queue, job_id)
            else:
                assert self.backend.delete_many(self.queue, [job_id]) == [None]
        else:
            self.need("purging")
            state = {"purge": State.READY, "purge delayed": State.DELAYED, "purge buried": State.BURIED}[how]
            job_id = self.given_unique(state, **options)
            others = int(has_others and state is not State.READY)
            assert self.backend.purge(self.queue, [state]) == 1 + others
        return job_id


@requires("unique", "inspection", "management")
class UniqueReplaceTests(_UniqueTopic):
    @promise("18.5", "2.5")
    def test_a_replaced_job_takes_the_new_data(self) -> None:
        # Given a job with a key, and other jobs before and after it
        priority = 5 if self.can.priorities else PRIORITY_DEFAULT
        job_id = self.add(b"first", delay=LONG, ttr=LONG)
        # When the job with the key is replaced
        assert self.add(b"second", on_conflict="replace", ttr=2 * LONG, priority=priority) == job_id
        # Then the job has the new body, priority, ttr and due time, but keeps its own id
        lease = self.take()
        assert (lease.id, lease.body, lease.ttr) == (job_id, b"second", 2 * LONG)
        assert lease.priority == priority

    @promise("18.5", "3.7")
    def test_a_replaced_job_that_is_due_wakes_a_waiting_consumer(self) -> None:
        job_id = self.add(b"first", delay=LONG)
        waiting = self.waiting(self.another_consumer())
        self.add(b"second", on_conflict="replace")
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    @promise("18.5")
    @pytest.mark.parametrize("size", [0, 10, 5000, 70_000])
    @pytest.mark.parametrize("before", [0, 10, 5000, 70_000])
    def test_a_body_of_any_size_replaces_another(self, before: int, size: int) -> None:
        limit = self.can.max_body
        if limit is not None and max(before, size) > limit:
            self.does_not_apply("its largest body is smaller")
        job_id = self.add(b"a" * before, delay=LONG)
        for _ in range(2):
            assert self.add(b"b" * size, on_conflict="replace", delay=LONG) == job_id
            assert self.peek(job_id).body == b"b" * size
        self.add(b"b" * size, on_conflict="replace")
        lease = self.take()
        assert lease.body == b"b" * size
        self.settle(Ack(lease))
        assert self.total() == 0

    @promise("18.5", "13.4")
    def test_what_earlier_attempts_have_left_starts_over(self) -> None:
        # Given a job with a key. The job has failed twice, and waits for its next attempt
        job_id = self.add(ttr=LONG)
        memo = After(memo=b"memo", detail=b"detail") if self.can.memos else None
        self.settle(Release(self.take(), reason="why", after=memo))
        self.settle(Bury(self.take(), reason="why", after=memo))
        self.backend.kick_job(self.queue, job_id)
        # When the failed job is replaced
        self.add(b"new", on_conflict="replace")
        # Then the job is as if it had never been reserved
        record = self.peek(job_id)
        assert (record.attempt, record.crashes, record.kicks, record.reason) == (0, 0, 0, None)
        assert not record.memo
        assert not record.detail
        lease = self.take()
        assert (lease.body, lease.attempt, lease.crashes, lease.kicks, lease.memo) == (b"new", 1, 0, 0, b"")

    @promise("18.5", "1.2", "4.3")
    def test_a_job_whose_lease_has_ended_is_replaced(self) -> None:
        # Given a job that has a key, and whose lease has ended
        job_id = self.add(b"first", ttr=self.short_ttr)
        lease = self.take()
        self.harness.past(self.in_(self.short_ttr))
        # When the job is replaced, then it has the new body, and the old lease is refused
        assert self.add(b"second", on_conflict="replace", ttr=LONG) == job_id
        if self.can.fenced_late:
            self.refused(Ack(lease))
        again = self.take()
        assert (again.id, again.body) == (job_id, b"second")
        self.settle(Ack(again))

    @promise("18.5", "3.4", "3.5", "4.8")
    @requires("total_order", "priorities")
    def test_a_replaced_job_keeps_its_age_and_position(self) -> None:
        # Given a job with a key, and a younger job
        job_id = self.add(b"first", priority=7)
        self.harness.advance(2 * self.short_delay)
        self.enqueue(b"younger", priority=7)
        # When the first job is replaced
        self.add(b"second", on_conflict="replace", priority=7)
        # Then the replaced job goes first, and its age counts from its first enqueue
        assert self.about(self.peek(job_id).age, 2 * self.short_delay)
        assert self.bodies() == [b"second", b"younger"]

    @promise("18.5", "2.5")
    def test_each_replacement_moves_the_due_time(self) -> None:
        # Given a job with a key and a delay
        job_id = self.add(delay=LONG)
        # When the job is replaced, then its delay begins again
        for delay in (2 * LONG, 3 * LONG, LONG):
            self.harness.advance(self.short_delay)
            self.add(on_conflict="replace", delay=delay)
            assert self.about(self.peek(job_id).due_in, delay)

    @promise("18.5", "2.5")
    def test_max_wait_limits_the_due_time(self) -> None:
        # Given a job that is replaced again and again
        job_id = self.add(delay=LONG, on_conflict="replace", max_wait=1.5 * LONG)
        self.add(delay=LONG, on_conflict="replace", max_wait=1.5 * LONG)
        assert self.about(self.peek(job_id).due_in, LONG)
        # When the new due time would be too late
        self.add(delay=LONG, on_conflict="replace", max_wait=LONG / 2)
        # Then the job is due max_wait after its enqueue
        assert self.about(self.peek(job_id).due_in, LONG / 2)
        # And if max_wait has passed, the job is ready
        self.harness.past(self.in_(self.short_delay))
        self.add(b"now", delay=LONG, on_conflict="replace", max_wait=self.short_delay / 2)
        assert self.take().body == b"now"

    @promise("18.5")
    @pytest.mark.parametrize("state", [State.RESERVED, State.BURIED], ids=str)
    def test_a_reserved_or_buried_job_is_not_replaced(self, state: State) -> None:
        job_id = self.given_unique(state, b"first", ttr=LONG)
        self.meets(job_id, on_conflict="replace", delay=LONG)
        assert (self.peek(job_id).body, self.state(job_id)) == (b"first", state)
        if state is State.RESERVED:  # and the job's lease is alive
            self.settle(Ack(next(iter(self.worker.held.values()))))

    @promise("18.5", "14.1", "14.3")
    @requires("holds")
    def test_a_held_job_that_is_replaced_stays_held(self) -> None:
        # Given a held job with a key, at which one of two members has arrived
        job_id = self.add(b"first", awaits=2)
        self.arrive(job_id, "a")
        # When the held job is replaced, with a delay
        self.add(b"second", on_conflict="replace", delay=LONG)
        # Then the job waits for the other member, and its delay begins afterwards
        assert (self.state(job_id), self.peek(job_id).awaits) == (State.HELD, 1)
        self.arrive(job_id, "b")
        record = self.peek(job_id)
        assert (record.state, record.body) == (State.DELAYED, b"second")
        assert self.about(record.due_in, LONG)

    @promise("15.4", "18.9", "18.5")
    @requires("holds", "atomic_batches")  # without atomic_batches, the two steps may be in two parts of the queue
    @pytest.mark.parametrize("by", ["carry_out", "verdict"])
    def test_an_arrival_before_an_enqueue_releases_the_job_that_is_replaced(self, by: str) -> None:
        # Given a held job with a key
        self.enqueue(b"sender", ttr=LONG)
        lease = self.take()
        job_id = self.add(b"first", awaits=2)
        self.arrive(job_id, "a")
        # When steps release the job and then replace it, and its latest due time has passed
        new = self.unique(b"second", delay=LONG, on_conflict="replace", max_wait=0.0)
        steps = Arrive(self.queue, job_id, "b"), Enqueue(self.queue, new)
        if by == "verdict":
            self.settle(Ack(lease, After(steps=steps)))
        else:
            assert self.backend.carry_out(steps) is True
        # Then the replacement treats the job as not held: its delay ends at the latest due time
        record = self.peek(job_id)
        assert (record.state, record.body) == (State.READY, b"second")

    @promise("18.5", "14.5")
    @requires("holds")
    def test_a_doomed_job_that_is_replaced_is_not_doomed(self) -> None:
        job_id = self.add(b"first", awaits=1)
        self.arrive(job_id, "a", doom="why")
        self.add(b"second", on_conflict="replace")
        lease = self.take()
        assert (lease.id, lease.body, lease.doomed) == (job_id, b"second", "")

    @promise("18.5", "18.4")
    def test_a_held_key_without_a_job_replaces_nothing(self) -> None:
        job_id = self.add(b"first", hold=LONG, until="reserved")
        lease = self.take()
        self.settle(Release(lease, delay=LONG))
        # the job waits for its next attempt, but does not have its key any more: the key is only held by time
        self.meets(job_id, on_conflict="replace")
        assert self.peek(job_id).body == b"first"


@requires("unique", "inspection", "management")
class UniqueKicksTests(_UniqueTopic):
    def taken(self, **options: Any) -> tuple[str, str]:
        """Bury a job, and enqueue another job that takes its key. Returns the ids of the buried job and the other
        job."""
        buried = self.given_unique(State.BURIED, b"buried", until="buried", ttr=LONG)
        return buried, self.is_free(until="buried", **options)

    @promise("18.6", "6.4", "7.4")
    @pytest.mark.parametrize("verb", ["kick_job", "reschedule", "kick"])
    def test_a_buried_job_whose_key_is_taken_stays_buried(self, verb: str) -> None:
        # Given a buried job, and another job that has taken its key
        buried, other = self.taken()
        before = self.peek(buried)
        # When the buried job is to be made ready, then the call is refused, and changes nothing
        if verb == "kick":
            assert self.backend.kick(self.queue, 10) == 0
        else:
            with pytest.raises(UniqueTaken) as caught:
                self._make_due(verb, buried)
            assert (caught.value.queue, caught.value.job_id) == (self.queue, buried)
        after = self.peek(buried)
        assert (after.state, after.kicks, after.attempt, after.body) == (
            State.BURIED, before.kicks, before.attempt, b"buried",
        )  # fmt: skip
        self.meets(other)

    @promise("18.6", "6.2")
    @pytest.mark.parametrize("verb", ["kick_job", "reschedule", "kick"])
    def test_a_buried_job_takes_its_key_again(self, verb: str) -> None:
        # Given a buried job whose key is free
        buried = self.given_unique(State.BURIED, until="buried")
        # When the buried job is made ready or due, then it has its key
        if verb == "kick":
            assert self.backend.kick(self.queue, 10) == 1
        else:
            self._make_due(verb, buried)
        self.meets(buried)

    @promise("18.6")
    @pytest.mark.parametrize("verb", ["kick_job", "reschedule", "kick"])
    def test_a_buried_job_takes_its_key_again_after_the_other_one_is_gone(self, verb: str) -> None:
        buried, other = self.taken(delay=LONG)
        self.backend.delete(self.queue, other)
        if verb == "kick":
            assert self.backend.kick(self.queue, 10) == 1
        else:
            self._make_due(verb, buried)
        self.meets(buried)

    @promise("18.6", "6.1")
    def test_of_two_kicked_jobs_with_one_key_the_one_that_can_have_it_takes_it(self) -> None:
        # Given two buried jobs with one key. The first job lost the key when it started
        self.need("total_order")
        self.given_unique(State.BURIED, until="reserved")
        job_id = self.given_unique(State.BURIED, until="buried")
        # When both jobs are kicked in one call, then the second job has the key
        assert self.backend.kick(self.queue, 10) == 2
        self.meets(job_id)

    @promise("18.6", "6.1")
    def test_kick_goes_on_with_the_jobs_after_those_whose_key_is_taken(self) -> None:
        # Given buried jobs. The jobs that were buried first have lost their key
        self.need("total_order")
        lost = []
        for number in range(3):
            key = b"key %d" % number
            lost.append(self.given_unique(State.BURIED, key=key, until="buried"))
            self.add(key=key, delay=LONG)
        plain = [self.given(State.BURIED, b"%d" % number) for number in range(3)]
        # When some jobs are kicked, then jobs whose key is taken by another job are skipped
        assert self.backend.kick(self.queue, 2) == 2
        assert [self.state(job_id) for job_id in plain] == [State.READY, State.READY, State.BURIED]
        assert self.backend.kick(self.queue, 100) == 1
        assert self.backend.kick(self.queue, 100) == 0
        assert [self.state(job_id) for job_id in lost] == [State.BURIED] * 3

    @promise("18.6", "6.1")
    @requires("total_order")
    def test_of_two_buried_jobs_with_one_key_one_is_kicked(self) -> None:
        # Given two buried jobs with one key
        first = self.given_unique(State.BURIED, until="buried")
        second = self.given_unique(State.BURIED, until="buried")
        # When all jobs are kicked, then the job that was buried first is ready
        assert self.backend.kick(self.queue, 10) == 1
        assert [self.state(first), self.state(second)] == [State.READY, State.BURIED]
        self.meets(first)

    @promise("18.6", "18.4")
    def test_a_key_that_is_only_held_by_time_is_taken_for_a_kick(self) -> None:
        # Given a buried job. Another job has taken its key, has ended, and still holds the key by time
        buried, other = self.taken(hold=LONG)
        self.settle(Ack(self.take()))
        with pytest.raises(UniqueTaken):
            self.backend.kick_job(self.queue, buried)
        self.meets(other)

    @promise("18.6")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED], ids=str)
    def test_a_waiting_job_whose_key_is_taken_is_not_rescheduled(self, state: State) -> None:
        # Given a job that waits for its second attempt, and another job that has taken its key
        job_id = self.given_unique(State.RESERVED, until="reserved")
        (lease,) = self.worker.held.values()
        self.settle(Release(lease, delay=LONG if state is State.DELAYED else 0))
        self.is_free(delay=LONG)
        with pytest.raises(UniqueTaken):
            self.backend.reschedule(self.queue, job_id, LONG)
        assert (self.state(job_id), self.peek(job_id).attempt) == (state, 1)

    @promise("18.6", "7.1")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED], ids=str)
    def test_a_rescheduled_job_has_its_key(self, state: State) -> None:
        job_id = self.given_unique(state)
        assert self.backend.reschedule(self.queue, job_id, LONG) == job_id
        self.meets(job_id)
        self.backend.delete(self.queue, job_id)
        self.is_free()

    @promise("18.6", "18.2", "7.1")
    def test_a_rescheduled_job_has_its_key_until_it_is_reserved_again(self) -> None:
        # Given a job that had its key until it was reserved
        job_id = self.given_unique(State.BURIED, until="reserved")
        # When the job is rescheduled, then its attempts start over, and it has its key
        self.backend.reschedule(self.queue, job_id, 0)
        self.meets(job_id)
        self.take()
        self.is_free()

    @promise("18.6", "14.7")
    @requires("holds")
    def test_a_held_or_delayed_job_is_kicked_with_its_key(self) -> None:
        for state in (State.DELAYED, State.HELD):
            job_id = self.given_unique(state, key=state.encode())
            self.backend.kick_job(self.queue, job_id)
            self.meets(job_id, key=state.encode())

    def _make_due(self, verb: str, job_id: str) -> None:
        if verb == "kick_job":
            self.backend.kick_job(self.queue, job_id)
        else:
            self.backend.reschedule(self.queue, job_id, LONG)
