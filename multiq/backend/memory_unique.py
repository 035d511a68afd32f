"""The unique keys of the memory backend, of all queues. The caller holds the store's lock around each call.

An entry names the job that took a key last. At the enqueue of another job with the key, the state of the named job
decides whether the named job still has the key. The named job has lost the key if it is gone, or if it has passed its
``until``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .types import State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .memory import Job

_LOOKED_AT_PER_TAKE = 2  # entries that each taken key examines, so that stale entries do not accumulate


class TakenKey(msgspec.Struct, frozen=True):
    """A key as it is stored. The time is in nanoseconds by the store's clock."""

    id: str
    """The id of the job that took the key."""
    held_until: int


TakenKeys: TypeAlias = "dict[bytes, TakenKey]"


class UniqueKeys:
    """The taken keys of all queues of a store."""

    def __init__(self) -> None:
        self._queues: dict[str, TakenKeys] = {}

    def find(self, queue: str, key: bytes) -> TakenKey | None:
        return self._queues.get(queue, {}).get(key)

    def take(self, queue: str, key: bytes, taken: TakenKey, jobs: Mapping[str, Job], now: int) -> None:
        """Store *taken* as the key's entry: a job has taken the key. *jobs*: the queue's jobs."""
        keys = self._queues.setdefault(queue, {})
        for _ in range(min(_LOOKED_AT_PER_TAKE, len(keys))):  # from the oldest on; entries that stay go to the end
            oldest = next(iter(keys))
            entry = keys.pop(oldest)
            if entry.held_until > now or _may_have_key(jobs.get(entry.id), oldest):
                keys[oldest] = entry
        keys[key] = taken

    def leave(self, queue: str, key: bytes, job_id: str) -> None:
        """Forget that a job, which is gone, has taken the key. A key that is held by time stays taken."""
        taken = self.find(queue, key)
        if taken is not None and taken.id == job_id and not taken.held_until:
            del self._queues[queue][key]
            if not self._queues[queue]:
                del self._queues[queue]

    def give_up(self, queue: str, job_id: str) -> None:
        """Forget all keys that a job has taken, because an exception has interrupted its enqueue."""
        keys = self._queues.get(queue, {})
        for key in [key for key, taken in keys.items() if taken.id == job_id]:
            del keys[key]


def _may_have_key(job: Job | None, key: bytes) -> bool:
    """Whether a job has the key now or may get it back. A job gets its key back if a give-back or a kick undoes its
    ``until``."""
    return job is not None and job.unique is not None and job.unique.key == key and job.state is not State.GONE


def has_key(job: Job | None, key: bytes) -> bool:
    """Whether a job was enqueued with this key and has not passed its ``until``."""
    if job is None or job.unique is None or job.unique.key != key or job.state is State.GONE:
        return False
    if job.unique.until == "buried":
        return job.state is not State.BURIED
    return job.unique.until == "gone" or job.attempt == 0
