"""The notes that the memory backend keeps, of all homes. The caller holds the store's lock around each call."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from multiq.driverkit.clock import SECOND, nanoseconds

from .effects import Drop, Note, NotePage, Put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .effects import Version

_DROPPED_PER_PUT = 2  # expired notes that each new note deletes: more than one, so that their number falls
_STALE_KEPT = 64  # stale entries that a heap may have in addition to one for each note


class KeptNote(msgspec.Struct, frozen=True):
    """A note as it is stored. The time is in nanoseconds by the store's clock."""

    value: bytes
    version: str
    expires_at: int | None

    def is_live(self, now: int) -> bool:
        return self.expires_at is None or self.expires_at > now


class _Home:
    """The notes of one home."""

    __slots__ = ("by_key", "expiring")

    def __init__(self) -> None:
        self.by_key: dict[str, KeptNote] = {}
        self.expiring: list[tuple[int, str]] = []
        """A heap of ``expires_at`` and key. An entry is stale if its note was dropped or replaced."""

    def is_stale(self, entry: tuple[int, str]) -> bool:
        note = self.by_key.get(entry[1])
        return note is None or note.expires_at != entry[0]

    def put(self, key: str, note: KeptNote, now: int) -> None:
        self.by_key[key] = note
        if note.expires_at is not None:
            heapq.heappush(self.expiring, (note.expires_at, key))
        self._drop_expired(now)
        if len(self.expiring) > 2 * len(self.by_key) + _STALE_KEPT:
            self.expiring = [entry for entry in self.expiring if not self.is_stale(entry)]
            heapq.heapify(self.expiring)

    def _drop_expired(self, now: int) -> None:
        dropped = 0
        while self.expiring and self.expiring[0][0] <= now and dropped < _DROPPED_PER_PUT:
            if not self.is_stale(self.expiring[0]):
                del self.by_key[self.expiring[0][1]]
                dropped += 1
            heapq.heappop(self.expiring)


class KeptNotes:
    """The notes of all homes of a store.

    An asynchronous exception (Ctrl-C, a time limit) may end ``change`` in the middle. ``Store.finish`` then repeats the
    change.
    """

    def __init__(self) -> None:
        self._homes: dict[str, _Home] = {}
        self._versions = itertools.count(1)

    def change(self, step: Put | Drop, now: int) -> None:
        """Carry out one step."""
        home = self._homes.setdefault(step.home, _Home())
        if isinstance(step, Put):
            expires_at = None if step.ttl is None else now + nanoseconds(step.ttl)
            home.put(step.key, KeptNote(step.value, str(next(self._versions)), expires_at), now)
        else:
            home.by_key.pop(step.key, None)
        if not home.by_key:
            del self._homes[step.home]

    def have(self, conditions: Sequence[Version], now: int) -> bool:
        """Return whether every note has the version that its condition names."""
        return all(self._version(condition.home, condition.key, now) == condition.version for condition in conditions)

    def find(self, home: str, key: str, now: int) -> Note | None:
        note = self._homes.get(home, _NONE).by_key.get(key)
        return _shown(key, note, now) if note is not None and note.is_live(now) else None

    def page(self, home: str, prefix: str, limit: int, after: str | None, now: int) -> NotePage:
        live = {key: note for key, note in self._homes.get(home, _NONE).by_key.items() if note.is_live(now)}
        keys = sorted(key for key in live if key.startswith(prefix) and (after is None or key > after))
        found = [_shown(key, live[key], now) for key in keys[:limit]]
        return NotePage(found, keys[limit - 1] if len(keys) > limit else None)

    def _version(self, home: str, key: str, now: int) -> str:
        note = self.find(home, key, now)
        return "" if note is None else note.version


_NONE = _Home()  # stands for any home without notes; no note is added to it


def _shown(key: str, note: KeptNote, now: int) -> Note:
    expires_in = None if note.expires_at is None else (note.expires_at - now) / SECOND
    return Note(key=key, value=note.value, version=note.version, expires_in=expires_in)
