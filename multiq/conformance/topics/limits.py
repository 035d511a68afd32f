"""Limits: how many jobs with the same gate are handed out at a time, and how many in a period."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from multiq.backend import (
    PRIORITY_DEFAULT,
    Ack,
    After,
    Bury,
    Enqueue,
    Gate,
    GiveBack,
    Quota,
    Release,
    State,
    Terms,
    Touch,
    UniqueKey,
)
from multiq.conformance.case import LONG, VERDICTS, Topic, promise, requires
from multiq.conformance.threads import together
from multiq.errors import UniqueTaken

from .holds import MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.backend import Lease, LimitState, Verdict
    from multiq.conformance.case import TrackedConsumer

API = Gate("api")
SMTP = Gate("smtp")
#: Keys that a collation, a pattern, trimming or a separator would mix up. An empty key means that the job has no key.
KEYS = ["", *MEMBERS]
#: Pairs of a limit's name and a key that are the same text when the two parts are joined.
JOINED = [("api", "/7"), ("api/", "7"), ("api/7", ""), ("api", ":7"), ("api:", "7")]
FREEING = sorted(set(VERDICTS) - {"touch"})
CONSUMERS = 32
SPINNING = 0.25  # the share of a core that a consumer must not exceed while it waits
WATCHED = 2.0  # seconds of the consumer's wait


@requires("limits", "inspection")
class _LimitsTopic(Topic):
    _limited: set[tuple[str, str]]

    def limit(self, name: str, *, queue: str | None = None, **quota: Any) -> None:
        """Store a limit. The limit is removed at the end of the test."""
        vars(self).setdefault("_limited", set()).add((queue or self.queue, name))
        self.backend.limits(queue or self.queue, {name: Quota(**quota)})

    def gated(self, body: bytes = b"x", *gates: Gate, **options: Any) -> str:
        """Enqueue a job with gates. The default is the gate ``API``."""
        return self.enqueue(body, terms=Terms(gates=gates or (API,)), **options)

    def gated_all(self, *bodies: bytes, gate: Gate = API, **options: Any) -> list[str]:
        return self.enqueue_all(*bodies, terms=Terms(gates=(gate,)), **options)

    def states(self) -> dict[str, LimitState]:
        return {state.name: state for state in self.backend.limits(self.queue)}

    def ids(self, leases: Iterable[Lease]) -> list[str]:
        return [lease.id for lease in leases]

    def _leave(self) -> None:
        for queue, name in getattr(self, "_limited", ()):
            self.backend.limits(queue, {name: None})
        super()._leave()


class LimitsTests(_LimitsTopic):
    # --- slots ---

    @promise("19.1")
    def test_a_gate_whose_limit_is_not_stored_is_open(self) -> None:
        ids = self.gated_all(b"a", b"b", b"c")
        assert self.ids(self.reserve()) == ids

    @promise("19.2")
    @pytest.mark.parametrize("slots", [0, 1, 3])
    @pytest.mark.parametrize("at_once", [True, False])
    def test_as_many_jobs_are_reserved_as_there_are_slots(self, slots: int, at_once: bool) -> None:
        # Given more jobs than slots
        self.limit("api", slots=slots)
        ids = self.gated_all(*[b"x"] * 5, ttr=LONG)
        # When the jobs are reserved in one call or one by one, then one job is handed out for each slot
        leases = self.reserve() if at_once else [lease for _ in range(5) for lease in self.reserve(1)]
        assert self.ids(leases) == ids[:slots]
        # When the handed-out jobs are done, then the next jobs are handed out
        for first in range(slots, 5, slots or 5):
            self.settle(*map(Ack, leases))
            leases = self.reserve()
            assert self.ids(leases) == ids[first : first + slots]

    @promise("19.2", "19.1")
    def test_each_key_has_its_own_slots(self) -> None:
        # Given keys that are easily mistaken for each other
        self.limit("api", slots=1)
        gates = [Gate("api", key) for key in KEYS]
        ids = {gate: [self.gated(b"x", gate, ttr=LONG) for _ in range(2)] for gate in gates}
        # When all jobs are reserved, then one job of each key is handed out
        assert sorted(self.ids(self.reserve())) == sorted(first for first, _ in ids.values())
        # And the limit reports one running job of each key
        state = self.states()["api"]
        assert (state.keys, state.running, state.parked) == (len(KEYS), len(KEYS), len(KEYS))

    @promise("19.1", "19.2")
    def test_a_limit_and_a_key_are_not_joined(self) -> None:
        for limit, _ in JOINED:
            self.limit(limit, slots=1)
        ids = [self.gated(b"x", Gate(limit, key), ttr=LONG) for limit, key in JOINED]
        assert sorted(self.ids(self.reserve())) == sorted(ids)
        assert self.reserve() == []

    @promise("19.1", "19.2")
    def test_another_queues_limit_is_another_limit(self) -> None:
        # Given a limit with one slot, and another limit of the same name in another queue
        other = self.another_queue()
        self.limit("api", slots=1)
        self.limit("api", queue=other, slots=2)
        for queue in (self.queue, other):
            self.enqueue_all(*[b"x"] * 3, queue=queue, terms=Terms(gates=(API,)), ttr=LONG)
        # Then each limit counts the jobs of its own queue
        leases = self.reserve(by=self.another_consumer(self.queue, other))
        assert Counter(lease.queue for lease in leases) == {self.queue: 1, other: 2}

    @promise("19.2")
    @pytest.mark.parametrize("verdict", FREEING)
    def test_each_verdict_frees_the_slot_once(self, verdict: str) -> None:
        # Given a limit with one slot, a running job that uses the slot, and two jobs that wait for the slot
        self.limit("api", slots=1)
        first = self.gated(b"first", ttr=LONG, priority=2000 if self.can.priorities else PRIORITY_DEFAULT)
        lease = self.take()
        others = self.gated_all(b"b", b"c", ttr=LONG)
        assert self.reserve() == []
        # When the running job's verdict is sent twice
        self.settle(VERDICTS[verdict](lease) if verdict != "release" else Release(lease, delay=LONG))
        self.refused(VERDICTS[verdict](lease))
        # Then one more job is handed out
        (next_lease,) = self.reserve()
        assert next_lease.id in {*others, first}
        assert self.reserve() == []

    @promise("19.2", "5.4")
    def test_a_touch_keeps_the_slot(self) -> None:
        # Given a running job that is touched before its lease ends
        self.limit("api", slots=1)
        self.gated_all(b"a", b"b", ttr=self.short_ttr)
        lease = self.take()
        began = self.harness.now()
        self.harness.advance(self.short_ttr * 0.7)
        self.settle(Touch(lease))
        # When the original end of the lease has passed, then the slot is still taken
        self.harness.past(began + self.short_ttr)
        assert self.reserve() == []
        # When the touched lease has ended, too, then the slot is free
        self.harness.past(self.in_(self.short_ttr))
        assert len(self.reserve()) == 1

    @promise("19.2", "4.2", "5.4")
    def test_leases_of_one_call_free_their_slots_one_by_one(self) -> None:
        # Given four jobs that one call has reserved: one is settled, and two are touched before their leases end
        self.limit("api", slots=4)
        ids = self.gated_all(*[b"x"] * 8, ttr=self.short_ttr)
        leases = self.reserve(4)
        assert self.ids(leases) == ids[:4]
        began = self.harness.now()
        self.settle(Ack(leases[0]))
        self.harness.advance(self.short_ttr * 0.7)
        self.settle(Touch(leases[1]), Touch(leases[2]))
        assert self.states()["api"].running == 3
        # When the original end of the leases has passed, then only the touched leases use slots
        self.harness.past(began + self.short_ttr)
        assert self.states()["api"].running == 2
        again = self.reserve(4)
        assert len(again) == 2
        assert self.states()["api"].running == 4
        # And the verdict on a touched lease frees its slot once
        self.settle(Ack(leases[1]))
        assert self.states()["api"].running == 3
        assert len(self.reserve(4)) == 1
        # And all slots are free when all leases have ended
        self.harness.past(self.in_(self.short_ttr))
        assert self.states()["api"].running == 0
        assert len(self.reserve(8)) == 4

    @promise("19.2", "19.7")
    @requires("management")
    def test_a_job_waits_no_longer_than_the_lease_of_a_job_that_is_deleted_after_it(self) -> None:
        # Given a limit with one slot, and two jobs: one reserve hands out the first, and finds the gate of the second
        # closed
        self.limit("api", slots=1)
        first, second = self.gated_all(b"a", b"b", ttr=self.short_ttr)
        assert self.ids(self.reserve(2)) == [first]
        # When the lease has ended, and the first job is deleted before any reserve
        self.harness.past(self.in_(self.short_ttr))
        self.backend.delete(self.queue, first)
        # Then a consumer of another process gets the second job
        other = self.another_consumer(backend=self.another_backend())
        assert self.ids(self.reserve(2, by=other)) == [second]

    @promise("19.2", "4.2")
    def test_the_end_of_a_lease_frees_the_slot_once(self) -> None:
        # Given a limit with one slot, a job whose lease has ended, and other jobs that wait for the slot
        self.limit("api", slots=1)
        first, *_ = self.gated_all(b"a", b"b", b"c", ttr=self.short_ttr)
        lease = self.take()
        self.harness.past(self.in_(self.short_ttr))
        # When the job with the ended lease is reserved again
        again = self.reserve()
        assert [(one.id, one.crashes) for one in again] == [(first, 1)]
        # Then the late verdict of the first lease frees no slot
        self.refused(Ack(lease))
        assert self.reserve() == []
        # And the end of the second lease frees the slot
        self.settle(Bury(again[0]))
        assert [one.body for one in self.reserve()] == [b"b"]

    @promise("19.2", "4.2")
    def test_a_late_verdict_frees_no_slot_beside_a_verdict_that_counts(self) -> None:
        # Given a job whose lease has ended
        self.limit("api", slots=2)
        first, second, _ = self.gated_all(b"a", b"b", b"c", ttr=self.short_ttr)
        late = self.take()
        self.harness.past(self.in_(self.short_ttr))
        # When a call reserves the job together with another job
        again = self.reserve(2)
        assert self.ids(again) == [first, second]
        # Then a late verdict on the first lease frees no slot, even in a call with a verdict on the other job
        lost = self.worker.settle([Ack(late), Ack(again[1])])
        assert [answer is None for answer in lost] == [False, True]
        assert self.states()["api"].running == 1
        assert [one.body for one in self.reserve(2)] == [b"c"]

    @promise("19.2", "4.2")
    def test_a_consumer_that_dies_uses_its_slots_until_the_leases_end(self) -> None:
        self.limit("api", slots=2)
        self.gated_all(*[b"x"] * 4, ttr=self.short_ttr)
        holder = self.another_consumer(backend=self.another_backend())
        assert len(self.reserve(by=holder)) == 2
        holder.held.clear()
        holder.close()
        if not self.can.disconnect_ends_lease:
            assert self.reserve() == []
        self.harness.past(self.in_(self.short_ttr))
        assert len(self.reserve()) == 2

    @promise("19.2", "19.4")
    def test_at_most_n_are_live_under_many_consumers(self) -> None:
        # Given many jobs, a limit of three slots, and many consumers that reserve and settle as fast as they can
        slots, jobs = 3, 8 * self.harness.rounds
        self.limit("api", slots=slots)
        self.gated_all(*[b"x"] * jobs, ttr=LONG)
        lock, live, most, done = threading.Lock(), 0, 0, 0

        def work(consumer: TrackedConsumer) -> None:
            nonlocal live, most, done
            while done < jobs:
                for lease in consumer.reserve(2, 0.05):
                    with lock:
                        live += 1
                        most = max(most, live)
                    time.sleep(0)
                    with lock:
                        live -= 1
                    self.settle(Ack(lease), by=consumer)
                    with lock:
                        done += 1

        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(CONSUMERS)]
        together([partial(work, consumer) for consumer in consumers])
        # Then there were never more live leases than slots, and each job ran
        assert most <= slots
        assert done == jobs
        assert self.counts() == (0, 0, 0, 0)
        assert self.states()["api"].running == 0

    # --- rates ---

    @promise("19.3")
    def test_a_burst_is_handed_out_at_once_and_then_one_at_a_time(self) -> None:
        # Given a rate of one job every few seconds, with a burst of three jobs
        pause = max(1.0, 2 * self.can.delay_resolution)
        self.limit("api", rate=1, per=pause, burst=3)
        ids = self.gated_all(*[b"x"] * 6, ttr=LONG)
        # Then three jobs are handed out together
        began = self.harness.now()
        assert self.ids(self.reserve()) == ids[:3]
        # And one more job is handed out with each interval
        for count in range(1, 3):
            self.nothing_before(began + count * pause)
            self.harness.past(began + count * pause)
            assert len(self.reserve()) <= 1
        assert 1 <= len(self.worker.held) - 3 <= 2

    @promise("19.3")
    def test_no_window_has_more_than_the_burst_and_its_share(self) -> None:
        # Given a rate, and consumers that reserve as fast as they can
        rate, burst, jobs = 40.0, 5, 40
        self.limit("api", rate=rate, burst=burst)
        self.gated_all(*[b"x"] * jobs, ttr=LONG)
        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(4)]
        taken: list[tuple[float, float]] = []  # the times before and after each call
        give_up_at = time.monotonic() + 3 * self.harness.patience

        def work(consumer: TrackedConsumer) -> None:
            while len(taken) < jobs and time.monotonic() < give_up_at:
                before = self.harness.now()
                leases = consumer.reserve(3, 0)
                taken.extend([(before, self.harness.now())] * len(leases))
                if not leases:
                    self.harness.advance(0.002)

        together([partial(work, consumer) for consumer in consumers])
        # Then no period has more jobs than the burst and the rate allow, and all jobs were handed out
        assert len(taken) == jobs
        for first, _ in taken:
            for last in (last for _, last in taken if last >= first):
                inside = sum(first <= before and after <= last for before, after in taken)
                assert inside <= burst + rate * (last - first) + 1e-6

    @promise("19.3", "5.5")
    @requires("give_back")
    def test_a_give_back_does_not_return_the_turn(self) -> None:
        self.limit("api", rate=1, per=LONG)
        self.gated(ttr=LONG)
        self.settle(GiveBack(self.take()))
        assert self.reserve() == []
        assert self.counts() == (1, 0, 0, 0)

    @promise("19.3", "19.2")
    def test_a_limit_can_have_slots_and_a_rate(self) -> None:
        # Given a limit of two slots, with a rate whose burst is three jobs
        self.limit("api", slots=2, rate=1, per=LONG, burst=3)
        self.gated_all(*[b"x"] * 5, ttr=LONG)
        # Then two jobs are handed out together
        leases = self.reserve()
        assert len(leases) == 2
        # When both jobs are done, then only a third job is handed out
        self.settle(*map(Ack, leases))
        assert len(self.reserve()) == 1
        assert self.reserve() == []

    @promise("19.3", "19.8")
    def test_a_faster_rate_does_not_wait_for_the_slower_one(self) -> None:
        self.limit("api", rate=1, per=LONG)
        ids = self.gated_all(b"a", b"b", ttr=LONG)
        assert self.ids(self.reserve()) == ids[:1]
        assert self.reserve() == []
        pause = self.short_delay
        self.limit("api", rate=1, per=pause)
        self.harness.past(self.in_(pause))
        assert self.ids(self.reserve()) == ids[1:]

    # --- several gates ---

    @promise("19.4")
    @pytest.mark.parametrize("closed", ["api", "smtp"])
    @pytest.mark.parametrize("kind", ["slots", "rate"])
    def test_a_job_with_a_closed_gate_counts_at_no_other(self, closed: str, kind: str) -> None:
        # Given two limits, one of which is closed
        other = "smtp" if closed == "api" else "api"
        self.limit(closed, slots=0)
        self.limit(other, **({"slots": 1} if kind == "slots" else {"rate": 1, "per": LONG}))
        both = self.gated(b"both", API, SMTP, ttr=LONG)
        assert self.reserve() == []
        # Then a job that has only the open limit's gate is handed out
        self.gated(b"one", Gate(other), ttr=LONG)
        (lease,) = self.reserve()
        assert lease.body == b"one"
        record = self.peek(both)
        assert (record.state, record.attempt, record.crashes) == (State.READY, 0, 0)
        # When both limits are open, then the job with both gates is handed out, too
        self.settle(Ack(lease))
        self.backend.limits(self.queue, {"api": None, "smtp": None})
        (lease,) = self.reserve()
        assert (lease.id, lease.attempt, lease.crashes) == (both, 1, 0)

    @promise("19.4", "19.7")
    def test_a_job_that_meets_one_closed_gate_after_the_other_is_handed_out(self) -> None:
        # Given jobs with two gates. Each gate has one slot, which another job uses
        self.limit("api", slots=1)
        self.limit("smtp", slots=1)
        self.gated(b"api", API, ttr=LONG)
        self.gated(b"smtp", SMTP, ttr=LONG)
        api, smtp = self.reserve()
        ids = [self.gated(b"both", API, SMTP, ttr=LONG) for _ in range(2)]
        behind = self.gated(b"behind", API, ttr=LONG)
        assert self.reserve() == []
        # When the first slot is free, then a job that needs no other slot is handed out
        self.settle(Ack(api))
        (lease,) = self.reserve()
        assert lease.id == behind
        # When both slots are free, then the jobs that need both slots are handed out, one after the other
        self.settle(Ack(lease), Ack(smtp))
        for job_id in ids:
            (lease,) = self.reserve()
            assert lease.id == job_id
            self.settle(Ack(lease))

    @promise("19.6", "19.4")
    @requires("total_order")
    def test_a_job_behind_one_that_waits_at_another_gate_is_next(self) -> None:
        # Given a job that waits for one of its gates. An older and a younger job wait behind it
        self.limit("api", slots=1)
        self.limit("smtp", slots=1)
        self.gated(b"smtp", SMTP, ttr=LONG)
        self.take()
        self.gated(b"both", API, SMTP, ttr=LONG)
        self.gated(b"api", API, ttr=LONG)
        self.enqueue(b"plain")
        # Then the older job goes first, even if the call asks for only one job
        bodies = [lease.body for _ in range(2) for lease in self.reserve(1)]
        assert self.in_line(bodies, [b"api", b"plain"])

    @promise("19.1", "19.4")
    def test_a_job_can_have_four_gates(self) -> None:
        gates = tuple(Gate(f"limit-{number}", "key") for number in range(4))
        for gate in gates:
            self.limit(gate.limit, slots=1)
        ids = [self.gated(b"x", *gates, ttr=LONG) for _ in range(2)]
        for job_id in ids:
            (lease,) = self.reserve()
            assert lease.id == job_id
            self.settle(Release(lease, delay=LONG))

    # --- parked jobs ---

    @promise("19.5", "9.1", "9.2", "9.5")
    def test_a_parked_job_is_ready_and_says_what_holds_it(self) -> None:
        # Given parked jobs, and another job
        self.limit("api", slots=1)
        gate = Gate("api", "7")
        ids = self.gated_all(b"a", b"b", b"c", gate=gate, ttr=LONG)
        (lease,) = self.reserve()
        plain = self.enqueue(b"plain")
        # Then the jobs are ready, and each job shows the limit and the key for which it waits
        assert self.counts() == (3, 0, 1, 0)
        record = self.peek(ids[1])
        assert (record.state, record.due_in, record.body) == (State.READY, 0, b"b")
        assert record.held_by == "limit api/7"
        listed = self.backend.jobs(self.queue, State.READY, limit=10).jobs
        assert sorted(one.id for one in listed) == sorted([*ids[1:], plain])
        assert {one.held_by for one in listed if one.id != plain} == {"limit api/7"}
        assert self.peek(plain).held_by is None
        assert self.peek(lease.id).held_by is None

    @promise("19.5", "9.3")
    def test_a_listing_in_pages_has_each_parked_job_once(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(*[b"x"] * 7, ttr=LONG)
        self.take()
        ids += self.enqueue_all(b"y", b"z")
        found: list[str] = []
        page = self.backend.jobs(self.queue, State.READY, limit=2)
        found += [job.id for job in page.jobs]
        while page.after is not None:
            page = self.backend.jobs(self.queue, State.READY, limit=2, after=page.after)
            found += [job.id for job in page.jobs]
        assert Counter(found) == Counter(ids[1:])

    @promise("19.5", "8.1")
    @requires("management")
    def test_a_parked_job_is_deleted(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", b"c", ttr=LONG)
        lease = self.take()
        self.backend.delete(self.queue, ids[1])
        self.settle(Ack(lease))
        assert self.ids(self.reserve()) == ids[2:]
        assert self.counts() == (0, 0, 1, 0)

    @promise("19.5", "10.4")
    @requires("total_order", "purging")
    def test_parked_jobs_are_purged(self) -> None:
        self.limit("api", slots=1)
        self.gated_all(*[b"x"] * 4, ttr=LONG)
        self.enqueue(b"plain")
        (lease,) = (one for one in self.reserve() if one.body != b"plain")
        assert self.backend.purge(self.queue, [State.READY]) == 3
        self.settle(Ack(lease))
        assert self.reserve() == []
        # The next job of the gate does not wait for jobs that are gone.
        job_id = self.gated(ttr=LONG)
        assert self.ids(self.reserve()) == [job_id]

    @promise("19.5", "7.1")
    @requires("management")
    def test_a_rescheduled_parked_job_keeps_its_gates(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", b"c", ttr=LONG)
        lease = self.take()
        assert self.reserve() == []
        moved = self.backend.reschedule(self.queue, ids[1], 0)
        assert self.reserve() == []
        self.settle(Ack(lease))
        order = []
        while leases := self.reserve():
            order += self.ids(leases)
            self.settle(*map(Ack, leases))
        assert order == [ids[2], moved]

    @promise("19.5", "7.1")
    @requires("management")
    def test_a_parked_job_can_be_delayed(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", ttr=LONG)
        lease = self.take()
        assert self.reserve() == []
        self.backend.reschedule(self.queue, ids[1], self.short_delay)
        self.settle(Ack(lease))
        assert self.counts() == (0, 1, 0, 0)
        self.harness.past(self.in_(self.short_delay))
        assert len(self.reserve()) == 1

    @promise("19.5", "6.2")
    @requires("management")
    def test_a_kick_opens_no_gate(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", ttr=LONG)
        lease = self.take()
        self.backend.kick_job(self.queue, ids[1])
        assert self.reserve() == []
        self.settle(Bury(lease))
        (other,) = self.reserve()
        self.backend.kick_job(self.queue, lease.id)
        assert self.reserve() == []
        self.settle(Ack(other))
        assert self.ids(self.reserve()) == [lease.id]

    @promise("19.5", "10.1")
    @requires("pausing")
    def test_a_paused_queue_hands_out_no_parked_job(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", ttr=LONG)
        lease = self.take()
        self.backend.pause(self.queue, LONG)
        self.settle(Ack(lease))
        assert self.reserve() == []
        self.backend.resume(self.queue)
        assert self.ids(self.reserve()) == ids[1:]

    @promise("19.4", "4.5")
    def test_waiting_at_a_gate_costs_neither_attempts_nor_age(self) -> None:
        # Given a job that has waited at a gate, and was peeked at many times
        self.limit("api", slots=0)
        job_id = self.gated(ttr=LONG)
        for _ in range(5):
            assert self.reserve() == []
        self.harness.advance(0.5)
        self.backend.limits(self.queue, {"api": Quota(slots=1)})
        # When the gate opens, then the job is in its first attempt, and its age includes the wait
        (lease,) = self.reserve()
        assert (lease.id, lease.attempt, lease.crashes, lease.kicks) == (job_id, 1, 0, 0)
        assert lease.age >= 0.5

    @promise("4.8", "3.3")
    def test_jobs_of_a_queue_after_one_with_gates_have_their_ages(self) -> None:
        # Given a queue with a job that has a gate, and a queue with a job that has no gate
        other = self.another_queue()
        ids = [self.gated(), self.enqueue(queue=other)]
        self.harness.advance(0.5)
        # When one call reserves both jobs, then each lease has the age of its job
        leases = self.reserve(by=self.another_consumer(self.queue, other))
        assert self.ids(leases) == ids
        assert min(lease.age for lease in leases) >= 0.5

    @promise("19.4", "13.1")
    @requires("memos")
    @pytest.mark.parametrize("memo", [b"", b"memo"], ids=["empty", "some bytes"])
    @pytest.mark.parametrize("doom", ["", "why"], ids=["not doomed", "doomed"])
    def test_a_gate_also_counts_for_a_job_with_a_memo(self, memo: bytes, doom: str) -> None:
        # Given two jobs with one gate. The first job has a memo, and possibly the reason of a doom
        self.limit("api", slots=1)
        terms = Terms(1 if doom else 0, gates=(API,))
        if doom:
            self.need("holds")
        first = self.enqueue(b"first", ttr=LONG, terms=terms)
        if doom:
            self.arrive(first, "a", doom=doom)
        second = self.gated(b"second", ttr=LONG)
        self.settle(Release(self.take(), after=After(memo=memo)))
        # When jobs are reserved, then the first job is handed out with its memo and its reason, and it uses the slot
        (lease,) = self.reserve()
        assert (lease.id, lease.memo, lease.doomed, lease.attempt) == (first, memo, doom, 2)
        assert self.reserve() == []
        # When the first job's lease ends, then the second job is handed out
        self.settle(Ack(lease))
        assert self.take().id == second

    # --- order ---

    @promise("19.6", "3.4")
    def test_parked_jobs_of_one_gate_keep_their_order(self) -> None:
        # Given a limit with one slot, and jobs of several priorities. The first job runs, and the other jobs are parked
        self.need("priorities")
        self.limit("api", slots=1)
        ids = []
        for priority in (5, 5, 1, 9, 1, 5, 0):
            ids.append(self.gated(b"%d" % priority, ttr=LONG, priority=priority))
            assert len(self.reserve()) <= 1
        order = []
        for _ in range(7):
            (lease,) = self.worker.held.values()
            order.append(lease)
            self.settle(Ack(lease))
            self.reserve()
        # Then the most urgent job goes first. Of equally urgent jobs, the oldest goes first
        assert [lease.body for lease in order] == [b"5", b"0", b"1", b"1", b"5", b"5", b"9"]
        assert [lease.id for lease in order if lease.body == b"5"] == [ids[0], ids[1], ids[5]]

    @promise("19.6", "3.5")
    def test_a_released_job_goes_before_parked_ones_that_are_younger(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", b"c", ttr=LONG)
        lease = self.take()
        assert self.reserve() == []
        self.settle(Release(lease))
        order = []
        while leases := self.reserve():
            order += self.ids(leases)
            self.settle(*map(Ack, leases))
        assert order == ids

    @promise("19.6")
    def test_other_jobs_do_not_wait_for_parked_ones(self) -> None:
        # Given parked jobs that are older and more urgent than the other jobs
        self.limit("api", slots=0)
        self.gated_all(*[b"parked"] * 20, priority=1 if self.can.priorities else PRIORITY_DEFAULT)
        plain = self.enqueue_all(b"a", b"b", b"c")
        keyed = self.gated(b"keyed", SMTP)
        # Then the other jobs are handed out
        order = self.ids(self.reserve(2)) + self.ids(self.reserve(2))
        assert self.in_line(order, [*plain, keyed])

    @promise("19.6", "3.3", "3.4")
    def test_jobs_with_open_gates_are_in_the_order_of_all_jobs(self) -> None:
        self.need("total_order")
        self.limit("api", slots=100)
        self.limit("smtp", rate=1000, burst=1000)
        ids = []
        for number in range(4):
            ids += [self.enqueue(b"%d" % number), self.gated(b"api"), self.gated(b"smtp", SMTP)]
            ids += [self.gated(b"both", API, SMTP)]
        assert self.ids(self.reserve(5)) == ids[:5]
        assert self.ids(self.reserve()) == ids[5:]

    # --- live changes ---

    @promise("19.8")
    def test_more_slots_and_fewer_take_effect_at_once(self) -> None:
        self.limit("api", slots=1)
        self.gated_all(*[b"x"] * 10, ttr=LONG)
        leases = self.reserve()
        assert len(leases) == 1
        self.limit("api", slots=4)
        leases += self.reserve()
        assert len(leases) == 4
        # With fewer slots than leases, the leases stay alive, and no job is handed out until enough leases have ended.
        self.limit("api", slots=2)
        self.settle(*map(Touch, leases))
        self.settle(*map(Ack, leases[:2]))
        assert self.reserve() == []
        self.settle(Ack(leases[2]))
        assert len(self.reserve()) == 1
        assert self.reserve() == []

    @promise("19.8")
    def test_a_removed_limit_is_open(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(*[b"x"] * 5, ttr=LONG)
        self.take()
        assert self.reserve() == []
        self.backend.limits(self.queue, {"api": None})
        assert self.ids(self.reserve()) == ids[1:]
        assert self.backend.limits(self.queue) == []

    @promise("19.8")
    def test_a_pinned_limit_is_changed_only_by_pinned_changes(self) -> None:
        self.limit("api")
        # Given a limit that the application's code has stored
        self.backend.limits(self.queue, {"api": None})
        self.backend.limits(self.queue, {"api": Quota(slots=1)}, pinned=False)
        assert (self.states()["api"].quota, self.states()["api"].is_pinned) == (Quota(slots=1), False)
        # Then the application's code may change the limit
        self.backend.limits(self.queue, {"api": Quota(slots=2)}, pinned=False)
        assert self.states()["api"].quota == Quota(slots=2)
        # When an operator sets the limit, then the application's code can no longer change the limit
        self.backend.limits(self.queue, {"api": Quota(slots=9)})
        found = self.backend.limits(self.queue, {"api": Quota(slots=2), "smtp": Quota(slots=3)}, pinned=False)
        self.limit("smtp", slots=3)
        assert [(one.name, one.quota, one.is_pinned) for one in found] == [
            ("api", Quota(slots=9), True),
            ("smtp", Quota(slots=3), False),
        ]

    @promise("19.10")
    @pytest.mark.parametrize(
        "quota",
        [
            Quota(slots=0), Quota(slots=2**31 - 1), Quota(rate=0.001, per=86400.0, burst=7), Quota(fair=True),
            Quota(slots=3, rate=12.5, per=60.0, burst=100, fair=True), Quota(rate=1e6), Quota(rate=1.0 / 3.0),
        ],
        ids=str,
    )  # fmt: skip
    def test_a_quota_is_returned_as_it_was_stored(self, quota: Quota) -> None:
        self.limit("api")
        (state,) = self.backend.limits(self.queue, {"api": quota})
        assert state.quota == quota
        assert self.another_backend().limits(self.queue) == [state]

    @promise("19.10", "9.4", "10.4")
    def test_limits_are_not_jobs(self) -> None:
        self.limit("api", slots=1)
        assert self.queue not in self.backend.queues()
        if self.can.purging:
            assert self.backend.purge(self.queue, [State.READY, State.BURIED]) == 0
        assert self.states()["api"].quota == Quota(slots=1)
        assert self.backend.limits(self.another_queue()) == []

    @promise("19.10")
    def test_limits_counts_keys_leases_and_parked_jobs(self) -> None:
        self.limit("api", slots=2)
        self.limit("smtp", slots=5)
        for key, count in (("a", 5), ("b", 1), ("c", 3)):
            self.gated_all(*[b"x"] * count, gate=Gate("api", key), ttr=LONG)
        self.reserve()
        api, smtp = self.backend.limits(self.queue)
        assert (api.name, api.keys, api.running, api.parked) == ("api", 3, 5, 4)
        assert api.top == [("a", 2, 3), ("c", 2, 1), ("b", 1, 0)]
        assert (smtp.keys, smtp.running, smtp.parked, smtp.top) == (0, 0, 0, [])

    @promise("19.8", "19.6", "3.2")
    @pytest.mark.parametrize("fair", [True, False])
    def test_the_next_reserve_finds_the_one_open_gate_among_many(self, fair: bool) -> None:
        # Given many jobs, each with its own key of a closed limit. All jobs except the last also have another closed
        # gate
        self.limit("api", slots=0, fair=fair)
        self.limit("all", slots=0)
        for key in range(120):
            self.gated(b"x", Gate("api", f"{key:03}"), Gate("all"))
        job_id = self.gated(b"x", Gate("api", "999"), ttr=LONG)
        assert self.reserve() == []
        # When the keys' limit opens, then the last job is handed out
        self.limit("api", slots=1, fair=fair)
        assert self.ids(self.reserve(1)) == [job_id]

    # --- fair limits ---

    @promise("19.9")
    def test_the_keys_of_a_fair_limit_share_the_leases(self) -> None:
        # Given a key with many jobs, and other keys whose jobs come later
        self.limit("tenant", fair=True)
        for key, count in (("a", 8), ("b", 2), ("c", 1)):
            self.gated_all(*[key.encode()] * count, gate=Gate("tenant", key), ttr=LONG)
        # Then the keys have their first leases in turn. The second lease goes to the key with the latest turn first
        bodies = [lease.body for lease in (self.take() for _ in range(11))]
        assert sorted(bodies[:3]) == [b"a", b"b", b"c"]
        second = bodies[1] if bodies[2] == b"c" else bodies[2]
        assert bodies[3:5] == ([b"b", b"a"] if second == b"b" else [b"a", b"b"])
        assert bodies[5:] == [b"a"] * 6

    @promise("19.9")
    def test_the_key_of_a_fair_limit_with_the_fewest_leases_is_next(self) -> None:
        # Given a key with three leases, and another key with one lease
        self.limit("tenant", fair=True)
        self.gated_all(*[b"a"] * 10, gate=Gate("tenant", "a"), ttr=LONG)
        first = [self.take(), self.take(), self.take()]
        self.gated_all(*[b"b"] * 10, gate=Gate("tenant", "b"), ttr=LONG)
        leases = [self.take()]
        # Then the other key has the next jobs until it has as many leases
        leases += [self.take(), self.take()]
        assert [lease.body for lease in leases] == [b"b"] * 3
        # When leases of one key end, then this key has the next jobs again
        self.settle(*map(Ack, first[:2]))
        assert [self.take().body for _ in range(2)] == [b"a"] * 2

    @promise("19.9")
    def test_keys_of_a_fair_limit_without_a_lease_take_turns(self) -> None:
        self.limit("tenant", fair=True)
        for key in "abc":
            self.gated_all(*[key.encode()] * 3, gate=Gate("tenant", key), ttr=LONG)
        bodies = []
        for _ in range(9):
            lease = self.take()
            bodies.append(lease.body)
            self.settle(Ack(lease))
        for turn in range(3):
            assert sorted(bodies[3 * turn : 3 * turn + 3]) == [b"a", b"b", b"c"]
        assert bodies == bodies[:3] * 3

    @promise("19.9")
    def test_a_key_behind_many_ready_jobs_of_another_key_has_its_turn(self) -> None:
        # Given a key with many jobs that no reserve has seen yet, and a key whose only job comes after all of them
        self.limit("tenant", fair=True)
        self.gated_all(*[b"a"] * 400, gate=Gate("tenant", "a"), ttr=LONG)
        self.gated_all(b"b", gate=Gate("tenant", "b"), ttr=LONG)
        # Then the first two jobs that start are those of two keys
        assert sorted(self.take().body for _ in range(2)) == [b"a", b"b"]

    @promise("19.9", "3.1")
    def test_the_jobs_of_one_call_are_in_the_order_of_their_turns(self) -> None:
        # Given a key with many jobs, and another key whose jobs come later
        self.limit("tenant", fair=True)
        for key, count in (("a", 3), ("b", 2)):
            self.gated_all(*[key.encode()] * count, gate=Gate("tenant", key), ttr=LONG)
        # Then a worker that takes many jobs at a time gets the jobs in the order in which single calls return them
        assert [lease.body for lease in self.reserve()] == [b"a", b"b", b"b", b"a", b"a"]

    @promise("19.9", "19.2")
    def test_a_fair_limit_keeps_to_its_slots(self) -> None:
        self.limit("tenant", slots=2, fair=True)
        for key, count in (("a", 8), ("b", 3)):
            self.gated_all(*[key.encode()] * count, gate=Gate("tenant", key), ttr=LONG)
        leases = self.reserve()
        assert Counter(lease.body for lease in leases) == {b"a": 2, b"b": 2}
        self.settle(*map(Ack, leases))
        assert Counter(lease.body for lease in self.reserve()) == {b"a": 2, b"b": 1}

    @promise("19.9", "19.4")
    def test_a_fair_limit_beside_one_for_all_keys(self) -> None:
        # Given jobs with two gates: a limit with two slots for all jobs, and a fair limit with a key for each tenant
        self.limit("all", slots=2)
        self.limit("tenant", fair=True)
        for key, count in (("a", 20), ("b", 3), ("c", 1)):
            for _ in range(count):
                self.gated(key.encode(), Gate("all"), Gate("tenant", key), ttr=LONG)
        # When the jobs are done one after the other, then the other tenants need not wait for the busy tenant
        order: list[bytes] = []
        leases = self.reserve()
        while leases:
            assert len(leases) <= 2
            order.append(leases[0].body)
            self.settle(Ack(leases[0]))
            leases = [*leases[1:], *self.reserve()]
        assert len(order) == 24
        assert b"c" in order[:5]
        assert order[:10].count(b"b") == 3

    @promise("19.9", "3.4")
    def test_urgent_jobs_of_a_fair_limit_go_first(self) -> None:
        self.need("priorities")
        self.limit("tenant", fair=True)
        self.gated_all(b"a1", b"a2", gate=Gate("tenant", "a"), ttr=LONG, priority=1)
        self.gated_all(b"b1", gate=Gate("tenant", "b"), ttr=LONG, priority=5)
        assert self.bodies() == [b"a1", b"a2", b"b1"]

    @promise("19.9", "19.6")
    @pytest.mark.parametrize("how", ["delete", "delete_many", "purge", "reschedule", "replace"])
    def test_the_next_job_of_a_key_goes_when_the_first_one_no_longer_waits(self, how: str) -> None:
        # Given a key whose first job waits for another limit
        self.limit("all", slots=0)
        self.limit("tenant", fair=True)
        tenant = Gate("tenant", "a")
        key = None
        if how == "replace":
            self.need("unique")
            key = UniqueKey(b"k", on_conflict="replace")
        first = self.enqueue(b"first", terms=Terms(unique=key, gates=(Gate("all"), tenant)))
        if how != "purge":
            self.gated(b"next", tenant)
        assert self.reserve() == []
        # When the waiting job is deleted, is behind the key's other jobs, or has other gates
        if how == "delete":
            self.backend.delete(self.queue, first)
        elif how == "delete_many":
            assert self.backend.delete_many(self.queue, [first]) == [None]
        elif how == "purge":
            self.need("purging")
            assert self.backend.purge(self.queue, [State.READY]) == 1
            self.gated(b"next", tenant)
        elif how == "reschedule":
            self.backend.reschedule(self.queue, first, 0)
        else:
            self.enqueue(b"other", terms=Terms(unique=key, gates=(Gate("tenant", "b"),)))
        # Then the next job of the key is handed out
        assert b"next" in self.bodies()

    @promise("19.9", "3.4")
    def test_an_urgent_job_goes_before_the_first_job_of_its_key_that_waits(self) -> None:
        self.need("priorities")
        self.limit("all", slots=0)
        self.limit("tenant", fair=True)
        self.gated(b"waits", Gate("all"), Gate("tenant", "a"))
        assert self.reserve() == []
        self.gated(b"urgent", Gate("tenant", "a"), priority=1)
        assert self.bodies() == [b"urgent"]

    @promise("19.9", "3.4")
    def test_an_urgent_job_before_the_first_job_of_its_key_that_waits_has_its_turn(self) -> None:
        # Given a key whose only job waits for another limit, and another key that has had a turn during the wait
        self.need("priorities")
        self.limit("all", slots=0)
        self.limit("tenant", fair=True)
        self.gated(b"waits", Gate("all"), Gate("tenant", "a"), priority=9)
        self.gated(b"b1", Gate("tenant", "b"), priority=5, ttr=LONG)
        assert self.take().body == b"b1"
        # When both keys have a more urgent job
        self.gated(b"b2", Gate("tenant", "b"), priority=5, ttr=LONG)
        self.gated(b"a", Gate("tenant", "a"), priority=5, ttr=LONG)
        # Then the first key has its turn before the other key
        assert [self.take().body for _ in range(2)] == [b"a", b"b2"]

    @promise("19.9", "3.4")
    def test_one_call_hands_out_the_jobs_of_a_gate_that_opens_before_less_urgent_ones(self) -> None:
        # Given two keys whose jobs wait for another limit
        self.need("priorities")
        self.limit("all", slots=0)
        self.limit("tenant", fair=True)
        for key, priority in (("a", 1), ("b", 5)):
            self.gated(key.encode(), Gate("all"), Gate("tenant", key), priority=priority, ttr=LONG)
        assert self.reserve() == []
        # When the other limit changes, and a less urgent job of a third key comes
        self.limit("all", slots=5)
        self.gated(b"c", Gate("tenant", "c"), priority=9, ttr=LONG)
        # Then one call hands out all jobs in the order of their priorities
        assert [lease.body for lease in self.reserve()] == [b"a", b"b", b"c"]

    @promise("19.9", "19.6")
    def test_the_order_of_a_key_stays_when_its_limit_becomes_fair(self) -> None:
        # Given jobs with two limits. The jobs wait at the first limit
        self.limit("all", slots=0)
        gates = Gate("all"), Gate("tenant", "a")
        first = self.gated(b"1", *gates, ttr=LONG)
        assert self.reserve() == []
        # When the second limit becomes fair, and another job of both limits is enqueued
        self.limit("tenant", fair=True, slots=1)
        second = self.gated(b"2", *gates, ttr=LONG)
        self.limit("all", slots=5)
        # Then the jobs are handed out in their order
        for expected in (first, second):
            (lease,) = self.reserve()
            assert lease.id == expected
            self.settle(Ack(lease))

    @promise("19.6", "19.7")
    @requires("management", "purging")
    @pytest.mark.parametrize("leaving", ["delete", "reschedule"])
    @pytest.mark.parametrize("before", [True, False])
    def test_a_gate_stays_open_for_the_others_when_the_jobs_leave_that_could_use_it(
        self, leaving: str, before: bool
    ) -> None:
        # Given a fair limit with many keys, and one slot for all jobs, which is taken. Each key has one waiting job
        self.limit("all", slots=1)
        self.limit("tenant", fair=True)
        self.gated(b"first", Gate("all"), ttr=LONG)
        (lease,) = self.reserve()
        ids = [self.gated(str(key).encode(), Gate("all"), Gate("tenant", str(key)), ttr=LONG) for key in range(25)]
        assert self.reserve() == []
        # When the slot is free, and most of the jobs are deleted or delayed before they run
        if not before:
            self.settle(Ack(lease))
        for job_id in ids[:20]:
            if leaving == "delete":
                self.backend.delete(self.queue, job_id)
            else:
                self.backend.reschedule(self.queue, job_id, LONG)
        if before:
            self.settle(Ack(lease))
        # Then the remaining jobs run one after another
        done: list[str] = []
        while leases := self.reserve():
            done += self.ids(leases)
            self.settle(*map(Ack, leases))
        assert sorted(done) == sorted(ids[20:])

    # --- jobs of every origin ---

    @promise("19.2", "2.5", "2.4")
    def test_delayed_jobs_meet_their_gates_when_they_are_due(self) -> None:
        self.limit("api", slots=1)
        ids = self.gated_all(b"a", b"b", b"c", ttr=LONG, delay=self.short_delay)
        if self.can.client_ids:
            assert self.gated(id=ids[0]) == ids[0]
        self.harness.past(self.in_(self.short_delay))
        leases = self.reserve()
        assert len(leases) == 1
        assert self.reserve() == []
        self.settle(Ack(leases[0]))
        assert len(self.reserve()) == 1

    @promise("19.2", "14.3")
    @requires("holds")
    def test_held_jobs_meet_their_gates_when_they_are_released(self) -> None:
        self.limit("api", slots=1)
        ids = [self.enqueue(terms=Terms(awaits=1, gates=(API,)), ttr=LONG) for _ in range(2)]
        for job_id in ids:
            self.arrive(job_id, "member")
        leases = self.reserve()
        assert self.ids(leases) == ids[:1]
        assert self.reserve() == []
        self.settle(Ack(leases[0]))
        assert self.ids(self.reserve()) == ids[1:]

    @promise("19.2", "15.1")
    @requires("holds")
    def test_jobs_that_steps_enqueue_meet_their_gates(self) -> None:
        # Given a job whose ack enqueues jobs with gates, in the job's queue and in another queue
        other = self.another_queue()
        for queue in (self.queue, other):
            self.limit("api", queue=queue, slots=1)
        self.enqueue(ttr=LONG)
        terms = Terms(gates=(API,))
        steps = tuple(
            Enqueue(queue, self.new(b"x", ttr=LONG, terms=terms)) for queue in (self.queue, other) for _ in range(3)
        )
        lease = self.take()
        self.settle(Ack(lease, After(steps=steps)))
        self.backend.relay([self.queue])
        # Then one job of each queue is handed out at a time
        for _ in range(3):
            leases = self.reserve(by=self.another_consumer(self.queue, other))
            assert sorted(one.queue for one in leases) == sorted([self.queue, other])
            self.settle(*map(Ack, leases))
        # And the jobs that carry_out enqueues are also handed out one at a time
        self.backend.carry_out([Enqueue(self.queue, self.new(b"y", ttr=LONG, terms=terms)) for _ in range(3)])
        assert len(self.reserve()) == 1

    @promise("19.2", "2.7")
    @requires("transactional_enqueue")
    def test_jobs_of_a_callers_transaction_meet_their_gates(self) -> None:
        self.limit("api", slots=1)
        terms = Terms(gates=(API,))
        with self.transaction() as connection:
            jobs = [self.new(b"x", ttr=LONG, terms=terms) for _ in range(3)]
            self.backend.enqueue(self.queue, jobs, connection=connection)
            connection.commit()
        for _ in range(3):
            leases = self.reserve()
            assert len(leases) == 1
            self.settle(*map(Ack, leases))

    @promise("19.2", "13.1")
    @requires("memos")
    def test_a_job_with_gates_keeps_memos_and_outcomes(self) -> None:
        self.limit("api", slots=1)
        job_id = self.gated(b"body" * 1000, ttr=LONG)
        self.gated(b"", ttr=LONG)
        lease = self.take()
        self.settle(Touch(lease, After(memo=b"memo")))
        assert self.reserve() == []
        self.settle(Release(lease, reason="why", after=After(memo=b"memo 2", detail=b"detail")))
        (again,) = self.reserve()
        assert (again.id, again.body, again.memo, again.attempt) == (job_id, b"body" * 1000, b"memo 2", 2)
        assert (self.peek(job_id).reason, self.peek(job_id).detail) == ("why", b"detail")
        self.settle(Ack(again, After(keep=LONG, outcome=b"done") if self.can.outcomes else None))
        assert [one.body for one in self.reserve()] == [b""]

    # --- most_gated ---

    @promise("19.11")
    def test_a_consumer_can_bound_its_jobs_with_gates(self) -> None:
        # Given jobs with gates that are open, and jobs without gates
        self.need("total_order")
        self.limit("api", slots=10)
        gated = self.gated_all(*[b"gated"] * 4, ttr=LONG)
        plain = self.enqueue_all(*[b"plain"] * 3, ttr=LONG)
        # When the consumer takes at most one job with gates, or none, then it still gets the jobs without gates
        self.worker.most_gated = 1
        assert sorted(self.ids(self.reserve(3))) == sorted([gated[0], *plain[:2]])
        self.worker.most_gated = 0
        assert self.ids(self.reserve(3)) == plain[2:]
        assert self.reserve() == []
        self.worker.most_gated = None
        assert self.ids(self.reserve()) == gated[1:]


@requires("limits", "unique", "inspection", "management")
class LimitsUniqueTests(_LimitsTopic):
    """Jobs that have both a unique key and gates."""

    @promise("18.1", "18.2", "19.5")
    @pytest.mark.parametrize("until", ["gone", "buried", "reserved"])
    def test_a_parked_job_has_its_key(self, until: str) -> None:
        # Given a limit with one slot, and a job that waits for the slot
        self.limit("api", slots=1)
        first = self.add(b"first", key=b"1", until=until)
        lease = self.take()
        second = self.add(b"second", key=b"2", until=until)
        assert self.reserve() == []
        # Then the waiting job's key is taken, and an enqueue with the key does not change the waiting job
        assert self.add(b"other", key=b"2", until=until) == second
        assert (self.peek(second).body, self.peek(second).held_by) == (b"second", "limit api")
        assert self.states()["api"].parked == 1
        # When the job was reserved, then its key is free only if ``until`` is "reserved"
        self.settle(Ack(lease))
        assert self.ids(self.reserve()) == [second]
        assert (self.add(b"third", key=b"2", until=until) != second) == (until == "reserved")
        # And the key of the deleted job is free
        assert self.add(b"fourth", key=b"1") != first

    @promise("18.5", "19.5")
    def test_a_parked_job_that_is_replaced_stays_parked(self) -> None:
        self.limit("api", slots=1)
        self.add(key=b"1")
        lease = self.take()
        parked = [self.add(b"old", key=key) for key in (b"2", b"3")]
        assert self.reserve() == []
        # When the first parked job is replaced
        assert self.add(b"new", key=b"2", on_conflict="replace") == parked[0]
        # Then the replaced job waits at the same place, with the new body
        assert self.reserve() == []
        assert self.states()["api"].parked == 2
        self.settle(Ack(lease))
        (lease,) = self.reserve()
        assert (lease.id, lease.body, lease.attempt) == (parked[0], b"new", 1)
        assert self.reserve() == []

    @promise("18.5", "19.1")
    @pytest.mark.parametrize("state", [State.READY, State.DELAYED, State.HELD], ids=str)
    def test_a_replaced_job_has_the_new_gates(self, state: State) -> None:
        # Given a job that waits, perhaps at a closed gate
        self.limit("api", slots=0)
        self.limit("smtp", slots=1)
        if state is State.HELD:
            self.need("holds")
        job_id = self.add(
            key=b"1", delay=LONG if state is State.DELAYED else 0, awaits=int(state is State.HELD), gates=(API,)
        )
        assert self.reserve() == []
        # When the waiting job is replaced by a job with another gate
        assert self.add(b"new", key=b"1", on_conflict="replace", gates=(SMTP,)) == job_id
        if state is State.HELD:
            self.arrive(job_id, "member")
        # Then only the new gate counts for the job
        (lease,) = self.reserve()
        assert lease.id == job_id
        assert {name: state.running for name, state in self.states().items()} == {"api": 0, "smtp": 1}
        self.settle(Release(lease))
        # And a job without gates replaces a job with gates
        self.backend.limits(self.queue, {"smtp": Quota(slots=0)})
        assert self.reserve() == []
        assert self.add(b"plain", key=b"1", on_conflict="replace", gates=()) == job_id
        assert [one.body for one in self.reserve()] == [b"plain"]
        assert sum(one.running + one.parked for one in self.states().values()) == 0

    @promise("18.5", "19.2", "4.2")
    @pytest.mark.parametrize("by", ["replace", "delete"])
    def test_a_job_that_gets_other_gates_after_its_lease_has_ended_uses_no_slot_of_the_old_gate(self, by: str) -> None:
        # Given a job that uses a slot, and whose lease ends
        self.limit("api", slots=1)
        job_id = self.add(b"first", key=b"1", ttr=self.short_ttr)
        self.take()
        self.harness.past(self.in_(self.short_ttr))
        # When a job without gates replaces the job, or is enqueued under its id, and a new consumer reserves this job
        if by == "replace":
            assert self.add(b"plain", key=b"1", on_conflict="replace", gates=()) == job_id
        else:
            self.need("client_ids")
            self.backend.delete(self.queue, job_id)
            self.enqueue(b"plain", id=job_id, ttr=LONG)
        (lease,) = self.reserve(by=self.another_consumer(backend=self.another_backend()))
        assert (lease.id, lease.body) == (job_id, b"plain")
        # Then the slot is free for another job
        other = self.gated(b"other", ttr=LONG)
        assert self.ids(self.reserve()) == [other]
        assert self.states()["api"].running == 1

    @promise("18.5", "19.2")
    def test_a_job_that_is_replaced_in_its_fair_line_waits_at_its_new_gates(self) -> None:
        # Given a job that waits in the line of a fair limit, because another of its gates is closed
        self.limit("api", slots=0)
        self.limit("tenant", fair=True)
        job_id = self.add(key=b"1", gates=(API, Gate("tenant", "a")))
        assert self.reserve() == []
        # When the waiting job is replaced by a job that has only a closed gate
        other = Gate("api", "other")
        assert self.add(b"new", key=b"1", on_conflict="replace", gates=(other,)) == job_id
        # Then the new job waits until the closed gate opens
        assert self.reserve() == []
        assert self.states()["api"].running == 0
        self.limit("api", slots=1)
        assert [(lease.id, lease.body) for lease in self.reserve()] == [(job_id, b"new")]

    @promise("18.1", "19.2")
    def test_an_enqueue_that_meets_a_key_uses_no_slot(self) -> None:
        self.limit("api", slots=2)
        job_id = self.add(key=b"1", hold=LONG)
        (lease,) = self.reserve()
        for _ in range(3):
            assert self.add(key=b"1", on_conflict="replace") == job_id
        self.settle(Ack(lease))
        assert self.add(key=b"1") == job_id
        assert (self.states()["api"].running, self.states()["api"].parked) == (0, 0)
        assert self.counts() == (0, 0, 0, 0)

    @promise("18.6", "19.5")
    def test_a_kicked_job_meets_its_key_before_its_gates(self) -> None:
        # Given a buried job, and a running job that has taken the buried job's key
        self.limit("api", slots=1)
        buried = self.add(b"first", key=b"1", until="buried")
        self.settle(Bury(self.take()))
        second = self.add(b"second", key=b"1", until="buried")
        lease = self.take()
        assert lease.id == second
        # Then the buried job is not kicked
        with pytest.raises(UniqueTaken):
            self.backend.kick_job(self.queue, buried)
        assert self.backend.kick(self.queue, 10) == 0
        assert self.states()["api"].parked == 0
        # When the key is free, then the buried job is kicked, and uses the slot
        self.settle(Ack(lease))
        self.backend.kick_job(self.queue, buried)
        assert self.ids(self.reserve()) == [buried]
        assert self.states()["api"].running == 1

    def add(
        self, body: bytes = b"x", *, key: bytes, gates: tuple[Gate, ...] = (API,), awaits: int = 0, delay: float = 0,
        ttr: float = LONG, **unique: Any,
    ) -> str:  # fmt: skip
        """Enqueue a job with a key and gates. Returns the id that the enqueue returned."""
        terms = Terms(awaits, UniqueKey(key, **unique), gates)
        (job_id,) = self.backend.enqueue(self.queue, [self.new(body, terms=terms, ttr=ttr, delay=delay)])
        return job_id


class LimitsWakingTests(_LimitsTopic):
    """Waiting consumers wake when a gate opens."""

    @promise("19.7", "3.10")
    @pytest.mark.parametrize("verdict", [*FREEING, "delayed release"])
    def test_a_verdict_wakes_a_waiting_consumer(self, verdict: str) -> None:
        # Given a job that waits at a gate, and a consumer that waits for the job
        self.limit("api", slots=1)
        lease = self._running()
        waiting = self.waiting(self.another_consumer(backend=self.another_backend()))
        # When the running job's verdict comes
        settled: Verdict = Release(lease, delay=LONG) if verdict == "delayed release" else VERDICTS[verdict](lease)
        self.settle(settled)
        # Then the consumer wakes
        assert len(self.woken(waiting)) == 1

    @promise("19.7", "4.2")
    def test_the_end_of_a_lease_wakes_a_waiting_consumer(self) -> None:
        self.limit("api", slots=1)
        self._running(ttr=self.short_ttr)
        waiting = self.waiting(self.another_consumer())
        self.harness.past(self.in_(self.short_ttr))
        assert len(self.woken(waiting)) == 1

    @promise("19.7", "19.3")
    def test_a_rate_that_opens_wakes_a_waiting_consumer(self) -> None:
        pause = self.short_delay
        self.limit("api", rate=1, per=pause)
        self._running()
        began = self.in_(0)
        waiting = self.waiting(self.another_consumer())
        self.harness.past(self.in_(pause))
        assert len(self.woken(waiting)) == 1
        assert self.harness.now() >= began

    @promise("19.7", "19.3")
    def test_a_rate_that_opens_wakes_a_consumer_that_waited_before_the_job_came(self) -> None:
        pause = max(0.5, self.short_delay)  # seconds; so that the job comes before the gate opens
        self.limit("api", rate=1, per=pause)
        self.gated(b"first", ttr=LONG)
        self.take()
        opens = self.in_(pause)
        waiting = self.waiting(self.another_consumer(backend=self.another_backend()))
        self.gated(b"second", ttr=LONG)
        self.harness.past(opens)
        assert len(self.woken(waiting)) == 1

    @promise("19.7", "19.8")
    @pytest.mark.parametrize("quota", [Quota(slots=2), Quota(rate=1000.0), None], ids=str)
    def test_a_changed_quota_wakes_a_waiting_consumer(self, quota: Quota | None) -> None:
        self.limit("api", slots=1)
        self._running()
        waiting = self.waiting(self.another_consumer())
        self.another_backend().limits(self.queue, {"api": quota})
        assert len(self.woken(waiting)) == 1

    @promise("19.7")
    def test_each_slot_that_is_free_is_used(self) -> None:
        # Given a limit with one slot, and consumers that wait for its jobs. Each consumer settles each job immediately
        self.limit("api", slots=1)
        jobs = 5 * self.harness.rounds
        self.gated_all(*[b"x"] * jobs, ttr=LONG)
        done: list[str] = []
        give_up_at = time.monotonic() + 6 * self.harness.patience

        def work(consumer: TrackedConsumer) -> None:
            while len(done) < jobs and time.monotonic() < give_up_at:
                for lease in consumer.reserve(1, 0.5):
                    self.settle(Ack(lease), by=consumer)
                    done.append(lease.id)

        consumers = [self.another_consumer(backend=self.another_backend()) for _ in range(4)]
        together([partial(work, consumer) for consumer in consumers])
        # Then all jobs are done
        assert len(done) == jobs

    @promise("19.7")
    def test_parked_jobs_do_not_make_a_consumer_spin(self) -> None:
        # Given many parked jobs of many keys, and a consumer that waits
        self.limit("api", slots=0)
        for number in range(20):
            self.gated_all(*[b"x"] * 10, gate=Gate("api", str(number)))
        consumer = self.another_consumer()
        assert consumer.reserve(10, 0) == []
        # Then the consumer uses little of the processor while it waits
        before = time.process_time()
        assert consumer.reserve(10, WATCHED) == []
        assert time.process_time() - before < SPINNING * WATCHED

    @promise("19.7", "19.11")
    def test_a_job_that_may_not_be_taken_does_not_make_a_consumer_spin(self) -> None:
        self.limit("api", slots=5)
        self.gated_all(*[b"x"] * 3)
        consumer = self.another_consumer()
        consumer.most_gated = 0
        before = time.process_time()
        assert consumer.reserve(10, WATCHED) == []
        assert time.process_time() - before < SPINNING * WATCHED
        # And a job without gates wakes the consumer
        waiting = self.waiting(consumer)
        job_id = self.enqueue(b"plain")
        assert [lease.id for lease in self.woken(waiting)] == [job_id]

    def _running(self, ttr: float = LONG) -> Lease:
        """Reserve one of two jobs that have the gate. The other job then waits at the gate."""
        self.gated_all(b"a", b"b", ttr=ttr)
        lease = self.take()
        assert self.reserve() == []
        return lease
