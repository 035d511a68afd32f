"""Jobs that another process cancels while a worker runs them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from cancel_app import add, app, ask, brief, sleep, spin
from modes import SUPERVISED, worker_of
from stores import PAIRED, STORES
from worker_app import read_diary

import multiq
from multiq import State
from multiq.errors import JobCancelled, Unsupported
from multiq.flows.retention import delete_leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from processes import WorkerProcess

    from multiq.job import JobHandle

SECONDS = 60.0  # a hang's limit
QUICK = ["sqlite"]
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in ("redis", "mysql", PAIRED))]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[getattr(request, "param", "sqlite")](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def started(process: WorkerProcess) -> list[tuple[str, int, int, int]]:
    return [entry for entry in read_diary(process.diary) if entry[0] == "start"] if process.diary.exists() else []


def assert_cancelled(handle: JobHandle, process: WorkerProcess) -> None:
    with pytest.raises(JobCancelled, match="not needed"):
        handle.result(timeout=SECONDS)
    assert handle.status() == "cancelled"
    assert app.queue().jobs(State.BURIED).jobs == []
    assert "end" not in [word for word, *_ in read_diary(process.diary)]


@pytest.mark.parametrize("url", ALL, indirect=True)
def test_a_plain_job_and_a_coroutine_are_cancelled(url: str, tmp_path: Path) -> None:
    # Given a worker that runs a job for two minutes
    handle = spin.enqueue(1)
    with worker_of("cancel_app", tmp_path, url, "processes=1") as process:
        wait_until(lambda: started(process))
        # When this process cancels the job, then the job ends in its first run
        assert handle.cancel(grace=0.1, reason="not needed") == "requested"
        assert_cancelled(handle, process)
        # When the worker runs a coroutine, and the coroutine's job is cancelled
        other = sleep.enqueue(2)
        wait_until(lambda: len(started(process)) == 2)
        assert other.cancel(grace=0.1, reason="not needed") == "requested"
        assert_cancelled(other, process)
        # Then no process had to be ended for this
        pids = {pid for _, _, pid, _ in started(process)}
        assert len(pids) == 1


@pytest.mark.parametrize("name", ["threads-supervised", pytest.param("coroutines-supervised", marks=pytest.mark.long)])
def test_a_job_on_a_thread_and_on_a_loop_is_cancelled(name: str, tmp_path: Path, url: str) -> None:
    handles = [ask.enqueue(1), sleep.enqueue(2)]
    with worker_of("cancel_app", tmp_path, url, f"{SUPERVISED[name]}, stop_when_empty=True") as process:
        wait_until(lambda: len(started(process)) == len(handles))
        for handle in handles:
            assert handle.cancel(grace=0.1, reason="not needed") == "requested"
        for handle in handles:
            assert_cancelled(handle, process)
        assert process.wait(SECONDS) == 0


@pytest.mark.long
def test_the_process_of_a_job_that_does_not_ask_ends(tmp_path: Path, url: str) -> None:
    # Given a job on a thread that does not check for its cancellation, and another job beside it
    handle, neighbour = spin.enqueue(1), brief.enqueue(2, 8)
    arguments = f"{SUPERVISED['threads-supervised']}, stop_when_empty=True, kill_after=0.3"
    with worker_of("cancel_app", tmp_path, url, arguments) as process:
        wait_until(lambda: len(started(process)) == 2)
        # When the first job is cancelled
        handle.cancel(grace=0, reason="not needed")
        with pytest.raises(JobCancelled):
            handle.result(timeout=SECONDS)
        assert process.wait(SECONDS) == 0
    # Then the other job has run again, and the cancelled job has not
    assert neighbour.status() == "done"
    assert [number for _, number, _, _ in started(process)].count(1) == 1


@pytest.mark.parametrize("url", ALL, indirect=True)
def test_a_job_whose_process_dies_after_the_request_does_not_start_again(url: str, tmp_path: Path) -> None:
    # Given a running job with a request to cancel it, and a grace that is longer than this test
    handle = spin.enqueue(1)
    with worker_of("cancel_app", tmp_path, url, "processes=1, stop_when_empty=True") as process:
        wait_until(lambda: started(process))
        assert handle.cancel(grace=SECONDS, reason="not needed") == "requested"
        # When the job's process is killed
        ((_, _, pid, _),) = started(process)
        os.kill(pid, signal.SIGKILL)
        # Then the next process does not run the job
        assert_cancelled(handle, process)
        assert len(started(process)) == 1


@pytest.mark.parametrize("url", ALL, indirect=True)
def test_results_of_a_flow_are_there_after_its_keep_and_are_deleted_when_it_has_ended(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a chain that is kept for a second, and whose second step waits for longer
    flow = multiq.chain(add.s(1), add.options(delay=1.5).s(), add.s(), keep=1).enqueue()
    first, _, last = flow.jobs()
    # When a worker runs it
    with worker_of("cancel_app", tmp_path, url, "processes=1"):
        # Then no result is missing
        assert last.result(timeout=SECONDS) == 4
        assert first.status() == "done"
    # When the flow is no longer kept, then its results are deleted
    later = time.time() + 60
    monkeypatch.setattr("multiq.flows.record.time.time", lambda: later)
    assert delete_leftovers(app.backend) == 1
    assert first.status() == "unknown"


@pytest.mark.parametrize("url", ALL, indirect=True)
def test_a_batch_is_cancelled_with_the_members_that_run(url: str, tmp_path: Path) -> None:
    # Given a batch of which one member runs
    members = [spin.s(1), *[add.options(delay=SECONDS).s(n) for n in range(1500)]]
    flow = multiq.batch(members, then=add.s(0)).enqueue()
    member = next(job for job, task in flow.tasks() if task == "spin")
    with worker_of("cancel_app", tmp_path, url, "processes=1") as process:
        wait_until(lambda: started(process))
        # When the flow is cancelled with its running jobs
        assert flow.cancel(running=True, grace=0, reason="not needed") == 1501
        # Then the member ends, and nothing of the flow is left
        assert_cancelled(member, process)
    assert flow.progress() == (0, 1501)
    stats = app.queue().stats()
    assert (stats.ready, stats.delayed, stats.held, stats.buried) == (0, 0, 0, 0)


def test_a_running_job_on_beanstalkd_cannot_be_cancelled(tmp_path: Path) -> None:
    with STORES["beanstalk"](tmp_path) as url:
        app.connect(url)
        handle = app.queue().enqueue("work")
        job = app.queue().reserve()
        with pytest.raises(Unsupported, match="notes"):
            handle.cancel()
        job.release()
        assert handle.cancel() == "deleted"
        app.close()
