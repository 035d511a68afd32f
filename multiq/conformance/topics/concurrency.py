"""Races: threads start at the same moment, each with its own backend object, in many rounds."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest

from multiq.backend import Ack, After, Bury, Release, State
from multiq.conformance.case import ALL, LONG, Topic, TrackedConsumer, promise, requires
from multiq.conformance.forks import ended_well, fork
from multiq.conformance.threads import HANGS, together
from multiq.errors import JobNotFound, JobReserved, LeaseLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, JobRecord, Lease, Outcome


class ConcurrencyTests(Topic):
    # --- reserving ---

    @promise("3.6", "11.4")
    def test_no_job_is_handed_to_two_consumers(self) -> None:
        # Given many jobs, and consumers that reserve one job at a time as fast as they can
        ids = self.enqueue_all(*[b"x"] * 200, ttr=LONG)
        consumers = self._consumers_of_their_own()
        # When all consumers begin at the same time
        taken = together([self._taking(consumer, limit=1) for consumer in consumers])
        # Then each job was handed out once, and no job is left
        assert Counter(lease.id for leases in taken for lease in leases) == Counter(ids)

    @promise("3.6", "3.1")
    def test_no_job_is_in_two_batches(self) -> None:
        # Given many jobs, and consumers that reserve batches, which might overlap
        ids = self.enqueue_all(*[b"x"] * 300, ttr=LONG)
        consumers = self._consumers_of_their_own()
        # When all consumers begin at the same time
        taken = together([self._taking(consumer, limit=7) for consumer in consumers])
        # Then each job was handed out once, and no job is left
        assert Counter(lease.id for leases in taken for lease in leases) == Counter(ids)

    @promise("3.6")
    def test_of_many_that_want_one_job_one_gets_it(self) -> None:
        consumers = self._consumers_of_their_own()
        for _ in range(self.harness.rounds):
            # Given one job
            self.enqueue(ttr=LONG)
            # When all consumers reserve at the same time
            taken = together([self._reserving(consumer) for consumer in consumers])
            # Then one consumer has the job
            assert sum(map(len, taken)) == 1
            self._ack_all(consumers)

    @promise("3.6", "4.2")
    def test_of_many_that_want_an_abandoned_job_one_gets_it(self) -> None:
        # Given abandoned jobs
        ids = self.enqueue_all(*[b"x"] * 20, ttr=self.short_ttr)
        self.reserve()
        self.harness.past(self.in_(self.short_ttr))
        # When all consumers reserve at the same time, in small batches
        consumers = self._consumers_of_their_own()
        taken = together([self._taking(consumer, limit=3) for consumer in consumers])
        # Then each job has one new holder, and one crash
        leases = [lease for batch in taken for lease in batch]
        assert Counter(lease.id for lease in leases) == Counter(ids)
        assert {lease.crashes for lease in leases} == {1}

    @promise("3.6", "2.5")
    def test_of_many_that_want_due_jobs_each_gets_others(self) -> None:
        # Given delayed jobs that are due by now, and that no call has made ready yet
        ids = self.enqueue_all(*[b"x"] * 40, delay=self.short_delay, ttr=LONG)
        self.harness.past(self.in_(self.short_delay))
        # When all consumers reserve at the same time
        consumers = self._consumers_of_their_own()
        taken = together([self._taking(consumer, limit=3) for consumer in consumers])
        # Then each job was handed out once
        assert Counter(lease.id for batch in taken for lease in batch) == Counter(ids)

    @promise("3.6", "3.1")
    def test_one_greedy_consumer_does_not_starve_another(self) -> None:
        # Given more jobs than one batch
        self.enqueue_all(*[b"x"] * 60, ttr=LONG)
        greedy, modest = self.another_consumer(), self.another_consumer(backend=self.another_backend())
        # When one consumer has reserved 50 jobs
        assert len(self.reserve(50, by=greedy)) == 50
        # Then the other consumer gets the remaining jobs
        assert len(self.reserve(50, by=modest)) == 10

    # --- settling ---

    @promise("5.7", "5.8")
    def test_all_consumers_settle_at_once(self) -> None:
        # Given consumers that hold many jobs each
        self.enqueue_all(*[b"x"] * 160, ttr=LONG)
        consumers = self._consumers_of_their_own()
        for consumer in consumers:
            self.reserve(160 // len(consumers), by=consumer)
        # When each consumer acks and releases by turns, one job at a time
        together([self._settling(consumer) for consumer in consumers])
        # Then every verdict was carried out
        assert self.counts() == (80, 0, 0, 0)

    @promise("3.6", "4.4", "11.1")
    def test_nothing_is_lost_or_doubled_between_producers_and_consumers(self) -> None:
        # Given producers that enqueue, and consumers that release each job once before they ack the job
        total, producers = 120, 2
        consumers = self._consumers_of_their_own()
        backends = [self.another_backend() for _ in range(producers)]
        acked: list[str] = []

        def produce(backend: Backend) -> list[str]:
            batches = [[self.new(b"x", ttr=LONG) for _ in range(4)] for _ in range(total // producers // 4)]
            return [job_id for batch in batches for job_id in backend.enqueue(self.queue, batch)]

        def consume(consumer: TrackedConsumer) -> list[str]:
            verdicts: list[Ack | Release] = []
            give_up_at = time.monotonic() + HANGS
            while len(acked) < total and time.monotonic() < give_up_at:
                answers, leases = consumer.exchange(verdicts, 5, 0.05)
                assert answers == [None] * len(verdicts)
                acked.extend(verdict.lease.id for verdict in verdicts if isinstance(verdict, Ack))
                verdicts = [Ack(lease) if lease.attempt > 1 else Release(lease) for lease in leases]
            return []

        works: list[Callable[[], list[str]]] = []
        works += [lambda backend=backend: produce(backend) for backend in backends]  # type: ignore[misc]
        works += [lambda consumer=consumer: consume(consumer) for consumer in consumers]  # type: ignore[misc]
        # When all producers and consumers run at the same time
        enqueued = [job_id for ids in together(works) for job_id in ids]
        # Then each job was acked exactly once
        assert Counter(acked) == Counter(enqueued)
        assert self.counts() == (0, 0, 0, 0)

    # --- outcomes and memos ---

    @promise("12.1")
    @requires("outcomes", "inspection")
    def test_no_job_is_gone_without_its_outcome(self) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a reserved job. An observer peeks at the job until it is gone, and then reads its outcome
            job_id = self.enqueue(ttr=LONG)
            lease = self.take()

            def look(job_id: str = job_id) -> Sequence[Outcome | None]:
                while self._is_there(job_id, observer):
                    pass
                return observer.outcomes(self.queue, [job_id])

            # When the job is acked at the same time, then the observer sees the job's outcome
            looking = self.background(look)
            self.settle(Ack(lease, After(keep=LONG, outcome=b"result")))
            (outcome,) = looking.result(HANGS)
            assert outcome is not None, "the job was gone, and its outcome was not there"
            assert outcome.body == b"result"

    @promise("12.11")
    @requires("outcomes", "one_step", "inspection", "management")
    def test_no_job_is_deleted_without_the_outcome_that_the_call_keeps(self) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a job. An observer peeks at the job until it is gone, and then reads its outcome
            job_id = self.enqueue()

            def look(job_id: str = job_id) -> Sequence[Outcome | None]:
                while self._is_there(job_id, observer):
                    pass
                return observer.outcomes(self.queue, [job_id])

            # When the job is deleted at the same time, then the observer sees the job's outcome
            looking = self.background(look)
            after = After(keep=LONG, outcome=b"why", kind="cancelled")
            assert self.backend.delete_many(self.queue, [job_id], after=after) == [None]
            (outcome,) = looking.result(HANGS)
            assert outcome is not None, "the job was gone, and its outcome was not there"
            assert outcome.body == b"why"

    @promise("12.1", "12.5")
    @requires("outcomes", "inspection", "one_step")
    @pytest.mark.parametrize("verb", ["outcomes", "history"])
    def test_no_outcome_is_there_before_its_job_is_gone(self, verb: str) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a reserved job. An observer reads its outcome until there is one, and then peeks at the job
            job_id = self.enqueue(ttr=LONG)
            lease = self.take()

            def look(job_id: str = job_id) -> bool:
                give_up_at = time.monotonic() + HANGS
                while time.monotonic() < give_up_at:
                    found = (
                        observer.outcomes(self.queue, [job_id])
                        if verb == "outcomes"
                        else observer.history(self.queue, limit=1000).outcomes
                    )
                    if any(outcome is not None and outcome.id == job_id for outcome in found):
                        return self._is_there(job_id, observer)
                raise AssertionError("no outcome was kept")

            # When the job is acked at the same time, then the observer finds no job
            looking = self.background(look)
            self.settle(Ack(lease, After(keep=LONG)))
            assert not looking.result(HANGS), "the outcome was there, and so was its job"

    @promise("12.2", "5.8")
    @requires("outcomes", "portable_leases")
    def test_of_many_that_ack_one_lease_the_one_that_is_accepted_keeps_its_outcome(self) -> None:
        consumers = self._consumers_of_their_own()
        for _ in range(self.harness.rounds):
            # Given a lease that several clients know
            job_id = self.enqueue(ttr=LONG)
            lease = self.take()
            # When each client acks the lease at the same time, each with its own outcome
            answers = together(
                [
                    partial(consumer.settle, [Ack(lease, After(keep=LONG, outcome=b"%d" % number))])
                    for number, consumer in enumerate(consumers)
                ]
            )
            # Then one ack is accepted, and the store has the outcome of this ack
            (accepted,) = (number for number, (answer,) in enumerate(answers) if answer is None)
            (outcome,) = self.backend.outcomes(self.queue, [job_id])
            assert outcome is not None
            assert outcome.body == b"%d" % accepted

    @promise("12.1", "12.6")
    @requires("outcomes")
    def test_acks_that_keep_outcomes_at_once_lose_none_and_each_is_forgotten_once(self) -> None:
        # Given consumers that hold many jobs each
        self.enqueue_all(*[b"x"] * 160, ttr=LONG)
        consumers = self._consumers_of_their_own()
        taken = [self.reserve(160 // len(consumers), by=consumer) for consumer in consumers]
        # When all consumers ack at the same time, in small calls
        together([partial(self._keeping, consumer, leases) for consumer, leases in zip(consumers, taken, strict=True)])
        # Then each job has its own outcome
        ids = [lease.id for leases in taken for lease in leases]
        found = self.backend.outcomes(self.queue, ids)
        assert [outcome and outcome.body for outcome in found] == [job_id.encode() for job_id in ids]
        # And when several clients forget the outcomes at the same time, then each outcome is counted once
        backends = [self.another_backend() for _ in consumers]
        assert sum(together([partial(backend.forget, self.queue, ids) for backend in backends])) == len(ids)

    @promise("13.1", "13.3")
    @requires("memos", "inspection", "one_step")
    def test_a_verdict_is_never_seen_without_its_memo_and_detail(self) -> None:
        observer = self.another_backend()
        for _ in range(self.harness.rounds):
            # Given a reserved job, and an observer who peeks at the job until it is buried
            job_id = self.enqueue(ttr=LONG)
            lease = self.take()

            def look(job_id: str = job_id) -> list[JobRecord]:
                records = [observer.peek(self.queue, job_id)]
                while records[-1].state is not State.BURIED:
                    records.append(observer.peek(self.queue, job_id))
                return records

            # When the job is buried with a memo and a detail at the same time, then the observer sees all changes in
            # one peek
            looking = self.background(look)
            self.settle(Bury(lease, after=After(memo=b"memo", detail=b"detail")))
            for record in looking.result(HANGS):
                stored = (b"memo", b"detail") if record.state is State.BURIED else (b"", b"")
                assert (record.memo, record.detail) == stored

    # --- managing against reserving ---

    @promise("8.3")
    @requires("management")
    def test_of_delete_and_reserve_exactly_one_wins(self) -> None:
        consumer = self.another_consumer(backend=self.another_backend())
        for _ in range(self.harness.rounds):
            # Given a ready job
            job_id = self.enqueue(ttr=LONG)
            # When the job is deleted and reserved at the same moment
            deleted, taken = together([lambda: self._delete(job_id), lambda: len(self.reserve(1, by=consumer)) == 1])  # noqa: B023
            # Then one of the two calls has succeeded
            assert deleted is not taken
            self._ack_all([consumer])
            assert self.counts() == (0, 0, 0, 0)

    @promise("8.3", "8.2")
    @requires("management")
    def test_of_many_deletes_exactly_one_wins(self) -> None:
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        for _ in range(self.harness.rounds):
            # Given a job
            job_id = self.enqueue()
            # When several threads delete the job at the same time
            deleted = together([lambda backend=backend: self._delete(job_id, backend) for backend in backends])  # type: ignore[misc]  # noqa: B023
            # Then one thread has deleted the job
            assert deleted.count(True) == 1

    @promise("7.4", "3.6")
    @requires("management", "purging")
    def test_of_reschedule_and_reserve_exactly_one_wins(self) -> None:
        consumer = self.another_consumer(backend=self.another_backend())
        for _ in range(self.harness.rounds):
            # Given a ready job
            job_id = self.enqueue(ttr=LONG)
            # When the job is rescheduled and reserved at the same moment
            put_off, taken = together([lambda: self._put_off(job_id), lambda: len(self.reserve(1, by=consumer)) == 1])  # noqa: B023
            # Then one of the two calls has succeeded, and there is one job
            assert put_off is not taken
            assert self.counts() == ((0, 1, 0, 0) if put_off else (0, 0, 1, 0))
            self._ack_all([consumer])
            self.backend.purge(self.queue, [State.DELAYED])

    @promise("10.4", "3.6")
    @requires("purging")
    def test_a_job_is_either_purged_or_handed_out(self) -> None:
        consumer = self.another_consumer(backend=self.another_backend())
        for _ in range(self.harness.rounds):
            # Given some jobs
            self.enqueue_all(*[b"x"] * 10, ttr=LONG)
            # When the jobs are purged and reserved at the same moment
            purged, taken = together(
                [lambda: self.backend.purge(self.queue, [State.READY]), lambda: len(self.reserve(5, by=consumer))]
            )
            left = self.counts()
            # Then no consumer holds a job that was deleted
            assert left == (10 - purged - taken, 0, taken, 0)
            self.settle(*map(Ack, list(consumer.held.values())), by=consumer)
            self.backend.purge(self.queue, [State.READY])

    @promise("6.1")
    @requires("purging")
    def test_a_buried_job_is_kicked_by_one_of_many(self) -> None:
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        for _ in range(max(1, self.harness.rounds // 5)):
            # Given ten buried jobs
            for _ in range(10):
                self.given(State.BURIED)
            # When several threads kick three jobs each at the same time
            kicked = together([lambda backend=backend: backend.kick(self.queue, 3) for backend in backends])  # type: ignore[misc]
            # Then the sum of the returned counts is the number of jobs that became ready
            moved = min(10, 3 * len(backends))
            assert sum(kicked) == moved
            assert self.counts() == (moved, 0, 0, 10 - moved)
            self.backend.purge(self.queue, [State.READY, State.BURIED])

    @promise("4.4", "5.8")
    def test_of_an_old_and_a_new_holder_that_ack_at_once_only_the_new_ones_ack_counts(self) -> None:
        # Given jobs that one consumer abandoned, and that another consumer holds
        count = 10
        self.enqueue_all(*[b"x"] * count, ttr=self.short_ttr)
        stale = self.reserve()
        self.harness.past(self.in_(self.short_ttr))
        other = self.another_consumer(backend=self.another_backend())
        live = self.reserve(by=other)
        # When both consumers ack all jobs at the same time
        old, new = together(
            [lambda: self.worker.settle(list(map(Ack, stale))), lambda: other.settle(list(map(Ack, live)))]
        )
        # Then the old holder's acks are refused, and the new holder's acks are accepted
        assert [type(answer) for answer in old] == [LeaseLost] * count
        assert new == [None] * count

    # --- enqueuing ---

    @promise("11.4", "2.2")
    def test_batches_that_are_enqueued_at_once_all_arrive_each_in_its_order(self) -> None:
        # Given producers with one batch each
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        batches = [[self.new(b"%d.%03d" % (at, number)) for number in range(50)] for at in range(len(backends))]
        # When all producers enqueue at the same time
        together(
            [
                lambda backend=backend, batch=batch: backend.enqueue(self.queue, batch)  # type: ignore[misc]
                for backend, batch in zip(backends, batches, strict=True)
            ]
        )
        # Then all jobs are stored, and the jobs of each producer are in order
        bodies = [lease.body for lease in self.reserve(ALL)]
        for at, batch in enumerate(batches):
            assert self.in_line([body for body in bodies if body.startswith(b"%d." % at)], [job.body for job in batch])
        assert len(bodies) == 50 * len(batches)

    @promise("2.3")
    @requires("atomic_batches")
    def test_a_part_of_a_batch_is_never_seen(self) -> None:
        # Given a thread that reads the counts all the time
        seen: set[int | None] = set()
        done = threading.Event()
        observer = self.another_backend()

        def look() -> None:
            while not done.is_set():
                seen.add(observer.stats(self.queue).ready)

        looking = self.background(look)
        # When batches are enqueued
        try:
            for _ in range(self.harness.rounds):
                self.enqueue_all(*[b"x"] * 40)
        finally:
            done.set()
        self.woken(looking)
        # Then every count is a multiple of 40, the length of a batch
        assert {(count or 0) % 40 for count in seen} <= {0}
        assert self.counts() == (40 * self.harness.rounds, 0, 0, 0)

    @promise("2.4")
    @requires("client_ids")
    def test_one_id_enqueued_by_many_at_once_is_one_job(self) -> None:
        backends = [self.another_backend() for _ in range(self.harness.threads)]
        for _ in range(self.harness.rounds):
            # Given a batch that is sent again while the first call is still running
            batch = [self.new(b"a"), self.new(b"b")]
            # When both calls arrive at the same time
            together([lambda backend=backend: backend.enqueue(self.queue, batch) for backend in backends])  # type: ignore[misc]  # noqa: B023
            # Then each job is stored once
            assert self.in_line(self.bodies(), [b"a", b"b"])
            self._ack_all([self.worker])

    @promise("11.4", "2.8")
    def test_idle_consumers_do_not_hold_up_producers(self) -> None:
        # Given many consumers that wait at an empty queue
        consumers = self._consumers_of_their_own()
        waiting = [self.waiting(consumer) for consumer in consumers]
        # When another thread enqueues delayed jobs in the consumers' queue, then every call returns
        enqueuing = self.background(lambda: [self.enqueue(delay=LONG) for _ in range(20)])
        assert len(self.woken(enqueuing)) == 20
        assert self.counts() == (0, 20, 0, 0)
        # And the consumers continue to wait
        assert all(thread.is_alive() for thread in waiting)

    # --- one object, many threads ---

    @promise("11.4")
    @requires("inspection", "management")
    def test_one_backend_serves_many_threads(self) -> None:
        # Given one backend object
        def work() -> int:
            ids = [self.backend.enqueue(self.queue, [self.new(b"x", delay=LONG)])[0] for _ in range(10)]
            states = [self.backend.peek(self.queue, job_id).state for job_id in ids]
            for job_id in ids[:5]:
                self.backend.delete(self.queue, job_id)
            self.backend.stats(self.queue)
            return states.count(State.DELAYED)

        # When many threads use the backend object at the same time
        counts = together([work] * self.harness.threads)
        # Then each thread gets its own answers
        assert counts == [10] * self.harness.threads
        assert self.counts() == (0, 5 * self.harness.threads, 0, 0)

    @promise("11.4", "3.8")
    def test_consumers_of_one_backend_work_in_threads_of_their_own(self) -> None:
        # Given one backend object, and consumers that were made from this object
        ids = self.enqueue_all(*[b"x"] * 100, ttr=LONG)
        consumers = [self.another_consumer() for _ in range(self.harness.threads)]
        # When each consumer works in a thread
        taken = together([self._taking(consumer, limit=2) for consumer in consumers])
        # Then each job was handed out once
        assert Counter(lease.id for leases in taken for lease in leases) == Counter(ids)

    @promise("11.4", "11.7")
    @requires("shared")
    def test_parent_and_child_use_the_backend_after_a_fork(self) -> None:
        # Given a process that has used a backend and then forks
        if not hasattr(os, "fork"):
            self.does_not_apply("this system cannot fork")
        self.enqueue(b"before")
        child = fork(lambda: self.enqueue_all(b"child", b"child"))
        self.enqueue(b"parent")
        # When the child process has ended
        assert ended_well(child)
        # Then both processes have enqueued their jobs, and the parent's connections still work
        assert Counter(self.bodies()) == Counter([b"before", b"child", b"child", b"parent"])

    # --- internals ---

    def _consumers_of_their_own(self) -> list[TrackedConsumer]:
        return [self.another_consumer(backend=self.another_backend()) for _ in range(self.harness.threads)]

    def _reserving(self, consumer: TrackedConsumer) -> Callable[[], list[Lease]]:
        return lambda: consumer.reserve(1, 0)

    def _taking(self, consumer: TrackedConsumer, limit: int) -> Callable[[], list[Lease]]:
        """Returns a function that reserves all jobs, at most *limit* per call."""

        def take() -> list[Lease]:
            taken: list[Lease] = []
            while leases := consumer.reserve(limit, 0):
                taken += leases
            return taken

        return take

    def _settling(self, consumer: TrackedConsumer) -> Callable[[], None]:
        def settle() -> None:
            for number, lease in enumerate(list(consumer.held.values())):
                self.settle(Release(lease) if number % 2 else Ack(lease), by=consumer)

        return settle

    def _keeping(self, consumer: TrackedConsumer, leases: list[Lease]) -> None:
        for at in range(0, len(leases), 3):
            acks = [Ack(lease, After(keep=LONG, outcome=lease.id.encode())) for lease in leases[at : at + 3]]
            self.settle(*acks, by=consumer)

    def _is_there(self, job_id: str, backend: Backend) -> bool:
        try:
            backend.peek(self.queue, job_id)
        except JobNotFound:
            return False
        return True

    def _ack_all(self, consumers: list[TrackedConsumer]) -> None:
        for consumer in consumers:
            self.settle(*map(Ack, list(consumer.held.values())), by=consumer)

    def _delete(self, job_id: str, backend: Backend | None = None) -> bool:
        try:
            (backend or self.backend).delete(self.queue, job_id)
        except (JobNotFound, JobReserved):
            return False
        return True

    def _put_off(self, job_id: str) -> bool:
        try:
            self.backend.reschedule(self.queue, job_id, LONG)
        except JobReserved:
            return False
        return True
