"""Planted bugs about jobs: fences, time, counters, order, batches, waiting, and lost replies."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from multiq.backend import Abandon, Ack, GiveBack, JobRecord, Lease, Page, QueueStats, Release, State, Touch
from multiq.backend.memory import Job, JobQueue, MemoryConsumer, Store
from multiq.conformance.memory_server import WiredBackend, WiredConsumer
from multiq.driverkit.clock import SECOND
from multiq.errors import BackendTimeout, JobNotFound, JobReserved
from multiq.ids import new_id

from .registry import Planted, plant

if TYPE_CHECKING:
    import itertools
    from collections.abc import Callable, Sequence
    from typing import Any

    from multiq.backend import After, NewJob, Verdict
    from multiq.backend.memory_limits import KeptLimits
    from multiq.backend.memory_outcomes import KeptOutcomes
    from multiq.backend.memory_unique import UniqueKeys
    from multiq.errors import LeaseLost


# --- capabilities ----------------------------------------------------------------------------------------


@plant(
    "declared and refused",
    "managing jobs by their ids is declared, and kicking one is refused",
    "Capabilities.test_an_optional_part_works_or_is_refused[management]",
)
class _DeclaredAndRefused(Planted):
    def kick_job(self, queue: str, job_id: str) -> None:
        raise self.unsupported("management")


# --- fences ----------------------------------------------------------------------------------------------


class _HeldByAnybody(JobQueue):
    def held(self, lease: Lease) -> Job | None:
        job = self.jobs.get(lease.id)
        return job if job is not None and job.state is State.RESERVED else None


class _UnfencedAck(MemoryConsumer):
    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        queue = self._store.queue(verdict.lease.queue, now)
        if isinstance(verdict, Ack) and verdict.lease.id in queue.jobs:
            queue.remove(queue.jobs[verdict.lease.id])
            return None
        return super()._settle_one(verdict, now)


@plant(
    "unfenced ack",
    "an ack deletes the job by its id, whichever lease it has now",
    "Lease.test_stale_verdicts_are_refused_when_another_consumer_holds_the_jobs",
)
class _NoFenceOnAck(Planted):
    consumer_class = _UnfencedAck


class _UnfencedRelease(MemoryConsumer):
    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        queue = self._store.queue(verdict.lease.queue, now)
        job = queue.jobs.get(verdict.lease.id)
        if isinstance(verdict, Release) and job is not None:
            self._carry_out(verdict, queue, job, now)
            return None
        return super()._settle_one(verdict, now)


@plant(
    "unfenced release",
    "a release moves the job whatever has become of it",
    "Lease.test_stale_verdicts_are_refused_when_another_consumer_buried_the_jobs",
)
class _NoFenceOnRelease(Planted):
    consumer_class = _UnfencedRelease


@plant(
    "fenced by state",
    "a verdict is checked against the state reserved, and not against the reservation",
    "Lease.test_stale_verdicts_are_refused_when_the_same_consumer_holds_the_jobs_again",
)
class _FencedByState(Planted):
    queue_class = _HeldByAnybody


class _LateAccepted(MemoryConsumer):
    """Accepts a verdict on an ended lease until another consumer reserves the job."""

    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        lease = verdict.lease
        queue = self._store.queue(lease.queue, now)
        job = queue.jobs.get(lease.id)
        was_mine = job is not None and job.state is State.READY and job.attempt == lease.attempt
        if job is not None and was_mine and job.crashes == lease.crashes + 1:
            self._carry_out(verdict, queue, job, now)
            return None
        return super()._settle_one(verdict, now)


@plant(
    "late ack",
    "a verdict is accepted after its lease has ended, as long as no other consumer has taken the job",
    "Lease.test_a_late_verdict_is_refused_though_no_other_consumer_has_the_job[ack]",
)
class _LateAck(Planted):
    consumer_class = _LateAccepted


# --- time ------------------------------------------------------------------------------------------------


class _EarlyQueue(JobQueue):
    def make_due(self, job: Job, delay: float, now: int) -> None:
        super().make_due(job, max(0.0, delay - 1.0), now)


@plant("early", "delayed jobs are due a second early", "Enqueue.test_a_delayed_job_is_never_early[2.5 s]")
class _Early(Planted):
    queue_class = _EarlyQueue


class _RoundingQueue(JobQueue):
    def make_due(self, job: Job, delay: float, now: int) -> None:
        super().make_due(job, int(delay), now)


@plant("whole seconds", "delays are cut to whole seconds", "Enqueue.test_a_delayed_job_is_never_early[0.999 s]")
class _WholeSeconds(Planted):
    queue_class = _RoundingQueue


class _NoTouchQueue(JobQueue):
    def extend(self, job: Job, now: int) -> None:
        if job.state is not State.RESERVED:
            super().extend(job, now)


@plant("touch does nothing", "a touch does not extend the lease", "Touch.test_a_touch_gives_the_full_ttr_again")
class _TouchDoesNothing(Planted):
    queue_class = _NoTouchQueue


class _ForgetfulQueue(JobQueue):
    """A queue whose pause is a flag. The next enqueue resets the flag."""

    def add(self, new: NewJob, now: int) -> str:
        self.paused_until = 0
        return super().add(new, now)


@plant("pause forgotten", "an enqueue ends a pause", "Pause.test_a_paused_queue_takes_jobs")
class _PauseForgotten(Planted):
    queue_class = _ForgetfulQueue


@plant("pause stops time", "a paused queue promotes nothing", "Pause.test_delays_run_on_during_a_pause")
class _PauseStopsTime(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def promote(self, now: int) -> None:
            if self.paused_until <= now:
                super().promote(now)


# --- counters --------------------------------------------------------------------------------------------


class _CarefreeQueue(JobQueue):
    def make_ready(self, job: Job, *, crashed: bool = False) -> None:
        super().make_ready(job, crashed=False)


@plant(
    "crashes not counted",
    "a lease that ends is not counted as a crash: a job that kills its workers is retried forever",
    "Lease.test_an_ended_lease_counts_as_an_attempt_and_as_a_crash",
)
class _CrashesNotCounted(Planted):
    queue_class = _CarefreeQueue


class _CountsGivenBack(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        job.attempt += isinstance(verdict, GiveBack)
        super()._carry_out(verdict, queue, job, now)


@plant(
    "give back counts",
    "a job that was given back has used up an attempt",
    "GiveBack.test_a_job_given_back_has_not_been_attempted",
)
class _GiveBackCounts(Planted):
    consumer_class = _CountsGivenBack


class _AbandonReleases(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        job.crashes -= isinstance(verdict, Abandon)
        super()._carry_out(verdict, queue, job, now)


@plant(
    "abandon not counted",
    "a job that is abandoned for a dead worker is not counted as a crash",
    "Abandon.test_each_crash_is_counted_once",
)
class _AbandonIsNoCrash(Planted):
    consumer_class = _AbandonReleases


@plant(
    "buried not counted",
    "stats count no buried jobs, and say 0",
    "Stats.test_each_state_is_counted_by_itself",
)
class _BuriedNotCounted(Planted):
    def stats(self, queue: str) -> QueueStats:
        stats = super().stats(queue)
        return QueueStats(
            queue=queue,
            ready=stats.ready,
            delayed=stats.delayed,
            reserved=stats.reserved,
            buried=0,
            paused_for=stats.paused_for,
        )


# --- order -----------------------------------------------------------------------------------------------


class _TextSequence:
    """Numbers that are sorted as text, so that 10 comes before 2 and 9."""

    def __init__(self, inner: itertools.count[int]) -> None:
        self._inner = inner

    def __next__(self) -> int:
        digits = str(next(self._inner))
        return int(digits.ljust(12, "0")) * 100 + len(digits)


class _TextQueue(JobQueue):
    def __init__(
        self,
        name: str,
        sequence: itertools.count[int],
        outcomes: KeptOutcomes,
        unique_keys: UniqueKeys,
        limits: KeptLimits,
    ) -> None:
        super().__init__(name, _TextSequence(sequence), outcomes, unique_keys, limits)  # type: ignore[arg-type]


@plant(
    "order as text",
    "jobs of one priority go in the order of their numbers as text: 1, 10, 11, 2...",
    "Reserve.test_jobs_of_one_priority_go_oldest_first_past_the_tenth",
)
class _OrderAsText(Planted):
    queue_class = _TextQueue


@plant("priority reversed", "larger numbers go first", "Reserve.test_the_lowest_priority_number_goes_first")
class _PriorityReversed(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def take(self, now: int, token: str, *, with_gates: bool = True) -> Job | None:
            ready = [job for job in self.jobs.values() if job.state is State.READY]
            if not ready or self.paused_until > now:
                return None
            job = min(ready, key=lambda job: (-job.priority, job.sequence))
            job.attempt += 1
            job.token = token
            self.extend(job, now)
            return job


class _Impartial(MemoryConsumer):
    def _take(self, limit: int, now: int, order: Sequence[str]) -> list[Lease]:
        def best(name: str) -> int:
            listing = self._store.queue(name, now).listing(State.READY)
            return listing[0][1].priority if listing else 2**32

        return super()._take(limit, now, sorted(order, key=best))


@plant(
    "queues mixed",
    "the best priority of all queues goes first, as on beanstalkd's watch list",
    "Reserve.test_earlier_queues_come_first_against_all_priorities",
)
class _QueuesMixed(Planted):
    consumer_class = _Impartial


class _Stubborn(MemoryConsumer):
    """Always uses the order of queues with which the consumer was created."""

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return super().reserve(limit, timeout)


@plant(
    "order ignored",
    "a call that is given an order of queues uses the consumer's own order",
    "QueueOrder.test_the_order_holds_for_the_call",
)
class _OrderIgnored(Planted):
    consumer_class = _Stubborn


class _Remembering(MemoryConsumer):
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        if queues is not None:
            self.queues = self.in_order(queues)
        return super().reserve(limit, timeout)


@plant(
    "order kept",
    "an order of queues that was given for one call applies to later calls, too",
    "QueueOrder.test_the_next_call_without_an_order_has_the_consumer_s_own",
)
class _OrderKept(Planted):
    consumer_class = _Remembering


@plant(
    "give-back not delayed",
    "a job that is given back with a delay is ready at once",
    "GiveBack.test_a_job_given_back_with_a_delay_is_ready_after_it_and_not_before",
)
class _GiveBackNotDelayed(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
            super()._carry_out(GiveBack(verdict.lease) if isinstance(verdict, GiveBack) else verdict, queue, job, now)


@plant(
    "delayed give-back counted",
    "a give-back with a delay counts as an attempt",
    "GiveBack.test_a_delayed_give_back_counts_no_attempt",
)
class _DelayedGiveBackCounted(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
            job.attempt += isinstance(verdict, GiveBack) and verdict.delay > 0
            super()._carry_out(verdict, queue, job, now)


@plant(
    "retried at the tail",
    "a released job goes to the end of its queue",
    "Reserve.test_a_released_job_goes_before_younger_ones",
)
class _RetriedAtTheTail(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
            if isinstance(verdict, Release):
                job.sequence = queue.next_sequence()
            super()._carry_out(verdict, queue, job, now)


@plant(
    "kicks delayed jobs",
    "a kick with nothing buried kicks delayed jobs, as beanstalkd's does",
    "Kick.test_a_kick_never_touches_delayed_jobs",
)
class _KicksDelayedJobs(Planted):
    def kick(self, queue: str, limit: int) -> int:
        kicked = super().kick(queue, limit)
        delayed = self.jobs(queue, State.DELAYED, limit=limit).jobs if kicked == 0 else []
        for record in delayed:
            self.kick_job(queue, record.id)
        return kicked + len(delayed)


# --- jobs lost and doubled -------------------------------------------------------------------------------


class _HarshQueue(JobQueue):
    def unreserved(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        return job if job is not None else super().unreserved(job_id)


@plant(
    "deletes reserved jobs",
    "delete deletes a reserved job",
    "Delete.test_a_reserved_job_cannot_be_deleted",
)
class _DeletesReservedJobs(Planted):
    queue_class = _HarshQueue


@plant(
    "answers in another order",
    "delete_many answers first for the jobs that it has deleted",
    "Delete.test_of_many_jobs_those_are_deleted_that_are_not_reserved",
)
class _AnswersInAnotherOrder(Planted):
    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        return sorted(super().delete_many(queue, ids, after=after), key=lambda answer: answer is not None)


@plant(
    "an ended lease denies",
    "delete_many does not delete a job whose lease has ended",
    "Delete.test_a_job_is_deleted_with_others_in_any_state_but_reserved[lease ended]",
)
class _AnEndedLeaseDenies(Planted):
    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        with self._store.lock:
            jobs = self._store.queue(queue, self._store.clock()).jobs
            crashed = {job_id for job_id in ids if job_id in jobs and jobs[job_id].crashes}
        free = [job_id for job_id in ids if job_id not in crashed]
        answers = dict(zip(free, super().delete_many(queue, free, after=after), strict=True))
        return [JobReserved(queue, job_id) if job_id in crashed else answers[job_id] for job_id in ids]


@plant(
    "purges reserved jobs",
    "purge deletes reserved jobs",
    "Purge.test_a_purge_never_deletes_a_reserved_job",
)
class _PurgesReservedJobs(Planted):
    def purge(self, queue: str, states: Sequence[State]) -> int:
        purged = super().purge(queue, states)
        with self._store.changed:
            held = self._store.queue(queue, self._store.clock())
            doomed = [job for job in held.jobs.values() if job.state is State.RESERVED and job.state in states]
            for job in doomed:
                held.remove(job)
        return purged + len(doomed)


@plant(
    "half a batch",
    "the second half of a long batch is lost without an error",
    "Enqueue.test_a_thousand_jobs_in_one_call_all_arrive_in_order",
)
class _HalfABatch(Planted):
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        kept = jobs if len(jobs) < 500 else jobs[: len(jobs) // 2]
        super().enqueue(queue, kept, connection=connection)
        return [job.id for job in jobs]


@plant(
    "batches in parts",
    "a batch is written in parts, and other clients see the parts",
    "Concurrency.test_a_part_of_a_batch_is_never_seen",
)
class _BatchesInParts(Planted):
    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        ids = []
        for at in range(0, len(jobs), 20):
            ids += super().enqueue(queue, jobs[at : at + 20], connection=connection)
            time.sleep(0.0001)  # lets other threads run, as a round trip to a server would
        return ids


class _DoublingQueue(JobQueue):
    def add(self, new: NewJob, now: int) -> str:
        if new.id in self.jobs:
            job_id = new_id()
            job = self.jobs[job_id] = Job(new)
            job.id = job_id
            job.start_over(self.next_sequence(), now)
            self.make_due(job, new.delay, now)
            return new.id
        return super().add(new, now)


@plant(
    "repeats doubled",
    "an enqueue that is repeated makes a second job",
    "Enqueue.test_a_repeated_enqueue_makes_no_second_job",
)
class _RepeatsDoubled(Planted):
    queue_class = _DoublingQueue


class _Racing(MemoryConsumer):
    """Finds a job, releases the lock, and only then takes the job."""

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        with self._store.changed:
            now = self._store.clock()
            seen = [
                (queue, job, job.body)  # the body is dropped when another consumer settles the job
                for queue in (self._store.queue(name, now) for name in self.queues)
                if queue.paused_until <= now
                for _, job in queue.listing(State.READY)
            ][:limit]
        if not seen:
            return super().reserve(limit, timeout, queues)
        time.sleep(0.0005)
        with self._store.changed:
            return [self._seize(queue, job, body) for queue, job, body in seen]

    def _seize(self, queue: JobQueue, job: Job, body: bytes) -> Lease:
        now = self._store.clock()
        job.attempt += 1
        job.token = str(next(self._tokens))
        queue.extend(job, now)
        return Lease(
            queue=queue.name,
            id=job.id,
            token=job.token,
            body=body,
            priority=job.priority,
            ttr=job.ttr,
            attempt=job.attempt,
            crashes=job.crashes,
            kicks=job.kicks,
            age=(now - job.enqueued_at) / SECOND,
            memo=job.memo,
        )


@plant(
    "handed out twice",
    "two consumers that reserve at the same moment get the same job",
    "Concurrency.test_of_many_that_want_one_job_one_gets_it",
)
class _HandedOutTwice(Planted):
    consumer_class = _Racing


class _AllOrNothing(MemoryConsumer):
    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        with self._store.changed:
            now = self._store.clock()
            refusals = [self._settle_one(Touch(verdict.lease), now) for verdict in verdicts]
            first = next((refusal for refusal in refusals if refusal is not None), None)
        return [first] * len(verdicts) if first is not None else super().settle(verdicts)


@plant(
    "one refusal for all",
    "one stale verdict in a call refuses all others",
    "Settle.test_a_refused_verdict_does_not_touch_the_others",
)
class _OneRefusalForAll(Planted):
    consumer_class = _AllOrNothing


# --- reading and waking ----------------------------------------------------------------------------------


@plant(
    "page skips a job",
    "a listing's cursor points behind the first job of the next page",
    "Jobs.test_pages_follow_each_other_without_gap_or_overlap[ready]",
)
class _PageSkipsAJob(Planted):
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        page = super().jobs(queue, state, limit=limit, after=after)
        if page.after is None:
            return page
        skipped = super().jobs(queue, state, limit=1, after=page.after)
        return Page(page.jobs, skipped.after)


@plant("peek counts", "peek counts as an attempt", "Peek.test_peek_changes_nothing")
class _PeekCounts(Planted):
    def peek(self, queue: str, job_id: str) -> JobRecord:
        record = super().peek(queue, job_id)
        with self._store.changed:
            self._store.queue(queue, self._store.clock()).jobs[job_id].attempt += 1
        return record


class _Planning(MemoryConsumer):
    """Sleeps until the earliest due time that the consumer has seen. Only a change in the number of ready jobs ends the
    sleep earlier.
    """

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        while True:
            leases = super().reserve(limit, 0, queues)
            if leases or time.monotonic() >= give_up_at or self._was_interrupted():
                return leases
            self._sleep(give_up_at)

    def _sleep(self, give_up_at: float) -> None:
        with self._store.changed:
            now = self._store.clock()
            changes = (self._store.queue(name, now).next_change_at(now) for name in self.queues)
            planned = min((at for at in changes if at is not None), default=None)
            ready = self._count_of(State.READY)
        while time.monotonic() < give_up_at and not self._interrupted:
            time.sleep(0.005)
            if planned is not None and self._store.clock() >= planned:
                return
            # A reschedule does not change the number of ready jobs, so the consumer does not notice the reschedule.
            if self._count_of(State.READY) != ready:
                return

    def _count_of(self, state: State) -> int:
        queues = [queue for queue in self._store._queues.values() if queue.name in self.queues]
        return sum(job.state is state for queue in queues for job in list(queue.jobs.values()))

    def _was_interrupted(self) -> bool:
        was, self._interrupted = self._interrupted, False
        return was


@plant(
    "sleeps too long",
    "a consumer that sleeps until the next due time does not notice an earlier one",
    "Waiting.test_an_earlier_due_time_is_noticed_by_a_waiting_consumer",
)
class _SleepsTooLong(Planted):
    consumer_class = _Planning


class _NeverWoken(MemoryConsumer):
    """Polls at the beginning and at the end of its timeout, but at no time between them."""

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        leases = super().reserve(limit, 0, queues)
        if leases or timeout <= 0:
            return leases
        give_up_at = time.monotonic() + timeout
        while time.monotonic() < give_up_at and not self._interrupted:
            time.sleep(0.005)
        return super().reserve(limit, 0, queues)


@plant(
    "is not woken",
    "a waiting consumer is not woken by a new job",
    "Waiting.test_a_new_job_wakes_a_waiting_consumer",
)
class _IsNotWoken(Planted):
    consumer_class = _NeverWoken


# --- lost replies, and no replies ------------------------------------------------------------------------


def _again(_: object, call: Callable[[], object]) -> object:
    """A bug: a repeated call is carried out once more. A server has this bug if it does not recognise that a call is
    repeated."""
    return call()


@plant(
    "delete denied",
    "a delete that is repeated because its reply was lost says that there was no such job",
    "LostReplies.test_a_delete_whose_reply_is_lost_does_not_say_that_there_was_no_job",
)
class _DeleteDenied(WiredBackend):
    on_repeat: ClassVar = {"delete": _again}


@plant(
    "many deletes denied",
    "a delete_many that is repeated because its reply was lost says that there were no such jobs",
    "LostReplies.test_a_delete_of_many_jobs_whose_reply_is_lost_answers_for_each_job",
)
class _ManyDeletesDenied(WiredBackend):
    on_repeat: ClassVar = {"delete_many": _again}


@plant(
    "missing means deleted",
    "a delete_many that is repeated because its reply was lost takes each job that is gone for deleted",
    "LostReplies.test_a_delete_of_many_jobs_whose_reply_is_lost_keeps_an_outcome_for_each",
)
class _MissingMeansDeleted(WiredBackend):
    on_repeat: ClassVar = {
        "delete_many": lambda answers, _: [None if isinstance(each, JobNotFound) else each for each in answers]
    }


@plant(
    "kick answers 0",
    "a kick that is repeated because its reply was lost finds nothing to kick, and says so",
    "LostReplies.test_a_kick_whose_reply_is_lost_counts_what_it_kicked",
)
class _KickAnswersZero(WiredBackend):
    on_repeat: ClassVar = {"kick": lambda *_: 0}


@plant(
    "purge answers 0",
    "a purge that is repeated because its reply was lost finds nothing to delete, and says so",
    "LostReplies.test_a_purge_whose_reply_is_lost_counts_what_it_deleted",
)
class _PurgeAnswersZero(WiredBackend):
    on_repeat: ClassVar = {"purge": _again}


def _and_one_more(leases: Any, call: Callable[[], Any]) -> list[Lease]:
    return [*leases, *call()[:1]]


@plant(
    "three for two",
    "a reserve that is repeated because its reply was lost hands out the jobs of the first call, and more",
    "LostReplies.test_a_reserve_whose_reply_is_lost_hands_out_no_more_than_was_asked_and_loses_none",
)
class _ThreeForTwo(WiredBackend):
    on_repeat: ClassVar = {"reserve": _and_one_more}


@plant(
    "lost with the reply",
    "the jobs of a waiting reserve whose reply was lost stay reserved, and no consumer has them",
    "LostReplies.test_a_waiting_reserve_whose_reply_is_lost_gets_the_job_that_comes",
)
class _LostWithTheReply(WiredBackend):
    on_repeat: ClassVar = {"reserve": lambda *_: []}


@plant(
    "ack called lost",
    "an ack that counted, and is repeated because its reply was lost, is refused",
    "LostReplies.test_an_ack_whose_reply_is_lost_is_answered_as_it_was_carried_out",
)
class _AckCalledLost(WiredBackend):
    on_repeat: ClassVar = {"settle": _again}


def _under_new_ids(ids: object, call: Any) -> object:
    _, queue, jobs = call.args
    call.func("enqueue", queue, [msgspec.structs.replace(job, id=new_id()) for job in jobs])
    return ids


@plant(
    "enqueued twice",
    "an enqueue that is repeated because its reply was lost stores its jobs twice",
    "LostReplies.test_an_enqueue_whose_reply_is_lost_adds_its_jobs_once",
)
class _EnqueuedTwice(WiredBackend):
    on_repeat: ClassVar = {"enqueue": _under_new_ids}


@plant(
    "uncertain called unavailable",
    "an enqueue whose replies are all lost raises BackendUnavailable, as if nothing had been stored",
    "LostReplies.test_an_enqueue_whose_replies_are_all_lost_names_the_jobs_whose_outcome_is_unknown",
)
class _UncertainCalledUnavailable(WiredBackend):
    names_uncertain_enqueues = False


@plant(
    "uncertain called timeout",
    "an enqueue that the server does not answer raises BackendTimeout, as if nothing had been sent",
    "Hangs.test_an_enqueue_that_a_server_does_not_answer_is_uncertain_and_can_be_repeated",
)
class _UncertainCalledTimeout(WiredBackend):
    names_uncertain_enqueues = False


@plant(
    "zero for a lost reply",
    "counts no ready jobs if the reply is lost",
    "LostReplies.test_a_look_whose_reply_is_lost_sees_what_is_there[stats]",
)
class _Unavailable(WiredBackend):
    on_repeat: ClassVar = {"stats": lambda stats, _: msgspec.structs.replace(stats, ready=0)}


@plant(
    "kick presumed",
    "a kick of one job whose connection is lost counts as carried out, though the server never received it",
    "LostReplies.test_a_kick_of_one_job_whose_reply_is_lost_kicks_it_once",
)
class _KickPresumed(WiredBackend):
    on_loss: ClassVar = {"kick_job": None}


@plant(
    "verdicts presumed",
    "a verdict whose connection is lost counts as carried out, though the server never received it",
    "LostReplies.test_a_bury_whose_reply_is_lost_is_carried_out_once",
)
class _VerdictsPresumed(WiredBackend):
    on_loss: ClassVar = {"settle": [None, None]}


@plant(
    "attempts counted twice",
    "a reserve that is repeated because its reply was lost counts a crash, and another attempt",
    "LostReplies.test_a_reserve_whose_reply_is_lost_counts_one_attempt",
)
class _AttemptsCountedTwice(WiredBackend):
    on_repeat: ClassVar = {
        "reserve": lambda leases, _: [
            msgspec.structs.replace(lease, attempt=lease.attempt + 1, crashes=1) for lease in leases
        ]
    }


def _put_behind(answers: object, call: Any) -> object:
    store, verdicts = call.func.__self__._store, call.args[0]
    with store.lock:
        for lease in (verdict.lease for verdict in verdicts if isinstance(verdict, Release)):
            queue = store.queue(lease.queue, store.clock())
            queue.jobs[lease.id].sequence = queue.next_sequence()
            queue.make_ready(queue.jobs[lease.id])
    return answers


@plant(
    "released again, put behind",
    "a release that is repeated because its reply was lost moves its job to the end of the queue",
    "LostReplies.test_a_release_whose_reply_is_lost_leaves_the_job_in_its_place",
)
class _ReleasedAgainPutBehind(WiredBackend):
    on_repeat: ClassVar = {"settle": _put_behind}


def _twice_as_late(_: object, call: Any) -> object:
    verb, queue, job_id, delay = call.args
    return call.func(verb, queue, job_id, 2 * delay)


@plant(
    "rescheduled from then",
    "a reschedule that is repeated because its reply was lost adds its delay to that of the first",
    "LostReplies.test_a_reschedule_whose_reply_is_lost_moves_its_job_once",
)
class _RescheduledFromThen(WiredBackend):
    on_repeat: ClassVar = {"reschedule": _twice_as_late}


@plant(
    "page without a next",
    "a listing that is repeated because its reply was lost ends after a page",
    "LostReplies.test_a_look_whose_reply_is_lost_sees_what_is_there[jobs]",
)
class _PageWithoutANext(WiredBackend):
    on_repeat: ClassVar = {"jobs": lambda page, _: Page(page.jobs, None)}


@plant(
    "patient",
    "each attempt of a call waits for the whole deadline, and more",
    "Hangs.test_every_call_to_a_server_that_hangs_ends_with_a_timeout_in_time",
)
class _Patient(WiredBackend):
    deadlines = 8.0


class _OnceSilentAlwaysDone(WiredConsumer):
    is_uncertain = False

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if self.is_uncertain:
            return [None] * len(verdicts)
        self.is_uncertain = True
        answers = super().settle(verdicts)
        self.is_uncertain = False
        return answers


@plant(
    "silence is consent",
    "a verdict that the server did not answer counts as carried out when it is repeated",
    "Hangs.test_a_verdict_that_a_server_took_no_notice_of_can_be_said_again",
)
class _SilenceIsConsent(WiredBackend):
    def consumer(self, queues: Sequence[str]) -> WiredConsumer:
        return _OnceSilentAlwaysDone(self, queues)


class _TriesForLong(WiredConsumer):
    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        with contextlib.suppress(BackendTimeout):
            return super().exchange(verdicts, limit, timeout, queues)
        time.sleep(2.0)
        return super().exchange(verdicts, limit, timeout, queues)


@plant(
    "patient exchange",
    "an exchange that is not answered is tried again, with a deadline of its own",
    "Hangs.test_an_exchange_with_a_server_that_hangs_ends_in_time",
)
class _PatientExchange(WiredBackend):
    def consumer(self, queues: Sequence[str]) -> WiredConsumer:
        return _TriesForLong(self, queues)


@plant(
    "silence means empty",
    "a reserve on a server that does not answer finds no job",
    "Hangs.test_a_waiting_reserve_on_a_server_that_hangs_ends_in_time",
)
class _SilenceIsNoJob(WiredBackend):
    on_silence: ClassVar = {"reserve": []}


# --- waking late -----------------------------------------------------------------------------------------

_NOW_AND_THEN = 3.0  # seconds between two polls; if no consumer is woken, a job may wait for this time


class _NotifyingStore(Store):
    """A store that wakes consumers only when an operation calls ``notify``."""

    notifications = 0

    def notify(self) -> None:
        with self.changed:
            self.notifications += 1
            self.changed.notify_all()


class _Waiting(MemoryConsumer):
    """Sleeps until a notification comes, but polls at least every ``_NOW_AND_THEN`` seconds."""

    notifies_after: ClassVar[tuple[type[Verdict], ...]] = (Release, GiveBack, Abandon)
    waits_after: ClassVar[float] = 0.0
    """Seconds from a consumer's poll until the consumer listens for notifications. With 0 seconds, the consumer listens
    before its poll, which is correct.
    """

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        store = cast("_NotifyingStore", self._store)
        while True:
            seen = store.notifications
            with store.lock:
                leases = self._take(limit, store.clock(), self.queues if queues is None else self.in_order(queues))
            left = give_up_at - time.monotonic()
            if leases or left <= 0 or self._interrupted:
                self._interrupted = False
                return leases
            if self.waits_after:
                time.sleep(self.waits_after)
                seen = store.notifications
            with store.changed:
                store.changed.wait_for(
                    lambda seen=seen: store.notifications != seen or self._interrupted,  # type: ignore[misc]
                    min(left, _NOW_AND_THEN),
                )

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers = super().settle(verdicts)
        if any(isinstance(verdict, self.notifies_after) for verdict in verdicts):
            cast("_NotifyingStore", self._store).notify()
        return answers


class _Notifying(Planted):
    """Notifies after each operation that may give a consumer a job, except the operations in ``silent``."""

    store_class = _NotifyingStore
    consumer_class = _Waiting
    silent: ClassVar[frozenset[str]] = frozenset()

    def _notify(self, verb: str) -> None:
        if verb not in self.silent:
            cast("_NotifyingStore", self._store).notify()

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        ids = super().enqueue(queue, jobs, connection=connection)
        self._notify("enqueue")
        return ids

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        new = super().reschedule(queue, job_id, delay)
        self._notify("reschedule")
        return new

    def kick(self, queue: str, limit: int) -> int:
        count = super().kick(queue, limit)
        self._notify("kick")
        return count

    def kick_job(self, queue: str, job_id: str) -> None:
        super().kick_job(queue, job_id)
        self._notify("kick_job")

    def resume(self, queue: str) -> None:
        super().resume(queue)
        self._notify("resume")


_IN_TIME = "Waking.test_a_waiting_consumer_has_the_job_in_time"


@plant("no wakeup", "no consumer is ever woken: all poll every three seconds", f"{_IN_TIME}[enqueue]")
class _NoWakeup(_Notifying):
    silent = frozenset({"enqueue", "reschedule", "kick", "kick_job", "resume"})


@plant("reschedule does not wake", "a job rescheduled to now waits for the next poll", f"{_IN_TIME}[reschedule]")
class _RescheduleDoesNotWake(_Notifying):
    silent = frozenset({"reschedule"})


@plant("kick does not wake", "a kicked job waits for the next poll", f"{_IN_TIME}[kick]")
class _KickDoesNotWake(_Notifying):
    silent = frozenset({"kick"})


@plant("resume does not wake", "a resumed queue waits for the next poll", f"{_IN_TIME}[resume]")
class _ResumeDoesNotWake(_Notifying):
    silent = frozenset({"resume"})


@plant("release does not wake", "a released job waits for the next poll", f"{_IN_TIME}[release]")
class _ReleaseDoesNotWake(_Notifying):
    class consumer_class(_Waiting):  # noqa: N801 - named like the attribute it replaces
        notifies_after = ()


@plant("abandon does not wake", "an abandoned job waits for the next poll", f"{_IN_TIME}[abandon]")
class _AbandonDoesNotWake(_Notifying):
    class consumer_class(_Waiting):  # noqa: N801 - named like the attribute it replaces
        notifies_after = (Release, GiveBack)


class _SleepsInExchanges(_Waiting):
    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        answers = self.settle(verdicts)
        give_up_at = time.monotonic() + timeout
        while (
            not (leases := self.reserve(limit, 0, queues)) and time.monotonic() < give_up_at and not self._interrupted
        ):
            time.sleep(min(_NOW_AND_THEN, timeout))
        return answers, leases


@plant(
    "exchange is not woken",
    "an exchange that waits polls every three seconds",
    "Waking.test_a_consumer_is_woken_in_time_again_and_in_each_of_its_queues[exchange]",
)
class _ExchangeIsNotWoken(_Notifying):
    consumer_class = _SleepsInExchanges


class _WokenOnce(_Waiting):
    has_waited = False

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        while self.has_waited and not self._interrupted and time.monotonic() < give_up_at:
            if leases := super().reserve(limit, 0, queues):
                return leases
            time.sleep(min(_NOW_AND_THEN, timeout))
        self.has_waited = self.has_waited or timeout > 0
        return super().reserve(limit, max(0.0, give_up_at - time.monotonic()), queues)


@plant(
    "woken once",
    "a consumer is woken in its first wait, and then polls every three seconds",
    "Waking.test_a_consumer_is_woken_in_time_again_and_in_each_of_its_queues[reserve]",
)
class _OnlyWokenOnce(_Notifying):
    consumer_class = _WokenOnce


class _NotifiesOne(_NotifyingStore):
    def notify(self) -> None:
        with self.changed:
            self.notifications += 1
            self.changed.notify(1)


@plant(
    "wakes only one",
    "a batch of jobs wakes one of the consumers that wait, and the others poll every three seconds",
    "Waking.test_two_jobs_wake_two_consumers_in_time",
)
class _OneIsWoken(_Notifying):
    store_class = _NotifiesOne

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        store = self._store
        with store.lock:
            now = store.clock()
            held = store.queue(queue, now)
            ids = held.add_all(jobs, now)
            store.keep(held)
        self._notify("enqueue")
        return ids


@plant("wakes too early", "a batch is notified before it is stored, and found at the next poll", f"{_IN_TIME}[a batch]")
class _NotifiesTooEarly(_Notifying):
    silent = frozenset({"enqueue"})

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        cast("_NotifyingStore", self._store).notify()
        time.sleep(0.02)  # simulates the duration of a commit
        return super().enqueue(queue, jobs, connection=connection)


@plant(
    "listens too late",
    "a consumer begins to listen after its poll: a job that comes in between is found at the next poll",
    "Waking.test_a_job_that_comes_while_a_consumer_falls_asleep_wakes_it_in_time",
)
class _WaitsTooLate(_Notifying):
    class consumer_class(_Waiting):  # noqa: N801 - named like the attribute it replaces
        waits_after = 0.02


class _PollingConsumer(WiredConsumer):
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        give_up_at = time.monotonic() + timeout
        while not (leases := super().reserve(limit, 0, queues)) and time.monotonic() < give_up_at:
            time.sleep(0.2)
        return leases


@plant(
    "polls",
    "a consumer that declares waits_in_server sends five requests a second",
    "Waiting.test_an_idle_consumer_asks_the_server_seldom",
)
class _Polls(WiredBackend):
    def consumer(self, queues: Sequence[str]) -> WiredConsumer:
        return _PollingConsumer(self, queues)


# --- times and places ------------------------------------------------------------------------------------


class _PutsBehind(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        if isinstance(verdict, Release) and verdict.delay > 0:
            job.sequence = queue.next_sequence()
        super()._carry_out(verdict, queue, job, now)


@plant(
    "put off, put behind",
    "a job that is released with a delay takes a new place",
    "Reserve.test_a_job_released_with_a_delay_is_still_the_oldest_when_it_is_due",
)
class _PutOffPutBehind(Planted):
    consumer_class = _PutsBehind


@plant(
    "duplicates re-time",
    "enqueuing the id of a delayed job again gives it the new delay",
    "Enqueue.test_a_known_id_does_not_re_time_a_delayed_job",
)
class _DuplicatesReTime(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            job = self.jobs.get(new.id)
            if job is not None and job.state is State.DELAYED and new.delay > 0:
                self.make_due(job, new.delay, now)
            return super().add(new, now)


@plant(
    "duplicates dig up",
    "enqueuing the id of a buried job with a delay makes it a delayed one",
    "Enqueue.test_a_known_id_leaves_the_job_in_its_state[buried]",
)
class _DuplicatesDigUp(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            job = self.jobs.get(new.id)
            if job is not None and job.state is State.BURIED and new.delay > 0:
                self.make_due(job, new.delay, now)
            return super().add(new, now)


@plant(
    "duplicates prolong",
    "enqueuing the id of a reserved job gives it the new ttr",
    "Enqueue.test_a_known_id_leaves_the_job_in_its_state[reserved]",
)
class _DuplicatesProlong(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            job = self.jobs.get(new.id)
            if job is not None and job.state is State.RESERVED:
                job.ttr = new.ttr
            return super().add(new, now)


@plant(
    "delays cut",
    "delays are cut to hundredths of a second, though microseconds are declared",
    "Enqueue.test_no_fraction_of_a_delay_is_cut_off[enqueue]",
)
class _DelaysCut(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            super().make_due(job, int(delay * 100) / 100, now)


@plant("long delays cut", "delays are cut to a year", "Enqueue.test_the_longest_delay_is_kept")
class _LongDelaysCut(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            super().make_due(job, min(delay, 365 * 86400.0), now)


class _SeesNoPause(MemoryConsumer):
    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        with self._store.lock:
            there = [self._store.queue(name, self._store.clock()) for name in self.queues]
            pauses = [queue.paused_until for queue in there]
            for queue in there:
                queue.paused_until = 0
            try:
                return super().exchange(verdicts, limit, 0, queues)
            finally:
                for queue, paused_until in zip(there, pauses, strict=True):
                    queue.paused_until = paused_until


@plant(
    "exchange sees no pause",
    "an exchange hands out jobs of a paused queue",
    "Pause.test_an_exchange_hands_out_nothing_of_a_paused_queue",
)
class _ExchangeSeesNoPause(Planted):
    consumer_class = _SeesNoPause


class _OtherClock(MemoryConsumer):
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        leases = super().reserve(limit, timeout, queues)
        self.asked_at = time.time()
        return leases


@plant(
    "asked by another clock",
    "asked_at is a time of day, not a monotonic time",
    "Reserve.test_the_moment_at_which_a_consumer_asked_is_before_its_leases_begin[at once]",
)
class _AskedByAnotherClock(Planted):
    consumer_class = _OtherClock


class _StaleConsumer(_Waiting):
    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        if timeout <= 0:
            self.asked_at = time.monotonic()
        return super().reserve(limit, timeout, queues)


@plant(
    "asked long ago",
    "after a wait, asked_at is the time of the previous request",
    "Reserve.test_the_moment_at_which_a_consumer_asked_is_before_its_leases_begin[after a wait]",
)
class _AskedLongAgo(_Notifying):
    consumer_class = _StaleConsumer
