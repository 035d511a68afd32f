"""The in-flight table: which leases a worker process holds and how far each job is. The table outlives the process.

The tables are shared memory, made by the supervisor before it forks anything. A child writes to one table as long as it
lives. The supervisor and the sidecar read that table, also after the child's death. Writing costs no system call.

A table has a slot for each lease. A slot keeps the lease's queue, id and token beside its *mark*: how far the job is.

Why a reader can trust a table, without a lock:

- Each number has one writer at a time ("Who may write what", below). An aligned number of 8 bytes is read and written
  at once. A reader sees a child's writes in the order in which they were made. (x86 guarantees that order. On other
  processors, the order is certain when the child is dead; before, it is very likely, because hundreds of the
  interpreter's instructions lie between two writes.)
- A slot is published last. ``hold`` writes the serial number, the record and all else while the mark is ``NOTHING``, in
  no particular order, and then the mark. ``drop`` makes the mark ``NOTHING`` again before anything else changes. In
  between, only the mark and two single numbers change: the job's ``kill_at`` and the lease's ``ends_at``. ``end``
  writes a verdict's record while the mark is ``NOTHING``, too; the mark is ``ENDED`` after that, and never before.
- ``_read`` reads serial and mark, then all else, then mark and serial again, and trusts what it has read if neither has
  changed. The first mark, read after the serial, says that ``hold`` of this serial is complete. The second mark, read
  before the serial, says that ``drop`` has not come yet: otherwise the mark would be ``NOTHING`` or, with another lease
  in the slot, the serial would be that lease's. Each lease of a table has its own serial.
- The method ``kill_at`` reads the mark, then the number ``kill_at``, then the mark again. A running job's mark is the
  moment at which it began, and no other job has the same mark.
- No thread writes to a slot that belongs to another lease by now. ``hold``, ``touch`` and ``drop`` are called under the
  fetcher's lock. A job's own thread calls ``begin`` and ``end``, and ``drop`` comes after ``end``, unless the job was
  aborted: then its slot is never used again. The heartbeat calls ``set_kill_at`` only for a job that still
  runs, and under the lock that the job's end takes, too (``Timeouts``).
- A dead child changes nothing: what the sidecar reads after a death is final.

``tests/unit/test_inflight_interleavings.py`` reads the table between any two writes, and ends the writer there.

If a child dies between two writes, the older state counts. So a job that has run, but whose ack is not written yet,
counts as running: its lease is abandoned, a crash is counted, and the job runs again. If a child dies while ``end``
writes a verdict, the lease is in no slot: no process settles it, and the lease ends after its ttr. In both cases, no
unfinished job counts as done.

Who may write what:

====================  =================  ==========================================================
a table's state       written by         meaning
====================  =================  ==========================================================
``FREE`` -> ``LIVE``  the supervisor     the table is assigned to a child that is about to be forked
slots, next touch     the child          while it lives
``exit_code``         the child          written last: the child ends in order, with this exit code
``LIVE`` -> ``DEAD``  the supervisor     the child has ended; the sidecar writes this if the supervisor is gone
``DEAD`` -> ``FREE``  the sidecar        what the child still held is settled
====================  =================  ==========================================================
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Ack, Bury, GiveBack, Release

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Lease, Verdict

NEVER = float("inf")

# a table's state
FREE = 0.0
LIVE = 1.0
DEAD = 2.0

# how far a slot's job is; a positive mark is the moment (time.monotonic) at which its job began
NOTHING = 0.0  # the slot holds no lease, or its record is being written
WAITING = -1.0
ACKED = -2.0  # the job has run, and its ack waits to be settled
ENDED = -3.0  # the job has run, and another verdict waits to be settled: the slot's record has it

_CELL = 8  # bytes: all but the records are numbers of this size
_STATE, _LIFE, _PID, _LEFT, _STATUS, _WHY, _DIED_AT, _NEXT_TOUCH, _HAS_HELD = range(9)  # cells of a table's head
_DIED, _LATE, _CUT = range(3)  # why a child is dead
_HEAD = 16  # cells
_MARK, _KILL_AT, _SERIAL, _LENGTH, _ENDS_AT = range(5)  # cells of a slot's head, with the record behind them
_SLOT = 64  # cells
_SLOT_HEAD = 5  # cells
_RECORD_ROOM = (_SLOT - _SLOT_HEAD) * _CELL  # bytes
_REASON_ROOM = 160  # bytes of a reason that are kept beside its lease
_READ_TRIES = 20

_encode = msgspec.msgpack.Encoder().encode
#: overwrites all of a slot except its mark. This takes 0.19 us; cell by cell, it takes 0.32 us, which is 1 % more CPU
#: for a no-op job
_write_slot = struct.Struct(f"={_SLOT_HEAD - 1}d{_RECORD_ROOM}s").pack_into


class Held(msgspec.Struct, eq=False):
    """A lease as its worker process holds it, from the reserve's reply to the settlement of its verdict."""

    lease: Lease
    slot: int | None
    """The number of the first cell of the lease's slot in the table; None: the lease has no slot, or no longer has one.
    """
    touch_at: float
    """When to touch the lease next. All moments are ``time.monotonic``, one clock for all processes of a host."""
    ends_at: float
    """When the lease is certainly over, unless it is touched before."""
    began_at: float = 0.0
    """When its job began; 0: it has not."""
    verdict: Verdict | None = None
    """The verdict on its job; None: there is none yet."""
    is_aborted: bool = False
    """Whether an abort settled the lease while its job ran on. The job may still write to the slot: it is not used
    again.
    """
    is_lost: bool = False
    """Whether its verdict was refused, because the lease had ended."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A lease in a table: what another process needs to settle it."""

    queue: str
    id: str
    token: str
    ttr: float
    verdict: str = ""
    """``release`` or ``bury`` where the job has run and failed, ``give_back`` where it is delayed; else empty."""
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None


class Entry(msgspec.Struct, frozen=True):
    """A slot as another process reads it."""

    held: Record
    mark: float
    """``WAITING``, ``ACKED``, ``ENDED``, or when its job began."""
    kill_at: float
    """When the process must end if the job still runs then."""
    ends_at: float
    """When the lease is over. From then on the child neither begins nor touches a job that has not begun."""
    serial: float
    """The lease's number in this life of the table, from 1."""

    @property
    def is_running(self) -> bool:
        return self.mark > 0


class InflightTable:
    """The in-flight table of one child at a time."""

    def __init__(self, memory: memoryview, number: int, slots: int) -> None:
        self.number = number
        self._bytes = memory
        self._cells = memory.cast("d")
        self._slots = slots

    # --- the supervisor and the sidecar ---

    @property
    def state(self) -> float:
        return self._cells[_STATE]

    @property
    def life(self) -> float:
        """How often the table was assigned to a child. Together with ``number``, this names one child uniquely."""
        return self._cells[_LIFE]

    @property
    def pid(self) -> int:
        """The child's pid; 0: it is not forked yet."""
        return int(self._cells[_PID])

    @pid.setter
    def pid(self, value: int) -> None:
        self._cells[_PID] = value

    @property
    def exit_code(self) -> int | None:
        """The exit code that the child wrote right before it ended in order; None: it did not end in order."""
        left = int(self._cells[_LEFT])
        return left - 1 if left else None

    @property
    def status(self) -> int:
        """Of a dead child: its exit status or, if negative, the signal that killed it."""
        return int(self._cells[_STATUS])

    @property
    def is_late(self) -> bool:
        """Of a dead child: whether the supervisor killed it for an overdue job."""
        return self._cells[_WHY] == _LATE

    @property
    def is_cut(self) -> bool:
        """Of a dead child: whether it was killed because it did not end in time when the worker was ending."""
        return self._cells[_WHY] == _CUT

    @property
    def died_at(self) -> float:
        return self._cells[_DIED_AT]

    @property
    def next_touch(self) -> float:
        """When the child was going to touch its leases next."""
        return self._cells[_NEXT_TOUCH]

    @property
    def has_held(self) -> bool:
        """Whether the child has ever got a job."""
        return bool(self._cells[_HAS_HELD])

    def assign(self) -> None:
        """Assign this table to a child that is about to be forked. The table must be free."""
        life = self._cells[_LIFE] + 1
        self._bytes[:] = bytes(len(self._bytes))
        self._cells[_LIFE] = life
        self._cells[_NEXT_TOUCH] = NEVER
        self._cells[_STATE] = LIVE

    def note_exit(self, code: int) -> None:
        """The child calls this as the last thing before it exits: it ends in order, with this exit code."""
        self._cells[_LEFT] = code + 1

    def mark_dead(self, status: int, now: float, *, is_late: bool = False, is_cut: bool = False) -> None:
        """Note that the child has died. Then the sidecar settles what the child held."""
        self._cells[_STATUS] = status
        self._cells[_WHY] = _CUT if is_cut else _LATE if is_late else _DIED
        self._cells[_DIED_AT] = now
        self._cells[_STATE] = DEAD

    def free(self) -> None:
        """Free the table for another child."""
        self._cells[_STATE] = FREE

    def entries(self) -> list[Entry]:
        """The leases that are held. Those of a living child may have changed since."""
        return [entry for entry in map(self._read, range(self._slots)) if entry is not None]

    def kill_at(self) -> float:
        """The earliest moment at which a running job must have ended."""
        cells, earliest = self._cells, NEVER
        for at in range(_HEAD, _HEAD + self._slots * _SLOT, _SLOT):
            mark = cells[at + _MARK]
            if mark > 0:
                kill_at = cells[at + _KILL_AT]
                if cells[at + _MARK] == mark:  # the same job still runs: no two begin at the same moment
                    earliest = min(earliest, kill_at)
        return earliest

    def _read(self, slot: int) -> Entry | None:
        cells, at = self._cells, _HEAD + slot * _SLOT
        for _ in range(_READ_TRIES):
            serial, mark = cells[at + _SERIAL], cells[at + _MARK]
            if mark == NOTHING or not serial:
                return None
            kill_at, ends_at = cells[at + _KILL_AT], cells[at + _ENDS_AT]
            start = (at + _SLOT_HEAD) * _CELL
            encoded = bytes(self._bytes[start : start + int(cells[at + _LENGTH])])
            if cells[at + _MARK] == mark and cells[at + _SERIAL] == serial:  # in this order
                return Entry(msgspec.msgpack.decode(encoded, type=Record), mark, kill_at, ends_at, serial)
        return None  # a child that changes its slot so fast is neither stuck nor dead


class InflightWriter:
    """The child's side of its table.

    The module's docstring says which thread may call which method. Nothing here needs a lock, because no slot is used
    again while a job may write to it. The slot of an aborted job is never used again: its process ends.
    """

    def __init__(self, table: InflightTable) -> None:
        self._bytes = table._bytes  # noqa: SLF001 - two sides of one thing
        self._cells = table._cells  # noqa: SLF001
        # free slots by the number of their first cell; the last one is taken next
        self._free = list(reversed(range(_HEAD, _HEAD + table._slots * _SLOT, _SLOT)))  # noqa: SLF001
        self._serial = 0
        self.marks = self._cells
        """The cells. At ``Held.slot`` is the mark; the inline executor writes it as ``begin`` and ``end`` do."""

    def hold(self, jobs: Sequence[Held]) -> None:
        """Write each job's lease to a slot. A lease for which no slot is free is left out.

        If the child dies, such a lease ends after its ttr.
        """
        cells, memory, free, serial = self._cells, self._bytes, self._free, self._serial
        for held in jobs:
            lease = held.lease
            encoded = _encode((lease.queue, lease.id, lease.token, lease.ttr))
            length = len(encoded)
            if length > _RECORD_ROOM or not free:
                continue
            held.slot = slot = free.pop()
            serial += 1
            _write_slot(memory, (slot + 1) * _CELL, NEVER, serial, length, held.ends_at, encoded)
            cells[slot] = WAITING  # last: from now on, readers see the slot
        self._serial = serial

    def touch(self, held: Held, ends_at: float) -> None:
        """Note that the lease is about to be renewed until *ends_at*. Call it before the backend is asked."""
        if held.slot is not None:
            self._cells[held.slot + _ENDS_AT] = ends_at

    def begin(self, held: Held) -> None:
        """Note that the job begins to run, at ``began_at``."""
        if held.slot is not None:
            self._cells[held.slot] = held.began_at

    def set_kill_at(self, held: Held, kill_at: float) -> None:
        """Note the moment at which the process must end if the job still runs."""
        if held.slot is not None:
            self._cells[held.slot + _KILL_AT] = kill_at

    def end(self, held: Held) -> None:
        """Note that the job has run, and that its verdict waits to be settled."""
        slot = held.slot
        if slot is None:
            return
        verdict, cells = held.verdict, self._cells
        if type(verdict) is Ack:
            cells[slot] = ACKED
        elif type(verdict) is GiveBack and not verdict.delay:
            cells[slot] = WAITING
        elif (encoded := _encode_verdict(verdict)) is not None and len(encoded) <= _RECORD_ROOM:
            # A reader in between sees a slot without a lease. If the child dies in between, this lease ends after its
            # ttr: a crash, as if the child had died before the job's end
            cells[slot] = NOTHING
            start = (slot + _SLOT_HEAD) * _CELL
            self._bytes[start : start + len(encoded)] = encoded
            cells[slot + _LENGTH] = len(encoded)
            cells[slot] = ENDED

    def drop(self, jobs: Sequence[Held]) -> None:
        """These jobs are settled: free their slots for other leases."""
        cells, free = self._cells, self._free
        for held in jobs:
            slot = held.slot
            if slot is not None:
                cells[slot] = NOTHING
                if not held.is_aborted:
                    held.slot = None
                    free.append(slot)

    def set_next_touch(self, moment: float) -> None:
        """The next touch of any lease is due at *moment*; until then, all leases are alive."""
        self._cells[_NEXT_TOUCH] = moment
        self._cells[_HAS_HELD] = self._serial


def make_tables(count: int, slots: int) -> list[InflightTable]:
    """Make *count* tables of *slots* slots each, shared with every process that is forked from now on."""
    size = (_HEAD + slots * _SLOT) * _CELL
    memory = memoryview(mmap.mmap(-1, size * count))
    return [InflightTable(memory[number * size : (number + 1) * size], number, slots) for number in range(count)]


def _encode_verdict(verdict: Verdict | None) -> bytes | None:
    if isinstance(verdict, GiveBack):
        lease = verdict.lease
        return _encode(Record(lease.queue, lease.id, lease.token, lease.ttr, "give_back", verdict.delay))
    if not isinstance(verdict, Release | Bury):
        return None
    lease, reason = verdict.lease, verdict.reason
    if reason is not None:
        reason = reason.encode("utf-8", "replace")[:_REASON_ROOM].decode("utf-8", "ignore")
    delay, priority = (0.0, None) if isinstance(verdict, Bury) else (verdict.delay, verdict.priority)
    verb = "bury" if isinstance(verdict, Bury) else "release"
    record = Record(lease.queue, lease.id, lease.token, lease.ttr, verb, delay, priority, reason)
    encoded = _encode(record)
    if len(encoded) > _RECORD_ROOM:  # long names: without its reason it fits
        encoded = _encode(msgspec.structs.replace(record, reason=None))
    return encoded
