"""Programs and forks that jobs start have the signal handling that they would have without a worker."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from rough_app import astart_program, clone, fork_children, program, start_program
from worker_app import app, quick, read_diary

if TYPE_CHECKING:
    from pathlib import Path

SUPERVISED = ["processes=1", "processes=1, threads=2", "processes=1, concurrency=2"]
MODES = ["", "threads=2", "concurrency=2", *SUPERVISED]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def said(folder: Path) -> list[tuple[str, int]]:
    """Words and numbers of the diary."""
    return [(word, number) for word, number, _, _ in read_diary(folder / "diary")]


@pytest.mark.parametrize("mode", MODES)
def test_a_program_that_a_job_starts_ends_by_sigterm(tmp_path: Path, url: str, mode: str) -> None:
    # Given a job that starts a program, looks at its signals, and terminates it
    start_program.enqueue(1)
    # When it runs
    with worker(tmp_path, url, code=program(f"stop_when_empty=True, {mode}")) as process:
        assert process.wait() == 0, process.log
    # Then no signal is blocked or ignored in that program, and it ends by SIGTERM
    assert said(tmp_path) == [("ended", -signal.SIGTERM)]


@pytest.mark.parametrize("mode", MODES)
def test_a_program_that_a_coroutine_starts_ends_by_sigterm(tmp_path: Path, url: str, mode: str) -> None:
    astart_program.enqueue(1)
    with worker(tmp_path, url, code=program(f"stop_when_empty=True, {mode}")) as process:
        assert process.wait() == 0, process.log
    assert said(tmp_path) == [("ended", -signal.SIGTERM)]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_processes_that_a_job_forks_die_of_signals_and_the_worker_gets_none(
    tmp_path: Path, url: str, mode: str
) -> None:
    # Given a job that forks processes and ends them by signals that the worker handles
    fork_children.enqueue(1)
    with worker(tmp_path, url, code=program(mode)) as process:
        until(lambda: ("end", 1) in said(tmp_path))
        # Then each of them died of its signal
        died = [number for word, number in said(tmp_path) if word == "died"]
        kinds = [signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT]
        assert died == kinds, said(tmp_path)
        # And the worker has received none of these signals: it runs the next job
        quick.enqueue(2)
        until(lambda: ("end", 2) in said(tmp_path))
        assert "paused" not in process.log
        assert "stopping" not in process.log
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


@pytest.mark.one_row
@pytest.mark.parametrize("way", ["returns", "raises", "exits"])
@pytest.mark.parametrize("mode", MODES)
def test_a_job_that_comes_back_in_a_forked_child_ends_that_child(tmp_path: Path, url: str, mode: str, way: str) -> None:
    # Given a job that forks and returns in both processes, among others
    clone.enqueue(1, way)
    quick.enqueue_many([(number,) for number in range(2, 12)])
    # When a worker runs them
    with worker(tmp_path, url, code=program(f"stop_when_empty=True, {mode}")) as process:
        assert process.wait() == 0, process.log
        assert "crashed" not in process.log
    # Then the child ended with the job, and every job ran once, in the worker
    rows = [row for row in read_diary(tmp_path / "diary") if row[0] != "clone"]
    left = [number for word, number, _, _ in rows if word == "left"]
    assert left == [{"returns": 0, "raises": 1, "exits": 7}[way]], said(tmp_path)
    assert sorted(number for word, number, _, _ in rows if word == "end") == list(range(1, 12))
    assert len({pid for _, _, pid, _ in rows}) == 1
    assert app.backend.queues() == []
