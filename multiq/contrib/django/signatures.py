"""The signature by which the arguments of a task of Django's are checked."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def plain_signature(function: Callable[..., Any], *, takes_context: bool) -> inspect.Signature:
    """Return the signature of a task without its context and without annotations, because Django does not convert JSON
    by annotations."""
    parameters = list(inspect.signature(function).parameters.values())[int(takes_context) :]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])
