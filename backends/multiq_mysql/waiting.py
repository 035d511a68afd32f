"""Waits for jobs. One consumer polls for all consumers of its process. It polls often at first, and then less often.

An enqueue in the same process wakes the consumers without a poll.

A poll is one short SELECT outside any transaction. A poll takes no lock, so an idle worker blocks no other statement.
It also returns the time at which the next job becomes due or the next lease ends. The consumers wake at that time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from multiq.driverkit.fork import PerProcess
from multiq.driverkit.shared_poller import Found, PollPause, SharedPoller

from .records import SECOND, look
from .scan_window import POLL, ScanWindows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .pool import Pool

# seconds between two polls of an idle process. A job from another process is at most about this late.
IDLE_POLL = 0.047
_FIRST_PAUSE = 0.001  # The first pause between two polls, in seconds. Pauses grow while no job comes.
_PAUSE_GROWTH = 0.05  # the pause as a share of the time since the last job
_JITTER = 0.1  # The share by which a pause varies, so that processes do not poll together.
_LONGEST_TURN = 1.0  # seconds after which the other consumers of a process no longer wait for a claim
_TURN_CHECK = 0.1  # seconds between two checks whether to go on waiting for the turn


class Poller(SharedPoller):
    """The notifications, polls and scan windows that all consumers and producers of one database in a process share."""

    def __init__(self) -> None:
        super().__init__(
            PollPause(first=_FIRST_PAUSE, longest=IDLE_POLL, growth=_PAUSE_GROWTH, jitter=_JITTER),
        )
        self.scan_windows = ScanWindows()
        self._claim_turns: dict[str, ClaimTurns] = {}

    def claim_turns(self, queue: str) -> ClaimTurns:
        """The turns in which the consumers of this process claim jobs with gates from a queue."""
        return self._claim_turns.setdefault(queue, ClaimTurns())


class ClaimTurns:
    """Lets the consumers of this process claim jobs with gates one after another.

    Claims at the same time would find each other's locks, and nothing else. Their polls show open gates until the claim
    that has the locks is committed, so all of them would go on asking.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_at = 0.0
        """The time at which the present turn began."""
        self._guard = threading.Lock()
        self._waiters: list[object] = []
        self.begun = 0
        """The number of claims so far."""
        self._found_all = 0
        """The number of the last claim after which no job was left that could start."""

    @property
    def is_awaited(self) -> bool:
        """Whether another consumer waits for its turn."""
        return bool(self._waiters)

    @contextlib.contextmanager
    def next(self, seen: int, give_up_at: float, is_interrupted: Callable[[], bool]) -> Iterator[int | None]:
        """Wait for the turn. The block claims.

        If the monotonic clock reaches *give_up_at*, or if the call is interrupted, the block claims without a turn.

        Yields the number of the claim, or None if a claim has left no job that can start, and began after the caller
        had read *seen* from ``begun``.
        """
        lock = self._wait(give_up_at, is_interrupted)
        try:
            if self._found_all > seen:
                yield None
            else:
                with self._guard:
                    self.begun += 1
                    number = self.begun
                yield number
        finally:
            if lock is not None:
                lock.release()

    def found_all(self, number: int) -> None:
        """Record that the claim of this number has left no job that can start."""
        with self._guard:
            self._found_all = max(self._found_all, number)

    def _wait(self, give_up_at: float, is_interrupted: Callable[[], bool]) -> threading.Lock | None:
        """Wait for the turn. Returns the lock that the caller now holds. None: the caller has no turn."""
        waiter = object()
        self._waiters.append(waiter)
        try:
            while True:
                lock = self._lock
                if lock.acquire(timeout=max(0.0, min(_TURN_CHECK, give_up_at - time.monotonic()))):
                    self._began_at = time.monotonic()
                    return lock
                if is_interrupted() or time.monotonic() >= give_up_at:
                    return None
                self._end_long_turn(lock)
        finally:
            self._waiters.remove(waiter)

    def _end_long_turn(self, lock: threading.Lock) -> None:
        """Let the next consumers take turns without the consumer that holds this lock, if its turn takes too long.

        The server may not answer that consumer. Or an exception of a signal handler has left the lock locked.
        """
        with self._guard:
            now = time.monotonic()
            if self._lock is lock and now > self._began_at + _LONGEST_TURN:
                self._lock, self._began_at = threading.Lock(), now


pollers = PerProcess(Poller)
"""The pollers by the server's address and the database's name."""


def poll(pool: Pool, queues: Sequence[str]) -> Found:
    """Poll these queues once, for all consumers of this process."""
    with pool.borrowed() as connection:
        outlooks = look(connection, pool, queues, POLL)
    changes = (outlook.changes_in for outlook in outlooks)
    return Found(
        {outlook.queue for outlook in outlooks if outlook.has_work or outlook.has_open_gate},
        min((change / SECOND for change in changes if change is not None and change > 0), default=IDLE_POLL),
    )
