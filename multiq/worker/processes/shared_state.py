"""The shared state of one worker: numbers in memory that its processes share, made before the first fork.

Reading and writing are plain assignments without locks; each number has one writer. A number outlives the process that
wrote it. Moments are ``time.monotonic``, one clock for all processes of a host. The leases that children hold stand in
tables of their own (``inflight``).
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

from .inflight import DEAD, FREE, make_tables

if TYPE_CHECKING:
    from .inflight import InflightTable

_CELL = 8  # bytes
_SPARE = 2  # tables beyond two per child: its own, and one of a dead predecessor that is not settled yet


class _Cell:
    """One number of a row, as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, row: Row, _: object = None) -> float:
        return row.cells[self._index]

    def __set__(self, row: Row, value: float) -> None:
        row.cells[self._index] = value


class Row:
    """A fixed number of cells of the shared memory."""

    room = 16  # cells

    def __init__(self, cells: memoryview[float]) -> None:
        self.cells = cells


class WorkerRow(Row):
    """What the supervisor and the sidecar write about the whole worker."""

    started_at = _Cell(0)
    supervisor_beat = _Cell(1)
    """When the supervisor last made a round; it does twice a second at least."""
    stops = _Cell(2)
    """How many stops were requested. The supervisor writes it; children read it in case they miss a signal."""
    is_paused = _Cell(3)
    """Whether a signal has paused the worker. The supervisor writes it; children obey it."""
    is_down = _Cell(4)
    """Whether the connection is down, as the sidecar has read from the backend. Children obey it."""
    asked_at = _Cell(5)
    """When the sidecar began its last successful call to read whether the connection is down."""
    contact = _Cell(6)
    """When the backend last answered the sidecar."""
    crashed = _Cell(7)
    """Children that died, so far."""
    replaced = _Cell(8)
    """Children that ended because they were to be replaced, so far."""
    restarts = _Cell(9)
    """How many requests to restart the sidecar has read from the backend."""
    restart_mark = _Cell(10)
    """The last request to restart that the sidecar has read, as a number. 1: there is none; 0: it has not asked yet."""
    sidecar_beat = _Cell(11)
    """When the sidecar last made a round; it does four times a second, unless it waits for the backend."""


class ProcessRow(Row):
    """What the children that fill one slot of the supervisor, one after the other, write about themselves."""

    pid = _Cell(0)
    """0: no child is there."""
    beat = _Cell(1)
    """When the child last made a turn."""
    taken = _Cell(2)
    """Jobs that were taken and not given back so far, by all children of this slot."""
    table = _Cell(3)
    """The number of the child's in-flight table."""


class SharedState:
    """The rows of one worker with so many *processes*, and in-flight tables of so many *slots* each."""

    def __init__(self, processes: int, slots: int = 1) -> None:
        shared = mmap.mmap(-1, _CELL * Row.room * (1 + processes))
        cells = memoryview(shared).cast("d")
        rows = [cells[at : at + Row.room] for at in range(0, len(cells), Row.room)]
        self.worker = WorkerRow(rows[0])
        self.children = [ProcessRow(row) for row in rows[1:]]
        self.tables = make_tables(2 * processes + _SPARE, slots)
        self.worker.started_at = self.worker.supervisor_beat = time.monotonic()

    def free_table(self) -> InflightTable | None:
        """A table for a new child; None: too many dead children's tables are not settled yet."""
        return next((table for table in self.tables if table.state == FREE), None)

    @property
    def is_handing_on(self) -> bool:
        """Whether the sidecar has yet to settle what a dead child held."""
        return any(table.state == DEAD for table in self.tables)
