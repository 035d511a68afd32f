"""Fair share: the order in which a worker asks its queues, so that each queue gives its share of the jobs."""

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
    """A consumer that reserves from its queues by *shares*. Without shares: *consumer* itself, in strict order."""
    return consumer if shares is None else FairShareConsumer(consumer, FairShare(shares))


class FairShare:
    """The order in which to ask queues, so that each gives jobs in proportion to its weight while it has any.

    A job that a queue gave is charged to it as 1 / weight, and the queue that was charged least is asked first. So the
    shares are shares of jobs, not of batches, and are exact to within one batch. A queue without jobs leaves its share
    to the others, and does not get it back later. The charges begin with random values (*rng*). Otherwise, if each of
    many workers took only one job, none of them would ever take a job of the last queue.
    """

    def __init__(self, weights: Mapping[str, int], rng: random.Random | None = None) -> None:
        self._weights = dict(weights)
        self._rng = rng or random.SystemRandom()  # seeded, it would give the same numbers in all forked children
        self._charged: dict[str, float] = {}
        self._reset()

    def order(self) -> tuple[str, ...]:
        """The queues, in the order to ask them."""
        return tuple(sorted(self._charged, key=self._charged.__getitem__))

    def charge(self, leases: Sequence[Lease], limit: int) -> None:
        """Charge the queues for jobs that were reserved in the present order; *limit*: how many were asked for."""
        if len(leases) < limit:  # all queues are empty: start afresh
            self._reset()
            return
        order = self.order()
        given = Counter(lease.queue for lease in leases)
        for queue, count in given.items():
            self._charged[queue] += count / self._weights[queue]
        last = max(order.index(queue) for queue in given)
        least = min(self._charged[queue] for queue in order[last:])
        for queue in order[:last]:  # those had no more jobs
            self._charged[queue] = max(self._charged[queue], least)

    def _reset(self) -> None:
        # Begin as at a random moment of a long run: each queue's chance to be the next is proportional to its weight,
        # and every other queue is at a random point between two of its jobs.
        (first,) = self._rng.choices(list(self._weights), list(self._weights.values()))
        self._charged = {queue: self._rng.uniform(0, 1 / weight) for queue, weight in self._weights.items()}
        self._charged[first] = 0.0


class FairShareConsumer(Consumer):
    """A driver's consumer that reserves from its queues by their shares."""

    def __init__(self, inner: Consumer, shares: FairShare) -> None:
        self.queues = inner.queues
        self._inner = inner
        self._shares = shares

    @property
    def asked_at(self) -> float:  # type: ignore[override]
        return self._inner.asked_at

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
