"""The lease timer: a thread that sends a no-op on the connection of an ended lease, as beanstalkd may miss its end.

The server's timer for a connection fires at the microsecond of a reservation's end. If the reservation is not quite
over then, the server does not set the timer again until the client sends something on the connection. On an idle
server that happens most of the time (issues 262 and 380, pull request 334 of beanstalkd; seen with 1.12).
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING

from multiq.driverkit.fork import forks

from .clock import now

if TYPE_CHECKING:
    from .leases import HeldLeases

#: seconds after the end of a lease, by the client's clock (a little before the server's), at which no-ops are sent
NOOP_DELAYS = (0.01, 0.1, 0.4, 0.9)

_RETRY_BUSY = 0.02  # seconds until a consumer that is in a call is checked again


class LeaseTimer:
    """Sleeps until the next unsettled lease ends. Its thread starts with the first lease."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._generation = forks.generation
        self._consumers: weakref.WeakSet[HeldLeases] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._next_at = math.inf
        self._is_running = False

    def schedule(self, held_leases: HeldLeases, ends_at: float) -> None:
        """Check this consumer's leases at *ends_at*, or before."""
        if self._generation != forks.generation:
            self._reset()  # a forked child has no copies of threads
        if held_leases in self._consumers and ends_at >= self._next_at:
            return
        with self._changed:
            self._consumers.add(held_leases)
            self._next_at = min(self._next_at, ends_at)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="multiq-beanstalk-lease-timer", daemon=True).start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                left = self._next_at - now()
                if left > 0:
                    self._changed.wait(None if left == math.inf else left)
                    continue
                self._next_at = math.inf
                consumers = list(self._consumers)
            next_at = min((self._check(held_leases) for held_leases in consumers), default=math.inf)
            del consumers
            with self._changed:
                self._next_at = min(self._next_at, next_at)

    def _check(self, held_leases: HeldLeases) -> float:
        """Send no-ops for leases that have ended. Returns when to check again."""
        if not held_leases.acquire(0):
            return now() + _RETRY_BUSY
        try:
            return held_leases.send_noops()
        finally:
            held_leases.release()


lease_timer = LeaseTimer()
