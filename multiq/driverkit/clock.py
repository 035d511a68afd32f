"""Clocks in integer nanoseconds, for drivers that keep the time themselves. Rounding never makes a job early."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

#: returns nanoseconds; ``time.time_ns`` and ``time.monotonic_ns`` are clocks
Clock: TypeAlias = Callable[[], int]

SECOND = 1_000_000_000  # nanoseconds


def nanoseconds(seconds: float) -> int:
    """Return *seconds* in nanoseconds, rounded up, so that a delay is never shorter than requested."""
    whole = int(seconds)
    return whole * SECOND - int(-(seconds - whole) * SECOND // 1)


class ManualClock:
    """A clock that moves only when ``advance`` is called, for tests and models that must not wait."""

    def __init__(self) -> None:
        self._now = 1_700_000_000 * SECOND
        self._lock = threading.Lock()  # two threads that move the clock at the same time must not move it back

    def __call__(self) -> int:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock by *seconds*. A negative number moves it back, as may happen on a real host."""
        with self._lock:
            self._now += nanoseconds(seconds)
