"""One worker process: a loop that reserves jobs, starts them, and settles them. One pass of the loop is a *turn*.

Three threads call into a ``WorkerProcess``:

- the thread of its loop (``_turn``);
- the heartbeat (``_on_heartbeat``);
- the thread that handles signals or calls ``Worker.stop`` (``stop``, ``abort``, ``pause``, ``resume``).

A process ends in these steps:

1. ``_end`` records the reason. The loop makes no further turn.
2. ``_drain`` gives back jobs that have not begun, and waits for running jobs until the grace ends.
3. ``abort`` ends that wait, after a second signal or at the end of the grace.
4. ``_exit_for`` exits for an overdue job or a stuck event loop. ``ExitDeadline`` exits if the end itself hangs.

Steps 3 and 4 settle jobs without waiting for running jobs (``ForcedSettlement``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.events import (
    JobOverdue,
    WorkerLooping,
    WorkerPaused,
    WorkerResumed,
)
from multiq.worker.execution.cancels import Cancels
from multiq.worker.execution.executors import CoroutineExecutor, Executor, InlineExecutor, ThreadExecutor
from multiq.worker.execution.fetcher import VETO_PAUSE, Fetcher
from multiq.worker.execution.hanging_calls import run_in_thread
from multiq.worker.execution.heartbeat import TICK, Heartbeat
from multiq.worker.execution.prefetch import Prefetch, WaitingJobs
from multiq.worker.execution.queue_shares import fair_share
from multiq.worker.execution.recycling import Recycling
from multiq.worker.execution.runner import Runner
from multiq.worker.execution.running_memos import JobMemos
from multiq.worker.execution.timeouts import Timeouts
from multiq.worker.monitoring.summary import Summary

from .exit_deadline import ExitDeadline
from .exits import EXIT_CUT_SHORT, EXIT_OK, EXIT_OVERDUE, EXIT_STUCK, EXIT_SUPERFLUOUS
from .expired_outcomes import ExpiredOutcomes
from .flow_upkeep import FlowUpkeep
from .forced_settlement import ForcedSettlement
from .inflight import NEVER
from .lifecycle_events import LifecycleEvents
from .shared_state import SharedState
from .stored_limits import StoredLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from multiq.app import App
    from multiq.backend import Backend
    from multiq.worker.execution.timeouts import TimedJob

    from .inflight import Held, InflightWriter
    from .shared_state import ProcessRow, WorkerRow

_log = logging.getLogger("multiq.worker")

_IDLE = 5.0  # seconds between two turns of an idle worker
_BUSY = 1.0  # seconds between two turns while jobs run on other threads
_LAST_EVENTS = 2.0  # seconds of each wait for coroutine subscribers at the end; there are two waits
_CUT_EVENTS = 0.25  # seconds that coroutine subscribers get in an abort; the supervisor kills a late process
_STOPPED_EVENTS = 1.0  # seconds that other subscribers of ``WorkerStopped`` get in an abort
_ABORT_WAIT = 2.0  # maximum number of seconds that an abort waits for the loop


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one process. ``Worker`` documents them."""

    queues: tuple[str, ...]
    shares: dict[str, int] | None = None
    threads: int = 1
    concurrency: int = 0
    prefetch: int = 100
    grace: float = 25.0
    kill_after: float = 2.0
    max_jobs: int | None = None
    stop_when_empty: bool = False
    end_at: float = float("inf")
    recycle_jobs: int | None = None
    recycle_time: float | None = None
    memory: int | None = None

    @property
    def at_a_time(self) -> int:
        """The maximum number of running jobs."""
        return self.concurrency or self.threads

    @property
    def most_held(self) -> int:
        """The maximum number of held jobs: running and waiting ones."""
        return self.at_a_time + self.prefetch


class WorkerProcess:
    """Runs until it is stopped, or until it reaches one of its limits.

    ``stop``, ``abort``, ``pause``, ``resume`` and ``wake`` are thread-safe.

    - *inflight*: the in-flight table, which the supervisor and the sidecar read. None: there is no supervisor that
      could replace this process, so an overdue job runs on.
    - *row*: the part of the shared state that this process writes.
    - *worker*: the part of the shared state that the supervisor and the sidecar write.
    - *is_handing_on*: a function that returns whether the sidecar still has to settle jobs of a dead process. These
      jobs may return to the queues, so the process does not end even if the queues are empty.
    - *exit_process*: a function that exits the process immediately, with a code. None: the process must not exit,
      because ``run`` was not called in its main thread.
    - *owns_process*: whether the process belongs to the worker. If True, the process exits even if a job or a
      subscriber hangs at the end. If False, only a second signal exits the process. Until that signal comes, a
      job that hangs at the end of the grace continues to run. Its result is ignored.
    - *reclaim_signals*: takes back signals that a job may have taken.
    """

    def __init__(
        self,
        app: App,
        settings: ProcessSettings,
        *,
        inflight: InflightWriter | None = None,
        row: ProcessRow | None = None,
        worker: WorkerRow | None = None,
        is_handing_on: Callable[[], bool] = lambda: False,
        exit_process: Callable[[int], None] | None = None,
        owns_process: bool = False,
        reclaim_signals: Callable[..., None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._inflight = inflight
        shared_state = SharedState(1)
        self._process_row = row or shared_state.children[0]
        self._worker_row = worker or shared_state.worker
        self._is_handing_on = is_handing_on
        self._exit_process = exit_process
        self._owns_process = owns_process
        self._reclaim_signals = reclaim_signals
        self._events = app.events
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._lifecycle = LifecycleEvents(app.events, self.name)
        self._stopping: str | None = None  # the reason for the end
        self._deadline = float("inf")  # the end of the grace
        self._aborted = False
        self._exit_code = EXIT_OK
        self._recycling = Recycling(settings)
        self._unsettled: Held | None = None  # the oldest job that had ended, but was not settled, at the last heartbeat
        self._paused = False
        self._flow_upkeep = FlowUpkeep(app, settings.queues)
        self._stored_limits = StoredLimits(app)
        self._asks_down: Callable[[], bool] | None = None
        self._was_down_at: float | None = None  # time of the last ``is_down`` call, if it returned True
        self._was_paused = False
        self._expired_outcomes = ExpiredOutcomes(app.backend, settings.queues)
        self._taken = 0
        self._taken_before = int(self._process_row.taken)  # jobs taken by earlier processes of this slot
        self._stop_requested = False
        self._is_finished = threading.Event()  # set when the loop has ended
        self._ending = threading.Lock()
        self._loop_thread = 0
        self._counting = threading.Lock()
        self._changed = threading.Event()
        consumer = fair_share(app.backend.consumer(settings.queues), settings.shares)
        self._fetcher = Fetcher(app.chain.around_consumer(consumer, self.name), app.events, self.name, inflight)
        self._timeouts = Timeouts(settings.kill_after, protected=(_package_of(app.backend),), inflight=inflight)
        is_asked = None if inflight is None else self._has_cancels
        self._cancels = Cancels(app.backend, self._fetcher, self._timeouts, is_asked)
        self._runner = Runner(app, self._timeouts, JobMemos(app, self._fetcher), self._cancels, self._fetcher)
        self._summary = Summary(
            self.name, self._fetcher.settling.counts, app.settings.log.summary, self._runner.not_runs
        )
        self._prefetch = Prefetch(settings.at_a_time, settings.prefetch)
        self._executor = self._make_executor()
        self._waiting_jobs = WaitingJobs(self._executor, self._fetcher, self._count)
        self._forced = ForcedSettlement(
            self._fetcher, self._executor, self._runner, self._waiting_jobs.take_back, has_sidecar=inflight is not None
        )
        self._heartbeat = Heartbeat(self._on_heartbeat, on_death=self.abort)
        self._exit_deadline = ExitDeadline(exit_process if owns_process else None, self._prepare_exit)

    # --- from outside ---

    def interrupting(self) -> AbstractContextManager[None]:
        """Interrupt inline jobs at their time limit while the block lasts. Call it in the main thread."""
        return self._timeouts.interrupting()

    def run(self) -> int:
        """Work until the process is stopped. Returns the exit code."""
        with self._exit_deadline:
            return self._run()

    def stop(self) -> None:
        """Stop taking jobs, give back jobs that have not begun, and finish running jobs within the grace."""
        if not self._stop_requested:
            self._stop_requested = True
            self._deadline = time.monotonic() + self._settings.grace
            self._exit_deadline.follow_grace(self._deadline)
            self._hold(True)  # the heartbeat checks the deadline, because the loop may hang in a user's hook
        self._end("asked to", EXIT_OK)  # the reason in WorkerStopping

    def abort(self, *, by_signal: bool = False) -> None:
        """Settle all jobs now. Running jobs are not awaited, and their results are ignored.

        A job or hook may occupy the main thread. In this case, the process exits if the worker owns it, or if an
        operator has sent a second signal (*by_signal*). Otherwise the job or hook runs on.
        """
        self._aborted = self._stop_requested = True
        self._exit_deadline.follow_abort(has_jobs=not self._is_finished.is_set())
        self._end("asked to, at once", EXIT_OK)
        self._forced.settle()
        may_exit = self._owns_process or (by_signal and not self._is_finished.is_set())
        if self._exit_process is None or not may_exit:
            return
        is_elsewhere = threading.get_ident() != self._loop_thread
        if self._is_inline or (is_elsewhere and not self._is_finished.wait(_ABORT_WAIT)):
            self._lifecycle.wait_stopping(_CUT_EVENTS)
            self._exit_process(self._stopped(_STOPPED_EVENTS))

    @property
    def grace(self) -> float:
        """Seconds that running jobs get after ``stop``."""
        return self._settings.grace

    @property
    def running(self) -> int:
        return len(self._executor.running())

    @property
    def is_stop_requested(self) -> bool:
        """Whether a stop was requested from outside. An end at a limit (``max_jobs``) does not count."""
        return self._stop_requested

    def pause(self) -> None:
        """Stop reserving jobs until ``resume``. Running jobs continue, and their leases are renewed."""
        self._paused = True
        self._notify()

    def resume(self) -> None:
        self._paused = False
        self._notify()

    def wake(self) -> None:
        """Make the loop read the shared state now."""
        self._notify()

    def obey_down(self, is_down: Callable[[], bool]) -> None:
        """Check now whether the connection is down (``multiq down``). Take no jobs from a connection that is down.

        With a sidecar, the process takes no jobs until the sidecar has read the flag again. Without a sidecar, the
        process takes no jobs until *is_down* returns False.
        """
        self._asks_down = is_down
        self._check_down()

    # --- the loop ---

    def _run(self) -> int:
        self._loop_thread = threading.get_ident()
        self._heartbeat.start()
        self._lifecycle.started(self._settings.queues, self._executor.loop)
        try:
            while self._goes_on():
                self._turn()
            self._drain()
            self._is_finished.set()
            if not self._aborted:
                self._lifecycle.wait_stopping(min(self._settings.grace, max(0.0, self._deadline - time.monotonic())))
            self._exit_deadline.follow_grace(time.monotonic() + self._settings.grace)
        finally:
            self._is_finished.set()
            if self._aborted:
                self._forced.wait()
            self._heartbeat.close()
            self._lifecycle.finish(_CUT_EVENTS if self._aborted else _LAST_EVENTS)
            self._executor.close()
            self._runner.close_permits()
            if self._reclaim_signals is not None:
                self._reclaim_signals(also_wakeups=True)  # closing a job's event loop has reset its signal handlers
            self._fetcher.close()
        return self._stopped()

    def _goes_on(self) -> bool:
        """Whether to make another turn. A change after this call ends the wait in that turn."""
        self._changed.clear()
        return self._stopping is None

    def _turn(self) -> None:
        """Settle finished jobs, reserve as many jobs as there is room for, and start them."""
        executor = self._executor
        self._begin_turn()
        if self._recycling.is_reached(self._taken):
            self._end(self._recycling.reason, self._recycling.code)
            return
        finished = executor.take_finished()
        room = self._room()
        most_gated = max(0, executor.capacity - executor.busy)  # a job that waits here would use a slot of its limits
        self._note_room(most_gated)
        if room <= 0:
            self._wait(finished, self._patience())
            return
        before_fetch = self._app.chain.before_fetch
        if finished and (before_fetch or self._events.listeners[WorkerLooping]):
            self._fetcher.settle(finished)  # before the user's code, which may take long
            finished = []
        if self._events.listeners[WorkerLooping]:
            self._events.emit(WorkerLooping(worker=self.name))
        if before_fetch and not self._fetcher.may_fetch(before_fetch):
            self._wait(finished, VETO_PAUSE if executor.busy == 0 else self._patience())
            return
        was_handing_on = self._is_handing_on()
        jobs = self._fetcher.exchange(finished, room, self._patience(), most_gated)
        self._prefetch.note_batch(room, len(jobs))
        self._count(len(jobs))
        if jobs and self._stopping is not None:
            self._waiting_jobs.give_back(jobs)  # a stop came during the call, so none of these jobs begins
        elif jobs:
            self._process_row.waits_since = 0
            self._hold(True)
            executor.start(jobs)
        elif (
            executor.busy == 0 and not self._changed.is_set()
        ):  # if not, the call was interrupted, and may have missed jobs
            self._found_nothing(was_handing_on=was_handing_on)

    def _note_room(self, room: int) -> None:
        row = self._process_row
        if not room:
            row.waits_since = 0
        elif not row.waits_since:
            row.waits_since = time.monotonic()

    def _begin_turn(self) -> None:
        self._process_row.beat = now = time.monotonic()
        self._summary.log_if_due(now)
        if self._reclaim_signals is not None:
            self._reclaim_signals(also_wakeups=True)
        self._fetcher.touch_due()
        self._follow_shared_state()
        if now >= self._expired_outcomes.due_at:
            self._expired_outcomes.delete(now, has_kept=self._runner.has_kept_outcomes)
        if self._inflight is None and self._was_down_at is not None and time.monotonic() >= self._was_down_at + _IDLE:
            self._check_down()
        if self._inflight is None:  # there is no sidecar
            self._flow_upkeep.relay_if_due()
            self._flow_upkeep.tidy_if_due()
            self._stored_limits.store_if_due()
        if self._executor.waiting:
            self._waiting_jobs.give_back_if_held_up()
        self._emit_pause_change()

    def _end(self, reason: str, code: int) -> None:
        """Take no more jobs, and finish running jobs. There is no deadline unless ``stop`` has set one.

        Later calls do not change the reason and the code. Subscribers of ``WorkerStopping`` run in another thread, so
        that neither the loop nor the next signal waits for them.
        """
        with self._ending:
            is_first = self._stopping is None
            if is_first:
                self._exit_code = code
                self._lifecycle.expect_stopping()
                self._stopping = reason
        self._notify()
        if is_first:
            self._lifecycle.stopping(reason)

    @property
    def _is_paused(self) -> bool:
        return bool(self._paused or self._worker_row.is_paused or self._is_down)

    @property
    def _is_down(self) -> bool:
        """Whether the connection is down, according to the sidecar. Until the sidecar has read the flag, the result of
        this process's own check is used.
        """
        if self._was_down_at is not None and self._worker_row.asked_at < self._was_down_at:
            return True
        return bool(self._worker_row.is_down)

    def _has_cancels(self) -> bool:
        """Whether there may be requests to cancel jobs, according to the sidecar."""
        return bool(self._worker_row.has_cancels)

    def _check_down(self) -> None:
        asked_at = time.monotonic()
        self._was_down_at = asked_at if self._asks_down is not None and self._asks_down() else None

    def _follow_shared_state(self) -> None:
        """Stop, abort or end if the shared state requests it. A job may have replaced the signal handlers."""
        if self._worker_row.stops > 1 and not self._aborted:
            self.abort()
        elif self._worker_row.stops and not self._stop_requested:
            self.stop()
        elif self._process_row.is_superfluous and self._stopping is None:
            self._end("there is too little work for it", EXIT_SUPERFLUOUS)

    def _emit_pause_change(self) -> None:
        """Emit ``WorkerPaused`` or ``WorkerResumed`` in the turn in which the change takes effect."""
        is_paused = self._is_paused
        if is_paused != self._was_paused:
            self._was_paused = is_paused
            kind = WorkerPaused if is_paused else WorkerResumed
            self._events.emit(kind(worker=self.name))

    def _room(self) -> int:
        if self._is_paused:
            return 0
        size = self._prefetch.size
        if self._executor.is_held_up:
            size = min(size, self._executor.capacity)  # more jobs would wait for long jobs, and would be given back
        return int(min(size - self._executor.busy, self._jobs_left))

    @property
    def _jobs_left(self) -> float:
        """The number of jobs left until ``max_jobs``, which is a limit for all processes of this slot together."""
        most = self._settings.max_jobs
        return NEVER if most is None else most - self._taken_before - self._taken

    def _wait(self, finished: list[Held], patience: float) -> None:
        """Settle jobs, and sleep until something changes. Called if there is no room, or after a refusal by a hook."""
        if finished or self._fetcher.has_unsettled:
            self._fetcher.settle(finished)
        if self._jobs_left <= 0 and self._executor.busy == 0:
            self._end(f"took {self._settings.max_jobs} jobs", EXIT_OK)
            return
        if self._executor.busy == 0:
            self._hold(False)
        self._changed.wait(min(patience, self._fetcher.retry_in()))

    def _patience(self) -> float:
        """Seconds that the loop may wait if nothing happens."""
        if self._executor.busy == 0:
            if self._settings.stop_when_empty and not self._is_paused:
                return TICK if self._is_handing_on() or not self._fetcher.sees_all else 0.0
            return min(_IDLE, self._recycling.ends_in())
        return min(self._fetcher.next_touch_in(), TICK if self._executor.waiting else _BUSY)

    def _found_nothing(self, *, was_handing_on: bool) -> None:
        """Called after an exchange without jobs while no job runs. Ends the process if ``stop_when_empty`` is set.

        Does not end the process if there may be due jobs that the backend could not hand out.
        """
        self._hold(False)
        if self._settings.stop_when_empty and self._fetcher.has_seen_all and not was_handing_on:
            self._end("no job is due", EXIT_OK)

    def _drain(self) -> None:
        """Give back jobs that have not begun, wait for running jobs, and settle all of them."""
        self._process_row.waits_since = 0  # this process takes no more jobs, so no job can be meant for it
        self._waiting_jobs.give_back_all()
        while not self._aborted:
            finished = self._executor.take_finished()
            if finished or self._fetcher.has_unsettled:
                self._fetcher.settle(finished)
            if self._executor.busy == 0 and not self._fetcher.has_unsettled:
                return
            self._follow_shared_state()
            if time.monotonic() >= self._deadline:
                self.abort()
                return
            self._fetcher.touch_due()
            self._changed.wait(TICK)
            self._changed.clear()

    # --- beside the jobs ---

    def _on_heartbeat(self) -> None:
        """Renew leases, and check timeouts and the grace. A separate thread calls this, so no job or hook can delay it.

        If a long job blocks the loop, this method also settles finished jobs and gives back waiting jobs.
        """
        self._cancels.check()
        self._check_timeouts()
        executor = self._executor
        if self._is_inline:
            self._process_row.beat = time.monotonic()
        self._fetcher.touch_due()
        if executor.waiting and (executor.is_held_up or self._recycling.is_memory_used_up()):
            self._waiting_jobs.give_back_beside_loop()
        oldest = executor.oldest_finished
        if oldest is not None and (executor.running_for() > TICK or oldest is self._unsettled):
            self._fetcher.settle_if_free(executor.take_finished)  # the loop is busy with a job or a hook
        self._unsettled = oldest
        self._follow_shared_state()
        is_late = time.monotonic() >= self._deadline and not self._is_finished.is_set()
        if self._stopping is not None and is_late and not self._aborted:
            self.abort()

    def _check_timeouts(self) -> None:
        """Notify jobs that exceed their timeout. End the process for a job that runs on."""
        overdue = self._timeouts.check()
        if overdue:
            run_in_thread(lambda: self._emit_overdue(overdue)).wait(_CUT_EVENTS)
        if self._inflight is None or self._exit_process is None:
            return
        if overdue:
            self._exit_for(overdue, "a job runs on after its timeout, or after it was cancelled", EXIT_OVERDUE)
        elif self._timeouts.is_loop_stuck():
            is_known = self._timeouts.blocked_loop.is_held_by_leftover()
            self._exit_for([], "the event loop is stuck", EXIT_OVERDUE if is_known else EXIT_STUCK)

    def _exit_for(self, overdue: Sequence[TimedJob], reason: str, code: int) -> None:
        assert self._exit_process is not None, "checked by _check_timeouts"  # noqa: S101 - for the reader, and mypy
        self._end(reason, code)
        self._forced.settle(overdue)
        wait_until = time.monotonic() + _CUT_EVENTS
        self._lifecycle.wait_stopping(_CUT_EVENTS)
        self._lifecycle.stopped(code, max(0.0, wait_until - time.monotonic()))
        self._lifecycle.close(_CUT_EVENTS)
        self._exit_process(code)

    def _prepare_exit(self) -> int:
        """Settle the jobs of a process whose end hangs, and return its exit code. ``ExitDeadline`` calls this."""
        # in this case the heartbeat hangs, too, and has not settled the jobs
        if not (self._is_finished.is_set() or self._forced.is_done):
            self._forced.settle()
        return EXIT_CUT_SHORT if self._stop_requested else self._exit_code

    def _emit_overdue(self, overdue: Sequence[TimedJob]) -> None:
        for timed in overdue:
            if timed.held.cancel is not None:
                _log.error("job %s runs on after it was cancelled", timed.held.lease.id)
                continue
            self._events.emit(JobOverdue(job=timed.call.job, timeout=timed.call.timeout or 0.0))

    def _after_inline_job(self) -> None:
        """Called between two jobs of an inline batch, because the main loop makes no turn during the batch."""
        if self._reclaim_signals is not None:
            self._reclaim_signals()
        if self._recycling.is_memory_used_up():
            self._waiting_jobs.give_back_all()

    def _hold(self, holding: bool) -> None:
        """Let the heartbeat run while the process holds jobs, and sleep otherwise."""
        if holding:
            self._heartbeat.holding.set()
        elif not self._stop_requested:
            self._heartbeat.holding.clear()

    def _count(self, change: int) -> None:
        """Count jobs as taken or given back. The lock is needed because the loop takes jobs and the heartbeat gives
        some back.
        """
        with self._counting:
            self._taken += change
            self._process_row.taken += change

    # --- small things ---

    @property
    def _is_inline(self) -> bool:
        return isinstance(self._executor, InlineExecutor)

    def _stopped(self, patience: float | None = None) -> int:
        """Emit the last events, and wait for subscribers up to *patience* seconds, if given. Returns the exit code."""
        self._summary.log(time.monotonic())
        code = EXIT_CUT_SHORT if self._aborted else self._exit_code
        self._lifecycle.stopped(code, patience)
        self._lifecycle.close(_CUT_EVENTS if self._aborted else _LAST_EVENTS)
        return code

    def _on_job_done(self) -> None:
        """Called when a job has ended. One notification per turn is enough, because a turn takes all finished jobs."""
        if not self._changed.is_set():
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._fetcher.interrupt()

    def _make_executor(self) -> Executor:
        settings, common = self._settings, (self._runner, self._prefetch, self._on_job_done)
        if settings.concurrency:
            return CoroutineExecutor(*common, settings.concurrency, self._inflight, timeouts=self._timeouts)
        # A thread with a running event loop (in a notebook, for example) cannot run another loop.
        if settings.threads > 1 or asyncio._get_running_loop() is not None:  # noqa: SLF001 - public, says asyncio.events
            return ThreadExecutor(*common, settings.threads, self._inflight)
        return InlineExecutor(*common, self._inflight, after_job=self._after_inline_job)


def _package_of(backend: Backend) -> str:
    backend = getattr(backend, "inner", backend)  # the driver itself, even if the payloads are sealed
    return type(backend).__module__.partition(".")[0]
