"""The suite accepts a backend without ``total_order`` that declares this gap."""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

from multiq.backend.capabilities import Capabilities, Gap
from multiq.backend.memory import JobQueue, MemoryBackend, Store
from multiq.conformance import ManualHarness
from multiq.conformance.runner import run_harness

if TYPE_CHECKING:
    from multiq.backend import State
    from multiq.backend.memory import Job

SEEDS = range(2)  # with two seeds, the order is not right by chance


class ShuffledQueue(JobQueue):
    """Hands out any ready job, and lists them in any order that pages can follow."""

    chance: ClassVar[random.Random]

    def take(self, now: int, token: str, *, with_gates: bool = True) -> Job | None:
        live = [entry for entry in self._ready if entry[3].stamp == entry[2]]
        self.chance.shuffle(live)
        self._ready = [] if self.paused_until > now else live[:1]
        job = super().take(now, token, with_gates=with_gates)
        self._ready = live if job is None else live[1:]
        heapq.heapify(self._ready)
        return job

    def listing(self, state: State) -> list[tuple[str, Job]]:
        return sorted((f"{job.sequence * 7919 % 1009:04}", job) for _, job in super().listing(state))


class ShuffledStore(Store):
    queue_class = ShuffledQueue


class ShuffledBackend(MemoryBackend):
    declared: ClassVar[Capabilities] = msgspec.structs.replace(
        MemoryBackend.declared, backend="shuffled", total_order=Gap("never", "each job is in a line of its own")
    )
    store_class: ClassVar[type[Store]] = ShuffledStore


class ShuffledHarness(ManualHarness):
    walks = 0
    rounds = 10

    def open(self) -> ShuffledBackend:
        return ShuffledBackend(name=f"shuffled/{self.prefix}", clock=self.clock)


@pytest.mark.long
def test_a_backend_without_one_order_keeps_all_the_rest() -> None:
    for seed in SEEDS:
        ShuffledQueue.chance = random.Random(seed)
        report = run_harness(ShuffledHarness)
        assert [(row.topic, row.name, row.reason) for row in report.failed] == [], f"seed {seed}"
        assert report.ok
        assert "total_order" in {row.power for row in report.refused}
