"""Sealed payloads against the contract: neither the core nor the driver notices the seal."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest

from multiq.backend.memory import MemoryBackend
from multiq.conformance import ManualHarness, suite
from multiq.payloads import Payloads
from multiq.payloads.sealed_backend import SealedBackend

if TYPE_CHECKING:
    from multiq.backend import Backend

KEY = "a:" + base64.b64encode(bytes(range(32))).decode()


class SealedMemory(SealedBackend):
    declared = MemoryBackend.declared  # the suite looks at the class


class SealedHarness(ManualHarness):
    walks = 10

    def open(self) -> Backend:
        inner = MemoryBackend(name=self.prefix, clock=self.clock)
        return SealedMemory(inner, Payloads(sign=[KEY], encrypt=[KEY], compress=100), 1 << 20)


#: topics about bytes that the seal changes; the others see them only in ``make test-long``
QUICK = {"TestDetails", "TestJobs", "TestMemos", "TestOutcomes", "TestWalk"}

globals().update(
    {name: topic if name in QUICK else pytest.mark.long(topic) for name, topic in suite(SealedHarness).items()}
)


class AllWalks(SealedHarness):
    walks = 100


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
