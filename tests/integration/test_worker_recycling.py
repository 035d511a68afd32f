"""A process is replaced, or ends by itself, between two jobs, and interrupts none."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from rough_app import grow, nap_through, program
from worker_app import anap, app, quick, read_diary

from multiq.worker.processes.exits import EXIT_CUT_SHORT, EXIT_MEMORY

if TYPE_CHECKING:
    from pathlib import Path

ALONE = ["", "threads=2", "concurrency=2"]
SUPERVISED = ["processes=1", "processes=1, threads=2", "processes=1, concurrency=2"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def words(folder: Path, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(folder / "diary") if said == word]


@pytest.mark.parametrize("mode", SUPERVISED[1:])
@pytest.mark.parametrize("limit", ["recycle_jobs=4", "recycle_time=1.0", "memory=1"])
@pytest.mark.long
def test_a_replacement_waits_for_a_job_that_is_longer_than_the_grace(
    tmp_path: Path, url: str, mode: str, limit: str
) -> None:
    # Given a job that runs longer than the grace, and other jobs because of which the process is to be replaced
    nap_through.enqueue(1, 3.0)
    with worker(tmp_path, url, code=program(f"grace=0.3, {limit}, {mode}")) as process:
        until(lambda: words(tmp_path, "start") == [1])
        for number in range(2, 12):
            quick.enqueue(number)
        # Then the long job runs to its end, once
        until(lambda: 1 in words(tmp_path, "end"))
        until(lambda: len(words(tmp_path, "end")) == 11)
        assert words(tmp_path, "start").count(1) == 1
        until(lambda: process.log.count(" working ") >= 2)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.parametrize("mode", [*ALONE[1:], *SUPERVISED[1:]])
@pytest.mark.parametrize("limit", ["max_jobs=4", "max_time=1.0"])
@pytest.mark.long
def test_a_worker_that_ends_by_itself_waits_for_a_job_that_is_longer_than_the_grace(
    tmp_path: Path, url: str, mode: str, limit: str
) -> None:
    nap_through.enqueue(1, 3.0)
    quick.enqueue_many([(number,) for number in range(2, 12)])
    with worker(tmp_path, url, code=program(f"grace=0.3, {limit}, {mode}")) as process:
        assert process.wait() == 0, process.log
    assert words(tmp_path, "end").count(1) == words(tmp_path, "start").count(1) == 1


@pytest.mark.parametrize("mode", [*ALONE[1:], *SUPERVISED[1:]])
@pytest.mark.parametrize("limit", ["max_jobs=4", "max_time=1.0"])
@pytest.mark.long
def test_a_signal_while_a_worker_ends_by_itself_begins_the_grace(
    tmp_path: Path, url: str, mode: str, limit: str
) -> None:
    # Given a worker that waits for its last job
    handle = (anap if mode.startswith("concurrency") else nap_through).enqueue(1, 60.0)  # this job waits for a thread
    with worker(tmp_path, url, code=program(f"grace=0.5, {limit}, {mode}")) as process:
        until(lambda: words(tmp_path, "start") == [1])
        quick.enqueue_many([(number,) for number in range(2, 12)])
        until(lambda: len(words(tmp_path, "end")) == 3 if "jobs" in limit else " stopping " in process.log)
        time.sleep(1.0)  # longer than the grace period, which has not begun, because no signal has come
        assert process.process.poll() is None
        # When the worker gets a stop signal, then it ends after the grace, and the job is given back
        process.send(signal.SIGTERM)
        assert process.wait(20) == EXIT_CUT_SHORT, process.log
    assert 1 not in words(tmp_path, "end")
    assert handle.peek().attempt == 0
    assert app.queue().stats().reserved == 0


@pytest.mark.parametrize("mode", SUPERVISED)
def test_max_jobs_counts_over_replacements(tmp_path: Path, url: str, mode: str) -> None:
    # Given a process that is replaced after about four jobs, and ends after ten
    quick.enqueue_many([(number,) for number in range(30)])
    with worker(tmp_path, url, f"max_jobs=10, recycle_jobs=4, prefetch=1, {mode}") as process:
        # Then the process ends after ten jobs
        assert process.wait() == 0, process.log
    assert len(words(tmp_path, "end")) == 10
    assert app.queue().stats().ready == 20


@pytest.mark.parametrize("mode", SUPERVISED)
@pytest.mark.long
def test_a_process_with_too_little_memory_works_slowly_and_says_so(tmp_path: Path, url: str, mode: str) -> None:
    # Given a limit that a process exceeds before it has run a job
    with worker(tmp_path, url, f"memory=1, {mode}") as process:
        process.wait_until_working()
        time.sleep(1.5)
        # Then the log reports it, and the process is kept as long as there are no jobs
        assert process.log.count("before its first job") == process.log.count(" working ") == 1
        # And if there are jobs, the process runs them
        quick.enqueue_many([(number,) for number in range(4)])
        until(lambda: len(words(tmp_path, "end")) == 4)
        assert sorted(words(tmp_path, "start")) == list(range(4))
        until(lambda: "used more memory than it may" in process.log)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.long
def test_processes_with_too_little_memory_do_not_follow_one_another_at_once(tmp_path: Path, url: str) -> None:
    quick.enqueue_many([(number,) for number in range(2000)])
    with worker(tmp_path, url, "memory=1, prefetch=1, processes=1") as process:
        until(lambda: words(tmp_path, "end"))
        time.sleep(3.0)
        # Without the pause between starts, there would be about fifty a second.
        assert process.log.count(" working ") < 15


@pytest.mark.long
@pytest.mark.parametrize("mode", [*ALONE, *SUPERVISED])
def test_memory_is_measured_between_jobs(tmp_path: Path, url: str, mode: str) -> None:
    # Given short jobs, fetched in one batch, each of which allocates more memory than its process may use
    quick.enqueue_many([(number,) for number in range(100, 130)])  # so that the batches are large
    grow.options(delay=1.5).enqueue_many([(number, 100) for number in range(12)])
    with worker(tmp_path, url, code=program(f"memory=110, {mode}")) as process:
        if "processes" not in mode:
            assert process.wait() == EXIT_MEMORY, process.log
            most = 1 if not mode else 8
        else:
            until(lambda: len([number for number in words(tmp_path, "end") if number < 100]) == 12)
            process.send(signal.SIGTERM)
            assert process.wait() == 0, process.log
            most = 1 if mode == "processes=1" else 8
    ran = Counter(pid for word, number, pid, _ in read_diary(tmp_path / "diary") if word == "end" and number < 100)
    # A process that is over the limit runs only the jobs that it has begun.
    assert max(ran.values()) <= most, ran


PROGRAM_GOES_ON = """
import sys, threading, time
import multiq, rough_app
from multiq.logging import setup_logging
setup_logging("info")
worker = multiq.Worker(rough_app.app, {arguments})
{before}
code = worker.run()
print("ran:", code, file=sys.stderr, flush=True)
{after}
time.sleep(0.3)
print("the program goes on", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("mode", [*ALONE, *SUPERVISED])
def test_stop_after_the_run_has_returned_does_nothing(tmp_path: Path, url: str, mode: str) -> None:
    quick.enqueue(1)
    code = PROGRAM_GOES_ON.format(
        arguments=f"stop_when_empty=True, {mode}", before="", after="worker.stop(); worker.stop(); worker.stop()"
    )
    with worker(tmp_path, url, code=code) as process:
        assert process.wait() == 0, process.log
        assert "ran: 0" in process.log
        assert "the program goes on" in process.log


@pytest.mark.long
@pytest.mark.one_row
@pytest.mark.parametrize("mode", ALONE)
@pytest.mark.parametrize("times", [1, 2])
def test_a_worker_in_a_program_does_not_end_it(tmp_path: Path, url: str, mode: str, times: int) -> None:
    # Given a program that runs a worker, and a job that is longer than the grace
    nap_through.enqueue(1, 3.0)
    before = f"""
def stop():
    while not rough_app.diary_has("start"):
        time.sleep(0.01)
    for _ in range({times}):
        worker.stop()
        time.sleep(0.05)
threading.Thread(target=stop).start()
"""
    code = PROGRAM_GOES_ON.format(arguments=f"grace=0.3, {mode}", before=before, after="")
    # When the grace ends, or the worker gets a second signal
    with worker(tmp_path, url, code=code) as process:
        # Then the program continues, and has the exit code of the worker
        assert process.wait() == 0, process.log
        assert f"ran: {EXIT_CUT_SHORT}" in process.log
        assert "the program goes on" in process.log
    # And the job was given back
    assert app.queue().stats().ready == 1
