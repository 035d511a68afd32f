"""Flows that are cancelled while their last jobs end, by real workers: what callers saw, and what the jobs wrote."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from flows_app import QUEUES, app, left, right
from processes import until
from soak.flow_losses import Workers
from stores import NAMES, PAIRS, STORES

import multiq

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
    [("sqlite", 40), *(pytest.param(name, 300, marks=pytest.mark.long) for name in HOLDING)],
    indirect=["url"],
)
def test_a_flow_that_was_seen_as_ended_stays_as_it_was_seen(url: str, number: int, tmp_path: Path) -> None:
    chance = random.Random(number)
    workers = Workers(url, tmp_path, 2, dying_every=0)
    seen: list[tuple[int, multiq.flows.FlowHandle, str]] = []
    longest = 0.03  # seconds from a flow's enqueue to its cancel
    try:
        until(lambda: _run_one(number) == "finished")
        # Given chains of two jobs that take milliseconds
        for at in range(number):
            flow = multiq.chain(left.s(at, 0), right.s(at, 1)).enqueue()
            # When each is cancelled at some moment of its life
            time.sleep(chance.uniform(0, longest))
            flow.cancel()
            now = flow.info().state
            seen.append((at, flow, now))
            # a busy machine takes longer for a chain, and then the cancels come later
            longest = min(longest * 1.1, 1.0) if now == "cancelled" else longest / 1.1
        until(lambda: all(_is_empty(queue) for queue in QUEUES))
    finally:
        workers.end()
    ended = {line.split()[1] for line in (tmp_path / "diary").read_text().splitlines() if line.startswith("end ")}
    states = [state for _, _, state in seen]
    # Then the moments were so mixed that both ends were seen
    assert {"cancelled", "finished"} == set(states)
    for at, flow, state in seen:
        # And no flow has changed its end, also not in a list
        assert (at, flow.info().state) == (at, state)
        # And each flow that finished has run both jobs
        assert state == "cancelled" or {f"{at}.0", f"{at}.1"} <= ended
    listed = {info.id: info.state for info in app.flows.list()}
    assert [listed[flow.id] for _, flow, _ in seen] == states


def _run_one(number: int) -> str:
    """Run a chain to its end, because the workers need time to start."""
    flow = multiq.chain(left.s(number, 0), right.s(number, 1)).enqueue()
    until(lambda: flow.info().state != "open")
    return flow.info().state


def _is_empty(queue: str) -> bool:
    stats = app.backend.stats(queue)
    return not ((stats.ready or 0) + (stats.delayed or 0) + (stats.reserved or 0) + (stats.held or 0))
