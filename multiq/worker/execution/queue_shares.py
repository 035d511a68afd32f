"""Fair share: orders the queues so that each queue gets its share of the jobs."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from multiq.backend import Consumer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from multiq.backend import Lease, Verdict
    from multiq.errors import LeaseLost


def fair_share(consumer: Consumer, shares: Mapping[str, int] | None) -> Consumer:
    """Return a consumer that reserves by *shares*. Without shares, it returns *consumer*, which uses strict order."""
    return consumer if shares is None else FairShareConsumer(consumer, FairShare(shares))


class FairShare:
    """Orders the queues so that each queue with jobs delivers jobs in proportion to its weight.

    Each job is charged to its queue as 1 / weight. The queue with the lowest charge is asked first. So the weights
    divide the number of jobs, and not the time that the jobs take. The error of a share is at most one batch. While a
    queue is empty, the other queues get its share. The queue does not get this share back later.

    The charges begin with random values (*rng*). Without random values, many workers that take one job each would never
    take a job of the last queue.
    """

    def __init__(self, weights: Mapping[str, int], rng: random.Random | None = None) -> None:
        self._weights = dict(weights)
        self._rng = rng or random.SystemRandom()  # a seeded generator would give all forked children the same numbers
        self._charged: dict[str, float] = {}
        self._reset()

    def order(self) -> tuple[str, ...]:
        return tuple(sorted(self._charged, key=self._charged.__getitem__))

    def charge(self, leases: Sequence[Lease], limit: int) -> None:
        """Charge the queues for jobs that were reserved in the current order. *limit* jobs were requested."""
        if len(leases) < limit:  # all queues are empty, so the charges start again
            self._reset()
            return
        order = self.order()
        given = Counter(lease.queue for lease in leases)
        for queue, count in given.items():
            self._charged[queue] += count / self._weights[queue]
        last = max(order.index(queue) for queue in given)
        least = min(self._charged[queue] for queue in order[last:])
        for queue in order[:last]:  # these queues had no jobs left
            self._charged[queue] = max(self._charged[queue], least)

    def _reset(self) -> None:
        # Start in the state that a long run has at a random moment. Each queue is next with a probability proportional
        # to its weight. Every other queue is at a random point between two of its jobs.
        (first,) = self._rng.choices(list(self._weights), list(self._weights.values()))
        self._charged = {queue: self._rng.uniform(0, 1 / weight) for queue, weight in self._weights.items()}
        self._charged[first] = 0.0


class FairShareConsumer(Consumer):
    def __init__(self, inner: Consumer, shares: FairShare) -> None:
        self.queues = inner.queues
        self._inner = inner
        self._shares = shares

    @property
    def asked_at(self) -> float:  # type: ignore[override]
        return self._inner.asked_at

    @property
    def most_gated(self) -> int | None:
        return self._inner.most_gated

    @most_gated.setter
    def most_gated(self, value: int | None) -> None:
        self._inner.most_gated = value

    @property
    def sees_all(self) -> bool:  # type: ignore[override]
        return self._inner.sees_all

    def reserve(self, limit: int, timeout: float, queues: Sequence[str] | None = None) -> list[Lease]:
        return self.exchange((), limit, timeout, queues)[1]

    def settle(self, verdicts: Sequence[Verdict]) -> list[LeaseLost | None]:
        return self._inner.settle(verdicts)

    def exchange(
        self, verdicts: Sequence[Verdict], limit: int, timeout: float, queues: Sequence[str] | None = None
    ) -> tuple[list[LeaseLost | None], list[Lease]]:
        lost, leases = self._inner.exchange(verdicts, limit, timeout, queues or self._shares.order())
        if leases:
            self._shares.charge(leases, limit)
        return lost, leases

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()
