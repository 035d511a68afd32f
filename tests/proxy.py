"""The proxy of the conformance suite, under the name that the tests here know it by."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

#: at how many places ``make test`` cuts what a call sends or gets; ``make test-long`` cuts at each
MOST = [12, pytest.param(None, marks=pytest.mark.long)]


def some(every: Sequence[int], most: int | None) -> Sequence[int]:
    """No more than *most* of these places, spread evenly, the first and the last among them; None: each."""
    if most is None or len(every) <= most:
        return every
    return [every[number * (len(every) - 1) // (most - 1)] for number in range(most)]
