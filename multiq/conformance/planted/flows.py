"""Backends with one planted bug each, about held jobs, steps and notes."""

from __future__ import annotations

import fnmatch
import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from multiq.backend import Abandon, Arrive, Drop, Enqueue, Put, State, Terms, Touch
from multiq.backend.memory import Job, JobQueue, MemoryConsumer, Store, steps_of
from multiq.backend.memory_notes import KeptNotes
from multiq.conformance.memory_server import WiredBackend
from multiq.driverkit.clock import SECOND
from multiq.ids import new_id

from .registry import Planted, plant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from multiq.backend import Lease, NewJob, NotePage, QueueStats, Step, Verdict, Version
    from multiq.driverkit.clock import Clock
    from multiq.errors import LeaseLost


class _PlantedNotes(Planted):
    """A backend whose class for notes can be replaced."""

    notes_class: ClassVar[type[KeptNotes]] = KeptNotes

    def __init__(self, *, name: str = "", clock: Clock = time.monotonic_ns) -> None:
        super().__init__(name=name, clock=clock)
        if type(self._store.notes) is not self.notes_class:
            self._store.notes = self.notes_class()


# --- members ---------------------------------------------------------------------------------------------


@plant(
    "arrivals counted",
    "arrivals are counted, and not the members that have arrived: a member that runs twice counts twice",
    "Holds.test_a_member_that_arrives_in_several_calls_counts_once",
)
class _ArrivalsCounted(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            super().arrive(msgspec.structs.replace(step, member=new_id()), now)


@plant(
    "members without case",
    "members are compared without regard to case and to spaces at the end, as some collations do",
    "Holds.test_members_are_the_same_only_if_all_their_characters_are",
)
class _MembersWithoutCase(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            super().arrive(msgspec.structs.replace(step, member=step.member.casefold().rstrip()), now)


class _OneSetQueue(JobQueue):
    """A bug: all jobs of this queue share one set of arrivals. An entry of the set is the text of the id, followed by
    the text of the member."""

    separator = "\0"
    arrivals: ClassVar[dict[str, set[str]]] = {}  # by the queue's name, as the store deletes empty queues

    def arrive(self, step: Arrive, now: int) -> None:
        entry = f"{step.id}{self.separator}{step.member}"
        job, arrived = self.jobs.get(step.id), self.arrivals.setdefault(self.name, set())
        if job is not None and job.state is State.HELD and (step.doom or entry not in arrived):
            arrived.add(entry)
            super().arrive(step, now)

    def _move(self, job: Job, state: State, due_at: int) -> None:
        super()._move(job, state, due_at)
        if state is not State.HELD:
            self.forget(job)

    def forget(self, job: Job) -> None:
        start = f"{job.id}{self.separator}"
        arrived = self.arrivals.get(self.name, set())
        self.arrivals[self.name] = {entry for entry in arrived if not entry.startswith(start)}


@plant(
    "id and member joined",
    "an arrival is stored as the id and the member one after the other, without a mark between them",
    "Holds.test_jobs_and_members_are_not_mixed_up",
)
class _IdAndMemberJoined(Planted):
    class queue_class(_OneSetQueue):  # noqa: N801 - named like the attribute it replaces
        separator = ""

        def forget(self, job: Job) -> None:
            """Does nothing: this bug is only about joined texts."""


@plant(
    "arrivals kept",
    "the arrivals of a held job stay when it is deleted: a later job of its id is released too early, or never",
    "Holds.test_a_later_job_of_the_same_id_begins_without_arrivals[delete]",
)
class _ArrivalsKept(Planted):
    class queue_class(_OneSetQueue):  # noqa: N801 - named like the attribute it replaces
        def forget(self, job: Job) -> None:
            if job.state is not State.GONE:
                super().forget(job)


@plant(
    "arrivals in advance",
    "an arrival at a job that is not there yet is kept, and counts when the job is enqueued",
    "Holds.test_an_arrival_before_the_job_is_enqueued_does_not_count",
)
class _ArrivalsInAdvance(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        early: ClassVar[dict[tuple[str, str], list[Arrive]]] = {}

        def arrive(self, step: Arrive, now: int) -> None:
            if step.id not in self.jobs:
                self.early.setdefault((self.name, step.id), []).append(step)
            super().arrive(step, now)

        def add(self, new: NewJob, now: int) -> str:
            is_new = new.id not in self.jobs
            super().add(new, now)
            for step in self.early.pop((self.name, new.id), []) if is_new else []:
                super().arrive(step, now)
            return new.id


@plant(
    "ids across queues",
    "an arrival finds its job by the id, in whichever queue it is",
    "Holds.test_an_arrival_in_another_queue_does_not_find_the_job",
)
class _IdsAcrossQueues(Planted):
    class store_class(Store):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, steps: Sequence[Step], now: int) -> None:
            for step in steps:
                super()._carry_out([step], now)
                if isinstance(step, Arrive):
                    for queue in [queue for queue in self._queues.values() if queue.name != step.queue]:
                        queue.arrive(step, now)


# --- released --------------------------------------------------------------------------------------------


@plant(
    "held and handed out",
    "a held job is handed out when there is no other one",
    "Holds.test_a_job_is_held_until_so_many_members_have_arrived[1]",
)
class _HeldAndHandedOut(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def take(self, now: int, token: str, *, with_gates: bool = True) -> Job | None:
            held = self.listing(State.HELD)
            if self.paused_until <= now and held and not self.listing(State.READY):
                self.make_ready(held[0][1])
            return super().take(now, token, with_gates=with_gates)


@plant(
    "delay from the enqueue",
    "the delay of a held job begins when it is enqueued, and not with the last arrival",
    "Holds.test_the_delay_begins_with_the_last_arrival",
)
class _DelayFromTheEnqueue(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            passed = (now - job.enqueued_at) / SECOND if job.state is State.HELD else 0.0
            super().make_due(job, max(0.0, delay - passed), now)


@plant(
    "delay of held jobs lost",
    "a held job that was enqueued with a delay is ready with the last arrival",
    "Holds.test_a_released_job_with_a_delay_is_delayed",
)
class _DelayLost(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            super().make_due(job, 0.0 if job.state is State.HELD else delay, now)


@plant(
    "released again",
    "an arrival at a delayed job that was held begins its delay again",
    "Holds.test_a_later_arrival_does_not_begin_the_delay_again",
)
class _ReleasedAgain(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            if job is not None and job.state is State.DELAYED:
                self.make_due(job, job.delay, now)
            super().arrive(step, now)


@plant(
    "released at the tail",
    "a released job goes behind the jobs that were enqueued while it was held",
    "Holds.test_a_released_job_has_its_old_place",
)
class _ReleasedAtTheTail(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            before = job.sequence if job is not None and job.state is State.HELD else 0
            if job is not None and before:
                job.sequence = self.next_sequence()
            super().arrive(step, now)
            if job is not None and job.state is State.HELD:
                job.sequence = before


# --- expect and doom -------------------------------------------------------------------------------------


@plant(
    "expect counted twice",
    "a member that arrives again makes the job wait for more again",
    "Holds.test_only_the_first_arrival_makes_the_job_wait_for_more",
)
class _ExpectCountedTwice(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            if job is not None and job.state is State.HELD and step.member in job.arrived:
                job.awaits += step.expect
            super().arrive(step, now)


@plant(
    "expect too late",
    "an arrival is counted before its expect: the last member releases the job instead of prolonging its wait",
    "Holds.test_the_last_member_can_make_the_job_wait_for_one_more_again_and_again",
)
class _ExpectTooLate(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            expect = step.expect if job is not None and step.member not in job.arrived else 0
            super().arrive(msgspec.structs.replace(step, expect=0), now)
            if job is not None and job.state is State.HELD:
                job.awaits += expect


class _ChangesDoom(JobQueue):
    """Changes the reason of a job that an arrival has just doomed."""

    def arrive(self, step: Arrive, now: int) -> None:
        super().arrive(step, now)
        job = self.jobs.get(step.id)
        if step.doom and job is not None:
            job.doomed = self.changed(job, step.doom)

    def changed(self, job: Job, doom: str) -> str:
        raise NotImplementedError


@plant(
    "doom without a reason",
    "a doomed job is released, and its lease does not say that it is doomed: it runs",
    "Holds.test_a_doomed_job_is_ready_at_once_with_the_reason",
)
class _DoomWithoutReason(Planted):
    class queue_class(_ChangesDoom):  # noqa: N801 - named like the attribute it replaces
        def changed(self, job: Job, doom: str) -> str:
            return ""


@plant(
    "last reason",
    "a second arrival with doom replaces the reason of the first",
    "Holds.test_the_first_reason_stays",
)
class _LastReason(Planted):
    class queue_class(_ChangesDoom):  # noqa: N801 - named like the attribute it replaces
        def changed(self, job: Job, doom: str) -> str:
            return doom if job.doomed else ""


@plant(
    "running jobs doomed",
    "an arrival with doom marks a job that is not held",
    "Holds.test_an_arrival_at_a_job_that_is_not_held_changes_nothing[ready-doom]",
)
class _RunningJobsDoomed(Planted):
    class queue_class(_ChangesDoom):  # noqa: N801 - named like the attribute it replaces
        def changed(self, job: Job, doom: str) -> str:
            return job.doomed or doom


@plant(
    "doom ignored",
    "a member that has arrived cannot doom the job any more",
    "Holds.test_a_member_that_has_arrived_can_doom_the_job_later",
)
class _DoomIgnored(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            if job is None or step.member not in job.arrived:
                super().arrive(step, now)


@plant(
    "doom delayed",
    "a doomed job waits for its delay first",
    "Holds.test_a_doomed_job_does_not_wait_for_its_delay",
)
class _DoomDelayed(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def arrive(self, step: Arrive, now: int) -> None:
            job = self.jobs.get(step.id)
            was_held = job is not None and job.state is State.HELD
            super().arrive(step, now)
            if job is not None and was_held and step.doom:
                self.make_due(job, job.delay, now)


@plant(
    "doom forgotten",
    "a verdict on a doomed job makes it a job like any other",
    "Holds.test_a_doomed_job_stays_doomed_through_its_verdicts",
)
class _DoomForgotten(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
            super()._carry_out(verdict, queue, job, now)
            job.doomed = ""


# --- held jobs and the other verbs -----------------------------------------------------------------------


@plant(
    "kicks held jobs",
    "a kick with few buried jobs releases held ones",
    "HeldJobs.test_a_kick_of_many_leaves_held_jobs_alone",
)
class _KicksHeldJobs(Planted):
    def kick(self, queue: str, limit: int) -> int:
        kicked = super().kick(queue, limit)
        held = self.jobs(queue, State.HELD, limit=limit).jobs if kicked < limit else []
        for record in held[: limit - kicked]:
            self.kick_job(queue, record.id)
        return kicked + len(held[: limit - kicked])


@plant(
    "kick counted for a held job",
    "kick_job counts a kick of a held job",
    "HeldJobs.test_a_held_job_that_is_kicked_is_ready_now[0.0]",
)
class _KickCountedForAHeldJob(Planted):
    def kick_job(self, queue: str, job_id: str) -> None:
        with self._store.lock:
            job = self._store.queue(queue, self._store.clock()).jobs.get(job_id)
            if job is not None:
                job.kicks += job.state is State.HELD
            super().kick_job(queue, job_id)


@plant(
    "purges held jobs",
    "a purge of the delayed jobs deletes the held ones, too",
    "HeldJobs.test_a_purge_of_other_states_leaves_held_jobs_alone",
)
class _PurgesHeldJobs(Planted):
    def purge(self, queue: str, states: Sequence[State]) -> int:
        return super().purge(queue, [*states, State.HELD] if State.DELAYED in states else states)


@plant(
    "reschedules held jobs",
    "a held job can be rescheduled, and starts without its members",
    "HeldJobs.test_a_held_job_cannot_be_rescheduled[0.0]",
)
class _ReschedulesHeldJobs(Planted):
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        with self._store.lock:
            job = self._store.queue(queue, self._store.clock()).jobs.get(job_id)
            if job is not None and job.state is State.HELD:
                self.kick_job(queue, job_id)
            return super().reschedule(queue, job_id, delay)


@plant(
    "held not counted",
    "stats count no held jobs, and say 0",
    "HeldJobs.test_stats_count_held_jobs_by_themselves",
)
class _HeldNotCounted(Planted):
    def stats(self, queue: str) -> QueueStats:
        return msgspec.structs.replace(super().stats(queue), held=0)


@plant(
    "queue of held jobs forgotten",
    "a queue that has only held jobs is not named",
    "HeldJobs.test_a_queue_is_named_while_it_has_a_held_job",
)
class _QueueOfHeldJobsForgotten(Planted):
    def queues(self) -> list[str]:
        return [name for name in super().queues() if self._is_used(name)]

    def _is_used(self, name: str) -> bool:
        stats = self.stats(name)
        return any((stats.ready, stats.delayed, stats.reserved, stats.buried, stats.paused_for)) or not stats.held


@plant(
    "duplicates re-hold",
    "enqueuing the id of a held job gives it the new number of members",
    "HeldJobs.test_a_held_job_is_not_changed_by_enqueuing_its_id[enqueue-0.0-more]",
)
class _DuplicatesReHold(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            job = self.jobs.get(new.id)
            if job is not None and job.state is State.HELD and new.terms is not None and new.terms.awaits > job.awaits:
                job.awaits = new.terms.awaits
            return super().add(new, now)


@plant(
    "terms of a step ignored",
    "a job that a step enqueues is not held",
    "Steps.test_the_steps_of_a_verdict_are_carried_out_in_their_order",
)
class _TermsOfAStepIgnored(Planted):
    class store_class(Store):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, steps: Sequence[Step], now: int) -> None:
            def plain(step: Step) -> Step:
                if not isinstance(step, Enqueue):
                    return step
                return Enqueue(step.queue, msgspec.structs.replace(step.job, terms=Terms()))

            super()._carry_out([plain(step) for step in steps], now)


# --- steps -----------------------------------------------------------------------------------------------


@plant(
    "steps of a refused verdict",
    "a verdict that is refused carries out its steps",
    "Steps.test_a_late_verdict_carries_out_no_step[ack]",
)
class _StepsOfARefusedVerdict(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
            lost = super()._settle_one(verdict, now)
            if lost is not None:
                self._store.carry_out(steps_of(verdict), now)
            return lost


@plant(
    "steps of the neighbour",
    "of several verdicts of a call, all steps are carried out if one of them is accepted",
    "Steps.test_of_several_verdicts_of_a_call_only_the_accepted_ones_carry_out_their_steps",
)
class _StepsOfTheNeighbour(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
            with self._store.lock:
                answers = super().settle(verdicts)
                if None in answers:
                    now = self._store.clock()
                    for verdict, answer in zip(verdicts, answers, strict=True):
                        self._store.carry_out(steps_of(verdict) if answer is not None else (), now)
            return answers


@plant(
    "touches carry out nothing",
    "a touch does not carry out its steps",
    "Steps.test_each_touch_carries_out_its_steps",
)
class _TouchesCarryOutNothing(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
            return super()._settle_one(Touch(verdict.lease) if isinstance(verdict, Touch) else verdict, now)


class _StepsApart(MemoryConsumer):
    """A bug: verdicts and their steps are carried out separately."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers = super().settle([_without_steps(verdict) for verdict in verdicts])
        self.between()
        with self._store.changed:
            now = self._store.clock()
            for verdict, answer in zip(verdicts, answers, strict=True):
                self._store.carry_out(steps_of(verdict) if answer is None else (), now)
            self._store.changed.notify_all()
        return answers

    def between(self) -> None:
        """Does nothing by default."""


def _without_steps(verdict: Verdict) -> Verdict:
    return _with_steps(verdict, ()) if steps_of(verdict) else verdict


def _with_steps(verdict: Verdict, steps: tuple[Step, ...]) -> Verdict:
    assert not isinstance(verdict, Abandon)
    assert verdict.after is not None
    return msgspec.structs.replace(verdict, after=msgspec.structs.replace(verdict.after, steps=steps))


@plant(
    "ack, then steps",
    "the steps of an ack are carried out after it, in a second call",
    "OneStep.test_an_ack_is_never_seen_without_its_arrival_nor_its_arrival_without_the_ack",
)
class _AckThenSteps(Planted):
    class consumer_class(_StepsApart):  # noqa: N801 - named like the attribute it replaces
        def between(self) -> None:
            time.sleep(0.001)  # lets other threads run, as a round trip to a server would


@plant(
    "exchange, then steps",
    "an exchange reserves before it carries out the steps of its verdicts",
    "Steps.test_an_exchange_hands_out_what_its_verdicts_have_released",
)
class _ExchangeThenSteps(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def exchange(
            self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
        ) -> tuple[list[LeaseLost | None], list[Lease]]:
            bare = [_without_steps(verdict) for verdict in verdicts]
            answers, leases = super().exchange(bare, limit, 0 if verdicts else timeout, queues)
            with self._store.changed:
                now = self._store.clock()
                for verdict, answer in zip(verdicts, answers, strict=True):
                    self._store.carry_out(steps_of(verdict) if answer is None else (), now)
                self._store.changed.notify_all()
            return answers, leases


@plant(
    "steps, then ack",
    "the steps of a verdict are carried out before it",
    "Steps.test_a_step_can_enqueue_the_id_of_the_job_that_is_acked",
)
class _StepsThenAck(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
            lease = verdict.lease
            if self._store.queue(lease.queue, now).held(lease) is not None:
                self._store.carry_out(steps_of(verdict), now)
                verdict = _without_steps(verdict)
            return super()._settle_one(verdict, now)


@plant(
    "arrivals first",
    "the arrivals among a verdict's steps are carried out before the other steps, even if they come after them",
    "Steps.test_the_steps_in_another_queue_are_carried_out_in_their_order",
)
class _ArrivalsFirst(Planted):
    class store_class(Store):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, steps: Sequence[Step], now: int) -> None:
            super()._carry_out(sorted(steps, key=lambda step: not isinstance(step, Arrive)), now)


@plant(
    "steps elsewhere forgotten",
    "a verdict's steps in other queues than the job's are never carried out",
    "Steps.test_an_accepted_verdict_carries_out_its_steps_in_other_queues[ack]",
)
class _StepsElsewhereForgotten(Planted):
    class consumer_class(MemoryConsumer):  # noqa: N801 - named like the attribute it replaces
        def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
            steps = steps_of(verdict)
            if steps:
                near = tuple(step for step in steps if _home(step) == verdict.lease.queue)
                verdict = _with_steps(verdict, near)
            return super()._settle_one(verdict, now)


def _home(step: Step) -> str:
    return step.home if isinstance(step, Put | Drop) else step.queue


@plant(
    "half the steps",
    "if there are more than 500 steps, only the first 500 are carried out",
    "Steps.test_a_thousand_steps_are_carried_out[verdict]",
)
class _HalfTheSteps(Planted):
    class store_class(Store):  # noqa: N801 - named like the attribute it replaces
        def _carry_out(self, steps: Sequence[Step], now: int) -> None:
            super()._carry_out(steps[:500], now)


@plant(
    "steps one by one",
    "other clients see the steps of carry_out one after the other",
    "OneStep.test_the_steps_of_carry_out_are_seen_together",
)
class _StepsOneByOne(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if when or not steps:
            return super().carry_out(steps, when=when)
        for step in steps:
            super().carry_out([step])
            time.sleep(0.0005)  # lets other threads run, as a round trip to a server would
        return True


@plant(
    "homes one by one",
    "other clients see the steps of carry_out in one home, and those in another home later",
    "OneStepEverywhere.test_the_steps_of_carry_out_in_several_homes_are_seen_together",
)
class _HomesOneByOne(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        for home in dict.fromkeys(map(_home, steps)):
            if not super().carry_out([step for step in steps if _home(step) == home], when=when):
                return False
            when = ()
            time.sleep(0.0005)  # lets other threads run, as a round trip to a server would
        return True


# --- lost replies ----------------------------------------------------------------------------------------


def _jobs_again(answers: Any, call: Any) -> Any:
    """A bug: the jobs of the accepted verdicts' steps are enqueued once more. A server that chooses the ids itself
    could have this bug."""
    consumer, (verdicts,) = call.func.__self__, call.args
    with consumer._store.lock:
        now = consumer._store.clock()
        for verdict, answer in zip(verdicts, answers, strict=True):
            for step in steps_of(verdict) if answer is None else ():
                if isinstance(step, Enqueue):
                    job = msgspec.structs.replace(step.job, id=new_id())
                    consumer._store.carry_out([Enqueue(step.queue, job)], now)
    return answers


@plant(
    "steps enqueue twice",
    "a verdict that is repeated because its reply was lost enqueues the jobs of its steps again",
    "LostReplies.test_the_steps_of_verdicts_whose_reply_is_lost_are_carried_out_once[Ack]",
)
class _StepsEnqueueTwice(WiredBackend):
    on_repeat: ClassVar = {"settle": _jobs_again}


def _again(_: object, call: Callable[[], object]) -> object:
    return call()


@plant(
    "condition checked twice",
    "after a lost reply, carry_out is repeated, and checks its condition against the notes that it has already changed",
    "LostReplies.test_a_condition_whose_reply_is_lost_has_the_answer_of_the_first_attempt[there is a note]",
)
class _ConditionCheckedTwice(WiredBackend):
    on_repeat: ClassVar = {"carry_out": _again}


@plant(
    "steps lost with the request",
    "carry_out returns True after a lost connection, though the server never received its request",
    "LostReplies.test_the_steps_of_carry_out_whose_reply_is_lost_are_carried_out_once",
)
class _StepsLostWithTheRequest(WiredBackend):
    on_loss: ClassVar = {"carry_out": True}


# --- notes -----------------------------------------------------------------------------------------------


class _Renames(KeptNotes):
    """Gives another version to a note that was just put."""

    def change(self, step: Put | Drop, now: int) -> None:
        super().change(step, now)
        if isinstance(step, Put) and step.home in self._homes:
            notes = self._homes[step.home].by_key
            notes[step.key] = msgspec.structs.replace(notes[step.key], version=self.version(step))

    def version(self, step: Put) -> str:
        raise NotImplementedError


@plant(
    "version reused",
    "the versions of a note are counted from 1 again after it was dropped",
    "CompareAndSet.test_a_note_that_was_dropped_does_not_have_its_version_any_more",
)
class _VersionReused(_PlantedNotes):
    class notes_class(_Renames):  # noqa: N801 - named like the attribute it replaces
        def __init__(self) -> None:
            super().__init__()
            self._counts: dict[tuple[str, str], int] = {}

        def change(self, step: Put | Drop, now: int) -> None:
            if isinstance(step, Drop):
                self._counts.pop((step.home, step.key), None)
            super().change(step, now)

        def version(self, step: Put) -> str:
            place = step.home, step.key
            self._counts[place] = self._counts.get(place, 0) + 1
            return str(self._counts[place])


@plant(
    "version of the bytes",
    "the version of a note is made of its bytes: the same bytes have the same version",
    "Notes.test_each_put_gives_another_version_also_of_the_same_bytes",
)
class _VersionOfTheBytes(_PlantedNotes):
    class notes_class(_Renames):  # noqa: N801 - named like the attribute it replaces
        def version(self, step: Put) -> str:
            return f"{len(step.value)}.{hash(step.value)}"


@plant(
    "condition ignored",
    "carry_out carries out its steps whatever the condition",
    "CompareAndSet.test_a_condition_that_does_not_hold_lets_no_step_be_carried_out",
)
class _ConditionIgnored(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        return super().carry_out(steps)


@plant(
    "first condition only",
    "of several conditions only the first one is checked",
    "CompareAndSet.test_all_conditions_must_hold",
)
class _FirstConditionOnly(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        return super().carry_out(steps, when=when[:1])


@plant(
    "condition before, steps after",
    "the condition and the steps are two calls, between which others change the note",
    "CompareAndSet.test_of_many_that_change_a_note_at_once_one_succeeds[a note]",
)
class _ConditionThenSteps(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        if not super().carry_out([], when=when):
            return False
        time.sleep(0.001)  # lets other threads run, as a round trip to a server would
        return super().carry_out(steps)


@plant(
    "condition for notes only",
    "if the condition does not hold, only the notes are left as they are, and the other steps are carried out",
    "CompareAndSet.test_a_condition_can_be_about_a_note_that_the_steps_leave",
)
class _ConditionForNotesOnly(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        holds = super().carry_out(steps, when=when)
        if not holds:
            super().carry_out([step for step in steps if not isinstance(step, Put | Drop)])
        return holds


@plant(
    "condition checked last",
    "the condition is checked after the steps, and holds because of them",
    "CompareAndSet.test_conditions_are_checked_before_the_first_step",
)
class _ConditionCheckedLast(Planted):
    def carry_out(self, steps: Sequence[Step], *, when: Sequence[Version] = ()) -> bool:
        dropped = {(step.home, step.key) for step in steps if isinstance(step, Drop)}
        return super().carry_out(steps, when=[one for one in when if one.version or (one.home, one.key) not in dropped])


@plant(
    "prefix as a pattern",
    "a prefix of keys is a pattern, in which * and [ have a meaning",
    "Notes.test_a_prefix_means_nothing_but_itself[*]",
)
class _PrefixAsAPattern(Planted):
    def notes(self, home: str, prefix: str = "", *, limit: int = 100, after: str | None = None) -> NotePage:
        page = super().notes(home, "", limit=100_000, after=after)
        found = [note for note in page.notes if fnmatch.fnmatchcase(note.key, f"{prefix}*")]
        more = found[limit - 1].key if len(found) > limit else None
        return msgspec.structs.replace(page, notes=found[:limit], after=more)


@plant(
    "keys without case",
    "keys are compared without regard to case",
    "Notes.test_keys_that_differ_are_keys_of_different_notes",
)
class _KeysWithoutCase(_PlantedNotes):
    class notes_class(KeptNotes):  # noqa: N801 - named like the attribute it replaces
        def change(self, step: Put | Drop, now: int) -> None:
            notes = self._homes[step.home].by_key if step.home in self._homes else {}
            same = [key for key in notes if key.lower() == step.key.lower()]
            super().change(msgspec.structs.replace(step, key=same[0] if same else step.key), now)


@plant(
    "notes expire early",
    "a note is deleted a second before its ttl has passed",
    "Notes.test_a_note_expires_after_its_ttl_and_not_before",
)
class _NotesExpireEarly(_PlantedNotes):
    class notes_class(KeptNotes):  # noqa: N801 - named like the attribute it replaces
        def change(self, step: Put | Drop, now: int) -> None:
            if isinstance(step, Put) and step.ttl is not None:
                step = msgspec.structs.replace(step, ttl=max(0.01, step.ttl - 1))
            super().change(step, now)


@plant(
    "notes never expire",
    "a listing shows notes that have expired",
    "Notes.test_pages_leave_out_expired_notes",
)
class _NotesNeverExpire(_PlantedNotes):
    class notes_class(KeptNotes):  # noqa: N801 - named like the attribute it replaces
        def page(self, home: str, prefix: str, limit: int, after: str | None, now: int) -> NotePage:
            return super().page(home, prefix, limit, after, 0)


@plant(
    "expired versions hold",
    "a note that has expired still counts for a condition",
    "Notes.test_an_expired_note_counts_as_none",
)
class _ExpiredVersionsHold(_PlantedNotes):
    class notes_class(KeptNotes):  # noqa: N801 - named like the attribute it replaces
        def _version(self, home: str, key: str, now: int) -> str:
            return super()._version(home, key, 0)


@plant(
    "old ttl kept",
    "a put without a ttl leaves the ttl that the note had",
    "Notes.test_the_last_put_decides_how_long_a_note_stays[None]",
)
class _OldTtlKept(_PlantedNotes):
    class notes_class(KeptNotes):  # noqa: N801 - named like the attribute it replaces
        def change(self, step: Put | Drop, now: int) -> None:
            if isinstance(step, Put) and step.ttl is None:
                before = self.find(step.home, step.key, now)
                step = msgspec.structs.replace(step, ttl=before and before.expires_in)
            super().change(step, now)


@plant(
    "homes are queues",
    "a home that has only notes is named as a queue",
    "Notes.test_a_home_that_has_only_notes_is_no_queue_in_use",
)
class _HomesAreQueues(Planted):
    def queues(self) -> list[str]:
        return sorted({*super().queues(), *self._store.notes._homes})


@plant(
    "purges notes",
    "a purge of a queue deletes its notes",
    "Notes.test_the_verbs_for_jobs_leave_notes_alone",
)
class _PurgesNotes(Planted):
    def purge(self, queue: str, states: Sequence[State]) -> int:
        self._store.notes._homes.pop(queue, None)
        return super().purge(queue, states)
