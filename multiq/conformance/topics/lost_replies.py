"""Lost replies: wherever the connection is cut, the operation is carried out once, and the caller's last answer is
correct.

If a caller's connection ends, the caller cannot know whether the server has received the call. For this reason, the
tests cut requests, too.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from multiq.backend import Ack, After, Arrive, Bury, Drop, Enqueue, Put, Release, State, Touch, Version
from multiq.conformance.case import ALL, LONG, VERDICTS, Topic, TrackedConsumer, promise, requires, without
from multiq.errors import BackendError, BackendUnavailable, EnqueueUncertain, JobNotFound, JobReserved
from multiq.fault_proxy import CutReply, CutRequest
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Backend, Lease, Step, Verdict
    from multiq.errors import LeaseLost
    from multiq.fault_proxy import Fault, Proxy

T = TypeVar("T")

TRIES = 5  # how often a call is made if it raises BackendUnavailable each time
AGAIN_AFTER = 0.05  # seconds between two attempts of a call


_LIMITS: dict[str, dict[str, int]] = {"jobs": {"limit": 1}}
_SEEN: dict[str, Callable[[Any, str, str], bool]] = {
    "peek": lambda job, _, job_id: (job.id, job.state, job.body) == (job_id, State.READY, b"x"),
    "jobs": lambda page, _, job_id: [job.id for job in page.jobs] == [job_id] and page.after is not None,
    "stats": lambda stats, *_: (stats.ready, stats.paused_for) == (3, None),
    "queues": lambda names, queue, _: queue in names,
}


class Cut:
    """One cut. A call that is made while ``armed`` loses its reply after *at* bytes.

    If *fault* is ``CutRequest``, the call loses its request after *at* bytes instead.
    """

    def __init__(self, proxy: Proxy, far: Backend, at: int | None, fault: type[Fault] = CutReply) -> None:
        self.proxy = proxy
        self.far = far
        self.at = at
        """If *fault* is None, nothing is cut, and the length of the reply is measured."""
        self.fault = fault
        self.size = 0
        self.sent = 0

    @contextlib.contextmanager
    def armed(self, times: int = 1) -> Iterator[None]:
        before, sent_before = self.proxy.replied, self.proxy.sent
        if self.at is not None:
            self.proxy.arm(self.fault(at=self.at, times=times))
        try:
            yield
        finally:
            self.proxy.disarm()
            self.size, self.sent = self.proxy.replied - before, self.proxy.sent - sent_before


class LostRepliesTests(Topic):
    # --- producing and consuming ---

    @promise("11.9", "2.4")
    @requires("client_ids")
    def test_an_enqueue_whose_reply_is_lost_adds_its_jobs_once(self) -> None:
        for cut in self._cuts():
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            with cut.armed():
                ids = self._insist(cut.far.enqueue, self.queue, jobs)
            assert ids == [job.id for job in jobs]
            assert self.counts() == (2, 1, 0, 0)

    @promise("2.9", "2.4", "11.9")
    @requires("client_ids")
    def test_an_enqueue_whose_replies_are_all_lost_names_the_jobs_whose_outcome_is_unknown(self) -> None:
        is_uncertain = False
        for cut in self._cuts():
            # Given a batch, while the replies to the call and to its repetitions are lost
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            error: BackendError | None = None
            try:
                with cut.armed(times=1000):
                    cut.far.enqueue(self.queue, jobs)
            except (EnqueueUncertain, BackendUnavailable) as exc:
                error = exc
            if isinstance(error, EnqueueUncertain):
                # Then each job's id is in one of the error's three lists: uncertain, accepted or unsent
                is_uncertain = True
                assert error.ids == tuple(job.id for job in error.jobs), "the ids of the jobs that may be stored"
                named = [*error.ids, *error.accepted.values(), *(job.id for job in error.unsent)]
                assert sorted(named) == sorted(job.id for job in jobs), "each job is in one of the three lists"
            elif error is not None:
                assert self.counts() == (0, 0, 0, 0), "the error says that nothing was stored, but jobs are there"
            # And when the same batch is enqueued again, then only the missing jobs are added
            assert self._insist(cut.far.enqueue, self.queue, jobs) == [job.id for job in jobs]
            assert self.counts() == (2, 1, 0, 0)
        assert is_uncertain, "no enqueue raised EnqueueUncertain"

    @promise("2.9", "11.9")
    @without("client_ids")
    def test_an_enqueue_whose_reply_is_lost_reports_which_jobs_may_be_there(self) -> None:
        for cut in self._cuts():
            jobs = [self.new(b"a"), self.new(b"b"), self.new(b"late", delay=LONG)]
            there, perhaps, unsent = len(jobs), 0, 0
            named: tuple[str, ...] = ()
            try:
                with cut.armed():
                    cut.far.enqueue(self.queue, jobs)
            except EnqueueUncertain as exc:
                there, perhaps, unsent, named = len(exc.accepted), len(exc.jobs), len(exc.unsent), exc.ids
            except BackendUnavailable:  # no job was sent
                there, unsent = 0, len(jobs)
            assert there + perhaps + unsent == len(jobs)
            assert named == (), "the ids are the backend's, so no client knows them"
            ready, delayed, *_ = self.counts()
            assert there <= (ready or 0) + (delayed or 0) <= there + perhaps

    @promise("11.9", "3.1")
    def test_a_reserve_whose_reply_is_lost_hands_out_no_more_than_was_asked_and_loses_none(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                with cut.armed():
                    leases = self._insist(consumer.reserve, 2, 0)
                assert len({lease.id for lease in leases}) == len(leases) == 2, "2 jobs of 3 were asked for"
                self._eventually_counts(1, 0, 2, 0)
                assert self._all_done(consumer, leases) == sorted(ids)

    @promise("11.9", "4.5", "4.6", "4.9")
    def test_a_reserve_whose_reply_is_lost_counts_one_attempt(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                with cut.armed():
                    leases = self._insist(consumer.reserve, 2, 0)
                assert [lease.body for lease in leases] == [b"x"] * 2
                if not self.can.disconnect_ends_lease:  # otherwise an attempt may have ended with its connection
                    assert [(lease.attempt, lease.crashes) for lease in leases] == [(1, 0)] * 2
                    assert [lease.id for lease in leases] == ids[:2] or not self.can.total_order
                self._all_done(consumer, leases)

    @promise("11.9", "3.7")
    def test_a_waiting_reserve_whose_reply_is_lost_gets_the_job_that_comes(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                with cut.armed():
                    waiting = self.background(partial(self._insist, consumer.reserve, 1, self.harness.patience))
                    time.sleep(AGAIN_AFTER)
                    job_id = self.enqueue(ttr=LONG)
                    leases = waiting.result(3 * self.harness.patience)
                assert self._all_done(consumer, leases) == [job_id]

    @promise("11.9", "5.9")
    def test_an_exchange_whose_reply_is_lost_settles_once_and_loses_no_job(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(5)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    answers, leases = self._insist(consumer.exchange, [Ack(lease) for lease in held], 2, 0)
                assert len(leases) <= 2, "2 jobs were asked for"
                done = self._answered(held, answers)
                left = self._all_done(consumer, leases)
                assert not {*done} & {*left}, "a job that was acked is handed out again"
                perhaps = {lease.id for lease in held} - {*done}  # acks that were reported as lost with the connection
                assert {*ids} - perhaps <= {*done, *left}, "a job is lost"

    # --- verdicts ---

    @promise("11.9", "5.1")
    def test_an_ack_whose_reply_is_lost_is_answered_as_it_was_carried_out(self) -> None:
        self._settled("ack", lambda _: None)

    @promise("11.9", "5.2")
    def test_a_release_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def released(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.priority, job.attempt) == (State.READY, 7, 1)
            assert self.tells(job.reason, "stale", "reasons")

        self._settled("release", released)

    @promise("11.9", "3.5")
    @requires("total_order")
    def test_a_release_whose_reply_is_lost_leaves_the_job_in_its_place(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                ids = self._put(3)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    self._insist(consumer.settle, [Release(lease) for lease in held])
                self._eventually_counts(3, 0, 0, 0)
                assert [lease.id for lease in self.reserve(3, by=self.another_consumer())] == ids

    @promise("11.9", "5.2", "2.5")
    def test_a_delayed_release_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def delayed(job_id: str) -> None:
            job = self.peek(job_id)
            assert job.state is State.DELAYED
            assert self.about(job.due_in, LONG)

        self._settled("release", delayed, lambda lease: Release(lease, delay=LONG))

    @promise("11.9", "5.3")
    def test_a_bury_whose_reply_is_lost_is_carried_out_once(self) -> None:
        def buried(job_id: str) -> None:
            job = self.peek(job_id)
            assert job.state is State.BURIED
            assert self.tells(job.kicks, 0, "durable_attempts")
            assert self.tells(job.reason, "stale", "reasons")

        self._settled("bury", buried)

    @promise("11.9", "5.4")
    def test_a_touch_whose_reply_is_lost_leaves_the_lease_alive(self) -> None:
        self._settled("touch", lambda _: None, then=Ack)

    @promise("11.9", "5.5")
    @requires("give_back")
    def test_a_job_given_back_whose_reply_is_lost_has_not_been_attempted(self) -> None:
        def given_back(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.attempt, job.crashes) == (State.READY, 0, 0)

        self._settled("give_back", given_back)

    @promise("11.9", "5.10")
    @requires("portable_leases")
    def test_an_abandoned_job_whose_reply_is_lost_counts_one_crash(self) -> None:
        def abandoned(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.attempt, job.crashes) == (State.READY, 1, 1)

        self._settled("abandon", abandoned)

    @promise("11.9", "4.4", "5.8")
    @requires("portable_leases")
    def test_a_verdict_whose_reply_is_lost_counts_once_when_another_consumer_has_the_job(self) -> None:
        carried_out = 0
        for cut in self._cuts():
            # Given a release, while the replies to the call and to its repetitions are lost
            consumer, rival = self.another_consumer(backend=cut.far), self.another_consumer()
            job_id = self.enqueue(ttr=LONG)
            (lease,) = consumer.reserve(1, 0)
            try:
                with cut.armed(times=1000):
                    assert consumer.settle([Release(lease)]) == [None], (
                        "the answer is LeaseLost for a verdict that was carried out"
                    )
            except BackendUnavailable:
                if self.state(job_id) is not State.READY:
                    continue
            else:
                carried_out += cut.at is not None
                continue
            # When the release was carried out, and the holder repeats it after another consumer has reserved the job
            carried_out += 1
            theirs = self.take(by=rival)
            (answer,) = self._insist(consumer.settle, [Release(lease)])
            # Then the answer says that the release was carried out, and the other consumer keeps its lease
            assert answer is None, "the answer is LeaseLost for a verdict that was carried out"
            self.settle(Ack(theirs), by=rival)
        assert carried_out, "no release was carried out whose reply was lost"

    # --- outcomes and memos ---

    @promise("11.9", "12.1")
    @requires("outcomes")
    def test_acks_whose_reply_is_lost_keep_one_outcome_each(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                # Given acks with and without an outcome, in a call whose reply is lost
                self._put(3)
                held = consumer.reserve(3, 0)
                with cut.armed():
                    answers = self._insist(consumer.settle, [*map(self._keeping, held[:2]), Ack(held[2])])
                # Then the outcome of each accepted ack is kept, with attempt 1, and the other jobs have no outcome
                done = self._answered_or_kept(held, answers)
                found = self.backend.outcomes(self.queue, [lease.id for lease in held])
                assert [outcome and (outcome.body, outcome.attempt) for outcome in found] == [
                    (lease.id.encode(), 1) if lease.id in done and lease is not held[2] else None for lease in held
                ]
                kept = [lease.id for lease in held[:2] if lease.id in done]
                assert sorted(outcome.id for outcome in self.backend.history(self.queue).outcomes) == sorted(kept)

    @promise("11.9", "12.1", "5.9")
    @requires("outcomes")
    def test_an_exchange_whose_reply_is_lost_keeps_one_outcome(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                self._put(4)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    answers, leases = self._insist(consumer.exchange, [*map(self._keeping, held)], 1, 0)
                assert len(leases) <= 1
                done = self._answered_or_kept(held, answers)
                found = self.backend.outcomes(self.queue, [lease.id for lease in held])
                assert [outcome and outcome.body for outcome in found] == [
                    lease.id.encode() if lease.id in done else None for lease in held
                ]
                self._all_done(consumer, leases)

    @promise("11.9", "12.6", "12.2")
    @requires("outcomes", "portable_leases")
    def test_an_outcome_that_was_forgotten_does_not_come_back_when_its_ack_is_repeated(self) -> None:
        carried_out = 0
        for cut in self._cuts():
            # Given an ack, while the replies to the call and to its repetitions are lost
            consumer = self.another_consumer(backend=cut.far)
            job_id = self.enqueue(ttr=LONG)
            (lease,) = consumer.reserve(1, 0)
            try:
                with cut.armed(times=1000):
                    assert consumer.settle([self._keeping(lease)]) == [None], (
                        "the answer is LeaseLost for an ack that was carried out"
                    )
            except BackendUnavailable:
                if self.backend.outcomes(self.queue, [job_id]) == [None]:
                    continue
            else:
                carried_out += cut.at is not None
                continue
            # Given an ack that was carried out. When the ack's outcome is forgotten, and the holder repeats the ack
            carried_out += 1
            assert self.backend.forget(self.queue, [job_id]) == 1
            # Then the answer says that the ack was carried out, and no outcome is kept
            assert self._insist(consumer.settle, [self._keeping(lease)]) == [None], (
                "the answer is LeaseLost for an ack that was carried out"
            )
            assert self.backend.history(self.queue).outcomes == [], "the outcome was kept again"
        assert carried_out, "the test proved nothing: no ack was carried out before its reply was lost"

    @promise("11.9", "12.6")
    @requires("outcomes")
    def test_a_forget_whose_reply_is_lost_counts_what_it_deleted(self) -> None:
        for cut in self._cuts():
            first, *doomed = self._kept(4)
            is_known, answer = self._managed(cut, cut.far.forget, self.queue, doomed)
            left = [outcome.id for outcome in self.backend.history(self.queue).outcomes]
            assert left == [first] or (not is_known and sorted(left) == sorted([first, *doomed]))
            assert not is_known or answer == 3

    @promise("11.9", "12.4", "12.5")
    @requires("outcomes")
    def test_a_look_at_outcomes_whose_reply_is_lost_sees_what_is_there(self) -> None:
        for cut in self._cuts():
            ids = self._kept(3)
            with cut.armed():
                found = self._insist(cut.far.outcomes, self.queue, [ids[1], "no-such-job", ids[0]])
            assert [outcome and outcome.id for outcome in found] == [ids[1], None, ids[0]]

    @promise("11.9", "12.5")
    @requires("outcomes")
    def test_a_history_whose_reply_is_lost_has_what_is_there(self) -> None:
        for cut in self._cuts():
            ids = self._kept(3)
            with cut.armed():
                page = self._insist(cut.far.history, self.queue, limit=2)
            assert page.after is not None
            with cut.armed():
                last = self._insist(cut.far.history, self.queue, limit=2, after=page.after)
            assert last.after is None
            assert sorted(outcome.id for outcome in (*page.outcomes, *last.outcomes)) == sorted(ids)

    @promise("11.9", "13.1", "13.3")
    @requires("memos", "inspection")
    @pytest.mark.parametrize("kind", [Release, Bury, Touch])
    def test_a_verdict_with_a_memo_whose_reply_is_lost_is_carried_out_once(
        self, kind: type[Release | Bury | Touch]
    ) -> None:
        after = After(memo=b"memo", detail=b"detail")
        states = {Release: State.READY, Bury: State.BURIED, Touch: State.RESERVED}

        def stored(job_id: str) -> None:
            job = self.peek(job_id)
            assert (job.state, job.memo) == (states[kind], b"memo")
            assert job.detail == (b"" if kind is Touch else b"detail")

        self._settled("", stored, lambda lease: kind(lease, after=after), then=Ack if kind is Touch else None)

    # --- steps and notes ---

    @promise("11.9", "15.7", "15.1", "14.2")
    @requires("holds", "inspection")
    @pytest.mark.parametrize("kind", [Ack, Release, Bury, Touch])
    def test_the_steps_of_verdicts_whose_reply_is_lost_are_carried_out_once(
        self, kind: type[Ack | Release | Bury | Touch]
    ) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                # Given verdicts, each of which arrives at a held job, adds two more members, and enqueues a job
                other = self.another_queue()
                self._put(2)
                held = consumer.reserve(2, 0)
                job_id = self.held(4)
                new = [self.new(), self.new()]
                verdicts = [
                    kind(lease, after=After(steps=(
                        Arrive(self.queue, job_id, lease.id, expect=2), Enqueue(self.queue, job), Enqueue(other, job),
                    )))
                    for lease, job in zip(held, new, strict=True)
                ]  # fmt: skip
                # When the verdicts are sent in a call whose reply is lost
                with cut.armed():
                    answers = self._insist(consumer.settle, verdicts)
                # Then each step of an accepted verdict has one effect, and the steps of a refused verdict have no
                # effect
                done = self._answered(held, answers)
                self._assert_once(
                    job_id, 4 + len(done), [job.id for job, lease in zip(new, held, strict=True) if lease.id in done]
                )
                while cut.far.relay([self.queue]):
                    continue
                assert self.counts(other) == (len(done), 0, 0, 0)
                self._relay_is_idle(other)

    @promise("11.9", "15.7", "5.9", "15.4")
    @requires("holds", "inspection")
    def test_the_steps_of_an_exchange_whose_reply_is_lost_are_carried_out_once(self) -> None:
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                self._put(1)
                (lease,) = consumer.reserve(1, 0)
                job_id, waits = self.held(ttr=LONG), self.held(3)
                steps = (Arrive(self.queue, job_id, lease.id), Arrive(self.queue, waits, lease.id, expect=2))
                with cut.armed():
                    answers, leases = self._insist(consumer.exchange, [Ack(lease, After(steps=steps))], 2, 0)
                # Then the job that the accepted verdict has released is handed out, now or with the next reserve
                if self._answered([lease], answers):
                    assert self._all_done(consumer, leases) == [job_id]
                    assert self.peek(waits).awaits == 4

    @promise("11.9", "15.7", "15.3")
    @requires("holds", "inspection", "portable_leases")
    @pytest.mark.parametrize("kind", [Ack, Touch])
    def test_steps_are_not_carried_out_again_when_a_verdict_is_repeated_later(self, kind: type[Ack | Touch]) -> None:
        carried_out = 0
        for cut in self._cuts():
            # Given a verdict with steps, while the replies to the call and to its repetitions are lost
            consumer = self.another_consumer(backend=cut.far)
            self.enqueue(ttr=LONG)
            (lease,) = consumer.reserve(1, 0)
            job_id, new = self.held(2), self.new()
            verdict = kind(lease, After(steps=(Arrive(self.queue, job_id, "a"), Enqueue(self.queue, new))))
            try:
                with cut.armed(times=1000):
                    assert consumer.settle([verdict]) == [None], (
                        "the answer is LeaseLost for a verdict that was carried out"
                    )
            except BackendUnavailable:
                if not self._is_there(new.id):
                    continue
            else:
                carried_out += cut.at is not None
                continue
            # Given a verdict that was carried out. When the job that the verdict enqueued is done, and the verdict is
            # repeated
            carried_out += 1
            other = self.another_consumer()
            self.settle(Ack(self.take(by=other)), by=other)
            assert self._insist(consumer.settle, [verdict]) == [None], (
                "the answer is LeaseLost for a verdict that was carried out"
            )
            # Then there is no second job
            assert not self._is_there(new.id)
            assert self.peek(job_id).awaits == 1
        assert carried_out, "the test proved nothing: no verdict was carried out before its reply was lost"

    @promise("11.9", "15.7", "15.5")
    @requires("holds", "inspection")
    def test_the_steps_of_carry_out_whose_reply_is_lost_are_carried_out_once(self) -> None:
        for cut in self._cuts():
            # Given steps that arrive at a held job and enqueue jobs, in a call whose reply is lost
            other = self.another_queue()
            job_id, jobs = self.held(4), [self.new(), self.new()]
            steps: list[Step] = [
                Arrive(self.queue, job_id, "a", expect=2), *(Enqueue(self.queue, job) for job in jobs),
                Arrive(self.queue, job_id, "b", expect=2), *(Enqueue(other, job) for job in jobs),
            ]  # fmt: skip
            with cut.armed():
                assert self._insist(cut.far.carry_out, steps) is True
            # Then each step has one effect
            self._assert_once(job_id, 6, [job.id for job in jobs])
            while cut.far.relay([self.queue]):
                continue
            assert self.counts(other) == (2, 0, 0, 0)
            self._relay_is_idle(other)

    @promise("11.9", "15.7", "16.2")
    @requires("holds", "notes", "inspection")
    @pytest.mark.parametrize("when", ["there is a note", "there is no note"])
    def test_a_condition_whose_reply_is_lost_has_the_answer_of_the_first_attempt(self, when: str) -> None:
        for cut in self._cuts():
            # Given a condition that holds, and two steps. One of the steps changes the note of the condition
            version = self._given_note() if when == "there is a note" else ""
            job = self.new()
            steps: list[Step] = [Put(self.queue, "key", b"new"), Enqueue(self.queue, job)]
            # When the steps are carried out in a call whose reply is lost
            is_known, answer = self._managed(
                cut, partial(cut.far.carry_out, steps, when=[Version(self.queue, "key", version)])
            )
            note = self.backend.note(self.queue, "key")
            is_done = note is not None and note.value == b"new"
            # Then both steps are carried out, or no step is carried out. If the call returns an answer, both steps are
            # carried out, and the answer says so.
            assert self._is_there(job.id) is is_done, "one of two steps was carried out without the other"
            assert not is_known or (answer, is_done) == (True, True), "the answer denies a condition that held"

    @promise("11.9", "15.7", "16.2")
    @requires("holds", "notes", "inspection")
    def test_a_condition_that_does_not_hold_is_answered_so_though_the_reply_is_lost(self) -> None:
        for cut in self._cuts():
            version = self._given_note()
            assert self.backend.carry_out([Put(self.queue, "key", b"newer")])
            job = self.new()
            conditions = [Version(self.queue, "key", version)]
            steps: list[Step] = [Put(self.queue, "key", b"wrong"), Enqueue(self.queue, job)]
            with cut.armed():
                assert self._insist(cut.far.carry_out, steps, when=conditions) is False
            note = self.backend.note(self.queue, "key")
            assert note is not None
            assert (note.value, self._is_there(job.id)) == (b"newer", False)

    @promise("11.9", "15.7", "16.1")
    @requires("holds", "notes")
    def test_a_put_and_a_drop_whose_replies_are_lost_are_carried_out(self) -> None:
        for cut in self._cuts():
            version = self._given_note()
            with cut.armed():
                assert self._insist(cut.far.carry_out, [Put(self.queue, "key", b"new", LONG)]) is True
            note = self.backend.note(self.queue, "key")
            assert note is not None
            assert (note.value, note.version != version, self.about(note.expires_in, LONG)) == (b"new", True, True)
            with cut.armed():
                assert self._insist(cut.far.carry_out, [Drop(self.queue, "key")]) is True
            assert self.backend.note(self.queue, "key") is None

    @promise("11.9", "16.3")
    @requires("holds", "notes")
    def test_a_look_at_notes_whose_reply_is_lost_sees_what_is_there(self) -> None:
        for cut in self._cuts():
            version = self._given_note()
            assert self.backend.carry_out([Put(self.queue, "key-2", b"2"), Put(self.queue, "key-3", b"3")])
            with cut.armed():
                note = self._insist(cut.far.note, self.queue, "key")
            assert note is not None
            assert (note.value, note.version) == (b"old", version)
            with cut.armed():
                page = self._insist(cut.far.notes, self.queue, "key", limit=2)
            assert [found.key for found in page.notes] == ["key", "key-2"]
            assert page.after is not None

    # --- managing ---

    @promise("11.9", "8.1")
    @requires("management")
    def test_a_delete_whose_reply_is_lost_does_not_say_that_there_was_no_job(self) -> None:
        for cut in self._cuts():
            first, doomed, last = self._put(3)
            is_known, _ = self._managed(cut, cut.far.delete, self.queue, doomed)
            left = [job_id for job_id in (first, doomed, last) if self._is_there(job_id)]
            assert left == [first, last] or (not is_known and left == [first, doomed, last])

    @promise("11.9", "8.5")
    @requires("management")
    def test_a_delete_of_many_jobs_whose_reply_is_lost_answers_for_each_job(self) -> None:
        self._deleted_many(None)

    @promise("11.9", "8.5", "12.11")
    @requires("management", "outcomes")
    def test_a_delete_of_many_jobs_whose_reply_is_lost_keeps_an_outcome_for_each(self) -> None:
        self._deleted_many(After(keep=LONG, outcome=b"why", kind="cancelled"))

    def _deleted_many(self, after: After | None) -> None:
        for cut in self._cuts():
            # Given one reserved job and two ready jobs
            self._put(1)
            reserved = self.take(by=self.another_consumer()).id
            first, second = self._put(2)
            # When the three jobs and a job that does not exist are deleted in one call
            missing = new_id()
            call = partial(cut.far.delete_many, after=after)
            is_known, answers = self._managed(cut, call, self.queue, [missing, second, reserved, first])
            # Then each job has its own answer
            left = {job_id for job_id in (first, second) if self._is_there(job_id)}
            assert not is_known or not left
            assert not is_known or [type(answer) for answer in answers] == [
                JobNotFound,
                type(None),
                JobReserved,
                type(None),
            ], "the answer must be that of this job, got that of another job"
            # Then only the deleted jobs have an outcome
            assert self.state(reserved) is State.RESERVED
            if after is not None:
                kept = {outcome.id for outcome in self.backend.history(self.queue).outcomes}
                assert kept == {first, second} - left

    @promise("11.9", "7.1", "7.2")
    @requires("management")
    def test_a_reschedule_whose_reply_is_lost_moves_its_job_once(self) -> None:
        for cut in self._cuts():
            _, moved, _ = self._put(3)
            is_known, answer = self._managed(cut, cut.far.reschedule, self.queue, moved, LONG)
            if is_known:
                job = self.peek(answer)
                assert job.state is State.DELAYED
                assert self.about(job.due_in, LONG)
                assert self.counts() == (2, 1, 0, 0)
                assert not self.can.stable_ids or answer == moved
            elif self.can.stable_ids:
                assert self.counts() in {(2, 1, 0, 0), (3, 0, 0, 0)}

    @promise("11.9", "6.1")
    def test_a_kick_whose_reply_is_lost_counts_what_it_kicked(self) -> None:
        for cut in self._cuts():
            ids = self._put_buried(3)
            is_known, answer = self._managed(cut, cut.far.kick, self.queue, 2)
            kicked = [job_id for job_id in ids if self.state(job_id) is State.READY]
            assert kicked == ids[: len(kicked)] or not self.can.total_order
            assert len(kicked) <= 2, "2 jobs of 3 were to be kicked"
            assert not is_known or answer == len(kicked) == 2

    @promise("11.9", "6.2")
    @requires("management")
    def test_a_kick_of_one_job_whose_reply_is_lost_kicks_it_once(self) -> None:
        for cut in self._cuts():
            _, kicked, _ = self._put_buried(3)
            is_known, _ = self._managed(cut, cut.far.kick_job, self.queue, kicked)
            job = self.peek(kicked)
            assert job.state is State.READY or not is_known
            assert job.state is not State.READY or self.tells(job.kicks, 1, "durable_attempts")
            ready, _, _, buried = self.counts()
            assert (ready, buried) == ((1, 2) if job.state is State.READY else (0, 3))

    @promise("11.9", "10.4")
    @requires("purging")
    def test_a_purge_whose_reply_is_lost_counts_what_it_deleted(self) -> None:
        for cut in self._cuts():
            self._put(3)
            self.enqueue(delay=LONG)
            is_known, answer = self._managed(cut, cut.far.purge, self.queue, [State.READY, State.BURIED])
            ready, delayed, _, _ = self.counts()
            assert delayed == 1
            assert not is_known or (answer, ready) == (3, 0)

    @promise("11.9", "10.1", "10.2")
    @requires("pausing")
    def test_a_pause_and_a_resume_whose_replies_are_lost_can_be_said_again(self) -> None:
        for cut in self._cuts():
            self._put(1)
            with cut.armed():
                self._insist(cut.far.pause, self.queue, LONG)
            assert self.about(self.backend.stats(self.queue).paused_for, LONG)
            with cut.armed():
                self._insist(cut.far.resume, self.queue)
            assert self.backend.stats(self.queue).paused_for is None
            assert len(self.reserve(1, by=self.another_consumer())) == 1

    # --- reading ---

    @promise("11.9", "9.1", "9.2", "9.4", "9.5")
    @pytest.mark.parametrize("verb", ["peek", "jobs", "stats", "queues"])
    def test_a_look_whose_reply_is_lost_sees_what_is_there(self, verb: str) -> None:
        used: set[str] = set()
        for cut in self._cuts():
            job_id, *_ = self._put(3)
            used.add(self.queue)
            arguments = {"peek": (self.queue, job_id), "jobs": (self.queue, State.READY), "stats": (self.queue,)}
            with cut.armed():
                answer: Any = self._insist(getattr(cut.far, verb), *arguments.get(verb, ()), **_LIMITS.get(verb, {}))
            assert _SEEN[verb](answer, self.queue, job_id)
            assert verb != "queues" or used <= set(answer)

    # --- internals ---

    def _cuts(self) -> Iterator[Cut]:
        """Yield cuts, each with its own queue.

        The first ``Cut`` has no fault. The next ``Cut`` objects end the reply at several bytes, and the last ``Cut``
        objects end the request.
        """
        proxy, far = self.proxied()
        whole = Cut(proxy, far, None)
        yield whole
        size = whole.size
        assert size > 0, "the call did not go through the proxy of Harness.proxied()"
        cuts: list[tuple[int, type[Fault]]] = [
            (at, CutReply) for at in sorted({0, size // 4, size // 2, 3 * size // 4, size - 2, size - 1} - {-1})
        ]
        cuts += [(0, CutRequest), (whole.sent // 2, CutRequest)]
        for at, fault in cuts:
            self.queue = self.another_queue()
            far.stats(self.queue)  # opens a connection that can be cut
            yield Cut(proxy, far, at, fault)

    @staticmethod
    def _insist(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        for _ in range(TRIES - 1):
            try:
                return call(*arguments, **options)
            except (BackendUnavailable, EnqueueUncertain):
                time.sleep(AGAIN_AFTER)
        return call(*arguments, **options)

    @contextlib.contextmanager
    def _consumer(self, cut: Cut) -> Iterator[TrackedConsumer]:
        """A consumer behind the proxy. The consumer is connected already, as in a running worker."""
        consumer = self.another_consumer(backend=cut.far)
        consumer.reserve(1, 0)
        yield consumer
        consumer.close()

    def _put(self, count: int) -> list[str]:
        return self.enqueue_all(*[b"x"] * count, ttr=LONG)

    def _kept(self, count: int) -> list[str]:
        """The ids of the jobs that have an outcome."""
        ids = self._put(count)
        consumer = self.another_consumer()
        self.settle(*map(self._keeping, self.reserve(by=consumer)), by=consumer)
        return ids

    @staticmethod
    def _keeping(lease: Lease) -> Ack:
        return Ack(lease, After(keep=LONG, outcome=lease.id.encode()))

    def _given_note(self) -> str:
        """Store a note. Returns its version."""
        assert self.backend.carry_out([Put(self.queue, "key", b"old")])
        note = self.backend.note(self.queue, "key")
        assert note is not None
        return note.version

    def _assert_once(self, job_id: str, awaits: int, new: list[str]) -> None:
        """Fail unless *job_id* waits for *awaits* members, and each of the jobs *new* is ready."""
        assert self.peek(job_id).awaits == awaits
        assert [self.state(added) for added in new] == [State.READY] * len(new)

    def _relay_is_idle(self, other: str) -> None:
        before = self.counts(other)
        assert self.backend.relay([self.queue, other]) == 0
        assert self.counts(other) == before

    def _put_buried(self, count: int) -> list[str]:
        ids = self._put(count)
        consumer = self.another_consumer()
        for _ in ids:
            self.settle(Bury(self.take(by=consumer)), by=consumer)
        return ids

    def _is_there(self, job_id: str) -> bool:
        try:
            self.peek(job_id)
        except JobNotFound:
            return False
        return True

    @staticmethod
    def _managed(cut: Cut, call: Callable[..., Any], *arguments: object) -> tuple[bool, Any]:
        """Returns whether the call succeeded, and its answer. False means that the call raised
        ``BackendUnavailable``."""
        try:
            with cut.armed():
                return True, call(*arguments)
        except BackendUnavailable:
            assert cut.at is not None, "nothing was cut"
            return False, None

    def _eventually_counts(self, *expected: int) -> None:
        self.eventually(lambda: self.counts() == expected)

    def _all_done(self, consumer: TrackedConsumer, leases: Sequence[Lease]) -> list[str]:
        """Ack the given leases and all leases that the consumer gets afterwards. Returns the ids of the acked jobs."""
        done: list[str] = []
        give_up_at = time.monotonic() + self.harness.patience
        while True:
            answers = consumer.settle([Ack(lease) for lease in leases])
            done += [lease.id for lease, answer in zip(leases, answers, strict=True) if answer is None]
            ready, _, reserved, _ = self.counts()
            if not ready and not reserved:
                return sorted(done)
            assert time.monotonic() < give_up_at, (
                f"{ready} jobs stay ready and {reserved} reserved, and no call has raised an error"
            )
            leases = consumer.reserve(ALL, 0)

    def _answered(self, held: Sequence[Lease], answers: Sequence[LeaseLost | None]) -> list[str]:
        """The ids of the jobs whose verdicts were accepted.

        A refused verdict is allowed only if the job's lease ended with the connection.
        """
        if not self.can.disconnect_ends_lease:
            assert list(answers) == [None] * len(held), "the answer is LeaseLost for a verdict that was carried out"
        return [lease.id for lease, answer in zip(held, answers, strict=True) if answer is None]

    def _answered_or_kept(self, held: Sequence[Lease], answers: Sequence[LeaseLost | None]) -> list[str]:
        """The ids of the jobs whose acks were accepted. Without ``one_step``, the ids of jobs with a
        kept outcome are included."""
        done = self._answered(held, answers)
        if self.can.one_step:
            return done
        kept = self.backend.outcomes(self.queue, [lease.id for lease in held])
        return [lease.id for lease, outcome in zip(held, kept, strict=True) if outcome is not None or lease.id in done]

    def _settled(
        self,
        kind: str,
        holds: Callable[[str], None],
        verdict: Callable[[Lease], Verdict] | None = None,
        then: Callable[[Lease], Verdict] | None = None,
    ) -> None:
        """Settle two jobs in one call whose reply is lost. *holds* checks each job whose verdict was accepted."""
        make = verdict or VERDICTS[kind]
        for cut in self._cuts():
            with self._consumer(cut) as consumer:
                self._put(2)
                held = consumer.reserve(2, 0)
                with cut.armed():
                    answers = self._insist(consumer.settle, [make(lease) for lease in held])
                done = self._answered(held, answers)
                if cut.at is None:
                    assert len(done) == 2, "a verdict was refused while its lease was alive"
                for lease in held:
                    if lease.id in done:
                        assert kind != "ack" or not self._is_there(lease.id), "a job that was acked is still there"
                        holds(lease.id)
                        assert then is None or self._insist(consumer.settle, [then(lease)]) == [None]
