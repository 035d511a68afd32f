"""``multiq worker``: runs an app's jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

from multiq.errors import MultiqError
from multiq.settings.queue_order import POLICIES

from .argument_types import ProcessCount
from .completion import complete_queue
from .options import connection_option, traceback_option, verbose_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from multiq.app import App

_log = logging.getLogger("multiq.cli")

_MOST_TOLD = 10  # the most tasks that are named in the warning about unserved queues


@click.command(short_help="Run an app's jobs.")
@click.argument("app_path", metavar="[APP]", required=False)
@click.option(
    "-q",
    "--queues",
    multiple=True,
    metavar="NAMES",
    shell_complete=complete_queue,
    help="Queues to work on, in order: high,default; or with weights: high=3,low=1.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    metavar="POLICY",
    help="Order of queues: strict, weighted or round-robin.",
)
@click.option(
    "-p",
    "--processes",
    type=ProcessCount(),
    metavar="N|MIN:MAX",
    help="Processes under a supervisor (1), or 1:8: as many of these as are needed; 0: no supervisor.",
)
@click.option("--scale-up-after", type=float, metavar="SECONDS", help="-p MIN:MAX: how long jobs wait (1).")
@click.option("--scale-down-after", type=float, metavar="SECONDS", help="-p MIN:MAX: how long processes idle (30).")
@click.option("-t", "--threads", type=int, metavar="N", help="Threads in each process (1).")
@click.option("--concurrency", type=int, metavar="N", help="Coroutines that run at a time in each process.")
@click.option("--prefetch", type=int, metavar="N", help="Reserve up to N jobs ahead, if jobs are short.")
@click.option("--grace", type=float, metavar="SECONDS", help="How long jobs may run on after SIGTERM (25).")
@click.option("--kill-after", type=float, metavar="SECONDS", help="How long a job may run on after its timeout (2).")
@click.option("--max-jobs", type=int, metavar="N", help="End each process after N jobs.")
@click.option("--max-time", type=float, metavar="SECONDS", help="End the worker after this time.")
@click.option("--recycle-jobs", type=int, metavar="N", help="Replace each process after about N jobs.")
@click.option("--recycle-time", type=float, metavar="SECONDS", help="Replace each process after about this time.")
@click.option("--memory", type=int, metavar="MIB", help="Replace a process that uses more; with -p 0, exit with 12.")
@click.option("--once", is_flag=True, help="End after one job, or at once if no job is due.")
@click.option("--stop-when-empty", is_flag=True, help="End when no job is due.")
@click.option("--force", is_flag=True, help="Take jobs even after multiq down.")
@click.option("--health-file", metavar="PATH", help="Write the worker's status to PATH (multiq health reads it).")
@click.option("--http", metavar="[HOST]:PORT", help="Serve health probes and Prometheus metrics on this address.")
@click.option("--watch", is_flag=True, help="For development: reload when the app's code changes.")
@click.option("--check", is_flag=True, help="Check app and settings, not the store; exits with 0 if all is well.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    metavar="LEVEL",
    help="debug, info, warning or error.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), metavar="FORMAT", help="text, or json: an object per line."
)
@click.option("--log-jobs", is_flag=True, help="Log each finished job at level info (by default only at debug).")
@click.option("--schedule/--no-schedule", default=True, help="Whether to make the jobs of schedules, too.")
@connection_option
@verbose_option
@traceback_option
def worker(*, check: bool, **options: Any) -> int:
    """Run the jobs of APP (module:attribute, like shop.tasks:app), or of the app that the settings name.

    \b
      multiq worker shop.tasks:app -q high,default -p 2 -t 4

    Without -q, the worker serves all queues of the app's tasks. The value of an option that is not given comes from the
    settings. Without a setting, the default in parentheses is used.

    On the first SIGTERM or Ctrl-C, the worker finishes its running jobs, and gives its other reserved jobs back to
    their queues. On the second signal, the worker gives all jobs back and ends immediately. SIGUSR2 pauses the worker.
    SIGCONT resumes the worker. SIGHUP reloads the code. SIGQUIT shows the running jobs.
    """
    if check:
        return _work(check=True, **options)
    with _stopping_while_it_starts() as end:
        end.code = _work(check=False, **options)
    return end.code


def _work(
    *,
    app_path: str | None,
    queues: tuple[str, ...],
    policy: str | None,
    processes: int | str | None,
    scale_up_after: float | None,
    scale_down_after: float | None,
    threads: int | None,
    concurrency: int | None,
    prefetch: int | None,
    grace: float | None,
    kill_after: float | None,
    max_jobs: int | None,
    max_time: float | None,
    recycle_jobs: int | None,
    recycle_time: float | None,
    memory: int | None,
    once: bool,
    stop_when_empty: bool,
    force: bool,
    health_file: str | None,
    http: str | None,
    watch: bool,
    check: bool,
    log_level: str | None,
    log_format: str | None,
    log_jobs: bool,
    schedule: bool,
) -> int:
    from multiq.logging import setup_logging
    from multiq.worker import Worker
    from multiq.worker.processes import auto_reload

    if once and max_jobs is not None:
        raise click.UsageError("--once is --max-jobs 1: give one of the two")
    from .apps import WITHOUT_APP, default_app

    try:
        app_path = app_path or default_app()
        app = _load(app_path)
    except (MultiqError, click.UsageError) as exc:
        if watch:
            auto_reload.wait_if_reloaded(exc)
        raise
    log = app.settings.log
    is_ours = setup_logging(log_level or log.level, log_format or log.format, over_app=log_level is not None)
    if log_format == "json" and not is_ours:
        _log.warning("--log-format has no effect: the app has set up logging itself")
    runner = Worker(
        app,
        queues=_names(queues),
        policy=policy,
        processes=_processes(app, processes),
        scale_up_after=scale_up_after,
        scale_down_after=scale_down_after,
        threads=threads,
        concurrency=concurrency,
        prefetch=prefetch,
        grace=grace,
        kill_after=kill_after,
        max_jobs=1 if once else max_jobs,
        max_time=max_time,
        stop_when_empty=stop_when_empty or once,
        recycle_jobs=recycle_jobs,
        recycle_time=recycle_time,
        memory=memory,
        force=force,
        health_file=health_file,
        http=http,
        log_jobs=log_jobs or None,
        schedule=schedule,
    )
    if watch:
        auto_reload.check_library()
        if not _processes(app, processes):
            raise click.UsageError("--watch needs a supervisor: give -p 1 or more")
    if check:
        return 0
    runner.owns_process = True
    runner.check = [sys.executable, *sys.orig_argv[1:], "--check"]
    _announce(app, app_path, runner.queues)
    with contextlib.ExitStack() as stack:
        stack.enter_context(app)
        if watch:
            modules = [*app.settings.include] if app_path == WITHOUT_APP else [app_path.partition(":")[0]]
            folders = {folder for module in modules for folder in auto_reload.folders_of(module)}
            stack.enter_context(auto_reload.auto_reloading(sorted(folders)))
        before: set[threading.Thread | BaseProcess] = {*threading.enumerate(), *_processes_begun()}
        code = runner.run()
    _leave(before, code)
    return code


def _processes_begun() -> list[BaseProcess]:
    """Return the running processes that this process has started with ``multiprocessing``."""
    module = sys.modules.get("multiprocessing.process")
    return [] if module is None else module.active_children()


def _leave(before: set[threading.Thread | BaseProcess], code: int) -> None:
    """End this process without waiting for the non-daemon threads and processes that jobs have started.

    A process that a job has started continues to run. If no threads or processes of jobs are left, ``_leave`` returns.
    When ``_leave`` has returned, Python waits at its exit for the threads and processes that the app has started.
    """
    from multiq.formatting import many
    from multiq.worker.processes import fork

    # At its exit, Python waits for the threads of executor pools, even for daemon threads.
    pools = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", ())
    left = [
        thread for thread in threading.enumerate() if thread not in before and (not thread.daemon or thread in pools)
    ]
    processes = [process for process in _processes_begun() if process not in before and not process.daemon]
    if left or processes:
        _log.warning(
            "%s and %s that jobs have begun did not end; the worker ends without them",
            many(len(left), "thread"),
            "1 process" if len(processes) == 1 else f"{len(processes)} processes",
        )
        for process in _processes_begun():
            if process.daemon:  # at its exit, Python terminates daemon processes, too
                process.terminate()
        logging.shutdown()
        fork.flush_streams()
        os._exit(code)


class _End:
    """A signal handler that ends this process.

    The handler is installed before the worker's own handlers, and again when the worker has ended.
    """

    code = 0

    def __call__(self, number: int, _frame: object) -> None:
        from multiq.worker.processes import reload

        # The handler calls os._exit, because code that is being imported might catch an exception. Normally, no child
        # process exists. During a reload, the previous child processes still run, so the signal is only recorded.
        if not reload.note_signal(number):
            os._exit(self.code)


@contextlib.contextmanager
def _stopping_while_it_starts() -> Iterator[_End]:
    """Handle signals until the worker installs its own handlers. SIGTERM and SIGINT end the process immediately."""
    from multiq.worker.processes import reload, signal_handlers

    end = _End()
    if threading.current_thread() is not threading.main_thread():
        yield end
        return
    taken = {number: signal_handlers.take_signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    # The worker installs its own handlers for SIGHUP, SIGUSR2 and SIGQUIT when it runs. Without a handler, the signals
    # would end the process during the start.
    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGQUIT):
        taken[number] = signal_handlers.take_signal(number, reload.note_signal)
    try:
        yield end
    finally:
        for number, token in taken.items():
            signal_handlers.restore_signal(number, token)


def _load(path: str) -> App:
    from .apps import load_app

    app = load_app(path)
    if not app.tasks:
        raise click.UsageError(f"{path} has no tasks, so every job would be buried: name the module that defines them")
    return app


def _processes(app: App, given: int | str | None) -> int | str:
    """Return the number of processes. The default is 1, or 0 if only this process can see the backend's jobs."""
    if given is None:
        given = app.settings.worker.processes
    if given is None:
        return 1 if app.backend.declared.shared else 0
    return given


def _names(words: Sequence[str]) -> list[str] | None:
    """Return the queues of ``-q``, which are separated by commas or given in several options. Without ``-q``, return
    None."""
    return [name.strip() for word in words for name in word.split(",")] or None


def _announce(app: App, path: str, queues: Sequence[str]) -> None:
    from multiq import __version__
    from multiq.formatting import many
    from multiq.settings.url import redact
    from multiq.terminal_escapes import safe

    _log.info("multiq %s runs %s, %s, on %s", __version__, path, many(len(app.tasks), "task"), safe(redact(app.url)))
    if not app.backend.capabilities.shared:
        _log.warning("the %s backend lives in this process: no other process can enqueue", app.backend.declared.backend)
    elsewhere = [
        f"{task.name} ({task.default.queue})" for task in app.tasks.values() if task.default.queue not in queues
    ]
    if elsewhere:
        shown = ", ".join(elsewhere[:_MOST_TOLD]) + (", ..." if len(elsewhere) > _MOST_TOLD else "")
        _log.warning("tasks not run here, because -q or worker.queues does not name their queues: %s", shown)
