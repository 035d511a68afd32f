"""The clock that leases are measured by."""

from __future__ import annotations

import functools
import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

#: seconds by a clock that counts suspended time, where there is one, as the server's does
now = functools.partial(time.clock_gettime, _CLOCK)
