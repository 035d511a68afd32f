"""Waits for jobs in a store that cannot notify its clients, by polls and by notifications within the process.

====================  =======================================================================================
``PollPause``         the pause between two polls: short after activity, then increasingly long
``Notifier``          wakes the waiting consumers of this process, immediately and without a poll
``SharedPoller``      a notifier whose waiting consumers share polls: one of them polls for the whole process
====================  =======================================================================================

If a poll is nearly free and needs the consumer's own connection (SQLite), a ``Notifier`` is enough. Use a
``SharedPoller`` if each poll is a query to a server (MySQL). Create both kinds of object with
``driverkit.fork.PerProcess``, because all consumers and producers of one store in a process must share one object.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence


class PollPause:
    """Computes the pause between two polls. The pause grows with the time since the last activity."""

    def __init__(self, *, first: float, longest: float, growth: float, jitter: float = 0.0) -> None:
        """All times are seconds.

        Parameters:
            first: the pause right after activity.
            longest: the longest pause. A consumer may find another process's job this much later.
            growth: the pause grows by this share of the time since the last activity.
            jitter: share by which a pause varies at random, so that processes do not poll at the same time.
        """
        self.first = first
        self.longest = longest
        self.growth = growth
        self.jitter = jitter
        self._active_at = 0.0

    @property
    def idle(self) -> float:
        """Seconds since the last activity."""
        return time.monotonic() - self._active_at

    def speed_up(self) -> None:
        """Record activity, so that the next pauses are short."""
        self._active_at = time.monotonic()

    def next(self) -> float:
        """Return the seconds until the next poll."""
        pause = min(self.longest, self.first + self.idle * self.growth)
        if self.jitter:
            pause *= random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311 - spreads the polls, guards nothing
        return pause


class Listener(Protocol):
    """A waiting consumer. A notification calls ``release``. A ``threading.Lock`` that is held can be a listener."""

    def release(self) -> None: ...


class Notifier:
    """Releases listeners. ``notifications`` shows whether there was a notification between a poll of the queues and the
    wait."""

    def __init__(self) -> None:
        self.notifications = 0
        self._guard = threading.Lock()
        self._listeners: list[Listener] = []

    def notify(self) -> None:
        """Release all listeners.

        Holds the lock until all are released, so that no listener is removed and closed before its release. The file
        descriptor of a closed listener could already belong to another file.
        """
        with self._guard:
            self.notifications += 1
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener.release()

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Register *listener* while the block lasts. The next notification releases it, and later notifications do
        not."""
        with self._guard:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._guard, contextlib.suppress(ValueError):
                self._listeners.remove(listener)


class Found(NamedTuple):
    """The result of one poll."""

    working: Collection[str]
    """The queues that have a job to reserve."""
    changes_in: float
    """Seconds until a delay, a lease or a pause in one of the queues ends. This may make a job ready.

    Values beyond the next poll need not be exact.
    """


class SharedPoller:
    """Lets all waiting consumers of a process share one poll, and wakes those whose queues have jobs."""

    def __init__(self, pause: PollPause) -> None:
        self.pause = pause
        self.notifications = 0
        """The number of calls of ``notify``. Read it before you query for jobs, and pass it to ``sleep``."""
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._polling_waiter: _Waiter | None = None

    @property
    def waiting(self) -> int:
        """The number of waiting consumers."""
        return len(self._waiters)

    def notify(self) -> None:
        """Wake all waiting consumers of this process."""
        with self._lock:
            self.notifications += 1
            for waiter in self._waiters:
                waiter.wake()

    def sleep(
        self, queues: Sequence[str], notifications: int, until: float, poll: Callable[[Sequence[str]], Found]
    ) -> None:
        """Sleep until ``notify`` was called, one of *queues* has a job, or the monotonic clock reaches *until*.
        With no *queues*, only ``notify`` and *until* end the sleep.

        Returns immediately if the number of notifications is not *notifications* any more. *poll* queries the queues of
        all waiting consumers. The calling thread calls *poll* if no other thread polls already. If *poll* raises an
        error, this method raises it, and another consumer polls from then on.
        """
        waiter = _Waiter(queues)
        with self._lock:
            if self.notifications != notifications:
                return
            self._waiters.append(waiter)
        try:
            self._wait(waiter, until, poll)
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                if self._polling_waiter is waiter:
                    self._polling_waiter = None
                if self._polling_waiter is None and self._waiters:
                    # the waiting consumer returns, calls this method again, and polls for all consumers
                    self._waiters[0].wake()

    def _wait(self, waiter: _Waiter, until: float, poll: Callable[[Sequence[str]], Found]) -> None:
        with self._lock:
            polls = self._polling_waiter is None
            if polls:
                self._polling_waiter = waiter
        if not polls:
            waiter.sleep(until - time.monotonic())
            return
        changes_in = self.pause.longest
        while not waiter.sleep(min(self.pause.next(), changes_in, until - time.monotonic())):
            if time.monotonic() >= until:
                return
            if not (queues := self._awaited_queues()):
                changes_in = self.pause.longest
                continue
            working, changes_in = poll(queues)
            if waiter in self._wake_waiters_of(working):
                return

    def _awaited_queues(self) -> list[str]:
        with self._lock:
            return list(dict.fromkeys(queue for waiter in self._waiters for queue in waiter.queues))

    def _wake_waiters_of(self, working: Collection[str]) -> list[_Waiter]:
        with self._lock:
            woken = [waiter for waiter in self._waiters if not set(working).isdisjoint(waiter.queues)]
            for waiter in woken:
                waiter.wake()
        return woken


class _Waiter:
    """A waiting consumer."""

    def __init__(self, queues: Sequence[str]) -> None:
        self.queues = queues
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._is_woken = False

    def wake(self) -> None:
        """Wake the consumer. A second call has no effect. The caller holds the poller's lock."""
        if not self._is_woken:
            self._is_woken = True
            self._wakeup.release()

    def sleep(self, seconds: float) -> bool:
        """Sleep. Returns whether the consumer was woken within *seconds*."""
        return seconds > 0 and self._wakeup.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
