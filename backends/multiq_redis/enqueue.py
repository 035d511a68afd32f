"""Enqueues batches. A partition gets one script, or several for a large batch, so that no script runs for long.

One script stores all of its jobs or none. If a server becomes full or unreachable between two scripts of a batch, only
a part is stored. ``EnqueuePartial`` says which part. A lost reply raises ``EnqueueUncertain``. Then the caller may
repeat the call, and no job is added twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from multiq.errors import BackendError, EnqueuePartial, EnqueueUncertain

from .records import new_jobs, pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob

    from .partitions import Partitions
    from .pool import Pool

MOST_JOBS = 1000  # jobs in one script, which takes the server 2.5 ms
MOST_BYTES = 8_000_000  # bytes of the bodies in one script


def enqueue_batch(pool: Pool, partitions: Partitions, queue: str, jobs: Sequence[NewJob]) -> None:
    """Enqueue several jobs. Raises ``BackendError``, or ``EnqueuePartial`` if some jobs were certainly stored."""
    if partitions.count == 1 and _fits(jobs):
        arguments = new_jobs(jobs)
        try:
            pool.call("enqueue", queue, arguments)
        except BackendError as exc:
            if exc.may_be_done:
                raise uncertain(exc, queue, jobs) from exc
            raise
        return
    taken: set[str] = set()
    for parts in _rounds(partitions, queue, jobs):
        with pool.borrowed() as client:
            calls = [client.new_call("enqueue", partition, new_jobs(part)) for partition, part in parts.items()]
            replies = client.perform_each(calls)
        failures: list[BackendError] = []
        unanswered: set[str] = set()
        for part, reply in zip(parts.values(), replies, strict=True):
            ids = {job.id for job in part}
            if not isinstance(reply, BackendError):
                taken |= ids
                continue
            failures.append(reply)
            if reply.may_be_done:
                unanswered |= ids
        if failures:
            _fail(failures, queue, jobs, taken, unanswered)


def _rounds(partitions: Partitions, queue: str, jobs: Sequence[NewJob]) -> Iterator[dict[str, list[NewJob]]]:
    """Split the jobs into round trips, with at most one script for each partition."""
    by_partition: dict[str, list[NewJob]] = {}
    for job, packed in zip(jobs, pack_ids([job.id for job in jobs]), strict=True):
        by_partition.setdefault(partitions.partition_for(queue, packed), []).append(job)
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
    failures: Sequence[BackendError], queue: str, jobs: Sequence[NewJob], taken: set[str], unanswered: set[str]
) -> NoReturn:
    accepted = {at: job.id for at, job in enumerate(jobs) if job.id in taken}
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
