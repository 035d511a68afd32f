"""The Redis backend against the contract, on a server of the run's own that keeps a log, in real time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from servers.redis import RedisServer

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite
from multiq.fault_proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Backend


class RedisHarness(Harness):
    """Backends on one server; each test has queues of its own."""

    walks = 4  # of 20 with ``make test-long``
    server: ClassVar[RedisServer]

    def open(self) -> Backend:
        return open_backend(self.server.unix_url)

    def proxied(self) -> tuple[Proxy, Backend]:
        proxy = Proxy(("127.0.0.1", self.server.port))
        return proxy, open_backend(f"redis://{proxy.host}:{proxy.port}?timeout={self.deadline}")

    def restart(self) -> None:
        self.server.stop()
        self.server.start()

    def requests_served(self) -> int:
        return self.server.consumers_sent


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    # with a log, so that the backend declares the capabilities that depend on a log, and the suite tests them
    with RedisServer(appendonly="yes") as RedisHarness.server:
        yield


globals().update(suite(RedisHarness))


class AllWalks(RedisHarness):
    walks = 20


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
