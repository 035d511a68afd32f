"""One worker process: the loop that reserves, has jobs run, and settles them."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from multiq.backend import GiveBack
from multiq.events import WorkerLooping, WorkerPaused, WorkerResumed, WorkerStarted, WorkerStopped, WorkerStopping

from .executors import CoroutineExecutor, Executor, InlineExecutor, ThreadExecutor
from .heartbeat import TICK, Heartbeat
from .prefetch import Prefetch
from .pump import Pump
from .runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from multiq.app import App
    from multiq.backend import Lease, Verdict

EXIT_OK = 0
EXIT_CUT_SHORT = 130
"""A second signal, or the end of the grace, cut jobs short; they were given back."""

_IDLE = 5.0  # seconds: an idle worker looks up this often, for what no notification brings (a dead supervisor)
_BUSY = 1.0  # seconds: while jobs run elsewhere, the loop looks this often whether one of them is overdue
_ABORT_WAIT = 2.0  # seconds: an abort waits no longer for the backend than this


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one process works."""

    queues: tuple[str, ...]
    threads: int = 1
    concurrency: int = 0
    prefetch: int = 100
    grace: float = 25.0
    max_jobs: int | None = None
    stop_when_empty: bool = False


class Child:
    """Runs until it is told to stop, or until its own limits say so.

    ``stop``, ``abort``, ``pause`` and ``resume`` may come from any thread. *parent* is the supervisor's pid, if there
    is one. *leave* ends the process where an aborted job cannot be left behind otherwise; without it (somebody
    else's process) such a job runs on to its end, and its result does not count.
    """

    def __init__(
        self,
        app: App,
        settings: ChildSettings,
        *,
        parent: int | None = None,
        leave: Callable[[int], None] | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._parent = parent
        self._leave = leave
        self._events = app.events
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._stopping: str | None = None
        self._deadline = float("inf")  # when the grace ends
        self._aborted = False
        self._given_back = threading.Event()
        self._paused = False
        self._taken = 0
        self._counting = threading.Lock()
        self._changed = threading.Event()
        self._pump = Pump(app.backend.consumer(settings.queues), app.events, self.name)
        self._runner = Runner(app)
        self._prefetch = Prefetch(settings.concurrency or settings.threads, settings.prefetch)
        self._executor = self._make_executor()
        # inline, a job has the loop's own thread, so somebody else must keep leases alive
        self._heartbeat = Heartbeat(self._tick, on_death=self.abort) if self._is_inline else None

    # --- from outside ---

    def run(self) -> int:
        """Work until stopped. Returns the exit code."""
        if self._heartbeat is not None:
            self._heartbeat.start()
        self._events.emit(WorkerStarted(worker=self.name, queues=self._settings.queues))
        try:
            while self._stopping is None:
                self._turn()
            self._drain()
        finally:
            if self._aborted:
                self._given_back.wait(_ABORT_WAIT)
            if self._heartbeat is not None:
                self._heartbeat.close()
            self._executor.close()
            self._pump.close()
        return self._stopped()

    def stop(self, reason: str = "asked to") -> None:
        """Take no more jobs, give back what has not begun, finish what runs within the grace."""
        if self._stopping is None:
            self._deadline = time.monotonic() + self._settings.grace
            self._stopping = reason
            self._events.emit(WorkerStopping(worker=self.name, reason=reason))
        self._nudge()

    def abort(self) -> None:
        """Give everything back, now. What runs is not waited for, and its result will not count."""
        self._aborted = True
        self.stop("asked to, at once")
        thread = threading.Thread(target=self._give_back_all, name="multiq-abort", daemon=True)
        thread.start()  # the pump may hang in a call to a backend that does not answer
        self._given_back.wait(_ABORT_WAIT)
        if self._is_inline and self._leave is not None:
            self._leave(self._stopped())

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for already."""
        return self._stopping is not None

    def pause(self) -> None:
        """Reserve nothing until ``resume``; what runs goes on, and so do its heartbeats."""
        if not self._paused:
            self._paused = True
            self._events.emit(WorkerPaused(worker=self.name))
            self._nudge()

    def resume(self) -> None:
        """Reserve again."""
        if self._paused:
            self._paused = False
            self._events.emit(WorkerResumed(worker=self.name))
            self._nudge()

    # --- the loop ---

    def _turn(self) -> None:
        """Once round: settle what is finished, reserve what there is room for, have it run."""
        executor = self._executor
        if not self._is_inline:
            self._tick()
        finished = executor.take_finished()
        room = self._room()
        if room <= 0:
            self._wait(finished)
            return
        if self._events.wants(WorkerLooping):
            self._events.emit(WorkerLooping(worker=self.name))
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

    def _room(self) -> int:
        """How many more jobs to ask for."""
        if self._paused:
            return 0
        room = self._prefetch.size - self._executor.busy
        if self._settings.max_jobs is not None:
            room = min(room, self._settings.max_jobs - self._taken)
        return room

    def _wait(self, finished: list[Verdict]) -> None:
        """No room: settle, and sleep until something changes."""
        if finished or self._pump.owes:
            self._pump.settle(finished)
        done = self._settings.max_jobs is not None and self._taken >= self._settings.max_jobs
        if done and self._executor.busy == 0:
            self.stop(f"took {self._taken} jobs")
            return
        self._changed.wait(self._patience())
        self._changed.clear()
        self._check_parent()

    def _patience(self) -> float:
        """Seconds that the loop may sleep if nothing happens."""
        if self._executor.busy == 0:
            return 0.0 if self._settings.stop_when_empty and not self._paused else _IDLE
        return min(self._pump.next_beat_in(), TICK if self._executor.waiting else _BUSY)

    def _found_nothing(self) -> None:
        """Nothing is due and nothing runs: is that a reason to end?"""
        self._hold(False)
        self._check_parent()
        if self._settings.stop_when_empty and not self._pump.is_down:
            self.stop("the queues are empty")

    def _check_parent(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            self.stop("the supervisor is gone")

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

    def _tick(self) -> None:
        """While jobs are held: keep leases alive; let no long job keep finished or waiting ones."""
        executor = self._executor
        self._pump.beat()
        self._runner.report_overdue()
        if executor.running_for() > TICK:
            self._give_back_waiting()
            finished = executor.take_finished()
            if finished:
                self._pump.settle(finished)
        if self._stopping is not None and time.monotonic() >= self._deadline and not self._aborted:
            self.abort()

    def _hold(self, holding: bool) -> None:
        """Let the heartbeat run while there are jobs, and sleep while there are none."""
        if self._heartbeat is None:
            return
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

    def _give_back_all(self) -> None:
        executor = self._executor
        finished = executor.take_finished()
        left = [*executor.take_back(), *executor.running()]
        self._pump.interrupt()
        try:
            self._pump.settle([*finished, *(GiveBack(lease) for lease in left)])
        finally:
            self._given_back.set()

    # --- small things ---

    @property
    def _is_inline(self) -> bool:
        return isinstance(self._executor, InlineExecutor)

    def _stopped(self) -> int:
        code = EXIT_CUT_SHORT if self._aborted else EXIT_OK
        self._events.emit(WorkerStopped(worker=self.name, exit_code=code))
        return code

    def _nudge(self) -> None:
        self._changed.set()
        self._pump.interrupt()

    def _make_executor(self) -> Executor:
        settings = self._settings
        if settings.concurrency:
            return CoroutineExecutor(self._runner, self._prefetch, self._nudge, settings.concurrency)
        if settings.threads > 1:
            return ThreadExecutor(self._runner, self._prefetch, self._nudge, settings.threads)
        return InlineExecutor(self._runner, self._prefetch, self._nudge)
