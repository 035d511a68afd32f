"""Hooks that raise a ``BaseException`` change no outcome: no thread ends, no job is repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from modes import in_each_mode, worker_of
from rude_app import KINDS, app, backs_off, fails, retries, succeeds, wrapped
from worker_app import read_diary

from multiq import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 20.0  # after which a call counts as hung


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app.connect(url)
    yield url
    app.close()


def run(mode: str, tmp_path: Path, url: str) -> list[int]:
    """Run a worker. Returns how often it has begun each job. One process must run all of them and exit with 0."""
    with worker_of("rude_app", tmp_path, url, f"{mode}, stop_when_empty=True") as process:
        assert process.wait(SECONDS) == 0
    diary = read_diary(process.diary)
    assert len({pid for _, _, pid, _ in diary}) == 1
    return sorted(number for _, number, _, _ in diary)


@in_each_mode
def test_base_exceptions_of_a_task_s_own_hooks_change_no_outcome(mode: str, tmp_path: Path, url: str) -> None:
    # Given jobs that succeed, fail and are retried, each with a hook that raises every kind of error
    each = len(KINDS)
    good = [task.enqueue(number) for task in succeeds for number in range(each)]
    bad = [task.enqueue(100 + number) for task in fails for number in range(each)]
    again = [task.enqueue(200 + number) for task in retries for number in range(each)]
    late = [task.enqueue(300 + number) for task in backs_off for number in range(each)]
    # When a worker runs them
    begun = run(mode, tmp_path, url)
    # Then each job has run as often, and has the same verdict, as without the hooks
    assert [number for number in begun if number < 300] == sorted(
        base + number for base, times in ((0, 2), (100, 2), (200, 4)) for number in [*range(each)] * times
    )
    assert {handle.state() for handle in good} == {State.GONE}
    assert {handle.state() for handle in bad + again} == {State.BURIED}
    assert {handle.peek().reason for handle in bad + again} == {
        f"ValueError: {base + number}" for base in (100, 200) for number in range(each)
    }
    assert {number for number in begun if number >= 300} == {300 + number for number in range(each)}
    assert {handle.state() for handle in late} <= {State.DELAYED, State.READY}  # the default backoff has jitter


@in_each_mode
def test_base_exceptions_of_middleware_are_job_failures(
    mode: str, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given jobs whose middleware raises every kind of error, before and after them
    monkeypatch.setenv("RUDE_ROLE", "middleware")
    handles = [task.enqueue(number) for task in wrapped for number in range(len(KINDS))]
    begin = [number for task in wrapped if "after" in task.name for number in range(len(KINDS))]
    # When a worker runs them
    begun = run(mode, tmp_path, url)
    # Then each has failed, once
    assert begun == sorted(begin)
    assert {handle.state() for handle in handles} == {State.BURIED}
    assert {str(handle.peek().reason) for handle in handles} == {kind.__name__ for kind in KINDS}


@pytest.mark.one_row
@in_each_mode
@pytest.mark.parametrize("role", ["subscriber", "coroutine subscriber", "before_fetch"])
def test_base_exceptions_of_subscribers_and_before_fetch_change_no_outcome(
    role: str, mode: str, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an app whose subscribers, or before_fetch hooks, raise every kind of error whenever they are called
    monkeypatch.setenv("RUDE_ROLE", role)
    good = [task.enqueue(number) for task in succeeds for number in range(4)]
    bad = [task.enqueue(100 + number) for task in retries for number in range(4)]
    # When a worker runs its jobs
    begun = run(mode, tmp_path, url)
    # Then the jobs run as often as without them
    assert begun == sorted([*range(4)] * 2 + [*range(100, 104)] * 4)
    assert {handle.state() for handle in good} == {State.GONE}
    assert {handle.state() for handle in bad} == {State.BURIED}
