"""The proxy of the conformance suite, under the name that the tests here know it by."""

from __future__ import annotations

from multiq.conformance.proxy import (
    CutReply,
    CutRequest,
    Fault,
    Hole,
    Latency,
    Pass,
    Proxy,
    Slice,
    Throttle,
    _Ended,
    _Link,
    places,
)

__all__ = [
    "CutReply", "CutRequest", "Fault", "Hole", "Latency", "Pass", "Proxy", "Slice", "Throttle", "_Ended", "_Link",
    "places",
]  # fmt: skip
