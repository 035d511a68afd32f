"""A real worker renews the leases of its running jobs, also while it puts many jobs of a limit aside."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from stores import STORES

if TYPE_CHECKING:
    from pathlib import Path

#: runs a job that takes longer than its lease beside many jobs of a limit, and prints how often it has begun
WORKER = """
import sys, time
import multiq

_, url, is_fair = sys.argv
app = multiq.App(url)
begun = []

@app.task(queue="running", ttr=2)
def hold():
    begun.append(time.monotonic())
    time.sleep(3)

limit = multiq.Limit("api", key="{key}", fair=True, slots=5) if is_fair else multiq.Limit("api", key="{key}", slots=1)

@app.task(queue="backlog", ttr=2, limits=[limit])
def limited(key):
    time.sleep(0.05 if is_fair else 4)

for _ in range(60):
    limited.enqueue_many([("a",)] * 500)
hold.enqueue()
multiq.Worker(app, ["running", "backlog"], threads=2, max_time=10).run()
print(len(begun))
"""


@pytest.mark.long
@pytest.mark.parametrize("is_fair", [True, False], ids=["fair", "closed"])
@pytest.mark.parametrize("store", ["redis", "mysql"])
def test_a_running_job_begins_once_while_its_worker_looks_at_many_jobs_of_a_limit(
    tmp_path: Path, store: str, is_fair: bool
) -> None:
    with STORES[store](tmp_path) as url:
        command = [sys.executable, "-c", WORKER, url, "fair" if is_fair else ""]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "1\n", done.stderr[-3000:]
