"""Recovery: the sidecar settles the jobs of dead worker processes.

Recovery reads the in-flight tables of the children. The verdict on a lease depends on what the child has written about
it:

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
from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, After, Bury, GiveBack, Lease, Release
from multiq.cancellation import find_request
from multiq.errors import BackendError, MultiqError, Unsupported
from multiq.events import JobCrashed
from multiq.job import JobInfo
from multiq.outage_log import Outage
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts

from .exits import EXIT_OVERDUE, EXIT_STUCK, describe_exit
from .inflight import ACKED, DEAD, ENDED, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.app import App
    from multiq.backend import Consumer, Verdict
    from multiq.errors import LeaseLost

    from .inflight import Entry, InflightTable, Record
    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")

UNKNOWN_EXIT = 2**31
"""The exit status of a child that ended after its supervisor. Only a parent process can read the real status."""

_RETRY = 0.2  # seconds after a failed call to the backend
_STUCK_LOOP = "its worker process was killed: the event loop was stuck, in this job or in another job"


class Recovery:
    """Settles the jobs of the dead children of one worker.

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
        self._outage = Outage()

    def settle_dead(self) -> None:
        """Settle the jobs of dead children. While the backend is down, their tables stay for the next round."""
        for table in self._tables:
            if table.state == DEAD:
                # each call may wait for the backend until its timeout
                self._worker_row.sidecar_beat = time.monotonic()
                self._settle_table(table, table.entries() if self._can_settle else [])

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        """Settle leases of other processes. Raises ``BackendError``."""
        if self._consumer is None:
            self._consumer = self._backend.consumer(("default",))
        return self._consumer.settle(verdicts)

    def _settle_table(self, table: InflightTable, entries: list[Entry]) -> None:
        """Settle the jobs of one dead child.

        While the backend is down, the table is not freed until the longest ttr is over.
        """
        if not entries:
            table.free()
            return
        try:
            verdicts = [self._verdict(table, entry, entries) for entry in entries]
            lost = self.settle([verdict for verdict, _ in verdicts])
        except MultiqError as exc:
            if self._outage.should_log(str(exc)):
                _log.warning("the jobs of a dead worker process cannot be settled yet: %s", exc)
            time.sleep(_RETRY)
            if time.monotonic() > table.died_at + max(entry.held.ttr for entry in entries):
                table.free()
            return
        self._outage.reset()
        table.free()  # before the events, because a hanging subscriber must not block the table
        for (_, emit), error in zip(verdicts, lost, strict=True):
            if error is None:
                emit()

    def _verdict(self, table: InflightTable, entry: Entry, entries: list[Entry]) -> tuple[Verdict, Callable[[], None]]:
        """Return the verdict on a lease, and a function that emits the events of the verdict.

        Call the function when the backend has accepted the verdict.
        """
        lease = lease_of(entry.held)
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


def lease_of(held: Record) -> Lease:
    return Lease(held.queue, held.id, held.token, b"", 0, held.ttr, held.attempt, 0, 0, 0.0)


def _no_event() -> None:
    """Emit nothing."""
