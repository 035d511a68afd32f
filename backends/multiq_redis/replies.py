"""What a server answers may be anything: what cannot be understood is an error of multiq's."""

from __future__ import annotations

import functools

import hiredis

from multiq.driverkit.replies import guarded as _guarded

guarded = functools.partial(_guarded, server="a Redis", more=(hiredis.HiredisError,))
"""``multiq.driverkit.replies.guarded`` for this driver."""
