"""Scales a worker: decides how many processes it needs, from the jobs that wait and the jobs that run.

``Scaling`` runs on a thread of the sidecar, because it calls the backend. It writes the number of needed processes to
the shared state, and the supervisor chooses the slots that get a process or lose it (``NeededSlots``). See decision 75
in ``docs/decisions``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from multiq.backend import State
from multiq.errors import MultiqError

from .inflight import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiq.backend import Backend
    from multiq.settings.process_range import ProcessRange

    from .child_record import ProcessSlot
    from .shared_state import SharedState, WorkerRow

_log = logging.getLogger("multiq.sidecar")
_supervisor_log = logging.getLogger("multiq.supervisor")

_LOOK_EVERY = 0.5  # seconds
_LOOKS = 4  # the smallest number of looks within ``up_after``, so that a single look decides nothing
_BUSY_SHARE = 0.7  # processes are ended only if the remaining processes will be busy for at most this share of the time
_IDLE_AFTER = 0.2  # a process counts as idle when it has waited for this number of seconds
_STUCK_AFTER = 30.0  # a process whose loop made its last pass before this number of seconds takes no jobs
_END_WAIT = 1.0  # seconds that ``stop`` waits for the thread


class Needs:
    """Computes the number of needed processes. It has no clock and no backend.

    - *number*: the number of processes at the beginning.
    - *at_a_time*: the number of jobs that a process can run at the same time.
    - *up_after*: the number of seconds for which a backlog must exist before processes are added.
    - *down_after*: the number of seconds for which there must be no backlog before unneeded processes are ended.
    """

    def __init__(
        self, limits: ProcessRange, number: int, *, at_a_time: int, up_after: float, down_after: float, now: float
    ) -> None:
        self._limits = limits
        self._at_a_time = at_a_time
        self._up_after = up_after
        self._down_after = down_after
        self._backlog_since: float | None = None
        self._taken_before = 0.0
        self._runs: list[int] = []  # the number of running jobs at each look since ``_quiet_since``
        self._quiet_since = now
        self.number = min(max(number, limits.least), limits.most)

    def note(self, now: float, *, ready: int, running: int, taken: float) -> int:
        """Take one look into account. Returns the number of needed processes.

        - *ready*: the number of jobs that wait in the queues.
        - *running*: the number of jobs that run.
        - *taken*: the number of jobs that the processes have taken so far.
        """
        self._runs.append(running)
        self._note_backlog(now, ready, taken)
        if self._backlog_since is None:
            self._shrink(now)
        elif now - self._backlog_since >= self._up_after:
            self._grow(ready)
            self.forget(now)
        return self.number

    def forget(self, now: float) -> None:
        """Start the measurement again, because the last seconds are unknown, or because new processes need time to take
        jobs."""
        self._backlog_since = None
        self._runs = []
        self._quiet_since = now

    def _note_backlog(self, now: float, ready: int, taken: float) -> None:
        """Record whether there is a backlog. A queue of short jobs can have jobs at all times although each job starts
        soon. Such a queue has no backlog."""
        if not ready:
            self._backlog_since = None
        elif self._backlog_since is None:
            self._backlog_since, self._taken_before = now, taken
        elif now > self._backlog_since:
            rate = (taken - self._taken_before) / (now - self._backlog_since)
            if ready <= rate * self._up_after:  # at this rate, the waiting jobs are taken soon enough
                self._backlog_since = None

    def _grow(self, ready: int) -> None:
        more = min(math.ceil(ready / self._at_a_time), self.number)  # at most twice as many processes
        self.number = min(self._limits.most, self.number + more)

    def _shrink(self, now: float) -> None:
        if now - self._quiet_since < self._down_after:
            return
        busy = max(*self._runs, sum(self._runs) / len(self._runs) / _BUSY_SHARE)
        self.number = min(self.number, max(self._limits.least, math.ceil(busy / self._at_a_time)))
        self.forget(now)


class Scaling:
    """Looks at the queues and the processes at intervals, and writes the number of needed processes.

    - *at_a_time*, *up_after*, *down_after*: see ``Needs``.
    """

    def __init__(
        self,
        backend: Backend,
        queues: Sequence[str],
        shared_state: SharedState,
        limits: ProcessRange,
        *,
        at_a_time: int,
        up_after: float,
        down_after: float,
    ) -> None:
        self._backend = backend
        self._queues = queues
        self._shared_state = shared_state
        self._row = shared_state.worker
        self._taken = 0.0
        self._needs = Needs(
            limits,
            int(self._row.wanted),
            at_a_time=at_a_time,
            up_after=up_after,
            down_after=down_after,
            now=time.monotonic(),
        )
        self._every = min(_LOOK_EVERY, max(0.01, up_after / _LOOKS))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiq-scaling", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(_END_WAIT)

    def _run(self) -> None:
        while not self._ended.wait(self._every):
            try:
                wanted = self._look()
            except MultiqError:  # the children report the outage
                self._needs.forget(time.monotonic())
            except Exception:  # noqa: BLE001 - logged, and the number of processes stays
                _log.exception("the worker cannot be scaled now")
                self._needs.forget(time.monotonic())
            else:
                if not self._ended.is_set():
                    self._row.wanted = wanted

    def _look(self) -> int:
        rows = [row for row in self._shared_state.children if row.pid]
        entries = [entry for row in rows for entry in self._shared_state.tables[int(row.table)].entries()]
        taken = sum(row.taken for row in self._shared_state.children)
        has_work = bool(entries) or taken != self._taken
        self._taken = taken
        row = self._row
        # If processes are idle, no job waits for a process. If jobs are ready nevertheless, they wait for their limits.
        # So no call of the backend is needed.
        now = time.monotonic()
        has_idle = any(0 < child.waits_since < now - _IDLE_AFTER and child.beat > now - _STUCK_AFTER for child in rows)
        is_asked = has_work and not (has_idle or row.stops or row.is_paused or row.is_down)
        ready = sum(map(self._ready, self._queues)) if is_asked else 0
        return self._needs.note(
            time.monotonic(), ready=ready, running=sum(entry.is_running for entry in entries), taken=taken
        )

    def _ready(self, queue: str) -> int:
        stats = self._backend.stats(queue)
        if stats.paused_for is not None:
            return 0
        if stats.ready is not None:
            return stats.ready
        # the backend cannot count jobs, but it can list them
        return len(self._backend.jobs(queue, State.READY, limit=1).jobs)


class NeededSlots:
    """Marks the slots of a supervisor as needed or not needed. The arguments are those of ``Supervisor``.

    No child is interrupted: an unneeded child ends after its jobs.
    """

    def __init__(
        self, slots: Sequence[ProcessSlot], worker_row: WorkerRow, least: int | None, *, shrinks: bool
    ) -> None:
        self._slots = slots
        self._worker_row = worker_row
        self._least = len(slots) if least is None else least
        self._shrinks = shrinks

    @property
    def scales(self) -> bool:
        return self._least < len(self._slots)

    def count(self) -> int:
        return sum(slot.is_needed for slot in self._slots)

    def start_with(self, number: int | None) -> None:
        """Mark the first *number* slots as needed. None: as few as possible."""
        number = min(max(number or 0, self._least), len(self._slots))
        self._worker_row.wanted = number
        for slot in self._slots[number:]:
            slot.is_needed, slot.start_at = False, NEVER

    def follow(self) -> None:
        """Mark as many slots as the sidecar has decided."""
        before, wanted = self.count(), int(self._worker_row.wanted)
        if not self.scales or wanted == before:
            return
        if wanted > before:
            self._need_more(wanted - before)
        elif self._shrinks:
            self._need_fewer(before - wanted)
        after = self.count()
        if after != before:  # a slot that is done is not used again
            why = "jobs wait" if after > before else "there is too little work"
            _supervisor_log.info("%s: from %d to %d processes", why, before, after)

    def _need_more(self, number: int) -> None:
        # Free slots come first. In the other slots, the next child can start only when the unneeded child has ended.
        spare = [slot for slot in self._slots if not (slot.is_needed or slot.is_done)]
        spare.sort(key=lambda slot: slot.pid is not None)
        for slot in spare[:number]:
            slot.is_needed = True
            if slot.pid is None:
                slot.start_at = time.monotonic()

    def _need_fewer(self, number: int) -> None:
        """Mark slots as not needed: first the slots without a child, then those whose children hold the fewest jobs."""
        used = [slot for slot in self._slots if slot.is_needed and not slot.is_done]
        used.sort(key=lambda slot: (slot.pid is not None, len(slot.entries())))
        for slot in used[:number]:
            slot.is_needed = False
            if slot.pid is None:
                slot.start_at = NEVER
                continue
            slot.row.is_superfluous = 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGCONT)  # wakes the child, which then reads the flag
