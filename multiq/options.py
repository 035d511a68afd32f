"""Checks of what callers pass beside a body: delays, points in time, priorities, ttrs, states."""

from __future__ import annotations

import datetime as dt
import math
from typing import TYPE_CHECKING, Any

from .backend import DELAY_MAX, PRIORITY_MAX, STORED_STATES, TTR_MIN, State
from .errors import OptionInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_delay(delay: float | dt.timedelta | None, at: dt.datetime | None = None) -> float:
    """Seconds from now: *delay* itself, or until *at*, a datetime with a zone (one in the past is now)."""
    if at is not None:
        if delay is not None:
            raise OptionInvalid("delay and at were both given: a job has one due time, give one of them")
        return _until(at)
    if delay is None:
        return 0.0
    seconds = delay.total_seconds() if isinstance(delay, dt.timedelta) else _number(delay, "delay")
    if not 0 <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"delay={delay!r} is out of range: seconds from 0 (now) to {DELAY_MAX:.0f} (a century)")
    return seconds


def check_priority(priority: int) -> int:
    """A whole number from 0 (first) to 2**32 - 1 (last)."""
    if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
        raise OptionInvalid(
            f"priority={priority!r} is out of range: a whole number from 0 (first) to {PRIORITY_MAX} (last)"
        )
    return priority


def check_ttr(ttr: float) -> float:
    """Seconds that a reservation lasts without a touch, 1 or more."""
    seconds = _number(ttr, "ttr")
    if not TTR_MIN <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"ttr={ttr!r} is out of range: seconds from {TTR_MIN:g} up")
    return seconds


def check_timeout(timeout: float, name: str = "timeout") -> float:
    """Seconds to wait, 0 or more."""
    seconds = _number(timeout, name)
    if not 0 <= seconds <= DELAY_MAX:
        raise OptionInvalid(f"{name}={timeout!r} is out of range: seconds from 0 up")
    return seconds


def check_count(count: int, name: str, *, least: int = 1) -> int:
    """A whole number of *least* or more."""
    if type(count) is not int or count < least:
        raise OptionInvalid(f"{name}={count!r} is out of range: a whole number from {least} up")
    return count


def check_state(state: str) -> State:
    """One of the four stored states, by name."""
    if state in STORED_STATES:
        return State(state)
    raise OptionInvalid(f"{state!r} is no state of a job: {', '.join(STORED_STATES)}")


def check_states(states: Sequence[str] | str) -> list[State]:
    """States, from one name or several."""
    return [check_state(state) for state in ([states] if isinstance(states, str) else states)]


def check_reason(reason: str | None) -> str | None:
    """The text kept with a released or buried job, cut to what a person reads."""
    if reason is None:
        return None
    # an unpaired surrogate from a broken exception text would not survive UTF-8
    text = str(reason).encode("utf-8", "replace").decode()
    return text if len(text) <= REASON_MAX else text[: REASON_MAX - 3] + "..."


REASON_MAX = 2000  # characters


def _until(at: dt.datetime) -> float:
    if not isinstance(at, dt.datetime):
        raise OptionInvalid(f"at={at!r} is no point in time: give a datetime with a zone")
    if at.tzinfo is None or at.utcoffset() is None:
        raise OptionInvalid(
            f"at={at!r} has no time zone, so it names no moment: use datetime.now(timezone.utc) + ..., or .astimezone()"
        )
    seconds = (at - dt.datetime.now(dt.UTC)).total_seconds()
    if seconds > DELAY_MAX:
        raise OptionInvalid(f"at={at!r} is more than a century away")
    return max(0.0, seconds)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise OptionInvalid(f"{name}={value!r} is no number of seconds")
    return float(value)
