"""Keeps the number of partitions of each queue, and finds the partition of a job (docs/decisions/0008).

``?partitions=`` in a URL is the number of partitions over which clients with this URL enqueue. For each queue, a key of
the first partition stores the largest number that any client has used. All clients read from this stored number of
partitions, whatever their own URLs say. So the number in the URLs can be changed at any time, and the order in which
producers and workers get the new URL does not matter.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING

from multiq.backend import Finding
from multiq.errors import BackendUnavailable

from . import keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .pool import Pool

MOST = 64
_ANNOUNCE_EVERY = 30.0  # seconds until the count is sent again: a failover or a user may have removed the key
_ANNOUNCE_SOONER = 5.0  # seconds until the next attempt after a failure
_ANNOUNCE_WITHIN = 1.0  # seconds within which a node of a cluster must store the count
_MOST_ANNOUNCED = 10_000  # queues whose last announcement is remembered


def parse_count(text: str) -> int:
    """Parse the option ``?partitions=``."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST):
        raise ValueError(f"must be a whole number from 1 to {MOST}")
    return int(text)


class Partitions:
    """One backend's knowledge of its queues' partitions."""

    def __init__(self, pool: Pool, count: int) -> None:
        self.count = count
        """The number of partitions over which this backend enqueues."""
        self._pool = pool
        self._known: dict[str, int] = {}  # queue -> number of its partitions, if larger than ``count``
        self._announced_at: dict[str, float] = {}  # queue -> when ``count`` was last sent; monotonic
        self._to_pause: dict[str, list[str]] = {}  # queue -> new partitions that may not be paused yet

    def partition_for(self, queue: str, packed_id: bytes, *, has_key_or_gates: bool = False) -> str:
        """The partition for a new job with this id. A job with a unique key or gates goes to the first partition,
        because keys and leases are counted there."""
        if has_key_or_gates or self.count == 1:
            return queue
        return keys.partition(queue, zlib.crc32(packed_id) % self.count)

    def likely_for(self, queue: str, packed_id: bytes) -> str:
        """The partition that probably has the job with this id, if there is such a job."""
        known = self._known.get(queue, self.count)
        if known <= self.count:
            return self.partition_for(queue, packed_id)
        return keys.partition(queue, zlib.crc32(packed_id) % known)

    def all_of(self, queue: str) -> list[str]:
        """All partitions that the queue is known to have."""
        known = self._known.get(queue, self.count)
        return [queue] if known == 1 else self._partitions(queue, 0, known)

    def has_several(self, queue: str) -> bool:
        """Whether a queue is known to have more than one partition."""
        return self._known.get(queue, self.count) > 1

    def learn(self, queue: str, stored: bytes) -> list[str]:
        """Take the stored count from a reply. Returns the partitions that were not known before."""
        known = self._known.get(queue, self.count)
        number = _parse_stored(stored)
        if number <= known:
            return []
        self._known[queue] = number
        return self._partitions(queue, known, number)

    def refreshed(self, queue: str) -> list[str]:
        """All partitions that the queue has, by the count that the server stores now. Raises ``BackendError``."""
        _, stored, *_ = self._pool.call("has_jobs", queue)
        self.learn(queue, stored)
        return self.all_of(queue)

    def others(self, queue: str, partition: str) -> Sequence[str]:
        """All partitions of the queue except *partition*. Raises ``BackendError``."""
        return [other for other in self.refreshed(queue) if other != partition]

    def findings(self, queues: Iterable[str]) -> Iterator[Finding]:
        """Yield a finding of the doctor for each queue that has more partitions than this URL says."""
        for queue in sorted(queues):
            number = _parse_stored(self._pool.call("has_jobs", queue)[1])
            if number <= self.count:
                continue
            sizes = [reply[:4] for reply in self._pool.call_each("stats", self._partitions(queue, self.count, number))]
            held = sum(map(sum, sizes))
            why = f"queue {queue!r} has {number} partitions, and this URL enqueues over {self.count}: all are read"
            if held:
                yield Finding("ok", "partitions", f"{why}; {held:,} jobs are in the further ones")
            else:
                advice = f"if no other program enqueues over more, delete the key {keys.partitions(self._base(queue))}"
                yield Finding("ok", "partitions", f"{why}; the further ones are empty", advice)

    def announce(self, queue: str) -> None:
        """Store this backend's count before its jobs go to several partitions. Raises ``BackendError``.

        If the node of the first partition does not answer, jobs are still enqueued in the partitions on other nodes.
        The first enqueue after the node is back stores the count. Until then, readers whose URLs have fewer partitions
        do not find these jobs.
        """
        now = time.monotonic()
        if now - self._announced_at.get(queue, -_ANNOUNCE_EVERY) < _ANNOUNCE_EVERY:
            return
        early = 0.0
        try:
            with self._pool.borrowed() as client:
                before, pause = client.perform(
                    client.new_call("set_partitions", queue, (0,)), now + self._announce_timeout()
                )
        except BackendUnavailable:
            if not self._pool.servers.is_cluster:
                raise
            early = _ANNOUNCE_EVERY - _ANNOUNCE_SOONER
        else:
            self._add(queue, before, pause)
        if len(self._announced_at) >= _MOST_ANNOUNCED:
            self._announced_at.clear()
        self._announced_at[queue] = time.monotonic() - early

    def _add(self, queue: str, before: int, pause: bytes) -> None:
        """Store the count. New partitions of a paused queue are paused first.

        After the count is stored, the new partitions are paused again, in case a pause began in between.
        """
        more = self._partitions(queue, before, self.count)
        if more:
            self._pause(more, pause)
            self._to_pause[queue] = more
            _, pause = self._pool.call("set_partitions", queue, (self.count,))
        if queue in self._to_pause:
            self._pause(self._to_pause[queue], pause)
            self._to_pause.pop(queue, None)

    def _pause(self, partitions: Sequence[str], pause: bytes) -> None:
        if pause != b"0":
            self._pool.call_each("pause", partitions, (pause,))

    def _announce_timeout(self) -> float:
        servers = self._pool.servers
        return min(servers.timeout, _ANNOUNCE_WITHIN) if servers.is_cluster else servers.timeout

    def _base(self, queue: str) -> str:
        return keys.base(self._pool.prefix, queue)

    @staticmethod
    def _partitions(queue: str, first: int, end: int) -> list[str]:
        return [keys.partition(queue, number) for number in range(first, end)]


def _parse_stored(stored: bytes) -> int:
    """Return the stored count. If another program has stored a value that is not a number, return 1."""
    return min(int(stored[:9]), MOST) if stored.isdigit() else 1
