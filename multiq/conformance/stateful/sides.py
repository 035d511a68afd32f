"""The two sides of a random walk: a backend, and its model.

Steps refer to queues, consumers, jobs and leases by numbers. A number means the same on both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from multiq.backend import Abandon, Ack, Bury, GiveBack, NewJob, Release, Touch
from multiq.errors import JobError
from multiq.ids import new_id

from .steps import WAYS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, Consumer, JobRecord, Lease, QueueStats, Verdict
    from multiq.backend.capabilities import Capabilities
    from multiq.conformance.harness import Harness

    from .steps import (  # fmt: skip
        Delete,
        Enqueue,
        EnqueueAgain,
        Exchange,
        Kick,
        KickJob,
        List,
        Pause,
        Peek,
        Purge,
        Reorder,
        Reschedule,
        Reserve,
        Resume,
        Say,
        Settle,
    )

PAGE = 3  # jobs per page: few, so that a listing has several pages


class Side:
    """A backend, its consumers, and the ids of its jobs.

    Jobs and leases are numbered in the order of their creation.
    """

    def __init__(self, backend: Backend, queues: Sequence[str], time: Pace) -> None:
        self.backend = backend
        self.queues = queues
        self.time = time
        self.consumers: list[Consumer] = [backend.consumer([queues[at] for at in way]) for way in WAYS]
        self.orders: list[tuple[str, ...] | None] = [None for _ in WAYS]  # the order of each consumer's next calls
        self.leases: list[list[Lease]] = [[] for _ in WAYS]
        self.places: list[tuple[str, NewJob]] = []  # job number -> the job's queue, and the job as it was enqueued
        self.ids: list[str] = []  # job number -> the job's current id
        self._numbers: dict[tuple[str, str], int] = {}

    # --- the operations, each with an answer that can be compared ---

    def enqueue(self, step: Enqueue) -> Answer:
        queue = self.queues[step.queue]
        jobs = [NewJob(job.body, new_id(), job.priority, self.time.delay(job.ticks), self.time.ttr(job.ttr))
                for job in step.jobs]  # fmt: skip
        for job, job_id in zip(jobs, self.backend.enqueue(queue, jobs), strict=True):
            self.places.append((queue, job))
            self.ids.append("")
            self._call(len(self.ids) - 1, job_id)
        return len(jobs)

    def enqueue_again(self, step: EnqueueAgain) -> Answer:
        number = self._number(step.job)
        queue, job = self.places[number]
        # A job that still exists stays unchanged. A job that is gone is stored again.
        again = NewJob(b"again", self.ids[number], step.priority, self.time.delay(step.ticks), job.ttr)
        ids = self.backend.enqueue(queue, [again])
        return [self._known(queue, job_id) for job_id in ids]

    def reserve(self, step: Reserve) -> Answer:
        order = self.orders[step.consumer]
        return self._got(step.consumer, self.consumers[step.consumer].reserve(step.limit, 0, order))

    def reorder(self, step: Reorder) -> Answer:
        before = self.orders[step.consumer]
        self.orders[step.consumer] = self.consumers[step.consumer].queues[::-1] if before is None else None
        return None

    def settle(self, step: Settle) -> Answer:
        holder = self._holder(step.consumer)
        return self._refusals(self.consumers[holder].settle(self._verdicts(holder, step.verdicts)))

    def exchange(self, step: Exchange) -> Answer:
        holder = self._holder(step.consumer)
        verdicts = self._verdicts(holder, step.verdicts)
        refusals, leases = self.consumers[holder].exchange(verdicts, step.limit, 0, self.orders[holder])
        return self._refusals(refusals), self._got(holder, leases)

    def kick(self, step: Kick) -> Answer:
        return self.backend.kick(self.queues[step.queue], step.limit)

    def kick_job(self, step: KickJob) -> Answer:
        return self._on_job(step.job, self.backend.kick_job)

    def reschedule(self, step: Reschedule) -> Answer:
        def reschedule(queue: str, job_id: str) -> None:
            number = self._numbers[queue, job_id]
            self._call(number, self.backend.reschedule(queue, job_id, self.time.delay(step.ticks)))

        return self._on_job(step.job, reschedule)

    def delete(self, step: Delete) -> Answer:
        return self._on_job(step.job, self.backend.delete)

    def peek(self, step: Peek) -> Answer:
        return self._on_job(step.job, lambda queue, job_id: self._record(self.backend.peek(queue, job_id)))

    def listing(self, step: List) -> Answer:
        """List page by page. ``_in_groups`` sorts jobs with the same due time, because their order is not defined."""
        queue, after, seen = self.queues[step.queue], None, []
        for _ in range(1000):
            page = self.backend.jobs(queue, step.state, limit=PAGE, after=after)
            seen += [self._record(record) for record in page.jobs]
            after = page.after
            if after is None:
                return seen
        raise AssertionError("the listing does not come to an end")

    def pause(self, step: Pause) -> Answer:
        return self.backend.pause(self.queues[step.queue], self.time.delay(step.ticks))

    def resume(self, step: Resume) -> Answer:
        return self.backend.resume(self.queues[step.queue])

    def purge(self, step: Purge) -> Answer:
        return self.backend.purge(self.queues[step.queue], step.states)

    def stats(self) -> list[Answer]:
        return [self._stats(self.backend.stats(queue)) for queue in self.queues]

    def names(self) -> Answer:
        return [self.queues.index(name) for name in self.backend.queues() if name in self.queues]

    def close(self) -> None:
        for consumer, leases in zip(self.consumers, self.leases, strict=True):
            consumer.settle([Ack(lease) for lease in leases])
            consumer.close()

    # --- internals ---

    def _call(self, number: int, job_id: str) -> None:
        self.ids[number] = job_id
        self._numbers[self.places[number][0], job_id] = number

    def _number(self, recent: int) -> int:
        return max(0, len(self.ids) - 1 - recent)

    def _known(self, queue: str, job_id: str) -> int:
        return self._numbers.get((queue, job_id), -1)

    def _on_job(self, recent: int, verb: Callable[[str, str], Answer]) -> Answer:
        number = self._number(recent)
        try:
            return verb(self.places[number][0], self.ids[number])
        except JobError as exc:
            return type(exc).__name__

    def _holder(self, at: int) -> int:
        """Number *at* of the consumers that have had a lease. Other consumers have nothing to settle."""
        holders = [consumer for consumer, leases in enumerate(self.leases) if leases]
        return holders[at % len(holders)] if holders else at

    def _verdicts(self, consumer: int, said: Sequence[Say]) -> list[Verdict]:
        leases = self.leases[consumer]
        return [self._verdict(say, leases[max(0, len(leases) - 1 - say.lease)]) for say in said if leases]

    def _verdict(self, say: Say, lease: Lease) -> Verdict:
        match say.kind:
            case "ack":
                return Ack(lease)
            case "release":
                return Release(lease, self.time.delay(say.ticks), say.priority, say.reason)
            case "bury":
                return Bury(lease, say.reason)
            case "touch":
                return Touch(lease)
            case "abandon":
                return Abandon(lease, say.reason)
            case _:
                return GiveBack(lease, self.time.delay(say.ticks))

    @staticmethod
    def _refusals(answers: Sequence[Exception | None]) -> Answer:
        return [None if answer is None else type(answer).__name__ for answer in answers]

    def _got(self, consumer: int, leases: list[Lease]) -> Answer:
        self.leases[consumer] += leases
        return [self._lease(lease) for lease in leases]

    def _lease(self, lease: Lease) -> dict[str, Answer]:
        return {
            "job": self._known(lease.queue, lease.id), "body": lease.body, "priority": lease.priority,
            "ttr": lease.ttr, "attempt": lease.attempt, "crashes": lease.crashes, "kicks": lease.kicks,
            "age": Seconds(lease.age),
        }  # fmt: skip

    def _record(self, record: JobRecord) -> dict[str, Answer]:
        return {
            "job": self._known(record.queue, record.id), "state": str(record.state), "body": record.body,
            "priority": record.priority, "ttr": record.ttr, "attempt": record.attempt, "crashes": record.crashes,
            "kicks": record.kicks, "reason": record.reason,
            "due in": None if record.due_in is None else Seconds(record.due_in),
            "age": None if record.age is None else Seconds(record.age),
        }  # fmt: skip

    @staticmethod
    def _stats(stats: QueueStats) -> dict[str, Answer]:
        paused_for = None if stats.paused_for is None else Seconds(stats.paused_for)
        return {
            "ready": stats.ready, "delayed": stats.delayed, "reserved": stats.reserved, "buried": stats.buried,
            "paused for": paused_for,
        }  # fmt: skip


class Seconds(float):
    """A duration in an answer. It is compared with the model's duration as exactly as the clock allows."""


Answer: TypeAlias = Any  # None, a number, a word, or lists and dicts of these


class Pace:
    """The length of a tick, and the length of delays and leases that are given in ticks."""

    def __init__(self, harness: Harness, can: Capabilities) -> None:
        self.is_real = harness.real_time
        if self.is_real:
            self.step = 2 * max(can.delay_resolution, 0.3)  # half a tick is at least the backend's resolution
        else:
            # 49/64 is not a round number, so a backend that cuts or rounds delays fails. This tick is a whole number
            # of microseconds, and needs a resolution of a microsecond. Sums of ticks are exact, because 64 is a power
            # of two.
            self.step = 49 / 64 if can.delay_resolution <= 1e-6 else max(can.delay_resolution, 0.75)
        self._shortest = can.min_ttr

    def delay(self, ticks: int) -> float:
        return self._length(ticks) if ticks else 0.0

    def ttr(self, ticks: int) -> float:
        while self._length(ticks) < max(1.0, self._shortest):
            ticks += 1
        return self._length(ticks)

    def _length(self, ticks: int) -> float:
        """Convert *ticks* to seconds. In real time the result is half a tick less, so that no delay or lease ends near
        a step.
        """
        # Rounded, because a store that counts microseconds cannot return 1.2000000000000002.
        return round((ticks - 0.5) * self.step, 6) if self.is_real else ticks * self.step
