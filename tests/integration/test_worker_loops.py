"""Coroutine jobs that misuse the event loop they share: other jobs are not harmed, and the attempts are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from loop_app import (
    ENDS,
    app,
    bystander,
    cancel_all,
    cancel_itself,
    end_in_awaited,
    end_in_callback,
    end_in_subtask,
    plain,
    stop_loop,
)
from modes import in_each_mode, worker_of
from worker_app import read_diary

from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

    import multiq

SECONDS = 20.0  # after which a call counts as hung


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    yield url
    app.close()


def lines(process: WorkerProcess, word: str) -> list[int]:
    return sorted(number for said, number, _, _ in read_diary(process.diary) if said == word)


@pytest.mark.one_row
@in_each_mode
@pytest.mark.parametrize(
    "task", [end_in_subtask, end_in_awaited, end_in_callback, stop_loop], ids=lambda task: task.name
)
def test_a_loop_outlives_what_would_end_it(task: multiq.Task[..., Any], mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs that would end their event loop, between others
    handles = []
    bystander.enqueue(1)
    for number, how in enumerate(ENDS, 2):
        handles.append(task.enqueue(number, how))
    bystander.enqueue(8)
    plain.enqueue(9)
    # When a worker runs them
    with worker_of("loop_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then the other jobs have run once, to their ends, and each of these jobs has a verdict, all in one process
    assert lines(process, "start") == [1, 2, 3, 8, 9]
    ended = lines(process, "end")
    assert ended == [1, *[number for number in (2, 3) if number in ended], 8, 9]
    for number, handle in enumerate(handles, 2):
        assert handle.state() == (State.GONE if number in ended else State.BURIED)
    assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1
    if task is end_in_awaited:
        assert sorted(str(job.reason) for job in app.queue().jobs(State.BURIED)) == sorted(ENDS)
    elif "concurrency" in mode:
        assert ended == [1, 2, 3, 8, 9]


@pytest.mark.one_row
@in_each_mode
@pytest.mark.parametrize("task", [cancel_itself, cancel_all], ids=lambda task: task.name)
def test_a_job_that_cancels_its_own_task_has_failed(
    task: multiq.Task[..., Any], mode: str, tmp_path: Path, url: str
) -> None:
    # Given a job with two attempts that cancels its own task, or all tasks of the loop
    handle = task.enqueue(1)
    # When a worker runs it
    with worker_of("loop_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    # Then the job has run twice, and is buried
    assert lines(process, "start") == [1, 1]
    assert handle.state() == State.BURIED
    assert handle.peek().reason == "CancelledError"
