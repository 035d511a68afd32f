"""Recovery: the sidecar settles the jobs of dead worker processes, and renews the leases of stuck processes.

A child is stuck while one call into C occupies its interpreter, perhaps for minutes. Recovery reads the in-flight
tables of the children. The verdict on a lease depends on what the child has written about it:

=============================  =============================================================================
the child has written          recovery's verdict
=============================  =============================================================================
the job waits                  give back, which does not count as an attempt, because the job never began
the job has run, and is acked  ack
the job has run, and is not    the verdict in the table: release, give back, bury, or ack with an outcome
the job runs, and the child
  had a stuck event loop       abandon, because it is unknown which job held the loop
  wrote its exit code          timed out, if the child ended for an overdue job and this job was overdue; else give back
  was killed for a time limit  timed out, if this job was overdue; else give back
  was killed in a stop         give back
  died                         abandon, so that the job is ready again immediately, and a crash is counted
=============================  =============================================================================
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, After, Bury, GiveBack, Lease, Release, Touch
from multiq.cancellation import find_request
from multiq.errors import BackendError, MultiqError, Unsupported
from multiq.events import JobCrashed
from multiq.job import JobInfo
from multiq.outage_log import Outage
from multiq.worker.execution.heartbeat import TOUCH_SHARE
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts

from .exits import EXIT_OVERDUE, EXIT_STUCK, describe_exit
from .inflight import ACKED, DEAD, ENDED, LIVE, WAITING, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from multiq.app import App
    from multiq.backend import Consumer, Verdict

    from .inflight import Entry, InflightTable, Record
    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")

UNKNOWN_EXIT = 2**31
"""The exit status of a child that ended after its supervisor. Only a parent process can read the real status."""

_SLACK = 0.1  # share of a ttr by which a touch may be late before the child counts as stuck
_RETRY = 0.2  # seconds after a failed call to the backend
_STUCK_LOOP = "its worker process was killed: the event loop was stuck, in this job or in another job"


class Recovery:
    """Settles and touches leases for the children of one worker.

    *shares_loop*: whether children run several coroutine jobs on one event loop. If they do, a job can block the other
    jobs of its loop.
    """

    def __init__(self, app: App, shared_state: SharedState, *, shares_loop: bool) -> None:
        self._tables = shared_state.tables
        self._worker_row = shared_state.worker
        self._events = app.events
        self._backend = app.backend
        self._can_settle = bool(app.backend.capabilities.portable_leases)  # if False, a lease ends with its connection
        self._shares_loop = shares_loop
        self._runner = Runner(app, Timeouts(0.0))
        self._consumer: Consumer | None = None
        self._touched: dict[tuple[int, float, float], float] = {}  # (table, life, serial) -> time of the last touch
        self._lost: set[tuple[int, float, float]] = set()
        self._settle_outage, self._touch_outage = Outage(), Outage()

    def forget(self, child: tuple[int, float]) -> None:
        """Drop the data about a child that has ended. *child* is its table's ``number`` and ``life``."""
        self._touched = {lease: at for lease, at in self._touched.items() if lease[:2] != child}
        self._lost = {lease for lease in self._lost if lease[:2] != child}

    # --- dead children ---

    def settle_dead(self) -> None:
        """Settle the jobs of dead children. While the backend is down, their tables stay for the next round."""
        for table in self._tables:
            if table.state == DEAD:
                # each call may wait for the backend until its timeout
                self._worker_row.sidecar_beat = time.monotonic()
                self._settle_table(table, table.entries() if self._can_settle else [])

    def _settle_table(self, table: InflightTable, entries: list[Entry]) -> None:
        """Settle the jobs of one dead child.

        While the backend is down, the table is not freed until the longest ttr is over.
        """
        if not entries:
            table.free()
            return
        try:
            verdicts = [self._verdict(table, entry, entries) for entry in entries]
            lost = self._settler().settle([verdict for verdict, _ in verdicts])
        except MultiqError as exc:
            if self._settle_outage.should_log(str(exc)):
                _log.warning("the jobs of a dead worker process cannot be settled yet: %s", exc)
            time.sleep(_RETRY)
            if time.monotonic() > table.died_at + max(entry.held.ttr for entry in entries):
                table.free()
            return
        self._settle_outage.reset()
        table.free()  # before the events, because a hanging subscriber must not block the table
        for (_, emit), error in zip(verdicts, lost, strict=True):
            if error is None:
                emit()

    def _verdict(self, table: InflightTable, entry: Entry, entries: list[Entry]) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict on a lease, and a function that emits the events of the verdict.

        Call the function when the backend has accepted the verdict.
        """
        lease = _lease(entry.held)
        if not entry.is_running:
            return _pending_verdict(lease, entry), _no_event
        is_over = entry.kill_at <= table.died_at
        is_stuck = table.is_late and self._shares_loop and sum(each.is_running for each in entries) > 1
        if is_stuck or table.exit_code == EXIT_STUCK:
            return self._crashed(lease, _STUCK_LOOP)  # it is unknown which job held the loop
        if table.is_cut:
            return GiveBack(lease), _no_event
        if table.is_late or table.exit_code is not None:
            is_blamed = is_over and (table.is_late or table.exit_code == EXIT_OVERDUE)
            return self._timed_out(lease) if is_blamed else (GiveBack(lease), _no_event)
        how = "without a supervisor" if table.status == UNKNOWN_EXIT else describe_exit(table.status, table.exit_code)
        return self._crashed(lease, f"its worker process died: {how}")

    def _crashed(self, lease: Lease, reason: str) -> tuple[Verdict, Callable[[], None]]:
        task = None
        with contextlib.suppress(MultiqError):  # the job is gone, or the backend fails, and then the verdict fails, too
            task = JobInfo.of(self._backend.peek(lease.queue, lease.id)).task
        event = JobCrashed(queue=lease.queue, job_id=lease.id, task=task, reason=reason)
        return Abandon(lease, reason), lambda: self._events.emit(event)

    def _timed_out(self, lease: Lease) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict of the task's retry policy for a job that was killed at its time limit."""
        try:
            record = self._backend.peek(lease.queue, lease.id)
        except BackendError:
            raise
        except Unsupported:
            return self._crashed(lease, "it ran longer than its timeout")
        except MultiqError:
            return Abandon(lease), _no_event  # the job does not exist, so the backend refuses any verdict
        found = Lease(
            queue=lease.queue,
            id=lease.id,
            token=lease.token,
            body=record.body,
            priority=record.priority,
            ttr=record.ttr,
            attempt=record.attempt or 1,
            crashes=record.crashes or 0,
            kicks=record.kicks or 0,
            age=record.age or 0.0,
            memo=record.memo or b"",
        )
        cancel = find_request(self._backend, found)
        return self._runner.timed_out(found) if cancel is None else self._runner.cancelled(found, cancel.request)

    # --- stuck children ---

    def touch_for_stuck(self) -> None:
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
            verdicts.append(GiveBack(_lease(entry.held)) if is_waiting else Touch(_lease(entry.held)))
        try:
            lost = self._settler().settle(verdicts)
        except MultiqError as exc:
            if self._touch_outage.should_log(str(exc)):
                # the child may be stuck, or may wait for the backend like this process
                _log.warning(
                    "a worker process has not renewed leases in time, and the sidecar cannot renew them: %s", exc
                )
            return
        self._touch_outage.reset()
        for entry, verdict, error in zip(entries, verdicts, lost, strict=True):
            key = table.number, table.life, entry.serial
            self._touched[key] = now
            if error is not None or isinstance(verdict, GiveBack):
                self._lost.add(key)  # the lease was settled, or has ended

    def _settler(self) -> Consumer:
        """A consumer that only settles the leases of other processes."""
        if self._consumer is None:
            self._consumer = self._backend.consumer(("default",))
        return self._consumer


def _pending_verdict(lease: Lease, entry: Entry) -> Verdict:
    """Return the verdict of the child on a job that does not run."""
    held = entry.held
    if entry.mark == ACKED:
        return Ack(lease)
    if entry.mark == ENDED and held.verdict == "ack":
        return Ack(lease, After(keep=held.keep, outcome=held.outcome, kind=held.kind, steps=steps_of(held)))
    if entry.mark == ENDED and held.verdict == "release":
        return Release(lease, held.delay, held.priority, held.reason)
    if entry.mark == ENDED and held.verdict == "give_back":
        return GiveBack(lease, held.delay)
    if entry.mark == ENDED and held.verdict == "bury":
        steps = steps_of(held)
        return Bury(lease, held.reason, After(steps=steps) if steps else None)
    return GiveBack(lease)


def _lease(held: Record) -> Lease:
    return Lease(held.queue, held.id, held.token, b"", 0, held.ttr, held.attempt, 0, 0, 0.0)


def _no_event() -> None:
    """Emit nothing."""


def _is_stopped(pid: int) -> bool:
    """Whether the child is stopped, by SIGSTOP or a debugger. The jobs of a stopped child make no progress, so their
    leases may end.
    """
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:  # the process or the file system does not exist
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}
