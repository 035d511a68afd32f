"""Counts for metrics, in memory that the processes of a worker share. A count outlives the child that wrote it.

Counting makes no system call. Each process writes only its own counts, and a reader adds them up. Each task that the
app has when the worker starts gets a row of counts. All other tasks share one row, so jobs cannot create labels.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from typing import TYPE_CHECKING

from multiq.events import (
    BackendDown,
    JobBuried,
    JobCancelled,
    JobCrashed,
    JobDone,
    JobEvent,
    JobExpired,
    JobFailed,
    JobLost,
    JobRetried,
    JobSnoozed,
    JobStarted,
    JobTimedOut,
)
from multiq.job import HEADER_DELAY, first_wait

if TYPE_CHECKING:
    from collections.abc import Iterable

    from multiq.events import Event, Events

BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""The inclusive upper bounds of the histogram, in seconds. One more bucket counts longer runs."""
OUTCOMES = ("done", "retried", "buried", "snoozed", "expired", "cancelled")
OTHER = "other"
"""The label of unknown tasks and of jobs without a task. A task named "other" shares this label."""

_CELL = 8  # bytes
_LOST, _CRASHED, _BACKEND_ERRORS, _LATE_SECONDS, _LATE = range(5)  # indexes of a process's cells
_COMMON = _LATE + len(BOUNDS) + 1
_TIMED_OUT = len(OUTCOMES)  # indexes of a task's cells; the outcomes come first
_PLACES: dict[type[JobEvent], int] = {
    JobRetried: OUTCOMES.index("retried"),
    JobBuried: OUTCOMES.index("buried"),
    JobSnoozed: OUTCOMES.index("snoozed"),
    JobExpired: OUTCOMES.index("expired"),
    JobCancelled: OUTCOMES.index("cancelled"),
    JobTimedOut: _TIMED_OUT,
}
_SECONDS = _TIMED_OUT + 1
_BUCKETS = _SECONDS + 1
_WAIT_SECONDS = _BUCKETS + len(BOUNDS) + 1
_WAITS = _WAIT_SECONDS + 1
_TASK_ROOM = _WAITS + len(BOUNDS) + 1


class TaskCounts:
    def __init__(self, task: str, cells: list[float]) -> None:
        self.task = task
        self.outcomes = dict(zip(OUTCOMES, cells, strict=False))
        self.timed_out = cells[_TIMED_OUT]
        self.seconds = cells[_SECONDS]
        """The sum over all runs of the task, in seconds."""
        self.buckets = cells[_BUCKETS:_WAIT_SECONDS]
        """``buckets[i]`` counts the runs of at most ``BOUNDS[i]`` seconds that no lower bucket counts."""
        self.wait_seconds = cells[_WAIT_SECONDS]
        self.wait_buckets = cells[_WAITS:]
        """Like ``buckets``, but for the time that jobs have waited for their first start."""


class Counts:
    def __init__(self, tasks: list[TaskCounts], cells: list[float]) -> None:
        self.tasks = tasks
        self.late_seconds = cells[_LATE_SECONDS]
        self.late_buckets = cells[_LATE:_COMMON]
        """Like ``TaskCounts.buckets``, but for the time between the due time and the start of schedules' jobs."""
        self.lost = cells[_LOST]
        self.crashed = cells[_CRASHED]
        self.backend_errors = cells[_BACKEND_ERRORS]


class Metrics:
    """The shared counts of *processes* processes. Create the object before forking."""

    def __init__(self, tasks: Iterable[str], processes: int) -> None:
        self._tasks = [*sorted(set(tasks) - {OTHER}), OTHER]
        room = _COMMON + _TASK_ROOM * len(self._tasks)
        cells = memoryview(mmap.mmap(-1, _CELL * room * processes)).cast("d")
        self._rows = [cells[at : at + room] for at in range(0, len(cells), room)]

    def count(self, events: Events, process: int) -> None:
        """Count the events of this process. *process* is its index."""
        places = {task: _COMMON + _TASK_ROOM * number for number, task in enumerate(self._tasks)}
        _ProcessMetrics(self._rows[process], places).listen(events)

    def read(self) -> Counts:
        """Return the sums over all processes."""
        cells = [sum(numbers) for numbers in zip(*self._rows, strict=True)]
        starts = range(_COMMON, len(cells), _TASK_ROOM)
        counts = [TaskCounts(task, cells[at : at + _TASK_ROOM]) for task, at in zip(self._tasks, starts, strict=True)]
        return Counts(counts, cells)


class _ProcessMetrics:
    def __init__(self, cells: memoryview[float], places: dict[str, int]) -> None:
        self._cells = cells
        self._places = places
        self._other = places[OTHER]
        self._lock = threading.Lock()  # jobs run on threads, and an addition is not atomic: it is a read and a write

    def listen(self, events: Events) -> None:
        events.subscribe(JobDone, self._ended)
        events.subscribe(JobFailed, self._ended)
        events.subscribe(JobStarted, self._started)
        for kind, place in _PLACES.items():
            self._count_tasks(events, kind, place)
        for place, event in ((_LOST, JobLost), (_CRASHED, JobCrashed), (_BACKEND_ERRORS, BackendDown)):
            self._count(events, event, place)

    def _started(self, event: JobStarted) -> None:
        job = event.job
        wait = first_wait(job)
        if wait is None:
            return
        bucket = bisect_left(BOUNDS, wait)
        at = self._places.get(job.task or OTHER, self._other)
        with self._lock:
            self._cells[at + _WAIT_SECONDS] += wait
            self._cells[at + _WAITS + bucket] += 1
            if HEADER_DELAY in job.headers:
                self._cells[_LATE_SECONDS] += wait
                self._cells[_LATE + bucket] += 1

    def _ended(self, event: JobDone | JobFailed) -> None:
        at = self._places.get(event.job.task or OTHER, self._other)
        bucket = at + _BUCKETS + bisect_left(BOUNDS, event.seconds)
        cells = self._cells
        with self._lock:
            cells[at + _SECONDS] += event.seconds
            cells[bucket] += 1
            if type(event) is JobDone:  # a failure is followed by an event with its outcome
                cells[at] += 1

    def _count_tasks(self, events: Events, kind: type[JobEvent], place: int) -> None:
        def add(event: JobEvent) -> None:
            at = self._places.get(event.job.task or OTHER, self._other) + place
            with self._lock:
                self._cells[at] += 1

        events.subscribe(kind, add)

    def _count(self, events: Events, kind: type[Event], place: int) -> None:
        def add(_: Event) -> None:
            with self._lock:
                self._cells[place] += 1

        events.subscribe(kind, add)
