"""ScanWindow: from where on the index is worth reading while InnoDB cannot purge it.

A job that leaves its place leaves an entry behind, until InnoDB purges it, and it purges nothing that the oldest open
snapshot on the server might read. Behind somebody's long report every job of the last hour is still there for a scan to
step over, half a microsecond each.

As long as that takes no time every scan begins at the bottom. When it does, the scans of a process that is at work go
on where they ended, inside the priority that they had reached, and begin at the bottom only now and then, the more
seldom the longer it takes. For that time somebody else's more urgent job, and one that has just become due, may wait
up to a second. A jump to a floor is only quick because a job is alive right behind it: a scan that finds none walks on
through the entries of the next priority, state and queue. So who finds nothing there begins at the bottom.
"""

from __future__ import annotations

import time

from .statements import Sql

CHEAP = 0.002  # seconds; what takes no longer is done every time
MANY = 2_000  # jobs taken since it was cheap, below which there is not enough to step over: something else was slow
BUSY, IDLE, POLL = 100, 10, 12  # beyond that a scan takes one part in so many: at work, out of work, waiting
LOCKED = 0.05  # seconds until due jobs are tried again that somebody has locked
_LONGEST = 0.8  # seconds between two looks from the bottom of who has nothing to do, or as long as one takes
_LONGEST_BUSY = 10.0  # the same of who takes one job after another

FROM_START = Sql("TRUE")
"""The condition of a scan that begins at the bottom."""
NO_SCAN = Sql("FALSE")
"""The condition of one that is not made."""


class ScanRestart:
    """When to begin at the bottom again."""

    def __init__(self, *, may_wait: bool) -> None:
        self._may_wait = may_wait
        self._took = 0.0
        self._looked_at = 0.0
        self._taken = 0
        self._has_job_arrived = False

    @property
    def must_measure(self) -> bool:
        """Whether enough was taken for it to have become slow: how long it takes has to be measured."""
        return self._taken >= MANY

    def is_due(self, share: int) -> bool:
        """Whether it would take less than that part of the time. Who waits has taken nothing, and nothing to lose."""
        if self._took <= CHEAP or (share != POLL and self._taken < MANY):
            return True
        if self._has_job_arrived and share != BUSY:
            return True
        longest = _LONGEST_BUSY if share == BUSY and self._may_wait else _LONGEST
        return time.monotonic() >= self._looked_at + min(share * self._took, max(longest, self._took))

    def scanned(self, took: float) -> None:
        """It took so many seconds to find something, or nothing."""
        self._took = took
        self._looked_at = time.monotonic()
        self._has_job_arrived = False
        if took <= CHEAP:
            self._taken = 0

    def taken(self, jobs: int) -> None:
        """So many entries more were left behind."""
        self._taken += jobs

    def job_arrived(self) -> None:
        """This process has brought something: who finds nothing else should look."""
        self._has_job_arrived = True

    def request(self) -> None:
        """Begin there next time."""
        self._took = 0.0


class ScanCursor:
    """One kind of a queue's ready jobs: the floor below which this process has taken them all."""

    def __init__(self, *, may_wait: bool) -> None:
        self.restart = ScanRestart(may_wait=may_wait)
        self._last: tuple[int, int] | None = None
        self._is_empty = False

    @property
    def sql(self) -> Sql:
        """The condition of a scan: from the bottom, or from the floor on, or none where nothing was."""
        if self.restart.is_due(BUSY):
            return FROM_START
        if self._is_empty:
            return NO_SCAN
        if self._last is None:
            return FROM_START
        priority, seq = self._last
        return Sql(f"place = {priority} AND seq > {seq}")

    def scanned(self, took: float | None, rows: int) -> None:
        """A scan from the bottom took so many seconds (None: nobody suspected it) and found so many rows."""
        if took is not None:
            self.restart.scanned(took)
        self._is_empty = not rows

    def taken(self, last: tuple[int, int]) -> None:
        """All are taken up to this one: its priority and seq."""
        self._last = last

    def dropped(self, first: tuple[int, int]) -> None:
        """A scan found this one, and somebody else is to have it: is it where the next scan looks?"""
        if self._last is not None and (first[0] != self._last[0] or first[1] <= self._last[1]):
            self.restart.request()

    def enqueued(self, priority: int) -> None:
        """This process has enqueued something: more urgent than where the floor is?"""
        if self._is_empty or (self._last is not None and priority < self._last[0]):
            self.restart.request()
        self.restart.job_arrived()


class ScanWindow:
    """One queue's floors."""

    def __init__(self) -> None:
        self.ready = ScanCursor(may_wait=True)
        self.again = ScanCursor(may_wait=False)
        self.due = ScanRestart(may_wait=False)
        """Of the delayed and the reserved jobs, which are looked at from the bottom or not at all."""
        self._locked_until = 0.0

    @property
    def is_due_locked(self) -> bool:
        """Whether what is due was just found to be in somebody's hands."""
        return self._locked_until > time.monotonic()

    def mark_due_locked(self) -> None:
        """Somebody else has locked what is due: that is no work for now, however often it is seen."""
        self._locked_until = time.monotonic() + LOCKED

    def taken(self, jobs: int) -> None:
        """So many jobs have left entries behind: among the ready ones, and soon among the reserved ones."""
        for restart in (self.ready.restart, self.again.restart, self.due):
            restart.taken(jobs)
