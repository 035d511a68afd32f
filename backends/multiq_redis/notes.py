"""Reads notes. A queue's notes are in its first partition."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from multiq.backend.effects import Note, NotePage
from multiq.errors import BackendCorrupt

from .records import MICROSECOND

if TYPE_CHECKING:
    from .pool import Pool

_HEAD = struct.Struct(">14sQ")  # lua/include/steps.lua
_NO_VERSION = b"?"  # no note has it


def find(pool: Pool, home: str, key: str) -> Note | None:
    now, stored = pool.call("note", home, (key.encode("utf-8", "surrogatepass"),))
    return _note(home, key, stored, int(now)) if stored else None


def now(pool: Pool, home: str) -> float:
    """Returns the time by the clock of the server that has the home's first partition."""
    time, _ = pool.call("note", home, (b"",))  # no note has the empty key
    return int(time) / MICROSECOND


def page(pool: Pool, home: str, prefix: str, limit: int, after: str | None) -> NotePage:
    packed = prefix.encode("utf-8", "surrogatepass")
    first, end = b"[" + packed, b"(" + packed + b"\xff"  # keys are ASCII, so 0xFF comes after all of them
    if after is not None and after >= prefix:
        first = b"(" + after.encode("utf-8", "surrogatepass")
    found: list[Note] = []
    while True:
        now, last, *rest = pool.call("notes", home, (limit + 1 - len(found), first, end))
        for name, stored in zip(rest[::2], rest[1::2], strict=True):
            key = name.decode("utf-8", "surrogatepass")
            found.append(_note(home, key, stored, int(now)))
        if len(found) > limit:
            return NotePage(found[:limit], found[limit - 1].key)
        if not last:
            return NotePage(found, None)
        first = b"(" + last


def pack_version(version: str) -> bytes:
    """Returns a version as it is stored. For an invalid version, returns bytes that match no note's version."""
    try:
        return bytes.fromhex(version) if version.isalnum() or not version else _NO_VERSION
    except ValueError:
        return _NO_VERSION


def _note(home: str, key: str, stored: bytes, now: int) -> Note:
    try:
        version, expires_at = _HEAD.unpack_from(stored)
    except struct.error as exc:
        raise BackendCorrupt(
            f"the note {key!r} of {home!r} is not one of multiq's: another program wrote it, or a newer multiq"
        ) from exc
    expires_in = (expires_at - now) / MICROSECOND if expires_at else None
    return Note(key=key, value=stored[_HEAD.size :], version=version.hex(), expires_in=expires_in)
