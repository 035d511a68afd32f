"""The shared metrics: a worker's processes count, and a reader gets the sums."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from multiq.backend import Lease
from multiq.envelope import Envelope, FlowPart
from multiq.events import BackendDown, Event, Events, JobBuried, JobDone, JobFailed, JobLost, JobRetried, JobStarted
from multiq.job import JobContext
from multiq.worker.monitoring.metrics import BOUNDS, Metrics, TaskCounts


def job(task: str | None, *, age: float = 0.0, attempt: int = 1, kicks: int = 0, **fields: Any) -> JobContext:
    lease = Lease("q", "1", "t", b"", 1, 60.0, attempt, 0, kicks, age)
    envelope = Envelope(multiq=1, task=task or "", **fields) if fields else None
    return JobContext(task=task, lease=lease, envelope=envelope)


def of(metrics: Metrics, task: str) -> TaskCounts:
    return next(counts for counts in metrics.read().tasks if counts.task == task)


def emit(metrics: Metrics, process: int, *happened: Event) -> None:
    events = Events()
    metrics.count(events, process)
    for event in happened:
        events.emit(event)


def test_counts_of_all_processes_add_up() -> None:
    metrics = Metrics(["a", "b"], 2)
    emit(metrics, 0, JobDone(job=job("a"), seconds=0.5), JobLost(queue="q", job_id="1"))
    emit(metrics, 1, JobDone(job=job("a"), seconds=0.25), JobDone(job=job("b"), seconds=1.0))
    emit(
        metrics,
        1,
        JobFailed(job=job("a"), seconds=2.0, error=ValueError()),
        JobRetried(job=job("a"), delay=1, reason=""),
    )
    emit(metrics, 0, BackendDown(worker="w", error=ValueError(), retry_in=1.0))
    assert of(metrics, "a").outcomes == {
        "done": 2,
        "retried": 1,
        "buried": 0,
        "snoozed": 0,
        "expired": 0,
        "cancelled": 0,
    }
    assert (of(metrics, "a").seconds, sum(of(metrics, "a").buckets)) == (2.75, 3)
    assert of(metrics, "b").outcomes["done"] == 1
    assert (metrics.read().lost, metrics.read().backend_errors, metrics.read().crashed) == (1, 1, 0)


@pytest.mark.parametrize("task", [None, "unknown", "other"])
def test_a_task_that_the_app_does_not_have_makes_no_figure_of_its_own(task: str | None) -> None:
    metrics = Metrics(["a"], 1)
    emit(metrics, 0, JobBuried(job=job(task), reason=""))
    assert [counts.task for counts in metrics.read().tasks] == ["a", "other"]
    assert of(metrics, "other").outcomes["buried"] == 1


@pytest.mark.parametrize(("seconds", "place"), [(0.0, 0), (0.001, 0), (0.0011, 1), (3600.0, 13), (3600.1, 14)])
def test_a_bound_is_part_of_its_bucket(seconds: float, place: int) -> None:
    metrics = Metrics(["a"], 1)
    emit(metrics, 0, JobDone(job=job("a"), seconds=seconds))
    assert of(metrics, "a").buckets.index(1.0) == place
    assert len(of(metrics, "a").buckets) == len(BOUNDS) + 1


def test_no_count_is_lost_between_threads() -> None:
    metrics, events = Metrics(["a"], 1), Events()
    metrics.count(events, 0)
    done = JobDone(job=job("a"), seconds=1.0)

    def work() -> None:
        for _ in range(2000):
            events.emit(done)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (of(metrics, "a").outcomes["done"], of(metrics, "a").seconds) == (8000, 8000.0)


def test_counts_of_a_dead_process_stay() -> None:
    metrics = Metrics(["a"], 1)
    pid = os.fork()
    if not pid:
        emit(metrics, 0, JobDone(job=job("a"), seconds=1.0))
        os._exit(0)
    os.waitpid(pid, 0)
    assert of(metrics, "a").outcomes["done"] == 1


def test_a_wait_is_the_age_at_the_first_start() -> None:
    metrics = Metrics(["a"], 1)
    emit(metrics, 0, JobStarted(job=job("a", age=0.4)), JobStarted(job=job("a", age=20.0)))
    counts = of(metrics, "a")
    assert (counts.wait_seconds, sum(counts.wait_buckets)) == (20.4, 2)
    assert [counts.wait_buckets[BOUNDS.index(bound)] for bound in (0.5, 30.0)] == [1, 1]
    assert (counts.seconds, sum(counts.buckets), metrics.read().late_seconds) == (0, 0, 0)


def test_a_wait_of_a_schedule_s_job_counts_from_its_due_time() -> None:
    metrics = Metrics(["a"], 1)
    emit(metrics, 0, JobStarted(job=job("a", age=20.0, headers={"multiq-delay": "19.5"})))
    assert of(metrics, "a").wait_seconds == metrics.read().late_seconds == 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"attempt": 2},
        {"kicks": 1},
        {"flow": FlowPart(id="1")},
        *({"headers": {"multiq-delay": text}} for text in ("soon", "-inf", "")),
    ],
    ids=str,
)
def test_a_start_whose_due_time_is_unknown_is_no_wait(fields: dict[str, Any]) -> None:
    metrics = Metrics(["a"], 1)
    emit(metrics, 0, JobStarted(job=job("a", age=20.0, **fields)))
    assert (sum(of(metrics, "a").wait_buckets), metrics.read().late_seconds) == (0, 0)
