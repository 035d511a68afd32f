"""Memos and details. The job's next lease has the memo. Only peek and listings show the detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import STORED_STATES, Abandon, Ack, After, Bury, GiveBack, Release, State, Touch
from multiq.conformance.case import BODIES, BOUNDARIES, LONG, VERDICTS, Topic, promise, requires
from multiq.errors import LeaseLost, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.backend import Lease, Verdict

    Make = Callable[[Lease, After | None], Verdict]

MEMO = After(memo=b"memo")
NEW = After(memo=b"new")

#: The states that a job with a memo can be in. A held job was never reserved.
_ONCE_RESERVED = [state for state in STORED_STATES if state is not State.HELD]
#: The verdicts that can store a memo.
_WITH_MEMO: dict[str, Make] = {
    "touch": Touch,
    "release": lambda lease, after: Release(lease, after=after),
    "delayed release": lambda lease, after: Release(lease, delay=LONG, after=after),
    "release with a priority": lambda lease, after: Release(lease, priority=7, after=after),
    "give back": lambda lease, after: GiveBack(lease, after=after),
    "delayed give back": lambda lease, after: GiveBack(lease, delay=LONG, after=after),
    "bury": lambda lease, after: Bury(lease, after=after),
}
#: The verdicts that can store a detail.
_WITH_DETAIL: dict[str, Make] = {
    "release": lambda lease, after: Release(lease, reason="why", after=after),
    "delayed release": lambda lease, after: Release(lease, delay=LONG, after=after),
    "bury": lambda lease, after: Bury(lease, "why", after),
}


@requires("memos", "inspection")
class MemosTests(Topic):
    # --- stored ---

    @promise("13.1", "13.2")
    @requires("priorities")
    @pytest.mark.parametrize("make", _WITH_MEMO.values(), ids=_WITH_MEMO.keys())
    def test_a_verdict_stores_its_memo(self, make: Make) -> None:
        # Given a verdict with a memo
        job_id = self.enqueue(b"body", ttr=LONG)
        self.settle(make(self.take(), MEMO))
        # Then peek shows the memo, and the body is as before
        record = self.peek(job_id)
        assert (record.memo, record.body) == (b"memo", b"body")

    @promise("13.1")
    @requires("priorities")
    @pytest.mark.parametrize("after", [None, After(), After(detail=b"d")], ids=["nothing", "an empty after", "detail"])
    @pytest.mark.parametrize("make", _WITH_MEMO.values(), ids=_WITH_MEMO.keys())
    def test_a_verdict_without_a_memo_leaves_the_stored_one(self, make: Make, after: After | None) -> None:
        # Given a job with a memo
        lease = self._with_memo()
        # When the next verdict has no memo, then the memo stays
        self.settle(make(lease, after))
        assert self.peek(lease.id).memo == b"memo"

    @promise("13.1")
    @requires("priorities")
    @pytest.mark.parametrize("make", _WITH_MEMO.values(), ids=_WITH_MEMO.keys())
    def test_an_empty_memo_replaces_the_stored_one(self, make: Make) -> None:
        # Given a job with a memo
        lease = self._with_memo()
        # When a verdict has a memo without bytes, then the memo is empty
        self.settle(make(lease, After(memo=b"")))
        assert self.peek(lease.id).memo == b""

    @promise("13.1", "13.2")
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_a_memo_is_given_back_to_the_byte(self, body: bytes) -> None:
        # Given a memo with bytes that some encodings would damage
        job_id = self.enqueue(b"body")
        self.settle(Release(self.take(), after=After(memo=body)))
        # Then peek, the listing and the next lease have the same bytes
        assert self.peek(job_id).memo == body
        lease = self.take()
        assert (lease.memo, lease.body) == (body, b"body")

    @promise("13.1", "13.2")
    def test_memos_around_64_kib_are_given_back_whole(self) -> None:
        # Given memos whose lengths are typical limits of buffers and length fields, stored in one call
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        memos = {bytes([number]): bytes([number]) * size for number, size in enumerate(sizes, 1)}
        self.enqueue_all(*memos)
        self.settle(*(Release(lease, after=After(memo=memos[lease.body])) for lease in self.reserve()))
        # Then each memo is complete
        leases = self.reserve()
        assert {lease.body: lease.memo for lease in leases} == memos

    @promise("13.1", "5.4")
    def test_a_touch_with_a_memo_extends_the_lease(self) -> None:
        # Given a lease whose holder touches it with a memo before the lease ends
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        self.harness.advance(self.short_ttr / 2)
        self.settle(Touch(lease, MEMO))
        over = self.in_(self.short_ttr)
        # Then the lease lasts its full ttr from the touch, and the token stays valid
        assert self.about(self.peek(lease.id).due_in, self.short_ttr)
        self.harness.nearly(self.in_(self.short_ttr / 2))
        (answer,) = self.worker.settle([Touch(lease, NEW)])
        assert answer is None or self.harness.now() >= over
        assert answer is not None or self.peek(lease.id).memo == b"new"

    @promise("13.1", "5.2", "5.6")
    @requires("reasons", "priorities")
    def test_a_verdict_with_a_memo_does_all_else_that_it_does(self) -> None:
        # Given a job that is released with all fields of a release
        job_id = self.enqueue()
        after = After(memo=b"memo", detail=b"detail")
        self.settle(Release(self.take(), delay=LONG, priority=7, reason="later", after=after))
        # Then all fields of the release are stored
        record = self.peek(job_id)
        assert (record.state, record.priority, record.reason) == (State.DELAYED, 7, "later")
        assert (record.memo, record.detail, record.attempt) == (b"memo", b"detail", 1)
        assert self.about(record.due_in, LONG)

    @promise("13.1", "5.1")
    def test_an_ack_with_a_memo_deletes_the_job(self) -> None:
        # Given an ack with a memo. An ack ignores a memo
        self.enqueue()
        self.settle(Ack(self.take(), After(memo=b"memo", detail=b"detail")))
        # Then the job is gone
        assert self.counts() == (0, 0, 0, 0)

    # --- refused ---

    @promise("13.1", "13.3", "4.3")
    def test_late_verdicts_store_nothing(self) -> None:
        # Given jobs whose leases have ended, each with a memo and a detail
        leases = self._abandoned_with_memos()
        # When the holder of the ended leases sends a verdict of each kind, then the memos and the details are as before
        self._refuse_all_kinds(leases)
        for lease in leases:
            self._assert_stored(lease.id, b"memo", b"detail")

    @promise("13.1", "13.3", "4.4")
    def test_stale_verdicts_store_nothing(self) -> None:
        # Given jobs with a memo and a detail, whose leases have ended. Another consumer has reserved the jobs after the
        # ends of the leases
        leases = self._abandoned_with_memos()
        other = self.another_consumer()
        theirs = self.reserve(by=other)
        assert len(theirs) == len(leases)
        # When the old holder sends a verdict of each kind, then the memos and the details are as before
        self._refuse_all_kinds(leases)
        for lease in leases:
            self._assert_stored(lease.id, b"memo", b"detail")
        # And after the new holder's verdicts, the old holder's verdicts still change nothing
        self.settle(*(Bury(lease, after=After(memo=b"new", detail=b"new")) for lease in theirs), by=other)
        self._refuse_all_kinds(leases)
        for lease in leases:
            self._assert_stored(lease.id, b"new", b"new")

    @promise("13.1", "5.8")
    @pytest.mark.parametrize("calls", [1, 2], ids=["in one call", "in two calls"])
    def test_of_two_verdicts_about_one_lease_the_first_stores(self, calls: int) -> None:
        # Given a holder that sends two verdicts with a memo and a detail
        job_id = self.enqueue()
        lease = self.take()
        verdicts: list[Verdict] = [
            Bury(lease, after=After(memo=b"first", detail=b"first")),
            Release(lease, after=After(memo=b"second", detail=b"second")),
        ]
        parts = [verdicts] if calls == 1 else [[verdict] for verdict in verdicts]
        answers = [answer for part in parts for answer in self.worker.settle(part)]
        # Then the second verdict is refused, and stores nothing
        assert [type(answer) for answer in answers] == [type(None), LeaseLost]
        self._assert_stored(job_id, b"first", b"first")

    @promise("13.1", "5.8", "5.4")
    @pytest.mark.parametrize("last", [None, b"released"], ids=["left", "replaced"])
    def test_touches_of_one_lease_in_one_call_store_one_after_the_other(self, last: bytes | None) -> None:
        # Given two touches and a release about one lease, in one call
        job_id = self.enqueue()
        lease = self.take()
        self.settle(
            Touch(lease, After(memo=b"one")), Touch(lease, After(memo=b"two")), Release(lease, after=After(memo=last))
        )
        # Then the last memo is stored
        assert self.peek(job_id).memo == (last or b"two")
        assert self.stands(job_id, State.READY)

    # --- many verdicts in one call ---

    @promise("13.1", "5.7")
    @requires("priorities")
    @pytest.mark.parametrize("memo", [b"", b"new", None])
    @pytest.mark.parametrize("was_stored", [False, True])
    def test_a_verdict_after_a_touch_of_the_same_call_has_the_last_word(
        self, memo: bytes | None, was_stored: bool
    ) -> None:
        # Given a lease whose job has no memo, or has the memo of an earlier call
        self.enqueue(ttr=LONG)
        lease = self.take()
        if was_stored:
            self.settle(Touch(lease, After(memo=b"first")))
        # When one call has a touch with a memo, and a release with another memo, an empty memo, or no memo
        self.settle(Touch(lease, MEMO), Release(lease, after=After(memo=memo)))
        # Then the job has the memo of the release. If the release has no memo, the job has the memo of the touch
        assert self.take().memo == (b"memo" if memo is None else memo)

    @promise("13.1", "13.3", "5.7")
    def test_each_verdict_of_a_mixed_call_stores_its_own_memo_and_detail(self) -> None:
        # Given nine jobs with a memo and a detail each, one of which was settled before
        self.enqueue_all(*[b"%d" % number for number in range(9)], ttr=LONG)
        before = After(memo=b"old", detail=b"old")
        self.settle(*(Release(lease, after=before) for lease in self.reserve()))
        leases = sorted(self.reserve(), key=lambda lease: lease.body)
        self.settle(Release(leases[3], delay=LONG, after=before))

        def after(number: int) -> After:
            return After(memo=b"memo %d" % number, detail=b"detail %d" % number)

        # When verdicts with and without a memo are mixed
        verdicts: list[Verdict] = [
            Release(leases[0], delay=LONG, after=after(0)),
            Release(leases[1], delay=LONG),
            Ack(leases[2]),
            Release(leases[3], after=after(3)),
            Bury(leases[4], after=After(memo=b"memo 4")),
            Touch(leases[5], after(5)),
            GiveBack(leases[6], delay=LONG, after=after(6)),
            Bury(leases[7], after=After(detail=b"detail 7")),
            Touch(leases[8]),
        ]
        answers = self.worker.settle(verdicts)
        # Then each accepted verdict has stored its own memo and detail
        assert [number for number, answer in enumerate(answers) if answer is not None] == [3]
        records = [self.peek(lease.id) for lease in leases if lease is not leases[2]]
        assert [(record.body, record.memo, record.detail) for record in records] == [
            (b"0", b"memo 0", b"detail 0"),
            (b"1", b"old", b""),
            (b"3", b"old", b"old"),
            (b"4", b"memo 4", b""),
            (b"5", b"memo 5", b"old"),
            (b"6", b"memo 6", b"old"),
            (b"7", b"old", b"detail 7"),
            (b"8", b"old", b"old"),
        ]

    @promise("13.1", "5.7")
    def test_three_hundred_memos_go_in_one_call(self) -> None:
        # Given more touches than a driver may expect in one call, every third of them without a memo
        self.enqueue_all(*[b"%d" % number for number in range(300)], ttr=LONG)
        leases = self.reserve()
        self.settle(
            *(
                Touch(lease, After(memo=b"memo " + lease.body) if number % 3 else None)
                for number, lease in enumerate(leases)
            )
        )
        # When all jobs are released, then each next lease has its own memo
        self.settle(*map(Release, leases))
        expected = {lease.id: b"memo " + lease.body if number % 3 else b"" for number, lease in enumerate(leases)}
        assert {lease.id: lease.memo for lease in self.reserve()} == expected

    @promise("13.1", "1.3", "5.7")
    def test_memos_of_several_queues_go_in_one_call(self) -> None:
        # Given a consumer that holds one job of each of two queues. The two ids are equal if callers choose ids
        queues = [self.queue, self.another_queue()]
        job = self.new()
        for queue in queues:
            self.enqueue(queue.encode(), id=job.id, queue=queue)
        consumer = self.another_consumer(*queues)
        leases = self.reserve(by=consumer)
        # When both jobs are released in one call, then each job has its own memo
        self.settle(*(Release(lease, after=After(memo=lease.body)) for lease in leases), by=consumer)
        assert [(lease.queue.encode(), lease.memo) for lease in self.reserve(by=consumer)] == [
            (queue.encode(), queue.encode()) for queue in queues
        ]

    # --- given back ---

    @promise("13.2", "13.4")
    def test_the_first_lease_of_a_job_has_an_empty_memo(self) -> None:
        self.enqueue()
        assert self.take().memo == b""

    @promise("13.2", "5.9")
    def test_a_job_that_is_released_by_an_exchange_comes_back_with_its_memo(self) -> None:
        # Given the only job
        self.enqueue()
        lease = self.take()
        # When an exchange releases the only job with a memo, then the same exchange hands the job out with this memo
        answers, (again,) = self.worker.exchange([Release(lease, after=MEMO)], 1, 0)
        assert (answers, again.memo, again.attempt) == ([None], b"memo", 2)

    @promise("13.2", "5.5")
    def test_a_job_that_is_given_back_has_its_memo(self) -> None:
        self.enqueue()
        self.settle(GiveBack(self.take(), after=MEMO))
        assert self.take().memo == b"memo"

    @promise("13.2", "2.5")
    def test_a_job_that_is_released_with_a_delay_has_its_memo_when_it_is_due(self) -> None:
        # Given a job that is released with a memo and a delay
        self.enqueue()
        self.settle(Release(self.take(), delay=self.short_delay, after=MEMO))
        # When the delay is over, then the lease has the memo
        self.harness.past(self.in_(self.short_delay + self.can.delay_resolution))
        assert self.take().memo == b"memo"

    @promise("13.2", "4.2")
    def test_a_memo_outlives_the_end_of_a_lease(self) -> None:
        # Given a job that is touched with a memo, and then abandoned
        self.enqueue(ttr=self.short_ttr)
        lease = self.take()
        self.settle(Touch(lease, MEMO))
        self.harness.past(self.in_(self.short_ttr))
        # Then peek shows the memo, and the next two leases have the memo
        assert self.peek(lease.id).memo == b"memo"
        again = self.take()
        assert (again.memo, again.crashes) == (b"memo", 1)
        self.harness.past(self.in_(self.short_ttr))
        assert self.take().memo == b"memo"

    @promise("13.2", "5.10")
    @requires("portable_leases")
    def test_a_memo_outlives_an_abandon(self) -> None:
        # Given a job that is touched with a memo
        self.enqueue(ttr=LONG)
        lease = self.take()
        self.settle(Touch(lease, MEMO))
        # When another process abandons the job for a worker that died, then the next lease has the memo
        self.settle(Abandon(lease), by=self.another_consumer(backend=self.another_backend()))
        assert self.take().memo == b"memo"

    @promise("13.2", "6.1")
    @pytest.mark.parametrize("verb", ["kick", "kick_job"])
    def test_a_memo_and_a_detail_outlive_a_kick(self, verb: str) -> None:
        # Given a buried job with a memo and a detail
        if verb == "kick_job":
            self.need("management")
        job_id = self.enqueue()
        self.settle(Bury(self.take(), after=After(memo=b"memo", detail=b"detail")))
        # When the job is kicked
        if verb == "kick":
            assert self.backend.kick(self.queue, 1) == 1
        else:
            self.backend.kick_job(self.queue, job_id)
        # Then the memo and the detail are kept, and the next lease has the memo
        self._assert_stored(job_id, b"memo", b"detail")
        assert self.take().memo == b"memo"
        self._assert_stored(job_id, b"memo", b"detail")

    @promise("13.2", "6.2")
    @requires("management")
    def test_a_memo_and_a_detail_outlive_the_kick_of_a_delayed_job(self) -> None:
        # Given a delayed job with a memo and a detail
        job_id = self.enqueue()
        self.settle(Release(self.take(), delay=LONG, after=After(memo=b"memo", detail=b"detail")))
        # When the job is kicked, then the memo and the detail are kept
        self.backend.kick_job(self.queue, job_id)
        self._assert_stored(job_id, b"memo", b"detail")
        assert self.take().memo == b"memo"

    @promise("13.2", "11.4")
    @requires("shared")
    def test_another_client_gets_the_memo(self) -> None:
        # Given a job that one client has released with a memo
        self.enqueue()
        self.settle(Release(self.take(), after=MEMO))
        # When another client reserves the job, then the lease has the memo
        assert self.take(by=self.another_consumer(backend=self.another_backend())).memo == b"memo"

    @promise("13.2", "5.8")
    def test_a_memo_grows_over_many_leases(self) -> None:
        # Given a job. Each holder of the job adds a letter to the memo that its lease has
        self.enqueue()
        for letter in (b"a", b"b", b"c", b"d"):
            lease = self.take()
            self.settle(Touch(lease, After(memo=lease.memo + letter)), Release(lease))
        # Then the memo has all letters
        assert self.take().memo == b"abcd"

    @promise("13.2", "13.3", "9.2")
    @requires("lists_jobs")
    @pytest.mark.parametrize("state", _ONCE_RESERVED)
    def test_a_listing_shows_memo_and_detail_in_each_state(self, state: State) -> None:
        # Given a job with a memo and a detail, and a job without a memo and a detail
        after = After(memo=b"\0memo", detail=b"\xffdetail")
        job_id = self.enqueue(ttr=LONG)
        lease = self.take()
        if state is State.RESERVED:
            self.settle(Release(lease, after=after))
            lease = self.take()
        else:
            verdicts: dict[State, Verdict] = {
                State.READY: Release(lease, after=after),
                State.BURIED: Bury(lease, after=after),
            }
            self.settle(verdicts.get(state, Release(lease, delay=LONG, after=after)))
        # Then the listing and peek show the first job's memo and detail, and show neither for the second job
        (listed,) = self.backend.jobs(self.queue, state).jobs
        peeked = self.peek(job_id)
        for record in (listed, peeked):
            assert (record.id, record.state) == (job_id, state)
            assert (record.memo, record.detail) == (b"\0memo", b"\xffdetail")

    # --- new, and as new ---

    @promise("13.4")
    @pytest.mark.parametrize("state", _ONCE_RESERVED)
    def test_a_new_job_has_neither(self, state: State) -> None:
        self._assert_stored(self.given(state), b"", b"")

    @promise("13.4", "7.1")
    @requires("management")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.BURIED])
    @pytest.mark.parametrize("is_put_off", [False, True], ids=["to now", "put off"])
    def test_a_rescheduled_job_has_neither(self, state: State, is_put_off: bool) -> None:
        # Given a job with a memo and a detail
        self.enqueue(b"body")
        lease, after = self.take(), After(memo=b"memo", detail=b"detail")
        verdicts: dict[State, Verdict] = {
            State.READY: Release(lease, after=after),
            State.BURIED: Bury(lease, after=after),
        }
        self.settle(verdicts.get(state, Release(lease, delay=2 * LONG, after=after)))
        # When the job is rescheduled, then the memo and the detail are empty, and its next lease has no memo
        job_id = self.backend.reschedule(self.queue, lease.id, LONG if is_put_off else 0.0)
        self._assert_stored(job_id, b"", b"")
        if is_put_off:
            self.backend.kick_job(self.queue, job_id)
        again = self.take()
        assert (again.memo, again.body) == (b"", b"body")

    @promise("13.4", "2.4")
    @requires("client_ids")
    @pytest.mark.parametrize("ending", ["ack", "delete", "purge"])
    def test_a_job_with_the_id_of_one_that_is_gone_has_neither(self, ending: str) -> None:
        # Given a job that had a memo and a detail, and is gone
        self.need({"delete": "management", "purge": "purging"}.get(ending, "client_ids"))
        lease = self._with_memo(detail=b"detail")
        if ending == "ack":
            self.settle(Ack(lease))
        else:
            self.settle(Release(lease, after=After(memo=b"memo", detail=b"detail")))
            if ending == "delete":
                self.backend.delete(self.queue, lease.id)
            else:
                assert self.backend.purge(self.queue, [State.READY]) == 1
        # When the deleted job's id is enqueued again, then the new job has neither a memo nor a detail
        self.enqueue(id=lease.id)
        self._assert_stored(lease.id, b"", b"")
        assert self.take().memo == b""

    @promise("13.4", "2.4")
    @requires("client_ids")
    def test_a_known_id_that_is_enqueued_again_leaves_memo_and_detail(self) -> None:
        # Given a job with a memo and a detail
        job_id = self.enqueue()
        self.settle(Release(self.take(), after=After(memo=b"memo", detail=b"detail")))
        # When the job's id is enqueued again, then the memo and the detail are as before
        self.enqueue(b"other", id=job_id)
        self._assert_stored(job_id, b"memo", b"detail")
        assert self.take().memo == b"memo"

    # --- limits ---

    @promise("13.5")
    def test_the_largest_memo_and_detail_are_kept_whole(self) -> None:
        memo, detail = b"\xa5" * self.modest_limit(), b"\x5a" * self.modest_limit()
        job_id = self.enqueue()
        self.settle(Release(self.take(), after=After(memo=memo, detail=detail)))
        assert self.peek(job_id).detail == detail
        assert self.take().memo == memo

    @promise("13.5", "5.7")
    @pytest.mark.parametrize("field", ["memo", "detail"])
    @pytest.mark.parametrize("verb", ["settle", "exchange"])
    def test_a_memo_or_detail_that_is_too_large_refuses_the_whole_call(self, verb: str, field: str) -> None:
        # Given four leases, and a ready job
        limit = self.modest_limit()
        self.enqueue_all(b"1", b"2", b"3", b"4", ttr=LONG)
        one, two, three, four = self.reserve()
        self.enqueue()
        # When one of several verdicts has a memo or a detail that is too large
        too_large: Any = {field: b"x" * (limit + 1)}
        verdicts: list[Verdict] = [
            Release(one, after=MEMO),
            Ack(two),
            Bury(three, after=After(**too_large)),
            Touch(four, MEMO),
        ]
        with pytest.raises(PayloadTooLarge) as refusal:
            self.worker.settle(verdicts) if verb == "settle" else self.worker.exchange(verdicts, 1, 0)
        # Then the error has both sizes, and no verdict was carried out
        assert (refusal.value.size_bytes, refusal.value.limit_bytes) == (limit + 1, limit)
        assert self.counts() == (1, 0, 4, 0)
        for lease in (one, two, three, four):
            self._assert_stored(lease.id, b"", b"")
        # And the leases can still be settled
        self.settle(*map(Ack, (one, two, three, four)))

    # --- steps and checks ---

    def _with_memo(self, *, detail: bytes | None = None, **options: Any) -> Lease:
        """The second lease of a job with a memo."""
        self.enqueue(**options)
        self.settle(Release(self.take(), after=After(memo=b"memo", detail=detail)))
        return self.take()

    def _abandoned_with_memos(self) -> list[Lease]:
        """One ended lease for each verdict that could change a memo or a detail. No consumer has reserved the jobs
        after the ends of the leases.
        """
        self.enqueue_all(*[b"x"] * (len(_WITH_MEMO) + len(VERDICTS)), ttr=self.short_ttr)
        after = After(memo=b"memo", detail=b"detail")
        self.settle(*(Release(lease, after=after) for lease in self.reserve()))
        leases = self.reserve()
        self.harness.past(self.in_(self.short_ttr))
        return leases

    def _refuse_all_kinds(self, leases: list[Lease]) -> None:
        """Send each kind of verdict that can store a memo, with a memo and a detail. Also send each kind of verdict
        without a memo and without a detail."""
        after = After(memo=b"refused", detail=b"refused")
        with_memo, plain = leases[: len(_WITH_MEMO)], leases[len(_WITH_MEMO) :]
        self.refused(
            *(make(lease, after) for make, lease in zip(_WITH_MEMO.values(), with_memo, strict=True)),
            *(make(lease) for make, lease in zip(VERDICTS.values(), plain, strict=True)),
        )

    def _assert_stored(self, job_id: str, memo: bytes, detail: bytes) -> None:
        record = self.peek(job_id)
        assert (record.memo, record.detail) == (memo, detail)


@requires("memos", "inspection")
class DetailsTests(Topic):
    @promise("13.3")
    @pytest.mark.parametrize("make", _WITH_DETAIL.values(), ids=_WITH_DETAIL.keys())
    @pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
    def test_a_verdict_stores_its_detail_to_the_byte(self, body: bytes, make: Make) -> None:
        job_id = self.enqueue()
        self.settle(make(self.take(), After(detail=body)))
        assert self.peek(job_id).detail == body

    @promise("13.3")
    def test_a_detail_of_a_long_traceback_is_kept_whole(self) -> None:
        sizes = sorted({min(size, self.can.max_body or size) for size in BOUNDARIES})
        for size in sizes:
            job_id = self.enqueue()
            detail = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            self.settle(Bury(self.take(), "it failed", After(detail=detail)))
            assert self.peek(job_id).detail == detail

    @promise("13.3", "5.6")
    @pytest.mark.parametrize("after", [None, After(), After(memo=b"memo")], ids=["nothing", "an empty after", "memo"])
    @pytest.mark.parametrize("make", _WITH_DETAIL.values(), ids=_WITH_DETAIL.keys())
    def test_a_verdict_without_a_detail_deletes_the_stored_one(self, make: Make, after: After | None) -> None:
        # Given a job with a detail
        lease = self._with_detail()
        # When the job is released or buried without a detail, then the stored detail is deleted
        self.settle(make(lease, after))
        assert self.peek(lease.id).detail == b""

    @promise("13.3")
    @pytest.mark.parametrize("make", _WITH_DETAIL.values(), ids=_WITH_DETAIL.keys())
    def test_a_new_detail_replaces_the_stored_one(self, make: Make) -> None:
        lease = self._with_detail()
        self.settle(make(lease, After(detail=b"new")))
        assert self.peek(lease.id).detail == b"new"

    @promise("13.3", "5.10")
    @requires("portable_leases")
    def test_an_abandon_deletes_the_detail(self) -> None:
        lease = self._with_detail()
        self.settle(Abandon(lease, "its worker died"))
        assert self.peek(lease.id).detail == b""

    @promise("13.3")
    @pytest.mark.parametrize("make", [Touch, GiveBack])
    @pytest.mark.parametrize(
        "after", [None, After(detail=b"other"), After(memo=b"m")], ids=["nothing", "detail", "memo"]
    )
    def test_a_touch_and_a_give_back_leave_the_detail(self, make: Callable[..., Verdict], after: After | None) -> None:
        # Given a reserved job with a detail
        lease = self._with_detail()
        # When the job is touched or given back, with or without a detail, then the detail stays
        self.settle(make(lease, after=after))
        assert self.peek(lease.id).detail == b"detail"

    @promise("13.3", "4.2")
    def test_the_end_of_a_lease_leaves_the_detail(self) -> None:
        lease = self._with_detail(ttr=self.short_ttr)
        self.harness.past(self.in_(self.short_ttr))
        assert self.peek(lease.id).detail == b"detail"

    @promise("13.3", "5.9")
    def test_an_exchange_stores_a_detail(self) -> None:
        # Given an exchange that buries the only job with a detail
        self.enqueue()
        lease = self.take()
        assert self.worker.exchange([Bury(lease, "why", After(detail=b"detail"))], 1, 0) == ([None], [])
        # Then peek shows the detail
        assert self.peek(lease.id).detail == b"detail"

    def _with_detail(self, **options: Any) -> Lease:
        """The second lease of a job with a detail."""
        self.enqueue(**options)
        self.settle(Release(self.take(), after=After(detail=b"detail")))
        return self.take()
