"""Guards methods that parse a server's replies: a malformed reply raises ``BackendUnavailable``, not ``IndexError``."""

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

PARSE_ERRORS: tuple[type[Exception], ...] = (
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
"""What parsing code raises for a reply of an unexpected shape."""

BACKEND_METHODS = (
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
"""The methods of a ``Backend`` that parse replies."""


def guarded(*methods: str, server: str, also: tuple[type[Exception], ...] = ()) -> Callable[[_C], _C]:
    """A class decorator: *methods* raise ``BackendUnavailable`` for replies that *server* ("a Redis") cannot have sent.

    *also*: a client library's errors that mean the same. After such a reply, the next one on the connection may belong
    to an earlier request. So a class that keeps connections has a method ``_discard_connections``, which closes them.
    """

    def guard(cls: _C) -> _C:
        for name in methods:
            setattr(cls, name, _guarded(getattr(cls, name), server, (*PARSE_ERRORS, *also)))
        return cls

    return guard


def _guarded(method: Callable[..., Any], server: str, parse_errors: tuple[type[Exception], ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except MultiqError:
            raise
        except parse_errors as exc:
            with contextlib.suppress(Exception):
                self._discard_connections()
            what = str(exc)[:200]
            raise BackendUnavailable(
                f"the server's reply cannot be parsed ({type(exc).__name__}: {what}): check that it is {server}, "
                "and that no proxy in between changes its replies"
            ) from exc

    return call
