"""Ids that the caller makes: UUIDv7 (RFC 9562, section 5.7), so that an enqueue can be repeated safely."""

from __future__ import annotations

import os
import time

_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_id() -> str:
    """One fresh id."""
    return new_ids(1)[0]


def new_ids(count: int) -> list[str]:
    """*count* fresh ids: 48 bits of milliseconds since 1970, then 74 random bits.

    One read of the system's randomness serves them all. They sort by time, not within a millisecond; the age of
    jobs is the server's business.
    """
    stamp = f"{time.time_ns() // 1_000_000:012x}"
    head = f"{stamp[:8]}-{stamp[8:]}-7"
    noise = os.urandom(10 * count).hex()
    ids = []
    for at in range(0, 20 * count, 20):
        digits = noise[at : at + 20]
        ids.append(f"{head}{digits[:3]}-{_VARIANT[digits[3]]}{digits[4:7]}-{digits[7:19]}")
    return ids
