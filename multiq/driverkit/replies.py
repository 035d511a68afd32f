"""For drivers: what a server answers may be anything, and what cannot be understood is an error of multiq's."""

from __future__ import annotations

import contextlib
import functools
import struct
from typing import TYPE_CHECKING, TypeVar

import msgspec

from multiq.errors import BackendUnavailable, MultiqError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_C = TypeVar("_C", bound=type)

MISREAD: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    msgspec.MsgspecError,
    struct.error,
)
"""What code stumbles over that reads a reply of another shape than it expects."""

BACKEND_VERBS = (
    "enqueue",
    "peek",
    "jobs",
    "delete",
    "reschedule",
    "kick",
    "kick_job",
    "queues",
    "stats",
    "pause",
    "resume",
    "purge",
    "doctor",
)
"""What of a ``Backend`` reads replies."""


def guarded(*verbs: str, server: str, more: tuple[type[Exception], ...] = ()) -> Callable[[_C], _C]:
    """A class whose *verbs* raise ``BackendUnavailable`` for a reply that *server*, "a Redis", would not give.

    *more*: a client library's errors that mean the same. The connections may be out of step then: a class that
    keeps any drops them in a method ``_out_of_step``.
    """

    def guard(cls: _C) -> _C:
        for verb in verbs:
            setattr(cls, verb, _guarded(getattr(cls, verb), server, (*MISREAD, *more)))
        return cls

    return guard


def _guarded(verb: Callable[..., Any], server: str, misread: tuple[type[Exception], ...]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(self, *args, **kwargs)
        except MultiqError:
            raise
        except misread as exc:
            with contextlib.suppress(Exception):
                self._out_of_step()
            what = str(exc)[:200]
            raise BackendUnavailable(
                f"the server's answer cannot be understood ({type(exc).__name__}: {what}): is it {server}, and does "
                "nothing between here and there change what it says?"
            ) from exc

    return call
