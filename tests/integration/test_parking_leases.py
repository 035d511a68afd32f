"""A real worker renews the leases of its running jobs, also while it puts many jobs of a limit aside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from stores import STORES
from worker_app import app, nap, read_diary

from multiq import open_backend
from multiq.backend import Gate, NewJob, Quota, Terms
from multiq.ids import new_id

if TYPE_CHECKING:
    from pathlib import Path

BACKLOG = 30_000  # jobs; a call that parked all of them took seconds


@pytest.mark.long
@pytest.mark.parametrize("quota", [Quota(fair=True), Quota(slots=0)], ids=["fair", "closed"])
@pytest.mark.parametrize("store", ["redis", "mysql"])
def test_a_running_job_is_run_once_while_its_worker_looks_at_many_jobs_of_a_limit(
    tmp_path: Path, store: str, quota: Quota
) -> None:
    with STORES[store](tmp_path) as url, open_backend(url) as backend, app.using(backend):
        # Given many jobs of a limit, and before them in the worker's order a job that runs longer than its lease
        backend.limits("backlog", {"api": quota})
        terms = Terms(gates=(Gate("api", "a"),))
        for _ in range(BACKLOG // 500):
            backend.enqueue("backlog", [NewJob(b"not a call", new_id(), terms=terms) for _ in range(500)])
        nap.options(ttr=3).enqueue(0, 8)
        # When a worker with a second thread looks for jobs in both queues
        with worker(tmp_path, url, "queues=['default', 'backlog'], threads=2, processes=0") as process:
            until(lambda: "end" in {row[0] for row in read_diary(process.diary)}, timeout=120)
            # Then the job has begun once
            assert [row[0] for row in read_diary(process.diary)] == ["start", "end"]
            until(lambda: app.queue().stats().reserved == 0)
            assert " lost " not in process.log
