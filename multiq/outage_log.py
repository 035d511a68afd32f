"""Logs outages. The first failure is logged immediately, and later failures are logged at growing intervals."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .events import BackendDown, BackendUp

_FIRST_SILENCE = 5.0  # seconds between the first and the second log line; the interval doubles after each line
_LONGEST_SILENCE = 600.0  # the longest interval, in seconds
_MOST_KINDS = 8  # the number of different errors of one outage that are logged without waiting for the interval's end


class OutageLog:
    """Logs the lines ``down`` and ``up``, for the periods in which a worker cannot reach the backend.

    *write* writes a line. Its arguments are the level, the event, and additional fields.
    """

    def __init__(self, write: Callable[[int, BackendDown | BackendUp, dict[str, Any]], None]) -> None:
        self._write = write
        self._outages: defaultdict[str, Outage] = defaultdict(Outage)

    def went_down(self, event: BackendDown) -> None:
        outage = self._outages[event.worker]
        if outage.should_log(str(event.error)):
            since = {"down_for": outage.duration, "tries": outage.failures} if outage.failures > 1 else {}
            self._write(logging.ERROR, event, since)

    def came_back(self, event: BackendUp) -> None:
        outage = self._outages.pop(event.worker, None)
        since = {} if outage is None else {"was_down_for": outage.duration, "tries": outage.failures}
        self._write(logging.WARNING, event, since)


class Outage:
    """Tracks the outages of one kind of call in one process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state, because the outage is over."""
        self.failures = 0
        self._began_at = 0.0
        self._silent_until = 0.0
        self._silence = _FIRST_SILENCE
        self._kinds: set[str] = set()

    @property
    def duration(self) -> float:
        """Seconds since the first failure, or 0.0 if there was no failure."""
        return time.monotonic() - self._began_at if self.failures else 0.0

    def should_log(self, error: str) -> bool:
        """Count a failure. Returns whether the failure must be logged.

        The first failure and failures with a new error are logged. Failures with a known error are logged once per
        interval.
        """
        now = time.monotonic()
        self.failures += 1
        if self.failures == 1:
            self._began_at = now
            self._silent_until = now + self._silence
        if error not in self._kinds and len(self._kinds) < _MOST_KINDS:
            self._kinds.add(error)
            return True
        if now < self._silent_until:
            return False
        self._silence = min(2 * self._silence, _LONGEST_SILENCE)
        self._silent_until = now + self._silence
        return True
