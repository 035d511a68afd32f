"""What the processes of one worker tell one another of themselves: memory that they share, made before the first fork.

Writing is an assignment, and reading too; nobody waits for anybody. What stands there outlives the process that
wrote it. All of it are numbers; moments are ``time.monotonic``, one clock for all processes of a host. The leases that
children hold stand in tables of their own (``inflight``).
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

from .inflight import DEAD, FREE, make_tables

if TYPE_CHECKING:
    from .inflight import InflightTable

_CELL = 8  # bytes
_SPARE = 2  # tables beyond two for each child: its own, and that of a dead one before it, not yet settled


class _Cell:
    """One number of a row, as an attribute."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, row: Row, _: object = None) -> float:
        return row.cells[self._place]

    def __set__(self, row: Row, value: float) -> None:
        row.cells[self._place] = value


class Row:
    """Some numbers of the shared_state."""

    room = 16  # cells

    def __init__(self, cells: memoryview[float]) -> None:
        self.cells = cells


class WorkerRow(Row):
    """What the supervisor and the sidecar say of the whole worker."""

    started_at = _Cell(0)
    supervisor_beat = _Cell(1)
    """When the supervisor last went round; twice a second at least."""
    stops = _Cell(2)
    """How often it was told to stop. The supervisor writes it; children look, should a signal not reach them."""
    is_paused = _Cell(3)
    """Whether it was paused by a signal. The supervisor writes it, children heed it."""
    is_down = _Cell(4)
    """Whether the connection is down, as the sidecar was told by the backend. Children heed it."""
    contact = _Cell(5)
    """When the backend last answered the sidecar."""
    crashed = _Cell(6)
    """Children that died, so far."""
    replaced = _Cell(7)
    """Children that ended because they were to be replaced, so far."""
    restarts = _Cell(9)
    """How often the sidecar was told by the backend that all workers are to restart."""
    restart_mark = _Cell(11)
    """Which restart the sidecar has heard of last: another number for each, 1 for none; 0: it has not asked yet."""
    sidecar_beat = _Cell(10)
    """When the sidecar last went round; four times a second, unless it waits for the backend."""
    asked_at = _Cell(8)
    """When the sidecar began to ask the backend whether the connection is down, the last time that it got an answer."""


class ProcessRow(Row):
    """What is said of one place for a child, by whoever fills it in turn."""

    pid = _Cell(0)
    """0: nobody is there."""
    beat = _Cell(1)
    """When the child last went round."""
    taken = _Cell(2)
    """Jobs that were taken and not given back, so far, by all children of this place."""
    table = _Cell(3)
    """The number of the child's in-flight table."""


class SharedState:
    """The rows of one worker with so many *processes*, and in-flight tables of so many *slots*."""

    def __init__(self, processes: int, slots: int = 1) -> None:
        shared = mmap.mmap(-1, _CELL * Row.room * (1 + processes))
        cells = memoryview(shared).cast("d")
        rows = [cells[at : at + Row.room] for at in range(0, len(cells), Row.room)]
        self.worker = WorkerRow(rows[0])
        self.children = [ProcessRow(row) for row in rows[1:]]
        self.tables = make_tables(2 * processes + _SPARE, slots)
        self.worker.started_at = self.worker.supervisor_beat = time.monotonic()

    def free_table(self) -> InflightTable | None:
        """One that a child may be given; None: the dead ones before it have left too much that is not settled yet."""
        return next((table for table in self.tables if table.state == FREE), None)

    @property
    def is_handing_on(self) -> bool:
        """Whether the sidecar has yet to settle what a dead child held."""
        return any(table.state == DEAD for table in self.tables)
