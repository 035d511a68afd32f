"""The short form of ``worker_losses.py``: jobs while child processes are killed, on SQLite."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from servers.process import require, until

SCRIPT = Path(__file__).parent / "worker_losses.py"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["-t 2", "--concurrency 4"])
def test_every_job_runs_although_children_are_killed_around_it(mode: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "sqlite", f"--mode={mode}", "--jobs=1000", "--kills=25", "--processes=3"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_run_whose_server_crashes_says_so_and_proves_nothing() -> None:
    require("beanstalkd")
    command = [sys.executable, str(SCRIPT), "beanstalk", "--mode=-t 2", "--jobs=4000", "--kills=100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        until(lambda: _servers(process.pid), "a server runs")
        time.sleep(2)  # in the middle of the run
        (server,) = _servers(process.pid)
        server.send_signal(signal.SIGSEGV)
        said, _ = process.communicate(timeout=60)
    assert "beanstalkd was ended by SIGSEGV: this run proves nothing" in said
    assert "Traceback" not in said
    assert process.returncode == 3


def _servers(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if child.name() == "beanstalkd"]
