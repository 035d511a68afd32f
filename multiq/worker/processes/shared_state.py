"""The shared state of one worker: numbers in memory that its processes share. The memory is created before the first
fork.

Each number has one writer, so assignments need no locks. A number outlives the process that wrote it. Times are
``time.monotonic``, which is one clock for all processes of a host. The leases that children hold are in separate tables
(``inflight``).
"""

from __future__ import annotations

import mmap
import time
from typing import TYPE_CHECKING

from .inflight import DEAD, FREE, make_tables

if TYPE_CHECKING:
    from .inflight import InflightTable

_CELL = 8  # bytes
_SPARE = 2  # tables in addition to two for each child; the two are for the child itself and for its dead predecessor


class _Cell:
    """A descriptor for one number of a row."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, row: Row, _: object = None) -> float:
        return row.cells[self._index]

    def __set__(self, row: Row, value: float) -> None:
        row.cells[self._index] = value


class Row:
    room = 16  # cells

    def __init__(self, cells: memoryview[float]) -> None:
        self.cells = cells


class WorkerRow(Row):
    """The part that the supervisor and the sidecar write."""

    started_at = _Cell(0)
    supervisor_beat = _Cell(1)
    """The time of the last pass of the supervisor's loop, which makes at least two passes per second."""
    stops = _Cell(2)
    """The number of requested stops. The supervisor writes this number, and children read it in case they miss a
    signal.
    """
    is_paused = _Cell(3)
    """Whether a signal has paused the worker. The supervisor writes this flag, and children obey it."""
    is_down = _Cell(4)
    """Whether the connection is down. The sidecar reads the flag from the backend, and children obey it."""
    asked_at = _Cell(5)
    """The time at which the sidecar began the last successful call that read ``is_down``."""
    contact = _Cell(6)
    """The time of the backend's last answer to the sidecar."""
    crashed = _Cell(7)
    """The number of children that have died."""
    replaced = _Cell(8)
    """The number of children that have ended in order to be replaced."""
    restarts = _Cell(9)
    """The number of restart requests that the sidecar has read from the backend."""
    restart_mark = _Cell(10)
    """The last restart request that the sidecar has read, as a number: 1 for none, 0 before the first call."""
    sidecar_beat = _Cell(11)
    """The time of the last pass of the sidecar's loop, which makes four passes per second if the backend answers."""
    has_cancels = _Cell(12)
    """Whether there may be requests to cancel jobs. The sidecar reads the flag from the backend."""
    wanted = _Cell(13)
    """The number of children that a worker that scales needs now. The sidecar writes this number."""
    childless_since = _Cell(14)
    """The time since which the worker has had no child. 0 while it has one. The supervisor writes this time."""


class ProcessRow(Row):
    """The part that a child writes. Successive children in the same slot share one row."""

    pid = _Cell(0)
    """0 if there is no child."""
    beat = _Cell(1)
    """The time of the last pass of the child's loop."""
    taken = _Cell(2)
    """The number of jobs taken and not given back, by all children of this slot so far."""
    table = _Cell(3)
    """The index of the child's in-flight table."""
    is_superfluous = _Cell(4)
    """Whether the child must end after its running jobs. The supervisor writes this flag."""
    waits_since = _Cell(5)
    """The time since which the child has had room for another job, but has received no job. 0 if the child runs as many
    jobs as it can."""


class SharedState:
    """The rows of a worker with *processes* children, and in-flight tables with *slots* slots each."""

    def __init__(self, processes: int, slots: int = 1) -> None:
        shared = mmap.mmap(-1, _CELL * Row.room * (1 + processes))
        cells = memoryview(shared).cast("d")
        rows = [cells[at : at + Row.room] for at in range(0, len(cells), Row.room)]
        self.worker = WorkerRow(rows[0])
        self.children = [ProcessRow(row) for row in rows[1:]]
        self.tables = make_tables(2 * processes + _SPARE, slots)
        self.worker.started_at = self.worker.supervisor_beat = self.worker.childless_since = time.monotonic()

    def free_table(self) -> InflightTable | None:
        """Return a table for a new child. None if the tables of too many dead children are not settled yet."""
        return next((table for table in self.tables if table.state == FREE), None)

    @property
    def is_handing_on(self) -> bool:
        """Whether the sidecar still has to settle jobs of a dead child."""
        return any(table.state == DEAD for table in self.tables)
