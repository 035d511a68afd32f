"""Repeated kill -9 of workers in the middle of jobs: every job is done in the end, and each rerun follows a kill.

A short run is part of the suite. The long one: ``MULTIQ_TEST_KILLS=50 MULTIQ_TEST_JOBS=5000 pytest -s tests/soak``.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from processes import WorkerProcess, until
from worker_app import app, nap, read_diary

if TYPE_CHECKING:
    from pathlib import Path

KILLS = int(os.environ.get("MULTIQ_TEST_KILLS", "6"))
JOBS = int(os.environ.get("MULTIQ_TEST_JOBS", "600"))
SEED = int(os.environ.get("MULTIQ_TEST_SEED", "20261121"))
MODES = ["", "threads=4", "processes=2"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_job_is_done_and_every_repetition_explained_by_a_kill(tmp_path: Path) -> None:
    # Given jobs of 0 to 40 ms, and three workers of different kinds
    luck = random.Random(SEED)
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    nap.enqueue_many([(number, luck.choice([0, 0.005, 0.02, 0.04])) for number in range(JOBS)])
    workers = [WorkerProcess(tmp_path, url, mode) for mode in MODES]
    killed: set[int] = set()
    try:
        # When one of the workers is killed at a random moment, and replaced, over and over
        for _ in range(KILLS):
            time.sleep(luck.uniform(0.05, 0.5))
            place = luck.randrange(len(workers))
            victim = workers[place]
            until(lambda victim=victim: "working" in victim.log)  # type: ignore[misc]
            time.sleep(luck.uniform(0, 0.1))
            victim.kill()
            killed |= {victim.process.pid, *_pids_of(victim)}
            workers[place] = WorkerProcess(tmp_path, url, MODES[place])
        diary = workers[0].diary
        until(lambda: _ended(diary) == JOBS, timeout=300, what=lambda: f"{JOBS} jobs are done, not {_ended(diary)}")
        until(lambda: app.backend.queues() == [], timeout=30, what=lambda: f"all is settled: {app.queue().stats()}")
    finally:
        for worker in workers:
            worker.kill()
    # Then no job was lost, and each process whose job ran again had been killed
    runs: dict[int, list[int]] = {}
    for word, number, pid, _ in read_diary(diary):
        if word == "start":
            runs.setdefault(number, []).append(pid)
    assert sorted(runs) == list(range(JOBS))
    unexplained = {number: pids for number, pids in runs.items() if not set(pids[:-1]) <= killed}
    assert unexplained == {}
    again = Counter(len(pids) for pids in runs.values())
    print(f"\n{KILLS} kills, {JOBS} jobs: none lost; runs per job: {dict(sorted(again.items()))}; seed {SEED}")


def _ended(diary: Path) -> int:
    return len({number for word, number, _, _ in read_diary(diary) if word == "end"})


def _pids_of(worker: WorkerProcess) -> set[int]:
    """The pids of a worker's processes, from its log."""
    return {int(line.rsplit(":", 1)[1].split()[0]) for line in worker.log.splitlines() if " working " in line}
