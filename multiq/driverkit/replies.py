"""Makes methods that parse replies raise ``BackendUnavailable`` for a malformed reply, instead of ``IndexError``."""

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
"""The errors that parsing code raises for a malformed reply."""

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
    "outcomes",
    "history",
    "forget",
    "doctor",
)
"""The methods of a ``Backend`` that parse replies."""


def guarded(*methods: str, server: str, also: tuple[type[Exception], ...] = ()) -> Callable[[_C], _C]:
    """Return a class decorator. It makes *methods* raise ``BackendUnavailable`` for malformed replies.

    *server* is the expected server, for the error message ("a Redis"). *also* has errors of a client library that mean
    a malformed reply. After a malformed reply, the next reply on the connection may belong to an earlier request. So a
    class that keeps connections needs a method ``_discard_connections`` that closes them.
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
            if _has_not_begun(exc, call):
                raise
            with contextlib.suppress(Exception):
                self._discard_connections()
            what = str(exc)[:200]
            raise BackendUnavailable(
                f"the server's reply cannot be parsed ({type(exc).__name__}: {what}): check that it is {server}, "
                "and that no proxy in between changes its replies"
            ) from exc

    return call


def _has_not_begun(exc: BaseException, call: Callable[..., Any]) -> bool:
    """Whether *call* has raised the error itself, because the method does not take the caller's arguments."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:  # a method may be guarded twice
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is getattr(call, "__code__", None)
