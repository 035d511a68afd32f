"""How long to wait before the next attempt: functions from the attempt that failed (1-based) to seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from .backend import DELAY_MAX
from .errors import OptionInvalid
from .options import shown

Backoff: TypeAlias = Callable[[int], float]


def fixed(seconds: float) -> Backoff:
    """Always the same."""
    _check(seconds, "fixed")
    return lambda _attempt: seconds


def exponential(base: float = 2, cap: float = 3600, *, first: float = 1, jitter: float = 0.5) -> Backoff:
    """``first`` seconds after attempt 1, then times ``base`` each time, never more than ``cap``.

    Up to the share ``jitter`` of it is taken off at random, so that what failed together does not return together.
    """
    for name, value in (("base", base), ("cap", cap), ("first", first)):
        _check(value, name)
    if base < 1:
        raise OptionInvalid(f"base={base!r} would make the waits shorter and shorter: give 1 or more")
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise OptionInvalid(f"jitter={shown(jitter)} must be a share from 0 to 1")

    def wait(attempt: int) -> float:
        try:
            growth = float(base) ** (attempt - 1)
        except OverflowError:
            growth = _HUGE
        return min(cap, first * growth) * (1 - jitter * random.random())  # noqa: S311 - spreads load, guards nothing

    return wait


def steps(*seconds: float) -> Backoff:
    """One number for each attempt; the last one holds for all that follow."""
    if not seconds:
        raise OptionInvalid("an empty list is no backoff: give at least one number of seconds")
    for value in seconds:
        _check(value, "backoff")
    return lambda attempt: seconds[min(attempt, len(seconds)) - 1]


def to_backoff(value: Backoff | Sequence[float] | float) -> Backoff:
    """A number, a list of numbers or a function, as a function."""
    if callable(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return steps(*value)
    _check(value, "backoff")
    return fixed(value)  # type: ignore[arg-type]  # checked


_HUGE = 1e300  # times any number of seconds, still a number


def _check(value: object, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= DELAY_MAX:
        raise OptionInvalid(
            f"{name}={shown(value)} is no backoff: give seconds >= 0, a list of them, or a function of the attempt"
        )


DEFAULT: Backoff = exponential()
