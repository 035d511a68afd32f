"""Short forms of the Redis soaks; each script's docstring has the command of the full run."""

from __future__ import annotations

import pytest
from soak import redis_failovers, redis_lost_replies


@pytest.mark.long
def test_verdicts_around_a_leases_end_are_answered_as_they_counted() -> None:
    assert redis_lost_replies.soak(cases=100, threads=12, seed=20261122) == 0


@pytest.mark.long
def test_failovers_of_a_cluster_lose_nothing_that_was_to_be_kept() -> None:
    assert redis_failovers.main("cluster", planned=3, behind_a_pause=0, unplanned=1) == 0
