"""Batches on their way in: one script for each line, and for a large batch several, none of which holds the server up.

What one script takes it takes whole. Of a batch that needs several, a server that is full in between has taken a part,
which ``EnqueuePartial`` tells. A lost connection is found out, or left to a repetition, which adds nothing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiq.errors import BackendError, BackendUnavailable, EnqueuePartial

from .jobs import new_jobs, pack_ids
from .together import call_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend import NewJob

    from .caller import Callers
    from .lines import Lines

MOST_JOBS = 1000  # of one script: 2.5 ms of the server
MOST_BYTES = 8_000_000  # of bodies in one script


def enqueue_batch(callers: Callers, lines: Lines, queue: str, jobs: Sequence[NewJob]) -> None:
    """Enqueue more than one job. Raises ``BackendError``: ``EnqueuePartial`` if it is sure that a part was taken."""
    if lines.spread == 1 and _fits(jobs):
        callers.call("enqueue", queue, new_jobs(jobs))
        return
    taken: set[str] = set()
    for parts in _rounds(lines, queue, jobs):
        with callers.borrowed() as caller:
            calls = [caller.new_call("enqueue", line, new_jobs(part)) for line, part in parts.items()]
            replies = call_together(caller, calls)
        failures = []
        for part, reply in zip(parts.values(), replies, strict=True):
            if isinstance(reply, BackendError):
                failures.append(reply)
            else:
                taken.update(job.id for job in part)
        if failures:
            _fail(failures, taken, jobs)


def _rounds(lines: Lines, queue: str, jobs: Sequence[NewJob]) -> Iterator[dict[str, list[NewJob]]]:
    """What goes in one round trip, and then in the next: for each line at most as much as one script may take."""
    by_line: dict[str, list[NewJob]] = {}
    for job, packed in zip(jobs, pack_ids([job.id for job in jobs]), strict=True):
        by_line.setdefault(lines.home(queue, packed), []).append(job)
    waiting = {line: _slices(some) for line, some in by_line.items()}
    while True:
        parts = {line: part for line, slices in waiting.items() if (part := next(slices, None))}
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


def _fail(failures: Sequence[BackendError], taken: set[str], jobs: Sequence[NewJob]) -> None:
    for failure in failures:
        if isinstance(failure, BackendUnavailable):
            raise failure  # nobody knows yet, and to call again with the same ids tells
    if not taken:
        raise failures[0]
    accepted = {at: job.id for at, job in enumerate(jobs) if job.id in taken}
    raise EnqueuePartial(accepted, len(jobs), str(failures[0])) from failures[0]
