"""``multiq.driverkit.replies.guarded`` for this driver."""

from __future__ import annotations

import functools

import hiredis

from multiq.driverkit.replies import guarded as _guarded

guarded = functools.partial(_guarded, server="a Redis", also=(hiredis.HiredisError, StopIteration))
