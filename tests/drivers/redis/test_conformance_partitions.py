"""The conformance suite with each queue spread over four partitions of one server: all but the order across them holds.

``make test`` has the topics of verbs that use several partitions; ``make test-long`` the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from servers.redis import RedisServer

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite
from multiq.conformance.topics.walk import WalkTests
from multiq_redis import keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Backend


class PartitionsHarness(Harness):
    """Without random walks, because these compare the order of all jobs. ``TestWalkInOneLine`` has them."""

    walks = 0
    rounds = 10
    server: ClassVar[RedisServer]

    def open(self) -> Backend:
        return open_backend(f"{self.server.unix_url}?partitions=4")

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def requests_served(self) -> int:
        return self.server.consumers_sent


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with RedisServer(appendonly="yes") as PartitionsHarness.server:
        yield


#: the topics that ``make test`` runs
TOPICS = frozenset({"TestReserve", "TestSettle", "TestKick", "TestJobs", "TestStats", "TestPause", "TestPurge"})

for _name, _class in suite(PartitionsHarness).items():
    globals()[_name] = _class if _name in TOPICS else pytest.mark.long(_class)


def _partition_for(queue: str, _: bytes, *, has_key_or_gates: bool = False) -> str:
    return queue if has_key_or_gates else keys.partition(queue, 2)


class OneLineHarness(PartitionsHarness):
    """All jobs are in one partition, but not in the first one. So they have one order, as in the model.

    Calls that concern the whole queue still read all four partitions.
    """

    walks = 8  # of 16 with ``make test-long``

    def open(self) -> Backend:
        backend = super().open()
        backend._partitions.partition_for = _partition_for  # type: ignore[attr-defined]
        return backend


class TestWalkInOneLine(WalkTests):
    harness_class = OneLineHarness


class PatientHarness(OneLineHarness):
    walks = 16


@pytest.mark.long
class TestAllWalksInOneLine(WalkTests):
    harness_class = PatientHarness
