"""The pauses between two attempts of a worker process to reach a backend that does not answer, and their events."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from multiq.events import BackendDown, BackendUp

if TYPE_CHECKING:
    from collections import deque

    from multiq.errors import BackendError
    from multiq.events import Event

_FIRST_PAUSE = 0.1  # seconds between two attempts to reach a backend that is down; doubles with each failure
LONGEST_PAUSE = 0.5  # the maximum of this pause, so that work continues within a second after an outage


class BackendBackoff:
    """Counts the failed calls of one consumer. The fetcher calls the methods under its lock.

    *events*: gets the events ``BackendDown`` and ``BackendUp`` of *worker*.
    """

    def __init__(self, worker: str, events: deque[Event]) -> None:
        self._worker = worker
        self._events = events
        self.is_down = False
        """Whether the last call did not reach the backend."""
        self.is_partial = False
        """Whether only a part of the backend is down."""
        self.last_failure: BackendError | None = None
        self.retry_at = 0.0
        """The monotonic time of the next attempt."""
        self._failures = 0

    def left(self) -> float:
        """Return the seconds until the next attempt. 0: the backend is not down, or the next attempt is due."""
        return max(0.0, self.retry_at - time.monotonic()) if self.is_down else 0.0

    def failed(self, failure: BackendError) -> float:
        """Record a failed call. Returns the seconds until the next attempt.

        The seconds grow with each failure. Jitter spreads the attempts of many workers.
        """
        longest = min(LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self._failures)
        pause = longest * (1 - random.random() / 2)  # noqa: S311 - spreads load, guards nothing
        self._failures = min(self._failures + 1, 20)
        self.is_down, self.is_partial, self.last_failure = True, failure.is_partial, failure
        self.retry_at = time.monotonic() + pause
        self._events.append(BackendDown(worker=self._worker, error=failure, retry_in=pause))
        return pause

    def answered(self) -> None:
        """Record that the whole backend has answered."""
        self._failures = 0
        self.is_down = self.is_partial = False
        self._events.append(BackendUp(worker=self._worker))
