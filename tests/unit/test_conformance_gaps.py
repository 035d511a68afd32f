"""The suite accepts a backend that has all possible gaps and declares them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from multiq.backend import Abandon, GiveBack, Page, Release, State
from multiq.backend.capabilities import Capabilities, Gap
from multiq.backend.memory import MemoryConsumer, MemoryJobs
from multiq.conformance import ManualHarness, Report
from multiq.conformance.runner import run_harness
from multiq.errors import LeaseLost, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Lease, NewJob, Verdict

MAX_BODY = 65_535
MIN_TTR = 3.0


class PoorConsumer(MemoryConsumer):
    """A consumer whose leases end when it is closed, that stores no reasons, and that cannot give a reservation
    back."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._held: dict[str, Lease] = {}

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        leases = super().reserve(limit, timeout, queues)
        self._held.update({lease.token: lease for lease in leases})
        return leases

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        own = [verdict.lease.token in self._held for verdict in verdicts]
        answers = iter(
            super().settle([poorly(verdict) for verdict, is_own in zip(verdicts, own, strict=True) if is_own])
        )
        lost = [LeaseLost(verdict.lease.queue, verdict.lease.id) for verdict in verdicts]
        return [next(answers) if is_own else refusal for is_own, refusal in zip(own, lost, strict=True)]

    def close(self) -> None:
        with self._store.changed:
            now = self._store.clock()
            for lease in self._held.values():
                queue = self._store.queue(lease.queue, now)
                job = queue.held(lease)
                if job is not None:
                    queue.make_ready(job, crashed=True)
            self._held.clear()
            self._store.changed.notify_all()


class PoorBackend(MemoryJobs):
    """A backend with few capabilities: whole seconds, short bodies, its own ids, and a view of the first job only."""

    declared: ClassVar[Capabilities] = Capabilities(
        backend="poor",
        delay_resolution=1.0,
        min_ttr=MIN_TTR,
        max_body=MAX_BODY,
        client_ids=Gap("never", "the store numbers its jobs itself"),
        atomic_batches=Gap("never", "the store takes one job at a time"),
        waits_in_server=Gap("not done", "it was not needed yet"),
        shared=Gap("never", "the jobs live in one process's memory"),
        persistent=Gap("never", "the jobs end with the process"),
        disconnect_ends_lease=True,
        give_back=Gap("never", "the store counts every reservation"),
        lists_jobs=Gap("cannot today", "the store shows the head of each state only"),
        durable_attempts=Gap("never", "nothing survives the process"),
        transactional_enqueue=Gap("never", "there is no database"),
        reasons=Gap("cannot today", "the store has no room for them"),
        stable_ids=Gap("never", "the store gives a rescheduled job a new number"),
        portable_leases=Gap("never", "a lease is its connection's own"),
        fenced_late=Gap("cannot today", "the driver looks at its own clock"),
        memos=Gap("never", "the store keeps a job as it was put"),
        outcomes=Gap("never", "the store forgets a job that is done"),
    )
    numbers: ClassVar[itertools.count[int]] = itertools.count(1)

    def enqueue(self, queue: str, jobs: Sequence[NewJob], *, connection: Any = None) -> list[str]:
        for job in jobs:
            if len(job.body) > MAX_BODY:
                raise PayloadTooLarge(len(job.body), MAX_BODY, "make it smaller")
        return [self._enqueue_one(queue, job, connection) for job in jobs]

    def _enqueue_one(self, queue: str, job: NewJob, connection: Any) -> str:
        taken = msgspec.structs.replace(
            job, id=str(next(self.numbers)), delay=math.ceil(job.delay), ttr=max(MIN_TTR, job.ttr)
        )
        return super().enqueue(queue, [taken], connection=connection)[0]

    def consumer(self, queues: Sequence[str]) -> PoorConsumer:
        return PoorConsumer(self._store, queues)

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        if after is not None or state is State.RESERVED:
            raise self.unsupported("lists_jobs")
        return super().jobs(queue, state, limit=1)

    def reschedule(self, queue: str, job_id: str, delay: float) -> str:
        super().reschedule(queue, job_id, math.ceil(delay))
        with self._store.changed:
            jobs = self._store.queue(queue, self._store.clock()).jobs
            job = jobs.pop(job_id)
            job.id = str(next(self.numbers))
            jobs[job.id] = job
            return job.id


class PoorHarness(ManualHarness):
    walks = 30
    rounds = 10

    def open(self) -> PoorBackend:
        return PoorBackend(name=f"poor/{self.prefix}", clock=self.clock)


def poorly(verdict: Verdict) -> Verdict:
    """Return a verdict with what such a store supports."""
    match verdict:
        case GiveBack(lease=lease, delay=delay):
            return Release(lease, math.ceil(delay))
        case Abandon(lease=lease):
            return Release(lease)
        case Release():
            return msgspec.structs.replace(verdict, delay=math.ceil(verdict.delay), reason=None)
        case _ if hasattr(verdict, "reason"):
            return msgspec.structs.replace(verdict, reason=None)
    return verdict


@pytest.fixture(scope="module")
def report() -> Report:
    return run_harness(PoorHarness)


@pytest.mark.long
def test_an_honest_backend_with_every_gap_keeps_the_rest(report: Report) -> None:
    assert [(row.topic, row.name, row.reason) for row in report.failed] == []
    assert report.ok


@pytest.mark.long
def test_each_gap_is_reported(report: Report) -> None:
    gaps = {power for power, _ in PoorBackend.declared.gaps()}
    assert {row.power for row in report.refused} == gaps


@pytest.mark.long
def test_where_a_power_is_missing_its_counterpart_is_tried(report: Report) -> None:
    kept = {row.name for row in report.kept}
    assert kept >= {
        "test_a_backend_that_chooses_ids_chooses_a_new_one_each_time",
        "test_a_backend_that_keeps_no_reasons_shows_none",
        "test_a_new_id_replaces_the_old_one",
        "test_a_state_that_cannot_be_listed_is_refused_and_never_an_empty_list[buried]",
        "test_where_it_cannot_be_undone_the_attempt_is_counted",
        "test_a_job_whose_consumer_closed_is_ready_at_once",
        "test_one_byte_more_is_refused_with_both_sizes",
        "test_random_walks_agree_with_the_model",
    }


class LyingBackend(PoorBackend):
    """Has the same gaps, and does not declare these."""

    def jobs(self, queue: str, state: State, *, limit: int = 100, after: str | None = None) -> Page:
        return Page([], None)


class LyingHarness(PoorHarness):
    def open(self) -> LyingBackend:
        return LyingBackend(name=f"lying/{self.prefix}", clock=self.clock)


@pytest.mark.long
def test_an_empty_list_in_place_of_a_refusal_is_found_out() -> None:
    report = run_harness(LyingHarness, select=["that_cannot_be_listed"])
    assert [row.outcome for row in report.rows] == ["failed"] * 4 + ["refused"]  # no held jobs
