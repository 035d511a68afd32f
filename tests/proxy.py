"""The proxy of the conformance suite, under a shorter name for the tests here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from multiq.fault_proxy import (
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

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MOST",
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
    "some",
]

#: at how many positions a test cuts what a call sends or receives; ``make test-exhaustive`` cuts at each position
MOST = [6, pytest.param(15, marks=pytest.mark.long), pytest.param(None, marks=pytest.mark.exhaustive)]


def some(every: Sequence[int], most: int | None) -> Sequence[int]:
    """At most *most* of these positions, evenly spread, including the first and the last one; None: all."""
    if most is None or len(every) <= most:
        return every
    return [every[number * (len(every) - 1) // (most - 1)] for number in range(most)]
