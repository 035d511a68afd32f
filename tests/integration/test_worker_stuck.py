"""Batches in which a job holds the interpreter's lock, and reloads that take long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from worker_app import app, clutch, nap, quick, read_diary, suicide

import multiq
from multiq import State
from multiq.worker.execution.thread_pool import ThreadPool
from multiq.worker.processes.reload import PreviousGeneration, ReloadCheck
from multiq.worker.processes.shared_state import SharedState
from multiq.worker.processes.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    from processes import WorkerProcess


def starts(process: WorkerProcess) -> Counter[int]:
    return Counter(number for word, number, _, _ in read_diary(process.diary) if word == "start")


def at(process: WorkerProcess, word: str, number: int) -> int:
    return next(at for said, job, _, at in read_diary(process.diary) if (said, job) == (word, number))


@pytest.mark.long
def test_neighbours_of_a_stuck_job_run_once_and_do_not_wait_for_it(tmp_path: Path, url: str) -> None:
    if not app.backend.capabilities.portable_leases:
        pytest.skip("only its own connection can touch or give back a lease: docs/worker.md says so")
    # Given a worker that prefetches many jobs, and a long job in the middle of its batch
    quick.enqueue_many([(number,) for number in range(200)])
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: len(starts(process)) == 200)
        until(lambda: app.queue().stats().reserved == 0)
        app.queue().pause(60)
        quick.options(ttr=1).enqueue_many([(number,) for number in range(1000, 1010)])
        clutch.enqueue(5000, 6)
        quick.options(ttr=1).enqueue_many([(number,) for number in range(2000, 2010)])
        app.queue().resume()
        until(lambda: 5000 in starts(process))
        # When another worker runs
        with worker(tmp_path, url, "processes=1"):
            until(lambda: len(starts(process)) == 221 and app.queue().stats().reserved == 0)
            # Then jobs that had ended before the stuck job are not run again
            assert all(starts(process)[number] == 1 for number in [*range(1000, 1010), 5000])
            # And jobs that had not begun have run in the other worker, long before the stuck job ended
            assert all(starts(process)[number] == 1 for number in range(2000, 2010))
            assert all(at(process, "start", number) < at(process, "end", 5000) for number in range(2000, 2010))


@pytest.mark.long
def test_a_reload_that_takes_long_to_start_kills_no_job(tmp_path: Path) -> None:
    # Given a program that takes long to import, and a job that ends within the grace after that
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    nap.options(ttr=600).enqueue(1, 14)
    code = (
        "import os, sys, time; time.sleep(11 if 'MULTIQ_RELOADED' in os.environ else 0);"
        "import multiq, worker_app; from multiq.logging import setup_logging; setup_logging('info');"
        "sys.exit(multiq.Worker(worker_app.app, processes=1, grace=5).run())"
    )
    with worker(tmp_path, url, code=code) as process:
        until(lambda: 1 in starts(process))
        # When it reloads
        process.send(signal.SIGHUP)
        # Then the job runs on until the new program works, and its grace begins then
        until(lambda: process.log.count("working") == 2, timeout=30)
        until(lambda: any(word == "end" for word, *_ in read_diary(process.diary)), timeout=30)
        assert starts(process) == {1: 1}
        assert "crashed" not in process.log


def test_a_reload_whose_check_cannot_start_keeps_the_old_program(tmp_path: Path) -> None:
    # Given a worker whose interpreter is missing for a moment, because a deployment replaces it
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    code = (
        "import sys, multiq, worker_app; from multiq.logging import setup_logging; setup_logging('info');"
        "worker = multiq.Worker(worker_app.app, processes=1); worker.check = ['/nowhere/python'];"
        "sys.exit(worker.run())"
    )
    with worker(tmp_path, url, code=code) as process:
        process.wait_until_working()
        # When it reloads
        process.send(signal.SIGHUP)
        until(lambda: "the new code cannot be checked" in process.log)
        # Then the worker continues
        quick.enqueue(1)
        until(lambda: 1 in starts(process))
        process.send(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.long
def test_a_second_signal_reaches_the_children_of_before_a_reload(tmp_path: Path) -> None:
    # Given a worker that has reloaded, and whose old child still has a job that takes minutes
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    nap.options(ttr=600).enqueue(1, 300)
    with worker(tmp_path, url, "processes=1, grace=200") as process:
        until(lambda: 1 in starts(process))
        process.send(signal.SIGHUP)
        until(lambda: process.log.count("working") == 2)
        # When it gets a stop signal, and then a second one
        process.send(signal.SIGTERM)
        until(lambda: process.log.count("stopping") == 2)
        process.send(signal.SIGTERM)
        # Then the worker ends, logs that a job was interrupted, and the job is ready
        assert process.wait() == 130
        until(lambda: app.queue().stats().ready == 1)


def test_a_supervisor_that_ends_leaves_no_check_of_new_code_behind() -> None:
    # Given a check of new code that takes long
    check = ReloadCheck([sys.executable, "-c", "import time; time.sleep(300)"])
    assert not check.begin()
    pid = check.pid
    assert pid is not None
    # When the worker ends meanwhile
    check.end()
    # Then the check is ended, too
    assert check.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_third_signal_does_not_postpone_the_end() -> None:
    # Given a supervisor that has got two signals
    supervisor = Supervisor(lambda _: 0, lambda _, __: 0, SharedState(1), grace=1, once=False)
    supervisor._previous = PreviousGeneration(set(), set())
    with supervisor._inbox:
        pass  # the sockets of this block are closed
    supervisor.stop_children()
    supervisor.stop_children()
    kill_at = supervisor._kill_at
    # When it gets another signal
    supervisor.stop_children()
    # Then it kills children that do not end at the same time as before
    assert supervisor._kill_at == kill_at


@pytest.mark.parametrize("mode", ["processes=1", "processes=1, threads=2"])
def test_ended_jobs_do_not_wait_for_a_slow_hook(tmp_path: Path, mode: str) -> None:
    # Given a hook that takes longer than a lease lasts, except the first time, and a second worker
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    code = (
        "import sys, time, multiq, worker_app\n"
        "calls = []\n"
        "class Wait(multiq.Middleware):\n"
        "    def before_fetch(self, worker):\n"
        "        calls.append(1)\n"
        "        time.sleep(4 if len(calls) > 1 else 0)\n"
        "worker_app.app.middleware(Wait())\n"
        f"sys.exit(multiq.Worker(worker_app.app, {mode}).run())"
    )
    quick.options(ttr=1).enqueue(1)
    with worker(tmp_path, url, code=code) as process:
        until(lambda: any(word == "end" for word, *_ in read_diary(process.diary)))
        # Then a job that has ended is settled before the hook is called again
        with worker(tmp_path, url, "processes=1"):
            quick.options(ttr=1).enqueue(2)
            until(lambda: 2 in starts(process))
            until(lambda: app.backend.queues() == [])
        assert starts(process)[1] == 1


@pytest.mark.one_row
@pytest.mark.parametrize("moment", ["stop", "reload"])
def test_a_job_that_the_worker_kills_at_its_end_has_not_crashed(tmp_path: Path, moment: str) -> None:
    # Given a job that is longer than the grace and the supervisor's extra time, in a process that handles no signals
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    handle = nap.options(ttr=600).enqueue(1, 60)
    code = (
        "import sys, multiq, worker_app; import multiq.worker.processes.supervisor as s, multiq.worker.worker as w;"
        "s.KILL_MARGIN = w.KILL_MARGIN = 0.5;"
        "worker = multiq.Worker(worker_app.app, processes=1, grace=0.5, force=True);"
        "sys.exit(worker.run())"
    )
    with worker(tmp_path, url, code=code) as process:
        until(lambda: 1 in starts(process))
        os.kill(next(pid for _, _, pid, _ in read_diary(process.diary)), signal.SIGSTOP)
        if moment == "reload":
            app.queue().pause(60)  # no other process takes the job
            process.send(signal.SIGHUP)
            until(lambda: handle.peek().state is State.READY)
            process.send(signal.SIGTERM)
            process.wait()
        else:
            process.send(signal.SIGTERM)
            # Then the worker's exit code shows that the job was interrupted
            assert process.wait() == 130
        # And the job is ready, without a counted attempt
        info = handle.peek()
        assert (info.state, info.crashes, info.attempt) == (State.READY, 0, 0)


@pytest.mark.long
def test_a_command_without_a_supervisor_ends_although_a_job_has_left_a_thread(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import threading, time, multiq\n"
        "app = multiq.App()\n"
        "@app.task\n"
        "def leave() -> None:\n"
        "    threading.Thread(target=time.sleep, args=(300,)).start()\n"
    )
    url = f"sqlite:///{tmp_path}/jobs.db"
    for command in ("enqueue leaving:app leave", "worker leaving:app -p 0 --stop-when-empty"):
        done = subprocess.run(
            [sys.executable, "-m", "multiq", *command.split(), "-c", url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "1 thread and 0 processes that jobs have begun did not end" in done.stderr


def test_a_pool_without_room_for_a_thread_keeps_nothing_that_it_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool(2, "test")
    start = threading.Thread.start

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(ran.append, 1)
    assert threading.Thread.start is start
    pool.submit(ran.append, 2).result(10)
    assert ran == [2]
    # If a thread exists, a refused thread does no harm
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in (3, 4):
            pool.submit(ran.append, number).result(10)
    assert ran == [2, 3, 4]
    pool.shutdown()


def test_a_worker_runs_again_after_a_stop_that_came_too_late() -> None:
    own = multiq.App("memory://")
    ran: list[int] = []
    task = own.task(name="append")(ran.append)
    worker = multiq.Worker(own, stop_when_empty=True)
    for number in (1, 2):
        task.enqueue(number)
        assert worker.run() == 0
        worker.stop()
    assert ran == [1, 2]


@pytest.mark.long
def test_a_subscriber_that_hangs_in_the_sidecar_stops_no_worker(tmp_path: Path) -> None:
    # Given a subscriber that never returns, and that the sidecar calls when it settles dead children's jobs
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    code = (
        "import sys, time, multiq, worker_app; from multiq import events; from multiq.logging import setup_logging;"
        "setup_logging('info'); import multiq.worker.processes.supervisor as s; s._SIDECAR_LIMIT = 3;"
        "worker_app.app.on(events.JobCrashed)(lambda event: time.sleep(300));"
        "sys.exit(multiq.Worker(worker_app.app, processes=1).run())"
    )
    suicide.options(max_crashes=1).enqueue_many([(number,) for number in range(6)])
    quick.enqueue_many([(number,) for number in range(100, 120)])
    with worker(tmp_path, url, code=code) as process:
        # Then these jobs run again nevertheless, and the log explains why they waited
        until(lambda: _unfinished() == 0 and app.queue().stats().buried == 6, timeout=90)
        assert all(starts(process)[number] == 1 for number in range(100, 120))
        assert "the sidecar has been stuck" in process.log


@pytest.mark.long
def test_a_command_without_a_supervisor_ends_although_a_job_has_left_a_process(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text(
        "import multiprocessing, time, multiq\n"
        "app = multiq.App()\n"
        "@app.task\n"
        "def leave() -> None:\n"
        "    fork = multiprocessing.get_context('fork')\n"
        "    fork.Process(target=time.sleep, args=(40,)).start()\n"
    )
    url = f"sqlite:///{tmp_path}/jobs.db"
    for command in ("enqueue leaving:app leave", "worker leaving:app -p 0 --stop-when-empty"):
        log = tmp_path / "log"
        with log.open("w") as stream:
            done = subprocess.run(
                [sys.executable, "-m", "multiq", *command.split(), "-c", url],
                cwd=tmp_path,
                stdout=stream,
                stderr=stream,
                timeout=30,
                check=False,
            )
        assert done.returncode == 0, log.read_text()
    assert "0 threads and 1 process that jobs have begun did not end" in log.read_text()


def _unfinished() -> int:
    stats = app.queue().stats()
    return (stats.ready or 0) + (stats.delayed or 0) + (stats.reserved or 0)
