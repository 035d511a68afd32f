"""Scan windows: where a scan of the index starts while InnoDB cannot purge deleted entries.

A job that leaves its place in the index leaves a deleted entry there until InnoDB purges it. InnoDB purges nothing that
the oldest open snapshot on the server might read. So while a long report runs, a scan steps over the deleted entries of
all jobs since the report began. Each entry costs half a microsecond.

While stepping over them is cheap (``CHEAP``), every scan begins at the start of the index range. When it is not cheap,
a busy process resumes each scan at its *cursor*: the last job that it has reserved. Such a scan covers only the jobs of
the cursor's priority. A *restart*, a scan from the start of the range, is made only now and then: the longer restarts
take, the less often. Meanwhile a job that another process enqueued with a more urgent priority, or that has just become
due, may wait up to a second.

To resume is fast only if a live job follows the cursor. A scan that finds none reads on through the entries of the next
priority, state and queue. So after a scan that found nothing, the next scan is a restart.
"""

from __future__ import annotations

import time

from .statements import Sql

CHEAP = 0.002  # seconds: a restart that takes no longer is made every time
MANY = 2_000  # jobs taken since a cheap restart; with fewer, deleted entries cannot be the cause of a slow one
BUSY, IDLE, POLL = 100, 10, 12  # slower restarts take 1/this of the time: at work, without work, waiting
LOCKED = 0.05  # seconds until due jobs that were locked are tried again
_LONGEST = 0.8  # seconds between two restarts of a process without work, at most (more if a restart takes longer)
_LONGEST_BUSY = 10.0  # the same for a process that takes one job after another

FROM_START = Sql("TRUE")
"""The condition of a scan from the start of the range."""
NO_SCAN = Sql("FALSE")
"""The condition that leaves a scan out."""


class ScanRestart:
    """Decides when a scan restarts at the start of its range, by what the last restart has cost."""

    def __init__(self, *, may_wait: bool) -> None:
        self._may_wait = may_wait
        self._took = 0.0
        self._looked_at = 0.0
        self._taken = 0
        self._has_job_arrived = False

    @property
    def must_measure(self) -> bool:
        """Whether the next restart has to be measured: so many jobs were taken that it may be slow."""
        return self._taken >= MANY

    def is_due(self, share: int) -> bool:
        """Whether a restart is due: all restarts together may take 1/*share* of the time.

        A process that waits (POLL) takes no jobs.
        """
        if self._took <= CHEAP or (share != POLL and self._taken < MANY):
            return True
        if self._has_job_arrived and share != BUSY:
            return True
        longest = _LONGEST_BUSY if share == BUSY and self._may_wait else _LONGEST
        return time.monotonic() >= self._looked_at + min(share * self._took, max(longest, self._took))

    def scanned(self, took: float) -> None:
        """Record that a restart took so many seconds on the server."""
        self._took = took
        self._looked_at = time.monotonic()
        self._has_job_arrived = False
        if took <= CHEAP:
            self._taken = 0

    def taken(self, jobs: int) -> None:
        """Record that the range has so many more deleted entries."""
        self._taken += jobs

    def job_arrived(self) -> None:
        """Record that this process has enqueued a job: a consumer that has found no other job makes a restart."""
        self._has_job_arrived = True

    def request(self) -> None:
        """Make the next scan a restart."""
        self._took = 0.0


class ScanCursor:
    """How far this process has reserved a queue's jobs in one ready state, and where the next scan begins."""

    def __init__(self, *, may_wait: bool) -> None:
        self.restart = ScanRestart(may_wait=may_wait)
        self._last: tuple[int, int] | None = None
        self._is_empty = False

    @property
    def sql(self) -> Sql:
        """The condition of the next scan: from the start, from the cursor on, or no scan if the last found nothing."""
        if self.restart.is_due(BUSY):
            return FROM_START
        if self._is_empty:
            return NO_SCAN
        if self._last is None:
            return FROM_START
        priority, seq = self._last
        return Sql(f"place = {priority} AND seq > {seq}")

    def scanned(self, took: float | None, rows: int) -> None:
        """Record a scan from the start: the seconds it took (None: not measured) and the rows it found."""
        if took is not None:
            self.restart.scanned(took)
        self._is_empty = not rows

    def taken(self, last: tuple[int, int]) -> None:
        """Record that all jobs up to this priority and seq are reserved."""
        self._last = last

    def dropped(self, first: tuple[int, int]) -> None:
        """Record that a scan found this job and did not reserve it.

        If the next scan would miss the job, that scan restarts.
        """
        if self._last is not None and (first[0] != self._last[0] or first[1] <= self._last[1]):
            self.restart.request()

    def enqueued(self, priority: int) -> None:
        """Record that this process has enqueued a job of this priority.

        If the job is before the cursor, the next scan restarts.
        """
        if self._is_empty or (self._last is not None and priority < self._last[0]):
            self.restart.request()
        self.restart.job_arrived()


class ScanWindow:
    """The cursors of one queue."""

    def __init__(self) -> None:
        self.ready = ScanCursor(may_wait=True)
        self.again = ScanCursor(may_wait=False)
        self.due = ScanRestart(may_wait=False)
        """When delayed and reserved jobs are scanned: always from the start, or not at all."""
        self._locked_until = 0.0

    @property
    def is_due_locked(self) -> bool:
        """Whether all due jobs were found locked a moment ago."""
        return self._locked_until > time.monotonic()

    def mark_due_locked(self) -> None:
        """Record that another transaction has locked the due jobs.

        For ``LOCKED`` seconds these jobs do not count as work.
        """
        self._locked_until = time.monotonic() + LOCKED

    def taken(self, jobs: int) -> None:
        """Record that so many jobs were taken.

        Each leaves a deleted entry among the ready jobs, and soon another one among the reserved jobs.
        """
        for restart in (self.ready.restart, self.again.restart, self.due):
            restart.taken(jobs)


class ScanWindows:
    """The scan windows of one database's queues, for all producers and consumers of this process."""

    def __init__(self) -> None:
        self._windows: dict[str, ScanWindow] = {}

    def of(self, queue: str) -> ScanWindow:
        """The queue's scan window."""
        return self._windows.setdefault(queue, ScanWindow())

    def enqueued(self, queue: str, priority: int) -> None:
        """Record that this process has enqueued a job, which may be before a busy consumer's cursor."""
        if queue in self._windows:  # a process that only enqueues has no scan windows
            self._windows[queue].ready.enqueued(priority)

    def made_ready(self, queue: str) -> None:
        """Record that this process has made jobs ready again. The next scan restarts, so that it finds them."""
        if queue in self._windows:
            self._windows[queue].again.restart.request()
