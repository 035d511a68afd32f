"""Rates while the store's clock jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from soak.walked_stores import BACKENDS, stores

from multiq.backend import Ack, Gate, NewJob, Terms
from multiq.backend.limits import Quota
from multiq.ids import new_id

if TYPE_CHECKING:
    from multiq.backend import Consumer

_GATE = Gate("calls", "")


def _started(consumer: Consumer, asked: int = 10) -> int:
    leases = consumer.reserve(asked, 0)
    consumer.settle([Ack(lease) for lease in leases])
    return len(leases)


@pytest.mark.one_row
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_rate_goes_on_after_the_clock_was_set_back(name: str, burst: int) -> None:
    with stores(name) as store:
        clock = store.clock()
        clock.advance(1_000_000_000)
        backend = store.open(clock)
        backend.limits("q", {"calls": Quota(rate=5, per=1, burst=burst)})
        with backend.consumer(["q"]) as consumer:
            clock.advance(3600)
            backend.enqueue("q", [NewJob(b"", new_id(), terms=Terms(gates=(_GATE,)))])
            assert _started(consumer) == 1
            clock.advance(-3600)
            backend.enqueue("q", [NewJob(b"", new_id(), terms=Terms(gates=(_GATE,))) for _ in range(30)])
            started = [_started(consumer)]
            for _ in range(20):
                clock.advance(0.2)
                started.append(_started(consumer))
            # one job may start at once; one more with each interval; never more than the rate admits
            assert 19 <= sum(started) <= 20 + burst
            for first in range(len(started)):
                assert all(sum(started[first:last]) <= burst + last - first for last in range(first + 1, len(started)))


# A Redis server reads its clock for one script after the other, so there the clock of a script is never behind.
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "redis"])
def test_a_rate_is_kept_while_the_clocks_of_two_transactions_differ_by_less_than_a_second(name: str) -> None:
    with stores(name) as store:
        clock = store.clock()
        clock.advance(1_000_000_000)
        backend = store.open(clock)
        backend.limits("q", {"calls": Quota(rate=5, per=1)})
        backend.enqueue("q", [NewJob(b"", new_id(), terms=Terms(gates=(_GATE,))) for _ in range(60)])
        with backend.consumer(["q"]) as consumer:
            started = 0
            for step in range(100):
                clock.advance(0.4 if step % 2 else -0.3)
                started += _started(consumer)
            assert 20 <= started <= 27  # 5 seconds
