"""Weighted and round robin workers on real stores: the share of each queue, counted in jobs that ran."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from shell import Shell
from stores import NAMES, STORES

import multiq
from multiq.settings.model import Settings, WorkerSettings

if TYPE_CHECKING:
    from pathlib import Path

JOBS = 2000  # jobs that run; each queue has as many


def ran(app: multiq.App, queues: Any, policy: str | None, jobs: int = JOBS, **options: Any) -> Counter[str]:
    """How many jobs of each queue are among the first ones that a worker runs."""
    counts: Counter[str] = Counter()

    @app.task(name="count")
    def count(queue: str) -> None:
        counts[queue] += 1

    for queue in ("high", "low"):
        count.options(queue=queue).enqueue_many([(queue,)] * jobs)
    assert multiq.Worker(app, queues=queues, policy=policy, max_jobs=jobs, **options).run() == 0
    assert counts.total() == jobs
    return counts


@pytest.mark.one_row
@pytest.mark.parametrize("prefetch", [1, 20])
@pytest.mark.parametrize("store", [name for name in NAMES if name in {"sqlite", "redis"}])
def test_a_queue_of_weight_3_gets_three_times_the_jobs_of_one_of_weight_1(
    store: str, prefetch: int, tmp_path: Path
) -> None:
    with STORES[store](tmp_path) as url, multiq.App(f"{url}") as app:
        counts = ran(app, {"high": 3, "low": 1}, "weighted", prefetch=prefetch)
    assert 0.72 < counts["high"] / JOBS < 0.78


@pytest.mark.parametrize("store", NAMES)
@pytest.mark.parametrize("mode", [{}, {"threads": 4}, {"concurrency": 8}], ids=["inline", "threads", "concurrency"])
def test_round_robin_gives_every_queue_as_much(store: str, mode: dict[str, Any], tmp_path: Path) -> None:
    with STORES[store](tmp_path) as url, multiq.App(f"{url}") as app:
        counts = ran(app, ["high", "low"], "round-robin", jobs=400, prefetch=10, **mode)
    assert 0.45 < counts["high"] / 400 < 0.55


def test_without_a_policy_the_order_is_strict(tmp_path: Path) -> None:
    with multiq.App(f"sqlite:///{tmp_path}/jobs.db") as app:
        assert ran(app, ["low", "high"], None) == {"low": JOBS}


def test_settings_may_name_queues_with_weights_and_a_policy(tmp_path: Path) -> None:
    worker = WorkerSettings(queues={"high": 3, "low": 1}, policy="weighted", prefetch=5)
    with multiq.App(settings=Settings(url=f"sqlite:///{tmp_path}/jobs.db", worker=worker)) as app:
        counts = ran(app, None, None)
    assert 0.72 < counts["high"] / JOBS < 0.78


def test_the_command_line_takes_weights_and_a_policy(tmp_path: Path) -> None:
    # Given a shop with both queues full
    shell = Shell(tmp_path)
    with shell.app as app:
        task = app.task(name="mail.reset")(lambda address: None)
        for queue in ("high", "low"):
            task.options(queue=queue).enqueue_many([(queue,)] * 100)
    # When a hundred jobs are run by weight
    weighted = ["-q", "high=3,low=1", "--policy", "weighted", "--prefetch", "1"]
    done = shell.run("worker", "shop.tasks:app", *weighted, "--max-jobs", "100")
    # Then three of four jobs are from the queue of weight 3
    assert done.code == 0
    assert abs(done.out.count("sent to high") - 75) <= 2


@pytest.mark.one_row
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-q", "high=3,low"], "choose policy='weighted'"),
        (["-q", "high=x", "--policy", "weighted"], "queue 'high' must be a whole number from 1 to 1000, got 'x'"),
        (["--policy", "fair"], "'fair' is not one of 'strict', 'weighted', 'round-robin'"),
    ],
)
def test_the_command_line_reports_bad_ones_with_the_way_out(options: list[str], says: str, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    with shell.app:
        told = shell.run("worker", "shop.tasks:app", *options, "--check")
    assert told.code == 2
    assert says in told.err
