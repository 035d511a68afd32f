"""Ids that the caller makes: UUIDv7 (RFC 9562, section 5.7), so that an enqueue can be repeated safely."""

from __future__ import annotations

import os
import time

_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_id() -> str:
    """One fresh id."""
    return new_ids(1)[0]


def new_ids(count: int) -> list[str]:
    """*count* fresh ids in ascending order: milliseconds since 1970, a 12-bit counter, 62 random bits.

    The counter (RFC 9562, section 6.2, method 1) is for the stores: jobs that are enqueued together stand together in
    an index of ids, so that working them off touches few of its pages. Beyond 4,096 ids it borrows from the next
    millisecond. One read of the system's randomness serves them all.
    """
    first = (time.time_ns() // 1_000_000) << 12
    noise = os.urandom(8 * count).hex()
    ids = []
    for number in range(count):
        stamp = f"{first + number:015x}"
        digits = noise[16 * number : 16 * number + 16]
        ids.append(f"{stamp[:8]}-{stamp[8:12]}-7{stamp[12:]}-{_VARIANT[digits[0]]}{digits[1:4]}-{digits[4:]}")
    return ids
