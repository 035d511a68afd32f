"""Short forms of the soaks that are run by hand, with fewer rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAKS = Path(__file__).parents[2] / "soak"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "rounds"),
    [("beanstalk_lost.py", 105), ("beanstalk_restarts.py", 60), ("beanstalk_crashes.py", 150)],
    ids=["lost", "restarts", "crashes"],
)
def test_soak_finds_no_fault(script: str, rounds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SOAKS / script), "--rounds", str(rounds)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
