"""One of a worker's places for children, as its supervisor sees it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .ledger import NEVER, LedgerReader

if TYPE_CHECKING:
    from .board import ChildRow
    from .ledger import Entry

_KILL_LATE = 0.5  # seconds: a child ends itself for a job over its limit, and is killed if it could not


class Post(msgspec.Struct, frozen=True):
    """What a child gets to know of those around it."""

    lifeline: int
    """A pipe that ends with the supervisor."""
    ledger: Path
    """Where to write what it holds; the file is its own to make."""
    place: int
    """Which of the worker's places for children it fills."""


class Slot:
    """One place for a child, with the history that the brake needs."""

    def __init__(self, place: int, row: ChildRow) -> None:
        self.place = place
        self.row = row
        self.pid: int | None = None
        self.ledger = Path()
        self._reader: LedgerReader | None = None
        self.is_timed_out = False
        self.started_at = 0.0
        self.start_at = 0.0
        self.early_deaths = 0

    def kill_at(self) -> float:
        """When the child must be killed for a job that does not end."""
        return min((entry.kill_at + _KILL_LATE for entry in self.entries() if entry.is_running), default=NEVER)

    def entries(self) -> list[Entry]:
        """What the child holds."""
        reader = self._open()
        return [] if reader is None else reader.entries()

    def has_worked(self) -> bool:
        """Whether the child has got as far as a job."""
        reader = self._open()
        return reader is not None and reader.has_held

    def forget(self) -> None:
        """The child is dead."""
        if self._reader is not None:
            self._reader.close()
        self.pid, self._reader, self.is_timed_out = None, None, False
        self.row.pid = 0

    def _open(self) -> LedgerReader | None:
        if self._reader is None:
            with contextlib.suppress(OSError, ValueError):  # not made yet
                self._reader = LedgerReader(self.ledger)
        return self._reader
