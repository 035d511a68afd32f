"""Ids made by the caller, and not by the backend, so that an enqueue can be repeated safely.

They are UUIDv7 (RFC 9562, section 5.7).
"""

from __future__ import annotations

import os
import time

_PER_MILLISECOND = 4096  # as many values as the counter has
_WITH_VARIANT = bytes(0x80 | byte & 0x3F for byte in range(256))  # the two bits that every such UUID has there
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))  # the same, in the digit that holds these bits

_head = 0, ""  # milliseconds since 1970, and the prefix of the ids of that millisecond, of which there may be many


def new_id() -> str:
    """One fresh id."""
    global _head  # noqa: PLW0603 - one assignment, which threads may make over one another
    stamp = time.time_ns() // 1_000_000
    made_at, head = _head
    if stamp != made_at:
        head = f"{stamp >> 16:08x}-{stamp & 0xFFFF:04x}-7000-"
        _head = stamp, head
    digits = os.urandom(8).hex()
    return f"{head}{_VARIANT[digits[0]]}{digits[1:4]}-{digits[4:]}"


def new_ids(count: int) -> list[str]:
    """*count* fresh ids in ascending order: milliseconds since 1970, a 12-bit counter, 62 random bits.

    The counter (RFC 9562, section 6.2, method 1) makes the ids of jobs that are enqueued together neighbours in an
    index, so that reserving and deleting these jobs touches few pages of the index. Beyond 4,096 ids the counter
    borrows from the next millisecond. One read of the system's randomness serves all ids of a call.
    """
    first = time.time_ns() // 1_000_000
    noise = bytearray(os.urandom(8 * count))
    noise[::8] = noise[::8].translate(_WITH_VARIANT)
    digits = noise.hex()
    ids: list[str] = []
    for start in range(0, count, _PER_MILLISECOND):
        stamp = f"{first + start // _PER_MILLISECOND:012x}"
        head = f"{stamp[:8]}-{stamp[8:]}-7"
        places = range(16 * start, 16 * min(start + _PER_MILLISECOND, count), 16)
        ids += [
            f"{head}{number:03x}-{digits[at : at + 4]}-{digits[at + 4 : at + 16]}" for number, at in enumerate(places)
        ]
    return ids
