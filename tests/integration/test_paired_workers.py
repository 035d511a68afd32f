"""Worker commands on beanstalkd with a store beside it: results, flows, failed jobs, and what dead processes leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from paired_app import app, double, fail, finish, stepwise, total
from processes import until
from stores import PAIRED, PAIRS, STORES

import multiq
from multiq.backend import Arrive, NewJob, Terms
from multiq.backend.paired.backend import Paired

if TYPE_CHECKING:
    from collections.abc import Iterator

APPS = Path(__file__).parent


@pytest.fixture(params=[PAIRED, *(pytest.param(name, marks=pytest.mark.long) for name in PAIRS if name != PAIRED)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@contextlib.contextmanager
def _worker(url: str, folder: Path) -> Iterator[None]:
    """A worker command with two processes."""
    with (folder / "worker.log").open("a") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "multiq", "worker", "paired_app:app", "-q", "default,other", "-p", "2"],
            env={**os.environ, "MULTIQ_URL": url, "PYTHONPATH": str(APPS)},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0, (folder / "worker.log").read_text()


def test_a_worker_keeps_results_runs_flows_and_shows_failed_jobs(url: str, tmp_path: Path) -> None:
    # Given a job, a chain over two queues, a batch, a graph, a job with steps, and a job that fails
    single = double.enqueue(4)
    chain = multiq.chain(multiq.group(double.s(1), double.s(2), double.s(3)), total.s()).enqueue()
    batch = multiq.batch([double.s(at) for at in range(30)], then=finish.s()).enqueue()
    graph = multiq.Flow("graph")
    left, right = graph.add(double.s(5)), graph.add(double.s(6))
    graph.add(total.s([left, right]))
    sent = graph.enqueue()
    steps, failing = stepwise.enqueue(), fail.enqueue()
    # When a worker runs them
    with _worker(url, tmp_path):
        # Then each has its result
        assert single.result(60) == 8
        assert chain.last().result(60) == 12
        assert batch.last().result(60) == f"finished {batch.id}"
        assert sent.last().result(60) == 22
        assert steps.result(60) == [1, 2]
        with pytest.raises(multiq.JobFailed) as failure:
            failing.result(60)
    # And the failed one has its reason and its traceback
    assert failure.value.reason == "ValueError: no such order"
    assert "raise ValueError" in (failure.value.traceback or "")
    (failed,) = app.failed.list()
    assert failed.failure is not None
    assert failed.failure.error == "ValueError: no such order"
    assert [flow.state for flow in app.flows.list()] == ["finished"] * 3
    assert batch.progress() == (30, 30)


@pytest.mark.long
def test_a_worker_puts_the_jobs_that_dead_processes_have_released(url: str, tmp_path: Path) -> None:
    # Given a running worker, and a held job
    backend = app.backend
    assert isinstance(backend, Paired)
    with _worker(url, tmp_path):
        assert double.enqueue(1).result(60) == 2
        body = b'{"multiq":1,"task":"double","args":[21],"keep":600}'
        backend.enqueue("default", [NewJob(body, "held", terms=Terms(1))])
        # When the job is released, and the process that should put it does nothing more
        assert backend.store.carry_out([Arrive("+default", "held", "someone")])
        # Then the worker puts the job and runs it
        until(lambda: backend.outcomes("default", ["held"]) != [None])
    assert app.job("default", "held").result(0) == 42
