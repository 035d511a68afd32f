"""Checks the arguments of callers, such as names, delays, priorities and ids.

Names of queues and tasks need no escaping in a beanstalkd command, a Redis hash tag, an SQL value, a URL or a shell.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from typing import TYPE_CHECKING, Any

from .backend import DELAY_MAX, PRIORITY_MAX, TTR_MIN
from .errors import ArgumentsInvalid, NameInvalid, OptionInvalid
from .formatting import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNT_MAX = 2**31 - 1
REASON_MAX = 2000  # characters

NAME_RULE = "1 to 128 letters, digits, '_', '.' or '-' (ASCII), beginning with a letter, digit or '_'"

APP_SCOPE = "@app"
"""The name that stands for a queue in limits with ``scope="app"``. No queue can have the name ``@app``."""

KEPT_QUEUES = frozenset(
    {"multiq.down", "multiq.restart", *(f"multiq.roll-call.{number}" for number in range(1, 5))}
    | {"multiq.cancel", "multiq.flows", "multiq.schedules"}
)
"""The queues of control flags, and the homes of multiq's notes. A delayed job in ``multiq.down`` would stop all
workers."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_known: set[str] = set()  # valid names, which are cached because every enqueue checks a name
_KNOWN_AT_MOST = 10_000


def check_name(name: object, kind: str = "queue") -> str:
    """Return *name* if it is a valid name. If *name* is not valid, raise ``NameInvalid``. *kind*: the kind of thing
    that has the name, such as a queue."""
    if type(name) is str:
        if name in _known:
            return name
        if _NAME.fullmatch(name):
            if len(_known) < _KNOWN_AT_MOST:
                _known.add(name)
            return name
    shown = ascii(name)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    raise NameInvalid(f"a {kind} name must have {NAME_RULE}, got {shown}")


def check_queue(name: object) -> str:
    """Return *name* if it is a valid name of a queue for jobs. If *name* is not valid, raise ``NameInvalid``."""
    queue = check_name(name)
    if queue in KEPT_QUEUES:
        raise NameInvalid(f"a queue for jobs must have another name: multiq keeps {queue!r} for itself")
    return queue


def check_delay(delay: float | dt.timedelta | None, at: dt.datetime | None = None, *, name: str = "delay") -> float:
    """Return *delay* in seconds, or the seconds until *at*, which is a datetime with a time zone. If *at* is in the
    past, return 0."""
    if at is not None:
        if delay is not None:
            raise OptionInvalid("delay and at must not both be given: a job has one due time")
        return _until(at)
    if delay is None:
        return 0.0
    seconds = delay.total_seconds() if isinstance(delay, dt.timedelta) else _number(delay, name)
    if not 0 <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"{name} must be from 0 (now) to {DELAY_MAX:.0f} seconds (a century), got {shown(delay)}")
    return seconds


def check_priority(priority: int) -> int:
    """Return *priority*. Raises ``OptionInvalid`` if *priority* is not a whole number from 0 (first) to 2**32 - 1
    (last)."""
    number = priority if type(priority) is int else _whole(priority)
    if number is None or not 0 <= number <= PRIORITY_MAX:
        raise OptionInvalid(
            f"priority must be a whole number from 0 (first) to {PRIORITY_MAX} (last), got {shown(priority)}"
        )
    return number


def check_ttr(ttr: float) -> float:
    """Return *ttr*. Raises ``OptionInvalid`` if *ttr* is not a number of seconds of at least 1."""
    seconds = _number(ttr, "ttr")
    if not TTR_MIN <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"ttr must be {TTR_MIN:g} second or more, got {shown(ttr)}")
    return seconds


def check_timeout(timeout: float, name: str = "timeout") -> float:
    """Return *timeout*. Raises ``OptionInvalid`` if *timeout* is not a number of seconds of at least 0."""
    seconds = _number(timeout, name)
    if seconds > DELAY_MAX:
        raise OptionInvalid(f"{name} must be at most {DELAY_MAX:.0f} seconds (a century), got {shown(timeout)}")
    if seconds < 0:
        raise OptionInvalid(f"{name} must be 0 seconds or more, got {shown(timeout)}")
    return seconds


def check_keep(keep: float | dt.timedelta | None) -> float:
    """Return *keep* in seconds. None becomes 0, which means that no outcome is kept."""
    if keep is None:
        return 0.0
    seconds = keep.total_seconds() if isinstance(keep, dt.timedelta) else _number(keep, "keep")
    if not 0 <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"keep must be from 0 (not kept) to {DELAY_MAX:.0f} seconds (a century), got {shown(keep)}")
    return seconds


def check_expires(expires: float | dt.timedelta) -> float:
    """Return *expires* in seconds, where 0 means no limit. Raises ``OptionInvalid``."""
    return check_timeout(expires.total_seconds() if isinstance(expires, dt.timedelta) else expires, "expires")


def check_count(count: int, name: str, *, least: int = 1) -> int:
    """Return *count*. Raises ``OptionInvalid`` if *count* is not a whole number from *least* to ``COUNT_MAX``."""
    number = _whole(count)
    if number is None or not least <= number <= COUNT_MAX:
        raise OptionInvalid(f"{name} must be a whole number from {least} to {COUNT_MAX}, got {shown(count)}")
    return number


def check_cursor(after: str | None) -> str | None:
    """Return the cursor of a listing, which is the ``after`` of the previous page."""
    if after is not None and not isinstance(after, str):
        raise OptionInvalid(
            f"after must be the cursor that the previous page returned as its after, got {shown(after)}"
        )
    return after


def check_reason(reason: str | None) -> str | None:
    """Cut the reason that a store keeps with a job to ``REASON_MAX`` characters."""
    if reason is None:
        return None
    # the text of an exception may have an unpaired surrogate, which UTF-8 cannot encode
    text = str(reason).encode("utf-8", "replace").decode()
    return text if len(text) <= REASON_MAX else text[: REASON_MAX - 3] + "..."


def _until(at: dt.datetime) -> float:
    if not isinstance(at, dt.datetime):
        raise OptionInvalid(f"at must be a datetime with a time zone, got {shown(at)}")
    if at.tzinfo is None or at.utcoffset() is None:
        raise OptionInvalid(
            f"at must have a time zone, got {at!r}: use datetime.now(timezone.utc) + ..., or .astimezone()"
        )
    seconds = (at - dt.datetime.now(dt.UTC)).total_seconds()
    if seconds > DELAY_MAX:
        raise OptionInvalid(f"at must be within a century, got {at!r}")
    return max(0.0, seconds)


def _number(value: Any, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # the int is larger than the largest float
            seconds = math.inf
        if math.isfinite(seconds):
            return seconds
    raise OptionInvalid(f"{name} must be a number of seconds, got {shown(value)}")


def _whole(value: Any) -> int | None:
    """Return *value* as a plain int, or None if *value* is not a whole number. An IntEnum is converted to an int."""
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def check_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of a job's headers. Raises ``ArgumentsInvalid``."""
    if not headers:
        return {}
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ArgumentsInvalid(f"headers must be strings by name, got {shown(name)}: {shown(value)}")
    return dict(headers)
