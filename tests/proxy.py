"""The proxy of the conformance suite, under the name that the tests here know it by."""

from __future__ import annotations

import pytest

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
    "STRIDES",
    "CutReply",
    "CutRequest",
    "Fault",
    "Hole",
    "Latency",
    "Pass",
    "Proxy",
    "Slice",
    "Throttle",
    "_Ended",
    "_Link",
    "places",
]

#: ``make test`` cuts at one place of nine (odd: so that every kind of cut comes up), ``make test-long`` at each
STRIDES = [9, pytest.param(1, marks=pytest.mark.long)]
