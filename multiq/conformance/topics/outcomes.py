"""Outcomes: an ack keeps an outcome of its job for some time. Outcomes can be read and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from multiq.backend import Ack, After, Bury, GiveBack, OutcomePage, Release, State, Touch
from multiq.conformance.case import BODIES, BOUNDARIES, IDS, LONG, Topic, promise, requires
from multiq.errors import JobNotFound, LeaseLost, PayloadTooLarge
from multiq.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, Lease, Outcome, OutcomeKind, Verdict

KEPT = After(keep=LONG, outcome=b"result")
PAGE = 3  # outcomes per page
YEAR = 365 * 86_400.0  # seconds

_NO_ACKS: dict[str, Callable[[Lease, After], Verdict]] = {
    "release": lambda lease, after: Release(lease, after=after),
    "delayed release": lambda lease, after: Release(lease, delay=LONG, after=after),
    "bury": lambda lease, after: Bury(lease, after=after),
    "touch": lambda lease, after: Touch(lease, after=after),
    "give back": lambda lease, after: GiveBack(lease, after=after),
}


@requires("outcomes")
class OutcomesTests(Topic):
    _kinds: ClassVar[tuple[OutcomeKind, ...]] = ("done", "cancelled")

    # --- kept in the step of the ack ---

    @promise("12.1", "12.4", "5.1")
    def test_an_ack_keeps_the_outcome_that_it_asks_for(self) -> None:
        # Given a job
        job_id = self.enqueue()
        # When an ack asks for an outcome
        self.settle(Ack(self.take(), After(keep=LONG, outcome=b'{"value": 7}', kind="done")))
        # Then the job is gone, and every client can read its outcome
        assert self.counts() == (0, 0, 0, 0)
        for backend in (self.backend, self.another_backend()):
            (outcome,) = backend.outcomes(self.queue, [job_id])
            assert outcome is not None
            assert (outcome.queue, outcome.id, outcome.kind) == (self.queue, job_id, "done")
            assert (outcome.body, outcome.attempt) == (b'{"value": 7}', 1)
            assert self.about(outcome.age, 0.0)
            assert self.about(outcome.expires_in, LONG)

    @promise("12.1", "12.4")
    @pytest.mark.parametrize("kind", ["done", "cancelled"])
    def test_an_outcome_has_the_kind_that_the_ack_gave(self, kind: OutcomeKind) -> None:
        job_id = self.done(After(keep=LONG, kind=kind))
        assert [outcome.kind for outcome in self.found(job_id)] == [kind]
        assert [outcome.kind for outcome in self.backend.history(self.queue).outcomes] == [kind]

    @promise("12.1", "12.4")
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_an_outcome_is_given_back_to_the_byte(self, body: bytes) -> None:
        # Given an outcome with bytes that some encodings would damage
        job_id = self.done(After(keep=LONG, outcome=body))
        # Then both calls return the same bytes
        assert self.outcome(job_id).body == body
        assert [outcome.body for outcome in self.backend.history(self.queue).outcomes] == [body]

    @promise("12.1", "12.4")
    def test_outcomes_around_64_kib_are_given_back_whole(self) -> None:
        # Given outcomes whose lengths are typical limits of buffers and length fields, kept in one call
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        bodies = {bytes([number]): bytes([number]) * size for number, size in enumerate(sizes, 1)}
        self.enqueue_all(*bodies)
        leases = self.reserve()
        self.settle(*(Ack(lease, After(keep=LONG, outcome=bodies[lease.body])) for lease in leases))
        # Then each outcome is complete
        assert self.kept(*(lease.id for lease in leases)) == [bodies[lease.body] for lease in leases]

    @promise("12.1", "5.1")
    @pytest.mark.parametrize("make", _NO_ACKS.values(), ids=_NO_ACKS.keys())
    def test_only_an_ack_keeps_an_outcome(self, make: Callable[[Lease, After], Verdict]) -> None:
        # Given a verdict that does not end the job, with the fields with which an ack keeps an outcome
        job_id = self.enqueue()
        self.settle(make(self.take(), KEPT))
        # Then no outcome is kept
        assert self.kept(job_id) == [None]
        assert self.backend.history(self.queue) == OutcomePage([], None)

    @promise("12.1", "5.4")
    def test_the_outcome_is_that_of_the_ack_and_not_of_an_earlier_verdict(self) -> None:
        # Given a job that was released and touched, with the fields with which an ack keeps an outcome
        job_id = self.enqueue()
        self.settle(Release(self.take(), after=After(keep=LONG, outcome=b"released")))
        lease = self.take()
        self.settle(Touch(lease, after=After(keep=LONG, outcome=b"touched", kind="cancelled")))
        # When the job is acked, then the outcome is the ack's outcome
        self.settle(Ack(lease, After(keep=LONG, outcome=b"acked")))
        outcome = self.outcome(job_id)
        assert (outcome.body, outcome.kind, outcome.attempt) == (b"acked", "done", 2)

    @promise("12.4", "4.5")
    def test_an_outcome_has_the_attempt_that_was_acked(self) -> None:
        # Given a job that was released twice
        job_id = self.enqueue()
        for _ in range(2):
            self.settle(Release(self.take()))
        # When the job's third reservation is acked, then the outcome has attempt 3
        lease = self.take()
        self.settle(Ack(lease, KEPT))
        assert self.outcome(job_id).attempt == lease.attempt == 3

    @promise("12.4", "4.5")
    @requires("give_back")
    def test_a_reservation_that_was_given_back_does_not_count_in_an_outcome(self) -> None:
        # Given a job that was given back
        job_id = self.enqueue()
        self.settle(GiveBack(self.take()))
        # When the job's next reservation is acked, then the outcome has attempt 1
        self.settle(Ack(self.take(), KEPT))
        assert self.outcome(job_id).attempt == 1

    # --- kept only if the ack asks for it and is accepted ---

    @promise("12.2")
    @pytest.mark.parametrize(
        "after",
        [None, After(), After(outcome=b"result", kind="cancelled")],
        ids=["nothing", "an empty after", "an outcome without a time"],
    )
    def test_an_ack_that_asks_for_nothing_keeps_nothing(self, after: After | None) -> None:
        job_id = self.done(after)
        assert self.kept(job_id) == [None]
        assert self.backend.history(self.queue) == OutcomePage([], None)

    @promise("12.2", "4.3")
    def test_a_late_ack_keeps_nothing(self) -> None:
        # Given a lease that has ended
        lease = self.abandoned()
        # When the holder of the ended lease acks, then no outcome is kept, and the job still exists
        self.refused(Ack(lease, KEPT))
        assert self.kept(lease.id) == [None]
        assert self.counts() == (1, 0, 0, 0)

    @promise("12.2", "12.4", "4.4")
    def test_a_stale_ack_keeps_nothing_and_leaves_what_the_new_holder_keeps(self) -> None:
        # Given a job whose lease has ended. Another consumer has reserved the job after the end of the lease
        stale = self.abandoned()
        other = self.another_consumer()
        lease = self.take(by=other)
        # When the old holder acks before and after the new holder
        self.refused(Ack(stale, After(keep=LONG, outcome=b"stale")))
        assert self.kept(stale.id) == [None]
        self.settle(Ack(lease, After(keep=LONG, outcome=b"new")), by=other)
        self.refused(Ack(stale, After(keep=2 * LONG, outcome=b"stale", kind="cancelled")))
        # Then the outcome is the one that the new holder has stored
        outcome = self.outcome(stale.id)
        assert (outcome.body, outcome.kind, outcome.attempt) == (b"new", "done", 2)
        assert self.about(outcome.expires_in, LONG)

    @promise("12.2", "5.8")
    def test_an_ack_after_another_verdict_keeps_nothing(self) -> None:
        # Given buried and released jobs. Some jobs are settled in the same call as the ack, and some jobs in an earlier
        # call
        ids = self.enqueue_all(b"1", b"2", b"3", b"4")
        one, two, three, four = self.reserve()
        self.settle(Bury(one), Release(two, delay=LONG))
        # When the holder acks after another verdict
        answers = self.worker.settle(
            [Ack(one, KEPT), Ack(two, KEPT), Bury(three), Ack(three, KEPT), Release(four, LONG), Ack(four, KEPT)]
        )
        # Then each ack is refused, and keeps nothing
        lost, done = LeaseLost, type(None)
        assert [type(answer) for answer in answers] == [lost, lost, done, lost, done, lost]
        assert self.kept(*ids) == [None] * 4
        assert self.counts() == (0, 2, 0, 2)

    @promise("12.2", "5.8")
    @pytest.mark.parametrize("calls", [1, 2], ids=["in one call", "in two calls"])
    def test_of_two_acks_of_one_lease_the_first_keeps(self, calls: int) -> None:
        # Given a holder that acks twice
        job_id = self.enqueue()
        lease = self.take()
        acks = [
            Ack(lease, After(keep=LONG, outcome=b"first")),
            Ack(lease, After(keep=2 * LONG, outcome=b"second", kind="cancelled")),
        ]
        parts = [acks] if calls == 1 else [[ack] for ack in acks]
        answers = [answer for part in parts for answer in self.worker.settle(part)]
        # Then the first ack is carried out with its outcome, and the second ack changes nothing
        assert [type(answer) for answer in answers] == [type(None), LeaseLost]
        outcome = self.outcome(job_id)
        assert (outcome.body, outcome.kind) == (b"first", "done")
        assert self.about(outcome.expires_in, LONG)

    @promise("12.2", "5.8")
    def test_a_second_ack_keeps_nothing_if_the_first_asked_for_nothing(self) -> None:
        # Given a holder that acks twice in one call. Only the second ack keeps an outcome
        job_id = self.enqueue()
        lease = self.take()
        answers = self.worker.settle([Ack(lease), Ack(lease, KEPT)])
        # Then the second ack is refused, and keeps nothing
        assert [type(answer) for answer in answers] == [type(None), LeaseLost]
        assert self.kept(job_id) == [None]

    @promise("12.2", "5.7")
    def test_a_refused_ack_does_not_take_the_outcomes_of_the_others_away(self) -> None:
        # Given three jobs, the second of which was released
        self.enqueue_all(b"a", b"b", b"c", ttr=LONG)
        leases = self.reserve()
        self.settle(Release(leases[1], delay=LONG))
        # When all three jobs are acked
        answers = self.worker.settle([Ack(lease, After(keep=LONG, outcome=lease.body)) for lease in leases])
        # Then the second ack is refused, and the other jobs have their outcomes
        assert [type(answer) for answer in answers] == [type(None), LeaseLost, type(None)]
        assert self.kept(*(lease.id for lease in leases)) == [leases[0].body, None, leases[2].body]

    # --- until it expires ---

    @promise("12.3")
    def test_an_outcome_is_returned_until_it_expires_and_no_longer(self) -> None:
        # Given an outcome that is kept for 1.9 s
        keep = 1.9
        job_id = self.enqueue()
        lease = self.take()
        soonest = self.in_(keep)
        self.settle(Ack(lease, After(keep=keep, outcome=b"result")))
        latest = self.in_(keep + self.can.delay_resolution)
        # When almost 1.9 s have passed, then the outcome still exists
        self.harness.nearly(soonest)
        found, listed = self.kept(job_id), self.listed()
        if self.harness.now() < soonest:
            assert (found, listed) == ([b"result"], [job_id])
        # When 1.9 s have passed, then no call returns the outcome
        self.harness.past(latest)
        assert self.kept(job_id) == [None]
        assert self.listed() == []
        assert self.backend.history(self.queue, kind="done") == OutcomePage([], None)
        assert self.backend.forget(self.queue, [job_id]) == 0

    @promise("12.3", "12.4")
    def test_an_outcome_tells_its_age_and_the_time_that_is_left(self) -> None:
        # Given a job that is acked some time after it was enqueued and reserved
        job_id = self.enqueue(ttr=LONG)
        lease = self.take()
        self.harness.advance(self.short_delay)
        self.settle(Ack(lease, After(keep=LONG)))
        # When as much time has passed again after the ack, then the outcome's age counts from the ack
        self.harness.advance(2 * self.short_delay)
        for outcome in (self.outcome(job_id), self.backend.history(self.queue).outcomes[0]):
            assert self.about(outcome.age, 2 * self.short_delay)
            assert self.about(outcome.expires_in, LONG - 2 * self.short_delay)

    @promise("12.3")
    def test_an_outcome_can_be_kept_for_a_year(self) -> None:
        job_id = self.done(After(keep=YEAR, outcome=b"result"))
        outcome = self.outcome(job_id)
        assert outcome.body == b"result"
        assert self.about(outcome.expires_in, YEAR)

    @promise("12.3")
    def test_outcomes_that_expire_at_different_times_go_one_by_one(self) -> None:
        # Given two outcomes of one call, the first of which is kept for longer
        self.enqueue_all(b"long", b"short")
        leases = sorted(self.reserve(), key=lambda lease: lease.body)
        long, short = leases
        self.settle(Ack(long, After(keep=LONG, outcome=b"l")), Ack(short, After(keep=self.short_delay, outcome=b"s")))
        # When the second outcome has expired, then the first outcome still exists
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        assert self.kept(short.id, long.id) == [None, b"l"]
        assert self.listed() == [long.id]

    # --- by id ---

    @promise("12.4")
    def test_outcomes_come_in_the_order_of_the_ids(self) -> None:
        # Given jobs with an outcome, a job without an outcome, and an id that no job ever had
        ids = [self.done(After(keep=LONG, outcome=b"%d" % number)) for number in range(5)]
        waiting, unknown = self.enqueue(), new_id()
        # When the jobs' outcomes are requested in another order, one of them twice
        asked = [ids[3], unknown, ids[0], waiting, ids[4], ids[3], ids[1]]
        # Then the answers are in the order of the ids
        assert self.kept(*asked) == [b"3", None, b"0", None, b"4", b"3", b"1"]
        assert self.kept() == []

    @promise("12.4", "5.7", "12.5")
    def test_three_hundred_outcomes_go_in_one_call(self) -> None:
        # Given more acks than a driver may expect in one call. Two of three acks have an outcome
        self.enqueue_all(*[b"%d" % number for number in range(300)], ttr=LONG)
        leases = self.reserve()
        afters = [None, After(keep=LONG, outcome=b"d"), After(keep=LONG, outcome=b"c", kind="cancelled")]
        self.settle(*(Ack(lease, afters[int(lease.body) % 3]) for lease in leases))
        # Then each job has its own outcome
        expected = [(None, b"d", b"c")[int(lease.body) % 3] for lease in leases]
        assert self.kept(*(lease.id for lease in leases)) == expected
        assert len(self.listed("done")) == len(self.listed("cancelled")) == 100
        # And all outcomes can be forgotten in one call
        assert self.backend.forget(self.queue, [lease.id for lease in leases]) == 200
        assert self.listed() == []

    @promise("12.4", "1.3")
    @requires("client_ids")
    @pytest.mark.parametrize("job_id", IDS)
    def test_an_outcome_is_found_by_any_id_that_a_caller_may_choose(self, job_id: str) -> None:
        self.done(After(keep=LONG, outcome=b"result"), id=job_id)
        assert self.kept(job_id, new_id(), job_id + "0") == [b"result", None, None]
        assert self.kept(job_id.swapcase()) == [b"result" if job_id.swapcase() == job_id else None]
        assert self.listed() == [job_id]
        assert self.backend.forget(self.queue, [job_id]) == 1
        assert self.kept(job_id) == [None]

    @promise("12.4", "11.2")
    def test_an_id_that_no_job_can_have_has_no_outcome(self) -> None:
        strange = ["", "a b", "x" * 300, "no\0job", "☃"]
        assert self.kept(*strange) == [None] * len(strange)
        assert self.backend.forget(self.queue, strange) == 0

    # --- the history ---

    @promise("12.5")
    def test_the_outcome_that_expires_last_comes_first(self) -> None:
        # Given outcomes that do not expire in the order of their acks
        ids = {keep: self.done(After(keep=keep)) for keep in (2 * LONG, LONG, 4 * LONG, 3 * LONG, YEAR)}
        # Then the outcomes are listed by the time at which they expire
        assert self.listed() == [ids[keep] for keep in sorted(ids, reverse=True)]
        assert self.listed(limit=2) == self.listed()

    @promise("12.5")
    def test_pages_of_outcomes_that_expire_together_have_no_gap_and_no_overlap(self) -> None:
        # Given one call that keeps more outcomes than fit on a page, all with the same expiry time
        self.enqueue_all(*[b"x"] * 11)
        leases = self.reserve()
        self.settle(*(Ack(lease, KEPT) for lease in leases))
        # When the pages are read one after the other, then all pages except the last are full, and each outcome comes
        # once
        pages = self._pages(self.backend, limit=PAGE)
        assert [len(page) for page in pages] == [3, 3, 3, 2]
        assert sorted(self._ids(pages)) == sorted(lease.id for lease in leases)
        # And a page may have a single outcome
        assert self._ids(self._pages(self.backend, limit=1)) == self._ids(pages)

    @promise("12.5")
    def test_a_page_that_has_all_remaining_entries_is_the_last_of_a_history(self) -> None:
        for _ in range(2 * PAGE):
            self.done(KEPT)
        assert [len(page) for page in self._pages(self.backend, limit=PAGE)] == [PAGE, PAGE]

    @promise("12.5")
    def test_an_empty_history_is_one_empty_page(self) -> None:
        # Given a queue with a job and no outcome, and a queue that was never used
        self.done(None)
        self.enqueue()
        for queue in (self.queue, self.another_queue()):
            for kind in (None, *self._kinds):
                # Then the first page is empty, and there is no next page
                assert self.backend.history(queue, kind=kind) == OutcomePage([], None)

    @promise("12.5")
    @pytest.mark.parametrize("limit", [1, 2, 100])
    def test_a_history_of_one_kind_has_all_of_this_kind_and_no_others(self, limit: int) -> None:
        # Given outcomes of both kinds, mixed, some of which expire together
        kinds: list[OutcomeKind] = ["done", "cancelled", "done", "done", "cancelled", "cancelled", "done"]
        self.enqueue_all(*[b"%d" % number for number in range(7)])
        leases = sorted(self.reserve(), key=lambda lease: lease.body)
        ids = [lease.id for lease in leases]
        self.settle(
            *(
                Ack(lease, After(keep=LONG + 100 * (number // 2), kind=kind))
                for number, (lease, kind) in enumerate(zip(leases, kinds, strict=True))
            )
        )
        for kind in self._kinds:
            # When the outcomes of one kind are read in pages
            pages = self._pages(self.backend, limit=limit, kind=kind)
            # Then no page is too long, and each outcome of the requested kind comes once, in order
            assert all(len(page) <= limit for page in pages)
            expected = [job_id for job_id, its in zip(ids, kinds, strict=True) if its == kind]
            assert sorted(self._ids(pages)) == sorted(expected)
            groups = [ids.index(job_id) // 2 for job_id in self._ids(pages)]  # the outcomes of a group expire together
            assert groups == sorted(groups, reverse=True)

    @promise("12.5")
    def test_an_outcome_that_stays_is_listed_once_while_others_come_and_go(self) -> None:
        # Given a history whose first page was read
        ids = [self.done(After(keep=LONG + 100 * (9 - number))) for number in range(9)]
        page = self.backend.history(self.queue, limit=PAGE)
        assert [outcome.id for outcome in page.outcomes] == ids[:3]
        # When outcomes around the cursor are forgotten, and other outcomes come before and after the cursor
        self.backend.forget(self.queue, [ids[0], ids[2], ids[4]])
        self.done(After(keep=LONG + 2000))
        late = self.done(After(keep=LONG + 10))
        # Then the remaining outcomes follow, and each of them is listed once
        rest = self.backend.history(self.queue, limit=100, after=page.after)
        assert [outcome.id for outcome in rest.outcomes if outcome.id != late] == [ids[3], *ids[5:]]

    @promise("12.5", "12.3")
    def test_a_page_that_begins_at_an_outcome_that_has_expired_goes_on(self) -> None:
        # Given a history of which one page was read
        self.enqueue_all(b"2", b"1", b"0")
        keeps = {b"2": 3 * LONG, b"1": 2 * LONG, b"0": self.short_delay}
        leases = sorted(self.reserve(), key=lambda lease: lease.body)
        self.settle(*(Ack(lease, After(keep=keeps[lease.body])) for lease in leases))
        page = self.backend.history(self.queue, limit=1)
        assert [outcome.id for outcome in page.outcomes] == [leases[2].id]
        # When the last outcome expires before the next page is read
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        # Then the next page has the remaining outcomes, and is the last page
        page = self.backend.history(self.queue, limit=2, after=page.after)
        assert ([outcome.id for outcome in page.outcomes], page.after) == ([leases[1].id], None)

    # --- forgetting ---

    @promise("12.6")
    def test_forget_deletes_the_outcomes_of_these_jobs_and_counts_them(self) -> None:
        # Given outcomes
        ids = [self.done(After(keep=LONG, outcome=b"%d" % number)) for number in range(5)]
        # When some outcomes are forgotten, one of them twice in the call, together with an id that has no outcome
        assert self.backend.forget(self.queue, [ids[1], new_id(), ids[3], ids[1]]) == 2
        # Then the other outcomes are left
        assert self.kept(*ids) == [b"0", None, b"2", None, b"4"]
        assert sorted(self.listed()) == sorted([ids[0], ids[2], ids[4]])
        # And outcomes that are already forgotten are not counted again
        assert self.backend.forget(self.queue, ids) == 3
        assert self.backend.forget(self.queue, ids) == 0

    @promise("12.6")
    def test_forget_with_no_ids_in_its_list_deletes_nothing(self) -> None:
        # Given two outcomes that have expired, and one outcome that has not expired
        _, (job_id,) = self._expired(2, and_kept=1)
        # When the call gets an empty list of ids, then no outcome is forgotten
        assert self.backend.forget(self.queue, []) == 0
        assert self.kept(job_id) == [b"result"]
        assert self.backend.forget(self.queue) == 2

    @promise("12.6", "12.3")
    def test_forget_without_ids_deletes_what_has_expired_and_nothing_else(self) -> None:
        # Given five outcomes that have expired, and two outcomes that have not expired
        _, ids = self._expired(5, and_kept=2)
        # When the expired outcomes are forgotten, first some of them and then the rest
        assert self.backend.forget(self.queue, limit=2) == 2
        assert self.backend.forget(self.queue) == 3
        # Then no expired outcome is left to forget, and the other outcomes still exist
        assert self.backend.forget(self.queue) == 0
        assert self.kept(*ids) == [b"result"] * 2

    @promise("12.6", "12.3")
    def test_an_outcome_that_has_expired_is_not_counted_with_those_that_are_forgotten(self) -> None:
        # Given an outcome that has expired, and an outcome that has not expired
        (gone,), (job_id,) = self._expired(1, and_kept=1)
        # When both outcomes are forgotten by their ids, then only one outcome is counted
        assert self.backend.forget(self.queue, [gone, job_id]) == 1
        assert self.listed() == []

    @promise("12.6", "12.1")
    @requires("client_ids")
    def test_a_job_whose_outcome_was_forgotten_can_keep_another(self) -> None:
        # Given an outcome that was forgotten
        job_id = self.done(After(keep=LONG, outcome=b"first"))
        assert self.backend.forget(self.queue, [job_id]) == 1
        # When a later job of the same id keeps an outcome, then the later outcome can be read
        self.done(After(keep=2 * LONG, outcome=b"second"), id=job_id)
        assert self.kept(job_id) == [b"second"]
        assert self.about(self.outcome(job_id).expires_in, 2 * LONG)

    # --- the same id again, and in another queue ---

    @promise("12.7")
    @requires("client_ids")
    def test_a_later_job_of_the_same_id_replaces_the_outcome(self) -> None:
        # Given an outcome
        job_id = self.done(After(keep=2 * LONG, outcome=b"first", kind="cancelled"))
        # When a later job of the same id keeps an outcome
        self.enqueue(id=job_id)
        self.settle(Release(self.take()))
        self.settle(Ack(self.take(), After(keep=LONG, outcome=b"second")))
        # Then only the later of the two outcomes exists
        outcome = self.outcome(job_id)
        assert (outcome.body, outcome.kind, outcome.attempt) == (b"second", "done", 2)
        assert self.about(outcome.expires_in, LONG)
        assert (self.listed(), self.listed("cancelled")) == ([job_id], [])
        assert self.backend.forget(self.queue, [job_id]) == 1

    @promise("12.7", "12.3")
    @requires("client_ids")
    def test_an_outcome_that_was_replaced_expires_when_the_new_one_does(self) -> None:
        # Given two outcomes that are replaced: the first by one with a longer time, the second by one with a shorter
        # time
        short, long = After(keep=self.short_delay, outcome=b"short"), After(keep=LONG, outcome=b"long")
        longer, shorter = self.done(short), self.done(long)
        self.done(long, id=longer)
        self.done(short, id=shorter)
        # When the shorter time is over, then only the times of the new outcomes count
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        assert self.kept(longer, shorter) == [b"long", None]
        assert self.listed() == [longer]
        assert self.backend.forget(self.queue) == 1
        assert self.kept(longer) == [b"long"]

    @promise("12.2", "12.7")
    @requires("client_ids")
    @pytest.mark.parametrize("after", [None, After(outcome=b"no time")], ids=["nothing", "no time"])
    def test_an_ack_that_asks_for_nothing_leaves_the_outcome_of_an_earlier_job(self, after: After | None) -> None:
        # Given an outcome, and a later job of the same id
        job_id = self.done(After(keep=LONG, outcome=b"first"))
        # When the later job is acked without an outcome, then the earlier outcome still exists
        self.done(after, id=job_id)
        assert self.kept(job_id) == [b"first"]

    @promise("12.7", "12.2")
    @requires("client_ids")
    def test_a_refused_ack_leaves_the_outcome_of_an_earlier_job(self) -> None:
        # Given an outcome, and a later job of the same id whose lease has ended
        job_id = self.done(After(keep=LONG, outcome=b"first"))
        lease = self.abandoned(id=job_id)
        # When the later job is acked too late, then the earlier outcome still exists
        self.refused(Ack(lease, After(keep=2 * LONG, outcome=b"late")))
        assert self.kept(job_id) == [b"first"]
        assert self.outcome(job_id).expires_in <= LONG

    @promise("12.7", "2.4")
    @requires("client_ids", "inspection")
    def test_an_id_with_an_outcome_can_be_enqueued_again(self) -> None:
        # Given an outcome
        job_id = self.done(After(keep=LONG, outcome=b"first"))
        # When the job's id is enqueued again, then there is a new job, and the outcome stays
        assert self.enqueue(b"again", id=job_id) == job_id
        assert self.state(job_id) is State.READY
        assert self.kept(job_id) == [b"first"]
        assert self.take().body == b"again"
        assert self.kept(job_id) == [b"first"]

    @promise("12.7", "1.3")
    @requires("client_ids")
    def test_the_same_id_in_another_queue_is_another_job(self) -> None:
        # Given two queues, each with a job of the same id. Both jobs are settled in one call
        queues, job_id = [self.queue, self.another_queue()], new_id()
        for queue in queues:
            self.enqueue(queue.encode(), id=job_id, queue=queue)
        consumer = self.another_consumer(*queues)
        leases = self.reserve(by=consumer)
        keeps = {queues[0]: LONG, queues[1]: 2 * LONG}
        self.settle(*(Ack(lease, After(keep=keeps[lease.queue], outcome=lease.body)) for lease in leases), by=consumer)
        # Then each queue has its own outcome
        for queue in queues:
            (outcome,) = self.backend.outcomes(queue, [job_id])
            assert outcome is not None
            assert (outcome.queue, outcome.body) == (queue, queue.encode())
            assert self.about(outcome.expires_in, keeps[queue])
            assert [listed.queue for listed in self.backend.history(queue).outcomes] == [queue]
        # And when one of the two outcomes is forgotten, the other outcome stays
        assert self.backend.forget(queues[0], [job_id]) == 1
        assert self.backend.outcomes(queues[0], [job_id]) == [None]
        assert [kept is not None for kept in self.backend.outcomes(queues[1], [job_id])] == [True]

    # --- many verdicts in one call ---

    @promise("12.1", "12.2", "5.7")
    def test_each_ack_of_a_mixed_call_keeps_its_own_outcome(self) -> None:
        # Given a lease that was settled before, and seven other leases
        self.enqueue_all(*[b"%d" % number for number in range(8)], ttr=LONG)
        leases = sorted(self.reserve(), key=lambda lease: lease.body)
        self.settle(Release(leases[2], delay=LONG))

        def kept(number: int, kind: OutcomeKind = "done") -> After:
            return After(keep=LONG + 100 * number, outcome=b"of %d" % number, kind=kind)

        # When acks with and without an outcome are mixed with other verdicts, and with refused acks
        verdicts: list[Verdict] = [
            Release(leases[0], delay=LONG, after=kept(0)),
            Ack(leases[1], kept(1)),
            Ack(leases[2], kept(2)),
            Ack(leases[3]),
            Ack(leases[4], kept(4, "cancelled")),
            Touch(leases[5], after=kept(5)),
            Bury(leases[6], after=kept(6)),
            Ack(leases[5], kept(15)),
            Ack(leases[7]),
        ]
        answers = self.worker.settle(verdicts)
        # Then each ack that was accepted has its own outcome
        assert [number for number, answer in enumerate(answers) if answer is not None] == [2]
        found = self.backend.outcomes(self.queue, [lease.id for lease in leases])
        expected = [None, b"of 1", None, None, b"of 4", b"of 15", None, None]
        assert [outcome and outcome.body for outcome in found] == expected
        assert self.listed("cancelled") == [leases[4].id]
        for outcome, number in ((found[1], 1), (found[4], 4), (found[5], 15)):
            assert outcome is not None
            assert self.about(outcome.expires_in, LONG + 100 * number)
        assert self.counts() == (0, 2, 0, 1)

    @promise("12.1", "5.7")
    def test_outcomes_of_several_queues_go_in_one_call(self) -> None:
        # Given a consumer that holds jobs of three queues
        queues = [self.queue, self.another_queue(), self.another_queue()]
        for queue in queues:
            self.enqueue_all(b"a", b"b", queue=queue)
        consumer = self.another_consumer(*queues)
        leases = self.reserve(by=consumer)
        # When all jobs are acked in a mixed order, half of them with an outcome
        leases.sort(key=lambda lease: (lease.body, lease.id))
        self.settle(
            *(
                Ack(lease, After(keep=LONG, outcome=lease.queue.encode()) if lease.body == b"a" else None)
                for lease in leases
            ),
            by=consumer,
        )
        # Then each queue has the outcome of its own job
        for queue in queues:
            assert [outcome.body for outcome in self.backend.history(queue).outcomes] == [queue.encode()]
            assert self.counts(queue) == (0, 0, 0, 0)

    @promise("12.1", "5.9")
    def test_an_exchange_keeps_outcomes_and_hands_out_the_next(self) -> None:
        # Given three jobs. Two of the three jobs are reserved, and one of the two leases was already settled
        self.enqueue_all(b"1", b"2", b"3", ttr=LONG)
        one, two = sorted(self.reserve(2), key=lambda lease: lease.body)
        self.settle(Bury(two))
        # When an exchange acks both reserved jobs and asks for the next job
        answers, leases = self.worker.exchange(
            [Ack(two, After(keep=LONG, outcome=b"second")), Ack(one, After(keep=LONG, outcome=b"first"))], 1, 0
        )
        # Then the accepted ack has its outcome, and the next job is reserved
        assert [type(answer) for answer in answers] == [LeaseLost, type(None)]
        assert self.kept(one.id, two.id) == [b"first", None]
        assert len(leases) == 1
        assert self.counts() == (0, 0, 1, 1)

    @promise("12.1", "12.2", "5.11")
    @requires("portable_leases")
    def test_any_process_that_knows_the_lease_can_keep_its_outcome(self) -> None:
        # Given a lease, and another consumer that never reserved a job
        job_id = self.enqueue(ttr=LONG)
        lease = self.take()
        stranger = self.another_consumer(backend=self.another_backend())
        # When the other consumer acks with an outcome, then the outcome is kept once
        self.settle(Ack(lease, KEPT), by=stranger)
        self.refused(Ack(lease, After(keep=LONG, outcome=b"again")))
        assert self.kept(job_id) == [b"result"]

    # --- outcomes are not jobs ---

    @promise("12.8", "9.4", "9.5")
    def test_a_queue_that_has_only_outcomes_has_no_jobs_and_is_not_listed(self) -> None:
        # Given a queue with outcomes, and nothing else
        ids = [self.done(KEPT) for _ in range(3)]
        # Then the queue looks empty to all calls about jobs
        assert self.counts() == (0, 0, 0, 0)
        assert self.queue not in self.backend.queues()
        assert self.reserve() == []
        assert self.backend.kick(self.queue, 10) == 0
        # And the outcomes still exist
        assert self.kept(*ids) == [b"result"] * 3

    @promise("12.8", "8.2", "9.1")
    @requires("inspection", "management")
    def test_a_job_that_left_an_outcome_is_not_found(self) -> None:
        # Given an outcome
        job_id = self.done(KEPT)
        # When a call looks for the outcome's job, then the job is not found, and the outcome stays
        for call in (
            lambda: self.backend.peek(self.queue, job_id),
            lambda: self.backend.delete(self.queue, job_id),
            lambda: self.backend.kick_job(self.queue, job_id),
            lambda: self.backend.reschedule(self.queue, job_id, 0.0),
        ):
            with pytest.raises(JobNotFound):
                call()
        assert self.kept(job_id) == [b"result"]

    @promise("12.8", "10.4")
    @requires("purging")
    def test_a_purge_neither_counts_nor_deletes_outcomes(self) -> None:
        # Given outcomes, and a ready job
        ids = [self.done(KEPT) for _ in range(3)]
        self.enqueue()
        # When the queue is purged, then the purge counts one job, and the outcomes stay
        assert self.backend.purge(self.queue, [State.READY, State.DELAYED, State.BURIED]) == 1
        assert self.kept(*ids) == [b"result"] * 3
        assert sorted(self.listed()) == sorted(ids)

    @promise("12.8", "8.1", "10.4")
    @requires("client_ids", "management", "purging")
    def test_a_job_that_is_deleted_or_purged_leaves_no_outcome_and_takes_none_away(self) -> None:
        # Given two outcomes, new jobs of the same ids, and two other jobs
        ids = [self.done(KEPT) for _ in range(2)]
        ids += self.enqueue_all(b"x", b"x")
        for job_id in ids[:2]:
            self.enqueue(id=job_id)
        # When two of the four jobs are deleted, and the other two are purged
        for job_id in (ids[0], ids[2]):
            self.backend.delete(self.queue, job_id)
        assert self.backend.purge(self.queue, [State.READY]) == 2
        # Then the outcomes are as before
        assert self.kept(*ids) == [b"result", b"result", None, None]

    @promise("12.8", "10.1")
    @requires("pausing")
    def test_outcomes_are_kept_and_read_while_the_queue_is_paused(self) -> None:
        # Given a paused queue with an outcome, and two leases
        before = self.done(After(keep=LONG, outcome=b"before"))
        self.enqueue_all(b"1", b"2")
        one, two = self.reserve()
        self.backend.pause(self.queue, LONG)
        # When a lease is acked with an outcome
        self.settle(Ack(one, After(keep=LONG, outcome=b"during")))
        # Then outcomes can be read and forgotten
        assert self.kept(before, one.id) == [b"before", b"during"]
        assert sorted(self.listed()) == sorted([before, one.id])
        assert self.backend.forget(self.queue, [before]) == 1
        # And the queue is still paused
        self.enqueue()
        assert self.reserve(by=self.another_consumer()) == []
        self.backend.resume(self.queue)
        assert self.kept(one.id) == [b"during"]
        self.settle(Ack(two))

    @promise("12.8", "12.6")
    @requires("client_ids", "inspection")
    def test_forgetting_an_outcome_leaves_a_job_of_the_same_id_alone(self) -> None:
        # Given an outcome, and a reserved job of the same id
        job_id = self.done(KEPT)
        self.enqueue(id=job_id, ttr=LONG)
        lease = self.take()
        # When the outcome is forgotten, then the job is still reserved, and can be acked
        assert self.backend.forget(self.queue, [job_id]) == 1
        assert self.state(job_id) is State.RESERVED
        self.settle(Ack(lease, After(keep=LONG, outcome=b"second")))
        assert self.kept(job_id) == [b"second"]

    # --- expired outcomes ---

    @promise("12.9")
    @pytest.mark.parametrize("is_one_call", [True, False], ids=["in one call", "one by one"])
    def test_acks_that_keep_an_outcome_delete_those_that_have_expired(self, is_one_call: bool) -> None:
        # Given many outcomes that have expired
        self._expired(20)
        # When half as many jobs are acked with an outcome
        ids = self.enqueue_all(*[b"x"] * 10)
        leases = self.reserve()
        for acks in [[*leases]] if is_one_call else [[lease] for lease in leases]:
            self.settle(*(Ack(lease, KEPT) for lease in acks))
        # Then few expired outcomes are left, and all new outcomes are there. An ack deletes expired outcomes only in
        # its own partition.
        assert self.backend.forget(self.queue) <= (4 if self.can.total_order else 19)
        assert self.kept(*ids) == [b"result"] * 10

    # --- limits ---

    @promise("12.10")
    def test_the_largest_outcome_is_kept_whole(self) -> None:
        body = b"\xa5" * self.modest_limit()
        job_id = self.done(After(keep=LONG, outcome=body))
        assert self.outcome(job_id).body == body

    @promise("12.10", "5.7")
    @pytest.mark.parametrize("verb", ["settle", "exchange"])
    def test_an_outcome_that_is_too_large_refuses_the_whole_call(self, verb: str) -> None:
        # Given four leases, and a ready job
        limit = self.modest_limit()
        self.enqueue_all(b"1", b"2", b"3", b"4", ttr=LONG)
        one, two, three, four = self.reserve()
        self.enqueue()
        # When one of several verdicts has an outcome that is too large
        verdicts: list[Verdict] = [
            Ack(one, KEPT),
            Bury(two),
            Ack(three, After(keep=LONG, outcome=b"x" * (limit + 1))),
            Ack(four),
        ]
        with pytest.raises(PayloadTooLarge) as refusal:
            self.worker.settle(verdicts) if verb == "settle" else self.worker.exchange(verdicts, 1, 0)
        # Then the error has both sizes, and no verdict was carried out
        assert (refusal.value.size_bytes, refusal.value.limit_bytes) == (limit + 1, limit)
        assert self.counts() == (1, 0, 4, 0)
        assert self.listed() == []
        # And the leases can still be settled
        self.settle(Ack(one, KEPT), Bury(two), Ack(three), Ack(four))
        assert self.kept(one.id) == [b"result"]

    # --- steps and checks ---

    def done(self, after: After | None, **options: Any) -> str:
        """A job that was acked with *after*. The queue must have no other ready job."""
        job_id = self.enqueue(**options)
        lease = self.take()
        assert lease.id == job_id
        self.settle(Ack(lease, after))
        return job_id

    def outcome(self, job_id: str) -> Outcome:
        (outcome,) = self.backend.outcomes(self.queue, [job_id])
        assert outcome is not None, "no outcome was kept"
        return outcome

    def found(self, *ids: str) -> list[Outcome]:
        return [outcome for outcome in self.backend.outcomes(self.queue, ids) if outcome is not None]

    def kept(self, *ids: str) -> list[bytes | None]:
        """The bytes of the outcomes of the jobs with these ids, in the order of the ids. The entry is None for a job
        without an outcome."""
        outcomes = self.backend.outcomes(self.queue, ids)
        assert all(outcome is None or outcome.id == job_id for outcome, job_id in zip(outcomes, ids, strict=True)), (
            "an outcome is not at the position of its id"
        )
        return [None if outcome is None else outcome.body for outcome in outcomes]

    def listed(self, kind: OutcomeKind | None = None, limit: int = 100) -> list[str]:
        return self._ids(self._pages(self.backend, limit=limit, kind=kind))

    # --- of deleted jobs ---

    @promise("12.11", "8.5")
    @requires("management")
    def test_deleted_jobs_keep_the_outcome_that_the_call_gives(self) -> None:
        # Given a ready, a delayed and a reserved job, and a job that was released
        released = self.enqueue()
        self.settle(Release(self.take(), delay=LONG))
        reserved = self.enqueue()
        lease = self.take()
        ready, delayed = self.enqueue(), self.enqueue(delay=LONG)
        # When the four jobs are deleted with an outcome
        after = After(keep=LONG, outcome=b"why", kind="cancelled")
        answers = self.backend.delete_many(self.queue, [ready, reserved, delayed, released], after=after)
        # Then the deleted jobs have the outcome, with the number of their last attempt. The reserved job has no outcome
        assert [answer is None for answer in answers] == [True, False, True, True]
        assert self.found(reserved) == []
        for job_id, attempt in ((ready, 0), (delayed, 0), (released, 1)):
            (outcome,) = self.found(job_id)
            assert (outcome.kind, outcome.body, outcome.attempt) == ("cancelled", b"why", attempt)
            assert self.about(outcome.expires_in, LONG)
        assert len(self.backend.history(self.queue, kind="cancelled").outcomes) == 3
        # When the reserved job is acked, then its own outcome is kept
        self.settle(Ack(lease, KEPT))
        assert [outcome.kind for outcome in self.found(reserved)] == ["done"]

    @promise("12.11")
    @requires("management")
    def test_the_outcomes_of_deleted_jobs_expire(self) -> None:
        job_id = self.enqueue()
        self.backend.delete_many(self.queue, [job_id], after=After(keep=self.short_delay, kind="cancelled"))
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        assert self.found(job_id) == []

    def _expired(self, count: int, and_kept: int = 0) -> tuple[list[str], list[str]]:
        """Outcomes that have expired, and outcomes that have not expired. No later ack has kept an outcome, because an
        ack with an outcome deletes expired outcomes.
        """
        ids = self.enqueue_all(*[b"x"] * (count + and_kept))
        expiring = After(keep=self.short_delay)
        self.settle(*(Ack(lease, expiring if lease.id in ids[:count] else KEPT) for lease in self.reserve()))
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        return ids[:count], ids[count:]

    def _pages(self, backend: Backend, *, limit: int, kind: OutcomeKind | None = None) -> list[list[Outcome]]:
        pages: list[list[Outcome]] = []
        after: str | None = None
        while len(pages) < 1000:
            page = backend.history(self.queue, kind=kind, limit=limit, after=after)
            pages.append(page.outcomes)
            after = page.after
            if after is None:
                return pages
        raise AssertionError("the history does not come to an end")

    @staticmethod
    def _ids(pages: Sequence[Sequence[Outcome]]) -> list[str]:
        return [outcome.id for page in pages for outcome in page]
