"""Workers that are stopped while they start, or that start in an environment that lacks something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from rough_app import program
from worker_app import app, quick, read_diary

if TYPE_CHECKING:
    from pathlib import Path

MODES = ["", "threads=2", "concurrency=2", "processes=1", "processes=2, threads=2", "processes=1, concurrency=2"]

SLOW_SHOP = """
import pathlib
import time
import multiq

app = multiq.App()

@app.task
def serve(number):
    pass

pathlib.Path("imports").touch()
time.sleep(20)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def ended(folder: Path) -> list[int]:
    """The numbers of the jobs that ran to their end."""
    return sorted(number for word, number, _, _ in read_diary(folder / "diary") if word == "end")


@pytest.mark.one_row
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("options", [["-p", "0"], ["-p", "1"]])
def test_a_worker_stopped_while_it_starts_ends_with_zero(
    tmp_path: Path, url: str, options: list[str], number: signal.Signals
) -> None:
    # Given a worker whose app takes long to import
    (tmp_path / "shop.py").write_text(SLOW_SHOP)
    command = [sys.executable, "-m", "multiq", "worker", "shop:app", *options]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "MULTIQ_URL": url}, stderr=subprocess.PIPE, text=True
    )
    try:
        until((tmp_path / "imports").exists)
        # When it gets a stop signal
        process.send_signal(number)
        # Then it ends at once, with exit code 0
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
        assert "Traceback" not in told
    finally:
        process.kill()
        process.communicate()


@pytest.mark.one_row
@pytest.mark.parametrize("options", ["", "processes=1", "threads=2"])
def test_a_second_signal_ends_a_worker_whose_first_call_hangs(tmp_path: Path, url: str, options: str) -> None:
    # Given a worker whose backend does not answer the question whether the connection is down
    code = (
        "import sys, time, multiq, worker_app, multiq.worker.worker as module\n"
        "def hang(app):\n"
        "    worker_app.note('asked', 0)\n"
        "    time.sleep(600)\n"
        "module._is_down = hang\n"
        f"worker = multiq.Worker(worker_app.app, {options}); worker.owns_process = True; sys.exit(worker.run())"
    )
    with worker(tmp_path, url, code=code) as process:
        until(lambda: read_diary(process.diary))
        # When it gets two signals
        process.send(signal.SIGTERM)
        time.sleep(0.2)
        process.send(signal.SIGTERM)
        # Then it ends
        assert process.wait(60) == 130, process.log


def test_a_check_that_is_ended_does_not_say_that_the_worker_would_start(tmp_path: Path, url: str) -> None:
    (tmp_path / "shop.py").write_text(SLOW_SHOP)
    command = [sys.executable, "-m", "multiq", "worker", "shop:app", "--check"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "MULTIQ_URL": url})
    try:
        until((tmp_path / "imports").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) != 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.one_row
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("closed", ["stdout", "stdin, stdout, stderr"])
def test_a_worker_whose_standard_streams_are_closed_works(tmp_path: Path, url: str, mode: str, closed: str) -> None:
    # Given a process that was started without standard streams: Python has None there
    quick.enqueue_many([(number,) for number in range(3)])
    numbers = [["stdin", "stdout", "stderr"].index(name) for name in closed.split(", ")]
    before = f"import os; [os.close(number) for number in {numbers}]; " + "".join(
        f"sys.{name} = None; " for name in closed.split(", ")
    )
    # When it runs a worker
    with worker(tmp_path, url, code=program(f"stop_when_empty=True, {mode}", before)) as process:
        # Then all jobs are done
        assert process.wait() == 0, process.log
    assert ended(tmp_path) == [0, 1, 2]


@pytest.mark.one_row
@pytest.mark.parametrize("options", ["-p 0", "-p 1"])
def test_output_of_a_jobs_program_is_discarded_if_the_worker_has_no_standard_streams(
    tmp_path: Path, url: str, options: str
) -> None:
    # Given a job that starts a program which prints, and a command line without standard streams
    (tmp_path / "shop.py").write_text("""
import subprocess
import multiq

app = multiq.App()

@app.task
def tell(number):
    done = subprocess.run(["sh", "-c", "echo aaaa; echo bbbb >&2"])
    with open("told", "a") as file:
        file.write(f"{number} {done.returncode}\\n")
""")
    app.queue().enqueue_many([{"multiq": 1, "task": "tell", "args": [number]} for number in range(3)])
    command = f"exec {sys.executable} -m multiq worker shop:app --stop-when-empty {options} <&- >&- 2>&-"
    # When it runs, then the program can print, and the worker is not affected
    environment = {**os.environ, "MULTIQ_URL": url}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 0
    assert (tmp_path / "told").read_text() == "0 0\n1 0\n2 0\n"


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_worker_with_more_than_a_thousand_open_files_handles_signals(tmp_path: Path, url: str, mode: str) -> None:
    # Given a program that has many files open before it runs a worker
    before = (
        "import os, resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard));"
        "files = [open(os.devnull) for _ in range(1100)]"
    )
    with worker(tmp_path, url, code=program(mode, before)) as process:
        quick.enqueue(1)
        until(lambda: ended(tmp_path) == [1])
        # When the worker gets signals to pause and to stop, then it pauses and stops
        process.send(signal.SIGUSR2)
        until(lambda: "paused" in process.log)
        process.send(signal.SIGTERM)
        assert process.wait(30) == 0, process.log
        assert "sidecar died" not in process.log
        assert "Traceback" not in process.log


def test_a_fork_that_fails_is_tried_again(tmp_path: Path, url: str) -> None:
    # Given a system that refuses some forks: the first three, and later that for a replacement
    before = """
import errno, os
fork, turns = os.fork, iter([1, 1, 1, 0, 0, 1, 1])
def refuse():
    if next(turns, 0):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = refuse
"""
    quick.enqueue_many([(number,) for number in range(10)])
    with worker(tmp_path, url, code=program("processes=1, max_time=60", before)) as process:
        # Then the worker starts
        until(lambda: len(ended(tmp_path)) == 10)
        # And it replaces a child that dies
        os.kill(read_diary(tmp_path / "diary")[0][2], signal.SIGKILL)
        quick.enqueue(10)
        until(lambda: len(ended(tmp_path)) == 11)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log
        assert "Resource temporarily unavailable" in process.log


@pytest.mark.long
def test_process_1_reaps_what_jobs_leave_behind(tmp_path: Path, url: str) -> None:
    # Given a worker that is process 1 of its container: orphans are its children
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no PID namespace")
    (tmp_path / "shop.py").write_text("""
import subprocess
import multiq

app = multiq.App()

@app.task
def leave(number):
    subprocess.run(["sh", "-c", "sleep 0.2 &"], check=True)

@app.task
def count(number):
    states = subprocess.run(["ps", "-eo", "stat="], capture_output=True, text=True, check=True).stdout.split()
    with open("zombies", "a") as file:
        file.write(f"{sum(state.startswith('Z') for state in states)}\\n")
""")
    command = [*unshare, sys.executable, "-m", "multiq", "worker", "shop:app", "-p", "1"]
    bodies = [{"multiq": 1, "task": "leave", "args": [number]} for number in range(30)]
    app.queue().enqueue_many(bodies)
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "MULTIQ_URL": url}, stderr=subprocess.DEVNULL, text=True
    )
    try:
        until(lambda: app.queue().stats().ready == app.queue().stats().reserved == 0)
        time.sleep(2)
        # When a job counts the zombies
        app.queue().enqueue({"multiq": 1, "task": "count", "args": [1]})
        until((tmp_path / "zombies").exists)
        until(lambda: (tmp_path / "zombies").read_text().endswith("\n"))
        # Then there are no zombies
        assert int((tmp_path / "zombies").read_text()) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("mode", ["", "threads=2", "concurrency=2"])
def test_coroutines_run_in_a_program_whose_thread_has_a_running_loop(tmp_path: Path, url: str, mode: str) -> None:
    # Given a notebook: its cells run in a thread that has a running event loop
    from worker_app import anap

    anap.enqueue(1, 0.01)
    quick.enqueue(2)
    code = f"""
import asyncio, sys, multiq, rough_app
from multiq.logging import setup_logging
setup_logging("info")
async def cell():
    return multiq.Worker(rough_app.app, stop_when_empty=True, {mode}).run()
sys.exit(asyncio.run(cell()))
"""
    # When a worker runs in one of these cells
    with worker(tmp_path, url, code=code) as process:
        assert process.wait() == 0, process.log
        assert "failed" not in process.log
    # Then jobs run, and no job loses an attempt
    assert ended(tmp_path) == [1, 2]
    rows = read_diary(tmp_path / "diary")
    assert sum(word == "start" for word, *_ in rows) == 2
