"""--once, in each mode: the worker runs one job, or none if none is due, whatever the job does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from worker_app import app, endless, quick, read_diary

if TYPE_CHECKING:
    from pathlib import Path

MODES = ["-p 0", "-p 0 -t 2", "-p 0 --concurrency 2", "-p 1", "-p 1 -t 2", "-p 1 --concurrency 2"]


@pytest.fixture(autouse=True)
def url(tmp_path: Path) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def run(folder: Path, mode: str, *options: str) -> int:
    """Run ``multiq worker --once`` to its end."""
    environment = {
        **os.environ,
        "MULTIQ_URL": f"sqlite:///{folder}/jobs.db",
        "WORKER_TEST_DIARY": f"{folder}/diary",
        "PYTHONPATH": os.path.dirname(__file__),  # noqa: PTH120 - a string is wanted
    }
    command = [sys.executable, "-m", "multiq", "worker", "worker_app:app", "--once", *mode.split(), *options]
    return subprocess.run(command, cwd=folder, env=environment, timeout=60, check=False).returncode


@pytest.mark.parametrize("mode", MODES)
def test_on_an_empty_queue_it_ends_at_once(tmp_path: Path, mode: str) -> None:
    assert run(tmp_path, mode) == 0


@pytest.mark.parametrize("mode", MODES)
def test_once_runs_one_job_of_many(tmp_path: Path, mode: str) -> None:
    quick.enqueue_many([(number,) for number in range(3)])
    assert run(tmp_path, mode) == 0
    assert sum(word == "end" for word, *_ in read_diary(tmp_path / "diary")) == 1
    assert app.queue().stats().ready == 2


@pytest.mark.one_row
@pytest.mark.parametrize("mode", [mode for mode in MODES if "-p 1" in mode])
@pytest.mark.parametrize("way", ["deaf", "stuck"])
def test_an_overdue_job_is_run_once(tmp_path: Path, mode: str, way: str) -> None:
    # Given a job with two attempts that ignores its time limit, so that the worker must kill its process
    endless.enqueue(1, way)
    quick.enqueue_many([(number,) for number in range(2, 4)])
    # When a worker runs one job
    assert run(tmp_path, mode, "--kill-after", "0.3") == 0
    # Then this job has begun once, and no other job has begun
    assert [(word, number) for word, number, *_ in read_diary(tmp_path / "diary")] == [("start", 1)]
