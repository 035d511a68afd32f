"""The supervisor's record of one slot: the child that fills it, and its history of early deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .inflight import NEVER, InflightTable

if TYPE_CHECKING:
    from .inflight import Entry
    from .shared_state import ProcessRow

_KILL_MARGIN = 0.5  # seconds: a child ends itself for an overdue job, and is killed this much later if it could not


class Assignment(msgspec.Struct, frozen=True):
    """What a child process is given by its supervisor."""

    lifeline: int
    """A pipe that closes when the supervisor ends."""
    table: InflightTable
    """The child's in-flight table."""
    index: int
    """The number of the slot that the child fills."""


class ProcessSlot:
    """One slot of a supervisor. A child fills the slot until the child dies; then another child fills it."""

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

    def assign(self, pid: int, table: InflightTable) -> None:
        """Note that a child was forked."""
        self.pid = table.pid = pid
        self.row.pid = pid
        self.table = table

    def kill_at(self) -> float:
        """When the child must be killed for an overdue job."""
        return NEVER if self.table is None else self.table.kill_at() + _KILL_MARGIN

    def entries(self) -> list[Entry]:
        """The in-flight jobs of the child."""
        return [] if self.table is None else self.table.entries()

    def clear(self) -> None:
        """Note that the child has died."""
        self.pid, self.table, self.is_timed_out, self.is_cut = None, None, False, False
        self.row.pid = 0
