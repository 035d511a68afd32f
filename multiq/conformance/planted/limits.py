"""Planted bugs about limits: slots, rates, gates, and waking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from multiq.backend import Gate, State
from multiq.backend.memory import JobQueue
from multiq.backend.memory_limits import _OPEN, Lines
from multiq.driverkit.clock import SECOND

from .registry import Planted, plant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multiq.backend import LimitState, NewJob, Quota
    from multiq.backend.memory import Job


class _LimitBug(Planted):
    """A memory backend whose class for the lines of parked jobs can be replaced."""

    lines_class: ClassVar[type[Lines]] = Lines

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "lines_class" in vars(cls):
            cls.queue_class = type("_Queue", (JobQueue,), {"lines_class": cls.lines_class})


class _Counting(Lines):
    """A bug: the slots are counted in a number beside the jobs, as a semaphore counts."""

    def clear(self) -> None:
        super().clear()
        self.used: dict[Gate, int] = {}

    def lease(self, job: Job) -> None:
        super().lease(job)
        for gate in job.gates:
            self.used[gate] = self.used.get(gate, 0) + 1

    def opens_at(self, gate: Gate, now: int) -> int:
        quota = self.kept.quota(gate)
        if quota is not None and quota.slots is not None and quota.rate is None:
            return _OPEN if self.used.get(gate, 0) < quota.slots else 2**63
        return super().opens_at(gate, now)

    def free(self, job: Job) -> None:
        for gate in job.gates:
            self.used[gate] = self.used.get(gate, 0) - 1
            self.look_at(gate)


@plant(
    "slot freed twice",
    "the end of a lease frees the slot, and a kick or release of the job frees it again",
    "Limits.test_each_verdict_frees_the_slot_once[bury]",
)
class _FreedTwice(_LimitBug):
    class lines_class(_Counting):  # noqa: N801 - named like the attribute it replaces
        def end_lease(self, job: Job) -> None:
            super().end_lease(job)
            if job.state is State.RESERVED:
                self.free(job)
                self.free(job)


@plant(
    "slot not freed at the lease's end",
    "only a verdict frees the slot",
    "Limits.test_the_end_of_a_lease_frees_the_slot_once",
)
class _NotFreedByTime(_LimitBug):
    class lines_class(_Counting):  # noqa: N801 - named like the attribute it replaces
        def end_lease(self, job: Job) -> None:
            super().end_lease(job)
            if job.state is State.RESERVED and job.due_at > self._now:
                self.free(job)


@plant("touch frees the slot", "a touch ends the count of its lease", "Limits.test_a_touch_keeps_the_slot")
class _TouchFrees(_LimitBug):
    class lines_class(_Counting):  # noqa: N801 - named like the attribute it replaces
        def end_lease(self, job: Job) -> None:
            super().end_lease(job)
            if job.state is State.RESERVED:
                self.free(job)

        def lease(self, job: Job) -> None:
            super().lease(job)
            if job.state is State.RESERVED:
                self.free(job)


@plant("keys are joined", "a limit counts all keys together", "Limits.test_each_key_has_its_own_slots")
class _OneKey(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def opens_at(self, gate: Gate, now: int) -> int:
            quota = self.kept.quota(gate)
            leased = sum(len(ids) for one, ids in self.leased.items() if one.limit == gate.limit)
            if quota is not None and quota.slots is not None and leased >= quota.slots:
                return 2**63
            return super().opens_at(gate, now)


@plant(
    "first gate taken",
    "a job that finds a closed gate has spent the rates of the gates before it",
    "Limits.test_a_job_with_a_closed_gate_counts_at_no_other[rate-smtp]",
)
class _FirstGateTaken(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def park(self, job: Job) -> None:
            for gate in job.gates if len(job.gates) > 1 else ():
                quota = self.kept.quota(gate)
                if self.opens_at(gate, self._now) != _OPEN:
                    break
                if quota is not None and quota.rate is not None:
                    self.kept.spend(gate, quota, self._now)
            super().park(job)


@plant(
    "only the first gate",
    "a job is handed out if its first gate is open",
    "Limits.test_a_job_with_a_closed_gate_counts_at_no_other[slots-smtp]",
)
class _OnlyTheFirst(_LimitBug):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            terms = new.terms and msgspec.structs.replace(new.terms, gates=new.terms.gates[:1])
            return super().add(msgspec.structs.replace(new, terms=terms), now)


@plant(
    "attempt burnt",
    "a reserve that finds a gate closed counts an attempt",
    "Limits.test_waiting_at_a_gate_costs_neither_attempts_nor_age",
)
class _AttemptBurnt(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def _close(self, line: Gate, closed: Gate, now: int) -> None:
            head = self._head(line)
            if head is not None:
                head.attempt += 1
            super()._close(line, closed, now)


@plant(
    "fixed windows",
    "a rate is counted in windows of the clock, so that two bursts follow each other at the edge of a window",
    "Limits.test_no_window_has_more_than_the_burst_and_its_share",
)
class _FixedWindows(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def clear(self) -> None:
            super().clear()
            self.windows: dict[tuple[Gate, int], int] = {}

        def opens_at(self, gate: Gate, now: int) -> int:
            quota = self.kept.quota(gate)
            if quota is None or quota.rate is None:
                return super().opens_at(gate, now)
            per = int(quota.per * SECOND)
            most = quota.rate + quota.burst
            return _OPEN if self.windows.get((gate, now // per), 0) < most else (now // per + 1) * per

        def take(self, gate: Gate, now: int) -> Job | None:
            job = super().take(gate, now)
            for one in () if job is None else job.gates:
                quota = self.kept.quota(one)
                if quota is not None and quota.rate is not None:
                    at = one, now // int(quota.per * SECOND)
                    self.windows[at] = self.windows.get(at, 0) + 1
            return job


@plant(
    "lost wake-up",
    "a gate that was found closed is looked at again only when another job comes to it",
    "Limits.test_as_many_jobs_are_reserved_as_there_are_slots[True-1]",
)
class _LostWakeUp(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def look_at(self, gate: Gate) -> None:
            """Do nothing."""


@plant(
    "one at a time is fair enough",
    "the keys of a fair limit are served oldest job first",
    "Limits.test_the_keys_of_a_fair_limit_share_the_leases",
)
class _NotFair(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def _is_fair(self, gate: Gate) -> bool:
            return False


@plant(
    "turns, whatever runs",
    "the keys of a fair limit take turns, whatever number of leases they have",
    "Limits.test_the_key_of_a_fair_limit_with_the_fewest_leases_is_next",
)
class _OnlyTurns(_LimitBug):
    class lines_class(Lines):  # noqa: N801 - named like the attribute it replaces
        def _rank(self, gate: Gate) -> tuple[int, int]:
            return 0, super()._rank(gate)[1]


@plant(
    "code undoes the operator",
    "an enqueue stores the code's quota over one that an operator has set",
    "Limits.test_a_pinned_limit_is_changed_only_by_pinned_changes",
)
class _Undone(Planted):
    def limits(
        self, queue: str, change: Mapping[str, Quota | None] | None = None, *, pinned: bool = True
    ) -> list[LimitState]:
        found = super().limits(queue)
        pins = {state.name for state in found if state.is_pinned}
        for name, quota in (change or {}).items():
            super().limits(queue, {name: None})
            super().limits(queue, {name: quota}, pinned=pinned or name in pins)
        return super().limits(queue)


@plant(
    "gates hold up others",
    "a job without gates waits for parked jobs that come before it",
    "Limits.test_other_jobs_do_not_wait_for_parked_ones",
)
class _HoldsUpOthers(_LimitBug):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def _best(self, now: int, *, with_gates: bool) -> Job | None:
            parked = [(job.priority, job.sequence) for job in self.jobs.values() if job.parked is not None]
            job = super()._best(now, with_gates=with_gates)
            if job is not None and not job.gates and parked and min(parked) < (job.priority, job.sequence):
                self._move(job, State.READY, 0)
                return None
            return job


@plant(
    "reschedule drops the gates",
    "a rescheduled job has no gates",
    "Limits.test_a_rescheduled_parked_job_keeps_its_gates",
)
class _GatesDropped(_LimitBug):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            if job.state is State.READY and job.parked is not None:
                job.gates = ()
            super().make_due(job, delay, now)
