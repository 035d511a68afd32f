"""The clock that measures leases."""

from __future__ import annotations

import functools
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: Seconds by a clock that continues while the machine is suspended. The server's clock does the same. A system without
#: such a clock uses the monotonic clock.
now = functools.partial(time.clock_gettime, _CLOCK)
