"""The signature by which the arguments of a task of Django's are checked, and the order of priorities."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MIDDLE = 1024
_STEP = 10


def plain_signature(function: Callable[..., Any], *, takes_context: bool) -> inspect.Signature:
    """Return the signature of a task without its context and without annotations, because Django does not convert JSON
    by annotations."""
    parameters = list(inspect.signature(function).parameters.values())[int(takes_context) :]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])


def to_priority(priority: int) -> int:
    """Return multiq's priority for a Django priority. With multiq, the smallest number goes first. With Django,
    priorities are from -100 to 100, and 100 goes first."""
    return _MIDDLE - _STEP * int(priority)


def from_priority(priority: int) -> int:
    """Return the Django priority for a priority of multiq's."""
    return max(-100, min(100, round((_MIDDLE - priority) / _STEP)))
