"""A worker that scales, with real processes: more of them while jobs wait, and fewer when there is too little work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from processes import WorkerProcess, until, worker
from stores import STORES
from worker_app import app, nap, read_diary, wait_for_a_file

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ["sqlite", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("redis", "beanstalk", "mysql"))]
FAST = "processes='1:4', scale_up_after=0.2, health_file='health', grace=10, "


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with STORES["sqlite"](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


def pids(folder: Path) -> list[int]:
    """The children that are alive: the log has their starts, and the kernel has their ends."""
    path = folder / "health"
    return [] if not path.exists() else list(json.loads(path.read_text())["children"])


def grown(working: WorkerProcess, number: int) -> bool:
    return f"to {number} processes" in working.log


def begun(folder: Path) -> int:
    return sum(word == "start" for word, *_ in read_diary(folder / "diary"))


def ended(folder: Path) -> list[int]:
    return sorted(number for word, number, *_ in read_diary(folder / "diary") if word == "end")


def alive(folder: Path) -> set[int]:
    """The processes that have run a job and are alive."""
    used = {pid for _, _, pid, _ in read_diary(folder / "diary")}
    return {pid for pid in used if os.path.exists(f"/proc/{pid}")}  # noqa: PTH110 - a pid, and no file


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_grows_while_jobs_wait_and_shrinks_when_they_are_done(tmp_path: Path, kind: str) -> None:
    with STORES[kind](tmp_path) as url:
        app.connect(url)
        nap.enqueue_many([(number, 0.2) for number in range(60)])
        with worker(tmp_path, url, FAST + "scale_down_after=0.5") as working:
            # while jobs wait, the worker grows to its largest number of processes
            until(lambda: grown(working, 4))
            until(lambda: len(ended(tmp_path)) == 60)

            # when no jobs wait, the worker shrinks to its smallest number, and each job has run once
            until(lambda: "from 4 to 1 processes" in working.log or grown(working, 1))
            until(lambda: len(alive(tmp_path)) <= 1)
            assert ended(tmp_path) == list(range(60))

            # and the worker still runs jobs
            nap.enqueue(60, 0)
            until(lambda: 60 in ended(tmp_path))
            working.send(signal.SIGTERM)
            assert working.wait() == 0
        assert begun(tmp_path) == 61
        assert app.queue().stats().ready == 0
        app.close()


@pytest.mark.long
def test_a_job_of_a_superfluous_process_runs_to_its_end(tmp_path: Path, url: str) -> None:
    # given a worker that has grown, and a job in each process
    nap.enqueue_many([(number, 0.3) for number in range(20)])
    with worker(tmp_path, url, FAST + "scale_down_after=0.3") as working:
        until(lambda: grown(working, 4))
        until(lambda: len(ended(tmp_path)) == 20)

        # when the worker shrinks while long jobs are enqueued
        for number in range(20, 40):
            nap.enqueue(number, 0.25)
        until(lambda: len(ended(tmp_path)) == 40)

        # then each job has run once
        assert begun(tmp_path) == 40
        working.send(signal.SIGTERM)
        assert working.wait() == 0
        assert "died" not in working.log


@pytest.mark.long
def test_a_process_that_takes_no_more_jobs_does_not_count_as_idle(tmp_path: Path, url: str) -> None:
    # given two processes with one long job and three idle threads each
    wait_for_a_file.enqueue_many([(number,) for number in range(8)])
    with worker(tmp_path, url, FAST + "scale_down_after=0.5, threads=4, prefetch=1") as working:
        until(lambda: begun(tmp_path) == 8)
        jobs_of: dict[int, list[int]] = {}
        for _, number, pid, _ in read_diary(tmp_path / "diary"):
            jobs_of.setdefault(pid, []).append(number)
        for number in range(8):
            if all(number != numbers[0] for numbers in jobs_of.values()):
                (tmp_path / f"go-{number}").touch()
        # when the worker ends one of them, which still has its long job
        until(lambda: grown(working, 1))
        # then the worker grows for jobs that come later
        wait_for_a_file.enqueue_many([(number,) for number in range(8, 16)])
        until(lambda: begun(tmp_path) == 16)


@pytest.mark.long
def test_killed_processes_of_a_worker_that_scales_are_replaced(tmp_path: Path, url: str) -> None:
    nap.options(ttr=2).enqueue_many([(number, 0.1) for number in range(100)])
    with worker(tmp_path, url, FAST + "scale_down_after=0.5") as working:
        killed: set[int] = set()
        for _ in range(3):
            until(lambda: alive(tmp_path) - killed)
            pid = (alive(tmp_path) - killed).pop()
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        until(lambda: set(ended(tmp_path)) == set(range(100)))
        until(lambda: len(alive(tmp_path) - killed) <= 1)
        working.send(signal.SIGTERM)
        assert working.wait() == 0


@pytest.mark.long
def test_a_reload_keeps_the_number_of_processes(tmp_path: Path, url: str) -> None:
    # given a worker that has grown
    (tmp_path / "shop.py").write_text(
        "import time, multiq\napp = multiq.App()\n\n@app.task\ndef serve(number):\n    time.sleep(0.2)\n"
    )
    app.queue().enqueue_many([{"multiq": 1, "task": "serve", "args": [1]}] * 60)
    command = ["worker", "shop:app", "-p", "1:3", "--scale-up-after", "0.2", "--scale-down-after", "600"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "multiq", *command, "--health-file", "health"],
            cwd=tmp_path, env={**os.environ, "MULTIQ_URL": url}, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: "to 3 processes" in log.read_text(), what=log.read_text)
        until(lambda: len(pids(tmp_path)) == 3, what=log.read_text)
        before = set(pids(tmp_path))
        growths = log.read_text().count("jobs wait: ")

        # when its code is reloaded
        process.send_signal(signal.SIGHUP)

        # then the new program has as many processes, although no job waits any more
        until(lambda: len(pids(tmp_path)) == 3 and not before & set(pids(tmp_path)), what=log.read_text)
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in before))  # noqa: PTH110 - a pid, and no file
        assert log.read_text().count("jobs wait: ") == growths, log.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_a_worker_that_scales_ends_when_its_queues_are_empty(tmp_path: Path, url: str) -> None:
    nap.enqueue_many([(number, 0.1) for number in range(20)])
    with worker(tmp_path, url, FAST + "scale_down_after=0.3, stop_when_empty=True") as working:
        assert working.wait() == 0
    assert ended(tmp_path) == list(range(20))


@pytest.mark.long
def test_the_last_process_of_a_worker_that_ends_runs_the_jobs_that_come_late(tmp_path: Path, url: str) -> None:
    # given a worker of which one process still has a long job, and the others have ended, because no job is due
    wait_for_a_file.options(priority=0).enqueue(0)
    nap.enqueue_many([(number, 0.15) for number in range(1, 12)])
    with worker(tmp_path, url, FAST + "scale_down_after=0.1, stop_when_empty=True") as working:
        until(lambda: len(ended(tmp_path)) == 11)
        until(lambda: len(alive(tmp_path)) == 1)
        time.sleep(0.8)  # the worker needs fewer processes now
        # when a job comes before the long job has ended
        nap.enqueue(12, 0)
        (tmp_path / "go-0").touch()
        # then it runs before the worker ends
        assert working.wait() == 0
    assert ended(tmp_path) == list(range(13))


def test_a_range_comes_from_the_settings(tmp_path: Path) -> None:
    (tmp_path / "multiq.toml").write_text(
        'url = "sqlite:///jobs.db"\n[worker]\nprocesses = "2:5"\nscale_up_after = 3\n'
    )
    from multiq.settings.loader import load_settings

    assert load_settings(tmp_path).worker.processes == "2:5"
    assert load_settings(tmp_path, {"MULTIQ_WORKER_PROCESSES": "1:8"}).worker.processes == "1:8"
    with pytest.raises(multiq.SettingsInvalid, match="MIN <= MAX"):
        load_settings(tmp_path, {"MULTIQ_WORKER_PROCESSES": "8:1"})
