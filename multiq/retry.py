"""Decides whether a job may start, and what happens after a failure.

A backoff is a function that takes the number of the failed attempt and returns seconds. The first attempt has the
number 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from .backend import DELAY_MAX, Bury, Lease, Release
from .errors import OptionInvalid
from .formatting import shown
from .validation import check_delay, check_reason

if TYPE_CHECKING:
    import datetime as dt

Backoff: TypeAlias = Callable[[int], float]


def fixed(seconds: float) -> Backoff:
    """Return a backoff that waits for *seconds* after each attempt."""
    _check(seconds, "fixed")
    return lambda _attempt: seconds


def exponential(base: float = 2, cap: float = 3600, *, first: float = 1, jitter: float = 0.5) -> Backoff:
    """Return a backoff that waits ``first`` seconds after attempt 1.

    Each further attempt multiplies the wait by ``base``. The wait is at most ``cap`` seconds. Each wait is shortened by
    a random share of at most ``jitter``. Because of the random share, jobs that failed together are not retried
    together.
    """
    for name, value in (("base", base), ("cap", cap), ("first", first)):
        _check(value, name)
    if base < 1:
        raise OptionInvalid(f"base must be 1 or more, got {base!r}: with a smaller base the waits would shrink")
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
        raise OptionInvalid(f"jitter must be a share from 0 to 1, got {shown(jitter)}")

    def wait(attempt: int) -> float:
        try:
            growth = float(base) ** (attempt - 1)
        except OverflowError:
            growth = _HUGE
        return min(cap, first * growth) * (1 - jitter * random.random())  # noqa: S311 - not for security

    return wait


def steps(*seconds: float) -> Backoff:
    """Return a backoff with one wait for each attempt. The last wait applies to all later attempts."""
    if not seconds:
        raise OptionInvalid("a list of backoffs must have at least one number of seconds, got an empty one")
    for value in seconds:
        _check(value, "backoff")
    return lambda attempt: seconds[min(attempt, len(seconds)) - 1]


def to_backoff(value: Backoff | Sequence[float] | float) -> Backoff:
    """Convert a number, a list of numbers or a function to a backoff."""
    if callable(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return steps(*value)
    _check(value, "backoff")
    return fixed(value)  # type: ignore[arg-type]  # checked


_HUGE = 1e300  # so small that its product with any allowed number of seconds is finite


def _check(value: object, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= DELAY_MAX:
        raise OptionInvalid(
            f"{name} must be seconds >= 0, a list of them, or a function of the attempt, got {shown(value)}"
        )


DEFAULT: Backoff = exponential()

MAX_ATTEMPTS_DEFAULT = 5
MAX_CRASHES_DEFAULT = 3


class ReleaseJob(Exception):
    """Raise ``ReleaseJob`` in a task to retry the job after *delay*. The run that raises ``ReleaseJob`` counts as an
    attempt.

    *delay*: seconds or a timedelta. With None, the task's backoff decides. An invalid *delay* raises ``OptionInvalid``,
    and the attempt fails as with any other error.
    """

    def __init__(self, delay: float | dt.timedelta | None = None, reason: str | None = None) -> None:
        self.delay = None if delay is None else check_delay(delay)
        self.reason = reason
        super().__init__(reason or "released by the task")


class BuryJob(Exception):
    """Raise ``BuryJob`` in a task to bury the job now, because no retry can help."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Snooze(Exception):
    """Raise ``Snooze`` in a task if the job cannot run now. The job runs again after *delay*, and the run is not a
    failure.

    Only a backend without the capability ``give_back`` counts a snoozed run as an attempt. A snooze itself never buries
    the job. A failure after a snooze buries the job if the backend's count of attempts has reached ``max_attempts``.

    *delay*: seconds or a timedelta. An invalid *delay* raises ``OptionInvalid``, and the attempt fails as with any
    other error.
    """

    def __init__(self, delay: float | dt.timedelta, reason: str | None = None) -> None:
        if delay is None:  # no default: with a default of 0, the job would run again and again without a pause
            raise OptionInvalid("delay must be a number of seconds, or a timedelta, got None")
        self.delay = check_delay(delay)
        self.reason = reason
        super().__init__(reason or "snoozed by the task")


_N = TypeVar("_N", int, float)


class SoftTimeout(TimeoutError):
    """The error that is raised in a task's code when the task's ``timeout`` is over. A task that timed out may clean
    up, and should then end.

    If the task does not catch ``SoftTimeout``, the attempt fails as with any other error. If the task still runs
    ``kill_after`` seconds after its timeout, its process is ended.
    """

    def __init__(self, message: str = "the task ran longer than its timeout") -> None:
        super().__init__(message)


def tighter(one: _N, other: _N) -> _N:
    """Return the stricter of two limits, where 0 means no limit."""
    return min(one, other) if one and other else one or other


class RetryPolicy(msgspec.Struct, frozen=True):
    """The limits of a job's retries. Each kick of the job raises its ``max_attempts`` and ``max_crashes`` by one."""

    max_attempts: int | None = None
    """The largest number of attempts. 0: no limit. None means 5 attempts, or no limit if ``retry_for`` is set."""
    max_crashes: int = MAX_CRASHES_DEFAULT
    """The largest number of runs that ended by a crash, a kill or a lost lease. After ``max_crashes`` crashed runs, the
    job does not start again. 0: no limit."""
    retry_for: float | None = None
    """The number of seconds after a job's enqueue in which the job is retried. None: no limit."""
    backoff: Backoff = DEFAULT

    def bounded(self, other: RetryPolicy) -> RetryPolicy:
        """Return a policy with the stricter limits of both policies, and with this policy's backoff."""
        times = [seconds for seconds in (self.retry_for, other.retry_for) if seconds is not None]
        return RetryPolicy(
            max_attempts=tighter(self.attempts(), other.attempts()),
            max_crashes=tighter(self.max_crashes, other.max_crashes),
            retry_for=min(times, default=None),
            backoff=self.backoff,
        )

    def refuse(self, lease: Lease, *, counts_given_back: bool = False) -> str | None:
        """Return the reason why the job must not start, or None if the job may start.

        *counts_given_back*: whether the store also counts reservations that were given back before the job started.
        With *counts_given_back*, the number of attempts that started is unknown. A job that has never started must not
        be refused, so ``refuse`` counts only crashed attempts. ``after_failure`` compares the store's count with the
        limit.
        """
        attempt = lease.crashes + 1 if counts_given_back else lease.attempt
        if self.max_crashes and lease.crashes >= self.max_crashes + lease.kicks:
            return (
                f"poison: attempt {lease.attempt} did not begin, as {lease.crashes} before it ended without a verdict "
                "(crash, kill, or lease too short)"
            )
        limit = self.attempts()
        if limit and attempt > limit + lease.kicks:
            return f"attempts exhausted: attempt {lease.attempt} did not begin, as {limit} are allowed"
        if self.retry_for is not None and attempt > 1 and lease.age > self.retry_for and not lease.kicks:
            return f"too late: enqueued {lease.age:.0f} s ago, retried for {self.retry_for:g} s"
        return None

    def after_failure(
        self, lease: Lease, reason: str, delay: float | None = None, *, longest: float | None = None
    ) -> Release | Bury:
        """Return the verdict after a failed attempt, which is a release, or a bury if a limit is reached.

        *delay*: the delay in seconds, or None if the backoff decides. *longest*: the longest delay in seconds, or None
        for a century.
        """
        limit = self.attempts()
        if limit and lease.attempt >= limit + lease.kicks:
            return Bury(lease, check_reason(reason))
        # a user's backoff function may return any number
        wait = min(
            DELAY_MAX if longest is None else longest,
            max(0.0, float(self.backoff(lease.attempt) if delay is None else delay)),
        )
        if self.retry_for is not None and lease.age + wait > self.retry_for:
            return Bury(lease, check_reason(reason))
        return Release(lease, wait, reason=check_reason(reason))

    def attempts(self) -> int:
        """Return the largest number of attempts, or 0 for no limit."""
        if self.max_attempts is not None:
            return self.max_attempts
        return 0 if self.retry_for is not None else MAX_ATTEMPTS_DEFAULT


class ErrorRules(msgspec.Struct, frozen=True):
    """The rules that decide which errors of a task bury its job without a retry."""

    retry_on: tuple[type[BaseException], ...] | None = None
    """Errors that are retried. Any other error buries the job. None means that every error is retried."""
    bury_on: tuple[type[BaseException], ...] = ()

    def buries(self, error: BaseException) -> bool:
        """Whether the error buries the job.

        If the error is an instance of several classes in ``retry_on`` and ``bury_on``, the most specific class decides.
        Classes are equally specific if no class is a subclass of another class. Among equally specific classes, a class
        in ``bury_on`` decides.
        """
        kinds = type(error).__mro__
        named = [kind for kind in kinds if kind in self.bury_on or kind in (self.retry_on or ())]
        nearest = [kind for kind in named if not any(other is not kind and kind in other.__mro__ for other in named)]
        if nearest:
            return any(kind in self.bury_on for kind in nearest)
        return self.retry_on is not None


def to_error_rules(retry_on: object, bury_on: object) -> ErrorRules | None:
    """Return the rules for a task's *retry_on* and *bury_on*, or None if both are None. Raises ``OptionInvalid``."""
    if retry_on is None and bury_on is None:
        return None
    retried = None if retry_on is None else _error_classes(retry_on, "retry_on")
    buried = () if bury_on is None else _error_classes(bury_on, "bury_on")
    for kind in retried or ():
        if kind in buried:
            raise OptionInvalid(f"retry_on and bury_on must not have the same class, got {kind.__qualname__} in both")
    return ErrorRules(retried, buried)


_DECIDING = (BuryJob, ReleaseJob, Snooze)


def _error_classes(value: object, name: str) -> tuple[type[BaseException], ...]:
    kinds = tuple(value) if isinstance(value, tuple | list | set | frozenset) else (value,)
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, BaseException):
            raise OptionInvalid(f"{name} must be an exception class, or a tuple of them, got {shown(kind)}")
        if issubclass(kind, _DECIDING):
            raise OptionInvalid(
                f"{name} must not have {kind.__qualname__}: a task that raises it has decided about its job already"
            )
    return kinds
