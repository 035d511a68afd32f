"""What only the live server knows: whether it keeps jobs on a disk, and how large a body may be."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend.capabilities import Gap
from multiq.errors import BackendError, BackendUnavailable

from .replies import guarded

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities

    from .client import Caller, Callers

_RECORD_SIZE = 1024  # bytes, and more than enough, that are stored in one string with a body
_KEEPS_NOTHING = "this server writes nothing to its disk: a restart loses all jobs (appendonly yes keeps them)"
_KEEPS_SNAPSHOTS = "this server saves snapshots at most: a crash loses all since the last (appendonly yes keeps them)"


@guarded("_ask")
class Facts:
    """Asked once, at the first question. A server that does not tell is taken to be as servers come."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._exact: Capabilities | None = None

    def make_exact(self, declared: Capabilities) -> Capabilities:
        """*declared*, with what the server says. As it is while the server cannot be reached."""
        if self._exact is None:
            with contextlib.suppress(BackendUnavailable):
                self._exact = self._ask(declared)
        return declared if self._exact is None else self._exact

    def _ask(self, declared: Capabilities) -> Capabilities:
        with self._callers.borrowed() as caller:
            address = caller.all_addresses()[0]
            changes: dict[str, Any] = {"max_body": _largest_body(caller, address, declared.max_body or 0)}
            gap = _gap_of_persistence(caller, address)
        if gap is not None:
            changes |= {"persistent": gap, "durable_attempts": gap}
        return msgspec.structs.replace(declared, **changes)


def _gap_of_persistence(caller: Caller, address: Any) -> Gap | None:
    try:
        told = _asked(caller, address, "INFO", "persistence")
    except _Refused:
        return None
    if b"aof_enabled:0" not in told:
        return None
    with contextlib.suppress(_Refused):
        if _asked(caller, address, "CONFIG", "GET", "save")[1:] == [b""]:
            return Gap("cannot today", _KEEPS_NOTHING)
    return Gap("cannot today", _KEEPS_SNAPSHOTS)


def _largest_body(caller: Caller, address: Any, default: int) -> int:
    with contextlib.suppress(_Refused):
        settings = _asked(caller, address, "CONFIG", "GET", "proto-max-bulk-len")
        if settings:
            return int(settings[1]) - _RECORD_SIZE
    return default - _RECORD_SIZE


class _Refused(Exception):
    """The server does not tell: managed ones forbid CONFIG."""


def _asked(caller: Caller, address: Any, *words: str) -> Any:
    try:
        return caller.command(address, *words)
    except BackendError as exc:
        if exc.__cause__ is not None and not isinstance(exc.__cause__, OSError):
            raise _Refused from exc
        raise
