"""The sidecar: a process beside the children that does for their jobs what a child cannot do itself any more.

It also asks the backend for the control flags of the connection, and writes them to the shared state.

It touches the leases of a child that is stuck (one call into C may keep an interpreter to itself for minutes), and
settles those of a child that died. It knows of both from the children's in-flight tables, and does for a lease only
what the child has written about that very lease:

===========================  ===================================================================================
the child has written        the sidecar says
===========================  ===================================================================================
it waits                     given back, uncounted: it never began, whatever ended the process
it has run, and is acked     ack
it has run, and is not       what was to be said: release with its delay, or bury
it runs, and the child ...
  wrote that it leaves       given back; timed out, if its own limit was over and the child left for that
  was killed for a limit     timed out, if it was its own; else given back, as a neighbour of the one that was
  was killed as all end      given back
  died                       abandoned: ready again at once, and a crash is counted
===========================  ===================================================================================
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from multiq.backend import Abandon, Ack, Bury, GiveBack, Lease, Release, Touch
from multiq.control.flags import Control
from multiq.control.presence import Responder
from multiq.errors import BackendError, MultiqError
from multiq.events import JobCrashed
from multiq.job import JobInfo
from multiq.outage_log import Outage
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.timeouts import Timeouts

from .inflight import ACKED, DEAD, ENDED, FREE, LIVE, WAITING
from .process import EXIT_OVERDUE, EXIT_STUCK
from .supervisor import describe_exit

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from multiq.app import App
    from multiq.backend import Consumer, Verdict
    from multiq.worker.monitoring.health_file import HealthFile
    from multiq.worker.monitoring.http import Server
    from multiq.worker.monitoring.status import Status

    from .inflight import Entry, InflightTable, Record
    from .shared_state import SharedState

_log = logging.getLogger("multiq.sidecar")

_POLL = 0.25  # seconds: a lease of the shortest ttr, a second, is not lost in between
_SLACK = 0.1  # of a ttr: a child is not stuck because it touches a little late
_TOUCH_SHARE = 1 / 3
_CONTROL_EVERY = 5.0  # seconds
_ANSWER_EVERY = 1.0  # seconds, while somebody looks at the workers
_LAST_EVENTS = 2.0  # seconds that subscribers which are coroutines get at the end
_RETRY = 0.2  # seconds, when the backend was not there
_NO_STATUS = 2**31  # of a child that ended after its supervisor: only a parent learns how a process ended
_STUCK_LOOP = "its worker process was killed: its event loop was stuck, in this job or another"


class Sidecar:
    """Runs until the supervisor is gone and all children's jobs are settled, *patience* seconds more at most.

    With *shares_loop*, children run coroutines side by side on one event loop.
    """

    def __init__(
        self,
        app: App,
        shared_state: SharedState,
        notifications: socket.socket,
        lifeline: int,
        patience: float,
        *,
        force: bool,
        shares_loop: bool,
        status: Status,
        health_file: HealthFile | None,
        server: Server | None,
    ) -> None:
        self._tables = shared_state.tables
        self._notifications = notifications
        self._lifeline = lifeline
        self._patience = patience
        self._events = app.events
        self._backend = app.backend
        self._can_settle = bool(app.backend.capabilities.portable_leases)  # else a child's leases end with the child
        self._shares_loop = shares_loop
        self._runner = Runner(app, Timeouts(0.0))
        self._consumer: Consumer | None = None
        self._children: dict[tuple[int, float], _ProcessHandle] = {}  # by their tables' number and life
        self._touched: dict[tuple[int, float, float], float] = {}  # by table, life and serial of the lease -> when
        self._lost: set[tuple[int, float, float]] = set()
        self._settle_outage, self._touch_outage = Outage(), Outage()
        self._control = Control(app.backend)
        self._obeys_down = not force
        self._poll_at = 0.0
        self._worker_row = shared_state.worker
        self._status = status
        self._responder = Responder(app.backend)
        self._answer_at = 0.0
        self._health_file = health_file
        self._server = server
        self._kill_requested = False

    def run(self) -> int:
        """The process's work. Returns its exit code."""
        is_alone, kill_at = False, float("inf")
        while True:
            if not is_alone and not self._is_supervisor_alive():
                is_alone = True
                if self._server is not None:
                    self._server.close()  # after a roll, its address is for the next one
            if is_alone and kill_at == float("inf") and self._is_lifeline_closed():
                kill_at = time.monotonic() + self._patience
            self._worker_row.sidecar_beat = time.monotonic()
            self._watch_children()
            self._settle_dead()
            if self._can_settle:
                self._touch_for_stuck()
            if is_alone:
                self._watch_orphans(killing=self._kill_requested or time.monotonic() >= kill_at)
                if all(table.state == FREE for table in self._tables):
                    self._events.finish(_LAST_EVENTS)
                    return 0
                time.sleep(_POLL)
            else:
                self._poll_control(time.monotonic())

    def kill(self) -> None:
        """Once the supervisor is gone: kill its children now. May come from a signal's handler."""
        self._kill_requested = True

    def _poll_control(self, now: float) -> None:
        """Heed what is said to all workers, and tell those who look at them of this one."""
        is_time = now >= self._poll_at
        with contextlib.suppress(MultiqError):  # the children tell of it
            if is_time:
                self._poll_at = now + _CONTROL_EVERY
                state, is_down = self._control.read(), self._obeys_down and self._control.is_down()
                self._worker_row.contact = time.monotonic()
                self._publish_control(state.last_restart, is_down=is_down)
                self._worker_row.asked_at = now  # last: what is on the shared_state now is newer than that
                if state.is_presence_asked:
                    self._responder.find_viewers()
            if now >= self._answer_at and not self._responder.is_idle:
                self._answer_at = now + _ANSWER_EVERY
                self._responder.answer(self._status.answer())
        if is_time and self._health_file is not None:
            self._health_file.write(self._status.report())

    def _publish_control(self, last_restart: str | None, *, is_down: bool) -> None:
        """Write on the shared_state what the workers of this connection are told."""
        if is_down != bool(self._worker_row.is_down):
            _log.warning("the connection is %s", "down: no more jobs are taken" if is_down else "up again")
            self._worker_row.is_down = is_down
        mark = 1.0 if last_restart is None else 2.0 + zlib.crc32(last_restart.encode())
        before, self._worker_row.restart_mark = (
            self._worker_row.restart_mark,
            mark,
        )  # there, so that the next sidecar knows it, too
        if before not in {0.0, mark} and last_restart is not None:
            _log.warning("all workers of this connection are to restart: this one ends")
            self._worker_row.restarts += 1

    def _is_supervisor_alive(self) -> bool:
        """Wait for its bell. False: it is gone."""
        poll = select.poll()
        poll.register(self._notifications, select.POLLIN)
        return not poll.poll(_POLL * 1000) or bool(self._notifications.recv(64))

    def _is_lifeline_closed(self) -> bool:
        """Whether the lifeline has ended, by which they know to end. In a roll, that is once the new program works."""
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        return bool(poll.poll(0))

    # --- the dead ---

    def _settle_dead(self) -> None:
        """Settle what dead children held. While the backend is away, their tables stay for the next time."""
        for table in self._tables:
            if table.state == DEAD:
                self._worker_row.sidecar_beat = (
                    time.monotonic()
                )  # each may wait for the backend for as long as a call takes
                self._settle_table(table, table.entries() if self._can_settle else [])

    def _settle_table(self, table: InflightTable, entries: list[Entry]) -> None:
        """Settle what one dead child held. While the backend is away, and leases may be alive, its table stays."""
        if not entries:
            table.free()
            return
        try:
            verdicts = [self._verdict(table, entry, entries) for entry in entries]
            lost = self._settler().settle([verdict for verdict, _ in verdicts])
        except MultiqError as exc:
            if self._settle_outage.should_log(str(exc)):
                _log.warning("the jobs of a dead worker process cannot be handed on yet: %s", exc)
            time.sleep(_RETRY)
            if time.monotonic() > table.died_at + max(entry.held.ttr for entry in entries):
                table.free()
            return
        self._settle_outage.reset()
        table.free()  # before any code of the user's: a subscriber that hangs must not keep it
        for (_, emit), error in zip(verdicts, lost, strict=True):
            if error is None:
                emit()

    def _verdict(self, table: InflightTable, entry: Entry, entries: list[Entry]) -> tuple[Verdict, Callable[[], None]]:
        """What becomes of a lease, and what says so once that has counted."""
        lease = _lease(entry.held)
        if not entry.is_running:
            return _pending_verdict(lease, entry), _no_event
        is_over = entry.kill_at <= table.died_at
        is_stuck = table.is_late and self._shares_loop and sum(each.is_running for each in entries) > 1
        if is_stuck or table.exit_code == EXIT_STUCK:
            return self._crashed(lease, _STUCK_LOOP)  # which of them held the loop, nobody can tell
        if table.is_cut:
            return GiveBack(lease), _no_event
        if table.is_late or table.exit_code is not None:
            is_blamed = is_over and (table.is_late or table.exit_code == EXIT_OVERDUE)
            return self._timed_out(lease) if is_blamed else (GiveBack(lease), _no_event)
        how = "without a supervisor" if table.status == _NO_STATUS else describe_exit(table.status, table.exit_code)
        return self._crashed(lease, f"its worker process died: {how}")

    def _crashed(self, lease: Lease, reason: str) -> tuple[Verdict, Callable[[], None]]:
        task = None
        with contextlib.suppress(MultiqError):  # it is gone, or the verdict will meet the same trouble
            task = JobInfo.of(self._backend.peek(lease.queue, lease.id)).task
        event = JobCrashed(queue=lease.queue, job_id=lease.id, task=task, reason=reason)
        return Abandon(lease, reason), lambda: self._events.emit(event)

    def _timed_out(self, lease: Lease) -> tuple[Verdict, Callable[[], None]]:
        """What its task's policy says of a job that did not end in time."""
        try:
            record = self._backend.peek(lease.queue, lease.id)
        except BackendError:
            raise
        except MultiqError:
            return Abandon(lease), _no_event  # it is gone: whatever is said of it is refused
        return self._runner.timed_out(
            Lease(
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
            )
        )

    # --- the stuck ---

    def _touch_for_stuck(self) -> None:
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
        return now >= max(late_from, self._touched.get(key, 0.0) + _TOUCH_SHARE * entry.held.ttr)

    def _keep_alive(self, table: InflightTable, entries: list[Entry], now: float) -> None:
        """Touch what runs or has run. What waits is touched, too, until the child cannot begin it: then it is
        given back, so that nothing waits for long behind a job that is stuck.
        """
        verdicts: list[Verdict] = []
        for entry in entries:
            is_waiting = entry.mark == WAITING and now >= entry.ends_at
            verdicts.append(GiveBack(_lease(entry.held)) if is_waiting else Touch(_lease(entry.held)))
        try:
            lost = self._settler().settle(verdicts)
        except MultiqError as exc:
            if self._touch_outage.should_log(str(exc)):
                # it may be stuck, or wait for the same answer: that cannot be seen from here
                _log.warning("leases that a worker process has not touched in time cannot be touched for it: %s", exc)
            return
        self._touch_outage.reset()
        for entry, verdict, error in zip(entries, verdicts, lost, strict=True):
            key = table.number, table.life, entry.serial
            self._touched[key] = now
            if error is not None or isinstance(verdict, GiveBack):
                self._lost.add(key)  # it was settled, or is over: nothing is to be kept alive

    def _watch_children(self) -> None:
        """Know each living child by more than its pid, while nobody has reaped it yet; forget the others."""
        living = {(table.number, table.life): table for table in self._tables if table.state == LIVE and table.pid}
        for key in self._children.keys() - living.keys():
            self._children.pop(key).close()
            self._touched = {lease: at for lease, at in self._touched.items() if lease[:2] != key}
            self._lost = {lease for lease in self._lost if lease[:2] != key}
        for key in living.keys() - self._children.keys():
            self._children[key] = _ProcessHandle(living[key].pid)

    # --- the orphans ---

    def _watch_orphans(self, *, killing: bool) -> None:
        """The supervisor is gone: nobody else notices when a child ends, or does not."""
        for table in self._tables:
            if table.state != LIVE:
                continue
            child = self._children.get((table.number, table.life))
            if child is None or child.is_gone():  # or it was given to a child that was never forked
                table.mark_dead(_NO_STATUS, time.monotonic(), is_cut=child is not None and child.was_killed)
            elif killing:
                child.kill()

    def _settler(self) -> Consumer:
        """Reserves nothing: it has leases of others to settle."""
        if self._consumer is None:
            self._consumer = self._backend.consumer(("default",))
        return self._consumer


class _ProcessHandle:
    """A process of this host that is not our child. Where the system has pidfds, it is never taken for a later one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor: int | None = None
        self._was_gone = False
        self.was_killed = False
        if hasattr(os, "pidfd_open"):
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._was_gone = True
            except OSError:  # an old kernel, or no descriptor left
                _log.debug("process %d has no pidfd", pid, exc_info=True)

    def is_gone(self) -> bool:
        if self._was_gone or self._descriptor is None:
            return self._was_gone or not self._send(0)
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        self.was_killed = True
        self._send(signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _send(self, number: int) -> bool:
        """False: there is no such process."""
        try:
            if self._descriptor is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True


def _pending_verdict(lease: Lease, entry: Entry) -> Verdict:
    """What the child was going to say of a job that does not run."""
    held = entry.held
    if entry.mark == ACKED:
        return Ack(lease)
    if entry.mark == ENDED and held.verdict == "release":
        return Release(lease, held.delay, held.priority, held.reason)
    if entry.mark == ENDED and held.verdict == "bury":
        return Bury(lease, held.reason)
    return GiveBack(lease)


def _lease(held: Record) -> Lease:
    return Lease(held.queue, held.id, held.token, b"", 0, held.ttr, 1, 0, 0, 0.0)


def _no_event() -> None:
    """There is nothing to say."""


def _is_stopped(pid: int) -> bool:
    """Whether the child was stopped (SIGSTOP, a debugger): its jobs do not go on, so they are not kept."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:  # no such process, or no such file system
        return False
    return stat.rpartition(")")[2].split()[0] in {"T", "t"}
