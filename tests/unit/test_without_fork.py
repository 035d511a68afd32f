"""On a system without fork (Windows), ``import multiq`` works, and producers can enqueue."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PRODUCER = """
import os, sys

del os.register_at_fork, os.fork, os.forkpty
for name in ("fcntl", "termios", "tty", "pty", "resource", "pwd", "grp"):
    sys.modules[name] = None  # importing it raises ImportError, as where it is missing
import multiq

app = multiq.App(sys.argv[1])

@app.task(queue="mail")
def send(address: str) -> None: ...

handle = send.enqueue("ann@example.com")
assert handle.state() == "ready"
with app.queue("mail").reserve() as job:
    assert job.body["task"] == "send"
assert handle.state() == "gone"
app.close()
"""


def produce(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRODUCER, url], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_producer_works_without_fork(tmp_path: Path) -> None:
    produce("memory://")
    produce(f"sqlite:///{tmp_path}/jobs.db")
