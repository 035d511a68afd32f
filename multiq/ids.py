"""Makes the ids of jobs, which are UUIDv7 (RFC 9562, section 5.7), and checks the ids that callers give.

The caller of an enqueue makes the ids, so that an enqueue can be repeated safely.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from .errors import OptionInvalid
from .formatting import shown

if TYPE_CHECKING:
    from collections.abc import Iterable

_ID_MAX = 200  # characters: a UUID has 36 characters, and MySQL's column has room for 254 bytes
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


def check_id(job_id: str) -> str:
    """Return *job_id*. Raises ``OptionInvalid`` if *job_id* cannot be the id of a job."""
    if not isinstance(job_id, str) or not 0 < len(job_id) <= _ID_MAX or not job_id.isprintable():
        raise OptionInvalid(f"a job's id must be the text that enqueue returned (handle.id), got {shown(job_id)}")
    return job_id


def check_new_id(job_id: str, name: str = "id") -> str:
    """Return the id that a caller chose for a new job. Raises ``OptionInvalid`` if the id is not one word of printable
    ASCII."""
    if not isinstance(job_id, str):
        raise OptionInvalid(
            f"{name}={shown(job_id)} must be text, got {type(job_id).__name__}: pass str(...) of it, or leave it out, "
            "and multiq makes an id"
        )
    if not (0 < len(job_id) <= _ID_MAX and job_id.isascii() and job_id.isprintable() and " " not in job_id):
        raise OptionInvalid(
            f"{name}={shown(job_id)} must be one word of ASCII, of 1 to {_ID_MAX} characters, got {len(job_id):,} "
            "characters: pass a hash of it, or leave it out, and multiq makes an id"
        )
    return job_id if type(job_id) is str else "".join(job_id)


def check_new_ids(ids: Iterable[str], count: int) -> list[str]:
    """Return the ids for *count* new jobs. Raises ``OptionInvalid`` if two ids are equal."""
    if isinstance(ids, str | bytes):
        raise OptionInvalid(f"ids must be a list with one id for each job, got {shown(ids)}")
    checked = [check_new_id(job_id, f"ids[{at}]") for at, job_id in enumerate(ids)]
    if len(checked) != count:
        raise OptionInvalid(f"ids must have one id for each job, got {len(checked)} for {count} jobs")
    if len({*checked}) < count:
        twice = next(job_id for job_id in checked if checked.count(job_id) > 1)
        raise OptionInvalid(f"ids must name each job once, got {shown(twice)} twice: only its first job would be added")
    return checked
