"""A worker gets its signals even if its jobs change the signal handlers, and suspending all its processes counts no
crash."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from processes import HERE, until, worker
from rough_app import (
    await_to_be_told,
    give_signals_up,
    nap_through,
    program,
    take_real_time_signals,
    take_signals,
    take_signals_in_a_loop,
    wait_to_be_told,
)
from worker_app import app, quick, read_diary

INLINE = ["", "processes=1"]  # modes in which jobs run in the main thread, where Python allows signal handlers
SUPERVISED = ["processes=1", "processes=1, threads=2", "processes=1, concurrency=2"]
MODES = ["", "threads=2", "concurrency=2", *SUPERVISED]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def words(folder: Path, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(folder / "diary") if said == word]


@pytest.mark.one_row
@pytest.mark.parametrize("mode", INLINE)
@pytest.mark.parametrize("way", ["wake-up", "tidy", "term", "loop", "real-time"])
@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_stops_by_signal_after_a_job_has_taken_signals(
    tmp_path: Path, url: str, mode: str, way: str, idle: bool
) -> None:
    # Given a job that has installed its own signal handlers
    if way == "loop":
        take_signals_in_a_loop.enqueue(1)
    elif way == "real-time":
        take_real_time_signals.enqueue(1)
    else:
        take_signals.enqueue(1, way)
    with worker(tmp_path, url, code=program(mode)) as process:
        until(lambda: words(tmp_path, "end") == [1])
        if way != "loop":
            assert words(tmp_path, "heard") == [1]
        until(lambda: " done " in process.log)  # the worker restores its signals before it logs this
        if not idle:
            nap_through.enqueue(2, 1.0)
            until(lambda: words(tmp_path, "start") == [2])
        # When the worker gets a stop signal
        process.send(signal.SIGTERM)
        # Then it finishes its running job, if there is one, and exits with 0
        assert process.wait(30) == 0, process.log
        assert "died" not in process.log
        assert "SIGTERM" not in process.log
    assert words(tmp_path, "end") == ([1] if idle else [1, 2])


@pytest.mark.parametrize("mode", SUPERVISED[:1])
def test_a_stop_that_kills_a_job_without_handlers_counts_no_crash(tmp_path: Path, url: str, mode: str) -> None:
    # Given a job that has reset SIGTERM to the system's default
    handle = give_signals_up.enqueue(1)
    with worker(tmp_path, url, code=program(mode)) as process:
        until(lambda: words(tmp_path, "start") == [1])
        # When its worker gets a stop signal, which ends the job's process
        process.send(signal.SIGTERM)
        # Then the job is given back, like any job that was interrupted
        assert process.wait(30) == 130, process.log
        assert "crashed" not in process.log
    record = app.queue().peek(handle.id)
    assert (record.state.name, record.attempt, record.crashes) == ("READY", 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES[1:3] + SUPERVISED[1:])
@pytest.mark.parametrize("what", ["before_fetch", "subscriber"])
def test_a_slow_hook_costs_no_running_job_its_lease(tmp_path: Path, url: str, mode: str, what: str) -> None:
    # Given a worker with a hook that takes longer than a lease
    make = {
        "before_fetch": (
            "slow = type('Slow', (multiq.Middleware,), {'before_fetch': lambda *_: time.sleep(4.0)}); "
            "rough_app.app.middleware(slow())"
        ),
        "subscriber": "rough_app.app.on(multiq.events.WorkerLooping)(lambda _: time.sleep(4.0))",
    }
    before = f"import multiq, rough_app, time; {make[what]}"
    nap_through.enqueue(1, 6.0)  # its ttr is 2
    with worker(tmp_path, url, code=program(mode, before)):
        until(lambda: words(tmp_path, "start") == [1])
        # When another worker waits for jobs
        with worker(tmp_path, url, code=program(mode)) as other:
            # Then it never gets the first worker's job
            until(lambda: words(tmp_path, "end"))
            assert words(tmp_path, "start") == [1]
            assert "done" not in other.log


@pytest.mark.long
@pytest.mark.parametrize("mode", SUPERVISED)
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_a_job_whose_worker_was_suspended_beyond_its_timeout_is_notified_on_resume(
    tmp_path: Path, url: str, mode: str, kind: str
) -> None:
    # Given a running job, whose worker's processes are all stopped for longer than the job's time limit
    task = wait_to_be_told if kind == "plain" else await_to_be_told
    handle = task.enqueue(1)
    with worker(tmp_path, url, code=program(mode)) as process:
        until(lambda: words(tmp_path, "start") == [1])
        os.killpg(process.process.pid, signal.SIGSTOP)
        time.sleep(5.0)
        # When they continue
        os.killpg(process.process.pid, signal.SIGCONT)
        # Then the job gets its timeout, and its process lives
        until(lambda: words(tmp_path, "told") == [1])
        until(lambda: handle.state().name == "BURIED")
        assert "overdue" not in process.log
        assert "ran on after its timeout" not in process.log
        assert process.log.count(" working ") == 1
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.one_row
@pytest.mark.parametrize("moment", range(4))
def test_the_sidecar_ends_without_an_error_when_children_die_at_the_end(tmp_path: Path, url: str, moment: int) -> None:
    nap_through.enqueue_many([(number, 0.4) for number in range(4)])
    with worker(tmp_path, url, code=program("processes=2, threads=2")) as process:
        until(lambda: len(words(tmp_path, "start")) == 4)
        process.send(signal.SIGTERM)
        time.sleep(0.1 * moment)
        with contextlib.suppress(ProcessLookupError):  # on a busy machine the process may have ended by itself
            os.kill(read_diary(tmp_path / "diary")[0][2], signal.SIGKILL)
        process.wait()
        assert "Traceback" not in process.log
        assert "FileNotFoundError" not in process.log
    assert app.queue().stats().reserved == 0


def test_no_file_says_what_a_worker_holds(tmp_path: Path, url: str) -> None:
    # So a full /dev/shm does no harm, and a worker in another container that shares it cannot delete the tables.
    def files() -> set[Path]:
        return {path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("multiq-*")}  # noqa: S108

    before = files()
    with worker(tmp_path, url, code=program("processes=2")) as process:
        quick.enqueue(1)
        until(lambda: words(tmp_path, "end") == [1])
        assert not {path for path in files() - before if str(process.process.pid) in path.name}


def start_with_nohup(folder: Path, url: str, *options: str) -> tuple[int, int]:
    """``nohup multiq worker`` in a terminal of its own. Returns the pid, and the descriptor that holds the terminal."""
    (folder / "shop.py").write_text("from worker_app import app\n")
    words = [sys.executable, "-m", "multiq", "worker", "shop:app", *options]
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            more = {"MULTIQ_URL": url, "WORKER_TEST_DIARY": str(folder / "diary"), "PYTHONPATH": str(HERE)}
            os.execvpe("nohup", ["nohup", *words], {**os.environ, **more})  # noqa: S606 - ourselves
        finally:
            os._exit(99)
    return pid, terminal


@pytest.mark.parametrize("processes", ["1", "0"])
@pytest.mark.long
def test_a_worker_that_nohup_has_started_continues_when_its_terminal_closes(
    tmp_path: Path, url: str, processes: str
) -> None:
    # Given a worker that was started with nohup, and that has reloaded if it has a supervisor
    pid, terminal = start_with_nohup(tmp_path, url, "-p", processes)
    log = tmp_path / "log"
    generations = 1
    try:
        until(lambda: log.exists() and " working " in log.read_text(), what=log.read_text)
        if processes == "1":
            os.kill(pid, signal.SIGHUP)
            until(lambda: log.read_text().count(" working ") == 2, what=log.read_text)
            generations = 3
        # When its terminal closes, which sends a SIGHUP
        os.close(terminal)
        until(lambda: log.read_text().count(" working ") == generations, what=log.read_text)
        # Then the worker still runs jobs
        quick.enqueue(1)
        until(lambda: words(tmp_path, "end") == [1], what=log.read_text)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, log.read_text()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        raise
