"""Reads and deletes the outcomes of jobs that are gone. An outcome is in the partition that its job was in."""

from __future__ import annotations

import contextlib
import heapq
import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from multiq.backend.effects import Outcome, OutcomePage
from multiq.driverkit.paging import foreign_cursor
from multiq.errors import BackendCorrupt

from . import keys
from .records import MICROSECOND, microseconds, pack_ids, unpack_id
from .verdicts import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from multiq.backend.effects import After, OutcomeKind

    from .partitions import Partitions
    from .pool import Pool

_HEAD = struct.Struct(">QQIc")  # lua/include/outcomes.lua
_KIND_NAMES: dict[bytes, OutcomeKind] = {letter: kind for kind, letter in KINDS.items()}
_SLICE = 500  # outcomes that one script reads or deletes, in a few milliseconds

_Place: TypeAlias = tuple[int, bytes]
"""The time at which an outcome expires, and the packed id of its job. A history begins with the highest place."""


class _Listed(NamedTuple):
    place: _Place
    outcome: Outcome


def find(pool: Pool, partitions: Partitions, queue: str, ids: Sequence[str]) -> list[Outcome | None]:
    """Return the outcome of each job. If an outcome is not in its id's partition, all other partitions are searched."""
    by_partition: dict[str, list[bytes]] = {}
    packed_ids = pack_ids(ids)
    for packed in dict.fromkeys(packed_ids):
        by_partition.setdefault(partitions.partition_for(queue, packed), []).append(packed)
    found: dict[bytes, Outcome] = {}
    for partition, wanted in by_partition.items():
        found |= _find_in(pool, partitions, partition, wanted)
    missing = [packed for packed in dict.fromkeys(packed_ids) if packed not in found]
    if missing and not (list(by_partition) == [queue] and not partitions.has_several(queue)):
        for partition in partitions.refreshed(queue):
            elsewhere = [packed for packed in missing if packed not in by_partition.get(partition, ())]
            found |= _find_in(pool, partitions, partition, elsewhere)
    return [found.get(packed) for packed in packed_ids]


def pack_kept(after: After) -> bytes:
    """Return the argument of ``lua/delete_many.lua`` that says which outcome to keep."""
    return microseconds(after.keep).to_bytes(8, "big") + KINDS[after.kind] + after.outcome


def page(pool: Pool, partitions: Sequence[str], kind: OutcomeKind | None, limit: int, after: str | None) -> OutcomePage:
    """Return a page of the outcomes in these partitions. Raises ``OptionInvalid``, ``BackendError``."""
    begin = None if after is None else _read_cursor(after)
    parts = [_listed(pool, partition, kind, begin, limit + 1) for partition in partitions]
    found: list[_Listed] = []
    for listed in heapq.merge(*parts, key=lambda listed: listed.place, reverse=True):
        if found and found[-1].place == listed.place:  # producers with different ?partitions= have used the same id
            continue
        if len(found) == limit:
            return OutcomePage([one.outcome for one in found], _cursor(found[-1].place) if found else after)
        found.append(listed)
    return OutcomePage([one.outcome for one in found], None)


def forget(pool: Pool, partition: str, ids: Sequence[str]) -> int:
    """Delete the outcomes of these jobs from one partition. Returns how many of the deleted outcomes had not
    expired."""
    packed_ids = pack_ids(list(dict.fromkeys(ids)))
    slices = [packed_ids[at : at + _SLICE] for at in range(0, len(packed_ids), _SLICE)]
    return sum(int(pool.call("forget", partition, ("", *part))) for part in slices)


def _find_in(pool: Pool, partitions: Partitions, partition: str, packed_ids: Sequence[bytes]) -> dict[bytes, Outcome]:
    queue, number = keys.queue_and_number(partition)
    found: dict[bytes, Outcome] = {}
    while packed_ids:
        now, stored_count, *replies = pool.call("outcomes", partition, packed_ids[:_SLICE])
        if number == 0:
            partitions.learn(queue, stored_count)
        if not replies:
            raise ValueError("the reply must have an entry for each job, got none")
        for packed, stored in zip(packed_ids, replies, strict=False):
            if stored is not None:
                found[packed] = _outcome(queue, packed, stored, int(now))
        packed_ids = packed_ids[len(replies) :]
    return found


def _listed(
    pool: Pool, partition: str, kind: OutcomeKind | None, begin: _Place | None, limit: int
) -> Iterator[_Listed]:
    """Yields up to *limit* outcomes of one partition after a place."""
    queue = keys.queue_and_number(partition)[0]
    letter = b"" if kind is None else KINDS.get(kind, b"-")
    at: tuple[int | bytes, bytes] = begin or (b"", b"")
    while limit > 0:
        reply = pool.call("history", partition, (min(limit, _SLICE), letter, *at))
        now, last_expires_at, last_id, *rest = reply
        for expires_at, packed, stored in zip(*[iter(rest)] * 3, strict=True):
            yield _Listed((int(expires_at), packed), _outcome(queue, packed, stored, int(now)))
            limit -= 1
        if not last_expires_at:
            return
        at = last_expires_at, last_id


def _outcome(queue: str, packed_id: bytes, stored: bytes, now: int) -> Outcome:
    try:
        kept_at, expires_at, attempt, letter = _HEAD.unpack_from(stored)
        kind = _KIND_NAMES[letter]
    except (struct.error, KeyError) as exc:
        raise BackendCorrupt(
            f"the outcome of job {packed_id.hex()} of queue {queue!r} is not one of multiq's: another program wrote "
            "it, or a newer multiq"
        ) from exc
    return Outcome(
        queue=queue,
        id=unpack_id(packed_id),
        kind=kind,
        body=stored[_HEAD.size :],
        attempt=attempt,
        age=(now - kept_at) / MICROSECOND,
        expires_in=(expires_at - now) / MICROSECOND,
    )


def _cursor(place: _Place) -> str:
    return f"{place[0]}.{place[1].hex()}"


def _read_cursor(after: str) -> _Place:
    expires_at, _, packed_id = after.partition(".")
    with contextlib.suppress(ValueError):
        if expires_at.isdecimal() and len(expires_at) < 17 and packed_id:
            return int(expires_at), bytes.fromhex(packed_id)
    raise foreign_cursor(after)
