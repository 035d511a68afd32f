"""The limits of a queue. All jobs with gates are in the queue's first partition, so all leases are counted there."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from multiq.backend.limits import Quota, limit_states

from .records import MICROSECOND, unpack_gate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from multiq.backend import Gate
    from multiq.backend.limits import LimitState

    from .pool import Pool

_QUOTA = struct.Struct(">IQIcc")  # lua/include/open_gates.lua; the quota follows as JSON
_ANY = 2**32 - 1
_PINNED = b"p"


def change(pool: Pool, queue: str, change: Mapping[str, Quota | None], *, pinned: bool) -> None:
    """Store and remove quotas. Raises ``BackendError``."""
    words: list[bytes] = [_PINNED if pinned else b"-"]
    for name, quota in change.items():
        words += name.encode("utf-8", "surrogatepass"), b"" if quota is None else _pack(quota, pinned=pinned)
    pool.call("limits", queue, words)


def states(pool: Pool, queue: str) -> list[LimitState]:
    """Return all limits of a queue. Raises ``BackendError``."""
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    stored, leases = _counted(pool, queue, b"slots")
    _, parked = _counted(pool, queue, b"lines")
    for gate in dict.fromkeys((*leases, *parked)):
        counts.setdefault(gate.limit, {})[gate.key] = leases.get(gate, 0), parked.get(gate, 0)
    return limit_states(_read(stored), counts)


def _pack(quota: Quota, *, pinned: bool) -> bytes:
    slots = _ANY if quota.slots is None else min(quota.slots, _ANY - 1)
    burst = min(quota.burst, _ANY)
    flags = b"f" if quota.fair else b"-", _PINNED if pinned else b"-"
    return _QUOTA.pack(slots, quota.interval(MICROSECOND), burst, *flags) + msgspec.json.encode(quota)


def _read(stored: list[bytes]) -> Iterator[tuple[str, Quota, bool]]:
    """Yields name and quota of each limit, and whether it is pinned. Data of another program is left out."""
    for name, packed in zip(stored[::2], stored[1::2], strict=True):
        try:
            quota = msgspec.json.decode(packed[_QUOTA.size :], type=Quota)
            yield name.decode("utf-8", "surrogatepass"), quota, packed[_QUOTA.size - 1 : _QUOTA.size] == _PINNED
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue


def _counted(pool: Pool, queue: str, which: bytes) -> tuple[list[bytes], dict[Gate, int]]:
    """Returns the stored limits, and the number of leases or parked jobs of each gate."""
    stored: list[bytes] = []
    found: dict[Gate, int] = {}
    ended: dict[Gate, int] = {}
    after = b""
    while True:
        limits, after, counted, over = pool.call("limit_counts", queue, (which, after))
        stored += limits
        ended |= _by_gate(over)
        found |= {gate: max(0, count - ended.get(gate, 0)) for gate, count in _by_gate(counted).items()}
        if not after:
            return stored, found


def _by_gate(counted: list[Any]) -> dict[Gate, int]:
    return {unpack_gate(gate): count for gate, count in zip(counted[::2], counted[1::2], strict=True)}
