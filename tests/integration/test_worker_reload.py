"""Reloads with new code, SIGQUIT, and recycling: with real processes, on each backend."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from worker_app import app, nap, quick, read_diary

import multiq
from multiq.worker.processes.exits import EXIT_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOP = """
import os
import time
import multiq

app = multiq.App()
VERSION = 1

@app.task
def serve(number):
    with open("served", "ab", 0) as served:
        served.write(f"{VERSION} {number} {os.getpid()}\\n".encode())
    time.sleep(0.005)
"""


@pytest.fixture
def shop(tmp_path: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """``multiq worker shop:app -p 2``, as a service manager starts it: no terminal, and its own process group."""
    (tmp_path / "shop.py").write_text(SHOP)
    # Python would use old compiled code if the new source had the same length and time. So no code is compiled ahead.
    environment = {**os.environ, "MULTIQ_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "multiq", "worker", "shop:app", "-p", "2", "--log-jobs"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def served(folder: Path) -> list[tuple[int, int, int]]:
    """Version, number and pid of each job that was served."""
    path = folder / "served"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines]  # type: ignore[misc]  # three numbers


def enqueue(numbers: range) -> None:
    """Jobs for the shop, which this process does not import."""
    bodies = [{"multiq": 1, "task": "serve", "args": [number]} for number in numbers]
    app.queue().enqueue_many(bodies)


def log(folder: Path) -> str:
    return (folder / "log").read_text()


@pytest.mark.long
def test_a_reload_under_load_switches_to_the_new_code_and_runs_every_job_once(
    tmp_path: Path, shop: subprocess.Popen[bytes]
) -> None:
    # Given a worker at work
    until(lambda: log(tmp_path).count(" working ") == 2)
    enqueue(range(600))
    until(lambda: len(served(tmp_path)) > 50)
    # When its code changes and it gets the signal to reload
    (tmp_path / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 2"))
    os.kill(shop.pid, signal.SIGHUP)
    count = 600

    def is_rolled() -> bool:
        nonlocal count
        rows = served(tmp_path)
        if len(rows) > count - 300:  # jobs remain, however long the new code takes to start
            enqueue(range(count, count + 300))
            count += 300
        return any(version == 2 for version, _, _ in rows)

    until(is_rolled)
    # Then each job is done once, later jobs by the new code, and the worker's pid is the same
    until(lambda: len(served(tmp_path)) == count)
    rows = served(tmp_path)
    assert sorted(number for _, number, _ in rows) == list(range(count))
    assert {version for version, _, _ in rows} == {1, 2}
    assert not {pid for version, _, pid in rows if version == 1} & {pid for version, _, pid in rows if version == 2}
    os.kill(shop.pid, signal.SIGTERM)
    assert shop.wait(30) == 0, log(tmp_path)
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved, stats.buried) == (0, 0, 0)


@pytest.mark.long
def test_a_worker_reloaded_twice_waits_for_the_jobs_of_its_first_children(
    tmp_path: Path, shop: subprocess.Popen[bytes]
) -> None:
    # Given a worker that reloads twice while a job runs
    (tmp_path / "shop.py").write_text(SHOP.replace("time.sleep(0.005)", "time.sleep(number)"))
    until(lambda: log(tmp_path).count(" working ") == 2)
    os.kill(shop.pid, signal.SIGHUP)  # so that the worker certainly runs the new code
    until(lambda: log(tmp_path).count(" working ") == 4)
    enqueue(range(6, 7))
    until(lambda: len(served(tmp_path)) == 1)
    os.kill(shop.pid, signal.SIGHUP)
    until(lambda: log(tmp_path).count(" working ") == 6)
    os.kill(shop.pid, signal.SIGHUP)
    until(lambda: log(tmp_path).count(" working ") == 8)
    # When it gets a stop signal, then it ends after that job, which is done
    os.kill(shop.pid, signal.SIGTERM)
    assert shop.wait(30) == 0, log(tmp_path)
    assert " done      serve" in log(tmp_path)
    assert app.queue().stats().reserved == 0


@pytest.mark.long
def test_five_workers_replaced_one_after_the_other_under_load_run_every_job_once(tmp_path: Path, url: str) -> None:
    # Given five workers at work
    with contextlib.ExitStack() as stack:
        team = [stack.enter_context(worker(tmp_path, url, "processes=1")) for _ in range(5)]
        diary = team[0].diary
        for member in team:
            member.wait_until_working()
        # When each worker is stopped and replaced while jobs are enqueued
        for turn, leaver in enumerate(team):
            quick.enqueue_many([(number,) for number in range(200 * turn, 200 * (turn + 1))])
            leaver.send(signal.SIGTERM)
            newcomer = stack.enter_context(worker(tmp_path, url, "processes=1"))
            assert leaver.wait() == 0, leaver.log
            newcomer.wait_until_working()
        # Then every job was done, none twice
        until(lambda: len(ended(diary)) >= 1000)
        assert sorted(ended(diary)) == list(range(1000))
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved, stats.buried) == (0, 0, 0)


def ended(diary: Path) -> list[int]:
    """The numbers of the jobs that ran to their end."""
    return [number for word, number, _, _ in read_diary(diary) if word == "end"]


AT_IMPORT = """
import multiprocessing
import subprocess

child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
child.start()
program = subprocess.Popen(["sleep", "300"])
time.sleep(0.1)
for each in (child, program):
    each.terminate()
child.join(30)
try:
    program.wait(30)
except subprocess.TimeoutExpired:
    pass
with open("ended", "a") as ended:
    ended.write(f"{child.exitcode} {program.returncode}\\n")
for each in (child, program):
    each.kill()
"""


on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@on_sqlite
@pytest.mark.long
def test_a_process_started_at_import_in_a_reload_ends_by_sigterm(tmp_path: Path, shop: subprocess.Popen[bytes]) -> None:
    # Given an app that starts processes when it is imported, and ends them by SIGTERM
    until(lambda: log(tmp_path).count(" working ") == 2)
    (tmp_path / "shop.py").write_text(SHOP + AT_IMPORT)
    # When a worker reloads this app
    os.kill(shop.pid, signal.SIGHUP)
    until(lambda: log(tmp_path).count(" working ") == 4)
    # Then these processes end, both after the check of the code and in the new program
    assert (tmp_path / "ended").read_text().splitlines() == ["-15 -15"] * 2
    os.kill(shop.pid, signal.SIGTERM)
    assert shop.wait(30) == 0, log(tmp_path)


@on_sqlite
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGUSR2, signal.SIGHUP))],
)
@pytest.mark.long
def test_a_signal_during_the_import_of_new_code_is_handled_afterwards(
    tmp_path: Path, shop: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    # Given a worker that reloads, and code that imports slowly after the check of the code
    until(lambda: log(tmp_path).count(" working ") == 2)
    slow = "if 'MULTIQ_RELOADED' in os.environ:\n    open('importing', 'a').close()\n    time.sleep(1)\n"
    (tmp_path / "shop.py").write_text(SHOP + slow)
    os.kill(shop.pid, signal.SIGHUP)
    until((tmp_path / "importing").exists)
    # When a signal comes during this import
    os.kill(shop.pid, number)
    # Then the signal takes effect when the new program works
    if number == signal.SIGUSR2:
        until(lambda: log(tmp_path).count(" paused") == 2)
        os.kill(shop.pid, signal.SIGTERM)
    elif number == signal.SIGHUP:
        until(lambda: log(tmp_path).count(" working ") == 6)
        os.kill(shop.pid, signal.SIGTERM)
    assert shop.wait(30) == 0, log(tmp_path)
    assert log(tmp_path).count("stopping") == log(tmp_path).count(" working ")


@pytest.mark.long
def test_a_reload_to_code_that_does_not_start_is_logged_and_refused(
    tmp_path: Path, shop: subprocess.Popen[bytes]
) -> None:
    until(lambda: log(tmp_path).count(" working ") == 2)
    (tmp_path / "shop.py").write_text("import nothing_of_this_name")
    os.kill(shop.pid, signal.SIGHUP)
    until(lambda: "the old code keeps running" in log(tmp_path))
    enqueue(range(5))
    until(lambda: len(served(tmp_path)) == 5)
    assert {version for version, _, _ in served(tmp_path)} == {1}


@pytest.mark.long
def test_sigquit_shows_what_runs_and_where_and_ends_no_process(tmp_path: Path, url: str) -> None:
    handle = nap.enqueue(1, 4)
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: read_diary(process.diary))
        process.send(signal.SIGQUIT)
        until(lambda: "in nap" in process.log)  # the line of the job's code
        assert re.search(rf"\[default\] {re.escape(handle.id)} for \d\.\d s", process.log)
        until(lambda: len(read_diary(process.diary)) == 2)
        process.send(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.long
def test_a_process_is_replaced_after_about_so_many_jobs(tmp_path: Path, url: str) -> None:
    quick.enqueue_many([(number,) for number in range(200)])
    with worker(tmp_path, url, "processes=1, recycle_jobs=50") as process:
        until(lambda: len(read_diary(process.diary)) == 400)
        process.send(signal.SIGTERM)
        assert process.wait() == 0
        rows = read_diary(process.diary)
    assert sorted(number for word, number, _, _ in rows if word == "end") == list(range(200))
    counts = [sum(row[2] == pid for row in rows) // 2 for pid in {pid for _, _, pid, _ in rows}]
    assert len(counts) >= 2
    assert "has worked for long enough" in process.log


def test_a_process_that_uses_too_much_memory_is_replaced(tmp_path: Path, url: str) -> None:
    quick.enqueue_many([(number,) for number in range(50)])
    with worker(tmp_path, url, "processes=1, memory=1, prefetch=1") as process:
        until(lambda: process.log.count("used more memory than it may") >= 2)
        process.send(signal.SIGTERM)
        assert process.wait() == 0


@pytest.mark.long
def test_a_worker_without_a_supervisor_that_uses_too_much_memory_ends_with_twelve(tmp_path: Path, url: str) -> None:
    quick.enqueue(1)
    with worker(tmp_path, url, "memory=1") as process:
        assert process.wait() == EXIT_MEMORY == 12, process.log


@pytest.mark.long
@pytest.mark.parametrize("mode", ["processes=0", "processes=2"])
def test_a_worker_ends_when_its_time_is_over(tmp_path: Path, url: str, mode: str) -> None:
    quick.enqueue(1)
    with worker(tmp_path, url, f"{mode}, max_time=4.0") as process:
        assert process.wait() == 0, process.log
        assert len(read_diary(process.diary)) == 2


def test_recycling_without_a_supervisor_is_refused() -> None:
    with pytest.raises(multiq.OptionInvalid, match="processes=1 or more"):
        multiq.Worker(multiq.App("memory://"), recycle_jobs=5)


@pytest.mark.parametrize("is_cut", [False, True], ids=["one signal", "two signals"])
@pytest.mark.long
def test_a_reload_to_a_worker_without_a_supervisor_ends_the_old_children(tmp_path: Path, *, is_cut: bool) -> None:
    # Given a worker whose settings have been changed since its start to need no supervisor, and a job that runs
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    settings = tmp_path / "multiq.toml"
    settings.write_text("[worker]\nprocesses = 1\ngrace = 60")
    code = "import sys; from multiq.cli import main; sys.argv[1:1] = ['worker', 'worker_app:app']; sys.exit(main())"
    with worker(tmp_path, url, code=code) as process:
        nap.enqueue(1, 300 if is_cut else 3)
        until(lambda: read_diary(process.diary))
        old = read_diary(process.diary)[0][2]
        settings.write_text("[worker]\nprocesses = 0\ngrace = 60")
        # When it reloads
        process.send(signal.SIGHUP)
        until(lambda: process.log.count(" working ") == 2)
        # Then the old child takes no more jobs, and ends
        until(lambda: process.log.count(" stopping ") == 1)
        numbers = range(10, 20)
        quick.enqueue_many([(number,) for number in numbers])
        until(lambda: {number for _, number, _, _ in read_diary(process.diary)} >= set(numbers))
        assert {pid for _, number, pid, _ in read_diary(process.diary) if number in numbers} == {process.process.pid}
        if not is_cut:
            until(lambda: not Path("/proc", str(old)).exists())
            assert [word for word, number, _, _ in read_diary(process.diary) if number == 1] == ["start", "end"]
        # And the worker ends like any other worker
        process.send(signal.SIGTERM)
        if is_cut:
            until(lambda: process.log.count(" stopping ") == 2)
            process.send(signal.SIGTERM)
        assert process.wait(30) == (130 if is_cut else 0), process.log
        until(lambda: app.queue().stats().ready == is_cut)
        assert app.queue().stats().reserved == 0
