"""Overdue jobs: their events, and that other jobs of the process are not blamed. In every mode, on SQLite."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from blame_app import (
    ahang,
    app,
    block,
    block_for_ever,
    hang,
    hold_by_callback,
    hold_by_thread,
    leave_timer,
    lenient,
    patient,
    rest,
    step,
    stop_us,
    wait_in,
)
from processes import HERE, until
from stores import STORES
from worker_app import read_diary

from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODES = ["-p 1", "-p 1 -t 2", "-p 1 --concurrency 3"]
TOLD = ("JobOverdue", "JobTimedOut", "JobFailed", "JobRetried", "ended:retried", "JobBuried", "ended:buried")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    app.connect(f"sqlite:///{tmp_path}/jobs.db")
    yield app.url
    app.close()


class Blamed:
    """``multiq worker blame_app:app``, and what its jobs and its events wrote."""

    def __init__(self, folder: Path, url: str, options: str, **environment: str) -> None:
        self.diary = folder / "diary"
        self._log = folder / f"log-{time.monotonic_ns()}"
        variables = {"MULTIQ_URL": url, "WORKER_TEST_DIARY": str(self.diary), "PYTHONPATH": str(HERE), **environment}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "multiq", "worker", "blame_app:app", *options.split()],
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def words(self, word: str) -> list[int]:
        return [number for said, number, _, _ in read_diary(self.diary) if said == word]

    def pids(self) -> set[int]:
        """Return the pids of the processes that ran jobs of this worker."""
        ours = {int(line.rsplit(":", 1)[1].split()[0]) for line in self.log.splitlines() if " working " in line}
        return ours & {pid for _, _, pid, _ in read_diary(self.diary)}

    def began(self) -> set[int]:
        """Return the numbers of the jobs that began in this worker."""
        pids = self.pids()
        return {number for word, number, pid, _ in read_diary(self.diary) if word == "start" and pid in pids}

    def until(self, condition: object, timeout: float = 30) -> None:
        until(condition, timeout=timeout, what=lambda: f"{condition}; the log:\n{self.log}")  # type: ignore[arg-type]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def blamed(folder: Path, url: str, options: str, **environment: str) -> Iterator[Blamed]:
    """A worker that is ended with the block."""
    worker = Blamed(folder, url, options, **environment)
    try:
        yield worker
    except BaseException as exc:
        exc.add_note(f"the worker's log:\n{worker.log}\nthe diary:\n{read_diary(worker.diary)}")
        raise
    finally:
        worker.kill()


# --- reports -----------------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("way", ["deaf", pytest.param("stuck", marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_coroutine", [False, True])
def test_an_overdue_job_is_reported_once(tmp_path: Path, url: str, mode: str, is_coroutine: bool, way: str) -> None:
    # Given a job that ignores its limit, or is stuck in a call that keeps the interpreter; it has two attempts
    handle = (ahang if is_coroutine else hang).enqueue(1, way)
    with blamed(tmp_path, url, f"{mode} --kill-after 0.2") as worker:
        # When its process has to be ended because of this job, twice
        worker.until(lambda: handle.state() is State.BURIED)
        worker.until(lambda: worker.words("ended:buried"))
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0
        # Then each subscriber and each hook was called once for each end
        told = Counter(word for word, _, _, _ in read_diary(worker.diary) if word in TOLD)
        overdue = told.pop("JobOverdue", 0)
        ended = {"ended:retried": 1, "ended:buried": 1}
        assert told == Counter(JobTimedOut=2, JobFailed=2, JobRetried=1, JobBuried=1, **ended)
        assert overdue == 2 if way == "deaf" else overdue <= 2  # a stuck process cannot be reported as overdue
        # And the process that could still be inspected has logged the line at which the job hung
        if way == "deaf":
            assert worker.words("stack-not-shown") == []
        assert handle.peek().reason == "the task ran longer than its timeout of 0.3 s"
        assert worker.words("start") == [1, 1]


# --- blame -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_time_in_which_another_job_holds_the_loop_does_not_count(tmp_path: Path, url: str) -> None:
    first = patient.enqueue(1)
    block.enqueue(2, 2.5)
    with blamed(tmp_path, url, "-p 1 --concurrency 3 --kill-after 0.2") as worker:
        worker.until(lambda: first.state() in {State.GONE, State.BURIED} and 2 in worker.words("end"))
        assert (worker.words("start").count(1), worker.words("end").count(1)) == (1, 1)
        assert (worker.words("start").count(2), worker.words("JobTimedOut")) == (1, [])


def test_the_job_that_holds_the_loop_is_overdue_and_its_neighbours_are_not(tmp_path: Path, url: str) -> None:
    first = patient.enqueue(1)
    second = block_for_ever.enqueue(2)
    with blamed(tmp_path, url, "-p 1 --concurrency 3 --kill-after 1") as worker:
        worker.until(lambda: second.state() is State.BURIED)
        worker.until(lambda: first.state() in {State.GONE, State.BURIED})
        # Then the job that blocked the loop is buried for its limit, and the other job has run again, to its end
        assert second.peek().reason == "the task ran longer than its timeout of 0.5 s"
        assert (worker.words("JobTimedOut"), worker.words("JobBuried")) == ([2], [2])
        assert (worker.words("start").count(1), worker.words("end").count(1)) == (2, 1)


@pytest.mark.long
def test_a_job_whose_callback_holds_the_loop_is_overdue_and_its_neighbours_are_not(tmp_path: Path, url: str) -> None:
    first = patient.enqueue(1)
    second = hold_by_callback.enqueue(2)
    with blamed(tmp_path, url, "-p 1 --concurrency 3 --kill-after 0.5") as worker:
        worker.until(lambda: second.state() is State.BURIED)
        worker.until(lambda: first.state() in {State.GONE, State.BURIED})
        assert second.peek().reason == "the task ran longer than its timeout of 0.5 s"
        assert (worker.words("JobTimedOut"), worker.words("JobBuried")) == ([2], [2])
        assert worker.words("stack-not-shown") == []
        assert (worker.words("start").count(1), worker.words("end").count(1)) == (2, 1)


@pytest.mark.long
def test_a_loop_that_no_running_job_holds_ends_with_its_process_and_no_job_has_timed_out(
    tmp_path: Path, url: str
) -> None:
    # Given a timer of an ended job that blocks the loop, and running jobs with a limit
    first, second = patient.enqueue(1), patient.enqueue(2)
    leave_timer.enqueue(3)
    with blamed(tmp_path, url, "-p 1 --concurrency 3 --kill-after 0.5") as worker:
        # When the loop has been blocked for longer than any of these limits, then these jobs run again, to their end
        worker.until(lambda: first.state() is second.state() is State.GONE)
        assert sorted(worker.words("start")) == [1, 1, 2, 2, 3]
        assert worker.words("JobTimedOut") == worker.words("JobBuried") == []
        # And the log shows the code that blocked the loop
        assert "by a job that has ended" in worker.log
        assert "where_it_hangs" in worker.log


@pytest.mark.long
def test_all_jobs_count_a_crash_if_it_is_unknown_which_holds_the_loop(tmp_path: Path, url: str) -> None:
    # Given a job whose thread posts a callback that blocks the loop, and another job
    first, second = lenient.enqueue(1), hold_by_thread.enqueue(2)
    with blamed(tmp_path, url, "-p 1 --concurrency 3 --kill-after 0.5") as worker:
        # When the loop has been blocked for longer than both limits, then both jobs count a crash, and run again
        worker.until(lambda: first.state() is second.state() is State.GONE)
        assert sorted(worker.words("start")) == [1, 1, 2, 2]
        assert worker.words("JobTimedOut") == worker.words("JobBuried") == []
        assert worker.log.count("crashed") == 2
        assert "where_it_hangs" in worker.log


@pytest.mark.long
def test_plain_jobs_beyond_the_pool_are_left_to_workers_with_room(tmp_path: Path, url: str) -> None:
    # Given more plain jobs beside a loop than there are threads for them
    handles = [rest.enqueue(number, 300) for number in range(45)]
    with blamed(tmp_path, url, "-p 1 --concurrency 50") as first:
        first.until(lambda: len(first.words("start")) == 32)
        # When another worker starts, then it gets the waiting jobs at once
        with blamed(tmp_path, url, "-p 1 --concurrency 50") as second:
            second.until(lambda: len(set(first.words("start"))) == 45, timeout=20)
            begun = first.began()
            assert len(begun) == 32
            # And when the first worker's process is killed, then only the jobs that began in it are blamed
            (child,) = first.pids()
            os.kill(child, signal.SIGKILL)
            second.until(lambda: all(handles[number].peek().crashes for number in begun), timeout=20)
            assert [handle.peek().crashes for number, handle in enumerate(handles) if number not in begun] == [0] * 13


@pytest.mark.long
def test_plain_jobs_beyond_the_pool_do_not_begin_after_a_stop(tmp_path: Path, url: str) -> None:
    rest.enqueue_many([(number, 1.5) for number in range(45)])
    with blamed(tmp_path, url, "-p 1 --concurrency 50") as worker:
        worker.until(lambda: len(worker.words("start")) == 32)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0
        assert (len(worker.words("start")), len(worker.words("end"))) == (32, 32)
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved) == (13, 0)
    assert {info.attempt for info in app.queue().jobs("ready")} == {0}


@pytest.fixture
def server_url(tmp_path: Path) -> Iterator[str]:
    """Redis, because a process that is stopped in a transaction would keep an SQLite file locked."""
    with STORES["redis"](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_child_that_was_stopped_begins_no_job_whose_lease_has_ended(
    server_url: str, tmp_path: Path, mode: str
) -> None:
    # Given a child that has prefetched several jobs, and is stopped in the first one
    step.enqueue_many([(number,) for number in range(300)])
    with blamed(tmp_path, server_url, mode, BLAME_STOPS="1") as stopped:
        stopped.until(lambda: len(stopped.words("end")) == 300)
        app.queue().pause(60)
        stop_us.enqueue(1000)
        step.enqueue_many([(number,) for number in range(1001, 1040)])
        app.queue().resume()
        stopped.until(lambda: 1000 in stopped.words("start"))
        (child,) = stopped.pids()
        time.sleep(2.5)
        # When the jobs' leases have ended, another worker has done all of them, and the child is continued
        with blamed(tmp_path, server_url, "-p 1") as other:

            def is_idle() -> bool:
                stats = app.queue().stats()
                return (stats.ready, stats.reserved) == (0, 0)

            other.until(lambda: 1000 in other.words("end") and is_idle())
            continued_at = time.monotonic_ns()
            os.kill(child, signal.SIGCONT)
            step.enqueue(2000)
            other.until(lambda: stopped.words("end").count(1000) == 2 and 2000 in other.words("end"))
            time.sleep(0.5)
            # Then it begins none of these jobs, except one that its second thread was about to begin when the process
            # was stopped
            later = [line for line in read_diary(stopped.diary) if line[2] == child and line[3] > continued_at]
            begun = {number for word, number, _, _ in later if word == "start"} - {2000}
            assert len(begun) <= ("-t" in mode)


# --- interrupts --------------------------------------------------------------------------------------------


@pytest.mark.one_row
@pytest.mark.parametrize("mode", ["-p 1", "-p 0"])
@pytest.mark.parametrize("way", ["sleep", "socket"])
def test_with_one_thread_a_call_that_blocks_is_interrupted(tmp_path: Path, url: str, mode: str, way: str) -> None:
    # Given a worker that waits for long before it ends an overdue job's process
    handle = wait_in.enqueue(1, way)
    with blamed(tmp_path, url, f"{mode} --kill-after 25") as worker:
        # When the job's time is over, then its call is interrupted, and it may clean up
        worker.until(lambda: handle.state() is State.BURIED, timeout=20)
        assert worker.words("tidied") == [1]
        assert handle.peek().reason == "the task ran longer than its timeout of 0.4 s"
        # And its process continues to work
        step.enqueue(2)
        worker.until(lambda: 2 in worker.words("end"))
        assert len(worker.pids()) == 1
