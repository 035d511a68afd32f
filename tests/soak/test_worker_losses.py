"""The short form of ``worker_losses.py``: jobs around kills of children, on SQLite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
