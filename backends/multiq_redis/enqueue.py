"""Enqueues batches. A partition gets one script. For a large batch it gets several scripts, so that no script runs for
long.

A script stores either all of its jobs or none of them. If a server becomes full or unreachable between two scripts of a
batch, only a part of the batch is stored. ``EnqueuePartial`` says which jobs were stored. A lost reply raises
``EnqueueUncertain``. After that error, the caller may repeat the call, and no job is added twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from multiq.backend.effects import Enqueue
from multiq.errors import BackendError, EnqueuePartial, EnqueueUncertain

from .records import details_of, has_key_or_gates, new_jobs, pack_id, pack_ids, record_of, unpack_id
from .steps import StepEncoder, carry_out_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from multiq.backend import NewJob

    from .client import Call, Client
    from .connection import Word
    from .partitions import Partitions
    from .pool import Pool

_UNIQUE = "enqueue_unique"  # the script for jobs with unique keys
MOST_JOBS = 1000  # jobs in one script, which takes the server 2.5 ms
MOST_BYTES = 8_000_000  # bytes of the bodies in one script


def enqueue_batch(pool: Pool, partitions: Partitions, queue: str, jobs: Sequence[NewJob]) -> list[str]:
    """Enqueue several jobs. For each job, returns its id, or the id of the other job that has its unique key.

    Raises ``BackendError``, or ``EnqueuePartial`` if some jobs were certainly stored.
    """
    if partitions.count == 1 and _fits(jobs):
        try:
            with pool.borrowed() as client:
                call = _new_call(client, partitions, queue, queue, jobs)
                return _ids(call, jobs, client.perform(call))
        except BackendError as exc:
            if exc.may_be_done:
                raise uncertain(exc, queue, jobs) from exc
            raise
    taken: dict[str, str] = {}
    for parts in _rounds(partitions, queue, jobs):
        with pool.borrowed() as client:
            calls = [_new_call(client, partitions, queue, partition, part) for partition, part in parts.items()]
            replies = client.perform_each(calls)
        failures: list[BackendError] = []
        unanswered: set[str] = set()
        for part, call, reply in zip(parts.values(), calls, replies, strict=True):
            if not isinstance(reply, BackendError):
                taken.update(zip((job.id for job in part), _ids(call, part, reply), strict=True))
                continue
            failures.append(reply)
            if reply.may_be_done:
                unanswered.update(job.id for job in part)
        if failures:
            _fail(failures, queue, jobs, taken, unanswered)
    return [taken[job.id] for job in jobs]


def _new_call(client: Client, partitions: Partitions, queue: str, partition: str, jobs: Sequence[NewJob]) -> Call:
    """Make a call that enqueues jobs of one partition. For held jobs, the call uses the script for steps."""
    if all(job.terms is None for job in jobs):
        return client.new_call("enqueue", partition, new_jobs(jobs))
    if any(map(has_key_or_gates, jobs)):
        words: list[Word] = []
        for job in jobs:
            words += details_of(job), pack_id(job.id), record_of(job)
        return client.new_call(_UNIQUE, partition, words)
    encoder = StepEncoder(partitions, partition)
    encoder.add(0, [Enqueue(queue, job) for job in jobs])
    return carry_out_call(client, partition, "carry_out", (), encoder)


def _ids(call: Call, jobs: Sequence[NewJob], reply: Any) -> list[str]:
    """Return the ids of the jobs. A script for jobs with unique keys replies with the ids. Other scripts do not."""
    return [*map(unpack_id, reply)] if call.verb == _UNIQUE else [job.id for job in jobs]


def _rounds(partitions: Partitions, queue: str, jobs: Sequence[NewJob]) -> Iterator[dict[str, list[NewJob]]]:
    """Split the jobs into round trips, with at most one script for each partition."""
    by_partition: dict[str, list[NewJob]] = {}
    for job, packed in zip(jobs, pack_ids([job.id for job in jobs]), strict=True):
        partition = partitions.partition_for(queue, packed, has_key_or_gates=has_key_or_gates(job))
        by_partition.setdefault(partition, []).append(job)
    waiting = {partition: _slices(some) for partition, some in by_partition.items()}
    while True:
        parts = {partition: part for partition, slices in waiting.items() if (part := next(slices, None))}
        if not parts:
            return
        yield parts


def _slices(jobs: Sequence[NewJob]) -> Iterator[list[NewJob]]:
    part: list[NewJob] = []
    size = 0
    for job in jobs:
        if part and (len(part) == MOST_JOBS or size + len(job.body) > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(job)
        size += len(job.body)
    if part:
        yield part


def _fits(jobs: Sequence[NewJob]) -> bool:
    return len(jobs) <= MOST_JOBS and sum(len(job.body) for job in jobs) <= MOST_BYTES


def uncertain(error: BackendError, queue: str, jobs: Sequence[NewJob]) -> EnqueueUncertain:
    """The error to raise if the server may have stored all *jobs*, but the reply was lost."""
    return EnqueueUncertain(queue, jobs, str(error), client_ids=True)


def _fail(
    failures: Sequence[BackendError], queue: str, jobs: Sequence[NewJob], taken: Mapping[str, str], unanswered: set[str]
) -> NoReturn:
    accepted = {at: taken[job.id] for at, job in enumerate(jobs) if job.id in taken}
    if unanswered:
        why = next(failure for failure in failures if failure.may_be_done)
        raise EnqueueUncertain(
            queue,
            [job for job in jobs if job.id in unanswered],
            str(why),
            accepted=accepted,
            unsent=[job for job in jobs if job.id not in unanswered and job.id not in taken],
            client_ids=True,
        ) from why
    if accepted:
        raise EnqueuePartial(accepted, len(jobs), str(failures[0])) from failures[0]
    raise failures[0]
