"""Pages of a listing: each ends with a cursor, from which the next page goes on.

The cursor names the last job shown, by the two numbers that the listing is sorted by. So a page never repeats or skips
a job that stays where it is, whatever is enqueued or done meanwhile.
"""

from __future__ import annotations

import contextlib
from typing import TypeAlias

from multiq.errors import OptionInvalid

Place: TypeAlias = tuple[int, int]
"""Where a job stands in a listing: its sort key, and a sequence number that orders equal keys."""

_END = 2**63  # stores count in 64 bits


def cursor_of(place: Place) -> str:
    """The cursor of a page whose last job stands at *place*."""
    return f"{place[0]}.{place[1]}"


def read_cursor(after: str) -> Place:
    """The place that a cursor names. Raises ``OptionInvalid`` for a text that is no cursor: users may pass any text."""
    first, _, second = after.partition(".")
    with contextlib.suppress(ValueError):
        place = int(first), int(second)
        if max(map(abs, place)) < _END:
            return place
    raise foreign_cursor(after)


def foreign_cursor(after: str) -> OptionInvalid:
    """The error for a text that is not a cursor of this driver's."""
    return OptionInvalid(f"after must be the cursor that the previous page returned as its after, got {after!r}")
