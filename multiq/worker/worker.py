"""``Worker``: the public class that runs an app's jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multiq.control.flags import Control
from multiq.errors import MultiqError, OptionInvalid
from multiq.logging import log_events
from multiq.settings.process_range import ProcessRange, read_process_range
from multiq.settings.queue_order import check_policy, read_queues, shares
from multiq.validation import check_count, check_timeout

from .execution.hanging_calls import run_in_thread
from .monitoring.health import Health
from .monitoring.health_file import HealthFile, check_path
from .monitoring.http_server import Pages, Server, check_libraries, listen, parse_address
from .monitoring.metrics import Metrics
from .processes import fork, signal_handlers
from .processes.exits import EXIT_CUT_SHORT, EXIT_OK
from .processes.inflight import InflightWriter
from .processes.outbox_relaying import relay_outboxes_on_thread
from .processes.process import ProcessSettings, WorkerProcess
from .processes.reload import PreviousGeneration, noted_signals, taking_over, was_reloaded
from .processes.scaling import Scaling
from .processes.scheduling import schedule_on_thread
from .processes.shared_state import SharedState
from .processes.sidecar import Sidecar
from .processes.signal_inbox import SignalInbox
from .processes.signals import (
    ABORT,
    HANDLED_BY_CHILD,
    HANDLED_BY_SUPERVISOR,
    actions_alone,
    actions_of_child,
    handled_alone,
    stop_or_abort,
)
from .processes.stack_dump import dumping_stacks
from .processes.supervisor import KILL_MARGIN, Supervisor

if TYPE_CHECKING:
    import socket
    import threading
    from collections.abc import Mapping, Sequence

    from multiq.app import App

    from .processes.child_record import Assignment
    from .processes.lifeline import Lifeline


_SPARE_SLOTS = 8
_SHORTEST_SCALE = 0.1  # seconds; the smallest value of scale_up_after and scale_down_after
_FLUSH_WAIT = 1.0  # seconds to flush the log and the standard streams before the process exits


class Worker:
    """Runs the jobs of an app's queues.

    An option that is not given comes from the settings (``worker.*``).

    - *app*: the app whose tasks the worker runs.
    - *queues*: names, or a mapping of names to weights. Default: the queues of the app's tasks.
    - *policy*: how the worker shares its work among the queues. ``"strict"`` reserves from a queue only while no
      earlier queue has a due job. ``"weighted"`` shares in proportion to the weights (``{"high": 3, "low": 1}``).
      ``"round-robin"`` shares equally. Default: strict if queues are named, else round-robin.
    - *processes*: the number of worker processes under a supervisor. The supervisor replaces processes that die, and
      ends processes whose job runs on after its timeout. 0, the default, means that jobs run in this process, without a
      supervisor. ``"MIN:MAX"``: the worker scales between these numbers.
    - *scale_up_after*: seconds for which jobs wait before a worker that scales starts more processes. Default 1.
    - *scale_down_after*: seconds for which a worker that scales keeps processes that it does not need. Default 30.
    - *threads*: the number of jobs that each process runs at a time, on threads. Default 1.
    - *concurrency*: the number of coroutine jobs that each process runs at a time on one event loop. With
      *concurrency*, plain functions run on a pool of threads. 0, the default, means no shared event loop.
    - *prefetch*: the number of short jobs that a process may hold in addition to its running jobs. Default 100.
    - *grace*: seconds that running jobs get after SIGTERM. Default 25.
    - *kill_after*: seconds that a job gets after its ``timeout`` before its process is ended. Default 2.
    - *max_jobs*: each process ends after this many jobs.
    - *max_time*: the worker ends after this many seconds.
    - *stop_when_empty*: the worker ends when no job is due. While the backend or a part of it is down, the worker does
      not end.
    - *recycle_jobs*, *recycle_time*: replace a process after about this many jobs, or seconds.
    - *memory*: replace a process that uses more than this many MiB. Without a supervisor, ``run`` returns 12 instead.
    - *force*: work even if the connection is down (``multiq down``).
    - *health_file*: the file that gets the worker's status every few seconds, for ``multiq health``.
    - *http*: the address of the pages for probes and Prometheus, such as ``"localhost:9000"``.
    - *log_jobs*: log a line for each job that is done.
    - *schedule*: whether the worker also makes the jobs of schedules. Default True. If *processes* is 0, the worker
      makes these jobs only if the app's code has schedules.

    Raises ``OptionInvalid``, ``NameInvalid`` or ``ExtraNotInstalled``. Raises ``Unsupported`` if *processes* is not 0
    and the backend cannot be shared between processes.
    """

    def __init__(
        self,
        app: App,
        queues: Sequence[str] | Mapping[str, int] | None = None,
        *,
        policy: str | None = None,
        processes: int | str | None = None,
        scale_up_after: float | None = None,
        scale_down_after: float | None = None,
        threads: int | None = None,
        concurrency: int | None = None,
        prefetch: int | None = None,
        grace: float | None = None,
        kill_after: float | None = None,
        max_jobs: int | None = None,
        max_time: float | None = None,
        stop_when_empty: bool = False,
        recycle_jobs: int | None = None,
        recycle_time: float | None = None,
        memory: int | None = None,
        force: bool = False,
        health_file: str | Path | None = None,
        http: str | None = None,
        log_jobs: bool | None = None,
        schedule: bool = True,
    ) -> None:
        app.load_included()  # before the processes are started, so that the error is raised here
        default = app.settings.worker
        self._app = app
        self._queues = default.queues if queues is None else queues
        self._policy = default.policy if policy is None else policy
        weights, policy = self._weights()
        if processes is None:
            processes = default.processes or 0
        self._limits = _process_range(processes)
        self._processes = self._limits.most
        self._up_after = _scale_time(scale_up_after, default.scale_up_after, "scale_up_after")
        self._down_after = _scale_time(scale_down_after, default.scale_down_after, "scale_down_after")
        if threads is not None:
            if concurrency and check_count(threads, "threads") > 1:
                raise OptionInvalid(
                    f"threads={threads} and concurrency={concurrency} exclude each other: jobs run on threads, or as "
                    "coroutines on one event loop"
                )
            concurrency = concurrency or 0  # overrides the settings' concurrency
        self._settings = ProcessSettings(
            queues=tuple(weights),
            shares=shares(policy, weights),
            threads=default.threads if threads is None else check_count(threads, "threads"),
            concurrency=default.concurrency
            if concurrency is None
            else check_count(concurrency, "concurrency", least=0),
            prefetch=default.prefetch if prefetch is None else check_count(prefetch, "prefetch"),
            grace=default.grace if grace is None else check_timeout(grace, "grace"),
            kill_after=default.kill_after if kill_after is None else check_timeout(kill_after, "kill_after"),
            max_jobs=None if max_jobs is None else check_count(max_jobs, "max_jobs"),
            stop_when_empty=stop_when_empty,
            recycle_jobs=None if recycle_jobs is None else check_count(recycle_jobs, "recycle_jobs"),
            recycle_time=None if recycle_time is None else check_timeout(recycle_time, "recycle_time"),
            memory=None if memory is None else check_count(memory, "memory"),
        )
        self._log_jobs = app.settings.log.jobs if log_jobs is None else log_jobs
        self._force = force
        self._schedules = schedule
        self._max_time = None if max_time is None else check_timeout(max_time, "max_time")
        self.owns_process = False
        """Whether the worker may exit the process if a job keeps ``run`` from returning. The command line sets this
        flag."""
        self.check: Sequence[str] | None = None
        """A command that exits with 0 if the current code starts. A reload (SIGHUP) runs the command first."""
        if not self._processes and (recycle_jobs or recycle_time):
            raise OptionInvalid(
                "recycle_jobs and recycle_time need a supervisor that replaces the process: processes=1 or more"
            )
        health_file = default.health_file if health_file is None else health_file
        self._health_file = None if health_file is None else check_path(Path(health_file))
        http = default.http if http is None else http
        self._http = None if http is None else parse_address(http)
        if not self._processes and (health_file is not None or http is not None):
            raise OptionInvalid("health_file and http need a process beside the jobs: processes=1 or more")
        if http is not None:
            check_libraries()
        if self._processes and not app.backend.capabilities.shared:
            raise app.backend.unsupported("shared")
        if self._limits.scales and not (app.backend.declared.exact_counts or app.backend.declared.inspection):
            raise app.backend.unsupported("exact_counts")  # without exact counts, it is unknown whether jobs wait
        self._running: WorkerProcess | Supervisor | None = None
        self._stop_early = False
        self._has_ended = False

    @property
    def queues(self) -> tuple[str, ...]:
        """The names of the worker's queues, in the given order."""
        return tuple(self._weights()[0])

    def run(self) -> int:
        """Work until SIGTERM, SIGINT or ``stop``.

        Returns the exit code: 0, or 130 if running jobs were given back.

        In the main thread, ``run`` handles signals. The first SIGTERM or SIGINT lets running jobs finish and gives back
        the other jobs. A second signal gives back all jobs immediately. SIGUSR2 pauses the worker, and SIGCONT resumes
        it.
        """
        self._has_ended = False
        try:
            return self._run()
        finally:
            self._has_ended, self._running, self._stop_early = True, None, False

    def stop(self) -> None:
        """Do what a SIGTERM does. A second call does what a second SIGTERM does.

        Thread-safe. After ``run`` has ended, a call has no effect.
        """
        if self._has_ended:
            return
        self._stop_early = True
        running = self._running
        if isinstance(running, WorkerProcess):
            stop_or_abort(running)
        elif running is not None:
            running.stop()

    def _run(self) -> int:
        log_events(self._app, each_job=self._log_jobs)
        weights, policy = self._weights()  # tasks may have been registered since the constructor ran
        self._settings = msgspec.structs.replace(self._settings, queues=tuple(weights), shares=shares(policy, weights))
        if self._max_time is not None:
            self._settings = msgspec.structs.replace(self._settings, end_at=time.monotonic() + self._max_time)
        if self._settings.stop_when_empty:
            for outbox in self._app.outboxes:  # before a worker can find its queues empty
                outbox.relay_or_log()
        if self._processes == 0:
            return self._run_alone()
        settings = self._settings
        try:
            self._shared_state = SharedState(self._processes, _SPARE_SLOTS + 2 * settings.most_held)
        except (OSError, OverflowError, MemoryError) as exc:
            raise OptionInvalid(
                f"a worker must fit into memory, got processes={self._processes}, {settings.at_a_time} jobs at a time "
                f"and prefetch={settings.prefetch}: lower one of them ({exc})"
            ) from exc
        if self._http is not None:
            self._listener = listen(self._http)
            self._metrics = Metrics(self._app.tasks, self._processes + 1)
        supervisor = Supervisor(
            self._run_process,
            self._run_sidecar,
            self._shared_state,
            grace=settings.grace,
            once=settings.stop_when_empty or settings.max_jobs is not None or self._max_time is not None,
            shrinks=not settings.stop_when_empty,
            check=self.check,
            least=self._limits.least,
            reaps_all=self.owns_process and os.getpid() == 1,
        )
        self._running = supervisor
        try:
            return EXIT_OK if self._stop_early else supervisor.run()
        finally:
            if self._http is not None:
                self._listener.close()
            if self._health_file is not None:
                self._health_file.unlink(missing_ok=True)

    def _weights(self) -> tuple[dict[str, int], str]:
        if self._queues is not None:
            weights = read_queues(self._queues)
            return weights, check_policy(self._policy or "strict", weights)
        weights = read_queues([task.default.queue for task in self._app.tasks.values()] or ["default"])
        return weights, check_policy(self._policy or "round-robin", weights)

    def _run_alone(self) -> int:
        ends = [relay_outboxes_on_thread(self._app)]
        if self._schedules and self._app.code_schedules:
            ends.append(schedule_on_thread(self._app))
        try:
            return self._run_in_this_process()
        finally:
            for end in ends:
                end()

    def _run_in_this_process(self) -> int:
        """After a reload, the children of a former supervisor may belong to this process."""
        if not (self.owns_process and was_reloaded()):
            return self._run_process(None)
        previous = PreviousGeneration.take()  # stops the old children
        all_ended = run_in_thread(previous.reap)
        with taking_over():
            code = self._run_process(None, previous, all_ended)
        return EXIT_CUT_SHORT if {EXIT_CUT_SHORT, -signal.SIGKILL} & set(previous.codes) else code

    def _run_process(
        self,
        assignment: Assignment | None,
        previous: PreviousGeneration | None = None,
        all_ended: threading.Event | None = None,
    ) -> int:
        """Run one process. A process without an *assignment* has no supervisor, so it waits for the end of the
        *previous* generation."""
        if assignment is None:
            inbox = SignalInbox(handled_alone(owns_process=self.owns_process))
        else:
            if self._http is not None:
                self._listener.close()
                self._metrics.count(self._app.events, assignment.index)
            inbox = SignalInbox(HANDLED_BY_CHILD, assignment.lifeline)
        # Threads inherit blocked signals, so the inbox unblocks them before the first thread starts.
        with inbox, dumping_stacks(on=inbox.installed):
            process = self._make_process(assignment, inbox)
            self._running = process
            if self._stop_early:
                process.stop()
            if previous is not None:
                if previous.is_paused:
                    process.pause()
                for number in noted_signals():
                    inbox.put(number)
            inbox.serve(actions_alone(process, previous) if assignment is None else actions_of_child(process))
            if not self._force:  # signals are served before, because a silent backend delays this call
                process.obey_down(lambda: _is_down(self._app))
            with process.interrupting() if inbox.installed else contextlib.nullcontext():
                code = process.run()
            if (
                previous is not None
                and all_ended is not None
                and not all_ended.wait(self._settings.grace + KILL_MARGIN)
            ):
                previous.send(signal.SIGKILL)  # the old sidecar may be dead
                all_ended.wait(KILL_MARGIN)
            return code

    def _make_process(self, assignment: Assignment | None, inbox: SignalInbox) -> WorkerProcess:
        def exit_process(code: int) -> None:
            """Exit even if a job occupies the main thread, or a thread holds the lock of a stream."""
            run_in_thread(_flush).wait(_FLUSH_WAIT)
            if assignment is not None:
                assignment.table.note_exit(code)
            os._exit(code)

        return WorkerProcess(
            self._app,
            self._settings,
            inflight=None if assignment is None else InflightWriter(assignment.table),
            row=None if assignment is None else self._shared_state.children[assignment.index],
            worker=None if assignment is None else self._shared_state.worker,
            is_handing_on=(lambda: False) if assignment is None else (lambda: self._shared_state.is_handing_on),
            exit_process=exit_process if inbox.installed else None,
            reclaim_signals=inbox.reclaim_signals,
            owns_process=assignment is not None or self.owns_process,
        )

    def _run_sidecar(self, notifications: socket.socket, lifeline: Lifeline) -> int:
        """The main function of the sidecar's process. The sidecar ignores signals to the process group."""
        health = Health(self._shared_state, self._settings, self._limits)
        sidecar = Sidecar(
            self._app,
            self._shared_state,
            notifications,
            lifeline,
            self._settings.grace + KILL_MARGIN,
            force=self._force,
            shares_loop=self._settings.concurrency > 0,
            schedules=self._schedules,
            queues=self._settings.queues,
            scaling=self._scaling() if self._limits.scales else None,
            health=health,
            health_file=None if self._health_file is None else HealthFile(self._health_file),
            server=None if self._http is None else self._serve(health),
        )
        # The handlers inherited from the supervisor stay installed, but have no effect in the sidecar.
        signal_handlers.take_signal(ABORT, lambda _number, _frame: sidecar.kill())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ABORT, *HANDLED_BY_SUPERVISOR})
        relay_outboxes_on_thread(self._app)  # after the mask is set, which threads inherit
        return sidecar.run()

    def _scaling(self) -> Scaling:
        return Scaling(
            self._app.backend,
            self._settings.queues,
            self._shared_state,
            self._limits,
            at_a_time=self._settings.at_a_time,
            up_after=self._up_after,
            down_after=self._down_after,
        )

    def _serve(self, health: Health) -> Server:
        from .monitoring.prometheus import WorkerCollector  # needs the extra ``metrics``

        self._metrics.count(self._app.events, self._processes)
        collector = WorkerCollector(self._metrics, health, self._app.backend, self._settings.queues)
        names = () if self._http is None else (self._http.host,)
        return Server(self._listener, Pages(health, collector.text, names))


def _process_range(processes: int | str) -> ProcessRange:
    if not isinstance(processes, str):
        number = check_count(processes, "processes", least=0)
        return ProcessRange(number, number)
    try:
        return read_process_range(processes)
    except ValueError as exc:
        raise OptionInvalid(f"processes {exc}, got {processes!r}") from exc


def _scale_time(given: float | None, default: float, name: str) -> float:
    seconds = default if given is None else check_timeout(given, name)
    if seconds < _SHORTEST_SCALE:
        raise OptionInvalid(f"{name} must be {_SHORTEST_SCALE:g} seconds or more, got {seconds:g}")
    return seconds


def _is_down(app: App) -> bool:
    try:
        return Control(app.backend).is_down()
    except MultiqError:  # the worker reports the error, and retries
        return False


def _flush() -> None:
    logging.shutdown()
    fork.flush_streams()
