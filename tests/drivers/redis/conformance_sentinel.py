"""The conformance suite on the primary that three sentinels name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
from servers.redis import SentinelTrio

from multiq.backend.registry import open_backend
from multiq.conformance import Harness, suite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from multiq.backend import Backend


class SentinelHarness(Harness):
    walks = 1
    rounds = 10
    trio: ClassVar[SentinelTrio]

    def open(self) -> Backend:
        return open_backend(self.trio.url)


@pytest.fixture(scope="module", autouse=True)
def _trio() -> Iterator[None]:
    with SentinelTrio() as trio:
        SentinelHarness.trio = trio
        yield


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

for _name, _topic in suite(SentinelHarness).items():
    globals()[_name] = _topic if _name in TOPICS else pytest.mark.exhaustive(_topic)
