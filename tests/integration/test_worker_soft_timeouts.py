"""Plain functions over their time limit: they are interrupted only in their own code, or must poll."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from limit_app import USES, alisten, app, asleep, brief, deaf, hammer, listen, neighbour, probe, unlimited
from modes import ALONE, SUPERVISED, in_each_mode, worker_of
from worker_app import read_diary

import multiq
from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

SECONDS = 40.0  # after which a call counts as hung


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    yield url
    app.close()


def lines(process: WorkerProcess, word: str) -> list[int]:
    return sorted(number for said, number, _, _ in read_diary(process.diary) if said == word)


def reasons() -> list[str | None]:
    return [job.reason for job in app.queue().jobs(State.BURIED, limit=1000)]


def told(seconds: float, count: int = 1) -> list[str]:
    return [f"the task ran longer than its timeout of {seconds:g} s"] * count


# --- code that is not the task's own ----------------------------------------------------------------------


@pytest.mark.long
@in_each_mode
def test_no_lock_stays_locked_when_jobs_that_use_it_time_out(mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs that use queues, conditions, logging, context managers and executors until their time is over
    is_inline = "threads" not in mode and "concurrency" not in mode
    count = 0
    for _ in range(3):
        for use in USES:
            count += 1
            hammer.enqueue(count, use, not is_inline)
    # When a worker runs them, and then a job that checks the locks
    probe.options(queue="last").enqueue(0)
    with worker_of("limit_app", tmp_path, url, f"['default', 'last'], {mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then the timeout was raised in each job, in one and the same process, and no lock is held, and no step is left
    # half done
    diary = read_diary(process.diary)
    assert [entry[:2] for entry in diary if entry[0] != "start"] == [("end", 0)]
    assert lines(process, "start") == list(range(1, count + 1))
    assert len({pid for _, _, pid, _ in diary}) == 1, process.log
    assert reasons() == told(0.05, count)


@in_each_mode
def test_a_timeout_at_the_end_of_its_job_harms_no_later_job(mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs that end just when their time is over
    handles = [brief.enqueue(number) for number in range(40)]
    # When a worker has run them
    with worker_of("limit_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then each job is either done or buried, all in one process
    assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1
    buried = [handle for handle in handles if handle.state() == State.BURIED]
    assert reasons() == told(0.02, len(buried))
    assert {handle.state() for handle in handles if handle not in buried} <= {State.GONE}


# --- cooperation ------------------------------------------------------------------------------------------


@in_each_mode
def test_a_job_can_ask_whether_its_time_is_over(mode: str, tmp_path: Path, url: str) -> None:
    # Given a plain and a coroutine job that check their limit, and one without a limit
    listen.enqueue(1)
    alisten.enqueue(2)
    unlimited.enqueue(3)
    # When a worker runs these jobs
    with worker_of("limit_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then the first two run until their limit is over, in one process
    assert (lines(process, "went-on"), lines(process, "end")) == ([1, 2], [3])
    assert not lines(process, "early")
    if "threads" in mode:
        assert 1 in lines(process, "in-time")
    assert reasons() == told(0.3, 2)
    assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1


@pytest.mark.long
@pytest.mark.parametrize("mode", [SUPERVISED["threads-supervised"], SUPERVISED["coroutines-supervised"]])
def test_the_process_of_a_job_that_does_not_ask_ends(mode: str, tmp_path: Path, url: str) -> None:
    # Given a job on a thread that does not check its limit, and another job, which has one attempt
    deaf.enqueue(1, 300)
    neighbour.enqueue(2, 1.5)
    # When the job's time and the extra time are over
    with worker_of("limit_app", tmp_path, url, f"{mode}, stop_when_empty=True, kill_after=0.3") as process:
        assert process.wait(SECONDS) == 0
    # Then its process has ended, and the other job has run again without a further attempt
    assert reasons() == told(0.3)
    assert (lines(process, "start"), lines(process, "end")) == ([1, 2, 2], [2])
    assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 2


@pytest.mark.long
@pytest.mark.parametrize("mode", [ALONE["threads-alone"], ALONE["coroutines-alone"]])
def test_without_a_supervisor_a_job_that_does_not_ask_runs_on(mode: str, tmp_path: Path, url: str) -> None:
    # Given a job on a thread that does not check its limit, and others after it
    deaf.enqueue(1, 1.5)
    for number in (2, 3, 4):
        neighbour.enqueue(number, 0.1)
    # When a worker without a supervisor runs them
    with worker_of("limit_app", tmp_path, url, f"{mode}, stop_when_empty=True, kill_after=0.3") as process:
        assert process.wait(SECONDS) == 0
    # Then the log reports the first job as overdue, and all jobs run to their ends, once
    assert "overdue" in process.log
    assert lines(process, "start") == lines(process, "end") == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", [ALONE["inline-alone"], SUPERVISED["inline-supervised"]])
def test_inline_a_sleep_is_interrupted(mode: str, tmp_path: Path, url: str) -> None:
    # Given a job that sleeps for minutes in one call, and one after it
    asleep.enqueue(1)
    neighbour.enqueue(2, 0)
    # When a worker runs them inline
    with worker_of("limit_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then the first job has ended at its limit, and its process has continued
    assert reasons() == told(0.3)
    assert lines(process, "end") == [2]
    assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1


def test_outside_of_the_main_thread_nothing_is_interrupted() -> None:
    # Given a worker in a thread of a program, with a job that checks its limit, one that does not, and a job after them
    app = multiq.App("memory://")
    ended = []

    @app.task(timeout=0.2, max_attempts=1)
    def ask(number: int) -> None:
        listen_until_told()
        ended.append(number)

    @app.task(timeout=0.2, max_attempts=1, loosen=True)
    def wait(number: int) -> None:
        for _ in range(50):
            threading.Event().wait(0.01)
        ended.append(number)

    def listen_until_told() -> None:
        for _ in range(1000):
            threading.Event().wait(0.01)
            multiq.current_job().check()

    asking, waiting, after = ask.enqueue(1), wait.enqueue(2), wait.options(timeout=60).enqueue(3)
    # When the worker has run these jobs
    thread = threading.Thread(target=multiq.Worker(app, stop_when_empty=True).run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    # Then the timeout is raised in the job that checks, and not in the job that does not
    assert ended == [2, 3]
    assert asking.peek().reason == told(0.2)[0]
    assert (waiting.state(), after.state()) == (State.GONE, State.GONE)
