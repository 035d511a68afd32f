"""A process that ends in any way loses none of its other jobs, and counts no attempt of theirs. In every mode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from processes import until, worker
from stores import NAMES, STORES
from worker_app import app, aquick, brief, leave, nap, quick, read_diary

from multiq import State
from multiq.backend import GiveBack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from processes import WorkerProcess

WAYS = ["exit 0", "exit 12", "exit 13", "exit 14", "exit 130", "exec", "exit of C"]
"""Ends of a process that look orderly: exit codes of workers that end in order, and exits in other code."""
MODES = ["processes=1", "processes=1, threads=2", "processes=1, concurrency=3"]


def words(process: WorkerProcess, word: str) -> list[int]:
    return [number for said, number, _, _ in read_diary(process.diary) if said == word]


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The store that the test names; SQLite for a test that names no store."""
    name = getattr(request, "param", "sqlite")
    if name not in NAMES:
        pytest.skip(f"{name} is not installed")
    with STORES[name](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        *(("sqlite", mode) for mode in MODES),
        pytest.param("redis", MODES[1], marks=pytest.mark.long),
        pytest.param("mysql", MODES[0], marks=pytest.mark.long),
    ],
    indirect=["url"],
)
def test_a_job_that_ends_its_process_in_any_way_counts_a_crash_of_this_job_only(
    tmp_path: Path, url: str, mode: str
) -> None:
    # Given jobs that end their process, each among others whose leases would last for ten minutes.
    # With threads, the process may end during a reserve. Jobs in the unread reply are due when their leases end.
    innocent = quick.options(ttr=600, max_crashes=1) if mode == MODES[0] else quick.options(ttr=3, max_crashes=3)
    with worker(tmp_path, url, mode) as process:
        for at, way in enumerate(WAYS):
            first = 1000 * at
            app.queue().pause(60)
            innocent.enqueue_many([(first + number,) for number in range(30)])
            guilty = leave.enqueue(first + 500, way)
            innocent.enqueue_many([(first + number,) for number in range(30, 60)])
            app.queue().resume()
            # Then each such job runs once and is buried, and all other jobs run at once
            expected = set(range(first, first + 60))
            until(
                lambda expected=expected: expected <= set(words(process, "end")),  # type: ignore[misc]
                timeout=20,
                what=lambda way=way: f"all run beside {way!r}: {app.queue().stats()}",  # type: ignore[misc]
            )
            until(lambda guilty=guilty: guilty.state() is State.BURIED, timeout=20)  # type: ignore[misc]
            assert words(process, "start").count(first + 500) == 1
            assert "poison: attempt 2 did not begin, as 1 before it" in str(guilty.peek().reason)
        until(lambda: app.queue().stats().reserved == 0, timeout=20)
        assert app.queue().stats().buried == len(WAYS)


@pytest.mark.long
@pytest.mark.parametrize("url", NAMES, indirect=True)
def test_a_job_that_was_only_given_back_is_run_however_often_that_was(tmp_path: Path, url: str) -> None:
    # Given a job that stopped workers have given back more often than its number of attempts
    handle = quick.options(max_attempts=2).enqueue(7)
    with app.backend.consumer(["default"]) as consumer:
        for _ in range(4):
            (lease,) = consumer.reserve(1, 5)
            assert consumer.settle([GiveBack(lease)]) == [None]
    # Then the next worker runs this job
    with worker(tmp_path, url, "processes=1, stop_when_empty=True") as process:
        assert process.wait(30) == 0, process.log
        assert words(process, "end") == [7], handle.peek()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_stop_when_empty_ends_when_it_is_empty_and_not_when_a_job_ends_its_process(
    tmp_path: Path, url: str, mode: str
) -> None:
    quick.options(ttr=600).enqueue(0)
    leave.enqueue(1, "exit 0")
    quick.options(ttr=600).enqueue_many([(number,) for number in range(2, 200)])
    with worker(tmp_path, url, f"stop_when_empty=True, {mode}") as process:
        assert process.wait(30) == 0, process.log
        assert set(words(process, "end")) == set(range(200)) - {1}
    stats = app.queue().stats()
    assert (stats.ready, stats.reserved, stats.buried) == (0, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "way", ["exit 13", *(pytest.param(way, marks=pytest.mark.long) for way in ("exit 14", "exit 130"))]
)
def test_a_job_that_ends_its_process_over_and_over_is_slowed_down_whatever_the_exit_code(
    tmp_path: Path, url: str, way: str
) -> None:
    leave.options(max_crashes=0).enqueue(1, way)
    with worker(tmp_path, url, "processes=1") as process:
        until(lambda: words(process, "start"))
        time.sleep(3)
        assert len(words(process, "start")) <= 8  # starts at 0, 0, 0.1, 0.3, 0.7, 1.5 and 2.5 s


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES[1:])
def test_jobs_that_wait_beside_one_that_kills_its_process_are_run(tmp_path: Path, url: str, mode: str) -> None:
    # Given a worker whose children are killed by their jobs, while leases come and go
    with worker(tmp_path, url, mode.replace("processes=1", "processes=2")) as process:
        for at in range(10):
            first = 1000 * at
            app.queue().pause(60)
            for number in range(first, first + 60, 10):
                (aquick if number % 20 else quick).enqueue_many([(number + more,) for more in range(10)])
            leave.options(max_crashes=1).enqueue(first + 500, "kill")
            quick.enqueue_many([(number,) for number in range(first + 60, first + 100)])
            app.queue().resume()
            until(lambda first=first: first + 500 in words(process, "start"))  # type: ignore[misc]
        # Then none of the jobs is lost
        expected = {1000 * at + number for at in range(10) for number in range(100)}
        until(
            lambda: expected <= set(words(process, "end")),
            timeout=20,
            what=lambda: f"all run, and {sorted(expected - set(words(process, 'end')))[:5]} too: {app.queue().stats()}",
        )


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param(MODES[0], marks=pytest.mark.long), *MODES[1:]])
def test_a_task_without_a_time_limit_is_not_ended_for_that_of_a_job_that_has_ended(
    tmp_path: Path, url: str, mode: str
) -> None:
    # Given jobs that have a time limit and end in time
    with worker(tmp_path, url, f"{mode}, kill_after=0.1") as process:
        for turn in range(2):
            brief.enqueue_many([(100 * turn + number,) for number in range(20)])
            until(lambda turn=turn: len(words(process, "end")) >= 20 * (turn + 1) + turn)  # type: ignore[misc]
            # When a job without a limit runs after them, for longer than their limit
            nap.enqueue(1000 + turn, 2.0)
            until(lambda turn=turn: 1000 + turn in words(process, "end"))  # type: ignore[misc]
        # Then the job without a limit runs to its end, once
        assert words(process, "start").count(1000) == words(process, "start").count(1001) == 1
        assert len({pid for _, _, pid, _ in read_diary(process.diary)}) == 1, process.log
