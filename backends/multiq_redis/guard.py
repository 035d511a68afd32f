"""What a server answers may be anything: what cannot be understood is an error of multiq's."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, TypeVar

import hiredis

from multiq.errors import BackendUnavailable, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_C = TypeVar("_C", bound=type)

_MISREAD = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    struct.error,
    hiredis.HiredisError,
)


def guarded(*verbs: str) -> Callable[[_C], _C]:
    """A class whose *verbs* raise no other errors than ``MultiqError`` for a reply that is not one of Redis'."""

    def guard(cls: _C) -> _C:
        for verb in verbs:
            setattr(cls, verb, _guarded(getattr(cls, verb)))
        return cls

    return guard


def _guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except MultiqError:
            raise
        except _MISREAD as exc:
            what = str(exc)[:200]
            raise BackendUnavailable(
                f"the server's answer cannot be understood ({type(exc).__name__}: {what}): is it a Redis, and does "
                "nothing between here and there change what it says?"
            ) from exc

    return call
