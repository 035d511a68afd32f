"""Chains and batches around kills of worker processes, on each store that holds jobs: ``tests/soak/flow_losses.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flows_app import app
from soak import flow_losses
from stores import NAMES, PAIRS, STORES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLDING = [*(name for name in NAMES if name != "beanstalk"), *PAIRS]  # beanstalkd alone holds no jobs


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield url
        app.close()


@pytest.mark.parametrize(
    ("url", "number"),
    [("sqlite", 20), *(pytest.param(name, 150, marks=pytest.mark.long) for name in HOLDING)],
    indirect=["url"],
)
def test_each_step_of_a_chain_runs_after_the_one_before_it_though_workers_are_killed(
    url: str, number: int, tmp_path: Path
) -> None:
    assert flow_losses.run(url, tmp_path, "chains", number, seed=number) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("url", "number"),
    [("sqlite", 60), *(pytest.param(name, 400, marks=pytest.mark.long) for name in HOLDING)],
    indirect=["url"],
)
def test_the_call_after_a_batch_runs_once_though_members_die_before_their_ack(
    url: str, number: int, tmp_path: Path
) -> None:
    assert flow_losses.run(url, tmp_path, "batch", number, seed=number) == []
