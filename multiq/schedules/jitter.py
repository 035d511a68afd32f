"""The jitter of a schedule: the delay of an occurrence's job, which all processes compute alike."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timetable import Milliseconds


def with_jitter(name: str, jitter: float, occurrence: Milliseconds) -> Milliseconds:
    """Return the time at which an occurrence's job is due: at most *jitter* seconds after the occurrence."""
    if not jitter:
        return occurrence
    share = int.from_bytes(digest("jitter", name, occurrence)[:8]) / 2**64
    return occurrence + int(share * jitter * 1000)


def digest(use: str, name: str, occurrence: Milliseconds) -> bytes:
    """Return 32 bytes that are the same for the same occurrence in all processes, and differ for each use."""
    return hashlib.sha256(f"multiq {use}\0{name}\0{occurrence}".encode()).digest()
