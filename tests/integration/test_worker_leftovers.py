"""Tasks and threads that a job leaves behind are cancelled, or do not keep a worker from ending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from loop_app import (
    app,
    block,
    fill_pool,
    heed,
    hold_on,
    leave_and_fail,
    leave_generator,
    leave_subtask,
    leave_swallower,
    leave_task,
    leave_task_decorated,
    leave_thread,
    leave_thread_decorated,
    plain,
    plod,
    take_time,
    time_out_decorated,
    time_out_with_subtask,
    use_pool,
)
from modes import ALONE, in_each_mode, worker_of
from processes import HERE, until
from worker_app import read_diary

from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import multiq

SECONDS = 20.0  # after which a call counts as hung


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    yield url
    app.close()


# --- leftovers that go on ---------------------------------------------------------------------------------

LEAVERS = [leave_task, leave_task_decorated, leave_subtask, leave_and_fail]
LATE = [time_out_decorated, time_out_with_subtask]


@in_each_mode
def test_nothing_that_a_job_left_goes_on_after_it(mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs that leave tasks behind, or are over their time limit, and a job after each
    for number, task in enumerate([*LEAVERS, *LATE], 1):
        task.enqueue(number)
    for number in range(11, 14):
        take_time.options(queue="last").enqueue(number)
    # When a worker runs them
    arguments = f"['default', 'last'], {mode}, stop_when_empty=True"
    with worker_of("loop_app", tmp_path, url, arguments) as process:
        assert process.wait(SECONDS) == 0
    # Then their tasks are cancelled when the jobs end, with a warning for jobs that did not fail because of them
    diary = read_diary(process.diary)
    ended = {number: at for word, number, _, at in diary if word == "end"}
    for number in range(1, 7):
        ticks = [at for word, said, _, at in diary if (word, said) == ("tick", number)]
        assert ticks
        assert max(ticks) < ended.get(number, min(ticks) + 10**9) + 10**8, f"what job {number} left went on"
    assert {11, 12, 13} <= ended.keys()  # the tasks of running jobs were not cancelled
    assert process.log.count("left") >= 3
    reasons = {job.value["task"]: job.reason for job in app.queue().jobs(State.BURIED)}
    limit = "the task ran longer than its timeout of 0.2 s"
    assert reasons == {
        "leave_and_fail": "ValueError: on purpose",
        "time_out_decorated": limit,
        "time_out_with_subtask": limit,
    }
    assert len({pid for _, _, pid, _ in diary}) == 1


def test_tasks_of_another_job_are_left_alone(tmp_path: Path, url: str) -> None:
    # Given jobs that wait for subtasks of theirs while others end and leave tasks behind
    for number in range(1, 4):
        take_time.enqueue(10 + number)
        leave_task.enqueue(number)
    # When they run on one loop
    with worker_of(
        "loop_app", tmp_path, url, "processes=0, concurrency=6, stop_when_empty=True", owns_process=False
    ) as process:
        assert process.wait(SECONDS) == 0
    # Then all jobs succeed
    ended = sorted(number for word, number, _, _ in read_diary(process.diary) if word == "end")
    assert ended == [1, 2, 3, 11, 12, 13]


@pytest.mark.long
@in_each_mode
def test_a_job_has_threads_although_another_one_has_left_all_of_them_at_work(
    mode: str, tmp_path: Path, url: str
) -> None:
    # Given a job that leaves busy all threads of its loop's pool, and other jobs that need a thread
    fill_pool.enqueue(1)
    for number in range(2, 6):
        use_pool.enqueue(number)
    # When a worker runs them
    with worker_of("loop_app", tmp_path, url, f"{mode}, stop_when_empty=True", owns_process=False) as process:
        assert process.wait(SECONDS) == 0
    # Then these jobs get a thread, also a job that was waiting for one already, and the log explains the shortage
    assert sorted(number for word, number, _, _ in read_diary(process.diary) if word == "end") == [1, 2, 3, 4, 5]
    assert sum(word == "in-thread" for word, _, _, _ in read_diary(process.diary)) == 4
    if "threads" not in mode:
        assert "of ended jobs still run while other calls wait for a thread" in process.log


# --- the end ----------------------------------------------------------------------------------------------


@in_each_mode
@pytest.mark.parametrize(
    "task",
    [leave_swallower, leave_thread, leave_thread_decorated, leave_generator],
    ids=lambda task: task.name,
)
@pytest.mark.long
def test_the_end_does_not_wait_for_what_was_left(
    task: multiq.Task[..., Any], mode: str, tmp_path: Path, url: str
) -> None:
    # Given a job that leaves a task or thread behind that cannot be cancelled
    task.enqueue(1)
    plain.enqueue(2)
    # When a worker has run this job, in a program of its own if there is no supervisor
    with worker_of("loop_app", tmp_path, url, f"{mode}, stop_when_empty=True", owns_process=False) as process:
        assert process.wait(SECONDS) == 0
    # Then the worker ends, long before that task or thread would
    assert sorted(number for word, number, _, _ in read_diary(process.diary) if word == "end") == [1, 2]
    assert app.queue().stats().reserved == 0


# --- cut short --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["-t", "3"], ["--concurrency", "3"]], ids=["inline", "threads", "coroutines"])
@pytest.mark.parametrize("processes", ["0", pytest.param("1", marks=pytest.mark.long)])
@pytest.mark.parametrize("task", [heed, hold_on, block, plod], ids=lambda task: task.name)
@pytest.mark.long
def test_after_the_second_signal_nothing_goes_on(
    task: multiq.Task[..., Any], processes: str, mode: list[str], tmp_path: Path, url: str
) -> None:
    # Given a worker's command line, with a long job
    handle = task.enqueue(1)
    diary = tmp_path / "diary"
    environment = {**os.environ, "MULTIQ_URL": url, "WORKER_TEST_DIARY": str(diary), "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "multiq", "worker", "loop_app:app", "-p", processes, *mode]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: len(read_diary(diary)) > 2)
            # When it gets two stop signals
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            code = process.wait(8)
        finally:
            process.kill()
    # Then it ends, and its job is given back and does not continue
    lines = len(read_diary(diary))
    assert code == 130
    assert (handle.state(), handle.peek().attempt) == (State.READY, 0)
    time.sleep(0.2)
    assert len(read_diary(diary)) == lines


@pytest.mark.parametrize("mode", ALONE.values(), ids=ALONE.keys())
def test_in_a_program_a_coroutine_that_is_cut_short_is_cancelled(mode: str, tmp_path: Path, url: str) -> None:
    # Given a program that runs a worker, with a long job
    handle = heed.enqueue(1)
    with worker_of("loop_app", tmp_path, url, mode, owns_process=False) as process:
        until(lambda: len(read_diary(process.diary)) > 2)
        # When it gets two stop signals
        process.send(signal.SIGTERM)
        time.sleep(0.2)
        process.send(signal.SIGTERM)
        # Then the program continues at once, and the job does not continue
        assert process.wait(8) == 130
    assert handle.state() == State.READY
    assert [line[0] for line in read_diary(process.diary)].count("end") == 0
