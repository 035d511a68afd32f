"""Planted bugs about memos and details."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from multiq.backend import Abandon, Bury, Release, State, Touch
from multiq.backend.memory import Job, JobQueue, MemoryConsumer
from multiq.conformance.memory_server import WiredBackend

from .registry import Planted, plant

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from multiq.backend import JobRecord, Lease, Page, Verdict
    from multiq.errors import LeaseLost

_A_ROUND_TRIP = 0.001  # seconds; during this time another client can see the first of the two steps alone


def _without(verdict: Verdict) -> Verdict:
    return verdict if verdict.after is None else msgspec.structs.replace(verdict, after=None)


# --- memos -----------------------------------------------------------------------------------------------


class _HandsOutNone(MemoryConsumer):
    def _take(self, limit: int, now: int, order: Sequence[str]) -> list[Lease]:
        return [msgspec.structs.replace(lease, memo=b"") for lease in super()._take(limit, now, order)]


@plant(
    "memo not given back",
    "a memo is stored and shown, and the next lease does not have it",
    "Memos.test_a_job_that_is_given_back_has_its_memo",
)
class _MemoNotGivenBack(Planted):
    consumer_class = _HandsOutNone


@plant(
    "memo lost at the lease's end",
    "a job whose lease ends without a verdict loses its memo",
    "Memos.test_a_memo_outlives_the_end_of_a_lease",
)
class _MemoLostAtTheEnd(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def promote(self, now: int) -> None:
            crashes = {job.id: job.crashes for job in self.jobs.values()}
            super().promote(now)
            for job in self.jobs.values():
                if job.crashes > crashes[job.id]:
                    job.memo = b""


@plant(
    "kick empties",
    "a job that is kicked loses its memo and its detail",
    "Memos.test_a_memo_and_a_detail_outlive_a_kick[kick]",
)
class _KickEmpties(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_ready(self, job: Job, *, crashed: bool = False) -> None:
            if job.kicks and job.state is State.BURIED:
                job.memo = job.detail = b""
            super().make_ready(job, crashed=crashed)


class _StoresFirst(MemoryConsumer):
    def _settle_one(self, verdict: Verdict, now: int) -> LeaseLost | None:
        job = self._store.queue(verdict.lease.queue, now).jobs.get(verdict.lease.id)
        after = verdict.after
        if job is not None and after is not None and after.memo is not None:
            job.memo = after.memo
        return super()._settle_one(verdict, now)


@plant(
    "refused verdict stores",
    "a verdict stores its memo, and is then refused",
    "Memos.test_late_verdicts_store_nothing",
)
class _RefusedVerdictStores(Planted):
    consumer_class = _StoresFirst


class _StoresLater(MemoryConsumer):
    """A bug: verdicts are carried out first, and their memos and details are stored in a second step."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        answers = super().settle([_without(verdict) for verdict in verdicts])
        time.sleep(_A_ROUND_TRIP)
        with self._store.lock:
            for verdict, answer in zip(verdicts, answers, strict=True):
                queue = self._store.queue(verdict.lease.queue, self._store.clock())
                job, after = queue.jobs.get(verdict.lease.id), verdict.after
                if answer is None and job is not None and after is not None:
                    job.memo = job.memo if after.memo is None else after.memo
                    if isinstance(verdict, Release | Bury):
                        job.detail = after.detail or b""
        return answers


@plant(
    "memo in a second step",
    "a verdict moves its job, and stores its memo in a second step",
    "Concurrency.test_a_verdict_is_never_seen_without_its_memo_and_detail",
)
class _MemoInASecondStep(Planted):
    consumer_class = _StoresLater


class _OverwritesMemo(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        after = verdict.after
        if after is not None and after.memo is None:
            job.memo = b""
        super()._carry_out(verdict, queue, job, now)


@plant(
    "no memo means an empty one",
    "a verdict that stores something else empties the memo",
    "Memos.test_a_verdict_without_a_memo_leaves_the_stored_one[touch-an empty after]",
)
class _NoMemoMeansAnEmptyOne(Planted):
    consumer_class = _OverwritesMemo


class _IgnoresEmpty(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        before, after = job.memo, verdict.after
        super()._carry_out(verdict, queue, job, now)
        if after is not None and after.memo == b"" and job.id in queue.jobs:
            job.memo = before


@plant(
    "empty memo ignored",
    "a memo without bytes leaves the stored one",
    "Memos.test_an_empty_memo_replaces_the_stored_one[touch]",
)
class _EmptyMemoIgnored(Planted):
    consumer_class = _IgnoresEmpty


@plant(
    "reschedule keeps the memo",
    "a job that is rescheduled keeps its memo and its detail",
    "Memos.test_a_rescheduled_job_has_neither[put off-ready]",
)
class _RescheduleKeepsTheMemo(Planted):
    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        with self._store.lock:
            before = self.peek(queue, job_id)
            new = super().reschedule(queue, job_id, delay)
            job = self._store.queue(queue, self._store.clock()).jobs[new]
            job.memo, job.detail = before.memo or b"", before.detail or b""
            return new


class _NextToIt(MemoryConsumer):
    """A bug: the memos and details of a call are assigned to the accepted verdicts by position. A verdict may therefore
    get the memo and detail of another verdict."""

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        with self._store.lock:
            now = self._store.clock()
            afters = iter([verdict.after for verdict in verdicts if not isinstance(verdict, Abandon)])
            shifted: list[Verdict] = []
            for verdict in verdicts:
                is_held = self._store.queue(verdict.lease.queue, now).held(verdict.lease) is not None
                if is_held and not isinstance(verdict, Abandon):
                    shifted.append(msgspec.structs.replace(verdict, after=next(afters)))
                else:
                    shifted.append(verdict)
            return super().settle(shifted)


@plant(
    "memo of the neighbour",
    "after a refused verdict, each verdict of the call stores the values of the verdict before it",
    "Memos.test_each_verdict_of_a_mixed_call_stores_its_own_memo_and_detail",
)
class _MemoOfTheNeighbour(Planted):
    consumer_class = _NextToIt


@plant(
    "listed without a memo",
    "peek shows memos and details, and a listing shows empty ones",
    "Memos.test_a_listing_shows_memo_and_detail_in_each_state[buried]",
)
class _ListedWithoutAMemo(Planted):
    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        page = super().jobs(queue, state, limit=limit, after=after)
        return msgspec.structs.replace(page, jobs=[_emptied(record) for record in page.jobs])


def _emptied(record: JobRecord) -> JobRecord:
    return msgspec.structs.replace(record, memo=b"", detail=b"")


def _touch_plainly(answers: Any, call: Any) -> object:
    store, verdicts = call.func.__self__._store, call.args[0]
    with store.lock:
        for verdict in (verdict for verdict in verdicts if isinstance(verdict, Touch)):
            job = store.queue(verdict.lease.queue, store.clock()).jobs.get(verdict.lease.id)
            if job is not None:
                job.memo = b""
    return answers


@plant(
    "memo lost when repeated",
    "a touch that is repeated because its reply was lost empties the memo",
    "LostReplies.test_a_verdict_with_a_memo_whose_reply_is_lost_is_carried_out_once[Touch]",
)
class _MemoLostWhenRepeated(WiredBackend):
    on_repeat: ClassVar = {"settle": _touch_plainly}


# --- details ---------------------------------------------------------------------------------------------


class _KeepsDetails(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        before, after = job.detail, verdict.after
        super()._carry_out(verdict, queue, job, now)
        if isinstance(verdict, Release | Bury) and (after is None or after.detail is None):
            job.detail = before


@plant(
    "detail kept",
    "a plain release leaves the detail of the failure before",
    "Details.test_a_verdict_without_a_detail_deletes_the_stored_one[release-nothing]",
)
class _DetailKept(Planted):
    consumer_class = _KeepsDetails


class _AbandonsWithDetail(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        before = job.detail
        super()._carry_out(verdict, queue, job, now)
        if isinstance(verdict, Abandon):
            job.detail = before


@plant(
    "abandon keeps the detail",
    "a job that is abandoned keeps the detail of an earlier failure",
    "Details.test_an_abandon_deletes_the_detail",
)
class _AbandonKeepsTheDetail(Planted):
    consumer_class = _AbandonsWithDetail


class _TouchesDetails(MemoryConsumer):
    def _carry_out(self, verdict: Verdict, queue: JobQueue, job: Job, now: int) -> None:
        super()._carry_out(verdict, queue, job, now)
        after = verdict.after
        if isinstance(verdict, Touch) and after is not None:
            job.detail = after.detail or b""


@plant(
    "touch changes the detail",
    "a touch with a memo deletes the detail",
    "Details.test_a_touch_and_a_give_back_leave_the_detail[memo-Touch]",
)
class _TouchChangesTheDetail(Planted):
    consumer_class = _TouchesDetails
