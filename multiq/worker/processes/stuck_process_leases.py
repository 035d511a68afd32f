"""Renews the leases of stuck worker processes, and does not end the processes. The sidecar does this.

A child is stuck while one call into C occupies its interpreter, perhaps for minutes. Its heartbeat cannot renew leases
in this time.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.backend import GiveBack, Touch
from multiq.errors import MultiqError
from multiq.outage_log import Outage
from multiq.worker.execution.heartbeat import TOUCH_SHARE

from .dead_children import lease_of
from .inflight import LIVE, WAITING

if TYPE_CHECKING:
    from multiq.app import App
    from multiq.backend import Verdict

    from .dead_children import Recovery
    from .inflight import Entry, InflightTable
    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")

_SLACK = 0.1  # share of a ttr by which a touch may be late before the child counts as stuck


class StuckProcesses:
    """Touches the leases of the children of one worker, if they have missed a touch.

    *recovery* settles the verdicts.
    """

    def __init__(self, app: App, shared_state: SharedState, recovery: Recovery) -> None:
        self._tables = shared_state.tables
        self._worker_row = shared_state.worker
        self._can_settle = bool(app.backend.capabilities.portable_leases)  # if False, a lease ends with its connection
        self._recovery = recovery
        self._touched: dict[tuple[int, float, float], float] = {}  # (table, life, serial) -> time of the last touch
        self._lost: set[tuple[int, float, float]] = set()
        self._outage = Outage()

    def forget(self, child: tuple[int, float]) -> None:
        """Drop the data about a child that has ended. *child* is its table's ``number`` and ``life``."""
        self._touched = {lease: at for lease, at in self._touched.items() if lease[:2] != child}
        self._lost = {lease for lease in self._lost if lease[:2] != child}

    def touch(self) -> None:
        """Renew the leases of living children that have missed a touch."""
        if not self._can_settle:
            return
        now = time.monotonic()
        for table in self._tables:
            if table.state != LIVE or table.next_touch > now or _is_stopped(table.pid):
                continue
            due = [entry for entry in table.entries() if self._needs_touch(table, entry, now)]
            if due:
                self._worker_row.sidecar_beat = time.monotonic()
                self._keep_alive(table, due, now)

    def _needs_touch(self, table: InflightTable, entry: Entry, now: float) -> bool:
        key = table.number, table.life, entry.serial
        if key in self._lost:
            return False
        late_from = table.next_touch + _SLACK * entry.held.ttr
        return now >= max(late_from, self._touched.get(key, 0.0) + TOUCH_SHARE * entry.held.ttr)

    def _keep_alive(self, table: InflightTable, entries: list[Entry], now: float) -> None:
        """Touch the leases of jobs that run, have run, or wait.

        If a child can no longer begin a waiting job (``Entry.ends_at``), this method gives the waiting job back. So the
        job need not wait for the stuck job.
        """
        verdicts: list[Verdict] = []
        for entry in entries:
            is_waiting = entry.mark == WAITING and now >= entry.ends_at
            verdicts.append(GiveBack(lease_of(entry.held)) if is_waiting else Touch(lease_of(entry.held)))
        try:
            lost = self._recovery.settle(verdicts)
        except MultiqError as exc:
            if self._outage.should_log(str(exc)):
                # the child may be stuck, or may wait for the backend like this process
                _log.warning(
                    "a worker process has not renewed leases in time, and the sidecar cannot renew them: %s", exc
                )
            return
        self._outage.reset()
        for entry, verdict, error in zip(entries, verdicts, lost, strict=True):
            key = table.number, table.life, entry.serial
            self._touched[key] = now
            if error is not None or isinstance(verdict, GiveBack):
                self._lost.add(key)  # the lease was settled, or has ended


def _is_stopped(pid: int) -> bool:
    """Whether the child is stopped, by SIGSTOP or a debugger. The jobs of a stopped child make no progress, so their
    leases may end.
    """
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:  # the process or the file system does not exist
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}
