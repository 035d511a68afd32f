"""Planted bugs about outcomes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from multiq.backend import Ack, After, OutcomePage
from multiq.backend.memory import Job, JobQueue, MemoryBackend, MemoryConsumer, Store
from multiq.backend.memory_outcomes import KeptOutcome, KeptOutcomes
from multiq.conformance.memory_server import WiredBackend, WiredConsumer
from multiq.errors import PayloadTooLarge

from .registry import Planted, plant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from multiq.backend import Outcome, OutcomeKind, State, Verdict
    from multiq.backend.capabilities import Capabilities
    from multiq.errors import JobNotFound, JobReserved, LeaseLost

_A_ROUND_TRIP = 0.001  # seconds; during this time another client can see the first of the two steps alone


def _store(outcomes: type[KeptOutcomes]) -> type[Store]:
    return type("PlantedStore", (Store,), {"outcomes_class": outcomes})


# --- kept in another step, or without an accepted ack -----------------------------------------------------


class _KeepsLater(MemoryConsumer):
    """A bug: the jobs are deleted in a first step, and their outcomes are stored in a second step."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        plain = [Ack(verdict.lease) if isinstance(verdict, Ack) else verdict for verdict in verdicts]
        answers = super().settle(plain)
        time.sleep(_A_ROUND_TRIP)
        for verdict, answer in zip(verdicts, answers, strict=True):
            if answer is None and isinstance(verdict, Ack):
                _keep(self._store, verdict)
        return answers


def _keep(store: Store, ack: Ack) -> None:
    """A bug: an ack's outcome is stored even if the ack was refused."""
    with store.lock:
        kept = KeptOutcome.of(ack.lease.id, ack.lease.attempt, ack.after, store.clock())
        if kept is not None:
            store.outcomes.keep(ack.lease.queue, kept)


@plant(
    "outcome after the ack",
    "an ack deletes its job, and keeps the outcome in a second step",
    "Concurrency.test_no_job_is_gone_without_its_outcome",
)
class _OutcomeAfterTheAck(Planted):
    consumer_class = _KeepsLater


@plant(
    "outcome after the deletion",
    "delete_many deletes the jobs, and keeps their outcomes in a second step",
    "Concurrency.test_no_job_is_deleted_without_the_outcome_that_the_call_keeps",
)
class _OutcomeAfterTheDeletion(Planted):
    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        answers = super().delete_many(queue, ids)
        time.sleep(_A_ROUND_TRIP)
        with self._store.lock:
            for job_id, answer in zip(ids, answers, strict=True):
                kept = KeptOutcome.of(job_id, 0, after, self._store.clock())
                if answer is None and kept is not None:
                    self._store.outcomes.keep(queue, kept)
        return answers


@plant(
    "outcome of each mention",
    "delete_many keeps its outcome for each job that it is given, also for reserved ones",
    "Outcomes.test_deleted_jobs_keep_the_outcome_that_the_call_gives",
)
class _OutcomeOfEachMention(Planted):
    def delete_many(
        self, queue: str, ids: Sequence[str], *, after: After | None = None
    ) -> list[JobNotFound | JobReserved | None]:
        answers = super().delete_many(queue, ids, after=after)
        with self._store.lock:
            for job_id, answer in zip(ids, answers, strict=True):
                kept = KeptOutcome.of(job_id, 0, after, self._store.clock())
                if answer is not None and kept is not None:
                    self._store.outcomes.keep(queue, kept)
        return answers


class _KeepsBefore(MemoryConsumer):
    """A bug: the outcomes of leases that have not ended are stored, and the jobs are deleted in a second step."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        acks = {verdict.lease.token: verdict for verdict in reversed(verdicts) if isinstance(verdict, Ack)}
        with self._store.lock:
            for ack in acks.values():
                if self._store.queue(ack.lease.queue, self._store.clock()).held(ack.lease) is not None:
                    _keep(self._store, ack)
        time.sleep(_A_ROUND_TRIP)
        return super().settle(
            [Ack(verdict.lease) if acks.get(verdict.lease.token) is verdict else verdict for verdict in verdicts]
        )


@plant(
    "outcome before the ack",
    "an ack keeps its outcome, and deletes its job in a second step",
    "Concurrency.test_no_outcome_is_there_before_its_job_is_gone[outcomes]",
)
class _OutcomeBeforeTheAck(Planted):
    consumer_class = _KeepsBefore


class _KeepsRefused(MemoryConsumer):
    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        lost = super()._settle_one(verdict, now)
        queue = self._store.queue(verdict.lease.queue, now)
        if lost is not None and isinstance(verdict, Ack) and verdict.lease.id in queue.jobs:
            _keep(self._store, verdict)
        return lost


@plant(
    "refused ack keeps",
    "an ack that comes too late is refused, and keeps its outcome",
    "Outcomes.test_a_late_ack_keeps_nothing",
)
class _RefusedAckKeeps(Planted):
    consumer_class = _KeepsRefused


class _KeepsTwice(MemoryConsumer):
    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        lost = super()._settle_one(verdict, now)
        queue = self._store.queue(verdict.lease.queue, now)
        if lost is not None and isinstance(verdict, Ack) and verdict.lease.id not in queue.jobs:
            _keep(self._store, verdict)
        return lost


@plant(
    "second ack keeps",
    "a second ack of one lease is refused, and replaces the outcome of the first",
    "Outcomes.test_of_two_acks_of_one_lease_the_first_keeps[in two calls]",
)
class _SecondAckKeeps(Planted):
    consumer_class = _KeepsTwice


class _KeepsForAll(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        super()._carry_out(verdict, queue, job, now)
        kept = KeptOutcome.of(job.id, job.attempt, verdict.after, now)
        if kept is not None:
            queue.outcomes.keep(queue.name, kept)


@plant(
    "every verdict keeps",
    "a touch keeps an outcome, and so does every other verdict that has one",
    "Outcomes.test_only_an_ack_keeps_an_outcome[touch]",
)
class _EveryVerdictKeeps(Planted):
    consumer_class = _KeepsForAll


class _KeepsForEver(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        if isinstance(verdict, Ack) and verdict.after is not None and verdict.after.keep == 0:
            verdict = Ack(verdict.lease, msgspec.structs.replace(verdict.after, keep=86_400.0))
        super()._carry_out(verdict, queue, job, now)


@plant(
    "no time means a day",
    "an outcome that is to be kept for no time is kept for a day",
    "Outcomes.test_an_ack_that_asks_for_nothing_keeps_nothing[an outcome without a time]",
)
class _NoTimeMeansADay(Planted):
    consumer_class = _KeepsForEver


class _Clears(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        if isinstance(verdict, Ack):
            queue.outcomes.delete(queue.name, [job.id], now)
        super()._carry_out(verdict, queue, job, now)


@plant(
    "plain ack clears",
    "an ack without an outcome deletes the outcome of an earlier job with the same id",
    "Outcomes.test_an_ack_that_asks_for_nothing_leaves_the_outcome_of_an_earlier_job[nothing]",
)
class _PlainAckClears(Planted):
    consumer_class = _Clears


class _Shifts(MemoryConsumer):
    """A bug: the outcomes of a call are assigned to the accepted acks by position. An ack may therefore get the outcome
    of another ack."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        with self._store.lock:
            now = self._store.clock()
            afters = iter([verdict.after for verdict in verdicts if isinstance(verdict, Ack)])
            shifted: list[Verdict] = []
            for verdict in verdicts:
                is_held = self._store.queue(verdict.lease.queue, now).held(verdict.lease) is not None
                ack = isinstance(verdict, Ack) and is_held
                shifted.append(Ack(verdict.lease, next(afters)) if ack else verdict)
            return super().settle(shifted)


@plant(
    "shifted to the neighbour",
    "after a refused ack, each ack of the call gets the outcome of the ack before it",
    "Outcomes.test_each_ack_of_a_mixed_call_keeps_its_own_outcome",
)
class _ShiftedToTheNeighbour(Planted):
    consumer_class = _Shifts


class _FirstAttempt(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        if isinstance(verdict, Ack):
            job.attempt = 1
        super()._carry_out(verdict, queue, job, now)


@plant(
    "always the first attempt",
    "an outcome has the attempt 1",
    "Outcomes.test_an_outcome_has_the_attempt_that_was_acked",
)
class _AlwaysTheFirstAttempt(Planted):
    consumer_class = _FirstAttempt


_LIMIT = 2_000  # bytes


class _ChecksOneByOne(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        after = verdict.after or After()
        size = max(len(after.outcome), len(after.memo or b""), len(after.detail or b""))
        if size > _LIMIT:
            raise PayloadTooLarge(size, _LIMIT, "store it elsewhere")
        super()._carry_out(verdict, queue, job, now)


@plant(
    "half a call",
    "a call with an outcome that is too large is carried out up to that verdict",
    "Outcomes.test_an_outcome_that_is_too_large_refuses_the_whole_call[settle]",
)
class _HalfACall(Planted):
    declared: ClassVar[Capabilities] = msgspec.structs.replace(MemoryBackend.declared, max_body=_LIMIT)
    consumer_class = _ChecksOneByOne


# --- expiry ----------------------------------------------------------------------------------------------


class _NeverExpires(KeptOutcomes):
    def find(self, queue: str, ids: Sequence[str], now: int) -> list[Outcome | None]:
        return super().find(queue, ids, 0)

    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        return super().page(queue, kind, limit, after, 0)


@plant(
    "expired ones shown",
    "an outcome is returned until something deletes it",
    "Outcomes.test_an_outcome_is_returned_until_it_expires_and_no_longer",
)
class _ExpiredOnesShown(Planted):
    store_class = _store(_NeverExpires)


class _FromTheEnqueue(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        super()._carry_out(verdict, queue, job, job.enqueued_at if isinstance(verdict, Ack) else now)


@plant(
    "kept from the enqueue",
    "an outcome is kept from the enqueue of its job, and not from the ack",
    "Outcomes.test_an_outcome_tells_its_age_and_the_time_that_is_left",
)
class _KeptFromTheEnqueue(Planted):
    consumer_class = _FromTheEnqueue


class _PilesUp(KeptOutcomes):
    def keep(self, queue: str, outcome: KeptOutcome) -> None:
        super().keep(queue, msgspec.structs.replace(outcome, kept_at=0))  # deletes outcomes that had expired long ago
        self._queues[queue].by_id[outcome.id] = outcome


@plant(
    "piles up",
    "an ack that keeps an outcome deletes none that has expired",
    "Outcomes.test_acks_that_keep_an_outcome_delete_those_that_have_expired[one by one]",
)
class _ExpiredOnesPileUp(Planted):
    store_class = _store(_PilesUp)


class _ByTheOldTime(KeptOutcomes):
    """A new outcome keeps the expiry time of the outcome that it replaces."""

    def keep(self, queue: str, outcome: KeptOutcome) -> None:
        (old,) = self.find(queue, [outcome.id], outcome.kept_at)
        if old is not None:
            expires_at = self._queues[queue].by_id[outcome.id].expires_at
            outcome = msgspec.structs.replace(outcome, expires_at=expires_at)
        super().keep(queue, outcome)


@plant(
    "replaced at the old time",
    "an outcome that replaces another one expires at the time of the replaced one",
    "Outcomes.test_an_outcome_that_was_replaced_expires_when_the_new_one_does",
)
class _ReplacedAtTheOldTime(Planted):
    store_class = _store(_ByTheOldTime)


# --- reading ---------------------------------------------------------------------------------------------


class _OldestFirst(KeptOutcomes):
    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        whole = super().page(queue, kind, 1_000_000, None, now).outcomes[::-1]
        start = 0 if after is None else int(after)
        return OutcomePage(whole[start : start + limit], str(start + limit) if len(whole) > start + limit else None)


@plant(
    "first to expire first",
    "a history begins with the outcome that expires first",
    "Outcomes.test_the_outcome_that_expires_last_comes_first",
)
class _FirstToExpireFirst(Planted):
    store_class = _store(_OldestFirst)


class _SkipsTies(KeptOutcomes):
    """A bug: the cursor has only the time at which an outcome expires. The cursor lacks the id."""

    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        page = super().page(queue, kind, limit, after, now)
        return OutcomePage(page.outcomes, page.after and page.after.partition(".")[0])


@plant(
    "page skips ties",
    "the next page of a history begins behind all outcomes that expire together with the last one",
    "Outcomes.test_pages_of_outcomes_that_expire_together_have_no_gap_and_no_overlap",
)
class _PageSkipsTies(Planted):
    store_class = _store(_SkipsTies)


class _AllKinds(KeptOutcomes):
    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        return super().page(queue, None, limit, after, now)


@plant(
    "kind ignored",
    "the history of one kind has the outcomes of the other kind, too",
    "Outcomes.test_a_history_of_one_kind_has_all_of_this_kind_and_no_others[100]",
)
class _KindIgnored(Planted):
    store_class = _store(_AllKinds)


class _FiltersPages(KeptOutcomes):
    """A bug: a page of all kinds of outcomes is read, and then filtered. The history therefore ends with the first page
    that has no outcomes of the requested kind."""

    def page(self, queue: str, kind: OutcomeKind | None, limit: int, after: str | None, now: int) -> OutcomePage:
        page = super().page(queue, None, limit, after, now)
        found = [outcome for outcome in page.outcomes if kind in {None, outcome.kind}]
        return OutcomePage(found, page.after if found else None)


@plant(
    "ends between two of a kind",
    "the history of one kind ends at a page that has only outcomes of the other kind",
    "Outcomes.test_a_history_of_one_kind_has_all_of_this_kind_and_no_others[1]",
)
class _EndsBetweenTwoOfAKind(Planted):
    store_class = _store(_FiltersPages)


class _AlwaysDone(KeptOutcomes):
    def keep(self, queue: str, outcome: KeptOutcome) -> None:
        super().keep(queue, msgspec.structs.replace(outcome, kind="done"))


@plant(
    "cancelled called done",
    "every outcome has the kind done",
    "Outcomes.test_an_outcome_has_the_kind_that_the_ack_gave[cancelled]",
)
class _CancelledCalledDone(Planted):
    store_class = _store(_AlwaysDone)


class _WithoutQueues(KeptOutcomes):
    """A bug: the outcomes of all queues are stored under their ids alone."""

    def find(self, queue: str, ids: Sequence[str], now: int) -> list[Outcome | None]:
        queues = [queue, *(name for name in self._queues if name != queue)]
        found = [super(_WithoutQueues, self).find(name, ids, now) for name in queues]
        return [
            next((outcome for outcome in all_of if outcome is not None), None) for all_of in zip(*found, strict=True)
        ]


@plant(
    "queue ignored",
    "an outcome is found under its id in every queue",
    "Outcomes.test_the_same_id_in_another_queue_is_another_job",
)
class _QueueIgnored(Planted):
    store_class = _store(_WithoutQueues)


class _FoundOnly(KeptOutcomes):
    def find(self, queue: str, ids: Sequence[str], now: int) -> list[Outcome | None]:
        found = {outcome.id: outcome for outcome in super().find(queue, ids, now) if outcome is not None}
        return [*found.values(), *[None] * (len(ids) - len(found))]


@plant(
    "order of the store",
    "outcomes come as the store finds them, and not in the order of the ids",
    "Outcomes.test_outcomes_come_in_the_order_of_the_ids",
)
class _OrderOfTheStore(Planted):
    store_class = _store(_FoundOnly)


# --- forgetting ------------------------------------------------------------------------------------------


class _ForgetsAll(KeptOutcomes):
    def delete(self, queue: str, ids: Sequence[str], now: int) -> int:
        found = super().delete(queue, ids, now)
        self._queues.pop(queue, None)
        return found


@plant(
    "forgets all",
    "forget deletes all outcomes of the queue, and counts those that were named",
    "Outcomes.test_forget_deletes_the_outcomes_of_these_jobs_and_counts_them",
)
class _ForgetsAllOfThem(Planted):
    store_class = _store(_ForgetsAll)


@plant(
    "no ids means expired",
    "forget with an empty list deletes the outcomes that have expired",
    "Outcomes.test_forget_with_no_ids_in_its_list_deletes_nothing",
)
class _NoIdsMeansExpired(Planted):
    def forget(self, queue: str, ids: Sequence[str] | None = None, *, limit: int = 1000) -> int:
        return super().forget(queue, ids or None, limit=limit)


class _CountsExpired(KeptOutcomes):
    def delete(self, queue: str, ids: Sequence[str], now: int) -> int:
        return super().delete(queue, ids, 0)


@plant(
    "counts expired ones",
    "forget counts outcomes that had expired and were not yet deleted",
    "Outcomes.test_an_outcome_that_has_expired_is_not_counted_with_those_that_are_forgotten",
)
class _CountsExpiredOnes(Planted):
    store_class = _store(_CountsExpired)


# --- taken for jobs --------------------------------------------------------------------------------------


@plant(
    "purge takes outcomes",
    "a purge deletes the outcomes of its queue",
    "Outcomes.test_a_purge_neither_counts_nor_deletes_outcomes",
)
class _PurgeTakesOutcomes(Planted):
    def purge(self, queue: str, states: Sequence[State]) -> int:
        with self._store.lock:
            self._store.outcomes._queues.pop(queue, None)
            return super().purge(queue, states)


@plant(
    "outcomes make a queue",
    "a queue that has only outcomes is listed",
    "Outcomes.test_a_queue_that_has_only_outcomes_has_no_jobs_and_is_not_listed",
)
class _OutcomesMakeAQueue(Planted):
    def queues(self) -> list[str]:
        return sorted({*super().queues(), *self._store.outcomes._queues})


# --- lost replies ----------------------------------------------------------------------------------------


def _keep_again(answers: Any, call: Any) -> object:
    store, verdicts = call.func.__self__._store, call.args[0]
    for verdict, answer in zip(verdicts, answers, strict=True):
        if answer is None and isinstance(verdict, Ack):
            _keep(store, verdict)
    return answers


@plant(
    "kept again",
    "an ack that is repeated because its reply was lost keeps its outcome again, though it was forgotten",
    "LostReplies.test_an_outcome_that_was_forgotten_does_not_come_back_when_its_ack_is_repeated",
)
class _KeptAgain(WiredBackend):
    on_repeat: ClassVar = {"settle": _keep_again}


def _drop(answers: Any, call: Any) -> object:
    store, verdicts = call.func.__self__._store, call.args[0]
    with store.lock:
        for lease in (verdict.lease for verdict in verdicts):
            store.outcomes.delete(lease.queue, [lease.id], store.clock())
    return answers


@plant(
    "lost when repeated",
    "an ack that is repeated because its reply was lost deletes its outcome",
    "LostReplies.test_acks_whose_reply_is_lost_keep_one_outcome_each",
)
class _LostWhenRepeated(WiredBackend):
    on_repeat: ClassVar = {"settle": _drop}


@plant(
    "forget answers 0",
    "a forget that is repeated because its reply was lost finds nothing to delete, and says so",
    "LostReplies.test_a_forget_whose_reply_is_lost_counts_what_it_deleted",
)
class _ForgetAnswersZero(WiredBackend):
    on_repeat: ClassVar = {"forget": lambda _, call: call()}


@plant(
    "history without a next",
    "a history that is repeated because its reply was lost ends after a page",
    "LostReplies.test_a_history_whose_reply_is_lost_has_what_is_there",
)
class _HistoryWithoutANext(WiredBackend):
    on_repeat: ClassVar = {"history": lambda page, _: OutcomePage(page.outcomes, None)}


class _RepeatsWithout(WiredConsumer):
    """A bug: if a call was not answered, its acks are repeated without their outcomes."""

    is_uncertain = False

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        if self.is_uncertain:
            verdicts = [Ack(verdict.lease) if isinstance(verdict, Ack) else verdict for verdict in verdicts]
        self.is_uncertain = True
        answers = super().settle(verdicts)
        self.is_uncertain = False
        return answers


@plant(
    "repeated without the outcome",
    "an ack that is repeated because the server did not answer asks for no outcome",
    "Hangs.test_an_outcome_that_a_server_took_no_notice_of_is_kept_when_its_ack_is_said_again",
)
class _RepeatedWithoutTheOutcome(WiredBackend):
    def consumer(self, queues: Sequence[str]) -> WiredConsumer:
        return _RepeatsWithout(self, queues)
