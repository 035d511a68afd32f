"""How often an outage is logged: at once, then at growing intervals, and once more when it is over."""

from __future__ import annotations

import time

_FIRST_SILENCE = 5.0  # seconds between the first line and the second, doubling...
_LONGEST_SILENCE = 600.0  # ...up to this
_MOST_KINDS = 8  # different errors of one outage, each of which is logged at once


class Outage:
    """The outages of one kind of call in one process, one after another."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the outage: it is over, or none has begun."""
        self.failures = 0
        self._began_at = 0.0
        self._silent_until = 0.0
        self._silence = _FIRST_SILENCE
        self._kinds: set[str] = set()

    @property
    def duration(self) -> float:
        """Seconds since the first failure; 0.0 without one."""
        return time.monotonic() - self._began_at if self.failures else 0.0

    def should_log(self, error: str) -> bool:
        """Note a failure. Returns whether to log it.

        A failure is logged if it is the first, or of a new kind, or if the interval since the last line is over.
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
