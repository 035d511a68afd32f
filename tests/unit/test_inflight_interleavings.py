"""The in-flight table under every interleaving of a writer and a reader, and after a death at every write.

The child's calls run once, and each single write is recorded: ``hold`` clears the slot's numbers, writes them one by
one, and writes the record in two halves. Then the reader's real code runs once for each sequence of values that it can
see: before each of its reads, any number of further writes may happen. Its result must be the state of one lease at one
moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from multiq.backend import Ack, After, Bury, GiveBack, Lease, Release
from multiq.worker.processes import inflight
from multiq.worker.processes.inflight import (
    ACKED,
    ENDED,
    NEVER,
    NOTHING,
    WAITING,
    Entry,
    Held,
    InflightTable,
    InflightWriter,
    make_tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from multiq.backend import Verdict

Change = tuple[int, bytes]
"""A single write: its place, and its value."""
Truth = tuple[str, float, str]
"""What a reader may see of a lease: its id, its mark, and the verdict in its record."""

_CELL = 8
_ENDS = {"job-1": {100.0, 150.0}, "job-2": {200.0}}
"""When each lease ends. The first one is touched once."""
_KILLS = {"job-1": {NEVER, 20.0}, "job-2": {NEVER, 40.0}}
"""When the process of each job must end."""


class Recorded:
    """A table of one slot, and the single writes of a child's calls, with what is true after each call."""

    def __init__(self, writer: type[InflightWriter] = InflightWriter) -> None:
        (self.table,) = make_tables(1, 1)
        self.table.assign()
        self.start = bytes(self.table._bytes)
        self.changes: list[Change] = []
        self.calls: list[tuple[int, frozenset[Truth]]] = [(0, frozenset())]
        """Record that a call has returned after the writes so far, and what is true then."""
        self.writer = writer(self.table)
        self.writer._bytes = _Bytes(self.changes)  # type: ignore[assignment]
        self.writer._cells = self.writer.marks = _Cells(self.changes)  # type: ignore[assignment]
        self._truth: dict[str, Truth] = {}

    def hold(self, number: int) -> Held:
        lease = Lease("default", f"job-{number}", f"token-{number}", b"", 1024, 60.0, 1, 0, 0, 0.0)
        held = Held(lease, None, 0.0, 100.0 * number)
        self.writer.hold([held])
        assert held.slot is not None
        self._note(held, WAITING)
        return held

    def begin(self, held: Held) -> None:
        held.began_at = 10.0 * int(held.lease.id[-1])
        self.writer.begin(held)
        self._note(held, held.began_at)
        self.writer.set_kill_at(held, max(_KILLS[held.lease.id] - {NEVER}))
        self._note(held, held.began_at)

    def touch(self, held: Held) -> None:
        self.writer.touch(held, max(_ENDS[held.lease.id]))
        self.calls.append((len(self.changes), self.calls[-1][1]))

    def end(self, held: Held, verdict: Verdict) -> None:
        held.verdict = verdict
        self.writer.end(held)
        kind = {Release: "release", Bury: "bury"}.get(type(verdict), "")
        if isinstance(verdict, Ack) and verdict.after is not None:
            kind = "ack"
        self._note(held, WAITING if type(verdict) is GiveBack else ENDED if kind else ACKED, kind)

    def drop(self, held: Held) -> None:
        self.writer.drop([held])
        self._truth.pop(held.lease.id)
        self.calls.append((len(self.changes), frozenset(self._truth.values())))

    def _note(self, held: Held, mark: float, verdict: str = "") -> None:
        self._truth[held.lease.id] = held.lease.id, mark, verdict
        self.calls.append((len(self.changes), frozenset(self._truth.values())))

    def memories(self) -> list[bytes]:
        """The content of the table after each write."""
        memory = bytearray(self.start)
        found = [bytes(memory)]
        for at, what in self.changes:
            memory[at : at + len(what)] = what
            found.append(bytes(memory))
        return found

    def truths_at(self, moment: int) -> frozenset[Truth]:
        """Return what may be read after this many writes: the truth before the present call, or after it."""
        before = max(index for index, (end, _) in enumerate(self.calls) if end <= moment)
        if self.calls[before][0] == moment:
            return self.calls[before][1]
        return self.calls[before][1] | self.calls[before + 1][1]

    def all_truths(self) -> frozenset[Truth]:
        return frozenset().union(*(truths for _, truths in self.calls))


class _Cells:
    """Records each number that is written to a cell."""

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes

    def __setitem__(self, index: int, value: float) -> None:
        cell = memoryview(bytearray(_CELL)).cast("d")
        cell[0] = value
        self._changes.append((index * _CELL, bytes(cell)))


class _Bytes:
    """Records what is written to a range of bytes, in two halves."""

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes

    def __setitem__(self, where: slice, what: bytes) -> None:
        middle = len(what) // 2
        self._changes += [(where.start, what[:middle]), (where.start + middle, what[middle:])]


@pytest.fixture(autouse=True)
def _single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """``struct`` first clears all bytes that it will write, and then writes field by field.

    A reader tries once: it carries nothing over to its next try, and a try may begin at any moment.
    """

    def write_slot(memory: _Bytes, at: int, *fields: Any) -> None:
        *numbers, record = fields
        cells = _Cells(memory._changes)
        for value in ([0.0] * len(numbers), numbers):
            for index, number in enumerate(value):
                cells[at // _CELL + index] = number
        memory[at + len(numbers) * _CELL :] = record

    monkeypatch.setattr(inflight, "_write_slot", write_slot)
    monkeypatch.setattr(inflight, "_READ_TRIES", 1)


# --- what a child does -----------------------------------------------------------------------------------


def acked_and_used_again(recorded: Recorded) -> None:
    first = recorded.hold(1)
    recorded.touch(first)
    recorded.begin(first)
    recorded.end(first, Ack(first.lease))
    recorded.drop(first)
    second = recorded.hold(2)
    recorded.begin(second)
    recorded.end(second, Ack(second.lease))
    recorded.drop(second)


def failed_and_used_again(recorded: Recorded) -> None:
    first = recorded.hold(1)
    recorded.begin(first)
    recorded.end(first, Release(first.lease, 30.0, None, "it did not work"))
    recorded.drop(first)
    second = recorded.hold(2)
    recorded.begin(second)
    recorded.end(second, Bury(second.lease, "it never works"))
    recorded.drop(second)


def given_back_and_used_again(recorded: Recorded) -> None:
    first = recorded.hold(1)
    recorded.drop(first)
    second = recorded.hold(2)
    recorded.begin(second)
    recorded.end(second, GiveBack(second.lease))
    recorded.drop(second)


def kept_and_used_again(recorded: Recorded) -> None:
    first = recorded.hold(1)
    recorded.begin(first)
    recorded.end(first, Ack(first.lease, After(keep=60, outcome=b'{"v":1,"value":7}')))
    recorded.drop(first)
    second = recorded.hold(2)
    recorded.begin(second)
    recorded.end(second, Ack(second.lease))
    recorded.drop(second)


STORIES = [acked_and_used_again, failed_and_used_again, given_back_and_used_again, kept_and_used_again]


# --- reading at every moment -----------------------------------------------------------------------------


class Schedule:
    """All runs of a reader, each with another interleaving of its reads and the writer's writes.

    Each read sees each possible value at the earliest possible moment. From then on, the reader can see everything that
    it could see after a later moment. So the runs have every sequence of values that a reader can see.
    """

    def __init__(self, memories: Sequence[bytes]) -> None:
        self._memories = memories
        self._choices: list[int] = []
        self._options: list[int] = []
        self._moment = 0

    def runs(self) -> Iterator[None]:
        """Each iteration is one run."""
        while True:
            self._moment, self._options = 0, []
            yield
            self._choices = self._choices[: len(self._options)]
            while self._choices and self._choices[-1] + 1 == self._options[len(self._choices) - 1]:
                self._choices.pop()
            if not self._choices:
                return
            self._choices[-1] += 1

    def read(self, start: int, end: int) -> bytes:
        """Return what one read sees in this run."""
        firsts: dict[bytes, int] = {}
        for moment in range(self._moment, len(self._memories)):
            firsts.setdefault(self._memories[moment][start:end], moment)
        number = len(self._options)
        if number == len(self._choices):
            self._choices.append(0)
        self._options.append(len(firsts))
        value, self._moment = list(firsts.items())[self._choices[number]]
        return value


class _ReadCells:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __getitem__(self, index: int) -> float:
        value: float = memoryview(self._schedule.read(index * _CELL, (index + 1) * _CELL)).cast("d")[0]
        return value


class _ReadBytes:
    """Reads a range of bytes in two halves, as they are written."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __getitem__(self, where: slice) -> bytes:
        middle = (where.start + where.stop) // 2
        return self._schedule.read(where.start, middle) + self._schedule.read(middle, where.stop)


def every_reading(recorded: Recorded, read: Callable[[InflightTable], Any]) -> Iterator[Any]:
    """Return the results of *read* for each sequence of values that it can see."""
    schedule = Schedule(recorded.memories())
    reader = InflightTable(memoryview(bytearray(len(recorded.start))), 0, 1)
    reader._cells = _ReadCells(schedule)  # type: ignore[assignment]
    reader._bytes = _ReadBytes(schedule)  # type: ignore[assignment]
    for _ in schedule.runs():
        yield read(reader)


def is_true(entry: Entry, truths: frozenset[Truth]) -> bool:
    lease = entry.held.id
    return (
        (lease, entry.mark, entry.held.verdict) in truths
        and entry.held.token == lease.replace("job", "token")
        and entry.serial == float(lease[-1])
        and entry.ends_at in _ENDS[lease]
        and entry.kill_at in _KILLS[lease]
    )


def read_beside_its_child(recorded: Recorded) -> int:
    """Read the table at every moment while its child writes. Returns how many different readings there are."""
    readings = 0
    for entries in every_reading(recorded, InflightTable.entries):
        readings += 1
        assert all(is_true(entry, recorded.all_truths()) for entry in entries), entries
    for kill_at in every_reading(recorded, InflightTable.kill_at):
        readings += 1
        assert kill_at in {20.0, 40.0, NEVER}, kill_at
    return readings


def read_after_its_child_s_death(recorded: Recorded) -> int:
    """Read the table after a death at each write. Returns how often a lease was found."""
    found = 0
    for moment, memory in enumerate(recorded.memories()):
        table = InflightTable(memoryview(bytearray(memory)), 0, 1)
        entries, truths = table.entries(), recorded.truths_at(moment)
        assert all(is_true(entry, truths) for entry in entries), (moment, entries, truths)
        found += len(entries)
    return found


@pytest.mark.parametrize("story", STORIES)
def test_a_reader_beside_a_living_child_sees_one_lease_as_it_was_at_one_moment(
    story: Callable[[Recorded], None],
) -> None:
    recorded = Recorded()
    story(recorded)
    assert read_beside_its_child(recorded) > 100


@pytest.mark.parametrize("story", STORIES)
def test_a_dead_child_s_slot_has_the_state_before_or_after_the_call_in_which_it_died(
    story: Callable[[Recorded], None],
) -> None:
    recorded = Recorded()
    story(recorded)
    assert read_after_its_child_s_death(recorded) >= 5


def test_a_lease_is_in_no_slot_only_while_it_is_held_or_dropped_or_its_verdict_is_written() -> None:
    recorded = Recorded()
    failed_and_used_again(recorded)
    # Given the moments between two calls while a lease is held
    whole = [moment for moment, truths in recorded.calls if truths]
    # Then the lease is in the table if the child dies at one of them
    memories = recorded.memories()
    for moment in whole:
        assert len(InflightTable(memoryview(bytearray(memories[moment])), 0, 1).entries()) == 1
    assert len(whole) == 8


def test_an_aborted_job_that_ends_late_changes_no_other_lease() -> None:
    # Given a table of one slot, whose job was aborted and settled, and runs on
    recorded = Recorded()
    first = recorded.hold(1)
    recorded.begin(first)
    first.is_aborted = True
    recorded.drop(first)
    # When another lease is reserved, and then the job ends
    second = Held(msgspec.structs.replace(first.lease, id="job-2"), None, 0.0, 200.0)
    recorded.writer.hold([second])
    # Then the new lease has no slot: the only slot stays with the aborted job
    assert second.slot is None
    recorded.end(first, Ack(first.lease))
    read_beside_its_child(recorded)
    read_after_its_child_s_death(recorded)


# --- planted bugs are found ------------------------------------------------------------------------------


class PublishedFirst(InflightWriter):
    """Publishes a slot before its record is written."""

    def hold(self, jobs: Sequence[Held]) -> None:
        self._cells[self._free[-1]] = WAITING
        super().hold(jobs)


class VerdictInPlace(InflightWriter):
    """Writes a verdict's record while the slot is published, and marks it as ended afterwards."""

    def end(self, held: Held) -> None:
        cells = self._cells
        self._cells = _WithoutNothing(cells)  # type: ignore[assignment]
        super().end(held)
        self._cells = cells


class _WithoutNothing:
    def __init__(self, cells: Any) -> None:
        self._cells = cells

    def __setitem__(self, index: int, value: float) -> None:
        if value != NOTHING:
            self._cells[index] = value


class NotWithdrawn(InflightWriter):
    """Frees a settled lease's slot and leaves its mark."""

    def drop(self, jobs: Sequence[Held]) -> None:
        cells = self._cells
        self._cells = _WithoutNothing(cells)  # type: ignore[assignment]
        super().drop(jobs)
        self._cells = cells


class SlotsReused(InflightWriter):
    """Uses an aborted job's slot again, and the job still writes to it."""

    def drop(self, jobs: Sequence[Held]) -> None:
        super().drop(jobs)
        self._free += [held.slot for held in jobs if held.is_aborted and held.slot is not None]


@pytest.mark.parametrize("writer", [PublishedFirst, VerdictInPlace, NotWithdrawn])
def test_a_writer_that_shows_what_is_half_written_is_noticed(writer: type[InflightWriter]) -> None:
    recorded = Recorded(writer)
    failed_and_used_again(recorded)
    with pytest.raises((AssertionError, msgspec.DecodeError)):
        read_beside_its_child(recorded)
    with pytest.raises((AssertionError, msgspec.DecodeError)):
        read_after_its_child_s_death(recorded)


def test_a_writer_that_uses_an_aborted_job_s_slot_again_is_noticed() -> None:
    recorded = Recorded(SlotsReused)
    first = recorded.hold(1)
    recorded.begin(first)
    first.is_aborted = True
    recorded.drop(first)
    recorded.hold(2)
    first.verdict = Ack(first.lease)
    recorded.writer.end(first)  # writes to the slot, which is now the second lease's
    recorded.calls.append((len(recorded.changes), recorded.calls[-1][1]))
    with pytest.raises(AssertionError):
        read_beside_its_child(recorded)
    with pytest.raises(AssertionError):
        read_after_its_child_s_death(recorded)
