"""Async subscribers in a worker's processes get the events of all ends of jobs, crashes included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from shell import Shell

if TYPE_CHECKING:
    from pathlib import Path

APP = """
import asyncio, os, signal, time
import multiq
from multiq import events

app = multiq.App()


@app.task
def work() -> None:
    pass


@app.task(max_crashes=1)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(timeout=0.2, max_attempts=1)
def ignore() -> None:
    while True:
        try:
            while True:
                time.sleep(0.01)
        except multiq.SoftTimeout:
            pass


@app.on(events.Event)
async def tell(event: events.Event) -> None:
    await asyncio.sleep(0.01)
    with open("told", "a") as file:
        file.write(type(event).__name__ + "\\n")
"""


@pytest.mark.one_row
@pytest.mark.parametrize("mode", [[], ["-t", "2"], ["--concurrency", "2"]], ids=["inline", "threads", "concurrency"])
@pytest.mark.parametrize(("task", "heard"), [("work", "JobDone"), ("die", "JobCrashed"), ("ignore", "JobOverdue")])
def test_every_end_of_a_job_is_emitted(task: str, heard: str, mode: list[str], tmp_path: Path) -> None:
    # Given a job that is done, kills its process, or ignores its timeout
    shell = Shell(tmp_path)
    (tmp_path / "ends.py").write_text(APP)
    with shell.app as app:
        app.queue().enqueue({"multiq": 1, "task": task})
    # When a worker with a supervisor has run it
    done = shell.run("worker", "ends:app", "-p", "1", "--kill-after", "0.2", "--stop-when-empty", *mode)
    # Then the subscriber was called for that end, in some process, and for the worker's end
    assert done.code == 0, done.err
    told = (tmp_path / "told").read_text().split()
    assert told.count(heard) == 1
    assert "WorkerStopped" in told
