"""The decorator that gives a task of Django's the options that only multiq has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from multiq.errors import ArgumentsInvalid, OptionInvalid
from multiq.formatting import shown
from multiq.registry import make_task

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_ATTRIBUTE = "_multiq_task_options"

NAMES = (
    "ttr", "timeout", "max_attempts", "max_crashes", "retry_for", "retry_on", "bury_on", "expires", "backoff", "keep",
)  # fmt: skip
"""The options of ``App.task`` that a task of Django's may have."""

_DJANGOS = {"queue": "@task(queue_name=...)", "priority": "@task(priority=...)", "delay": "task.using(run_after=...)"}


def task_options(**options: Any) -> Callable[[F], F]:
    """Set multiq's options for a task, below Django's decorator ``@task``: ``@task_options(max_attempts=5)``.

    The options are *ttr*, *timeout*, *max_attempts*, *max_crashes*, *retry_for*, *retry_on*, *bury_on*, *expires*,
    *backoff* and *keep*, as for ``App.task``. With another backend, these options have no effect. Raises
    ``OptionInvalid``.
    """
    check_options(options)

    def decorate(function: F) -> F:
        if not callable(function) or not hasattr(function, "__dict__") or hasattr(function, "module_path"):
            raise ArgumentsInvalid(
                f"@task_options must decorate a function, below Django's @task, got {shown(function)}"
            )
        setattr(function, _ATTRIBUTE, {**options_of(function), **options})
        return function

    return decorate


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what ``task_options`` has set."""
    found: dict[str, Any] = getattr(function, _ATTRIBUTE, {})
    return found


def check_options(options: dict[str, Any]) -> None:
    """Raise ``OptionInvalid`` for an option that does not exist, or whose value is wrong."""
    for name, value in options.items():
        if name not in NAMES:
            hint = f"use {_DJANGOS[name]}" if name in _DJANGOS else f"there are: {', '.join(NAMES)}"
            raise OptionInvalid(f"unknown task option {name}={shown(value)}: {hint}")
    make_task(None, check_options, name="checked", **options)
