"""Notes: bytes that are stored under a home and a key. Steps change them, and conditions compare their versions."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from multiq.backend import Note, Put
from multiq.driverkit.clock import SECOND, nanoseconds

from .errors import MalformedRecord
from .records import move

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Drop, Version

    from .connection import Transaction

_DROPPED_PER_PUT = 2  # expired notes that each new note deletes: more than one, so that their number falls
_KINDS = {(int, str, int, expires_at, bytes) for expires_at in (int, type(None))}

AFTER_ALL = "\U0010ffff"
"""Sorts after every character of a key."""


class NoteRow(NamedTuple):
    """A note as ``note`` and ``notes`` read it."""

    seq: int
    key: str
    version: int
    expires_at: int | None
    value: bytes

    def note(self, now: int) -> Note:
        """Return the public note at the time *now*."""
        if tuple(map(type, self)) not in _KINDS:
            raise MalformedRecord(f"note number {self.seq} has a column of a wrong type")
        expires_in = None if self.expires_at is None else (self.expires_at - now) / SECOND
        return Note(key=self.key, value=self.value, version=str(self.version), expires_in=expires_in)


def change_notes(transaction: Transaction, steps: Sequence[Put | Drop], now: int) -> None:
    """Store and delete notes in the order of the steps."""
    for step in steps:
        changed = {"home": step.home, "key": step.key}
        if isinstance(step, Put):
            expires_at = None if step.ttl is None else now + nanoseconds(step.ttl)
            # A random number is used, because a counter would reuse versions after the file was restored from a backup.
            version = secrets.randbits(63)
            transaction.execute("put", changed | {"version": version, "value": step.value, "expires_at": expires_at})
        else:
            transaction.execute("drop", changed)
    for home, count in Counter(step.home for step in steps if isinstance(step, Put)).items():
        expired = {"home": home, "limit": _DROPPED_PER_PUT * count, "now": now}
        move(transaction, "forget_notes", "expired_notes", expired)


def have_versions(transaction: Transaction, conditions: Sequence[Version], now: int) -> bool:
    """Whether every note has the version that its condition names."""
    return all(_version(transaction, condition, now) == condition.version for condition in conditions)


def _version(transaction: Transaction, condition: Version, now: int) -> str:
    asked = {"home": condition.home, "key": condition.key, "now": now}
    row = transaction.execute("find_note", asked).fetchone()
    return "" if row is None else NoteRow(*row).note(now).version
