"""The health of a worker, and its jobs. Both are read from shared memory, so no other process has to answer."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.control.presence import Answer, Process, Run

if TYPE_CHECKING:
    from multiq.settings.process_range import ProcessRange
    from multiq.worker.processes.inflight import Entry
    from multiq.worker.processes.process import ProcessSettings
    from multiq.worker.processes.shared_state import ProcessRow, SharedState

_BACKEND_LIMIT = 60.0  # seconds without an answer; a restart of the server takes less
_BACKEND_PATIENCE = 15.0  # seconds without an answer; the sidecar calls the backend every five seconds
_CHILD_LIMIT = 30.0  # seconds between two passes of a child's loop; an idle child makes one every five seconds
_CHILDLESS_LIMIT = 5.0  # seconds without a child; the first start and a replacement take milliseconds
_SUPERVISOR_LIMIT = 10.0  # seconds between two passes of the supervisor's loop, which makes two per second
_LISTED = 100  # jobs in an answer; the answer must fit into the smallest ``max_body`` of all backends


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the health file and of the health pages. All times are in seconds."""

    pid: int
    """The pid of the supervisor."""
    worker: str
    """``host:pid``."""
    state: str
    """``working``, ``paused``, ``down`` or ``draining``."""
    is_well: bool
    """Whether all processes make progress and the backend has answered within a minute. If not, restart the worker."""
    is_ready: bool
    """Whether the worker is well and takes jobs."""
    waits_for: list[str]
    """The reasons why the worker is not ready."""
    up_for: float
    backend_answered: float | None
    """Seconds since the backend's last answer. None: the backend has not answered yet."""
    children: list[int]
    """The pids of the children."""
    wanted: int
    """The number of children that the worker needs now. It differs from the number of ``children`` while some of them
    start or end.
    """
    processes: str
    """The number of children as the user has set it: ``4``, or ``1:8`` for a worker that scales."""
    jobs: int
    """The number of jobs run so far."""
    running: int
    crashed: int
    """The number of children that have died."""
    replaced: int
    """The number of children that have ended in order to be replaced."""


class Health:
    """Reads the status of the worker whose supervisor is this process's parent. Thread-safe."""

    def __init__(self, shared_state: SharedState, settings: ProcessSettings, limits: ProcessRange) -> None:
        self._shared_state = shared_state
        self._settings = settings
        self.limits = limits
        self._pid = os.getppid()
        self._name = f"{socket.gethostname()}:{self._pid}"

    def answer(self) -> Answer:
        """Return the answer to viewers of all workers (``multiq top``)."""
        now = time.monotonic()
        room = _LISTED
        processes, running = [], 0
        for row in self._shared_state.children:
            if not row.pid:
                continue
            entries = self.entries(row)
            runs = [
                Run(entry.held.queue, entry.held.id, now - entry.mark)
                for entry in sorted(entries, key=lambda entry: entry.mark)
                if entry.is_running
            ]
            held = sum(entry.mark >= 0 for entry in entries)
            processes.append(Process(int(row.pid), held, runs[:room]))
            running += len(runs)
            room -= len(processes[-1].runs)
        return Answer(
            worker=self._name,
            state=self._state,
            up_for=now - self._shared_state.worker.started_at,
            queues=list(self._settings.queues),
            at_a_time=self._settings.at_a_time,
            processes=processes,
            running=running,
        )

    def report(self) -> HealthReport:
        now, worker = time.monotonic(), self._shared_state.worker
        rows = [row for row in self._shared_state.children if row.pid]
        entries = [self.entries(row) for row in rows]
        faults = self._faults(now, rows, entries)
        waits_for = [*faults, *self._reasons(now, rows)]
        return HealthReport(
            pid=self._pid,
            worker=self._name,
            state=self._state,
            is_well=not faults,
            is_ready=not waits_for,
            waits_for=waits_for,
            up_for=now - worker.started_at,
            backend_answered=now - worker.contact if worker.contact else None,
            children=[int(row.pid) for row in rows],
            wanted=int(worker.wanted),
            processes=str(self.limits),
            jobs=max(0, int(sum(row.taken for row in self._shared_state.children)) - sum(map(_count_held, entries))),
            running=sum(entry.is_running for each in entries for entry in each),
            crashed=int(worker.crashed),
            replaced=int(worker.replaced),
        )

    def entries(self, row: ProcessRow) -> list[Entry]:
        return self._shared_state.tables[int(row.table)].entries() if row.pid else []

    @property
    def _state(self) -> str:
        worker = self._shared_state.worker
        if worker.stops:
            return "draining"
        return "down" if worker.is_down else "paused" if worker.is_paused else "working"

    def _faults(self, now: float, rows: list[ProcessRow], entries: list[list[Entry]]) -> list[str]:
        """Return the faults that a restart of the worker would repair."""
        worker = self._shared_state.worker
        faults = []
        if now - worker.supervisor_beat > _SUPERVISOR_LIMIT:
            faults.append(f"the supervisor has been stuck for {now - worker.supervisor_beat:.0f} s")
        if not rows and not worker.stops and self._childless_for(now) > _CHILDLESS_LIMIT:
            faults.append(f"no process has worked for {self._childless_for(now):.0f} s: see the worker's log")
        for row, held in zip(rows, entries, strict=True):
            # While a child runs an inline job, its loop does nothing else. The job's timeout limits this time.
            if now - row.beat > _CHILD_LIMIT and not any(entry.is_running for entry in held):
                faults.append(f"process {int(row.pid)} has been stuck for {now - row.beat:.0f} s")
        silence = now - (worker.contact or worker.started_at)
        if silence > _BACKEND_LIMIT:
            faults.append(f"the backend has not answered for {silence:.0f} s")
        return faults

    def _reasons(self, now: float, rows: list[ProcessRow]) -> list[str]:
        """Return the reasons why a worker without faults takes no jobs."""
        reasons = []
        contact = self._shared_state.worker.contact
        if not contact:
            reasons.append("the backend has not answered yet")
        elif _BACKEND_PATIENCE < now - contact <= _BACKEND_LIMIT:
            reasons.append(f"the backend has not answered for {now - contact:.0f} s")
        if not rows and not self._shared_state.worker.stops and self._childless_for(now) <= _CHILDLESS_LIMIT:
            reasons.append("no process works: one is about to start")
        if self._state != "working":
            reasons.append(f"it is {self._state}")
        return reasons

    def _childless_for(self, now: float) -> float:
        """Return the seconds for which the worker has had no child. 0: the supervisor has not recorded such a time."""
        since = self._shared_state.worker.childless_since
        return now - since if since else 0.0


def _count_held(entries: list[Entry]) -> int:
    return sum(entry.mark >= 0 for entry in entries)
