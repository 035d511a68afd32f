"""The two sides of a random walk: a backend, and its model.

Steps refer to queues, consumers, jobs and leases by numbers. A number means the same queue, consumer, job or lease on
both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from multiq.backend import (
    Abandon,
    Ack,
    After,
    Arrive,
    Bury,
    Drop,
    GiveBack,
    NewJob,
    Put,
    Release,
    Terms,
    Touch,
    Version,
)
from multiq.backend import (
    Enqueue as EnqueueStep,
)
from multiq.errors import JobError
from multiq.ids import new_id

from .steps import WAYS, Add, AddAgain, Come, DropNote, PutNote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.backend import Backend, Consumer, JobRecord, Lease, Note, Outcome, QueueStats, Step, Verdict
    from multiq.backend.capabilities import Capabilities
    from multiq.conformance.harness import Harness

    from .steps import (  # fmt: skip
        Act,
        CarryOut,
        Delete,
        Enqueue,
        EnqueueAgain,
        Exchange,
        Forget,
        History,
        Job,
        Kick,
        KickJob,
        List,
        ListNotes,
        Outcomes,
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

    def __init__(self, backend: Backend, queues: Sequence[str], time: Pace, can: Capabilities) -> None:
        self.backend = backend
        self.is_one_step = bool(can.one_step_everywhere)
        self.queues = queues
        self.time = time
        self.consumers: list[Consumer] = [backend.consumer([queues[at] for at in way]) for way in WAYS]
        self.orders: list[tuple[str, ...] | None] = [None for _ in WAYS]  # the order of each consumer's next calls
        self.leases: list[list[Lease]] = [[] for _ in WAYS]
        self.places: list[tuple[str, NewJob]] = []  # job number -> the job's queue, and the job as it was enqueued
        self.ids: list[str] = []  # job number -> the job's current id
        self._numbers: dict[tuple[str, str], int] = {}
        self._versions: dict[tuple[int, str], str] = {}  # home queue and key -> the version that was last read

    # --- the operations, each with an answer that can be compared ---

    def enqueue(self, step: Enqueue) -> Answer:
        queue = self.queues[step.queue]
        jobs = [self._new(job) for job in step.jobs]
        for job, job_id in zip(jobs, self.backend.enqueue(queue, jobs), strict=True):
            self.places.append((queue, job))
            self.ids.append("")
            self._call(len(self.ids) - 1, job_id)
        return len(jobs)

    def enqueue_again(self, step: EnqueueAgain) -> Answer:
        number = self._number(step.job)
        queue, _ = self.places[number]
        # A job that still exists stays unchanged. A job that is gone is stored again.
        ids = self.backend.enqueue(queue, [self._again(number, step)])
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
        """List page by page. ``walks._in_groups`` sorts jobs with the same due time, whose order is not defined."""
        queue, after, seen = self.queues[step.queue], None, []
        for _ in range(1000):
            page = self.backend.jobs(queue, step.state, limit=PAGE, after=after)
            seen += [self._record(record) for record in page.jobs]
            after = page.after
            if after is None:
                return seen
        raise AssertionError("the listing does not come to an end")

    def outcomes(self, step: Outcomes) -> Answer:
        ids = self._ids(step.queue, step.jobs)
        found = self.backend.outcomes(self.queues[step.queue], ids)
        return [outcome and self._outcome(outcome) for outcome in found]

    def history(self, step: History) -> Answer:
        """Read the history page by page."""
        queue, after, seen = self.queues[step.queue], None, []
        for _ in range(1000):
            page = self.backend.history(queue, kind=step.kind, limit=PAGE, after=after)
            seen += [self._outcome(outcome) for outcome in page.outcomes]
            after = page.after
            if after is None:
                return seen
        raise AssertionError("the history does not come to an end")

    def forget(self, step: Forget) -> Answer:
        queue = self.queues[step.queue]
        if step.jobs is not None:
            return self.backend.forget(queue, self._ids(step.queue, step.jobs))
        self.backend.forget(queue)  # the count is not compared, because acks may delete any number of jobs
        return None

    def carry_out(self, step: CarryOut) -> Answer:
        """Carry out steps. Steps in the home queue come first. Returns None if there are no steps.

        If there are conditions, at least one step is in the home queue.
        """
        steps = [one for act in step.acts if (one := self._step(act)) is not None]
        home = self.queues[step.home]
        near, far = [one for one in steps if _home(one) == home], [one for one in steps if _home(one) != home]
        when = [Version(home, key, self._version(step.home, key, which)) for key, which in step.when]
        if not near and (when or (far and not self.is_one_step)):
            near = [Drop(home, "never")]
        if not self.is_one_step:
            far = []
        return self.backend.carry_out([*near, *far], when=when) if near or far else None

    def list_notes(self, step: ListNotes) -> Answer:
        """List page by page."""
        after, seen = None, []
        for _ in range(1000):
            page = self.backend.notes(self.queues[step.home], step.prefix, limit=PAGE, after=after)
            seen += [self._note(note) for note in page.notes]
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

    def _ids(self, queue: int, recent: Sequence[int]) -> list[str]:
        """Return the ids of those *recent* jobs that are in the queue, and one id that no job has."""
        numbers = [self._number(one) for one in recent]
        ids = [self.ids[number] for number in numbers if self.places[number][0] == self.queues[queue]]
        return [*ids, "no-such-job"]

    def _holder(self, at: int) -> int:
        """Return the number of a consumer that has had a lease, chosen by *at*. A consumer without leases cannot settle
        anything."""
        holders = [consumer for consumer, leases in enumerate(self.leases) if leases]
        return holders[at % len(holders)] if holders else at

    def _verdicts(self, consumer: int, said: Sequence[Say]) -> list[Verdict]:
        leases = self.leases[consumer]
        return [self._verdict(say, leases[max(0, len(leases) - 1 - say.lease)]) for say in said if leases]

    def _verdict(self, say: Say, lease: Lease) -> Verdict:
        after = self._after(say, lease)
        match say.kind:
            case "ack":
                return Ack(lease, after)
            case "release":
                return Release(lease, self.time.delay(say.ticks), say.priority, say.reason, after)
            case "bury":
                return Bury(lease, say.reason, after)
            case "touch":
                return Touch(lease, after)
            case "abandon":
                return Abandon(lease, say.reason)
            case _:
                return GiveBack(lease, self.time.delay(say.ticks), after)

    def _after(self, say: Say, lease: Lease) -> After | None:
        then = say.then
        if say.kind == "abandon" or (then is None and not say.acts):
            return None
        steps = [one for act in say.acts if (one := self._step(act)) is not None]
        # Without one_step_everywhere, the order of steps in other queues differs from the model's.
        steps = [one for one in steps if self.is_one_step or _home(one) == lease.queue]
        if then is None:
            return After(steps=tuple(steps))
        return After(self.time.delay(then.ticks), then.outcome, then.kind, then.memo, then.detail, tuple(steps))

    # --- steps of verdicts ---

    def _step(self, act: Act) -> Step | None:
        """Return the step for an act. The step is None if the act needs an earlier job, but there is none."""
        match act:
            case Come(job=recent, member=member, expect=expect, doom=doom) if self.ids:
                held = [number for number, (_, job) in enumerate(self.places) if job.terms is not None]
                number = held[-1 - recent] if recent < min(5, len(held)) else self._number(recent)
                return Arrive(self.places[number][0], self.ids[number], member, expect, doom)
            case Add(queue=queue, job=job):
                new = self._new(job)
                self.places.append((self.queues[queue], new))
                self.ids.append("")
                self._call(len(self.ids) - 1, new.id)
                return EnqueueStep(self.queues[queue], new)
            case AddAgain(job=recent) if self.ids:
                number = self._number(recent)
                return EnqueueStep(self.places[number][0], self._again(number, act))
            case PutNote(home=home, key=key, value=value, ticks=ticks):
                return Put(self.queues[home], key, value, self.time.delay(ticks) or None)
            case DropNote(home=home, key=key):
                return Drop(self.queues[home], key)
        return None

    def _new(self, job: Job) -> NewJob:
        terms = Terms(job.awaits) if job.awaits else None
        return NewJob(job.body, new_id(), job.priority, self.time.delay(job.ticks), self.time.ttr(job.ttr), terms)

    def _again(self, number: int, step: EnqueueAgain | AddAgain) -> NewJob:
        """Return a job with the id of an earlier job."""
        job = self.places[number][1]
        return NewJob(b"again", self.ids[number], step.priority, self.time.delay(step.ticks), job.ttr, job.terms)

    def _version(self, home: int, key: str, which: str) -> str:
        before = self._versions.get((home, key), "")
        if which != "now":
            return before if which == "before" else ""
        note = self.backend.note(self.queues[home], key)
        self._versions[home, key] = "" if note is None else note.version
        return self._versions[home, key]

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
            "age": Seconds(lease.age), "memo": lease.memo, "doomed": lease.doomed,
        }  # fmt: skip

    def _record(self, record: JobRecord) -> dict[str, Answer]:
        return {
            "job": self._known(record.queue, record.id), "state": str(record.state), "body": record.body,
            "priority": record.priority, "ttr": record.ttr, "attempt": record.attempt, "crashes": record.crashes,
            "kicks": record.kicks, "reason": record.reason, "memo": record.memo, "detail": record.detail,
            "awaits": record.awaits,
            "due in": None if record.due_in is None else Seconds(record.due_in),
            "age": None if record.age is None else Seconds(record.age),
        }  # fmt: skip

    def _outcome(self, outcome: Outcome) -> dict[str, Answer]:
        return {
            "job": self._known(outcome.queue, outcome.id), "kind": outcome.kind, "body": outcome.body,
            "attempt": outcome.attempt, "age": Seconds(outcome.age), "expires in": Seconds(outcome.expires_in),
        }  # fmt: skip

    @staticmethod
    def _stats(stats: QueueStats) -> dict[str, Answer]:
        paused_for = None if stats.paused_for is None else Seconds(stats.paused_for)
        return {
            "ready": stats.ready, "delayed": stats.delayed, "reserved": stats.reserved, "buried": stats.buried,
            "held": stats.held, "paused for": paused_for,
        }  # fmt: skip

    @staticmethod
    def _note(note: Note) -> dict[str, Answer]:
        expires_in = None if note.expires_in is None else Seconds(note.expires_in)
        return {"key": note.key, "value": note.value, "expires in": expires_in}


def _home(step: Step) -> str:
    """The queue in which a step happens."""
    return step.home if isinstance(step, Put | Drop) else step.queue


class Seconds(float):
    """A duration in an answer. A duration is compared with the model's duration as exactly as the clock allows."""


Answer: TypeAlias = Any  # None, a number, a word, or lists and dicts of these values


class Pace:
    """The length of a tick, and the length of delays and leases that are given in ticks."""

    def __init__(self, harness: Harness, can: Capabilities) -> None:
        self.is_real = harness.real_time
        if self.is_real:
            self.step = 2 * max(can.delay_resolution, 0.3)  # half a tick is at least the backend's resolution
        else:
            # 49/64 is not a round number, so a backend that cuts or rounds delays fails. The tick of 49/64 s is a whole
            # number of microseconds. The backend needs a resolution of a microsecond. Sums of ticks are exact, because
            # 64 is a power of two.
            self.step = 49 / 64 if can.delay_resolution <= 1e-6 else max(can.delay_resolution, 0.75)
        self._shortest = can.min_ttr

    def delay(self, ticks: int) -> float:
        return self._length(ticks) if ticks else 0.0

    def ttr(self, ticks: int) -> float:
        while self._length(ticks) < max(1.0, self._shortest):
            ticks += 1
        return self._length(ticks)

    def _length(self, ticks: int) -> float:
        """Convert *ticks* to seconds. In real time, a walk's steps are whole ticks apart. The result is half a tick
        shorter, so that delays and leases never end at the time of a step.
        """
        # Rounded, because a store that counts microseconds cannot return 1.2000000000000002.
        return round((ticks - 0.5) * self.step, 6) if self.is_real else ticks * self.step
