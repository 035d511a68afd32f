"""The in-flight table: the leases that a worker process holds, and the progress of each job.

The tables are in shared memory. The supervisor creates them before it forks any process. A child writes to one table
during its whole life. The supervisor and the sidecar read that table, even after the child's death. Writing makes no
system call.

A table has a slot for each lease. A slot has the lease's queue, id and token, a *serial* and a *mark*. The serial is
the lease's number in this table. The mark is the progress of the job.

A reader can trust a table without a lock, for these reasons:

- Each number has one writer at a time (see the table below). Reads and writes of an aligned number of 8 bytes are
  atomic.
- A reader sees a child's writes in their order. x86 guarantees this order. On other processors, the order is certain
  after the child's death. Before the child's death, the order is very likely, because the interpreter executes hundreds
  of instructions between two writes.
- ``hold`` writes the mark last. Until then, the mark is ``NOTHING``. ``drop`` sets the mark to ``NOTHING`` before
  anything else changes.
- Between ``hold`` and ``drop``, only the mark, ``kill_at`` and ``ends_at`` change. ``end`` also writes the record of a
  verdict, or takes back ``kill_at``. During this write, the mark is ``NOTHING``, and afterwards it is ``ENDED``.
- ``_read`` reads the serial and the mark, then the rest, then the mark and the serial again. ``_read`` accepts the
  result if neither has changed. The first mark shows that ``hold`` is complete. The second mark shows that ``drop`` has
  not begun. A new lease in the slot would have another serial, because each lease of a table has its own.
- ``kill_at`` reads the mark, then the number ``kill_at``, then the mark again. The mark of a running job is the time at
  which the job began. No other job of the table has the same mark.
- No thread writes to a slot after the slot was given to another lease. ``hold``, ``touch`` and ``drop`` are called
  under the fetcher's lock. The job's own thread calls ``begin`` and ``end``. ``drop`` comes after ``end``, except for
  aborted jobs, whose slots are never used again. The heartbeat calls ``set_kill_at`` only while the job runs, and under
  the lock that the job's end also takes (``Timeouts``).
- A dead child writes nothing, so the sidecar reads the final state.

``tests/unit/test_inflight_interleavings.py`` reads the table between any two writes. It also ends the writer between
any two writes.

If an ack keeps an outcome, the slot's record has the outcome. If the record has too little room, the outcome's value is
left out.

If a child dies between two writes, readers see the older state. After a job has run, it is seen as running until its
ack is written. The job's lease is abandoned, a crash is counted, and the job runs again. If a child dies while ``end``
writes a verdict, no slot has the lease, and the lease ends after its ttr. In both cases, no unfinished job counts as
done.

The writers of a table:

====================  =================  ==========================================================
a table's state       written by         meaning
====================  =================  ==========================================================
``FREE`` -> ``LIVE``  the supervisor     the table is assigned to a child that is about to be forked
slots, next touch     the child          while it lives
``exit_code``         the child          written last, at an orderly end with this exit code
``LIVE`` -> ``DEAD``  the supervisor     the child has ended; the sidecar writes this if the supervisor is gone
``DEAD`` -> ``FREE``  the sidecar        the leases of the child are settled
====================  =================  ==========================================================
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import Ack, Arrive, Bury, GiveBack, OutcomeKind, Put, Release
from multiq.outcome import without_value

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Sequence
    from typing import Any

    from multiq.backend import After, Lease, Step, Verdict
    from multiq.worker.execution.cancels import Cancel
    from multiq.worker.execution.running_memos import JobMemo
    from multiq.worker.execution.task_call import TaskCall

NEVER = float("inf")

# states of a table
FREE = 0.0
LIVE = 1.0
DEAD = 2.0

# Marks of a slot. A positive mark is the time (time.monotonic) at which the job began.
NOTHING = 0.0  # the slot has no lease, or its record is being written
WAITING = -1.0
ACKED = -2.0  # the job has run, and its ack is not settled yet
ENDED = -3.0  # the job has run, and the verdict in its record is not settled yet

_CELL = 8  # bytes of a number; everything except the records is a number
_STATE, _LIFE, _PID, _LEFT, _STATUS, _WHY, _DIED_AT, _NEXT_TOUCH, _HAS_HELD = range(9)  # cells of a table's header
_DIED, _LATE, _CUT = range(3)  # why a child is dead
_HEAD = 16  # cells
_MARK, _KILL_AT, _SERIAL, _LENGTH, _ENDS_AT = range(5)  # cells of a slot's header, which precedes the record
_SLOT = 64  # cells
_SLOT_HEAD = 5  # cells
_RECORD_ROOM = (_SLOT - _SLOT_HEAD) * _CELL  # bytes
_REASON_ROOM = 160  # bytes of a reason that a record stores
_READ_TRIES = 20
_VALUE_LOST = "the worker process died before it had stored the value"

_encode = msgspec.msgpack.Encoder().encode
#: Overwrites a slot except its mark. One call takes 0.19 us. Writing each cell separately takes 0.32 us. The difference
#: is 1 % of the CPU time of a no-op job.
_write_slot = struct.Struct(f"={_SLOT_HEAD - 1}d{_RECORD_ROOM}s").pack_into


class Held(msgspec.Struct, eq=False):
    """A lease in its worker process, from the reply to the reserve call until its verdict is settled."""

    lease: Lease
    slot: int | None
    """The index of the first cell of the lease's slot in the table, or None if the lease has no slot."""
    touch_at: float
    """The time of the next touch, if the job's memo does not change. All times are ``time.monotonic``, which is one
    clock for all processes of a host.
    """
    ends_at: float
    """The time at which the lease has certainly ended, if no touch extends it."""
    began_at: float = 0.0
    """The time at which the job began, or 0 if it has not begun."""
    verdict: Verdict | None = None
    """The verdict on the job. None before the job has ended."""
    is_aborted: bool = False
    """Whether an abort has settled the lease while the job runs on. The job may still write to the slot, so the slot is
    not used again.
    """
    memo: JobMemo | None = None
    """The running job's memo. None: the job has not used a memo."""
    is_lost: bool = False
    """Whether the backend refused the verdict because the lease had ended."""
    cancel: Cancel | None = None
    """The request to cancel the job. None: there is no request, or this process does not know it yet."""
    call: TaskCall | None = None
    """The call that runs now. None: the job has not begun, or its function has returned."""
    task: Task[Any] | None = None
    """The asyncio task of the call, if the call is a coroutine."""
    reserved: float = 0.0
    """The time of the reservation, if the lease was touched since."""
    has_permit: bool = False
    """Whether the job holds a permit, which is freed after its verdict."""

    @property
    def reserved_at(self) -> float:
        """The time of the reservation."""
        return self.reserved or self.ends_at - self.lease.ttr


class _Arrival(msgspec.Struct, frozen=True, array_like=True, tag=1):
    queue: str
    id: str
    member: str
    expect: int
    doom: str


class _Note(msgspec.Struct, frozen=True, array_like=True, tag=2):
    home: str
    key: str
    value: bytes
    ttl: float | None


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The data in a slot that another process needs to settle the lease."""

    queue: str
    id: str
    token: str
    ttr: float
    verdict: str = ""
    """``release`` or ``bury`` for a failed job, ``give_back`` for a job given back with a delay, ``ack`` for a done job
    whose outcome is kept. Empty in all other cases.
    """
    delay: float = 0.0
    priority: int | None = None
    reason: str | None = None
    keep: float = 0.0
    """Seconds for which ``outcome`` is kept. ``kind`` is the kind of the outcome."""
    outcome: bytes = b""
    kind: OutcomeKind = "done"
    steps: tuple[_Arrival | _Note, ...] = ()
    """The steps of the verdict. A job of a flow has arrivals. The last job of a flow has a note."""
    attempt: int = 1
    """If there is an ``outcome``: the number of the lease's attempt. Without an outcome, no backend needs this number
    to settle the lease."""


class Entry(msgspec.Struct, frozen=True):
    """The contents of a slot, as another process reads them."""

    held: Record
    mark: float
    """``WAITING``, ``ACKED``, ``ENDED``, or the time at which the job began."""
    kill_at: float
    """The time at which the process must end if the job still runs."""
    ends_at: float
    """The time at which the lease ends. After this time, the child neither begins nor touches a waiting job."""
    serial: float
    """The number of the lease in this life of the table. The first lease has number 1."""

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
        """The number of times that the table was assigned. ``number`` and ``life`` together identify a child."""
        return self._cells[_LIFE]

    @property
    def pid(self) -> int:
        """The pid of the child. 0 before the fork."""
        return int(self._cells[_PID])

    @pid.setter
    def pid(self, value: int) -> None:
        self._cells[_PID] = value

    @property
    def exit_code(self) -> int | None:
        """The exit code that the child wrote before it exited. None if the child did not write one."""
        left = int(self._cells[_LEFT])
        return left - 1 if left else None

    @property
    def status(self) -> int:
        """The exit status of a dead child. A negative number is the signal that killed the child."""
        return int(self._cells[_STATUS])

    @property
    def is_late(self) -> bool:
        """Whether the supervisor killed the dead child for an overdue job."""
        return self._cells[_WHY] == _LATE

    @property
    def is_cut(self) -> bool:
        """Whether the dead child was killed because it did not end in time when the worker was stopping."""
        return self._cells[_WHY] == _CUT

    @property
    def died_at(self) -> float:
        return self._cells[_DIED_AT]

    @property
    def next_touch(self) -> float:
        """The time of the child's next touch, as planned by the child."""
        return self._cells[_NEXT_TOUCH]

    @property
    def has_held(self) -> bool:
        """Whether the child has ever taken a job."""
        return bool(self._cells[_HAS_HELD])

    def assign(self) -> None:
        """Assign this free table to a child that is about to be forked."""
        life = self._cells[_LIFE] + 1
        self._bytes[:] = bytes(len(self._bytes))
        self._cells[_LIFE] = life
        self._cells[_NEXT_TOUCH] = NEVER
        self._cells[_STATE] = LIVE

    def note_exit(self, code: int) -> None:
        """Write the exit code of an orderly end. The child calls this method last."""
        self._cells[_LEFT] = code + 1

    def mark_dead(self, status: int, now: float, *, is_late: bool = False, is_cut: bool = False) -> None:
        """Record the child's death. The sidecar then settles the child's jobs."""
        self._cells[_STATUS] = status
        self._cells[_WHY] = _CUT if is_cut else _LATE if is_late else _DIED
        self._cells[_DIED_AT] = now
        self._cells[_STATE] = DEAD

    def free(self) -> None:
        self._cells[_STATE] = FREE

    def entries(self) -> list[Entry]:
        """Return the held leases. The leases of a living child may already have changed."""
        return [entry for entry in map(self._read, range(self._slots)) if entry is not None]

    def kill_at(self) -> float:
        """Return the earliest time at which a running job must have ended."""
        cells, earliest = self._cells, NEVER
        for at in range(_HEAD, _HEAD + self._slots * _SLOT, _SLOT):
            mark = cells[at + _MARK]
            if mark > 0:
                kill_at = cells[at + _KILL_AT]
                if cells[at + _MARK] == mark:  # the same job still runs, because no two jobs begin at the same time
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
        return None  # a child that changes its slot this fast is neither stuck nor dead


class InflightWriter:
    """The child's interface to its table.

    The module's docstring lists the threads that call each method. The methods need no lock, because a slot is not used
    again while a job may write to it. The slot of an aborted job is never used again. Few slots are lost in this
    way, because a process ends soon after it has aborted a job.
    """

    def __init__(self, table: InflightTable) -> None:
        self._bytes = table._bytes  # noqa: SLF001 - two sides of one thing
        self._cells = table._cells  # noqa: SLF001
        # free slots by the index of their first cell; the last one is used first
        self._free = list(reversed(range(_HEAD, _HEAD + table._slots * _SLOT, _SLOT)))  # noqa: SLF001
        self._serial = 0
        self.marks = self._cells
        """The cells. A slot's mark is at index ``Held.slot``. The inline executor writes the mark in place of
        ``begin`` and ``end``.
        """

    def hold(self, jobs: Sequence[Held]) -> None:
        """Write each lease to a slot. A lease without a free slot is left out.

        If the child dies, a lease that was left out ends after its ttr.
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
            cells[slot] = WAITING  # this line is last, because readers see the slot from now on
        self._serial = serial

    def touch(self, held: Held, ends_at: float) -> None:
        """Record that the lease will be renewed until *ends_at*. Call this before the backend is asked."""
        if held.slot is not None:
            self._cells[held.slot + _ENDS_AT] = ends_at

    def begin(self, held: Held) -> None:
        """Record that the job began at ``began_at``."""
        if held.slot is not None:
            self._cells[held.slot] = held.began_at

    def set_kill_at(self, held: Held, kill_at: float) -> None:
        """Record the time at which the process must end if the job still runs."""
        if held.slot is not None:
            self._cells[held.slot + _KILL_AT] = kill_at

    def end(self, held: Held) -> None:
        """Record that the job has run, and that its verdict is not settled yet."""
        slot = held.slot
        if slot is None:
            return
        verdict, cells = held.verdict, self._cells
        if type(verdict) is Ack and verdict.after is None:
            cells[slot] = ACKED
        elif type(verdict) is GiveBack and not verdict.delay:
            cells[slot] = WAITING
        elif (encoded := _encode_verdict(verdict)) is not None and len(encoded) <= _RECORD_ROOM:
            # A reader now sees a slot without a lease. If the child dies here, the effect is the same as if it had died
            # before the job's end: the lease ends after its ttr, and a crash is counted.
            cells[slot] = NOTHING
            start = (slot + _SLOT_HEAD) * _CELL
            self._bytes[start : start + len(encoded)] = encoded
            cells[slot + _LENGTH] = len(encoded)
            cells[slot] = ENDED
        else:
            cells[slot + _KILL_AT] = NEVER  # the job still counts as running, and must not be killed for its time limit

    def drop(self, jobs: Sequence[Held]) -> None:
        """Free the slots of settled jobs."""
        cells, free = self._cells, self._free
        for held in jobs:
            slot = held.slot
            if slot is not None:
                cells[slot] = NOTHING
                if not held.is_aborted:
                    held.slot = None
                    free.append(slot)

    def set_next_touch(self, moment: float) -> None:
        """Record that the next touch is due at *moment*. All leases are alive until then."""
        self._cells[_NEXT_TOUCH] = moment
        self._cells[_HAS_HELD] = self._serial


def make_tables(count: int, slots: int) -> list[InflightTable]:
    """Create *count* tables with *slots* slots each. All processes forked from now on share them."""
    size = (_HEAD + slots * _SLOT) * _CELL
    memory = memoryview(mmap.mmap(-1, size * count))
    return [InflightTable(memory[number * size : (number + 1) * size], number, slots) for number in range(count)]


def steps_of(record: Record) -> tuple[Step, ...]:
    """Return the steps of a recorded verdict."""
    return tuple(
        Arrive(step.queue, step.id, step.member, step.expect, step.doom)
        if isinstance(step, _Arrival)
        else Put(step.home, step.key, step.value, step.ttl)
        for step in record.steps
    )


def _encode_steps(encoded: bytes, steps: Sequence[Step]) -> bytes | None:
    """Add steps to a record. None: the record has no room for the steps, or the steps cannot be recorded.

    A verdict without its steps would break a flow. In this case, the job stays marked as running: if the child dies,
    the job runs again.
    """
    written: list[_Arrival | _Note] = []
    for step in steps:
        if isinstance(step, Arrive):
            written.append(_Arrival(step.queue, step.id, step.member, step.expect, step.doom))
        elif isinstance(step, Put):
            written.append(_Note(step.home, step.key, step.value, step.ttl))
        else:
            return None
    record = msgspec.structs.replace(msgspec.msgpack.decode(encoded, type=Record), steps=tuple(written))
    with_steps = _encode(record)
    return with_steps if len(with_steps) <= _RECORD_ROOM else None


def _encode_verdict(verdict: Verdict | None) -> bytes | None:
    """Return the record of a verdict. None: the verdict cannot be recorded, so the job counts as running."""
    after = None if verdict is None else verdict.after
    encoded = _encode_change(verdict)
    if encoded is None or after is None or not after.steps:
        return encoded
    if len(encoded) > _RECORD_ROOM or (after.outcome and after.outcome not in encoded):
        return None  # a later job may need the value
    return _encode_steps(encoded, after.steps)


def _encode_change(verdict: Verdict | None) -> bytes | None:
    if isinstance(verdict, GiveBack):
        lease = verdict.lease
        return _encode(Record(lease.queue, lease.id, lease.token, lease.ttr, "give_back", verdict.delay))
    if isinstance(verdict, Ack) and verdict.after is not None:
        return _encode_kept_ack(verdict.lease, verdict.after)
    if not isinstance(verdict, Release | Bury):
        return None
    lease, reason = verdict.lease, verdict.reason
    if reason is not None:
        reason = reason.encode("utf-8", "replace")[:_REASON_ROOM].decode("utf-8", "ignore")
    delay, priority = (0.0, None) if isinstance(verdict, Bury) else (verdict.delay, verdict.priority)
    verb = "bury" if isinstance(verdict, Bury) else "release"
    record = Record(lease.queue, lease.id, lease.token, lease.ttr, verb, delay, priority, reason)
    encoded = _encode(record)
    if len(encoded) > _RECORD_ROOM:  # very long names; the record fits without its reason
        encoded = _encode(msgspec.structs.replace(record, reason=None))
    return encoded


def _encode_kept_ack(lease: Lease, after: After) -> bytes:
    """Return the record of an ack that keeps an outcome.

    If there is too little room, the outcome's value is left out. Without any record, a job that is done would run
    again.
    """
    record = Record(
        lease.queue,
        lease.id,
        lease.token,
        lease.ttr,
        "ack",
        keep=after.keep,
        outcome=after.outcome,
        kind=after.kind,
        attempt=lease.attempt,
    )
    encoded = _encode(record)
    if len(encoded) > _RECORD_ROOM:
        short = without_value(after.outcome, _VALUE_LOST, with_errors=False)
        encoded = _encode(msgspec.structs.replace(record, outcome=short))
    return encoded
