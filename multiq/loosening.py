"""A job's own limits beside its task's limits: the stricter value applies, unless the task has ``loosen=True``.

The limits are *max_attempts*, *max_crashes*, *retry_for* and *timeout*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import OptionInvalid
from .retry import RetryPolicy, tighter

if TYPE_CHECKING:
    from .envelope import Envelope
    from .task import Task


def refuse_looser(task: Task[..., Any], **asked: float | None) -> None:
    """Raise ``OptionInvalid`` for limits that are looser than the task's limits."""
    own = {
        "max_attempts": task.policy.attempts(),
        "max_crashes": task.policy.max_crashes,
        "timeout": task.timeout,
    }
    for name, value in asked.items():
        limit = task.policy.retry_for if name == "retry_for" else own[name] or None
        if value is None or limit is None or (value <= limit and (value or name == "retry_for")):
            continue
        raise OptionInvalid(
            f"{name} must be at most {limit:g}, the limit of task {task.name}, got {value:g}: register the task "
            "with a looser limit, or with loosen=True, which allows jobs to have looser limits than the task"
        )


def bounded_policy(own: RetryPolicy, envelope: Envelope, *, loosen: bool) -> RetryPolicy:
    """Return the retry policy of a job with limits of its own. *own*: the policy of the task."""
    asked = RetryPolicy(
        max_attempts=own.max_attempts if envelope.max_attempts is None else envelope.max_attempts,
        max_crashes=own.max_crashes if envelope.max_crashes is None else envelope.max_crashes,
        retry_for=own.retry_for if envelope.retry_for is None else envelope.retry_for,
        backoff=own.backoff,
    )
    return asked if loosen else own.bounded(asked)


def bounded_timeout(own: float | None, asked: float, *, loosen: bool) -> float | None:
    """Return the timeout of a job with a timeout of its own. *own*: the timeout of the task."""
    return asked if loosen else tighter(own or 0.0, asked)
