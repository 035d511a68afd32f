"""Makes the ids of jobs, which are UUIDv7 (RFC 9562, section 5.7).

The caller of an enqueue makes the ids, so that an enqueue can be repeated safely.
"""

from __future__ import annotations

import os
import time

_PER_MILLISECOND = 4096  # the number of values of the 12-bit counter
# maps a byte to the byte with the two variant bits set
_WITH_VARIANT = bytes(0x80 | byte & 0x3F for byte in range(256))
# maps a hex digit to the same digit with the variant bits
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))

_head = 0, ""  # a millisecond since 1970, and the prefix of the ids that are made in this millisecond


def new_id() -> str:
    """Make an id."""
    global _head  # noqa: PLW0603 - one assignment, which is safe in threads
    stamp = time.time_ns() // 1_000_000
    made_at, head = _head
    if stamp != made_at:
        head = f"{stamp >> 16:08x}-{stamp & 0xFFFF:04x}-7000-"
        _head = stamp, head
    digits = os.urandom(8).hex()
    return f"{head}{_VARIANT[digits[0]]}{digits[1:4]}-{digits[4:]}"


def new_ids(count: int) -> list[str]:
    """Make *count* ids in ascending order. An id consists of milliseconds since 1970, a 12-bit counter and 62 random
    bits.

    The counter is described in RFC 9562, section 6.2, method 1. Because of the counter, the ids of one call are
    neighbours in an index. Reserving and deleting jobs with neighbouring ids reads and writes few pages of the index.
    After each 4,096 ids, the counter begins again, and the timestamp in the ids grows by one millisecond.
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
