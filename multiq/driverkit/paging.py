"""Pages of a listing. Each page has a cursor, which says where the next page begins.

The listing is sorted by two numbers. The cursor has the two numbers of the last job on the page. If a job keeps its
place, no page repeats or skips it, even if other jobs are enqueued or done between two pages.
"""

from __future__ import annotations

import contextlib
from typing import TypeAlias

from multiq.errors import OptionInvalid

Place: TypeAlias = tuple[int, int]
"""The place of a job in a listing: its sort key, and a sequence number that orders equal keys."""

_END = 2**63  # stores count in 64 bits


def cursor_of(place: Place) -> str:
    """Return the cursor of a page whose last job has this place."""
    return f"{place[0]}.{place[1]}"


def read_cursor(after: str) -> Place:
    """Return the place in a cursor. Raises ``OptionInvalid`` if the text is not a cursor, because users may pass any
    text.
    """
    first, _, second = after.partition(".")
    with contextlib.suppress(ValueError):
        place = int(first), int(second)
        if max(map(abs, place)) < _END:
            return place
    raise foreign_cursor(after)


def foreign_cursor(after: str) -> OptionInvalid:
    """Return the error for a text that is not a cursor of this driver."""
    return OptionInvalid(f"after must be the cursor that the previous page returned as its after, got {after!r}")
