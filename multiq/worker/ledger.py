"""What a worker process holds, written where it can be read after its death.

A file that is mapped into memory: the child writes, the supervisor and the keeper read. It tells which leases are
held and which of them run, since when and until when at most; so whoever survives a ``kill -9`` can hand the jobs on
at once, and knows which one to blame. Writing costs no system call; a batch's leases are written in one go.

There are two pages, and one byte says which of them counts: a page is complete before it does.
"""

from __future__ import annotations

import mmap
import operator
import os
import struct
import threading
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from multiq.backend import Lease

NEVER = float("inf")

WAITING = 0.0
ACKED = -1.0
ENDED = -2.0

# which page counts, in turn or not, when the leases are touched next, entries in a page, how often one was written
_HEAD = struct.Struct("<B?xxxxxxdII")
_HEAD_ROOM = 64
_COUNT = struct.Struct("<II")  # entries, bytes of the leases
_COUNT_ROOM = 16
_READ_TRIES = 20
_LEASE_ROOM = 384  # bytes: a queue's name, an id, a token and a number, whatever backend made them

_encode = msgspec.msgpack.Encoder().encode
_what_settles = operator.attrgetter("queue", "id", "token", "ttr")  # the fields of Held


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A lease as it stands in a ledger: what another process needs to settle it."""

    queue: str
    id: str
    token: str
    ttr: float


class Entry(msgspec.Struct, frozen=True):
    """A lease, and how far its job is: ``mark`` is ``WAITING``, ``ACKED``, ``ENDED``, or when it began to run."""

    held: Held
    mark: float
    kill_at: float
    """When its process must end, if it still runs then. All moments are ``time.monotonic``, one clock for all."""

    @property
    def is_running(self) -> bool:
        return self.mark > WAITING


class Ledger:
    """The child's side: it writes, from the pump's thread and from those that run jobs.

    Where jobs run one after the other (*in_turn*), the beginning of one tells that those before it have ended, and
    marking it costs one assignment.
    """

    def __init__(self, path: Path, entries: int, *, in_turn: bool) -> None:
        self._entries = entries
        self._room = _page_room(entries)
        size = _HEAD_ROOM + 2 * self._room
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)  # no room is an error now, and not a SIGBUS later
            else:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._map, 0, 0, in_turn, NEVER, entries, 0)
        self._pages = [_Page(self._map, _HEAD_ROOM + number * self._room, entries) for number in (0, 1)]
        self._current = 0
        self._next_touch = memoryview(self._map)[8:16].cast("d")
        self._writes = memoryview(self._map)[20:24].cast("I")
        self._blank = bytes(8 * entries)
        self._numbers = range(entries)
        self._never = struct.pack("<d", NEVER) * entries
        self._places: dict[int, int] = {}  # a lease by identity -> its entry
        self._lock = threading.Lock()

    def hold(self, leases: Sequence[Lease]) -> None:
        """These leases are held, and no others. Those that were held before keep their marks."""
        leases = leases[: self._entries]
        encoded = _encode(list(map(_what_settles, leases)))
        if len(encoded) > self._entries * _LEASE_ROOM:
            leases, encoded = [], _encode([])  # an exotic backend's tokens: its leases end by themselves
        with self._lock:
            self._writes[0] = self._writes[0] + 1 & 0xFFFFFFFF
            old, new = self._pages[self._current], self._pages[1 - self._current]
            new.marks_bytes[:] = self._blank
            new.kill_at_bytes[:] = self._never
            places = dict(zip(map(id, leases), self._numbers, strict=False))
            if not self._places.keys().isdisjoint(places):
                for key in self._places.keys() & places.keys():
                    new.marks[places[key]] = old.marks[self._places[key]]
                    new.kill_at[places[key]] = old.kill_at[self._places[key]]
            new.write(len(leases), encoded)
            self._places = places
            self._current = 1 - self._current
            self._map[0] = self._current

    def touched_until(self, moment: float) -> None:
        """All leases are alive; the next touch is due at *moment*."""
        self._next_touch[0] = moment

    def begin(self, lease: Lease, at: float) -> None:
        """Its job begins to run."""
        with self._lock:
            place = self._places.get(id(lease))
            if place is not None:
                self._pages[self._current].marks[place] = at

    def limit(self, lease: Lease, kill_at: float) -> None:
        """Its job must have ended by then."""
        with self._lock:
            place = self._places.get(id(lease))
            if place is not None:
                self._pages[self._current].kill_at[place] = kill_at

    def turns(self, first: Lease) -> tuple[memoryview[float], int]:
        """Where marks are written in turn, and at which place the mark of *first* goes. The next one's is beside it."""
        return self._pages[self._current].marks, self._places.get(id(first), 0)

    def end(self, lease: Lease, *, acked: bool) -> None:
        """Its job has run, and its verdict waits to be settled."""
        with self._lock:
            place = self._places.get(id(lease))
            if place is not None:
                self._pages[self._current].marks[place] = ACKED if acked else ENDED


class LedgerReader:
    """The other side: reads a child's ledger while the child writes, or after its death."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        self._map.close()

    @property
    def next_touch(self) -> float:
        """When the child was going to touch its leases next."""
        return float(_HEAD.unpack_from(self._map, 0)[2])

    @property
    def has_held(self) -> bool:
        """Whether the child has ever got a job."""
        return bool(_HEAD.unpack_from(self._map, 0)[4])

    def entries(self) -> list[Entry]:
        """The leases that are held. Of a living child, perhaps those of an instant ago."""
        for _ in range(_READ_TRIES):
            current, in_turn, _, size, writes = _HEAD.unpack_from(self._map, 0)
            at = _HEAD_ROOM + current * _page_room(size)
            page = self._map[at : at + _page_room(size)]
            if writes == _HEAD.unpack_from(self._map, 0)[4]:
                return _entries(page, size, in_turn=in_turn)
        return []  # a child that is busier than that is neither stuck nor dead


class _Page:
    """One page's places in the map."""

    def __init__(self, buffer: mmap.mmap, at: int, entries: int) -> None:
        whole = memoryview(buffer)
        self._count = whole[at : at + _COUNT_ROOM]
        at += _COUNT_ROOM
        self.marks_bytes = whole[at : at + 8 * entries]
        self.kill_at_bytes = whole[at + 8 * entries : at + 16 * entries]
        self.marks = self.marks_bytes.cast("d")
        self.kill_at = self.kill_at_bytes.cast("d")
        self._leases = whole[at + 16 * entries : at + 16 * entries + entries * _LEASE_ROOM]

    def write(self, count: int, encoded: bytes) -> None:
        self._leases[: len(encoded)] = encoded
        _COUNT.pack_into(self._count, 0, count, len(encoded))


def _page_room(entries: int) -> int:
    room = _COUNT_ROOM + 16 * entries + _LEASE_ROOM * entries
    return room + -room % 8  # marks are aligned


def _entries(page: bytes, size: int, *, in_turn: bool) -> list[Entry]:
    count, length = _COUNT.unpack_from(page, 0)
    at = _COUNT_ROOM
    marks = struct.unpack_from(f"<{count}d", page, at)
    kill_ats = struct.unpack_from(f"<{count}d", page, at + 8 * size)
    held = msgspec.msgpack.decode(page[at + 16 * size : at + 16 * size + length], type=list[Held]) if count else []
    latest = max((place for place, mark in enumerate(marks) if mark != WAITING), default=0) if in_turn else 0
    return [
        Entry(lease, ACKED if place < latest and mark > WAITING else mark, kill_at)
        for place, (lease, mark, kill_at) in enumerate(zip(held, marks, kill_ats, strict=True))
    ]
