"""The short form of ``tests/soak/sqlite_stale.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "soak" / "sqlite_stale.py"


@pytest.mark.long
def test_stale_verdicts_are_refused_and_valid_ones_count() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--verdicts", "150"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 leases settled" in done.stdout
