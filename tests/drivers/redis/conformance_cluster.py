"""The conformance suite on a cluster of three masters, its queues spread over them by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite

if TYPE_CHECKING:
    from servers.redis import RedisCluster

    from multiq.backend import Backend


class ClusterHarness(Harness):
    walks = 1
    rounds = 10
    cluster: ClassVar[RedisCluster]

    def open(self) -> Backend:
        return open_backend(self.cluster.url)


@pytest.fixture(scope="module", autouse=True)
def _cluster(redis_masters: RedisCluster) -> None:
    ClusterHarness.cluster = redis_masters


globals().update(suite(ClusterHarness))
