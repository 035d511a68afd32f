"""Converts the priorities of Django's tasks to multiq's, and back."""

from __future__ import annotations

_MIDDLE = 1024
_STEP = 10


def to_priority(priority: int) -> int:
    """Return multiq's priority for a Django priority. With multiq, the smallest number goes first. With Django,
    priorities are from -100 to 100, and 100 goes first."""
    return _MIDDLE - _STEP * int(priority)


def from_priority(priority: int) -> int:
    """Return the Django priority for a priority of multiq's."""
    return max(-100, min(100, round((_MIDDLE - priority) / _STEP)))
