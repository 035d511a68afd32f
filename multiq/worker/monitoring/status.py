"""How a worker is, as one of its processes can tell without asking another: from shared memory alone."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.control.presence import Answer, Process, Run

if TYPE_CHECKING:
    from multiq.worker.processes.inflight import Entry
    from multiq.worker.processes.process import ProcessSettings
    from multiq.worker.processes.shared_state import ProcessRow, SharedState

_BACKEND_LIMIT = 60.0  # seconds without an answer: more than a server needs to be restarted
_BACKEND_PATIENCE = 15.0  # seconds: it is asked every five
_CHILD_LIMIT = 30.0  # seconds: a child goes round every five when it is idle
_SUPERVISOR_LIMIT = 10.0  # seconds: it goes round twice in one
_LISTED = 100  # jobs of one worker: an answer must fit into what the smallest backend takes for a job


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's health, as programs read it. Seconds all."""

    pid: int
    """The supervisor's."""
    worker: str
    """``host:pid``."""
    state: str
    """``working``, ``paused``, ``down`` or ``draining``."""
    is_well: bool
    """Its processes do what they should, and the backend is not silent for long: if not, start it anew."""
    is_ready: bool
    """And it takes jobs."""
    waits_for: list[str]
    """What keeps it from being ready."""
    up_for: float
    backend_answered: float | None
    """So long ago; None: not yet."""
    children: list[int]
    """Their pids."""
    jobs: int
    """That have run so far."""
    running: int
    crashed: int
    """Children that died, so far."""
    replaced: int
    """Children that ended because they were to be replaced, so far."""


class Status:
    """Looks at the worker whose supervisor has forked this process. From any thread."""

    def __init__(self, shared_state: SharedState, settings: ProcessSettings) -> None:
        self._shared_state = shared_state
        self._settings = settings
        self._pid = os.getppid()
        self._name = f"{socket.gethostname()}:{self._pid}"

    def answer(self) -> Answer:
        """What those see who look at all workers."""
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
        """What those see who decide whether it goes on."""
        now, worker = time.monotonic(), self._shared_state.worker
        rows = [row for row in self._shared_state.children if row.pid]
        entries = [self.entries(row) for row in rows]
        faults = self._faults(now, rows, entries)
        waits_for = [*faults, *self._reasons(now)]
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
            jobs=max(0, int(sum(row.taken for row in self._shared_state.children)) - sum(map(_count_held, entries))),
            running=sum(entry.is_running for each in entries for entry in each),
            crashed=int(worker.crashed),
            replaced=int(worker.replaced),
        )

    def entries(self, row: ProcessRow) -> list[Entry]:
        """What a child holds."""
        return self._shared_state.tables[int(row.table)].entries() if row.pid else []

    @property
    def _state(self) -> str:
        worker = self._shared_state.worker
        if worker.stops:
            return "draining"
        return "down" if worker.is_down else "paused" if worker.is_paused else "working"

    def _faults(self, now: float, rows: list[ProcessRow], entries: list[list[Entry]]) -> list[str]:
        """What a new start would mend."""
        worker = self._shared_state.worker
        faults = []
        if now - worker.supervisor_beat > _SUPERVISOR_LIMIT:
            faults.append(f"the supervisor has not gone round for {now - worker.supervisor_beat:.0f} s")
        if not rows and not worker.stops:
            faults.append("no process works: each died young and waits to be replaced")
        for row, held in zip(rows, entries, strict=True):
            # one that runs a job may be deaf as long as that job may run, and its time limit sees to that
            if now - row.beat > _CHILD_LIMIT and not any(entry.is_running for entry in held):
                faults.append(f"process {int(row.pid)} has not gone round for {now - row.beat:.0f} s")
        silence = now - (worker.contact or worker.started_at)
        if silence > _BACKEND_LIMIT:
            faults.append(f"the backend has not answered for {silence:.0f} s")
        return faults

    def _reasons(self, now: float) -> list[str]:
        """What keeps a worker in good health from taking jobs."""
        reasons = []
        contact = self._shared_state.worker.contact
        if not contact:
            reasons.append("the backend has not answered yet")
        elif _BACKEND_PATIENCE < now - contact <= _BACKEND_LIMIT:
            reasons.append(f"the backend has not answered for {now - contact:.0f} s")
        if self._state != "working":
            reasons.append(f"it is {self._state}")
        return reasons


def _count_held(entries: list[Entry]) -> int:
    return sum(entry.mark >= 0 for entry in entries)
