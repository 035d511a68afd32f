"""The conformance suite over TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite

if TYPE_CHECKING:
    from servers.redis import RedisServer

    from multiq.backend import Backend


class TlsHarness(Harness):
    walks = 1
    rounds = 10
    server: ClassVar[RedisServer]

    def open(self) -> Backend:
        return open_backend(self.server.url)


@pytest.fixture(scope="module", autouse=True)
def _server(redis_tls: RedisServer) -> None:
    TlsHarness.server = redis_tls


#: the topics in which the connection matters; the others run only with ``make test-exhaustive``
TOPICS = frozenset(
    {
        "TestConcurrency",
        "TestEnqueue",
        "TestErrors",
        "TestHangs",
        "TestLostReplies",
        "TestReserve",
        "TestSettle",
        "TestWaking",
    }
)

for _name, _topic in suite(TlsHarness).items():
    globals()[_name] = _topic if _name in TOPICS else pytest.mark.exhaustive(_topic)
