"""The supervisor: starts worker processes, replaces dead processes, kills overdue processes, reloads the code, and
stops.

Children are forked, so the app and its tasks are loaded once. The supervisor opens no connection and starts no thread,
because a fork would copy both in an undefined state. Instead, a separate process, the sidecar, calls the backend, for
example to settle the jobs of dead children.

After a reload (``reload``), the supervisor of the new program stops the previous children, as if their supervisor had
died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from . import fork, signal_handlers
from .child_record import Assignment, ProcessSlot
from .exits import (
    EXIT_CRASHED,
    EXIT_CUT_SHORT,
    EXIT_MEMORY,
    EXIT_OK,
    EXIT_OVERDUE,
    EXIT_RECYCLED,
    EXIT_STUCK,
    EXIT_SUPERFLUOUS,
    describe_exit,
)
from .inflight import DEAD, NEVER, WAITING
from .lifeline import Lifeline
from .orphans import reap_orphans
from .reload import (
    PreviousGeneration,
    ReloadCheck,
    is_child,
    noted_signals,
    re_execute,
    reload_environment,
    taking_over,
)
from .respawn_backoff import YOUNG, respawn_backoff
from .scaling import NeededSlots
from .signal_inbox import SignalInbox
from .signals import ABORT, HANDLED_BY_CHILD, HANDLED_BY_SUPERVISOR, actions_of_supervisor, log_waiting
from .stack_dump import log_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import NoReturn

    from .inflight import InflightTable
    from .shared_state import SharedState

_log = logging.getLogger("multiq.supervisor")

_POLL = 0.5  # seconds between two checks of the children, in case a SIGCHLD is lost
KILL_MARGIN = 5.0  # seconds after the grace until remaining children are killed
_SIDECAR_WAIT = 5.0  # seconds that the sidecar gets at the end to settle the jobs of the last children

_FORK_RETRY = 1.0  # seconds until a failed fork is tried again
_SIDECAR_LIMIT = 60.0  # seconds without a pass of the sidecar's loop, after which it is killed; a subscriber may hang
_TABLE_RETRY = 0.25  # seconds between two searches for a free in-flight table
_SUSPENDED = 1.5  # seconds between two passes of this loop; if the time is longer, the worker was suspended in between
_RESUME_DELAY = 1.0  # seconds after a suspension; until then no process is killed, so that children can notify jobs

_REPLACED = {
    EXIT_OVERDUE: "had a job that ran on after its timeout, or after it was cancelled",
    EXIT_STUCK: "had an event loop that was blocked for longer than the longest timeout of the jobs on it",
    EXIT_MEMORY: "used more memory than it may",
    EXIT_RECYCLED: "has worked for long enough",
}


_CLEAN_EXITS = frozenset({EXIT_OK, EXIT_MEMORY, EXIT_RECYCLED, EXIT_SUPERFLUOUS})


class Supervisor:
    """Keeps a child running in each needed slot of the shared state, and one sidecar.

    - *run_child*: the main function of a child. The function gets the child's ``Assignment``, and returns an exit code.
    - *run_sidecar*: the main function of the sidecar, which returns an exit code. The arguments are the socket that
      reports dead children, and the lifeline of the children.
    - *shared_state*: has a row for each process.
    - *grace*: seconds that running jobs get after a stop.
    - *once*: True: a child that exits with 0 is not replaced.
    - *check*: a command that exits with 0 if the current code starts. A reload runs the command first, and the old
      code keeps running if the command fails. None: reload without a check.
    - *least*: the smallest number of needed slots. The sidecar decides how many slots are needed. None: all slots are
      needed.
    - *shrinks*: whether children that are not needed are ended. False: each child ends by itself when no job is due. If
      the last child ended earlier, the jobs that its jobs enqueue would be left.
    - *reaps_all*: also reap orphans of jobs. Process 1 of a container must do this.
    """

    def __init__(
        self,
        run_child: Callable[[Assignment], int],
        run_sidecar: Callable[[socket.socket, Lifeline], int],
        shared_state: SharedState,
        *,
        grace: float,
        once: bool,
        check: Sequence[str] | None = None,
        least: int | None = None,
        shrinks: bool = True,
        reaps_all: bool = False,
    ) -> None:
        self._run_child = run_child
        self._run_sidecar = run_sidecar
        self._shared_state = shared_state
        self._worker_row = shared_state.worker
        self._slots = [ProcessSlot(index, row) for index, row in enumerate(shared_state.children)]
        self._needed = NeededSlots(self._slots, shared_state.worker, least, shrinks=shrinks)
        self._grace = grace
        self._once = once
        self._reload_check = ReloadCheck(check)
        self._reaps_all = reaps_all
        self._stop_requests = 0
        self._was_down = 0.0
        self._restarts = 0.0
        self._round_at = NEVER
        self._kill_none_before = 0.0
        self._kill_at = NEVER
        self._are_sidecars_signaled = False
        self._codes: list[int] = []
        self._inbox = SignalInbox(HANDLED_BY_SUPERVISOR)
        self._actions = actions_of_supervisor(self)
        self._ignores_hangups = signal_handlers.was_ignored(signal.SIGHUP)
        self._had_terminal = _has_terminal()
        self._is_waiting_for_table = False
        self._sidecar: int | None = None
        self._sidecar_at = 0.0  # earliest start of the next sidecar

    def run(self) -> int:
        """Supervise until all children have ended.

        Returns 0 if all children ended well, 130 if jobs were cut short, or 1 if one of the last children crashed.
        """
        self._previous = PreviousGeneration.take()  # stops the previous children just before the new ones start
        self._worker_row.is_paused = self._previous.is_paused
        self._needed.start_with(self._previous.processes)
        self._lifeline = Lifeline()
        self._sidecar_notifier, self._sidecar_wakeup = socket.socketpair()
        self._sidecar_notifier.setblocking(False)
        with taking_over(), self._inbox:
            for number in noted_signals():
                self._inbox.put(number)
            while True:
                self._note_round()
                self._reap()
                self._follow_sidecar()
                if not self._stop_requests:
                    self._needed.follow()
                self._start_missing()
                if self._previous.have_all_ended() and self._is_over():
                    break
                if self._reload_check.has_just_passed(is_stopping=bool(self._stop_requests)):
                    self._reload()
                self._kill_overdue()
                for number in self._inbox.wait(self._wait_time()):
                    if number in self._actions:
                        self._actions[number]()
            self._reload_check.end()
            if self._sidecar is None and any(table.state == DEAD for table in self._shared_state.tables):
                self._start_sidecar()  # the sidecar died before it could settle the jobs of a last child
            self._end_sidecar()
        if {EXIT_CUT_SHORT, -signal.SIGKILL} & set(self._previous.codes):
            self._codes.append(EXIT_CUT_SHORT)
        return max(self._codes, key=(EXIT_OK, EXIT_CRASHED, EXIT_CUT_SHORT).index, default=EXIT_OK)

    def stop(self) -> None:
        """Do what SIGTERM does. A second call does what a second SIGTERM does. Thread-safe."""
        self._inbox.put(signal.SIGTERM)

    # --- what a signal asks for (``signals``) ---

    def stop_children(self) -> None:
        """Let the children finish their running jobs within the grace. The second call aborts the children."""
        self._stop_requests += 1
        self._worker_row.stops = self._stop_requests
        if self._stop_requests == 1:
            log_waiting(sum(entry.is_running for slot in self._slots for entry in slot.entries()), self._grace)
        kill_at = time.monotonic() + KILL_MARGIN + (self._grace if self._stop_requests == 1 else 0)
        self._kill_at = min(self._kill_at, kill_at)  # further signals do not postpone the end
        self._signal_all(signal.SIGTERM if self._stop_requests == 1 else ABORT)

    def pause(self) -> None:
        self._worker_row.is_paused = True
        self._signal_all(signal.SIGUSR2)  # wakes the children, which then read the shared state

    def resume(self) -> None:
        self._worker_row.is_paused = False
        self._signal_all(signal.SIGCONT)

    def dump(self) -> None:
        """Log the running jobs, and let the children write the stacks of their threads."""
        log_running(self._slots)
        self._signal_all(signal.SIGQUIT)

    def reload_or_hang_up(self) -> None:
        """Reload, with the check of the new code first. If the terminal was closed, stop instead."""
        if self._had_terminal and not self._ignores_hangups and not _has_terminal():
            self.stop_children()
        elif not self._stop_requests and self._reload_check.begin():
            self._reload()

    # --- the loop ---

    def _note_round(self) -> None:
        """Record the time of this pass of the loop. If the worker was suspended before this pass, kill no process yet.

        Many jobs may have exceeded their timeouts during the suspension, and the children must first notify these jobs.
        """
        now = time.monotonic()
        if now - self._round_at > _SUSPENDED:
            self._kill_none_before = now + _RESUME_DELAY
        self._round_at = self._worker_row.supervisor_beat = now

    def _follow_sidecar(self) -> None:
        """Apply the control flags that the sidecar writes to the shared state."""
        if self._worker_row.is_down != self._was_down:
            self._was_down = self._worker_row.is_down
            self._signal_all(signal.SIGCONT)  # wakes the children, which then read the shared state
        if self._worker_row.restarts > self._restarts:
            self._restarts = self._worker_row.restarts
            if not self._stop_requests:
                self.stop_children()

    # --- reloading ---

    def _reload(self) -> None:
        _log.warning("reloading: re-executing the command with the current code")
        fork.flush_streams()
        environment = reload_environment(
            self._lifeline.hand_on(),
            [*self._previous.children, *(slot.pid for slot in self._slots if slot.pid is not None)],
            [*self._previous.sidecars, *([] if self._sidecar is None else [self._sidecar])],
            is_paused=bool(self._worker_row.is_paused),
            processes=self._needed.count() if self._needed.scales else None,
        )
        re_execute(environment, self._undo_reload, ignores_hangups=self._ignores_hangups)

    def _undo_reload(self) -> None:
        self._lifeline.take_back()
        self._inbox.reclaim_signals()

    # --- starting ---

    def _start_missing(self) -> None:
        now = time.monotonic()
        if self._sidecar is None and self._sidecar_at <= now:
            self._sidecar_at = now + YOUNG
            self._start_sidecar()
        for slot in self._slots:
            if slot.pid is None and not self._stop_requests and slot.start_at <= now:
                slot.started_at = now
                slot.start_at = now + _FORK_RETRY  # in case the fork fails
                with self._retrying_fork():
                    self._start_child(slot)
        if any(slot.pid is not None for slot in self._slots):
            self._worker_row.childless_since = 0
        elif not self._worker_row.childless_since:
            self._worker_row.childless_since = now

    def _start_sidecar(self) -> None:
        self._worker_row.sidecar_beat = time.monotonic()
        with self._retrying_fork():
            self._sidecar = self._fork(lambda: self._run_sidecar(self._sidecar_wakeup, self._lifeline), is_child=False)

    def _start_child(self, slot: ProcessSlot) -> None:
        table = self._shared_state.free_table()
        if table is None:  # the sidecar frees the table of a dead child when the child's leases have ended, or earlier
            if not self._is_waiting_for_table:
                _log.error("no process is started until the jobs of dead processes are settled")
            self._is_waiting_for_table = True
            slot.start_at = slot.started_at + _TABLE_RETRY
            return
        self._is_waiting_for_table = False
        table.assign()
        slot.row.beat = time.monotonic()
        slot.row.table = table.number

        def run_child() -> int:
            table.pid = os.getpid()
            return self._run_child(Assignment(self._lifeline, table, slot.index))

        try:
            slot.assign(self._fork(run_child, is_child=True, table=table), table)
        except OSError:
            table.free()
            raise

    @contextlib.contextmanager
    def _retrying_fork(self) -> Iterator[None]:
        """Log a fork that the system refuses (too many processes, no memory). The caller's loop tries the fork
        again."""
        try:
            yield
        except OSError as exc:
            _log.error("a process cannot be forked: %s; next attempt in %g s", exc, _FORK_RETRY)

    def _fork(self, run_child: Callable[[], int], *, is_child: bool, table: InflightTable | None = None) -> int:
        fork.flush_streams()
        # Until the child has its own inbox, signals to the child would arrive in the supervisor's inbox.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_BY_CHILD)
        pid = -1
        try:
            pid = fork.fork_worker_process()
        finally:
            if pid:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if pid:
            return pid
        return self._run_forked(run_child, table, is_child=is_child)

    def _run_forked(self, run_child: Callable[[], int], table: InflightTable | None, *, is_child: bool) -> NoReturn:
        """Run the new process, and exit without returning into the supervisor's code."""
        code = EXIT_CRASHED
        try:
            self._detach_from_supervisor(is_child=is_child)
            code = run_child()
        except BaseException:  # noqa: BLE001 - logged, and the exit code says it
            _log.exception("a worker process crashed")
            table = None
        finally:
            fork.flush_streams()
            if table is not None:
                table.note_exit(code)
            os._exit(code)  # skips the atexit handlers and finally blocks of the supervisor

    def _detach_from_supervisor(self, *, is_child: bool) -> None:
        # The handlers of the supervisor's inbox stay installed, but have no effect in a child. The terminal sends
        # Ctrl-C to the whole group, and the supervisor forwards it once, as SIGTERM. SIG_IGN would be wrong, because
        # programs that jobs start would inherit it.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._lifeline.let_go()  # only the supervisor keeps it open, so it is cut with the supervisor's death
        self._sidecar_notifier.close()
        if is_child:
            self._sidecar_wakeup.close()

    # --- ending ---

    def _reap(self) -> None:
        """Reap ended processes, and decide when each one is replaced."""
        for slot in self._slots:
            if slot.pid is not None:
                pid, status = os.waitpid(slot.pid, os.WNOHANG)
                if pid:
                    self._note_end(slot, pid, os.waitstatus_to_exitcode(status))
        if self._sidecar is not None and os.waitpid(self._sidecar, os.WNOHANG)[0]:
            self._sidecar = None
            _log.error("the sidecar died; starting another one")
        if self._reaps_all:
            reap_orphans(
                {self._sidecar, self._reload_check.pid, *(slot.pid for slot in self._slots), *self._previous.pids}
            )

    def _note_end(self, slot: ProcessSlot, pid: int, status: int) -> None:
        table, now = slot.table, time.monotonic()
        assert table is not None, "a child has a table as long as it lives"  # noqa: S101 - for the reader, and mypy
        exit_code, has_held, was_late = (
            table.exit_code,
            table.has_held,
            slot.is_timed_out or table.exit_code == EXIT_OVERDUE,
        )
        # ``taken`` counts jobs for ``max_jobs``. Jobs that the child took but never began are subtracted again.
        slot.row.taken -= sum(entry.mark == WAITING for entry in slot.entries())
        # If a job has reset SIGTERM to its default, the supervisor's SIGTERM kills the process.
        is_cut = exit_code is None and (slot.is_cut or bool(self._stop_requests and status == -signal.SIGTERM))
        table.mark_dead(status, now, is_late=slot.is_timed_out, is_cut=is_cut)
        self._leave_to_sidecar(table)
        died_young = now - slot.started_at < YOUNG
        slot.clear()
        if self._stop_requests or (self._once and exit_code == EXIT_OK):
            slot.start_at = NEVER
            slot.is_done = True
            ended_well = exit_code in _CLEAN_EXITS or was_late
            was_cut = is_cut or exit_code == EXIT_CUT_SHORT
            self._codes.append(EXIT_OK if ended_well else EXIT_CUT_SHORT if was_cut else EXIT_CRASHED)
            return
        if exit_code == EXIT_SUPERFLUOUS:
            slot.early_deaths = 0
            slot.start_at = now if slot.is_needed else NEVER
            return
        is_too_large = exit_code == EXIT_MEMORY and not has_held
        if (was_late or exit_code in _REPLACED) and not is_too_large:
            self._worker_row.replaced += 1
            slot.early_deaths = slot.early_deaths + 1 if died_young and exit_code == EXIT_MEMORY else 0
            slot.start_at = now + respawn_backoff(slot.early_deaths, had_jobs=True) if slot.is_needed else NEVER
            why = EXIT_OVERDUE if was_late else exit_code or 0
            level = logging.INFO if why == EXIT_RECYCLED else logging.WARNING
            _log.log(level, "worker process %d %s; %s", pid, _REPLACED[why], _what_next(slot))
            return
        self._worker_row.crashed += 1
        slot.early_deaths = slot.early_deaths + 1 if died_young else 0
        backoff = respawn_backoff(slot.early_deaths, had_jobs=has_held)
        slot.start_at = now + backoff if slot.is_needed else NEVER
        how = "exceeds its memory limit before it has run any job" if is_too_large else describe_exit(status, exit_code)
        _log.log(
            logging.ERROR if is_too_large else logging.WARNING,
            "worker process %d %s; %s",
            pid,
            how,
            _what_next(slot, f" in {backoff:.1f} s"),
        )

    def _leave_to_sidecar(self, table: InflightTable) -> None:
        if not table.entries():
            table.free()
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the sidecar also polls
            self._sidecar_notifier.send(b"\0")

    def _kill_overdue(self) -> None:
        """Kill a stuck sidecar, children that run after the grace, and children with an overdue job."""
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = now + YOUNG  # tries again later in case some children remain
            for slot in self._slots:
                slot.is_cut = True
            self._kill_all()
            return
        if now < self._kill_none_before:
            return
        if self._sidecar is not None and now - self._worker_row.sidecar_beat > _SIDECAR_LIMIT:
            _log.error("the sidecar has been stuck for %g s: killing it", _SIDECAR_LIMIT)
            self._worker_row.sidecar_beat = now
            os.kill(self._sidecar, signal.SIGKILL)
        for slot in self._slots:
            if slot.pid is not None and slot.kill_at() <= now:
                slot.is_timed_out = True
                os.kill(slot.pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        """Kill the children.

        Children from before a reload have a sidecar of their own. This sidecar is first asked to kill them, because
        only it can record the reason.
        """
        if not self._are_sidecars_signaled:
            self._are_sidecars_signaled = True
            _signal(filter(is_child, self._previous.sidecars), ABORT)
            if self._previous.sidecars:
                self._signal_slots(signal.SIGKILL)
                return
        self._signal_all(signal.SIGKILL)

    def _end_sidecar(self) -> None:
        """Wait until the sidecar has settled the jobs of the last children."""
        self._sidecar_notifier.close()
        self._lifeline.let_go()
        give_up_at = time.monotonic() + _SIDECAR_WAIT
        while self._sidecar is not None and not os.waitpid(self._sidecar, os.WNOHANG)[0]:
            if time.monotonic() > give_up_at:
                os.kill(self._sidecar, signal.SIGKILL)
                os.waitpid(self._sidecar, 0)
                break
            time.sleep(0.01)
        self._sidecar_wakeup.close()
        self._lifeline.close()

    # --- small things ---

    def _is_over(self) -> bool:
        is_through = all(slot.start_at == NEVER for slot in self._slots)
        return not any(slot.pid for slot in self._slots) and bool(self._stop_requests or is_through)

    def _wait_time(self) -> float:
        now = time.monotonic()
        starts = [slot.start_at - now for slot in self._slots if slot.pid is None]
        return max(0.0, min([_POLL, self._kill_at - now, *starts]))

    def _signal_all(self, number: signal.Signals) -> None:
        self._signal_slots(number)
        if number in {ABORT, signal.SIGKILL}:  # children from before a reload were already asked to stop
            _signal(filter(is_child, self._previous.children), number)

    def _signal_slots(self, number: signal.Signals) -> None:
        _signal([slot.pid for slot in self._slots if slot.pid is not None], number)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _what_next(slot: ProcessSlot, when: str = "") -> str:
    return f"starting another one{when}" if slot.is_needed else "the child was not needed, and is not replaced"


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
