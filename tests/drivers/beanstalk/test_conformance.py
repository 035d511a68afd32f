"""The beanstalkd backend against the contract, on a private server with a log, in real time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from servers.beanstalk import BeanstalkServer

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite
from multiq.fault_proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Backend


class BeanstalkHarness(Harness):
    """Backends on one server; each test has queues of its own."""

    walks = 4  # of 16 with ``make test-long``
    server: ClassVar[BeanstalkServer]

    def open(self) -> Backend:
        return open_backend(self.server.url)

    def proxied(self) -> tuple[Proxy, Backend]:
        proxy = Proxy(self.server.address)
        return proxy, open_backend(f"beanstalk://{proxy.host}:{proxy.port}?timeout={self.deadline}")

    def restart(self) -> None:
        self.server.stop()
        self.server.start()
        assert "missing data" not in self.server.log, self.server.log

    def requests_served(self) -> int:
        with self.server.client() as client:
            stats = client.stats()
        return sum(int(count) for name, count in stats.items() if name.startswith("cmd-") and name != "cmd-stats")


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    # with a log, so that the backend declares the capabilities that depend on a log, and the suite tests them
    with BeanstalkServer(binlog=True, fsync_ms=None) as BeanstalkHarness.server:
        yield


globals().update(suite(BeanstalkHarness))


class AllWalks(BeanstalkHarness):
    walks = 16


TestAllWalks = pytest.mark.long(suite(AllWalks)["TestWalk"])
