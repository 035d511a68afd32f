"""The capabilities that depend on the live server: persistence and the largest body."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend.capabilities import Gap
from multiq.errors import BackendError, BackendUnavailable

from .errors import guarded

if TYPE_CHECKING:
    from multiq.backend.capabilities import Capabilities

    from .client import Client
    from .pool import Pool

_RECORD_SIZE = 1024  # bytes: an upper bound of the bytes that one string stores in addition to a body
_KEEPS_NOTHING = "this server writes nothing to its disk: a restart loses all jobs (appendonly yes keeps them)"
_KEEPS_SNAPSHOTS = "this server saves snapshots at most: a crash loses all since the last (appendonly yes keeps them)"


@guarded("_fetch")
class ServerInfo:
    """Reads the server's settings once, at the first use. If the server does not show a setting, its default is
    used."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._exact: Capabilities | None = None

    def refine(self, declared: Capabilities) -> Capabilities:
        """Return *declared* with the live server's values, if the server can be reached."""
        if self._exact is None:
            with contextlib.suppress(BackendUnavailable):
                self._exact = self._fetch(declared)
        return declared if self._exact is None else self._exact

    def _fetch(self, declared: Capabilities) -> Capabilities:
        with self._pool.borrowed() as client:
            address = client.all_addresses()[0]
            changes: dict[str, Any] = {"max_body": _largest_body(client, address, declared.max_body or 0)}
            gap = _gap_of_persistence(client, address)
        if gap is not None:
            changes |= {"persistent": gap, "durable_attempts": gap}
        return msgspec.structs.replace(declared, **changes)


def _gap_of_persistence(client: Client, address: Any) -> Gap | None:
    try:
        reply = _ask_or_refused(client, address, "INFO", "persistence")
    except _Refused:
        return None
    if b"aof_enabled:0" not in reply:
        return None
    with contextlib.suppress(_Refused):
        if _ask_or_refused(client, address, "CONFIG", "GET", "save")[1:] == [b""]:
            return Gap("cannot today", _KEEPS_NOTHING)
    return Gap("cannot today", _KEEPS_SNAPSHOTS)


def _largest_body(client: Client, address: Any, default: int) -> int:
    with contextlib.suppress(_Refused):
        settings = _ask_or_refused(client, address, "CONFIG", "GET", "proto-max-bulk-len")
        if settings:
            return int(settings[1]) - _RECORD_SIZE
    return default - _RECORD_SIZE


class _Refused(Exception):
    """The server refuses the command. For example, managed servers refuse CONFIG."""


def _ask_or_refused(client: Client, address: Any, *words: str) -> Any:
    try:
        return client.command(address, *words)
    except BackendError as exc:
        if exc.__cause__ is not None and not isinstance(exc.__cause__, OSError):
            raise _Refused from exc
        raise
