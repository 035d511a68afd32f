"""The clock that leases are measured by."""

from __future__ import annotations

import functools
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: the time in seconds, by a clock that also counts the time in which the machine is suspended, as the server's clock
#: does; on a system without such a clock, by the monotonic clock
now = functools.partial(time.clock_gettime, _CLOCK)
