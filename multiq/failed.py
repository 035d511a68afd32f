"""The failed jobs of an app. A failed job is a buried job of any queue. ``App.failed`` returns a ``FailedJobs``."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from .backend import State
from .control.flags import visible_queues
from .delete import delete_job
from .errors import JobAwaited, JobNotFailed, JobNotFound, JobReserved, MultiqError, OptionInvalid, UniqueTaken
from .formatting import shown
from .ids import check_id
from .job import JobInfo
from .validation import check_count, check_name, check_timeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from .backend import Backend
    from .errors import Unsupported
    from .flows.followers import Followers

P = ParamSpec("P")
R = TypeVar("R")

# the number of jobs that one call lists; the number is small, because each job may have a body of many kilobytes
_PAGE = 100


class _InNoQueue(JobNotFound):
    sentence = "no queue has job {job_id}: it is done, was deleted, or was never there"


class ShownJob(msgspec.Struct, frozen=True):
    """The data of a failed job at the time of a listing. ``is_still`` finds out whether the job has run again since the
    listing."""

    queue: str
    id: str
    attempt: int | None = None
    """The number of the job's attempt when the job was listed. If the job was not listed, ``attempt``, ``kicks`` and
    ``failed_at`` are None."""
    kicks: int | None = None
    failed_at: float | None = None
    """``Failure.at``. The time of the failure distinguishes the job from a later job with the same id."""

    @classmethod
    def of(cls, job: JobInfo | ShownJob | tuple[str, str]) -> ShownJob:
        """Return the data that identify a job. *job* may be a pair of the job's queue and id."""
        if isinstance(job, ShownJob):
            return job
        if isinstance(job, JobInfo):
            return cls(job.queue, job.id, job.attempt, job.kicks, _failed_at(job))
        if not isinstance(job, tuple | list) or len(job) != 2:
            raise OptionInvalid(f"a failed job must be a listed job, or its queue and its id, got {shown(job)}")
        queue, job_id = job
        return cls(check_name(queue), check_id(job_id))

    def is_still(self, job: JobInfo) -> bool:
        """Whether the job is still buried, and has not run since the listing."""
        return (
            job.state is State.BURIED
            and self.attempt in {None, job.attempt}
            and self.kicks in {None, job.kicks}
            and self.failed_at in {None, _failed_at(job)}
        )


def _failed_at(job: JobInfo) -> float | None:
    failure = job.failure
    return None if failure is None else failure.at


class FailedChange(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``retry``, ``forget`` and ``prune``."""

    matched: int
    """The number of failed jobs that match the filters."""
    changed: int
    """The number of jobs that were retried or deleted, which is 0 with ``dry_run``."""
    left: int
    """The number of jobs that were not changed because they had changed since they were listed."""
    awaited: int = 0
    """The number of jobs that were not deleted because other jobs of a flow wait for them."""
    taken: int = 0
    """The number of jobs that were not retried because another job has taken their unique key."""
    undated: int = 0
    """The number of jobs that the call left alone because the time of their failure is not stored. Without
    ``older_than``, the number is 0."""


class FailedFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Checked filters of failed jobs."""

    queues: tuple[str, ...] | None
    """None: all queues."""
    task: str | None
    reason: str | None
    older_than: float | None
    limit: int | None

    @classmethod
    def of(
        cls,
        queue: str | Iterable[str] | None,
        task: str | None,
        reason: str | None,
        older_than: float | dt.timedelta | None,
        limit: int | None,
    ) -> FailedFilter:
        names = queue if isinstance(queue, Iterable) and not isinstance(queue, str) else (queue,)
        if reason is not None and not isinstance(reason, str):
            raise OptionInvalid(f"reason must be text, got {shown(reason)}")
        seconds = older_than.total_seconds() if isinstance(older_than, dt.timedelta) else older_than
        return cls(
            queues=None if queue is None else tuple(dict.fromkeys(check_name(name) for name in names)),
            task=None if task is None else check_name(task, "task"),
            reason=reason,
            older_than=None if seconds is None else check_timeout(seconds, "older_than"),
            limit=None if limit is None else check_count(limit, "limit"),
        )

    def check(self, backend: Backend) -> None:
        """Raise ``Unsupported`` if the backend lacks a value that the filters need."""
        for is_needed, power in (
            (True, "inspection"),
            (self.reason is not None, "reasons"),
            (self.older_than is not None, "memos"),
        ):
            if is_needed and not backend.capabilities.claim(power):
                raise backend.unsupported(power)

    @property
    def chooses(self) -> bool:
        """Whether some failed jobs of the queues may not match."""
        return any(value is not None for value in (self.task, self.reason, self.older_than))

    def matches(self, job: JobInfo) -> bool:
        """Whether a job passes the filters, except ``older_than``."""
        return (self.task is None or job.task == self.task) and (
            self.reason is None or self.reason in (job.reason or "")
        )

    def is_old(self, job: JobInfo) -> bool | None:
        """Whether the job failed long enough ago. None means that the time of the failure is unknown."""
        if self.older_than is None:
            return True
        failure = job.failure
        if failure is not None:
            return time.time() - failure.at >= self.older_than
        # A job cannot have failed before it was enqueued.
        return False if job.age is not None and job.age < self.older_than else None


class FailedListing:
    """The failed jobs that match the given filters. Each iteration reads the jobs again, page by page.

    In each queue, the job that has been buried for the longest time comes first. If the backend shows only some of the
    jobs, the iteration yields the shown jobs, and then raises ``Unsupported``. ``async for`` iterates without blocking
    the event loop.
    """

    def __init__(self, backend: Backend, wanted: FailedFilter) -> None:
        self._backend = backend
        self._wanted = wanted
        self.undated = 0
        """The number of jobs that the last iteration left out because the time of their failure is not stored. Without
        ``older_than``, the number is 0.
        """

    def __iter__(self) -> Iterator[JobInfo]:
        backend, wanted = self._backend, self._wanted
        wanted.check(backend)
        self.undated, left, unlisted = 0, wanted.limit, False
        for queue in self.queues():
            for job in self._jobs(queue):
                if job is None:
                    unlisted = True
                    continue
                if not wanted.matches(job):
                    continue
                is_old = wanted.is_old(job)
                self.undated += is_old is None
                if is_old:
                    yield job
                    left = None if left is None else left - 1
                    if left == 0:
                        return
        if unlisted:
            raise backend.unsupported("lists_jobs")

    async def __aiter__(self) -> AsyncIterator[JobInfo]:
        from .async_calls import iterate

        async for job in iterate(self._backend, self):
            yield job

    def queues(self) -> Iterable[str]:
        """The queues to search."""
        return visible_queues(self._backend) if self._wanted.queues is None else self._wanted.queues

    def _jobs(self, queue: str) -> Iterator[JobInfo | None]:
        """Yield the queue's failed jobs. If the backend cannot show all of the queue's failed jobs, yield None at the
        end."""
        after: str | None = None
        while True:
            page = self._backend.jobs(queue, State.BURIED, limit=_PAGE, after=after)
            yield from map(JobInfo.of, page.jobs)
            if page.after is None:
                return
            if not self._backend.declared.lists_jobs:
                yield None
                return
            after = page.after


class FailedJobs:
    """The failed jobs of an app: ``app.failed``. A failed job is a buried job.

    Several methods take filters. A job must match all given filters:

    - *queue*: one or several queues. Default: all queues.
    - *task*: the name of the task.
    - *reason*: a part of the reason. The case of letters must match.
    - *older_than*: seconds, or a timedelta, since the job failed. The worker's clock gives the time of the failure, and
      this host's clock gives the time now.
    - *limit*: the largest number of jobs.

    The methods raise ``Unsupported`` if the backend lacks a capability that they need. A backend without ``lists_jobs``
    shows only one failed job of each queue: the job that was buried first.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def list(
        self,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        older_than: float | dt.timedelta | None = None,
        limit: int | None = None,
    ) -> FailedListing:
        """Return the failed jobs that match the filters. Iterating over the result reads the jobs page by page."""
        return FailedListing(self._backend, FailedFilter.of(queue, task, reason, older_than, limit))

    def show(self, job_id: str, queue: str | None = None) -> JobInfo:
        """Return a failed job. Without *queue*, all queues are searched.

        Raises ``JobNotFound``. Raises ``JobNotFailed`` if the job is not buried.
        """
        check_id(job_id)
        queues = visible_queues(self._backend) if queue is None else [check_name(queue)]
        found: JobInfo | None = None
        for name in queues:
            try:
                job = JobInfo.of(self._backend.peek(name, job_id))
            except JobNotFound:
                continue
            if job.state is State.BURIED:
                return job
            found = job
        if found is not None:
            raise JobNotFailed(found.queue, job_id)
        raise _InNoQueue("", job_id) if queue is None else JobNotFound(queue, job_id)

    def retry(
        self,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        older_than: float | dt.timedelta | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> FailedChange:
        """Retry the failed jobs that match the filters. A retried job becomes ready, and gets one more attempt.

        First, all matching jobs are listed. A job that has changed since it was listed is not retried, and is counted
        in ``left``. A job whose unique key another job has taken is not retried, and is counted in ``taken``.
        *dry_run*: count the jobs, and change nothing.
        """
        wanted = FailedFilter.of(queue, task, reason, older_than, limit)
        return self._change(wanted, self._backend.kick_job, dry_run=dry_run)

    def forget(
        self,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        older_than: float | dt.timedelta | None = None,
        limit: int | None = None,
        followers: Followers = "refuse",
        dry_run: bool = False,
    ) -> FailedChange:
        """Delete the failed jobs that match the filters. ``forget`` lists and counts jobs in the same way as ``retry``.

        *followers*: what happens to the jobs of a flow that wait for a deleted job, as in ``JobHandle.cancel``. By
        default, a job that other jobs wait for is not deleted, and is counted in ``awaited``.
        """
        wanted = FailedFilter.of(queue, task, reason, older_than, limit)
        return self._change(wanted, self._deleting(followers), dry_run=dry_run)

    def prune(
        self,
        older_than: float | dt.timedelta,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
        followers: Followers = "refuse",
        dry_run: bool = False,
    ) -> FailedChange:
        """Like ``forget``, for the jobs that failed longer ago than *older_than*.

        A job whose time of failure is not stored is not deleted, and is counted in ``undated``.
        """
        if older_than is None:  # for the filters, None means any age, so all failed jobs would be deleted
            raise OptionInvalid("older_than must be a number of seconds, or a timedelta, got None")
        return self.forget(
            queue=queue,
            task=task,
            reason=reason,
            older_than=older_than,
            limit=limit,
            followers=followers,
            dry_run=dry_run,
        )

    def retry_ids(self, jobs: Iterable[JobInfo | ShownJob | tuple[str, str]]) -> FailedChange:
        """Make failed jobs ready. *jobs*: jobs that ``list`` has yielded, or pairs of a queue and an id.

        A job that is no longer buried, or that has run since it was listed, is not changed. The unchanged jobs are
        counted in ``left``.
        """
        return self._carry_out([ShownJob.of(job) for job in jobs], self._backend.kick_job)

    def forget_ids(
        self, jobs: Iterable[JobInfo | ShownJob | tuple[str, str]], *, followers: Followers = "refuse"
    ) -> FailedChange:
        """Delete failed jobs. *jobs*: as in ``retry_ids``. *followers*: as in ``forget``. Unchanged jobs are counted as
        in ``retry_ids``."""
        return self._carry_out([ShownJob.of(job) for job in jobs], self._deleting(followers))

    async def ashow(self, job_id: str, queue: str | None = None) -> JobInfo:
        """``show`` without blocking the event loop."""
        return await self._run(self.show, job_id, queue)

    async def aretry(
        self,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        older_than: float | dt.timedelta | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> FailedChange:
        """``retry`` without blocking the event loop."""
        return await self._run(
            self.retry, queue=queue, task=task, reason=reason, older_than=older_than, limit=limit, dry_run=dry_run
        )

    async def aforget(
        self,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        older_than: float | dt.timedelta | None = None,
        limit: int | None = None,
        followers: Followers = "refuse",
        dry_run: bool = False,
    ) -> FailedChange:
        """``forget`` without blocking the event loop."""
        return await self._run(
            self.forget,
            queue=queue,
            task=task,
            reason=reason,
            older_than=older_than,
            limit=limit,
            followers=followers,
            dry_run=dry_run,
        )

    async def aprune(
        self,
        older_than: float | dt.timedelta,
        *,
        queue: str | Iterable[str] | None = None,
        task: str | None = None,
        reason: str | None = None,
        limit: int | None = None,
        followers: Followers = "refuse",
        dry_run: bool = False,
    ) -> FailedChange:
        """``prune`` without blocking the event loop."""
        return await self._run(
            self.prune,
            older_than,
            queue=queue,
            task=task,
            reason=reason,
            limit=limit,
            followers=followers,
            dry_run=dry_run,
        )

    async def aretry_ids(self, jobs: Iterable[JobInfo | ShownJob | tuple[str, str]]) -> FailedChange:
        """``retry_ids`` without blocking the event loop."""
        return await self._run(self.retry_ids, jobs)

    async def aforget_ids(
        self, jobs: Iterable[JobInfo | ShownJob | tuple[str, str]], *, followers: Followers = "refuse"
    ) -> FailedChange:
        """``forget_ids`` without blocking the event loop."""
        return await self._run(self.forget_ids, jobs, followers=followers)

    async def _run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        from .async_calls import run

        return await run(self._backend, function, *args, **kwargs)

    def _deleting(self, followers: Followers) -> Callable[[str, str], None]:
        # imported late, because programs that only list and retry need no flows
        from .flows.followers import check_followers

        check_followers(followers)
        return lambda queue, job_id: delete_job(self._backend, queue, job_id, followers)

    def _change(self, wanted: FailedFilter, act: Callable[[str, str], None], *, dry_run: bool) -> FailedChange:
        listing = FailedListing(self._backend, wanted)
        wanted.check(self._backend)
        if not self._backend.capabilities.management:
            raise self._backend.unsupported("management")
        if not self._backend.declared.lists_jobs:
            return self._count_heads(wanted, listing) if dry_run else self._change_heads(wanted, listing, act)
        found = [ShownJob.of(job) for job in listing]
        if dry_run:
            return FailedChange(matched=len(found), changed=0, left=0, undated=listing.undated)
        return msgspec.structs.replace(self._carry_out(found, act), undated=listing.undated)

    def _carry_out(self, found: Sequence[ShownJob], act: Callable[[str, str], None]) -> FailedChange:
        changed = left = awaited = taken = 0
        for job in found:
            try:
                # another client may change the job between ``peek`` and ``act``, because no backend has one call for
                # both
                if job.is_still(JobInfo.of(self._backend.peek(job.queue, job.id))):
                    act(job.queue, job.id)
                    changed += 1
                else:
                    left += 1
            except (JobNotFound, JobReserved):
                left += 1
            except JobAwaited:
                awaited += 1
            except UniqueTaken:
                taken += 1
            except MultiqError as exc:
                exc.add_note(f"{changed} of {len(found)} jobs were changed before this error")
                raise
        return FailedChange(matched=len(found), changed=changed, left=left, awaited=awaited, taken=taken)

    def _count_heads(self, wanted: FailedFilter, listing: FailedListing) -> FailedChange:
        """Count failed jobs on a backend that shows only the first failed job of a queue.

        With filters, a queue with more than one failed job cannot be counted, and the method raises ``Unsupported``.
        """
        if wanted.chooses:
            matched = sum(1 for _ in listing)
            return FailedChange(matched=matched, changed=0, left=0, undated=listing.undated)
        count = sum(self._backend.stats(queue).buried or 0 for queue in listing.queues())
        return FailedChange(matched=min(count, wanted.limit or count), changed=0, left=0)

    def _change_heads(
        self, wanted: FailedFilter, listing: FailedListing, act: Callable[[str, str], None]
    ) -> FailedChange:
        """Change failed jobs on a backend that shows only the first failed job of a queue.

        After each change, the next failed job is the first of its queue. A first job that is left unchanged hides the
        queue's other failed jobs. If failed jobs are hidden, ``_change_heads`` raises ``Unsupported``. The jobs behind
        a job that is too young failed later, so they are too young, too.
        """
        changed = awaited = taken = undated = 0
        for queue in listing.queues():
            # a job that fails again becomes the last job of its queue, so this loop does not change a job twice
            for _ in range(self._backend.stats(queue).buried or 0):
                page = self._backend.jobs(queue, State.BURIED, limit=1)
                if changed == wanted.limit or not page.jobs:
                    break
                job = JobInfo.of(page.jobs[0])
                is_match = wanted.matches(job)
                is_old = wanted.is_old(job) if is_match else None
                if is_old is False:
                    break
                if is_old:
                    done = self._carry_out([ShownJob.of(job)], act)
                    changed, awaited, taken = changed + done.changed, awaited + done.awaited, taken + done.taken
                    if done.changed or done.left:
                        continue
                undated += is_match and is_old is None
                if page.after is None:
                    break
                raise self._hidden_by(job, changed)
        return FailedChange(
            matched=changed + awaited + taken, changed=changed, left=0, awaited=awaited, taken=taken, undated=undated
        )

    def _hidden_by(self, job: JobInfo, changed: int) -> Unsupported:
        error = self._backend.unsupported("lists_jobs")
        error.add_note(f"{changed} jobs were changed before this error")
        error.add_note(f"job {job.id} of queue {job.queue!r} was left, and it hides the failed jobs behind it")
        return error
