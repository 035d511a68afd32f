"""How consumers wait: one of them polls for all of this process, often at first, then less often.

An enqueue in the same process wakes them without a poll.

A poll is one short SELECT outside any transaction: it takes no lock, so an idle worker blocks no other statement. It
also returns when the next job is due, so that delays and leases are waited for exactly.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

from .records import SECOND, look, outlooks
from .scan_window import BUSY, FROM_START, IDLE, NO_SCAN, POLL, ScanWindow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Connection, Pool
    from .records import Outlook
    from .scan_window import ScanRestart
    from .statements import Sql

IDLE_POLL = 0.047  # seconds between two polls of an idle process: another process's job is at most about this late
_FIRST_NAP = 0.001  # seconds between two polls at first; longer the longer no job comes
_NAP_GROWTH = 0.05  # the pause between two polls, as a share of the time since the last job
_HORIZON = 100_000  # microseconds of look-ahead of an idle process: it polls again long before they are over
_JITTER = 0.1  # share by which a pause varies, so that processes which were started together do not poll together


class Waiter:
    """A waiting consumer."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = queues
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._is_woken = False

    def wake(self) -> None:
        """Wake the consumer. Idempotent. The caller holds the poller's lock."""
        if not self._is_woken:
            self._is_woken = True
            self._wakeup.release()

    def sleep(self, seconds: float) -> bool:
        """Whether it was woken within so many seconds."""
        return seconds > 0 and self._wakeup.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Poller:
    """What a process's consumers and producers of one database share: notifications, polling, and the scan windows."""

    def __init__(self) -> None:
        self.notifications = 0
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._polling_waiter: Waiter | None = None
        self._active_at = 0.0
        self._scan_windows: dict[str, ScanWindow] = {}

    def scan_window(self, queue: str) -> ScanWindow:
        """The queue's scan window."""
        return self._scan_windows.setdefault(queue, ScanWindow())

    def enqueued(self, queue: str, priority: int) -> None:
        """Record an enqueue of this process: wake waiting consumers, and show busy ones a more urgent priority."""
        if queue in self._scan_windows:  # a process that only enqueues has no scan windows
            self._scan_windows[queue].ready.enqueued(priority)
        self.notify()

    def made_ready(self, queue: str) -> None:
        """Record that this process has made jobs ready again: the next scan restarts, and so finds them."""
        if queue in self._scan_windows:
            self._scan_windows[queue].again.restart.request()
        self.notify()

    def notify(self) -> None:
        """Wake all waiting consumers of this process."""
        with self._lock:
            self.notifications += 1
            for waiter in self._waiters:
                waiter.wake()

    def speed_up(self) -> None:
        """Poll often for a while, because jobs were reserved."""
        self._active_at = time.monotonic()

    def look(self, connection: Connection, pool: Pool, queues: Sequence[str], share: int = IDLE) -> list[Outlook]:
        """Poll the queues, without a lock."""
        poll = Poll(self, pool, queues, share)
        return poll.read(connection.select(poll.sql))

    def sleep(self, pool: Pool, queues: Sequence[str], notifications: int, until: float) -> None:
        """Sleep until there are more *notifications*, or work in *queues*, or the monotonic clock reaches *until*."""
        waiter = Waiter(queues)
        with self._lock:
            if self.notifications != notifications:
                return
            self._waiters.append(waiter)
        try:
            self._wait(pool, waiter, until)
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                if self._polling_waiter is waiter:
                    self._polling_waiter = None
                if self._polling_waiter is None and self._waiters:
                    self._waiters[0].wake()  # it returns from its wait, calls this method again, and polls for all

    def _wait(self, pool: Pool, waiter: Waiter, until: float) -> None:
        with self._lock:
            is_looking = self._polling_waiter is None
            if is_looking:
                self._polling_waiter = waiter
        if not is_looking:
            waiter.sleep(until - time.monotonic())
            return
        changes_in: float = IDLE_POLL
        with pool.borrowed() as connection:
            while not waiter.sleep(min(self._nap(), changes_in, until - time.monotonic())):
                if time.monotonic() >= until:
                    return
                outlooks = self.look(connection, pool, self._awaited_queues(), POLL)
                if waiter in self._wake_waiters_with_work(outlooks):
                    return
                changes_in = _first_change(outlooks)

    def _nap(self) -> float:
        idle = time.monotonic() - self._active_at
        nap = min(IDLE_POLL, _FIRST_NAP + idle * _NAP_GROWTH)
        return nap * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spreads the polls, guards nothing

    def _awaited_queues(self) -> list[str]:
        with self._lock:
            return list(dict.fromkeys(queue for waiter in self._waiters for queue in waiter.queues))

    def _wake_waiters_with_work(self, outlooks: Sequence[Outlook]) -> list[Waiter]:
        working = {outlook.queue for outlook in outlooks if outlook.has_work}
        with self._lock:
            woken = [waiter for waiter in self._waiters if not working.isdisjoint(waiter.queues)]
            for waiter in woken:
                waiter.wake()
        return woken


class Poll:
    """One poll of some queues: the statement, and what the scan windows learn from its reply.

    A busy consumer leaves out the ready jobs of the queue from which it claims in the same packet.
    """

    def __init__(
        self, poller: Poller, pool: Pool, queues: Sequence[str], share: int, *, claimed_from: str | None = None
    ) -> None:
        self._queues = queues
        self._scan_windows = [poller.scan_window(queue) for queue in queues]
        self._restarts: list[ScanRestart] = []
        claimed = [queue == claimed_from for queue in queues]
        values = [
            self._values(scan_window, share, is_claimed=is_claimed)
            for scan_window, is_claimed in zip(self._scan_windows, claimed, strict=True)
        ]
        self.sql = look(pool, queues, values, 0 if share == BUSY else _HORIZON)

    def read(self, rows: Sequence[tuple[str]]) -> list[Outlook]:
        """The outlooks in the poll's reply. Updates the scan windows."""
        took, found = outlooks(rows, self._queues)
        for restart in self._restarts:
            restart.scanned(took)
        for number, (scan_window, outlook) in enumerate(zip(self._scan_windows, found, strict=True)):
            if outlook.has_due and scan_window.is_due_locked:
                found[number] = outlook.without_due
            if outlook.has_ready:  # the claim that follows has to find the ready jobs
                scan_window.ready.restart.request()
                scan_window.again.restart.request()
        return found

    def _values(self, scan_window: ScanWindow, share: int, *, is_claimed: bool) -> dict[str, Sql]:
        ready, again = (
            NO_SCAN if is_claimed else self._scan(cursor.restart, share)
            for cursor in (scan_window.ready, scan_window.again)
        )
        return {"again": again, "ready": ready, "due": self._scan(scan_window.due, share)}

    def _scan(self, restart: ScanRestart, share: int) -> Sql:
        if not restart.is_due(share):
            return NO_SCAN
        self._restarts.append(restart)
        return FROM_START


def _first_change(outlooks: Sequence[Outlook]) -> float:
    """Seconds until time makes a job ready that is not ready now."""
    changes = (outlook.changes_in for outlook in outlooks)
    return min((change / SECOND for change in changes if change is not None and change > 0), default=IDLE_POLL)


def shared_poller(key: tuple[str, str]) -> Poller:
    """The only poller of a database in this process. A forked child has its own: the lock may be held in the parent."""
    return _pollers.setdefault((forks.generation, *key), Poller())


_pollers: weakref.WeakValueDictionary[tuple[int, str, str], Poller] = weakref.WeakValueDictionary()
