"""How consumers wait: one of them looks for all of this process, often at first, then less; a producer here rings.

A look is one short SELECT outside any transaction: it takes no lock and holds nothing, so an idle worker disturbs
nobody. It also says when the next job is due, so that delays and leases need no guess.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .records import SECOND, look, outlooks
from .scan_window import BOTTOM, BUSY, IDLE, NOTHING, POLL, Floors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Connection, Database
    from .records import Outlook
    from .scan_window import Bottom
    from .statements import Sql

IDLE_POLL = 0.047  # seconds between two looks of an idle process: another process's job is at most about this late
_FIRST_NAP = 0.001  # seconds between two looks; longer the longer nothing happens
_NAP_GROWTH = 0.05  # of the time since something happened
_HORIZON = 100_000  # microseconds that an idle process looks ahead: it looks again long before they are over
_JITTER = 0.1  # so that processes which were started together do not look together


class Waiter:
    """A consumer that waits."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = queues
        self._ear = threading.Lock()
        self._ear.acquire()
        self._is_woken = False

    def wake(self) -> None:
        """Once is enough. Called under the watch's guard."""
        if not self._is_woken:
            self._is_woken = True
            self._ear.release()

    def sleep(self, seconds: float) -> bool:
        """Whether it was woken within so many seconds."""
        return seconds > 0 and self._ear.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class Watch:
    """What a process's consumers and producers of one database share: the bell, the looking, and the floors."""

    def __init__(self) -> None:
        self.rings = 0
        self._guard = threading.Lock()
        self._waiters: list[Waiter] = []
        self._looking: Waiter | None = None
        self._stirred_at = 0.0
        self._floors: dict[str, Floors] = {}

    def floors(self, queue: str) -> Floors:
        """The queue's floors."""
        return self._floors.setdefault(queue, Floors())

    def enqueued(self, queue: str, priority: int) -> None:
        """This process has enqueued something: whoever waits wakes, and whoever works looks at what is more urgent."""
        if queue in self._floors:  # who only produces needs none
            self._floors[queue].ready.enqueued(priority)
        self.ring()

    def made_ready(self, queue: str) -> None:
        """This process has made jobs ready again: the next look begins below them."""
        if queue in self._floors:
            self._floors[queue].again.bottom.hurry()
        self.ring()

    def ring(self) -> None:
        """Wake all who wait in this process."""
        with self._guard:
            self.rings += 1
            for waiter in self._waiters:
                waiter.wake()

    def stir(self) -> None:
        """Something happened: look often for a while."""
        self._stirred_at = time.monotonic()

    def look(
        self, connection: Connection, database: Database, queues: Sequence[str], share: int = IDLE
    ) -> list[Outlook]:
        """What the queues have to offer, without a lock."""
        question = Question(self, database, queues, share)
        return question.answered(connection.ask(question.sql))

    def sleep(self, database: Database, queues: Sequence[str], rings: int, until: float) -> None:
        """Until the bell has rung more often than *rings*, or there is work in *queues*, or the clock says *until*."""
        waiter = Waiter(queues)
        with self._guard:
            if self.rings != rings:
                return
            self._waiters.append(waiter)
        try:
            self._wait(database, waiter, until)
        finally:
            with self._guard:
                self._waiters.remove(waiter)
                if self._looking is waiter:
                    self._looking = None
                if self._looking is None and self._waiters:
                    self._waiters[0].wake()  # it sees that nobody looks, comes back here, and does

    def _wait(self, database: Database, waiter: Waiter, until: float) -> None:
        with self._guard:
            is_looking = self._looking is None
            if is_looking:
                self._looking = waiter
        if not is_looking:
            waiter.sleep(until - time.monotonic())
            return
        changes_in: float = IDLE_POLL
        with database.borrowed() as connection:
            while not waiter.sleep(min(self._nap(), changes_in, until - time.monotonic())):
                if time.monotonic() >= until:
                    return
                outlooks = self.look(connection, database, self._everybodys_queues(), POLL)
                if waiter in self._wake_who_has_work(outlooks):
                    return
                changes_in = _first_change(outlooks)

    def _nap(self) -> float:
        idle = time.monotonic() - self._stirred_at
        nap = min(IDLE_POLL, _FIRST_NAP + idle * _NAP_GROWTH)
        return nap * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - spreads the looks, guards nothing

    def _everybodys_queues(self) -> list[str]:
        with self._guard:
            return list(dict.fromkeys(queue for waiter in self._waiters for queue in waiter.queues))

    def _wake_who_has_work(self, outlooks: Sequence[Outlook]) -> list[Waiter]:
        working = {outlook.queue for outlook in outlooks if outlook.has_work}
        with self._guard:
            woken = [waiter for waiter in self._waiters if not working.isdisjoint(waiter.queues)]
            for waiter in woken:
                waiter.wake()
        return woken


class Question:
    """One look at some queues: the statement, and what the floors learn from its answer.

    Who is at work leaves out the queue from which it claims in the same packet.
    """

    def __init__(
        self, watch: Watch, database: Database, queues: Sequence[str], share: int, *, claimed_from: str | None = None
    ) -> None:
        self._queues = queues
        self._floors = [watch.floors(queue) for queue in queues]
        self._bottoms: list[Bottom] = []
        claimed = [queue == claimed_from for queue in queues]
        values = [
            self._values(floors, share, is_claimed=is_claimed)
            for floors, is_claimed in zip(self._floors, claimed, strict=True)
        ]
        self.sql = look(database, queues, values, 0 if share == BUSY else _HORIZON)

    def answered(self, rows: Sequence[tuple[str]]) -> list[Outlook]:
        """The outlooks."""
        took, found = outlooks(rows, self._queues)
        for bottom in self._bottoms:
            bottom.looked(took)
        for number, (floors, outlook) in enumerate(zip(self._floors, found, strict=True)):
            if outlook.has_due and floors.is_all_due_locked:
                found[number] = outlook.without_due
            if outlook.has_ready:  # who comes to take it has to find it
                floors.ready.bottom.hurry()
                floors.again.bottom.hurry()
        return found

    def _values(self, floors: Floors, share: int, *, is_claimed: bool) -> dict[str, Sql]:
        ready, again = (
            NOTHING if is_claimed else self._scan(lane.bottom, share) for lane in (floors.ready, floors.again)
        )
        return {"again": again, "ready": ready, "due": self._scan(floors.due, share)}

    def _scan(self, bottom: Bottom, share: int) -> Sql:
        if not bottom.is_due(share):
            return NOTHING
        self._bottoms.append(bottom)
        return BOTTOM


def _first_change(outlooks: Sequence[Outlook]) -> float:
    """Seconds until time makes a job ready that is not ready now."""
    changes = (outlook.changes_in for outlook in outlooks)
    return min((change / SECOND for change in changes if change is not None and change > 0), default=IDLE_POLL)


def watch_of(key: tuple[str, str]) -> Watch:
    """The one watch of a database in this process. A fork gets its own: its lock might be another thread's."""
    return _watches.setdefault((os.getpid(), *key), Watch())


_watches: weakref.WeakValueDictionary[tuple[int, str, str], Watch] = weakref.WeakValueDictionary()
