"""Short forms of ``settle_kills.py``, whose docstring lists the checks."""

from __future__ import annotations

import pytest
from soak import settle_kills


@pytest.mark.long
def test_redis_log_that_ends_at_any_byte_has_all_of_a_verdict_or_nothing() -> None:
    faults, counts = settle_kills.run("redis", 0, seed=1, torn=5)
    assert faults == []
    assert counts["units done"] > 5
    assert counts["torn logs"] == 5


@pytest.mark.long
@pytest.mark.parametrize("backend", ["redis", "mysql", "sqlite"])
def test_verdict_and_what_it_stores_are_one_step_though_the_server_is_killed(backend: str) -> None:
    faults, counts = settle_kills.run(backend, 10, seed=10, torn=20)
    assert faults == []
    assert counts["units done"] > 10


@pytest.mark.long
def test_failover_loses_a_verdict_and_what_it_stores_together() -> None:
    faults, counts = settle_kills.run("sentinel", 3, seed=2)
    assert faults == []
    assert counts["units done"] > 10
