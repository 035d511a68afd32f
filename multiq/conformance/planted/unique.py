"""Backends with one planted bug each, about unique jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from multiq.backend import State, Terms
from multiq.backend.memory import JobQueue
from multiq.driverkit.clock import nanoseconds

from .registry import Planted, plant

if TYPE_CHECKING:
    from multiq.backend import NewJob, UniqueKey
    from multiq.backend.memory import Job
    from multiq.backend.memory_unique import TakenKey

_LIFETIME = 60.0  # seconds: how long the lock of "lock with a lifetime" lasts


def _without_key(queue: JobQueue, job: Job) -> None:
    if job.unique is not None:
        queue.unique_keys.give_up(queue.name, job.id)


@plant(
    "key freed on touch",
    "a touch frees the key, because it renews only the lease",
    "Unique.test_no_other_event_takes_the_key_from_a_job[gone-touch]",
)
class _FreedOnTouch(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def extend(self, job: Job, now: int) -> None:
            if job.state is State.RESERVED:
                _without_key(self, job)
            super().extend(job, now)


@plant(
    "key freed on release",
    "a released job has lost its key, as if it were done",
    "Unique.test_no_other_event_takes_the_key_from_a_job[gone-release]",
)
class _FreedOnRelease(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def make_due(self, job: Job, delay: float, now: int) -> None:
            if job.state is State.RESERVED:
                _without_key(self, job)
            super().make_due(job, delay, now)


@plant(
    "lock with a lifetime",
    "a key is a lock with a lifetime of a minute: a job that waits longer has lost it",
    "Unique.test_a_job_has_its_key_past_a_minute",
)
class _LockWithALifetime(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def taken(self, key: bytes, now: int) -> TakenKey | None:
            taken = super().taken(key, now)
            job = None if taken is None else self.jobs.get(taken.id)
            return None if job is not None and now > job.enqueued_at + nanoseconds(_LIFETIME) else taken


@plant(
    "running job replaced",
    "a running job takes the new body, and its lease is void",
    "UniqueReplace.test_a_reserved_or_buried_job_is_not_replaced[reserved]",
)
class _RunningReplaced(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def replace(self, job: Job, new: NewJob, unique: UniqueKey, now: int) -> None:
            if job.state is State.RESERVED:
                self._move(job, State.READY, 0)
            super().replace(job, new, unique, now)


@plant(
    "key outlives its job",
    "the key of a deleted job stays taken, as a lock in a cache does",
    "Unique.test_the_key_of_a_job_that_is_gone_is_free[delete]",
)
class _OutlivesItsJob(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def add(self, new: NewJob, now: int) -> str:
            unique = None if new.terms is None else new.terms.unique
            if unique is not None and not unique.hold:
                new = msgspec.structs.replace(
                    new, terms=Terms(new.terms.awaits if new.terms else 0, msgspec.structs.replace(unique, hold=3600.0))
                )
            return super().add(new, now)


@plant(
    "kick takes no key",
    "a kicked job runs beside the job that has taken its key",
    "UniqueKicks.test_a_buried_job_whose_key_is_taken_stays_buried[kick]",
)
class _KickTakesNoKey(Planted):
    class queue_class(JobQueue):  # noqa: N801 - named like the attribute it replaces
        def may_start_over(self, job: Job, now: int) -> bool:
            return True
