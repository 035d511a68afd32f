"""One worker process: the loop that reserves, has jobs run, and settles them."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import GiveBack
from multiq.events import (
    JobOverdue,
    WorkerLooping,
    WorkerPaused,
    WorkerResumed,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)

from .board import Board
from .executors import CoroutineExecutor, Executor, InlineExecutor, ThreadExecutor
from .heartbeat import TICK, Heartbeat
from .lifetime import Lifetime
from .limits import Limits
from .policies import sharing
from .prefetch import Prefetch
from .pump import Pump
from .runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.app import App
    from multiq.backend import Backend, Lease, Verdict

    from .board import ChildRow
    from .ledger import Ledger
    from .runner import Call

_log = logging.getLogger("multiq.worker")

EXIT_OK = 0
EXIT_CUT_SHORT = 130
"""A second signal, or the end of the grace, cut jobs short; they were given back."""
EXIT_OVERDUE = 13
"""A job did not heed its time limit, so its process had to end."""

_IDLE = 5.0  # seconds: an idle worker looks up this often
_VETOED = 1.0  # seconds until a before_fetch hook is asked again
_BUSY = 1.0  # seconds: while jobs run elsewhere, the loop looks this often whether one of them is overdue
_LAST_EVENTS = 2.0  # seconds that subscribers which are coroutines get at the end, once or twice...
_CUT_EVENTS = 0.25  # ...or this, when the end is now: a supervisor kills who is late
_ABORT_WAIT = 2.0  # seconds: an abort waits no longer for the backend than this


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one process works; ``Worker`` says what each of these means."""

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
        """Jobs that run at a time."""
        return self.concurrency or self.threads

    @property
    def most_held(self) -> int:
        """Jobs that are held at a time, those that wait included."""
        return self.at_a_time + self.prefetch

    @property
    def is_inline(self) -> bool:
        return not self.concurrency and self.threads == 1


class Child:
    """Runs until it is told to stop, or until its own limits say so.

    ``stop``, ``abort``, ``pause`` and ``resume`` may come from any thread. *ledger* is where the supervisor and the
    keeper read what is held here, *row* where they see that it goes on; without a ledger there is nobody to replace
    this process, so a job that does not heed its time limit runs on. *leave* ends the process where an aborted job
    cannot be left behind otherwise; without it (somebody else's process) such a job runs on to its end, and its
    result does not count.
    """

    def __init__(
        self,
        app: App,
        settings: ChildSettings,
        *,
        ledger: Ledger | None = None,
        row: ChildRow | None = None,
        leave: Callable[[int], None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._ledger = ledger
        self._row = row or Board(1).children[0]
        self._leave = leave
        self._events = app.events
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._stopping: str | None = None
        self._deadline = float("inf")  # when the grace ends
        self._aborted = False
        self._exit_code = EXIT_OK
        self._limit = Lifetime(settings)
        self._given_back = threading.Event()
        self._paused = False
        self._was_paused = False
        self._taken = 0
        self._counting = threading.Lock()
        self._changed = threading.Event()
        consumer = sharing(app.backend.consumer(settings.queues), settings.shares)
        self._pump = Pump(consumer, app.events, self.name, ledger)
        self._limits = Limits(settings.kill_after, untouchable=("multiq", _package_of(app.backend)))
        if ledger is not None:
            self._limits.on_begin = ledger.limit
        self._runner = Runner(app, self._limits)
        self._prefetch = Prefetch(settings.at_a_time, settings.prefetch)
        self._executor = self._make_executor()
        self._heartbeat = Heartbeat(self._beat, on_death=self.abort)

    # --- from outside ---

    def run(self) -> int:
        """Work until stopped. Returns the exit code."""
        self._heartbeat.start()
        if self._executor.loop is not None:
            self._events.run_on(self._executor.loop)
        self._events.emit(WorkerStarted(worker=self.name, queues=self._settings.queues))
        try:
            while self._goes_on():
                self._turn()
            self._drain()
        finally:
            if self._aborted:
                self._given_back.wait(_ABORT_WAIT)
            self._heartbeat.close()
            self._finish_events()
            self._executor.close()
            self._pump.close()
        return self._stopped()

    def stop(self, reason: str = "asked to", code: int = EXIT_OK) -> None:
        """Take no more jobs, give back what has not begun, finish what runs within the grace. Exit with *code*."""
        if self._stopping is None:
            self._exit_code = code
            self._deadline = time.monotonic() + self._settings.grace
            self._stopping = reason
            self._events.emit(WorkerStopping(worker=self.name, reason=reason))
        self._nudge()

    def abort(self) -> None:
        """Give everything back, now. What runs is not waited for, and its result will not count."""
        self._aborted = True
        self.stop("asked to, at once")
        self._let_go()
        if self._is_inline and self._leave is not None:
            self._leave(self._stopped())

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for already."""
        return self._stopping is not None

    def pause(self) -> None:
        """Reserve nothing until ``resume``; what runs goes on, and so do its heartbeats."""
        self._paused = True
        self._nudge()

    def resume(self) -> None:
        """Reserve again."""
        self._paused = False
        self._nudge()

    # --- the loop ---

    def _goes_on(self) -> bool:
        """Whether there is another turn. What changes from now on ends that one's wait."""
        self._changed.clear()
        return self._stopping is None

    def _turn(self) -> None:
        """Once round: settle what is finished, reserve what there is room for, have it run."""
        executor = self._executor
        self._row.beat = time.monotonic()
        if not self._is_inline:
            self._tick()
        if self._paused != self._was_paused:
            self._tell_pause()
        if self._limit.is_reached(self._taken):
            self.stop(self._limit.reason, self._limit.code)
            return
        finished = executor.take_finished()
        room = self._room()
        if room <= 0:
            self._wait(finished, self._patience())
            return
        if self._events.wants(WorkerLooping):
            self._events.emit(WorkerLooping(worker=self.name))
        if self._app.fetch_hooks and not self._may_fetch():
            self._wait(finished, _VETOED if executor.busy == 0 else self._patience())
            return
        leases = self._pump.exchange(finished, room, self._patience())
        self._prefetch.saw_batch(room, len(leases))
        self._count(len(leases))
        if leases and self._stopping is not None:
            self._give_back(leases)  # told to stop while it asked: none of these begins
        elif leases:
            self._hold(True)
            executor.start(leases)
        elif executor.busy == 0:
            self._found_nothing()

    def _tell_pause(self) -> None:
        """Told by the loop itself: from now on it reserves nothing, or again."""
        self._was_paused = self._paused
        kind = WorkerPaused if self._was_paused else WorkerResumed
        self._events.emit(kind(worker=self.name))

    def _room(self) -> int:
        """How many more jobs to ask for."""
        if self._paused:
            return 0
        size = self._prefetch.size
        if size > self._settings.at_a_time and self._is_held_up():
            size = self._settings.at_a_time  # what waits behind long jobs would be given back, and come again
        room = size - self._executor.busy
        if self._settings.max_jobs is not None:
            room = min(room, self._settings.max_jobs - self._taken)
        return room

    def _may_fetch(self) -> bool:
        """Whether no hook of the app's says no."""
        for hook in self._app.fetch_hooks:
            try:
                if hook(self.name) is False:
                    return False
            except (Exception, SystemExit):  # noqa: BLE001 - logged, and no veto
                _log.exception("a before_fetch hook failed; the worker goes on as if it had agreed")
        return True

    def _wait(self, finished: list[Verdict], patience: float) -> None:
        """No room, or not allowed: settle, and sleep until something changes."""
        if finished or self._pump.owes:
            self._pump.settle(finished)
        done = self._settings.max_jobs is not None and self._taken >= self._settings.max_jobs
        if done and self._executor.busy == 0:
            self.stop(f"took {self._taken} jobs")
            return
        self._changed.wait(patience)

    def _patience(self) -> float:
        """Seconds that the loop may sleep if nothing happens."""
        if self._executor.busy == 0:
            return 0.0 if self._settings.stop_when_empty and not self._paused else min(_IDLE, self._limit.ends_in())
        return min(self._pump.next_beat_in(), TICK if self._executor.waiting else _BUSY)

    def _found_nothing(self) -> None:
        """Nothing is due and nothing runs: is that a reason to end?"""
        self._hold(False)
        if self._settings.stop_when_empty and not self._pump.is_down:
            self.stop("the queues are empty")

    def _drain(self) -> None:
        """Give back what has not begun, wait for what runs, settle it all."""
        self._give_back_waiting()
        while not self._aborted:
            finished = self._executor.take_finished()
            if finished or self._pump.owes:
                self._pump.settle(finished)
            if self._executor.busy == 0 and not self._pump.owes:
                return
            if time.monotonic() >= self._deadline:
                self.abort()
                return
            self._pump.beat()
            self._changed.wait(TICK)
            self._changed.clear()

    # --- beside the jobs ---

    def _beat(self) -> None:
        """The heartbeat's work. Inline, a job has the loop's own thread, so what else the loop does is done here."""
        self._watch_limits()
        if self._is_inline:
            self._row.beat = time.monotonic()
            self._tick()

    def _tick(self) -> None:
        """While jobs are held: keep leases alive; let no long job keep finished or waiting ones."""
        executor = self._executor
        self._pump.beat()
        if executor.waiting and self._is_held_up():
            self._give_back_waiting()
        if executor.running_for() > TICK:
            finished = executor.take_finished()
            if finished:
                self._pump.settle(finished)
        if self._stopping is not None and time.monotonic() >= self._deadline and not self._aborted:
            self.abort()

    def _is_held_up(self) -> bool:
        """Whether all who could run a job are in one, and not all of those jobs are short."""
        executor = self._executor
        return executor.at_work >= self._settings.at_a_time and executor.running_for() > TICK

    def _watch_limits(self) -> None:
        """Tell jobs that run longer than they may; end the process for one that does not listen."""
        self._limits.tell()
        overdue = self._limits.overdue()
        for call in overdue:
            self._events.emit(JobOverdue(job=call.job, timeout=call.timeout or 0.0))
        if overdue and self._ledger is not None and self._leave is not None:
            self.stop("a job does not heed its time limit")
            self._let_go(overdue)
            self._events.emit(WorkerStopped(worker=self.name, exit_code=EXIT_OVERDUE))
            self._events.finish(_CUT_EVENTS)
            self._leave(EXIT_OVERDUE)

    def _hold(self, holding: bool) -> None:
        """Let the heartbeat run while there are jobs, and sleep while there are none."""
        if holding:
            self._heartbeat.holding.set()
        else:
            self._heartbeat.holding.clear()

    def _give_back_waiting(self) -> None:
        leases = self._executor.take_back()
        if leases:
            self._give_back(leases)

    def _give_back(self, leases: Sequence[Lease]) -> None:
        self._count(-len(leases))
        self._pump.settle([GiveBack(lease) for lease in leases])

    def _count(self, change: int) -> None:
        """The loop takes jobs and the heartbeat gives some back."""
        with self._counting:
            self._taken += change
            self._row.taken += change

    def _let_go(self, overdue: Sequence[Call] = ()) -> None:
        """Settle all that is held, without waiting long: the pump may hang in a call that nobody answers."""
        thread = threading.Thread(target=self._settle_all, args=(overdue,), name="multiq-abort", daemon=True)
        thread.start()
        self._given_back.wait(_ABORT_WAIT)

    def _settle_all(self, overdue: Sequence[Call]) -> None:
        executor = self._executor
        finished = executor.take_finished()
        late = [call.job.lease for call in overdue]
        left = [lease for lease in (*executor.take_back(), *executor.running()) if lease not in late]
        self._pump.interrupt()
        try:
            timed_out = [self._runner.timed_out(lease) for lease in late]
            self._pump.settle([*finished, *timed_out, *(GiveBack(lease) for lease in left)])
        finally:
            self._given_back.set()

    # --- small things ---

    @property
    def _is_inline(self) -> bool:
        return isinstance(self._executor, InlineExecutor)

    def _stopped(self) -> int:
        code = EXIT_CUT_SHORT if self._aborted else self._exit_code
        self._events.emit(WorkerStopped(worker=self.name, exit_code=code))
        self._finish_events()
        return code

    def _finish_events(self) -> None:
        self._events.finish(_CUT_EVENTS if self._aborted else _LAST_EVENTS)

    def _wake(self) -> None:
        """A job has ended. Once in a turn is enough: what ended since is seen with it."""
        if not self._changed.is_set():
            self._nudge()

    def _nudge(self) -> None:
        self._changed.set()
        self._pump.interrupt()

    def _make_executor(self) -> Executor:
        settings, ledger = self._settings, self._ledger
        if settings.concurrency:
            return CoroutineExecutor(self._runner, self._prefetch, self._wake, settings.concurrency, ledger)
        if settings.threads > 1:
            return ThreadExecutor(self._runner, self._prefetch, self._wake, settings.threads, ledger)
        return InlineExecutor(self._runner, self._prefetch, self._wake, ledger)


def _package_of(backend: Backend) -> str:
    return type(backend).__module__.partition(".")[0]
