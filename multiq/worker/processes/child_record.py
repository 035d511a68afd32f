"""The supervisor's record of one slot: the child in the slot, and the number of early deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .inflight import NEVER, InflightTable

if TYPE_CHECKING:
    from .inflight import Entry
    from .lifeline import Lifeline
    from .shared_state import ProcessRow

_KILL_MARGIN = 0.5  # seconds that a child with an overdue job gets to exit by itself


class Assignment(msgspec.Struct, frozen=True):
    """The arguments that a child gets from its supervisor."""

    lifeline: Lifeline
    table: InflightTable
    index: int
    """The index of the child's slot."""


class ProcessSlot:
    """One slot of a supervisor. When the child in the slot dies, another child takes the slot."""

    def __init__(self, index: int, row: ProcessRow) -> None:
        self.index = index
        self.row = row
        self.pid: int | None = None
        self.table: InflightTable | None = None
        self.is_timed_out = False
        self.is_cut = False
        self.started_at = 0.0
        self.start_at = 0.0
        self.early_deaths = 0
        self.is_needed = True
        """False: a worker that scales has too little work for this slot. A child in the slot ends after its jobs."""
        self.is_done = False
        """Whether the slot is not used any more, because its child has ended for good (``once``)."""

    def assign(self, pid: int, table: InflightTable) -> None:
        self.pid = table.pid = pid
        self.row.pid = pid
        self.table = table

    def kill_at(self) -> float:
        """Return the time at which the child must be killed for an overdue job."""
        return NEVER if self.table is None else self.table.kill_at() + _KILL_MARGIN

    def entries(self) -> list[Entry]:
        return [] if self.table is None else self.table.entries()

    def clear(self) -> None:
        self.pid, self.table, self.is_timed_out, self.is_cut = None, None, False, False
        self.row.pid = self.row.is_superfluous = self.row.waits_since = 0
