"""Workers as processes, on SQLite: signals, kills, supervision. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from worker_app import anap, app, fail, hold_the_gil, nap, quick, read_diary, suicide

import multiq
from multiq import State
from multiq.worker.processes.exits import EXIT_CUT_SHORT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new SQLite file, to which the test app enqueues."""
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    return app.url


def words(path: Path, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(path) if said == word]


MODES = ["", "threads=3", "concurrency=5", "processes=2", "processes=2, threads=2"]


@pytest.mark.parametrize("mode", MODES)
def test_every_job_is_done_once_and_the_worker_ends_with_zero(tmp_path: Path, url: str, mode: str) -> None:
    # Given a few hundred jobs of two kinds
    quick.enqueue_many([(number,) for number in range(300)])
    anap.enqueue_many([(number, 0.001) for number in range(300, 320)])
    # When a worker drains the queue
    with worker(tmp_path, url, f"stop_when_empty=True, {mode}") as process:
        assert process.wait() == 0, process.log
        # Then each job ran once, and none is left
        assert sorted(words(process.diary, "end")) == list(range(320))
    assert app.backend.queues() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_jobs_finish_and_gives_back_the_rest(
    tmp_path: Path, url: str, mode: str, number: signal.Signals
) -> None:
    # Given a worker in the middle of more jobs than it can run at once
    nap.enqueue_many([(n, 0.3) for n in range(40)])
    with worker(tmp_path, url, mode) as process:
        until(lambda: words(process.diary, "start"))
        # When it gets a stop signal
        process.send(number)
        # Then the jobs that had begun are finished, and the other jobs are ready, without a counted attempt
        assert process.wait() == 0, process.log
        started, ended = words(process.diary, "start"), words(process.diary, "end")
    assert sorted(started) == sorted(ended)
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved) == (40 - len(ended), 0)
    assert {info.attempt for info in app.queue().jobs("ready")} <= {0}


@pytest.mark.parametrize("mode", ["", "threads=3", "concurrency=5", "processes=2"])
def test_a_second_signal_ends_the_worker_now_and_gives_back_what_runs(tmp_path: Path, url: str, mode: str) -> None:
    # Given a worker whose jobs last for minutes
    anap.enqueue_many([(number, 300) for number in range(4)])
    with worker(tmp_path, url, mode) as process:
        until(lambda: words(process.diary, "start"))
        # When the worker gets two signals
        process.send(signal.SIGTERM)
        until(lambda: "stopping" in process.log)
        process.send(signal.SIGTERM)
        # Then it ends with the documented code, and all jobs are ready
        assert process.wait(20) == EXIT_CUT_SHORT, process.log
    assert app.queue().stats().ready == 4


def test_jobs_that_outlast_the_grace_are_given_back(tmp_path: Path, url: str) -> None:
    nap.enqueue(1, 300)
    with worker(tmp_path, url, "grace=0.3") as process:
        until(lambda: words(process.diary, "start"))
        process.send(signal.SIGTERM)
        assert process.wait(20) == EXIT_CUT_SHORT, process.log
    assert app.queue().stats().ready == 1


@pytest.mark.long
def test_a_long_inline_job_keeps_its_lease_and_delays_no_other_job(tmp_path: Path, url: str) -> None:
    # Given a job three times as long as its lease, among many short ones, and two inline workers
    quick.enqueue_many([(number,) for number in range(100)])
    nap.enqueue(1000, 6.5)  # its ttr is 2
    quick.enqueue_many([(number,) for number in range(100, 200)])
    with worker(tmp_path, url) as first, worker(tmp_path, url) as second:
        # Then the short jobs are all done while the long job still runs
        until(lambda: len(words(first.diary, "end")) == 200)
        assert 1000 not in words(first.diary, "end")
        # And the long job runs once, to its end
        until(lambda: 1000 in words(first.diary, "end"))
        until(lambda: app.queue().stats().reserved == 0)
        assert words(first.diary, "start").count(1000) == 1
        assert "lost" not in first.log + second.log


@pytest.mark.long
@pytest.mark.parametrize("mode", ["", "threads=2"])
def test_a_job_that_keeps_the_interpreter_busy_keeps_its_lease(tmp_path: Path, url: str, mode: str) -> None:
    hold_the_gil.enqueue(1, 5)  # its ttr is 2
    with worker(tmp_path, url, mode) as process, worker(tmp_path, url, mode):
        until(lambda: words(process.diary, "end"))
        assert words(process.diary, "start") == [1]


def test_a_killed_worker_s_job_is_run_again_when_its_lease_has_ended(tmp_path: Path, url: str) -> None:
    # Given a worker that is killed in mid-job
    handle = nap.enqueue(1, 30)
    with worker(tmp_path, url) as process:
        until(lambda: words(process.diary, "start"))
        process.kill()
    assert handle.state() is State.RESERVED
    # When another worker runs, then the job starts again, and the crash is counted
    with worker(tmp_path, url) as process:
        until(lambda: len(words(process.diary, "start")) == 2)
        info = handle.peek()
        assert (info.attempt, info.crashes) == (2, 1)


@pytest.mark.long
def test_a_poison_job_is_buried_after_its_crashes_and_the_workers_live_on(tmp_path: Path, url: str) -> None:
    # Given a job that kills its process each time, under a supervisor
    handle = suicide.enqueue(1)
    with worker(tmp_path, url, "processes=2") as process:
        # Then the job is buried after three runs
        until(lambda: handle.state() is State.BURIED, timeout=60)
        assert words(process.diary, "start") == [1, 1, 1]
        assert "poison" in str(handle.peek().reason)
        # And the workers still work
        quick.enqueue(2)
        until(lambda: 2 in words(process.diary, "end"))
        # When the job is kicked, then it gets exactly one more attempt
        app.queue().kick()
        until(lambda: handle.state() is State.BURIED and words(process.diary, "start").count(1) == 4, timeout=60)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


def test_a_dead_child_is_replaced_at_once(tmp_path: Path, url: str) -> None:
    nap.enqueue_many([(number, 0.2) for number in range(4)])
    with worker(tmp_path, url, "processes=2") as process:
        until(lambda: len(words(process.diary, "end")) >= 2)
        victim = read_diary(process.diary)[0][2]
        os.kill(victim, signal.SIGKILL)
        until(lambda: "SIGKILL" in process.log)
        until(lambda: process.log.count(" working ") == 3)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path, url: str) -> None:
    quick.enqueue_many([(number,) for number in range(50)])
    with worker(tmp_path, url, "processes=2") as process:
        until(lambda: process.log.count(" working ") == 2)
        os.kill(process.process.pid, signal.SIGKILL)
        until(lambda: process.log.count(" stopped ") == 2)


def test_pause_and_resume_by_signal(tmp_path: Path, url: str) -> None:
    with worker(tmp_path, url) as process:
        process.wait_until_working()
        process.send(signal.SIGUSR2)
        until(lambda: "paused" in process.log)
        quick.enqueue(1)
        time.sleep(0.5)
        assert words(process.diary, "start") == []
        process.send(signal.SIGCONT)
        until(lambda: words(process.diary, "end") == [1])
        process.send(signal.SIGTERM)
        assert process.wait() == 0


def test_failed_jobs_are_retried_and_then_buried_with_their_reason(tmp_path: Path, url: str) -> None:
    handle = fail.enqueue(7)
    with worker(tmp_path, url) as process:
        until(lambda: handle.state() is State.BURIED)
        assert words(process.diary, "start") == [7, 7, 7]
    assert handle.peek().reason == "ValueError: number 7 is not to my liking"


def test_earlier_queues_come_first_strictly(tmp_path: Path, url: str) -> None:
    # Given urgent jobs in the second queue, and less urgent jobs in the first queue
    for number in range(30):
        quick.options(queue="low", priority=0).enqueue(number)
        quick.options(queue="high", priority=5000).enqueue(100 + number)
    with worker(tmp_path, url, "queues=['high', 'low'], stop_when_empty=True") as process:
        assert process.wait() == 0
        assert words(process.diary, "start") == [*range(100, 130), *range(30)]


def test_max_jobs_ends_the_worker_after_exactly_so_many(tmp_path: Path, url: str) -> None:
    quick.enqueue_many([(number,) for number in range(20)])
    with worker(tmp_path, url, "max_jobs=7") as process:
        assert process.wait() == 0
        assert len(words(process.diary, "end")) == 7
    assert app.queue().stats().ready == 13


def test_several_processes_on_memory_are_refused() -> None:
    with pytest.raises(multiq.Unsupported, match=r"shared.*sqlite"):
        multiq.Worker(multiq.App("memory://"), processes=2)


@pytest.mark.one_row
@pytest.mark.parametrize("offset", [*range(3), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 12))])
def test_no_job_stays_leased_after_a_graceful_stop_at_any_moment(tmp_path: Path, url: str, offset: int) -> None:
    quick.enqueue_many([(number,) for number in range(3000)])
    mode = ["", "threads=3", "processes=2"][offset % 3]
    with worker(tmp_path, url, mode) as process:
        process.wait_until_working()
        time.sleep(0.02 * offset)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log
        ended = words(process.diary, "end")
    assert app.queue().stats().reserved == 0
    assert len(ended) == len(set(ended)) == 3000 - (app.queue().stats().ready or 0)


@pytest.mark.long
@pytest.mark.parametrize("offset", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 8))])
def test_a_signal_while_children_start_reaches_them_and_ends_all_with_zero(
    tmp_path: Path, url: str, offset: int
) -> None:
    nap.enqueue_many([(number, 0.01) for number in range(2000)])
    with worker(tmp_path, url, "processes=3") as process:
        # A log line of the first child shows that the supervisor has begun to fork.
        until(lambda: "working" in process.log)
        time.sleep(0.004 * offset)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.log
    assert app.queue().stats().reserved == 0
