"""The memory backend against the contract, without waiting: its clock is moved by hand."""

from __future__ import annotations

import pytest

from multiq.backend.memory import MemoryBackend
from multiq.conformance import ManualHarness, suite


class MemoryHarness(ManualHarness):
    """Backends that share a store by its name, and read the harness's clock."""

    walks = 10  # of 100 with ``make test-long``

    def open(self) -> MemoryBackend:
        return MemoryBackend(name=self.prefix, clock=self.clock)


globals().update(suite(MemoryHarness))


class AllWalks(MemoryHarness):
    walks = 100


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
