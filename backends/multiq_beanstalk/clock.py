"""The clock that leases are measured by."""

from __future__ import annotations

import functools
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: seconds by a clock that also counts the time in which the machine is suspended, as the server's clock does; where a
#: system has no such clock, by the monotonic one
now = functools.partial(time.clock_gettime, _CLOCK)
