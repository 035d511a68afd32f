"""When a kept result expires, on each store: for a caller that asks for it, and for the jobs of its flow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from stores import NAMES, STORES

import multiq

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEEP = 1.0  # seconds
SLACK = 0.1  # seconds: an expiry is rounded up to the backend's resolution
app = multiq.App()


@app.task(keep=KEEP)
def make(value: int) -> int:
    return value


@app.task(keep=KEEP)
def double(value: int) -> int:
    return 2 * value


def work() -> None:
    multiq.Worker(app, stop_when_empty=True).run()


@pytest.fixture(
    params=[
        "sqlite",
        *(pytest.param(name, marks=pytest.mark.long) for name in NAMES if name not in {"sqlite", "beanstalk"}),
    ]
)
def _store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    with STORES[request.param](tmp_path) as url:
        app.connect(url)
        yield
        app.close()


@pytest.mark.usefixtures("_store")
def test_result_is_there_for_as_long_as_it_is_kept_and_unknown_after_that() -> None:
    in_time = 0
    for _ in range(20):
        # Given a job that is done
        handle = make.enqueue(7)
        before = time.monotonic()
        work()
        after = time.monotonic()
        # Then its result is there shortly before it expires; a machine may be too busy to ask in time
        time.sleep(max(0.0, before + 0.9 * KEEP - time.monotonic()))
        outcome = handle.outcome()
        if time.monotonic() < before + KEEP:
            in_time += 1
            assert outcome is not None
            assert outcome.value == 7
        # And the result is unknown when its time is over
        time.sleep(max(0.0, after + KEEP + SLACK - time.monotonic()))
        with pytest.raises(multiq.OutcomeUnknown):
            handle.result(timeout=0)
        if in_time:
            return
    pytest.fail("the machine was too busy to ask in time")


@pytest.mark.long
@pytest.mark.usefixtures("_store")
def test_result_for_the_next_job_of_a_flow_outlives_the_keep_of_its_task() -> None:
    # Given a chain whose second job begins when the result of the first job would have expired
    flow = multiq.chain(make.s(7), double.options(delay=2 * KEEP, keep=60).s()).enqueue()
    while flow.info().state == "open":
        work()
        time.sleep(0.01)
    # Then the second job got the result
    assert flow.last().result(timeout=0) == 14
