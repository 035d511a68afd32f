"""Where to cut what goes over the wire."""

from __future__ import annotations

EVERY_BYTE = 1000  # of a reply up to this length; of a longer one the two ends, and a spread between them


def places(size: int) -> list[int]:
    """Where to cut so many bytes."""
    if size <= EVERY_BYTE:
        return list(range(size))
    ends = EVERY_BYTE // 3
    return [*range(ends), *range(ends, size - ends, max(1, (size - 2 * ends) // ends)), *range(size - ends, size)]
