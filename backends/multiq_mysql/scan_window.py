"""Scan windows decide where a scan of the index starts while InnoDB cannot purge deleted entries.

A job that is moved or deleted leaves a deleted entry in the index until InnoDB purges it. InnoDB purges nothing that
the oldest open snapshot on the server might read. During a long report, a scan therefore steps over the deleted entries
of all jobs since the report began. Each entry costs half a microsecond.

While this is cheap (``CHEAP``), every scan begins at the start of the index range. When it is not cheap, a busy process
resumes each scan at its *cursor*, which is the last job that it has reserved. Such a scan covers only the jobs of the
cursor's priority. A *restart* is a scan from the start of the range. The longer restarts take, the rarer they are.
Until the next restart, a more urgent job of another process or a job that has just become due may wait up to a second.

A resumed scan is fast only if a live job follows the cursor. Otherwise the scan reads on through the entries of the
next priority, state and queue. So after a scan that found nothing, the next scan is a restart.
"""

from __future__ import annotations

import time

from .statements import Sql

CHEAP = 0.002  # seconds. If restarts take at most this time, every scan is a restart.
MANY = 2_000  # Jobs taken since a cheap restart. Fewer jobs leave too few deleted entries to slow a restart down.
# Slower restarts take 1/100 of the time of a busy process, 1/10 of the time of a process without work, and 1/12 of the
# time of a waiting process.
BUSY, IDLE, POLL = 100, 10, 12
LOCKED = 0.05  # seconds until locked due jobs are tried again
# The longest time in seconds between two restarts of a process without work, unless a restart itself takes longer.
_LONGEST = 0.8
_LONGEST_BUSY = 10.0  # the same time for a process that reserves one job after another
_RESTARTED = 60.0  # seconds after which a scan for expired outcomes starts at 0 again
_LIMITS_ASKED = 0.25  # seconds between two checks for limits in a queue that has had none
_DRIFT = 10_000_000  # microseconds that the estimate of the server's time may be wrong

FROM_START = Sql("TRUE")
"""The condition of a scan from the start of the range."""
NO_SCAN = Sql("FALSE")
"""The condition by which a scan is left out."""


class ScanRestart:
    """Decides when a scan restarts at the start of its range. This depends on the time that the last restart took."""

    def __init__(self, *, may_wait: bool) -> None:
        self._may_wait = may_wait
        self._took = 0.0
        self._looked_at = 0.0
        self._taken = 0
        self._has_job_arrived = False

    @property
    def must_measure(self) -> bool:
        """Whether the next restart has to be measured. After many jobs were taken, a restart may be slow."""
        return self._taken >= MANY

    def is_due(self, share: int) -> bool:
        """Whether a restart is due. All restarts together may take at most 1/*share* of the time.

        With POLL, the number of taken jobs does not matter, because a process that only waits takes no jobs.
        """
        if self._took <= CHEAP or (share != POLL and self._taken < MANY):
            return True
        if self._has_job_arrived and share != BUSY:
            return True
        longest = _LONGEST_BUSY if share == BUSY and self._may_wait else _LONGEST
        return time.monotonic() >= self._looked_at + min(share * self._took, max(longest, self._took))

    def scanned(self, took: float) -> None:
        """Record that a restart took *took* seconds on the server."""
        self._took = took
        self._looked_at = time.monotonic()
        self._has_job_arrived = False
        if took <= CHEAP:
            self._taken = 0

    def taken(self, jobs: int) -> None:
        """Record that the range has *jobs* more deleted entries."""
        self._taken += jobs

    def job_arrived(self) -> None:
        """Record that this process has enqueued a job. The next scan is then a restart, unless the consumer is busy."""
        self._has_job_arrived = True

    def request(self) -> None:
        """Make the next scan a restart."""
        self._took = 0.0


class ScanCursor:
    """The last job in one ready state that this process has reserved from a queue. The next scan may begin there."""

    def __init__(self, *, may_wait: bool) -> None:
        self.restart = ScanRestart(may_wait=may_wait)
        self._last: tuple[int, int] | None = None
        self._is_empty = False

    @property
    def sql(self) -> Sql:
        """The condition of the next scan.

        The scan begins at the start or at the cursor. There is no scan if the last scan found nothing.
        """
        if self.restart.is_due(BUSY):
            return FROM_START
        if self._is_empty:
            return NO_SCAN
        if self._last is None:
            return FROM_START
        priority, seq = self._last
        return Sql(f"place = {priority} AND seq > {seq}")

    def scanned(self, took: float | None, rows: int) -> None:
        """Record the time in seconds and the number of rows of a scan from the start. *took* is None if it was not
        measured.
        """
        if took is not None:
            self.restart.scanned(took)
        self._is_empty = not rows

    def taken(self, last: tuple[int, int]) -> None:
        """Record that all jobs up to this priority and seq are reserved."""
        self._last = last

    def dropped(self, first: tuple[int, int]) -> None:
        """Record that a scan found this job, and that the job was not reserved.

        If the next scan would miss the job, it restarts.
        """
        if self._last is not None and (first[0] != self._last[0] or first[1] <= self._last[1]):
            self.restart.request()

    def enqueued(self, priority: int) -> None:
        """Record that this process has enqueued a job of this priority.

        The next scan restarts if the job is before the cursor.
        """
        if self._is_empty or (self._last is not None and priority < self._last[0]):
            self.restart.request()
        self.restart.job_arrived()


class ExpiredScan:
    """Decides at which expiry time the scan for a queue's expired outcomes starts. This time is the *floor*.

    All outcomes that expired before the floor are known to be deleted, and a new outcome expires after the floor. This
    does not hold if the clock is set back, or if a transaction that deletes outcomes is rolled back. So some scans
    start at 0.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._restarted_at = 0.0

    def floor(self) -> int:
        """Return the time in microseconds before which the next scan need not look."""
        now = time.monotonic()
        if now - self._restarted_at > _RESTARTED:
            self._restarted_at, self._floor = now, 0
        return self._floor

    def found_all(self, server_time: int) -> None:
        """Record that a scan has found all outcomes that had expired at *server_time*. This time is an estimate."""
        self._floor = max(self._floor, server_time - _DRIFT)


class ScanWindow:
    def __init__(self) -> None:
        self.ready = ScanCursor(may_wait=True)
        self.again = ScanCursor(may_wait=False)
        self.due = ScanRestart(may_wait=False)
        """Decides when delayed and reserved jobs are scanned. These scans have no cursor."""
        self.expired = ExpiredScan()
        self.has_limits = False
        """Whether this process has seen jobs of the queue that wait for limits."""
        self._asked_for_limits_at = float("-inf")
        self._locked_until = 0.0

    def may_have_limits(self) -> bool:
        """Whether the next poll must check for limits. For a queue without limits, few polls check this, so the check
        costs almost nothing."""
        now = time.monotonic()
        if not self.has_limits and now - self._asked_for_limits_at < _LIMITS_ASKED:
            return False
        self._asked_for_limits_at = now
        return True

    @property
    def is_due_locked(self) -> bool:
        """Whether an attempt found all due jobs locked, and was made less than ``LOCKED`` seconds ago."""
        return self._locked_until > time.monotonic()

    def mark_due_locked(self) -> None:
        """Record that another transaction has locked the due jobs.

        For ``LOCKED`` seconds, polls ignore these jobs.
        """
        self._locked_until = time.monotonic() + LOCKED

    def taken(self, jobs: int) -> None:
        """Record that *jobs* jobs were taken.

        Each job leaves a deleted entry among the ready jobs. Its lease soon leaves another entry among the reserved
        jobs.
        """
        for restart in (self.ready.restart, self.again.restart, self.due):
            restart.taken(jobs)


class ScanWindows:
    """The scan windows of one database's queues. All producers and consumers of this process share them."""

    def __init__(self) -> None:
        self._windows: dict[str, ScanWindow] = {}

    def of(self, queue: str) -> ScanWindow:
        return self._windows.setdefault(queue, ScanWindow())

    def enqueued(self, queue: str, priority: int) -> None:
        """Record that this process has enqueued a job. The job may be before a busy consumer's cursor."""
        if queue in self._windows:  # A process that only enqueues has no scan windows.
            self._windows[queue].ready.enqueued(priority)

    def made_ready(self, queue: str) -> None:
        """Record that this process has made jobs ready again. The next scan restarts and finds them."""
        if queue in self._windows:
            self._windows[queue].again.restart.request()
